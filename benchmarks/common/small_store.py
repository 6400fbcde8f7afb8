"""Small stores that are dumped for a benchmark, and random teachers of any size."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from teachonce.student_train.settings.options import TrainOptions


def small_store(
    model: str,
    corpus: str,
    tokens: int,
    out: Path,
    logits: str | None = "none",
    hidden: str = "auto",
) -> None:
    """Dump the teacher's states (`hidden="none"`: none), and optionally logits, of some tokens."""
    from teachonce.teacher_dump.job.dump import dump
    from teachonce.teacher_dump.job.options import DumpOptions

    options = DumpOptions(
        model=model,
        corpus=(corpus,),
        out=out,
        limit=tokens,
        attention="none",
        logits=logits,
        hidden=hidden,
        max_length=128,
    )
    dump(options)


@contextmanager
def on_small_store(model: str, corpus: str, tokens: int, **options: Any) -> Iterator[TrainOptions]:
    """Make options for training on view 0 of a small store, with nothing held out.

    The store is removed at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.zarr"
        small_store(model, corpus, tokens, store)
        yield TrainOptions(store=str(store), view=0, held_out=0.0, **options)


def random_teacher(folder: Path, like: str, **config: int) -> str:
    """Make a masked LM with random weights and another teacher's tokenizer. Values missing in
    `config` are those of BERT-base."""
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    from teachonce.checkpoints.names import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(like).path_or_id)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), **config}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def random_decoder(folder: Path, corpus: str, **config: int) -> str:
    """Make a decoder with random weights and a vocabulary of the corpus. Values missing in `config`
    are those of Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from teachonce.teacher_dump.corpus.documents import Corpus
    from teachonce.training.byte_level import SPECIALS, train_byte_level

    texts = (document.text for document in islice(Corpus.open((corpus,)), 10_000))
    sizes: dict[str, Any] = {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, **config,
    }  # fmt: skip
    backend = train_byte_level(texts, sizes["vocab_size"], "llama-bpe")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in SPECIALS}
    settings = LlamaConfig(tie_word_embeddings=True, **ids, **sizes)
    LlamaForCausalLM(settings).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
