"""Combines several teachers into one for `--combine outputs`: the mean of their states and maps,
and the geometric mean of their distributions, which is the softmax of the mean logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from teachonce.student_train.data.batch import Distillation, Runs, StudentBatch
from teachonce.student_train.data.targets import TaskTargets
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
        normalised=_means([each.normalised for each in teachers]),
        states=_means([each.states for each in teachers]),
        sentences=_means([each.sentences for each in teachers]),
        raw_sentences=_means([each.raw_sentences for each in teachers]),
        maps=_means([each.maps for each in teachers]),
    )


def _mean_shared(teachers: Sequence[Distillation]) -> SharedTargets | None:
    """Average the logits of all shared pieces, which are the same pieces for every teacher."""
    targets = [each.shared for each in teachers if each.shared is not None]
    if not targets:
        return None
    return replace(targets[0], logits=torch.stack([each.logits for each in targets]).mean(dim=0))


def _means(values: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in values]).mean(dim=0) for name in values[0]}


def _mean_task(teachers: Sequence[Distillation]) -> TaskTargets | None:
    tasks = [each.task for each in teachers if each.task is not None]
    if not tasks:
        return None
    logits = [each.logits for each in tasks if each.logits is not None]
    return replace(tasks[0], logits=torch.stack(logits).mean(dim=0) if logits else None)


def _mean_logits(
    teachers: Sequence[Distillation], pieces: int
) -> tuple[Runs | None, LogitTargets | None]:
    """Combine the logit targets of the runs for which every teacher has targets. A teacher has none
    for a run if it stored no piece of the student's vocabulary."""
    runs = [each.logit_runs for each in teachers if each.logit_runs is not None]
    targets = [each.logits for each in teachers if each.logits is not None]
    # Without logit targets, `shared` determines the runs, the same for every teacher.
    if not targets:
        return next(iter(runs), None), None
    # The first student token identifies a run, as each teacher leaves out other runs.
    begins = [each.member[each.begin] for each in runs]
    common = reduce(lambda one, two: one[torch.isin(one, two)], begins)
    chosen = [torch.isin(each, common) for each in begins]
    rows = [_select(each, where) for each, where in zip(targets, chosen, strict=True)]
    mean = geometric_mean(rows, pieces)
    if isinstance(rows[0], NextTargets):  # the next piece is the text's, whoever the teacher is
        mean = NextTargets(**vars(mean), following=rows[0].following)
    return runs[0].select(chosen[0]), mean


def _select(targets: LogitTargets, where: Tensor) -> LogitTargets:
    return type(targets)(*(value[where] for value in vars(targets).values()))


def geometric_mean(targets: Sequence[LogitTargets], pieces: int) -> LogitTargets:
    """Return the normalised geometric mean of several distributions [G,K] over `pieces` pieces.

    The result has every piece that any teacher stored. A teacher that did not store a piece is
    assumed to give it an even share of its remaining probability. All other pieces are one more
    outcome. The log-partition is chosen so that log-probability + log-partition is the mean of the
    logits.
    """
    ids = torch.cat([each.ids for each in targets], dim=1)
    new = []
    for number, each in enumerate(targets):
        # A row of `LogitTargets` must not repeat a piece: only the first teacher's slot stays
        # valid.
        met = [_log_probabilities(before, each.ids)[0] for before in targets[:number]]
        new.append(reduce(lambda valid, one: valid & ~one, met, each.valid))
    valid = torch.cat(new, dim=1)
    shares = [_share(each, pieces) for each in targets]
    logs = []
    for each, share in zip(targets, shares, strict=True):
        stored, values = _log_probabilities(each, ids)
        logs.append(torch.where(stored, values, share[:, None]))
    means = torch.stack(logs).mean(dim=0).masked_fill(~valid, -torch.inf)
    others = (pieces - valid.sum(dim=1)).clamp(min=0).log()
    rest = torch.stack(shares).mean(dim=0) + others
    total = torch.cat([means, rest[:, None]], dim=1).logsumexp(dim=1)
    partition = torch.stack([each.log_partition for each in targets]).mean(dim=0) + total
    return LogitTargets(ids, means - total[:, None], valid, rest - total, partition)


def _share(targets: LogitTargets, pieces: int) -> Tensor:
    """Return the log [G] of an even share of a teacher's remaining probability."""
    # At least 1: if all pieces are stored, the log of 0 would make the share infinite.
    others = (pieces - targets.valid.sum(dim=1)).clamp(min=1)
    return targets.rest.clamp(min=LEAST) - others.log()


def _log_probabilities(targets: LogitTargets, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Look up pieces [G,S]: whether the teacher stored them, and their log-probabilities [G,S]."""
    # An invalid slot repeats the id of a valid piece, and must not be found in its place.
    none = torch.iinfo(torch.int64).max
    own, order = targets.ids.masked_fill(~targets.valid, none).sort(dim=1)
    place = torch.searchsorted(own, ids).clamp(max=own.shape[1] - 1)
    stored = own.gather(1, place) == ids
    return stored, targets.logprobs.gather(1, order.gather(1, place)).clamp(min=LEAST)
