"""Differences between settings are shown by the values that differ."""

from __future__ import annotations

from teachonce.support.differences import described, differences


def test_lists_of_files_are_shown_by_their_names() -> None:
    one = {
        "sources": [{"name": "a.txt", "sha256": "0" * 64}, {"name": "b.txt", "sha256": "1" * 64}]
    }
    other = {"sources": [{"name": "a.txt", "sha256": "0" * 64}]}
    assert [*differences(one, other)] == [("sources", "a.txt, b.txt", "a.txt")]
    assert [*differences({"loss": [1, 2]}, {"loss": [1]})] == [("loss", "'[1, 2]'", "'[1]'")]


def test_keys_are_described_as_options_or_in_words() -> None:
    for then, now, group, expected in (
        ({"width": 48}, {"width": 64}, "", "--width is '48' in the store and '64' now"),
        ({"width": 48}, {"width": 64}, "features", "the model's hidden size is '48'"),
        ({"sources": {"a": 1}}, {"sources": {"a": 2}}, "identity.corpus", "sources, a) is '1'"),
        ({"sources": [{"n": 1}]}, {"sources": [{"n": 2}]}, "identity.corpus", "(source 1, n) is"),
    ):
        (line,) = described(differences(then, now, group))
        assert expected in line
