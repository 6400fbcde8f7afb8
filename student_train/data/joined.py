"""One teacher made of several: their states and maps averaged, their distributions joined by a
geometric mean, which is the softmax of averaged logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from teachonce.student_train.data.batch import Distillation, Runs, StudentBatch
from teachonce.student_train.data.targets import TaskTargets
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets

LEAST = -40.0  # log probability: what a teacher keeps nothing of, for a mean that is finite


def joined(batches: Sequence[StudentBatch], pieces: int) -> StudentBatch:
    """Join the batches of several teachers of one text, which are on their device, into one.

    `pieces` is the size of the teachers' vocabulary. The agreement of texts, masks and features is
    not looked at; `plan/checks.py` has compared the stores.
    """
    aligned = {
        name: _joined([batch.aligned[name] for batch in batches], pieces)
        for name in batches[0].aligned
    }
    return replace(batches[0], aligned=aligned)


def _joined(taught: Sequence[Distillation], pieces: int) -> Distillation:
    runs, logits = _logits(taught, pieces)
    return replace(
        taught[0],
        logit_runs=runs,
        logits=logits,
        shared=_shared(taught),
        task=_task(taught),
        normalised=_means([each.normalised for each in taught]),
        states=_means([each.states for each in taught]),
        sentences=_means([each.sentences for each in taught]),
        raw_sentences=_means([each.raw_sentences for each in taught]),
        maps=_means([each.maps for each in taught]),
    )


def _shared(taught: Sequence[Distillation]) -> SharedTargets | None:
    """Average logits of all shared pieces, which are the same for all of the teachers."""
    targets = [each.shared for each in taught if each.shared is not None]
    if not targets:
        return None
    return replace(targets[0], logits=torch.stack([each.logits for each in targets]).mean(dim=0))


def _means(values: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in values]).mean(dim=0) for name in values[0]}


def _task(taught: Sequence[Distillation]) -> TaskTargets | None:
    tasks = [each.task for each in taught if each.task is not None]
    if not tasks:
        return None
    logits = [each.logits for each in tasks if each.logits is not None]
    return replace(tasks[0], logits=torch.stack(logits).mean(dim=0) if logits else None)


def _logits(taught: Sequence[Distillation], pieces: int) -> tuple[Runs | None, LogitTargets | None]:
    """Join the targets of the runs that all of the teachers have targets of: a run is left out
    where a teacher keeps no piece that the student has."""
    runs = [each.logit_runs for each in taught if each.logit_runs is not None]
    targets = [each.logits for each in taught if each.logits is not None]
    if not targets:
        return next(iter(runs), None), None
    begins = [each.member[each.begin] for each in runs]
    common = reduce(lambda one, two: one[torch.isin(one, two)], begins)
    chosen = [torch.isin(each, common) for each in begins]
    rows = [_rows(each, where) for each, where in zip(targets, chosen, strict=True)]
    return runs[0].chosen(chosen[0]), geometric_mean(rows, pieces)


def _rows(targets: LogitTargets, where: Tensor) -> LogitTargets:
    return LogitTargets(*(value[where] for value in vars(targets).values()))


def geometric_mean(targets: Sequence[LogitTargets], pieces: int) -> LogitTargets:
    """Join distributions [G,K] of several teachers over a vocabulary of `pieces`: at each piece the
    normalised geometric mean.

    All pieces count that one of the teachers keeps. A teacher that does not keep a piece gives it
    an even share of what it leaves over. The means of all other pieces become the rest. The
    log-partition is such that log-probability plus log-partition is the mean of the logits.
    """
    ids = torch.cat([each.ids for each in targets], dim=1)
    new = []
    for number, each in enumerate(targets):
        met = [_found(before, each.ids)[0] for before in targets[:number]]
        new.append(reduce(lambda valid, one: valid & ~one, met, each.valid))
    valid = torch.cat(new, dim=1)
    shares = [_share(each, pieces) for each in targets]
    logs = []
    for each, share in zip(targets, shares, strict=True):
        kept, values = _found(each, ids)
        logs.append(torch.where(kept, values, share[:, None]))
    means = torch.stack(logs).mean(dim=0).masked_fill(~valid, -torch.inf)
    others = (pieces - valid.sum(dim=1)).clamp(min=0).log()
    rest = torch.stack(shares).mean(dim=0) + others
    total = torch.cat([means, rest[:, None]], dim=1).logsumexp(dim=1)
    partition = torch.stack([each.log_partition for each in targets]).mean(dim=0) + total
    return LogitTargets(ids, means - total[:, None], valid, rest - total, partition)


def _share(targets: LogitTargets, pieces: int) -> Tensor:
    """Return the log [G] of an even share of what a teacher leaves over."""
    others = (pieces - targets.valid.sum(dim=1)).clamp(min=1)
    return (targets.rest.clamp(min=LEAST) - others.log()).clamp(min=LEAST - math.log(pieces))


def _found(targets: LogitTargets, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Tell which of the pieces [G,S] a teacher keeps, and their log-probabilities [G,S]."""
    none = torch.iinfo(torch.int64).max
    own, order = targets.ids.masked_fill(~targets.valid, none).sort(dim=1)
    place = torch.searchsorted(own, ids).clamp(max=own.shape[1] - 1)
    kept = own.gather(1, place) == ids
    return kept, targets.logprobs.gather(1, order.gather(1, place)).clamp(min=LEAST)
