"""The options of a training: each with its type, values, help and scope."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from student_train.losses import registry
from student_train.settings import alignments
from student_train.settings.alignments import ALIGNMENTS
from student_train.settings.loss_alignments import check_alignments, check_pieces, parse_alignments
from student_train.settings.loss_weights import DEFAULT_LOSS, check_losses, parse_losses
from student_train.settings.naming import beside, folder_name
from student_train.settings.shapes import parse_student
from support.console import check_device
from support.errors import UserError
from support.options import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    at_least,
    check_values,
    default_of,
    flag_of,
    option,
    options_of,
    scoped,
)
from training.device import resolved_device, resolved_precision
from training.optimizer import ADADELTA_LR, OPTIMIZERS, check_optimizer
from training.rare_masks import MASK_WORDS
from training.schedule import SCHEDULES, Schedule

CACHES = ("none", "ram", "device")
FREEZABLE = r"embeddings|words|positions|types|layers(\.[1-9][0-9]*)?|head|projection"
PARTS = "embeddings, words, positions, types, layers, layers.N, head or projection"
SEEDS = 2**32
UNFREEZE = "top-down"

STAGE = "stage"  # may differ from one stage to the next
LENGTH = "length"  # says how long a stage is; one that is given removes the other
BATCH = "batch"  # says how large a batch is; one that is given removes the other
COMMAND = "command"  # has no place in a recipe
ONCE = "once"  # has one value in a sweep
MACHINE = "machine"  # does not shape the student
NETWORK = "network"  # goes to the config of the student's kind, under its own name
BILSTM = "bilstm"  # only that kind of student has it
START = "start"  # only the making of a student can refuse it
UNNAMED = "unnamed"  # came after the first students: a folder's name does not tell its default
NEW = "new"  # came later still: training.json does not tell its default, either


def _parse_parts(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(",") if word.strip())


def _check_parts(parts: Any) -> None:
    for part in parts:
        if not re.fullmatch(FREEZABLE, part):
            raise UserError(f"--freeze {part}: expected {PARTS}")


@dataclass(frozen=True)
class TrainOptions:
    """Holds everything that decides what a student becomes; `student-train --help` tells of each
    option.

    Raises UserError for a value that an option does not take, in a stage as well, and for options
    that contradict each other.
    """

    store: str = option(
        help="A sealed store: .zarr, .h5 or an object-store URL. Repeated: the student learns from"
        " all of them, each aligned through its own tokens.",
        required=True,
        scope={COMMAND, ONCE},
    )
    others: tuple[str, ...] = ()
    combine: str = option(
        "losses",
        "What several stores teach: losses: the mean of their losses; outputs: as one teacher, the"
        " geometric mean of their distributions and the mean of their states (stores of the same"
        " text and vocabulary).",
        choices=("losses", "outputs"),
        scope={NEW},
    )
    vocab: str = option(
        "5k",
        "5k | 10k | 20k | 30k | N (WordPiece of the store's text) | a tokenizer folder | teacher |"
        " pruned:N (the teacher's most frequent pieces) | words, words:N (lower-cased words"
        " between blanks, all or the most frequent) | mixed-vocab (the store's).",
        scope={START},
    )
    out: Path | None = option(
        None,
        "Folder of the student.",
        told_default="beside the store, named after the settings",
        scope={COMMAND, ONCE, MACHINE},
    )
    student: str = option(
        "tiny",
        "tiny (264x3x12x792) or HxLxA[xF]: width x layers x heads of a BERT, and units of its"
        " feed-forward parts, 4 H by default; of a ModernBERT after modernbert:, 2 H by default;"
        " teacher:L: as wide as the teacher, and a ModernBERT if that is one;"
        " bilstm:E,H: width of the embeddings and of an LSTM in each direction.",
        scope={START},
    )
    align: str = option(
        "span",
        f"Runs of tokens that are compared, teacher's and student's; {alignments.help_text()}."
        " Of single losses: kl=match,hidden=reduce.",
        check=check_alignments,
    )
    pool: str | None = option(
        None,
        "How a run's outputs become one.",
        choices=("sum", "mean"),
        told_default=alignments.pool_help(),
    )
    loss: Mapping[str, float] = option(
        factory=lambda: dict(DEFAULT_LOSS),
        help=f"NAME=WEIGHT, repeated or a comma list: {registry.help_text()}.",
        told_default=f"{' '.join(f'{name}={weight:g}' for name, weight in DEFAULT_LOSS.items())};"
        " kl=1 for hidden where the store has no hidden states; of a task kl=1, and ce=1 where"
        " there are gold labels",
        repeated=True,
        read=parse_losses,
        check=check_losses,
        scope={STAGE},
    )
    temperature: float = option(2.0, "Of kl and kl-shared.", within=POSITIVE, scope={STAGE})
    targets: str = option(
        "all",
        "Tokens whose teacher logits are learnt: all, or those masked for the student, or the"
        " others.",
        choices=("all", "masked", "unmasked"),
        scope={STAGE},
    )
    projection: str = option(
        "trainable",
        "From the student's width to the teacher's; student: a part of a BiLSTM, through a GELU,"
        " and its heads stand on it.",
        choices=("trainable", "frozen", "student"),
    )
    outputs: str = option(
        "shared",
        "Of a task's student: separate: logit and log-odds teach an output of their own beside the"
        " classes', where ce, kl or hard teach these. It serves training alone.",
        choices=("shared", "separate"),
        scope={NEW},
    )
    init: str = option(
        "auto",
        "svd | svd:STORE (of the teacher that another store keeps) | teacher | layers:I,J,...[@DIR]"
        " (of the model in a folder) | mixed-vocab | random | auto:"
        " teacher where its layers can be cut, else svd.",
        scope={START},
    )
    dropout: float = option(
        0.0,  # a small student underfits: dropout would only slow it down
        "Share of hidden states and attention that are dropped in training; of a BiLSTM, of"
        " embeddings, layers, and the state between two tokens.",
        within=SHARE,
        scope={NETWORK, NEW},
    )
    recurrent_dropout: float | None = option(
        None,
        "Of the state between two tokens of a BiLSTM.",
        within=SHARE,
        told_default="as --dropout",
        scope={NETWORK, BILSTM, NEW},
    )
    classifier_pooling: str | None = option(
        None,
        "What a BiLSTM classifies a text by: the largest value of each channel, or the last state"
        " of either direction.",
        choices=("max", "last"),
        told_default="max",
        scope={NETWORK, BILSTM, NEW},
    )
    word_vectors: str | None = option(
        None,
        "File of word vectors (GloVe, fastText or word2vec as text), as wide as the embeddings,"
        " for the pieces that are words there; beside --init random the others begin at random in"
        " -0.1 to 0.1.",
        scope={START},
    )
    view: int | None = option(
        None,
        "View of the store to learn from.",
        told_default="the masked views in turn, else view 0",
        scope={STAGE},
    )
    steps: int | None = option(
        None,
        "Optimiser steps; 0 saves a student with random weights (--init random).",
        within=Range("0 or more", low=0),
        scope={STAGE, LENGTH},
    )
    epochs: float | None = option(
        None,
        "Passes over the (first) store, instead of --steps.",
        within=POSITIVE,
        told_default="3",
        scope={STAGE, LENGTH},
    )
    batch_tokens: int = option(
        1024,
        "Teacher tokens of a batch, padding included.",
        within=at_least(1),
        scope={STAGE, BATCH},
    )
    batch_texts: int | None = option(
        None,
        "Texts of a batch, instead of --batch-tokens.",
        within=at_least(1),
        scope={STAGE, BATCH, NEW},
    )
    accumulate: int = option(1, "Batches of one optimiser step.", within=at_least(1))
    optimizer: str = option(
        "adamw",
        "lamb (You et al. 2020): for large batches; needs `pip install pytorch-optimizer`."
        " adadelta (Zeiler 2012): has no rate of its own.",
        choices=OPTIMIZERS,
        scope={UNNAMED},
    )
    lr: float | None = option(
        None,
        "Peak learning rate.",
        within=POSITIVE,
        told_default="as found with adamw: 0.5 / width, at most 0.004; of a BiLSTM 0.003; of"
        " adadelta 1",
        scope={STAGE},
    )
    lr_end: float = option(
        0.0,
        "Learning rate at the end of a linear or cosine schedule.",
        within=NOT_NEGATIVE,
        scope={STAGE, NEW},
    )
    warmup: float = option(0.05, "Share of the steps.", within=SHARE, scope={STAGE})
    schedule: str = option(
        "linear",
        "After warm-up: linear or cosine down to --lr-end, or halved on a validation plateau.",
        choices=SCHEDULES,
        scope={STAGE},
    )
    weight_decay: float = option(0.01, "Of matrices.", within=NOT_NEGATIVE)
    clip: float = option(1.0, "Gradient norm.", within=POSITIVE)
    mask_prob: float = option(
        0.15, "Share of tokens masked anew each time (view 0).", within=SHARE, scope={STAGE}
    )
    mask_words: str = option(
        "uniform",
        "rare: a piece is masked the more often the rarer it is (view 0).",
        choices=MASK_WORDS,
        scope={STAGE},
    )
    max_masks: int | None = option(
        None,
        "Masked tokens of a sequence at most (view 0).",
        within=at_least(1),
        told_default="as many as are drawn",
        scope={STAGE, NEW},
    )
    max_length: int | None = option(
        None,
        "Longest student input.",
        within=Range("at least 3: two special tokens and one of text", low=3),
        told_default="twice the store's, at most 512",
        scope={START},
    )
    min_length: int = option(
        0,
        "Shorter sequences, in teacher tokens, are not learnt from.",
        within=Range("0 or more", low=0),
    )
    data: str = option(
        "all",
        "Sequences to learn from; labelled: those with a gold label or tag; balanced: each step"
        " takes a batch of these for the losses of gold, and one as large of the others for the"
        " other losses.",
        choices=("all", "labelled", "unlabelled", "balanced"),
        scope={STAGE},
    )
    freeze: tuple[str, ...] = option(
        (),
        "Parts that keep their weights, a comma list: embeddings (or of them words, positions,"
        " types), layers, layers.N, head, projection.",
        read=_parse_parts,
        check=_check_parts,
        scope={STAGE},
    )
    prune_to: str | None = option(
        None,
        "Cut the finished student to the pieces that it has in common with this vocabulary, given"
        " as --vocab is.",
        scope={START, NEW},
    )
    best: bool = option(
        False, "Keep the weights with the best validation loss, not the last.", scope={STAGE}
    )
    stages: tuple[Mapping[str, Any], ...] = ()
    needs: Mapping[str, Any] = field(default_factory=dict)  # what a recipe needs of the stores
    held_out: float = option(
        0.02, "Share of the store kept for validation; the same for every student.", within=SHARE
    )
    eval_every: int | Literal["epoch"] | None = option(
        None,
        "Steps between validations, or `epoch`: one after each pass over the store.",
        within=at_least(1),
        told_default="a tenth of all",
        scope={STAGE},
    )
    patience: int | None = option(
        None,
        "Validations without a better one after which a training, or a stage, ends early.",
        within=at_least(1),
        told_default="it takes all steps",
        scope={STAGE, NEW},
    )
    checkpoint_every: int | None = option(
        None,
        "Steps between checkpoints.",
        within=at_least(1),
        told_default="as --eval-every",
        scope={MACHINE},
    )
    seed: int = option(
        0,
        "Of weights, order, masks and dropout.",
        within=Range(f"0 to {SEEDS - 1}", low=0, high=SEEDS - 1),
    )
    device: str = option(
        "auto", "auto | cpu | cuda | cuda:N.", check=check_device, scope={COMMAND, MACHINE}
    )
    precision: str = option(
        "auto",
        "auto: bf16 where the hardware multiplies it, else fp32.",
        choices=("auto", "bf16", "fp32"),
    )
    workers: int = option(
        0,
        "Processes that prepare batches; 0: a thread. The student is the same, bit for bit.",
        within=Range("0 or more", low=0),
        scope={COMMAND, ONCE, MACHINE},
    )
    cache: str = option(
        "none",
        "ram: the store is read and unpacked once, and stays in memory; device: its hidden states"
        " and attention maps in the memory of --device. The student is the same.",
        choices=CACHES,
        scope={COMMAND, ONCE, MACHINE},
    )
    allow_partial: bool = option(
        False,
        "Learn from the published parts of an unfinished store.",
        flag="--allow-partial",
        scope={COMMAND, ONCE, MACHINE},
    )

    def __post_init__(self) -> None:
        check_values(self)
        self._check_together()
        for number, stage in enumerate(self.stages, 1):
            check_stage(stage, f"stage {number}")
            try:
                self.in_stage(stage)
            except UserError as error:
                raise UserError(f"stage {number}: {error}") from error

    def _check_together(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise UserError("--steps and --epochs contradict each other: give one")
        if self.steps == 0 and (self.init != "random" or self.stages):
            raise UserError(
                "--steps 0: expected at least 1, or --init random and no stages: such a student is"
                " saved as it starts"
            )
        if self.batch_texts and self.batch_tokens != default_of(TrainOptions, "batch_tokens"):
            raise UserError("--batch-tokens and --batch-texts contradict each other: give one")
        if (judged := self.judged_by()) and not self.held_out:
            raise UserError(f"{judged[0]} and --held-out 0: nothing to validate on")
        if self.lr_end and self.schedule == "plateau":
            raise UserError(
                f"--lr-end {self.lr_end:g} and --schedule plateau: that has no end; use linear or"
                " cosine"
            )
        if self.lr_end and self.lr_end > self.resolved_lr:
            raise UserError(
                f"--lr-end {self.lr_end:g}: expected at most --lr, here {self.resolved_lr:g}"
            )
        self._check_data()
        of_bilstm = [name for name in scoped(TrainOptions, BILSTM) if getattr(self, name)]
        words = [f"{flag_of(name)} {getattr(self, name)}" for name in sorted(of_bilstm)]
        words += ["--projection student"] if self.projection == "student" else []
        if words and parse_student(self.student).kind != "bilstm":
            raise UserError(
                f"{words[0]}: only a BiLSTM has that, and --student is {self.student}; leave it"
                " out, or choose bilstm:E,H"
            )
        masked = [f"--loss {loss.name}" for loss in registry.named(self.loss) if loss.of_masked]
        masked += ["--targets masked"] if self.targets == "masked" else []
        if masked and not self.mask_prob:
            raise UserError(f"--mask-prob 0: nothing would be masked for {masked[0]} to learn")
        check_pieces(self.align, self.loss)
        if self.workers and self.cache != "none":
            raise UserError(
                f"--cache {self.cache} and --workers {self.workers}: each process would keep a copy"
                " of its own; give one of the two"
            )

    def _check_data(self) -> None:
        gold, others = self._losses_by_gold()
        if self.data == "unlabelled" and gold:
            raise UserError(
                f"--loss {min(gold)} and --data unlabelled: that text has no gold labels; choose"
                " other losses, or --data all"
            )
        if self.data != "balanced":
            return
        if not gold or not others:
            lacking = "for the unlabelled text" if gold else "of gold labels, such as ce=1"
            raise UserError(f"--data balanced: --loss has none {lacking}; add one")

    def _losses_by_gold(self) -> tuple[dict[str, float], dict[str, float]]:
        names = {loss.name for loss in registry.named(self.loss) if loss.of_gold}
        gold = {name: weight for name, weight in self.loss.items() if name in names}
        return gold, {name: self.loss[name] for name in self.loss if name not in names}

    def shares(self) -> list[TrainOptions]:
        """Return the options for each of the batches that a step takes of a store: one; of a
        balanced stage one of labelled and one of other text, each with its losses."""
        if self.data != "balanced":
            return [self]
        whole = replace(self, stages=())
        kinds = zip(("labelled", "unlabelled"), self._losses_by_gold(), strict=True)
        return [replace(whole, data=data, loss=loss) for data, loss in kinds]

    def in_stage(self, stage: Mapping[str, Any], **more: Any) -> TrainOptions:
        """Return the options of one stage: its own over those of the training, and `more` over
        both."""
        own = {name: value for name, value in stage.items() if name != "unfreeze"}
        others = {name: default_of(TrainOptions, name) for name in ruled_out(own)}
        return replace(self, **{"stages": (), **others, **own, **more})

    def alignment_of(self, loss: str) -> str:
        """Name the alignment of a loss."""
        return parse_alignments(self.align).of(loss)

    def pool_of(self, alignment: str) -> str:
        """Tell how the outputs of a run of an alignment become one: `--pool`, else as the alignment
        has it."""
        return self.pool or ALIGNMENTS[alignment].pool

    @property
    def resolved_pool(self) -> str:
        """Tell how a run's outputs become one: a word, or `match=mean,reduce=sum` where the
        alignments differ in it."""
        chosen = parse_alignments(self.align)
        compared = [loss.name for loss in registry.named(self.losses()) if not loss.of_masked]
        used = {chosen.of(name) for name in compared} if chosen.own else {chosen.others}
        pools = {name: self.pool_of(name) for name in ALIGNMENTS if name in used}
        if len(set(pools.values())) > 1:
            return ",".join(f"{name}={pool}" for name, pool in pools.items())
        return next(iter(pools.values()), self.pool_of(chosen.others))

    @property
    def resolved_lr(self) -> float:
        """Return the peak learning rate: --lr, else the default of adadelta, or of the kind of
        student."""
        if self.lr is not None:
            return self.lr
        if self.optimizer == "adadelta":
            return ADADELTA_LR
        return parse_student(self.student).learning_rate

    def judged_by(self) -> list[str]:
        """Name what validations decide, as the command line spells it; nothing where they only
        tell."""
        asked = {
            "--schedule plateau": self.schedule == "plateau",
            "--best": self.best,
            f"--patience {self.patience}": self.patience,
        }
        return [spelt for spelt, wanted in asked.items() if wanted]

    @property
    def batching(self) -> dict[str, Any]:
        """Return what bounds a batch, as `FeatureStore.stream` takes it."""
        if self.batch_texts is not None:
            return {"batch_texts": self.batch_texts}
        return {"batch_tokens": self.batch_tokens}

    def schedule_over(self, steps: int) -> Schedule:
        """Return the course of the learning rate over a stage of so many steps."""
        warmup = round(steps * self.warmup)
        end = self.lr_end / self.resolved_lr
        return Schedule(self.schedule, steps, warmup, end=end, patience=self.patience)

    def resolved(self) -> TrainOptions:
        """Decide what depends on the machine, device and precision, and 3 epochs where no length is
        given.

        Raises UserError where the machine lacks the device or the optimizer's package.
        """
        check_optimizer(self.optimizer)
        device = resolved_device(self.device)
        precision = resolved_precision(self.precision, device)
        epochs = 3.0 if self.steps is None and self.epochs is None else self.epochs
        return replace(self, device=device, precision=precision, epochs=epochs)

    def describing(self) -> dict[str, Any]:
        """Return all that shapes the student, as JSON: its folder and its machine are left out."""
        apart = scoped(TrainOptions, MACHINE) | {"needs"} | _at_default(self, NEW)
        if not any(each.judged_by() for each in (self, *map(self.in_stage, self.stages))):
            apart |= {"eval_every"}  # validations decide nothing
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        resolved = {"pool": self.resolved_pool, "lr": self.resolved_lr}
        resolved |= {"batch_tokens": self.batching.get("batch_tokens")}
        values |= {"loss": dict(self.loss), "stages": [{**stage} for stage in self.stages]}
        lists = {"freeze": list(self.freeze), "others": list(self.others)}
        return {**values, **lists, **resolved}

    def losses(self) -> set[str]:
        """Name the losses of all stages."""
        return {name for stage in self.stages or ({},) for name in stage.get("loss", self.loss)}

    def name(self) -> str:
        """Return a folder name that tells the main settings, with a short hash of all of them."""
        unnamed = _at_default(self, UNNAMED)
        return folder_name({n: v for n, v in self.describing().items() if n not in unnamed})

    def out_folder(self) -> Path:
        """Return --out, or a folder beside the store named after the settings."""
        return self.out or beside(self.store, "students") / self.name()


def ruled_out(given: Collection[str]) -> frozenset[str]:
    """Name the options that those given rule out: a stage has one length, and a batch one size.

    Raises UserError where two that are given contradict each other.
    """
    found = set[str]()
    for scope in (LENGTH, BATCH):
        rivals = [name for name, about in options_of(TrainOptions).items() if scope in about.scope]
        chosen = [name for name in rivals if name in given]
        if len(chosen) > 1:
            both = " and ".join(map(flag_of, chosen))
            raise UserError(f"{both} contradict each other: give one")
        found |= set(rivals).difference(chosen) if chosen else set()
    return frozenset(found)


def check_stage(stage: Mapping[str, Any], where: str) -> None:
    """Check that a stage has these settings: raise UserError, naming `where`, for any other."""
    known = scoped(TrainOptions, STAGE) | {"unfreeze"}
    if unknown := sorted(stage.keys() - known):
        raise UserError(
            f"{where}: {unknown[0]} is no setting of a stage; there are {', '.join(sorted(known))}"
        )
    if "unfreeze" in stage:
        _check_unfreeze(stage["unfreeze"], where)


def _check_unfreeze(order: Any, where: str) -> None:
    if order == UNFREEZE:
        return
    parts = order if isinstance(order, list | tuple) else ()
    wrong = [p for p in parts if not isinstance(p, str) or not re.fullmatch(FREEZABLE, p)]
    if not parts or wrong or len(set(parts)) < len(parts):
        raise UserError(
            f"{where}: unfreeze {order!r}: expected {UNFREEZE!r}, or a list of parts, each once:"
            f" {PARTS}"
        )


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the settings of training.json with the defaults that it does not tell."""
    untold = {name: default_of(TrainOptions, name) for name in scoped(TrainOptions, NEW)}
    return {**untold, **settings}


def _at_default(options: TrainOptions, scope: str) -> frozenset[str]:
    """Name the options of a scope that have their default."""
    names = scoped(TrainOptions, scope)
    return frozenset(n for n in names if getattr(options, n) == default_of(TrainOptions, n))
