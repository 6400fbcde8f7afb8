"""Differences between settings are shown by the values that differ."""

from __future__ import annotations

from teachonce.support.differences import differences


def test_lists_of_files_are_shown_by_their_names() -> None:
    one = {
        "sources": [{"name": "a.txt", "sha256": "0" * 64}, {"name": "b.txt", "sha256": "1" * 64}]
    }
    other = {"sources": [{"name": "a.txt", "sha256": "0" * 64}]}
    assert [*differences(one, other)] == [("sources", "a.txt, b.txt", "a.txt")]
    assert [*differences({"loss": [1, 2]}, {"loss": [1]})] == [("loss", "'[1, 2]'", "'[1]'")]
