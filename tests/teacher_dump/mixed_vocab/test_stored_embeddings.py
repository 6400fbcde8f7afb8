"""Embeddings in a store: merged, missing, and verified against their tokenizer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.errors import StoreError
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.store.tools.verify import verify
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.training.wordpiece import train_wordpiece
from tests.end_to_end.support import ok, refused
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers
from tests.making.texts import ENGLISH
from tests.teacher_dump.mixed_vocab.support import LONGEST


def test_a_plain_store_has_none_and_merges_behind_one_that_has(
    trained: Any, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    path, corpus, _ = trained
    plain = dumped(
        tiny_teacher("bert"), write_corpus(tmp_path / "more.txt", 10), tmp_path / "plain.zarr",
        logits="none", hidden="none", attention="none", text_only=True, max_length=LONGEST,
        part_tokens=1 << 17, weights=False,
    )  # fmt: skip
    store = open_store(plain)
    assert MixedVocab.stored(store) is None
    for asked in (lambda: student_tokenizer("mixed-vocab", store), lambda: MixedVocab.of(store)):
        with pytest.raises(StoreError, match="make such a store with `teacher-dump mixed-vocab`"):
            asked()
    line = refused(feature_store, "merge", plain, path, tmp_path / "all.zarr")
    assert f"name {path} first" in line
    ok(feature_store, "merge", path, plain, tmp_path / "all.h5")
    both = open_store(tmp_path / "all.h5")
    assert len(both) == len(store) + len(open_store(path)) and not verify(both.path).problems
    assert np.array_equal(
        MixedVocab.of(both).embeddings, MixedVocab.of(open_store(path)).embeddings
    )


def test_verify_tells_embeddings_that_are_not_those_of_the_tokenizer(
    trained: Any, tmp_path: Path
) -> None:
    store = open_store(trained[0])
    good = MixedVocab.of(store)
    backend = train_wordpiece(ENGLISH, 180, None)
    settings = json.dumps(json.loads(good.settings)).encode()
    wrong = dataclasses.replace(good, tokenizer=backend.to_str().encode(), settings=settings)
    from teachonce.store import StoreWriter
    from teachonce.store.tools.copy import copy_part

    writer = StoreWriter.create_or_resume(
        tmp_path / "wrong.zarr", store.identity, store.features,
        software=store.meta["software"], calibration=store.calibration,
        files=store.teacher_files(), extras=(wrong,),
    )  # fmt: skip
    copy_part(writer, 0, store, 0, store, 0)
    writer.seal()
    (line,) = verify(tmp_path / "wrong.zarr").problems
    assert "is not a float32 [180, d]" in line
    with pytest.raises(StoreError, match="a row for each piece"):
        MixedVocab.of(open_store(tmp_path / "wrong.zarr"))
