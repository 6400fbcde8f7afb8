"""Small folders of sentence-transformers around the tiny teachers, written by that library."""

import json
from pathlib import Path
from typing import Any

from tests.making.models import Teachers

PROMPTS = {"query": "find: ", "document": ""}


def modules(*extra: Any, base: Path, folder: Path, **settings: Any) -> Path:
    """Save a transformer and the modules after it as a folder; return the folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    model = SentenceTransformer(modules=[Transformer(str(base)), *extra], device="cpu", **settings)
    model.save(str(folder), create_model_card=False)
    return folder


def pooling(mode: Any, width: int = 32, **settings: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling(width, mode, **settings)


def mean_embedder(base: Path, folder: Path, **settings: Any) -> Path:
    """Save a folder whose vectors are the means of the states, of length 1."""
    return modules(pooling("mean"), normalize(), base=base, folder=folder, **settings)


def layer_norm(width: int) -> Any:
    """Return a LayerNorm whose weights differ from their initial values."""
    import torch
    from sentence_transformers.sentence_transformer.modules import LayerNorm

    module = LayerNorm(width)
    module.norm.weight.data = torch.linspace(0.5, 2, width)
    module.norm.bias.data = torch.linspace(-1, 1, width)
    return module


def dropout() -> Any:
    from sentence_transformers.sentence_transformer.modules import Dropout

    return Dropout(0.5)


def changed(folder: Path, file: str, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change fields of a JSON file of a folder, or create the file; return the folder."""
    path = folder / file
    fields = (json.loads(path.read_text("utf-8")) if path.exists() else {}) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if k not in drop}), "utf-8")
    return folder


def dense(width: int, out: int, **settings: Any) -> Any:
    import torch
    from sentence_transformers.sentence_transformer.modules import Dense

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(width)
        return Dense(width, out, **settings)


def normalize(of: str = "sentence_embedding") -> Any:
    from sentence_transformers.sentence_transformer.modules import Normalize

    return Normalize(of)


def decoder(tiny_teacher: Teachers, folder: Path, side: str) -> Path:
    """Save a causal model whose tokenizer pads on one side and ends every text with one token."""
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
