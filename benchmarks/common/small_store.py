"""Small stores that are dumped for a benchmark, and random teachers of any size."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from teachonce.student_train.settings.options import TrainOptions


def small_store(
    model: str, corpus: str, tokens: int, out: Path, logits: str | None = "none"
) -> None:
    """Dump the teacher's states, and logits if asked for, of some tokens."""
    from teachonce.teacher_dump.job.dump import dump
    from teachonce.teacher_dump.job.options import DumpOptions

    options = DumpOptions(
        model=model,
        corpus=(corpus,),
        out=out,
        limit=tokens,
        attention="none",
        logits=logits,
        max_length=128,
    )
    dump(options)


@contextmanager
def on_small_store(
    model: str, corpus: str, tokens: int, logits: str | None = "none", **options: Any
) -> Iterator[TrainOptions]:
    """Options for training on view 0 of a small store, with nothing held out.

    The store is removed at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.zarr"
        small_store(model, corpus, tokens, store, logits)
        yield TrainOptions(store=str(store), view=0, held_out=0.0, **options)


def random_teacher(folder: Path, like: str, head: bool = False, **config: int) -> str:
    """An encoder with random weights, of BERT-base's size where `config` says nothing else, and
    another teacher's tokenizer; with a masked-LM head if asked for."""
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

    from teachonce.checkpoints.names import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(like).path_or_id)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), **config}
    settings = BertConfig(**sizes)
    (BertForMaskedLM if head else BertModel)(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
