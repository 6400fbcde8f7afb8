"""The student's vocabulary: trained on the text of a store, or the pieces retained of one.

- The student's vocabulary, trained on the text of a store.
- A pruned vocabulary gives the same pieces as the whole one for text whose pieces it retains.
"""

import json
import shutil
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from teachonce.align import Vocabulary, VocabularyMap
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.model import pruning
from teachonce.student_train.model.pruning import cut_tokenizer, pieces_of, retained_pieces
from teachonce.student_train.model.start_checks import check_same_pieces
from teachonce.student_train.model.student_tokenizer import (
    student_tokenizer,
    train_student_wordpiece,
)
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training import wordpiece
from teachonce.training.wordpiece import SPECIALS, fewer_pieces, suggested_size, vocabulary_size
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers, trained_tokenizer
from tests.making.texts import ENGLISH, RUSSIAN, SENTENCES, SLOVAK
from tests.teacher_dump.windows.test_window import TEXTS


def test_size_words() -> None:
    assert vocabulary_size("5k") == 5000
    assert vocabulary_size("30K") == 30_000
    assert vocabulary_size("812") == 812
    assert vocabulary_size("teacher") is vocabulary_size("./folder") is None
    assert vocabulary_size("9" * 5000) is None  # more digits than `int` reads


def test_every_character_of_the_corpus_is_known(store: FeatureStore) -> None:
    tokenizer = student_tokenizer("500", store)
    assert len(tokenizer) == 500
    for text in store.texts():
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text


def test_training_does_not_depend_on_the_order_of_the_text() -> None:
    texts = ENGLISH + RUSSIAN + SLOVAK
    one = train_student_wordpiece(texts, 350, None).get_vocab()
    assert train_student_wordpiece(reversed(texts), 350, None).get_vocab() == one


def test_the_most_frequent_words_become_whole_pieces() -> None:
    words = sorted({w for text in ENGLISH for w in text.split() if w.isalpha() and len(w) > 1})
    often, seldom = words[::2], words[1::2]
    texts = [" ".join(often * 50), " ".join(seldom * 2), *SENTENCES]
    pieces = set(train_student_wordpiece(texts, 600, None).get_vocab())
    assert set(often) <= pieces and len(set(seldom) - pieces) > len(seldom) / 2


def test_characters_are_known_where_half_of_the_pieces_is_left() -> None:
    """Zhao et al. 2021, section 3: all of ASCII, so that no word is unknown."""
    ascii_ = string.ascii_letters + string.digits + string.punctuation
    few = wordpiece.train_wordpiece(["one two, three"] * 3, 400, None, ascii_)
    lacking = [text for text in (*ascii_, "Qx7", "~z") if "[UNK]" in few.encode(text).tokens]
    assert not lacking
    less = wordpiece.train_wordpiece(["one two, three"] * 3, 300, None, ascii_).get_vocab()
    assert less == wordpiece.train_wordpiece(["one two, three"] * 3, 300, None).get_vocab()
    assert "Q" not in less


def test_frequencies_count_in_full() -> None:
    texts = ["zebra " * 30_000, "apple " * 10_500]
    letters = len(SPECIALS) + len(set("zebraapple")) + len(set("ebrapple"))
    # There is room for one word of five characters.
    pieces = train_student_wordpiece(texts, letters + 4, None).get_vocab()
    assert "zebra" in pieces and not {"apple", "##ple", "##pp", "ap"} & set(pieces)


HAN = ["".join(map(chr, range(begin, begin + 50))) for begin in range(0x4E00, 0x6000, 50)]
SUGGESTED: dict[str, tuple[Sequence[str], int]] = {
    "a few sentences": (SENTENCES, 5000),
    "large": ([f"{n} tokens{n}" for n in range(6000)] * 2, 5000),
    "many letters": (HAN, 10_000),
    "many letters and words": (HAN * 2 + [f"word{n}" for n in range(9000)] * 2, 10_000),
}


