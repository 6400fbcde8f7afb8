"""The papers whose students are masked LMs that are fine-tuned afterwards.

They are about reduced vocabularies in Russian, mixed vocabularies, and Slovak.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.results import NOVELS, TEACHER
from benchmarks.reproduce.arms import OURS, SIZES, Arm, Source, dump, trained_teacher
from benchmarks.reproduce.examples import DATA, Data, cut_all, scoring

RU_NOVELS, SLOVAK = DATA / "text/ru_novels.txt", DATA / "text/sk.txt"
FULL = ("full",)
NARROW = (
    "--student", "modernbert:128x2x2",  # within so few steps a BERT stays on the first plateau
    "--steps", "400", "--batch-tokens", "512", "--eval-every", "100",
)  # fmt: skip
RATE = ("--lr", "1e-3")  # the best for masked-LM loss, alone or with kl
STATES_RATE = ("--lr", "4e-3")  # and with states
OUR_LOSSES = ("--loss", "mlm=1,hidden=30")  # the default of student-train


def recipe(name: str, *words: str, sizes: tuple[str, ...] = SIZES) -> Arm:
    rate = STATES_RATE if "-mse-" in name else RATE
    return Arm(("--recipe", name, *rate, *words), sizes=sizes)


RUSSIAN = {size: (
    Data("POS macro F1", "pos", "pos", "pos/ru_grameval.train.tsv", "pos/ru_grameval.dev.tsv"),
    Data("NER entity F1", "ner", "ner", "ner/ru_factrueval.train.tsv"),
    Data("CEDR macro F1", "cedr", "classify", "classify/ru_cedr.train.tsv"),
    Data("RuCoLA macro F1", "rucola", "classify", "classify/ru_rucola.train.tsv",
         "classify/ru_rucola.dev.tsv"),
) for size in SIZES}  # fmt: skip


def reduced(work: Path, size: str) -> tuple[list[Path], Path]:
    """A Russian teacher trained from nothing; its states averaged over all layers and logits of
    plain text."""
    cut_all(RUSSIAN, work, size)
    shape, batch, length, limit = {
        "small": ("scratch:256x3x4", "1024", ("--steps", "4000"), "200000"),
        "full": ("scratch:512x6x8", "16384", ("--epochs", "10"), "10000000"),
    }[size]
    teacher = trained_teacher(
        work / "teacher", "--model", shape, "--train", RU_NOVELS, "--vocab", "30k",
        "--mask-prob", "0.3", "--batch-tokens", batch, *length, "--precision", "bf16",
    )  # fmt: skip
    words = ("--model", teacher, "--corpus", RU_NOVELS, "--limit", limit, "--attention", "none")
    return [dump(work / "plain.zarr", *words, "--logits", "topk:64", "--hidden", "mean")], teacher


def _kolesnikova_arms() -> dict[str, Arm]:
    small = {"KL+MSE match frozen", "KL+MSE reduce frozen", "KL+MSE reduce trainable"}
    arms = {
        "random": Arm(("--loss", "mlm=1", "--init", "random", *RATE)),
        "MLM only": recipe("kolesnikova-tiny30-mlm"),
        "KL match": recipe("kolesnikova-tiny30-kl-m", sizes=FULL),
        "KL reduce": recipe("kolesnikova-tiny30-kl-rm", sizes=FULL),
    }
    for losses in ("KL+MSE", "MSE"):
        for align in ("match", "reduce"):
            for projection in ("frozen", "trainable"):
                name = f"{losses} {align} {projection}"
                row = f"{losses.lower().replace('+', '-')}-{align[0]}{projection[0]}"
                known = f"kolesnikova-tiny30-{row}"
                arms[name] = recipe(known, sizes=SIZES if name in small else FULL)
    # The small text gives no more than 19,553 pieces, but the teacher has 30k of all novels.
    for name, vocab, sizes in (
        ("10k pieces", "10k", SIZES),
        ("20k pieces", "20k", FULL),
        ("30k pieces", "30k", FULL),
        ("the teacher's 30k", "teacher", SIZES),
    ):
        words = ("kolesnikova-tiny30-kl-mse-rt", "--vocab", vocab)
        arms[name] = recipe(*words, sizes=sizes)
    return arms | {OURS: Arm(OUR_LOSSES)}


INTENTS = {size: (
    Data("SST-2 macro F1", "sst2", "classify", "classify/en_sst2.train.tsv",
         "classify/en_sst2.dev.tsv"),
    Data("SNIPS intents macro F1", "intents", "classify", "intent/en_snips.train.tsv",
         "intent/en_snips.valid.tsv"),
    Data("SNIPS slots entity F1", "slots", "ner", "intent/en_snips_slots.train.tsv",
         "intent/en_snips_slots.valid.tsv", few=1200),
) for size in SIZES}  # fmt: skip


SMALL_BATCHES = ("--optimizer", "adamw", "--warmup", "0.05")  # published: LAMB, 2,048 texts, 0.1


def mixed(work: Path, size: str) -> tuple[list[Path], Path]:
    """Stage I: the student's embeddings, learnt within the teacher, without and with ties; and a
    store of the teacher's logits of masked words."""
    cut_all(INTENTS, work, size)
    words = {
        "small": ("--limit", "200000", "--steps", "500", "--batch-tokens", "1024", "--lr", "1e-3",
                  "--precision", "bf16"),
        "full": ("--steps", "20000"),
    }  # fmt: skip
    stores = [
        dump(
            work / f"{name}.zarr", "mixed-vocab", "--model", TEACHER, "--corpus", NOVELS,
            "--vocab", "5k", "--width", "128" if size == "small" else "256",
            "--hidden", "mean", "--weights", *tie, *words[size],
        )
        for name, tie in (("mixed", ()), ("tied", ("--tie",)))
    ]  # fmt: skip
    limit = ("--limit", "200000") if size == "small" else ()
    views = ("--views", "2", "--logits", "topk:64", "--hidden", "none", "--attention", "none")
    words_of_views = ("--model", TEACHER, "--corpus", NOVELS, *limit, *views)
    return [*stores, dump(work / "views.zarr", *words_of_views)], TEACHER


