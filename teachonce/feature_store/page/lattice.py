"""Lay out the tokens of teacher and student over one text, in clusters that no token crosses.

A side is the teacher or the student.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from teachonce.align import Tokens

Span = tuple[int, int]
WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Cell:
    """Holds tokens of one side that share characters; `tokens` are their numbers.

    They cover `width` columns of the cluster, from `column`.
    """

    column: int
    width: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """Describes a span of the text whose edges no token of teacher or student crosses.

    before: the white space in front of it. atoms: its characters, split into spans wherever a
        token of either side starts or ends; each span is a column of the page. A cluster without
        atoms holds tokens without text, such as [CLS]. sides: for each side, its tokens as cells.
    """

    before: str
    atoms: tuple[Span, ...]
    sides: tuple[tuple[Cell, ...], ...]


@dataclass
class _Group:
    """Holds tokens of one side that share characters; begin and end are equal if they have no
    text."""

    begin: int
    end: int
    tokens: list[int]


def clusters(text: str, sides: Sequence[Tokens]) -> list[Cluster]:
    """Lay out one sequence: return its clusters, in the order of the text. Together they have all
    tokens, and all characters except white space."""
    groups = [_groups(text, tokens) for tokens in sides]
    spans = _spans(text, [group for side in groups for group in side if group.begin < group.end])
    ends = [end for _, end in spans]
    # Sorted by begin, then whether there is text, then end: [CLS], without text, comes before the
    # word that begins at the same character.
    inside = defaultdict[tuple[int, int, int], list[list[_Group]]](lambda: [[] for _ in sides])
    for side, side_groups in enumerate(groups):
        for group in side_groups:
            number = bisect_right(ends, group.begin)
            if group.begin < group.end:
                begin, end = spans[number]
                key = begin, 1, end
            else:
                # A special token of one side may lie inside a word of the other, which is one
                # cluster: it comes after the word.
                within = number < len(spans) and spans[number][0] < group.begin
                point = ends[number] if within else group.begin
                key = point, 0, point
            inside[key][side].append(group)
    layout, last = list[Cluster](), 0
    for key in sorted({*inside, *((begin, 1, end) for begin, end in spans)}):
        begin, of_text, end = key
        before = text[last:begin]
        last = max(last, end)
        if of_text:
            layout.append(_cluster(before, (begin, end), inside[key]))
        else:
            layout.append(Cluster(before, (), tuple(map(_without_text, inside[key]))))
    return layout


def _groups(text: str, tokens: Tokens) -> list[_Group]:
    """Group tokens that share characters. A token without text is placed at the end of its
    predecessor."""
    groups, last = list[_Group](), 0
    rows = zip(
        np.asarray(tokens.offsets).tolist(), np.asarray(tokens.special).tolist(), strict=True
    )
    for number, ((begin, end), special) in enumerate(rows):
        begin, end = (last, last) if special else _trimmed(text, begin, end)
        if begin == end:
            begin = end = last
        groups.append(_Group(begin, end, [number]))
        # Offsets may step back in the text, into groups before the previous one.
        while len(groups) > 1 and _together(*groups[-2:]):
            popped = groups.pop()
            group = groups[-1]
            group.begin, group.end = min(group.begin, popped.begin), max(group.end, popped.end)
            group.tokens += popped.tokens
        last = groups[-1].end
    return groups


def _together(one: _Group, next_one: _Group) -> bool:
    """Return whether two groups share characters, or are both empty at the same character."""
    points = {one.begin, one.end, next_one.begin, next_one.end}
    return next_one.begin < one.end or len(points) == 1


def _trimmed(text: str, begin: int, end: int) -> Span:
    """Remove white space from both edges of a span, unless it has nothing else."""
    inside = text[begin:end]
    if not inside.strip():
        return begin, end
    return begin + len(inside) - len(inside.lstrip()), end - len(inside) + len(inside.rstrip())


def _spans(text: str, groups: Iterable[_Group]) -> list[Span]:
    """Merge groups of all sides that share characters; add the words that no token covers."""
    merged = list[Span]()
    for begin, end in sorted((group.begin, group.end) for group in groups):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    edges = [0, *(edge for span in merged for edge in span), len(text)]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    words = (word.span() for gap in gaps for word in WORD.finditer(text, *gap))
    return sorted([*merged, *words])


def _without_text(groups: Sequence[_Group]) -> tuple[Cell, ...]:
    """Return one cell with the tokens of a side that have no text; () if the side has none."""
    tokens = tuple(token for group in groups for token in group.tokens)
    return (Cell(0, 1, tokens),) if tokens else ()


def _cluster(before: str, span: Span, sides: Sequence[Sequence[_Group]]) -> Cluster:
    edges = sorted({*span, *(edge for side in sides for g in side for edge in (g.begin, g.end))})
    column = {edge: number for number, edge in enumerate(edges)}
    cells = (
        tuple(Cell(column[g.begin], column[g.end] - column[g.begin], tuple(g.tokens)) for g in side)
        for side in sides
    )
    return Cluster(before, tuple(zip(edges[:-1], edges[1:], strict=True)), tuple(cells))
