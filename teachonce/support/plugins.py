"""Objects that other installed packages add by entry points, as codecs are added to zarr.

A package adds, for example, a codec by a table in its pyproject.toml:

    [project.entry-points."teachonce.codecs"]
    mine = "mypackage.codecs:MINE"
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from teachonce.support.errors import UserError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def added_object(group: str, name: str, option: str = "") -> Any | None:
    """Load the object that an installed package adds under a name; None if no package does.

    Call it only for a name that is not built in, because searching all installed packages takes
    about 50 ms. Raises UserError, which starts with the `option`, if the object cannot be loaded,
    or if several packages add one.
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
    if no package does. Raises UserError, which starts with the `option`, if it cannot be loaded."""
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
    except (Exception, SystemExit) as error:  # a foreign module may raise any
        why = f"exit {error.code}" if isinstance(error, SystemExit) else first_line(error)
        raise UserError(f"{subject} cannot be loaded ({why}); {remedy}") from error
