"""Mukherjee & Awadallah 2019: BiLSTM classifiers from few labels. The rows of Tables 5 to 12."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.special import softmax

from benchmarks.common.results import SHARED
from benchmarks.common.results import TEACHER as MINILM
from benchmarks.reproduce.costs import size_of
from benchmarks.reproduce.examples import check_files
from benchmarks.reproduce.reproduction import downstream, dump, trained_teacher
from benchmarks.reproduce.source import (
    ABOUT,
    OURS,
    TEACHER,
    Arm,
    Claim,
    Model,
    Prepared,
    Published,
    Source,
    Task,
    Work,
)
from teachonce.store import FeatureStore, open_store

DATA = SHARED / "data"
SST2 = DATA / "classify/en_sst2.train.tsv", DATA / "classify/en_sst2.dev.tsv"
SNIPS = DATA / "intent/en_snips.train.tsv", DATA / "intent/en_snips.valid.tsv"
UNLABELLED = 4000  # texts, at most
DEV = 500
MEASURE = "accuracy"
STEERED_BY = 100  # labels that are held out to choose the best weights by: 20 choose at random
RECIPES = {"none": "simple-no-distillation"}

SETS = ("AG News", "IMDB", "Elec", "DBpedia")
LARGER = "BERT Large"  # the row of a second, larger teacher


def of_larger(arm: str) -> str:
    """Return the name of an arm that is trained on the larger teacher."""
    return f"{arm}, of Large"


PUBLISHED = Published(
    "Tables 5, 6, 8, 10, 11 and 12. The published teacher is BERT Base unless another is named",
    tuple(f"{name} {MEASURE}" for name in SETS),
    {
        TEACHER: (92.12, 91.70, 93.46, 99.26),
        "rnn": (87.66, 89.93, 89.72, 98.44),
        "none": (89.71, 89.37, 90.62, 98.64),
        "stagewise": (92.33, 91.22, 93.55, 99.10),
        "joint": (92.17, 90.07, 93.12, 99.08),
        "once": (92.26, 90.87, 93.10, 99.08),
        LARGER: (94.63, 93.22, 94.27, 99.20),
        "stagewise, of Large": (94.33, 91.70, 93.56, 99.06),
        "joint, of Large": (93.90, 90.84, 93.16, 99.06),
        "once, of Large": (93.78, 90.89, 93.35, 99.04),
        "hard, of Large": (93.17, 91.21, 92.57, 98.97),
        "RNN, 500 a class": (85.03, 52.94, 68.93, 93.33),
        "none, 500 a class": (85.85, 61.53, 65.68, 96.30),
        "stagewise, 500 a class, of Large": (90.45, 89.08, 91.00, 98.94),
        "BERT Large, 500 a class": (90.36, 89.11, 90.41, 98.94),
        "BERT Large, 100 a class": ("", 87.72, 89.94, ""),
        "hard, 100 a class, of Large": ("", 87.37, 89.17, ""),
        "stagewise, 100 a class, of Large": ("", 87.84, 90.14, ""),
    },
)
CLAIMS = (
    Claim("stagewise beats joint", "6.5, Table 12", "stagewise", "joint"),
    Claim("stagewise beats once", "6.5, Table 12", "stagewise", "once"),
    Claim("soft targets beat hard ones", "6.3, Tables 8 and 11", "stagewise", "hard",
          rows=("stagewise, of Large", "hard, of Large")),
    Claim("distillation beats none (on average in the paper)", "6.1, Tables 5 and 10",
          "stagewise", "none"),
    Claim("even hard distillation beats none", "Tables 5 and 8", "hard", "none",
          rows=("hard, of Large", "none")),
    Claim("max pooling and word pieces are slightly better than the RNN (on average in the paper)",
          "6.1, Table 5", "none", "rnn"),
    Claim("the teacher is not ahead of the distilled student (on average in the paper)",
          "6.4, Tables 10 and 11", TEACHER, "stagewise", gains=False),
)  # fmt: skip
OF_BOTH = (
    Claim("a better teacher helps a little (on average in the paper)", "6.2, Table 6",
          of_larger("stagewise"), "stagewise"),
    Claim("soft targets beat hard ones", "6.3, Table 8", of_larger("stagewise"),
          of_larger("hard")),
    *(
        Claim(f"stagewise beats {other}", "6.5, Table 12", of_larger("stagewise"),
              of_larger(other))
        for other in ("joint", "once")
    ),
)  # fmt: skip
FEW_ROWS = {  # by the labels per class: rows of PUBLISHED by their arm
    500: {TEACHER: "BERT Large, 500 a class", "rnn": "RNN, 500 a class",
          "none": "none, 500 a class", "stagewise": "stagewise, 500 a class, of Large"},
    100: {TEACHER: "BERT Large, 100 a class", "hard": "hard, 100 a class, of Large",
          "stagewise": "stagewise, 100 a class, of Large"},
}  # fmt: skip
VECTORS = "glove.300d.txt"
ARMS = ("rnn", "none", "hard", "joint", "stagewise", "once")


ALL_LABELS = {row: f"{row}, all labels" for row in (TEACHER, *ARMS)}  # rows in a table of few


def claims_of(per_class: int) -> tuple[Claim, ...]:
    """List the claims with the published rows for this number of labels per class, or for all
    labels if there are none."""
    few, claims = FEW_ROWS[per_class], []
    for claim in CLAIMS:
        better, worse = claim.rows or (claim.better, claim.worse)
        rows = (ALL_LABELS.get(better, better), ALL_LABELS.get(worse, worse))
        if {claim.better, claim.worse} <= few.keys():
            rows = (few[claim.better], few[claim.worse])
        claims.append(replace(claim, rows=rows))
    return tuple(claims)


def few_labels_published(per_class: int) -> Published:
    """Return the published figures with the rows of the arms for this number of labels per class,
    which are for BERT Large."""
    rows = {ALL_LABELS.get(row, row): figures for row, figures in PUBLISHED.rows.items()}
    rows |= {arm: PUBLISHED.rows[row] for arm, row in FEW_ROWS[per_class].items()}
    table = {500: 10, 100: 11}[per_class]
    where = f"Table {table} in the rows ({per_class} labels per class, BERT Large); in the claims,"
    return replace(PUBLISHED, where=f"{where} {PUBLISHED.where}", rows=rows)


LARGER_MODEL = Model("{work}/larger/model")  # that `published_teacher` fine-tunes


def arms(*words: str, vocab: str = "") -> dict[str, Arm]:
    """Name the arms. Each is trained until its validation loss is constant, as in the recipes; the
    RNN uses the words of its recipe instead of `vocab`."""
    pieces = ("--vocab", vocab) if vocab else ()
    table_arms = {}
    for name in ARMS:
        options = () if name == "rnn" else pieces
        table_arms[name] = Arm(("--recipe", RECIPES.get(name, f"simple-{name}"), *options, *words))
    losses = ("--loss", "ce=1,kl=1,hidden=30")
    return table_arms | {OURS: Arm(("--recipe", "simple-joint", *pieces, *words, *losses))}


def few_labels(
    rows: Sequence[str], per_class: int, unlabelled: int | None = None
) -> tuple[list[str], list[str]]:
    """Return the first few rows of each class, and at most `unlabelled` others without their
    labels. A row is a text, a tab and a label, which may be empty."""
    remaining = Counter(dict.fromkeys({row.rpartition("\t")[2] for row in rows} - {""}, per_class))
    few, all_rows, count = [], [], 0
    for row in rows:
        text, _, label = row.rpartition("\t")
        if remaining[label] > 0:
            remaining[label] -= 1
            few.append(row)
            all_rows.append(row)
        elif unlabelled is None or count < unlabelled:
            count += 1
            all_rows.append(f"{text}\t")
    return few, all_rows


def _write(folder: Path, head: str, **tables: Sequence[str]) -> None:
    for name, rows in tables.items():
        (folder / f"{name}.tsv").write_text("\n".join([head, *rows]) + "\n", "utf-8")


def _rows(path: Path) -> tuple[str, list[str]]:
    head, *rows = path.read_text("utf-8").removesuffix("\n").split("\n")  # a text may have U+0085
    return head, rows


def cut_labels(path: Path, folder: Path, per_class: int) -> None:
    """Split a table of texts and labels: few.tsv, dev.tsv to choose the epoch by, all.tsv to learn
    from, and rest.tsv, which neither teacher nor students read."""
    head, rows = _rows(path)
    random.Random(0).shuffle(rows)
    dev, rows = rows[:DEV], rows[DEV:]
    few, all_rows = few_labels(rows, per_class, UNLABELLED)
    texts = {row.rpartition("\t")[0] for row in (*all_rows, *dev)}
    rest = [row for row in rows if row.rpartition("\t")[0] not in texts]
    _write(folder, head, few=few, dev=dev, all=all_rows, rest=rest)


def fine_tuned(work: Work, name: str, model: str | Path, *words: str | Path) -> Path:
    """Fine-tune a teacher on labelled texts, in a folder of that name, and return the model."""
    arguments = ("--task", "classify", "--model", model, *words, "--seeds", "1", "--save")
    downstream(work, work.folder / name, *arguments)
    return work.folder / name / "model"


def classifier(files: tuple[Path, Path], per_class: int, work: Work) -> Prepared:
    """Fine-tune MiniLM on few labels, and dump its outputs for all the text."""
    few, dev, all_texts = (work.folder / f"{name}.tsv" for name in ("few", "dev", "all"))
    work.steps.write(lambda: cut_labels(files[0], work.folder, per_class))
    teacher = fine_tuned(work, "teacher", MINILM, "--train", few, "--dev", dev, "--epochs", "8")
    store = task_store(work, teacher, all_texts, "layer:6")
    return Prepared([store], teacher, [all_texts])


def task_store(
    work: Work,
    teacher: Path,
    text: Path,
    hidden: str,
    name: str = "classes",
    like: tuple[Path, str] | None = None,
) -> Path:
    """Dump the classes that a fine-tuned teacher predicts for texts, and its last states."""
    return dump(
        work, work.folder / f"{name}.zarr", text, "--model", teacher, "--head", "classification",
        "--label-column", "label", "--text-column", "text", "--hidden", hidden, "--attention",
        "none", like=like,
    )  # fmt: skip


TABLE_9 = "IMDB .240 and .249 of .250, Elec .239 and .247, AG News .173 and .185 of .188"


def variances(work: Work) -> str:
    """Return the variance of the teachers' probabilities (6.3, Table 9), as a sentence."""
    paths = {name: work.folder / f"{name}.zarr" for name in ("classes", "larger")}
    figures = []
    for name, path in paths.items():
        if path.exists():
            with closing(open_store(path)) as store:
                of_texts = probability_variance(store)
                assert store.task is not None
                maximum = (1 - 1 / len(store.task.labels)) / len(store.task.labels)
            teacher = TEACHER if name == "classes" else LARGER
            figures.append(f"{teacher} {of_texts:.3f} (hard labels {maximum:.3f})")
    return (
        "Variance of the teacher's probabilities, averaged over the texts of its store:"
        f" {', '.join(figures)}. Published, Table 9, BERT Base and Large: {TABLE_9}."
    )


