"""Imports resume, finish once and report what they leave out; whole stores are exported.

- An import resumes after a stop, finishes once, and reports the samples that it leaves out.
- A whole store as Parquet and as a folder of datasets.
"""

import json
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from teachonce.feature_store.captures import exporting, importing
from teachonce.feature_store.captures.exporting import export_store
from teachonce.feature_store.captures.formats import FORMATS, ImportOptions, _load_format
from teachonce.feature_store.captures.importing import import_capture
from teachonce.feature_store.captures.sample import Rows, Sample
from teachonce.feature_store.captures.token_texts import (
    RoundTripTokenizer,
    stretches,
    without_specials,
)
from teachonce.store import LogitsSpec, StoreError, open_store
from teachonce.store.read.derived_copies import list_of
from teachonce.support.errors import UserError
from tests.end_to_end.support import says
from tests.feature_store.captures.conftest import imported, refused, run
from tests.making.captures import Taught, distillkit, packed, specforge
from tests.making.models import Teachers, Tokenizers
from tests.making.stores import begin, features_of, make_part, put_part
from tests.making.texts import ENGLISH, RUSSIAN, SLOVAK


def test_every_format_has_an_entry() -> None:
    assert [_load_format(name).name for name in FORMATS] == list(FORMATS)


def test_a_stopped_import_goes_on(
    teacher: Path, samples: list[Taught], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part is written twice, and the store equals an undisturbed import."""
    source = specforge(tmp_path / "data", samples, (1, 2, 3))

    def options(name: str, **more: Any) -> ImportOptions:
        return ImportOptions(
            source, tmp_path / name, tokenizer=str(teacher), layers=(1, 2, 3, 4), part_tokens=90,
            **more,
        )  # fmt: skip

    import_capture(options("whole.zarr"))
    write, written, stop = importing._write_part, list[int](), [2]

    def seen(writer: Any, number: int, *rest: Any) -> None:
        if number in stop:
            raise KeyboardInterrupt
        written.append(number)
        write(writer, number, *rest)

    monkeypatch.setattr(importing, "_write_part", seen)
    with pytest.raises(KeyboardInterrupt):
        import_capture(options("a.zarr"))
    stop.clear()
    import_capture(options("a.zarr"))
    assert len(written) > 3 and written == list(range(len(written)))  # each exactly once
    contents = [open_store(tmp_path / f"{n}.zarr").manifest.content() for n in ("whole", "a")]
    assert contents[0] == contents[1]
    said = list[str]()
    assert import_capture(options("a.zarr"), said.append).finished_before
    assert "was finished before" in said[-1]
    line = refused("import", source, tmp_path / "a.zarr", "--tokenizer", teacher)
    says(line, "--layers", "name 4 different layers")


def test_names_of_files_need_not_be_utf8(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"data\xff")
    source = specforge(folder, samples[:2], (1, 2, 3))
    path = source / "rows_0-2000/data_1.ckpt"
    path.rename(path.with_name(os.fsdecode(b"data_\xff.ckpt")))
    said = imported(source, tmp_path / "a.zarr", teacher, "--layers", "1,2,3,4")
    assert "specforge, 2 samples" in said and len(open_store(tmp_path / "a.zarr")) == 2


def test_a_continued_import_counts_the_whole_capture(
    teacher: Path, samples: list[Taught], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A continued import also counts the logits of the parts that were published before."""
    source = distillkit(tmp_path / "data", samples[:2], 8, 8)

    def lines(name: str) -> list[str]:
        options = ImportOptions(source, tmp_path / name, tokenizer=str(teacher), part_tokens=8)
        return list(import_capture(options).lines())

    whole, write = lines("whole.zarr"), importing._write_part

    def stopped(writer: Any, number: int, *rest: Any) -> None:
        if number:
            raise KeyboardInterrupt
        write(writer, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(importing, "_write_part", stopped)
        lines("a.zarr")
    assert lines("a.zarr") == whole and "the next token is among the top-k ids" in whole[-1]


def test_a_store_of_another_capture_is_left_alone(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    imported(distillkit(tmp_path / "one", samples, 8, 8), tmp_path / "a.zarr", teacher)
    other = distillkit(tmp_path / "other", samples[:5], 8, 8)
    before = open_store(tmp_path / "a.zarr").manifest.content()
    line = refused("import", other, tmp_path / "a.zarr", "--tokenizer", teacher)
    says(line, "finished with other arguments", "the corpus (source 1, ")
    assert open_store(tmp_path / "a.zarr").manifest.content() == before


def test_info_shows_the_source(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    imported(distillkit(tmp_path / "one", samples, 8, 8), tmp_path / "a.zarr", teacher)
    text = run("info", tmp_path / "a.zarr").output
    assert "one (files 2, bytes" in text
    assert "gpt2 (captured by distillkit)" in text
    assert "topk:8 of 600 of the next token" in text


def sample(ids: list[int], **more: Any) -> Sample:
    return Sample("here", Rows, np.array(ids, np.int64), **more)


@pytest.mark.parametrize("kind", ("wordpiece", "wordpiece-lower", "bpe", "bpe-plain", "unigram"))
def test_texts_of_all_tokenizers(kind: str, make_tokenizer: Tokenizers) -> None:
    """A text as any tokenizer encodes it is imported whole, and encodes to the same ids again."""
    backend = make_tokenizer(kind).backend_tokenizer
    texts = [*ENGLISH, *RUSSIAN, *SLOVAK]
    rows = [backend.encode(text).ids for text in texts]
    tally: Counter[str] = Counter()
    found = list(stretches(map(sample, rows), RoundTripTokenizer(backend), tally))
    assert [each.ids.tolist() for each in found] == rows
    assert not tally["tokens"]


@given(
    st.integers(0, len(ENGLISH) - 1), st.integers(0, len(RUSSIAN) - 1), st.integers(1, 9),
    st.integers(1, 9),
)  # fmt: skip
def test_cut_ids_are_kept_as_far_as_they_are_text(
    make_tokenizer: Tokenizers, first: int, second: int, begin: int, end: int
) -> None:
    """Cut ids are imported in stretches: runs of the sample in order, each equal to the encoding of
    its text. The tokens between are counted."""
    tokenizer = RoundTripTokenizer(make_tokenizer("bpe-plain").backend_tokenizer)
    whole = [t for text in (ENGLISH[first], RUSSIAN[second])
             for t in tokenizer.tokenizer.encode(text).ids]  # fmt: skip
    ids = whole[begin:-end]
    tally: Counter[str] = Counter()
    after = 0
    for each in stretches([sample(ids, continues=True)], tokenizer, tally):
        count = len(each.ids)
        assert each.begin >= after and each.ids.tolist() == ids[each.begin : each.begin + count]
        assert tokenizer.tokenizer.encode(each.window.text).ids == each.ids.tolist()
        after = each.begin + count
        tally["kept"] += count
    assert tally["kept"] + tally["tokens"] == len(ids)
    assert tally["tokens"] < len(ids) / 2


@pytest.mark.parametrize("kind", ("wordpiece", "wordpiece-lower", "bpe", "bpe-plain"))
@pytest.mark.parametrize("around", (False, True))
def test_a_stretch_begins_where_the_text_before_it_ends(
    kind: str, around: bool, make_tokenizer: Tokenizers
) -> None:
    """Also with special tokens around the sample, and after omitted tokens."""
    backend = without_specials(make_tokenizer(kind).backend_tokenizer)
    tokenizer, chance = RoundTripTokenizer(backend), random.Random(0)
    ids = backend.encode(" ".join([*ENGLISH, *RUSSIAN, *SLOVAK])).ids
    for place in range(20, len(ids), 20):
        ids[place] = chance.randrange(10, backend.get_vocab_size())
    if around:
        tokenizer.before, tokenizer.after = [2], [3]
        ids = [2, *ids, 3]
    found = list(stretches([sample(ids)], tokenizer, Counter()))
    assert len(found) > 5
    tokenizer.tokenizer.decoder = tokenizer.decoders[-1]
    for each in found:
        text = tokenizer.tokenizer.decode(ids[around : each.begin], skip_special_tokens=False)
        assert each.window.document_begin == len(text)


class Counting:
    """A tokenizer that counts the characters that it tokenizes, and the ids that it decodes."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.characters, self.ids = backend, 0, 0

    def encode(self, text: str) -> Any:
        self.characters += len(text)
        return self.backend.encode(text)

    def encode_batch(self, texts: list[str]) -> Any:
        self.characters += sum(map(len, texts))
        return self.backend.encode_batch(texts)

    def decode_batch(self, ids: list[list[int]], **options: Any) -> Any:
        self.ids += sum(map(len, ids))
        return self.backend.decode_batch(ids, **options)


def with_splits(backend: Any, ids: list[int]) -> tuple[list[int], int]:
    """Split one of 100 pieces in two, if both parts are pieces. Return the ids and the number of
    splits."""
    found, splits = list[int](), 0
    for place, one in enumerate(ids):
        piece = backend.id_to_token(one)
        parts = [backend.token_to_id(part) for part in (piece[:1], piece[1:])]
        split = place % 100 == 0 and None not in parts
        found += parts if split else [one]
        splits += split
    return found, splits


def test_the_work_of_a_long_sample_is_linear(
    make_tokenizer: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stretch reaches to the next piece that the tokenizer splits differently. The tokenized
    characters and the decoded ids grow with the length of the sample."""
    backend = make_tokenizer("bpe-plain").backend_tokenizer
    whole, characters = backend.encode(" ".join(9 * [*ENGLISH, *RUSSIAN])).ids, list[int]()
    decoded = list[int]()
    for size in (2000, 4000):
        ids, splits = with_splits(backend, whole[:size])
        tokenizer, tally = RoundTripTokenizer(backend), Counter[str]()
        counting = Counting(tokenizer.tokenizer)
        monkeypatch.setattr(tokenizer, "tokenizer", counting)
        found = list(stretches([sample(ids)], tokenizer, tally))
        for each in found:
            assert each.ids.tolist() == ids[each.begin : each.begin + len(each.ids)]
            assert backend.encode(each.window.text).ids == each.ids.tolist()
        assert len(found) == splits and tally["tokens"] <= 2 * splits
        assert max(len(each.ids) for each in found) > 400  # more than are compared at first
        characters.append(counting.characters)
        decoded.append(counting.ids)
    assert characters[1] < 3 * characters[0] and decoded[1] < 2.2 * decoded[0]


def test_marks_of_a_chat_are_characters(make_tokenizer: Tokenizers) -> None:
    """Special tokens of a chat inside a text are spelled out, and cover their own characters."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(make_tokenizer("bpe-plain").backend_tokenizer.to_str())
    backend.add_special_tokens(["<|user|>", "<|end|>"])
    chat = f"<|user|>\n{ENGLISH[0]}<|end|>\n<|user|>\n{RUSSIAN[0]}<|end|>\n"
    (found,) = stretches([sample(backend.encode(chat).ids)], RoundTripTokenizer(backend), Counter())
    assert found.window.text == chat and not found.window.special.any()
    begin, end = found.window.offsets[0]
    assert chat[begin:end] == "<|user|>"


def test_a_sequence_that_begins_inside_a_word_says_so(make_tokenizer: Tokenizers) -> None:
    tokenizer = RoundTripTokenizer(make_tokenizer("bpe-plain").backend_tokenizer)
    encoding = tokenizer.tokenizer.encode(ENGLISH[2])
    word = next(i for i, piece in enumerate(encoding.tokens) if i and piece[0].isalpha()
                and piece[0] != "Ġ" and encoding.tokens[i - 1][-1].isalpha())  # fmt: skip
    (found,) = stretches([sample(encoding.ids[word:], continues=True)], tokenizer, Counter())
    assert found.window.hard_cut


def test_texts_longer_than_the_teacher_reads_are_reported(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    rows = {"text": [*ENGLISH, "\n"], "label": np.eye(13, 16).tolist()}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "rows"))
    words = ("--max-length", "12")
    said = imported(tmp_path / "rows", tmp_path / "a.zarr", tiny_teacher("bert"), *words)
    assert "left out without a token: 1; truncated to --max-length: " in said
    store = open_store(tmp_path / "a.zarr")
    assert len(store) == 12 and store.features.max_length == 12
    assert all(row.embedding.argmax() == row.document for row in store)


CAPTURE = '''
from functools import partial

import numpy as np
from teachonce.feature_store.captures.formats import Format
from teachonce.feature_store.captures.sample import CaptureContents, Rows, Sample


class Lines:
    """A text, a tab and a number in each line: vectors of two numbers."""

    contents, settings = CaptureContents(vector=2), {}

    def __init__(self, options, teacher):
        self._path = options.source

    def files(self):
        return [self._path]

    def samples(self):
        for line in self._path.read_text("utf-8").splitlines():
            text, number = line.split("\\t")
            vector = np.array([float(number), 1], np.float32)
            yield Sample(str(self._path), partial(Rows, vector=vector), text=text)


FORMAT = Format("lines", lambda path: True, Lines)
'''


def test_an_installed_package_adds_a_format(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, source = tmp_path / "site" / "lines-1.0.dist-info", tmp_path / "lines.txt"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: lines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[teachonce.captures]\nlines = capture_of_lines:FORMAT\n"
    )
    (info.parent / "capture_of_lines.py").write_text(CAPTURE)
    source.write_text("".join(f"{text}\t{place}\n" for place, text in enumerate(ENGLISH)), "utf-8")
    words = ("import", source, tmp_path / "a.zarr", "--tokenizer", teacher)
    assert "is not a capture of a known format" in refused(*words)
    absent = run(*words, "--format", "lines")
    assert absent.exit_code == 2 and "--format lines: expected one of distillkit" in absent.output
    monkeypatch.syspath_prepend(str(info.parent))
    imported(source, tmp_path / "a.zarr", teacher, "--format", "lines", "--codec", "exact")
    store = open_store(tmp_path / "a.zarr")
    assert [record.text for record in store] == list(ENGLISH)
    assert [record.embedding.tolist() for record in store] == [[n, 1] for n in range(len(ENGLISH))]


def test_everything_is_written(store: Path, tmp_path: Path) -> None:
    texts = [record.text for record in open_store(store)]
    printed = json.loads(
        run("export", store, tmp_path / "a.parquet", "--to", "parquet", "--json").stdout
    )
    assert printed["rows"] == len(texts)
    assert printed["bytes"] == (tmp_path / "a.parquet").stat().st_size
    assert parquet.read_table(tmp_path / "a.parquet")["text"].to_pylist() == texts
    columns = ("--columns", "text,token_ids", "--floats", "float16")
    assert run("export", store, tmp_path / "a", "--to", "datasets", *columns).exit_code == 0
    made = datasets.load_from_disk(str(tmp_path / "a"))
    assert made.column_names == ["text", "token_ids"] and made["text"][:] == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.parquet"]


def test_distillkit_files_have_all_rows_of_a_sound_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have ROWS_A_FILE rows; a store with logits in the wrong parts is refused."""
    monkeypatch.setattr(exporting, "ROWS_A_FILE", 5)
    path, made = tmp_path / "a.zarr", tmp_path / "made"
    features = replace(
        features_of(views=1), hidden=(), attention=(), logits=LogitsSpec("topk", 5, next_token=True)
    )
    writer = begin(path, features)
    parts = [make_part(features, 0) for _ in range(2)]  # of equal shapes
    parts[1].logits[0]["ids"] = (parts[1].logits[0]["ids"] + 1) % features.vocabulary
    for number, part in enumerate(parts):
        put_part(writer, number, part)
    writer.seal()
    export_store(str(path), made, "distillkit", None, "float32")
    found = [parquet.read_table(made / f"data_{n}.parquet").to_pylist() for n in range(5)]
    assert [len(rows) for rows in found] == [5, 5, 5, 5, 4] and len([*made.iterdir()]) == 6
    for record, row in zip(open_store(path), sum(found, []), strict=True):
        logits = record.views[0].logits
        assert row["input_ids"] == record.token_ids.tolist()
        assert row["bytepacked_indices"] == packed(logits.ids, bits=10)
        logprobs = np.array(row["compressed_logprobs"], np.uint8).view("<f4")
        assert np.array_equal(logprobs, logits.logprobs)
    with monkeypatch.context() as small:
        small.setattr(exporting, "LARGEST", 99)
        with pytest.raises(UserError, match=r"at most 99 bytes; export --to parquet, or"):
            export_store(str(path), tmp_path / "large", "distillkit", None, "float32")

    chunks = [path / f"parts/{number}/view0/logits/ids/c/0/0" for number in range(2)]
    contents = [chunk.read_bytes() for chunk in chunks]
    for chunk, content in zip(chunks, reversed(contents), strict=True):
        chunk.write_bytes(content)
    monkeypatch.setattr(exporting, "ROWS_A_FILE", 8)  # the last file is full before the stream ends
    with pytest.raises(StoreError, match="view0/logits/ids"):
        export_store(str(path), tmp_path / "b", "distillkit", None, "float32")
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == [list_of(path).name, "a.zarr", "made"]
