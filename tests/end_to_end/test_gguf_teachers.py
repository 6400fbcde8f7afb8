"""Teachers with weights in a GGUF file equal transformers with the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.support.arrays import Array
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import ok, refused, says
from tests.making.decoders import save_decoder
from tests.making.dumps import write_corpus

FILE, KIND = "small-q8_0.gguf", GGMLQuantizationType.Q8_0


def rotary_order(weight: Array, heads: int, back: bool = False) -> Array:
    """Permute the rows of a query or key matrix to the order of llama.cpp, or back to
    transformers'."""
    shape = (heads, 2, -1) if not back else (heads, -1, 2)
    inner = weight.reshape(*shape, weight.shape[1])
    return inner.swapaxes(1, 2).reshape(weight.shape)


def as_gguf(folder: Path) -> Any:
    """Replace the weights of a Llama's folder by a GGUF file in Q8_0; returns the network with the
    weights as the file has them."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, writer = network.config, gguf.GGUFWriter(folder / FILE, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = config.num_attention_heads
    for key, tensor in network.state_dict().items():
        name, values = names.get_name(key, try_suffixes=(".weight",)), tensor.numpy()
        if name is None or key == "lm_head.weight":  # tied
            continue
        rotary = "q_proj" in key or "k_proj" in key
        values = rotary_order(values, heads) if rotary else values
        if values.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(values))
            continue
        codes = quantize(np.ascontiguousarray(values), KIND)
        writer.add_tensor(name, codes, raw_dtype=KIND)
        stored = dequantize(codes, KIND)
        stored = rotary_order(stored, heads, back=True) if rotary else stored
        tensor.copy_(torch.from_numpy(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "model.safetensors").unlink()
    return network


def test_the_weights_of_a_gguf_file(tmp_path: Path) -> None:
    model, corpus = save_decoder(tmp_path / "model", "Llama"), write_corpus(tmp_path / "c.txt", 9)
    config = json.loads((model / "config.json").read_text())
    del config["architectures"]  # as in a config that transformers reads from a GGUF file
    (model / "config.json").write_text(json.dumps(config))
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network, path = as_gguf(model), tmp_path / "a.zarr"
    words: tuple[Any, ...] = ("--model", model, "--corpus", corpus, "--attention", "none")
    words = (*words, "--logits", "topk:8", "--codec", "exact", "--device", "cpu", "--out", path)
    ok(teacher_dump, *words, "--gguf", FILE)
    store, other = open_store(path), []
    for record in store:
        ids = torch.from_numpy(record.token_ids.astype(np.int64))[None]
        logits = record.views[0].logits
        with torch.no_grad():
            live, unquantised = (each(ids).logits[0].log_softmax(-1) for each in (network, plain))
        chosen = torch.from_numpy(logits.ids.astype(np.int64))
        assert np.abs(live.gather(1, chosen).numpy() - logits.logprobs).max() < 1e-4
        other.append(float((live - unquantised).abs().max()))
    assert max(other) > 1e-3  # 8 bits are not the weights that were there before
    assert b"quantization" not in store.teacher_file("config.json")
    assert store.identity["arguments"]["gguf"] == FILE
    verify: tuple[Any, ...] = (feature_store, "verify", path, "--device", "cpu", "--model")
    ok(*verify, model)
    other_model = save_decoder(tmp_path / "other", "Llama")
    line = refused(*verify, other_model)
    says(line, f"--model {other_model}: {FILE}, which the store was made with: no such file")
    says(line, f"put it, or a link to it, into {other_model}")
    (other_model / FILE).symlink_to(model / FILE)
    ok(*verify, other_model)
    assert "nothing to do" in ok(teacher_dump, *words, "--gguf", model / FILE)


def test_files_that_are_no_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, corpus = save_decoder(tmp_path / "model", "Llama"), write_corpus(tmp_path / "c.txt", 3)
    (model / "text.gguf").write_text("no weights")
    words: tuple[Any, ...] = ("--corpus", corpus, "--out", tmp_path / "a.h5", "--model")
    says(refused(teacher_dump, *words, model, "--gguf", "none.gguf"), "no such file")
    says(refused(teacher_dump, *words, model, "--gguf", "text.gguf"), "is not a GGUF file")
    line = refused(teacher_dump, *words, tmp_path, "--gguf", "a.gguf")
    says(line, "has no config.json; give as --model")
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", "text.gguf"):
        (alone / name).write_bytes((model / name).read_bytes())
    says(refused(teacher_dump, *words, alone), "has no weights", "give --gguf text.gguf")
    line = refused(
        downstream,
        *("--task", "lm", "--model", alone, "--test", corpus, "--out", tmp_path / "bits"),
    )
    says(line, "write weights from text.gguf (docs/guide/dump.md, A decoder in GGUF)")
    (model / FILE).write_bytes(b"GGUF\x03\0\0\0 and then nothing")
    says(refused(teacher_dump, *words, model, "--gguf", FILE), "cannot be loaded")
    monkeypatch.setattr("teachonce.checkpoints.names.find_spec", lambda name: None)
    says(refused(teacher_dump, *words, model, "--gguf", FILE), "pip install 'teachonce[gguf]'")
