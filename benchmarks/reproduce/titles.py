"""The one or two claims behind the title of each paper, in trainings that can decide them.

Compared with the miniatures: few arms, longer trainings, larger test sets, and teachers that are
good at the tasks. With five seeds each source took two to four hours of a core, which it shared
with other jobs.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path

from benchmarks.common.results import NOVELS
from benchmarks.common.results import TEACHER as MINILM
from benchmarks.reproduce import kolesnikova, mukherjee, slovakbert, tinymbert, zhao
from benchmarks.reproduce.examples import DATA, Data, cut_all
from benchmarks.reproduce.reproduction import dump
from benchmarks.reproduce.source import Prepared, Work, selected

TOKENS = ("--limit", "400000")
FEW, TESTED = 2000, 1000  # examples to fine-tune on, and to score at most
SENTIMENT, INTENTS, SLOTS = (replace(each, few=FEW, tested=TESTED) for each in zhao.EXAMPLES)
SLOTS_RATE = ("--lr", "3e-4")  # at the default rate of its size, the teacher is not at its best


def as_column(data: Data, column: tuple[str, str], *words: str) -> Data:
    """Return the examples with the name and the figure of another paper's task."""
    title, figure = column
    return replace(data, title=title, figure=figure, words=words)


def changed(words: tuple[str, ...], *others: str) -> tuple[str, ...]:
    """Return options of `student-train` with their values, some of them replaced."""
    every = [*words, *others]
    return tuple(
        word for pair in dict(zip(every[::2], every[1::2], strict=True)).items() for word in pair
    )


# Kolesnikova et al. 2022: "Reduction of Vocabulary"

K_DATA = (
    as_column(SENTIMENT, kolesnikova.SENTIMENT),
    as_column(SLOTS, kolesnikova.ENTITIES, *SLOTS_RATE),
)
K_WORDS = changed(kolesnikova.NARROW, "--steps", "2000", "--eval-every", "500")


def reduced(work: Work) -> Prepared:
    """Dump the logits and mean states of MiniLM for English novels."""
    cut_all(K_DATA, work)
    store = dump(
        work, work.folder / "plain.zarr", NOVELS, "--model", MINILM, *TOKENS,
        "--attention", "none", "--logits", "head", "--hidden", "mean",
    )  # fmt: skip
    return Prepared([store], MINILM, [NOVELS])


KOLESNIKOVA = selected(
    replace(
        kolesnikova.MINIATURE,
        title="Kolesnikova et al. 2022: the claims of the title",
        about=(
            "Teacher: MiniLM with its masked-LM head, English. Store: 400,000 tokens of the novels."
            " Students: ModernBERTs of 128x2x2, 2,000 steps of 512 teacher tokens at lr 1e-3, 5k or"
            " 15k WordPiece. Students are fine-tuned on 2,000 examples of SST-2 (sentiment) and of"
            " SNIPS slots (entities, 8 epochs at lr 3e-4), and scored on 872 and 700."
        ),
        words=(),
        tasks=[each.scored for each in K_DATA],
        arms=kolesnikova.arms("5k", "15k", *K_WORDS),
        best="KL M",
        prepare=reduced,
    ),
    ("none", "MLM", "KL M", "KL M, 15k"),
)


# Mukherjee & Awadallah 2019: "Distilling BERT into Simple Neural Networks with Unlabeled Transfer
# Data"

MUKHERJEE = selected(
    replace(
        mukherjee.small("SNIPS intents", mukherjee.SNIPS, 100, 7, "4k", test="{work}/rest.tsv"),
        title="Mukherjee & Awadallah 2019: the claims of the title",
    ),
    ("none", "hard", "joint", "stagewise", "once"),
)


# Zhao et al. 2021: "Extremely Small BERT Models from Mixed-Vocabulary Training"

Z_DATA = (SENTIMENT, INTENTS)
ZHAO = selected(
    replace(
        zhao.MINIATURE,
        title="Zhao et al. 2021: the claims of the title",
        about=(
            "Teacher: MiniLM with its masked-LM head. Stage I takes 1,000 steps of 1,024 tokens and"
            " stage II 1,600 steps of 512 tokens, over the same 400,000 tokens of English novels."
            " Students: ModernBERTs of 128x2x2, 5k WordPiece, lr 1e-3. They are fine-tuned on 2,000"
            " examples of each task and scored on 872 (sentiment) and 700."
        ),
        tasks=[each.scored for each in Z_DATA],
        arms=zhao.arms(*changed(kolesnikova.NARROW, "--steps", "1600", "--eval-every", "400")),
        prepare=functools.partial(zhao.mixed, Z_DATA, TOKENS, "1000", False),
    ),
    ("mixed", "NoKD", "pruned"),
)


# The SlovakBERT thesis: the choice of layers, and two teachers

