"""Shows the progress of a dump and the time left: as a bar in a terminal, otherwise as a line for
each part and every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from tqdm.auto import tqdm

from teachonce.support.console import counted
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.windows.window import Window, count_tokens

EVERY = 30.0  # seconds between lines within a part, without a terminal


class DumpProgress:
    """Counts tokens and estimates their total from the share of the corpus that was read.

    The share is counted in characters, or in documents with `by_documents`. Without a `corpus`, and
    for datasets of the hub, whose size is unknown, only `limit` gives a total. `title` begins each
    line.
    """

    def __init__(
        self,
        corpus: Corpus | None,
        limit: int | None,
        by_documents: bool,
        say: Callable[[str], object],
        title: str = "dump",
    ) -> None:
        self._title = title
        self._whole = corpus.size(by_documents) if corpus else None
        self._limit, self._by_documents, self._say = limit, by_documents, say
        self._seen = self._tokens = self._here = self._done = 0
        self._started = self._reported = time.perf_counter()
        # `disable=None`: no bar without a terminal.
        self.bar: Any = tqdm(
            unit="tok", unit_scale=True, desc=title, disable=None, total=self._limit
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def begin(self, part: Sequence[Window]) -> None:
        """Count a part that starts: its tokens, and how much of the corpus has been read."""
        self._tokens += count_tokens(part)
        if self._by_documents:
            self._seen = part[-1].document + 1
        else:
            self._seen += sum(len(window.text) for window in part)
        self.bar.total = self.total()

    def total(self) -> int | None:
        """Estimate the tokens of the whole dump; None if the size of the corpus is unknown."""
        if not self._whole or not self._seen:
            return self._limit
        estimate = round(self._tokens * max(1.0, self._whole / self._seen))
        return estimate if self._limit is None else min(estimate, self._limit)

    def skip(self, part: Sequence[Window]) -> None:
        """Count a part that was published before."""
        tokens = count_tokens(part)
        # Not added to `_here`: speed and time left count only what the teacher reads in this run.
        self._done += tokens
        self.bar.update(tokens)

    def advance(self, tokens: int) -> None:
        """Count tokens of a batch; without a terminal, print a line every EVERY seconds."""
        self._here += tokens
        self._done += tokens
        self.bar.update(tokens)
        now = time.perf_counter()
        if self.bar.disable and now - self._reported >= EVERY:
            self._reported = now
            speed = self._here / (now - self._started)
            self._say(
                f"{self._title:<9} {self._done:,} teacher tokens so far, {speed:,.0f} tokens/s"
                f"{self._left()}"
            )

    def end(self, number: int, part: Sequence[Window], seconds: float) -> None:
        """Print a line for a written part, without a terminal."""
        if not self.bar.disable:
            return
        tokens = count_tokens(part)
        line = part_line(number, len(part), tokens, seconds, self._tokens)
        self._reported = time.perf_counter()
        self._say(line + self._left())

    def _left(self) -> str:
        total, spent = self.total(), time.perf_counter() - self._started
        if total is None or not self._here:
            return ""
        seconds = max(0, total - self._done) * spent / self._here
        share = min(1.0, self._done / max(1, total))
        return f", about {share:.0%} of all, {tqdm.format_interval(seconds)} left"


def part_line(number: int, sequences: int, tokens: int, seconds: float, so_far: int) -> str:
    return (
        f"part {number:<4} {counted(sequences, 'sequence')}, {counted(tokens, 'teacher token')},"
        f" {tokens / seconds:,.0f} tokens/s; {so_far:,} tokens so far"
    )
