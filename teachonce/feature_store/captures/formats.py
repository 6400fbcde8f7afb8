"""The formats of captures, and the options of an import."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.support.errors import UserError, suggest, suggest_path
from teachonce.support.options import flag_of, names_options
from teachonce.support.packages import added_object
from teachonce.teacher_dump.job.option_values import PART_TOKENS

if TYPE_CHECKING:
    from teachonce.feature_store.captures.sample import Capture
    from teachonce.feature_store.captures.teacher_files import TeacherFiles

_MODULES = "teachonce.feature_store.captures"
BUILT_IN = {
    "distillkit": ("distillkit", "FORMAT"),
    "megatron": ("megatron", "FORMAT"),
    "vllm": ("engine_rows", "VLLM"),
    "sglang": ("engine_rows", "SGLANG"),
    "speculators": ("hidden_files", "SPECULATORS"),
    "specforge": ("hidden_files", "SPECFORGE"),
    "sentence-transformers": ("cached_vectors", "FORMAT"),
}
"""Module and name of each `Format` of this package."""
FORMATS = tuple(BUILT_IN)
GROUP = "teachonce.captures"
"""Group of entry points by which other packages add formats; each names a `Format`."""

EXPORTS = ("parquet", "datasets", "sentence-transformers", "distillkit")
"""Names of the formats in which a store can be exported."""


@names_options("feature-store import")
@dataclass(frozen=True)
class ImportOptions:
    """Holds the options of `feature-store import`.

    layers: the layers of the captured states in the store's numbering (0 is the output of the
    embeddings), the last layer included. model: the checkpoint with which a sample of captured
    logits or states is compared. prompt: the text that the teacher read before each text.
    """

    source: Path
    target: Path
    format: str | None = None
    tokenizer: str | None = None
    codec: str = "default"
    compression: Path | None = None
    tokens: Path | None = None
    layers: tuple[int, ...] = ()
    text_column: str | None = None
    max_length: int | None = None
    prompt: str | None = None
    part_tokens: int = PART_TOKENS
    model: str | None = None

    def check(self, takes: frozenset[str], name: str) -> None:
        """Raise UserError for an option that does not apply to format `name`."""
        scoped = {"compression", "tokens", "layers", "text_column", "max_length", "prompt", "model"}
        for key in sorted(scoped - takes):
            if getattr(self, key) not in (None, ()):
                raise UserError(
                    f"{flag_of(key)}: does not apply to a capture of {name}; leave it out"
                )


@dataclass(frozen=True)
class Format:
    """Defines a format of captures. `takes` names the fields of ImportOptions that apply to it.

    recognises: whether a path holds a capture of this format. open: opens the capture.
    """

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[ImportOptions, TeacherFiles], Capture]
    takes: frozenset[str] = frozenset()


def _load_format(name: str) -> Format:
    """Load the format `name` of this or of an installed package. Raises UserError if no package has
    it."""
    if name in BUILT_IN:  # imported by name, so that --help loads no reader
        module, attribute = BUILT_IN[name]
        loaded: Any = getattr(import_module(f"{_MODULES}.{module}"), attribute)
    else:
        loaded = added_object(GROUP, name)
    if loaded is None:
        raise UserError(
            f"--format {name}: {suggest(name, FORMATS)}expected one of {', '.join(FORMATS)}; if"
            f" another package adds it ({GROUP}), install that package"
        )
    if not isinstance(loaded, Format):
        raise UserError(f"--format {name}: expected a Format, got {type(loaded).__name__}")
    return loaded


def format_of(options: ImportOptions) -> Format:
    """Return the format that --format names, or recognise it from the files.

    Raises UserError for a missing path, for an option that does not apply to the format, and if no
    format or several fit the files.
    """
    source = options.source
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; {suggest_path(source)}check the path")
    kind = source.stat().st_mode  # opening a pipe would wait forever
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise UserError(f"{source}: is a pipe or a device; give a file or a folder")
    names = FORMATS if options.format is None else (options.format,)
    formats = [f for f in map(_load_format, names) if options.format or f.recognises(source)]
    if not formats:
        raise UserError(
            f"{source}: is not a capture of a known format ({', '.join(FORMATS)}); check the path,"
            " or name its format with --format"
        )
    if len(formats) > 1:
        raise UserError(
            f"{source}: may be a capture of {' or of '.join(f.name for f in formats)}; choose"
            " one of these with --format"
        )
    options.check(formats[0].takes, formats[0].name)
    return formats[0]
