"""Forged captures: each is imported with the values of an independent reader, or refused in one
line.

    python -m tests.integrity.capture_trials FOLDER FORMAT SEED FIRST LAST   (one of the processes)

Processes with little memory and a time limit for each capture forge and import captures one after
another. The content of each store is compared with values that other libraries read from the same
files.
"""

import contextlib
import gzip
import io
import json
import random
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import datasets
import numpy as np
import pyarrow as pa
import torch
import yaml
from numcodecs import Zstd
from pyarrow import parquet
from safetensors.torch import load_file

from teachonce.feature_store.captures import importing
from teachonce.feature_store.captures.formats import ImportOptions
from teachonce.store import UserError, open_store
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.integrity import forgery
from tests.integrity.forged_captures import forge
from tests.integrity.support import limit_memory, save_teacher
from tests.making import captures
from tests.making.models import TOKENIZER_OF, trained_tokenizer

SECONDS, MEMORY = forgery.SECONDS, forgery.MEMORY
HOW = ("refused", "imported")
HEAD = ("forged captures", "refused", "imported as they are", "failures", "seconds")
TEXTS = (
    "The old lighthouse keeper climbed the stairs every evening.",
    "A red boat left the harbour before the storm.",
    "Nobody knew why the letter came so late.",
)
LAYERS = (1, 2, 3, 4)
KEPT, LENGTH = 6, 8
ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class Read:
    """A sample as an independent reader returns it: ids and states by layer, or log-probabilities
    by id for each token (of an engine also of the next token), or text and vector."""

    ids: list[int]
    states: list[Array] | None = None
    kept: list[dict[int, float]] | None = None
    observed: list[float] | None = None
    text: str | None = None
    vector: list[float] | None = None


def teacher(folder: Path) -> Path:
    """Make a causal teacher."""
    place = folder / "teacher"
    return place if place.exists() else save_teacher(place, "gpt2", "causal")


def sound(kind: str, folder: Path) -> Path:
    """Make a small capture of a format; a capture of Megatron-LM includes its tokens."""
    place = folder / f"sound-{kind}"
    if place.exists():
        return place
    tokenizer = trained_tokenizer(TOKENIZER_OF["gpt2"])
    chance = torch.Generator().manual_seed(1)
    samples = []
    for text in TEXTS:
        ids = np.array(tokenizer(text)["input_ids"])
        logits = torch.randn(len(ids), len(tokenizer), generator=chance) * 3
        states = [torch.randn(len(ids), 32, generator=chance) for _ in range(6)]
        found = logits.log_softmax(-1).numpy()
        samples.append(captures.Taught(text, ids, found, states[:5], states[5]))
    if kind == "speculators":
        captures.speculators(place, samples, LAYERS[:3])
    elif kind == "specforge":
        captures.specforge(place, samples[:2], LAYERS[:3], padded=2)
        packed = captures.specforge(folder / "gz", samples[2:], LAYERS[:3], gz=True)
        shutil.move(packed / "rows_0-2000/data_0.ckpt.gz", place / "rows_0-2000/data_2.ckpt.gz")
    elif kind == "distillkit":
        captures.distillkit(place, samples, KEPT, KEPT)
    elif kind == "megatron":
        ids, logprobs = captures.stacked(samples, LENGTH)
        captures.megatron(place, [[logprobs[:, :1]], [logprobs[:, 1:2]], [logprobs[:, 2:]]], KEPT)
        np.save(place / "tokens.npy", ids.astype(np.int32))
    elif kind in ENGINES:
        place.mkdir()
        for number, texts in enumerate((TEXTS[:2], TEXTS[2:])):
            captures.engine_rows(kind, teacher(folder), place / f"{number}.parquet", texts, KEPT)
    else:
        vectors = torch.randn(len(TEXTS), 5, generator=chance).tolist()
        rows = {"text": list(TEXTS), "label": vectors}
        datasets.Dataset.from_dict(rows).save_to_disk(str(place))
    return place


