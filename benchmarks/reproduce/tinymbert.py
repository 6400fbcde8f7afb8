"""Mukherjee & Awadallah 2020 (TinyMBERT): taggers of many languages, all arms of Table 3."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.results import SHARED
from benchmarks.common.results import TEACHER as MINILM
from benchmarks.reproduce.examples import PARTS, check_files
from benchmarks.reproduce.mukherjee import SETS, file_name
from benchmarks.reproduce.reproduction import downstream, dump
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

DATA = SHARED / "data"
LANGUAGES = ("de", "en", "fr", "nl", "pt", "sk", "sv")
LABELLED, TESTED, UNLABELLED = 100, 500, 600  # sentences of a language
MEASURE = "entity F1"
EACH = 8  # epochs for every unfrozen part, equal for all as in section 5.3
STILL = ("--patience", "3")  # a part that no longer improves ends early
LABELLED_ALONE = 40  # epochs if there are only labelled sentences
BATCH = 32  # texts: of the published 512 there would be no more than seven batches in an epoch
RATE = "8e-3"  # of 1e-3, 3e-3 and 8e-3 the best for D1 by held-out loss
IN_MINIATURE = ("--student", "bilstm:100,100", "--vocab", "5k", "--batch-texts", str(BATCH),
                "--lr", RATE)  # fmt: skip
DISTILLED = ("D1", "D2", "D3.1", "D3.2", "D4.1", "D4.2")
SINGLE = "a teacher of each language"
TABLE_3 = Published(
    "Table 3: mean and standard deviation over 41 languages, with 0.7, 1.4 and 7.2M sentences"
    " without labels. The teachers are from Table 5, which compares them with D4.2 of 1.4M;"
    " `D4.2, last layer` is from Table 13",
    ("entity F1, 0.7M", "deviation", "entity F1, 1.4M", "deviation", "entity F1, 7.2M",
     "deviation"),
    {
        TEACHER: ("", "", 91.86, 2.7, "", ""),
        SINGLE: ("", "", 90.76, 3.1, "", ""),
        "D0": (71.26, 6.2, "", "", "", ""),
        "D0-S": (81.44, 5.3, "", "", "", ""),
        "D1": (82.74, 5.1, 84.52, 4.8, 85.94, 4.8),
        "D2": (82.38, 5.2, 83.78, 4.9, 85.87, 4.9),
        "D3.1": (83.10, 5.0, 84.38, 5.1, 86.35, 4.9),
        "D3.2": (86.77, 4.3, 87.79, 4.0, 88.26, 4.3),
        "D4.1": (84.82, 4.7, 87.07, 4.2, 87.87, 4.1),
        "D4.2": (87.10, 4.2, 88.64, 3.8, 88.52, 4.1),
        "D4.2, last layer": ("", "", 88.46, 3.8, "", ""),
    },
)  # fmt: skip
COMPRESSED = "D4.2, 50 and 200 wide"


def claims(compressed: str = "D4.2") -> tuple[Claim, ...]:
    """List the paper's claims; `compressed` is the arm that the paper calls small enough."""
    return (
        Claim("one student of all languages beats one of each", "6.1, Table 3", "D0-S", "D0"),
        Claim("logits beat gold tags alone", "6.1, Table 3", "D1", "D0-S"),
        Claim("hidden states in addition to logits, trained jointly, hurt", "6.1, Table 3",
              "D1", "D2"),
        Claim("two stages beat joint training", "6.1, Table 3", "D3.1", "D2"),
        Claim("unfreezing improves two stages", "6.1, Table 3", "D3.2", "D3.1"),
        Claim("unfreezing improves three stages", "6.1, Table 3", "D4.2", "D4.1"),
        Claim("three stages beat two", "Table 3", "D4.1", "D3.1"),
        Claim("the student reaches 95 % of the teacher's score", "abstract, Table 5", TEACHER,
              compressed, share=0.95, rows=(TEACHER, "D4.2")),
        Claim("one teacher of all languages beats one of each", "6.2, Table 5", TEACHER, SINGLE),
        Claim("D4.2 is the best", "6.1, Table 3", "D4.2", "D3.2"),
        Claim("a middle layer is a better target than the last", "A, Table 13", "D4.2",
              "D4.2, last layer"),
    )  # fmt: skip


