"""Small folders of sentence-transformers around the tiny teachers, written by that library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

TinyTeacher = Callable[..., Path]
PROMPTS = {"query": "find: ", "document": ""}


def modules(*made: Any, base: Path, folder: Path, **settings: Any) -> Path:
    """Save a transformer and the modules behind it as a folder; returns it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    model = SentenceTransformer(modules=[Transformer(str(base)), *made], device="cpu", **settings)
    model.save(str(folder), create_model_card=False)
    return folder


def pooling(mode: Any, **settings: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling(32, mode, **settings)


def dense(width: int, out: int, **settings: Any) -> Any:
    import torch
    from sentence_transformers.sentence_transformer.modules import Dense

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(width)
        return Dense(width, out, **settings)


def normalize() -> Any:
    from sentence_transformers.sentence_transformer.modules import Normalize

    return Normalize()


def decoder(tiny_teacher: TinyTeacher, folder: Path, side: str) -> Path:
    """A causal model whose tokenizer fills up on one side, and ends every text by one token."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, GPT2Model

    base = tiny_teacher("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side=side)
    end = "<|endoftext|>"
    tokenizer.pad_token = tokenizer.eos_token = end
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.convert_tokens_to_ids(end))]
    )
    GPT2Model.from_pretrained(base).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
