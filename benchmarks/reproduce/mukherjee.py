"""Mukherjee & Awadallah 2019: BiLSTM classifiers from few labels. The rows of Tables 5 to 12."""

from __future__ import annotations

import functools
import random
from pathlib import Path

from benchmarks.common.results import SHARED
from benchmarks.common.results import TEACHER as MINILM
from benchmarks.reproduce.costs import size_of
from benchmarks.reproduce.examples import check_files
from benchmarks.reproduce.reproduction import downstream, dump
from benchmarks.reproduce.source import (
    OURS,
    TEACHER,
    Arm,
    Claim,
    Prepared,
    Published,
    Source,
    Task,
    Work,
)

DATA = SHARED / "data"
SST2 = DATA / "classify/en_sst2.train.tsv", DATA / "classify/en_sst2.dev.tsv"
SNIPS = DATA / "intent/en_snips.train.tsv", DATA / "intent/en_snips.valid.tsv"
UNLABELLED = 4000  # texts, at most
DEV = 500
MEASURE = "accuracy"
STEERED_BY = 100  # labels that are held out to choose the best weights by: 20 choose at random
RECIPES = {"none": "simple-no-distillation"}

SETS = ("AG News", "IMDB", "Elec", "DBpedia")
PUBLISHED = Published(
    "Tables 5, 8, 11 and 12; with BERT Base, where nothing else is said",
    SETS,
    {
        TEACHER: (92.12, 91.70, 93.46, 99.26),
        "rnn": (87.66, 89.93, 89.72, 98.44),
        "none": (89.71, 89.37, 90.62, 98.64),
        "stagewise": (92.33, 91.22, 93.55, 99.10),
        "joint": (92.17, 90.07, 93.12, 99.08),
        "once": (92.26, 90.87, 93.10, 99.08),
        "BERT Large": (94.63, 93.22, 94.27, 99.20),
        "stagewise, of Large": (94.33, 91.70, 93.56, 99.06),
        "hard, of Large": (93.17, 91.21, 92.57, 98.97),
        "none, 500 a class": (85.85, 61.53, 65.68, 96.30),
        "stagewise, 500 a class, of Large": (90.45, 89.08, 91.00, 98.94),
        "BERT Large, 500 a class": (90.36, 89.11, 90.41, 98.94),
        "hard, 100 a class, of Large": ("", 87.37, 89.17, ""),
        "stagewise, 100 a class, of Large": ("", 87.84, 90.14, ""),
    },
)
CLAIMS = (
    Claim("stagewise beats joint", "6.5, Table 12", "stagewise", "joint"),
    Claim("stagewise beats once", "6.5, Table 12", "stagewise", "once"),
    Claim("soft targets beat hard ones", "6.3, Tables 8 and 11", "stagewise", "hard"),
    Claim("distillation beats none", "6.1, Tables 5 and 10", "stagewise", "none"),
    Claim("even hard distillation beats none", "6.6", "hard", "none"),
    Claim("max pooling and word pieces are slightly better than the RNN", "6.1, Table 5", "none",
          "rnn"),
    Claim("the teacher is not ahead of the distilled student", "6.4, Tables 10 and 11", TEACHER,
          "stagewise", gains=False),
)  # fmt: skip


def arms(*words: str, vocab: str = "") -> dict[str, Arm]:
    """Name the arms. Each is trained until its validations stand still, as the recipes have it; the
    RNN has the words of its recipe in place of `vocab`."""
    pieces = ("--vocab", vocab) if vocab else ()
    found = {}
    for name in ("rnn", "none", "hard", "joint", "stagewise", "once"):
        own = () if name == "rnn" else pieces
        found[name] = Arm(("--recipe", RECIPES.get(name, f"simple-{name}"), *own, *words))
    losses = ("--loss", "ce=1,kl=1,hidden=30")
    return found | {OURS: Arm(("--recipe", "simple-joint", *pieces, *words, *losses))}


