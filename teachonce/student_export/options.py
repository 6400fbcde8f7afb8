"""The options of `student-export`: the values and the default of each."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from teachonce.downstream.options import COLUMN, DownstreamOptions
from teachonce.support import files
from teachonce.support.errors import UserError, suggest
from teachonce.support.option_types import MaybePath, SomePath, Words
from teachonce.support.options import (
    Range,
    flag_of,
    names_options,
    option,
    parse_values,
    same_option,
)

DECODER = "causal"
ENCODERS = ("mlm", "classification", "tagging", "embedding")
"""The kinds of students: one predicts next tokens, the others answer about a whole text."""
GGUF = ("f16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0")
K_QUANT_FALLBACKS = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0"}
"""Types that llama.cpp quantises to and the package gguf does not, each with the type of rows whose
length is not a multiple of its block of 256, as llama-quantize chooses it."""


@dataclass(frozen=True)
class FormatSupport:
    """Holds what a format supports and needs; `formats/registry.py` has its functions.

    kinds: the kinds of students that it exports. quantised: its values of --quantize.
    modules: what it needs, installed by the pip extra `extra`.
    """

    kinds: tuple[str, ...]
    quantised: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    extra: str = ""


FORMATS = {
    "onnx": FormatSupport(
        (*ENCODERS, DECODER), ("int8", "int4"), ("onnx", "onnxscript", "onnxruntime"), "export"
    ),
    "openvino": FormatSupport(ENCODERS, ("int8",), ("onnx", "onnxscript", "openvino"), "openvino"),
    "torchscript": FormatSupport(ENCODERS),
    "gguf": FormatSupport((DECODER,), GGUF, ("gguf",), "gguf"),
    "model2vec": FormatSupport(("embedding",)),
}


def _check_formats(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in FORMATS:
            raise UserError(
                f"--to {name}: {suggest(name, FORMATS)}expected one of {', '.join(FORMATS)}"
            )


def check_kind(names: tuple[str, ...], kind: str) -> None:
    """Raise UserError for a format that does not export this kind of student."""
    able = [name for name, format in FORMATS.items() if kind in format.kinds]
    for name in names:
        if name not in able:
            models = "decoders" if kind == DECODER else "students other than decoders"
            if name == "model2vec":
                models = "models other than static students"
            raise UserError(f"--to {name}: does not export {models}; give --to {' or '.join(able)}")


def check_new(out: Path) -> None:
    """Raise UserError if `out` exists, also as a link to a missing file."""
    if files.is_taken(out):
        raise UserError(f"--out {out}: exists already; choose another")


def _column(role: str) -> str | None:
    """Return a field with the name of the column of --check that holds `role`."""
    help = f"Read this column of --check instead of `{role}`."
    column: str | None = same_option(DownstreamOptions, f"{role}{COLUMN}", None, help=help)
    return column


@names_options("student-export")
@dataclass(frozen=True)
class ExportOptions:
    """Holds the options of an export. Raises UserError for a wrong value."""

    folder: Path
    out: SomePath = option(None, "Write to this folder, which must not exist.", required=True)
    to: Words = option(
        (),
        f"Export to this format: {', '.join(FORMATS)}. Repeatable.",
        repeated=True,
        words=FORMATS,
        check=_check_formats,
    )
    quantize: str | None = option(
        None,
        "Quantise the weights: onnx to int8 (a quarter of the bytes) or int4, openvino to int8,"
        f" gguf to {', '.join(GGUF)}.",
        words=("int8", "int4", *GGUF),
        default_text="float32",
    )
    keep_float: Words = option(
        (), "Leave this layer and its submodules in float32. Repeatable.", repeated=True
    )
    check: MaybePath = option(
        None,
        "Compare the score on these labelled examples (files as for downstream --test), or the"
        " outputs for the lines of a .txt.",
        default_text="compare the outputs for texts of random pieces",
    )
    least: float = option(
        0.99,
        "Refuse an export whose score, as a share of the student's, or agreement with its outputs"
        " is below this number.",
        within=Range("a share above 0, at most 1", low=0, high=1, open_low=True),
    )
    text_column: str | None = _column("text")
    label_column: str | None = _column("label")
    text_a_column: str | None = _column("text_a")
    text_b_column: str | None = _column("text_b")
    score_column: str | None = _column("score")

    def __post_init__(self) -> None:
        parse_values(self)
        if not self.to:
            raise UserError(f"--to is missing: give one of {', '.join(FORMATS)}")
        unable = [name for name in self.to if self.quantize not in FORMATS[name].quantised]
        if self.quantize and unable:
            first, *others = (FORMATS[name].quantised for name in (unable[0], *self.to))
            common = [kind for kind in first if all(kind in other for other in others)]
            able = [name for name, each in FORMATS.items() if self.quantize in each.quantised]
            remedies = [f"give --quantize {' or '.join(common)}"] if common else []
            remedies += [f"give --to {' or '.join(able)}"] if able else []
            raise UserError(
                f"--quantize {self.quantize}: {unable[0]} does not support it;"
                f" {', or '.join([*remedies, 'leave --quantize out'])}"
            )
        if self.keep_float and not self.quantize:
            raise UserError(
                "--keep-float needs --quantize; without it all layers are in float32, leave"
                " --keep-float out"
            )
        if self.columns and not self.check:
            flags = column_flags(self.columns)
            raise UserError(f"{flags}: needs --check FILE, the labelled examples with this column")

    @property
    def columns(self) -> dict[str, str]:
        """Return the names of columns that were given, by role (`text`, `label`, ...)."""
        given = {name: each for name, each in vars(self).items() if name.endswith(COLUMN) and each}
        return {name.removesuffix(COLUMN): each for name, each in given.items()}


def column_flags(roles: Iterable[str]) -> str:
    """Return the options that name the columns of these roles, as they are typed."""
    return ", ".join(flag_of(f"{role}{COLUMN}") for role in roles)


def check_llama_cpp(given: str, instead: str) -> None:
    """Raise UserError if llama-cpp-python is not installed.

    given: the option that needs it, as it is typed. instead: what to do without the package, for
        the message.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise UserError(
            f"{given}: needs llama_cpp, which is missing; `pip install llama-cpp-python`, or"
            f" {instead}"
        )


def check_k_quants(kind: str) -> None:
    """Raise UserError if llama-cpp-python, which quantises to `kind`, is not installed."""
    check_llama_cpp(f"--quantize {kind}", "give --quantize q4_0, q5_0 or q8_0")
