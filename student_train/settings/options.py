"""The options of a training: checked one by one and against one another, and what follows from
them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from teachonce.store.containers.cache_word import is_disk_cache
from teachonce.store.format.features import OutputKind
from teachonce.student_train.losses import registry
from teachonce.student_train.losses.registry import Term
from teachonce.student_train.settings.alignments import ALIGNMENTS
from teachonce.student_train.settings.naming import beside, folder_name
from teachonce.student_train.settings.option_fields import (
    BATCH,
    BILSTM,
    LENGTH,
    MACHINE,
    STAGE,
    OptionFields,
)
from teachonce.student_train.settings.shapes import parse_student
from teachonce.student_train.settings.terms import (
    BatchPlan,
    check_pieces,
    parse_alignments,
)
from teachonce.student_train.settings.words import EXPECTED_PARTS, is_part, stays_in_memory
from teachonce.support.errors import UserError
from teachonce.support.options import (
    check_value,
    check_values,
    default_of,
    flag_of,
    options_of,
    scoped,
)
from teachonce.training.device import resolved_device, resolved_precision
from teachonce.training.optimizer import ADADELTA_LR, check_optimizer
from teachonce.training.schedule import Schedule
from teachonce.training.trackers import check_installed

UNFREEZE = "top-down"


@dataclass(frozen=True)
class TrainOptions(OptionFields):
    """Holds everything that decides what a student becomes; `student-train --help` tells of each
    option.

    Raises UserError for a value that an option does not take, in a stage as well, and for options
    that contradict each other.
    """

    def __post_init__(self) -> None:
        check_values(self)
        self._check_together()
        for number, stage in enumerate(self.stages, 1):
            check_stage(stage, f"stage {number}")
            try:
                self._check_stage(stage)
            except UserError as error:
                raise UserError(f"stage {number}: {error}") from error

    def _check_stage(self, stage: Mapping[str, Any]) -> None:
        for name in stage.keys() - {"unfreeze"}:
            check_value(TrainOptions, name, options_of(TrainOptions)[name], stage[name])
        self.in_stage(stage)._check_together()

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
        nested = [loss for loss in registry.named(self.losses()) if loss.nests]
        if self.matryoshka and not nested:
            raise UserError(
                f"--matryoshka {','.join(map(str, self.matryoshka))}: no loss teaches parts of a"
                " vector; add similarity or similarity-kl to --loss"
            )
        if is_disk_cache(self.cache) and not any(
            "://" in str(path) for path in (self.store, *self.others)
        ):
            raise UserError(
                f"--cache {self.cache}: for stores behind a URL, and {self.store} lies on a disk;"
                " leave --cache out, or give ram"
            )
        if self.workers and stays_in_memory(self.cache):
            raise UserError(
                f"--cache {self.cache} and --workers {self.workers}: each process would keep a copy"
                " of its own; give one of the two"
            )

    def _check_data(self) -> None:
        named = {loss.name for loss in registry.named(self.loss) if loss.of_gold}
        gold, others = named.intersection(self.loss), self.loss.keys() - named
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

    def terms(self, answers: OutputKind | None) -> tuple[Term, ...]:
        """Resolve the losses of a student of a task with such `answers`, or for None of a
        vocabulary, in the order of the registry. Names that such a student has no loss of are left
        out."""
        for name in self.loss:
            registry.find(name)  # this may be another process than the one that checked them
        aligned = parse_alignments(self.align)
        found = []
        for loss in registry.losses_for(answers, self.loss):
            name = "" if loss.of_masked or loss.of_text else aligned.of(loss.name)
            found.append(
                Term(
                    loss,
                    self.loss[loss.name],
                    name,
                    self.pool_of(name) if name else "mean",
                    self.temperature if loss.tempered else None,
                    self.matryoshka if loss.nests else (),
                    bool(name) and ALIGNMENTS[name].pools_logits,
                )
            )
        return tuple(found)

    def every_term(self, answers: OutputKind | None) -> tuple[Term, ...]:
        """Resolve the losses of all stages, each once, in the order of the registry."""
        stages = [self.in_stage(stage).terms(answers) for stage in self.stages or ({},)]
        found = {term.loss: term for terms in stages for term in terms}
        return tuple(found[loss] for loss in registry.losses_for(answers, self.losses()))

    def batches(self, answers: OutputKind | None) -> tuple[BatchPlan, ...]:
        """Plan the batches that a step takes of a store: one; of a balanced stage one of labelled
        and one of other text, each with its losses."""
        plan = self.batch_plan(self.terms(answers))
        if self.data != "balanced":
            return (plan,)
        gold = tuple(term for term in plan.terms if term.loss.of_gold)
        others = tuple(term for term in plan.terms if not term.loss.of_gold)
        return (
            replace(plan, data="labelled", terms=gold),
            replace(plan, data="unlabelled", terms=others),
        )

    def batch_plan(self, terms: tuple[Term, ...]) -> BatchPlan:
        """Plan batches that teach these terms."""
        return BatchPlan(
            terms,
            self.data,
            self.min_length,
            self.batching,
            self.view,
            self.mask_prob,
            self.mask_words == "rare",
            self.max_masks,
            self.targets,
        )

    def in_stage(self, stage: Mapping[str, Any], **more: Any) -> TrainOptions:
        """Return the options of one stage: its own over those of the training, and `more` over
        both."""
        own = {name: value for name, value in stage.items() if name != "unfreeze"}
        others = {name: default_of(TrainOptions, name) for name in ruled_out(own)}
        return self._with(**{"stages": (), **others, **own, **more})

    def _with(self, **values: Any) -> TrainOptions:
        """Copy the options with other values, which were checked: checking all of them again for
        each stage is most of what a training of two steps did before its first step."""
        other = copy.copy(self)
        vars(other).update(values)
        return other

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
        check_installed(self.log)
        device = resolved_device(self.device)
        precision = resolved_precision(self.precision, device)
        epochs = 3.0 if self.steps is None and self.epochs is None else self.epochs
        return self._with(device=device, precision=precision, epochs=epochs)

    def describing(self) -> dict[str, Any]:
        """Return all that shapes the student, as JSON: its folder and its machine are left out."""
        apart = scoped(TrainOptions, MACHINE) | {"needs"}
        if not any(each.judged_by() for each in (self, *map(self.in_stage, self.stages))):
            apart |= {"eval_every"}  # validations decide nothing
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        resolved = {"pool": self.resolved_pool, "lr": self.resolved_lr}
        resolved |= {"batch_tokens": self.batching.get("batch_tokens")}
        values |= {"loss": dict(self.loss), "stages": [{**stage} for stage in self.stages]}
        lists = {name: list(values[name]) for name in ("freeze", "others", "matryoshka")}
        return {**values, **lists, **resolved}

    def chosen(self) -> dict[str, Any]:
        """Return those settings of `describing` that are not at their default."""
        plain = {
            f.name for f in fields(self) if getattr(self, f.name) == default_of(type(self), f.name)
        }
        return {name: value for name, value in self.describing().items() if name not in plain}

    def losses(self) -> set[str]:
        """Name the losses of all stages."""
        return {name for stage in self.stages or ({},) for name in stage.get("loss", self.loss)}

    def name(self) -> str:
        """Return a folder name that tells the main settings, with a short hash of all of them."""
        # An option at its default is left out, so that a later option changes no folder's name.
        return folder_name(self.describing(), self.chosen())

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
    wrong = [p for p in parts if not isinstance(p, str) or not is_part(p)]
    if not parts or wrong or len(set(parts)) < len(parts):
        raise UserError(
            f"{where}: unfreeze {order!r}: expected {UNFREEZE!r}, or a list of parts, each once:"
            f" {EXPECTED_PARTS}"
        )
