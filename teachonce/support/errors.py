"""The error whose message is printed to the user, and functions that describe other errors in one
line."""

from __future__ import annotations

import os
import re
import textwrap
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import metadata
from itertools import islice
from pathlib import Path

from teachonce.support.redaction import redacted


class UserError(Exception):
    """Reports an error in one line for the user: what is wrong, where, what was expected and found,
    what to do next.

    Passwords in URLs are removed, because messages are logged and copied into issues.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*map(redacted, parts))


ANOTHER = "give another name, or remove what is there"
"""Remedy if the path of a new store is taken."""

FOLLOWING = 120  # characters added to a first line that ends in a colon
# Parts of messages of torch, cuBLAS, C++ and oneDNN, whose only common class is RuntimeError.
NO_MEMORY = (
    "out of memory",
    "allocate memory",
    "not enough memory",
    "bad_alloc",
    "ALLOC_FAILED",
    "could not create a primitive",  # oneDNN, on a CPU
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory was exhausted; torch raises RuntimeError in this
    case."""
    if isinstance(error, RuntimeError):
        return any(phrase in str(error) for phrase in NO_MEMORY)
    return isinstance(error, MemoryError)


ROOM = "check the free space on the disk of the output, and the permissions there"
UNWRITTEN = ("PytorchStreamWriter", "inline_container.cc", "iostream error", "unexpected pos")
"""Words of torch's RuntimeError for a file that could not be written."""


def library_error_line(error: BaseException) -> str | None:
    """Return one line for an error of safetensors, tokenizers or torch while a file is read or
    written, and for a torchvision that does not fit torch. None for any other error."""
    if line := _of_torchvision(error):
        return line
    if match := re.search(r"\(os error (\d+)\)", str(error)):
        return f"{os.strerror(int(match[1]))}, while a file was written or read; {ROOM}"
    if isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in UNWRITTEN):
        return f"a file could not be written; {ROOM}"
    return None


def _of_torchvision(error: BaseException | None) -> str | None:
    """Return one line if the import of torchvision failed, else None. transformers imports an
    installed torchvision, and a build for another version of torch fails."""
    if not isinstance(error, ImportError | RuntimeError | AttributeError):
        return None
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    if not any(f"{os.sep}torchvision{os.sep}" in path for link in chain for path in _files(link)):
        return None
    torch, vision = (_version(name) for name in ("torch", "torchvision"))
    build = torch.partition("+")[2]  # cpu, cu130
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return (
        f"torchvision {vision} does not fit torch {torch} ({first_line(chain[-1])}); remove it, as"
        " nothing here needs it: pip uninstall torchvision; or install the one that fits: pip"
        f" install --force-reinstall 'torch=={torch.partition('+')[0]}' torchvision{index}"
    )


def _files(error: BaseException) -> list[str]:
    """Return the paths of the source files in the traceback of an error."""
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def os_error_line(error: OSError) -> str:
    """Return one line for an OSError: the file or folder, the cause, and what to check."""
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    cause = error.strerror or first_line(error)
    return f"{where}{cause}; check the name, its permissions and the free disk space"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none.

    If the line ends in a colon, the next FOLLOWING characters are included.
    """
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0].rstrip()
    if not first.endswith(":"):
        return first
    return textwrap.shorten(text, len(first) + FOLLOWING, placeholder=" ...").rstrip(":")


def suggest(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return a question such as `did you mean hidden? ` with the known word that is most similar to
    `word`.

    Returns "" if no known word is similar, or if `word` is known. Differences of case and of spaces
    at the ends count least. least: the smallest similarity, as `difflib` measures it, 0 to 1.
    """
    near = most_similar(word, known, least)
    return did_you_mean(near) if near else ""


def did_you_mean(text: object) -> str:
    """Return `did you mean TEXT? `, to be put in front of a message's remedy."""
    return f"did you mean {text}? "


def most_similar(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return the known word that is most similar to `word`, or ""; see `suggest`."""
    names = list(known)
    # Lower case, because difflib is case-sensitive: `MLM` and `mlm` would have nothing in common.
    alike = [other for other in names if other.strip().casefold() == word.strip().casefold()]
    close = alike or get_close_matches(word, names, n=1, cutoff=least)
    return close[0] if close and close[0] != word else ""


NEIGHBOURS = 10_000  # most names in a folder that are compared with a missing name


def suggest_path(path: str | Path) -> str:
    """Return `did you mean PATH? ` with the existing file or folder whose name is most similar to a
    missing one; "" if no name is similar."""
    missing = Path(path)
    try:
        with os.scandir(missing.parent) as entries:
            names = [entry.name for entry in islice(entries, NEIGHBOURS)]
    except OSError:
        return ""
    near = most_similar(missing.name, names)  # the names alone: the folder is the same for all
    return did_you_mean(missing.parent / near) if near else ""
