"""Zhao et al. 2021: mixed vocabularies. The student of Table 1, and the ablations of section 6."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.results import NOVELS
from benchmarks.common.results import TEACHER as MINILM
from benchmarks.reproduce.examples import Data, check_files, cut_all, of_files
from benchmarks.reproduce.kolesnikova import NARROW, OUR_LOSSES, STATES_RATE
from benchmarks.reproduce.reproduction import dump, trained_teacher
from benchmarks.reproduce.source import (
    ABOUT,
    OURS,
    TEACHER,
    Arm,
    Claim,
    Prepared,
    Probe,
    Published,
    Source,
    Work,
)

SENTIMENT, PAIRS = ("SST-2", "accuracy"), ("MNLI-m", "accuracy")
INTENTS, SLOTS = ("SNIPS intents", "accuracy"), ("SNIPS slots", "entity F1")
PUBLISHED = Published(
    "differences to mixed on the dev sets of SST-2 and MNLI-m, section 6. Our copy of the paper"
    " lacks the figures of Tables 1 and 2",
    tuple(f"{task} accuracy, difference to mixed" for task in ("SST-2", "MNLI-m")),
    {
        "mixed": ("0", "0"),
        "pruned": ("-0.8", "-0.7"),
        "tied": ("-0.7", "-0.5"),
        "vanilla 30k": ("+0.1", "+0.5"),
        "5k teacher, vanilla": ("-1.2", "-0.7"),
        "base 5k": ("90.9 in all", "83.7 in all"),
    },
)
TABLE_2 = Published(
    "section 4 on Table 2, slots: the smallest as a share of BERT-base's, larger ones over NoKD",
    ("SNIPS slots entity F1, relative",),
    {"mixed, 96": ("over 95 %",), "mixed, 192": ("+.2 to .5",), "mixed, 256": ("+.2 to .5",)},
)
LONGER = Probe("four times as many steps of stage II", ("--steps", "1600"))
CLAIMS = (
    Claim("mixed beats no distillation", "4, Tables 1 and 2", "mixed", "NoKD", probe=LONGER),
    Claim("mixed beats a pruned 30k student", "6", "mixed", "pruned", probe=LONGER),
    Claim("mixed beats embeddings tied to the teacher's", "6", "mixed", "tied", probe=LONGER),
    Claim("30k pieces and vanilla distillation gain a little", "6", "vanilla 30k", "mixed",
          probe=LONGER),
)  # fmt: skip


def arms(*words: str) -> dict[str, Arm]:
    """Name the arms. The stores come, in order, from stage I, from the teacher's labels for masked
    words, and from a stage I with tied shared pieces."""
    return {
        "mixed": Arm(("--recipe", "zhao-mixed", *words)),
        "NoKD": Arm(("--recipe", "zhao-nokd", *words)),
        "tied": Arm(("--recipe", "zhao-tied", *words), (2,)),
        "vanilla 30k": Arm(("--recipe", "zhao-vanilla-30k", *words), (1,)),
        "pruned": Arm(("--recipe", "zhao-pruned", *words), (1,)),
    }


EXAMPLES = (
    Data(*SENTIMENT, "sst2", "classify", "classify/en_sst2.train.tsv", "classify/en_sst2.dev.tsv"),
    Data(*INTENTS, "intents", "classify", "intent/en_snips.train.tsv", "intent/en_snips.valid.tsv"),
    Data(*SLOTS, "slots", "ner", "intent/en_snips_slots.train.tsv",
         "intent/en_snips_slots.valid.tsv", few=1200),
)  # fmt: skip
LABELS = ("--views", "2", "--logits", "topk:64", "--hidden", "none", "--attention", "none")
STAGE_ONE = ("--batch-tokens", "1024", "--lr", "1e-3", "--precision", "bf16")


def mixed(
    examples: Sequence[Data], limit: tuple[str, str], steps: str, tied: bool, work: Work
) -> Prepared:
    """Train the student's embeddings within the teacher for this number of steps, and dump the
    teacher's labels. If `tied`, train them again with the shared pieces tied to the teacher's."""
    cut_all(examples, work)
    model = ("--model", MINILM, *limit)

    def stage_one_of(name: str, *extra: str) -> Path:
        return dump(
            work, work.folder / f"{name}.zarr", NOVELS, "mixed-vocab", *model, "--vocab", "5k",
            "--width", "128", "--hidden", "mean", "--weights", "--steps", steps, *STAGE_ONE, *extra,
        )  # fmt: skip

    stores = [
        stage_one_of("mixed"),
        dump(work, work.folder / "views.zarr", NOVELS, *model, *LABELS),
    ]
    if tied:
        stores.append(stage_one_of("tied", "--tie"))
    return Prepared(stores, MINILM, [NOVELS] * len(stores))


MINIATURE = Source(
    title="Zhao et al. 2021 in miniature",
    about=(
        "Teacher: MiniLM. Stage I takes 500 steps of 1,024 tokens and stage II 400 steps of 512"
        " tokens (far fewer than published), over the same 200,000 tokens of English novels."
        " Students: ModernBERTs of 128x2x2, 5k WordPiece, lr 1e-3; `ours` has the default of 4e-3."
        " Students are fine-tuned on 800 examples of each task (slots: 1,200)."
    ),
    tasks=[data.scored for data in EXAMPLES],
    arms=arms(*NARROW)
    | {OURS: Arm((*OUR_LOSSES, "--vocab", "mixed-vocab", *NARROW, *STATES_RATE))},
    claims=CLAIMS,
    best="mixed",
    prepare=functools.partial(mixed, EXAMPLES, ("--limit", "200000"), "500", True),
    published=PUBLISHED,
)


LEAST_BATCH = 512  # tokens of a scaled batch
STAGE_TWO = ("--student", "bert:256x6x4")
VOCABULARIES = ("5k", "7k", "10k")
VIEWS = ("--max-length", "128", *LABELS)
HIDDEN_SIZES = (96, 192, 256)
# BERT Large with 5k pieces, with the steps and sequences of BERT's own training (Devlin et al.
# 2019, A.2): the paper does not state its length.
FROM_SCRATCH = ("--model", "scratch:bert:1024x24x16", "--max-length", "128", "--lr", "1e-4")


def stage_one(
    work: Work, name: str, text: Path, vocab: str = "5k", width: int = 256, recipe: str = "mixed"
) -> Path:
    """Run stage I as published with the user's own teacher."""
    batch = min(8192, max(LEAST_BATCH, int(work.scaled(2048 * 128))))
    short = ("--steps", work.scaled(500_000), "--accumulate", "1", "--batch-tokens", str(batch))
    length = () if work.scale == 1 else short
    return dump(
        work, work.folder / f"{name}.zarr", text, "mixed-vocab", "--model", work.teacher,
        "--recipe", f"zhao-{recipe}", "--width", str(width), "--vocab", work.pieces(vocab),
        "--weights", "--hidden", "mean", "--logits", "topk:64", *length,
    )  # fmt: skip