def probability_variance(store: FeatureStore) -> float:
    """Return the variance over the classes of a text's probabilities, mean over all texts (6.3)."""
    total = 0.0
    for batch in store.stream(features="task"):
        logits = np.asarray(batch.class_logits, np.float64)
        total += float(softmax(logits, axis=1).var(axis=1).sum())
    return total / len(store)


def scored(data_set: str, test: str) -> Task:
    """Return the task that scores a classifier as it is on a file of a data set."""
    return Task(data_set, MEASURE, ("--task", "classify", "--test", test, "--as-is"))


def with_labels(data_set: str, per_class: int | None) -> str:
    """Return a data set and how many labels of each class are used, for a title."""
    return data_set if per_class is None else f"{data_set}, {per_class} labels a class"


def small(
    data_set: str,
    files: tuple[Path, Path],
    per_class: int,
    classes: int,
    vocab: str,
    test: str = "",
) -> Source:
    """Return the source on a task with few labels. It is tested on the second of the files, or on
    `test`."""
    tested = "the other texts of the training set" if test else "the official dev set"
    held_out = max(0.1, STEERED_BY / (per_class * classes))
    return Source(
        title=f"Mukherjee & Awadallah 2019 in miniature: {with_labels(data_set, per_class)}",
        about=(
            f"Data: {data_set}; test set: {tested}."
            f" Teacher: a MiniLM fine-tuned on {per_class} labels of each class; its outputs are"
            f" stored for at most {UNLABELLED:,} texts without labels. Students: BiLSTM 100,100"
            f" with {vocab}"
            " WordPiece; the vocabulary of the RNN is the words of the texts (published: 300,600,"
            " the teacher's vocabulary, GloVe). Each stage, and each part that is unfrozen, is"
            " trained until the validation score stops improving; the validation set has"
            f" {held_out * per_class * classes:.0f} labels."
        ),
        tasks=[scored(data_set, test or str(files[1]))],
        arms=arms(
            "--student", "bilstm:100,100", "--held-out", f"{held_out:.3g}", vocab=vocab
        ),
        claims=claims_of(per_class),
        best="stagewise",
        prepare=functools.partial(classifier, files, per_class),
        remark=variances,
        published=few_labels_published(per_class),
    )  # fmt: skip


