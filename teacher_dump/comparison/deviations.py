"""Measures errors of stored features against the teacher's output and their codecs' bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from teachonce.store import Features, Logits, Record
from teachonce.store.format.codecs.levels import bound
from teachonce.store.format.layout import EMBEDDING
from teachonce.support.arrays import Floats
from teachonce.teacher_dump.teacher.heads import Decoder, all_logits

# A normal variable is further from its mean with a probability of 2e-9.
STANDARD_ERRORS = 6.0  # allowed distance of random draws from their expectation
FLOOR = -63.0  # log-probabilities below it count as equal
Calibration = tuple[Floats, Floats]  # mean [D] and standard deviation [D] of the channels


@dataclass
class Comparison:
    """Holds the errors of one feature in the sample: stored values against the teacher's output.

    `promised` is the largest error that the codec allows in the sample. `share` is the largest
    ratio of an error to the error that codec and precision together allow for this value.
    """

    feature: str
    unit: str
    largest: float = 0.0
    mean: float = 0.0
    promised: float = 0.0
    share: float = 0.0


@dataclass
class Tally:
    """Collects errors of one feature over a sample."""

    row: Comparison
    count: int = 0
    total: float = 0.0
    place: str = ""

    def add(self, error: Any, promised: Any, slack: Any, place: str) -> None:
        """Add errors of any shape, each with the codec's error bound (`promised`) and with the
        error that precision may add (`slack`)."""
        error, promised = np.asarray(error, np.float64), np.asarray(promised, np.float64)
        if not error.size:
            return
        self.row.largest = max(self.row.largest, float(error.max()))
        self.row.promised = max(self.row.promised, float(promised.max()))
        self.count, self.total = self.count + error.size, self.total + float(error.sum())
        self.row.mean = self.total / self.count
        share = float((error / (promised + slack)).max())
        if not share <= self.row.share:  # true for NaN
            self.row.share, self.place = share, place


class Errors:
    """Compares a sample of a store with the teacher's output.

    `tolerance` is the error that precision may add, relative to 1 + |value|. `times` multiplies the
    codec's bound for hidden states (above 1 after `merge --recode`).
    """

    def __init__(self, features: Features, tolerance: float, times: float) -> None:
        self.features, self.tolerance, self.times = features, tolerance, times
        self.tallies: dict[str, Tally] = {}
        # Sums: tokens, entropy, the draws' mean -log p minus the entropy, variance of that mean.
        self.draws = np.zeros(4)

    def _add(
        self, feature: str, unit: str, error: Any, promised: Any, slack: Any, record: Record
    ) -> None:
        tally = self.tallies.setdefault(feature, Tally(Comparison(feature, unit)))
        tally.add(error, promised, slack, f"sequence {record.index}")

    def _slack(self, values: Any) -> Any:
        return self.tolerance * (1 + np.abs(values))

    def hidden(
        self, record: Record, view: int, name: str, live: Floats, calibration: Calibration
    ) -> None:
        """Compare states [L,D], in standard deviations of their channels."""
        mean, deviation = calibration
        live = (live - mean) / deviation
        stored = (record.views[view].hidden[name] - mean) / deviation
        path, level = f"view{view}/hidden/{name}", self.features.level
        codes = {
            key: record.part.read(f"{path}/{key}", *record.tokens) for key in level.hidden.names
        }
        promised = self.times * bound(level, "hidden", stored, codes)
        error, slack = np.abs(live - stored), self._slack(stored)
        self._add(path, "deviations", error, promised, slack, record)

    def attention(self, record: Record, view: int, name: str, live: Floats) -> None:
        """Compare maps [L,L] of probabilities."""
        stored = record.views[view].attention[name]
        # The bound grows with the probability that was encoded, which is unknown here: the larger
        # of the two is used.
        promised = bound(self.features.level, "attention", np.maximum(live, stored))
        slack = self.tolerance * (0.1 + stored)
        path = f"view{view}/attention/{name}"
        self._add(path, "probability", np.abs(live - stored), promised, slack, record)

    def embedding(self, record: Record, live: Floats) -> None:
        """Compare vectors [W]: values relative to the vector's root mean square, and the cosine."""
        stored, codec = record.embedding[None], self.features.level.embedding
        path, one = EMBEDDING, (record.position, record.position + 1)
        codes = {key: record.part.read(f"{path}/{key}", *one) for key in codec.names}
        promised = bound(self.features.level, "embedding", stored, codes)
        # A vector without `normalised` may be all zeros (FORMAT.md, 6).
        length = float(np.linalg.norm(stored)) + 1e-12
        unit = length / np.sqrt(stored.size)
        error, slack = np.abs(live - stored) / unit, self._slack(stored / unit)
        self._add(path, "root mean squares", error, promised / unit, slack, record)
        cosine = float(live @ stored[0]) / (length * float(np.linalg.norm(live)) + 1e-12)
        # The decoded vector lies within an angle of this sine (FORMAT.md, 7).
        sine = min(1.0, float(np.linalg.norm(promised)) / length)
        away = 1 - np.sqrt(1 - sine**2)
        self._add(f"{path}, 1 - cosine", "of 2", 1 - cosine, away, self.tolerance, record)

    def task(self, record: Record, view: int, decoder: Decoder, values: torch.Tensor) -> Floats:
        """Compare raw logits, which no codec changes: of classes [1,C] or of tags [L,C].

        Returns the teacher's logits.
        """
        task, seen = self.features.task, record.views[view]
        assert task is not None
        stored = seen.tag_logits if task.kind == "tagging" else seen.class_logits[None]
        live = all_logits(decoder, values)
        error = np.abs(live - stored)
        self._add(f"view{view}/{task.outputs}", "logits", error, 0.0, self._slack(live), record)
        return live

    def logits(self, record: Record, view: int, decoder: Decoder, values: torch.Tensor) -> Floats:
        """Compare all stored arrays of logits, for inputs `values` [L,D'] of the head.

        Returns the teacher's log-partitions [L].
        """
        stored, path = record.views[view].logits, f"view{view}/logits"
        partitions = []
        for rows, raw in decoder.logits(values):
            partition = raw.logsumexp(-1)
            partitions.append(partition.cpu().numpy())
            if stored.tier == "topk":
                self._top(record, path, stored, rows, raw - partition[:, None])
            elif stored.tier == "sample":
                self._draws(stored, rows, raw - partition[:, None])
            if stored.observed is not None:
                self._observed(record, path, stored, rows, raw - partition[:, None])
        if stored.tier == "head":
            self._head(record, path, stored.values, values.float().cpu().numpy())
        live = np.concatenate(partitions)
        error, slack = np.abs(live - stored.log_partition), self._slack(live)
        self._add(f"{path}/log_partition", "nats", error, 0.0, slack, record)
        return live

    def _top(
        self, record: Record, path: str, stored: Logits, rows: slice, logs: torch.Tensor
    ) -> None:
        ids = torch.from_numpy(stored.ids[rows].astype(np.int64)).to(logs.device)
        live = logs.gather(1, ids).cpu().numpy()
        tail = logs.scatter(1, ids, -torch.inf)
        rest, best = tail.logsumexp(-1).cpu().numpy(), tail.max(-1).values.cpu().numpy()
        for key, live_logs, stored_logs in (
            ("logprobs", live, stored.logprobs[rows]),
            ("rest", rest, stored.rest[rows]),
        ):
            self._logprobs(record, f"{path}/{key}", key, live_logs, stored_logs)
        lowest = live.min(axis=1)
        error = np.maximum(0, np.maximum(best, FLOOR) - np.maximum(lowest, FLOOR))
        # Twice: both `best` and `lowest` are of the teacher that runs again, and may be off.
        self._add(f"{path}/ids", "nats", error, 0.0, 2 * self._slack(lowest), record)

    def _logprobs(self, record: Record, name: str, kind: str, live: Floats, stored: Floats) -> None:
        """Compare log-probabilities of any shape, which the codec of `kind` encoded."""
        level = self.features.level
        # Values below the codec's lowest are decoded to about the lowest (FORMAT.md, 7): they
        # count as equal.
        floor = max(FLOOR, getattr(level, kind).lowest)
        live, stored = np.maximum(live, floor), np.maximum(stored, floor)
        # The bound of codec `small` grows with -v: the lower value gives the larger bound.
        promised = bound(level, kind, np.minimum(live, stored))
        self._add(name, "nats", np.abs(live - stored), promised, self._slack(stored), record)

    def _observed(
        self, record: Record, path: str, stored: Logits, rows: slice, logs: torch.Tensor
    ) -> None:
        """Compare the log-probability of each token's next token; the last row has no next one."""
        following = record.token_ids[1:][rows].astype(np.int64)
        ids = torch.from_numpy(following).to(logs.device)
        live = logs[: len(ids)].gather(1, ids[:, None])[:, 0].cpu().numpy()
        self._logprobs(record, f"{path}/observed", "rest", live, stored.observed[:-1][rows])

    def _head(self, record: Record, path: str, stored: Floats, live: Floats) -> None:
        """Compare the head's inputs [L,D'], relative to the root mean square of each input."""
        unit = np.sqrt(np.square(stored).mean(axis=1, keepdims=True)) + 1e-6
        promised = bound(self.features.level, "head", stored) / unit
        error, slack = np.abs(live - stored) / unit, self._slack(stored / unit)
        self._add(f"{path}/values", "root mean squares", error, promised, slack, record)

    def _draws(self, stored: Logits, rows: slice, logs: torch.Tensor) -> None:
        """Add random draws d from p: the expected value of -log p(d) is the entropy of p, and its
        variance is known."""
        start = stored.start[rows.start : rows.start + len(logs) + 1]
        ids = torch.from_numpy(stored.ids[start[0] : start[-1]].astype(np.int64)).to(logs.device)
        counts = stored.counts[start[0] : start[-1]].astype(np.float64)
        token = np.repeat(np.arange(len(logs)), np.diff(start))
        drawn = logs.double()[torch.from_numpy(token).to(logs.device), ids].cpu().numpy()
        # 0 times -inf would be NaN.
        logs = logs.double().clamp(min=-1e4)
        entropy = -(logs.exp() * logs).sum(-1)
        variance = ((logs.exp() * logs.square()).sum(-1) - entropy.square()).clamp(min=0)
        # Bounded like `logs`: a drawn id with a probability of 0 must not make the sum infinite.
        surprise = -(counts * np.maximum(drawn, -1e4)).sum() / (stored.draws or 1)
        entropies = float(entropy.sum())
        spread = float(variance.sum()) / (stored.draws or 1)
        self.draws += (len(logs), entropies, surprise - entropies, spread)

    def finished(self) -> list[Tally]:
        """Return all tallies. Random draws are tested once, over the whole sample."""
        tokens, entropy, excess, variance = self.draws
        if tokens:
            row = Comparison("draws", "nats")
            promised = STANDARD_ERRORS * np.sqrt(variance) / tokens
            slack = self.tolerance * (1 + entropy / tokens) / 10
            self.tallies["draws"] = Tally(row)
            self.tallies["draws"].add(abs(excess) / tokens, promised, slack, "all sequences")
        return list(self.tallies.values())
