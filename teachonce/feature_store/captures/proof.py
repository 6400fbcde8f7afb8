"""Checks that captured logits predict the tokens after them, and that captured logits and states
are those of the given model.

An inference engine may return the rows of other tokens than the requested ones: shifted by one
position, or cached for another prompt. Such rows also look like log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.feature_store.captures.sample import Capture, CaptureContents, Sample
from teachonce.store.format.value_laws import LOG_SLACK, logprob_bounds
from teachonce.support.arrays import Array, Floats
from teachonce.support.console import counted
from teachonce.support.errors import UserError

SAMPLES = 32  # texts that run through --model
TIMES = 10.0  # largest accepted ratio of a row's difference to the median row's, above `outlier`
# At least ROWS rows are refused as shifted if they predict another token (see `ShiftCheck`) better
# than the next one, by more than NATS on average and by more than SIGMAS standard errors. Fewer
# rows may do so by chance.
ROWS, SIGMAS, NATS = 100, 6.0, 1.0
OTHER_TOKENS = (
    "the rows belong to other tokens, because they are shifted by one position, or cached from"
    " another text (prefix caching, chunked prefill)"
)
CAUSES = f"{OTHER_TOKENS}; capture again, as examples/capture_vllm.py does"


def check_observed(
    following: Array, ids: Array, logprobs: Floats, observed: Floats, where: str
) -> None:
    """Raise UserError if `observed` [T], the log-probabilities of the next tokens, contradict the
    best ids and log-probabilities [T,K]."""
    inside, expected = logprob_bounds(following, ids, logprobs)
    off = (observed > expected + LOG_SLACK) | (inside & (observed < expected - LOG_SLACK))
    if off.any():
        row = int(off.argmax())
        relation = "" if inside[row] else "at most "
        raise UserError(
            f"{where}, token {row}: the log-probability of the next token (id"
            f" {following[row]}) is {observed[row]:.3g}, but by the top-k ids it is {relation}"
            f"{expected[row]:.3g}: {CAUSES}"
        )


class ShiftCheck:
    """Checks whether the rows of a capture are shifted. Rows must not predict the token itself, or
    the token after the next, much better than the next token."""

    def __init__(self) -> None:
        self._sums = np.zeros((2, 2))  # for both other tokens: differences, their squares
        self._count = 0

    def add(self, ids: Array, best: Array, logprobs: Floats, rest: Floats, vocabulary: int) -> None:
        """Add the rows of a sample.

        ids: its tokens [T].
        best, logprobs: the best ids of the next token and their log-probabilities [T,K].
        rest: the log of the remaining probability [T].
        vocabulary: number of ids.
        """
        if len(ids) < 3:
            return
        # A log-probability may be -inf; the differences below must stay finite.
        lowest = -np.log(1e4 * vocabulary)
        # The capture does not show how the remaining probability is distributed: all ids outside
        # the top K get equal shares.
        outside = np.maximum(rest - np.log(max(1, vocabulary - best.shape[1])), lowest)[:-2]
        scores = []
        # The next token comes first: the token itself and the token after the next are compared
        # with it. The last two rows have no token after the next, and are left out.
        for shift in (1, 0, 2):
            tokens = ids[shift : len(ids) - 2 + shift]
            inside, bound = logprob_bounds(tokens, best[:-2], logprobs[:-2])
            scores.append(np.where(inside, np.maximum(bound, lowest), outside))
        for number, score in enumerate(scores[1:]):
            # float64: the variance below is a difference of two large sums.
            better = (score - scores[0]).astype(np.float64)
            self._sums[number] += better.sum(), np.square(better).sum()
        self._count += len(ids) - 2

    def check(self, source: object) -> None:
        """Raise UserError if the rows are shifted."""
        if self._count < ROWS:
            return
        mean, squares = (self._sums / self._count).T
        error = np.sqrt(np.maximum(squares - mean**2, 0) / self._count)
        for better, token in zip(
            (mean > NATS) & (mean > SIGMAS * error),
            ("the token itself", "the token after the next"),
            strict=True,
        ):
            if better:
                raise UserError(
                    f"{source}: the logits give more probability to {token} than to the next token,"
                    " so they are shifted by one position; capture again, or shift the rows. If"
                    " the rows are correct, give the checkpoint as --model: its own rows are then"
                    " compared instead"
                )


def compare_with_model(
    capture: Capture, count: int, model: str, check: Callable[[], object]
) -> str:
    """Run up to SAMPLES of the `count` texts of a capture through a model, and compare their rows;
    return a line about the agreement.

    check: called for each text; it may raise to stop. Raises UserError if rows differ by more than
        the precision of an engine, or if the model cannot be the captured one.
    """
    by = LOGITS if capture.contents.topk else STATES
    teacher = _load(model, capture.contents)
    numbers = set(np.linspace(0, count - 1, min(count, SAMPLES)).astype(int).tolist())
    compared: list[tuple[Sample, Floats]] = []
    for number, sample in enumerate(capture.samples()):
        check()
        if number in numbers:
            compared.append((sample, by.rows(sample, _ids(sample, teacher, model), teacher)))
    every = np.concatenate([rows for _, rows in compared])
    median = float(np.median(every))
    # `not <=` refuses NaN as well, which a model with NaN among its weights gives.
    if not median <= by.usual:
        raise UserError(
            f"--model {model}: the captured {by.plural} differ from its own by {median:.2g}"
            f" {by.unit} (median of {len(every):,} rows), expected {by.usual} at"
            f" most: this is not the captured model, or {by.reason}; give the checkpoint that the"
            " engine ran, or capture again"
        )
    for sample, rows in compared:
        if (bad := ~(rows <= max(by.outlier, TIMES * median))).any():
            raise UserError(
                f"{sample.where}, token {bad.argmax()}: compared with {model},"
                f" {counted(int(bad.sum()), 'row')} of this text are off by up to"
                f" {rows.max():.2g} {by.unit}, and the median row by {median:.2g}: {OTHER_TOKENS};"
                " capture again"
            )
    return (
        f"proof     {counted(len(every), 'row')} of {counted(len(compared), 'text')} agree with"
        f" {model}: within {median:.2g} {by.unit} (median), {every.max():.2g} at most"
    )


def _load(model: str, contents: CaptureContents) -> Any:
    from teachonce.checkpoints.names import resolve_teacher
    from teachonce.teacher_dump.comparison.rerun import states_option
    from teachonce.teacher_dump.teacher.loading import load_teacher
    from teachonce.training.device import resolved_device, resolved_precision

    device = resolved_device("auto")
    # On a CPU float32, against which LOGITS and STATES were measured.
    precision = resolved_precision("auto", device) if device != "cpu" else "fp32"
    try:
        teacher = load_teacher(
            resolve_teacher(model),
            head="causal" if contents.topk else "none",
            hidden=states_option(contents.hidden),
            attention="none",
            device=device,
            precision=precision,
        )
    except UserError as error:
        raise UserError(f"--model: {error}") from error
    if contents.width not in (None, teacher.width):
        raise UserError(
            f"--model {model}: has hidden size {teacher.width}, and the captured states"
            f" {contents.width}; give the model that was captured"
        )
    return teacher


def _ids(sample: Sample, teacher: Any, model: str) -> Array:
    """Return the token ids of a sample [T], truncated to the longest input of the teacher. Raises
    UserError if one of them, or of their top-k ids, is beyond the teacher's vocabulary."""
    assert sample.ids is not None
    ids = sample.ids[: teacher.max_length() or len(sample.ids)]
    largest = int(ids.max())
    if (topk := sample.rows().topk) is not None:
        best, logprobs = (values[: len(ids)] for values in topk)
        largest = max(largest, int(best[~np.isneginf(logprobs)].max()))
    if largest >= teacher.vocabulary:
        raise UserError(
            f"--model {model}: has a vocabulary of {teacher.vocabulary:,}, and {sample.where} the"
            f" id {largest:,}; give the model that was captured"
        )
    return ids.copy()  # torch reads only arrays that can be written


