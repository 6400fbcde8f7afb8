"""What a student is asked for."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from support.console import check_device
from support.errors import UserError
from training.optimizer import check_optimizer
from training.rare_masks import MASK_WORDS

ALIGNMENTS = ("span", "match", "reduce")
DATA = ("all", "labelled")
CACHES = ("none", "ram", "device")
LENGTH = {"steps", "epochs"}  # the one takes the place of the other
FREEZABLE = r"embeddings|words|positions|layers(\.[1-9][0-9]*)?|head|projection"
DEFAULT_LOSS: Mapping[str, float] = {"mlm": 1.0, "hidden": 30.0}
SEEDS = 2**32
GREATEST_RATE, RATE_TIMES_WIDTH = 4e-3, 0.5  # the best rate falls with the student's width
RECURRENT_RATE = 3e-3  # of a BiLSTM, at any width


@dataclass(frozen=True)
class TrainOptions:
    """Everything that decides what a student becomes; see `student-train --help` for each."""

    store: str
    others: tuple[str, ...] = ()
    vocab: str = "5k"
    out: Path | None = None
    student: str = "tiny"
    align: str = "span"
    pool: str | None = None
    loss: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_LOSS))
    temperature: float = 2.0
    targets: str = "all"
    projection: str = "trainable"
    init: str = "auto"
    word_vectors: str | None = None
    view: int | None = None
    steps: int | None = None
    epochs: float | None = None
    batch_tokens: int = 1024
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float | None = None
    warmup: float = 0.05
    schedule: str = "linear"
    weight_decay: float = 0.01
    clip: float = 1.0
    mask_prob: float = 0.15
    mask_words: str = "uniform"
    max_length: int | None = None
    min_length: int = 0
    data: str = "all"
    freeze: tuple[str, ...] = ()
    best: bool = False
    stages: tuple[Mapping[str, Any], ...] = ()
    needs: Mapping[str, Any] = field(default_factory=dict)  # of the stores, by their recipe
    held_out: float = 0.02
    eval_every: int | None = None
    checkpoint_every: int | None = None
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    workers: int = 0
    cache: str = "none"
    allow_partial: bool = False

    @property
    def resolved_pool(self) -> str:
        """Runs are summed under reduce (Kolesnikova et al. 2022), averaged otherwise."""
        return self.pool or ("sum" if self.align == "reduce" else "mean")

    @property
    def resolved_lr(self) -> float:
        """The peak learning rate: --lr, else by the student's width."""
        from student_train.model.kinds import parse_student

        if self.lr is not None:
            return self.lr
        shape = parse_student(self.student)
        if not shape.heads:
            return RECURRENT_RATE
        return min(GREATEST_RATE, RATE_TIMES_WIDTH / shape.width)

    def resolved(self) -> TrainOptions:
        """The same options with what depends on the machine decided."""
        import torch  # here and not above: --help must not wait for it

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if _multiplies_bf16(device) else "fp32"
        epochs = 3.0 if self.steps is None and self.epochs is None else self.epochs
        return replace(self, device=device, precision=precision, epochs=epochs)

    def check(self) -> None:
        """Refuse, in one line, what cannot work whatever the store is. For resolved options."""
        import torch

        from student_train.losses.registry import loss_names

        if self.steps is not None and self.epochs is not None:
            raise UserError("--steps and --epochs contradict each other: give one")
        if not self.loss or not all(0 < weight < math.inf for weight in self.loss.values()):
            raise UserError("--loss: at least one loss, each with a weight above 0")
        for name in self.loss:
            if name not in loss_names():
                raise UserError(f"--loss {name}: unknown; there are {', '.join(loss_names())}")
        for name, wanted in (("--schedule plateau", self.schedule == "plateau"),
                             ("--best", self.best)):  # fmt: skip
            if wanted and not self.held_out:
                raise UserError(f"{name} and --held-out 0: nothing to validate on")
        for name, value, known in (
            ("align", self.align, ALIGNMENTS),
            ("data", self.data, DATA),
            ("mask-words", self.mask_words, MASK_WORDS),
            ("cache", self.cache, CACHES),
        ):
            if value not in known:
                raise UserError(f"--{name} {value}: expected one of {', '.join(known)}")
        for group in self.freeze:
            if not re.fullmatch(FREEZABLE, group):
                raise UserError(
                    f"--freeze {group}: expected embeddings, words, positions, layers, layers.N,"
                    " head or projection"
                )
        if not self.mask_prob and ("mlm" in self.loss or self.targets == "masked"):
            raise UserError("--mask-prob 0: nothing would be masked for --loss mlm to learn")
        positive = (
            "batch_tokens",
            "accumulate",
            "lr",
            "temperature",
            "clip",
            "steps",
            "epochs",
            "eval_every",
            "checkpoint_every",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(
                    f"--{name.replace('_', '-')} {value}: expected a finite number above 0"
                )
        for name in ("warmup", "mask_prob", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: expected a share from 0 to"
                    " below 1"
                )
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"--weight-decay {self.weight_decay:g}: expected 0 or more, and finite")
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"--seed {self.seed}: expected 0 to {SEEDS - 1}")
        if self.max_length is not None and self.max_length < 3:
            raise UserError(
                f"--max-length {self.max_length}: at least 3, two special tokens and one of text"
            )
        if self.precision not in ("bf16", "fp32"):
            raise UserError(f"--precision {self.precision}: expected auto, bf16 or fp32")
        for name, number in (("workers", self.workers), ("min-length", self.min_length)):
            if number < 0:
                raise UserError(f"--{name} {number}: expected 0 or more")
        if self.workers and self.cache != "none":
            raise UserError(
                f"--cache {self.cache} and --workers {self.workers}: each process would keep a copy"
                " of its own; give one of the two"
            )
        check_optimizer(self.optimizer)
        check_device(self.device, torch.cuda.device_count())

    def describing(self) -> dict[str, Any]:
        """All that shapes the student, as JSON: where it goes and on what it runs left out."""
        values = asdict(self)
        for name in ("out", "needs", "device", "checkpoint_every", "allow_partial", "workers",
                     "cache"):  # fmt: skip
            del values[name]
        stages = [vars(self), *self.stages]
        if not any(s.get("best") or s.get("schedule") == "plateau" for s in stages):
            del values["eval_every"]  # validations decide nothing
        resolved = {"pool": self.resolved_pool, "lr": self.resolved_lr}
        values |= {"loss": dict(self.loss), "stages": [{**stage} for stage in self.stages]}
        lists = {"freeze": list(self.freeze), "others": list(self.others)}
        return {**values, **lists, **resolved}

    def losses(self) -> set[str]:
        """Names of the losses of all stages."""
        return {name for stage in self.stages or ({},) for name in stage.get("loss", self.loss)}

    def name(self) -> str:
        """A folder name that tells the main settings, with a short hash of all of them."""
        loss = "+".join(f"{name}{weight:g}" for name, weight in self.loss.items())
        # Of the store only its name counts: spelled otherwise or moved it is the same one.
        names = {"store": Path(self.store).name, "others": [Path(o).name for o in self.others]}
        kind, colon, chosen = self.init.partition(":")
        start = f"{kind}{colon}{Path(chosen).name}"
        values = self.describing() | names | {"init": start}
        if self.optimizer == TrainOptions.optimizer:
            del values["optimizer"]  # it came later: students of before keep their names
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
        settings = (
            Path(self.vocab).name,
            self.student,
            self.align,
            loss,
            start,
            f"seed{self.seed}",
        )
        return "-".join((*settings, digest)).replace(",", ".").replace(":", "")

    def out_folder(self) -> Path:
        """--out, or a folder beside the store named after the settings."""
        return self.out or beside(self.store, "students") / self.name()


