"""`teacher-dump`: run the teacher once and keep what it knew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from store.console import CONTEXT, command_errors, counted
from teacher_dump.options import DumpOptions

HELP = """Run a teacher once over a corpus and write what it knew about every token into a store.

A dump that was stopped continues where it was: type the same command again.
"""


@click.command(help=HELP, context_settings=CONTEXT)
@click.option(
    "--model", required=True, help="Teacher: model id, folder, or an alias (rubert-base, minilm)."
)
@click.option(
    "--corpus",
    multiple=True,
    help=(
        "Text: .txt (a document a line), .jsonl/.csv/.tsv/.parquet, token/tag .tsv, a folder,"
        " hf:NAME[@CONFIG][:SPLIT], or python-docs. Repeatable. Default: the alias's own corpus,"
        " else python-docs (embedded)."
    ),
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The store: NAME.zarr or NAME.h5."
)
@click.option(
    "--text-column", help="Column with the text in .jsonl/.csv/.tsv/.parquet and hf: sources."
)
@click.option(
    "--label-column",
    help="Column with the gold label, by name or number, for a teacher that classifies texts.",
)
@click.option(
    "--head",
    type=click.Choice(["auto", "mlm", "classification", "tagging", "causal", "none"]),
    default="auto",
    help=(
        "Head to read logits from; auto takes what the checkpoint was fine-tuned for"
        " (classification, tagging), else its masked-LM head."
    ),
)
@click.option(
    "--logits",
    help="Of an LM head: topk:K | sample:DRAWS | head | none.  [default: topk:64]",
)
@click.option(
    "--hidden",
    default="mean",
    help="mean | groups:N | layer:I (0 = embeddings) | none; a comma list for several.",
)
@click.option("--attention", default="mean", help="mean | groups:N | none.")
@click.option(
    "--views",
    default=1,
    help="Forward passes over each sequence; view 0 is plain, the others have words masked.",
)
@click.option("--mask-prob", default=0.15, help="Share of words masked in views 1, 2, ...")
@click.option("--seed", default=0, help="Seed of masks and draws.")
@click.option(
    "--codec",
    type=click.Choice(["default", "exact", "small"]),
    default="default",
    help="Precision of what is kept.",
)
@click.option(
    "--max-length",
    type=int,
    help=(
        "Longest window in tokens, special ones included.  [default: 256 or the teacher's own"
        " limit]"
    ),
)
@click.option("--stride", default=0, help="Tokens by which windows of one document overlap.")
@click.option(
    "--batch-tokens",
    default=8192,
    help="Tokens of a teacher batch, padding included: bounds memory.",
)
@click.option("--device", default="auto", help="auto | cpu | cuda | cuda:N.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
    default="auto",
    help="auto: bf16 on a GPU, else fp32.",
)
@click.option("--limit", type=int, help="Stop after this many tokens of the corpus.")
@click.option(
    "--weights/--no-weights",
    default=True,
    help="Keep the encoder's weights (fp16), from which students start.",
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint."
)
@command_errors
def main(**arguments: Any) -> None:
    from teacher_dump.dump import dump  # torch and transformers load only for work, not for --help

    corpus = tuple(word for value in arguments.pop("corpus") for word in value.split(",") if word)
    options = DumpOptions(corpus=corpus, **arguments)
    done = dump(options, say=click.echo)
    resumed = f" ({done.resumed_parts:,} of them from before)" if done.resumed_parts else ""
    click.echo(
        f"{options.out}: {counted(done.tokens, 'token')} in {counted(done.sequences, 'sequence')}"
        f" of {counted(done.documents, 'document')}, {counted(done.parts, 'part')}{resumed};"
        f" {counted(done.empty_lines, 'empty line')} skipped"
    )
    if done.task == "classification":
        click.echo(f"{counted(done.gold, 'sequence')} with a gold label")
    elif done.task == "tagging":
        click.echo(f"{counted(done.gold, 'token')} with a gold tag")
    if done.without_tokens:
        click.echo(f"{counted(done.without_tokens, 'window')} without any token left out")
    if done.task == "classification" and done.cut:
        click.echo(f"{counted(done.cut, 'document')} cut at the longest sequence (--max-length)")
    if done.surrogates:
        held = counted(done.surrogates, "character")
        click.echo(f"{held} that UTF-8 cannot hold replaced by U+FFFD")
    if done.halved:
        click.echo(f"{done.halved:,} batches did not fit into the memory: run in halves")
    if done.widened:
        click.echo(f"{done.widened:,} times a sequence gave NaN or infinity: run in float32")
    click.echo(f"next: student-train --store {options.out} --vocab 5k (or what its text can give)")
