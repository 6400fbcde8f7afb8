"""Prunes vocabularies: the teacher's for a new student, and a finished student's to another
vocabulary. A text whose pieces are all retained is tokenized as before.

Both are baselines of Zhao et al. 2021 (section 6).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from teachonce.align.vocabulary import RAW_BYTE, byte_of_character
from teachonce.store import FeatureStore
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

Settings = dict[str, Any]
Merges = dict[tuple[str, str], tuple[int, str]]  # two pieces: rank and merged piece
CAN_BE_CUT = ("WordPiece", "Unigram", "BPE", "WordLevel")
# Settings that a pruned tokenizer retains: its inputs (with token types or not), and the side at
# which texts are truncated.
RETAINED = ("model_input_names", "truncation_side")


def pruned_tokenizer(store: FeatureStore, size: int, blocks: Array | None = None) -> Tokenizer:
    """Reduce the teacher's tokenizer to `size` pieces, the `retained_pieces` of the store's text.

    blocks: count pieces in these blocks only.
    Raises UserError for a tokenizer of another kind than CAN_BE_CUT, and as `retained_pieces` does.
    """
    settings: dict[str, Any] = json.loads(store.teacher_file("tokenizer.json"))
    kind = settings["model"]["type"]
    if kind not in CAN_BE_CUT:
        raise UserError(
            f"--vocab pruned:{size}: only vocabularies of the kinds {', '.join(CAN_BE_CUT)} can be"
            f" reduced, and the teacher's is a {kind}; give a size alone, such as 5k"
        )
    return cut_tokenizer(settings, retained_pieces(settings, _counts(store, blocks), size))


def cut_tokenizer(settings: dict[str, Any], pieces: list[str]) -> Tokenizer:
    """Reduce the JSON of a tokenizer to these pieces and added tokens, numbered in their order."""
    number = {piece: i for i, piece in enumerate(pieces)}
    _cut_model(settings["model"], number)
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
    for index in range(len(store.manifest.parts)):
        counts += np.bincount(store.part(index).all("token/id"), minlength=len(counts))
    return counts


def _renumber(processor: Any, number: dict[str, int]) -> None:
    """Renumber the special tokens of a post-processor, in place."""
    if processor is None:
        return
    if processor["type"] == "Sequence":
        for child in processor["processors"]:
            _renumber(child, number)
    elif processor["type"] == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [number[piece] for piece in token["tokens"]]
    else:
        for role in {"cls", "sep"} & set(processor):  # BertProcessing
            processor[role][1] = number[processor[role][0]]


def retained_pieces(settings: Settings, counts: Array, size: int) -> list[str]:
    """List `size` pieces of a tokenizer, in its order: special and added tokens, raw bytes, all
    single characters of the text, and the most frequent of the others.

    counts: how often each id occurs in the text, int64 [V].
    A BPE piece is added with the pieces from which it is merged. The list is shorter if the text
    has fewer pieces. Raises UserError if the required pieces alone exceed `size`.
    """
    model = settings["model"]
    pieces = pieces_of(model)
    ids = {piece: number for number, piece in pieces.items()}
    added = [token["content"] for token in settings["added_tokens"]]
    special = {*added, unknown_piece(model)} - {None}
    met = [p for number, p in pieces.items() if counts[number] and p not in special]
    needed = _needed(settings, met) | special
    if len(needed) > size:
        raise UserError(
            f"--vocab pruned:{size}: the special tokens and the characters of the text alone need"
            f" {len(needed)} pieces; give at least this number"
        )
    retained, parts = set(needed), _parts(model)
    for piece in sorted((p for p in met if p not in needed), key=lambda p: -counts[ids[p]]):
        new = {piece, *parts(piece)} - retained
        if len(retained) + len(new) <= size:
            retained |= new
        if len(retained) == size:
            break
    # Loading a tokenizer numbers added tokens after its vocabulary, whatever their ids were.
    return [piece for piece in dict.fromkeys((*pieces.values(), *added)) if piece in retained]


def _cut_model(model: Settings, number: dict[str, int]) -> None:
    """Reduce the model of a tokenizer.json, in place, to the pieces in `number`, which has their
    new ids."""
    if model["type"] == "Unigram":
        unknown, scores = unknown_piece(model), dict(model["vocab"])
        model["vocab"] = [[piece, scores[piece]] for piece in number if piece in scores]
        model["unk_id"] = None if unknown is None else number[unknown]
        return
    model["vocab"] = {piece: i for piece, i in number.items() if piece in model["vocab"]}
    if model["type"] == "BPE":
        vocab, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            merge
            for merge, (left, right) in zip(model["merges"], _pairs(model), strict=True)
            if {left, right, left + right.removeprefix(prefix)} <= vocab.keys()
        ]


def pieces_of(model: Settings) -> dict[int, str]:
    """Return the pieces of a model by id, in ascending order."""
    if model["type"] == "Unigram":
        return {number: piece for number, (piece, _) in enumerate(model["vocab"])}
    return {i: piece for piece, i in sorted(model["vocab"].items(), key=lambda item: item[1])}


def unknown_piece(model: Settings) -> str | None:
    if model["type"] != "Unigram":
        piece: str | None = model.get("unk_token")
        return piece
    number = model.get("unk_id")
    return None if number is None else model["vocab"][number][0]


def _needed(settings: Settings, met: list[str]) -> set[str]:
    """Return the pieces that every pruned vocabulary needs: the single characters of the pieces
    `met` in the text, raw bytes, and the least likely piece of a Unigram model."""
    model = settings["model"]
    bare = _bare(model)
    letters = {letter for piece in met for letter in bare(piece)}
    if '"ByteLevel"' in json.dumps([settings.get("pre_tokenizer"), settings.get("decoder")]):
        # Texts to come may have any byte, and a byte-level model has no other way to spell it.
        letters |= set(byte_of_character())
    needed = {piece for piece in pieces_of(model).values() if bare(piece) in letters}
    if model.get("byte_fallback"):
        needed |= {piece for piece in pieces_of(model).values() if RAW_BYTE.fullmatch(piece)}
    if model["type"] == "Unigram":
        # Unigram derives the score of unknown text from its least likely piece.
        needed.add(min(model["vocab"], key=lambda entry: entry[1])[0])
    return needed


def _bare(model: Settings) -> Callable[[str], str]:
    """Return a function that removes a model's prefix and suffix marks from a piece."""
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    return lambda piece: piece.removeprefix(prefix).removesuffix(suffix)


