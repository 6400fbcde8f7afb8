"""The batches of `student-train` as a torch IterableDataset, for your own training loop."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.arguments import with_store_defaults
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.spelled_text import check_spelling
from teachonce.student_train.data.stream import BatchOrder, ready
from teachonce.student_train.model.any_student import check_fits
from teachonce.student_train.model.student_tokenizer import (
    check_student_tokenizer,
    student_tokenizer,
)
from teachonce.student_train.output.run import check_tokenizers
from teachonce.student_train.plan.checks import check_batches
from teachonce.student_train.plan.train_plan import plan_of
from teachonce.student_train.prepared_student import make_collator, prepare_tokenizer
from teachonce.student_train.settings.option_values import is_model_folder
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import evaluate, held_out
from teachonce.support.background import prefetched
from teachonce.support.environment import torchrun_number, warn_of_spinning
from teachonce.support.errors import UserError, suggest
from teachonce.support.options import parse_value


class BatchSettings(TypedDict, total=False):
    """Holds options of `student-train` that batches and losses depend on; see `TrainOptions`."""

    loss: str | Sequence[str] | Mapping[str, float]
    align: str | Sequence[str]
    pool: str | None
    temperature: float
    targets: str
    matryoshka: str | int | Sequence[int]
    projection: str
    outputs: str
    batch_tokens: int
    batch_texts: int | None
    seed: int
    view: int | None
    held_out: float
    data: str
    min_length: int
    max_length: int | None
    mask_prob: float
    mask_words: str
    max_masks: int | None
    student: str


class StudentBatches(IterableDataset[StudentBatch]):
    """Iterate over the batches of one epoch of a store: tokenized for a student, masked and aligned
    as by `student-train`. With a DataLoader, pass `batch_size=None` and
    `multiprocessing_context="forkserver"`: forked workers may hang in a matrix product of MKL.

    store: a FeatureStore, or its path or URL.
    vocab: a value of `--vocab`, such as `5k`, 8000 or a folder, or a fast tokenizer of
        transformers, which is copied; None for the default of `--vocab`.
    device: the device of the batches, a value of `--device`. Workers of a DataLoader leave them on
        the CPU; call `batch.to(device)`, which does nothing if the batch is already there.
    rank, world_size: this process and the number of processes, by default from torchrun or
        torch.distributed. Every process yields the same number of batches; the remainder is
        dropped.
    settings: the keywords of `BatchSettings`, options of `student-train` with the defaults of the
        command. Set `student` for a BiLSTM, for a ModernBERT with text pairs, and for a decoder
        in a folder.

    The order, and the masks of view 0, are a pure function of (seed, epoch), for any number of
    workers. `set_epoch` chooses the epoch; without it each pass is epoch 0. `len()` is the number
    of batches per epoch in this process. Public attributes: `store`, `tokenizer`, `options`,
    `collator`. Raises UserError for an unknown setting, and for a setting that the store cannot
    serve.
    """

    def __init__(
        self,
        store: FeatureStore | str | Path,
        vocab: Any = None,
        *,
        device: torch.device | str = "cpu",
        rank: int | None = None,
        world_size: int | None = None,
        **settings: Unpack[BatchSettings],
    ) -> None:
        if isinstance(vocab, int | os.PathLike):
            vocab = str(vocab)
        self.store = store if isinstance(store, FeatureStore) else open_store(store)
        check_tokenizers(self.store)
        self.rank, self.world_size = _place(rank, world_size)
        self.options = _options(self.store, vocab, str(device), settings)
        self.device = torch.device(self.options.device)
        if self.device.type == "cpu":
            warn_of_spinning(torch.get_num_threads())
        plan = plan_of(self.options, self.store)
        check_batches(plan)
        (self._plan,), (source,) = plan.stages[0].batches, plan.sources
        self._blocks, self._held_out = source.blocks(self._plan), source.held_out
        word = self.options.vocab if vocab is None else vocab
        self.tokenizer = _tokenizer(word, self.store, self.options.shape.family)
        prepare_tokenizer(self.tokenizer, plan)
        self.collator = make_collator(plan, self.store, self.tokenizer)
        if self.options.shape.causal:
            check_spelling(self.collator, self.store, self.options.vocab)
        self._order = BatchOrder(
            self.store,
            self.collator,
            self._blocks,
            seed=self.options.seed,
            view=self.options.view,
            batching=self.options.batching,
        ).share(self.rank, self.world_size)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers see it change

    @property
    def epoch(self) -> int:
        """Return the epoch of the next pass."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, from 0. It determines the order, the masks and the
        masked view. Raises ValueError for a number below 0, TypeError for a fraction."""
        number = operator.index(epoch)  # a tensor of integers would cut a fraction off
        if number < 0:
            raise ValueError(f"epoch: expected at least 0, got {epoch}")
        self._epoch.fill_(number)

    def __len__(self) -> int:
        return self._order.count(self.epoch) // self.world_size

    def __iter__(self) -> Iterator[StudentBatch]:
        worker = get_worker_info()
        if worker is None:
            moved = (batch.to(self.device) for batch in self._batches(self._order))
            return prefetched(moved, ready(self.collator))
        # A forked worker cannot use the threads and file handles of its parent: open them again.
        order = replace(self._order, store=copy.copy(self.store))
        batches = self._batches(order, worker.id, worker.num_workers)
        # For a GPU, states and maps stay encoded between processes, and `to` decodes them there.
        return batches if self.device.type != "cpu" else (b.to(self.device) for b in batches)

    def _batches(
        self, order: BatchOrder, number: int = 0, workers: int = 1
    ) -> Iterator[StudentBatch]:
        """Yield the batches of this process that worker `number` of `workers` prepares."""
        size = -(-(len(self) - number) // workers)
        return islice(order.share(number, workers).of_epoch(self.epoch), max(0, size))

    def distiller(self, student: Any) -> Distiller:
        """Make the module that computes the losses, on the device. It contains the student and the
        projections to the teacher's hidden size. See `Distiller.of`. Raises UserError for a model
        with fewer pieces or positions than the batches have."""
        check_fits(student, len(self.tokenizer), self.collator.max_length)
        return Distiller.of(student, self.options, self.store).to(self.device)

    def held_out(self) -> Iterator[StudentBatch]:
        """Yield the held-out batches, which no epoch contains, in store order with fixed masks."""
        if len(self._held_out):
            for batch in held_out(self.store, self.collator, self._held_out, self._plan):
                yield batch.to(self.device)

    def validate(self, distiller: Distiller) -> dict[str, float]:
        """Evaluate a student on the held-out batches. Return the figures that `student-train`
        reports, such as `valid_loss`, by name."""
        if not hasattr(distiller, "compute"):  # a distiller may be wrapped by torch.compile
            raise TypeError(
                f"validate: expected a Distiller, got {type(distiller).__name__}; call"
                " validate(batches.distiller(student))"
            )
        return evaluate(distiller, self.store, self.collator, self._held_out, self._plan)

    def __repr__(self) -> str:
        losses = ",".join(f"{name}={weight:g}" for name, weight in self.options.loss.items())
        share = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return (
            f"<StudentBatches {self.store.path}: epoch {self.epoch} of {len(self):,} batches"
            f"{share}; {len(self.tokenizer):,} pieces; {losses}; {self.options.resolved_align}>"
        )


def _refuse_to_collate(batches: Sequence[StudentBatch], **_: Any) -> None:
    raise TypeError(
        "StudentBatches yields whole batches, which a DataLoader cannot combine; call"
        " DataLoader(batches, batch_size=None)"
    )


default_collate_fn_map[StudentBatch] = _refuse_to_collate


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        rank, world_size = torchrun_number("RANK", 0), torchrun_number("WORLD_SIZE", 1)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UserError(
            f"rank {rank} of world_size {world_size}: expected both or neither, and 0 <= rank <"
            " world_size"
        )
    return rank, world_size


def _options(
    store: FeatureStore, vocab: Any, device: str, settings: Mapping[str, Any]
) -> TrainOptions:
    names = BatchSettings.__annotations__.keys()
    if unknown := sorted(settings.keys() - names):
        near = suggest(unknown[0], names)
        expected = ", ".join(sorted(names))
        raise UserError(
            f"StudentBatches: no setting {unknown[0]!r}; {near}expected one of {expected}"
        )
    given = {name: parse_value(TrainOptions, name, value) for name, value in settings.items()}
    if isinstance(vocab, str):
        given["vocab"] = vocab
        student = given.get("student", "")
        # Only the shape of the folder is needed: its weights are for another vocabulary.
        if is_model_folder(student) and Path(vocab) != Path(student):
            given["init"] = "auto"
    options = TrainOptions(store=str(store.path), device=device, **given)
    options = with_store_defaults(options, [store]).resolved()
    if options.data == "balanced":
        raise UserError(
            "StudentBatches: data='balanced' needs two batches per step; make one StudentBatches"
            " with data='labelled' and one with data='unlabelled', each with its losses"
        )
    return options


def _tokenizer(vocab: Any, store: FeatureStore, family: str) -> Any:
    if isinstance(vocab, str):
        return student_tokenizer(vocab, store, family=family)
    if not hasattr(vocab, "is_fast"):
        raise UserError(
            f"vocab: expected a word such as 5k, a folder, or a tokenizer of transformers, got"
            f" {type(vocab).__name__}"
        )
    # A copy: `prepare_tokenizer` sets the student's max length and truncation side in it.
    return check_student_tokenizer(copy.deepcopy(vocab), type(vocab).__name__, family)
