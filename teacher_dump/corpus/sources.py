"""Sources of texts: a file, a dataset of the hub, the docstrings of Python."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from teachonce.support.errors import first_line
from teachonce.teacher_dump.corpus.iob import Step
from teachonce.teacher_dump.corpus.labelled_text import (
    Columns,
    LabelledText,
    check_label,
    gold_of,
    joined_text,
)
from teachonce.teacher_dump.corpus.readers import BLOCK, has_columns, read_rows
from teachonce.teacher_dump.corpus.utf8_lines import CorpusError

PYTHON_DOCS = "python-docs"
HUB = "hf:"
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "lib2to3", "site-packages"}
SKIPPED_FOLDERS |= {"test", "tests"}
Told = tuple[int, str]  # size and SHA-256 of bytes
KEPT_NAMES = 1 << 17  # more than any teacher has labels


class Source(Protocol):
    """Texts in a fixed order, empty ones too, which can be read again and again.

    `texts` counts those that are not empty, and `characters` those in them; None where that is not
    known, as it is of local files before `check`.
    """

    name: str

    @property
    def texts(self) -> int | None: ...

    @property
    def characters(self) -> int | None: ...

    @property
    def tabular(self) -> bool:
        """Whether the texts stand in a column."""

    def rows(self) -> Iterator[LabelledText]: ...

    def check(self) -> None:
        """Read a local source to its end. Raises CorpusError."""

    def met(self, kind: str) -> dict[str, str]:
        """Return the labels (`classification`) or tags (`tagging`) that `check` met, and where."""

    def steps(self) -> dict[Step, str]:
        """Return the steps from tag to tag that `check` met, and where each was first."""

    def identity(self) -> dict[str, Any]: ...

    def trust(self, told: Mapping[str, Any]) -> None:
        """Take the hash of this identity, if all else of it is true, rather than read for it."""

    def check_unchanged(self) -> None:
        """Raise CorpusError where the last pass did not read what `identity` tells."""


class FileSource:
    """A local file with one of the suffixes of `readers.READERS`."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.name, self._path = path.name, path
        self._columns = columns
        self.texts: int | None = None
        self.characters: int | None = None
        self._pass = _Digest()  # what the last pass has read
        self._checked: Told | None = None
        self._told: Told | None = None
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
        if self._checked and read.told() != self._checked:
            raise self._changed(self._checked, read.told())

    def check(self) -> None:
        """Read the file, and hash it on the way if its reader reads every byte.

        A second pass for the hash alone would take minutes for big files.
        """
        texts = characters = 0
        for row in self.rows():
            if row.text and not row.text.isspace():
                texts, characters = texts + 1, characters + len(row.text)
            if row.gold and row.gold.label is not None:
                _keep(self._met["classification"], row.gold.label, row.line)
            elif row.gold:
                for (before, tag), line in zip(row.gold.steps(), row.tag_lines, strict=True):
                    _keep(self._met["tagging"], tag, line)
                    _keep(self._steps, (before, tag), line)
        self.texts, self.characters = texts, characters
        if self._pass.size == self._path.stat().st_size:
            self._checked = self._pass.told()

    def met(self, kind: str) -> dict[str, str]:
        return {name: f"{self._path}, line {line}" for name, line in self._met[kind].items()}

    def steps(self) -> dict[Step, str]:
        return {step: f"{self._path}, line {line}" for step, line in self._steps.items()}

    def identity(self) -> dict[str, Any]:
        self._told = self._checked or self._digests()[0].told()
        size, sha256 = self._told
        return {"kind": "file", "name": self.name, "bytes": size, "sha256": sha256}

    def trust(self, told: Mapping[str, Any]) -> None:
        size = self._path.stat().st_size
        if (told.get("kind"), told.get("name"), told.get("bytes")) == ("file", self.name, size):
            self._checked = size, str(told.get("sha256"))

    def check_unchanged(self) -> None:
        """Raise CorpusError unless the last pass read the bytes that `identity` tells.

        Where the pass stopped early, or its reader does not tell its bytes, the file is read again.
        """
        read = self._pass.told()
        if self._told is None or read == self._told:
            return
        whole, begun = (digest.told() for digest in self._digests(self._pass.size))
        if (whole, begun) != (self._told, read):
            raise self._changed(self._told, whole)

    def _digests(self, first: int = 0) -> tuple[_Digest, _Digest]:
        try:
            return _digests(self._path, first)
        except OSError as error:
            raise CorpusError(
                f"{self._path}: cannot be read ({error.strerror}); check the file"
            ) from None

    def _changed(self, before: Told, now: Told) -> CorpusError:
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

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()

    def told(self) -> Told:
        return self.size, self._sha256.hexdigest()


def _digests(path: Path, first: int = 0) -> tuple[_Digest, _Digest]:
    """Hash a file, and its `first` bytes."""
    whole, begun = _Digest(), _Digest()
    with path.open("rb") as file:
        while raw := file.read(BLOCK):
            whole.add(raw)
            begun.add(raw[: max(0, first - begun.size)])
    return whole, begun


def _keep(found: dict[Any, int], name: Any, line: int) -> None:
    if len(found) < KEPT_NAMES:
        found.setdefault(name, line)


