"""Plans a dump: determines everything about the store once, before any work starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from teachonce.store import Features, StoreWriter
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.store.format.identity import object_in
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.differences import first_few
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.redaction import without_paths
from teachonce.teacher_dump.corpus.documents import SUFFIXES, Corpus
from teachonce.teacher_dump.corpus.labelled_text import DEFAULT_COLUMN
from teachonce.teacher_dump.job.features import as_started, features_of
from teachonce.teacher_dump.job.growing import Growth
from teachonce.teacher_dump.job.inputs import (
    check_inputs,
    check_labels,
    load_for_dump,
    notes_on_teacher,
    notes_on_vectors,
    settings_lines,
)
from teachonce.teacher_dump.job.option_values import DEFAULT_LOGITS
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.versions import config_hash, identity_as_stored
from teachonce.teacher_dump.windows.chats import reads_clock, template_hash

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher

Value = TypeVar("Value")

# `batch_tokens` is included, because a teacher rounds differently in batches of another shape.
ARGUMENTS = (
    *("seed", "views", "mask_prob", "stride", "batch_tokens", "part_tokens"),
    *("precision", "limit", "weights"),
)
"""Options that every store holds in its identity."""


@dataclass(frozen=True)
class StageOne:
    """Holds the result of a mixed-vocabulary training, and its arguments as JSON. `corpus` is the
    identity of the corpus if the training was in this run, else None."""

    vocab: MixedVocab
    arguments: Mapping[str, Any]
    corpus: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return the arguments and hashes of the result."""
        # The hashes are needed: on a GPU two trainings with the same arguments may differ.
        return {
            **self.arguments,
            "tokenizer_hash": hashlib.sha256(self.vocab.tokenizer).hexdigest(),
            "embeddings_hash": hashlib.sha256(self.vocab.embeddings.tobytes()).hexdigest(),
        }


