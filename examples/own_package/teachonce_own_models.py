"""Models for the kind of student in `teachonce_own.py`: DistilBERT of transformers."""

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import DistilBertConfig, DistilBertForMaskedLM

from teachonce.student_train.model.kinds import ModelKind, first_state
from teachonce.student_train.settings.shapes import Shape


def config(
    shape: Shape, tokenizer: Any, positions: int, dropout: float = 0.0, **common: Any
) -> DistilBertConfig:
    """Return the configuration of a student with the given shape."""
    return DistilBertConfig(
        dim=shape.width,
        n_layers=shape.layers,
        n_heads=shape.heads,
        hidden_dim=shape.feed_forward,
        max_position_embeddings=positions,
        dropout=dropout,
        attention_dropout=dropout,
        **common,
    )


def logits(model: Any, states: Tensor) -> Any:
    """Compute vocabulary logits [M,V] from states [M,D]."""
    hidden = functional.gelu(model.vocab_transform(states))
    return model.vocab_projector(model.vocab_layer_norm(hidden))


def no_task(*_: Any) -> Any:
    """Refuse a task: this example supports masked-LM students only."""
    raise NotImplementedError("this kind has no model for a task")


DISTILBERT = ModelKind(
    config,
    {"mlm": DistilBertForMaskedLM},
    parts=None,
    lm=logits,
    tag=no_task,
    pooled=first_state,
    classify=no_task,
)
