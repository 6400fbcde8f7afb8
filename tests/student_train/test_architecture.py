"""Every kind of student is an ordinary masked LM and learns under every loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from store import FeatureStore
from store.errors import UserError
from student_train import losses
from student_train.architecture import KINDS, lm_logits, make_student, parse_student
from student_train.options import ALIGNMENTS, TrainOptions
from student_train.run import run
from student_train.trainer import METRICS
from student_train.vocabulary import student_tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("align", ALIGNMENTS)
def test_trained_under_every_loss(
    kind: str, align: str, store: FeatureStore, tmp_path: Path
) -> None:
    options = TrainOptions(
        store=str(store.path),
        vocab="400",
        out=tmp_path / "student",
        student=f"{kind}:32x2x4",
        align=align,
        loss=dict.fromkeys(losses.NAMES, 1.0),
        steps=30,
        eval_every=1000,
        batch_tokens=512,
        lr=5e-3,
        view=0,
        device="cpu",
        precision="fp32",
    )
    result = run(options.resolved())["result"]
    records = [json.loads(line) for line in (options.out / METRICS).read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 30 and set(losses.NAMES) <= set(steps[0])
    assert sum(r["loss"] for r in steps[-5:]) < sum(r["loss"] for r in steps[:5])
    student = AutoModelForMaskedLM.from_pretrained(options.out)
    assert student.config.model_type == kind
    assert student.num_parameters() == result["parameters"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_reads_the_last_state(kind: str, store: FeatureStore) -> None:
    student = make_student(f"{kind}:16x3x4", student_tokenizer("400", store), 32).eval()
    ids, present = torch.randint(0, 99, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    present[1, 6:] = 0
    with torch.inference_mode():
        asked = {"input_ids": ids, "attention_mask": present}
        states = student.base_model(**asked, output_hidden_states=True).hidden_states
        torch.testing.assert_close(lm_logits(student, states[-1]), student(**asked).logits)
    assert len(states) == 4


def test_sizes() -> None:
    assert parse_student("tiny") == ("bert", (264, 3, 12))
    assert parse_student("modernbert:tiny") == ("modernbert", (264, 3, 12))
    assert parse_student("64x2x4", default="modernbert") == ("modernbert", (64, 2, 4))


@pytest.mark.parametrize(
    ("student", "told"),
    [
        ("llama:64x2x4", "no kind of student is called llama; there are bert, modernbert"),
        ("modernbert:64x2", "expected tiny or HxLxA"),
        ("modernbert:12x2x4", "3 dimensions a head; rotary positions need an even number"),
    ],
)
def test_wrong_students_are_refused(student: str, told: str) -> None:
    with pytest.raises(UserError, match=f"^--student {student}: {told}"):
        parse_student(student)
