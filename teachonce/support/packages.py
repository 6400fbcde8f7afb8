"""Imports optional libraries, loads objects that installed packages add, and lists versions.

A library of an extra of pyproject.toml is imported by `library`: if it is missing, the error names
the command that installs it.

Another package adds objects by entry points, as codecs are added to zarr: for example, a codec by a
table in its pyproject.toml:

    [project.entry-points."teachonce.codecs"]
    mine = "mypackage.codecs:MINE"

Processes that work on the same store or student must have the same versions and code (`installed`).
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.support.errors import UserError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def library(name: str, extra: str, what_for: str) -> Any:
    """Import a module of an optional library.

    what_for: the option or command that needs the library, such as `--task retrieval`. Raises
    UserError, with the command that installs the library, if it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _lacking(name, extra, what_for, first_line(error)) from None


def check_library(name: str, extra: str, what_for: str) -> None:
    """Raise UserError as `library` does if a module is not installed; nothing is imported."""
    if importlib.util.find_spec(name) is None:
        raise _lacking(name, extra, what_for, f"No module named {name!r}")


def _lacking(name: str, extra: str, what_for: str, why: str) -> UserError:
    package = name.partition(".")[0].replace("_", "-")
    return UserError(
        f"{what_for} needs {package}, which cannot be imported ({why});"
        f" `pip install 'teachonce[{extra}]'`"
    )


def added_object(group: str, name: str, option: str = "") -> Any | None:
    """Load the object that an installed package adds under a name; None if no package does.

    Call it only for a name that is not built in, because searching all installed packages takes
    about 50 ms. Raises UserError, which starts with `option`, if the object cannot be loaded, or if
    several packages add different objects of this name.
    """
    from importlib.metadata import entry_points

    if not re.fullmatch(r"[\w.-]+", name):
        return None
    entries = tuple(entry_points(group=group, name=name))
    # Packages that add the same object under the same name do not conflict.
    if len(values := {entry.value for entry in entries}) > 1:
        raise UserError(
            f"{option}{name}: several installed packages add it to {group}:"
            f" {', '.join(sorted(values))}; remove all but one"
        )
    if not entries:
        return None
    added = f"{entries[0].value}, which an installed package adds to {group},"
    return _load(entries[0], f"{option}{name}: {added}", "install, update or remove that package")


def load_outside(word: str, group: str, option: str) -> Any | None:
    """Load `module:attribute`, or the object that an installed package adds under this name; None
    if no package does. Raises UserError, which starts with `option`, if the object cannot be
    loaded."""
    from importlib.metadata import EntryPoint

    if ":" not in word:
        return added_object(group, word, f"{option} ")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", word):
        return None
    remedy = "correct it, or put the folder of that module on PYTHONPATH"
    return _load(EntryPoint(word, word, group), f"{option} {word}:", remedy)


def _load(entry: EntryPoint, subject: str, remedy: str) -> Any:
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # a foreign module may raise any error
        why = f"exit {error.code}" if isinstance(error, SystemExit) else first_line(error)
        raise UserError(f"{subject} cannot be loaded ({why}); {remedy}") from error


LIBRARIES = ("transformers", "tokenizers", "torch", "numpy")
"""Packages whose versions may change the output of a teacher."""
NAMES = ("teachonce", "torch", "transformers", "tokenizers", "numpy", "zarr", "h5py")


def software() -> dict[str, str]:
    """Return the versions of all libraries that affect the numbers of a store or of a student."""
    return {"python": platform.python_version(), **{name: version(name) for name in NAMES}}


def other_versions(then: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the libraries that run a teacher and whose versions differ from `then`, the `software`
    of a store: (version then, version now) by name."""
    now = software()
    return {
        name: (str(then[name]), now[name])
        for name in LIBRARIES
        if name in then and then[name] != now[name]
    }


def version_words(versions: Mapping[str, tuple[str, str]]) -> str:
    """Format the result of `other_versions` for a message."""
    return ", ".join(f"{name} was {then} and is {now}" for name, (then, now) in versions.items())


def installed() -> dict[str, str]:
    """Return the versions of `software()`, the machine type, and a hash of this package's code."""
    import hashlib  # not at the top: --help hashes nothing

    code, above = hashlib.sha256(), Path(__file__).parents[1]
    # Per package, because rglob follows no links below its start, and a checkout has four packages
    # as links.
    for file in sorted(file for package in above.iterdir() for file in package.rglob("*.py")):
        code.update(f"{file.relative_to(above)}\n".encode() + file.read_bytes())
    return {**software(), "machine": platform.machine(), "code": code.hexdigest()[:12]}
