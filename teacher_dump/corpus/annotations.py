"""Reads cells of labels as people export them: names, lists of names, spans of characters.

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

from teachonce.teacher_dump.corpus.errors import CorpusError
from teachonce.teacher_dump.corpus.tag_schemes import FIRST, OTHER, OUTSIDE

Span = tuple[int, int, str]
"""First character of an entity, the one behind its last, and its kind."""
SPAN_KEYS = (
    ("start", "end", "labels"),
    ("start", "end", "label"),
    ("start_offset", "end_offset", "label"),
)
WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Annotation:
    """What people said of a text: labels of the whole text, and spans; None where none are meant.

    An empty list may mean either.
    """

    labels: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()


def label_name(value: Any, column: str | None, where: object) -> str | None:
    """Read a label, a name or a whole number; None where it is missing.

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
    return value if isinstance(value, str) else str(value)


def annotation_of(
    value: Any, column: str | None, where: object, text: str | None = None
) -> Annotation | None:
    """Read a cell of labels; None where the text is not annotated.

    Raises CorpusError for a cell of another form, where annotators disagree, and for a span that
    holds other characters of the `text` than it says.
    """
    if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"choices", "labels"}:
        (value,) = value.values()
    if not isinstance(value, list):
        name = label_name(value, column, where)
        return None if name is None else Annotation((name,))
    if any(isinstance(each, dict) and "result" in each for each in value):
        return _agreed(value, column, where, text)
    if value == [] and column is not None and column.endswith("annotations"):
        return None
    return _annotation(value, column, where, text)


def _agreed(
    value: Sequence[Any], column: str | None, where: object, text: str | None
) -> Annotation | None:
    """Read the annotations of a text by Label Studio, one of each annotator."""
    said = [
        _annotation(each.get("result") or [], column, where, text)
        for each in value
        if isinstance(each, dict) and not each.get("was_cancelled")
    ]
    if any(each != said[0] for each in said):
        raise CorpusError(
            f"{where}: {len(said)} annotators say different things in column {column!r}; choose one"
            " annotation of each text before the export"
        )
    return said[0] if said else None


def _annotation(items: Any, column: str | None, where: object, text: str | None) -> Annotation:
    if not isinstance(items, list):
        raise CorpusError(f"{where}: expected a list of labels as result, got {items!r:.40}")
    labels, spans, questions = list[str](), list[Span](), set[str]()
    others = dict[str, object]()  # by question the type of answers that are no labels of characters
    for item in items:
        if isinstance(item, dict) and item.get("type") == "relation":
            continue  # between spans that have labels of their own
        if isinstance(item, dict) and isinstance(item.get("value"), dict):  # of Label Studio
            question, kind = str(item.get("from_name")), item.get("type")
            questions.add(question)
            if kind not in ("choices", "labels"):
                others[question] = kind
                continue
            item = item["value"]
        found = _span(item, where, text)
        if found:
            spans.append(found)
        elif isinstance(item, dict) and isinstance(item.get("choices"), str | list):
            choices = item["choices"]
            labels += [choices] if isinstance(choices, str) else map(str, choices)
        else:
            name = label_name(item, column, where)
            labels += [] if name is None else [name]
    if len(questions) > 1:
        raise CorpusError(
            f"{where}: column {column!r} answers several questions, {', '.join(sorted(questions))};"
            " export the project as JSON-MIN, and name the column of one as --label-column"
        )
    for question, kind in others.items():
        raise CorpusError(
            f"{where}: question {question!r:.40} of column {column!r} has answers of type"
            f" {kind!r:.40}, expected choices or labels of a text; leave it out of the export"
        )
    return Annotation(tuple(labels), tuple(sorted(spans)))


def check_accepted(row: Mapping[str, Any], where: object) -> None:
    """Raise CorpusError for a row of Prodigy whose labels the annotator rejected or left open."""
    of_prodigy = not row.keys().isdisjoint(("spans", "_task_hash", "_input_hash"))
    if of_prodigy and (answer := row.get("answer")) in ("reject", "ignore"):
        raise CorpusError(
            f"{where}: the annotator's answer is {answer!r}, so its labels are not gold; take out"
            " all rows whose answer is not 'accept'"
        )


def _span(item: Any, where: object, text: str | None) -> Span | None:
    """Read a span; None for what has another form."""
    cells: Sequence[Any] = item if isinstance(item, list) else ()
    if isinstance(item, dict):
        cells = next(([item[k] for k in keys] for keys in SPAN_KEYS if {*keys} <= item.keys()), ())
    if len(cells) != 3:
        return None
    begin, end, names = cells
    names = names if isinstance(names, list) else [names]
    if len(names) != 1 or not isinstance(names[0], str) or not names[0]:
        raise CorpusError(f"{where}: expected one name of a span, got {names!r:.60}; choose one")
    if not all(isinstance(each, int) for each in (begin, end)) or not 0 <= begin < end:
        raise CorpusError(
            f"{where}: expected a span from a character to a later one, got {begin!r:.20} to"
            f" {end!r:.20}; mend the row or take it out"
        )
    said = item.get("text") if isinstance(item, dict) else None
    if text is not None and isinstance(said, str) and text[begin:end] != said:
        raise CorpusError(
            f"{where}: characters {begin} to {end} of the text are {text[begin:end]!r:.40}, but the"
            f" span says {said!r:.40}; count characters, not bytes or UTF-16 units, from 0"
        )
    return begin, end, names[0]


def words_in(text: str, spans: Sequence[Span], where: object) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and IOB2 tag of the words of a text; blanks and the ends of spans part them.

    Raises CorpusError for spans that overlap, lie outside of the text or hold no word.
    """
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise CorpusError(
                f"{where}: the spans {before} and {after} overlap, but a word has one tag; leave"
                " one of them out"
            )
    if spans and spans[-1][1] > len(text):
        raise CorpusError(
            f"{where}: the span {spans[-1]} ends behind the text, which has {len(text)} characters;"
            " export the spans of this text"
        )
    place = 0
    for begin, end, kind in [*spans, (len(text), len(text), "")]:
        for word in WORD.finditer(text, place, begin):
            yield *word.span(), OUTSIDE
        if kind and text[begin:end].isspace():
            raise CorpusError(
                f"{where}: the span {(begin, end, kind)} holds no word, but"
                f" {text[begin:end]!r:.20}; mend it or take it out"
            )
        for number, word in enumerate(WORD.finditer(text, begin, end)):
            yield *word.span(), (OTHER if number else FIRST) + kind
        place = end
