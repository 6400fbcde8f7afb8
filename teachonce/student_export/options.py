"""The options of `student-export`: what each may be, and its default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from teachonce.support.errors import UserError
from teachonce.support.options import Range, check_values, option

FORMATS = ("onnx", "openvino", "torchscript")
QUANTISED = {"onnx": ("int8", "int4"), "openvino": ("int8",), "torchscript": ()}
"""What of --quantize each format can do."""
LIBRARIES = {
    "onnx": ("export", ("onnx", "onnxscript", "onnxruntime")),
    "openvino": ("openvino", ("onnx", "onnxscript", "openvino")),
}
"""The extra of a format, and the modules that it needs."""
WITHOUT = {
    "gguf": "llama.cpp's converter is on no package index, and it reads its own list of"
    " architectures"
}
"""Formats that people ask for, and why they are not there."""


def _check_formats(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in FORMATS:
            why = f" ({WITHOUT[name]})" if name in WITHOUT else ""
            raise UserError(f"--to {name}: expected one of {', '.join(FORMATS)}{why}")


@dataclass(frozen=True)
class ExportOptions:
    """What to export, to what, and how much it must keep. Raises UserError for a wrong value."""

    folder: Path
    out: Path = option(None, "A new folder.", required=True)
    to: tuple[str, ...] = option(
        (),
        f"The format: {', '.join(FORMATS)}. Repeatable.",
        repeated=True,
        words=FORMATS,
        check=_check_formats,
    )
    quantize: str = option(
        "",
        "Weights in int8 (a quarter of the bytes) or in int4 (of onnx).",
        choices=("", "int8", "int4"),
    )
    keep_float: tuple[str, ...] = option(
        (), "A layer that is not quantised, with all that is in it. Repeatable.", repeated=True
    )
    check: Path | None = option(
        None,
        "Labelled examples as downstream --test reads them, whose score is compared, or a .txt"
        " whose lines both read.",
        default_text="texts of random pieces, whose outputs are compared",
    )
    least: float = option(
        0.99,
        "Share of the student's score, or agreement with it, that an export must keep.",
        within=Range("a share above 0, at most 1", low=0, high=1, open_low=True),
    )

    def __post_init__(self) -> None:
        check_values(self)
        if not self.to:
            raise UserError(f"--to is needed: one of {', '.join(FORMATS)}")
        for name in self.to:
            if self.quantize and self.quantize not in QUANTISED[name]:
                able = [each for each, kinds in QUANTISED.items() if self.quantize in kinds]
                raise UserError(
                    f"--quantize {self.quantize}: {name} has none; give --to {' or '.join(able)},"
                    " or leave --quantize out"
                )
        if self.keep_float and not self.quantize:
            raise UserError("--keep-float needs --quantize; leave it out, for all is in float32")
