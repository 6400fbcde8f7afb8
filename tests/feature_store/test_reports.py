"""`info --vocab`, and the same facts of every command as JSON.

- `info --vocab` reports the share that each alignment uses, over all of a store or a sample.
- `--json`: every command reports the same facts as JSON as in its text output.
"""

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from teachonce.align import (
    FlatText,
    Tokens,
    Vocabulary,
    VocabularyMap,
    align_bytes,
    align_match,
    align_reduce,
    align_span,
)
from teachonce.feature_store import coverage, student_vocabulary
from teachonce.feature_store.cli import main
from teachonce.feature_store.output import Output, printed
from teachonce.feature_store.spread_sample import spread_sample
from teachonce.feature_store.student_vocabulary import (
    StudentVocabulary,
    tokenized_as_json,
    tokens_from_json,
)
from teachonce.store import open_store
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.settings.terms import ALIGNMENTS
from tests.end_to_end.support import ok, refused
from tests.making.stores import PIECES, begin, features_of, make_part, make_store, put_part

lines = partial(ok, main)


def test_coverage_is_what_the_alignments_give_text_by_text(store: Path) -> None:
    printed, fs = facts("info", store, "--vocab", "5k"), open_store(store)
    own = StudentVocabulary("5k", fs)
    backend = own.tokenizer.backend_tokenizer
    pieces = [
        Vocabulary.from_tokenizer_json(text)
        for text in (fs.teacher_file("tokenizer.json").decode(), backend.to_str())
    ]
    shared = VocabularyMap.between(*pieces)
    runs = {name: Counter[str]() for name in ALIGNMENTS}
    tokens, unknown = Counter[str](), Counter[str]()
    for record in fs:
        encoding = backend.encode(record.text)
        teacher = Tokens.of([record.token_ids.tolist()], [record.offsets], [record.special])
        learns = Tokens.of([encoding.ids], [encoding.offsets], [encoding.special_tokens_mask])
        text, reduced = FlatText.of([record.text]), align_reduce(teacher, shared)
        found = {
            "span": (learns, align_span(text, teacher, learns)),
            "match": (learns, align_match(text, teacher, learns, shared)),
            "reduce": (reduced.tokens, reduced.alignment),
            "bytes": (learns, align_bytes(text, teacher, learns, shared)),
        }
        for name, (side, pairs) in found.items():
            for t, s in zip(pairs.teacher, pairs.student, strict=True):
                runs[name][f"{t[1] - t[0]}:{s[1] - s[0]}"] += 1
            ordinary = side.ids[~side.special].tolist()
            tokens[name] += len(ordinary)
            unknown[name] += ordinary.count(own.tokenizer.unk_token_id)
        tokens["teacher"] += int((~record.special).sum())
    assert printed["coverage"]["teacher_tokens"] == tokens["teacher"]
    assert (printed["coverage"]["sequences"], printed["coverage"]["of"]) == (24, 24)
    for name, each in printed["coverage"]["alignments"].items():
        assert each["runs_by_size"] == runs[name] and each["student_tokens"] == tokens[name]
        assert each["unknown"] == unknown[name]
        sizes = [(*map(int, size.split(":")), count) for size, count in runs[name].items()]
        assert each["teacher_share"] == sum(t * n for t, _, n in sizes) / tokens["teacher"]
        assert each["student_share"] == sum(s * n for _, s, n in sizes) / tokens[name]
    vocabulary = printed["vocabulary"]
    assert vocabulary["pieces"] == len(own.tokenizer)
    assert vocabulary["shared"] == len(set(shared.match[shared.match >= 0]))
    assert vocabulary["teacher_pieces"] == len(PIECES)
    assert vocabulary["teacher_pieces_unknown"] == shared.unknown[list(PIECES.values())].sum()


def test_people_are_reported_the_same(store: Path) -> None:
    text, printed = lines("info", store, "--vocab", "5k"), facts("info", store, "--vocab", "5k")
    span = printed["coverage"]["alignments"]["span"]
    row = next(line for line in text.splitlines() if line.startswith("span ")).split()
    assert row[1:3] == [f"{span['teacher_share']:.1%}", f"{span['student_share']:.1%}"]
    assert row[4] == f"{span['runs']:,}"
    assert "of 24 of 24 sequences" in text and "the text has no more" in text


def test_bytes_by_feature_add_up(store: Path, tmp_path: Path) -> None:
    lines("convert", store, tmp_path / "b.h5")
    for path in (store, tmp_path / "b.h5"):
        printed = facts("info", path)
        by_feature, disk = printed["bytes_by_feature"], printed["bytes_on_disk"]
        assert by_feature.keys() == printed["bytes_per_token_encoded"].keys()
        assert 0.7 * disk["features"] < sum(by_feature.values()) <= disk["features"]
    files = store.glob("parts/*/view1/attention/mean/values/**/*")
    maps = sum(file.stat().st_size for file in files if file.is_file())
    assert facts("info", store)["bytes_by_feature"]["view1/attention/mean"] == maps


