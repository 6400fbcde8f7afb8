"""The commands that make stores of other tools' captures, and captures of stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from teachonce.checkpoints.names import ALIASES
from teachonce.feature_store.captures import formats
from teachonce.feature_store.output import Output, bars, printed, written
from teachonce.store.format.codecs.levels import BUILT_IN, GROUP
from teachonce.support.completion import PATH, Text
from teachonce.support.errors import UserError
from teachonce.support.grouped_help import examples
from teachonce.support.plugins import NameOrAdded

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
say = partial(click.echo, err=True)


@click.command(
    "import",
    epilog=examples(
        "feature-store import capture store.zarr --tokenizer my-teacher",
        "feature-store import run store.zarr --tokenizer my-teacher --tokens tokens.npy",
    ),
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=NameOrAdded(formats.FORMATS, formats.GROUP),
    help="What SOURCE is, where it cannot be seen.",
)
@click.option(
    "--tokenizer",
    metavar="MODEL",
    type=Text(ALIASES, paths=True),
    help="The teacher, named as for teacher-dump, or the folder of its tokenizer.",
)
@click.option(
    "--codec", type=NameOrAdded(BUILT_IN, GROUP), default="default", help="As in teacher-dump."
)
@click.option(
    "--compression",
    metavar="FILE",
    type=FILE,
    help="Settings of DistillKit's compression, where they do not lie beside the capture.",
)
@click.option(
    "--tokens",
    metavar="FILE.npy",
    type=FILE,
    help="Tokens of the run that wrote Megatron-LM's archives: [sequences, tokens].",
)
@click.option(
    "--layers",
    metavar="I,J,...",
    help="Which layers captured states are of, if not the tool's own: 0 is the embeddings.",
)
@click.option("--text-column", metavar="NAME", help="The column that vectors in `label` are of.")
@click.option(
    "--max-length",
    type=click.IntRange(min=3),
    help="Tokens that a text with a vector is cut to: 256, or the tokenizer's own limit.",
)
@printed
def import_(
    source: Path, target: Path, kind: str | None, layers: str | None, **given: Any
) -> Iterator[Output]:
    """Make a store of what another tool has captured of a teacher.

    SOURCE is a capture of DistillKit (Parquet of logits), of Megatron-LM (archives of the best
    logits), of speculators or SpecForge (a file of states for each sample), or a folder of datasets
    with texts and their vectors in `label`. Its ids become texts by --tokenizer; tokens that cannot
    are told and left out. After a stop the same command goes on.
    """
    from teachonce.feature_store.arguments import read_layers

    numbers = read_layers(layers)
    if target.suffix not in (".zarr", ".h5"):
        raise UserError(f"{target}: expected a name that ends in .zarr or .h5")
    from teachonce.feature_store.captures.importing import import_capture

    options = formats.ImportOptions(source, target, kind, layers=numbers, **given)
    summary = import_capture(options, say, bars)
    yield Output(asdict(summary), summary.lines())
    yield written(str(target))


@click.command(
    epilog=examples(
        "feature-store export store.zarr rows --to parquet",
        "feature-store export store.zarr vectors --to sentence-transformers",
    )
)
@click.argument("store", type=PATH)
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to", "kind", type=click.Choice(formats.EXPORTS), required=True, help="What to write."
)
@click.option("--columns", metavar="A,B,...", help="Of parquet and datasets, instead of all.")
@click.option(
    "--floats",
    type=click.Choice(["float32", "float16"]),
    help="States, maps and vectors of parquet and datasets: float32 by default.",
)
@printed
def export(
    store: str, target: Path, kind: str, columns: str | None, floats: str | None
) -> Iterator[Output]:
    """Write a store in the form that another tool reads.

    parquet and datasets hold everything, a row for each sequence. sentence-transformers is a folder
    of datasets with `sentence` and `label`, the teacher's vector, for its trainers. distillkit is
    Parquet of the best logits of a causal teacher, with the settings of compression beside it.
    """
    if kind not in ("parquet", "datasets") and (columns or floats):
        option = "--columns" if columns else "--floats"
        raise UserError(f"{option}: is of use for --to parquet and datasets alone; leave it out")
    if target.exists():
        raise UserError(f"{target}: exists already; remove it, or choose another name")
    from teachonce.feature_store.captures.exporting import export_store

    names = tuple(columns.split(",")) if columns else None
    told = export_store(store, target, kind, names, floats or "float32")
    yield Output(asdict(told), [told.line()])
