"""Bad captures end in one line with the error, its place and the remedy.

- Bad captures end in one line with the error, its place and the remedy; none of their content is
  executed.
- Invalid numbers in a capture end in one line with the file and the sample.
"""

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from numcodecs import Zstd
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from teachonce.feature_store.captures.files import gunzip, unzstd
from teachonce.store.read.derived_copies import list_of
from tests.end_to_end.support import says
from tests.feature_store.captures.conftest import refused
from tests.making import captures
from tests.making.captures import (
    Taught,
    distillkit,
    megatron,
    specforge,
    speculators,
    stacked,
    write_archive,
)
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.stores import copied


def importing(source: Path, tokenizer: Path, *words: Any, code: int = 1) -> str:
    """Import a capture into a new store and return its error line."""
    target = source.parent / "refused.zarr"
    line = refused("import", source, target, "--tokenizer", tokenizer, *words, code=code)
    assert not target.exists()
    return line


def test_what_is_no_capture(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    says(importing(tmp_path / "gone", teacher), "gone", "no such file or folder")
    (tmp_path / "empty").mkdir()
    says(importing(tmp_path / "empty", teacher), "is not a capture", "distillkit, megatron")
    both = specforge(tmp_path / "both", samples[:2], (1, 2, 3))
    speculators(both, samples[:2], (1, 2, 3))
    says(importing(both, teacher), "speculators or of specforge", "--format")
    says(importing(both, teacher, "--format", "megatron"), "no archive such as")
    says(importing(both, teacher, "--format", "distillkit"), "no table with input_ids")
    line = importing(both, teacher, "--format", "specforge", "--text-column", "text")
    says(line, "--text-column", "does not apply to a capture of specforge")
    states = ("--format", "specforge", "--layers", "1,2,3,4")
    line = importing(both, teacher, *states, "--text-column", "")
    says(line, "--text-column", "does not apply to a capture of specforge")
    # An empty word, as of an unset variable of the shell, is not taken for a missing option.
    says(importing(both, teacher, *states, "--model", "", code=2), "--model: is empty")
    says(importing(both, teacher, *states[:2], "--layers", ""), "--layers ", "expected numbers")
    line = importing(both, Path(), *states, "--tokenizer", "", "--model", teacher, code=2)
    says(line, "--tokenizer: is empty")
    line = refused("import", both, tmp_path / "a.zarr", "--format", "specforge")
    says(line, "--tokenizer", "the characters that it covers")
    says(refused("import", both, tmp_path / "a"), "ends in .zarr or .h5")
    line = refused("import", both, "s3://bucket/a.zarr", "--tokenizer", teacher, code=2)
    says(line, "s3://bucket/a.zarr: is a URL", "feature-store convert")
    says(refused("import", both, tmp_path / "a.zarr", "--layers", "1,x"), "expected numbers")


def test_ids_and_tokenizers_that_do_not_fit(
    teacher: Path, samples: list[Taught], tiny_teacher: Teachers, tmp_path: Path
) -> None:
    source = distillkit(tmp_path / "capture", samples, 8, 8)
    says(importing(source, tiny_teacher("bert")), "does not fit", "gives back")
    says(importing(source, tmp_path / "gone"), "no such folder")
    (tmp_path / "empty").mkdir()
    says(importing(source, tmp_path / "empty"), "it has no tokenizer.json, nor", "give a folder")


def test_captures_of_logits(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    source = distillkit(tmp_path / "capture", samples[:3], 8, 8)
    settings = source / "compression_config.yaml"
    printed = yaml.safe_load(settings.read_text())
    settings.write_text(yaml.safe_dump(printed | {"k": 9, "exact_k": 9}))
    says(importing(source, teacher), "18 and 12 by the settings of compression", "--compression")
    settings.unlink()
    says(importing(source, teacher), "compression_config.yaml", "--compression")
    wild = [Taught(s.text, s.ids, s.logprobs + 3, s.states, s.unnormed) for s in samples[:2]]
    says(importing(distillkit(tmp_path / "wild", wild, 8, 8), teacher), "not log-probabilities")
    nan = [Taught(s.text, s.ids, s.logprobs * np.nan, s.states, s.unnormed) for s in samples[:2]]
    says(importing(distillkit(tmp_path / "nan", nan, 8, 8), teacher), "token 0", "is NaN")
    short = [Taught(s.text, s.ids[:-3], s.logprobs, s.states, s.unnormed) for s in samples[:2]]
    line = importing(distillkit(tmp_path / "short", short, 8, 8), teacher)
    says(line, "row 0", "token ids, and logits of")
    masked = distillkit(tmp_path / "masked", samples[:2], 8, 8, packed_rows=True)
    table = parquet.read_table(masked / "data_0.parquet")
    longer = pa.array([[*table["attention_mask"][0].as_py(), 3, 3]])
    place = table.column_names.index("attention_mask")
    table = table.set_column(place, "attention_mask", longer)
    parquet.write_table(table, masked / "data_0.parquet")
    says(importing(masked, teacher), "row 0", "an attention_mask of")


def test_archives(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    ids, logprobs = stacked(samples[:4], 16)
    source = megatron(tmp_path / "run", [[logprobs]], 8)
    says(importing(source, teacher), "hold no tokens", "--tokens FILE.npy")
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, ids[:3])
    says(importing(source, teacher, "--tokens", tokens), "sequence 3 of the run", "3 sequences")
    np.save(tokens, ids[:, :9])
    says(importing(source, teacher, "--tokens", tokens), "has 16 tokens", "tokens.npy 9")
    np.save(tokens, np.array([{}], object), allow_pickle=True)
    says(importing(source, teacher, "--tokens", tokens), "--tokens")
    np.save(tokens, ids / 2)
    line = importing(source, teacher, "--tokens", tokens)
    says(line, "is float64[4, 16], expected whole numbers [sequences, tokens]")
    tokens.write_text("1 2 3 4 5\n")
    line = importing(source, teacher, "--tokens", tokens)
    says(line, "cannot be read (the magic string is not correct", "that numpy.save wrote")
    assert "pickle" not in line
    np.save(tokens, ids)
    line = importing(source / "cp0_dp0__0.tar", teacher, "--tokens", tokens)
    says(line, "is a file, expected the folder with all archives", f"give {source}")
    (source / "cp0_dp1__0.tar").write_bytes(b"")
    (source / "cp0_dp0__0.tar").rename(source / "cp1_dp1__0.tar")
    says(importing(source, teacher, "--tokens", tokens), "2 of 4 ranks are missing")
    (source / "cp0_dp1__0.tar").unlink()
    (source / "cp1_dp1__0.tar").rename(source / "cp0_dp0__0.tar")
    archive = source / "cp0_dp0__0.tar"
    sound = archive.read_bytes()
    write_archive(archive, [("_meta.json", b'{"saver": {"k": 8}}'), ("9" * 5000 + ".pt.zst", b"")])
    says(importing(source, teacher, "--tokens", tokens), "cp0_dp0__0.tar, 999", "of an iteration")
    archive.write_bytes(sound)
    larger = changed(copied(teacher, tmp_path / "larger"), "config.json", vocab_size=150_000)
    line = importing(source, larger, "--tokens", tokens)
    says(line, "ids in 17 bits", "has 150,000 pieces", "another tool")


def test_files_of_states(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    source = speculators(tmp_path / "data", samples[:3], (1, 2, 3))
    path = source / "hidden_states/hs_1.safetensors"
    sound = load_file(path)
    layers = ("--layers", "1,2,3,4")
    line = importing(source, teacher, "--layers", "1,2")
    says(line, "--layers 1,2: ", "holds 4 states of a teacher with 4 layers")
    save_file(sound | {"token_ids": sound["token_ids"][:-1].clone()}, path)
    line = importing(source, teacher, *layers)
    says(line, "hs_1.safetensors", "token_ids has 33 tokens", "hidden_states 34")
    save_file({"other": sound["token_ids"]}, path)
    says(importing(source, teacher, *layers), "has no token_ids")
    path.write_bytes(b"{}")
    says(importing(source, teacher, *layers), "hs_1.safetensors: cannot be read")


class Dangerous:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("saved", ("torch", "pickle"))
def test_pickled_objects_are_not_run(
    saved: str, teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    source, trace = specforge(tmp_path / "data", samples[:2], (1, 2, 3)), tmp_path / "was-run"
    path = source / "rows_0-2000/data_0.ckpt"
    if saved == "torch":
        torch.save({"input_ids": Dangerous(trace)}, path)
    else:
        path.write_bytes(pickle.dumps(Dangerous(trace), protocol=2))
    says(importing(source, teacher), "data_0.ckpt", "pickled objects", "not read")
    assert not trace.exists()


def test_tables_of_vectors(tiny_teacher: Teachers, teacher: Path, tmp_path: Path) -> None:
    bert = tiny_teacher("bert")
    rows = {"a": ["one", "two"], "b": ["x", "y"], "label": [[1.0, 2.0], [3.0, 4.0]]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "two"))
    says(importing(tmp_path / "two", bert), "--text-column NAME", "a, b")
    says(importing(tmp_path / "two", bert, "--text-column", "c"), "its columns of texts are a, b")
    datasets.Dataset.from_dict({"label": rows["label"]}).save_to_disk(str(tmp_path / "textless"))
    says(importing(tmp_path / "textless", bert), "has no column of strings", "add one")
    uneven = datasets.Dataset.from_dict({"a": ["one", "two"], "label": [[1.0, 2.0], [3.0]]})
    uneven.save_to_disk(str(tmp_path / "uneven"))
    says(importing(tmp_path / "uneven", bert), "row 1", "a vector of 1 numbers")
    nan = datasets.Dataset.from_dict({"a": ["one"], "label": [[1.0, float("nan")]]})
    nan.save_to_disk(str(tmp_path / "nan"))
    says(importing(tmp_path / "nan", bert), "row 0, number 1: label is NaN")
    (tmp_path / "nan/state.json").write_text("{}")
    says(importing(tmp_path / "nan", bert), "state.json: _data_files is missing; copy it again")
    split = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "splits"))
    says(importing(tmp_path / "splits", bert), "several splits", "train")


def test_exports_that_a_store_cannot_give(
    teacher: Path, samples: list[Taught], store: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    line = refused("export", store, target, "--to", "sentence-transformers")
    says(line, "holds no text vectors", "--to datasets")
    says(refused("export", store, target, "--to", "distillkit"), "of the token itself")
    copies = list_of(store)  # a refused export leaves no file
    assert not copies.exists() or str(target) not in copies.read_text()
    line = refused("export", store, target, "--to", "distillkit", "--floats", "float16")
    says(line, "--floats", "leave it out")
    line = refused("export", store, target, "--to", "distillkit", "--columns", "")
    says(line, "--columns", "leave it out")
    line = refused("export", store, target, "--to", "parquet", "--columns", "")
    says(line, "no column ''", "it has index, document")
    says(refused("export", store, tmp_path, "--to", "parquet"), "exists already")
    line = refused("export", store, "s3://me:secret@bucket/rows", "--to", "parquet", code=2)
    says(line, "bucket/rows: is a URL", "a path on this machine")
    assert "secret" not in line
    says(refused("export", store, target, "--to", "datasets", "--columns", "no"), "no column 'no'")
    assert not target.exists() and list(tmp_path.iterdir()) == []


Change = Callable[[dict[str, Any]], Any]
SPECULATORS: dict[str, tuple[Change, str]] = {
    "no token": (
        lambda t: t.update(token_ids=t["token_ids"][:0], hidden_states=t["hidden_states"][:0]),
        "token_ids holds no tokens",
    ),
    "half ids": (lambda t: t.update(token_ids=t["token_ids"] + 0.5), "expected whole numbers"),
    "complex ids": (lambda t: t.update(token_ids=t["token_ids"] * 1j), "token_ids is complex"),
    "ids below 0": (lambda t: t["token_ids"].sub_(999), "token 0: token_ids is not among"),
    "bool ids": (lambda t: t.update(token_ids=t["token_ids"] > 3), "expected whole numbers"),
    "complex states": (
        lambda t: t.update(hidden_states=t["hidden_states"].to(torch.complex64)),
        "hidden_states is complex",
    ),
    "whole states": (
        lambda t: t.update(hidden_states=t["hidden_states"].long()), "expected finite numbers"
    ),
    "infinite": (lambda t: t["hidden_states"][3].fill_(torch.inf), "token 3: hidden_states is NaN"),
    "flat": (lambda t: t.update(hidden_states=t["hidden_states"][:, 0]), "expected finite numbers"),
    "no states": (lambda t: t.pop("hidden_states"), "has no hidden_states"),
    "large": (
        lambda t: t["hidden_states"][3].fill_(-1e30), "token 3: hidden_states has a square beyond"
    ),
    "double": (
        lambda t: t.update(hidden_states=t["hidden_states"].double() * 1e300), "beyond float32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECULATORS)
def test_speculators(case: str, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    change, words = SPECULATORS[case]
    source = speculators(tmp_path / "data", samples[:2], (1, 2, 3))
    path = source / "hidden_states/hs_1.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    says(importing(source, teacher, "--layers", "1,2,3,4"), "hs_1.safetensors", words)


SPECFORGE: dict[str, tuple[Change, str]] = {
    "NaN in a mask": (
        lambda t: t.update(loss_mask=t["loss_mask"] * torch.nan), "token 0: loss_mask is NaN"
    ),
    "half a mask": (
        lambda t: t.update(loss_mask=t["loss_mask"] * 0.5), "loss_mask is not 0 or 1"
    ),
    "a short mask": (lambda t: t.update(loss_mask=t["loss_mask"][:-1]), "and loss_mask"),
    "a few bytes": (
        lambda t: t.update(input_ids=torch.zeros(1, dtype=torch.int64).expand(10**9)),
        "not a dense tensor of stored numbers",
    ),
    "sparse": (
        lambda t: t.update(hidden_state=torch.eye(3).to_sparse()), "pickled objects other than"
    ),
    "a list": (lambda t: t.update(input_ids=[1, 2, 3]), "input_ids is a list"),
    "fewer layers": (
        lambda t: t.update(aux_hidden_state=t["aux_hidden_state"][..., :64]), "holds 3 states"
    ),
    "no multiple": (
        lambda t: t.update(aux_hidden_state=t["aux_hidden_state"][..., :7]), "not a multiple"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECFORGE)
def test_specforge(case: str, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    change, words = SPECFORGE[case]
    source = specforge(tmp_path / "data", samples[:2], (1, 2, 3))
    path = source / "rows_0-2000/data_1.ckpt"
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)
    says(importing(source, teacher, "--layers", "1,2,3,4"), "data_1.ckpt", words)


def test_files_that_were_cut_off_or_unpack_to_anything(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    source = specforge(tmp_path / "gz", samples[:1], (1, 2, 3), gz=True)
    path = source / "rows_0-2000/data_0.ckpt.gz"
    sound = path.read_bytes()
    path.write_bytes(sound[:-4])
    says(importing(source, teacher), "data_0.ckpt.gz: cannot be decompressed")
    path.write_bytes(gzip.compress(bytes(1 << 27)))
    says(importing(source, teacher), "decompresses to more than", "is not read")
    path.write_bytes(gzip.compress(b"PK"))
    says(importing(source, teacher), "data_0.ckpt.gz", "truncated")
    path.unlink()
    os.mkfifo(path)
    says(importing(source, teacher), "data_0.ckpt.gz: is not a file (but a pipe")
    says(importing(path, teacher), "is a pipe or a device")


def test_memory_follows_the_data_and_not_the_bound(tmp_path: Path) -> None:
    data, path = b"a" * 1000, tmp_path / "a.gz"
    path.write_bytes(gzip.compress(data))
    packed = bytes(Zstd().encode(data))
    unzstd(packed, "a")  # imports pyarrow
    tracemalloc.start()
    assert gunzip(path) == unzstd(packed, "a") == data
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


@pytest.fixture
def run(samples: list[Taught], tmp_path: Path) -> tuple[Path, Path]:
    """Write an archive of Megatron-LM with two iterations, and the file of its tokens."""
    ids, logprobs = stacked(samples[:4], 16)
    np.save(tmp_path / "tokens.npy", ids)
    batches = [[logprobs[:, :2]], [logprobs[:, 2:]]]
    return megatron(tmp_path / "run", batches, 8), tmp_path / "tokens.npy"


def rewritten(archive: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Write the members of an archive again, changed."""
    found = captures.archive_members(archive)
    captures.write_archive(archive, [(name, change(name, data)) for name, data in found])


def _payload(change: Change) -> Callable[[str, bytes], bytes]:
    def changed(name: str, data: bytes) -> bytes:
        if name != "1.pt.zst":
            return data
        tensors = torch.load(io.BytesIO(Zstd().decode(data)), weights_only=True)
        change(tensors)
        return bytes(Zstd().encode(captures.saved(tensors)))

    return changed


MEGATRON: dict[str, tuple[Callable[[str, bytes], bytes], str]] = {
    "cut frame": (lambda name, data: data[:-3] if "pt" in name else data, "cannot be decompressed"),
    "NaN": (_payload(lambda t: t["values"][0][2].fill_(torch.nan)), "token 2: values is NaN"),
    "half ids": (
        _payload(lambda t: t.update(indices_low=[t["indices_low"][0].float()])),
        "expected whole numbers below 65,536",
    ),
    "one id": (
        _payload(lambda t: t["indices_low"][0].fill_(7)),
        "iteration 1, sequence 2 of the run, token 0: an id occurs twice",
    ),
    "a dimension more": (
        _payload(lambda t: t.update(values=[t["values"][0][None]])),
        "expected log-probabilities",
    ),
    "no list": (_payload(lambda t: t.update(values=t["values"][0])), "a list of tensors"),
    "more ids": (
        _payload(lambda t: t.update({k: [torch.cat([v[0], v[0]], 2)] for k, v in t.items()})),
        "has 16 ids for a token",
    ),
    "no meta": (lambda name, data: b"[" * 9999 if "meta" in name else data, "_meta.json"),
}


@pytest.mark.parametrize("case", MEGATRON)
def test_megatron(case: str, teacher: Path, run: tuple[Path, Path]) -> None:
    change, words = MEGATRON[case]
    rewritten(run[0] / "cp0_dp0__1.tar", change)
    says(importing(run[0], teacher, "--tokens", run[1]), words)


def test_an_archive_that_was_cut_between_two_members(teacher: Path, run: tuple[Path, Path]) -> None:
    path = run[0] / "cp0_dp0__1.tar"
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1].offset
    os.truncate(path, last)
    says(importing(run[0], teacher, "--tokens", run[1]), "has no end", "copy it again")
    run[1].unlink()
    os.mkfifo(run[1])
    says(importing(run[0], teacher, "--tokens", run[1]), "tokens.npy: is not a file")


ROW = {"input_ids": [2, 9, 3], "token_ids": [[5, 6]] * 3, "top_values": [[-0.7, -1.0]] * 3}
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "half ids": ({"input_ids": [2.5, 9.0, 3.0]}, "input_ids is float64[3], expected whole numbers"),
    "half top-k ids": ({"token_ids": [[5.5, 6.0]] * 3}, "expected whole numbers"),
    "one id": ({"token_ids": [[5, 5]] * 3}, "row 0, token 0: an id occurs twice"),
    "far id": ({"token_ids": [[5, 600]] * 3}, "top-k id 600 is beyond the vocabulary of 600"),
    "id below 0": ({"token_ids": [[5, -1]] * 3}, "token_ids is not among whole numbers"),
    "NaN": ({"top_values": [[-0.7, float("nan")]] * 3}, "top_values is NaN"),
    "mask": ({"attention_mask": [1.0, float("nan"), 1.0]}, "attention_mask is float64[3]"),
    "rows": ({"token_ids": [[5, 6]] * 2}, "token_ids has 2 tokens, and top_values 3"),
    "values": ({"top_values": [[-0.7]] * 3}, "token_ids has 2 top-k ids, and top_values 1"),
    "no token": ({"input_ids": [], "token_ids": [], "top_values": []}, "not a list of lists"),
    "text": ({"input_ids": "2 9 3"}, "column input_ids is not a list of numbers"),
    "structs": (
        {"token_ids": [{"id": 5}] * 3},
        "column token_ids is not a list of lists of numbers",
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(case: str, teacher: Path, tmp_path: Path) -> None:
    changes, words = TABLES[case]
    (tmp_path / "data").mkdir()
    parquet.write_table(pa.Table.from_pylist([ROW | changes]), tmp_path / "data/a.parquet")
    says(importing(tmp_path / "data", teacher), words)


def test_tables_of_other_columns(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    parquet.write_table(pa.Table.from_pylist([ROW]), tmp_path / "data/a.parquet")
    parquet.write_table(pa.table({"other": [1]}), tmp_path / "data/b.parquet")
    says(importing(tmp_path / "data", teacher), "b.parquet: its columns are other (int64)")
    stream = tmp_path / "data/b.parquet"
    stream.unlink()
    os.mkfifo(stream)
    says(importing(tmp_path / "data", teacher), "b.parquet: is not a file (but a pipe")


def test_a_stream_of_arrow_that_was_cut_off(tiny_teacher: Teachers, tmp_path: Path) -> None:
    import datasets

    rows = {"text": ["one", "two"], "label": [[1.0, 2.0], [3.0, 4.0]]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    (path,) = (tmp_path / "set").glob("*.arrow")
    os.truncate(path, path.stat().st_size - 8)
    says(importing(tmp_path / "set", tiny_teacher("bert")), path.name, "is truncated")


def test_settings_of_a_compression(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    source = distillkit(tmp_path / "data", samples[:1], 8, 8)
    settings = source / "compression_config.yaml"
    sound = settings.read_text()
    for text, words in (
        (sound.replace("k: 8", "k: 2000000000"), "k is larger than d"),
        (sound.replace("normalize_t: false", "normalize_t: 3"), "expected true or false"),
        ("[" * 5000, "not the settings of DistillKit's compression"),
        (sound.replace("d: 600", "d: .nan"), "expected a whole number from 1 for d"),
    ):
        settings.write_text(text)
        says(importing(source, teacher), "compression_config.yaml", words)
