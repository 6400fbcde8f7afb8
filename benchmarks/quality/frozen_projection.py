"""Why a frozen projection of states does as well as a trained one: what students keep of a teacher.

    python -m benchmarks.quality.frozen_projection --work DIR [--seeds N]

DIR is that of `benchmarks.reproduce`, whose students of `kolesnikova` are taken, with their scores.
Kolesnikova et al. 2022 (section 4.2) find frozen random projections better than trained ones and
call it not expected. Measured on text held out of the training, of tokens that cover the same
characters: how many directions the states of a student really use, how much of the teacher's states
the best linear map finds in them, and how much the projection that was trained with them finds.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import click
import numpy as np
import torch
from transformers import AutoModelForMaskedLM

from benchmarks.common.results import RESULTS, mean_and_deviation, publish, table
from benchmarks.reproduce import kolesnikova
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import held_out
from teachonce.support.arrays import Array, Floats
from teachonce.support.console import command_errors
from teachonce.support.errors import UserError

ARMS = (
    "none", "MLM", "KL M", "KL+MSE MF", "KL+MSE MT", "KL+MSE RF", "KL+MSE RT",
    "MSE MF", "MSE MT", "MSE RF", "MSE RT", *kolesnikova.OF_CODE.values(),
)  # fmt: skip
LOSS = "hidden-raw-sum"  # of the arms with MSE
HELD_OUT = 0.1  # of the store: the students kept 2 % of it, too few to fit a map to
FOLDERS = {  # of the students, and of those that probes trained
    "400 steps": "",
    "1,600 steps": "probe--steps-1600",
    "256x3x4": "probe--student-modernbert:256x3x4",
}
HEAD = (
    "students", "arm", "MLM nats/character", "squared error at the end",
    "out of reach of a frozen one", "squared length of its states", "directions in use",
    "linear R2",
)  # fmt: skip


def directions(states: Array) -> float:
    """Return the effective rank of states [N,D]: exp of the entropy of the shares of the variance
    along the principal directions (Roy & Vetterli 2007)."""
    values = np.linalg.eigvalsh(np.cov(states, rowvar=False)).clip(0)
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def explained(own: Array, teacher: Array) -> float:
    """Return the share of the teacher's variance [N,T] that the best linear map from states [N,D]
    finds: fitted to the even rows, with a bias, and judged by the odd ones."""
    inputs = np.concatenate([own, np.ones((len(own), 1))], axis=1)
    weight = np.linalg.lstsq(inputs[::2], teacher[::2], rcond=None)[0]
    left, whole = teacher[1::2] - inputs[1::2] @ weight, teacher[1::2] - teacher[::2].mean(axis=0)
    return float(1 - (left**2).sum() / (whole**2).sum())


@torch.no_grad()
def both_states(folder: Path, store: FeatureStore) -> tuple[Floats, Floats]:
    """Return a student's states [N,D] and the teacher's [N,T], means of all layers, of the same
    characters."""
    options = TrainOptions(
        store=str(store.path),
        vocab=str(folder),
        loss={LOSS: 1.0},
        mask_prob=0.01,  # the least: what the student does not read it cannot tell
        steps=1,
        init="random",
        held_out=HELD_OUT,
    ).resolved()
    _, collator, _ = prepare(options, store)
    student = AutoModelForMaskedLM.from_pretrained(folder).eval()
    distiller = Distiller.of(student, options, store)
    own, teacher = list[Floats](), list[Floats]()
    plan = options.batch_plan(distiller.terms)
    for batch in held_out(store, collator, split_blocks(store, HELD_OUT)[1], plan):
        found = batch.to(torch.device("cpu"))
        (wanted,) = found.aligned.values()
        ((feature, states),) = wanted.states.items()
        read = distiller.encode(found.inputs).states[1:]
        own.append(wanted.runs.pool(distiller.counterpart(read, feature), "mean").numpy())
        teacher.append(states.numpy())
    return np.concatenate(own), np.concatenate(teacher)


def last_figure(folder: Path, name: str) -> float | None:
    """Read the last value of a figure in a student's metrics; None where it has none."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [float(line[name]) for line in lines if name in line]
    return found[-1] if found else None


def reachable(states: Array, width: int) -> float:
    """Return the share of the second moment of states [N,T] that a random map from `width` numbers
    can give at all: the part within a random subspace of so many directions."""
    random = np.random.default_rng(0).normal(size=(states.shape[1], width))
    basis, _ = np.linalg.qr(random)
    return float(((states @ basis) ** 2).sum() / (states**2).sum())


def row(arm: str, folders: list[Path], store: FeatureStore) -> list[object]:
    """Return the line of an arm: figures of its students, one for each seed."""
    both = [both_states(folder, store) for folder in folders]
    told = [[figure for f in folders if (figure := last_figure(f, name)) is not None]
            for name in ("valid_mlm_per_character", f"valid_{LOSS}")]  # fmt: skip
    own, teacher = both[0]
    return [
        arm,
        *(mean_and_deviation(values) if values else "" for values in told),
        f"{(teacher**2).sum(axis=1).mean() * (1 - reachable(teacher, own.shape[1])):.0f}",
        mean_and_deviation([float((states**2).sum(axis=1).mean()) for states, _ in both]),
        mean_and_deviation([directions(states) for states, _ in both]),
        mean_and_deviation([explained(*pair) for pair in both]),
    ]


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(work: Path, seeds: int, results: Path) -> None:
    """Measure what the students of `reproduce kolesnikova` keep of their teacher's states."""
    place, rows = work / "kolesnikova", []
    with closing(open_store(place / "plain.zarr")) as store:
        for about, folder in FOLDERS.items():
            for arm in ARMS:
                names = [f"{arm}-{seed}".replace(" ", "-") for seed in range(seeds)]
                folders = [place / folder / name for name in names]
                if all((each / "model.safetensors").exists() for each in folders):
                    rows.append([about, *row(arm, folders, store)])
                elif not folder:
                    raise UserError(
                        f"{folders[0]}: no such student; run first"
                        f" `python -m benchmarks.reproduce kolesnikova --work {work}`"
                    )
        teacher = both_states(place / "none-0", store)[1]
    settings = (
        f"`python -m benchmarks.quality.frozen_projection --seeds {seeds}`; students of"
        f" `{kolesnikova.MINIATURE.title}`, {HELD_OUT:.0%} of the store. The teacher's states use"
        f" {directions(teacher):.0f} directions of {teacher.shape[1]}, their squared length is"
        f" {(teacher**2).sum(axis=1).mean():.0f}. Out of reach: the part of it that a random map of"
        " the student's width cannot give, whatever the student learns."
    )
    publish("Why frozen projections do well", settings, table(HEAD, rows), results)


if __name__ == "__main__":
    main()