SMALL = {
    "mukherjee-1": small("SST-2", SST2, 500, 2, "5k"),
    "mukherjee-2": small("SNIPS intents", SNIPS, 100, 7, "4k"),
}


def file_name(data_set: str) -> str:
    """Return the prefix of the file names of a data set."""
    return data_set.lower().replace(" ", "_").replace("-", "")


def published_teacher(
    name: str, per_class: int | None, again: bool, needs: Sequence[str], work: Work
) -> Prepared:
    """Fine-tune the user's own teachers on the labelled texts of a data set, and dump their outputs
    for the labelled and the unlabelled texts.

    per_class: labels of each class that are used; all by default.
    again: whether the teachers are first trained on over all the text as masked LMs (6.4).
    needs: further files of the user's folder.
    """
    train, dev, all_texts = (work.data / f"{name}.{part}.tsv" for part in ("train", "dev", "all"))
    check_files(work, (), train.name, dev.name, all_texts.name, f"{name}.test.tsv", *needs)
    text = all_texts
    if per_class is not None:
        train, text = work.folder / "few.tsv", work.folder / "all.tsv"
        work.steps.write(lambda: _cut_published(all_texts, work.folder, per_class))
    models = {"classes": work.teacher, "larger": work.larger}
    if per_class is not None and work.larger:
        models = {"classes": work.larger}
    stores, teachers = [], []
    for role, model in models.items():
        if model:
            start = _trained_on(model, role, work, all_texts) if again else model
            out = "teacher" if role == "classes" else role
            teachers.append(fine_tuned(work, out, start, "--train", train, "--dev", dev))
            hidden = f"layer:{size_of(model).layers}"
            stores.append(task_store(work, teachers[-1], text, hidden, role, (all_texts, model)))
    return Prepared(stores, teachers[0], [all_texts] * len(stores))


