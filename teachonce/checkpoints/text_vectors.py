"""Finds how a checkpoint makes one vector of a text: the folder's own modules, or --pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from teachonce.checkpoints.fields import MODULES, SETTINGS
from teachonce.checkpoints.names import ResolvedModel, finder
from teachonce.checkpoints.sentence_folder import VectorHead, read_sentence_folder
from teachonce.checkpoints.sentence_settings import SentenceSettings, fit_tokenizer
from teachonce.store.format.features import EmbeddingSpec
from teachonce.support.errors import UserError, first_line

POOLINGS = {"mean": "mean", "cls": "cls", "max": "max", "last": "lasttoken"}
"""The words of --pooling, and the names of `Pooling`'s modes for them."""


@dataclass(frozen=True)
class TextVectors:
    """How a teacher makes a vector of a text.

    `prompt` is put before every text, and is `prompt_tokens` tokens with the special ones before
    it. `max_length` is the folder's longest text in tokens, None where it does not say. `settings`
    is its file of prompts as it is, None where there is none.
    """

    head: VectorHead
    prompt: str = ""
    prompt_tokens: int = 0
    max_length: int | None = None
    settings: bytes | None = None

    @property
    def spec(self) -> EmbeddingSpec:
        """The description of the vectors in the store."""
        head = self.head
        return EmbeddingSpec(head.width, head.description, self.prompt, head.normalised)


def text_vectors(
    model: ResolvedModel, tokenizer: Any, width: int, pooling: str | None, prompt: str | None
) -> TextVectors:
    """Find how a checkpoint of hidden size `width` makes vectors.

    `pooling` is a word of POOLINGS, which replaces the folder's own modules; `prompt` the name of
    one of its prompts. Raises UserError where the folder has no pooling and none is given, and for
    a prompt that is not there.
    """
    name = model.name
    if pooling is None:
        head, settings = read_sentence_folder(model, width)
    else:
        from sentence_transformers.sentence_transformer.modules import Pooling

        head, settings = VectorHead(Pooling(width, POOLINGS[pooling])), SentenceSettings()
    if head is None:
        raise UserError(
            f"{name}: no pooling in it (modules.json of sentence-transformers): give --pooling"
            f" {'|'.join(POOLINGS)}, the one that the model was trained with"
        )
    if (pooled := head.states_width) != width:
        raise UserError(
            f"{name}: its pooling is for states {pooled} wide, and the transformer's are {width};"
            " copy the whole folder"
        )
    _check_fit(head.eval(), name)
    fit_tokenizer(tokenizer, settings)
    text = _prompt(name, settings, prompt)
    if text and getattr(tokenizer, "truncation_side", "right") == "left":
        raise UserError(
            f"--prompt {prompt or 'of ' + SETTINGS}: {name} cuts long texts at their beginning"
            " (truncation_side of tokenizer_config.json is left), where the prompt is; give"
            " --prompt '' or set truncation_side to right"
        )
    path = finder(model)(SETTINGS)
    return TextVectors(
        head,
        text,
        _prompt_tokens(tokenizer, text),
        settings.max_length,
        path.read_bytes() if path else None,
    )


def _check_fit(head: VectorHead, name: str) -> None:
    """Raise UserError for modules of which one does not give what the next one reads."""
    states = torch.zeros(1, 3, head.states_width)
    why = "they give no vector"
    try:
        with torch.inference_mode():
            shape = list(head(states, torch.ones(1, 3, dtype=torch.bool)).shape)
        if shape == [1, head.width] and head.width:
            return
        why = f"they give {shape[-1]} numbers, expected {head.width}"
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        why = first_line(error)
    raise UserError(
        f"{name}: its modules do not fit together ({MODULES}): {why}; copy the whole folder"
    )


def _prompt(model: str, settings: SentenceSettings, name: str | None) -> str:
    """Return the text of a prompt by its name; the default one's for None, "" if there is none.

    An empty name means no prompt. Raises UserError for an unknown name.
    """
    prompts = settings.prompts
    chosen = settings.default_prompt if name is None else name
    if name is None and chosen and chosen not in prompts:
        raise UserError(
            f"{model}: default_prompt_name is {chosen!r:.60} in {SETTINGS}, and its prompts are"
            f" {', '.join(prompts) or 'none'}; give --prompt NAME, or --prompt '' for none"
        )
    if chosen and chosen not in prompts:
        raise UserError(
            f"--prompt {chosen}: {model} has no such prompt; it has: {', '.join(prompts) or 'none'}"
            f" ({SETTINGS}); give one of them, or leave it out"
        )
    return prompts[chosen] if chosen else ""


def _prompt_tokens(tokenizer: Any, prompt: str) -> int:
    """Count the tokens that a prompt puts before a text, the first special ones included."""
    if not prompt:
        return 0
    ids = list(tokenizer(prompt)["input_ids"])
    ends = ids and ids[-1] in tokenizer.all_special_ids
    return len(ids) - bool(ends)
