"""Converts gold labels of texts and tags of words to label ids of the teacher."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from teachonce.store import TaskSpec
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, suggest
from teachonce.teacher_dump.corpus.class_names import ClassName
from teachonce.teacher_dump.corpus.labelled_text import Gold, check_order, is_iob
from teachonce.teacher_dump.corpus.tag_schemes import (
    BEGINNING,
    ENTITIES,
    LAST_AND_SINGLE,
    NO_LABEL,
    OUTSIDE,
    Step,
    converted,
    scheme_of,
    written_in,
)
from teachonce.teacher_dump.windows.window import Window

if TYPE_CHECKING:
    from teachonce.teacher_dump.corpus.documents import Corpus

SHOWN = 10  # labels that an error lists
WHOLE = re.compile(r"-?\d+\.0")  # an integer in a pandas column with missing values, which is float
UNNAMED = re.compile(r"LABEL_\d+")  # transformers' name for a label without a name


def ignore_line(line: str) -> None:
    """Discard a line, for callers that print nothing."""


class Labels:
    """Finds the label ids of a teacher by name or number.

    An integer in the corpus is a label id; -1 means no label. It is a name instead if the names of
    the teacher's labels are integers, or if it is a class of a dataset schema (ClassName). A corpus
    may have names or numbers, not both. `say` receives a line that explains numbers, and a line if
    tags are converted to the teacher's scheme.
    """

    def __init__(
        self, task: TaskSpec, teacher: str, say: Callable[[str], object] = ignore_line
    ) -> None:
        self.task, self._teacher, self._say = task, teacher, say
        ids = {str(number): number for number in range(-1, len(task.labels))}
        if any(name.lstrip("-").isdigit() for name in task.labels):
            ids = {NO_LABEL: -1}
        # Labels of a corpus are read without blanks around them.
        self._own = [name.strip() for name in task.labels]
        self._numbers = ids | {name: number for number, name in enumerate(self._own)}
        # The corpus has tags of words; `later_label` is for pieces that do not begin a word.
        self._names = [name for name in task.labels if name != task.later_label]
        # Whether a label is a number -> the first such label and its place.
        self._first_seen: dict[bool, tuple[str, str]] = {}
        scheme = scheme_of(self._names) if task.kind == "tagging" else None
        self._scheme = scheme if scheme in LAST_AND_SINGLE or is_iob(self._names) else None
        self._convert, self._described = self._scheme in LAST_AND_SINGLE, False
        self._from: str | None = None

    @classmethod
    def of_corpus(
        cls,
        task: TaskSpec,
        teacher: str,
        corpus: Corpus,
        say: Callable[[str], object] = ignore_line,
    ) -> Labels:
        """Compare all labels that `Corpus.check` found with the teacher's. Raises UserError like
        `check`."""
        labels = cls(task, teacher, say)
        other = "tagging" if task.kind == "classification" else "classification"
        labels.check(
            corpus.found_labels(task.kind),
            corpus.tag_pairs(),
            corpus.found_labels(other) if corpus.columns.label else {},
            corpus.found_labels(ENTITIES),
        )
        return labels

    def number(self, name: str, where: str) -> int:
        """Return the id of a label; `where` is its place in the corpus, for messages.

        Raises UserError for a label that the teacher does not have, and for a number in a corpus
        that also has names.
        """
        if isinstance(name, ClassName) and name not in self._own:
            raise self._unknown(name, where)
        label_id = self._numbers.get(name)
        if label_id is None and WHOLE.fullmatch(name):
            name = name.removesuffix(".0")
            label_id = self._numbers.get(name)
        if label_id is None or label_id == self.task.later_number:
            raise self._unknown(name, where)
        by_number = name not in self._own
        # -1 means no label among names and among numbers alike.
        if label_id >= 0 and by_number not in self._first_seen:
            self._first_seen[by_number] = name, where
            self._check_one_kind()
        return label_id

    def _check_one_kind(self) -> None:
        if len(self._first_seen) == 2:
            (name, there), (number, where) = self._first_seen[False], self._first_seen[True]
            raise UserError(
                f"{where}: label {number!r} is a number, but {name!r} ({there}) is a name; write"
                " either names or numbers"
            )
        if True in self._first_seen:
            pairs = enumerate(self.task.labels)
            shown = ", ".join(f"{n} = {name}" for n, name in pairs if n < SHOWN)
            dots = ", ..." if len(self.task.labels) > SHOWN else ""
            self._say(f"labels of the corpus are taken as the teacher's label ids: {shown}{dots}")

    def _unknown(self, name: str, where: str) -> UserError:
        names = self._names
        rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        noun = "tag" if self.task.kind == "tagging" else "label"
        remedy = "correct the corpus, or use a teacher that was trained on these labels"
        classes, number = isinstance(name, ClassName), name.lstrip("-").isdigit()
        if all(UNNAMED.fullmatch(label) for label in names) and (classes or not number):
            remedy = "write their names into id2label and label2id of its config.json"
        elif classes and number:
            noun += " named"
            remedy = "name the classes in the schema of the corpus as the teacher does"
        return UserError(
            f"{where}: the teacher {self._teacher} has no {noun} {name!r}; {suggest(name, names)}"
            f"it has {', '.join(names[:SHOWN])}{rest}; {remedy}"
        )

    def check(
        self,
        met: Mapping[str, str],
        steps: Mapping[Step, str],
        others: Mapping[str, str] = {},
        entities: Mapping[str, str] = {},
    ) -> None:
        """Compare all labels of a corpus with the teacher's; each argument maps labels to places.

        met: names of labels or tags. steps: pairs of consecutive tags. others: labels of the other
        kind, of texts if the teacher tags words, and tags if it classifies texts. entities: the
        tags in the scheme ENTITIES, for a conversion.

        Raises UserError for the first name that the teacher does not have. If the teacher's tags
        are IOB and need no conversion, raises it also for the first tag that may not follow the tag
        before it.
        """
        self._check_kind(others)
        tags = {*met, *(tag for _, tag in steps)} - {NO_LABEL}
        scheme = scheme_of(tags, steps) if self._scheme else None
        if tags:
            self._convert, self._from = scheme not in (None, self._scheme), scheme
        names = met
        if self._convert and self._scheme:
            outside = {tag: where for tag, where in met.items() if tag in (OUTSIDE, NO_LABEL)}
            names = {written_in(tag, self._scheme): where for tag, where in entities.items()}
            names |= outside
        for name, where in names.items():
            self.number(name, where)
        if self.task.kind == "tagging" and is_iob(self._names) and not self._convert:
            for (before, tag), where in steps.items():
                if (called := self._teacher_tag(tag)) is not None:
                    try:
                        check_order(self._teacher_tag(before), called, where)
                    except UserError:
                        if tag in self._own:
                            raise
                        raise UserError(
                            f"{where}: tag {tag} is the teacher's {called!r}, which cannot be at"
                            " this word: the corpus may number its tags in another order than"
                            " the teacher; write their names in place of the numbers"
                        ) from None

    def _check_kind(self, others: Mapping[str, str]) -> None:
        for name, where in others.items():
            if self.task.kind == "tagging":
                raise UserError(
                    f"{where}: {name!r} is a label of a whole text, but the teacher"
                    f" {self._teacher} tags words; give a --label-column with tags or spans"
                )
            # An empty list of labels is read as no span, which tags every word O.
            if name != OUTSIDE:
                raise UserError(
                    f"{where}: {name!r} is a tag of a word, but the teacher {self._teacher}"
                    " classifies texts; give a --label-column with labels of texts"
                )

    def _teacher_tag(self, tag: str | None) -> str | None:
        """Return the teacher's name of a tag of the corpus; None if the tag means no label."""
        if tag is None or tag == BEGINNING:
            return tag
        number = self._numbers[tag]
        return self.task.labels[number] if number >= 0 else None

    def _in_scheme(self, gold: Gold) -> Gold:
        """Convert tags of words to the teacher's scheme."""
        corpus_tags = [OUTSIDE if tag == NO_LABEL else tag for *_, tag in gold.tags]
        if not (self._convert and self._scheme and scheme_of(corpus_tags)):
            return gold
        new_tags = converted(corpus_tags, self._scheme)
        if new_tags != corpus_tags and not self._described:
            self._described = True
            self._say(
                f"tags of the corpus are {self._from or 'of another scheme'}; they are converted to"
                f" {self._scheme}, the scheme of the teacher"
            )
        tags = tuple(
            (begin, end, old if old == NO_LABEL else new)
            for (begin, end, old), new in zip(gold.tags, new_tags, strict=True)
        )
        return replace(gold, tags=tags)

    def numbered(self, windows: Iterable[Window]) -> Iterator[Window]:
        """Yield the windows with `numbers`: int32 [1] for a label, [T] for tags."""
        raw_gold, gold, begins = None, Gold(), list[int]()
        for window in windows:
            # Done once for all windows of a document, which may be long: a file without blank lines
            # is one document.
            if window.gold is not raw_gold:
                raw_gold, gold = window.gold, self._in_scheme(window.gold or Gold())
                begins = [begin for begin, *_ in gold.tags]
            where = f"document {window.document}"
            if self.task.kind == "tagging":
                ends = window.document_begin, window.document_begin + len(window.text)
                first, last = (bisect_left(begins, position) for position in ends)
                numbers = self._tags(window, gold.tags[first:last], where)
            else:
                label = -1 if gold.label is None else self.number(gold.label, where)
                numbers = np.array([label], np.int32)
            yield replace(window, numbers=numbers)

    def _tags(self, window: Window, inside: Sequence[tuple[int, int, str]], where: str) -> Array:
        """Return the tag ids of a window's tokens: int32 [T], -1 for no tag.

        inside: for each word that begins in the window, its begin and end in the document, and its
            tag.

        The first piece of a word gets the word's tag; a piece over several words gets the tag of
        the first word. Later pieces of a word get the teacher's `later_label`, if it has one.
        """
        tags = np.full(len(window.ids), -1, np.int32)
        begin, end = window.offsets.astype(np.int64).T
        pieces = np.flatnonzero(~window.special & (begin < end))
        # A normalizer may swap characters: make the spans ascend, for `searchsorted`.
        begins, ends = (np.maximum.accumulate(side[pieces]) for side in (begin, end))
        later = self.task.later_number
        # Backwards, so that the first word has the last say on a piece over several words.
        for first, after, name in reversed(inside):
            index = int(np.searchsorted(ends, first - window.document_begin, "right"))
            if index < len(pieces) and begin[pieces[index]] < after - window.document_begin:
                tags[pieces[index]] = number = self.number(name, where)
                if later is not None and number >= 0:
                    stop = int(np.searchsorted(begins, after - window.document_begin, "left"))
                    rest = pieces[index + 1 : stop]
                    tags[rest[tags[rest] < 0]] = later
        return tags
