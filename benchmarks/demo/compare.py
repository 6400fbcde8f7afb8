"""Dump a teacher, train a student with what it knew and one without, and compare them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from benchmarks.common.results import whole_size
from store import FeatureStore, open_store
from support.errors import UserError

if TYPE_CHECKING:
    from benchmarks.demo.measure import Comparison
    from student_train.settings.options import TrainOptions

STUDENTS = {"distilled": {"mlm": 1.0, "hidden": 30.0}, "MLM only": {"mlm": 1.0}}
SHORTEST, LONGEST = 40, 400  # characters of a held-out paragraph


@dataclass(frozen=True)
class Settings:
    """Sizes of the demo: everything that it runs depends on these alone."""

    out: Path = Path("demo-output")
    model: str = "minilm"
    corpus: str = "python-docs"
    tokens: int = 130_000
    max_length: int = 128
    vocab: str = "5k"
    student: str = "128x2x4"
    steps: int = 1200
    batch_tokens: int = 512
    lr: float = 5e-4
    sentences: int = 300
    seed: int = 0

    @property
    def store(self) -> Path:
        return self.out / "store.zarr"

    @property
    def picture(self) -> Path:
        return self.out / "demo.png"

    def folder(self, name: str) -> Path:
        """Where the student called `name` goes."""
        return self.out / name.lower().replace(" ", "-")

    def training(self, name: str) -> TrainOptions:
        """The options of the student called `name`."""
        from student_train.settings.options import TrainOptions

        return TrainOptions(
            store=str(self.store),
            out=self.folder(name),
            loss=STUDENTS[name],
            vocab=self.vocab,
            student=self.student,
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            lr=self.lr,
            seed=self.seed,
            device="cpu",
        )


def demo(settings: Settings) -> Comparison:
    """Dump, train, compare and draw, after removing what an earlier demo left in the folder.

    Without matplotlib no picture is drawn. Raises UserError if the corpus is too small for these
    settings.
    """
    drawn = find_spec("matplotlib") is not None
    if not drawn:
        _say("matplotlib is missing, so no picture is drawn: pip install -e '.[demo]' installs it")
    _clear(settings)
    _dump(settings)
    texts = held_out_texts(open_store(settings.store), settings.corpus, settings.sentences)
    reports = {name: _train(settings, name) for name in STUDENTS}
    comparison = compare(settings, texts, reports)
    if drawn:
        from benchmarks.demo.picture import draw

        draw(comparison, settings.picture)
    return comparison


def _clear(settings: Settings) -> None:
    settings.out.mkdir(parents=True, exist_ok=True)
    for folder in (settings.store, *map(settings.folder, STUDENTS)):
        shutil.rmtree(folder, ignore_errors=True)
    settings.picture.unlink(missing_ok=True)


def _dump(settings: Settings) -> None:
    from teacher_dump.job.dump import dump
    from teacher_dump.job.options import DumpOptions

    _say(f"1. the teacher {settings.model} reads {settings.tokens:,} tokens of {settings.corpus}")
    options = DumpOptions(
        model=settings.model,
        corpus=(settings.corpus,),
        out=settings.store,
        hidden="mean",
        attention="none",
        logits="none",
        max_length=settings.max_length,
        limit=settings.tokens,
        seed=settings.seed,
        device="cpu",
    )
    done = dump(options)
    size = whole_size(settings.store)
    _say(
        f"   {settings.store}: {done.tokens:,} tokens of {done.sequences:,} sequences,"
        f" {size / 1e6:.0f} MB with the teacher's weights"
    )


def _train(settings: Settings, name: str) -> dict[str, Any]:
    from student_train.output.run import run

    options = settings.training(name)
    loss = " + ".join(f"{weight:g} {part}" for part, weight in options.loss.items())
    _say(
        f"{2 + list(STUDENTS).index(name)}. student {name}: {options.student}, vocabulary"
        f" {options.vocab}, loss {loss}"
    )
    result: dict[str, Any] = run(options.resolved())["result"]
    return result


def compare(settings: Settings, texts: list[str], reports: dict[str, dict[str, Any]]) -> Comparison:
    """Teacher, the students' common start and both students on text that none of them has seen."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    from benchmarks.demo.measure import Comparison, Model, encode, similarities, spearman
    from student_train.output.run import prepare
    from teacher_dump.teacher.teacher import load_teacher

    _say(f"{2 + len(STUDENTS)}. all of them read {len(texts)} paragraphs that were not dumped")
    teacher = load_teacher(settings.model, head="none", hidden="none", attention="none")
    start, collator, _ = prepare(settings.training("distilled"), open_store(settings.store))
    encoders = {
        "teacher": (teacher.model, teacher.base, teacher.tokenizer),
        "before training": (start, start.base_model, collator.student_tokenizer),
    }
    for name in STUDENTS:
        student = AutoModelForMaskedLM.from_pretrained(settings.folder(name))
        tokenizer = AutoTokenizer.from_pretrained(settings.folder(name))
        encoders[name] = (student, student.base_model, tokenizer)

    models: list[Model] = []
    for name, (whole, encoder, tokenizer) in encoders.items():
        found = encode(encoder.eval(), tokenizer, texts, settings.max_length, name)
        pairs = similarities(found.vectors)
        parameters = sum(p.numel() for p in whole.parameters())
        models.append(
            Model(
                name,
                parameters=parameters,
                megabytes=parameters * 4 / 1e6,
                sentences_per_second=found.sentences_per_second,
                similarities=pairs,
                agreement=spearman(models[0].similarities, pairs) if models else 1.0,
                mlm=reports[name]["valid_mlm"] if name in reports else None,
            )
        )
    curves = {name: _rows(settings.folder(name) / "metrics.jsonl") for name in STUDENTS}
    return Comparison(models, curves, len(texts))


def held_out_texts(store: FeatureStore, corpus: str, count: int) -> list[str]:
    """`count` documents spread evenly over the part of the corpus after the last dumped one.

    Raises UserError if there are fewer than three.
    """
    from teacher_dump.corpus.documents import Corpus

    last = store[-1].document
    unseen = [
        document.text
        for document in Corpus.open([corpus])
        if document.number > last and SHORTEST <= len(document.text) <= LONGEST
    ]
    if len(unseen) < 3:
        raise UserError(
            f"{corpus}: nothing is left to compare on after the {last + 1} dumped documents; dump"
            " less with --tokens"
        )
    chosen = np.linspace(0, len(unseen) - 1, min(count, len(unseen))).astype(int)
    return [unseen[i] for i in chosen]


def _rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _say(line: str) -> None:
    click.secho(line, bold=not line.startswith(" "))
