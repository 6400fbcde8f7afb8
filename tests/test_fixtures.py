"""The shared fixtures give what the other tests rely on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.making.models import MAX_LENGTH, TEACHER_KINDS, TOKENIZER_KINDS, trained_tokenizer
from tests.texts import SENTENCES


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_tokenizer_gives_offsets_and_knows_its_text(
    kind: str, make_tokenizer: Callable[[str], Any]
) -> None:
    tokenizer = make_tokenizer(kind)
    encoded = tokenizer(list(SENTENCES), return_offsets_mapping=True)
    ids = [token for row in encoded["input_ids"] for token in row]
    assert ids.count(tokenizer.cls_token_id) == len(SENTENCES)
    assert ids.count(tokenizer.unk_token_id) < len(ids) // 50
    for text, spans in zip(SENTENCES, encoded["offset_mapping"], strict=True):
        assert all(0 <= begin <= end <= len(text) for begin, end in spans)


@pytest.mark.parametrize("kind", TEACHER_KINDS)
def test_teacher_loads_with_all_its_weights(kind: str, tiny_teacher: Callable[[str], Path]) -> None:
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = tiny_teacher(kind)
    model, report = AutoModelForMaskedLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast and tokenizer.model_max_length == MAX_LENGTH
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt", truncation=True)
    assert batch["input_ids"].ne(tokenizer.unk_token_id).float().mean() > 0.95
    with torch.inference_mode():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.shape[-1] == len(tokenizer) and logits.isfinite().all()


def test_a_tokenizer_that_truncates_leaves_the_next_one_whole() -> None:
    trained_tokenizer("wordpiece").backend_tokenizer.enable_truncation(4)
    assert trained_tokenizer("wordpiece").backend_tokenizer.truncation is None
