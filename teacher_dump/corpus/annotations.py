"""Reads cells of labels in the forms of annotation tools: names, lists of names, spans.

Forms: a name or number; a list with one of them; spans `[begin, end, name]` and `{"start_offset",
"end_offset", "label"}` (doccano); `{"start", "end", "labels"}` and `{"choices"}` (Label Studio,
JSON-MIN); annotations with a `result` (Label Studio, JSON).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from teachonce.teacher_dump.corpus.tag_schemes import FIRST, OTHER, OUTSIDE
from teachonce.teacher_dump.corpus.text_files import CorpusError

Span = tuple[int, int, str]  # begin and end (exclusive) of an entity in characters, and its kind
SPAN_KEYS = (
    ("start", "end", "labels"),
    ("start", "end", "label"),
    ("start_offset", "end_offset", "label"),
)
WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Annotation:
    """Holds the labels of a whole text, and the spans in it.

    Both are empty for an empty list, which may mean no label or no span.
    """

    labels: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()


def label_name(value: Any, column: str | None, where: object) -> str | None:
    """Read a label: a name or an integer, as text without blanks around it; None if `value` is
    empty.

    Raises CorpusError for any other value.
    """
    if value is None or value == "" or value != value:  # pandas writes NaN for what is missing
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int):
        raise CorpusError(
            f"{where}: expected a label in column {column!r}, its name or its number, got"
            f" {type(value).__name__} {value!r:.40}; is it the right --label-column?"
        )
    name = str(value).strip()
    # A ClassName without blanks around it is returned as a ClassName.
    return value if name == value else name or None


def annotation_of(
    value: Any, column: str | None, where: object, text: str | None = None
) -> Annotation | None:
    """Read a cell of labels; None if the text is not annotated.

    Raises CorpusError for a cell of another form, if annotators disagree, and if a span records
    another text than the characters of `text` at its offsets.
    """
    if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"choices", "labels"}:
        (value,) = value.values()
    if not isinstance(value, list):
        name = label_name(value, column, where)
        return None if name is None else Annotation((name,))
    if any(isinstance(entry, dict) and "result" in entry for entry in value):
        return _agreed(value, column, where, text)
    # Label Studio writes an empty list for a text that nobody has annotated.
    if value == [] and column is not None and column.endswith("annotations"):
        return None
    return _annotation(value, column, where, text)


def _agreed(
    value: Sequence[Any], column: str | None, where: object, text: str | None
) -> Annotation | None:
    """Read Label Studio's annotations of a text, one for each annotator; None if nobody annotated
    it. Raises CorpusError if annotators disagree."""
    votes = [
        _annotation(entry.get("result") or [], column, where, text)
        for entry in value
        # `was_cancelled`: the annotator skipped this text.
        if isinstance(entry, dict) and not entry.get("was_cancelled")
    ]
    if any(annotation != votes[0] for annotation in votes):
        raise CorpusError(
            f"{where}: {len(votes)} annotators disagree in column {column!r}; choose one annotation"
            " of each text before the export"
        )
    return votes[0] if votes else None


def _annotation(items: Any, column: str | None, where: object, text: str | None) -> Annotation:
    if not isinstance(items, list):
        raise CorpusError(
            f"{where}: expected a list of labels in `result`, got {items!r:.40}; export the"
            " project again"
        )
    labels, spans, questions = list[str](), list[Span](), set[str]()
    other_types = dict[str, object]()  # question -> type of its answers, if these are not labels
    for item in items:
        if isinstance(item, dict) and item.get("type") == "relation":
            continue  # a relation between two spans, which are items themselves
        if isinstance(item, dict) and isinstance(item.get("value"), dict):  # of Label Studio
            question, kind = str(item.get("from_name")), item.get("type")
            questions.add(question)
            if kind not in ("choices", "labels"):
                other_types[question] = kind
                continue
            item = item["value"]
        span = _span(item, where, text)
        if span:
            spans.append(span)
            continue
        if isinstance(item, dict) and isinstance(item.get("choices"), str | list):
            choices = item["choices"]
            names = [choices] if isinstance(choices, str) else choices
        else:
            names = [item]
        labels += filter(None, (label_name(name, column, where) for name in names))
    if len(questions) > 1:
        raise CorpusError(
            f"{where}: column {column!r} answers several questions, {', '.join(sorted(questions))};"
            " export the project as JSON-MIN, and give the column of one question as"
            " --label-column"
        )
    for question, kind in other_types.items():
        raise CorpusError(
            f"{where}: question {question!r:.40} of column {column!r} has answers of type"
            f" {kind!r:.40}, expected choices or labels of a text; leave it out of the export"
        )
    # Sorted, because `words_in` finds overlaps between neighbours only.
    return Annotation(tuple(labels), tuple(sorted(spans)))


def check_accepted(row: Mapping[str, Any], where: object) -> None:
    """Raise CorpusError for a Prodigy row whose labels the annotator rejected or skipped."""
    of_prodigy = not row.keys().isdisjoint(("spans", "_task_hash", "_input_hash"))
    if of_prodigy and (answer := row.get("answer")) in ("reject", "ignore"):
        raise CorpusError(
            f"{where}: the annotator's answer is {answer!r}, so its labels are not gold; remove all"
            " rows whose answer is not 'accept'"
        )


def _span(item: Any, where: object, text: str | None) -> Span | None:
    """Read a span; None if the item has another form."""
    cells: Sequence[Any] = item if isinstance(item, list) else ()
    if isinstance(item, dict):
        cells = next(([item[k] for k in keys] for keys in SPAN_KEYS if {*keys} <= item.keys()), ())
    if len(cells) != 3:
        return None
    begin, end, names = cells
    names = names if isinstance(names, list) else [names]
    if len(names) != 1 or not isinstance(names[0], str) or not names[0].strip():
        raise CorpusError(f"{where}: expected one name for a span, got {names!r:.60}; choose one")
    if not all(isinstance(offset, int) for offset in (begin, end)) or not 0 <= begin < end:
        raise CorpusError(
            f"{where}: expected a span with 0 <= begin < end, got {begin!r:.20} to {end!r:.20};"
            " correct the row or remove it"
        )
    recorded = item.get("text") if isinstance(item, dict) else None
    # Tools that count bytes or UTF-16 units would silently label other words.
    if text is not None and isinstance(recorded, str) and text[begin:end] != recorded:
        raise CorpusError(
            f"{where}: characters {begin} to {end} of the text are {text[begin:end]!r:.40}, but the"
            f" span has {recorded!r:.40}; count characters, not bytes or UTF-16 units, from 0"
        )
    return begin, end, names[0].strip()


def words_in(text: str, spans: Sequence[Span], where: object) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and IOB2 tag of the words of a text. The text is split into words at white
    space and at the ends of spans.

    Raises CorpusError for spans that overlap, are outside of the text or contain no word.
    """
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise CorpusError(
                f"{where}: the spans {before} and {after} overlap, but a word has one tag; remove"
                " one of them"
            )
    if spans and spans[-1][1] > len(text):
        raise CorpusError(
            f"{where}: the span {spans[-1]} ends after the text, which has {len(text)} characters;"
            " export the spans of this text"
        )
    position = 0
    for begin, end, kind in [*spans, (len(text), len(text), "")]:
        for word in WORD.finditer(text, position, begin):
            yield *word.span(), OUTSIDE
        if kind and text[begin:end].isspace():
            raise CorpusError(
                f"{where}: the span {(begin, end, kind)} holds no word, but"
                f" {text[begin:end]!r:.20}; correct or remove it"
            )
        for number, word in enumerate(WORD.finditer(text, begin, end)):
            yield *word.span(), (OTHER if number else FIRST) + kind
        position = end
