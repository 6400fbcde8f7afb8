"""Cuts vocabularies: the teacher's for a new student, a finished student to another's.

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
from teachonce.student_train.model.kept_pieces import CAN_BE_CUT, cut_model, kept_pieces
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError


def pruned_tokenizer(store: FeatureStore, size: int, blocks: Array | None = None) -> Tokenizer:
    """Cut the teacher's tokenizer to `size` pieces: the `kept_pieces` of the store's text. With
    `blocks` the text is theirs alone.

    Raises UserError for a tokenizer of another kind than CAN_BE_CUT, and as `kept_pieces` does.
    """
    settings: dict[str, Any] = json.loads(store.teacher_file("tokenizer.json"))
    kind = settings["model"]["type"]
    if kind not in CAN_BE_CUT:
        raise UserError(
            f"--vocab pruned:{size}: a {', '.join(CAN_BE_CUT)} vocabulary can be cut, and the"
            f" teacher's is a {kind}; give a size alone, such as 5k"
        )
    return cut_tokenizer(settings, kept_pieces(settings, _counts(store, blocks), size))


def cut_tokenizer(settings: dict[str, Any], kept: list[str]) -> Tokenizer:
    """Cut a tokenizer, as JSON, to pieces and added tokens, which are numbered in their order."""
    number = {piece: i for i, piece in enumerate(kept)}
    cut_model(settings["model"], kept)
    for token in settings["added_tokens"]:
        token["id"] = number[token["content"]]
    if padding := settings.get("padding"):
        padding["pad_id"] = number[padding["pad_token"]]
    _renumber(settings["post_processor"], number)
    return Tokenizer.from_str(json.dumps(settings))


def _counts(store: FeatureStore, blocks: Array | None) -> Array:
    """Count how often each of the teacher's ids stands in the store: int64 [V]."""
    counts = np.zeros(store.features.vocabulary, np.int64)
    if blocks is not None:
        for batch in store.stream(blocks=blocks, features=(), shuffle=False):
            counts += np.bincount(batch.token_ids, minlength=len(counts))
        return counts
    for place in range(len(store.manifest.parts)):
        counts += np.bincount(store.part(place).all("token/id"), minlength=len(counts))
    return counts


def _renumber(processor: Any, number: dict[str, int]) -> None:
    """Renumber the special tokens that a post-processor puts around a text."""
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


INPUTS = "model_input_names"  # a setting of tokenizers: a student of pairs reads types of tokens


def shared_pieces(own: Any, other: Any, word: str) -> list[str]:
    """List the pieces of a tokenizer that another has, too, and its special and added tokens, in
    its order (Zhao et al. 2021, section 6, alternative vocabulary pruning).

    `word` is what `--prune-to` gave for the other. Raises UserError unless both are WordPieces
    whose pieces inside of words are marked alike, and where nothing would be cut.
    """
    models = [json.loads(each.backend_tokenizer.to_str())["model"] for each in (own, other)]
    kinds = [f"{m['type']} {m.get('continuing_subword_prefix') or ''}".strip() for m in models]
    if kinds[0] != kinds[1] or models[0]["type"] != "WordPiece":
        raise UserError(
            f"--prune-to {word}: its vocabulary is a {kinds[1]} and the student's a {kinds[0]};"
            " expected two WordPieces, whose pieces are spelt alike"
        )
    pieces, theirs = own.get_vocab(), other.get_vocab()
    needed = {*own.all_special_tokens, *own.get_added_vocab(), models[0]["unk_token"]}
    kept = [
        piece
        for piece in sorted(pieces, key=pieces.__getitem__)
        if piece in theirs or piece in needed
    ]
    if len(kept) == len(pieces):
        raise UserError(
            f"--prune-to {word}: it has all of the student's {len(pieces)} pieces, so nothing would"
            " be cut; give a smaller vocabulary"
        )
    return kept


def pruned(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, kept: list[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Cut a student and its tokenizer to the pieces of `shared_pieces`: of embeddings and output
    bias it keeps the rows of these, and of all else everything."""
    ids, new = tokenizer.get_vocab(), {piece: number for number, piece in enumerate(kept)}
    backend = cut_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str()), kept)
    cut = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        **tokenizer.special_tokens_map,
        **{key: value for key, value in tokenizer.init_kwargs.items() if key == INPUTS},
    )
    config = copy.deepcopy(student.config)
    config.vocab_size = len(kept)
    numbers = {ids[piece]: number for piece, number in new.items()}
    for name, value in vars(config).items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, numbers.get(value))
    rows, weights = torch.tensor([ids[piece] for piece in kept]), student.state_dict()
    smaller = type(student)(config)
    for name, value in smaller.state_dict().items():
        if value.shape != weights[name].shape:  # rows of pieces
            weights[name] = weights[name][rows]
    smaller.load_state_dict(weights)
    return smaller.eval(), cut
