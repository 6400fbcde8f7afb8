"""Reads the documents of a corpus: from files, from the hub, or from Python's docstrings.

    for document in Corpus.open(["novels.txt", "hf:wikimedia/wikipedia@20231101.sk:train"]): ...

Sources, in the order given:

- files: .txt (one document per line), .jsonl, .ndjson, .json, .csv, .tsv (a header, or lines of a
  word and its tag, with empty lines between sentences), .parquet, .conll, .conllu; text formats
  also compressed, as .txt.gz; see `files`
- folders (with their subfolders) and patterns (`data/*.txt`): their files with such a suffix, in
  sorted order; .json only by a pattern that names it, because settings are stored in .json, too
- folders that `save_to_disk` of `datasets` wrote
- `hf:NAME[@CONFIG][:SPLIT]`: a dataset of the Hugging Face hub or a local folder, streamed; the
  split is `train` by default
- `python-docs`: the docstrings of Python's standard library, a corpus that every machine has

Only the current document (and the standard library's docstrings) are in memory. Each iteration
gives the same documents.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from teachonce.store.format.identity import corpus_sources
from teachonce.support.console import counted
from teachonce.support.errors import suggest_path
from teachonce.support.options import flag_of
from teachonce.teacher_dump.corpus.files import READERS, CorpusSource, FileSource
from teachonce.teacher_dump.corpus.labelled_text import Columns, Gold, Message
from teachonce.teacher_dump.corpus.sources import HUB, PYTHON_DOCS, HubSource, PythonDocs
from teachonce.teacher_dump.corpus.tables import is_saved
from teachonce.teacher_dump.corpus.tag_schemes import Step
from teachonce.teacher_dump.corpus.text_files import PACKED, CorpusError, suffix_of

__all__ = ["Corpus", "CorpusError", "Document"]

SUFFIXES = ", ".join(READERS) + f" (also with {', '.join(PACKED)})"
NO_COLUMNS = Columns()
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?([@:].*)?")  # NAME[@CONFIG][:SPLIT]
JSON = ".json"  # settings of models and data sets, too


@dataclass(frozen=True, slots=True)
class Document:
    """Holds one text of the corpus. `number` counts the documents of the whole corpus from 0.

    messages: the messages of a chat, before they are rendered. learn: ascending spans of characters
        of `text` that students are trained on; None for all. contents: begin and end of each
        message in `text`, and its role as a number (`ROLES`).
    """

    text: str
    source: str
    number: int
    gold: Gold | None = None
    messages: tuple[Message, ...] = ()
    learn: tuple[tuple[int, int], ...] | None = None
    contents: tuple[tuple[int, int, int], ...] = ()


class Corpus:
    """Yields the documents of several sources, one after the other.

    After an iteration, `documents` counts its documents and `empty_lines` the blank texts that it
    left out. `skipped` lists the files of a folder or pattern that are not read: empty, or of an
    unknown suffix.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        columns: Columns = NO_COLUMNS,
        skipped: Sequence[Path] = (),
    ) -> None:
        self.sources = list(sources)
        self.columns = columns
        self.skipped = list(skipped)
        self.documents = 0
        self.empty_lines = 0

    @classmethod
    def open(
        cls,
        sources: Sequence[str],
        text_column: str | None = None,
        label_column: str | None = None,
        student_column: str | None = None,
        messages: str | None = None,
    ) -> Corpus:
        """Find the sources and read the first text of each, so that most mistakes show at once.

        Tables hold the text in `text_column` (if it is None see `choose_column`), or pairs of texts
        in two columns `A,B`, and gold labels in `label_column`. With `student_column` a document is
        a pair of the teacher's text and the student's text. With `messages`, that column holds
        chats, and no other is read.

        Raises CorpusError for a source that is missing, empty, not text, not UTF-8, or lacks a
        column, and for a corpus without any text. The rest of a file is checked while iterating, or
        by `check`.
        """
        columns = Columns.named(text_column, label_column, student_column)
        if messages is not None:
            columns = Columns(messages, chats=True)
        skipped = list[Path]()
        resolved = [source for name in sources for source in _resolve(name, columns, skipped)]
        if not resolved:
            raise CorpusError(
                f"no corpus given; expected files ({SUFFIXES}), a folder, hf:NAME or {PYTHON_DOCS}"
            )
        given = {
            name: f"{flag_of(name)} {column}"
            for name, column in columns.options().items()
            if column is not None
        }
        plain = [source.name for source in resolved if not source.tabular]
        # One source with columns suffices: texts without labels may come from a .txt.
        if given and len(plain) == len(resolved):
            option = next(iter(given.values()))
            has = "has" if len(plain) == 1 else "have"
            raise CorpusError(
                f"{option}: {', '.join(plain)} {has} no columns; leave {option.split()[0]} out"
            )
        if columns.chats and plain:
            raise CorpusError(
                f"{given['messages']}: {plain[0]} has no columns, so no chats; give tables, such as"
                " .jsonl, or leave --messages out"
            )
        if columns.second is not None and plain:
            option = given["student_column" if columns.parallel else "text_column"]
            raise CorpusError(
                f"{option}: {plain[0]} has no columns, so no pairs of texts; write it as a table,"
                f" or leave {option.split()[0]} out"
            )
        corpus = cls(resolved, columns, skipped)
        firsts = [source.first() for source in resolved]
        if all(first is None or first.is_blank for first in firsts):
            next(iter(corpus))  # raises if there is no text at all
        return corpus

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents.

        Raises CorpusError at the first text that cannot be read, and at the end if all texts were
        blank.
        """
        self.documents = self.empty_lines = 0
        for source in self.sources:
            for row in source.rows():
                if row.is_blank:
                    self.empty_lines += 1
                    continue
                yield Document(row.text, source.name, self.documents, row.gold, row.messages)
                self.documents += 1
        if self.documents == 0:
            names = ", ".join(source.name for source in self.sources)
            raise CorpusError(
                f"{names}: no text in the whole corpus ({counted(self.empty_lines, 'empty line')});"
                " give another corpus"
            )

    def check(self) -> None:
        """Read local sources to their end, so that a bad line is reported before hours of work.

        Raises CorpusError.
        """
        for source in self.sources:
            source.check()

    def size(self, in_documents: bool) -> int | None:
        """Return the number of documents if `in_documents`, else of characters; None before
        `check`, and for a dataset of the hub."""
        counts = [source.texts if in_documents else source.characters for source in self.sources]
        return None if None in counts else sum(count or 0 for count in counts)

    def check_unchanged(self) -> None:
        """Raise CorpusError if other documents were read than `identity` describes.

        A file may be edited while it is read. Its bytes are hashed while they are read; if reading
        stopped early, the file is read once more.
        """
        for source in self.sources:
            source.check_unchanged()

    def notes(self) -> list[str]:
        """Return a line for each source that could be read in several ways; it describes how the
        source is read."""
        return [note for source in self.sources for note in source.notes()]

    def found_labels(self, kind: str) -> dict[str, str]:
        """Return the labels (`classification`) or tags (`tagging`) that `check` found, each with
        its first place.

        The kind `ENTITIES` gives the tags of entities, converted to the scheme of this name. Only
        local sources are checked.
        """
        # A label in two sources has its place in the first one.
        by_source = (source.found_labels(kind) for source in reversed(self.sources))
        return {name: place for labels in by_source for name, place in labels.items()}

    def tag_pairs(self) -> dict[Step, str]:
        """Return the pairs of consecutive tags that `check` found, each with its first place."""
        by_source = (source.tag_pairs() for source in reversed(self.sources))
        return {step: place for steps in by_source for step, place in steps.items()}

    def identity(self) -> dict[str, Any]:
        """Describe the corpus as JSON: two corpora with the same identity yield the same documents.

        It has `text_column`, `label_column` and `student_column` if they were given, and kind and
        name of each source. Files add bytes and sha256; datasets of the hub add config, split and
        revision, local ones also sha256; python-docs adds the version of Python, and number and
        sha256 of the paragraphs. A file that `check` has not hashed is read once more.
        """
        return {
            **self.columns.options(),
            "sources": [source.identity() for source in self.sources],
        }

    def trust(self, identity: object) -> None:
        """Reuse the hashes in `identity`, the identity of a corpus in a store, for files of the
        same name and size, instead of hashing the files.

        Processes that read no text call this, so that only one process hashes the corpus.
        """
        # Not strict: a store of other sources is refused later, when identities are compared.
        for source, stored in zip(self.sources, corpus_sources(identity), strict=False):
            source.trust(stored)


def _resolve(name: str, columns: Columns, skipped: list[Path]) -> list[CorpusSource]:
    if name == PYTHON_DOCS:
        return [PythonDocs()]
    if name.startswith(HUB):
        return [HubSource(name.removeprefix(HUB), columns)]
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    if is_saved(path):
        return [HubSource(name, columns, saved=True)]
    if path.is_dir():
        # Sorted: a file system lists in any order, and a store numbers the documents.
        # Relative to the folder, which may itself be inside a hidden one.
        seen = sorted(p for p in path.rglob("*") if not _hidden(p.relative_to(path)))
        return _several(name, seen, columns, skipped)
    if path.is_file():
        _check_suffix(name, path)
        if path.stat().st_size == 0:
            raise CorpusError(f"{name}: the file is empty; give a file that has text")
        return [FileSource(path, columns)]
    if path.exists():
        raise CorpusError(
            f"{name}: not an ordinary file, but a corpus is read more than once; save it to a file"
        )
    # After the checks for a file, whose name may have brackets, as `a[1].txt`.
    if glob.has_magic(name):
        seen = sorted(map(Path, glob.glob(str(path), recursive=True)))
        return _several(name, seen, columns, skipped)
    near = suggest_path(path)
    remedy = "check the name"
    if name == "-":
        remedy = "standard input is not read, as a corpus is read more than once; save it to a file"
    elif HUB_NAME.fullmatch(name) and suffix_of(path) not in READERS:
        remedy = f"for a dataset of the hub write {HUB}{name}"
    raise CorpusError(f"{name}: no such file or folder (in {Path.cwd()}); {near}{remedy}")


def _check_suffix(name: str, path: Path) -> None:
    suffix = suffix_of(path)
    if suffix not in READERS:
        raise CorpusError(f"{name}: unknown suffix {path.suffix!r}, expected one of {SUFFIXES}")
    if suffix == ".parquet" and path.suffix.lower() in PACKED:
        raise CorpusError(
            f"{name}: a compressed Parquet file cannot be read, because its parts are read in any"
            f" order; decompress it: {PACKED[path.suffix.lower()][0]} -d {quote(name)}"
        )


def _several(
    name: str, paths: list[Path], columns: Columns, skipped: list[Path]
) -> list[CorpusSource]:
    readable = [suffix for suffix in READERS if suffix != JSON or JSON in name]
    files = [path for path in paths if path.is_file()]
    usable = [p for p in files if suffix_of(p) in readable and p.stat().st_size]
    skipped += sorted(set(files) - set(usable))
    if not usable:
        unread = any(suffix_of(path) == JSON for path in files) and not glob.has_magic(name)
        hint = f"; to read {JSON} files give {name}/*{JSON}" if unread else ""
        raise CorpusError(f"{name}: no file with text in it, expected some of {SUFFIXES}{hint}")
    for path in usable:
        _check_suffix(str(path), path)
    return [FileSource(path, columns) for path in usable]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
