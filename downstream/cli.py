"""`downstream`: use a checkpoint for something, and say how well and how fast it does it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from downstream.options import COLUMNS, TAKES, refuse
from support.console import CONTEXT, command_errors
from support.errors import UserError

HELP = """Use a checkpoint for something.

mlm continues the masked-LM training of MODEL on text (a document a line), or begins it with MODEL
scratch:HxLxA (width x layers x heads; any that student-train --student takes): once, or with
--seeds once for each, and prints the mean and the deviation of the loss on held-out text.

pos, ner, classify, pair and qa fine-tune MODEL, once for each seed, and print the mean and the
deviation; the epoch is chosen on --dev. A label that training lacks is refused, unless
--unseen-labels count makes it an error of the model.

With --as-is all but qa score on --test, untrained, a MODEL that has its head: a masked LM, a
student of a task teacher, or what --save kept.

\b
pos       word<TAB>tag, a blank line between sentences: macro F1, accuracy
ner       the same with IOB tags (B-X first, then I-X): entity F1, accuracy
classify  columns text, label: accuracy, macro and weighted F1, Matthews
pair      columns text_a, text_b, score (a number): Pearson, Spearman
qa        SQuAD .json, or columns question, context, answer (empty: there
          is none): exact match, F1

Columns are those of .tsv, .csv or .jsonl files; an option gives a column's name where it is
another.

speed measures parameters, size on disk, time and peak memory of MODEL, on a GPU as well where there
is one. scores.json in --out holds everything. table joins finished RUNs (--out folders) of any
tasks into one table, the speed of a model beside its scores.
"""
FILE = click.Path(path_type=Path)


def _column_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for role in reversed(list(dict.fromkeys(role for roles in COLUMNS.values() for role in roles))):
        tasks = ", ".join(task for task, roles in COLUMNS.items() if role in roles)
        flag = f"--{role.replace('_', '-')}-column"
        command = click.option(flag, help=f"{tasks}: its name, where it is not {role}.")(command)
    return command


@click.command(help=HELP, context_settings=CONTEXT)
@click.option("--task", type=click.Choice(list(TAKES)), required=True)
@click.argument("runs", nargs=-1, type=FILE, metavar="[RUN]...")
@click.option(
    "--model",
    multiple=True,
    help="Folder, hub id, alias (rubert-base, minilm) or scratch:HxLxA. Repeatable for speed and"
    " --as-is.",
)
@click.option("--train", type=FILE, multiple=True, help="Repeatable for mlm.")
@click.option("--dev", type=FILE, help="mlm: default a hundredth of the lines of --train.")
@click.option(
    "--test",
    type=FILE,
    multiple=True,
    help="Report this as well. Repeatable, e.g. a file for each language: each of them and their"
    " mean. speed: single texts, default random tokens.",
)
@click.option("--out", type=FILE, help="A new folder. speed, table: not needed.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    help="Number of runs; several of mlm are saved in OUT/seed-N. [mlm 1; fine-tuning 3]",
)
@click.option("--seed", type=int, help="The (first) seed. [0]")
@click.option("--steps", type=click.IntRange(min=1), help="mlm: optimiser steps.")
@click.option("--epochs", type=click.IntRange(min=1), help="[mlm 1; fine-tuning 3]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Sequences. [mlm 32; others 16]")
@click.option("--batch-tokens", type=click.IntRange(min=1), help="mlm: instead of --batch-size.")
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    help="[mlm 2e-4, from scratch 1e-3; others 5e-5, less than 384 wide 5e-4, BiLSTMs 3e-3]",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=8),
    help="Tokens; all but mlm cut it to what the model takes. [128; qa 384, speed 512]",
)
@click.option("--vocab", help="mlm from scratch: pieces of its WordPiece, e.g. 30k. [30k]")
@click.option(
    "--mask-prob",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="mlm: share of tokens masked in training; validation always masks 0.15. [0.15]",
)
@click.option("--evaluate-every", type=click.IntRange(min=1), help="mlm: steps. [500]")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), help="mlm, fine-tuning. [fp32]")
@click.option(
    "--group-by-length",
    is_flag=True,
    help="Fine-tuning: batches of inputs of about equal length; faster, may cost some quality.",
)
@click.option("--resume", is_flag=True, help="mlm: continue a run that was stopped, in --out.")
@click.option(
    "--save", is_flag=True, help="Fine-tuning: keep the first seed's model in OUT/model, a teacher."
)
@click.option("--as-is", is_flag=True, help="All but qa: score MODEL on --test, untrained.")
@click.option("--limit", type=click.IntRange(min=1), help="Fine-tuning: first N training examples.")
@click.option(
    "--per-class",
    type=click.IntRange(min=1),
    help="classify: N training examples of each class, other ones for each seed.",
)
@click.option(
    "--unseen-labels",
    type=click.Choice(["refuse", "count"]),
    help="pos, ner, classify: labels of --dev or --test that training (--as-is: the model) does not"
    " have; count: the model has each of them wrong. [refuse]",
)
@click.option(
    "--pieces",
    type=click.Choice(["first", "all"]),
    help="ner: what of a word is taught, its first word piece or all: those after it the label X,"
    " which the model, its store and its students keep (TinyMBERT). [first]",
)
@click.option(
    "--stride",
    type=click.IntRange(min=0),
    help="qa: tokens that two windows of a long context share. [a third of --max-length]",
)
@_column_options
@click.option("--teacher", help="speed: the model that the others are compared with.")
@click.option("--repeat", type=click.IntRange(min=1), help="speed: runs to take medians of. [5]")
@command_errors
def main(task: str, **options: Any) -> None:
    """Parse, refuse what does not fit the task, run."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # heads that are new on purpose are ours to tell
    logging.disable_progress_bar()  # bars of reading and writing weights, terminal or not
    given = {  # 0 is False for Python, but not here: --stride 0 is said
        name: value
        for name, value in options.items()
        if value not in (None, ()) and value is not False
    }
    refuse(task, given)
    {"mlm": _mlm, "speed": _speed, "table": _table}.get(task, _fine_tune)(task, given)


