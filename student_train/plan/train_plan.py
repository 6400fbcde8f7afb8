"""The plan of a training: stores, the student's shape, losses and batches of each stage.

`checks.checked_plan` makes it and compares options and stores; all that runs later takes parts of
the plan. This module needs no torch, so that mistakes are reported before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from teachonce.store import FeatureStore, open_store
from teachonce.store.containers.cache_option import is_disk_cache
from teachonce.student_train.data.blocks import chosen_blocks, output_kind_of, split_blocks
from teachonce.student_train.losses.registry import Term
from teachonce.student_train.settings.option_fields import SEEDS
from teachonce.student_train.settings.options import UNFREEZE, TrainOptions
from teachonce.student_train.settings.shapes import Shape, parse_student
from teachonce.student_train.settings.terms import BatchPlan
from teachonce.support.arrays import Array

SEEDS_APART = 1009  # gives each stage other batches than the stage before it


@dataclass(frozen=True)
class Source:
    """An open store, and which of its sequences a training reads. `share` is held out."""

    store: FeatureStore
    share: float
    _chosen: dict[tuple[str, int], Array] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _split(self) -> tuple[Array, Array]:
        return split_blocks(self.store, self.share)

    @property
    def held_out(self) -> Array:
        """Return the blocks [n,2] to validate on."""
        return self._split[1]

    def blocks(self, batch: BatchPlan) -> Array:
        """Return the blocks [n,2] that such batches are made of.

        Raises UserError if no sequence is left.
        """
        key = batch.data, batch.min_length
        if key not in self._chosen:
            self._chosen[key] = chosen_blocks(self.store, self._split[0], *key)
        return self._chosen[key]


@dataclass(frozen=True)
class Stage:
    """One stage of a training.

    options: its length, rates, validations and frozen parts.
    terms: all its losses, which validations measure.
    batches: what a step takes of each store.
    """

    options: TrainOptions
    terms: tuple[Term, ...]
    batches: tuple[BatchPlan, ...]

    @property
    def measured(self) -> BatchPlan:
        """Return the plan of the batches that validations read: all losses, all sequences."""
        return self.options.batch_plan(self.terms)


@dataclass(frozen=True)
class TrainPlan:
    """All that a training does: its options, its stores, the student's shape, its stages."""

    options: TrainOptions
    sources: tuple[Source, ...]
    shape: Shape
    stages: tuple[Stage, ...]

    @property
    def store(self) -> FeatureStore:
        """Return the first store, which decides vocabulary and start."""
        return self.sources[0].store

    @property
    def stores(self) -> list[FeatureStore]:
        """Return the open stores."""
        return [source.store for source in self.sources]

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Return the losses of all stages, each once, in the order of the registry."""
        return self.options.every_term(output_kind_of(self.store))

    def resolved(self) -> TrainPlan:
        """Decide what depends on the machine; see `TrainOptions.resolved`."""
        return plan_of(self.options.resolved(), *self.stores)


def plan_of(
    options: TrainOptions,
    store: FeatureStore,
    *others: FeatureStore,
    layers: int | None = None,
) -> TrainPlan:
    """Plan a training, unchecked, of a student with so many `layers`, by default those of
    `--student`."""
    shape = parse_student(options.student)
    answers = output_kind_of(store)
    stages = stages_of(options, shape.layers if layers is None else layers)
    return TrainPlan(
        options,
        tuple(Source(each, options.held_out) for each in (store, *others)),
        shape,
        tuple(Stage(stage, stage.terms(answers), stage.batches(answers)) for stage in stages),
    )


def stages_of(options: TrainOptions, layers: int) -> list[TrainOptions]:
    """Return the options of each stage, of a student with so many layers.

    A stage with `unfreeze` becomes many, each of its length: the first trains the first part of
    that list, each further one a part more. What is not in the list keeps its weights. `top-down`
    stands for the head, a projection that is part of the student, each layer from the top, and the
    embeddings (gradual unfreezing: Howard & Ruder 2018, section 3.3; Mukherjee & Awadallah 2019,
    section 5.2, and 2020, algorithm 1).
    """
    every = [each for stage in options.stages for each in _unfrozen(stage, layers, options)]
    return [
        options.in_stage(stage, seed=(options.seed + SEEDS_APART * number) % SEEDS)
        for number, stage in enumerate(every or [{}])
    ]


def _unfrozen(stage: Mapping[str, Any], layers: int, options: TrainOptions) -> list[dict[str, Any]]:
    plain = {name: value for name, value in stage.items() if name != "unfreeze"}
    if len(plain) == len(stage):
        return [plain]
    always, order, trained = plain.get("freeze", options.freeze), stage["unfreeze"], set[str]()
    if order == UNFREEZE:
        order = [f"layers.{layer}" for layer in range(layers, 0, -1)]
        order = ["head", "projection", *order, "embeddings"]
        if options.projection != "student":
            order.remove("projection")  # it serves the losses alone, and is always trained
            trained.add("projection")
    shape = parse_student(options.student)
    return [
        plain | {"freeze": (*always, *_untrained(trained.union(order[:count]), layers, shape))}
        for count in range(1, len(order) + 1)
    ]


def _untrained(trained: set[str], layers: int, shape: Shape) -> list[str]:
    """Name the parts of a student that are frozen while those of `trained` are trained."""
    found = []
    if "embeddings" not in trained:
        kinds = shape.kinds_of_embeddings
        found += (
            [kind for kind in kinds if kind not in trained]
            if trained.intersection(kinds)
            else ["embeddings"]
        )
    if "layers" not in trained:
        numbered = (f"layers.{layer}" for layer in range(1, layers + 1))
        found += [layer for layer in numbered if layer not in trained]
    return found + [part for part in ("head", "projection") if part not in trained]


class Stores:
    """The stores of a training, opened once, when they are first read."""

    def __init__(self, paths: Sequence[Any], allow_partial: bool = False, cache: str = "") -> None:
        self._paths, self._partial = paths, allow_partial
        self._cache = cache if is_disk_cache(cache) else None
        self._closing = ExitStack()

    @cached_property
    def opened(self) -> list[FeatureStore]:
        """Open the stores. Raises StoreError for one that cannot be read."""
        return [
            self._closing.enter_context(
                closing(open_store(path, allow_partial=self._partial, cache=self._cache))
            )
            for path in self._paths
        ]

    def close(self) -> None:
        """Close what was opened."""
        self._closing.close()
