"""The corpus: documents from files, from the hub, or from the docstrings of Python itself.

    for document in Corpus.open(["novels.txt", "hf:wikimedia/wikipedia@20231101.sk:train"]): ...

Sources, in the order given:

- files: .txt (a document a line), .jsonl, .csv, .tsv (a header, or token/tag lines with empty lines
  between sentences), .parquet; see `readers`
- folders (searched with their subfolders) and patterns (`data/*.txt`): the files in them with such
  a suffix, in sorted order
- `hf:NAME[@CONFIG][:SPLIT]`: a dataset of the Hugging Face hub or a local folder of one, streamed;
  the split is `train` by default
- `python-docs`: the docstrings of the standard library of this Python, the corpus that every
  machine has

Nothing is held in memory but the document at hand (and the standard library's docstrings).
Iterating again gives the same documents.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teacher_dump.readers import READERS, CorpusError
from teacher_dump.sources import HUB, PYTHON_DOCS, FileSource, HubSource, PythonDocs, Source

__all__ = ["Corpus", "CorpusError", "Document"]

SUFFIXES = ", ".join(READERS)


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus; `number` counts the texts of the whole corpus that are not empty."""

    text: str
    source: str
    number: int


class Corpus:
    """Documents of several sources, one after the other.

    After an iteration `documents` and `empty_lines` (texts skipped because they hold nothing but
    blanks) say what it met.
    """

    def __init__(self, sources: Sequence[Source], text_column: str | None = None) -> None:
        self.sources = list(sources)
        self.text_column = text_column
        self.documents = 0
        self.empty_lines = 0

    @classmethod
    def open(cls, sources: Sequence[str], text_column: str | None = None) -> Corpus:
        """Find the sources and read the first text of each, so that most mistakes are told at once.

        Raises CorpusError for what is missing, empty, not text, not UTF-8, or has no column of
        text; the rest of a file is checked while iterating, or by `check`.
        """
        found = [source for name in sources for source in _resolve(name, text_column)]
        if not found:
            raise CorpusError(
                f"no corpus given; expected files ({SUFFIXES}), a folder, hf:NAME or {PYTHON_DOCS}"
            )
        for source in found:
            next(source.texts(), None)
        return cls(found, text_column)

    def __iter__(self) -> Iterator[Document]:
        """Raises CorpusError at the first text that cannot be read, or at the end without any."""
        self.documents = self.empty_lines = 0
        for source in self.sources:
            for text in source.texts():
                if not text or text.isspace():
                    self.empty_lines += 1
                    continue
                yield Document(text, source.name, self.documents)
                self.documents += 1
        if self.documents == 0:
            names = ", ".join(source.name for source in self.sources)
            raise CorpusError(
                f"{names}: no text in the whole corpus ({self.empty_lines} empty lines); "
                f"give another corpus"
            )

    def check(self) -> None:
        """Read local sources to their end: a bad line is told before hours of work.

        Raises CorpusError.
        """
        for source in self.sources:
            source.check()

    def identity(self) -> dict[str, Any]:
        """What the corpus is, as JSON: two corpora with the same identity give the same documents.

        `text_column`, and for each source its kind and name, with bytes and sha256 for files,
        config, split and revision for the hub, and the Python version with the number and sha256 of
        the paragraphs for python-docs. Reads files whole that `check` has not hashed.
        """
        return {
            "text_column": self.text_column,
            "sources": [source.identity() for source in self.sources],
        }


def _resolve(name: str, column: str | None) -> list[Source]:
    if name == PYTHON_DOCS:
        return [PythonDocs()]
    if name.startswith(HUB):
        return [HubSource(name.removeprefix(HUB), column)]
    path = Path(name).expanduser()
    if path.is_dir():
        return _several(
            name, sorted(p for p in path.rglob("*") if not _hidden(p.relative_to(path))), column
        )
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise CorpusError(f"{name}: unknown suffix {path.suffix!r}, expected one of {SUFFIXES}")
        if path.stat().st_size == 0:
            raise CorpusError(f"{name}: the file is empty; give a file with text")
        return [FileSource(path, column)]
    if path.exists():
        raise CorpusError(
            f"{name}: not an ordinary file, but it must be read more than once; save it to one"
        )
    if glob.has_magic(name):
        return _several(name, sorted(map(Path, glob.glob(str(path), recursive=True))), column)
    raise CorpusError(
        f"{name}: no such file or folder (seen from {Path.cwd()}); "
        f"for a dataset of the hub write {HUB}{name}"
    )


def _several(name: str, paths: list[Path], column: str | None) -> list[Source]:
    usable = [p for p in paths if p.suffix.lower() in READERS and p.is_file() and p.stat().st_size]
    if not usable:
        raise CorpusError(f"{name}: no file with text in it, expected some of {SUFFIXES}")
    return [FileSource(path, column) for path in usable]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
