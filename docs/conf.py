"""The site: `make docs` builds it into docs/_build, without links to other sites if offline."""

from __future__ import annotations

import re
from importlib import import_module, metadata
from typing import Any
from urllib.request import urlopen

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.errors import ExtensionError

from teachonce.student_train.losses.registry import LOSSES

project = "Teachonce"
copyright = "the authors of Teachonce"
release = version = metadata.version("teachonce")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["logo"]
html_theme_options = {"light_logo": "light.svg", "dark_logo": "dark.svg"}
html_math_renderer = "mathml"
html_title = f"Teachonce {release}"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
myst_enable_extensions = ["dollarmath", "substitution"]
copybutton_exclude = ".linenos, .gp, .go"
myst_heading_anchors = 3

OTHER_SITES = {
    "python": "https://docs.python.org/3",
    "numpy": "https://numpy.org/doc/stable",
    "torch": "https://docs.pytorch.org/docs/stable",
    "zarr": "https://zarr.readthedocs.io/en/stable",
}


def _reachable(site: str) -> bool:
    try:
        urlopen(f"{site}/objects.inv", timeout=5).close()
    except OSError:
        return False
    return True


intersphinx_mapping = {name: (site, None) for name, site in OTHER_SITES.items() if _reachable(site)}


def _losses() -> str:
    """Return the table of all losses, in the order of their registry."""
    rows = [
        (f"`{loss.shown}`", loss.teacher, loss.student, loss.unit, loss.projection,
         f"{{py:func}}`{loss.formula} <teachonce.student_train.losses.{loss.formula}>`")
        for loss in LOSSES
    ]  # fmt: skip
    head = ("`--loss`", "reads from the store", "student output", "unit", "projection", "formula")
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


myst_substitutions = {"losses": _losses()}


def _plain(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Set a docstring in reStructuredText: ours name code in single backticks."""
    shown = _files(lines) if what == "module" else _fields(lines)
    text = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", "\n".join(shown))
    text = re.sub(r"``.+?``|\*|_(?!\w)", _escaped, text)
    lines[:] = text.split("\n")


FIELD = re.compile(r"([A-Za-z]\w*(?:, [A-Za-z]\w*)*): (.+)")
"""A line of ours that describes arguments or attributes; longer ones go on indented."""


def _fields(lines: list[str]) -> list[str]:
    """Write what describes arguments and attributes as a list of definitions."""
    converted, inside = lines[:1], False
    for line in lines[1:]:
        field = FIELD.match(line)
        starts = bool(field) != inside and line[:1].strip()  # a list begins or ends here
        if starts and converted[-1]:
            converted.append("")
        converted += [f"``{field[1]}``", f"    {field[2]}"] if field else [line]
        inside = bool(field) or (inside and line.startswith(" "))
    return converted


def _files(lines: list[str]) -> list[str]:
    """Write the indented list of a package's files as a literal block."""
    converted = list[str]()
    for line in lines:
        if line.startswith("    ") and converted and not converted[-1]:
            converted += ["::", ""]
        converted.append(line)
    return converted


def _escaped(match: re.Match[str]) -> str:
    """Return code as it is, and a mark of reStructuredText with a backslash before it."""
    text = match.group()
    return text if text.startswith("``") else f"\\{text}"


def _as_typed(app: object, context: object, lines: list[str]) -> None:
    """Correct what sphinx-click prints of an option: it takes click's mark of no default for a
    default, and docutils takes `nDCG@10` for an address of mail."""
    lines[:] = [
        re.sub(r"(?<=\w)@(?=\d)", r"\\@", line) for line in lines if "Sentinel.UNSET" not in line
    ]


INCLUDED = {
    "ARCHITECTURE": "architecture",
    "CONTRIBUTING": "contributing",
    "SECURITY": "security",
    "benchmarks/RESULTS": "results",
    "benchmarks/reproduce/README": "reproduce",
    "store/FORMAT": "format",
}
"""Files outside docs/, without `.md`, and the page that includes each of them."""


def _to_included(app: Any, doctree: Any) -> None:
    """Point links to an included file to its page. In the repository they lead to the file, which
    a reader there can read; the page has only the directive."""
    pages = {str(app.srcdir.parent / file): page for file, page in INCLUDED.items()}
    for link in doctree.findall(pending_xref):
        link["reftarget"] = pages.get(link["reftarget"], link["reftarget"])


PACKAGES = ("align", "store", "teacher_dump", "student_train")


def _all_are_published(app: Any, error: Exception | None) -> None:
    """Fail if a public name has no entry, as when the import of its module fails."""
    if error is None:
        entries = app.env.domaindata["py"]["objects"]
        names = [
            f"{package.__name__}.{name}"
            for package in (import_module(f"teachonce.{module}") for module in PACKAGES)
            for name in package.__all__
        ]
        losses = [f"teachonce.student_train.losses.{loss.formula}" for loss in LOSSES]
        if missing := [name for name in (*names, *losses) if name not in entries]:
            raise ExtensionError(f"not on the site: {', '.join(missing)}")


def _math(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers show without a network; MathJax loads itself from
    one."""
    block = node.tagname == "math_block"
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register what the site does with docstrings, options, formulas and links, and its check."""
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
    app.connect("autodoc-process-docstring", _plain)
    for part in ("description", "options"):
        app.connect(f"sphinx-click-process-{part}", _as_typed)
    app.connect("doctree-read", _to_included)
    app.connect("build-finished", _all_are_published)
