"""Memory and time of a student's step on long texts, whole and in parts.

    python -m benchmarks.speed.long_batches [--model DIR]

Texts of random pieces, all of one length; forward and backward pass of `modernbert:tiny` in bf16.
Each figure is of a process of its own.
"""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path
from unittest import mock

import click
import torch

from benchmarks.common.interleaved import Figures, interleaved, peak_memory
from benchmarks.common.results import RESULTS, publish, table
from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.train import forward_pass as room
from teachonce.student_train.train.forward_pass import HELD, forward_pass
from teachonce.support.console import command_errors

SIZES = ((128, 64), (128, 128), (128, 256), (64, 512))
WHOLE = 2**60
HEAD = ("texts", "tokens of each", "whole, GB", "in parts, GB", "times the seconds")


def step(model: str, texts: int, length: int, held: int, steps: int) -> Figures:
    """Take steps, and tell what memory they took beyond that of the libraries, and the seconds of
    a processor for each."""
    from transformers import AutoTokenizer

    from teachonce.checkpoints.names import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model).path_or_id)
    student = make_student("modernbert:tiny", tokenizer, length)
    student.set_attn_implementation("eager")
    present = torch.ones(texts, length, dtype=torch.bool)
    ids = torch.randint(len(tokenizer), present.shape)
    before, begun = peak_memory(), resource.getrusage(resource.RUSAGE_SELF)
    with mock.patch.object(room, "HELD", held):
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward_pass(student, Inputs(ids, present)).last.float().square().mean()
            loss.backward()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    seconds = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
    return {"memory": (peak_memory() - before) / 1024, "seconds": seconds / steps}


def rows(model: str, sizes: tuple[tuple[int, int], ...], repeats: int) -> list[list[object]]:
    """A row for each size of a batch."""
    found: list[list[object]] = []
    for texts, length in sizes:
        ways = {
            name: partial(step, model, texts, length, held, 2)
            for name, held in (("whole", WHOLE), ("parts", HELD))
        }
        figures = interleaved(ways, repeats)
        whole, parts = figures["whole"], figures["parts"]
        found.append(
            [
                *(texts, length),
                *(f"{each['memory']:.1f}" for each in (whole, parts)),
                f"{parts['seconds'] / whole['seconds']:.2f}",
            ]
        )
    return found


@click.command()
@click.option("--model", default="minilm", help="Whose tokenizer the student has.")
@click.option("--repeats", default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(model: str, repeats: int, results: Path) -> None:
    """Print the table and put it into RESULTS.md."""
    told = (
        f"`python -m benchmarks.speed.long_batches`; forward and backward pass of modernbert:tiny,"
        f" bf16 and eager attention; memory beyond that of libraries and weights,"
        f" seconds of a processor; medians of {repeats} interleaved runs. A part is of at most"
        f" {HELD / 2**30:g} GiB by the count of `bytes_of_text`."
    )
    publish("Batches of long texts", told, table(HEAD, rows(model, SIZES, repeats)), results)


if __name__ == "__main__":
    main()
