"""A dump in a process that is going to be killed."""

from pathlib import Path

from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from tests.making.dumps import dump_options


def options(model: Path, corpus: Path, out: Path, seed: int = 0) -> DumpOptions:
    """Return the options of a dump with many small parts."""
    return dump_options(
        model, corpus, out,
        seed=seed, part_tokens=400, batch_tokens=256, logits="sample:9", views=2, mask_words="rare",
    )  # fmt: skip


def run(model: Path, corpus: Path, out: Path) -> None:
    dump(options(model, corpus, out))
