"""`student-train`: trains one student from a store, without the teacher in memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import Any

import click

from teachonce.checkpoints.declared import declared_head
from teachonce.student_train.losses.registry import named
from teachonce.student_train.settings.contradictions import NEXT
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.click_types import LocalPath, Text
from teachonce.support.commands import (
    GroupedCommandWithSubcommands,
    examples,
    is_given,
    version_option,
)
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.environment import is_main_process
from teachonce.support.errors import UserError
from teachonce.support.hub import (
    Repository,
    check_card_metadata,
    metadata_options,
    open_repository,
    push_options,
)
from teachonce.support.options import click_option, options_of
from teachonce.support.signals import stoppable

HELP = """Train a small student on a store; the teacher is not needed.

On Ctrl-C or SIGTERM the training saves a checkpoint. The same command with --resume continues it,
with the same result as an uninterrupted training.
"""
EXAMPLES = examples(
    "student-train --store store.zarr --vocab 5k",
    "student-train --store store.zarr --vocab teacher --student teacher:3 --epochs 1",
)

GROUPS = {
    "The ten that matter most": (
        "store", "vocab", "student", "loss", "align", "init", "epochs", "lr", "recipe", "out",
    ),
    "Targets and data": (
        "temperature", "targets", "outputs", "combine", "view", "data", "min_length", "mask_prob",
        "mask_words", "max_masks", "matryoshka", "held_out", "allow_partial",
    ),
    "Student": (
        "lora", "dropout", "recurrent_dropout", "classifier_pooling", "word_vectors", "max_length",
        "freeze", "prune_to",
    ),
    "Alignment": ("pool", "projection", "projection_start"),
    "Training": (
        "steps", "batch_tokens", "batch_texts", "accumulate", "optimizer", "lr_end", "warmup",
        "schedule", "weight_decay", "clip", "eval_every", "patience", "best", "seed", "device",
        "precision", "workers", "cache",
    ),
    "Output": (
        "log", "checkpoint_every", "resume", "license", "language", "push_to_hub", "private",
        "as_json",
    ),
}  # fmt: skip
"""Headings of --help, and the options under each."""
DESCRIBED = {
    "store", "others", "student", "vocab", "init", "loss", "align", "pool", "projection", "epochs",
    "steps", "batch_tokens", "batch_texts", "accumulate", "optimizer", "lr", "schedule", "seed",
    "stages", "precision",
}  # fmt: skip
"""Options that `setting_lines` prints at fixed places. It appends any other option that is not at
its default."""


def _list_recipes(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    if value in ("list", ("list",)):
        from teachonce.student_train.settings.recipe import listed

        click.echo(listed())
        context.exit()
    return value


def _recipes() -> list[str]:
    """Return the values of --recipe, for shell completion."""
    from teachonce.student_train.settings.recipe import all_recipes

    return ["list", *all_recipes()]


def parameters(varied: Collection[str] = ()) -> list[click.Parameter]:
    """Make the options of a training, and `--recipe`.

    An option in `varied` may be repeated, once for each setting of a sweep. If `varied` is not
    empty, `--recipe` may be repeated as well.
    """
    store, *options = (
        click_option(
            TrainOptions,
            name,
            varied=name in varied,
            **({"multiple": True} if name == "store" else {}),
        )
        for name in options_of(TrainOptions)
    )
    recipe = click.Option(
        ["--recipe"],
        multiple=bool(varied),
        type=Text(_recipes, paths=True),
        callback=_list_recipes,
        # Eager, so that `--recipe list` prints before click demands --store.
        is_eager=True,
        help="Take settings and stages from a built-in recipe or FILE.toml[:NAME]; options on the"
        " command line override them. list: print all recipes.",
    )
    return [store, recipe, *options]


@click.group(
    cls=GroupedCommandWithSubcommands,
    groups=GROUPS,
    help=HELP,
    epilog=EXAMPLES,
    context_settings=CONTEXT,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND ...]",
    params=parameters(),
)
@click.option("--resume", is_flag=True, help="Continue a stopped training.")
@click.option(
    "--push-to-hub",
    metavar="USER/NAME",
    help="Upload the finished student to this Hugging Face repository; README.md is its card.",
)
@click.option("--private", is_flag=True, help="Create the repository of --push-to-hub as private.")
@metadata_options
@version_option
@click.pass_context
@command_errors
def main(
    context: click.Context,
    /,
    resume: bool,
    push_to_hub: str | None,
    private: bool,
    license: str | None,
    language: tuple[str, ...],
    **arguments: Any,
) -> None:
    if context.invoked_subcommand is not None:
        if arguments["store"]:
            raise click.UsageError(
                f"give the options after the subcommand {context.invoked_subcommand}"
            )
        return
    # Imported here: --help and completion must not wait for torch.
    from teachonce.student_train.arguments import checked_from, stores_of
    from teachonce.student_train.output.report import check_output
    from teachonce.student_train.plan.checks import checked_plan

    if private and push_to_hub is None:
        raise UserError("--private: applies to a repository on the hub; give --push-to-hub as well")
    check_card_metadata(license, language)
    # Defaults are left out, because given values override a recipe's.
    given = {name: value for name, value in arguments.items() if is_given(name)}
    with closing(stores_of(given)) as stores:
        options = checked_from(given, stores)
        options.out_folder()  # refuses a remote store without --out before the store is opened
        plan = checked_plan(options, *stores.opened)
        # Before `resolved`, which imports torch: an --out that is taken is refused at once.
        if is_main_process() and options.out is not None:
            check_output(options.out, resume)
        plan = plan.resolved()
        out, target = plan.options.out_folder(), None
        # Opened before the training: a missing permission shows before hours of work.
        if is_main_process() and push_to_hub is not None:
            target = open_repository(push_to_hub, "model", private)
        with stoppable(lambda: how_to_resume(out)):
            if is_main_process():
                click.echo(setting_lines(plan.options))
            from teachonce.student_train.output.run import check_tokenizers, run_plan

            for store in stores.opened:
                check_tokenizers(store)
            report = run_plan(plan, resume=resume, say=click.echo)
    if is_main_process():
        from teachonce.student_train.output.pushing import write_card_metadata

        write_card_metadata(out, license, language)
        _print_result(report, out)
    if target is not None:
        _upload(out, target)


@main.command(
    epilog=examples(
        "student-train push student me/my-student",
        "student-train push student me/my-student --license mit --language en",
    )
)
@click.argument("folder", type=LocalPath())
@click.argument("repository", metavar="USER/NAME")
@push_options
@command_errors
def push(folder: Path, repository: str, **how: Any) -> None:
    """Upload a finished student to the Hugging Face hub.

    README.md in FOLDER is the model card: add the intended use there first. --license and
    --language are written into it. The command uploads a folder of student-export in the same way.
    """
    from teachonce.student_train.output.pushing import push as send_folder

    click.echo(f"pushed    {send_folder(folder, repository, **how)}")


def _upload(out: Path, target: Repository) -> None:
    """Upload a student after its training; an error names the command that uploads it later."""
    from teachonce.student_train.output.pushing import send

    try:
        click.echo(f"pushed    {send(out, target)}")
    except UserError as error:
        raise UserError(
            f"{error}; the student is finished: `student-train push {quote(str(out))} {target.id}`"
            " uploads it"
        ) from error


def _print_result(report: Mapping[str, Any], out: Path) -> None:
    from teachonce.student_train.train.evaluate import warning_of_one_label

    result = report["result"]
    validated = [name for name in result if name.startswith("valid_")]
    for name in dict.fromkeys(
        ["parameters", "steps", "tokens", "seconds", "valid_loss", *validated]
    ):
        if name in result:
            label = "student tokens" if name == "tokens" else name
            click.echo(f"{label:24} {format_number(result[name])}")
    if line := warning_of_one_label(result):
        click.echo(line)
    click.echo(f"student in {out}")
    if following := _next_command(out, report):
        click.echo(f"next: {following}")


def _next_command(out: Path, report: Mapping[str, Any]) -> str:
    """Return a command to try a finished student; "" for decoders, students that read pairs, and
    students whose head over the vocabulary was not trained."""
    from transformers import AutoTokenizer

    from teachonce.student_train.output.card import trains_vocabulary

    if "separator" in (report["store"]["features"].get("task") or {}):
        return ""
    config = json.loads((out / "config.json").read_text("utf-8"))
    names = config.get("architectures") or []
    text = "A text."
    if declared_head(names) == "causal":
        return ""
    if any(name.endswith("ForMaskedLM") for name in names) and not (out / "modules.json").exists():
        if not report["result"]["steps"] or not trains_vocabulary(report["settings"]):
            return ""
        text = f"This is a {AutoTokenizer.from_pretrained(out).mask_token}."
    return f"student-predict {quote(str(out))} {quote(text)}"


def _format(value: object) -> str:
    """Format the value of a setting for `setting_lines`; losses become their weighted sum."""
    if isinstance(value, Mapping):
        return " + ".join(f"{weight:g} {name}" for name, weight in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "nothing"
    return str(value)


def _describe_pairs(options: TrainOptions) -> str:
    """Describe how the outputs of student and teacher are paired; "" if no loss needs pairs."""
    # Next-token losses compare single positions, so nothing is pooled.
    if not set(options.alignments) - {NEXT}:
        return ", ".join(options.alignments)
    align = options.resolved_align
    aligned = align if "=" in align else ", ".join(options.alignments)
    projected = any(loss.projection != "none" for loss in named(options.losses()))
    projection = f", {options.projection} projection" if projected else ""
    if options.shape.causal:  # a decoder has read a run only at its last token
        return f"{aligned}, last token of a run{projection}"
    return f"{aligned}, pool {options.resolved_pool}{projection}"


def setting_lines(options: TrainOptions) -> str:
    """Return the lines that a training prints at its start. `options` must be resolved."""
    loss = _format(options.loss)
    length = f"{options.epochs:g} epochs" if options.steps is None else f"{options.steps} steps"
    settings = {name: value for name, value in options.chosen().items() if name not in DESCRIBED}
    extras = "".join(f", {name} {_format(value)}" for name, value in settings.items())
    ((unit, size),) = options.batching.items()
    scope = ""
    if options.stages:
        loss, scope = "by stage", " in each stage, and for each part that it unfreezes"
    rows = {
        "store": ", ".join((options.store, *options.others)),
        "student": f"{options.student}, vocabulary {options.vocab}, start {options.init}",
        "losses": "; ".join(filter(None, [loss, _describe_pairs(options)])),
        "training": (
            f"{length} of {size} x {options.accumulate} {unit.removeprefix('batch_')}{scope},"
            f" {options.optimizer}, lr {options.resolved_lr:.2g} {options.schedule},"
            f" seed {options.seed}{extras}"
        ),
        **{
            # Also 0, False and an empty list, which override a setting of the training.
            f"stage {n}": "; ".join(f"{name} {_format(value)}" for name, value in stage.items())
            for n, stage in enumerate(options.stages, 1)
        },
        "device": f"{options.device}, {options.precision}"
        + (f", cache {options.cache}" if options.cache != "none" else ""),
        "out": str(options.out_folder()),
    }
    return "\n".join(f"{name:9} {value}" for name, value in rows.items())


def how_to_resume(out: Path) -> str:
    """Return a line that names the last checkpoint of a stopped training, and how to continue."""
    from teachonce.training.checkpoint import newest_checkpoint

    # Before its first checkpoint a training has no training.json, and --resume would be refused.
    flag = " and --resume" if (out / "training.json").exists() else ""
    return f"{out}: {newest_checkpoint(out / 'checkpoints')}; continue with the same command{flag}"


def format_number(number: float) -> str:
    """Format a count with all digits, a measure with five significant digits."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.5g}"
