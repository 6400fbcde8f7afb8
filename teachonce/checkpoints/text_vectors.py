"""Loads what computes a text's vector: the modules of the folder, or --pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from teachonce.checkpoints.fields import MODULES, SETTINGS
from teachonce.checkpoints.names import ResolvedModel, finder
from teachonce.checkpoints.sentence_folder import VectorHead, read_sentence_folder
from teachonce.checkpoints.sentence_settings import SentenceSettings, apply_settings
from teachonce.store.format.features import EmbeddingSpec
from teachonce.support.errors import UserError, first_line

# Values of --pooling, and the modes of sentence-transformers' `Pooling`.
POOLINGS = {"mean": "mean", "cls": "cls", "max": "max", "last": "lasttoken"}


@dataclass(frozen=True)
class TextVectors:
    """Holds the parts that compute the vector of a text.

    head: pooling and other modules.
    prompt: the text in front of every text.
    prompt_tokens: its number of tokens, with the special tokens before it.
    max_length: the folder's longest text in tokens; None if unknown.
    settings: bytes of config_sentence_transformers.json; None if it is missing.
    unused_prompts: names of the folder's prompts, if none was chosen and there is no default.
    """

    head: VectorHead
    prompt: str = ""
    prompt_tokens: int = 0
    max_length: int | None = None
    settings: bytes | None = None
    unused_prompts: tuple[str, ...] = ()

    @property
    def spec(self) -> EmbeddingSpec:
        """Return the description of the vectors for the store."""
        head = self.head
        return EmbeddingSpec(head.width, head.description, self.prompt, head.normalised)


def text_vectors(
    model: ResolvedModel, tokenizer: Any, width: int, pooling: str | None, prompt: str | None
) -> TextVectors:
    """Load the vector head and the prompt of a checkpoint with hidden size `width`.

    `pooling`, a key of POOLINGS, replaces the folder's modules; `prompt` is the name of a prompt.
    Raises UserError if neither the folder nor `pooling` gives a pooling, and for an unknown prompt.
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
            f" {'|'.join(POOLINGS)}, as in the model's training"
        )
    if (pooled := head.states_width) != width:
        raise UserError(
            f"{name}: its pooling expects states of size {pooled}, and the transformer's hidden"
            f" size is {width}; copy the whole folder"
        )
    # Dropout would make vectors random.
    _check_fit(head.eval(), name)
    apply_settings(tokenizer, settings)
    text = _prompt(name, settings, prompt)
    if text and getattr(tokenizer, "truncation_side", "right") == "left":
        raise UserError(
            f"--prompt {prompt or 'of ' + SETTINGS}: {name} truncates the start of long texts"
            " (truncation_side in tokenizer_config.json is left), where the prompt is; give"
            " --prompt '' or set truncation_side to right"
        )
    path = finder(model)(SETTINGS)
    chosen = prompt is not None or settings.default_prompt
    return TextVectors(
        head,
        text,
        _prompt_tokens(tokenizer, text),
        settings.max_length,
        path.read_bytes() if path else None,
        () if chosen else tuple(name for name, text in settings.prompts.items() if text),
    )


def _check_fit(head: VectorHead, name: str) -> None:
    """Raise UserError if the output of a module does not fit the input of the next one."""
    # One pass over zeros shows before the dump what its first batch would fail at.
    states = torch.zeros(1, 3, head.states_width)
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
    """Return the text of the prompt `name`. For None return the default prompt, "" without one.

    An empty name means no prompt. Raises UserError for an unknown name.
    """
    prompts = settings.prompts
    key = settings.default_prompt if name is None else name
    if name is None and key and key not in prompts:
        raise UserError(
            f"{model}: default_prompt_name is {key!r:.60} in {SETTINGS}, and its prompts are"
            f" {', '.join(prompts) or 'none'}; give --prompt NAME, or --prompt '' for none"
        )
    if key and key not in prompts:
        raise UserError(
            f"--prompt {key}: {model} has no such prompt; it has: {', '.join(prompts) or 'none'}"
            f" ({SETTINGS}); give one of them, or leave --prompt out"
        )
    return prompts[key] if key else ""


def _prompt_tokens(tokenizer: Any, prompt: str) -> int:
    """Count the tokens of a prompt before a text, with the special tokens at the start."""
    if not prompt:
        return 0
    ids = list(tokenizer(prompt)["input_ids"])
    # Counted like `_get_prompt_length` of the library, so that poolings leave out the same tokens.
    ends = ids and ids[-1] in tokenizer.all_special_ids
    return len(ids) - bool(ends)