S_FEW = 800
S_DATA = (
    Data(*slovakbert.POS, "pos", "pos", "pos/en_ewt.train.tsv", "pos/en_ewt.dev.tsv",
         few=S_FEW, tested=TESTED, words=slovakbert.TUNED),
    as_column(SLOTS, slovakbert.NER, *changed(slovakbert.TUNED, "--epochs", "8", *SLOTS_RATE)),
    Data(*slovakbert.STS, "sts", "sts", "sts/stsb_en.dev.tsv", few=S_FEW, words=slovakbert.TUNED),
)  # fmt: skip
S_TOKENS = ("--limit", "200000")
S_WORDS = changed(slovakbert.SHORT, "--steps", "128", "--eval-every", "128")


def english(work: Work) -> Prepared:
    """Dump masked views of English novels by MiniLM."""
    cut_all(S_DATA, work)
    store = dump(
        work, work.folder / "views.zarr", NOVELS, "--model", MINILM, *S_TOKENS,
        "--hidden", "layer:6", *slovakbert.VIEWS,
    )  # fmt: skip
    return Prepared([store], MINILM, [NOVELS])


SLOVAKBERT = selected(
    replace(
        slovakbert.MINIATURE,
        title="The SlovakBERT thesis: the claims of the title",
        about=(
            "Teacher: MiniLM with its masked-LM head, 6 layers, English. Store: 200,000 tokens of"
            " the novels, a masked view that masks rare words more often. Students: the teacher's"
            " hidden size and vocabulary, 2 of its layers (3 in 1 and 2), 128 steps of 1,024"
            " tokens. They are fine-tuned on 800 sentences of EWT (parts of speech) and 800 pairs"
            " of STS-B, 4 epochs in batches of 8 at lr 2e-4, bf16, and on 2,000 sentences of SNIPS"
            " slots (entities), 8 epochs at lr 3e-4, and scored on 1,000, 300 and 700."
        ),
        tasks=[each.scored for each in S_DATA],
        arms=slovakbert.small_arms(*S_WORDS),
        prepare=english,
        student_dump=(*S_TOKENS, "--hidden", "layer:3", *slovakbert.VIEWS),
        best="4",
    ),
    ("3", "4", "6"),
)


# TinyMBERT: "Multi-stage Distillation"

GOLD, UNLABELLED, M20_DEV = 1000, 4000, 500
"""Sentences with tags, sentences without, and sentences to choose the teacher's epoch by."""


def write_slots(folder: Path) -> None:
    """Write sentences of SNIPS with their slots: to learn from, to choose by and to test on."""
    train, test = (
        (DATA / path).read_text("utf-8").strip().split("\n\n") for path in (SLOTS.train, SLOTS.test)
    )
    random.Random(0).shuffle(train)
    dev, train = train[:M20_DEV], train[M20_DEV:][: GOLD + UNLABELLED]
    parts = {"train": train[:GOLD], "all": train, "dev": dev, "slots.test": test}
    for name, sentences in parts.items():
        labelled = GOLD if name == "all" else len(sentences)
        tinymbert.few_tags(sentences, folder / f"{name}.tsv", labelled)


def slots_tagger(work: Work) -> Prepared:
    """Fine-tune MiniLM on the tagged sentences, and dump its tags and layer 4 for all sentences."""
    work.steps.write(functools.partial(write_slots, work.folder))
    teacher = tinymbert.fine_tuned(work, MINILM, work.folder, *tinymbert.TEACHER_LENGTH)
    return tinymbert.tag_stores(work, teacher, work.folder, (), ("4",))


TINYMBERT = selected(
    replace(
        tinymbert.MINIATURE,
        title="TinyMBERT: the claims of the title",
        about=(
            f"Data: SNIPS slots, in one language; test set: the official dev set (700 sentences)."
            f" Teacher: MiniLM fine-tuned on {GOLD:,} sentences (8 epochs at lr 3e-4, bf16); its"
            f" outputs and its layer 4 of 6 are stored for these and {UNLABELLED:,} sentences"
            f" without tags. Students: BiLSTM 100,100 with 5k WordPiece, batches of"
            f" {tinymbert.BATCH} texts at lr {tinymbert.RATE}, {tinymbert.EACH} epochs for each"
            " stage and for each part that is unfrozen (7 parts of D3.2, 11 of D4.2), fewer if the"
            " validation score stops improving. Students of gold tags alone train"
            f" {tinymbert.LABELLED_ALONE} epochs."
        ),
        tasks=[tinymbert.tested("{work}", ("slots",))],
        arms=tinymbert.arms(*tinymbert.IN_MINIATURE, languages=(), short=True),
        prepare=slots_tagger,
        models={},
        joined={},
    ),
    ("D0-S", *tinymbert.DISTILLED),
)
TITLES = {
    "kolesnikova": KOLESNIKOVA,
    "mukherjee": MUKHERJEE,
    "zhao": ZHAO,
    "slovakbert": SLOVAKBERT,
    "tinymbert": TINYMBERT,
}
