"""Small random causal LMs of several families, in folders with a byte-level tokenizer."""

from pathlib import Path
from typing import Any

from tests.making.models import MAX_LENGTH, trained_tokenizer

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16, "num_key_value_heads": 2},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "GPT2": {},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 3.0, "sliding_window": 32},
    "Gemma3nText": {
        "head_dim": 16, "final_logit_softcapping": 3.0, "sliding_window": 32, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "intermediate_size": [48, 64],
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "GPTNeoX": {"tie_word_embeddings": False},
    "Mamba": {"state_size": 8},
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4},
}  # fmt: skip
"""Names of families in transformers, with the settings that set their logits apart."""


def random_llama(pieces: int, width: int = 32, layers: int = 2, heads: int = 4) -> Any:
    """Return a random Llama with a feed-forward size of twice its hidden size."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=pieces, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def save_decoder(folder: Path, family: str, bos: str | None = None, **changes: Any) -> Path:
    """Save a random decoder (2 layers, hidden size 32) and its tokenizer; `bos` is also its eos."""
    import torch
    import transformers

    tokenizer = trained_tokenizer("bpe-plain")
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos, "eos_token": bos})
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.2,
    }
    config = getattr(transformers, f"{family}Config")(
        **{**ends, **sizes, **FAMILIES[family], **changes}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