def beside(store: str, what: str) -> Path:
    """The folder STORE-WHAT beside a store; UserError if the store is not on this machine."""
    if "://" in store:
        raise UserError(f"{store} is not on this machine: give --out, too")
    return Path(store).parent / f"{Path(store).stem}-{what}"


def _multiplies_bf16(device: str) -> bool:
    """Whether the hardware does it, rather than emulate it slowly."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def parse_losses(words: tuple[str, ...]) -> dict[str, float]:
    """`name=weight` words, repeated or as comma lists; UserError for anything else."""
    weights: dict[str, float] = {}
    for word in (item.strip() for value in words for item in value.split(",")):
        name, _, weight = word.partition("=")
        try:
            found = float(weight or 1)
        except ValueError:
            raise UserError(f"--loss {word}: expected NAME=WEIGHT, such as kl=2") from None
        if name in weights:
            raise UserError(f"--loss {word}: {name} is given twice; give each loss one weight")
        weights[name] = found
    return weights


def _told_stage(stage: Mapping[str, Any]) -> str:
    words = {**stage, "loss": " + ".join(f"{w:g} {n}" for n, w in stage.get("loss", {}).items())}
    words["freeze"] = ",".join(stage.get("freeze", ()))
    return "; ".join(f"{name} {value}" for name, value in words.items() if value not in ("", False))


def describe(options: TrainOptions) -> str:
    """The settings of a training, as they are printed at its start."""
    loss = " + ".join(f"{weight:g} {name}" for name, weight in options.loss.items())
    length = f"{options.epochs:g} epochs" if options.steps is None else f"{options.steps} steps"
    each = ""
    if options.stages:
        loss, each = "of each stage", " in each stage, and for each part that it unfreezes"
    rows = {
        "store": ", ".join((options.store, *options.others)),
        "student": f"{options.student}, vocabulary {options.vocab}, start {options.init}",
        "losses": (
            f"{loss}; {options.align}, pool {options.resolved_pool}, {options.projection}"
            " projection"
        ),
        "training": (
            f"{length} of {options.batch_tokens} x {options.accumulate} tokens{each},"
            f" {options.optimizer}, lr {options.resolved_lr:.2g} {options.schedule},"
            f" seed {options.seed}"
        ),
        **{f"stage {n}": _told_stage(stage) for n, stage in enumerate(options.stages, 1)},
        "device": f"{options.device}, {options.precision}"
        + (f", cache {options.cache}" if options.cache != "none" else ""),
        "out": str(options.out_folder()),
    }
    return "\n".join(f"{name:9} {value}" for name, value in rows.items())
