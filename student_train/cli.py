"""`student-train`: one student from a store, no teacher in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from store.console import CONTEXT, command_errors
from store.stopping import stoppable
from student_train.options import ALIGNMENTS, DEFAULT_LOSS, TrainOptions, parse_losses

HELP = """Train a small student from a store alone; the teacher is not needed.

Stopped by Ctrl-C or SIGTERM it saves itself; the same command with --resume goes on along the same
loss curve.
"""
DEFAULT = TrainOptions(store="")
LOSS_DEFAULT = " ".join(f"{name}={weight:g}" for name, weight in DEFAULT_LOSS.items())


def option(*names: str, **settings: Any) -> Any:
    """A click option whose default is that of TrainOptions."""
    field = names[0].removeprefix("--").replace("-", "_")
    return click.option(*names, default=getattr(DEFAULT, field), **settings)


@click.command(help=HELP, context_settings=CONTEXT)
@click.option("--store", required=True, help="A sealed store: .zarr, .h5 or an object-store URL.")
@option(
    "--vocab",
    help="5k | 10k | 20k | 30k | N (WordPiece of the store's text) | a tokenizer folder | teacher.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the student.  [default: beside the store, named after the settings]",
)
@option(
    "--student",
    help="tiny (264x3x12) or HxLxA: width x layers x heads of a BERT; of a ModernBERT after"
    " modernbert:",
)
@option(
    "--align",
    type=click.Choice(ALIGNMENTS),
    help="How teacher tokens meet the student's.",
)
@option(
    "--pool",
    type=click.Choice(["sum", "mean"]),
    help="How a run's outputs become one.  [default: sum for reduce, else mean]",
)
@click.option(
    "--loss",
    multiple=True,
    help=(
        "NAME=WEIGHT, repeated or a comma list: mlm, kl, logit, hard, hidden, cosine, attention.  "
        f"[default: {LOSS_DEFAULT}; kl=1 for hidden where the store has no hidden states]"
    ),
)
@option("--temperature", help="Of kl.")
@option(
    "--targets",
    type=click.Choice(["all", "masked"]),
    help="Tokens whose teacher logits are learnt: all, or those masked for the student.",
)
@option(
    "--projection",
    type=click.Choice(["trainable", "frozen"]),
    help="From the student's width to the teacher's.",
)
@option(
    "--init",
    help="svd | teacher | layers:I,J,... | random | auto: teacher where its layers can be cut, else"
    " svd.",
)
@option(
    "--view",
    type=int,
    help="View of the store to learn from.  [default: the masked views in turn, else view 0]",
)
@option("--steps", type=int, help="Optimiser steps.")
@option("--epochs", type=float, help="Passes over the store, instead of --steps.  [default: 3]")
@option("--batch-tokens", help="Teacher tokens of a batch, padding included.")
@option("--accumulate", help="Batches of one optimiser step.")
@option(
    "--lr",
    type=float,
    help="Peak learning rate of AdamW.  [default: 0.5 / width, at most 0.004]",
)
@option("--warmup", help="Share of the steps.")
@option(
    "--schedule",
    type=click.Choice(["linear", "plateau"]),
    help="After warm-up: linear to 0, or halved on a validation plateau.",
)
@option("--weight-decay", help="Of matrices.")
@option("--clip", help="Gradient norm.")
@option("--mask-prob", help="Share of tokens masked anew each time (view 0).")
@option(
    "--max-length",
    type=int,
    help="Longest student input.  [default: twice the store's, at most 512]",
)
@option("--held-out", help="Share of the store kept for validation; the same for every student.")
@option("--eval-every", type=int, help="Steps between validations.  [default: a tenth of all]")
@option(
    "--checkpoint-every", type=int, help="Steps between checkpoints.  [default: as --eval-every]"
)
@option("--seed", help="Of weights, order, masks and dropout.")
@option("--device", help="auto | cpu | cuda | cuda:N.")
@option(
    "--precision",
    type=click.Choice(["auto", "bf16", "fp32"]),
    help="auto: bf16 where the hardware multiplies it, else fp32.",
)
@option(
    "--workers",
    help="Processes that prepare batches; 0: a thread. The student is the same, bit for bit.",
)
@click.option(
    "--allow-partial", is_flag=True, help="Learn from the published parts of an unfinished store."
)
@click.option("--resume", is_flag=True, help="Go on with a stopped training.")
@command_errors
def main(resume: bool, **arguments: Any) -> None:
    options = options_of(arguments)
    click.echo(describe(options))
    with stoppable(lambda: kept(options.out_folder())):
        from student_train.run import run  # torch and transformers load only for work

        report = run(options, resume=resume, say=click.echo)
    result = report["result"]
    for name in (
        "parameters",
        "steps",
        "tokens",
        "seconds",
        "valid_loss",
        "valid_mlm",
        "valid_mlm_per_character",
    ):
        if name in result:
            click.echo(f"{name:24} {told(result[name])}")
    click.echo(f"student in {options.out_folder()}")


def kept(out: Path) -> str:
    """What a stopped training has, and how to go on."""
    from student_train.checkpoint import newest_checkpoint

    words = " and --resume" if (out / "training.json").exists() else ""
    return f"{out}: {newest_checkpoint(out / 'checkpoints')}; go on with the same command{words}"


def told(number: float) -> str:
    """Counts whole, measures with five digits."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.5g}"


def options_of(arguments: dict[str, Any]) -> TrainOptions:
    """TrainOptions from the command line's words; the default losses are those that the store can
    serve."""
    from store import open_store

    loss = parse_losses(arguments.pop("loss"))
    if not loss:
        partial = arguments.get("allow_partial", False)
        features = open_store(arguments["store"], allow_partial=partial).features
        loss = dict(DEFAULT_LOSS) if features.hidden else {"mlm": 1.0}
        if features.logits and not features.logits.next_token and not features.hidden:
            loss["kl"] = 1.0
    return TrainOptions(**arguments, loss=loss).resolved()


def describe(options: TrainOptions) -> str:
    """The settings of a training, as they are printed at its start."""
    loss = " + ".join(f"{weight:g} {name}" for name, weight in options.loss.items())
    length = f"{options.epochs:g} epochs" if options.steps is None else f"{options.steps} steps"
    rows = {
        "store": options.store,
        "student": f"{options.student}, vocabulary {options.vocab}, start {options.init}",
        "losses": (
            f"{loss}; {options.align}, pool {options.resolved_pool}, {options.projection}"
            " projection"
        ),
        "training": (
            f"{length} of {options.batch_tokens} x {options.accumulate} tokens,"
            f" lr {options.resolved_lr:.2g} {options.schedule}, seed {options.seed}"
        ),
        "device": f"{options.device}, {options.precision}",
        "out": str(options.out_folder()),
    }
    return "\n".join(f"{name:9} {value}" for name, value in rows.items())
