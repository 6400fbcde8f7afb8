"""An untrusted tokenizer in a store is plain, or runs within limits, or is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from teachonce.store import StoreError, open_store
from teachonce.store.read import stored_tokenizer
from teachonce.store.read.stored_tokenizer import encoded, is_plain, json_object, parse_tokenizer
from teachonce.store.tools.stored_tokens import check_tokens
from teachonce.store.tools.verify import verify
from tests.integrity.odd_tokenizers import CHANGES, TEXT, _split, rewritten
from tests.making.dumps import dumped

KINDS = ("wordpiece", "bpe", "unigram")


@pytest.fixture(scope="module")
def bpe_store(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path]
) -> Path:
    folder = tmp_path_factory.mktemp("stored_tokenizer")
    corpus = folder / "corpus.txt"
    corpus.write_text(f"{TEXT}\n" * 8)
    return dumped(tiny_teacher("roberta"), corpus, folder / "store.zarr", attention="none")


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_of_every_kind_are_plain(kind: str, make_tokenizer: Any) -> None:
    assert is_plain(make_tokenizer(kind).backend_tokenizer.to_str().encode())


@pytest.mark.parametrize("what", CHANGES)
def test_no_tokenizer_without_bounds_is_plain(what: str, make_tokenizer: Any) -> None:
    settings = json.loads(make_tokenizer("bpe").backend_tokenizer.to_str())
    CHANGES[what](settings, random.Random(0))
    # The padding that a tokenizer requests is never applied.
    assert is_plain(json.dumps(settings).encode()) == (what == "padding to 10^9")


def test_work_out_of_proportion_is_not_plain(make_tokenizer: Any) -> None:
    wordpiece, unigram = (
        json.loads(make_tokenizer(kind).backend_tokenizer.to_str())
        for kind in ("wordpiece", "unigram")
    )
    # takes quadratic time in the length of a word
    wordpiece["model"]["max_input_chars_per_word"] = 10**9
    assert not is_plain(json.dumps(wordpiece).encode())
    unigram["model"]["vocab"].append(["x" * 20_000, -9.0])
    assert not is_plain(json.dumps(unigram).encode())
    template = json.loads(make_tokenizer("wordpiece").backend_tokenizer.to_str())
    for token in template["post_processor"]["special_tokens"].values():
        token["ids"], token["tokens"] = token["ids"] * 9_000, token["tokens"] * 9_000
    assert not is_plain(json.dumps(template).encode())


def test_a_key_that_occurs_twice_is_not_plain(make_tokenizer: Any) -> None:
    """A key that occurs twice is not plain: parsers of JSON differ in the value returned."""
    text = make_tokenizer("wordpiece").backend_tokenizer.to_str()
    assert is_plain(text.encode())
    assert not is_plain(text.replace('"normalizer"', '"normalizer":null,"normalizer"').encode())
    assert not is_plain(text.replace('"content"', '"content":"a","content"', 1).encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", ["<extra_0>", "[unused1]", "word"])
def test_added_tokens_of_every_kind_are_plain(make_tokenizer: Any, kind: str, content: str) -> None:
    backend = Tokenizer.from_str(make_tokenizer(kind).backend_tokenizer.to_str())
    for number, flag in enumerate(("lstrip", "rstrip", "single_word", "normalized")):
        backend.add_tokens([AddedToken(f"{content}{number}", **{flag: True})])
    assert is_plain(backend.to_str().encode())
    backend.add_special_tokens([AddedToken("    ", normalized=True)])  # as in GPT-NeoX
    assert is_plain(backend.to_str().encode()) == (kind != "wordpiece")


def test_a_tokenizer_is_loaded_within_bounds_first(
    make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = json.loads(make_tokenizer("bpe").backend_tokenizer.to_str())
    _split("b+")(settings, random.Random(0))
    data = json.dumps(settings).encode()
    with monkeypatch.context() as patch:
        patch.setattr(stored_tokenizer, "MEMORY", 1 << 26)
        with pytest.raises(StoreError, match="^it(: loading it crashed| cannot be loaded)"):
            parse_tokenizer(data, "it")
    assert parse_tokenizer(data, "it").encode("abba").ids


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"{" * 5000, b"\xff"])
def test_what_is_no_tokenizer(data: bytes) -> None:
    assert not is_plain(data)
    for wrote, remedy in ((None, "a newer version of tokenizers"), ("0.9", ".* wrote it: 0.9$")):
        with pytest.raises(StoreError, match=f"it cannot be loaded .*; install {remedy}"):
            parse_tokenizer(data, "it", wrote)
    if data != b"{}":
        with pytest.raises(StoreError, match="it is"):
            json_object(data, "it")


def own(make_tokenizer: Any) -> Tokenizer:
    """Make a tokenizer that no other test uses."""
    return Tokenizer.from_str(make_tokenizer("wordpiece").backend_tokenizer.to_str())


def test_padding_and_truncation_are_off(make_tokenizer: Any) -> None:
    backend = own(make_tokenizer)
    backend.enable_padding(length=10**9)
    backend.enable_truncation(4)
    plain = parse_tokenizer(backend.to_str().encode(), "it")
    assert plain.padding is None and plain.truncation is None
    assert 4 < len(plain.encode("the story of the river " * 9).ids) < 999


def test_more_tokens_than_a_text_can_have(make_tokenizer: Any) -> None:
    class Padded:
        def encode_batch(self, texts: list[str]) -> list[Any]:
            backend = own(make_tokenizer)
            backend.enable_padding(length=5000)
            found: list[Any] = backend.encode_batch(texts)
            return found

    with pytest.raises(StoreError, match="it: .* gives 5,000 tokens for a text of 3 characters"):
        encoded(Padded(), ["the"], "it")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "a regex without end",
        "a text doubled 40 times",
        "a text of texts of texts",
        "bytes of bytes of bytes",
    ],
)
def test_work_without_bounds_is_a_line(
    bpe_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(stored_tokenizer, "SECONDS", 1.0)
    monkeypatch.setattr(stored_tokenizer, "MEMORY", 1 << 29)
    files = dict(open_store(bpe_store).teacher_files())
    settings = json.loads(files["tokenizer.json"])
    CHANGES[what](settings, random.Random(0))
    path = tmp_path / "store.zarr"
    rewritten(bpe_store, path, files | {"tokenizer.json": json.dumps(settings).encode()})
    (problem,) = verify(path).problems
    assert "the tokenizer in it" in problem or "crashed" in problem
    with pytest.raises(StoreError, match="the tokenizer in it"):
        check_tokens(open_store(path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("data", [b"[]", b"{", b"3"])
def test_verify_looks_at_the_settings(
    bpe_store: Path, tmp_path: Path, name: str, data: bytes
) -> None:
    path = tmp_path / "store.zarr"
    rewritten(bpe_store, path, dict(open_store(bpe_store).teacher_files()) | {name: data})
    (problem,) = verify(path).problems
    assert f"{name} in it is" in problem
    with pytest.raises(StoreError, match=f"{name} in it is"):
        open_store(path).teacher_settings(name)
