"""The thesis on distilling SlovakBERT: six experiments of Table 4.2, figures of Table 5.1."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.results import SHARED
from benchmarks.common.results import TEACHER as MINILM
from benchmarks.reproduce.examples import Data, check_files, cut_all, of_files
from benchmarks.reproduce.kolesnikova import OUR_LOSSES
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

SLOVAK = SHARED / "data/text/sk.txt"
NER, POS = ("NER", "macro F1"), ("POS", "macro F1")
STS, BOOLQ = ("STS", "Spearman"), ("BoolQ", "accuracy")
OF_NER, OF_POS, OF_STS, OF_BOOLQ = map(" ".join, (NER, POS, STS, BOOLQ))
TABLE_5_1 = Published(
    "Table 5.1",
    (OF_NER, OF_POS, OF_STS, OF_BOOLQ),
    {
        TEACHER: (0.939, 0.983, 0.781, 0.709),
        "1": (0.929, 0.976, 0.713, 0.649),
        "2": (0.931, 0.979, 0.734, 0.662),
        "3": (0.907, 0.972, 0.720, 0.646),
        "4": (0.916, 0.974, 0.743, 0.668),
        "5": (0.915, 0.973, 0.740, 0.645),
        "6": (0.916, 0.975, 0.693, 0.642),
    },
)
LONGER = Probe("four times as many steps", ("--steps", "256"))
CLAIMS = (
    *(
        Claim("the first layers are the best start for STS and BoolQ", "5, Table 5.1", "4", other,
              (OF_STS, OF_BOOLQ), probe=LONGER, rows=("4", other), columns=(OF_STS, OF_BOOLQ))
        for other in "12356"
    ),
    Claim("the first layers beat layers from all of the teacher", "5, Table 5.1", "4", "3",
          probe=LONGER),
    Claim("experiment 2 beats experiment 1 on all tasks", "5, Table 5.1", "2", "1", probe=LONGER),
    *(
        Claim(f"six layers ({number}) reach at least 91 % of the teacher's score on each task", "5",
              TEACHER, number, share=0.91, probe=LONGER)
        for number in "12"
    ),
    Claim("a second teacher does not help, on average", "5, Table 5.1", "6", "4", average=True,
          gains=False, probe=LONGER),
    Claim("six layers are ahead of four for entities and parts of speech", "Table 5.1", "2", "4",
          (OF_NER, OF_POS), probe=LONGER, columns=(OF_NER, OF_POS)),
)  # fmt: skip
VIEWS = ("--views", "2", "--mask-words", "rare", "--attention", "none", "--logits", "topk:64")

# Better for the teacher's tags than the default, held out, in half the time.
TUNED = ("--lr", "2e-4", "--batch-size", "8", "--epochs", "4", "--precision", "bf16")
EXAMPLES = tuple(
    Data(*column, name, name, f"{name}/{train}", test and f"{name}/{test}", 300, words=TUNED)
    for column, name, train, test in (
        (POS, "pos", "sk_snk.train.tsv", "sk_snk.dev.tsv"),
        # Models fine-tuned on fiction find no entities in its dev file, which has other genres.
        (NER, "ner", "sk_uner.train.tsv", ""),
    )
)  # fmt: skip


def experiment(number: int, layers: tuple[int, ...], *words: str) -> Arm:
    """Name an experiment whose layers are cut from a teacher of another depth than SlovakBERT's."""
    start = ",".join(map(str, layers))
    shape = ("--student", f"teacher:{len(layers)}", "--init", f"layers:{start}")
    return Arm(("--recipe", f"slovakbert-{number}", *shape, *words))


def slovak(work: Work) -> Prepared:
    """Continue training MiniLM on Slovak text, and dump masked views of it."""
    cut_all(EXAMPLES, work)
    short = ("--steps", "150", "--batch-tokens", "1024", "--evaluate-every", "150")
    teacher = trained_teacher(
        work, work.folder / "teacher", "--model", MINILM, "--train", SLOVAK, "--precision", "bf16",
        *short,
    )  # fmt: skip
    store = dump(
        work, work.folder / "views.zarr", SLOVAK, "--model", teacher, "--limit", "40000",
        "--hidden", "layer:6", *VIEWS,
    )  # fmt: skip
    return Prepared([store], teacher, [SLOVAK])