def _parts(model: Settings) -> Callable[[str], set[str]]:
    """Return a function from a piece to the pieces that a BPE merges into it. For other models the
    set is empty."""
    if model["type"] != "BPE":
        return lambda piece: set()
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    merges: Merges = {
        (left, right): (rank, left + right.removeprefix(prefix))
        for rank, (left, right) in enumerate(_pairs(model))
    }

    def parts(piece: str) -> set[str]:
        inside = prefix if prefix and piece.startswith(prefix) else ""
        last = suffix if suffix and piece.endswith(suffix) else ""
        letters = piece.removeprefix(inside).removesuffix(last)
        word = [(prefix if i else inside) + letter for i, letter in enumerate(letters)]
        if word and last:
            word[-1] += last
        pieces = set(word)
        while len(word) > 1:
            ranked = [merges.get(pair) for pair in zip(word, word[1:], strict=False)]
            if not any(ranked):
                return set()  # no merges make this piece: BPE uses it only as a whole word
            index = min((r[0], i) for i, r in enumerate(ranked) if r)[1]
            word[index : index + 2] = [merges[word[index], word[index + 1]][1]]
            pieces.add(word[index])
        return {part for part in pieces if part in model["vocab"]}

    return parts


def _pairs(model: Settings) -> list[tuple[str, str]]:
    """Return the merges of a BPE. Older files write both pieces as one text, separated by a
    space."""
    halves = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    return [(left, right) for left, right in halves]


def shared_pieces(student: Any, other: Any, word: str) -> list[str]:
    """List the pieces of the tokenizer `student` that `other` has, too, and the special and added
    tokens of `student`, in its order.

    word: the value of `--prune-to`, for messages.
    Zhao et al. 2021, section 6, alternative vocabulary pruning. Raises UserError unless both are
    fast WordPieces with the same continuation prefix, and if no piece would be removed.
    """
    if slow := [t for t in (student, other) if not t.is_fast]:
        raise UserError(
            f"--prune-to {word}: {type(slow[0]).__name__} is not a fast tokenizer (tokenizer.json);"
            " expected two WordPieces with the same continuation prefix"
        )
    models = [json.loads(t.backend_tokenizer.to_str())["model"] for t in (student, other)]
    kinds = [f"{m['type']} {m.get('continuing_subword_prefix') or ''}".strip() for m in models]
    if kinds[0] != kinds[1] or models[0]["type"] != "WordPiece":
        raise UserError(
            f"--prune-to {word}: its vocabulary is a {kinds[1]} and the student's a {kinds[0]};"
            " expected two WordPieces with the same continuation prefix"
        )
    pieces, other_pieces = student.get_vocab(), other.get_vocab()
    needed = {*student.all_special_tokens, *student.get_added_vocab(), models[0]["unk_token"]}
    shared = [
        piece
        for piece in sorted(pieces, key=pieces.__getitem__)
        if piece in other_pieces or piece in needed
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
    ids = tokenizer.get_vocab()
    backend = cut_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str()), pieces)
    cut = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        **tokenizer.special_tokens_map,
        **{key: value for key, value in tokenizer.init_kwargs.items() if key in RETAINED},
    )
    config = copy.deepcopy(student.config)
    config.vocab_size = len(pieces)
    numbers = {ids[piece]: number for number, piece in enumerate(pieces)}
    for name, value in vars(config).items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, numbers.get(value))
        if name == "special_ids":  # of a static student
            setattr(config, name, [numbers[i] for i in value if i in numbers])
    rows, weights = torch.tensor([ids[piece] for piece in pieces]), student.state_dict()
    smaller = type(student)(config)
    # Rows of pieces are found by shape: `shared_pieces` refuses a vocabulary that removes none.
    for name, value in smaller.state_dict().items():
        if value.shape != weights[name].shape:  # one row per piece
            weights[name] = weights[name][rows]
    smaller.load_state_dict(weights)
    return smaller.eval(), cut
