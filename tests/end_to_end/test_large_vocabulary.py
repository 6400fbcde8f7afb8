"""A teacher with more than 2^17 pieces: ids retain all their bits in every tier, and a student
reads them."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from teachonce.store import open_store
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.training.wordpiece import SPECIALS
from tests.making.dumps import dumped

WORDS = ["".join(each) for each in itertools.product(string.ascii_lowercase[:20], repeat=4)]
PIECES = 140_000
SEVENTEEN_BITS = 1 << 17


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    pieces = [*SPECIALS.values(), *string.ascii_lowercase, *WORDS][:PIECES]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=32, **SPECIALS)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=PIECES, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8, max_position_embeddings=32, initializer_range=0.5,
        )  # fmt: skip
        model = BertForMaskedLM(config)
        # the last pieces are the likely ones
        model.cls.predictions.bias.data = torch.linspace(0, 9, PIECES)
    model.save_pretrained(folder)
    (folder / "text.txt").write_text(
        "\n".join(" ".join(WORDS[PIECES - 40 - i : PIECES - 32 - i]) for i in range(6))
    )
    return folder


@pytest.mark.slow
def test_ids_above_seventeen_bits(teacher: Path, tmp_path: Path) -> None:
    options = {"logits": "topk:8", "codec": "small", "attention": "none", "hidden": "none"}
    store = open_store(dumped(teacher, teacher / "text.txt", tmp_path / "a.zarr", **options))
    network = AutoModelForMaskedLM.from_pretrained(teacher).eval()
    for record in store:
        ids = record.token_ids
        assert (ids[1:-1] > SEVENTEEN_BITS).all() and len(ids) == 10
        with torch.no_grad():
            rows = network(torch.tensor(ids[None].astype(np.int64))).logits[0].log_softmax(-1)
        best, wanted = rows.topk(8)
        found = record.views[0].logits
        assert found is not None and found.ids is not None and found.logprobs is not None
        assert (np.sort(found.ids) == np.sort(wanted.numpy())).mean() > 0.99  # ties, in float16
        assert (found.ids > SEVENTEEN_BITS).any()
        assert np.allclose(found.logprobs, best.numpy(), atol=0.2)
    small: dict[str, Any] = {"vocab": "pruned:30", "student": "8x1x1", "steps": 2, "held_out": 0}
    run(TrainOptions(store.path, out=tmp_path / "s", loss="kl=1,mlm=1", device="cpu", **small))
    student = AutoModelForMaskedLM.from_pretrained(tmp_path / "s")
    assert student.config.vocab_size == 30
