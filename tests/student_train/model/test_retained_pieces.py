"""A pruned vocabulary gives the same pieces as the whole one for text whose pieces it retains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModel, AutoTokenizer

from teachonce.store import open_store
from teachonce.student_train.model.pruning import cut_tokenizer, pieces_of, retained_pieces
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers, trained_tokenizer
from tests.making.texts import SENTENCES
from tests.teacher_dump.windows.test_window import TEXTS

KINDS = ("wordpiece", "bpe", "unigram", "bpe-words", "bpe-bytes", "bpe-ends", "unigram-bytes")


def size_of(kind: str) -> int:
    return 600 if kind == "unigram-bytes" else 470


@cache
def whole(kind: str) -> Tokenizer:
    """Make a tokenizer: a kind of the shared fixtures; with `ignore_merges`, as in Llama 3; of
    SentencePiece with raw bytes; with a mark at the end of a word, as in CLIP."""
    if kind in ("wordpiece", "bpe", "unigram"):
        return Tokenizer.from_str(trained_tokenizer(kind).backend_tokenizer.to_str())
    if kind == "unigram-bytes":
        made = json.loads(whole("unigram").to_str())
        made["model"]["vocab"] += [[f"<0x{byte:02X}>", -12.5] for byte in range(256)]
        made["model"]["byte_fallback"] = True
        return Tokenizer.from_str(json.dumps(made))
    if kind == "bpe-words":
        made = json.loads(whole("bpe").to_str())
        made["model"]["ignore_merges"] = True
        made["model"]["vocab"]["story-book"] = len(made["model"]["vocab"])
        return Tokenizer.from_str(json.dumps(made))
    ends: dict[str, Any] = {"end_of_word_suffix": "</w>"} if kind == "bpe-ends" else {}
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=not ends, **ends))
    specials = ["<unk>", *([] if ends else [f"<0x{byte:02X}>" for byte in range(256)])]
    if ends:
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.ByteFallback()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=specials, show_progress=False, limit_alphabet=60, **ends
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [t for t in made["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(made))


def counts_of(tokenizer: Tokenizer, texts: Any) -> Array:
    ids = [number for text in texts for number in tokenizer.encode(text).ids]
    return np.bincount(ids, minlength=tokenizer.get_vocab_size())


@cache
def cut(kind: str, size: int) -> Tokenizer:
    made = json.loads(whole(kind).to_str())
    return cut_tokenizer(made, retained_pieces(made, counts_of(whole(kind), SENTENCES), size))


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.one_of(
        TEXTS, st.lists(st.sampled_from(" ".join(SENTENCES).split()), max_size=9).map(" ".join)
    ),
    more=st.sampled_from([0, 20, 60]),
)
@settings(max_examples=15)
def test_text_of_retained_pieces_has_the_same_pieces(kind: str, text: str, more: int) -> None:
    smaller = cut(kind, size_of(kind) + more)
    unknown = json.loads(whole(kind).to_str())["model"].get("unk_token")
    for words in (text, *text.split()):
        expected = whole(kind).encode(words)
        if set(expected.tokens) <= smaller.get_vocab().keys() and unknown not in expected.tokens:
            found = smaller.encode(words)
            assert (found.tokens, found.offsets) == (expected.tokens, expected.offsets)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_retained(kind: str) -> None:
    before, after = whole(kind).get_vocab(), cut(kind, size_of(kind)).get_vocab()
    size = size_of(kind)
    assert len(after) == size and sorted(after.values()) == list(range(size))
    assert after.keys() < before.keys()
    assert sorted(after, key=after.__getitem__) == sorted(after, key=before.__getitem__)
    settings_before, settings_after = (
        json.loads(tokenizer.to_str()) for tokenizer in (whole(kind), cut(kind, size_of(kind)))
    )
    one, other = settings_before["model"], settings_after["model"]
    for token in settings_after["added_tokens"]:
        assert after[token["content"]] == token["id"]
    raw = {piece for piece in before if piece.startswith("<0x")}
    assert raw <= after.keys() and len(raw) in (0, 256)
    if one["type"] == "Unigram":
        scores = dict(one["vocab"])
        assert all(scores[piece] == score for piece, score in other["vocab"])
        assert other["vocab"][other["unk_id"]][0] == one["vocab"][one["unk_id"]][0]
    if one["type"] == "BPE":
        assert 20 < len(other["merges"]) < len(one["merges"])
        made = {left + right for left, right in other["merges"]}
        mark = one["end_of_word_suffix"] or ""
        joined = {p for p in after if len(p.removesuffix(mark)) > 1 and p not in raw}
        assert joined - made <= {token["content"] for token in settings_after["added_tokens"]}
    if kind in ("bpe", "bpe-words"):
        assert {piece for piece in before if len(piece) == 1} <= after.keys()
        text = "\U0001f9ac \u0e1f"
        assert cut(kind, size_of(kind)).decode(cut(kind, size_of(kind)).encode(text).ids) == text


def test_sizes_that_cannot_be() -> None:
    made = json.loads(whole("bpe").to_str())
    with pytest.raises(UserError, match="pruned:200: .* need 261 pieces; give at least"):
        retained_pieces(made, counts_of(whole("bpe"), SENTENCES), 200)
    everything = retained_pieces(made, counts_of(whole("bpe"), SENTENCES), 10**6)
    assert set(everything) <= set(pieces_of(made["model"]).values()) and len(everything) > 500


@pytest.fixture(scope="module", params=["xlmr", "roberta"])
def teacher(request: Any, tiny_teacher: Teachers) -> Iterator[Path]:
    yield tiny_teacher(request.param)


def test_a_student_with_the_teachers_most_frequent_pieces(teacher: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 60, SENTENCES)
    store = open_store(dumped(teacher, corpus, tmp_path / "a.zarr", attention="none"))
    options: dict[str, Any] = {"store": str(store.path), "vocab": "pruned:450", "steps": 2}
    options |= {"student": "32x1x2", "init": "teacher", "held_out": 0, "device": "cpu"}
    run(TrainOptions(out=tmp_path / "student", lr=1e-9, **options))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    own, other = tokenizer, AutoTokenizer.from_pretrained(teacher)
    assert len(own) == 450 and own.special_tokens_map == other.special_tokens_map
    text = next(iter(store.texts()))
    found = own(text)["input_ids"]
    assert (found[0], found[-1]) == (own.cls_token_id, own.sep_token_id)
    rows, theirs = (
        AutoModel.from_pretrained(folder).get_input_embeddings().weight.detach()
        for folder in (tmp_path / "student", teacher)
    )
    assert rows.shape == (450, 32)
    alone = [p for p in own.get_vocab() if p in (own.cls_token, own.sep_token, own.mask_token)]
    for piece in alone:  # no other piece of the teacher is written with these
        number, before = own.get_vocab()[piece], other.get_vocab()[piece]
        assert torch.allclose(rows[number], theirs[before], atol=1e-2)
