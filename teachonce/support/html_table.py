"""Tables in HTML for notebooks, which display the `_repr_html_` of an object."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

MOST = 300  # characters of a cell


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
