"""Teachers in GGUF files, with large vocabularies, and without a masked-LM head.

- Students of teachers that are not masked LMs: their states can be trained on, their logits are
  refused.
- Teachers with weights in a GGUF file equal transformers with the dequantised weights.
- A teacher with more than 2^17 pieces: ids retain all their bits in every tier, and a student reads
  them.
"""

import itertools
import json
import string
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
)

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.arrays import Array
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.training.wordpiece import SPECIALS
from tests.downstream.support import classified
from tests.end_to_end.support import STUDENT, Words, ok, refused, says
from tests.making.decoders import save_decoder
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers

STEPS = ("--vocab", "500", "--steps", "3", *STUDENT, "--init", "svd")


def test_states_of_a_causal_teacher(tmp_path: Path, causal: Path) -> None:
    words: Words = ("--store", causal, "--out", tmp_path / "student", *STEPS)
    said = ok(student_train, *words, "--loss", "mlm=1,hidden=30")
    assert "1 mlm + 30 hidden; span" in said


@pytest.mark.slow
def test_from_labelled_texts_to_a_store_of_classes(tmp_path: Path, tiny_teacher: Teachers) -> None:
    train, dev = (classified(tmp_path / f"{n}.tsv", n, seed=n) for n in (120, 30))
    scores, store = tmp_path / "scores", tmp_path / "store.h5"
    words: Words = ("--task", "classify", "--model", tiny_teacher("bert"))
    words = (*words, "--train", train, "--dev", dev)
    learning: Words = ("--epochs", 5, "--lr", 3e-3, "--batch-size", 4, "--seeds", 1)
    ok(downstream, *words, *learning, "--out", scores, "--save")
    words = ("--model", scores / "model", "--corpus", dev, "--text-column", "text")
    said = ok(teacher_dump, *words, "--label-column", "label", "--out", store, "--device", "cpu")
    assert "30 sequences with a gold label" in said
    records = list(open_store(store))
    printed = [record.views[0].class_logits.argmax() == record.label for record in records]
    (seed,) = json.loads((scores / "scores.json").read_text())["seeds"]
    assert np.mean(printed) == seed["dev"]["accuracy"] > 0.8
    out = tmp_path / "student"
    ok(student_train, "--store", store, "--out", out, *STEPS, "--vocab", "teacher")


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


WORDS = ["".join(each) for each in itertools.product(string.ascii_lowercase[:20], repeat=4)]
PIECES = 140_000
SEVENTEEN_BITS = 1 << 17


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    pieces = [*SPECIALS.values(), *string.ascii_lowercase, *WORDS][:PIECES]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=32, **SPECIALS)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=PIECES, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8, max_position_embeddings=32, initializer_range=0.5,
        )  # fmt: skip
        model = BertForMaskedLM(config)
        # the last pieces are the likely ones
        model.cls.predictions.bias.data = torch.linspace(0, 9, PIECES)
    model.save_pretrained(folder)
    (folder / "text.txt").write_text(
        "\n".join(" ".join(WORDS[PIECES - 40 - i : PIECES - 32 - i]) for i in range(6))
    )
    return folder


@pytest.mark.slow
def test_ids_above_seventeen_bits(teacher: Path, tmp_path: Path) -> None:
    options = {"logits": "topk:8", "codec": "small", "attention": "none", "hidden": "none"}
    store = open_store(dumped(teacher, teacher / "text.txt", tmp_path / "a.zarr", **options))
    network = AutoModelForMaskedLM.from_pretrained(teacher).eval()
    for record in store:
        ids = record.token_ids
        assert (ids[1:-1] > SEVENTEEN_BITS).all() and len(ids) == 10
        with torch.no_grad():
            rows = network(torch.tensor(ids[None].astype(np.int64))).logits[0].log_softmax(-1)
        best, wanted = rows.topk(8)
        found = record.views[0].logits
        assert found is not None and found.ids is not None and found.logprobs is not None
        assert (np.sort(found.ids) == np.sort(wanted.numpy())).mean() > 0.99  # ties, in float16
        assert (found.ids > SEVENTEEN_BITS).any()
        assert np.allclose(found.logprobs, best.numpy(), atol=0.2)
    small: dict[str, Any] = {"vocab": "pruned:30", "student": "8x1x1", "steps": 2, "held_out": 0}
    run(TrainOptions(store.path, out=tmp_path / "s", loss="kl=1,mlm=1", device="cpu", **small))
    student = AutoModelForMaskedLM.from_pretrained(tmp_path / "s")
    assert student.config.vocab_size == 30
