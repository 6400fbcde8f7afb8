"""Texts of a corpus with gold labels or IOB tags, and the columns of a table that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from teachonce.store.format.sequences import SEPARATOR
from teachonce.support.console import counted, takes_option
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.annotations import (
    annotation_of,
    check_accepted,
    label_name,
    words_in,
)
from teachonce.teacher_dump.corpus.tables import cell_of, is_message
from teachonce.teacher_dump.corpus.tag_schemes import BEGINNING, FIRST, OTHER, OUTSIDE, Step
from teachonce.teacher_dump.corpus.text_files import CorpusError, conversion, no_column, suffix_of

TEXT_COLUMN, MESSAGES = "--text-column", "--messages"
DEFAULT_COLUMN = "text"


class Message(NamedTuple):
    """Holds a message of a chat.

    more: its other fields that are not null, such as `tool_calls`.
    """

    role: str
    content: str
    more: Mapping[str, Any] = MappingProxyType({})

    def fields(self, others: Sequence[str] = ()) -> dict[str, Any]:
        """Return role and content, and the `others` that the message has."""
        extra = {name: self.more[name] for name in others if name in self.more}
        return {"role": self.role, "content": self.content, **extra}


@dataclass(frozen=True, slots=True)
class Columns:
    """Holds the names of the columns of a table that have texts and labels.

    text: the column of texts; None for the column named `text`, else the only column of texts or
        lists of words.
    label: None if texts have no label.
    second: the column of the second text of a pair.
    parallel: whether the teacher reads only the first text of a pair, and the student the second.
    chats: whether `text` is a column of chats, lists of messages.
    """

    text: str | None = None
    label: str | None = None
    second: str | None = None
    parallel: bool = False
    chats: bool = False

    @classmethod
    def named(cls, text: str | None, label: str | None, student: str | None = None) -> Columns:
        """Make the columns from `--text-column`, `--label-column` and `--student-column`.

        Raises CorpusError for more than two columns of texts, and for a column named twice.
        """
        names = pair_of(text) or (text, student)
        if label is not None and label in names:
            raise CorpusError(
                f"--label-column {label}: is the column of the text; give the column of the labels"
            )
        return cls(names[0], label, names[1], student is not None)

    def names(self) -> set[str]:
        """Return the names of these columns. A first row that has one of the names is a header."""
        return {self.text or DEFAULT_COLUMN, *filter(None, (self.second, self.label))}

    def options(self) -> dict[str, str | None]:
        """Return these columns as options: text_column, student_column, label_column."""
        if self.chats:
            texts = {"messages": self.text}
        elif self.parallel:
            texts = {"text_column": self.text, "student_column": self.second}
        else:
            names = [name for name in (self.text, self.second) if name is not None]
            texts = {"text_column": ",".join(names) or None}
        return texts | ({} if self.label is None else {"label_column": self.label})

    def chosen(self, columns: list[str], textual: list[str], where: object) -> list[str]:
        """Return the names of the columns of texts in a table: one, or two for pairs.

        Raises CorpusError like `choose_column`.
        """
        of_text = MESSAGES if self.chats else TEXT_COLUMN
        first = choose_column(columns, textual, self.text, where, of_text)
        if self.second is None:
            return [first]
        option = "--student-column" if self.parallel else TEXT_COLUMN
        return [first, choose_column(columns, textual, self.second, where, option)]


def pair_of(text_column: str | None) -> tuple[str, str] | None:
    """Parse `--text-column A,B` into its two columns; None for one column.

    Raises CorpusError for more than two columns, an empty name, or equal names.
    """
    if text_column is None or "," not in text_column:
        return None
    first, _, second = text_column.partition(",")
    if "," in second or not (first and second) or first == second:
        raise CorpusError(
            f"--text-column {text_column}: expected one column, or A,B for two different columns of"
            " pairs of texts; rename a column that has a comma in its name"
        )
    return first, second


@dataclass(frozen=True, slots=True)
class Gold:
    """Holds gold labels: one label of a whole text, or tags of its words.

    A tag is (begin, end, name) in characters, with an exclusive end; tags are in the order of
    words.
    """

    label: str | None = None
    tags: tuple[tuple[int, int, str], ...] = ()

    def tag_pairs(self) -> Iterator[Step]:
        """Yield each tag together with the tag of the word before it."""
        before, expected = BEGINNING, 0
        for begin, end, tag in self.tags:
            yield before if begin == expected else None, tag
            before, expected = tag, end + 1  # one space between words


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Holds one text of a file.

    line: its line in the file, or its row in .parquet.
    tag_lines: the line of each tag.
    messages: the messages of a chat; `text` is then their contents, joined.
    """

    text: str
    line: int
    gold: Gold | None = None
    tag_lines: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def is_blank(self) -> bool:
        """Return whether the text is white space alone; for a pair, both texts."""
        return not self.text.strip()  # SEPARATOR is white space for Python, too


