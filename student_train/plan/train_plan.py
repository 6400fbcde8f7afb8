"""The plan of a training: stores, the student's shape, losses and batches of each stage.

`checks.checked_plan` makes it and compares options with stores; code that runs later takes parts of
the plan.
"""

# No torch here: mistakes are reported before torch is imported, which takes seconds.

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from teachonce.store import FeatureStore, open_store
from teachonce.store.containers.cache_option import is_disk_cache
from teachonce.store.format.features import OutputKind
from teachonce.student_train.data.blocks import chosen_blocks, output_kind_of, split_blocks, view_of
from teachonce.student_train.data.vocabularies import has_teacher_tokenizer
from teachonce.student_train.losses import registry
from teachonce.student_train.losses.loss import Loss, Term
from teachonce.student_train.settings.option_fields import SEEDS
from teachonce.student_train.settings.options import UNFREEZE, BatchPlan, TrainOptions
from teachonce.student_train.settings.shapes import Shape
from teachonce.student_train.settings.terms import ALIGNMENTS, NEXT_TEMPERATURE
from teachonce.support.arrays import Array
from teachonce.support.options import default_of, flag_of, options_of

# With an offset of 1, the second stage of seed 0 would have the order and the masks of the first
# stage of seed 1.
SEEDS_APART = 1009  # stage N adds N times this to the seed: each stage has its own order and masks


@dataclass(frozen=True)
class StoreSplit:
    """Splits an open store into training and held-out blocks. `share` is the held-out share."""

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
        """Return the training blocks [n,2] of a batch plan.

        Raises UserError if no sequence is left.
        """
        key = batch.options.data, batch.options.min_length
        if key not in self._chosen:
            self._chosen[key] = chosen_blocks(self.store, self._split[0], *key)
        return self._chosen[key]


@dataclass(frozen=True)
class Stage:
    """Describes one stage of a training.

    options: its length, learning rate, validation and frozen parts.
    terms: all its losses, which validations compute.
    """

    options: TrainOptions
    terms: tuple[Term, ...]

    @property
    def batches(self) -> tuple[BatchPlan, ...]:
        """Return the plans of the batches that a step takes from each store.

        A step of a balanced stage takes two, one of labelled and one of unlabelled text, each with
        its own losses; any other step takes one.
        """
        if self.options.data != "balanced":
            return (self.validation,)
        gold = tuple(term for term in self.terms if term.loss.of_gold)
        others = tuple(term for term in self.terms if not term.loss.of_gold)
        return (
            BatchPlan(self.options.in_stage({}, data="labelled"), gold),
            BatchPlan(self.options.in_stage({}, data="unlabelled"), others),
        )

    @property
    def validation(self) -> BatchPlan:
        """Return the batch plan of validations, which compute all losses of the stage."""
        return BatchPlan(self.options, self.terms)