SLOVAK_DATA = {size: (
    Data("POS macro F1", "pos", "pos", "pos/sk_snk.train.tsv", "pos/sk_snk.dev.tsv", few=300),
    # Of its dev file, which is of other genres, no model fine-tuned on fiction finds the entities.
    Data("NER entity F1", "ner", "ner", "ner/sk_uner.train.tsv", few=300),
) for size in SIZES}  # fmt: skip
TOKENS = ("--batch-tokens", "1024", "--accumulate", "1")  # published: 12 texts, 50 times
SAME_DATA = ("--min-length", "11")  # as their recipe has it
# Better for the teacher's tags than the default, held out, in half the time.
SLOVAK_SHORT = ("--lr", "2e-4", "--batch-size", "8", "--epochs", "4", "--precision", "bf16")


def slovak(work: Path, size: str) -> tuple[list[Path], Path]:
    """Three teachers: MiniLM trained on over Slovak text, from two seeds, and one of Slovak alone
    with a vocabulary of its own; masked views of all."""
    cut_all(SLOVAK_DATA, work, size)
    small = size == "small"
    short = ("--steps", "150", "--batch-tokens", "1024", "--evaluate-every", "150")
    own = ("--steps", "400", "--batch-tokens", "2048", "--mask-prob", "0.3")
    limit = ("--limit", "40000") if small else ()
    stores, teachers = [], []
    for name, model, last, words in (
        ("0", (TEACHER,), "6", short if small else ("--epochs", "10")),
        ("1", (TEACHER, "--seed", "1"), "6", short if small else ("--epochs", "10")),
        ("own", ("scratch:256x4x4", "--vocab", "8k"), "4", own if small else ("--epochs", "40")),
    ):
        words = ("--model", *model, "--train", SLOVAK, "--precision", "bf16", *words)
        teachers.append(trained_teacher(work / f"teacher-{name}", *words))
        words = ("--model", teachers[-1], "--corpus", SLOVAK, *limit)
        views = ("--views", "2" if small else "6", "--mask-words", "rare")
        states = ("--hidden", f"layer:{last}", "--attention", "none")
        store = work / f"views-{name}.zarr"
        stores.append(dump(store, *words, *views, "--logits", "topk:64", *states))
    return stores, teachers[0]


