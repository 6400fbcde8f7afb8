"""Reads files of words and tags: a word on each line, a blank line after every sentence.

Forms: `word<TAB>tag`; columns divided by spaces, with the word first and the tag last (CoNLL-2000,
    -2002, -2003); CoNLL-U, where the UPOS are the tags. Lines `-DOCSTART-` are skipped. A line that
    starts with `#` is a comment, unless it has a tag as the other lines have: `is_comment`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from teachonce.support.console import counted
from teachonce.teacher_dump.corpus.tag_schemes import OUTSIDE, TAG
from teachonce.teacher_dump.corpus.text_files import (
    CorpusError,
    Seen,
    conversion,
    ignore_bytes,
    is_packed,
    read_lines,
    stem_of,
    suffix_of,
)

TAGGED = (".conll", ".conllu", ".bio", ".iob")  # suffixes that always mean words with tags
PEEK_LINES, PEEK_CHARACTERS = 1000, 1 << 20  # read from the start of a file to find its form
MOST = 0.8  # if at least this share of lines ends with an entity tag, a file is words with tags
DOCUMENT = "-DOCSTART-"
BLANKS = re.compile(r"[ \t]+")  # a no-break space may be inside of a word
CONLLU_ID = re.compile(r"\d+([-.]\d+)?")
CONLLU_COLUMNS = 10
TaggedWord = tuple[int, str, str]  # line, word, tag ("" for none)


@dataclass(frozen=True, slots=True)
class TaggedLayout:
    """Describes the columns of a file of words and tags.

    tabs: whether tabs divide the columns, else spaces do. width: the number of columns. word, tag:
        the column of the words and the column of the tags, counted from 0. conllu: whether the file
        is CoNLL-U. entities: whether the last column has entity tags. comments: the number of
        comments among the first lines.
    """

    tabs: bool
    width: int
    word: int = 0
    tag: int = 1
    conllu: bool = False
    entities: bool = False
    comments: int = 0

    def cells(self, line: str) -> list[str]:
        if not self.tabs:
            return BLANKS.split(line.strip(" \t"))
        cells = line.split("\t")
        while len(cells) > self.width and not cells[-1].strip():
            cells.pop()  # a tab at the end of a line does not begin a column
        return cells

    def is_comment(self, line: str) -> bool:
        if not line.startswith("#") or self.conllu:
            return line.startswith("#")
        if self.entities:
            last = BLANKS.split(line.strip(" \t"))[-1]
            return len(self.cells(line)) != self.width or not TAG.fullmatch(last)
        if self.tabs:
            return "\t" not in line
        # A line may begin with the word # itself, followed by its tag.
        cells = self.cells(line)
        return len(cells) != self.width or cells[0] != "#"

    def note(self) -> str | None:
        """Describe which columns are read and which lines are skipped; None if the file has nothing
        but words and tags."""
        notes = []
        if self.conllu:
            notes.append("read as CoNLL-U: words (FORM) with UPOS tags, without multiword tokens")
        elif self.width > 2:
            notes.append(
                f"of {self.width} columns the first holds the words, and column {self.tag + 1} the"
                " tags"
            )
        if self.comments:
            notes.append(
                f"lines that start with # and have no tag are comments, and skipped"
                f" ({self.comments:,} of the first {PEEK_LINES:,} lines)"
            )
        return "; ".join(notes) or None


def tagged_layout(path: Path, parts_of_speech: bool = False) -> TaggedLayout:
    """Find the columns of a file from its first lines.

    Files with more than two columns are accepted if the last one has entity tags. With
    `parts_of_speech` the tags are then read from the second column, as in CoNLL-2002 and -2003.
    """
    lines = [line for line in _peek(path) if line.strip() and not line.startswith(DOCUMENT)]
    layout = _columns(path, lines, parts_of_speech)
    return replace(layout, comments=sum(map(layout.is_comment, lines)))


def _columns(path: Path, lines: list[str], parts_of_speech: bool) -> TaggedLayout:
    lines = [line for line in lines if not line.startswith("#")] or lines
    entities = _have_entities(lines)
    rows = [line.split("\t") for line in lines if not (line.startswith("#") and "\t" not in line)]
    if suffix_of(path) == ".conllu" or _are_conllu(rows):
        return TaggedLayout(True, CONLLU_COLUMNS, 1, 3, True)
    tabs = any("\t" in line for line in lines)
    if not tabs:
        rows = [BLANKS.split(line.strip(" \t")) for line in lines]
    # For words without tags the error then names the usual form, token<TAB>tag.
    tabs = tabs or all(len(row) == 1 for row in rows)
    width = _width(rows) if rows and entities else 2
    cut = f"cut -f2,{width}" if tabs else f"tr -s ' \\t' ' ' | cut -d' ' -f2,{width}"
    if width > 2 and all(row[0] == str(number) for number, row in enumerate(rows[:3], 1)):
        raise CorpusError(
            f"{path}: its first column counts the words, expected words in the first and tags in"
            f" the last column; extract both: {conversion(path, cut, 'words')}"
        )
    return TaggedLayout(tabs, width, 0, 1 if parts_of_speech else width - 1, entities=entities)


def _width(rows: list[list[str]]) -> int:
    """Count the columns of the first row, without columns at the end that are empty in all rows."""
    # A row of another width is an error of the file, reported at its line; it widens no column.
    alike = [row for row in rows if len(row) == len(rows[0])]
    filled = (number for row in alike for number, cell in enumerate(row, 1) if cell.strip())
    return max(2, max(filled, default=2))


def _peek(path: Path) -> Iterator[str]:
    read = 0
    for number, line in enumerate(read_lines(path)):
        read += len(line)
        if number == PEEK_LINES or read > PEEK_CHARACTERS:
            return
        yield line


def is_tagged(path: Path, names: set[str]) -> bool:
    """Return whether a .tsv holds words with tags. It is a table if its header has one of the
    `names`.

    Otherwise it holds words with tags if nearly all lines end with an entity tag, or if lines have
    the columns of CoNLL-U. It also holds them if blank lines divide the other lines into sentences,
    and each line is `word<TAB>tag`, or two words, of which the second ones repeat.
    """
    lines = [line for line in _peek(path) if not (line.startswith("#") and "\t" not in line)]
    full = [line for line in lines if line.strip()]
    if not full or names & set(full[0].split("\t")):
        return False
    if _have_entities(full) or _are_conllu([line.split("\t") for line in full]):
        return True
    gaps = [i for i, line in enumerate(lines) if not line]
    inner = any(i and lines[i - 1] and any(lines[i:]) for i in gaps)
    if any("\t" in line for line in full):
        return inner and all(line.count("\t") == 1 for line in lines if line)
    rows = [BLANKS.split(line.strip(" \t")) for line in full]
    alike = {row[-1] for row in rows if len(row) == 2}
    return inner and all(len(row) == 2 for row in rows) and 2 * len(alike) <= len(rows)


def check_untagged(path: Path) -> None:
    """Raise CorpusError if a .txt holds words with tags: each line would be read as a text."""
    full = [line for line in _peek(path) if line.strip() and not line.startswith("#")]
    if _have_entities(full):
        raise CorpusError(
            f"{path}: looks like words with tags ({full[0]!r:.40}), expected a text on each line;"
            f" rename it to {stem_of(path)}.conll{path.suffix if is_packed(path) else ''}"
        )


def _are_conllu(rows: list[list[str]]) -> bool:
    """Return whether rows have the columns of CoNLL-U, with word numbers in the first."""
    ids = [row[0] for row in rows if len(row) == CONLLU_COLUMNS and CONLLU_ID.fullmatch(row[0])]
    return bool(rows) and len(ids) == len(rows)


def _have_entities(lines: list[str]) -> bool:
    """Return whether nearly all lines end with an entity tag, and not all with O."""
    rows = [BLANKS.split(line.strip(" \t")) for line in lines if not line.startswith(DOCUMENT)]
    tags = [row[-1] for row in rows if len(row) > 1 and TAG.fullmatch(row[-1])]
    return len(tags) >= max(2, MOST * len(rows)) and any(tag != OUTSIDE for tag in tags)


def tagged_sentences(
    path: Path, seen: Seen = ignore_bytes, parts_of_speech: bool = False
) -> Iterator[list[TaggedWord]]:
    """Read the sentences of a file of words and tags; see `tagged_layout`.

    If tabs divide the columns, a word or a tag may be empty. Raises CorpusError like
    `tagged_layout`, and for a line with another number of columns.
    """
    layout, words = tagged_layout(path, parts_of_speech), list[TaggedWord]()
    for number, line in enumerate(read_lines(path, seen), 1):
        if not line.strip() or line.startswith(DOCUMENT):
            if words:
                yield words
            words = []
        elif not layout.is_comment(line):
            cells = layout.cells(line)
            if len(cells) != layout.width:
                raise _other_width(path, number, line, layout)
            if layout.conllu and not cells[0].isdecimal():
                continue  # 1-2 is a multiword token, 1.1 an empty node
            word, tag = cells[layout.word], cells[layout.tag].strip()
            # CoNLL-U writes _ for a value that is not given.
            words.append((number, word, "" if layout.conllu and tag == "_" else tag))
    if words:
        yield words


def _other_width(path: Path, number: int, line: str, layout: TaggedLayout) -> CorpusError:
    expected = "token<TAB>tag" if layout.tabs and layout.width == 2 else f"{layout.width} columns"
    if not layout.tabs:
        expected += " with spaces between them"
    got = counted(len(layout.cells(line)), "column")
    remedy = "correct the line or remove it"
    if layout.tabs and len(BLANKS.split(line.strip())) == layout.width:
        remedy = "divide its columns by tabs, as in the other lines"
    return CorpusError(
        f"{path}, line {number}: expected {expected}, and a blank line between sentences, got"
        f" {got}; {remedy}"
    )