class HubSource:
    """A dataset of the hub, at the revision that it had when it was opened, or a local folder."""

    def __init__(self, spec: str, columns: Columns) -> None:
        self.name, self.tabular = HUB + spec, True
        self._columns = columns
        match = re.fullmatch(r"(?P<name>.+?)(@(?P<config>[^@:/]+))?(:(?P<split>[^:/]+))?", spec)
        if match is None:
            raise CorpusError(
                f"{self.name}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME@CONFIG:SPLIT"
            )
        self._dataset, self._config = match["name"], match["config"]
        self._split = match["split"] or "train"
        self.texts: int | None = None
        self.characters: int | None = None
        self._checked: str | None = None
        self._told: str | None = None

    @cached_property
    def _revision(self) -> str | None:
        if os.path.isdir(self._dataset):
            return None
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
        )

        try:
            return HfApi().dataset_info(self._dataset, timeout=20).sha
        except GatedRepoError:
            raise CorpusError(
                f"{self.name}: the dataset asks for permission; "
                f"get it on its page and log in with `hf auth login`"
            ) from None
        except (RepositoryNotFoundError, HFValidationError):
            raise CorpusError(
                f"{self.name}: neither the hub nor this machine has a dataset {self._dataset!r}; "
                f"check the name"
            ) from None
        except Exception as error:  # the client passes errors of its transport on, of any kind
            raise CorpusError(
                f"{self.name}: the hub cannot be reached ({type(error).__name__}); "
                f"check the network, or give a local file or folder"
            ) from None

    def rows(self) -> Iterator[LabelledText]:
        from datasets import load_dataset

        revision = self._revision
        try:
            rows = load_dataset(
                self._dataset, self._config, split=self._split, revision=revision, streaming=True
            )
            chosen, label = list[str](), self._columns.label
            for number, row in enumerate(rows, 1):
                where = f"{self.name}, row {number}"
                if not chosen:
                    textual = [n for n, v in row.items() if isinstance(v, str) and n != label]
                    chosen = self._columns.chosen(list(row), textual, self.name)
                    check_label(list(row), label, self.name)
                gold = gold_of(row[label], label, where) if label else None
                text = joined_text([row[name] for name in chosen], chosen, where)
                yield LabelledText(text, number, gold)
        except CorpusError:
            raise
        except Exception as error:  # a dataset may fail in any way, and in the middle
            raise CorpusError(
                f"{self.name}: {first_line(error)} (split {self._split!r}, config"
                f" {self._config!r}); check hf:NAME@CONFIG:SPLIT and the network"
            ) from None

    def check(self) -> None:
        """Hash a local folder; of the hub check nothing, for that would fetch the dataset."""
        self._checked = self._hashed()

    def check_unchanged(self) -> None:
        """Hash a local folder again; the hub keeps a revision as it is. Raises CorpusError."""
        if self._told is not None and self._hashed() != self._told:
            raise CorpusError(
                f"{self.name}: the folder was changed while it was read; what was made of it is not"
                " finished: remove that, and type the command again with a folder that nobody"
                " changes"
            )

    def met(self, kind: str) -> dict[str, str]:
        return {}

    def steps(self) -> dict[Step, str]:
        return {}

    def trust(self, told: Mapping[str, Any]) -> None:
        """Trust nothing: the hub tells its revision, and a local folder is hashed."""

    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": "hf", "name": self._dataset, "config": self._config}
        found |= {"split": self._split, "revision": self._revision}
        self._told = self._checked or self._hashed()
        if self._told is not None:
            found |= {"name": Path(self._dataset).resolve().name, "sha256": self._told}
        return found

    def _hashed(self) -> str | None:
        """SHA-256 of the names and hashes of a local folder's files; None for the hub."""
        folder, digest = Path(self._dataset), hashlib.sha256()
        if not folder.is_dir():
            return None
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            sha256 = _digests(path)[0].hexdigest()
            digest.update(f"{path.relative_to(folder)}\0{sha256}\n".encode())
        return digest.hexdigest()


class PythonDocs:
    """Paragraphs of the standard library's docstrings, each once, without importing a module."""

    name, tabular = PYTHON_DOCS, False

    @property
    def texts(self) -> int | None:
        return len(self._paragraphs)

    @property
    def characters(self) -> int | None:
        return sum(map(len, self._paragraphs))

    def rows(self) -> Iterator[LabelledText]:
        return (LabelledText(text, number) for number, text in enumerate(self._paragraphs, 1))

    def check(self) -> None:
        """Check nothing, for all texts are in memory."""

    def check_unchanged(self) -> None:
        """Check nothing, for all texts are in memory."""

    def met(self, kind: str) -> dict[str, str]:
        return {}

    def steps(self) -> dict[Step, str]:
        return {}

    def trust(self, told: Mapping[str, Any]) -> None:
        """Trust nothing, for all texts are in memory."""

    @cached_property
    def _paragraphs(self) -> list[str]:
        docstrings = (text for _, path in library_sources() for text in _docstrings(path))
        split = (re.split(r"\n\s*\n", docstring) for docstring in docstrings)
        folded = (" ".join(paragraph.split()) for paragraphs in split for paragraph in paragraphs)
        return [text for text in dict.fromkeys(folded) if text]

    def identity(self) -> dict[str, Any]:
        joined = "\n".join(self._paragraphs).encode("utf-8", "surrogatepass")
        return {
            "kind": PYTHON_DOCS,
            "name": PYTHON_DOCS,
            "python": platform.python_version(),
            "documents": len(self._paragraphs),
            "sha256": hashlib.sha256(joined).hexdigest(),
        }


def library_sources() -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the standard library, and each source file in it but for tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from ((root, Path(folder, name)) for name in sorted(files) if name.endswith(".py"))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