def _of_states(sample: Sample, ids: Array, teacher: Any) -> Floats:
    """Return for each token |captured - teacher| / |teacher|, in Euclidean norms, for the layer
    that differs most: [T]."""
    live = teacher.run(ids[None], np.ones((1, len(ids)), bool)).hidden
    errors = []
    for name, states in sample.rows().hidden.items():
        teacher_states = live[name][0].cpu().numpy()
        size = np.maximum(np.linalg.norm(teacher_states, axis=1), 1e-9)
        errors.append(np.linalg.norm(states[: len(ids)] - teacher_states, axis=1) / size)
    return np.max(errors, axis=0)  # type: ignore[no-any-return]


def _of_logits(sample: Sample, ids: Array, teacher: Any) -> Floats:
    """Return for each row the mean absolute difference between captured and teacher's
    log-probabilities, weighted by the captured probabilities: [T]."""
    import torch

    topk = sample.rows().topk
    assert topk is not None
    best, logprobs = (values[: len(ids)] for values in topk)
    there = ~np.isneginf(logprobs)
    with torch.inference_mode():
        inputs = teacher.run(ids[None], np.ones((1, len(ids)), bool)).head_input
        live = [
            raw.log_softmax(-1)
            .gather(1, torch.from_numpy(np.where(there, best, 0)[chunk]).to(raw.device))
            .cpu()
            .numpy()
            for chunk, raw in teacher.decoder.logits(inputs[0])
        ]
    mass = np.exp(logprobs)
    error = np.abs(np.where(there, np.concatenate(live) - logprobs, 0))
    mean_error: Floats = (mass * error).sum(axis=1) / mass.sum(axis=1)
    return mean_error


@dataclass(frozen=True)
class RowComparison:
    """Compares captured rows with the rows of a model.

    plural, unit, reason: for messages.
    usual: the largest accepted difference of the median row. outlier: that of any row.
    rows: `rows(sample, ids, teacher)` returns the difference of each row [T].
    """

    plural: str
    unit: str
    usual: float
    outlier: float
    reason: str
    rows: Callable[[Sample, Array, Any], Floats]


# Measured on SmolLM2-135M against float32: bfloat16 differs by .028 nats on average and .16 at
# most, 3 % of noise on the weights by .18. 64 rows after the prefix of another text differ by .94
# on average, rows of another text by 7.4.
SHIFTED = "the rows are shifted"
LOGITS = RowComparison("log-probabilities", "nats", 0.15, 0.4, SHIFTED, _of_logits)
# Measured as above, on layers 2, 15, 27 and 30: bfloat16 differs by .013 (median) and .14 at most,
# 3 % of noise by .1. States after the prefix of another text differ by .3 (median), states of the
# previous token by .9.
LAYERS = f"the states are of other layers (--layers), or {SHIFTED}"
STATES = RowComparison("states", "of their length", 0.05, 0.2, LAYERS, _of_states)
