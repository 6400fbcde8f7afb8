"""`downstream`: continue masked-LM training of a checkpoint, or fine-tune and score it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from store.console import CONTEXT, command_errors
from store.errors import UserError

HELP = """Use a checkpoint for something.

mlm continues the masked-LM training of MODEL on text (a document a line), or begins it with MODEL
scratch:HxLxA (width x layers x heads, as student-train --student takes it). pos and ner fine-tune
MODEL on word<TAB>tag files, once for each seed, and print the mean and the deviation: macro F1 and
accuracy for pos, entity F1 for ner; the epoch is chosen on --dev.
"""
FILE = click.Path(path_type=Path)


@click.command(help=HELP, context_settings=CONTEXT)
@click.option("--task", type=click.Choice(["mlm", "pos", "ner"]), required=True)
@click.option(
    "--model", required=True, help="Folder, hub id, alias (rubert-base, minilm) or scratch:HxLxA."
)
@click.option("--train", type=FILE, multiple=True, required=True, help="Repeatable for mlm.")
@click.option("--dev", type=FILE, help="mlm: default a hundredth of the lines of --train.")
@click.option("--test", type=FILE, help="pos, ner: report this as well.")
@click.option("--out", type=FILE, required=True, help="A new folder.")
@click.option("--seeds", type=click.IntRange(min=1), help="pos, ner: number of runs. [3]")
@click.option("--seed", default=0, help="The (first) seed.")
@click.option("--steps", type=click.IntRange(min=1), help="mlm: optimiser steps.")
@click.option("--epochs", type=click.IntRange(min=1), help="[mlm 1; pos, ner 3]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Sequences. [mlm 32; pos, ner 16]")
@click.option("--batch-tokens", type=click.IntRange(min=1), help="mlm: instead of --batch-size.")
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    help="[mlm 2e-4, from scratch 1e-3; pos, ner 5e-5, for encoders less than 384 wide 5e-4]",
)
@click.option("--max-length", default=128, type=click.IntRange(min=8))
@click.option("--vocab", help="mlm from scratch: pieces of its WordPiece, e.g. 30k. [30k]")
@click.option(
    "--mask-prob",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="mlm: share of tokens masked in training; validation always masks 0.15. [0.15]",
)
@click.option("--evaluate-every", type=click.IntRange(min=1), help="mlm: steps. [500]")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), help="mlm. [fp32]")
@click.option("--limit", type=click.IntRange(min=1), help="pos, ner: first N training sentences.")
@click.option("--resume", is_flag=True, help="mlm: continue a run that was stopped, in --out.")
@command_errors
def main(task: str, **options: Any) -> None:
    """Parse, refuse what does not fit the task, run."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # heads that are new on purpose are ours to tell
    logging.disable_progress_bar()  # bars of reading and writing weights, terminal or not
    given = {name: value for name, value in options.items() if value not in (None, (), False)}
    if task == "mlm":
        _refuse(task, given, ("test", "seeds", "limit"))
        _mlm(given)
    else:
        _refuse(
            task,
            given,
            (
                "steps",
                "batch_tokens",
                "vocab",
                "mask_prob",
                "evaluate_every",
                "precision",
                "resume",
            ),
        )
        _tagging(task, given)


def _refuse(task: str, given: dict[str, Any], foreign: tuple[str, ...]) -> None:
    wrong = [f"--{name.replace('_', '-')}" for name in foreign if name in given]
    if wrong:
        raise UserError(f"--task {task} does not take {', '.join(wrong)}; leave out")


def _mlm(given: dict[str, Any]) -> None:
    from downstream.mlm import MlmSettings, train_mlm
    from downstream.scratch import PREFIX

    if "steps" in given and "epochs" in given:
        raise UserError("--steps and --epochs contradict each other; give one")
    if "batch_size" in given and "batch_tokens" in given:
        raise UserError("--batch-size and --batch-tokens contradict each other; give one")
    if "vocab" in given and not given["model"].startswith(PREFIX):
        raise UserError("--vocab needs --model scratch:HxLxA: a checkpoint brings its own")
    if "batch_tokens" in given:
        given["batch_size"] = max(1, given.pop("batch_tokens") // given["max_length"])
    figures = train_mlm(MlmSettings(**given), say=click.echo)
    click.echo(
        f"saved {given['out']}: held-out loss {figures['held_out_loss']:.4f} nats per masked token"
    )


def _tagging(task: str, given: dict[str, Any]) -> None:
    from rich.console import Console

    from downstream.tagging import TaggingSettings, fine_tune

    if len(given["train"]) != 1:
        raise UserError(f"--task {task} takes one --train file, got {len(given['train'])}")
    if "dev" not in given:
        raise UserError(f"--task {task} needs --dev: the best epoch is chosen on it")
    out, train, dev = given.pop("out"), given.pop("train")[0], given.pop("dev")
    if out.exists():
        raise UserError(f"--out {out}: exists already; choose another")
    model, test = given.pop("model"), given.pop("test", None)
    result = fine_tune(task, model, train, dev, test, TaggingSettings(**given), say=click.echo)
    out.mkdir(parents=True)
    (out / "scores.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    Console().print(_table(result))


def _table(result: dict[str, Any]) -> Any:
    """A row for each split: mean ± deviation over the seeds, in percent."""
    from rich.table import Table

    from downstream.tagging import MEASURES

    table = Table(title=f"{result['task']}: {result['model']}, {len(result['seeds'])} seeds")
    for heading in ("split", "sentences", *MEASURES[result["task"]]):
        table.add_column(heading, justify="right")
    for split, mean in result["mean"].items():
        deviation = result["deviation"][split]
        table.add_row(
            split,
            str(result["sentences"][split]),
            *(f"{100 * mean[name]:.2f} ± {100 * deviation[name]:.2f}" for name in mean),
        )
    return table
