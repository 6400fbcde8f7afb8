"""The commands `import` and `export`, which exchange stores and captures with other tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from teachonce.checkpoints.names import ALIASES
from teachonce.feature_store.captures import formats
from teachonce.feature_store.output import Output, bars, printed, say, written
from teachonce.store.format.codecs.levels import BUILT_IN, GROUP
from teachonce.support import files
from teachonce.support.click_types import PATH, LocalPath, NameOrAdded, Names, Text
from teachonce.support.commands import examples
from teachonce.support.errors import UserError

FILE = LocalPath(exists=True, dir_okay=False)


@click.command(
    "import",
    epilog=examples(
        "feature-store import capture store.zarr --model my-teacher",
        "feature-store import run store.zarr --tokenizer my-teacher --tokens tokens.npy",
    ),
)
@click.argument("source", type=LocalPath())
@click.argument("target", type=LocalPath())
@click.option(
    "--format",
    "kind",
    type=NameOrAdded(formats.FORMATS, formats.GROUP),
    help="Read SOURCE in this format.  [default: recognised from its files]",
)
@click.option(
    "--tokenizer",
    metavar="MODEL",
    type=Text(ALIASES, paths=True),
    help="Decode ids with the tokenizer of this teacher, named as for teacher-dump, or of its"
    " folder.  [default: --model]",
)
@click.option(
    "--model",
    type=Text(ALIASES, paths=True),
    help="Compare a sample of captured logits or states with this checkpoint, and refuse them if"
    " they differ by more than the numerical error of an inference engine.  [default: not"
    " compared]",
)
@click.option(
    "--codec",
    type=NameOrAdded(BUILT_IN, GROUP),
    default="default",
    show_default=True,
    help="Store values by this codec, as in teacher-dump.",
)
@click.option(
    "--compression",
    metavar="FILE",
    type=FILE,
    help="Read the settings of DistillKit's compression from this file.  [default:"
    " compression_config.yaml in the folder of SOURCE]",
)
@click.option(
    "--tokens",
    metavar="FILE.npy",
    type=FILE,
    help="Read the token ids [sequences, tokens] of the run that wrote Megatron-LM's archives from"
    " this file.",
)
@click.option(
    "--layers",
    metavar="I,J,...",
    help="Give the numbers of the captured layers, in the order of the states; 0 is the output of"
    " the embeddings.  [default: the tool's default layers]",
)
@click.option(
    "--text-column",
    metavar="NAME",
    help="Read the texts whose vectors are in `label` from this column.  [default: the only column"
    " of texts]",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=3),
    help="Truncate texts that have a vector to N tokens.  [default: 256, or the tokenizer's limit"
    " if it is less]",
)
@click.option(
    "--prompt",
    metavar="TEXT",
    help="Put this prompt before each text that has a vector; the teacher computed the vectors with"
    " it.  [default: none]",
)
@printed
def import_(
    source: Path, target: Path, kind: str | None, layers: str | None, **given: Any
) -> Iterator[Output]:
    """Write a store from a capture of another tool.

    SOURCE is a capture of DistillKit (Parquet of logits), of Megatron-LM (archives of top-k
    logits), of vLLM or SGLang (Parquet of examples/capture_vllm.py or capture_sglang.py), of
    speculators or SpecForge (a file of states for each sample), or a folder of datasets with texts
    and their vectors in `label`. Ids are decoded with --tokenizer; tokens that differ if their text
    is tokenized again are left out and counted. After a stop, the same command continues.
    """
    from teachonce.feature_store.arguments import read_layers

    numbers = read_layers(layers)
    if target.suffix not in (".zarr", ".h5"):
        raise UserError(
            f"{target}: expected a name that ends in .zarr or .h5 for the new store, such as"
            " store.zarr"
        )
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
@click.argument("target", type=LocalPath())
@click.option(
    "--to", "kind", type=Names(formats.EXPORTS), required=True, help="Write TARGET in this format."
)
@click.option(
    "--columns",
    metavar="A,B,...",
    help="Write only these columns of parquet or datasets.  [default: all]",
)
@click.option(
    "--floats",
    type=Names(["float32", "float16"]),
    help="Write states, maps and vectors of parquet and datasets in this dtype.  [default:"
    " float32]",
)
@printed
def export(
    store: str, target: Path, kind: str, columns: str | None, floats: str | None
) -> Iterator[Output]:
    """Write a store in the format of another tool.

    parquet and datasets hold all features, with a row for each sequence. sentence-transformers is a
    folder of datasets with `sentence` and `label` (the teacher's vector) for its trainers.
    distillkit is Parquet with the top-k logits of a causal teacher, and a file with the settings of
    compression.
    """
    if kind not in ("parquet", "datasets") and (columns is not None or floats):
        option = "--columns" if columns is not None else "--floats"
        raise UserError(f"{option}: applies only to --to parquet and datasets; leave it out")
    if files.is_taken(target):
        raise UserError(f"{target}: exists already; remove it, or choose another name")
    from teachonce.feature_store.captures.exporting import export_store

    names = None if columns is None else tuple(columns.split(","))
    exported = export_store(store, target, kind, names, floats or "float32")
    yield Output(asdict(exported), [exported.line()])
