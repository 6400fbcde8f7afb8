"""A finished student cut down to the pieces that its vocabulary has in common with another."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from teachonce.student_train.model.pruned_vocabulary import cut_tokenizer
from teachonce.support.errors import UserError

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
