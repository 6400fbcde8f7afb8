"""Optimizers, and the trackers of a training.

- LAMB and Adadelta: the papers' steps, the same training after a stop, and the message without
  LAMB's package.
- `--log`: a tracker receives the content of metrics.jsonl.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.output.report import check_same_training
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.cli import main as student_sweep
from teachonce.student_train.train.student_training import BETAS, train
from teachonce.support.errors import UserError
from teachonce.training.optimizer import optimizer_of
from tests.end_to_end.support import STUDENT, ok, refused, report_of, says
from tests.student_train import support
from tests.student_train.stopping import resume, same_weights, stop
from tests.training.lamb import LONGEST, check_steps
from tests.training.tracker_packages import install, recorded

WORDS = ("--vocab", 400, "--student", "16x2x2", "--batch-tokens", 512, "--steps", 2)
GIVEN = "settings: optimizer was {} and is {}; give the earlier settings"


LOSS = {"mlm": 1.0, "hidden": 1.0}
options_for = partial(support.options_for, steps=4, loss=LOSS, optimizer="lamb", lr=1e-2)


def test_steps_are_those_of_the_paper() -> None:
    torch.manual_seed(3)
    short, long, frozen = nn.Linear(3, 4), nn.Linear(8, 6), nn.Linear(3, 3)
    model = nn.ModuleDict({"a": short, "long": long, "frozen": frozen, "n": nn.LayerNorm(4)})
    with torch.no_grad():
        long.weight *= 40
    assert short.weight.norm() < LONGEST < long.weight.norm()
    frozen.requires_grad_(False)
    made = optimizer_of(model, "lamb", lr=0.004, weight_decay=0.3, betas=BETAS)
    check_steps(made, model, BETAS, 0.3)


def test_steps_of_adadelta_are_those_of_the_paper() -> None:
    """Zeiler 2012, algorithm 1: averages of squared gradients and of squared steps."""
    weight = nn.Parameter(torch.tensor([[3.0]]))
    made = optimizer_of(nn.ParameterList([weight]), "adadelta", lr=1.0, weight_decay=0.0,
                        betas=BETAS)  # fmt: skip
    gradients = steps = 0.0
    place = 3.0
    for gradient in (2.0, -1.0, 0.5):
        weight.grad = torch.tensor([[gradient]])
        made.step()
        gradients = 0.95 * gradients + 0.05 * gradient**2
        step = -math.sqrt(steps + 1e-6) / math.sqrt(gradients + 1e-6) * gradient
        steps = 0.95 * steps + 0.05 * step**2
        place += step
        assert weight.item() == pytest.approx(place, abs=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("lamb", "fp32"), ("lamb", "bf16"), ("adadelta", "fp32")]
)
def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    store: FeatureStore, tmp_path: Path, optimizer: str, precision: str
) -> None:
    options = options_for(
        store, checkpoint_every=1, precision=precision, optimizer=optimizer,
        lr=1.0 if optimizer == "adadelta" else 1e-2,
    )  # fmt: skip
    straight, collator, _ = prepare(options, store)
    before = {name: value.clone() for name, value in straight.state_dict().items()}
    losses: list[float] = []
    train(store, straight, collator, options, on_step=lambda _, found: losses.append(found["loss"]))
    assert losses[-1] < losses[0]
    stop(store, options, tmp_path, 2)
    again, _, said = resume(store, options, tmp_path)
    assert said[0] == "resume    after step 2"
    same_weights(straight, again)
    assert any((value != before[name]).any() for name, value in straight.state_dict().items())


def test_folders_of_students_keep_their_names() -> None:
    """A sweep finds its earlier students."""
    plain = TrainOptions(store="data/a.zarr", lr=1e-3, precision="fp32")
    cut = replace(plain, init="layers:1,3", loss={"mlm": 1.0})
    assert plain.digest() == "a7fe70"
    assert cut.digest() == "b0a78a"
    assert replace(plain, optimizer="lamb").digest() != plain.digest()
    starts = [replace(plain, init=f"svd:{path}") for path in ("a/b.zarr", "../b.zarr")]
    folders = {each.folder_in(Path("sweep"), ["init"]) for each in starts}
    assert len(folders) == 1 and folders.pop().name.startswith("svdb.zarr-")
    layers = ("layers:1,2@/m/bert", "layers:1,2@/elsewhere/bert", "layers:3,4@/m/bert")
    one, moved, other = (replace(plain, init=init).folder_in(Path("sweep")) for init in layers)
    assert one == moved != other


def test_a_training_goes_on_with_its_own_optimizer(store: FeatureStore, tmp_path: Path) -> None:
    def started(**changes: Any) -> dict[str, Any]:
        settings = options_for(store, **changes).describing()
        nothing: dict[str, Any] = {"store": {}, "others": [], "environments": [], "tokenizer": ""}
        return {"settings": settings, **nothing}

    before = started()
    (tmp_path / "training.json").write_text(json.dumps(before))
    assert check_same_training(tmp_path, started(), resume=True) == before
    with pytest.raises(UserError, match=GIVEN.format("lamb", "adamw")):
        check_same_training(tmp_path, started(optimizer="adamw"), resume=True)
    before = started(optimizer="adamw")
    (tmp_path / "training.json").write_text(json.dumps(before))
    assert check_same_training(tmp_path, started(optimizer="adamw"), resume=True) == before
    with pytest.raises(UserError, match=GIVEN.format("adamw", "lamb")):
        check_same_training(tmp_path, started(), resume=True)


def test_without_the_package_nothing_is_begun(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    words = ("--store", store.path, *WORDS, "--optimizer", "lamb", "--out", tmp_path / "student")
    says(refused(main, *words), "--optimizer lamb", "`pip install 'teachonce[lamb]'`")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield install(tmp_path, monkeypatch)
    sys.modules.pop("wandb", None)


def test_a_tracker_hears_what_metrics_has(store: FeatureStore, file: Path, tmp_path: Path) -> None:
    words = ("--store", store.path, "--vocab", "450", *STUDENT, "--log", "wandb")
    ok(student_train, *words, "--steps", "3", "--out", tmp_path / "mine")
    metrics = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    started, *heard, ended = recorded(file)
    assert [{"step": each["step"], **each["log"]} for each in heard] == [*map(json.loads, metrics)]
    assert started["init"] == "mine" and started["config"]["steps"] == 3 and ended["finish"] == 0
    # The tracker is specific to a machine: it neither changes a student's name nor prevents a
    # resume.
    settings = report_of(tmp_path / "mine")["settings"]
    assert "log" not in settings
    file.unlink()
    rates = ("--lr", "0.001", "--lr", "0.002")
    ok(student_sweep, *words, "--steps", "1", *rates, "--out", tmp_path / "sweep")
    assert [each["group"] for each in recorded(file) if "init" in each] == ["sweep", "sweep"]
    assert len({each["id"] for each in recorded(file)}) == 2
