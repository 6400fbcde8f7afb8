"""Write small captures in the formats of other tools, according to their code and documentation:

- DistillKit, github.com/arcee-ai/DistillKit at a61c2e7: sample_common.py, compression/
- Megatron-LM, github.com/NVIDIA/Megatron-LM at d98e8a6: training/distillation/logits_saver.py
- speculators, github.com/vllm-project/speculators at c05b95b: train/data.py
- SpecForge, github.com/sgl-project/SpecForge at a6b6b02: scripts/prepare_hidden_states.py
- vLLM, SGLang: examples/capture_vllm.py and capture_sglang.py write them here too
"""

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from numcodecs import Zstd
from pyarrow import parquet
from safetensors.torch import save_file

from teachonce.support.arrays import Array, Floats
from tests.examples.loading import example


@dataclass(frozen=True, eq=False)
class Taught:
    """The output of a causal teacher for a text: ids [T], log-probabilities [T,V], states of all
    layers (embeddings first), and the last state before the final norm."""

    text: str
    ids: Array
    logprobs: Floats
    states: list[torch.Tensor]
    unnormed: torch.Tensor


def taught_by(folder: Path, texts: Sequence[str | list[int]]) -> list[Taught]:
    """Run a GPT-2 of transformers over the texts, or token ids."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        GPT2LMHeadModel.from_pretrained(folder),
    )
    unnormed: list[torch.Tensor] = []
    hook = model.transformer.ln_f.register_forward_pre_hook(lambda _, x: unnormed.append(x[0][0]))
    samples = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids if isinstance(text, str) else text])
            output = model(ids, output_hidden_states=True)
            states = [state[0] for state in output.hidden_states]
            logprobs = torch.log_softmax(output.logits[0].float(), -1).numpy()
            samples.append(
                Taught(
                    str(tokenizer.decode(ids[0])), ids[0].numpy(), logprobs, states, unnormed[-1]
                )
            )
    hook.remove()
    return samples


def packed(ids: Array, bits: int) -> list[list[int]]:
    """Pack each row of ids into one bit string, highest bit first, padded to whole bytes."""
    rows = []
    for row in ids.tolist():
        line = "".join(f"{number:0{bits}b}" for number in row)
        line += "0" * (-len(line) % 8)
        rows.append([int(line[at : at + 8], 2) for at in range(0, len(line), 8)])
    return rows


def distillkit(
    folder: Path, samples: Sequence[Taught], exact: int, kept: int, packed_rows: bool = False
) -> Path:
    """Write a DistillKit capture: `exact` values in bfloat16, and the values up to `kept` on a
    curve of 1, t and the square root of t. Without packing, the last id is padding without a row
    (as in vLLM)."""
    folder.mkdir(parents=True)
    vocabulary = samples[0].logprobs.shape[1]
    settings: dict[str, Any] = {
        "d": vocabulary, "k": kept, "exact_k": exact, "exact_dtype": "bfloat16",
        "polynomial_terms": [0, 1, "sqrt"] if exact < kept else [], "term_dtype": "float32",
        "residual_bins": [], "delta_encoding": False, "error_diffusion": False,
        "normalize_t": False,
    }  # fmt: skip
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(settings))
    rows = [_compressed(sample, exact, kept) for sample in samples]
    names = ("input_ids", "compressed_logprobs", "bytepacked_indices")
    columns = map(list, zip(*rows, strict=True))
    table: dict[str, list[Any]] = dict(zip(names, columns, strict=True))
    if packed_rows:
        mask = [[n] * len(s.ids) for n, s in enumerate(samples, 1)]
        table = {name: [sum(column, [])] for name, column in table.items()}
        table["attention_mask"] = [sum(mask, [])]
    else:
        table["input_ids"] = [[*ids, 0] for ids in table["input_ids"]]
    nested = pa.list_(pa.list_(pa.uint8()))
    kinds = {"input_ids": pa.list_(pa.uint64()), "attention_mask": pa.list_(pa.int64())}
    arrays = {name: pa.array(values, kinds.get(name, nested)) for name, values in table.items()}
    arrow = pa.table(arrays)
    half = max(1, len(arrow) // 2)
    for number, part in enumerate((arrow[:half], arrow[half:])):
        if len(part):
            parquet.write_table(part, folder / f"data_{number}.parquet")
    return folder


def _compressed(sample: Taught, exact: int, kept: int) -> tuple[list[Any], ...]:
    values, ids = torch.from_numpy(sample.logprobs).topk(kept)
    chunks = [values[:, :exact].bfloat16().view(torch.uint8)]
    if exact < kept:
        t = torch.arange(kept - exact, dtype=torch.float32)
        terms = torch.stack([torch.ones_like(t), t, t.sqrt()], 1)
        fitted = torch.linalg.lstsq(terms, values[:, exact:].T).solution.T
        chunks.append(fitted.contiguous().view(torch.uint8))
    bits = (sample.logprobs.shape[1] - 1).bit_length()
    logprobs = torch.cat(chunks, 1).tolist()
    return sample.ids.tolist(), logprobs, packed(ids.numpy(), bits)


def megatron(
    folder: Path,
    batches: Sequence[Sequence[torch.Tensor]],
    kept: int,
    dp: int = 1,
    cp: int = 1,
    nucleus: float | None = None,
) -> Path:
    """Write the archives of a run, two iterations each: `batches[iteration][microbatch]` are the
    log-probabilities [S,B,V] of all data ranks in turn."""
    folder.mkdir(parents=True)
    meta = {"hash": "0" * 32, "identifiers": {}, "saver": {"k": kept, "p": nucleus, "min_k": 1}}
    for data in range(dp):
        for context in range(cp):
            for first in range(0, len(batches), 2):
                numbers = range(first, min(first + 2, len(batches)))
                name = f"cp{context}_dp{data}__{numbers[-1]}.tar"
                members = [("_meta.json", json.dumps(meta).encode())]
                for number in numbers:
                    rank_batches = [_of_rank(b, context, cp) for b in batches[number][data::dp]]
                    payload = _payload([_top(batch, kept, nucleus) for batch in rank_batches])
                    members.append((f"{number}.pt.zst", payload))
                write_archive(folder / name, members)
    return folder


def write_archive(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write a tar with these names and contents."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def archive_members(path: Path) -> list[tuple[str, bytes]]:
    """Return the names and contents of the members of a tar."""
    with tarfile.open(path) as archive:
        return [(m.name, (archive.extractfile(m) or io.BytesIO()).read()) for m in archive]


def saved(value: object) -> bytes:
    """Return the bytes that torch.save writes for a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _of_rank(batch: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    if ranks == 1:
        return batch
    chunks = batch.chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def _top(batch: torch.Tensor, kept: int, nucleus: float | None) -> tuple[torch.Tensor, ...]:
    values, ids = batch.topk(kept)
    if nucleus is not None:
        inside = values.exp().cumsum(-1) - values.exp() < nucleus
        most = int(inside.sum(-1).max())
        values, ids, inside = (t[..., :most] for t in (values, ids, inside))
        values, ids = torch.where(inside, values, -1e3), torch.where(inside, ids, -1)
    return values.half(), (ids & 0xFFFF).to(torch.uint16), (ids >> 16).to(torch.bool)


def _payload(batches: list[tuple[torch.Tensor, ...]]) -> bytes:
    values, low, high = (list(tensors) for tensors in zip(*batches, strict=True))
    payload = saved({"values": values, "indices_low": low, "bit_17": high})
    return bytes(Zstd(level=3).encode(payload))


def speculators(folder: Path, samples: Sequence[Taught], layers: Sequence[int]) -> Path:
    """Write files hs_<i>.safetensors: `layers` and the last state before the norm, in bfloat16."""
    (folder / "hidden_states").mkdir(parents=True)
    for number, sample in enumerate(samples):
        states = torch.stack([*(sample.states[n] for n in layers), sample.unnormed], 1)
        tensors = {"hidden_states": states.bfloat16(), "token_ids": torch.from_numpy(sample.ids)}
        save_file(tensors, folder / f"hidden_states/hs_{number}.safetensors")
    return folder


def specforge(
    folder: Path,
    samples: Sequence[Taught],
    layers: Sequence[int],
    padded: int = 0,
    gz: bool = False,
) -> Path:
    """Write files rows_0-2000/data_<i>.ckpt of EAGLE3, each padded to the length of its batch."""
    (folder / "rows_0-2000").mkdir(parents=True)
    for number, sample in enumerate(samples):
        aux = torch.cat([sample.states[n] for n in layers], 1)
        pad = (0, 0, 0, padded)
        record = {
            "input_ids": torch.nn.functional.pad(torch.from_numpy(sample.ids), (0, padded)),
            "loss_mask": torch.nn.functional.pad(torch.ones(len(sample.ids)), (0, padded)).long(),
            "hidden_state": torch.nn.functional.pad(sample.states[-1], pad)[None],
            "aux_hidden_state": torch.nn.functional.pad(aux, pad)[None],
        }
        path = folder / f"rows_0-2000/data_{number}.ckpt{'.gz' if gz else ''}"
        path.write_bytes(gzip.compress(saved(record)) if gz else saved(record))
    return folder


def stacked(samples: Sequence[Taught], length: int) -> tuple[Array, torch.Tensor]:
    """Return the first `length` tokens of each sample [n,S], and log-probabilities [S,n,V]."""
    ids = np.stack([sample.ids[:length] for sample in samples])
    logprobs = np.stack([sample.logprobs[:length] for sample in samples], 1)
    return ids, torch.from_numpy(logprobs)


class Engine:
    """A GPT-2 of transformers with the methods of vLLM's LLM and of SGLang's Engine."""

    def __init__(self, folder: Path, kept: int) -> None:
        from transformers import AutoTokenizer, GPT2LMHeadModel

        self.model = GPT2LMHeadModel.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="<|endoftext|>")
        self.kept = kept

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logprobs: torch.Tensor = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return logprobs

    def generate(
        self,
        prompts: Sequence[Any] = (),
        settings: Any = None,
        input_ids: Sequence[list[int]] = (),
        **options: Any,
    ) -> list[Any]:
        if input_ids:
            assert options["return_logprob"] and options["logprob_start_len"] == 0
            return [self._sglang(ids) for ids in input_ids]
        return [self._vllm(prompt["prompt_token_ids"]) for prompt in prompts]

    def _vllm(self, ids: list[int]) -> Any:
        """Return flat lists: for each token except the first, its own entry, then the best ones."""
        flat = SimpleNamespace(start_indices=[0], end_indices=[0], token_ids=[], logprobs=[])
        for row, follows in zip(self.logprobs(ids), ids[1:], strict=False):
            values, best = row.topk(self.kept)
            flat.start_indices.append(len(flat.token_ids))
            flat.token_ids += [follows, *best.tolist()]
            flat.logprobs += [float(row[follows]), *values.tolist()]
            flat.end_indices.append(len(flat.token_ids))
        return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=flat)

    def _sglang(self, ids: list[int]) -> Any:
        token_logprobs: list[Any] = [(None, ids[0], None)]
        best: list[Any] = [None]
        for row, follows in zip(self.logprobs(ids), ids[1:], strict=False):
            values, top_ids = row.topk(self.kept)
            token_logprobs.append((float(row[follows]), follows, None))
            pairs = zip(values.tolist(), top_ids.tolist(), strict=True)
            best.append([(value, token, None) for value, token in pairs])
        return {"meta_info": {"input_token_logprobs": token_logprobs, "input_top_logprobs": best}}


def engine_rows(engine: str, folder: Path, out: Path, texts: Iterable[str], kept: int) -> Path:
    """Return a capture of the GPT-2 in `folder`, as the example script of an engine writes it."""
    script, gpt2 = example(f"capture_{engine}"), Engine(folder, kept)
    script.K, script.TOKENS = kept, 100
    about = "settings" if engine == "vllm" else gpt2.tokenizer
    script.capture(gpt2, about, [f"{text}\n" for text in texts], str(out))
    return out
