"""The published plans, run from the dump to the scores with tiny texts and numbers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce import steps, zhao
from benchmarks.reproduce.mukherjee import SETS, file_name
from tests.benchmarks.test_reproduce import in_this_process
from tests.end_to_end.support import ok, refused
from tests.making.dumps import LATIN_AND_CYRILLIC, write_corpus

SENTENCES = LATIN_AND_CYRILLIC
SCALE = 1e-5
WIDTH, LAYERS = 312, 12  # width of the published BiLSTM's embeddings, and 12 layers to cut from
PARTS = {"train": 24, "dev": 8, "test": 8}
LANGUAGES = ("de", "sk")
ARMS = {  # by table
    "kolesnikova": ("none", "KL+MSE RF"),
    "mukherjee-ag_news": ("hard", "stagewise", "stagewise, of Large"),
    "mukherjee-imdb-500": ("none", "stagewise"),
    "mukherjee-imdb-100": ("hard",),
    "zhao": ("mixed", "NoKD"),
    "zhao-vocabularies": ("mixed, 7k", "5k teacher, vanilla"),
    "zhao-snips": ("mixed, 96", "NoKD, 192"),
    "slovakbert": ("1", "2", "6"),
    "tinymbert": ("D0-S", "D4.2"),
    "tinymbert-100": ("D4.2", "D4.2, gold sentences alone"),
    "tinymbert-settings": (
        "D4.2, dropout 0.1", "D4.2, layer 2", "D4.2, the pre-trained teacher's embeddings",
        "D4.2, GloVe",
    ),
    "tinymbert-sizes": ("BiLSTM 50,100", "transformer 48x2"),
    "tinymbert-imdb": ("D4.2", "D4.2, of Large"),
    "tinymbert-imdb-500": ("none", "D4.2"),
}  # fmt: skip
SOURCES = sorted({table.partition("-")[0] for table in ARMS})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[[str], Any]) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    folder, tokenizer = tmp_path_factory.mktemp("teacher"), make_tokenizer("wordpiece")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=12, intermediate_size=32, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def texts(count: int, columns: tuple[str, ...], labels: tuple[str, ...]) -> str:
    chance = random.Random(count)
    rows = [
        "\t".join([*(chance.choice(SENTENCES) for _ in columns), labels[number % len(labels)]])
        for number in range(count)
    ]
    return "\n".join(["\t".join([*columns, "score" if "0.5" in labels else "label"]), *rows]) + "\n"


def words(count: int, tags: tuple[str, ...], tagged: int = 10**6) -> str:
    lines = []
    for number in range(count):
        for place, word in enumerate(SENTENCES[number % len(SENTENCES)].split()):
            tag = tags[(number + place) % len(tags)] if number < tagged else ""
            lines.append(f"{word}\t{tag}")
        lines.append("")
    return "\n".join(lines) + "\n"


def questions(count: int) -> str:
    paragraphs = [
        {"context": text, "qas": [{
            "id": str(number), "question": "?",
            "answers": [{"text": text.split()[0], "answer_start": 0}],
        }]}
        for number, text in enumerate((SENTENCES * count)[:count])
    ]  # fmt: skip
    return json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a folder of data for each source."""
    found = {name: tmp_path_factory.mktemp(name) for name in SOURCES}
    for name in ("kolesnikova", "zhao", "slovakbert"):
        write_corpus(found[name] / "corpus.txt", 60)
    one, two, tags = ("text",), ("text_a", "text_b"), ("O", "B-LOC", "B-PER")
    for part, count in PARTS.items():
        kinds = {
            "kolesnikova/paraphraser.tsv": texts(count, two, ("yes", "no")),
            "kolesnikova/rusentiment.tsv": texts(count, one, ("good", "bad", "skip")),
            "kolesnikova/collection3.tsv": words(count, tags),
            "kolesnikova/sberquad.json": questions(count),
            **{f"zhao/{name}.tsv": texts(count, one, ("a", "b")) for name in ("sst2",
                                                                              "snips_intents")},
            **{f"zhao/{name}.tsv": texts(count, two, ("a", "b")) for name in ("mnli", "mrpc")},
            "zhao/snips_slots.tsv": words(count, tags),
            "slovakbert/wikiann.tsv": words(count, tags),
            "slovakbert/ud.tsv": words(count, ("NOUN", "VERB")),
            "slovakbert/stsb.tsv": texts(count, two, ("0.5", "4", "2")),
            "slovakbert/boolq.tsv": texts(count, two, ("yes", "no")),
            **{f"tinymbert/{name}.tsv": words(count, tags) for name in LANGUAGES},
            "tinymbert/.tsv": words(count, tags),
        }  # fmt: skip
        for called in SETS:
            name = file_name(called)
            gold = texts(16, one, ("a", "b"))
            whole = gold + "".join(f"{text}\t\n" for text in SENTENCES * 8)
            for source in ("mukherjee", "tinymbert"):
                kinds[f"{source}/{name}.tsv"] = texts(count, one, ("a", "b"))
                (found[source] / f"{name}.all.tsv").write_text(whole, "utf-8")
        for path, text in kinds.items():
            source, _, file = path.partition("/")
            name, _, ending = file.rpartition(".")
            file = f"{name}.{part}.{ending}".lstrip(".")
            (found[source] / file).write_text(text, "utf-8")
    (found["tinymbert"] / "all.tsv").write_text(words(40, tags, tagged=16), "utf-8")
    vectors = [" ".join([word, *["0.1"] * 300]) for word in ("the", "of")]
    for source in ("mukherjee", "tinymbert"):
        (found[source] / "glove.300d.txt").write_text("\n".join(vectors) + "\n")
    return found