@pytest.mark.parametrize("case", SUGGESTED)
@pytest.mark.parametrize("normalizer", [None, normalizers.BertNormalizer(lowercase=True)])
def test_a_suggested_size_holds_the_letters_twice(
    case: str, normalizer: normalizers.Normalizer | None
) -> None:
    texts, expected = SUGGESTED[case]
    assert suggested_size(texts, normalizer) == expected
    assert len(train_student_wordpiece(texts, expected, normalizer)) <= expected


@pytest.mark.parametrize("size", [3, 60])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"--vocab {size}: .*characters.*give more"):
        train_student_wordpiece(SENTENCES, size, None)


def test_a_size_that_the_text_cannot_give_is_taken_as_far_as_it_goes() -> None:
    most = train_student_wordpiece(SENTENCES, 100_000, None)
    assert 600 < len(most) < 5000
    assert most.get_vocab() == train_student_wordpiece(SENTENCES, len(most), None).get_vocab()
    printed = fewer_pieces("100k", len(most))
    assert f"of {len(most):,} pieces, not 100,000 (--vocab 100k)" in printed
    for word in (str(len(most)), "teacher", "words", "./folder"):
        assert not fewer_pieces(word, len(most)), word


@pytest.mark.parametrize(("word", "all_of_it"), [("pruned:5k", "teacher"), ("words:5k", "words")])
def test_other_vocabularies_go_as_far_as_the_text_does(
    word: str, all_of_it: str, store: FeatureStore
) -> None:
    found, whole = (student_tokenizer(each, store).get_vocab() for each in (word, all_of_it))
    assert found.keys() <= whole.keys() and fewer_pieces(word, len(found))
    ids = {number for record in store for number in record.token_ids.tolist()}
    met = {piece for piece, number in whole.items() if number in ids}
    assert (found.keys() >= met) if word.startswith("pruned") else (found == whole)


@pytest.mark.parametrize(
    ("normalizer", "same", "different"),
    [
        (None, [], ["Aa", "éе"]),
        (normalizers.BertNormalizer(lowercase=True), ["Éé", "Ee", "éE"], []),
        (normalizers.BertNormalizer(lowercase=True, strip_accents=False), ["Éé"], ["ée"]),
        (normalizers.NFKC(), [], ["Ee", "ée"]),
    ],
)
def test_case_and_accents_are_folded_as_the_teacher_does(
    normalizer: normalizers.Normalizer | None, same: list[str], different: list[str]
) -> None:
    texts = [*ENGLISH, *SLOVAK, "A a E e É é е " * 3]
    tokenizer = train_student_wordpiece(texts, 200, normalizer)
    for pair, equal in [(p, True) for p in same] + [(p, False) for p in different]:
        first, second = (tokenizer(c)["input_ids"] for c in pair)
        assert (first == second) == equal, pair


def test_the_teachers_own_tokenizer_comes_from_the_store(store: FeatureStore) -> None:
    tokenizer = student_tokenizer("teacher", store)
    record = store[3]
    assert tokenizer(record.text)["input_ids"] == record.token_ids.tolist()


def test_a_tokenizer_without_pieces_is_refused(store: FeatureStore, tmp_path: Path) -> None:
    # transformers normalises this to a single token.
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="only special tokens.*give a size such as 5k"):
        student_tokenizer(str(tmp_path), store)


def test_a_tokenizer_that_cannot_be_aligned_is_refused(store: FeatureStore, tmp_path: Path) -> None:
    """Python cannot compile the expression of its normalizer."""
    made = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    made.normalizer = normalizers.Replace(Regex(r"\p{L}"), "x")
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"--vocab {tmp_path}: .* choose another tokenizer"):
        student_tokenizer(str(tmp_path), store, family="llama-bpe")
    with pytest.raises(UserError, match="--init layers:1@d: .* choose another tokenizer"):
        check_same_pieces("layers:1@d", store, made.to_str(), "model", "a model")


