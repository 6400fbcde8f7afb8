"""Combines several teachers into one for `--combine outputs`: the mean of their states and maps,
and the geometric mean of their distributions, which is the softmax of the mean logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from teachonce.student_train.data.batch import Distillation, Runs, StudentBatch
from teachonce.student_train.data.task_targets import TaskTargets
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.student_train.losses.next_token import NextTargets

# Log probability of a piece that a teacher gives no probability: -inf would make every mean -inf.
LEAST = -40.0


def combine_teachers(batches: Sequence[StudentBatch], pieces: int) -> StudentBatch:
    """Combine the batches of several teachers of the same text into one.

    pieces: the size of the teachers' vocabulary. The batches must be on their device, and have the
        same texts, masks and features; `plan/checks.py` has verified this.
    """
    aligned = {
        name: _combine([batch.aligned[name] for batch in batches], pieces)
        for name in batches[0].aligned
    }
    return replace(batches[0], aligned=aligned)


def _combine(teachers: Sequence[Distillation], pieces: int) -> Distillation:
    runs, logits = _mean_logits(teachers, pieces)
    return replace(
        teachers[0],
        logit_runs=runs,
        logits=logits,
        shared=_mean_shared(teachers),
        task=_mean_task(teachers),
        decoded={
            side: _means([teacher.decoded[side] for teacher in teachers])
            for side in teachers[0].decoded
        },
    )


def _mean_shared(teachers: Sequence[Distillation]) -> SharedTargets | None:
    """Average the logits of all shared pieces, which are the same pieces for every teacher; None if
    no loss reads them."""
    targets = [teacher.shared for teacher in teachers if teacher.shared is not None]
    if not targets:
        return None
    return replace(targets[0], logits=torch.stack([t.logits for t in targets]).mean(dim=0))


def _means(values: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([t[name] for t in values]).mean(dim=0) for name in values[0]}


def _mean_task(teachers: Sequence[Distillation]) -> TaskTargets | None:
    tasks = [teacher.task for teacher in teachers if teacher.task is not None]
    if not tasks:
        return None
    logits = [task.logits for task in tasks if task.logits is not None]
    return replace(tasks[0], logits=torch.stack(logits).mean(dim=0) if logits else None)


def _mean_logits(
    teachers: Sequence[Distillation], pieces: int
) -> tuple[Runs | None, LogitTargets | None]:
    """Combine the logit targets of the runs for which every teacher has targets. A teacher has none
    for a run if it stored no piece of the student's vocabulary. Runs and targets are None if no
    loss reads them."""
    runs = [teacher.logit_runs for teacher in teachers if teacher.logit_runs is not None]
    targets = [teacher.logits for teacher in teachers if teacher.logits is not None]
    # Without logit targets, `shared` determines the runs, the same for every teacher.
    if not targets:
        return next(iter(runs), None), None
    # The first student token identifies a run, as each teacher leaves out other runs.
    begins = [r.member[r.begin] for r in runs]
    common = reduce(lambda one, two: one[torch.isin(one, two)], begins)
    is_common = [torch.isin(begin, common) for begin in begins]
    rows = [_select(t, keep) for t, keep in zip(targets, is_common, strict=True)]
    mean = geometric_mean(rows, pieces)
    if isinstance(rows[0], NextTargets):  # the next piece is the text's, whoever the teacher is
        mean = NextTargets(**vars(mean), following=rows[0].following)
    return runs[0].select(is_common[0]), mean


def _select(targets: LogitTargets, keep: Tensor) -> LogitTargets:
    return type(targets)(*(value[keep] for value in vars(targets).values()))


def geometric_mean(targets: Sequence[LogitTargets], pieces: int) -> LogitTargets:
    """Return the normalised geometric mean of several distributions [G,K] over `pieces` pieces.

    The result has every piece that any teacher stored. A teacher that did not store a piece is
    assumed to give it an even share of its remaining probability. All other pieces are one more
    outcome. The log-partition is chosen so that log-probability + log-partition is the mean of the
    logits.
    """
    ids = torch.cat([teacher.ids for teacher in targets], dim=1)
    firsts = []
    for number, teacher in enumerate(targets):
        # A row of `LogitTargets` must not repeat a piece: only the first teacher's slot stays
        # valid.
        repeated = [_log_probabilities(earlier, teacher.ids)[0] for earlier in targets[:number]]
        firsts.append(reduce(lambda valid, one: valid & ~one, repeated, teacher.valid))
    valid = torch.cat(firsts, dim=1)
    shares = [_even_share(teacher, pieces) for teacher in targets]
    logs = []
    for teacher, share in zip(targets, shares, strict=True):
        stored, values = _log_probabilities(teacher, ids)
        logs.append(torch.where(stored, values, share[:, None]))
    means = torch.stack(logs).mean(dim=0).masked_fill(~valid, -torch.inf)
    log_unstored = (pieces - valid.sum(dim=1)).clamp(min=0).log()
    rest = torch.stack(shares).mean(dim=0) + log_unstored
    total = torch.cat([means, rest[:, None]], dim=1).logsumexp(dim=1)
    partition = torch.stack([teacher.log_partition for teacher in targets]).mean(dim=0) + total
    return LogitTargets(ids, means - total[:, None], valid, rest - total, partition)


def _even_share(targets: LogitTargets, pieces: int) -> Tensor:
    """Return the log-probability [G] of each piece that a teacher did not store: its remaining
    probability, divided evenly among them. pieces: the size of the vocabulary."""
    # At least 1: if all pieces are stored, the log of 0 would make the share infinite.
    unstored = (pieces - targets.valid.sum(dim=1)).clamp(min=1)
    return targets.rest.clamp(min=LEAST) - unstored.log()


def _log_probabilities(targets: LogitTargets, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Look up the pieces `ids` [G,S]. Return bool [G,S], which of them the teacher stored, and
    their log-probabilities [G,S]."""
    # An invalid slot repeats the id of a valid piece, and must not be found in its place.
    none = torch.iinfo(torch.int64).max
    stored_ids, order = targets.ids.masked_fill(~targets.valid, none).sort(dim=1)
    position = torch.searchsorted(stored_ids, ids).clamp(max=stored_ids.shape[1] - 1)
    stored = stored_ids.gather(1, position) == ids
    return stored, targets.logprobs.gather(1, order.gather(1, position)).clamp(min=LEAST)