def published_teacher(work: Work) -> Prepared:
    """Run stage I with and without tied pieces, and dump the teacher's labels for masked words."""
    text = work.data / "corpus.txt"
    check_files(work, GLUE.tasks, text.name)
    mixed, tied = (stage_one(work, name, text, recipe=name) for name in ("mixed", "tied"))
    views = dump(work, work.folder / "views.zarr", text, "--model", work.teacher, *VIEWS)
    return Prepared([mixed, views, tied], work.teacher, [text] * 3)


def vocabularies_teacher(work: Work) -> Prepared:
    """Run stage I with each vocabulary; train and dump a teacher of the smallest."""
    text = work.data / "corpus.txt"
    check_files(work, GLUE.tasks, text.name)
    stores = [stage_one(work, f"mixed-{vocab}", text, vocab=vocab) for vocab in VOCABULARIES]
    large = trained_teacher(
        work, work.folder / "large-5k", *FROM_SCRATCH, "--train", text, "--vocab",
        work.pieces("5k"), "--batch-size", work.scaled(256), "--steps", work.scaled(1_000_000),
    )  # fmt: skip
    store = work.folder / "views-5k.zarr"
    stores.append(dump(work, store, text, "--model", large, *VIEWS, like=(text, work.teacher)))
    return Prepared(stores, work.teacher, [text] * len(stores))


