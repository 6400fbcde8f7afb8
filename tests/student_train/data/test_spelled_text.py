"""Tokenizers that change or drop text are reported, and refused if little text is left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.spelled_text import (
    REFUSED,
    REPORTED,
    check_spelling,
    sampled,
    spelled_share,
)
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.plan.train_plan import plan_of
from teachonce.student_train.prepared_student import make_collator
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.errors import UserError
from tests.end_to_end.support import refused, says
from tests.making.models import Stores, Tokenizers


@pytest.fixture(scope="module")
def causal(tiny_store: Stores) -> Path:
    return tiny_store("gpt2", attention="none")


@pytest.fixture(scope="module")
def trained(causal: Path) -> Any:
    with open_store(causal) as store:
        return student_tokenizer("400", store, family="llama-bpe")


def collator_of(store: FeatureStore, trained: Any, normalizer: Any) -> Collator:
    """Return the collator of a decoder whose tokenizer normalises the text."""
    tokenizer = copy.deepcopy(trained)
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    tokenizer.model_max_length = 256
    options = TrainOptions(str(store.path), student="llama:32x1x4", loss={"next": 1.0})
    return make_collator(plan_of(options, store), store, tokenizer)


@pytest.mark.parametrize(
    ("normalizer", "least", "most"),
    [
        (None, 0, 0),
        (normalizers.NFC(), 0, 0),
        (normalizers.Lowercase(), 0.01, 0.2),
        (normalizers.Replace("e", "3"), 0.05, 0.5),
        (normalizers.Replace(Regex("[^ ]"), "x"), 0.6, 1),
        (normalizers.Replace(" the", ""), 0.001, 0.1),
    ],
)
def test_the_share_that_is_changed(
    causal: Path, trained: Any, normalizer: Any, least: float, most: float
) -> None:
    with open_store(causal) as store:
        collator = collator_of(store, trained, normalizer)
        share = 1 - spelled_share(sampled(collator, store))
        assert least <= share <= most
        if share > REFUSED:
            with pytest.raises(UserError, match="--vocab DIR: its tokenizer changes or drops .*%"):
                check_spelling(collator, store, "DIR")
        else:
            line = check_spelling(collator, store, "DIR")
            assert line.startswith(f"{share:.0%} of the text") == (share > REPORTED)


def test_what_is_beyond_max_length_is_not_changed(causal: Path, trained: Any) -> None:
    with open_store(causal) as store:
        collator = collator_of(store, trained, None)
        collator.tokenizer.enable_truncation(7)
        assert spelled_share(sampled(collator, store)) == 1


def test_bytes_that_a_vocabulary_lacks_are_refused(
    causal: Path, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """It has neither pieces nor fallbacks for all bytes."""
    make_tokenizer("unigram").save_pretrained(tmp_path / "unigram")
    words = ("--store", causal, "--student", "llama:32x1x4", "--steps", "1", "--device", "cpu")
    said = refused(student_train, *words, "--vocab", tmp_path / "unigram", "--out", tmp_path / "s")
    says(said, "--vocab", "a fast tokenizer that encodes every byte", "such as 8k")
