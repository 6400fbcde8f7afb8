"""Chooses the pieces of a tokenizer.json that a pruned vocabulary retains. A text whose pieces are
all retained is tokenized as before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from teachonce.align.vocabulary import RAW_BYTE, byte_of_character
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

Settings = dict[str, Any]
Merges = dict[tuple[str, str], tuple[int, str]]  # two pieces: rank and merged piece
CAN_BE_CUT = ("WordPiece", "Unigram", "BPE", "WordLevel")


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
            f"--vocab pruned:{size}: the special tokens and the characters of the text need"
            f" {len(needed)} pieces; give at least that number"
        )
    retained, parts = set(needed), _parts(model)
    for piece in sorted((p for p in met if p not in needed), key=lambda p: -counts[ids[p]]):
        more = {piece, *parts(piece)} - retained
        if len(retained) + len(more) <= size:
            retained |= more
        if len(retained) == size:
            break
    # Loading a tokenizer numbers added tokens after its vocabulary, whatever their ids were.
    return [piece for piece in dict.fromkeys((*pieces.values(), *added)) if piece in retained]


def cut_model(model: Settings, retained: Iterable[str]) -> None:
    """Reduce a model of a tokenizer.json, in place, to these pieces, numbered in their order."""
    number = {piece: i for i, piece in enumerate(retained)}
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
    """Return the piece for unknown text, or None."""
    if model["type"] != "Unigram":
        found: str | None = model.get("unk_token")
        return found
    number = model.get("unk_id")
    return None if number is None else model["vocab"][number][0]


def _needed(settings: Settings, met: list[str]) -> set[str]:
    """Return the pieces that every pruned vocabulary needs: single characters of the text, and raw
    bytes."""
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
        found = set(word)
        while len(word) > 1:
            ranked = [merges.get(pair) for pair in zip(word, word[1:], strict=False)]
            if not any(ranked):
                return set()  # no merges lead to it: BPE uses it only for a whole word
            place = min((r[0], i) for i, r in enumerate(ranked) if r)[1]
            word[place : place + 2] = [merges[word[place], word[place + 1]][1]]
            found.add(word[place])
        return {part for part in found if part in model["vocab"]}

    return parts


def _pairs(model: Settings) -> list[tuple[str, str]]:
    """Return the merges of a BPE. Older files write both pieces as one text, separated by a
    space."""
    halves = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    return [(left, right) for left, right in halves]
