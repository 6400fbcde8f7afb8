"""The site: `make docs` builds it into docs/_build, offline."""

from __future__ import annotations

import re
from importlib import metadata

from teachonce.student_train.losses.registry import LOSSES

project = "Teachonce"
copyright = "the authors of Teachonce"
release = version = metadata.version("teachonce")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Teachonce {release}"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
myst_enable_extensions = ["substitution"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing", "myst.header"]  # links to files outside the site


def _losses() -> str:
    """Return the table of all losses, in the order of their registry."""
    rows = [
        (f"`{loss.name}`", loss.teacher, loss.student, loss.unit, loss.projection,
         f"`losses.{loss.formula}`")
        for loss in LOSSES
    ]  # fmt: skip
    head = ("`--loss`", "reads of the store", "of the student", "unit", "projection", "formula")
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


myst_substitutions = {"losses": _losses()}


def _plain(
    app: object, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Set a docstring in reStructuredText: ours name code in single backticks."""
    text = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", "\n".join(_fields(lines)))
    text = re.sub(r"``.+?``|\*|_(?!\w)", _escaped, text)
    lines[:] = text.split("\n")


FIELD = re.compile(r"([A-Za-z]\w*(?:, [A-Za-z]\w*)*): (.+)")
"""A line of ours that describes arguments or attributes; longer ones go on indented."""


def _fields(lines: list[str]) -> list[str]:
    """Write what describes arguments and attributes as a list of definitions."""
    found, inside = lines[:1], False
    for line in lines[1:]:
        field = FIELD.match(line)
        starts = bool(field) != inside and line[:1].strip()  # a list begins or ends here
        if starts and found[-1]:
            found.append("")
        found += [f"``{field[1]}``", f"    {field[2]}"] if field else [line]
        inside = bool(field) or (inside and line.startswith(" "))
    return found


def _escaped(found: re.Match[str]) -> str:
    """Return code as it is, and a mark of reStructuredText with a backslash before it."""
    text = found.group()
    return text if text.startswith("``") else f"\\{text}"


def setup(app: object) -> None:
    """Register what the site does with docstrings."""
    app.connect("autodoc-process-docstring", _plain)  # type: ignore[attr-defined]
