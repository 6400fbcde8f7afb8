"""Cuts a corpus into the parts of a store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from teachonce.store import Features
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.support.signals import Stop
from teachonce.teacher_dump.corpus.documents import Corpus, Document
from teachonce.teacher_dump.job.growing import Growth, Plan
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.windows.label_numbers import Labels
from teachonce.teacher_dump.windows.sequences import windows_of
from teachonce.teacher_dump.windows.window import Window

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher


class Tokens(Protocol):
    """Holds the token ids of a window, or of what is made of one."""

    @property
    def ids(self) -> Array: ...


Cut = TypeVar("Cut", bound=Tokens)


def opened_corpus(options: DumpOptions) -> Corpus:
    """Open the corpus that the options name; raises CorpusError as `Corpus.open` does."""
    columns = options.text_column, options.label_column, options.student_column
    return Corpus.open(options.sources(), *columns)


def new_parts(
    options: DumpOptions,
    corpus: Corpus,
    teacher: Teacher,
    features: Features,
    counters: Counter[str],
    stop: Stop,
    growth: Growth | None,
    say: Callable[[str], object],
) -> tuple[Plan | None, Iterator[list[Window]]]:
    """Cut into parts what the teacher is to read: the corpus, or what of it is new to the store
    that it grew from, with the plan of what is taken over."""
    whole = cut_parts(options, corpus, teacher, features, counters, stop)
    if growth is None:
        return None, whole
    plan = growth.compare(itertools.chain.from_iterable(whole), say)
    rest = replace(options, limit=max(1, plan.tokens))  # the last document may be cut by a limit
    new = plan.documents(corpus)
    return plan, cut_parts(rest, corpus, teacher, features, Counter(), stop, new)


def cut_parts(
    options: DumpOptions,
    corpus: Corpus,
    teacher: Teacher,
    features: Features,
    counters: Counter[str],
    stop: Stop,
    documents: Iterable[Document] | None = None,
) -> Iterator[list[Window]]:
    """Cut the corpus, or those `documents` of it, into windows, with the numbers of gold labels,
    and gather them into parts."""
    task = features.task
    windows = windows_of(
        corpus if documents is None else documents,
        teacher.tokenizer,
        features,
        options.stride,
        counters,
        parallel=options.student_column is not None,
    )
    if task:
        labels = Labels(task, teacher.name)
        labels.check(corpus.met(task.kind), corpus.steps())
        windows = labels.numbered(windows)
    return gathered(_until(stop, windows), options.part_tokens, options.limit)


def first_of(
    parts: Iterator[list[Window]], options: DumpOptions, plan: Plan | None = None
) -> list[Window]:
    """Return the first part, empty where there is none and all is taken over from another store.

    Raises UserError where the corpus gives no token.
    """
    first = next(parts, None)
    if first is None and plan and plan.keep:
        return []
    if first is None:
        raise UserError(
            f"{', '.join(options.corpus)}: no token in the whole corpus; nothing to dump"
        )
    return first


def _until(stop: Stop, windows: Iterator[Window]) -> Iterator[Window]:
    """Yield the windows; raise Stopped between two of them.

    The thread that cuts them would otherwise go on to the end of its part.
    """
    for window in windows:
        stop.check()
        yield window


def gathered(windows: Iterator[Cut], part_tokens: int, limit: int | None) -> Iterator[list[Cut]]:
    """Yield consecutive windows in groups of at least `part_tokens` tokens.

    The last group may be smaller. It ends before the window that would exceed `limit` tokens, but
    never before the first.
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
    """Add what one more part holds to the counts of those before."""
    done["parts"] += 1
    done["documents"] = part[-1].document + 1
    done["sequences"] += len(part)
    done["tokens"] += sum(len(w.ids) for w in part)
    done["gold"] += sum(int((w.numbers >= 0).sum()) for w in part if w.numbers is not None)