def _mlm(task: str, given: dict[str, Any]) -> None:
    from downstream import report
    from downstream.mlm.scores import score_as_is, train_seeds
    from downstream.mlm.scratch import PREFIX
    from downstream.mlm.train import MlmSettings

    if "steps" in given and "epochs" in given:
        raise UserError("--steps and --epochs contradict each other; give one")
    if "batch_size" in given and "batch_tokens" in given:
        raise UserError("--batch-size and --batch-tokens contradict each other; give one")
    models, seeds = given.pop("model"), given.pop("seeds", 1)
    if "vocab" in given and not models[0].startswith(PREFIX):
        raise UserError("--vocab needs --model scratch:HxLxA: a checkpoint brings its own")
    length = given.get("max_length", MlmSettings.max_length)
    if "batch_tokens" in given:
        given["batch_size"] = max(1, given.pop("batch_tokens") // length)
    as_is, tests = given.pop("as_is", False), report.splits_to_test(given.pop("test", ()))
    if as_is:
        result = report.of_models([score_as_is(m, tests, length, click.echo) for m in models])
    else:
        result = train_seeds(MlmSettings(model=models[0], **given), seeds, tests, click.echo)
    report.save(result, given["out"])
    report.show(report.seed_table(result))


def _fine_tune(task: str, given: dict[str, Any]) -> None:
    from downstream import report
    from downstream.tasks.fine_tune import FineTuneSettings, fine_tune, score_as_is

    as_is = given.pop("as_is", False)
    if not as_is and "dev" not in given:
        raise UserError(f"--task {task} needs --dev: the best epoch is chosen on it")
    if "limit" in given and "per_class" in given:
        raise UserError("--limit and --per-class contradict each other; give one")
    models, out, columns = given.pop("model"), given.pop("out"), _columns(task, given)
    files = _taken(given, "train", "dev") | report.splits_to_test(given.pop("test", ()))
    if not as_is:
        (files["train"],) = files["train"]
    own = _taken(given, "per_class", "stride", "unseen_labels", "pieces")
    subject = _task(task, columns, own)
    keep = out / "model" if given.pop("save", False) else None
    settings = FineTuneSettings(**given)
    out.mkdir(parents=True, exist_ok=True)  # told now, not after hours, if it cannot be made
    try:
        if as_is:
            length = settings.max_length
            each = [score_as_is(subject, m, files, length, click.echo) for m in models]
            result = report.of_models(each)
        else:
            result = fine_tune(subject, models[0], files, settings, click.echo, keep)
        report.save(result, out)
    finally:
        with suppress(OSError):
            out.rmdir()  # only if nothing came of it
    report.show(report.seed_table(result))


def _taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}


def _columns(task: str, given: dict[str, Any]) -> dict[str, str]:
    names = {role: given.pop(f"{role}_column", None) for role in COLUMNS.get(task, ())}
    return {role: name for role, name in names.items() if name}


def _task(name: str, columns: dict[str, str], own: dict[str, Any]) -> Any:
    from downstream.tasks.classify import Classify
    from downstream.tasks.pair import PairScore
    from downstream.tasks.qa import QA
    from downstream.tasks.tagging import Entities, PartsOfSpeech

    if name in ("pos", "ner"):
        return PartsOfSpeech(**own) if name == "pos" else Entities(**own)
    return {"classify": Classify, "pair": PairScore, "qa": QA}[name](columns, **own)


def _speed(task: str, given: dict[str, Any]) -> None:
    from downstream import report
    from downstream.speed import SpeedSettings, measure_speed

    columns, out, tests = _columns(task, given), given.pop("out", None), given.pop("test", ())
    if columns and not tests:
        raise UserError("--text-column needs --test, the file that has the column")
    if tests:
        given["texts"] = _texts(tests[0], columns)
    models, teacher = given.pop("model"), given.pop("teacher", None)
    if "repeat" in given:
        given["runs"] = given.pop("repeat")
    result = measure_speed(models, teacher, SpeedSettings(**given), say=click.echo)
    if out:
        report.save(result, out)
    report.show(report.speed_table(result))


def _texts(path: Path, columns: dict[str, str]) -> list[str]:
    from downstream.mlm.text_blocks import read_lines
    from downstream.tables import read_rows

    if path.suffix.lower() == ".txt":
        return read_lines(path)
    return [row.text("text", columns) for row in read_rows(path)]


def _table(task: str, given: dict[str, Any]) -> None:
    from downstream import report

    result = report.joined(given["runs"])
    if "out" in given:
        report.save(result, given["out"])
    report.show(report.joined_table(result))