TUNING = ("--optimizer", "lamb", "--lr", "1e-4", "--batch-size", "64", "--epochs", "10")
GLUE = Source(
    title="Zhao et al. 2021",
    about=ABOUT,
    tasks=[
        of_files(*SENTIMENT, "sst2", "classify", *TUNING),
        of_files(*PAIRS, "mnli", "classify", *TUNING),
        of_files("MRPC", "F1", "mrpc", "classify", *TUNING),
    ],
    arms=arms(*STAGE_TWO)
    | {
        "base 5k": Arm(("--recipe", "zhao-base-5k")),
        "mixed, 12 layers": Arm(("--recipe", "zhao-mixed", "--student", "bert:256x12x4")),
        OURS: Arm((*OUR_LOSSES, "--vocab", "mixed-vocab", *STAGE_TWO)),
    },
    claims=CLAIMS,
    best="mixed",
    prepare=published_teacher,
    published=PUBLISHED,
)  # fmt: skip

OF_VOCABULARIES = Source(
    title="Zhao et al. 2021: vocabularies",
    about="The published setting of section 6, with the given teacher and data.",
    tasks=GLUE.tasks,
    arms={
        **{name: Arm(("--recipe", "zhao-mixed", *STAGE_TWO), (number,))
           for number, name in enumerate(("mixed", "mixed, 7k", "mixed, 10k"))},
        "5k teacher, vanilla": Arm(("--recipe", "zhao-vanilla-30k", *STAGE_TWO), (3,)),
    },
    claims=(
        *(Claim(f"{size} pieces are no better than 5k", "6", f"mixed, {size}", "mixed", gains=False)
          for size in VOCABULARIES[1:]),
        Claim("mixed beats vanilla distillation from a teacher of 5k pieces", "6", "mixed",
              "5k teacher, vanilla"),
    ),
    best="mixed",
    prepare=vocabularies_teacher,
    published=PUBLISHED,
)  # fmt: skip


def snips_teacher(work: Work) -> Prepared:
    """Run stage I once for each hidden size of the students."""
    text = work.data / "corpus.txt"
    check_files(work, SNIPS.tasks, text.name)
    stores = [stage_one(work, f"mixed-{size}", text, width=size) for size in HIDDEN_SIZES]
    return Prepared(stores, work.teacher, [text] * len(stores))


ON_DEVICE = ("--lr", "1e-4", "--batch-size", "64")
SNIPS = Source(
    title="Zhao et al. 2021: SNIPS",
    about="The published setting of Table 2, with the given teacher and data.",
    tasks=[
        of_files(*INTENTS, "snips_intents", "classify", *ON_DEVICE),
        of_files(*SLOTS, "snips_slots", "ner", *ON_DEVICE),
    ],
    arms={
        f"{name}, {size}": Arm(("--recipe", f"zhao-{name.lower()}", "--student", f"{size}x6x4"),
                               (number,))
        for number, size in enumerate(HIDDEN_SIZES) for name in ("mixed", "NoKD")
    } | {OURS: Arm((*OUR_LOSSES, "--vocab", "mixed-vocab", *STAGE_TWO), (2,))},
    claims=(
        Claim("the smallest student has 95 % of the teacher's slots (published: of BERT-base's, a"
              " smaller one than the teacher)", "4, Table 2", TEACHER,
              "mixed, 96", (" ".join(SLOTS),), share=0.95),
        *(Claim("mixed beats no distillation", "4, Table 2", f"mixed, {size}", f"NoKD, {size}")
          for size in HIDDEN_SIZES),
    ),
    best="mixed, 256",
    prepare=snips_teacher,
    published=TABLE_2,
)  # fmt: skip
SMALL = {"zhao": MINIATURE}


def full(data: Path, larger: bool = False) -> dict[str, Source]:
    """Return the published tables: GLUE with the ablations of section 6, and SNIPS."""
    return {"zhao": GLUE, "zhao-vocabularies": OF_VOCABULARIES, "zhao-snips": SNIPS}
