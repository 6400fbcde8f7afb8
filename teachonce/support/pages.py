"""Write self-contained HTML pages: one file, no network, light and dark, for keyboard and screen
reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teachonce.support import files
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.extras import library

SHARED = Path(__file__).with_name("page")
BEGINNING = b"<!doctype html>"


def write_page(path: Path, templates: Path, name: str, what_for: str, **values: Any) -> None:
    """Write the page that the template `name` of a folder makes of `values`.

    All text is escaped; `name | embedded` puts data into a script, and `include_file` CSS and
    JavaScript of the template's folder or of the shared one. Raises UserError as `check_page` does,
    OSError where the page cannot be written.
    """
    check_page(path, what_for)
    jinja2 = library("jinja2", "report", what_for)
    loader = jinja2.FileSystemLoader([templates, SHARED])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["embedded"] = lambda value: embedded(value, jinja2.utils.markupsafe.Markup)
    environment.globals["include_file"] = lambda file: jinja2.utils.markupsafe.Markup(
        loader.get_source(environment, file)[0]
    )
    text = environment.get_template(name).render(**values)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text.encode("utf-8", "replace"))


def check_page(path: Path, what_for: str) -> None:
    """Raise UserError where Jinja2 is missing, and where something that is no page has the name.

    An older page is replaced, as a page can be made again at any time.
    """
    library("jinja2", "report", what_for)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the name of a file, such as page.html")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(BEGINNING)) != BEGINNING:
                raise UserError(f"{path}: exists already, and is no page of this kind; {ANOTHER}")


def embedded(value: Any, markup: Any = str) -> Any:
    """Write data as JSON for a script element, which nothing in it can end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return markup(text)