SHARE_GPT = 'rename "from" to "role" (human to user, gpt to assistant) and "value" to "content"'
# In JSON, quotes inside of a text are escaped, so that only keys match.
RENAME = (
    """sed -E 's/"from" *: *"human"/"role": "user"/g; s/"from" *: *"gpt"/"role": "assistant"/g;"""
    """ s/"from" *:/"role":/g; s/"value" *:/"content":/g'"""
)


def chat_row(cell: Any, column: str, line: int, where: object, path: Path) -> LabelledText:
    """Read a chat: a list of messages, each with the texts `role` and `content`, or such a list as
    JSON, as in .csv files.

    path: the file, for a command that corrects it. Raises CorpusError for any other cell.
    """
    chat = cell
    if isinstance(cell, str):
        with suppress(ValueError, RecursionError):
            chat = json.loads(cell)
    if not (isinstance(chat, list) and chat and all(isinstance(m, Mapping) for m in chat)):
        raise CorpusError(
            f'{where}: expected a list of messages like {{"role": "user", "content": "..."}}, or'
            f" its JSON, in column {column!r}, got {cell!r:.60}; is it the right --messages?"
        )
    messages = list[Message]()
    for number, message in enumerate(chat, 1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got, remedy = "which it lacks", "give a text, or remove this chat"
                if key in message:
                    got = f"got {message[key]!r:.60}"
                if message.get(key) is None and {"from", "value"} <= message.keys():
                    remedy = SHARE_GPT
                    if isinstance(cell, list) and suffix_of(path) in (".json", ".jsonl"):
                        remedy += f": {conversion(path, RENAME, 'chats')}"
                raise CorpusError(
                    f"{where}: message {number} in column {column!r}: expected a text as {key!r},"
                    f" {got}; {remedy}"
                )
        fields = {key: value for key, value in message.items() if value is not None}
        messages.append(Message(fields.pop("role"), fields.pop("content"), fields))
    # The joined contents serve until the chat is rendered: to leave out blank chats, and to count
    # characters for --plan.
    return LabelledText(
        "\n".join(message.content for message in messages), line, messages=tuple(messages)
    )


def choose_column(
    columns: list[str],
    textual: list[str],
    wanted: str | None,
    where: object,
    option: str = TEXT_COLUMN,
) -> str:
    """Return the column of texts: the `wanted` one, else `text`, else the only textual column.

    Raises CorpusError if there is no such column, or if several have this name.
    """
    if wanted in columns:
        column = wanted
    elif wanted is not None:
        raise no_column(wanted, columns, where, f"give one of them as {option}")
    elif DEFAULT_COLUMN in columns:
        column = DEFAULT_COLUMN
    elif len(textual) == 1:
        column = textual[0]
    else:
        remedy = f"name the one that holds the text with {option}"
        remedy += ", or chats with --messages" if takes_option("messages") is not False else ""
        raise no_column(DEFAULT_COLUMN, columns, where, remedy)
    _check_single(column, columns, where)
    return column


def _check_single(name: str, columns: Sequence[str], where: object) -> None:
    if columns.count(name) > 1:
        raise CorpusError(
            f"{where}: {columns.count(name)} columns have the name {name!r}; rename all but one"
        )


def check_label(columns: Sequence[str], wanted: str | None, where: object) -> None:
    """Raise CorpusError if the `wanted` column of labels is missing or ambiguous."""
    if wanted is None:
        return
    if wanted not in columns:
        remedy = (
            "give one of them as --label-column (texts without labels may come as .txt, or with an"
            " empty label)"
        )
        raise no_column(wanted, columns, where, remedy, " of labels")
    _check_single(wanted, columns, where)


def gold_of(value: Any, column: str, where: object, text: str) -> Gold | None:
    """Read the labels of a text from a cell; None if the text is not annotated. Spans become tags
    of words.

    Raises CorpusError for a cell of unknown form, and if a text has several labels.
    """
    annotation = annotation_of(value, column, where, text)
    if annotation is None:
        return None
    if len(annotation.labels) > 1 or (annotation.labels and annotation.spans):
        raise several_labels((*annotation.labels, *annotation.spans), where)
    if annotation.labels:
        return Gold(annotation.labels[0])
    return Gold(tags=tuple(words_in(text, annotation.spans, where)))


def several_labels(labels: Sequence[object], where: object) -> CorpusError:
    """Return the error for a text with several labels."""
    return CorpusError(
        f"{where}: {len(labels)} labels of one text, {list(labels)!r:.60}, expected one; choose"
        " one, or write a file for each label with yes and no as labels"
    )


def tagged_words(words: Any, tags: Any, columns: Sequence[str], where: object) -> Gold | None:
    """Read a list of tags, one for each word; None if `tags` is None.

    Raises CorpusError if words are not strings, or if the number of tags differs from theirs.
    """
    if not all(isinstance(word, str) for word in words):
        remedy = "is it the right --text-column?"
        if is_message(words[0]) and takes_option("messages") is not False:
            remedy = f"give chats as --messages {columns[0]}, without --text-column"
        raise CorpusError(
            f"{where}: expected words in column {columns[0]!r}, got {words!r:.60}; {remedy}"
        )
    if tags is None:
        return None
    if not isinstance(tags, list) or len(tags) != len(words):
        got = counted(len(tags), "tag") if isinstance(tags, list) else f"{tags!r:.40}"
        raise CorpusError(
            f"{where}: expected a tag for each of {len(words)} words in column {columns[1]!r}, got"
            f" {got}; correct the row or remove it"
        )
    word_tags, begin = [], 0
    for word, tag in zip(words, tags, strict=True):
        if name := label_name(tag, columns[1], where):
            word_tags.append((begin, begin + len(word), name))
        begin += len(word) + 1
    return Gold(tags=tuple(word_tags))


def labelled_row(
    row: Mapping[str, Any], texts: Sequence[str], label: str | None, line: int, where: object
) -> LabelledText:
    """Read the columns of `texts` and `label` of a row.

    A text may be a list of words, which are joined by spaces; its label is then a list of tags.
    Raises CorpusError like `check_accepted`, `gold_of`, `tagged_words` and `joined_text`.
    """
    if label:
        check_accepted(row, where)
    cells, gold = [cell_of(row, name) for name in texts], None
    label_cell = cell_of(row, label) if label else None
    if len(cells) == 1 and isinstance(cells[0], list):
        gold = tagged_words(cells[0], label_cell, [texts[0], label or ""], where)
        text = " ".join(cells[0])
    else:
        text = joined_text(cells, texts, where)
        gold = gold_of(label_cell, label, where, text) if label else None
    lines = (line,) * len(gold.tags) if gold else ()
    return LabelledText(text, line, gold, lines)


def joined_text(values: Sequence[Any], columns: Sequence[str], where: object) -> str:
    """Return the text of a row; the texts of a pair are joined by SEPARATOR.

    Raises CorpusError if a value is not text, or if a text of a pair contains SEPARATOR.
    """
    texts = [text_of(value, name, where) for value, name in zip(values, columns, strict=True)]
    for text, name in zip(texts, columns, strict=True):
        if len(texts) > 1 and SEPARATOR in text:
            raise CorpusError(
                f"{where}: the text in column {name!r} holds the control character U+001F, which"
                " separates the two texts of a pair in a store; replace it by a space"
            )
    return SEPARATOR.join(texts)


def text_of(value: Any, column: str, where: object) -> str:
    """Return a value of the text column; null gives an empty text.

    Raises CorpusError if the value is not text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        got = f"{type(value).__name__} {value!r:.40}"
        raise CorpusError(
            f"{where}: expected text in column {column!r}, got {got}; "
            f"is it the right --text-column?"
        )
    return value


def is_iob(labels: Iterable[str]) -> bool:
    """Return whether the labels of a tagger are IOB: all are O, B-X or I-X, with at least one
    B-X."""
    prefixes = {label if label == OUTSIDE else label[:2] for label in labels}
    return FIRST in prefixes and prefixes <= {OUTSIDE, FIRST, OTHER}


def check_tag(tag: str, where: str) -> None:
    """Raise UserError, which names `where`, if a tag is not O, B-X or I-X."""
    if tag != OUTSIDE and not tag.startswith((FIRST, OTHER)):
        raise UserError(
            f"{where}: tag {tag!r} is neither O nor B-... nor I-...; convert the tags to IOB, or"
            " remove comment lines; for tags that are not entities use `downstream --task pos`"
        )


def check_order(before: str | None, tag: str, where: str) -> None:
    """Raise UserError, which names `where`, if I-X follows neither B-X nor I-X.

    before: the previous word's tag, as in `Step`. tag: the word's tag.
    """
    kind = tag.removeprefix(OTHER)
    if kind == tag or before in (None, FIRST + kind, tag):
        return
    context = f"after {before!r}" if before else "at the beginning of a sentence"
    raise UserError(
        f"{where}: tag {tag!r} is {context}, without a {kind} before it; write {FIRST}{kind} at the"
        " first word of every entity (IOB2)"
    )
