"""Texts of a local file: .txt, .jsonl, .csv, .tsv (a table or token/tag), .parquet.

Every reader streams the texts in order, empty ones too, with their gold labels, and raises
CorpusError (one line: file, line, expected and got, remedy).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from teachonce.support.console import counted
from teachonce.support.errors import first_line
from teachonce.teacher_dump.corpus.labelled_text import (
    DEFAULT_COLUMN,
    Columns,
    Gold,
    LabelledText,
    Step,
    check_label,
    choose_column,
    gold_of,
    joined_text,
    labelled_row,
)
from teachonce.teacher_dump.corpus.text_files import (
    CorpusError,
    Seen,
    ignore,
    read_lines,
    read_objects,
    read_table,
)

PEEK_LINES = 1000
"""Number of lines by which a token/tag file is distinguished from a table."""
SAMPLE_ROWS = 100
"""Number of rows by which a column of text is distinguished from a column of numbers."""
BLOCK = 1 << 20
"""Bytes that are read at once for a hash."""
KEPT_NAMES = 1 << 17  # more than any teacher has labels
SizeAndHash = tuple[int, str]  # of bytes: their number and SHA-256


def read_rows(path: Path, columns: Columns, seen: Seen = ignore) -> Iterator[LabelledText]:
    """Read the texts of a file by its suffix. `seen` gets the bytes that are read."""
    return READERS[path.suffix.lower()](path, columns, seen)


def has_columns(path: Path, columns: Columns) -> bool:
    """Whether the texts of a file are in a column, not on lines or as words with tags."""
    suffix = path.suffix.lower()
    return suffix != ".txt" and not (suffix == ".tsv" and _is_tagged(path, columns))


def _read_txt(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    return (LabelledText(line, number) for number, line in enumerate(read_lines(path, seen), 1))


def _read_jsonl(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    chosen, label = list[str](), columns.label
    for number, row in read_objects(path, seen):
        if row is None:
            yield LabelledText("", number)
            continue
        where = f"{path}, line {number}"
        if not chosen:
            textual = [n for n, value in row.items() if isinstance(value, str) and n != label]
            chosen = columns.chosen(list(row), textual, where)
        if absent := [name for name in chosen if name not in row]:
            choose_column(list(row), [], absent[0], where)
        check_label(list(row), label, where)
        yield labelled_row(row, chosen, label, number, where)


def _read_tsv(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    tagged = _is_tagged(path, columns)
    return _read_tagged(path, seen) if tagged else _read_table(path, columns, seen)


def _read_table(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    """Read the texts of a table with a header; a blank row is an empty text."""
    table = read_table(path, seen)
    header, sample = table.header, list(islice(table.rows, SAMPLE_ROWS))
    textual = [
        name
        for i, name in enumerate(header)
        if name != columns.label and not all(_is_number(row[i]) for _, row in sample if row)
    ]
    chosen = columns.chosen(header, textual, table.where)
    places = [header.index(name) for name in chosen]
    check_label(header, columns.label, table.where)
    label = header.index(columns.label) if columns.label else None
    for number, row in chain(sample, table.rows):
        gold = gold_of(row[label], columns.label, path) if row and label is not None else None
        cells, where = [row[place] for place in places] if row else [], f"{path}, line {number}"
        yield LabelledText(joined_text(cells, chosen, where) if row else "", number, gold)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return not cell
    return True


def _is_tagged(path: Path, columns: Columns) -> bool:
    """Whether the lines are `token<TAB>tag` with empty lines between sentences, and no header."""
    first = islice(read_lines(path), PEEK_LINES)
    rows = [line.split("\t") for line in first if not _is_comment(line)]
    if not rows or {columns.text or DEFAULT_COLUMN, columns.second, columns.label} & set(rows[0]):
        return False
    gaps = [i for i, row in enumerate(rows) if row == [""]]
    inner = any(i and rows[i - 1] != [""] and any(r != [""] for r in rows[i:]) for i in gaps)
    return inner and all(len(row) == 2 for row in rows if row != [""])


def _is_comment(line: str) -> bool:
    return line.startswith("#") and "\t" not in line


def tagged_sentences(path: Path, seen: Seen = ignore) -> Iterator[list[tuple[int, str, str]]]:
    """Read the sentences of a token/tag file: line number, word and tag of each word.

    A word or a tag may be empty. Blank lines end a sentence; comments (# without a tab) are left
    out. Raises CorpusError for a line with another number of columns.
    """
    words: list[tuple[int, str, str]] = []
    for number, line in enumerate(read_lines(path, seen), 1):
        if not line.strip():
            if words:
                yield words
            words = []
        elif not _is_comment(line):
            cells = line.split("\t")
            if len(cells) != 2:
                raise CorpusError(
                    f"{path}, line {number}: expected token<TAB>tag, and a blank line between "
                    f"sentences, got {counted(len(cells), 'column')}"
                )
            words.append((number, cells[0], cells[1].strip()))
    if words:
        yield words


def _read_tagged(path: Path, seen: Seen) -> Iterator[LabelledText]:
    """Read each sentence as its tokens joined by blanks, on the line of the first token."""
    for words in tagged_sentences(path, seen):
        tags, begin = [], 0
        for _, word, tag in words:
            if tag:
                tags.append((begin, begin + len(word), tag))
            begin += len(word) + 1
        text, lines = " ".join(word for _, word, _ in words), tuple(n for n, _, tag in words if tag)
        yield LabelledText(text, words[0][0], Gold(tags=tuple(tags)), lines)


def _read_parquet(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _seen_whole(path, seen), pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            label = columns.label
            check_label(schema.names, label, path)
            textual = [field.name for field in schema if _is_text(field.type)]
            others = [name for name in textual if name != label]
            chosen = columns.chosen(schema.names, others, path)
            if wrong := [name for name in chosen if name not in textual]:
                got = schema.field(wrong[0]).type
                raise CorpusError(
                    f"{path}: expected text in column {wrong[0]!r}, got {got}; "
                    f"give another --text-column"
                )
            kept = chosen if label is None else [*chosen, label]
            batches = file.iter_batches(batch_size=1000, columns=kept)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield labelled_row(row, chosen, label, number, f"{path}, row {number}")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{path}: not a readable parquet file ({first_line(error)}); write it again"
        ) from None


@contextmanager
def _seen_whole(path: Path, seen: Seen) -> Iterator[None]:
    """Pass on the bytes of a file that a library reads in any order; and more if they differ after
    the reading, because what was read is then neither version."""
    if seen is ignore:
        yield
        return
    before = hashlib.sha256()
    with path.open("rb") as file:
        while raw := file.read(BLOCK):
            before.update(raw)
            seen(raw)
    try:
        yield
    finally:
        try:
            with path.open("rb") as file:
                after = hashlib.file_digest(file, "sha256").digest()
        except OSError:
            after = b""
        if after != before.digest():
            seen(b"changed")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


READERS: dict[str, Callable[[Path, Columns, Seen], Iterator[LabelledText]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_table,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}


class Source:
    """Texts in a fixed order, empty ones too, which can be read again and again.

    `texts` counts those that are not empty, and `characters` those in them; None where that is not
    known, as before `check`.
    """

    name: str
    texts: int | None = None
    characters: int | None = None

    @property
    def tabular(self) -> bool:
        """Whether the texts are in a column."""
        return True

    def rows(self) -> Iterator[LabelledText]:
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        raise NotImplementedError

    def check(self) -> None:
        """Read a local source to its end. Raises CorpusError."""

    def met(self, kind: str) -> dict[str, str]:
        """Return the labels (`classification`) or tags (`tagging`) that `check` met, and where."""
        return {}

    def steps(self) -> dict[Step, str]:
        """Return the steps from tag to tag that `check` met, and where each was first."""
        return {}

    def trust(self, identity: Mapping[str, Any]) -> None:
        """Take the hash of this identity, if all else of it is true, rather than read for it."""

    def check_unchanged(self) -> None:
        """Raise CorpusError where the last pass did not read what `identity` returned."""


class FileSource(Source):
    """A local file with one of the suffixes of READERS."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.name, self._path = path.name, path
        self._columns = columns
        self._pass = _Digest()  # what the last pass has read
        self._checked: SizeAndHash | None = None
        self._identified: SizeAndHash | None = None
        self._met: dict[str, dict[str, int]] = {"classification": {}, "tagging": {}}
        self._steps: dict[Step, int] = {}

    @cached_property
    def tabular(self) -> bool:
        return has_columns(self._path, self._columns)

    def rows(self) -> Iterator[LabelledText]:
        """Yield the texts. Raises CorpusError, at the end also where `check` read other bytes."""
        self._pass = read = _Digest()
        try:
            yield from read_rows(self._path, self._columns, read.add)
        except OSError as error:
            raise CorpusError(
                f"{self._path}: cannot be read ({error.strerror}); check the file"
            ) from None
        if self._checked and read.size_and_hash() != self._checked:
            raise self._changed(self._checked, read.size_and_hash())

    def check(self) -> None:
        """Read the file, and hash it on the way if its reader reads every byte.

        A second pass for the hash alone would take minutes for big files.
        """
        texts = characters = 0
        for row in self.rows():
            if row.text and not row.text.isspace():
                texts, characters = texts + 1, characters + len(row.text)
            if row.gold and row.gold.label is not None:
                _note(self._met["classification"], row.gold.label, row.line)
            elif row.gold:
                for (before, tag), line in zip(row.gold.steps(), row.tag_lines, strict=True):
                    _note(self._met["tagging"], tag, line)
                    _note(self._steps, (before, tag), line)
        self.texts, self.characters = texts, characters
        if self._pass.size == self._path.stat().st_size:
            self._checked = self._pass.size_and_hash()

    def met(self, kind: str) -> dict[str, str]:
        return {name: f"{self._path}, line {line}" for name, line in self._met[kind].items()}

    def steps(self) -> dict[Step, str]:
        return {step: f"{self._path}, line {line}" for step, line in self._steps.items()}

    def identity(self) -> dict[str, Any]:
        self._identified = self._checked or self._digests()[0].size_and_hash()
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
        whole, begun = (digest.size_and_hash() for digest in self._digests(self._pass.size))
        if (whole, begun) != (self._identified, read):
            raise self._changed(self._identified, whole)

    def _digests(self, first: int = 0) -> tuple[_Digest, _Digest]:
        try:
            return digests(self._path, first)
        except OSError as error:
            raise CorpusError(
                f"{self._path}: cannot be read ({error.strerror}); check the file"
            ) from None

    def _changed(self, before: SizeAndHash, now: SizeAndHash) -> CorpusError:
        had, has = (f"{size:,} bytes, sha256 {sha256[:12]}" for size, sha256 in (before, now))
        return CorpusError(
            f"{self._path}: was changed while it was read: {had} before, {has} now; what was made"
            " of it is not finished: remove that, and type the command again with a file that"
            " nobody changes"
        )


class _Digest:
    """Size and SHA-256 of bytes that come one after another."""

    def __init__(self) -> None:
        self.size, self._sha256 = 0, hashlib.sha256()

    def add(self, raw: bytes) -> None:
        self.size += len(raw)
        self._sha256.update(raw)

    def size_and_hash(self) -> SizeAndHash:
        return self.size, self._sha256.hexdigest()


def digests(path: Path, first: int = 0) -> tuple[_Digest, _Digest]:
    """Hash a file, and its `first` bytes."""
    whole, begun = _Digest(), _Digest()
    with path.open("rb") as file:
        while raw := file.read(BLOCK):
            whole.add(raw)
            begun.add(raw[: max(0, first - begun.size)])
    return whole, begun


def _note(found: dict[Any, int], name: Any, line: int) -> None:
    if len(found) < KEPT_NAMES:
        found.setdefault(name, line)
