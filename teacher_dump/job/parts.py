"""Cuts a corpus into the parts of a store, and compares them with published ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from teachonce.checkpoints.checkpoint_tokenizer import note_on_pieces
from teachonce.store import Features, Sequences, StoreWriter
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.support.signals import Stop
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.job.growing import CopyPlan
from teachonce.teacher_dump.job.plan import DumpPlan
from teachonce.teacher_dump.windows.chats import ChatRenderer
from teachonce.teacher_dump.windows.label_numbers import Labels, ignore_line
from teachonce.teacher_dump.windows.sequences import windows_of
from teachonce.teacher_dump.windows.window import Window, count_tokens

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.forward import BatchOutput

VERSIONS = ("teachonce", "transformers", "tokenizers")  # packages that cut a corpus into sequences


class WithIds(Protocol):
    """Has token ids, as a window in a dump and a stretch in an import of captures do."""

    @property
    def ids(self) -> Array: ...


Cut = TypeVar("Cut", bound=WithIds)


@dataclass
class FirstPass:
    """Holds the teacher's output for view 0 of the whole first part, if calibration computed it.

    It is empty if the calibration read fewer windows, and once the part is written. `tally` is
    the tally of `forward`; `seconds` is its duration.
    """

    outputs: list[BatchOutput] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def take(self) -> Iterator[BatchOutput]:
        """Yield the outputs in the order of `forward`, and drop them."""
        while self.outputs:
            yield self.outputs.pop(0)


class NumberedPart(NamedTuple):
    """Holds a part's windows and number, and the number of its first sequence in the store."""

    number: int
    first_sequence: int
    windows: list[Window]
    first_pass: FirstPass | None = None


def parts_of(
    plan: DumpPlan, counters: Counter[str], stop: Stop, say: Callable[[str], object]
) -> tuple[CopyPlan | None, Iterator[list[Window]]]:
    """Cut the corpus into parts. With --grow-from, cut only its new documents, and also return what
    to copy from that store (else None)."""
    parts = cut_parts(plan, counters, stop, plan.corpus, plan.options.limit, say)
    if plan.growth is None:
        return None, parts
    copy_plan = plan.growth.compare(itertools.chain.from_iterable(parts), say)
    # --limit may have cut the last document; its tokens are counted as far as they were read.
    limit = max(1, copy_plan.tokens)
    # New counters, because the comparison has counted every document in `counters` already.
    return copy_plan, cut_parts(plan, Counter(), stop, copy_plan.documents(plan.corpus), limit)


def cut_parts(
    plan: DumpPlan,
    counters: Counter[str],
    stop: Stop,
    documents: Iterable[Document],
    limit: int | None,
    say: Callable[[str], object] = ignore_line,
) -> Iterator[list[Window]]:
    """Cut documents into windows, with gold labels as label ids, and group the windows into parts
    with at most `limit` tokens in all. `say` receives a line if labels are converted."""
    options, teacher, task = plan.options, plan.teacher, plan.features.task
    if options.messages is not None:
        chats = ChatRenderer(teacher.tokenizer, teacher.name, plan.learn, plan.chat_date)
        documents = chats.rendered(documents)
    windows = windows_of(
        documents,
        teacher.tokenizer,
        plan.features,
        options.stride,
        counters,
        parallel=options.student_column is not None,
    )
    if task:
        labels = Labels.of_corpus(task, teacher.name, plan.corpus, say)
        windows = labels.numbered(windows)
    return gathered(_stoppable(stop, windows), options.part_tokens, limit)


def first_part(
    parts: Iterator[list[Window]],
    plan: DumpPlan,
    say: Callable[[str], object],
    copy_plan: CopyPlan | None = None,
) -> list[Window]:
    """Return the first part; an empty list if all sequences are copied from another store.

    `say` receives a line if the teacher's tokenizer splits words into many pieces. Raises UserError
    if the corpus has no token.
    """
    first = next(parts, None)
    if first is None and not (copy_plan and copy_plan.sequences):
        corpus = ", ".join(plan.options.corpus)
        raise UserError(f"{corpus}: no token in the whole corpus; nothing to dump")
    if first and (note := note_on_pieces(plan.teacher.tokenizer, [w.text for w in first])):
        say(f"{'pieces':9} {note}")
    return first or []


