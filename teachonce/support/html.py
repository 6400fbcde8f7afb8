"""Write HTML: self-contained pages, and tables for notebooks.

A page is one file that needs no network, with a light and a dark theme, usable by keyboard and
screen reader. A notebook displays the `_repr_html_` of an object.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from teachonce.support import files
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.packages import library

SHARED = Path(__file__).with_name("page")
BEGINNING = b"<!doctype html>"
MOST = 300  # characters of a cell


def write_page(path: Path, templates: Path, name: str, what_for: str, **values: Any) -> None:
    """Render the Jinja2 template `name` of the folder `templates` with `values` into the file
    `path`.

    All text is escaped. In a template, `value | tojson` writes data as JSON into a script, and
    `include_file("x.css")` inserts a file of `templates` or of the shared folder. `what_for` names
    the command in errors. Raises UserError as `check_page` does, and OSError if the page cannot be
    written.
    """
    check_page(path, what_for)
    jinja2 = library("jinja2", "report", what_for)
    loader = jinja2.FileSystemLoader([templates, SHARED])
    # StrictUndefined: a misspelt name in a template is an error, not an empty text.
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    # Jinja2 sorts keys and writes \uXXXX by default: three times the bytes of a Russian text.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}
    environment.globals["include_file"] = lambda file: jinja2.utils.markupsafe.Markup(
        loader.get_source(environment, file)[0]
    )
    text = environment.get_template(name).render(**values)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A damaged text may hold a lone surrogate, which UTF-8 cannot encode.
    files.write(path, text.encode("utf-8", "replace"))


def check_page(path: Path, what_for: str) -> None:
    """Raise UserError if Jinja2 is missing, or if `path` is no file or a file that is not HTML.

    An existing page is not an error: `write_page` replaces it, as a page can be made again at any
    time. `what_for` names the command that needs Jinja2.
    """
    library("jinja2", "report", what_for)
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe would block
        raise UserError(
            f"{path}: is a folder, pipe or device; give the name of a file, such as page.html"
        )
    with path.open("rb") as file:
        if file.read(len(BEGINNING)) != BEGINNING:
            raise UserError(f"{path}: exists already, and is not an HTML page; {ANOTHER}")


def html_table(caption: str, rows: Iterable[Iterable[object]], headings: Iterable[str] = ()) -> str:
    """Return an HTML table. Without `headings`, the first cell of each row is its heading.

    Every text is escaped, and truncated to `MOST` characters.
    """
    headings = list(headings)
    lines = ["<table>", f"<caption>{_cell(caption)}</caption>"]
    if headings:
        lines.append(_row([f"<th>{_cell(heading)}</th>" for heading in headings]))
    for row in rows:
        first, *cells = (_cell(cell) for cell in row)
        begin = f"<td>{first}</td>" if headings else f"<th>{first}</th>"
        lines.append(_row([begin, *(f"<td>{cell}</td>" for cell in cells)]))
    return "\n".join([*lines, "</table>"])


def _row(cells: list[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: object) -> str:
    text = str(value)
    return escape(text if len(text) <= MOST else f"{text[:MOST]}…")
