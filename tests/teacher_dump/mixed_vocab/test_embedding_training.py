"""Training of the embeddings: the loss falls, and a stopped training continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.support.errors import UserError
from teachonce.support.signals import Stopped, stoppable
from teachonce.teacher_dump.mixed_vocab.embedding_training import MixedTeacher, train
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions, StageOneDump
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.training.loop import Training
from tests.making.models import Teachers
from tests.teacher_dump.mixed_vocab.support import WIDTH, mixer_of


def options(out: Path, steps: int, **changes: Any) -> MixedVocabOptions:
    dump = StageOneDump("teacher", out, seed=1, device="cpu", precision="fp32")
    settings: dict[str, Any] = {"width": WIDTH, "steps": steps, "lr": 3e-3}
    return MixedVocabOptions(dump, **(settings | {"checkpoint_every": 1000} | changes))


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("adamw", 3e-3), pytest.param("lamb", 3e-2, marks=pytest.mark.apart)]
)
def test_the_loss_falls_and_a_stopped_training_goes_on_along_the_same_curve(
    tiny_teacher: Teachers, small: Any, tmp_path: Path, optimizer: str, rate: float
) -> None:
    def once(name: str, until: int = 0, started: int = 30, **changes: Any) -> tuple[Any, list[str]]:
        teacher = load_teacher(
            str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none"
        )
        model, said = MixedTeacher(teacher, len(small), WIDTH, seed=1), list[str]()
        mixer = mixer_of(teacher, small, batch_tokens=512)

        def say(line: str) -> None:
            said.append(line)
            if line.startswith(f"step {until}/"):
                os.kill(os.getpid(), signal.SIGINT)

        with stoppable() as stop:
            asked = options(tmp_path / name, 30, optimizer=optimizer, lr=rate, **changes)
            return train(model, mixer, asked, {"steps": started}, stop, say), said

    whole, said = once("whole")
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (said[0], said[-1]))
    assert last < first - 0.5 and said[-1].startswith("step 30/30")
    with pytest.raises(Stopped):
        once("cut", until=11, checkpoint_every=4)
    again, said = once("cut")
    assert said[0] == "resume    after step 11 of 30"
    assert np.array_equal(whole, again) and whole.dtype == np.float32
    unchanged, said = once("cut")  # killed just before the store is written: no training is left
    assert said == ["resume    after step 30 of 30"] and np.array_equal(whole, unchanged)
    with pytest.raises(UserError, match="with other arguments: steps was '30' and is '31'"):
        once("cut", started=31)
    options(tmp_path / "torn", 30).checkpoint().write_bytes(b"PK")
    with pytest.raises(UserError, match="cannot be read.*remove it to start from the beginning"):
        once("torn")


def test_a_step_of_several_batches_and_its_warm_up(
    tiny_teacher: Teachers, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, several batches make one step, and the warm-up is a share of the steps."""
    taken: list[tuple[float, int, int]] = []
    update = Training.update

    def printed(self: Any, rate: float, batches: Any, losses: Any, count: int = 1) -> Any:
        found = update(self, rate, batches, losses, count)
        taken.append((rate, count, self.step))
        return found

    monkeypatch.setattr(Training, "update", printed)

    def trained(name: str, until: int = 0) -> Any:
        taken.clear()
        teacher = load_teacher(
            str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none"
        )
        mixer = mixer_of(teacher, small, batch_tokens=512)
        model = MixedTeacher(teacher, len(small), WIDTH, seed=1)

        def say(line: str) -> None:
            if line.startswith(f"step {until}/"):
                os.kill(os.getpid(), signal.SIGINT)

        with stoppable() as stop:
            asked = options(tmp_path / name, 4, accumulate=3, warmup=0.5)
            return train(model, mixer, asked, {}, stop, say)

    whole = trained("whole")
    assert [rate for rate, _, _ in taken] == pytest.approx([1.5e-3, 3e-3, 3e-3, 1.5e-3])
    assert {count for _, count, _ in taken} == {3}
    with pytest.raises(Stopped):
        trained("cut", until=2)
    assert np.array_equal(trained("cut"), whole)  # continues with batch 6, not with batch 2
    assert [step for *_, step in taken] == [3, 4]
