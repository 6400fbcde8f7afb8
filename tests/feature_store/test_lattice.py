"""Tokens in the rows of a text: each token and each character has exactly one place, in order."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from teachonce.align import Tokens
from teachonce.feature_store.page import lattice
from teachonce.feature_store.page.lattice import Cluster, clusters

Side = list[tuple[int, int]]  # spans; an empty span is special


def tokens(spans: Side) -> Tokens:
    return Tokens.of([list(range(len(spans)))], [spans], [[int(b == e) for b, e in spans]])


def drawn(text: str, *sides: Side) -> list[Cluster]:
    return clusters(text, [tokens(side) for side in sides])


def printed(text: str, found: list[Cluster]) -> list[str]:
    """Format each cluster as its atoms, and each side's tokens by number under the columns."""
    return [
        "|".join(text[b:e] for b, e in c.atoms)
        + "".join(f" {[(x.column, x.width, x.tokens) for x in side]}" for side in c.sides)
        for c in found
    ]


def test_a_word_that_is_cut_in_other_places() -> None:
    teacher = [(0, 0), (0, 7), (7, 8), (0, 0)]
    student = [(0, 0), (0, 3), (3, 7), (7, 8), (0, 0)]
    assert printed("stories.", drawn("stories.", teacher, student)) == [
        " [(0, 1, (0,))] [(0, 1, (0,))]",
        "sto|ries [(0, 2, (1,))] [(0, 1, (1,)), (1, 1, (2,))]",
        ". [(0, 1, (2,))] [(0, 1, (3,))]",
        " [(0, 1, (3,))] [(0, 1, (4,))]",
    ]


def test_blanks_at_edges_and_characters_that_nothing_covers() -> None:
    found = drawn("a  bc\x00 d", [(0, 1), (1, 5), (6, 8)], [(0, 1)])
    assert printed("a  bc\x00 d", found) == [
        "a [(0, 1, (0,))] [(0, 1, (0,))]",
        "bc [(0, 1, (1,))] []",
        "\x00 [] []",
        "d [(0, 1, (2,))] []",
    ]
    assert [each.before for each in found] == ["", "  ", "", " "]


def test_tokens_of_one_character_share_a_cell() -> None:
    found = drawn("🙂x", [(0, 1), (0, 1), (0, 1), (1, 2)], [(0, 2)])
    assert printed("🙂x", found) == ["🙂|x [(0, 1, (0, 1, 2)), (1, 1, (3,))] [(0, 2, (0,))]"]


def test_the_work_grows_with_the_text() -> None:
    assert instructions(64) < 6 * instructions(16)


def instructions(words: int) -> int:
    """Count the instructions for the layout of `words` words, with a special token in each."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace if frame.f_code.co_filename == lattice.__file__ else None

    side = [(5 * n, 5 * n + size) for n in range(words) for size in (2, 0)]
    text, before = "word " * words, sys.gettrace()
    sys.settrace(trace)
    try:
        drawn(text, side, [(begin, begin + 4) for begin, _ in side[::2]])
    finally:
        sys.settrace(before)
    return count


@st.composite
def texts_with_sides(draw: st.DrawFn) -> tuple[str, list[Side]]:
    """Draw a text, and spans of tokens that may overlap, step back, be special or leave gaps."""
    text = draw(st.text("ab \n", max_size=12))
    place = st.integers(0, len(text))
    span = st.tuples(place, place).map(lambda pair: (min(pair), max(pair)))
    side = st.lists(span, max_size=8)
    return text, draw(st.lists(st.one_of(side, side.map(sorted)), min_size=1, max_size=2))


@given(texts_with_sides())
def test_everything_stands_in_one_place(example: tuple[str, list[Side]]) -> None:
    text, sides = example
    found = drawn(text, *sides)
    assert "".join(c.before + "".join(text[b:e] for b, e in c.atoms) for c in found) == (
        text if found and text.strip() and not text[-1:].isspace() else text[: _end(found)]
    )
    for number, spans in enumerate(sides):
        placed = [t for c in found for cell in c.sides[number] for t in cell.tokens]
        assert sorted(placed) == list(range(len(spans)))
        for cluster in found:
            for cell in cluster.sides[number]:
                if cluster.atoms:
                    begin = cluster.atoms[cell.column][0]
                    end = cluster.atoms[cell.column + cell.width - 1][1]
                    for token in cell.tokens:
                        low, high = spans[token]
                        kept = text[low:high].strip() or low == high
                        assert not kept or low == high or begin <= high and low <= end


def _end(found: list[Cluster]) -> int:
    return max((e for c in found for _, e in c.atoms), default=0)