def _numbered(source: Path, pattern: str) -> list[Path]:
    paths = source.rglob(pattern)
    return sorted(paths, key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))])


def _torch(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _flat(tensor: Any) -> list[int]:
    found: list[int] = tensor.reshape(-1).tolist()
    assert all(type(number) is int for number in found)
    return found


def read_speculators(source: Path) -> Iterator[Read]:
    for path in _numbered(source, "hs_*.safetensors"):
        tensors = load_file(path)
        states = tensors["hidden_states"].float()
        states = states[0] if states.dim() == 4 else states
        ids = _flat(tensors["token_ids"])
        yield Read(ids, [states[:, n].numpy() for n in range(states.shape[1])])


def read_specforge(source: Path) -> Iterator[Read]:
    for path in _numbered(source, "data_*.ckpt*"):
        data = path.read_bytes()
        found = _torch(gzip.decompress(data) if path.suffix == ".gz" else data)
        ids = _flat(found["input_ids"])
        last = found.get("hidden_state", found.get("target_last_hidden_states"))
        aux = found.get("aux_hidden_state", found.get("hidden_states"))
        wide = aux.detach().float().reshape(len(ids), -1)
        states = list(wide.split(32, 1)) + ([] if last is None else [last.detach().float()])
        learnt = found.get("loss_mask")
        mask = [0] * len(ids) if learnt is None else learnt.reshape(-1).tolist()
        while ids and ids[-1] in (0, 1) and not mask[len(ids) - 1]:
            ids.pop()
        yield Read(ids, [s.reshape(-1, 32)[: len(ids)].numpy() for s in states])


def read_distillkit(source: Path) -> Iterator[Read]:
    settings = yaml.safe_load((source / "compression_config.yaml").read_text())
    plain = not settings.get("polynomial_terms") and not settings.get("residual_bins")
    bits = max(1, int(np.ceil(np.log2(settings["d"]))))
    for path in _numbered(source, "*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            kept = []
            for values, packed in zip(
                row["compressed_logprobs"], row["bytepacked_indices"], strict=True
            ):
                line = "".join(f"{byte:08b}" for byte in packed)
                ids = [int(line[n * bits : (n + 1) * bits], 2) for n in range(settings["k"])]
                dtype = getattr(torch, settings.get("exact_dtype", "float32"))
                logs = torch.frombuffer(bytearray(values), dtype=dtype).double()
                logs = logs.cumsum(0) if settings.get("delta_encoding", True) else logs
                kept.append(dict(zip(ids, logs.tolist(), strict=True)) if plain else {})
            ids = row["input_ids"][: len(kept)]
            mask = (row.get("attention_mask") or [1] * len(ids))[: len(kept)]
            first = 0
            for n in range(1, len(ids) + 1):
                if n == len(ids) or mask[n] != mask[first]:
                    if mask[first]:
                        yield Read(ids[first:n], kept=kept[first:n])
                    first = n


def read_megatron(source: Path) -> Iterator[Read]:
    tokens = np.load(source / "tokens.npy")
    end = trained_tokenizer(TOKENIZER_OF["gpt2"]).eos_token_id
    for path in _numbered(source, "cp*_dp*__*.tar"):
        with tarfile.open(path) as archive:
            for member in archive:
                if not (number := re.fullmatch(r"(\d+)\.pt\.zst", member.name)):
                    continue
                data = (archive.extractfile(member) or io.BytesIO()).read()
                found = _torch(bytes(Zstd().decode(data)))
                lists = [found[key] for key in ("values", "indices_low", "bit_17")]
                size = lists[0][0].shape[1]
                for place, (values, low, high) in enumerate(zip(*lists, strict=True)):
                    first = (int(number[1]) * len(lists[0]) + place) * size
                    for row in range(size):
                        ids = (low[:, row].long() + (high[:, row].long() << 16)).tolist()
                        logs = values[:, row].detach().double().tolist()
                        kept = [
                            {i: v for i, v in zip(*pair, strict=True) if v >= -999}
                            for pair in zip(ids, logs, strict=True)
                        ]
                        flat = tokens[first + row][: len(kept)].tolist()
                        yield from _divided(flat, kept, end)


def _divided(ids: list[int], kept: list[dict[int, float]], end: int) -> Iterator[Read]:
    places = [n for n, number in enumerate(ids) if number == end]
    for first, last in zip([-1, *places], [*places, len(ids)], strict=True):
        if first + 1 < last:
            yield Read(ids[first + 1 : last], kept=kept[first + 1 : last])


def read_engine(source: Path) -> Iterator[Read]:
    for path in _numbered(source, "*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            pairs = zip(row["token_ids"], row["logprobs"], strict=True)
            kept = [dict(zip(*each, strict=True)) for each in pairs]
            yield Read(row["input_ids"][:-1], kept=kept, observed=row["observed"])


def read_vectors(source: Path) -> Iterator[Read]:
    state = json.loads((source / "state.json").read_text())
    for each in state["_data_files"]:
        with pa.OSFile(str(source / Path(each["filename"]).name)) as file:
            for row in pa.ipc.open_stream(file).read_all().to_pylist():
                texts = [value for value in row.values() if isinstance(value, str)]
                yield Read([], text=texts[0], vector=row["label"])


READ: dict[str, Callable[[Path], Iterator[Read]]] = {
    "speculators": read_speculators,
    "specforge": read_specforge,
    "distillkit": read_distillkit,
    "megatron": read_megatron,
    **dict.fromkeys(ENGINES, read_engine),
    "sentence-transformers": read_vectors,
}


def unlike(target: Path, samples: list[Read], left_out: int) -> str:
    """Describe the difference between a store and the samples; return "" if there is none."""
    with closing(open_store(target)) as store:
        records = list(store)
        if samples and samples[0].text is not None:
            return _other_vectors(records, samples)
        if sum(len(r.token_ids) for r in records) + left_out != sum(len(s.ids) for s in samples):
            return f"{left_out} tokens left out are not those that it lacks"
        at = 0
        for record in records:
            found = (n for n in range(at, len(samples)) if _holds(samples[n], record))
            if (place := next(found, None)) is None:
                return f"{record}: of no sample behind number {at}"
            at = place
    return ""


def _holds(sample: Read, record: Any) -> bool:
    ids, view = record.token_ids.tolist(), record.views[0]
    for first in range(len(sample.ids) - len(ids) + 1):
        rows = slice(first, first + len(ids))
        if sample.ids[rows] != ids:
            continue
        if sample.states is not None:
            pairs = zip(view.hidden.values(), sample.states, strict=True)
            if all(np.array_equal(one, other[rows]) for one, other in pairs):
                return True
        elif sample.kept is not None:
            rows_of = zip(view.logits.ids, view.logits.logprobs, sample.kept[rows], strict=True)
            if all(_alike(*each) for each in rows_of) and _follows(sample.observed, first, view):
                return True
    return False


def _follows(observed: list[float] | None, first: int, view: Any) -> bool:
    """Return whether each row has its next token's log-probability, and the last row has none."""
    if observed is None:
        return view.logits.observed is None
    *found, last = view.logits.observed.tolist()
    known = [min(value, 0) for value in observed[first : first + len(found)]]
    return last == -np.inf and np.allclose(found, known, 1e-5, 1e-5)


def _alike(ids: Array, logs: Array, kept: dict[int, float]) -> bool:
    found = {i: v for i, v in zip(ids.tolist(), logs.tolist(), strict=True) if v > -np.inf}
    if not kept:
        return True  # from a curve, which the independent reader does not decode
    known = {i: v for i, v in kept.items() if v > -np.inf}
    return found.keys() == known.keys() and all(
        abs(found[i] - min(known[i], 0)) <= 1e-5 * max(1, abs(known[i])) for i in found
    )


def _other_vectors(records: list[Any], samples: list[Read]) -> str:
    kept = [sample for sample in samples if sample.text and sample.text.strip()]
    if len(kept) != len(records):
        return f"{len(records)} of {len(kept)} vectors"
    for record, sample in zip(records, kept, strict=True):
        same = np.array_equal(record.embedding, np.array(sample.vector, np.float32))
        if record.text != sample.text or not same:
            return f"{record}: another text or vector"
    return ""


def outcome(kind: str, source: Path, target: Path, tokenizer: Path) -> tuple[str, str]:
    """Import a forged capture; return one of HOW, or `wrong` and the reason."""
    layers = LAYERS if kind in ("speculators", "specforge") else ()
    tokens = source / "tokens.npy" if kind == "megatron" else None
    options = ImportOptions(
        source, target, kind, str(tokenizer), "exact", tokens=tokens, layers=layers
    )
    try:
        summary = importing.import_capture(options)
    except UserError as error:
        line = str(error)
        named = any(name in line for name in (str(source), "capture", "--", str(target)))
        return (
            ("refused", "") if line and "\n" not in line and named else ("wrong", f"said {line!r}")
        )
    except BaseException as error:
        return "wrong", f"{type(error).__name__}: {error}"[:300]
    try:
        samples = list(READ[kind](source))
    except Exception as error:
        return "wrong", f"imported, and not read otherwise: {type(error).__name__}: {error}"[:300]
    if problem := unlike(target, samples, summary.tokens):
        return "wrong", problem
    problems = verify(target).problems
    return ("wrong", problems[0]) if problems else ("imported", "")


def attempt(kind: str, folder: Path, seed: int, number: int, bounded: bool) -> tuple[str, str]:
    """Forge a capture and import it; return one of HOW, or `wrong`, with change and reason."""
    inside = folder / f"inside-{kind}"
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    shutil.copytree(sound(kind, folder), inside / "capture")
    print(f"{number}", file=sys.stderr, flush=True)
    what = forge(inside / "capture", random.Random(f"{kind} {seed} {number}"))
    print(f"{number} {what}", file=sys.stderr, flush=True)
    forgery.bounded(SECONDS if bounded else 0)
    how, why = outcome(kind, inside / "capture", inside / "forged.h5", teacher(folder))
    forgery.bounded(0)
    return how, why and f"{kind} {number} {what}: {why}"


def fuzz(folder: Path, kind: str, seed: int, first: int, last: int) -> dict[str, Any]:
    """Forge captures first..last; return the numbers refused and imported, and the errors."""
    found: dict[str, Any] = {how: 0 for how in HOW} | {"wrong": []}
    vars(importing)["open_teacher"] = cache(vars(importing)["open_teacher"])  # always the same
    (folder / f"sound-{kind}.h5").unlink(missing_ok=True)
    whole = sound(kind, folder)
    how, why = outcome(kind, whole, folder / f"sound-{kind}.h5", teacher(folder))
    assert how == "imported", why
    limit_memory(MEMORY)
    for number in range(first, last):
        how, why = attempt(kind, folder, seed, number, bounded=True)
        if how in HOW:
            found[how] += 1
        else:
            found["wrong"].append(why)
    return found


def trial(number: int, seed: int) -> tuple[list[list[object]], list[str]]:
    """Forge captures of every format; return the rows of HEAD, and the errors."""

    def row(kind: str) -> tuple[list[object], list[str]]:
        return forgery.row(f"{number:,} {kind}", kind, seed, number, __name__, HOW)

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(row, READ))
    return [cells for cells, _ in done], [line for _, wrong in done for line in wrong]


if __name__ == "__main__":
    place, extension, *numbers = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        made = fuzz(Path(place), extension, *map(int, numbers))
    click.echo(json.dumps(made))
