"""The papers whose teachers do a task: BiLSTM classifiers and taggers from few labels."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.results import TEACHER
from benchmarks.reproduce.arms import OURS, Arm, Source, Task, downstream, dump
from benchmarks.reproduce.examples import DATA

SST2 = DATA / "classify/en_sst2.train.tsv", DATA / "classify/en_sst2.dev.tsv"
SNIPS = DATA / "intent/en_snips.train.tsv", DATA / "intent/en_snips.valid.tsv"
PER_CLASS = 100  # gold labels of a class
UNLABELLED = {"small": 4000, "full": 10**6}  # texts, at most
LABELLED = 100  # sentences of a language with gold tags
DEV = 500
WORDS: dict[str, tuple[str, ...]] = {
    "small": ("--student", "bilstm:100,100", "--vocab", "5k"),
    "full": (),
}
SHORT = ("--group-by-length",)  # for teachers, which take longest
IN_ALL = 8  # epochs over all text, whatever the stages


def recipe(name: str, *words: str, store: int = 0) -> Arm:
    return Arm(("--recipe", name, *words), (store,))


def as_long(name: str, *words: str, stages: int = 1) -> Arm:
    """An arm whose epochs are shared out among its stages, each step of an unfreezing one."""
    return recipe(name, "--epochs", f"{IN_ALL / stages:.3g}", *words)


def as_it_is(measure: str, task: str, *tests: str) -> dict[str, tuple[Task, ...]]:
    files = [word for test in tests for word in ("--test", test)]
    return dict.fromkeys(WORDS, (Task(measure, ("--task", task, *files, "--as-is")),))


def few_labels(
    path: Path, work: Path, per_class: int = PER_CLASS, unlabelled: int = 10**6
) -> tuple[Path, Path, Path]:
    """Split a table of texts and labels: few labelled rows, rows for choosing the epoch, and texts
    with the labels of the few alone."""
    head, *rows = path.read_text("utf-8").splitlines()
    random.Random(0).shuffle(rows)
    dev, rows = rows[:DEV], rows[DEV:]
    left = dict.fromkeys({row.rpartition("\t")[2] for row in rows}, per_class)
    few, all_ = [], []
    for row in rows:
        text, _, label = row.rpartition("\t")
        if left[label] > 0:
            left[label] -= 1
            few.append(row)
            all_.append(row)
        elif unlabelled > 0:
            unlabelled -= 1
            all_.append(f"{text}\t")
    files = []
    for name, some in (("few", few), ("dev", dev), ("all", all_)):
        files.append(work / f"{name}.tsv")
        files[-1].write_text("\n".join([head, *some]) + "\n", "utf-8")
    return files[0], files[1], files[2]


def classifier(train: Path, per_class: int, work: Path, size: str) -> tuple[list[Path], Path]:
    """A MiniLM fine-tuned on few labels, and what it says of all the text."""
    few, dev, all_ = few_labels(train, work, per_class, UNLABELLED[size])
    words = ("--task", "classify", "--model", TEACHER, "--train", few, "--dev", dev)
    downstream(work / "teacher", *words, "--epochs", "8", "--seeds", "1", *SHORT, "--save")
    store = dump(
        work / "classes.zarr", "--model", work / "teacher/model", "--corpus", all_,
        "--head", "classification", "--label-column", "label", "--text-column", "text",
        "--hidden", "layer:6", "--attention", "none",
    )  # fmt: skip
    return [store], work / "teacher/model"


LANGUAGES = ("de", "en", "fr", "nl", "pt", "sk", "sv")
TESTED = 500  # sentences of a language


def sentences_of(language: str, split: str) -> list[str]:
    """Sentences of WikiANN, or of Universal NER where that has the language."""
    (path,) = (DATA / "ner").glob(f"{language}_*.{split}.tsv")
    return path.read_text("utf-8").strip().split("\n\n")


def few_tags(sentences: Sequence[str], out: Path, labelled: int) -> Path:
    """A token/tag file, the tags of the first few sentences alone."""
    lines = []
    for number, sentence in enumerate(sentences):
        for line in sentence.split("\n"):
            word, _, tag = line.partition("\t")
            lines.append(f"{word}\t{tag if number < labelled else ''}")
        lines.append("")
    out.write_text("\n".join(lines) + "\n", "utf-8")
    return out


def tagger(work: Path, size: str) -> tuple[list[Path], Path]:
    """One teacher of all languages, fine-tuned on few sentences of each, and what it says of many
    more; and stores of the gold sentences of each language alone."""
    whole = 600 if size == "small" else None
    few, dev, alone = list[str](), list[str](), list[Path]()
    corpora: list[str | Path] = []
    for name in LANGUAGES:
        train = sentences_of(name, "train")
        few += train[:LABELLED]
        dev += train[-LABELLED:]
        corpora += [
            "--corpus",
            few_tags(train[:-LABELLED][:whole], work / f"{name}.all.tsv", LABELLED),
        ]
        few_tags(sentences_of(name, "dev")[:TESTED], work / f"{name}.test.tsv", TESTED)
        alone.append(few_tags(train[:LABELLED], work / f"{name}.gold.tsv", LABELLED))
    gold = [
        word
        for role, sentences in (("train", few), ("dev", dev))
        for word in (f"--{role}", few_tags(sentences, work / f"{role}.tsv", len(sentences)))
    ]
    words = ("--task", "ner", "--model", TEACHER, *gold, "--pieces", "all", "--seeds", "1")
    # At the default rate it takes twice as many epochs.
    length = ("--epochs", "8", "--lr", "3e-4", "--precision", "bf16", *SHORT)
    downstream(work / "teacher", *words, *length, "--save")
    model = work / "teacher/model"
    options: tuple[str | Path, ...] = (
        "--model",
        model,
        "--head",
        "tagging",
        "--hidden",
        "layer:6",
        "--attention",
        "none",
    )
    return [
        dump(work / "tags.zarr", *corpora, *options),
        *(dump(gold.with_suffix(".zarr"), "--corpus", gold, *options) for gold in alone),
    ], model


def of_language(name: str) -> str:
    return f"D0 {name}"


def simple(called: str, files: tuple[Path, Path], per_class: int, vocab: str = "5k") -> Source:
    """Mukherjee & Awadallah 2019 on a task with few labels, whose text gives so many pieces."""
    train, test = files
    return Source(
        f"Distilling into simple networks: {called}, {per_class} labels a class",
        {
            "small": f"{called}: a MiniLM fine-tuned (`--group-by-length`) on {per_class} labels of"
            " each class, and what"
            f" it says of at most {UNLABELLED['small']:,} texts without labels; students BiLSTM"
            f" 100,100 with {vocab} WordPiece, {IN_ALL} epochs over all text in every way of"
            " distilling, shared out among its stages (the published: 300,600 with the teacher's"
            " vocabulary). Test: the official dev set.",
            "full": "all of the text; students as published, 300,600 with the teacher's"
            " vocabulary.",
        },
        WORDS | {"small": ("--student", "bilstm:100,100", "--vocab", vocab)},
        as_it_is("macro F1", "classify", str(test)),
        {
            "rnn": recipe("simple-rnn", "--epochs", "40"),
            "no distillation": recipe("simple-no-distillation", "--epochs", "40"),
            "hard": as_long("simple-hard"),
            "joint": as_long("simple-joint"),
            "stagewise": as_long("simple-stagewise", stages=4),
            "once": as_long("simple-once", stages=4),
            OURS: as_long("simple-joint", "--loss", "ce=1,kl=1,hidden=30"),
        },
        [
            ("hard", "no distillation", "hard distillation helps with few labels"),
            ("joint", "hard", "soft is better than hard"),
            ("stagewise", "joint", "stages with gradual unfreezing are better than joint training"),
            ("stagewise", "once", "logits belong to the second stage"),
        ],
        "stagewise",
        functools.partial(classifier, train, per_class),
    )


TASK_SOURCES = {
    "mukherjee": simple("SST-2", SST2, PER_CLASS),
    "mukherjee-500": simple("SST-2", SST2, 500),
    "mukherjee-snips": simple("SNIPS intents", SNIPS, PER_CLASS, "4k"),
    "tinymbert": Source(
        "Massive multilingual tagging in miniature",
        {
            "small": "WikiANN (de, en, fr, nl) and Universal NER (pt, sk, sv): an (English) MiniLM"
            f" fine-tuned on all word pieces of {LABELLED} sentences of each language (8 epochs at"
            " lr 3e-4, bf16, `--group-by-length`), and what it says of 600 of each; students BiLSTM"
            f" 100,100 with 5k WordPiece, {IN_ALL} epochs over all text in every way of distilling,"
            " shared out among its stages; `D0` a student for each language, scored on it"
            f" (published: mBERT, 41 languages, 300,600). Test: {TESTED} sentences of each"
            " language.",
            "full": "the same languages, all of their text; students as published, 300,600 with the"
            " teacher's vocabulary.",
        },
        WORDS,
        as_it_is("entity F1", "ner", *(f"{{work}}/{name}.test.tsv" for name in LANGUAGES)),
        {
            "D0-S": recipe("tinymbert-d0-s", "--epochs", "40"),
            **{
                of_language(name): recipe(
                    "tinymbert-d0", "--epochs", "60", "--vocab", "{work}/D0-S-0", store=number
                )
                for number, name in enumerate(LANGUAGES, 1)
            },
            "D1": as_long("tinymbert-d1"),
            "D2": as_long("tinymbert-d2"),
            "D3.1": as_long("tinymbert-d3-1", stages=2),
            "D3.2": as_long("tinymbert-d3-2", stages=7),
            "D4.1": as_long("tinymbert-d4-1", stages=3),
            "D4.2": as_long("tinymbert-d4-2", stages=11),
            OURS: as_long("tinymbert-d1", "--loss", "ce=1,kl=1,hidden=30"),
        },
        [
            ("D0-S", "D0", "one model of all languages is better than one for each"),
            ("D1", "D0-S", "logits help"),
            ("D2", "D0-S", "logits and representation help"),
            ("D3.2", "D1", "stages with unfreezing are better than joint training"),
            ("D3.2", "D2", "stages with unfreezing are better than joint training"),
            ("D3.2", "D3.1", "unfreezing is better than end to end, two stages"),
            ("D4.2", "D4.1", "unfreezing is better than end to end, three stages"),
            ("D4.2", "D3.2", "three stages are better than two"),
        ],
        "D4.2",
        tagger,
        {
            "teacher": "91.9",
            "D0": "71.3",
            "D0-S": "81.4",
            "D1": "82.7",
            "D2": "82.4",
            "D3.1": "83.1",
            "D3.2": "86.8",
            "D4.1": "84.8",
            "D4.2": "87.1",
        },
        "mean F1 of 41 languages, all labels and 0.7M sentences to learn from the teacher; Tables 3"
        " and 5 of https://www.aclweb.org/anthology/2020.acl-main.202. With 100 labels a language,"
        " as here: teacher 79.5, D4.2 77.0 (Table 6)",
        {"D0": {name: of_language(name) for name in LANGUAGES}},
    ),
}
"""By the name that the command knows."""
