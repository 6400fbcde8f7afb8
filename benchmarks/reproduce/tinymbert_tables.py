"""TinyMBERT beyond Table 3: few labels (Table 6), texts (7-9), settings (11-14), sizes (15)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reproduce.examples import check_files
from benchmarks.reproduce.mukherjee import (
    FEW_ROWS,
    LARGER,
    LARGER_MODEL,
    SETS,
    file_name,
    of_larger,
    scored,
    with_labels,
)
from benchmarks.reproduce.mukherjee import PUBLISHED as OF_2019
from benchmarks.reproduce.mukherjee import published_teacher as classifiers
from benchmarks.reproduce.reproduction import dump
from benchmarks.reproduce.source import (
    ABOUT,
    OURS,
    TEACHER,
    Arm,
    Claim,
    Prepared,
    Published,
    Source,
    Work,
)
from benchmarks.reproduce.tinymbert import (
    few_tags,
    fine_tuned,
    languages_of,
    published_teacher,
    tested,
)

BASE = "D4.2"
RECIPE = ("--recipe", "tinymbert-d4-2")

# Table 6: gold sentences of each language.
FEW = 100
GOLD_ALONE = f"{BASE}, gold sentences alone"
TABLE_6 = Published(
    "Table 6, with transfer sets of 705K, 1.3M and 7.2M sentences; 4.1K are those with labels",
    ("entity F1, 705K", "entity F1, 1.3M", "entity F1, 7.2M"),
    {TEACHER: (79.54, "", ""), BASE: (76.97, 77.17, 77.26), GOLD_ALONE: (19.12, "", "")},
)

# Tables 11 to 13: the setting of D4.2 is a dropout of .2, batches of 512 texts and layer 7.
DROPOUTS = {"1e-4": 87.94, "0.1": 88.36, "0.3": 88.46, "0.6": 87.26, "0.8": 85.49}
BATCHES = {128: 87.96, 1024: 88.24, 2048: 88.13, 4096: 87.63}
LAYERS = {11: 88.46, 9: 88.31, 6: 88.64, 4: 88.19, 2: 88.50}
SETTINGS = Published(
    "Tables 11 to 13; Table 14 is not in our copy of the paper",
    ("entity F1, Table 11", "entity F1, Table 12", "entity F1, Table 13"),
    {
        BASE: (88.49, 88.4, 88.64),
        **{f"{BASE}, dropout {rate}": (f1, "", "") for rate, f1 in DROPOUTS.items()},
        **{f"{BASE}, batches of {texts}": ("", f1, "") for texts, f1 in BATCHES.items()},
        **{f"{BASE}, layer {layer}": ("", "", f1) for layer, f1 in LAYERS.items()},
    },
)
VECTORS = {"GloVe": "glove.300d.txt", "FastText": "fasttext.300d.txt"}  # optional files
LEVEL = f"{BASE}, layer 6"  # 6.5: the sixth or seventh
RANDOM, PRE_TRAINED = f"{BASE}, random embeddings", f"{BASE}, the pre-trained teacher's embeddings"

# Table 15: widths or depths of students with about equal latency, with F1 and latency of each.
HEADS = 12  # our choice, as the paper does not give them
PAIRS = (
    ((50, 100), (80.26, 0.311), (48, 2), (76.67, 0.307)),
    ((200, 100), (79.21, 0.354), (144, 2), (78.49, 0.357)),
    ((300, 100), (79.63, 0.385), (72, 2), (77.98, 0.388)),
    ((50, 200), (81.22, 0.472), (96, 2), (79.19, 0.47)),
    ((300, 200), (80.04, 0.593), (132, 2), (80.0, 0.6)),
    ((50, 400), (81.98, 0.892), (204, 2), (80.96, 0.88)),
    ((200, 400), (80.61, 0.978), (228, 2), (80.87, 0.979)),
    ((100, 400), (81.54, ""), (240, 2), (80.79, 1.03)),
    ((300, 400), (80.16, 1.06), (252, 2), (80.84, 1.075)),
    ((50, 600), (81.78, 1.5), (228, 3), (83.75, 1.448)),
    ((100, 600), (81.94, 1.53), (240, 3), (84.07, 1.498)),
    ((200, 600), (80.7, 1.628), (252, 3), (84.08, 1.591)),
    ((300, 600), (81.42, 1.766), (276, 3), (84.06, 1.742)),
)


def few_gold(work: Work) -> Prepared:
    """Fine-tune the teacher on few gold sentences of each language, and dump its tags for all text,
    and for the text of these sentences alone."""
    languages = languages_of(work.data)
    alone = [f"{name}.train.tsv" for name in languages or ["LANGUAGE"]]
    check_files(work, (), "all.tsv", "dev.tsv", *alone)
    work.steps.write(functools.partial(_write_few, work.data, work.folder, languages))
    teacher = fine_tuned(work, work.teacher, work.folder)
    words = ("--model", teacher, "--head", "tagging", "--attention", "none", "--hidden", "layer:7")
    like = (work.data / "all.tsv", work.teacher)
    texts = [work.folder / f"{name}.tsv" for name in ("all", "gold")]
    stores = [dump(work, text.with_suffix(".zarr"), text, *words, like=like) for text in texts]
    return Prepared(stores, teacher, [like[0]] * 2)


def _write_few(data: Path, folder: Path, languages: Sequence[str]) -> None:
    def sentences(name: str) -> list[str]:
        return (data / name).read_text("utf-8").strip().split("\n\n")

    folder.mkdir(parents=True, exist_ok=True)
    gold = [sentence for name in languages for sentence in sentences(f"{name}.train.tsv")[:FEW]]
    gold_set = set(gold)
    unlabelled = [sentence for sentence in sentences("all.tsv") if sentence not in gold_set]
    few_tags(gold, folder / "train.tsv", len(gold))
    few_tags([*gold, *unlabelled], folder / "all.tsv", len(gold))
    few_tags([*gold, *gold], folder / "gold.tsv", len(gold))  # the same text without its tags
    dev = sentences("dev.tsv")
    few_tags(dev, folder / "dev.tsv", len(dev))


def table_6(languages: Sequence[str]) -> Source:
    """Return the source with few gold sentences of each language."""
    return Source(
        title=f"TinyMBERT: {FEW} labelled sentences a language",
        about=ABOUT,
        tasks=[tested("{data}", languages)],
        arms={BASE: Arm(RECIPE), GOLD_ALONE: Arm(RECIPE, (1,))},
        claims=[
            Claim("more text without labels makes a better student", "6.3, Table 6", BASE,
                  GOLD_ALONE),
            Claim("the student follows its teacher closely", "6.3, Table 6", TEACHER, BASE,
                  share=0.95),
        ],
        best=BASE,
        prepare=few_gold,
        published=TABLE_6,
    )  # fmt: skip


def settings_teacher(work: Work) -> Prepared:
    """Prepare the stores of the main table, of further layers and of the pre-trained embeddings."""
    layers = ["7", *map(str, LAYERS)]
    prepared = published_teacher(layers, False, work)
    text = work.data / "all.tsv"
    store = dump(
        work, work.folder / "pre-trained.zarr", text, "--model", work.teacher, "--limit", "1000",
        "--logits", "none", "--hidden", "mean", "--attention", "none", "--weights",
    )  # fmt: skip
    return Prepared([*prepared.stores, store], prepared.teacher, [*prepared.texts, text])


def settings(data: Path, languages: Sequence[str]) -> Source:
    """Return the source of dropout, batches, layers and first embeddings."""
    arms = {
        BASE: Arm(RECIPE),
        **{f"{BASE}, dropout {rate}": Arm((*RECIPE, "--dropout", rate)) for rate in DROPOUTS},
        **{f"{BASE}, batches of {n}": Arm((*RECIPE, "--batch-texts", str(n))) for n in BATCHES},
        **{f"{BASE}, layer {layer}": Arm(RECIPE, (n,)) for n, layer in enumerate(LAYERS, 1)},
        RANDOM: Arm((*RECIPE, "--init", "random")),
        PRE_TRAINED: Arm((*RECIPE, "--init", "svd:{work}/pre-trained.zarr")),
    }
    vectors = {name: file for name, file in VECTORS.items() if (data / file).is_file()}
    for name, file in vectors.items():
        words = ("--init", "random", "--word-vectors", f"{{data}}/{file}")
        arms[f"{BASE}, {name}"] = Arm((*RECIPE, *words))
    best = {"a dropout of .2 is the best": ("A.2, Table 11", "dropout"),
            "batches of 512 texts are the best": ("A.2, Table 12", "batches"),
            "layer 7 teaches best": ("6.5, Table 13", "layer")}  # fmt: skip
    return Source(
        title="TinyMBERT: settings",
        about=ABOUT + " PCA and the unreduced embeddings of Table 14 are not among the arms.",
        tasks=[tested("{data}", languages)],
        arms=arms,
        claims=[
            *(
                Claim(says, where, BASE, arm)
                for says, (where, kind) in best.items()
                for arm in arms
                if arm.startswith(f"{BASE}, {kind}") and arm != LEVEL
            ),
            *(
                Claim("SVD of the fine-tuned teacher's embeddings is the best start",
                      "6.4, Table 14", BASE, arm)
                for arm in (RANDOM, PRE_TRAINED, *(f"{BASE}, {name}" for name in vectors))
            ),
        ],
        best=BASE,
        prepare=settings_teacher,
        published=SETTINGS,
    )  # fmt: skip


def sizes(languages: Sequence[str]) -> Source:
    """Return the source of BiLSTMs and transformers with about equal latency."""
    arms, rows, claims = {}, {}, []
    for (width, hidden), of_lstm, (size, depth), of_transformer in PAIRS:
        lstm, transformer = f"BiLSTM {width},{hidden}", f"transformer {size}x{depth}"
        for name, student, figures in (
            (lstm, f"bilstm:{width},{hidden}", of_lstm),
            (transformer, f"bert:{size}x{depth}x{HEADS}", of_transformer),
        ):
            arms[name] = Arm(("--recipe", "tinymbert-d0-s", "--student", student))
            rows[name] = figures
        if hidden <= 200:
            says = "where latency is low, BiLSTMs beat transformers of two layers"
            claims.append(Claim(says, "6.5, Table 15", lstm, transformer))
        elif depth > 2:
            says = "transformers of three layers beat BiLSTMs that take as long"
            claims.append(Claim(says, "6.5, Table 15", transformer, lstm))
    return Source(
        title="TinyMBERT: BiLSTMs and transformers",
        about=ABOUT + f" Transformers have {HEADS} heads. `benchmarks.latency` measures latencies.",
        tasks=[tested("{data}", languages)],
        arms=arms,
        claims=claims,
        best="BiLSTM 50,200",
        prepare=functools.partial(published_teacher, ("7",), False),
        published=Published("Table 15", ("entity F1", "latency"), rows),
    )


FIGURES = {  # by data set: the Base teacher, the Large teacher, and their students
    "SST-2": (92.78, 94.95, 92.89, 93.35),
}
OF_FEW = 500  # labels of a class
FEW_ARMS = {TEACHER: TEACHER, "none": "none", BASE: "stagewise"}  # with the names of 2019
TEXTS = ("--recipe", "tinymbert-text")
OUR_TEXTS = ("--recipe", "tinymbert-d1", "--loss", "ce=1,kl=1,hidden=30")


def texts(data_set: str, larger: bool, per_class: int | None = None) -> Source:
    """Return the source of one data set of texts, with all its labels or some of each class.

    The larger teacher, if it exists, has a student in addition; with few labels it is the teacher.
    """
    name = file_name(data_set)
    arms = {BASE: Arm(TEXTS), "none": Arm(("--recipe", "simple-no-distillation"))}
    claims = [
        Claim("the student has its teacher's accuracy (on average in the paper)",
              "6.6, Tables 7 to 9", TEACHER, BASE, gains=False),
        Claim("distillation beats none", "6.6, Table 9", BASE, "none"),
    ]  # fmt: skip
    models, rows = {}, {}
    if per_class is not None:
        figures, column = OF_2019.rows, SETS.index(data_set)
        rows = {arm: (figures[FEW_ROWS[per_class][row]][column],) for arm, row in FEW_ARMS.items()}
    elif data_set in FIGURES:
        row_names = (TEACHER, LARGER, BASE, of_larger(BASE))
        rows = {row: (figure,) for row, figure in zip(row_names, FIGURES[data_set], strict=True)}
    if larger and per_class is None:
        models = {LARGER: LARGER_MODEL}
        arms[of_larger(BASE)] = Arm(TEXTS, (1,))
        says = "a better teacher gives a better student"
        claims.append(Claim(says, "6.6, Tables 7 and 8", of_larger(BASE), BASE))
    arms[OURS] = Arm(OUR_TEXTS)
    where = "Table 7" if data_set in FIGURES else "Table 8, whose figures our copy lacks"
    return Source(
        title=f"TinyMBERT: {with_labels(data_set, per_class)}",
        about=ABOUT + " `none` is that of the paper of 2019.",
        tasks=[scored(data_set, f"{{data}}/{name}.test.tsv")],
        arms=arms,
        claims=claims,
        best=BASE,
        prepare=functools.partial(classifiers, name, per_class, False, ()),
        models=models,
        published=Published(
            "Table 10 of 2019; Table 9 is not in our copy" if per_class else where,
            (f"{data_set} accuracy",),
            rows,
        ),
    )


def full(data: Path, larger: bool = False) -> dict[str, Source]:
    """Return the published tables, including the tables of texts if the user's folder has the
    texts."""
    languages = languages_of(data)
    sources = {
        "tinymbert-100": table_6(languages),
        "tinymbert-settings": settings(data, languages),
        "tinymbert-sizes": sizes(languages),
    }
    for data_set in ("SST-2", *SETS):
        name = file_name(data_set)
        if (data / f"{name}.all.tsv").is_file():
            sources[f"tinymbert-{name}"] = texts(data_set, larger)
            if data_set in SETS:
                sources[f"tinymbert-{name}-{OF_FEW}"] = texts(data_set, larger, OF_FEW)
    return sources


SMALL: dict[str, Source] = {}
