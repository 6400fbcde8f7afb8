"""Makes a tokenizer put one token in front of each text, so that a decoder also predicts the first
token of the text."""

from __future__ import annotations

import json
from typing import Any

from teachonce.support.errors import UserError
from teachonce.support.parsing import whole_number

TEMPLATE = "TemplateProcessing"
IDS = 2**32  # tokenizers raises OverflowError for larger ones


def parse_bos(word: str) -> int | None:
    """Parse `--bos ID`; None for `auto` and `none`. Raises UserError for any other value."""
    if word in ("auto", "none"):
        return None
    # A number with fewer digits than IDS is always below IDS.
    if (number := whole_number(word, len(str(IDS)) - 1)) is not None:
        return number
    raise UserError(f"--bos {word}: expected auto, none or the id of a token, such as 0")


def prepended_token(backend: Any) -> int | None:
    """Return the id of the token that a tokenizer of the package tokenizers puts in front of each
    text, or None."""
    # By encoding a text, because post-processors of several types can put a token in front.
    probe = backend.encode("x")
    return int(probe.ids[0]) if probe.special_tokens_mask[:1] == [1] else None


def prepend_token(tokenizer: Any, word: str, name: str) -> int | None:
    """Make a fast tokenizer of transformers put a token in front of each text, and return its id.

    word: `none`, an id, or `auto`: the tokenizer's bos token, if it is also its eos token. Returns
        None if nothing was changed: for `none`, and if the tokenizer already puts this token there.
        Raises UserError for an id without a token, and if the tokenizer puts another token there.
    """
    number, backend = parse_bos(word), tokenizer.backend_tokenizer
    if word == "none":
        return None
    current = prepended_token(backend)
    if number is None:
        # The teacher's training texts follow one another, so a token that ends texts also precedes
        # them. Nothing shows whether the teacher ever read another bos token before plain text.
        number = tokenizer.bos_token_id
        if current is not None or number is None or number != tokenizer.eos_token_id:
            return None
    if current == number:
        return None
    if current is not None:
        raise UserError(
            f"--bos {word}: the tokenizer of {name} puts {backend.id_to_token(current)!r}"
            f" ({current}) in front of each text itself; leave --bos out"
        )
    piece = backend.id_to_token(number)
    if piece is None:
        has_bos = tokenizer.bos_token_id is not None
        own_bos = f" (its bos is {tokenizer.bos_token_id})" if has_bos else ""
        raise UserError(
            f"--bos {word}: the tokenizer of {name} has no such token; give the id of one"
            f"{own_bos}, or leave --bos out"
        )
    settings = json.loads(backend.to_str())
    settings["post_processor"] = _with_first(settings["post_processor"], piece, number)
    from tokenizers import Tokenizer  # not at the top: `teacher-dump --help` must not wait for it

    backend.post_processor = Tokenizer.from_str(json.dumps(settings)).post_processor
    return number


def _with_first(old: Any, piece: str, number: int) -> Any:
    """Return a post-processor, as in tokenizer.json, that also puts a piece in front."""
    steps = list(old["processors"]) if old and old["type"] == "Sequence" else [old] if old else []
    templates = [step for step in steps if step["type"] == TEMPLATE]
    # An existing template is extended: tokenizers 0.22 panics on two templates in a sequence.
    template = templates[0] if templates else _plain_template()
    for form in ("single", "pair"):
        template[form] = [{"SpecialToken": {"id": piece, "type_id": 0}}, *template[form]]
    template["special_tokens"][piece] = {"id": piece, "ids": [number], "tokens": [piece]}
    return {"type": "Sequence", "processors": [*steps, *([] if templates else [template])]}


def _plain_template() -> dict[str, Any]:
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    fields = {"single": [first], "pair": [first, second], "special_tokens": dict[str, Any]()}
    return {"type": TEMPLATE, **fields}