@dataclass(frozen=True)
class TrainPlan:
    """Holds a complete plan: the options, the stores, the stages, and the losses of all stages,
    each once, in the order of the registry."""

    options: TrainOptions
    sources: tuple[StoreSplit, ...]
    stages: tuple[Stage, ...]
    terms: tuple[Term, ...]

    @property
    def store(self) -> FeatureStore:
        """Return the first store, which determines vocabulary and initial weights."""
        return self.sources[0].store

    @property
    def stores(self) -> list[FeatureStore]:
        """Return the open stores."""
        return [source.store for source in self.sources]

    def zero_losses(self) -> set[str]:
        """Return the names of the losses that are 0 for every text, because the student has the
        teacher's tokens."""
        edges = {term.name for term in self.terms if term.loss.teacher == "edges"}
        combined = self.options.combine == "outputs"
        same = edges and has_teacher_tokenizer(self.options.vocab, self.stores, combined)
        return edges if same else set()

    def without_effect(self) -> set[str]:
        """Return the names of the options that nothing in the training reads."""
        losses, shape = [term.loss for term in self.terms], self.options.shape
        sides = {loss.student for loss in losses}
        aligned = any(term.alignment and not term.loss.of_next for term in self.terms)
        in_model = self.options.projection == "student"  # part of the model, for any losses
        maps = {loss.of_vectors for loss in losses if self._is_projected(loss)}
        masks = any(map(self._draws_masks, self.stages))
        task = self.store.task
        readers = {
            "combine": len(self.sources) > 1,
            "align": aligned,
            # A decoder's states are read at the last token of a run.
            "pool": not shape.causal and not sides.isdisjoint({"runs", "pieces"}),
            "temperature": any(loss.tempered for loss in losses),
            "targets": "pieces" in sides,
            "projection": bool(maps) or in_model,
            # The map of text vectors has no bias, and always the initial weights of PyTorch.
            "projection_start": False in maps and not in_model,
            "outputs": {"classes", "scores"} <= sides,
            "freeze": bool(maps) or in_model or set(self.options.freeze) != {"projection"},
            "dropout": shape.layers > 0,
            "classifier_pooling": task is not None and task.kind == "classification",
            **dict.fromkeys(("mask_prob", "mask_words", "max_masks"), masks),
        }
        return {name for name, is_read in readers.items() if not is_read}

    def unread(self) -> list[str]:
        """List the options, as typed, that were given and that nothing in the training reads."""
        given = {name: getattr(self.options, name) for name in self.without_effect()}
        defaults = {name: default_of(TrainOptions, name) for name in given}
        if self.options.shape.causal:
            # The default of a decoder, and its only alignment.
            defaults |= {"temperature": NEXT_TEMPERATURE, "align": given.get("align")}
        return [
            f"{flag_of(name)} {','.join(v) if isinstance(v := given[name], tuple) else v}"
            for name in options_of(TrainOptions)
            if name in given and given[name] != defaults[name]
        ]

    def _is_projected(self, loss: Loss) -> bool:
        """Return whether the student's states pass through a linear map in a loss, for any of the
        stores."""
        if loss.projection != "widths differ":
            return loss.projection == "always"
        features = [store.features for store in self.stores]
        vectors = {f.embedding.width for f in features if f.embedding}
        widths = vectors if loss.of_vectors else {f.width for f in features}
        return widths != {self.options.shape.width}

    def _draws_masks(self, stage: Stage) -> bool:
        """Return whether a training draws the masks of a stage; a masked view has the masks of its
        dump."""
        if self.options.shape.causal or self.store.task:
            return False
        views = {view_of(0, store.features, stage.options.view) for store in self.stores}
        return 0 in views and registry.reads_masked_tokens([term.loss for term in stage.terms])

    def resolved(self) -> TrainPlan:
        """Return the plan with resolved options; see `TrainOptions.resolved`."""
        stages = tuple(replace(stage, options=stage.options.resolved()) for stage in self.stages)
        return replace(self, options=self.options.resolved(), stages=stages)


def check_arguments(caller: str, options: object, *stores: object) -> None:
    """Raise TypeError for options that are no TrainOptions, and for the path of a store."""
    if not isinstance(options, TrainOptions):
        raise TypeError(
            f"{caller}: expected TrainOptions, got {type(options).__name__}; give"
            " TrainOptions(store, vocab=...), or the attribute `options` of StudentBatches"
        )
    # Not an instance of FeatureStore: any object with the methods of one will do.
    for store in stores:
        if isinstance(store, str | os.PathLike):
            raise TypeError(f"{caller}: {store} is a path; give open_store({str(store)!r})")


def plan_of(
    options: TrainOptions, store: FeatureStore, *others: FeatureStore, layers: int | None = None
) -> TrainPlan:
    """Plan a training without checks. `layers` is the student's number of layers, by default that
    of `--student`."""
    output_kind = output_kind_of(store)
    stages = stages_of(options, options.shape.layers if layers is None else layers)
    return TrainPlan(
        options,
        tuple(StoreSplit(s, options.held_out) for s in (store, *others)),
        tuple(Stage(stage, terms_of(stage, output_kind)) for stage in stages),
        every_term(options, output_kind),
    )