def few_labels(
    path: Path, work: Path, per_class: int, unlabelled: int = UNLABELLED
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


def classifier(files: tuple[Path, Path], per_class: int, work: Work) -> Prepared:
    """Fine-tune MiniLM on few labels, and dump what it says of all the text."""
    few, dev, whole = (work.folder / f"{name}.tsv" for name in ("few", "dev", "all"))
    work.steps.write(lambda: few_labels(files[0], work.folder, per_class))
    words = ("--task", "classify", "--model", MINILM, "--train", few, "--dev", dev)
    short = ("--epochs", "8", "--seeds", "1")
    downstream(work, work.folder / "teacher", *words, *short, "--save")
    return task_store(work, work.folder / "teacher/model", whole, "layer:6")


def task_store(work: Work, teacher: Path, text: Path, hidden: str) -> Prepared:
    """Dump the classes that a fine-tuned teacher gives to texts, and its last states."""
    store = dump(
        work, work.folder / "classes.zarr", text, "--model", teacher, "--head", "classification",
        "--label-column", "label", "--text-column", "text", "--hidden", hidden, "--attention",
        "none",
    )  # fmt: skip
    return Prepared([store], teacher, [text])


def small(
    called: str, files: tuple[Path, Path], per_class: int, classes: int, vocab: str
) -> Source:
    """Return the source on a task with few labels, whose text gives so many pieces."""
    held_out = max(0.1, STEERED_BY / (per_class * classes))
    return Source(
        title=f"Mukherjee & Awadallah 2019 in miniature: {called}, {per_class} labels a class",
        about=(
            f"{called}: a MiniLM fine-tuned on {per_class} labels of each"
            f" class, and what it says of at most {UNLABELLED:,} texts without labels; students"
            f" BiLSTM 100,100 with {vocab} WordPiece, the RNN with its words (published: 300,600,"
            " the teacher's vocabulary, GloVe). Every stage, and every part that is unfrozen, is"
            " trained until its validation stands still; it has"
            f" {held_out * per_class * classes:.0f} labels. Test: the official dev set."
        ),
        words=(),
        tasks=[Task(called, MEASURE, ("--task", "classify", "--test", str(files[1]), "--as-is"))],
        arms=arms(
            "--student", "bilstm:100,100", "--held-out", f"{held_out:.3g}", vocab=vocab
        ),
        claims=CLAIMS,
        best="stagewise",
        prepare=functools.partial(classifier, files, per_class),
        published=PUBLISHED,
    )  # fmt: skip


SMALL = (small("SST-2", SST2, 500, 2, "5k"), small("SNIPS intents", SNIPS, 100, 7, "4k"))


def published_teacher(name: str, work: Work) -> Prepared:
    """Fine-tune the user's own teacher on the labelled texts of a data set, and dump what it says
    of these and of those without a label."""
    train, dev, whole = (work.data / f"{name}.{part}.tsv" for part in ("train", "dev", "all"))
    check_files(work, (), train.name, dev.name, whole.name, f"{name}.test.tsv", "glove.300d.txt")
    words = ("--task", "classify", "--model", work.teacher, "--train", train, "--dev", dev)
    downstream(work, work.folder / "teacher", *words, "--seeds", "1", "--save")
    last = size_of(work.teacher).layers
    return task_store(work, work.folder / "teacher/model", whole, f"layer:{last}")


def full(called: str) -> Source:
    """Return the published setting of one data set."""
    name = called.lower().replace(" ", "_")
    test = ("--test", f"{{data}}/{name}.test.tsv")
    return Source(
        title=f"Mukherjee & Awadallah 2019: {called}",
        about="the published setting with the teacher and the data given.",
        words=(),
        tasks=[Task(called, MEASURE, ("--task", "classify", *test, "--as-is"))],
        arms=arms("--word-vectors", "{data}/glove.300d.txt"),
        claims=CLAIMS,
        best="stagewise",
        prepare=functools.partial(published_teacher, name),
        published=PUBLISHED,
    )


FULL = tuple(full(called) for called in SETS)
