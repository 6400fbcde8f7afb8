"""Time, size and loss of the two commands on real text, as a user types them.

    python -m benchmarks.speed.main_job --model DIR --corpus TEXT --work DIR

Everything is at its default but what is named; the same student without the teacher is trained for
comparison. What is finished in --work is not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.common.results import NOVELS, RESULTS, TEACHER, publish, table, whole_size
from teachonce.store import open_store
from teachonce.support.console import command_errors

HEAD = ("", "minutes", "MB on disk", "parameters, M", "MLM nats/token", "MLM nats/character")
STUDENTS = {"distilled": (), "MLM only": ("--loss", "mlm=1")}


def command(module: str, *words: str | Path) -> float:
    """Run the `main` of a module in a process of its own; the minutes it took."""
    begun = time.perf_counter()
    call = f"from {module} import main; main()"
    subprocess.run([sys.executable, "-c", call, *map(str, words)], check=True)
    return (time.perf_counter() - begun) / 60


def train(store: Path, out: Path, words: tuple[str | Path, ...]) -> dict[str, Any]:
    """training.json of a student."""
    if not (out / "model.safetensors").exists():
        command("teachonce.student_train.cli", "--store", store, "--out", out, *words)
    report: dict[str, Any] = json.loads((out / "training.json").read_text())
    return report


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=TEACHER)
@click.option("--corpus", type=click.Path(path_type=Path), default=NOVELS)
@click.option("--limit", default=500_000, help="Tokens of the corpus.")
@click.option("--student", default="tiny")
@click.option("--vocab", default="5k")
@click.option("--title", default="The main job", help="Of the section of RESULTS.md.")
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    model: Path,
    corpus: Path,
    limit: int,
    student: str,
    vocab: str,
    title: str,
    work: Path,
    results: Path,
) -> None:
    """Dump, train both students, print the table and put it into RESULTS.md."""
    work.mkdir(parents=True, exist_ok=True)
    store, took = work / "store.zarr", work / "minutes.json"
    if not took.exists():
        words = ("--model", model, "--corpus", corpus, "--limit", str(limit), "--out", store)
        took.write_text(json.dumps(command("teachonce.teacher_dump.cli", *words)))
    meta = open_store(store).meta
    minutes = float(json.loads(took.read_text()))
    rows: list[list[object]] = [["dump", minutes, whole_size(store) / 1e6, "", "", ""]]
    settings: dict[str, Any] = {}
    for name, losses in STUDENTS.items():
        out = work / name.replace(" ", "-")
        report = train(store, out, ("--student", student, "--vocab", vocab, *losses))
        result, settings = report["result"], report["settings"]
        rows.append(
            [
                name,
                result["seconds"] / 60,
                (out / "model.safetensors").stat().st_size / 1e6,
                result["parameters"] / 1e6,
                result["valid_mlm"],
                result["valid_mlm_per_character"],
            ]
        )
    publish(
        title,
        f"`python -m benchmarks.speed.main_job`; teacher {model.name}, {meta['tokens']:,} tokens of"
        f" {corpus.name} ({whole_size(store) / meta['tokens']:.0f} bytes a token, the teacher's"
        f" weights included), students {student} with {vocab} WordPiece, {settings['epochs']:g}"
        f" epochs in batches of {settings['batch_tokens']} tokens, lr {settings['lr']:.2g}; losses"
        " on the held-out part of the store, of the student's own tokens.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