def test_a_pruned_vocabulary_is_the_teachers_most_frequent_pieces(store: FeatureStore) -> None:
    teacher, pruned = student_tokenizer("teacher", store), student_tokenizer("pruned:350", store)
    ids, own = teacher.get_vocab(), pruned.get_vocab()
    assert len(own) == 350 and set(own) < set(ids) and sorted(own.values()) == list(range(350))
    assert sorted(own, key=own.__getitem__) == sorted(own, key=ids.__getitem__)
    ids_of_all = [number for record in store for number in record.token_ids.tolist()]
    counts = Counter(teacher.convert_ids_to_tokens(ids_of_all))
    joined = {p for p in ids if len(p.removeprefix("##")) > 1} - {*teacher.all_special_tokens}
    least = min(counts[piece] for piece in joined & set(own))
    assert least > 0 and least >= max(counts[piece] for piece in joined - set(own))
    for text in store.texts():
        found = pruned(text)["input_ids"]
        assert pruned.unk_token_id not in found, text
        assert (found[0], found[-1]) == (pruned.cls_token_id, pruned.sep_token_id)
    assert pruned.special_tokens_map == teacher.special_tokens_map
    for name in ("pad", "unk", "cls", "sep", "mask"):
        assert getattr(pruned, f"{name}_token_id") == own[getattr(teacher, f"{name}_token")], name


def test_a_token_that_was_added_to_the_vocabulary_is_retained(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_teacher("bert"))
    model = AutoModelForMaskedLM.from_pretrained(tiny_teacher("bert"))
    tokenizer.add_tokens(["<new>", "<newer>"])
    model.resize_token_embeddings(len(tokenizer))
    for each in (tokenizer, model):
        each.save_pretrained(tmp_path / "model")
    corpus = write_corpus(tmp_path / "corpus.txt", 60, [f"<new> {text}" for text in ENGLISH])
    store = open_store(dumped(tmp_path / "model", corpus, tmp_path / "store.zarr"))
    pruned = student_tokenizer("pruned:150", store)
    own = pruned.get_vocab()
    assert len(pruned) == 150 and sorted(own.values()) == list(range(150))
    assert (own["<new>"], own["<newer>"]) == (148, 149)
    for text in store.texts():
        assert text.count("<new>") == pruned.tokenize(text).count("<new>")
        assert pruned.unk_token not in pruned.tokenize(text)
    theirs, ours = (
        Vocabulary.from_tokenizer_json(each.backend_tokenizer.to_str())
        for each in (tokenizer, pruned)
    )
    assert VocabularyMap.between(theirs, ours).match[theirs.tokens.index("<new>")] == 148


def test_special_tokens_anywhere_keep_their_places_around_a_text(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """The teacher's [CLS] is its last piece, so its id is not BERT's."""
    model = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    settings = json.loads((model / "tokenizer.json").read_text("utf-8"))
    ids = settings["model"]["vocab"]
    before, last = ids["[CLS]"], max(ids, key=ids.__getitem__)
    ids["[CLS]"], ids[last] = ids[last], before
    (token,) = (each for each in settings["added_tokens"] if each["content"] == "[CLS]")
    token["id"] = ids["[CLS]"]
    settings["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [ids["[CLS]"]]
    (model / "tokenizer.json").write_text(json.dumps(settings), "utf-8")
    corpus = write_corpus(tmp_path / "corpus.txt", 60, ENGLISH)
    store = open_store(dumped(model, corpus, tmp_path / "store.zarr"))
    pruned = student_tokenizer("pruned:150", store)
    found = pruned(store[0].text)["input_ids"]
    assert found[0] == pruned.cls_token_id == 149 and found[-1] == pruned.sep_token_id
    assert store[0].token_ids[0] == ids["[CLS]"] > 149
    assert found.count(pruned.cls_token_id) == 1


def test_a_vocabulary_of_another_kind_is_refused(
    tiny_store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "CAN_BE_CUT", ("WordPiece",))
    with pytest.raises(UserError, match="pruned:500: .* the teacher's is a BPE"):
        student_tokenizer("pruned:500", open_store(tiny_store("roberta")))


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
