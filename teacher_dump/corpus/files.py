"""Texts of a local file: .txt, tables (`tables`), words with tags (`tagged_files`).

Every reader streams the texts in order, empty ones too, with their gold labels, and raises
CorpusError (one line: file, line, expected and got, remedy).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from teachonce.teacher_dump.corpus.labelled_text import (
    Columns,
    Gold,
    LabelledText,
    chat_row,
    check_label,
    labelled_row,
)
from teachonce.teacher_dump.corpus.tables import (
    TABLES,
    TextTable,
    cell_of,
    has_cell,
    names_in,
    open_table,
)
from teachonce.teacher_dump.corpus.tag_schemes import (
    ENTITIES,
    NO_LABEL,
    OUTSIDE,
    Step,
    converted,
    scheme_of,
)
from teachonce.teacher_dump.corpus.tagged_files import (
    TAGGED,
    check_untagged,
    is_tagged,
    tagged_layout,
    tagged_sentences,
)
from teachonce.teacher_dump.corpus.text_files import (
    BLOCK,
    CorpusError,
    Seen,
    ignore_bytes,
    no_column,
    read_lines,
    suffix_of,
)

# The name of a column has at most a few words, and does not end like a sentence.
NAME_WORDS, NAME_CHARACTERS, ENDS = 4, 50, (".", "!", "?", "。", "！", "？")
MAX_NAMES = 1 << 17  # labels to collect: more than any teacher has
SizeAndHash = tuple[int, str]  # number of bytes, and their SHA-256


def read_rows(path: Path, columns: Columns, seen: Seen = ignore_bytes) -> Iterator[LabelledText]:
    """Read the texts of a file by its suffix. `seen` receives the bytes that are read."""
    if suffix_of(path) == ".txt":
        check_untagged(path)
        return (LabelledText(line, n) for n, line in enumerate(read_lines(path, seen), 1))
    if has_columns(path, columns):
        return table_texts(open_table(path, seen), columns, str(path))
    return _read_tagged(path, seen)


def has_columns(path: Path, columns: Columns) -> bool:
    """Return whether a file is a table, not lines of text or words with tags."""
    suffix = suffix_of(path)
    return suffix in TABLES and not (suffix == ".tsv" and is_tagged(path, columns.names()))


def table_texts(table: TextTable, columns: Columns, name: str) -> Iterator[LabelledText]:
    """Read the texts of a table, called `name` in errors; a blank row is an empty text. Raises
    CorpusError for a table without rows, and for a column that is missing or has no text."""
    if not table.columns:
        raise CorpusError(f"{name}: has no rows; give a table with a text in each row")
    label = columns.label
    # Names of labels are text as well, and would leave the choice of the text column ambiguous.
    textual = [name for name in table.textual if name != label]
    text_columns = columns.chosen(table.columns, textual, table.where)
    if table.header and columns.text is None:
        _check_header(table, text_columns[0])
    for column in text_columns:
        if (kind := table.others.get(column)) is not None:
            raise CorpusError(
                f"{name}: expected text in column {column!r}, got {kind}; give another"
                " --text-column"
            )
    check_label(table.columns, label, table.where)
    read_columns = [*text_columns, label] if label else text_columns
    for number, row in table.rows(read_columns):
        where = f"{name}, {table.unit} {number}"
        if row is None:
            yield LabelledText("", number)
            continue
        # Each row of JSON names its own cells, so any row may lack a column.
        if absent := [column for column in text_columns if not has_cell(row, column)]:
            # A chat must have messages: null would be refused.
            null = "" if columns.chats else "if this row has no text, write null there, or "
            raise no_column(absent[0], names_in(row), where, f"{null}remove the row")
        if label and not has_cell(row, label):
            remedy = "if this text has no label, write null there, or remove the row"
            raise no_column(label, names_in(row), where, remedy, " of labels")
        if columns.chats:
            cell = cell_of(row, text_columns[0])
            yield chat_row(cell, text_columns[0], number, where, Path(name))
        else:
            yield labelled_row(row, text_columns, label, number, where)


def _check_header(table: TextTable, column: str) -> None:
    """Raise CorpusError if the name of the chosen column looks like a text: the header is
    missing."""
    if len(column.split()) > NAME_WORDS or len(column) > NAME_CHARACTERS or column.endswith(ENDS):
        raise CorpusError(
            f"{table.where}: {column!r:.60} is read as the name of the text column, but looks like"
            " a text; write a header above it, such as text, or give the name as --text-column"
        )


def _read_tagged(path: Path, seen: Seen) -> Iterator[LabelledText]:
    """Read each sentence as a text, its words joined by spaces, with the line of the first word."""
    for words in tagged_sentences(path, seen):
        tags, begin = [], 0
        for _, word, tag in words:
            if tag:
                tags.append((begin, begin + len(word), tag))
            begin += len(word) + 1
        text, lines = " ".join(word for _, word, _ in words), tuple(n for n, _, tag in words if tag)
        yield LabelledText(text, words[0][0], Gold(tags=tuple(tags)), lines)


READERS = (".txt", *TABLES, *TAGGED)
"""Suffixes of the files that can be read."""


class CorpusSource:
    """Yields texts in a fixed order, including empty ones; can be read repeatedly.

    `texts` is the number of texts that are not empty, and `characters` their length; None if
    unknown, as before `check`.
    """

    name: str
    unit = "line"
    texts: int | None = None
    characters: int | None = None

    def __init__(self) -> None:
        self._met: dict[str, dict[str, int]] = {"classification": {}, "tagging": {}, ENTITIES: {}}
        self._steps: dict[Step, int] = {}

    @property
    def tabular(self) -> bool:
        """Return whether the texts are in a column."""
        return True

    def rows(self) -> Iterator[LabelledText]:
        raise NotImplementedError

    def first(self) -> LabelledText | None:
        """Return the first text; None if the source is empty. Raises CorpusError if the text cannot
        be read."""
        return next(self.rows(), None)

    def identity(self) -> dict[str, Any]:
        raise NotImplementedError

    def check(self) -> None:
        """Read a local source to its end. Raises CorpusError."""

    def notes(self) -> list[str]:
        """Return a line on how the source is read, if it could be read in several ways."""
        return []

    def found_labels(self, kind: str) -> dict[str, str]:
        """Return the labels (`classification`) or tags (`tagging`) that `check` found, each with
        its first place.

        The kind `ENTITIES` gives the tags of entities, converted to the scheme of this name.
        """
        return {name: self._place(line) for name, line in self._met[kind].items()}

    def tag_pairs(self) -> dict[Step, str]:
        """Return the pairs of consecutive tags that `check` found, each with its first place."""
        return {step: self._place(line) for step, line in self._steps.items()}

    def _place(self, line: int) -> str:
        return f"{self.name}, {self.unit} {line}"

    def _count(self) -> None:
        """Read every text; count texts and characters, and collect labels and tags."""
        texts = characters = 0
        for row in self.rows():
            if not row.is_blank:
                texts, characters = texts + 1, characters + len(row.text)
            if row.gold and row.gold.label is not None:
                _collect(self._met["classification"], row.gold.label, row.line)
            elif row.gold:
                for (before, tag), line in zip(row.gold.tag_pairs(), row.tag_lines, strict=True):
                    _collect(self._met["tagging"], tag, line)
                    _collect(self._steps, (before, tag), line)
                tags = [OUTSIDE if tag == NO_LABEL else tag for *_, tag in row.gold.tags]
                if scheme_of(tags):
                    for tag, line in zip(converted(tags, ENTITIES), row.tag_lines, strict=True):
                        _collect(self._met[ENTITIES], tag, line)
        self.texts, self.characters = texts, characters

    def trust(self, identity: Mapping[str, Any]) -> None:
        """Take the file's hash from this identity instead of hashing the file, if kind, name and
        size are equal."""

    def check_unchanged(self) -> None:
        """Raise CorpusError if the last pass read other texts than `identity` describes."""


class FileSource(CorpusSource):
    """Reads a local file with one of the suffixes of READERS."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__()
        self.name, self._path = path.name, path
        self.unit = "row" if suffix_of(path) == ".parquet" else "line"
        self._columns = columns
        self._pass = _Digest()  # size and hash of the bytes that the last pass read
        self._checked: SizeAndHash | None = None
        self._identified: SizeAndHash | None = None

    @cached_property
    def tabular(self) -> bool:
        return has_columns(self._path, self._columns)

    def rows(self) -> Iterator[LabelledText]:
        """Yield the texts. Raises CorpusError for a text that cannot be read, and after the last
        text if the file has changed since `check` read it."""
        self._pass = read = _Digest()
        yield from self._read(read.add)
        if self._checked and read.size_and_hash() != self._checked:
            raise self._changed(self._checked, read.size_and_hash())

    def first(self) -> LabelledText | None:
        # Not hashed: for the hash, a compressed file would be read to its end, before and after.
        return next(self._read(ignore_bytes), None)

    def _read(self, seen: Seen) -> Iterator[LabelledText]:
        try:
            yield from read_rows(self._path, self._columns, seen)
        except OSError as error:
            raise _unreadable(self._path, error) from None

    def check(self) -> None:
        """Read the file, and hash it on the way if its reader reads every byte."""
        # A second pass for the hash alone would take minutes for large files.
        self._count()
        # After a pass that skipped bytes, or missed appended ones, `identity` hashes the file.
        if self._pass.size == self._path.stat().st_size:
            self._checked = self._pass.size_and_hash()

    def notes(self) -> list[str]:
        if suffix_of(self._path) == ".txt" or self.tabular:
            return []
        note = tagged_layout(self._path).note()
        return [f"{self._path}: {note}"] if note else []

    def _place(self, line: int) -> str:
        return f"{self._path}, {self.unit} {line}"

    def identity(self) -> dict[str, Any]:
        self._identified = self._checked or digests(self._path)[0].size_and_hash()
        size, sha256 = self._identified
        return {"kind": "file", "name": self.name, "bytes": size, "sha256": sha256}

    def trust(self, identity: Mapping[str, Any]) -> None:
        size = self._path.stat().st_size
        if [identity.get(key) for key in ("kind", "name", "bytes")] == ["file", self.name, size]:
            self._checked = size, str(identity.get("sha256"))

    def check_unchanged(self) -> None:
        """Raise CorpusError unless the last pass read the bytes that `identity` describes.

        If the pass stopped early, or its reader skips bytes, the file is read again.
        """
        read = self._pass.size_and_hash()
        if self._identified is None or read == self._identified:
            return
        whole, start = (digest.size_and_hash() for digest in digests(self._path, self._pass.size))
        # The bytes up to the end of the pass are compared as well: if an edit was undone, the file
        # is as before, but the pass read other bytes.
        if (whole, start) != (self._identified, read):
            raise self._changed(self._identified, whole)

    def _changed(self, before: SizeAndHash, now: SizeAndHash) -> CorpusError:
        had, has = (f"{size:,} bytes, sha256 {sha256[:12]}" for size, sha256 in (before, now))
        return CorpusError(
            f"{self._path}: was changed while it was being read, from {had} to {has}, so the output"
            " is not finished; remove it, and run the command again with a file that does not"
            " change"
        )


class _Digest:
    """Computes the size and the SHA-256 of a stream of bytes."""

    def __init__(self) -> None:
        self.size, self._sha256 = 0, hashlib.sha256()

    def add(self, raw: bytes) -> None:
        self.size += len(raw)
        self._sha256.update(raw)

    def size_and_hash(self) -> SizeAndHash:
        return self.size, self._sha256.hexdigest()


def digests(path: Path, first: int = 0) -> tuple[_Digest, _Digest]:
    """Return the digests of a file and of its first `first` bytes. Raises CorpusError if the file
    cannot be read."""
    whole, start = _Digest(), _Digest()
    try:
        with path.open("rb") as file:
            while raw := file.read(BLOCK):
                whole.add(raw)
                start.add(raw[: max(0, first - start.size)])
    except OSError as error:
        raise _unreadable(path, error) from None
    return whole, start


def _unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(f"{path}: cannot be read ({error.strerror}); check the file")


def _collect(first_lines: dict[Any, int], name: Any, line: int) -> None:
    if len(first_lines) < MAX_NAMES:
        first_lines.setdefault(name, line)