def _cut_published(all_texts: Path, folder: Path, per_class: int) -> None:
    head, rows = _rows(all_texts)
    random.Random(0).shuffle(rows)  # tables are often sorted by label
    few, all_rows = few_labels(rows, per_class)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, head, few=few, all=all_rows)
    texts = (row.rpartition("\t")[0] for row in rows)
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts), "utf-8")


def _trained_on(model: str, role: str, work: Work, all_texts: Path) -> Path:
    batch = ("--batch-size", work.scaled(32))  # the length is not published: `downstream`'s default
    words = ("--model", model, "--train", work.folder / "texts.txt", *batch)
    return trained_teacher(work, work.folder / f"{role}-again", *words, like=all_texts)


def published_set(data_set: str, larger: bool, per_class: int | None = None) -> Source:
    """Return the published setting of one data set, with all its labels or some of each class.

    With few labels, the teacher is the larger one if it exists, as published.
    """
    name, column = file_name(data_set), SETS.index(data_set)
    rows = {row: (figures[column],) for row, figures in PUBLISHED.rows.items()}
    table_arms, claims = arms("--word-vectors", f"{{data}}/{VECTORS}"), [*CLAIMS]
    if per_class is not None or larger:  # the rows have the arms' names
        claims = [replace(claim, rows=None) for claim in CLAIMS]
    if per_class is None:  # Tables 5 and 6 have teachers that are ahead
        claims = [claim for claim in claims if claim.better != TEACHER]
    models = {}
    if per_class is not None:
        rows = {arm: rows[row] for arm, row in FEW_ROWS[per_class].items()}
    elif larger:
        models = {LARGER: LARGER_MODEL}
        table_arms |= {
            of_larger(arm): replace(table_arms[arm], stores=(1,))
            for arm in ("hard", "joint", "stagewise", "once")
        }
        claims += OF_BOTH
    return Source(
        title=f"Mukherjee & Awadallah 2019: {with_labels(data_set, per_class)}",
        about=ABOUT,
        tasks=[scored(data_set, f"{{data}}/{name}.test.tsv")],
        arms=table_arms,
        claims=claims,
        best="stagewise",
        prepare=functools.partial(
            published_teacher, name, per_class, per_class == 100, (VECTORS,)
        ),
        models=models,
        remark=variances,
        published=Published(PUBLISHED.where, (f"{data_set} {MEASURE}",), rows),
    )  # fmt: skip


def full(data: Path, larger: bool = False) -> dict[str, Source]:
    """Return the published tables: each data set with all labels, with 500 and with 100 a class."""
    sources = {f"mukherjee-{file_name(title)}": published_set(title, larger) for title in SETS}
    for per_class, sets in ((500, SETS), (100, ("IMDB", "Elec"))):
        for title in sets:
            name = f"mukherjee-{file_name(title)}-{per_class}"
            sources[name] = published_set(title, larger, per_class)
    return sources