def terms_of(options: TrainOptions, output_kind: OutputKind | None) -> tuple[Term, ...]:
    """Resolve the losses of a student, in the order of the registry.

    output_kind: the kind of its task outputs; None for a student with an MLM head. Losses of other
    students are left out.
    """
    # A Ray worker or a process of torchrun unpickles the options without checking them: the losses
    # of other packages are not loaded there yet.
    for name in options.loss:
        registry.find(name)
    terms = []
    for loss in registry.losses_for(output_kind, options.loss):
        name = options.alignment_of(loss)
        terms.append(
            Term(
                loss,
                options.loss[loss.name],
                name,
                options.pool_of(name) if name else "mean",
                options.temperature if loss.tempered else None,
                options.matryoshka if loss.nests else (),
                bool(name) and ALIGNMENTS[name].pools_logits,
            )
        )
    return tuple(terms)


def every_term(options: TrainOptions, output_kind: OutputKind | None) -> tuple[Term, ...]:
    """Resolve the losses of all stages, each once, in the order of the registry."""
    stages = [options.in_stage(stage) for stage in options.stages or ({},)]
    by_loss = {term.loss: term for stage in stages for term in terms_of(stage, output_kind)}
    return tuple(by_loss[loss] for loss in registry.losses_for(output_kind, options.losses()))


def stages_of(options: TrainOptions, layers: int) -> list[TrainOptions]:
    """Return the options of each stage, for a student with `layers` layers.

    A stage with `unfreeze` becomes several stages of its length: the first trains the first part of
    the list, and each following stage trains one part more. Parts that are not in the list stay
    frozen. `top-down` is the list of the head, a projection that is part of the student, the layers
    from the top, and the embeddings. Gradual unfreezing: Howard & Ruder 2018, section 3.3;
    Mukherjee & Awadallah 2019, section 5.2, and 2020, algorithm 1.
    """
    stages = [phase for stage in options.stages for phase in _unfrozen(stage, layers, options)]
    return [
        # Modulo SEEDS, as `--seed` accepts only smaller numbers.
        options.in_stage(stage, seed=(options.seed + SEEDS_APART * number) % SEEDS)
        for number, stage in enumerate(stages or [{}])
    ]


def _unfrozen(stage: Mapping[str, Any], layers: int, options: TrainOptions) -> list[dict[str, Any]]:
    settings = {name: value for name, value in stage.items() if name != "unfreeze"}
    if len(settings) == len(stage):
        return [settings]
    always, order, trained = settings.get("freeze", options.freeze), stage["unfreeze"], set[str]()
    if order == UNFREEZE:
        order = [f"layers.{layer}" for layer in range(layers, 0, -1)]
        order = ["head", "projection", *order, "embeddings"]
        if options.projection != "student":
            order.remove("projection")  # used by losses only, and trained in every stage
            trained.add("projection")
    shape = options.shape
    return [
        settings | {"freeze": (*always, *_untrained(trained.union(order[:count]), layers, shape))}
        for count in range(1, len(order) + 1)
    ]


def _untrained(trained: set[str], layers: int, shape: Shape) -> list[str]:
    """Return the parts of a student that are frozen while `trained` are trained."""
    frozen = []
    if "embeddings" not in trained:
        kinds = shape.kinds_of_embeddings
        frozen += (
            [kind for kind in kinds if kind not in trained]
            if trained.intersection(kinds)
            else ["embeddings"]
        )
    if "layers" not in trained:
        numbered = (f"layers.{layer}" for layer in range(1, layers + 1))
        frozen += [layer for layer in numbered if layer not in trained]
    return frozen + [part for part in ("head", "projection") if part not in trained]


class Stores:
    """Opens the stores of a training once, on first use."""

    def __init__(self, paths: Sequence[Any], allow_partial: bool = False, cache: str = "") -> None:
        self._paths, self._partial = paths, allow_partial
        self._cache = cache if is_disk_cache(cache) else None
        self._closing = ExitStack()

    @cached_property
    def opened(self) -> list[FeatureStore]:
        """Open the stores. Raises StoreError for a store that cannot be read."""
        return [
            self._closing.enter_context(
                closing(open_store(path, allow_partial=self._partial, cache=self._cache))
            )
            for path in self._paths
        ]

    def close(self) -> None:
        """Close the stores that were opened."""
        self._closing.close()
