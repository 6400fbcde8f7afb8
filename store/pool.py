"""The blocks that a stream mixes at once, read into buffers that are used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from store.layout import logits_specs
from store.tree import Array

if TYPE_CHECKING:
    from store.reader import FeatureStore


class Buffers:
    """Named arrays that grow and are used again: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of this shape; its content is what was there before."""
        held = self._arrays.get(name)
        if held is None or held.dtype != dtype or len(held) < shape[0]:
            held = np.empty((shape[0] + shape[0] // 8, *shape[1:]), dtype)
            self._arrays[name] = held
        return held[: shape[0]]


def ranges(begin: Array, sizes: Array) -> Array:
    """begin[0]..begin[0]+sizes[0], begin[1]..., one after another."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begin - (ends - sizes), sizes) + np.arange(total)


def starts(sizes: Array) -> Array:
    """[n] -> int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


class Pool:
    """All wanted arrays of some blocks, flat, as stored (not decoded)."""

    def __init__(
        self,
        store: FeatureStore,
        blocks: Array,
        lengths: Array,
        view: int,
        kinds: tuple[str, ...],
        buffers: Buffers,
    ) -> None:
        features = store.features
        self.view, self.lengths = view, lengths
        self.token_start, self.square_start = starts(lengths), starts(lengths**2)
        self.index = np.concatenate([np.arange(begin, end) for begin, end in blocks])
        self.hidden = features.hidden if "hidden" in kinds else ()
        self.has_logits = features.logits is not None and "logits" in kinds
        self.token: dict[str, Array] = {}
        self.attention: dict[str, Array] = {}
        self.draws: dict[str, Array] = {}
        self.draw_start: Array | None = None
        self.texts: list[str] = []
        self._sampled = (
            self.has_logits and features.logits is not None and features.logits.tier == "sample"
        )
        maps = features.attention if "attention" in kinds else ()
        documents, span_sizes, spans, draw_sizes = [], [], [], []
        draws: dict[str, list[Array]] = {"ids": [], "counts": []}
        names, done = self._token_names(store), 0
        for begin, end in blocks.tolist():
            part, first = store.locate(begin)
            last = first + end - begin
            left, right = (int(part.token_start[edge]) for edge in (first, last))
            rows = slice(int(self.token_start[done]), int(self.token_start[done + end - begin]))
            for name in names:
                self._fill(self.token, name, part.read(name, left, right), rows, buffers)
            squares = [int(part.square_start[edge]) for edge in (first, last)]
            place = slice(int(self.square_start[done]), int(self.square_start[done + end - begin]))
            for name in maps:
                codes = part.read(f"view{view}/attention/{name}/values", *squares)
                self._fill(self.attention, name, codes, place, buffers)
            if self._sampled:
                edges = part.draw_start(view, left, right)
                draw_sizes.append(np.diff(edges))
                for key, pieces in draws.items():
                    flat = (int(edges[0]), int(edges[-1]))
                    pieces.append(part.read(f"view{view}/logits/{key}", *flat))
            documents.append(part.read("sequence/document", first, last))
            edges, masked = part.spans(view, first, last)
            span_sizes.append(np.diff(edges))
            spans.append(masked)
            self.texts += part.texts(first, last)
            done += end - begin
        self.document, self.spans = np.concatenate(documents), np.concatenate(spans)
        self.span_start = starts(np.concatenate(span_sizes))
        if self._sampled:
            self.draw_start = starts(np.concatenate(draw_sizes))
            self.draws = {key: np.concatenate(pieces) for key, pieces in draws.items()}

    def _token_names(self, store: FeatureStore) -> list[str]:
        names, here = [f"token/{key}" for key in ("id", "begin", "end", "special")], self.view
        if self.has_logits:
            specs = logits_specs(store.features, 0, 0)
            names += [f"view{here}/logits/{key}" for key, spec in specs.items() if spec.per_token]
        keys = ("values",) if store.features.codec == "exact" else ("values", "scale")
        return names + [f"view{here}/hidden/{n}/{key}" for n in self.hidden for key in keys]

    def _fill(
        self, target: dict[str, Array], name: str, data: Array, rows: slice, buffers: Buffers
    ) -> None:
        if name not in target:
            start = self.token_start if target is self.token else self.square_start
            target[name] = buffers.get(name, (int(start[-1]), *data.shape[1:]), data.dtype)
        target[name][rows] = data
