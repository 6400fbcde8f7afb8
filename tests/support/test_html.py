"""Tables for notebooks: escaped and short."""

from __future__ import annotations

from teachonce.support.html import MOST, html_table


def test_every_text_is_escaped_and_cut() -> None:
    found = html_table("<a>", [("<b>", "x" * 1000)], ("<c>", '"&'))
    assert "<caption>&lt;a&gt;</caption>" in found
    assert "<tr><th>&lt;c&gt;</th><th>&quot;&amp;</th></tr>" in found
    assert f"<tr><td>&lt;b&gt;</td><td>{'x' * MOST}…</td></tr>" in found


def test_without_headings_the_first_cell_is_one() -> None:
    assert html_table("a", [("b", 3)]) == (
        "<table>\n<caption>a</caption>\n<tr><th>b</th><td>3</td></tr>\n</table>"
    )