def layers(
    number: int | str, *chosen: int, stores: tuple[int, ...] = (0,), sizes: tuple[str, ...] = SIZES
) -> Arm:
    """Experiment `number`, or our variant of that name, of a teacher with 6 layers."""
    init = f"layers:{','.join(map(str, chosen))}"
    words = ("--student", f"teacher:{len(chosen)}", "--init", init)
    return Arm(("--recipe", f"slovakbert-{number}", *words), stores, sizes)


MLM_SOURCES = {
    "kolesnikova": Source(
        "Reduced vocabularies in miniature",
        {
            "small": "a Russian ModernBERT of 256x3x4 trained from nothing over the novels for"
            " 4,000 steps of 1,024 tokens, 200,000 tokens of these; students ModernBERTs of"
            " 128x2x2, 400 steps of 512 teacher tokens, 5k WordPiece where nothing else is said;"
            " their losses and weights at lr 1e-3 without states and 4e-3 with them, ours at the"
            " default of 4e-3 (of factors of two the best by held-out loss, or within 0.01 nats);"
            " fine-tuned with `--group-by-length` on 800 examples each of GramEval, factRuEval,"
            " CEDR and RuCoLA.",
            "full": "a Russian ModernBERT of 512x6x8 trained from nothing over the novels, 10M"
            " tokens of these; students of 256x3x4, 3 epochs in batches of 8,192; fine-tuned on"
            " all of GramEval, factRuEval, CEDR and RuCoLA.",
        },
        {
            "small": (*NARROW, "--vocab", "5k", "--accumulate", "1"),
            "full": (
                "--student",
                "modernbert:256x3x4",
                "--vocab",
                "5k",
                "--batch-tokens",
                "8192",
                "--accumulate",
                "1",
                "--epochs",
                "3",
            ),
        },
        scoring(RUSSIAN),
        _kolesnikova_arms(),
        [
            ("MLM only", "random", "a start from the teacher helps"),
            ("KL+MSE reduce trainable", "MLM only", "distillation helps"),
            ("KL+MSE reduce frozen", "KL+MSE match frozen", "reduce is better than match"),
            ("KL reduce", "KL match", "reduce is better than match"),
            (
                "KL+MSE reduce trainable",
                "KL+MSE reduce frozen",
                "a trained projection is better than a random one",
            ),
            (
                "MSE reduce trainable",
                "MSE reduce frozen",
                "a trained projection is better than a random one",
            ),
            ("10k pieces", "KL+MSE reduce trainable", "10k pieces are better than 5k"),
            ("30k pieces", "KL+MSE reduce trainable", "30k pieces are better than 5k"),
            ("the teacher's 30k", "KL+MSE reduce trainable", "the teacher's 30k pieces, too"),
            (OURS, "KL+MSE reduce trainable", "our recipe is better than theirs"),
        ],
        "KL+MSE reduce trainable",
        reduced,
    ),
    "zhao": Source(
        "Mixed vocabularies in miniature",
        {
            "small": "MiniLM, 500 steps of 1,024 tokens of stage I and 400 of 512 of stage II (far"
            " fewer than published), over the same 200,000 of English novels; students ModernBERTs"
            " of 128x2x2, lr 1e-3, ours at the default of 4e-3; 5k WordPiece; fine-tuned with"
            " `--group-by-length` on 800 examples of each task, of slots on 1,200.",
            "full": "MiniLM, 20,000 steps of stage I over all novels; students ModernBERTs of"
            " 256x4x4, 3 epochs; fine-tuned on all examples.",
        },
        {
            "small": (*NARROW, *SMALL_BATCHES),
            "full": (
                "--student",
                "modernbert:256x4x4",
                "--batch-tokens",
                "8192",
                "--epochs",
                "3",
                *SMALL_BATCHES,
            ),
        },
        scoring(INTENTS),
        {
            "mixed vocabulary": recipe("zhao-mixed"),
            "no distillation": recipe("zhao-nokd"),
            "pruned vocabulary": Arm(("--recipe", "zhao-pruned", *RATE), (2,)),
            "tied embeddings": Arm(("--recipe", "zhao-tied", *RATE), (1,)),
            "30k vanilla": Arm(("--recipe", "zhao-vanilla-30k", *RATE), (2,)),
            OURS: Arm((*OUR_LOSSES, "--vocab", "mixed-vocab")),
        },
        [
            ("mixed vocabulary", "no distillation", "embeddings learnt within the teacher help"),
            ("mixed vocabulary", "pruned vocabulary", "mixed is better than pruned"),
            ("mixed vocabulary", "tied embeddings", "mixed is better than tied"),
            ("30k vanilla", "mixed vocabulary", "30k vanilla is a little better than mixed"),
            (OURS, "mixed vocabulary", "our recipe is better than theirs"),
        ],
        "mixed vocabulary",
        mixed,
        {
            "teacher": "98.6; 97.0",
            "mixed vocabulary": "98.7; 95.0",
        },
        "accuracy of SNIPS intents and F1 of slots, BERT-base and a student of 6 layers; by the"
        " survey of Gupta & Agrawal, https://ar5iv.labs.arxiv.org/html/2008.05221, Table 3",
    ),
    "slovakbert": Source(
        "Layers and teachers in Slovak, in miniature",
        {
            "small": "teacher: MiniLM (6 layers, English) trained on for 150 steps of 1,024 tokens"
            " over Slovak sentences, a second one from another seed, a third of 256x4x4 and 8k"
            " pieces of its own from 400 steps of 2,048; 40,000 tokens, masked view, rare words"
            " more often; students as wide as the teacher, 3 or 2 of its 6 layers (published: 6 or"
            " 4 of 12), its vocabulary, 64 steps of 1,024 tokens, KL at masked words (the"
            " recipe's: at all); fine-tuned with `--group-by-length` on 300 sentences of each task,"
            " 4 epochs in batches of 8 at lr 2e-4, bf16.",
            "full": "the same teachers, 10 epochs over all Slovak sentences; students 5 epochs of"
            " them; KL at all words; fine-tuned on all sentences.",
        },
        {
            "small": (*TOKENS, "--steps", "64", "--targets", "masked", "--eval-every", "64"),
            "full": (*TOKENS, "--epochs", "5"),
        },
        scoring(SLOVAK_DATA, SLOVAK_SHORT),
        {
            "3 layers 1,4,6": layers(1, 1, 4, 6),
            "3 layers 1,3,5": layers(2, 1, 3, 5, sizes=FULL),
            "2 layers 1,4": layers(3, 1, 4),
            "2 layers 1,2": layers(4, 1, 2),
            "2 layers 1,3": layers(5, 1, 3, sizes=FULL),
            "two teachers": layers("two-teachers", 1, 4, 6, stores=(0, 1)),
            "two vocabularies": layers("two-teachers", 1, 4, 6, stores=(0, 2)),
            OURS: Arm((*OUR_LOSSES, "--vocab", "teacher", "--student", "teacher:3", *SAME_DATA)),
        },
        [
            ("3 layers 1,4,6", "2 layers 1,4", "more layers are better"),
            ("3 layers 1,4,6", "3 layers 1,3,5", "a start with the last layer is better"),
            ("2 layers 1,4", "2 layers 1,2", "layers from all of the teacher are better"),
            ("2 layers 1,3", "2 layers 1,2", "layers from all of the teacher are better"),
            ("two teachers", "3 layers 1,4,6", "two teachers are better than one"),
            ("two vocabularies", "3 layers 1,4,6", "and so with another vocabulary"),
            (OURS, "3 layers 1,4,6", "our recipe is better than theirs"),
        ],
        "3 layers 1,4,6",
        slovak,
    ),
}
"""By the name that the command knows."""
