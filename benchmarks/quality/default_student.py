"""Which student is the default: a BERT or a ModernBERT, by every job a student is trained for.

    python -m benchmarks.quality.default_student --work DIR [--ru TEACHER] [--seeds N]

Students of equal shape are trained by the default options, but for their kind, from an English and
a Russian masked LM (if one is given) and from an English embedder, with as many steps. What is
finished in --work is not made again.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.common.results import (
    NOVELS,
    RESULTS,
    SHARED,
    TEACHER,
    mean_and_deviation,
    publish,
    table,
)
from benchmarks.quality.embedding_peers import folder_of
from benchmarks.quality.embedding_students import (
    TABLES,
    correlations,
    dump_vectors,
    write_corpus,
)
from teachonce.checkpoints.embedders import Embedder
from teachonce.downstream.settings import FineTuneSettings, SpeedSettings
from teachonce.downstream.speed import measure_speed
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.fine_tune import fine_tune
from teachonce.downstream.tasks.tagging import PartsOfSpeech
from teachonce.downstream.tasks.task_interface import Task
from teachonce.student_export.job import export
from teachonce.student_export.options import ExportOptions
from teachonce.student_train.arguments import checked_from
from teachonce.student_train.output.run import run
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

KINDS = ("bert", "modernbert")
DATA = SHARED / "data"
TOKENS = 800_000  # of a masked LM's store
TEXTS = 50_000  # of an embedder's store
TUNED = FineTuneSettings(epochs=3, lr=5e-4, seeds=1, limit=3000)
LATENCY = SpeedSettings(max_length=128)


@dataclass(frozen=True)
class Language:
    """A masked LM's text, and the tables by which its students are judged after fine-tuning."""

    corpus: Path
    tags: str
    feelings: str

    def tasks(self) -> Mapping[str, tuple[Task, str]]:
        """Return the tasks by the name of their figure, each with the start of its files' names."""
        return {
            "POS accuracy": (PartsOfSpeech("count"), self.tags),
            "sentiment macro F1": (Classify(), self.feelings),
        }


LANGUAGES = {
    "en": Language(NOVELS, "pos/en_ewt", "classify/en_sst2"),
    "ru": Language(DATA / "text/ru_novels.txt", "pos/ru_grameval", "classify/ru_cedr"),
}


def files_of(start: str, work: Path) -> dict[str, Path]:
    """Return the files to train and to score on; of a single file every fifth line is to score."""
    files = {split: DATA / f"{start}.{split}.tsv" for split in ("train", "dev")}
    if files["dev"].exists():
        return files
    head, *lines = files["train"].read_text("utf-8").splitlines(True)
    name = Path(start).name
    parts = {"train": [x for n, x in enumerate(lines) if n % 5], "dev": lines[::5]}
    for split, some in parts.items():
        files[split] = work / f"{name}.{split}.tsv"
        files[split].write_text("".join([head, *some]), "utf-8")
    return files


