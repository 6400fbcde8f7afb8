"""The normalizers of a tokenizer.json give the same text as the library `tokenizers`."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers

from teachonce.align import AlignmentError
from teachonce.align.normalisers import normaliser_of
from tests.align.support import FRAGMENTS

NORMALISERS = {
    "bert": normalizers.BertNormalizer(lowercase=True, handle_chinese_chars=False),
    "bert-cased": normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False),
    "bert-accents": normalizers.BertNormalizer(
        lowercase=True, strip_accents=False, handle_chinese_chars=False
    ),
    "bert-raw": normalizers.BertNormalizer(
        clean_text=False, lowercase=False, strip_accents=True, handle_chinese_chars=False
    ),
    "albert": normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    ),
    "electra": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "regex": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("[éa]+"), "o")]),
    "nfkc": normalizers.NFKC(),
}
WRITTEN = st.lists(st.sampled_from([*FRAGMENTS, "``", "ÀÉ", "ΑΣ", "Å"]), max_size=8).map("".join)


@pytest.mark.parametrize("name", NORMALISERS)
@given(text=WRITTEN)
@settings(max_examples=80, deadline=None)
def test_normalisers_do_what_tokenizers_does(name: str, text: str) -> None:
    holder = Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    holder.normalizer = NORMALISERS[name]
    ours = normaliser_of(json.loads(holder.to_str())["normalizer"])
    assert ours(text) == NORMALISERS[name].normalize_str(text)


def test_normalisers_of_marks_and_compiled_tables() -> None:
    marks = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            {"type": "Strip", "strip_left": True, "strip_right": True},
        ],
    }
    assert normaliser_of(marks)(" a b ") == " a b "
    assert normaliser_of({"type": "Precompiled"})("ﬁ\u0007\n½") == "fi 1⁄2"
    with pytest.raises(AlignmentError, match=r"cannot compile the expression '\\\\p"):
        normaliser_of({"type": "Replace", "pattern": {"Regex": "\\p{L}"}, "content": ""})
