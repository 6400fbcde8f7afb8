"""The options of a training, checked one by one and against each other, and values derived from
them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.student_train.losses import registry
from teachonce.student_train.losses.loss import Loss, Term
from teachonce.student_train.settings.contradictions import (
    NEXT,
    check_alignment_is_read,
    check_together,
)
from teachonce.student_train.settings.naming import (
    MAIN,
    path_next_to,
    settings_digest,
    student_folder,
)
from teachonce.student_train.settings.option_fields import (
    BATCH,
    LENGTH,
    MACHINE,
    STAGE,
    OptionFields,
)
from teachonce.student_train.settings.option_values import (
    EXPECTED_PARTS,
    FOLDER,
    is_part,
    is_shape_of_model,
)
from teachonce.student_train.settings.shapes import Shape, parse_student
from teachonce.student_train.settings.terms import (
    ALIGNMENTS,
    DEFAULT_ALIGNMENT,
    LossAlignments,
    parse_alignments,
)
from teachonce.support.errors import UserError
from teachonce.support.option_types import NotGiven
from teachonce.support.options import (
    check_value,
    default_of,
    flag_of,
    options_of,
    parse_value,
    parse_values,
    scoped,
)
from teachonce.support.packages import check_library
from teachonce.training.device import resolved_device, resolved_precision
from teachonce.training.optimizer import ADADELTA_LR, Schedule, check_optimizer
from teachonce.training.trackers import check_installed

UNFREEZE = "top-down"
CONTINUED = 0.1  # factor of the default learning rate for a model that is already trained


# Not a dataclass itself: mypy would read its fields as what the constructor accepts; see `Given`.
class TrainOptions(OptionFields):
    """Holds every setting of a training; `student-train --help` documents each option.

    If an option was not given, `run` chooses a default that fits the stores, as the command does:
    the losses, the kind of student, its vocabulary and temperature, the size of a batch.

    Raises UserError for an invalid value, in a stage as well, and for options that contradict each
    other.
    """

    @property
    def given(self) -> frozenset[str]:
        """Return the names of all options except those at a default that the stores may change."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return frozenset(name for name, value in values.items() if not isinstance(value, NotGiven))

    if not TYPE_CHECKING:  # a type checker reads the arguments of the dataclass

        @wraps(OptionFields.__init__)
        def __init__(self, *values: Any, **named: Any) -> None:
            if len(values) > 1 or not (values or "store" in named):
                # The second field is `others`, not the vocabulary as for StudentBatches.
                raise TypeError(
                    f"TrainOptions: expected the store, and the other options by name, got"
                    f" {len(values)} values without a name; call TrainOptions(store, vocab=...)"
                )
            super().__init__(*values, **named)

    def __post_init__(self) -> None:
        self._parse_stores_and_stages()
        parse_values(self)
        for number, stage in enumerate(self.stages, 1):
            check_stage(stage, f"stage {number}")
            for name in stage.keys() - {"unfreeze"}:
                with _in_stage(number):
                    check_value(TrainOptions, name, options_of(TrainOptions)[name], stage[name])
        self._check_together(self._left_to_stores())

    def _left_to_stores(self) -> frozenset[str]:
        """Return which of `loss` and `student` the stores decide once they are open: an option that
        was not given, or a `student` that names a model instead of a shape."""
        names = frozenset({"loss", "student"} - self.given)
        return names | {"student"} if is_shape_of_model(self.student) else names

    def _check_together(self, unknown: Set[str]) -> None:
        """Raise UserError for options that contradict each other, in a stage as well. Options are
        not compared with `unknown` ones."""
        check_together(self, unknown)
        if not unknown:
            check_alignment_is_read(self)
        for number, stage in enumerate(self.stages, 1):
            with _in_stage(number):
                check_together(self.in_stage(stage), unknown - stage.keys())

    def _parse_stores_and_stages(self) -> None:
        """Set `store` and `others` from a list of stores, and parse the settings of stages that are
        text."""
        stores = self.store if isinstance(self.store, list | tuple) else [self.store]
        others = self.others if isinstance(self.others, list | tuple) else [self.others]
        if not stores:
            raise UserError("--store: expected at least one store, got an empty list")
        if wrong := [one for one in (*stores, *others) if not isinstance(one, str | os.PathLike)]:
            raise UserError(f"--store {wrong[0]}: expected a path or a URL")
        options = options_of(TrainOptions)
        stages = tuple(
            {n: parse_value(TrainOptions, n, v) if n in options else v for n, v in stage.items()}
            for stage in self.stages
        )
        paths = tuple(map(os.fspath, (*stores[1:], *others)))
        values = {"store": stores[0], "others": paths, "stages": stages}
        vars(self).update(values)  # frozen for its callers

    def __getstate__(self) -> dict[str, Any]:
        # Without the parsed values: the process that unpickles the options has not loaded kinds of
        # student of other packages. Parsing loads them.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def shape(self) -> Shape:
        """Return the parsed `--student`."""
        return parse_student(self.student)

    @cached_property
    def loss_alignments(self) -> LossAlignments:
        """Return the parsed `--align`."""
        return parse_alignments(self.align)

    def alignment_of(self, loss: Loss) -> str:
        """Return the name of a loss's alignment; "" if it needs none."""
        if loss.without_teacher or loss.of_vectors:
            return ""
        return NEXT if loss.of_next else self.loss_alignments.of(loss.name)

    @property
    def alignments(self) -> tuple[str, ...]:
        """Return the alignments of the losses of all stages, in the order of `ALIGNMENTS`."""
        used = {self.alignment_of(loss) for loss in registry.named(self.losses())}
        return tuple(name for name in ALIGNMENTS if name in used)

    def in_stage(self, stage: Mapping[str, Any], **overrides: Any) -> TrainOptions:
        """Return the options of one stage. `overrides` replace values of the stage, and the stage
        replaces values of the training."""
        values = {name: value for name, value in stage.items() if name != "unfreeze"}
        # The `steps` of a stage also replace the training's `epochs`, and its `batch_texts` the
        # `batch_tokens`.
        defaults = {name: default_of(TrainOptions, name) for name in ruled_out(values)}
        return self._with(**{"stages": (), **defaults, **values, **overrides})

    def _with(self, **values: Any) -> TrainOptions:
        """Copy the options with other values, which must be valid."""
        # Not `replace`, which runs every check again: for a recipe of many stages that was most of
        # the time before the first step.
        options = object.__new__(type(self))
        vars(options).update({**vars(self), **values})
        return options

    def pool_of(self, alignment: str) -> str:
        """Return how the outputs of a run are pooled: `--pool`, or the alignment's default."""
        return self.pool or ALIGNMENTS[alignment].pool

    @property
    def resolved_align(self) -> str:
        """Return `--align`, or its default."""
        return self.align or DEFAULT_ALIGNMENT

    @property
    def resolved_pool(self) -> str:
        """Describe how the outputs of a run are pooled: `mean` or `sum`, or `match=mean,reduce=sum`
        if the alignments in use differ."""
        alignments = self.loss_alignments
        compared = [loss.name for loss in registry.named(self.losses()) if not loss.without_teacher]
        used = {alignments.of(name) for name in compared} if alignments.own else {alignments.others}
        pools = {name: self.pool_of(name) for name in ALIGNMENTS if name in used}
        if len(set(pools.values())) > 1:
            return ",".join(f"{name}={pool}" for name, pool in pools.items())
        return next(iter(pools.values()), self.pool_of(alignments.others))

    @property
    def resolved_lr(self) -> float:
        """Return the peak learning rate: --lr, or the default of adadelta or of the student's
        kind."""
        if self.lr is not None:
            return self.lr
        if self.optimizer == "adadelta":
            return ADADELTA_LR
        rate = self.shape.learning_rate
        continued = self.init.startswith(FOLDER) and not self.lora
        return rate * CONTINUED if continued else rate

    def judged_by(self) -> list[str]:
        """List the options that depend on validation, as typed on the command line. If the list is
        empty, validations are only reported."""
        by_option = {
            "--schedule plateau": self.schedule == "plateau",
            "--best": self.best,
            f"--patience {self.patience}": self.patience,
        }
        return [option for option, is_set in by_option.items() if is_set]

    @property
    def batching(self) -> dict[str, Any]:
        """Return the size of a batch, as an argument of `FeatureStore.stream`."""
        if self.batch_texts is not None:
            return {"batch_texts": self.batch_texts}
        return {"batch_tokens": self.batch_tokens}

    def schedule_over(self, steps: int) -> Schedule:
        """Return the learning-rate schedule of a stage of `steps` steps."""
        warmup = round(steps * self.warmup)
        end = self.lr_end / self.resolved_lr
        return Schedule(self.schedule, steps, warmup, end=end, patience=self.patience)

    def resolved(self) -> TrainOptions:
        """Return the options with a concrete device, precision and length (3 epochs if none is
        given).

        Raises UserError if the device, or the package of the optimizer or tracker, is missing.
        """
        if self._left_to_stores():
            self._check_together(frozenset())
        check_optimizer(self.optimizer)
        check_installed(self.log)
        if self.lora:
            check_library("peft", "lora", "--lora")
        device = resolved_device(self.device)
        precision = resolved_precision(self.precision, device)
        epochs = 3.0 if self.steps is None and self.epochs is None else self.epochs
        return self._with(device=device, precision=precision, epochs=epochs)

    def describing(self) -> dict[str, Any]:
        """Return every setting that determines the student's weights, as JSON. Options of the
        machine and the folder are left out."""
        omitted = scoped(TrainOptions, MACHINE) | {"needs"}
        if not any(options.judged_by() for options in (self, *map(self.in_stage, self.stages))):
            omitted |= {"eval_every"}  # validations decide nothing
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in omitted}
        resolved = {"pool": self.resolved_pool, "lr": self.resolved_lr}
        resolved |= {"align": self.resolved_align}
        resolved |= {"batch_tokens": self.batching.get("batch_tokens")}
        values |= {"loss": dict(self.loss), "stages": [{**stage} for stage in self.stages]}
        lists = {name: list(values[name]) for name in ("freeze", "others", "matryoshka")}
        return {**values, **lists, **resolved}

    def chosen(self) -> dict[str, Any]:
        """Return the settings of `describing` that are not at their default."""
        at_default = {
            f.name for f in fields(self) if getattr(self, f.name) == default_of(type(self), f.name)
        }
        if self.align == DEFAULT_ALIGNMENT:  # given or not, it is the same student
            at_default.add("align")
        return {name: value for name, value in self.describing().items() if name not in at_default}

    def losses(self) -> set[str]:
        """Return the names of the losses of all stages."""
        return {name for stage in self.stages or ({},) for name in stage.get("loss", self.loss)}

    def digest(self) -> str:
        """Return a short hash of all settings, which identifies the student's folder."""
        # An option at its default is left out, so that adding an option changes no folder's name.
        return settings_digest(self.describing(), self.chosen())

    def folder_in(self, parent: Path, varied: Sequence[str] = MAIN) -> Path:
        """Return the student's folder in `parent`, named after the `varied` settings and a hash of
        all settings. An existing folder with this hash is returned, whatever its name shows."""
        settings = {"recipe": self.needs.get("recipe", ""), **vars(self)}
        return student_folder(parent, {name: settings[name] for name in varied}, self.digest())

    def out_folder(self) -> Path:
        """Return --out, or a folder in STORE-students, next to the store, named after the settings.

        Raises UserError if --out is not given and the store is remote.
        """
        return self.out or self.folder_in(path_next_to(self.store, "students"))