def small_arms(*words: str) -> dict[str, Arm]:
    """Name the six experiments after their numbers, for a teacher of six layers."""
    two = ("--student", "teacher:2", "--init", "layers:1,2@{teacher}")
    return {
        "1": experiment(1, (1, 4, 6), *words),
        "2": experiment(2, (1, 3, 5), *words),
        "3": experiment(3, (1, 5), *words),
        "4": experiment(4, (1, 2), *words),
        "5": experiment(5, (1, 3), *words),
        "6": Arm(("--recipe", "slovakbert-6", *two, *words), (), ("1", "2")),
    }


SHORT = ("--steps", "64", "--batch-tokens", "1024", "--eval-every", "64", "--accumulate", "1")
MINIATURE = Source(
    title="The SlovakBERT thesis in miniature",
    about=(
        "Teacher: MiniLM (6 layers, English), trained for another 150 steps of 1,024 tokens on"
        " Slovak sentences. Store: 40,000 tokens, a masked view that masks rare words more often."
        " Students: the teacher's hidden size and vocabulary, 3 or 2 of its 6 layers (published: 6"
        " or 4 of 12), 64 steps of 1,024 tokens. They are fine-tuned on 300 sentences of each task,"
        " 4 epochs in batches of 8 at lr 2e-4, bf16. The data here include no Slovak sentence pairs"
        " and no Slovak questions."
    ),
    tasks=[data.scored for data in EXAMPLES],
    arms=small_arms(*SHORT) | {
        OURS: Arm((*OUR_LOSSES, "--vocab", "teacher", "--student", "teacher:3",
                   "--min-length", "11", *SHORT)),
    },
    claims=CLAIMS,
    best="2",
    prepare=slovak,
    student_dump=("--limit", "40000", "--hidden", "layer:3", *VIEWS),
    published=TABLE_5_1,
)  # fmt: skip


def published_teacher(work: Work) -> Prepared:
    """Dump the user's own teacher of 12 layers, with a view of new masks for each of three
    epochs."""
    text = work.data / "corpus.txt"
    check_files(work, PUBLISHED_SIZE.tasks, text.name)
    store = dump(
        work, work.folder / "views.zarr", text, "--model", work.teacher, "--hidden", "layer:12",
        *PUBLISHED_SIZE.student_dump[2:],
    )  # fmt: skip
    return Prepared([store], work.teacher, [text])


TAGS = ("--batch-size", "32", "--lr", "5e-5")
PUBLISHED_SIZE = Source(
    title="The SlovakBERT thesis",
    about=ABOUT,
    tasks=[
        of_files(*NER, "wikiann", "ner", *TAGS, "--epochs", "10"),
        of_files(*POS, "ud", "pos", *TAGS, "--epochs", "5"),
        of_files(*STS, "stsb", "sts", "--batch-size", "32", "--epochs", "4"),
        of_files(*BOOLQ, "boolq", "classify", "--batch-size", "16", "--lr", "1e-5", "--epochs",
                 "10", "--accumulate", "10"),
    ],
    arms={
        **{str(number): Arm(("--recipe", f"slovakbert-{number}")) for number in range(1, 6)},
        "6": Arm(("--recipe", "slovakbert-6", "--init", "layers:1,2,3,4@{teacher}"), (),
                 ("1", "2")),
        OURS: Arm((*OUR_LOSSES, "--vocab", "teacher", "--student", "teacher:6",
                   "--min-length", "11", "--epochs", "3")),
    },
    claims=CLAIMS,
    best="2",
    prepare=published_teacher,
    student_dump=("--hidden", "layer:6", "--views", "4", *VIEWS[2:]),
    published=TABLE_5_1,
)  # fmt: skip
SMALL = {"slovakbert": MINIATURE}


def full(data: Path, larger: bool = False) -> dict[str, Source]:
    """Return the published setting."""
    return {"slovakbert": PUBLISHED_SIZE}
