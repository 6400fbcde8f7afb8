"""A dump in a process that is going to be killed: `main` takes MODEL CORPUS OUT."""

from __future__ import annotations

import sys
from pathlib import Path

from teacher_dump.job.dump import dump
from teacher_dump.job.options import DumpOptions
from tests.end_to_end.support import dump_options


def options(model: Path, corpus: Path, out: Path, seed: int = 0) -> DumpOptions:
    """A dump of many small parts."""
    return dump_options(
        *(model, corpus, out),
        **{"seed": seed, "part_tokens": 400, "batch_tokens": 256, "logits": "sample:9"},
        **{"views": 2, "mask_words": "rare"},
    )


def main() -> None:
    dump(options(*map(Path, sys.argv[1:4])))
