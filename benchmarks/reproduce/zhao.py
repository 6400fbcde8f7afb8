"""Zhao et al. 2021: mixed vocabularies. The student of Table 1, and the ablations of section 6."""

from __future__ import annotations

from benchmarks.common.results import NOVELS
from benchmarks.common.results import TEACHER as MINILM
from benchmarks.reproduce.examples import Data, check_files, cut_all, of_files
from benchmarks.reproduce.kolesnikova import NARROW, OUR_LOSSES, STATES_RATE
from benchmarks.reproduce.reproduction import dump
from benchmarks.reproduce.source import (
    OURS,
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
    "differences to mixed on the dev sets of SST-2 and MNLI-m, section 6",
    ("SST-2 accuracy", "MNLI-m accuracy"),
    {
        "mixed": ("0", "0"),
        "pruned": ("-0.8", "-0.7"),
        "tied": ("-0.7", "-0.5"),
        "vanilla 30k": ("+0.1", "+0.5"),
        "5k teacher, vanilla": ("-1.2", "-0.7"),
        "base 5k": ("90.9 in all", "83.7 in all"),
    },
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
    """Name the arms. The stores are: of stage I, of a stage I that tied shared pieces, and of the
    teacher's labels for masked words."""
    return {
        "mixed": Arm(("--recipe", "zhao-mixed", *words)),
        "NoKD": Arm(("--recipe", "zhao-nokd", *words)),
        "tied": Arm(("--recipe", "zhao-tied", *words), (1,)),
        "vanilla 30k": Arm(("--recipe", "zhao-vanilla-30k", *words), (2,)),
        "pruned": Arm(("--recipe", "zhao-pruned", *words), (2,)),
    }


EXAMPLES = (
    Data(*SENTIMENT, "sst2", "classify", "classify/en_sst2.train.tsv", "classify/en_sst2.dev.tsv"),
    Data(*INTENTS, "intents", "classify", "intent/en_snips.train.tsv", "intent/en_snips.valid.tsv"),
    Data(*SLOTS, "slots", "ner", "intent/en_snips_slots.train.tsv",
         "intent/en_snips_slots.valid.tsv", few=1200),
)  # fmt: skip
LABELS = ("--views", "2", "--logits", "topk:64", "--hidden", "none", "--attention", "none")
STAGE_ONE = ("--steps", "500", "--batch-tokens", "1024", "--lr", "1e-3", "--precision", "bf16")


def mixed(work: Work) -> Prepared:
    """Learn the student's embeddings within the teacher, once apart from its own and once tied."""
    cut_all(EXAMPLES, work)
    stores = [
        dump(
            work, work.folder / f"{name}.zarr", NOVELS, "mixed-vocab", "--model", MINILM,
            "--limit", "200000", "--vocab", "5k", "--width", "128", "--hidden", "mean",
            "--weights", *STAGE_ONE, *tied,
        )
        for name, tied in (("mixed", ()), ("tied", ("--tie",)))
    ]  # fmt: skip
    labels = ("--limit", "200000", *LABELS)
    stores.append(dump(work, work.folder / "views.zarr", NOVELS, "--model", MINILM, *labels))
    return Prepared(stores, MINILM, [NOVELS] * 3)


SMALL = Source(
    title="Zhao et al. 2021 in miniature",
    about=(
        "MiniLM, 500 steps of 1,024 tokens of stage I and 400 of 512 of stage II (far fewer than"
        " published), over the same 200,000 of English novels; students ModernBERTs of 128x2x2, lr"
        " 1e-3, ours at the default of 4e-3; 5k WordPiece; fine-tuned on"
        " 800 examples of each task, of slots on 1,200."
    ),
    words=(),
    tasks=[data.scored for data in EXAMPLES],
    arms=arms(*NARROW)
    | {OURS: Arm((*OUR_LOSSES, "--vocab", "mixed-vocab", *NARROW, *STATES_RATE))},
    claims=CLAIMS,
    best="mixed",
    prepare=mixed,
    published=PUBLISHED,
)


def published_teacher(work: Work) -> Prepared:
    """Run stage I as published with the user's own teacher."""
    text = work.data / "corpus.txt"
    check_files(work, FULL.tasks, text.name)
    short = ("--steps", work.scaled(500_000), "--accumulate", "1", "--vocab", work.pieces("5k"))
    length = () if work.scale == 1 else short
    stores = [
        dump(
            work, work.folder / f"{name}.zarr", text, "mixed-vocab", "--model", work.teacher,
            "--recipe", f"zhao-{name}", "--width", "256", "--weights", "--hidden", "mean",
            "--logits", "topk:64", *length,
        )
        for name in ("mixed", "tied")
    ]  # fmt: skip
    model = ("--model", work.teacher, "--max-length", "128")
    stores.append(dump(work, work.folder / "views.zarr", text, *model, *LABELS))
    return Prepared(stores, work.teacher, [text] * 3)


GLUE = ("--optimizer", "lamb", "--lr", "1e-4", "--batch-size", "64", "--epochs", "10")
SNIPS = ("--lr", "1e-4", "--batch-size", "64")
FULL = Source(
    title="Zhao et al. 2021",
    about="the published setting with the teacher and the data given.",
    words=(),
    tasks=[
        of_files(*SENTIMENT, "sst2", "classify", *GLUE),
        of_files(*PAIRS, "mnli", "classify", *GLUE),
        of_files("MRPC", "F1", "mrpc", "classify", *GLUE),
        of_files(*INTENTS, "snips_intents", "classify", *SNIPS),
        of_files(*SLOTS, "snips_slots", "ner", *SNIPS),
    ],
    arms=arms("--student", "256x6x4")
    | {
        "base 5k": Arm(("--recipe", "zhao-base-5k")),
        "mixed, 12 layers": Arm(("--recipe", "zhao-mixed", "--student", "256x12x4")),
        OURS: Arm((*OUR_LOSSES, "--vocab", "mixed-vocab", "--student", "256x6x4")),
    },
    claims=CLAIMS,
    best="mixed",
    prepare=published_teacher,
    published=PUBLISHED,
)