@dataclass(frozen=True)
class BatchPlan:
    """Holds what determines the batches of a stage.

    options: the options of the stage. A balanced stage has two plans: `data` is "labelled" or
        "unlabelled".
    terms: the weighted losses of the batches, in the order of the registry.
    """

    options: TrainOptions
    terms: tuple[Term, ...]

    @property
    def validated(self) -> tuple[Term, ...]:
        """Return the terms of a validation. For a decoder they always include `next`, with weight 0
        if it is not trained."""
        # Only bits per byte, which `next` gives, compare decoders of any vocabulary and losses.
        causal = self.options.shape.causal
        if not causal or any(term.name == "next" for term in self.terms):
            return self.terms
        return (*(Term(loss, 0.0) for loss in registry.named(["next"])), *self.terms)


@contextmanager
def _in_stage(number: int) -> Iterator[None]:
    """Put the number of a stage before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"stage {number}: {error}") from error


def ruled_out(given: Collection[str]) -> frozenset[str]:
    """Return the options that the given ones exclude: a stage has one length, a batch one size.

    Raises UserError if two of the given options exclude each other.
    """
    excluded = set[str]()
    for scope in (LENGTH, BATCH):
        rivals = [name for name, about in options_of(TrainOptions).items() if scope in about.scope]
        present = [name for name in rivals if name in given]
        if len(present) > 1:
            both = " and ".join(map(flag_of, present))
            raise UserError(f"{both} contradict each other: give one")
        excluded |= set(rivals).difference(present) if present else set()
    return frozenset(excluded)


def check_stage(stage: Mapping[str, Any], where: str) -> None:
    """Check the keys of a stage. Raises UserError, prefixed by `where`, for an unknown key."""
    expected = scoped(TrainOptions, STAGE) | {"unfreeze"}
    if unknown := sorted(stage.keys() - expected):
        raise UserError(
            f"{where}: {unknown[0]} is not a setting of a stage; expected one of"
            f" {', '.join(sorted(expected))}"
        )
    if "unfreeze" in stage:
        _check_unfreeze(stage["unfreeze"], where)


def _check_unfreeze(order: Any, where: str) -> None:
    if order == UNFREEZE:
        return
    parts = order if isinstance(order, list | tuple) else ()
    wrong = [p for p in parts if not isinstance(p, str) or not is_part(p)]
    if not parts or wrong or len(set(parts)) < len(parts):
        raise UserError(
            f"{where}: unfreeze {order!r}: expected {UNFREEZE!r}, or a list of different parts:"
            f" {EXPECTED_PARTS}"
        )
