"""The command `student-export`."""

from __future__ import annotations

from typing import Any

import click

from teachonce.checkpoints.declared import config_of, declared_kind
from teachonce.checkpoints.names import resolve_vectors
from teachonce.student_export.options import (
    FORMATS,
    K_QUANT_FALLBACKS,
    ExportOptions,
    check_k_quants,
    check_kind,
    check_llama_cpp,
    check_new,
)
from teachonce.support import files
from teachonce.support.click_types import LocalPath
from teachonce.support.commands import OneLineCommand, examples, version_option
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.errors import UserError, suggest_path
from teachonce.support.options import click_options, default_of, flag_of, read_words
from teachonce.support.packages import check_library

HELP = """Export the student in FOLDER to ONNX, OpenVINO, TorchScript, GGUF or model2vec, and
compare each file with the student. FOLDER is a model of transformers or sentence-transformers.

\b
onnx         onnx/model.onnx, model_quantized.onnx (int8) or model_q4.onnx (int4):
             onnxruntime, transformers.js; decoders with their cache;
             `pip install 'teachonce[export]'`
openvino     openvino/openvino_model.xml, also in int8;
             `pip install 'teachonce[openvino]'`
torchscript  torchscript/model.pt: libtorch
gguf         decoders: gguf/model.gguf, model-q8_0.gguf and others: llama.cpp;
             `pip install 'teachonce[gguf]'`; compared with the student only if
             llama-cpp-python is installed
model2vec    static students: model2vec/model.safetensors, a table of word vectors

Each file includes the pooling and the modules after it. The folder also holds the tokenizer and
export.json, which lists inputs, output, labels and prompts. An export whose agreement with the
student is below --least is refused; if it was quantised, the message names the layers that lose
most. Size, time and memory are added to the model cards of both folders.
"""

EXAMPLES = examples(
    "student-export student --to onnx --out ready",
    "student-export student --to onnx --quantize int8 --check test.tsv --out checked",
)


def _parameters() -> list[click.Parameter]:
    folder = click.Argument(["folder"], type=LocalPath())
    return [folder, *click_options(ExportOptions)]


def _refuse_early(options: ExportOptions) -> None:
    """Raise UserError for a missing file or library, an existing --out, or a format that does not
    export this kind of student. Imports no torch."""
    check_new(options.out)
    if not options.folder.is_dir():
        near = suggest_path(options.folder)
        raise UserError(f"{options.folder}: no such folder; {near}give the folder of a student")
    if options.check is not None and not options.check.is_file():
        near = suggest_path(options.check)
        raise UserError(f"--check {options.check}: no such file; {near}check the path")
    if kind := declared_kind(config_of(resolve_vectors(str(options.folder)))):
        check_kind(options.to, kind)
    for name in options.to:
        for module in FORMATS[name].modules:
            check_library(module, FORMATS[name].extra, f"--to {name}")
    if options.quantize in K_QUANT_FALLBACKS:
        check_k_quants(options.quantize)
    # Without llama-cpp-python no comparison runs, and these options would have no effect.
    for name in ("check", "least") if "gguf" in options.to else ():
        if (value := getattr(options, name)) != default_of(ExportOptions, name):
            flag = flag_of(name)
            check_llama_cpp(f"{flag} {value}", f"leave {flag} out to export without a comparison")


@click.command(
    cls=OneLineCommand,
    help=HELP,
    epilog=EXAMPLES,
    context_settings=CONTEXT,
    params=_parameters(),
)
@version_option
@command_errors
def main(**values: Any) -> None:
    """Read the options, check them and export."""
    given = {name: value for name, value in values.items() if value not in (None, ())}
    options = ExportOptions(**read_words(ExportOptions, given))
    files.check_utf8(options.out)
    _refuse_early(options)
    from transformers.utils import logging

    from teachonce.student_export.job import export

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    export(options, click.echo)
