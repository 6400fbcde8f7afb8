"""Runs a sample of a store through its teacher again, and compares the output with stored values.

Errors above the codec's bound have one of four causes: other weights, active dropout, another
layer, or another text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from teachonce.checkpoints.declared import layers_of
from teachonce.checkpoints.loading import load_config
from teachonce.checkpoints.names import ResolvedModel, resolve_teacher
from teachonce.checkpoints.sentence_settings import read_sentence_settings
from teachonce.checkpoints.text_vectors import POOLINGS
from teachonce.store import Features, FeatureStore, Record, TaskSpec, UserError
from teachonce.store.errors import StoreError
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.format.features import AS_CAPTURED
from teachonce.store.format.sequences import offsets_of, tokenizer_inputs
from teachonce.store.tools.merge import is_merged
from teachonce.support.arrays import Array
from teachonce.support.console import check_device, counted
from teachonce.support.differences import ABSENT, differences, first_few
from teachonce.support.packages import other_versions, version_words
from teachonce.teacher_dump.comparison.deviations import Comparison, Errors
from teachonce.teacher_dump.teacher.forward import BatchOutput, forward
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.teacher.teacher import Teacher, VectorOptions
from teachonce.teacher_dump.windows.cutting import encoder
from teachonce.teacher_dump.windows.masked_views import (
    RANDOM,
    DrawKey,
    MaskVocabulary,
    mask_spans,
    masked_input,
)
from teachonce.teacher_dump.windows.sequences import TRIES
from teachonce.teacher_dump.windows.window import Window, length_batches
from teachonce.training.device import resolved_device

# Errors that are allowed in addition to the codec's, as another machine adds in another order. They
# are relative to 1 + |value|, in standard deviations of the channel for hidden states, in nats for
# logits.
TOLERANCE = {"fp32": 3e-4, "fp16": 0.01, "bf16": 0.1}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value != ""


ARGUMENTS: Mapping[str, tuple[Any, str, Callable[[Any], bool]]] = {
    "precision": ("fp32", "one of fp32, fp16, bf16", lambda value: value in list(TOLERANCE)),
    "seed": (0, "a whole number from 0", lambda value: type(value) is int and value >= 0),
    "mask_prob": (0.15, "a share", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "pooling": (None, "one of mean, cls, max, last", lambda value: value in (None, *POOLINGS)),
    "prompt": (None, "a name", lambda value: value is None or isinstance(value, str)),
    "gguf": (None, "the name of a file", lambda value: value is None or _is_name(value)),
    "remote_code": (False, "true or false", lambda value: type(value) is bool),
    "bos": (None, "an id", lambda value: value is None or (type(value) is int and value >= 0)),
    "batch_tokens": (8192, "at least 1", lambda value: type(value) is int and value >= 1),
}
"""Arguments of the dump that the comparison needs: the default for a store without the argument,
the expected values as text, and a check of the value."""

SETTINGS = ("architectures", "hidden_size", "model_type", "vocab_size")
"""Fields of config.json that show another model."""

# Keys of `identity.corpus` of a store whose sequences may have had other numbers in their dump.
RENUMBERED = ("merged", "forgotten", "grown_from")

# Multiplies the codec's bound if `merge --recode` may have encoded states a second time. The bound
# of the first time is relative to standard deviations up to twice as large.
MERGED = 3.0


@dataclass
class LiveReport:
    """Holds the result of a comparison: a headline, a row for each feature, notes and problems."""

    headline: str
    rows: list[Comparison]
    notes: list[str]
    problems: list[str]

    def lines(self, path: str, model: str) -> Iterator[str]:
        yield self.headline
        yield f"{'':<28} {'largest':>9} {'mean':>9} {'promised':>9}  share of what is allowed"
        for row in self.rows:
            yield (
                f"{row.feature:<28} {row.largest:9.3g} {row.mean:9.3g} {row.promised:9.3g} "
                f"{row.share:6.2f}  ({row.unit})"
            )
        yield from (*self.notes, *self.problems)
        if not self.problems:
            yield f"{path}: every error is within what its codec and {model} promise"

    def check(self, path: str, model: str) -> None:
        """Raise StoreError if anything differs."""
        if self.problems:
            raise StoreError(
                f"{path}: differs from the output of {model}:"
                f" {counted(len(self.problems), 'problem')}; give the model that it was made with,"
                " or dump again"
            )


def check(
    store: FeatureStore, model: str, sample: int, seed: int, device: str, trusted: bool = False
) -> LiveReport:
    """Compare `sample` sequences, chosen by `seed`, in all views with the output of `model`.

    The teacher runs in the precision of the dump. trusted: whether Python code of the model may
    run; the caller decides this, not the store. Raises UserError if the model cannot be the teacher
    of the store, or if the store's arguments are invalid.
    """
    if not len(store) or sample < 1:
        raise UserError(
            f"--sample {sample}: expected 1 to {len(store)}, the number of the store's sequences"
        )
    arguments = _arguments(store)
    precision = arguments["precision"]
    resolved = replace(resolve_teacher(model, arguments["gguf"]), trusted=trusted)
    teacher_device = device if device == "cpu" else resolved_device(device)
    check_device(teacher_device, torch.cuda.device_count())
    prompt = _prompt(store, resolved, arguments["prompt"])
    try:
        teacher = load_teacher(
            resolved,
            head=_head(store.features),
            hidden=states_option(store.features.hidden),
            attention=states_option(store.features.attention),
            device=teacher_device,
            precision=precision,
            vectors=VectorOptions(arguments["pooling"], prompt),
        )
    except UserError as error:  # its advice is for options of a dump
        if not (unlike := _other_settings(store, resolved)):
            raise
        raise UserError(
            f"--model {resolved.name}: is another model than the store's teacher"
            f" ({first_few(unlike)}); give the model that {store.path} was made with"
        ) from error
    if (first := arguments["bos"]) is not None:
        try:
            teacher.start_with(str(first))
        except UserError:  # its advice is for --bos of a dump
            raise UserError(
                f"{store.path}: its teacher read token {first} in front of each window, which the"
                f" tokenizer of {model} cannot put there; give the model that it was made with"
            ) from None
    return compare(store, teacher, sample, seed)


def compare(store: FeatureStore, teacher: Teacher, sample: int, seed: int) -> LiveReport:
    """Compare `sample` sequences, chosen by `seed`, with the output of a loaded teacher.

    Raises UserError like `check`.
    """
    arguments = _arguments(store)
    precision = arguments["precision"]
    _check_sizes(store, teacher)
    _check_vectors(store, teacher)
    drawn = np.random.default_rng(seed).choice(len(store), min(sample, len(store)), replace=False)
    records = [store[int(i)] for i in np.sort(drawn)]
    if captured := _is_captured(store):
        limit = _whole_below(store, teacher)
        records = [r for r in records if not r.document_begin and len(r.token_ids) < limit]
        if not records:
            more = "give a larger --sample, or " if len(drawn) < len(store) and limit > 1 else ""
            raise UserError(
                f"{store.path}: {counted(len(drawn), 'sequence')} drawn, and each may lack a part"
                f" of the text with which its output was captured; {more}verify the store without"
                " --model"
            )
    # Engines run in bf16 or fp16; a capture does not record which.
    engine = captured and store.features.embedding is None
    tolerance = TOLERANCE["bf16" if engine else precision]
    live = _Sample(store, teacher, records, arguments)
    errors = Errors(store.features, tolerance, MERGED if live.merged else 1)
    problems = [*live.other_tokens()]
    for view in tqdm(range(store.features.views), desc="live", unit="view", disable=None):
        problems += live.other_masks(view)
        live.run(view, errors)
    tallies = errors.finished()
    if captured:  # its logits are log-probabilities (FORMAT.md, 6)
        tallies = [t for t in tallies if not t.row.feature.endswith("/log_partition")]
    problems += [
        f"{tally.row.feature}: {tally.row.share:.3g} times the error that codec and precision allow"
        f" ({tally.place})"
        for tally in tallies
        if not tally.row.share <= 1
    ]
    tokens = sum(len(record.token_ids) for record in live.records)
    return LiveReport(
        f"{counted(len(live.records), 'sequence')}, {counted(tokens, 'teacher token')},"
        f" {counted(store.features.views, 'view')}, by {teacher.name} in {precision} on"
        f" {teacher.device};"
        f" tolerance in addition to the codec's error: {tolerance:g} of 1 + |value|",
        [tally.row for tally in tallies],
        [*live.notes(), *_partial(len(drawn) - len(records))],
        problems,
    )


def _is_captured(store: FeatureStore) -> bool:
    """Return whether `feature-store import` made the store from the output of another tool."""
    teacher = store.identity.get("teacher")
    return isinstance(teacher, dict) and "captured_by" in teacher


def _whole_below(store: FeatureStore, teacher: Teacher) -> float:
    """Return the number of tokens below which a sequence of a capture has not been truncated."""
    if store.features.embedding is None:
        return math.inf  # a truncated end changes no row before it
    own = teacher.text_vectors and teacher.text_vectors.max_length
    # A truncated text may lack a few more tokens than it must.
    return min(store.features.max_length, own or math.inf) - TRIES


def _partial(count: int) -> list[str]:
    """Return a note on captured sequences that were left out of a comparison."""
    if not count:
        return []
    return [
        f"{counted(count, 'sequence')} left out: the store may lack a part of the text with which"
        " their outputs were captured"
    ]


def _arguments(store: FeatureStore) -> dict[str, Any]:
    # An identity has free keys (FORMAT.md, 4): its values are checked before they are used.
    raw = store.identity.get("arguments")
    stored: dict[str, Any] = raw if isinstance(raw, dict) else {}
    arguments: dict[str, Any] = {}
    for name, (default, expected, right) in ARGUMENTS.items():
        arguments[name] = stored.get(name, default)
        if not right(arguments[name]):
            raise UserError(
                f"{store.path}: identity.arguments.{name} is {arguments[name]!r:.40}, expected"
                f" {expected}; verify the store without --model, or dump again"
            )
    return arguments


def _head(features: Features) -> str:
    if features.task:
        return features.task.kind
    if features.embedding:
        return "embedding"
    if features.logits:
        return "causal" if features.logits.next_token else "mlm"
    return "none"


def _other_settings(store: FeatureStore, model: ResolvedModel) -> list[str]:
    """Describe how architecture and sizes of a checkpoint differ from the stored config.json."""
    if "config.json" not in store.teacher_files():
        return []
    try:
        stored, here = store.teacher_settings("config.json"), load_config(model).to_dict()
    except (UserError, StoreError):
        return []  # the caller raises the first error
    then, now = ({name: config.get(name) for name in SETTINGS} for config in (stored, here))
    changes = differences({**then, "layers": layers_of(stored)}, {**now, "layers": layers_of(here)})
    # A stored config.json of another program may leave out what is the default here.
    return [
        f"{key} is {old} in the store and {new} here"
        for key, old, new in changes
        if ABSENT not in (old, new)
    ]


def _prompt(store: FeatureStore, model: ResolvedModel, stored: str | None) -> str | None:
    """Return the name of the prompt with which the teacher embeds texts for the comparison. It is
    the `stored` name (None: the model's default). For imported vectors, it is the model's name of
    the prompt that their texts begin with, "" without one. Raises UserError if the model has no
    such prompt."""
    vectors = store.features.embedding
    if vectors is None or vectors.pooling != AS_CAPTURED:
        return stored
    if not vectors.prompt:
        return ""
    prompts = read_sentence_settings(model, None).prompts
    prompt = next((name for name, text in prompts.items() if text == vectors.prompt), None)
    if prompt is None:
        raise UserError(
            f"--model {model.name}: has no prompt {vectors.prompt!r:.60}, with which the texts of"
            f" {store.path} begin; give the model whose vectors were imported"
        )
    return prompt


def _check_vectors(store: FeatureStore, teacher: Teacher) -> None:
    spec = teacher.text_vectors.spec if teacher.text_vectors else None
    stored = store.features.embedding
    if stored is None or spec is None:  # `_head` loads vectors exactly if the store has some
        return
    if stored.parallel:
        raise UserError(
            f"{store.path}: does not hold the texts of its vectors, only the student's texts"
            " (--student-column); verify it without --model"
        )
    if stored.pooling == AS_CAPTURED:  # a capture does not hold how its vectors were made
        spec = replace(stored, width=spec.width)
    mismatches = differences(stored.to_json(), spec.to_json())
    if unlike := [f"{key} is {old} in the store and {new} here" for key, old, new in mismatches]:
        raise UserError(
            f"--model {teacher.name}: makes other vectors: {first_few(unlike)}; give the model that"
            f" {store.path} was made with"
        )


def states_option(names: Iterable[str]) -> str:
    """Return the value of --hidden or --attention that stores features with these names."""
    values = [
        f"groups:{name.removeprefix('groups').split('.')[0]}"
        if name.startswith("groups")
        else {"mean0": "mean:0"}.get(name, name.replace("layer", "layer:"))
        for name in names
    ]
    # The N features of `groups:N` give the same value.
    return ",".join(dict.fromkeys(values)) or "none"


def _check_sizes(store: FeatureStore, teacher: Teacher) -> None:
    sizes, features = (teacher.width, teacher.vocabulary), store.features
    if sizes != (features.width, features.vocabulary):
        raise UserError(
            f"--model {teacher.name}: has hidden size {sizes[0]} and {sizes[1]} pieces, the store's"
            f" teacher {features.width} and {features.vocabulary}; give the model that"
            f" {store.path} was made with"
        )
    # --text-column of the dump decided whether texts are pairs; the teacher does not.
    task = teacher.task and replace(teacher.task, separator=features.separator)
    if task != store.task:
        stored, labels = (_task_labels(t) for t in (store.task, teacher.task))
        raise UserError(
            f"--model {teacher.name}: its labels are {labels:.200}, the store's are {stored:.200};"
            f" give the model that {store.path} was made with"
        )


def _task_labels(task: TaskSpec | None) -> str:
    if task is None:
        return "none"
    return ", ".join([*task.labels, *([f"({task.problem_type})"] if task.problem_type else [])])


class _Sample:
    """Holds a sample of a store's sequences, and the teacher that runs over them again."""

    def __init__(
        self,
        store: FeatureStore,
        teacher: Teacher,
        records: list[Record],
        arguments: dict[str, Any],
    ) -> None:
        self.store, self.teacher, self.records, self.arguments = store, teacher, records, arguments
        self.separator = store.features.separator
        texts = [record.text for record in records]
        inputs = tokenizer_inputs(texts, self.separator, store.path)
        self.encodings = encoder(teacher.tokenizer.backend_tokenizer)(inputs)
        self.windows = [
            Window(
                *(r.text, r.document, r.document_begin, r.hard_cut),
                *(r.token_ids, r.offsets, r.special),
                types=self._types(r, encoding),
            )
            for r, encoding in zip(records, self.encodings, strict=True)
        ]
        corpus = store.identity.get("corpus")
        self.merged = is_merged(corpus)
        numbers = [part.number for part in store.manifest.parts]
        # Masks and random tokens were drawn by the number that a sequence had in its dump.
        renumbered = isinstance(corpus, dict) and not corpus.keys().isdisjoint(RENUMBERED)
        # An unfinished store may lack a part, which gives the sequences after it other numbers.
        self.numbered = not renumbered and numbers == list(range(len(numbers)))
        self.left_out = 0

    def _types(self, record: Record, encoding: Any) -> Array | None:
        """Return the token_type_ids of a pair, which are not stored; None for a single text."""
        # If the tokens differ, `other_tokens` reports it, and zeros serve.
        if self.separator is None:
            return None
        types = np.array(encoding.type_ids, np.int32)
        length = len(record.token_ids)
        return types if len(types) == length else np.zeros(length, np.int32)

    def other_tokens(self) -> Iterator[str]:
        """Yield one line if the model's tokenizer gives other tokens than the stored ones."""
        for record, encoding in zip(self.records, self.encodings, strict=True):
            spans = offsets_of(encoding, record.text, self.separator)
            same = np.array_equal(encoding.ids, record.token_ids)
            if not same or not np.array_equal(spans, record.offsets):
                yield (
                    "tokens: the model's tokenizer gives other tokens for the text of sequence"
                    f" {record.index} than the stored ones"
                )
                return

    def _key(self, record: Record, view: int) -> DrawKey:
        return DrawKey(self.arguments["seed"], view, record.index)

    def other_masks(self, view: int) -> Iterator[str]:
        """Yield one line if the seed gives other masked words in a view than the stored ones."""
        share, counts = self.arguments["mask_prob"], WordCounts.stored(self.store)
        for record in self.records if view and self.numbered else ():
            drawn = mask_spans(record.text, *self._key(record, view), share, counts)
            if not np.array_equal(record.views[view].spans, drawn):
                yield f"view{view}/mask: in sequence {record.index} the seed masks other words"
                return

    def notes(self) -> list[str]:
        """Return notes on differences that do not by themselves make a store wrong."""
        notes, teacher = [], self.store.identity.get("teacher")
        stored = teacher.get("weights_hash") if isinstance(teacher, dict) else None
        if stored and stored != (live := self.teacher.weights_hash()):
            notes.append(
                f"the hash of the weights is {live[:12]}, and was {str(stored)[:12]} in the dump"
            )
        if versions := other_versions(self.store.meta["software"]):
            notes.append(f"the store was made with other versions: {version_words(versions)}")
        if self.arguments["remote_code"] and not self.teacher.trusted:
            notes.append(
                "the dump may have run Python code of the model, and this command ran the class of"
                " transformers, which may compute other numbers; read the code, then give"
                " --trust-remote-code to run it"
            )
        if self.left_out:
            notes.append(
                f"{counted(self.left_out, 'masked sequence')} left out: a merged or unfinished"
                " store does not hold the numbers from which their random tokens were drawn"
            )
        return notes

    def run(self, view: int, errors: Errors) -> None:
        """Run the teacher over one view, and pass its output to `errors`."""
        task = self.store.features.task
        inputs = [self._input(i, view) for i in range(len(self.records))]
        indices = np.array([i for i, ids in enumerate(inputs) if ids is not None], np.int64)
        self.left_out += len(inputs) - len(indices)
        flat = [w.ids if ids is None else ids for ids, w in zip(inputs, self.windows, strict=True)]
        lengths = [len(flat[i]) for i in indices]
        size = self.arguments["batch_tokens"]
        batches = [indices[batch] for batch in length_batches(lengths, size)] if lengths else []

        def read(values: torch.Tensor, batch: Array) -> dict[str, Array]:
            assert self.teacher.decoder is not None
            of_sequences = task and task.kind == "classification"
            pieces = values.split([1 if of_sequences else len(flat[i]) for i in batch])
            compare = errors.task if task else errors.logits
            with torch.inference_mode():
                logits = [
                    compare(self.records[i], view, self.teacher.decoder, piece)
                    for i, piece in zip(batch, pieces, strict=True)
                ]
            return {"values" if task else "log_partition": np.concatenate(logits)}

        reader = read if task or self.store.features.logits else None
        for output in forward(self.teacher, self.windows, flat, batches, 0, Counter(), reader):
            self._compare(view, output, errors)

    def _input(self, i: int, view: int) -> Array | None:
        """Return the teacher's input ids; None if random tokens in them cannot be drawn again."""
        record, window, tokenizer = self.records[i], self.windows[i], self.teacher.tokenizer
        spans = record.views[view].spans
        if not self.numbered and (spans[:, 2] == RANDOM).any():
            return None
        return masked_input(
            *(window.ids, window.offsets, window.special, spans),
            MaskVocabulary.of(tokenizer),
            self._key(record, view),
        )

    def _compare(self, view: int, output: BatchOutput, errors: Errors) -> None:
        first = 0
        for index, (i, length) in enumerate(zip(output.sequences, output.lengths, strict=True)):
            record = self.records[i]
            if output.vectors is not None and not view:
                errors.embedding(record, output.vectors[index])
            for name, states in output.hidden.items():
                rows = states[first : first + length]
                errors.hidden(record, view, name, rows, self.store.calibration[name])
            for name, maps in output.attention.items():
                errors.attention(record, view, name, maps[index])
            first += length
