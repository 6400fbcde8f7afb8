"""Prunes vocabularies: the teacher's for a new student, and a finished student's to another
vocabulary.

Both are baselines of Zhao et al. 2021 (section 6).
"""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from teachonce.store import FeatureStore
from teachonce.student_train.model.retained_pieces import CAN_BE_CUT, cut_model, retained_pieces
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError


def pruned_tokenizer(store: FeatureStore, size: int, blocks: Array | None = None) -> Tokenizer:
    """Reduce the teacher's tokenizer to `size` pieces, the `retained_pieces` of the store's text.

    blocks: count pieces in these blocks only.
    Raises UserError for a tokenizer of another kind than CAN_BE_CUT, and as `retained_pieces` does.
    """
    settings: dict[str, Any] = json.loads(store.teacher_file("tokenizer.json"))
    kind = settings["model"]["type"]
    if kind not in CAN_BE_CUT:
        raise UserError(
            f"--vocab pruned:{size}: a {', '.join(CAN_BE_CUT)} vocabulary can be cut, and the"
            f" teacher's is a {kind}; give a size alone, such as 5k"
        )
    return cut_tokenizer(settings, retained_pieces(settings, _counts(store, blocks), size))


def cut_tokenizer(settings: dict[str, Any], pieces: list[str]) -> Tokenizer:
    """Reduce the JSON of a tokenizer to these pieces and added tokens, numbered in their order."""
    number = {piece: i for i, piece in enumerate(pieces)}
    cut_model(settings["model"], pieces)
    for token in settings["added_tokens"]:
        token["id"] = number[token["content"]]
    if padding := settings.get("padding"):
        padding["pad_id"] = number[padding["pad_token"]]
    _renumber(settings["post_processor"], number)
    return Tokenizer.from_str(json.dumps(settings))


def _counts(store: FeatureStore, blocks: Array | None) -> Array:
    """Count how often each of the teacher's ids occurs in the store: int64 [V]."""
    counts = np.zeros(store.features.vocabulary, np.int64)
    if blocks is not None:
        for batch in store.stream(blocks=blocks, features=(), shuffle=False):
            counts += np.bincount(batch.token_ids, minlength=len(counts))
        return counts
    for place in range(len(store.manifest.parts)):
        counts += np.bincount(store.part(place).all("token/id"), minlength=len(counts))
    return counts


def _renumber(processor: Any, number: dict[str, int]) -> None:
    """Renumber the special tokens of a post-processor, in place."""
    if processor is None:
        return
    if processor["type"] == "Sequence":
        for each in processor["processors"]:
            _renumber(each, number)
    elif processor["type"] == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [number[piece] for piece in token["tokens"]]
    else:
        for role in {"cls", "sep"} & set(processor):  # BertProcessing
            processor[role][1] = number[processor[role][0]]


# Settings that a pruned tokenizer retains: its inputs (with token types or not), and the side at
# which texts are truncated.
RETAINED = ("model_input_names", "truncation_side")


def shared_pieces(own: Any, other: Any, word: str) -> list[str]:
    """List the pieces of a tokenizer that are also in another one, and its special and added
    tokens, in its order.

    word: the value of `--prune-to`, for messages.
    Zhao et al. 2021, section 6, alternative vocabulary pruning. Raises UserError unless both are
    WordPieces with the same continuation prefix, and if no piece would be removed.
    """
    models = [json.loads(each.backend_tokenizer.to_str())["model"] for each in (own, other)]
    kinds = [f"{m['type']} {m.get('continuing_subword_prefix') or ''}".strip() for m in models]
    if kinds[0] != kinds[1] or models[0]["type"] != "WordPiece":
        raise UserError(
            f"--prune-to {word}: its vocabulary is a {kinds[1]} and the student's a {kinds[0]};"
            " expected two WordPieces with the same continuation prefix"
        )
    pieces, theirs = own.get_vocab(), other.get_vocab()
    needed = {*own.all_special_tokens, *own.get_added_vocab(), models[0]["unk_token"]}
    shared = [
        piece
        for piece in sorted(pieces, key=pieces.__getitem__)
        if piece in theirs or piece in needed
    ]
    if len(shared) == len(pieces):
        raise UserError(
            f"--prune-to {word}: it has all of the student's {len(pieces)} pieces, so nothing would"
            " be removed; give a smaller vocabulary"
        )
    return shared


def pruned(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pieces: list[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a student and its tokenizer, reduced to `pieces`. Embeddings and output bias retain
    the rows of these pieces; all other weights are unchanged."""
    ids, new = tokenizer.get_vocab(), {piece: number for number, piece in enumerate(pieces)}
    backend = cut_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str()), pieces)
    cut = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        **tokenizer.special_tokens_map,
        **{key: value for key, value in tokenizer.init_kwargs.items() if key in RETAINED},
    )
    config = copy.deepcopy(student.config)
    config.vocab_size = len(pieces)
    numbers = {ids[piece]: number for piece, number in new.items()}
    for name, value in vars(config).items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, numbers.get(value))
        if name == "special_ids":  # of a static student
            setattr(config, name, [numbers[each] for each in value if each in numbers])
    rows, weights = torch.tensor([ids[piece] for piece in pieces]), student.state_dict()
    smaller = type(student)(config)
    # Rows of pieces are found by shape: `shared_pieces` refuses a vocabulary that removes none.
    for name, value in smaller.state_dict().items():
        if value.shape != weights[name].shape:  # one row per piece
            weights[name] = weights[name][rows]
    smaller.load_state_dict(weights)
    return smaller.eval(), cut