def test_a_large_store_is_sampled(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spread_sample(open_store(store), 1).summary == "12 of 24 sequences, spread evenly"
    assert spread_sample(open_store(store), 10**9).summary == "all 24 sequences"
    monkeypatch.setattr(coverage, "SAMPLE_TOKENS", 1)
    monkeypatch.setattr(student_vocabulary, "VOCABULARY_TOKENS", 1)
    printed = facts("info", store, "--vocab", "5k")
    assert (printed["coverage"]["sequences"], printed["coverage"]["of"]) == (12, 24)
    assert "made of 12 of 24 sequences" in printed["vocabulary"]["note"]
    folder = tmp_path / "student-5"  # its name has the suffix of a size
    StudentVocabulary("5k", open_store(store)).tokenizer.save_pretrained(folder)
    assert not StudentVocabulary(str(folder), open_store(store)).note
    first = "".join(open_store(store)[number].text for number in range(12))
    assert set(first.replace(" ", "")) >= {
        c
        for c in StudentVocabulary("words", open_store(store)).tokenizer.get_vocab()
        if len(c) == 1
    }


def test_tokens_are_the_same_from_another_process(store: Path) -> None:
    own = StudentVocabulary("5k", open_store(store))
    texts = [record.text for record in open_store(store)[:3]]
    here = tokenize(own.backend, texts)
    there = tokens_from_json(
        json.loads(json.dumps(tokenized_as_json(own.backend.to_str(), texts, None)))
    )
    for name in ("ids", "offsets", "special", "start", "types"):
        assert np.array_equal(getattr(here, name), getattr(there, name))


def test_what_cannot_be_a_vocabulary_is_refused(store: Path, tmp_path: Path) -> None:
    assert "--vocab big: expected a size" in refused(main, "info", store, "--vocab", "big")
    writer = begin(tmp_path / "a.zarr", features_of(tier=None), files={"config.json": b"{}"})
    put_part(writer, 0, make_part(features_of(tier=None), 0))
    writer.seal()
    for command in ("info", "page"):
        line = refused(main, command, tmp_path / "a.zarr", "--vocab", "5k")
        assert "holds no tokenizer.json" in line and "leave --vocab out" in line
    assert "page in" in lines("page", tmp_path / "a.zarr", "--out", tmp_path / "a.html")


def facts(*arguments: object, code: int = 0) -> Any:
    """Run a command and return its JSON, which must be the whole stdout."""
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_it(name: str) -> None:
    assert "--json" in {option for each in main.commands[name].params for option in each.opts}


def test_copies_report_what_was_written(store: Path, tmp_path: Path) -> None:
    tokens = open_store(store).meta["tokens"]
    copied = facts("convert", store, tmp_path / "b.h5", "--codec", "small")
    assert (copied["sequences"], copied["tokens"], copied["codec"]) == (24, tokens, "small")
    assert copied["bytes_on_disk"]["total"] == (tmp_path / "b.h5").stat().st_size
    make_store(tmp_path / "other.zarr", features_of(), parts=3)
    merged = facts("merge", store, tmp_path / "other.zarr", tmp_path / "c.zarr")
    assert (merged["sequences"], merged["parts"]) == (60, 5)
    assert merged["content"] == open_store(tmp_path / "c.zarr").manifest.content()
    assert facts("seal", store)["finished_before"] is True


def test_damage_is_reported_before_the_error(store: Path, tmp_path: Path) -> None:
    assert facts("verify", store)["sound"] is True
    path = tmp_path / "a.zarr"
    shutil.copytree(store, path)
    shard = path / "parts/1/token/end/c/0"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    found = facts("verify", path, code=1)
    assert found["sound"] is False and "part 1: array token/end" in found["problems"][0]
    mended = facts("repair", path)
    assert (
        mended["parts_left"] == 1 and "repeat the command that made the store" in mended["advice"]
    )
    assert Path(mended["quarantine"]).is_dir() and mended["undo"]


def test_a_sequence_is_reported_whole(store: Path) -> None:
    record, shown = open_store(store)[17], facts("show", store, 17, "--view", 1)
    assert shown["texts"] == [record.text] and shown["sequence"] == 17
    for number, token in enumerate(shown["tokens"]):
        assert token["id"] == record.token_ids[number]
        assert token["masked"] == record.views[1].mask[number]
        best = [each["probability"] for each in token["best"]]
        assert best == sorted(best, reverse=True) and len(best) == 3
        if not record.special[number]:
            begin, end = token["characters"]
            assert record.text[begin:end] == token["text"]


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    @printed
    def command() -> Any:
        yield Output({"a": [float("nan"), 1.5]}, ["for people"])
        yield Output({"b": {"c": float("-inf")}}, ["and more"])

    command(as_json=True)
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
    command(as_json=False)
    assert capsys.readouterr().out == "for people\nand more\n"
