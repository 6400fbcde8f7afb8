"""The student makes text vectors of unmasked text, as the teacher does, with any other loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from teachonce.store import open_store
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.model.any_student import Outputs, shared_pass
from teachonce.student_train.output.run import run
from teachonce.student_train.plan.checks import checked_plan
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train import distiller as distiller_module
from teachonce.student_train.train import evaluate
from teachonce.support.errors import UserError
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import modules, normalize, pooling


@pytest.fixture(scope="module")
def store(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has vectors, and states of a masked view as well."""
    folder = tmp_path_factory.mktemp("vectors")
    corpus = write_corpus(folder / "corpus.txt", 30)
    behind = (pooling("mean"), normalize())
    model = modules(*behind, base=tiny_teacher("bert"), folder=folder / "model")
    words: dict[str, Any] = {"head": "embedding", "logits": None, "hidden": "layer:4", "views": 2}
    return dumped(model, corpus, folder / "store.zarr", **words)


def test_a_stage_of_single_texts_has_none_to_compare(store: Path) -> None:
    words: dict[str, Any] = {"student": "static:8", "vocab": "400", "loss": "similarity=1"}
    with open_store(store) as opened:
        one, several = (
            TrainOptions(str(store), batch_texts=count, stages=({"batch_texts": other},), **words)
            for count, other in ((4, 1), (1, 4))
        )
        with pytest.raises(UserError, match="stage 1: --batch-texts 1: --loss similarity compares"):
            checked_plan(one, opened)
        assert checked_plan(several, opened).stages[0].options.batch_texts == 4


@pytest.mark.parametrize(
    ("loss", "view", "passes"),
    [
        ("mlm=1,embedding=1", 0, 2),
        ("embedding=1,hidden=1", 1, 2),
        ("embedding=1", 1, 1),
        ("embedding=1,hidden=1", 0, 1),
    ],
)
@torch.no_grad()
def test_vectors_are_of_the_whole_text(
    store: Path, loss: str, view: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = StudentBatches(store, "400", student="16x1x2", loss=loss, view=view, batch_texts=8)
    distiller = batches.distiller(prepare(batches.options, batches.store)[0]).eval()
    read = list[Inputs]()

    def counted(student: Any, inputs: Inputs, *more: Any) -> Outputs:
        read.append(inputs)
        return shared_pass(student, inputs, *more)

    monkeypatch.setattr(distiller_module, "shared_pass", counted)
    batch = next(iter(batches))
    ((found, _),) = distiller.sides(batch).of("embedding")
    assert len(read) == passes
    raw = next(iter(batches.store.stream(0, 0, batch_texts=8, blocks=batches._blocks, features=())))
    plain = batches.tokenizer(raw.texts, padding=True, return_tensors="pt")
    inputs = Inputs(plain["input_ids"], plain["attention_mask"].bool())
    torch.testing.assert_close(found, distiller.vectors(inputs, distiller.encode(inputs)))
    # Masked tokens are still predicted from masked text.
    assert torch.equal(batch.inputs.ids, inputs.ids) == (view == 0 and "mlm" not in loss)


@torch.no_grad()
def test_a_validation_ranks_pairs_of_held_out_texts(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all held-out texts, not within batches, from the vectors of the student."""
    batches = StudentBatches(
        store, "400", student="static:16", loss="embedding=1", batch_texts=4, held_out=0.4
    )
    distiller = batches.distiller(prepare(batches.options, batches.store)[0]).eval()
    sides = [distiller.sides(batch).of("embedding")[0] for batch in batches.held_out()]
    assert len(sides) > 2
    own, teacher = (torch.cat(each).numpy() for each in zip(*sides, strict=True))

    def expected(count: int) -> float:
        pairs = np.triu_indices(count, 1)
        first = (own[:count], teacher[:count])
        unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in first]
        one, other = ((each @ each.T)[pairs] for each in unit)
        return float(spearmanr(one, other).statistic)

    assert len(own) < evaluate.LEAST_TEXTS and "valid_spearman" not in batches.validate(distiller)
    monkeypatch.setattr(evaluate, "LEAST_TEXTS", 3)
    found = batches.validate(distiller)
    assert found["valid_spearman"] == pytest.approx(expected(len(own)), abs=1e-3)
    monkeypatch.setattr(evaluate, "MOST_TEXTS", 5)
    assert batches.validate(distiller)["valid_spearman"] == pytest.approx(expected(5), abs=1e-3)
    monkeypatch.setattr(evaluate, "MOST_TEXTS", 2)  # one pair has no order
    assert "valid_spearman" not in batches.validate(distiller)


@torch.no_grad()
def test_a_batch_of_one_text_has_no_pairs_to_validate(store: Path) -> None:
    def validated(**words: Any) -> tuple[dict[str, float], list[int], float]:
        words |= {"student": "static:8", "loss": "embedding=1,similarity=10", "held_out": 0.1}
        batches = StudentBatches(store, "400", **words)
        distiller = batches.distiller(prepare(batches.options, batches.store)[0]).eval()
        held_out = list(batches.held_out())
        sizes = [len(batch.inputs.ids) for batch in held_out]
        return batches.validate(distiller), sizes, float(distiller(held_out[0])["similarity"])

    figures, sizes, first = validated(batch_texts=4)
    assert sizes == [4, 1]
    assert figures["valid_similarity"] == pytest.approx(first)
    figures, sizes, _ = validated(batch_tokens=1)
    assert set(sizes) == {1}
    assert "valid_similarity" not in figures
    assert figures["valid_loss"] == figures["valid_embedding"]


def test_a_training_without_pairs_is_refused(store: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"student": "static:8", "vocab": "400", "loss": "similarity=1"}
    options = TrainOptions(str(store), steps=1, out=tmp_path / "student", batch_tokens=1, **words)
    problem = "--loss similarity: compares the texts of a batch, and there is only one in each"
    with pytest.raises(UserError, match=f"{problem} batch of .*; raise --batch-tokens"):
        run(options)
    assert not (tmp_path / "student").exists()