def given(table: str, teacher: Path, data: dict[str, Path]) -> list[str | Path | float]:
    """Return the words that run a table with tiny numbers: its arms in ARMS, with one seed."""
    name = table.partition("-")[0]
    asked = [word for arm in ARMS[table] for word in ("--arm", arm)]
    return [
        name, "--size", "full", "--table", table, "--teacher", teacher, "--larger-teacher", teacher,
        "--data", data[name], "--scale", SCALE, "--seeds", 1, *asked,
    ]  # fmt: skip


@pytest.mark.parametrize("table", ARMS)
def test_the_published_plan_is_reported(
    table: str, tmp_path: Path, teacher: Path, data: dict[str, Path]
) -> None:
    work = tmp_path / "work"
    printed = ok(reproduce.main, *given(table, teacher, data), "--work", work, "--dry-run")
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    assert not work.exists()
    assert sum("student-train" in line for line in lines) == len(ARMS[table])
    if table == "kolesnikova":  # both figures of the questions come from one run
        assert printed.count("--task qa") == printed.count("--task ner") > 0
    assert not re.search("# about 0 minutes\ndownstream --task mlm", printed)


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_file_is_refused(name: str, tmp_path: Path, teacher: Path) -> None:
    words = ("--size", "full", "--teacher", teacher, "--data", tmp_path, "--work", tmp_path / "w")
    line = refused(reproduce.main, name, *words)
    assert f"--data {tmp_path}: there is no " in line and "README.md" in line
    line = refused(reproduce.main, name, *words, "--table", "9")
    assert f"--table 9: there are {name}" in line


@pytest.mark.apart
@pytest.mark.parametrize("table", ARMS)
def test_the_published_plan_runs(
    table: str,
    tmp_path: Path,
    teacher: Path,
    data: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "in_own_process", in_this_process)
    monkeypatch.setattr(zhao, "FROM_SCRATCH", ("--model", "scratch:bert:32x2x4"))
    results = tmp_path / "RESULTS.md"
    words = [*given(table, teacher, data), "--work", tmp_path / "work"]
    ok(reproduce.main, *words, "--results", results)
    said = results.read_text()
    assert all(f"\n| {arm} | " in said for arm in ARMS[table]) and "Published: " in said
    assert f"--size full --table {table} --arm " in said and f" --scale {SCALE}`" in said
    if table.startswith("mukherjee"):
        assert re.search(r"of its store: teacher 0\.\d{3} \(hard labels 0\.\d{3}\)", said)
    assert "# all 0 commands" in ok(reproduce.main, *words, "--dry-run")
