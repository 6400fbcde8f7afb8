"""What K students cost from one dump, and with the teacher in memory.

    python -m benchmarks.economy [--corpus TEXT]

A dump, a student from it and a student with the teacher resident are measured in processes of their
own; K students are K times one. Libraries are loaded in each of them and are not counted.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.interleaved import Figures, interleaved
from benchmarks.report import NOVELS, RESULTS, TEACHER, publish, table
from benchmarks.teacher_gone import small_store, training
from store.console import command_errors
from student_train.options import TrainOptions, parse_losses

STUDENTS = (1, 4, 10)
EPOCHS = 10  # of a student
LOSS = "mlm=1,hidden=30"
HEAD = (
    "teacher",
    "dump, s",
    "a student, s",
    "with its teacher, s",
    *(f"K={k}" for k in STUDENTS),
    "K to infinity",
    "even at K",
)


def dumped(model: str, corpus: str, tokens: int) -> Figures:
    """Seconds of a dump, the teacher loaded before it."""
    from teacher_dump.teacher import load_teacher

    load_teacher(model, attention="none")
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        small_store(model, corpus, tokens, Path(folder) / "store.zarr")
        return {"seconds": time.perf_counter() - begun}


def of_bert_base_size(folder: Path, like: str) -> str:
    """An encoder of 12 layers, 768 wide, with random weights and another teacher's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from teacher_dump.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(like).path_or_id)
    BertModel(BertConfig(vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def measure(name: str, model: str, corpus: str, tokens: int, options: Any, repeats: int) -> Any:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.zarr"
        small_store(model, corpus, tokens, store)
        options = TrainOptions(str(store), **options).resolved()
        found = interleaved(
            {
                "dump": partial(dumped, model, corpus, tokens),
                "stored": partial(training, options, None),
                "resident": partial(training, options, model),
            },
            repeats,
        )
    steps = EPOCHS * tokens / options.batch_tokens
    dump = found["dump"]["seconds"]
    stored, resident = (steps * found[key]["seconds"] for key in ("stored", "resident"))
    ratios = [k * resident / (dump + k * stored) for k in STUDENTS]
    even = dump / (resident - stored) if resident > stored else float("inf")
    told = [f"{ratio:.2f}x" for ratio in (*ratios, resident / stored)]
    return [name, f"{dump:.1f}", f"{stored:.1f}", f"{resident:.1f}", *told, f"{even:.2f}"]


@click.command()
@click.option("--corpus", default=str(NOVELS) if NOVELS.exists() else "python-docs")
@click.option("--tokens", default=20_000)
@click.option("--student", default="128x2x2")
@click.option("--vocab", default="2k")
@click.option("--steps", default=10)
@click.option("--repeats", default=5)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    corpus: str,
    tokens: int,
    student: str,
    vocab: str,
    steps: int,
    repeats: int,
    results: Path,
) -> None:
    """Print the table and put it into RESULTS.md."""
    minilm = str(TEACHER) if TEACHER.exists() else "minilm"
    options = {
        "student": student,
        "vocab": vocab,
        "loss": parse_losses((LOSS,)),
        "steps": steps,
        "view": 0,
        "held_out": 0.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        base = of_bert_base_size(Path(folder), minilm)
        rows = [
            measure(name, model, corpus, tokens, options, repeats)
            for name, model in (("MiniLM, 6x384", minilm), ("BERT-base size, 12x768", base))
        ]
    publish(
        "Economy",
        f"`python -m benchmarks.economy`; {tokens:,} tokens, student {student}, {vocab} WordPiece,"
        f" {LOSS}, {EPOCHS} epochs; a student's time is that of its steps (medians of {repeats}"
        f" interleaved processes of {steps}); K=4: four students with the teacher in memory take so"
        " many times as long as a dump and four students from it.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
