"""The student's vocabulary, trained on the text of a store."""

from __future__ import annotations

import json
import shutil
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from teachonce.align import Vocabulary, VocabularyMap
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.model import pruning
from teachonce.student_train.model.start_checks import check_same_pieces
from teachonce.student_train.model.student_tokenizer import student_tokenizer, train_wordpiece
from teachonce.support.errors import UserError
from teachonce.training import wordpiece
from teachonce.training.wordpiece import SPECIALS, fewer_pieces, suggested_size, vocabulary_size
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers
from tests.making.texts import ENGLISH, RUSSIAN, SENTENCES, SLOVAK


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
    one = train_wordpiece(texts, 350, None).get_vocab()
    assert train_wordpiece(reversed(texts), 350, None).get_vocab() == one


def test_the_most_frequent_words_become_whole_pieces() -> None:
    words = sorted({w for text in ENGLISH for w in text.split() if w.isalpha() and len(w) > 1})
    often, seldom = words[::2], words[1::2]
    texts = [" ".join(often * 50), " ".join(seldom * 2), *SENTENCES]
    pieces = set(train_wordpiece(texts, 600, None).get_vocab())
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
    pieces = train_wordpiece(texts, letters + 4, None).get_vocab()
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
    assert len(train_wordpiece(texts, expected, normalizer)) <= expected


@pytest.mark.parametrize("size", [3, 60])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"--vocab {size}: .*characters.*give more"):
        train_wordpiece(SENTENCES, size, None)


def test_a_size_that_the_text_cannot_give_is_taken_as_far_as_it_goes() -> None:
    most = train_wordpiece(SENTENCES, 100_000, None)
    assert 600 < len(most) < 5000
    assert most.get_vocab() == train_wordpiece(SENTENCES, len(most), None).get_vocab()
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
    tokenizer = train_wordpiece(texts, 200, normalizer)
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


def test_a_token_that_was_added_beside_the_vocabulary_is_kept(
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
