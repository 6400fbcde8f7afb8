"""`--precision auto` is bf16 on a CPU that multiplies bfloat16, if the outputs agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teachonce.store import open_store
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.teacher.precision import TOLERANCE, deviations, load_fastest
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.training import device
from tests.making.dumps import dump_options, write_corpus
from tests.making.models import Teachers
from tests.making.texts import ENGLISH


def test_deviations_by_hand() -> None:
    """An error of 1 in a channel of deviation 2 counts as 0.5; constant channels do not count."""
    values = torch.tensor([[1.0, 7.0, 0.0], [5.0, 7.0, 2.0]])
    found = deviations({"a": values}, {"a": values + torch.tensor([1.0, 9.0, 0.0])})
    assert found["a"] == pytest.approx((0.25 / 2) ** 0.5)
    assert deviations({"a": values[:, 1:2]}, {"a": values[:, :1]}) == {"a": 0.0}


@pytest.mark.parametrize("kind", ("bert", "gpt2"))
def test_a_decoder_that_agrees(kind: str, tiny_teacher: Teachers) -> None:
    said: list[str] = []

    def load(precision: str) -> Teacher:
        return load_teacher(str(tiny_teacher(kind)), precision=precision)

    teacher, precision = load_fastest(load, ENGLISH, said.append)
    if kind == "bert":  # without a decoder
        assert precision == "fp32" and not teacher.narrow
        assert said == ["precision fp32, chosen by auto: on a CPU, only decoders run in bf16"]
        return
    assert precision == "bf16" and teacher.narrow
    assert len(said) == 1 and said[0].startswith("precision bf16: in bf16 ")


def test_a_teacher_that_does_not_agree(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """A teacher with a large common offset in its embeddings does not agree in bfloat16."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    folder = tiny_teacher("gpt2")
    model = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.wte.weight += 300
    model.save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "large")
    said: list[str] = []

    def load(precision: str) -> Teacher:
        return load_teacher(str(tmp_path / "large"), precision=precision)

    teacher, precision = load_fastest(load, ENGLISH, said.append)
    assert precision == "fp32" and not teacher.narrow
    assert said[0].startswith("precision fp32: in bf16 ") and f"(at most {TOLERANCE})" in said[0]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "c.txt", 12)


def precision_of(path: Path) -> Any:
    return open_store(path).identity["arguments"]["precision"]


def test_a_store_keeps_the_precision_that_it_was_started_with(
    tiny_teacher: Teachers, corpus: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def options(name: str, **changes: Any) -> Any:
        words = {"codec": "exact", "hidden": "mean", **changes}
        return dump_options(tiny_teacher("gpt2"), corpus, tmp_path / name, **words)

    dump(options("fp32.zarr", precision="auto"))
    monkeypatch.setattr(device, "_multiplies_bf16", lambda device: True)
    first: list[str] = []
    dump(options("bf16.zarr", precision="auto"), first.append)
    assert not any("auto" in line for line in first)
    assert sum(line.startswith("precision bf16: in bf16 ") for line in first) == 1
    assert precision_of(tmp_path / "fp32.zarr") == "fp32"
    assert precision_of(tmp_path / "bf16.zarr") == "bf16"
    said: list[str] = []
    assert dump(options("fp32.zarr", precision="auto"), said.append).finished_before
    assert not any(line.startswith("precision") for line in said)
    one, two = (open_store(tmp_path / f"{name}.zarr")[0] for name in ("fp32", "bf16"))
    difference = np.abs(one.views[0].hidden["mean"] - two.views[0].hidden["mean"]).max()
    assert 0 < difference < 0.1


def test_a_limit_on_the_instructions_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    able = {"amx_bf16": True, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
    assert device.resolved_precision("auto", "cpu") == "fp32"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert device.resolved_precision("auto", "cpu") == "bf16"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert device.resolved_precision("auto", "cpu") == "bf16"
    assert device.resolved_precision("fp32", "cpu") == "fp32"