@dataclass(frozen=True)
class DumpPlan:
    """Defines what a dump reads, runs and writes. A dump, its estimate (`--plan`) and each of
    several processes use the same plan.

    options: every `auto` is replaced for this machine.
    features: what the options request and the teacher has.
    growth: the store of `--grow-from`, if any.
    stage_one: the student's vocabulary to store with the teacher's output, if any.
    """

    options: DumpOptions
    corpus: Corpus
    teacher: Teacher
    features: Features
    growth: Growth | None = None
    stage_one: StageOne | None = None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the attribute `identity` of the store: stores with equal identity and features are
        equal.

        The first access hashes the teacher's weights and all unhashed files of the corpus.
        """
        options, files = self.options, self.teacher.files()
        grown = {"grown_from": self.growth.identity()} if self.growth else {}
        identity = {
            "teacher": {
                "id": without_paths(self.teacher.name),  # a store may be published
                "revision": self.teacher.revision,
                "architecture": type(self.teacher.model).__name__,
                "weights_hash": self.teacher.weights_hash(),
                "config_hash": config_hash(files["config.json"]),
            },
            "tokenizer_hash": hashlib.sha256(files["tokenizer.json"]).hexdigest(),
            "corpus": self.corpus.identity() | grown,
            "arguments": {
                **{name: getattr(options, name) for name in ARGUMENTS},
                "max_length": self.features.max_length,
                # Without the number of the GPU: a dump may continue on another.
                "device": options.device.partition(":")[0],
                # Defaults are left out from here on, so that earlier stores can be continued.
                **({"mask_words": options.mask_words} if options.mask_words != "uniform" else {}),
                **({"remote_code": True} if options.trust_remote_code else {}),
                **({} if (first := self.teacher.first_token) is None else {"bos": first}),
                **({"gguf": Path(options.gguf).name} if options.gguf else {}),
                **self._chat_arguments(),
                **{k: v for k in ("pooling", "prompt") if (v := getattr(options, k)) is not None},
            },
            **({"mixed_vocab": self.stage_one.identity()} if self.stage_one else {}),
        }
        return identity_as_stored(identity, files, options.out)

    def _chat_arguments(self) -> dict[str, Any]:
        if self.options.messages is None:
            return {}
        template = template_hash(self.teacher.tokenizer)
        dated = {"chat_date": self.chat_date.isoformat()} if self.chat_date else {}
        return {"learn": self.learn, "chat_template_hash": template, **dated}

    @cached_property
    def chat_date(self) -> datetime | None:
        """Return the time at which the dump was started; a continued dump renders chats with it.

        None if the chat template writes no date, or if the store does not hold the time. Raises
        UserError if the stored value is not a time.
        """
        if self.options.messages is None or not reads_clock(self.teacher.tokenizer):
            return None
        # Read at the first use: another process may create the store after the plan is made.
        if (started := _started(self.options)) is None:
            return datetime.now().replace(microsecond=0)
        stored = _stored_argument(started, "chat_date", str)
        try:
            return datetime.fromisoformat(stored) if stored is not None else None
        except ValueError:
            raise UserError(
                f"{self.options.out}: identity.arguments.chat_date is {stored!r:.40}, expected a"
                f" time, such as 2026-01-31T12:00:00; {ANOTHER}"
            ) from None

    @property
    def learn(self) -> str:
        """Return the value of --learn, by default `assistant`."""
        return self.options.learn or "assistant"

    def stored_head(self) -> tuple[Array, Array] | None:
        """Return weight and bias of the head if the store holds them, else None."""
        logits = self.features.logits
        return self.teacher.head_arrays() if logits and logits.tier == "head" else None

    def check_growth(self) -> None:
        """Raise UserError if the store of --grow-from has another teacher or other options."""
        if self.growth:
            self.growth.check(self.identity, self.teacher.files()["config.json"], self.features)

    def features_line(self) -> str:
        """Describe in a line what the store will hold."""
        options, features = self.options, self.features
        logits = options.logits or DEFAULT_LOGITS
        if task := features.task:
            logits = f"of {counted(len(task.labels), 'label')} ({task.kind})"
            logits = "a score of each pair" if task.is_score and task.separator else logits
            if task.problem_type:
                logits = f"of {counted(len(task.labels), 'output')} ({task.problem_type})"
        elif logits != "none" and not features.logits:
            headless = options.head == "none"
            reason = "--head none" if headless else "no masked-LM head in the checkpoint"
            logits = f"none ({reason})"
        stored = f"logits {logits}"
        if vector := features.embedding:
            column = options.text_column or DEFAULT_COLUMN
            details = [
                vector.pooling,
                *(["length 1"] if vector.normalised else []),
                *([f"prompt {vector.prompt!r}"] if vector.prompt else []),
                *([f"of column {column}"] if vector.parallel else []),
            ]
            stored = f"embedding of width {vector.width} ({', '.join(details)})"
        return (
            f"features  {stored}, hidden {options.hidden}, attention {options.attention}, "
            f"{counted(features.views, 'view')}, windows of at most {features.max_length} teacher"
            " tokens"
        )


@contextmanager
def planned(
    options: DumpOptions,
    say: Callable[[str], object],
    stage_one: StageOne | None = None,
    read_corpus: bool = True,
) -> Iterator[DumpPlan]:
    """Plan a dump; the store of --grow-from is open until the end of the `with` block.

    `say` receives the settings. With `read_corpus`, local files are first read to their end, so
    that a bad line is reported before hours of work. Raises UserError if teacher or corpus cannot
    be read, or if the options do not fit the teacher.
    """
    options, model, corpus = check_inputs(options)
    started = _started(options)
    # After the checks, which do not need torch: resolving `auto` loads it.
    resolved = _resolved(options, started)
    say(settings_lines(resolved, bool(options.corpus)))
    if corpus.skipped:
        files = first_few([str(path) for path in corpus.skipped])
        say(f"{'skipped':9} {files}: empty, or of a suffix that is not read ({SUFFIXES})")
    for note in (*corpus.notes(), *notes_on_vectors(resolved, model)):
        say(note)
    with Growth.of(resolved) as growth:
        if read_corpus:
            corpus.check()
            check_labels(options, model, corpus)
        if stage_one and stage_one.corpus not in (None, corpus.identity()):
            raise UserError(
                f"{', '.join(resolved.corpus)}: was changed after the training on both"
                f" vocabularies; restore it, or remove {resolved.out}.mixed-vocab to train on the"
                " current text"
            )
        teacher, resolved = load_for_dump(resolved, model, corpus, say)
        for note in notes_on_teacher(teacher):
            say(note)
        features = as_started(features_of(resolved, teacher), started)
        if growth:
            vocab = MixedVocab.stored(growth.store)
            arguments = object_in(growth.store.identity, "mixed_vocab")
            stage_one = StageOne(vocab, arguments) if vocab else None
        yield DumpPlan(resolved, corpus, teacher, features, growth, stage_one)


def _resolved(options: DumpOptions, started: Mapping[str, Any] | None) -> DumpOptions:
    """Replace every `auto`, by the value in a started store if it has one. Precision and batch size
    are in the identity, and a machine that continues the store might choose others."""
    stored: dict[str, Any] = {}
    if options.precision == "auto":
        stored["precision"] = _stored_argument(started, "precision", str)
    if options.batch_tokens is None:
        stored["batch_tokens"] = _stored_argument(started, "batch_tokens", int)
    return replace(options.resolved(), **{name: value for name, value in stored.items() if value})


def _started(options: DumpOptions) -> Mapping[str, Any] | None:
    """Return the root attributes of the store at --out. If this store does not exist, return those
    of the store of --grow-from; None if neither exists."""
    for path in (options.out, options.grow_from):
        if path and (attributes := StoreWriter.peek(path, None)):
            return attributes
    return None


def _stored_argument(
    started: Mapping[str, Any] | None, name: str, kind: type[Value]
) -> Value | None:
    """Return an argument of a started store; None if it is missing, or of another type."""
    value = object_in(started["identity"], "arguments").get(name) if started else None
    return value if isinstance(value, kind) else None
