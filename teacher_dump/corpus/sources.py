"""Sources of texts other than files: datasets of the hub, and the docstrings of Python."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError, first_line
from teachonce.support.hub_client import bound_hub_client
from teachonce.teacher_dump.corpus.files import CorpusSource, digests, table_texts
from teachonce.teacher_dump.corpus.labelled_text import Columns, LabelledText
from teachonce.teacher_dump.corpus.tables import (
    DEFAULT_SPLIT,
    dataset_table,
    is_saved,
    saved_dataset,
)
from teachonce.teacher_dump.corpus.text_files import CorpusError

PYTHON_DOCS = "python-docs"
HUB = "hf:"
# site-packages and dist-packages lie inside the library's folder, and differ by machine.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "lib2to3", "site-packages"}
SKIPPED_FOLDERS |= {"test", "tests"}


class HubSource(CorpusSource):
    """Reads a dataset of the hub, pinned to its current revision, or a local folder.

    saved: whether `spec` is the path of a folder that `save_to_disk` wrote.
    """

    unit = "row"

    def __init__(self, spec: str, columns: Columns, saved: bool = False) -> None:
        super().__init__()
        self.name = spec if saved else HUB + spec
        self._columns = columns
        self._config: str | None = None
        self._split: str | None = None
        self._checked: str | None = None
        self._identified: str | None = None
        if saved:
            self._dataset = os.path.expanduser(spec)
            return
        # Neither config nor split has a slash, so that a path may contain @ and colons.
        match = re.fullmatch(r"(?P<name>.+?)(@(?P<config>[^@:/]+))?(:(?P<split>[^:/]+))?", spec)
        if match is None:
            raise CorpusError(
                f"{self.name}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME@CONFIG:SPLIT"
            )
        self._dataset, self._config = match["name"], match["config"]
        self._split = match["split"] or DEFAULT_SPLIT

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

        # A hub is untrusted: size and time of its answers are bounded (SECURITY.md).
        bound_hub_client()
        try:
            return HfApi().dataset_info(self._dataset, timeout=20).sha
        except GatedRepoError:
            raise CorpusError(
                f"{self.name}: access to the dataset is restricted; request it on its page and log"
                " in with `hf auth login`"
            ) from None
        except (RepositoryNotFoundError, HFValidationError):
            raise CorpusError(
                f"{self.name}: neither the hub nor this machine has a dataset {self._dataset!r}; "
                f"check the name"
            ) from None
        except UserError as error:  # from the bounded client
            raise CorpusError(f"{self.name}: {error}") from None
        except Exception as error:  # the client raises errors of its transport, of any type
            raise CorpusError(
                f"{self.name}: the hub cannot be reached ({type(error).__name__}); "
                f"check the network, or give a local file or folder"
            ) from None

    def rows(self) -> Iterator[LabelledText]:
        try:
            yield from table_texts(dataset_table(self._rows(), self.name), self._columns, self.name)
        except CorpusError:
            raise
        except Exception as error:  # a dataset's loader may raise anything, at any row
            folder = Path(self._dataset)
            read = "the files in the folder" if folder.is_dir() else "the network"
            named = f" (split {self._split!r}, config {self._config!r})"
            remedy = f"{named}; check hf:NAME@CONFIG:SPLIT and {read}"
            if is_saved(folder):
                remedy = "; save it again"
            raise CorpusError(f"{self.name}: {first_line(error)}{remedy}") from None

    def _rows(self) -> Any:
        from datasets import load_dataset

        if is_saved(Path(self._dataset)):
            if self._config is not None:
                raise CorpusError(
                    f"{self.name}: `save_to_disk` stores no configurations; leave @{self._config}"
                    " out"
                )
            return saved_dataset(Path(self._dataset), self._split)
        return load_dataset(
            self._dataset,
            self._config,
            split=self._split,
            revision=self._revision,
            streaming=True,
        )

    def check(self) -> None:
        """Read and hash a local folder. A dataset of the hub is not checked: that would download
        it."""
        if os.path.isdir(self._dataset):
            self._count()
        self._checked = self._hashed()

    def check_unchanged(self) -> None:
        """Hash a local folder again; a revision of the hub cannot change. Raises CorpusError."""
        if self._identified is not None and self._hashed() != self._identified:
            raise CorpusError(
                f"{self.name}: the folder was changed while it was being read, so the output is not"
                " finished; remove it, and run the command again with a folder that does not change"
            )

    def identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"kind": "hf", "name": self._dataset, "config": self._config}
        identity |= {"split": self._split, "revision": self._revision}
        self._identified = self._checked or self._hashed()
        if self._identified is not None:
            # Only the name, as for files: the folder may be moved.
            identity |= {"name": Path(self._dataset).resolve().name, "sha256": self._identified}
        return identity

    def _hashed(self) -> str | None:
        """Return the SHA-256 of names and hashes of a local folder's files; None for the hub."""
        folder, digest = Path(self._dataset), hashlib.sha256()
        if not folder.is_dir():
            return None
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            sha256 = digests(path)[0].size_and_hash()[1]
            digest.update(f"{path.relative_to(folder)}\0{sha256}\n".encode())
        return digest.hexdigest()


class PythonDocs(CorpusSource):
    """Yields `python-docs`: distinct paragraphs of the docstrings of Python's standard library.

    Docstrings are parsed from the source files; no module is imported.
    """

    name, tabular = PYTHON_DOCS, False

    def rows(self) -> Iterator[LabelledText]:
        return (LabelledText(text, number) for number, text in enumerate(self._paragraphs, 1))

    def check(self) -> None:
        """Set `texts` and `characters`. No file can be damaged: all texts are in memory."""
        self.texts, self.characters = len(self._paragraphs), sum(map(len, self._paragraphs))

    @cached_property
    def _paragraphs(self) -> list[str]:
        docstrings = (text for _, path in library_sources() for text in _docstrings(path))
        split = (re.split(r"\n\s*\n", docstring) for docstring in docstrings)
        folded = (" ".join(paragraph.split()) for paragraphs in split for paragraph in paragraphs)
        return [text for text in dict.fromkeys(folded) if text]

    def identity(self) -> dict[str, Any]:
        # An escape in a docstring may be a lone surrogate.
        joined = "\n".join(self._paragraphs).encode("utf-8", "surrogatepass")
        return {
            "kind": PYTHON_DOCS,
            "name": PYTHON_DOCS,
            "python": platform.python_version(),
            "documents": len(self._paragraphs),
            "sha256": hashlib.sha256(joined).hexdigest(),
        }


def library_sources() -> Iterator[tuple[Path, Path]]:
    """Yield (folder, file) for each source file of the standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(root):
        # In place, as `os.walk` descends into this list; sorted, as file systems list in any order.
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from ((root, Path(folder, name)) for name in sorted(files) if name.endswith(".py"))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            # Invalid escapes in the library's own strings are SyntaxWarnings.
            warnings.simplefilter("ignore")
            # As bytes: then `parse` heeds an encoding that the file declares.
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
