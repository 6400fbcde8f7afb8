"""Options that `teacher-dump` and `teacher-dump mixed-vocab` have alike."""

from __future__ import annotations

from pathlib import Path

import click

from store.format.codecs.levels import LEVELS

model = click.option(
    "--model", required=True, help="Teacher: model id, folder, or an alias (rubert-base, minilm)."
)
corpus = click.option(
    "--corpus",
    multiple=True,
    help=(
        "Text: .txt (a document a line), .jsonl/.csv/.tsv/.parquet, token/tag .tsv, a folder,"
        " hf:NAME[@CONFIG][:SPLIT], or python-docs. Repeatable. Default: the alias's own corpus,"
        " else python-docs (embedded)."
    ),
)
out = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The store: NAME.zarr or NAME.h5."
)
text_column = click.option(
    "--text-column", help="Column with the text in .jsonl/.csv/.tsv/.parquet and hf: sources."
)
codec = click.option(
    "--codec",
    type=click.Choice(sorted(LEVELS)),
    default="default",
    help="Precision of what is kept.",
)
batch_tokens = click.option(
    "--batch-tokens",
    default=8192,
    help="Tokens of a teacher batch, padding included: bounds memory.",
)
device = click.option("--device", default="auto", help="auto | cpu | cuda | cuda:N.")
precision = click.option(
    "--precision",
    type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
    default="auto",
    help="auto: bf16 on a GPU, else fp32.",
)
limit = click.option("--limit", type=int, help="Stop after this many tokens of the corpus.")
trust_remote_code = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the checkpoint."
)


def listed(corpus: tuple[str, ...]) -> tuple[str, ...]:
    """The sources of a repeated `--corpus`, each perhaps a comma list."""
    return tuple(word for value in corpus for word in value.split(",") if word)
