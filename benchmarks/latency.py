"""Size, time and memory of the students of the five sources, compared with their teachers.

    python -m benchmarks.latency

Time and memory do not depend on the values of the weights, which are random.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks.common.results import publish, results_option, table
from harness.processes import in_own_process
from teachonce.support.console import command_errors

Model = tuple[str, int]  # shape, pieces
TINY, BASE = "bert:264x3x12x792", "bert:768x12x12"
TEACHER = (BASE, 119_547)
STUDENTS = (
    *((TINY, pieces) for pieces in (5_000, 10_000, 20_000, 30_000)),
    *((f"bert:768x{layers}x12", 119_547) for layers in (2, 6)),
)
# Table 3 of Kolesnikova et al. 2022: parameters in millions, MiB on disk
# ("MB": the teacher's 679 are 178M numbers of 4 bytes), and of 16 x 512 tokens the
# milliseconds on a CPU (i7-7700K) and on a GPU (GTX 1080 Ti).
PUBLISHED = {
    TEACHER: (177.9, 679, 5283.2, 186.6),
    ("bert:768x6x12", 119_547): (135.5, 517, 2335.4, 55.3),
    ("bert:768x2x12", 119_547): (107.1, 409, 802.4, 1.5),
    (TINY, 30_000): (10.4, 41, 374.7, 2.0),
    (TINY, 20_000): (7.6, 30, 357.6, 1.9),
    (TINY, 10_000): (5.0, 19, 356.5, 1.8),
    (TINY, 5_000): (3.6, 14, 354.9, 1.8),
}
# The other sources: the teacher, then students with the published figures: ratio of parameters
# (teacher to student), MB on disk, and speedup for a sentence and for a batch.
OTHERS: dict[str, tuple[Model, dict[Model, tuple[str, ...]]]] = {
    "Mukherjee & Awadallah 2019, Table 7": (
        (BASE, 30_522),
        {("bilstm:300,600", 30_522): ("8.5", "", "", "")},
    ),
    "TinyMBERT, section 6.2": (
        TEACHER,
        {("bilstm:50,200", 119_547): ("35", "", "17 (Xeon)", "51 (P100)")},
    ),
    "Zhao et al. 2021, Table 2": (
        (BASE, 30_522),
        {
            ("bert:96x6x4", 5_000): ("30", "below 10", "57 (phone)", ""),
            ("bert:192x6x4", 5_000): ("", "", "", ""),
            ("bert:256x6x4", 5_000): ("", "", "", ""),
        },
    ),
    "SlovakBERT thesis, Tables 5.1 to 5.3": (
        (BASE, 50_264),
        {
            ("bert:768x6x12", 50_264): ("1.5", "313", "1.5", "1.5"),
            ("bert:768x4x12", 50_264): ("1.9", "260", "1.9", "1.9"),
        },
    ),
}
SHORT = ("--batch-size", "32", "--max-length", "32")  # the batch of TinyMBERT
POSITIONS = 512
MIB = 2**20
HEAD = (
    "", "pieces", "parameters, M", "times fewer", "MiB on disk",
    "batch, ms", "times as fast", "batch, memory, MB", "times less",
    "sentence, ms", "times as fast", "sentence, memory, MB", "times less",
)  # fmt: skip
COMPARED_HEAD = (
    "", "pieces", "parameters, M", "published", "MiB on disk", "published", "CPU, ms", "published",
    "times as fast", "published", "GPU, ms", "published", "times as fast", "published",
)  # fmt: skip
OF_OTHERS = (
    "source", "student", "pieces", "parameters, M", "times fewer", "published", "MiB on disk",
    "published", "sentence, times as fast", "published", "batch, times as fast", "published",
)  # fmt: skip
FIGURES = {"ms": 1.0, "memory_bytes": 1e6}  # by unit


def random_model(folder: Path, shape: str, pieces: int) -> Path:
    """Make a model of a shape, and a tokenizer with the given number of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from teachonce.student_train.model.kinds import make_student

    vocab = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, pieces)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]"
    )
    path = folder / f"{shape}-{pieces}".replace(":", "-")
    make_student(shape, tokenizer, POSITIONS).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def measured(models: list[Path], teacher: Path, size: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a row of `downstream --task speed` for each model, the teacher last."""
    flags = [word for model in models for word in ("--model", model)]
    with tempfile.TemporaryDirectory() as out:
        arguments = ("--task", "speed", *flags, "--teacher", teacher, *size, "--out", out)
        in_own_process("teachonce.downstream.cli", *arguments)
        rows: list[dict[str, Any]] = json.loads((Path(out) / "scores.json").read_text())["models"]
    return rows


def row(shape: str, pieces: int, scores: dict[str, Any]) -> list[object]:
    """Return the figures of `downstream --task speed` on a CPU, each with its ratio to the
    teacher's."""
    ratio = scores.get("ratio", {"parameters": 1.0, "cpu": {}})
    cells = [shape, f"{pieces:,}", scores["parameters"] / 1e6, ratio["parameters"]]
    cells.append(scores["disk_bytes"] / MIB)
    for inputs, (figure, unit) in product(("batch", "sentence"), FIGURES.items()):
        name = f"{inputs}_{figure}"
        value = scores["cpu"][name]  # None if the system does not report it
        cells += [value / unit, ratio["cpu"].get(name, 1.0)] if value else ["", ""]
    return cells


def compared_row(shape: tuple[str, int], scores: dict[str, Any]) -> list[object]:
    """Return the figures of a batch and the published ones, times also over the teacher's."""
    reference: tuple[float | str, ...] = PUBLISHED.get(shape, ("",) * 4)
    parameters, disk, *times = reference
    cells: list[object] = [shape[0], f"{shape[1]:,}", scores["parameters"] / 1e6, parameters]
    cells += [scores["disk_bytes"] / MIB, disk]
    for device, published, teacher in zip(
        ("cpu", "cuda"), times, PUBLISHED[TEACHER][2:], strict=True
    ):
        ours = scores.get(device, {}).get("batch_ms", "")
        ratio = scores.get("ratio", {}).get(device, {}).get("batch_ms", 1.0 if ours else "")
        cells += [ours, published, ratio, float(teacher) / float(published) if published else ""]
    return cells


def row_of_other(source: str, model: Model, reference: Sequence[str], scores: Any) -> list[object]:
    """Return the figures of a student of another source, each with the published one."""
    ratio = scores["ratio"]
    cells = [ratio["parameters"], reference[0], scores["disk_bytes"] / MIB, reference[1]]
    for inputs, published in zip(("sentence", "batch"), reference[2:], strict=True):
        cells += [ratio["cpu"][f"{inputs}_ms"], published]
    return [source, model[0], f"{model[1]:,}", scores["parameters"] / 1e6, *cells]


def rows_of_others(folder: Path) -> list[list[object]]:
    """Measure the students of the other sources, each with its source's teacher."""
    rows = list[list[object]]()
    for source, (teacher, students) in OTHERS.items():
        models = [random_model(folder, *model) for model in (*students, teacher)]
        scores = measured(models[:-1], models[-1], SHORT)
        rows += [
            row_of_other(source, model, published, s)
            for (model, published), s in zip(students.items(), scores[:-1], strict=True)
        ]
    return rows


@click.command()
@click.option("--batch-size", default=16)
@click.option("--length", type=click.IntRange(32, POSITIONS), default=POSITIONS)
@results_option
@command_errors
def main(batch_size: int, length: int, results: Path) -> None:
    """Time all models in turn, and write the tables."""
    with tempfile.TemporaryDirectory() as folder:
        teacher, *students = (random_model(Path(folder), *model) for model in (TEACHER, *STUDENTS))
        size = ("--batch-size", str(batch_size), "--max-length", str(length))
        scores = measured(students, teacher, size)
        other_rows = rows_of_others(Path(folder))
    shapes = (*STUDENTS, TEACHER)
    rows = [row(*shape, s) for shape, s in zip(shapes, scores, strict=True)]
    settings = (
        "`python -m benchmarks.latency`. Encoders with random weights, float32 on a CPU, measured"
        f" by `downstream --task speed`: batches of {batch_size} x {length} tokens and single"
        " sentences of 32 tokens, medians of 5 runs in turn. Memory is the size of the weights plus"
        " the peak memory of the batch or sentence. The first row is the teacher, of"
        f" rubert-base-cased's size; `bert:tiny` is {TINY}."
    )
    tables = [table(HEAD, rows[-1:] + rows[:-1])]
    if (batch_size, length) == (16, POSITIONS):
        compared = [compared_row(shape, s) for shape, s in zip(shapes, scores, strict=True)]
        tables += [
            "Batches, compared with Table 3 of Kolesnikova et al. 2022 (i7-7700K, GTX 1080 Ti):",
            table(COMPARED_HEAD, compared[-1:] + compared[:-1]),
        ]
    tables += [
        "Students of the other sources with their own teachers; batches of 32 x 32 tokens:",
        table(OF_OTHERS, other_rows),
    ]
    publish("Size and latency of students", settings, "\n\n".join(tables), results)


if __name__ == "__main__":
    main()