def remembered(path: Path, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the figures in a file, which are measured if it is not there."""
    if not path.exists():
        path.write_text(json.dumps(measure()))
    found: dict[str, float] = json.loads(path.read_text())
    print(f"{path.parent.name} {path.stem}: {found}", flush=True)
    return found


def trained(store: Path, out: Path, student: str, seed: int, **length: float) -> dict[str, float]:
    """Train a student by the default options, unless it is finished; returns its report."""
    given = {"store": (str(store),), "out": out, "student": student, "vocab": "5k", "seed": seed}
    found: dict[str, float] = run(
        checked_from({**given, "cache": "ram", **length}), say=lambda line: None
    )["result"]
    return found


def of_language(name: str, store: Path, out: Path, student: str, seed: int) -> dict[str, float]:
    """Train a student of a masked LM, and fine-tune it for each task."""
    report = trained(store, out, student, seed, steps=1200)

    def measure() -> dict[str, float]:
        found = {"MLM nats/character": report["valid_mlm_per_character"]}
        for figure, (task, start) in LANGUAGES[name].tasks().items():
            files = files_of(start, out.parent)
            tuned = fine_tune(task, str(out), files, TUNED, say=lambda line: None)
            found[figure] = tuned["mean"]["dev"][tuned["primary"]]
        return found

    return remembered(out / "figures.json", measure)


def of_vectors(store: Path, out: Path, student: str, seed: int) -> dict[str, float]:
    """Train a student of an embedder, and score it on tables of similarity."""
    trained(store, out, student, seed, epochs=1.0)

    def measure() -> dict[str, float]:
        tables = [DATA / "sts" / f"{name}.tsv" for name in TABLES]
        scores = correlations(Embedder(str(out)), tables)
        return {"mean of STS tables": statistics.mean(scores)}

    return remembered(out / "figures.json", measure)


def latency(work: Path, shape: str) -> dict[str, dict[str, float]]:
    """Measure the first English student of both kinds side by side: sentences and batches in torch,
    sentences in ONNX and int8, in milliseconds."""
    folders = {kind: work / f"en-{kind}-{shape}-0" for kind in KINDS}
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    rows = measure_speed([*map(str, folders.values())], None, LATENCY, say=lambda line: None)
    for kind, row in zip(KINDS, rows["models"], strict=True):
        found[kind] = {
            "torch, a sentence, ms": row["cpu"]["sentence_ms"],
            "torch, a batch, ms": row["cpu"]["batch_ms"],
        }
        for name, quantize in (("ONNX", None), ("int8", "int8")):
            out = work / f"{kind}-{shape}-{name}"
            shutil.rmtree(out, ignore_errors=True)
            options = ExportOptions(folders[kind], out, to=("onnx",), quantize=quantize, least=0.01)
            (made,) = export(options, say=lambda line: None)
            milliseconds = made.figures.sentence_ms
            assert milliseconds is not None  # of a format that runs here
            found[kind][f"{name}, a sentence, ms"] = milliseconds
    return found


def rows_of(
    work: Path, stores: Mapping[str, Path], shapes: Sequence[str], seeds: int
) -> list[list[object]]:
    """Train, judge and time all students; a row for each figure of a shape."""
    rows = list[list[object]]()
    for shape, (name, store) in itertools.product(shapes, stores.items()):
        of_kind = dict[str, list[dict[str, float]]]()
        for kind, seed in itertools.product(KINDS, range(seeds)):
            out, student = work / f"{name}-{kind}-{shape}-{seed}", f"{kind}:{shape}"
            found = (
                of_vectors(store, out, student, seed)
                if name == "vectors"
                else of_language(name, store, out, student, seed)
            )
            of_kind.setdefault(kind, []).append(found)
        for figure in of_kind[KINDS[0]][0]:
            values = ([each[figure] for each in of_kind[kind]] for kind in KINDS)
            rows.append([shape, name, figure, *map(mean_and_deviation, values)])
    for shape in shapes:
        of_shape = latency(work, shape)
        for figure in of_shape[KINDS[0]]:
            times = (f"{of_shape[kind][figure]:.2f}" for kind in KINDS)
            rows.append([shape, "latency", figure, *times])
    return rows


def stores_of(work: Path, teachers: Mapping[str, Path], embedder: str) -> dict[str, Path]:
    """Dump the states of the masked LMs, and the vectors and states of the embedder."""
    stores = {}
    for name, teacher in teachers.items():
        stores[name] = work / f"{name}.zarr"
        corpus = (str(LANGUAGES[name].corpus),)
        options = DumpOptions(
            str(teacher), stores[name], corpus, head="none", limit=TOKENS, attention="none"
        )
        dump(options, click.echo)
    texts = work / "texts.txt"
    if not texts.exists():
        write_corpus(texts, DATA, embedder)
        texts.write_text("".join(texts.read_text("utf-8").splitlines(True)[:TEXTS]), "utf-8")
    stores["vectors"] = work / "vectors.zarr"
    dump_vectors(embedder, texts, stores["vectors"])
    return stores


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--en", type=click.Path(path_type=Path), default=TEACHER, help="A masked LM.")
@click.option("--ru", type=click.Path(path_type=Path), help="A masked LM; left out without it.")
@click.option("--model", default="minilm", help="An embedder.")
@click.option("--shapes", default="128x2x2,tiny")
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    work: Path, en: Path, ru: Path | None, model: str, shapes: str, seeds: int, results: Path
) -> None:
    """Train what is not finished, and print the table."""
    work.mkdir(parents=True, exist_ok=True)
    teachers = {"en": en, **({"ru": ru} if ru else {})}
    stores = stores_of(work, teachers, folder_of(model))
    rows = rows_of(work, stores, shapes.split(","), seeds)
    settings = (
        f"`python -m benchmarks.quality.default_student --shapes {shapes} --seeds {seeds}`;"
        f" teachers {' and '.join(each.name for each in teachers.values())}, {TOKENS:,} tokens of"
        f" novels each, and {Path(model).name}, {TEXTS:,} texts;"
        " students with 5k pieces by the default options, but for --student: 1,200 steps from a"
        f" masked LM, an epoch from the embedder; fine-tuned on {TUNED.limit:,} examples;"
        f" latency on one thread, batches of {LATENCY.batch_size} x {LATENCY.max_length} tokens,"
        " sentences of 32; ± sample deviation over seeds."
    )
    head = ("shape", "teacher", "figure", *KINDS)
    publish("BERT or ModernBERT", settings, table(head, rows), results)


if __name__ == "__main__":
    main()