def arms(*words: str, languages: Sequence[str], short: bool) -> dict[str, Arm]:
    """Name the arms. The stores have, in order: all text and a middle layer; all text and the last
    layer; the gold sentences of each language."""
    alone = ("--epochs", str(LABELLED_ALONE)) if short else ()
    length = ("--epochs", str(EACH), *STILL) if short else ()
    table_arms = {"D0-S": Arm(("--recipe", "tinymbert-d0-s", *words, *alone))}
    for store, language in enumerate(languages, 2):
        arguments = ("--recipe", "tinymbert-d0", *words, *alone, "--vocab", "{work}/D0-S-{seed}")
        table_arms[of_language(language)] = Arm(arguments, (store,))
    for name in DISTILLED:
        recipe = "tinymbert-" + name.lower().replace(".", "-")
        table_arms[name] = Arm(("--recipe", recipe, *words, *length))
    table_arms["D4.2, last layer"] = Arm(table_arms["D4.2"].words, (1,))
    ours = ("--recipe", "tinymbert-d1", *words, "--loss", "ce=1,kl=1,hidden=30")
    return table_arms | {OURS: Arm((*ours, *length))}


def of_language(name: str) -> str:
    return f"D0 {name}"


def sentences_of(language: str, split: str) -> list[str]:
    """Load sentences of WikiANN, or of Universal NER if it has the language."""
    (path,) = (DATA / "ner").glob(f"{language}_*.{split}.tsv")
    return path.read_text("utf-8").strip().split("\n\n")


def few_tags(sentences: Sequence[str], out: Path, labelled: int) -> Path:
    """Write a token/tag file with the tags of the first few sentences alone."""
    lines = []
    for number, sentence in enumerate(sentences):
        for line in sentence.split("\n"):
            word, _, tag = line.partition("\t")
            lines.append(f"{word}\t{tag if number < labelled else ''}")
        lines.append("")
    out.write_text("\n".join(lines) + "\n", "utf-8")
    return out


# At the default rate it takes twice as many epochs.
TEACHER_LENGTH = ("--epochs", "8", "--lr", "3e-4", "--precision", "bf16")
# The first Swedish sentences have no entities: a teacher trained on them alone has no other tag.
ALONE = (*TEACHER_LENGTH, "--unseen-labels", "count")


def tagger(work: Work) -> Prepared:
    """Fine-tune one teacher on few sentences of all languages, and dump its outputs for more
    sentences."""
    work.steps.write(functools.partial(write_sentences, work.folder))
    teacher = fine_tuned(work, MINILM, work.folder, *TEACHER_LENGTH)
    return tag_stores(work, teacher, work.folder, LANGUAGES, ("4", "6"))


def fine_tuned(work: Work, model: str | Path, data: Path, *words: str) -> Path:
    """Fine-tune a teacher on the gold sentences of all languages, and return the model."""
    gold = ("--train", data / "train.tsv", "--dev", data / "dev.tsv")
    arguments = ("--task", "ner", "--model", model, "--pieces", "all", "--seeds", "1")
    downstream(work, work.folder / "teacher", *arguments, *gold, *words, "--save")
    return work.folder / "teacher/model"


def write_sentences(folder: Path) -> None:
    """Write the sentences to learn from, to choose by and to test on, of each language."""
    few, dev, all_texts = list[str](), list[str](), list[str]()
    for name in LANGUAGES:
        train = sentences_of(name, "train")
        few += train[:LABELLED]
        dev += train[-LABELLED:]
        few_tags(train[-LABELLED:], folder / f"{name}.dev.tsv", LABELLED)
        few_tags(train[:LABELLED], folder / f"{name}.train.tsv", LABELLED)
        path = few_tags(train[:-LABELLED][:UNLABELLED], folder / f"{name}.all.tsv", LABELLED)
        all_texts.append(path.read_text("utf-8"))
        few_tags(sentences_of(name, "dev")[:TESTED], folder / f"{name}.test.tsv", TESTED)
    (folder / "all.tsv").write_text("".join(all_texts), "utf-8")
    for role, sentences in (("train", few), ("dev", dev)):
        few_tags(sentences, folder / f"{role}.tsv", len(sentences))


def tag_stores(
    work: Work, teacher: Path, data: Path, languages: Sequence[str], layers: Sequence[str]
) -> Prepared:
    """Dump a teacher's tags for all text, with states of one layer each, and for the gold sentences
    of each language."""
    options = ("--model", teacher, "--head", "tagging", "--attention", "none")
    texts = [data / "all.tsv"] * len(layers) + [data / f"{name}.train.tsv" for name in languages]
    names = [*(f"layer-{layer}" for layer in layers), *languages]
    states = [*layers, *([layers[0]] * len(languages))]
    stores = [
        dump(work, work.folder / f"{name}.zarr", text, *options, "--hidden", f"layer:{layer}")
        for name, text, layer in zip(names, texts, states, strict=True)
    ]
    return Prepared(stores, teacher, texts)