def _stoppable(stop: Stop, windows: Iterator[Window]) -> Iterator[Window]:
    """Yield the windows; after a signal, raise Stopped between two windows."""
    # Without this check, the thread that cuts windows would continue to the end of its part.
    for window in windows:
        stop.check()
        yield window


def gathered(windows: Iterator[Cut], part_tokens: int, limit: int | None) -> Iterator[list[Cut]]:
    """Yield consecutive windows in groups of at least `part_tokens` tokens.

    The last group may be smaller. All groups together have at most `limit` tokens, but at least one
    window.
    """
    part: list[Cut] = []
    filled = total = 0
    for window in windows:
        if limit is not None and total + len(window.ids) > limit and total:
            break
        part.append(window)
        filled += len(window.ids)
        total += len(window.ids)
        if filled >= part_tokens:
            yield part
            part, filled = [], 0
    if part:
        yield part


def count(done: Counter[str], part: list[Window]) -> None:
    """Add the counts of one part to `done`."""
    done["parts"] += 1
    # By number, so that documents without any window count as well.
    done["documents"] = part[-1].document + 1
    done["sequences"] += len(part)
    done["tokens"] += count_tokens(part)
    # Unlike `sequences`, which includes what --grow-from copied: `cut` is a share of `read`.
    done["read"] += len(part)
    done["cut"] += sum(w.lost > 0 for w in part)
    done["lost"] += sum(w.lost for w in part)
    done["characters"] += sum(w.lost + len(w.text) for w in part)
    done["gold"] += sum(int((w.numbers >= 0).sum()) for w in part if w.numbers is not None)


def check_published(writer: StoreWriter, number: int, windows: list[Window]) -> None:
    """Raise UserError unless the published part `number` holds these windows."""
    # Other versions of the libraries may cut other windows. The store would then hold some
    # sequences twice and others not at all.
    lengths = np.array([len(w.ids) for w in windows])
    differ = writer.differing(number, lengths, sequences_of(windows, writer.features))
    if differ:
        raise other_sequences(writer, number, "published before", f"{differ[0]} differs")


def other_sequences(writer: StoreWriter, number: int, when: str, difference: str) -> UserError:
    """Return the error for a part whose sequences differ from an earlier run's."""
    versions = [
        f"{name} was {then} and is {version(name)}"
        for name, then in writer.software.items()
        if name in VERSIONS and then != version(name)
    ]
    return UserError(
        f"{writer.path}: part {number}, {when}, has other sequences than the corpus gives now"
        f" ({difference}; {', '.join(versions) or 'with the same libraries'}); install the"
        " versions that started the dump, or give another name"
    )


def sequences_of(windows: list[Window], features: Features) -> Sequences:
    """Return the sequences of a part in the writer's form."""
    return Sequences(
        texts=[w.text for w in windows],
        document=[w.document for w in windows],
        document_begin=[w.document_begin for w in windows],
        hard_cut=[w.hard_cut for w in windows],
        token_ids=np.concatenate([w.ids for w in windows]),
        offsets=np.concatenate([w.offsets for w in windows]),
        special=np.concatenate([w.special for w in windows]),
        gold=np.concatenate([w.numbers for w in windows if w.numbers is not None])
        if features.task
        else None,
        context=[w.context for w in windows] if features.context else None,
        learn=np.concatenate(
            [np.ones(len(w.ids), bool) if w.learn is None else w.learn for w in windows]
        )
        if features.learn
        else None,
        messages=[() if w.messages is None else w.messages for w in windows]
        if features.messages
        else None,
    )
