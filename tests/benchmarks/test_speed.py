"""The benchmarks of speed with a tiny teacher: the functions that are timed, in this process."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu
from benchmarks.common.small_store import random_teacher, small_store
from benchmarks.speed import dumping, stepping
from teachonce.student_train.settings.option_values import CACHES
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.arrays import Array
from teachonce.teacher_dump.job.dump import DumpSummary, dump
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher.teacher import Activations, Teacher
from tests.making.models import Teachers


@pytest.fixture(scope="module")
def base(tiny_teacher: Teachers, corpus: Path) -> TrainOptions:
    store = corpus.with_name("store.zarr")
    small_store(str(tiny_teacher("bert")), str(corpus), 6000, store)
    return TrainOptions(
        *(str(store),),
        student="16x1x2",
        vocab="200",
        loss={"mlm": 1.0, "hidden": 1.0},
        steps=5,
        batch_tokens=512,
        view=0,
        held_out=0.0,
    ).resolved()


def test_the_teacher_in_memory_runs_at_every_step(
    base: TrainOptions, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passes = Teacher.run, 0

    def counted(self: Teacher, ids: Array, present: Array) -> Activations:
        nonlocal passes
        passes += 1
        return real(self, ids, present)

    monkeypatch.setattr(Teacher, "run", counted)
    assert gpu.online(base, str(tiny_teacher("bert")))["speed"] > 0
    assert passes >= (base.steps or 0) > 0


@pytest.mark.parametrize("features", dumping.FEATURES)
def test_dumps(
    features: str, tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = dumping.FEATURES[features]
    options = DumpOptions(
        *(str(tiny_teacher("bert")), Path("none.zarr"), (str(corpus),)), limit=2000,
        part_tokens=700, precision="fp32", max_length=64,
    )  # fmt: skip
    options, stored, made = replace(options, **words), Counter[str](), list[DumpSummary]()
    put = dumping.Arrays.put

    def counted(self: dumping.Arrays, name: str, values: torch.Tensor) -> None:
        stored[name] += len(values)
        put(self, name, values)

    monkeypatch.setattr(dumping.Arrays, "put", counted)
    monkeypatch.setattr(dumping, "dump", lambda *given: made.append(dump(*given)))
    for work in dumping.compared(options).values():
        assert min(work().values()) > 0
    windows = [window for part in dumping.parts_of(options) for window in part]
    tokens = sum(len(window.ids) for window in windows)
    rows = {"vectors": len(windows)} if options.pooling else {"hidden": tokens}
    if features == "all features":
        rows |= dict.fromkeys(("ids", "logprobs", "log_partition"), tokens)
        rows["attention"] = sum(len(window.ids) ** 2 for window in windows)
    assert stored == rows and [done.tokens for done in made] == [tokens]


def test_steps(base: TrainOptions) -> None:
    mine = stepping.ours(base)
    assert mine["speed"] > 0 and 0 <= mine["waiting"] < 1
    assert stepping.plain(replace(base, loss={"mlm": 1.0}), 8)["speed"] > 0


@pytest.mark.slow
def test_what_a_gpu_is_measured_by(
    tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself runs on a CPU at toy size."""
    small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    monkeypatch.setattr(gpu, "random_teacher", partial(random_teacher, **small))
    words = {
        "model": tiny_teacher("bert"), "corpus": str(corpus), "tokens": 1500, "vocabulary": 900,
        "layers": 1, "decoder-width": 64, "decoder-layers": 1, "part-tokens": 700,
        "dump-batch": 512, "student": "16x1x2", "vocab": 200, "batch-tokens": 1000, "steps": 4,
        "device": "cpu", "precision": "fp32", "repeats": 1,
    }  # fmt: skip
    found = CliRunner().invoke(gpu.main, [f"--{name}={value}" for name, value in words.items()])
    assert found.exit_code == 0, found.output
    lines = [line for line in found.output.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kinds = [*gpu.FEATURES, *gpu.OF_DECODER]
    dumped = [row for row in rows if row[0] in kinds]
    assert [row[0] for row in dumped] == [kind for kind in kinds for _ in range(3)]
    assert dumped[0][3:] == ["1.00", dumped[0][4], ""] and dumped[2][4] == "1.00"
    assert [row[1] for row in rows if row[0].startswith("topk:")] == ["plain"] * 2
    assert [row[0].split()[-1] for row in rows[-4:]] == [*CACHES, "memory"][-4:]
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert gpu.of_peak(98.9e12, "cuda") == "10.0%" and gpu.of_peak(1.0, "cpu") == ""


def test_operations_of_a_token_match_its_weights(tiny_teacher: Teachers, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    like = str(tiny_teacher("bert"))
    model = random_teacher(tmp_path, like, vocab_size=900, intermediate_size=64, **small)
    options = DumpOptions(*(model, Path("none.zarr"), ("none.txt",)), precision="fp32")
    with_head = gpu.operations(replace(options, **gpu.FEATURES["states and logits"]))
    without = gpu.operations(replace(options, **gpu.FEATURES["states"]))
    # the decoder, the transform before it (a matrix, a bias, a norm) and its bias
    assert with_head - without == 2 * (900 * 32 + 32 * 32 + 3 * 32 + 900)
