"""What an import is told: the capture, the store, and what the capture itself does not tell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.options import PART_TOKENS

FORMATS = ("distillkit", "megatron", "speculators", "specforge", "sentence-transformers")
"""Names of the captures that can be read; `registry` has an entry for each."""

EXPORTS = ("parquet", "datasets", "sentence-transformers", "distillkit")
"""Names of what a store can be written as."""


@dataclass(frozen=True)
class ImportOptions:
    """The words of `feature-store import`.

    `layers` are the layers of the captured states as a store counts them, the last one included.
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
    part_tokens: int = PART_TOKENS

    def check(self, takes: frozenset[str], name: str) -> None:
        """Raise UserError for an option that captures in format `name` have no use for."""
        own = {"compression", "tokens", "layers", "text_column", "max_length"}
        for key in sorted(own - takes):
            if getattr(self, key):
                raise UserError(
                    f"--{key.replace('_', '-')}: is of no use for a capture of {name}; leave it out"
                )
