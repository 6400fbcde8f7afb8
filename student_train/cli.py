"""`student-train`: one student from a store, no teacher in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from student_train.settings.options import (
    ALIGNMENTS,
    CACHES,
    DATA,
    DEFAULT_LOSS,
    TrainOptions,
    describe,
)
from support.console import CONTEXT, command_errors
from support.signals import stoppable
from training.optimizer import OPTIMIZERS
from training.rare_masks import MASK_WORDS

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


def _list_recipes(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value in ("list", ("list",)):
        from student_train.settings.recipe import listed

        click.echo(listed())
        context.exit()
    return value


@click.command(help=HELP, context_settings=CONTEXT)
@click.option(
    "--store",
    required=True,
    multiple=True,
    help="A sealed store: .zarr, .h5 or an object-store URL. Repeated: the student learns from all"
    " of them, each aligned through its own tokens.",
)
@click.option(
    "--recipe",
    callback=_list_recipes,
    is_eager=True,
    help="Settings and stages by name, of the sources or FILE.toml[:NAME]; options given beside it"
    " win. list: tell all of them.",
)
@option(
    "--vocab",
    help="5k | 10k | 20k | 30k | N (WordPiece of the store's text) | a tokenizer folder | teacher |"
    " pruned:N (the teacher's most frequent pieces) | mixed-vocab (the store's).",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the student.  [default: beside the store, named after the settings]",
)
@option(
    "--student",
    help="tiny (264x3x12) or HxLxA: width x layers x heads of a BERT; of a ModernBERT after"
    " modernbert:; teacher:L: as wide as the teacher, and a ModernBERT if that is one",
)
@option("--align", type=click.Choice(ALIGNMENTS), help="How teacher tokens meet the student's.")
@option(
    "--pool",
    type=click.Choice(["sum", "mean"]),
    help="How a run's outputs become one.  [default: sum for reduce, else mean]",
)
@click.option(
    "--loss",
    multiple=True,
    help=(
        "NAME=WEIGHT, repeated or a comma list: mlm, kl, logit, hard, hidden, hidden-sum,"
        " hidden-gelu, hidden-kld, cosine, contrastive, attention; of a task ce, kl, logit,"
        f" log-odds, hard, sentence, sentence-kld.  [default: {LOSS_DEFAULT}; kl=1 for hidden where"
        " the store has no hidden states; of a task kl=1, and ce=1 where there are gold labels]"
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
    help="svd | svd:STORE (of the teacher that another store keeps) | teacher | layers:I,J,... |"
    " mixed-vocab | random | auto: teacher where its layers can be cut, else svd.",
)
@option(
    "--word-vectors",
    help="File of word vectors (GloVe, fastText or word2vec as text), as wide as the embeddings,"
    " for the pieces that are words there.",
)
@option(
    "--view",
    type=int,
    help="View of the store to learn from.  [default: the masked views in turn, else view 0]",
)
@option("--steps", type=int, help="Optimiser steps.")
@option(
    "--epochs",
    type=float,
    help="Passes over the (first) store, instead of --steps.  [default: 3]",
)
@option("--batch-tokens", help="Teacher tokens of a batch, padding included.")
@option("--accumulate", help="Batches of one optimiser step.")
@option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    help="lamb (You et al. 2020): for large batches; needs `pip install pytorch-optimizer`.",
)
@option(
    "--lr",
    type=float,
    help="Peak learning rate.  [default, as found with adamw: 0.5 / width, at most 0.004; of a"
    " BiLSTM 0.003]",
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
    "--mask-words",
    type=click.Choice(MASK_WORDS),
    help="rare: a piece is masked the more often the rarer it is (view 0).",
)
@option(
    "--data",
    type=click.Choice(DATA),
    help="Sequences to learn from; labelled: those with a gold label or tag.",
)
@option("--min-length", help="Shorter sequences, in teacher tokens, are not learnt from.")
@click.option(
    "--freeze",
    default="",
    show_default=False,
    help="Parts that keep their weights, a comma list: embeddings (or of them words, positions),"
    " layers, layers.N, head, projection.",
)
@click.option(
    "--best/--no-best", help="Keep the weights with the best validation loss, not the last."
)
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
@option(
    "--cache",
    type=click.Choice(CACHES),
    help="ram: the store is read and unpacked once, and stays in memory; device: its hidden states"
    " and attention maps in the memory of --device. The student is the same.",
)
@click.option(
    "--allow-partial", is_flag=True, help="Learn from the published parts of an unfinished store."
)
@click.option("--resume", is_flag=True, help="Go on with a stopped training.")
@click.pass_context
@command_errors
def main(context: click.Context, resume: bool, **arguments: Any) -> None:
    from student_train.settings.arguments import options_of  # torch loads only for work

    default = click.core.ParameterSource.DEFAULT
    options = options_of(
        {n: v for n, v in arguments.items() if context.get_parameter_source(n) != default}
    )
    click.echo(describe(options))
    with stoppable(lambda: kept(options.out_folder())):
        from student_train.output.run import run

        report = run(options, resume=resume, say=click.echo)
    result = report["result"]
    for name in (
        "parameters", "steps", "tokens", "seconds", "valid_loss", "valid_mlm",
        "valid_mlm_per_character", "valid_accuracy", "valid_agreement",
    ):  # fmt: skip
        if name in result:
            click.echo(f"{name:24} {told(result[name])}")
    click.echo(f"student in {options.out_folder()}")


def kept(out: Path) -> str:
    """What a stopped training has, and how to go on."""
    from student_train.train.checkpoint import newest_checkpoint

    words = " and --resume" if (out / "training.json").exists() else ""
    return f"{out}: {newest_checkpoint(out / 'checkpoints')}; go on with the same command{words}"


def told(number: float) -> str:
    """Counts whole, measures with five digits."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.5g}"
