"""Turns gold labels of texts and tags of words into the numbers of the teacher's labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from teachonce.store import TaskSpec
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.labelled_text import BEGINNING, Gold, Step, check_order, is_iob
from teachonce.teacher_dump.windows.window import Window

SHOWN = 10  # labels that an error lists


class Labels:
    """Finds the labels of a teacher by name or number.

    A whole number in the corpus is the number of a label. If some labels have whole numbers for
    names, it is a name instead. -1 is no label.
    """

    def __init__(self, task: TaskSpec, teacher: str) -> None:
        self.task, self._teacher = task, teacher
        self._numbers = {name: number for number, name in enumerate(task.labels)}
        ids = {str(number): number for number in range(-1, len(task.labels))}
        if any(name.lstrip("-").isdigit() for name in task.labels):
            ids = {"-1": -1}
        self._numbers = ids | self._numbers
        self._names = [name for name in task.labels if name != task.later_label]

    def number(self, name: str, where: str) -> int:
        """Return the number of a label.

        Raises UserError, which names `where`, for a label that the teacher does not have.
        """
        found = self._numbers.get(name)
        if found is None or found == self.task.later_number:
            names = self._names
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            what = "tag" if self.task.kind == "tagging" else "label"
            raise UserError(
                f"{where}: the teacher {self._teacher} has no {what} {name!r}; it has"
                f" {', '.join(names[:SHOWN])}{more}; correct the corpus, or take the teacher that"
                " was trained for it"
            )
        return found

    def check(self, met: Mapping[str, str], steps: Mapping[Step, str]) -> None:
        """Raise UserError for the first name, with its place, that the teacher does not have.

        If the teacher's tags are IOB, raise it also for the first tag that may not follow the tag
        before it.
        """
        for name, where in met.items():
            self.number(name, where)
        if self.task.kind == "tagging" and is_iob(self._names):
            for (before, tag), where in steps.items():
                if (called := self._named(tag)) is not None:
                    check_order(self._named(before), called, where)

    def _named(self, tag: str | None) -> str | None:
        """Return the name of the label that a tag of the corpus means; None where there is none."""
        if tag is None or tag == BEGINNING:
            return tag
        number = self._numbers[tag]
        return self.task.labels[number] if number >= 0 else None

    def numbered(self, windows: Iterable[Window]) -> Iterator[Window]:
        """Yield the windows with `numbers`: int32 [1] for a label, [T] for tags."""
        for window in windows:
            gold, where = window.gold or Gold(), f"document {window.document}"
            if self.task.kind == "tagging":
                numbers = self._tags(window, gold, where)
            else:
                label = -1 if gold.label is None else self.number(gold.label, where)
                numbers = np.array([label], np.int32)
            yield replace(window, numbers=numbers)

    def _tags(self, window: Window, gold: Gold, where: str) -> Array:
        """Number the tags of a window's tokens: int32 [T], -1 where there is none.

        The first piece of a word has the word's tag; a piece of several words has the tag of the
        first. The later pieces have the teacher's `later_label`, where it has one.
        """
        tags = np.full(len(window.ids), -1, np.int32)
        begin, end = window.offsets.astype(np.int64).T
        pieces = np.flatnonzero(~window.special & (begin < end))
        begins, ends = (np.maximum.accumulate(side[pieces]) for side in (begin, end))
        later = self.task.later_number
        last = window.document_begin + len(window.text)
        inside = [tag for tag in gold.tags if window.document_begin <= tag[0] < last]
        for first, after, name in reversed(inside):
            place = int(np.searchsorted(ends, first - window.document_begin, "right"))
            if place < len(pieces) and begin[pieces[place]] < after - window.document_begin:
                tags[pieces[place]] = number = self.number(name, where)
                if later is not None and number >= 0:
                    stop = int(np.searchsorted(begins, after - window.document_begin, "left"))
                    others = pieces[place + 1 : stop]
                    tags[others[tags[others] < 0]] = later
        return tags
