"""The `student-export` command: a student's folder in, a folder that runs without torch out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from teachonce.checkpoints.names import resolve_vectors
from teachonce.student_export.options import LIBRARIES, ExportOptions
from teachonce.support import files
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.errors import UserError
from teachonce.support.extras import check_library
from teachonce.support.options import click_options, read_words

HELP = """Export the student in FOLDER, of transformers or sentence-transformers, to files that run
where the user runs them, and check that they do what the student does.

\b
onnx         onnx/model.onnx, model_quantized.onnx (int8) or model_q4.onnx (int4):
             onnxruntime, transformers.js; `pip install 'teachonce[export]'`
openvino     openvino/openvino_model.xml, also in int8;
             `pip install 'teachonce[openvino]'`
torchscript  torchscript/model.pt: libtorch

The pooling and the steps behind it are in the file. The tokenizer lies beside it, and export.json
names inputs, output, labels and prompts. An export that keeps less than --least of the student is
refused; it then says which layers lose most when they are quantised. Size, time and memory stand in
the model cards of both folders.
"""


def _parameters() -> list[click.Parameter]:
    folder = click.Argument(["folder"], type=click.Path(path_type=Path))
    return [folder, *click_options(ExportOptions)]


def _refuse_early(options: ExportOptions) -> None:
    """Raise UserError for what is not there, or is there already, before torch is loaded."""
    if options.out.exists():
        raise UserError(f"--out {options.out}: exists already; choose another")
    if options.check is not None and not options.check.is_file():
        raise UserError(f"--check {options.check}: no such file; check the path")
    resolve_vectors(str(options.folder))
    for name in options.to:
        extra, modules = LIBRARIES.get(name, ("", ()))
        for module in modules:
            check_library(module, extra, f"--to {name}")


@click.command(help=HELP, context_settings=CONTEXT, params=_parameters())
@command_errors
def main(**words: Any) -> None:
    """Read what was asked, export."""
    given = {name: value for name, value in words.items() if value not in (None, ())}
    options = ExportOptions(**read_words(ExportOptions, given))
    files.check_utf8(options.out)
    _refuse_early(options)
    from transformers.utils import logging

    from teachonce.student_export.job import export

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    export(options, click.echo)


if __name__ == "__main__":
    main()
