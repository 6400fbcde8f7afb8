"""The shared fixtures have the properties that the other tests rely on."""

import pytest

from tests.making.models import TOKENIZER_KINDS, Tokenizers, trained_tokenizer
from tests.making.texts import SENTENCES


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_tokenizer_gives_offsets_and_knows_its_text(kind: str, make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer(kind)
    encoded = tokenizer(list(SENTENCES), return_offsets_mapping=True)
    ids = [token for row in encoded["input_ids"] for token in row]
    assert ids.count(tokenizer.cls_token_id) == len(SENTENCES)
    assert ids.count(tokenizer.unk_token_id) < len(ids) // 50
    for text, spans in zip(SENTENCES, encoded["offset_mapping"], strict=True):
        assert all(0 <= begin <= end <= len(text) for begin, end in spans)


def test_a_tokenizer_that_truncates_leaves_the_next_one_whole() -> None:
    trained_tokenizer("wordpiece").backend_tokenizer.enable_truncation(4)
    assert trained_tokenizer("wordpiece").backend_tokenizer.truncation is None