def tested(folder: str, languages: Sequence[str]) -> Task:
    """Return the task that scores a tagger as it is on each language."""
    return Task("", MEASURE, ("--task", "ner", *_tests(folder, languages), "--as-is"))


def _tests(folder: str, languages: Sequence[str]) -> list[str]:
    return [word for name in languages for word in ("--test", f"{folder}/{name}.test.tsv")]


def single_teachers(
    model: str, folder: str, languages: Sequence[str], *words: str
) -> dict[str, Model]:
    """Return the rows of a teacher that is fine-tuned on each language alone."""
    base = ("--task", "ner", "--pieces", "all", "--seeds", "1", *_tests(folder, languages), *words)
    return {
        f"{SINGLE}, {name}": Model(model, [
            Task("", MEASURE, (*base, "--train", f"{folder}/{name}.train.tsv",
                               "--dev", f"{folder}/{name}.dev.tsv"))
        ])
        for name in languages
    }  # fmt: skip


def joined_rows(languages: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the rows that have another teacher or student for each language."""
    return {
        SINGLE: {name: f"{SINGLE}, {name}" for name in languages},
        "D0": {name: of_language(name) for name in languages},
    }


MINIATURE = Source(
    title="TinyMBERT in miniature",
    about=(
        "Data: WikiANN (de, en, fr, nl) and Universal NER (pt, sk, sv); test set:"
        f" {TESTED} sentences of each language. Teacher: an English MiniLM fine-tuned on all word"
        f" pieces of {LABELLED} sentences of each language (8 epochs at lr 3e-4, bf16); its outputs"
        f" and its layers 4 and 6 of 6 are stored for {UNLABELLED} sentences of each language."
        f" Students: BiLSTM 100,100 with 5k WordPiece, batches of {BATCH} texts at lr {RATE},"
        f" {EACH} epochs for each stage and for each part that is unfrozen (7 parts of D3.2, 11 of"
        " D4.2), fewer if the validation score stops improving. Students of gold tags alone train"
        f" {LABELLED_ALONE} epochs. `D0` is one student for each language, scored on that language."
        " Published: mBERT, 41 languages, 300,600, batches of 512 at 1e-3."
    ),
    tasks=[tested("{work}", LANGUAGES)],
    arms=arms(*IN_MINIATURE, languages=LANGUAGES, short=True),
    claims=claims(),
    best="D4.2",
    prepare=tagger,
    published=TABLE_3,
    models=single_teachers(str(MINILM), "{work}", LANGUAGES, *ALONE),
    joined=joined_rows(LANGUAGES),
)
SMALL = {"tinymbert": MINIATURE}


def languages_of(data: Path) -> list[str]:
    """Return the languages in the user's folder, which may also contain sets of texts."""
    names = {path.name.split(".")[0] for path in data.glob("*.test.tsv")}
    return sorted(names - set(map(file_name, ("SST-2", *SETS))))


def published_teacher(layers: Sequence[str], alone: bool, work: Work) -> Prepared:
    """Fine-tune the user's own teacher on the sentences of all languages, and dump its tags.

    alone: whether to dump the gold sentences of each language as well.

    Raises UserError if the data folder lacks a file.
    """
    languages = languages_of(work.data)
    files = [f"{name}.{part}.tsv" for name in languages or ["LANGUAGE"] for part in PARTS]
    check_files(work, (), "all.tsv", "train.tsv", "dev.tsv", *files)
    teacher = fine_tuned(work, work.teacher, work.data)
    return tag_stores(work, teacher, work.data, languages if alone else (), layers)


def full(data: Path, larger: bool = False) -> dict[str, Source]:
    """Return the published setting of Tables 3 and 5, of the languages that the user's folder
    holds."""
    languages = languages_of(data)
    all_arms = arms(languages=languages, short=False)
    source = Source(
        title="TinyMBERT",
        about=ABOUT,
        tasks=[tested("{data}", languages)],
        arms=all_arms | {COMPRESSED: Arm((*all_arms["D4.2"].words, "--student", "bilstm:50,200"))},
        claims=claims(COMPRESSED),
        best="D4.2",
        prepare=functools.partial(published_teacher, ("7", "11"), True),
        published=TABLE_3,
        models=single_teachers("", "{data}", languages),
        joined=joined_rows(languages),
    )
    return {"tinymbert": source}
