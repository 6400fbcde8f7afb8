"""The options of `student-predict`: the values and the default of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from teachonce.checkpoints.declared import config_of, declared_kind
from teachonce.checkpoints.names import EXPORTED, resolve_vectors
from teachonce.student_export.options import DECODER
from teachonce.support.errors import UserError
from teachonce.support.option_types import MaybePath
from teachonce.support.options import at_least, names_options, option, parse_values


def check_folder(folder: Path) -> None:
    """Raise UserError for a folder that is not a model, and for a decoder. Imports no torch."""
    if declared_kind(config_of(resolve_vectors(str(folder)))) == DECODER:
        raise decoder_refused(folder)


def decoder_refused(folder: Path) -> UserError:
    # transformers cannot load an export; its README.md shows how to run it.
    run = "as its README.md shows"
    if not (folder / EXPORTED).is_file():
        run = "with pipeline('text-generation') of transformers"
    return UserError(
        f"{folder}: is a decoder, which continues a text instead of answering about it; run it"
        f" {run}"
    )


def _column(role: str) -> str | None:
    """Return a field with the name of the column of --input that holds `role`."""
    column: str | None = option(None, f"Read this column of --input instead of `{role}`.")
    return column


@names_options("student-predict")
@dataclass(frozen=True)
class PredictOptions:
    """Holds the options of a prediction. Raises UserError for a wrong value."""

    folder: Path
    texts: tuple[str, ...] = ()
    input: MaybePath = option(
        None,
        "Read texts from this file: the lines of a .txt, or column text (text_a and text_b for"
        " pairs) of a .tsv, .csv, .jsonl or .parquet. For a tagger also a file of words and tags"
        " (word<TAB>tag, CoNLL), or lists of words in column tokens or words of a table.",
        default_text="the words of the command line; without any, the lines of stdin",
    )
    pairs: bool = option(False, "Read each line or TEXT as two texts with a TAB between them.")
    file: str | None = option(
        None, "Run this file of an export.", default_text="the first that export.json lists"
    )
    top: int | None = option(
        None,
        "Print the N best labels of a text, or pieces of a mask.",
        within=at_least(1),
        default_text="all labels, 5 pieces",
    )
    format: str = option(
        "jsonl",
        "Print JSON lines (jsonl), or tab-separated lines (tsv): for a tagger a word, a TAB and"
        " its tag, with an empty line between texts; for a classifier a table of texts and labels.",
        choices=("jsonl", "tsv"),
    )
    text_column: str | None = _column("text")
    text_a_column: str | None = _column("text_a")
    text_b_column: str | None = _column("text_b")

    def __post_init__(self) -> None:
        parse_values(self)
        if self.input and self.texts:
            raise UserError("give texts on the command line or --input, not both")
        if self.columns and not self.input:
            raise UserError("--text-column, --text-a-column and --text-b-column need --input FILE")
        if self.top is not None and self.format == "tsv":
            raise UserError("--top: --format tsv prints the best label alone; leave --top out")

    @property
    def columns(self) -> dict[str, str]:
        """Return the column names that were given, by role (`text`, `text_a`, `text_b`)."""
        named = {
            "text": self.text_column,
            "text_a": self.text_a_column,
            "text_b": self.text_b_column,
        }
        return {role: name for role, name in named.items() if name is not None}
