"""The shared training loop: its checkpoints, memory, learning rates, ranks and trackers.

- The shared training loop, with a small training of its own.
- A torn checkpoint is skipped for the previous one; a whole one is loaded without pickle.
- A training limits the memory used in addition to model and batch, and restores settings.
- Learning rates, calculated by hand: linear decay, cosine decay, and a decay at the end.
- Variables of torchrun that are not numbers are refused, each in one line.
- Trackers receive the figures, continue their run after a resume, and never end a training.
"""

import copy
import hashlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from teachonce.student_train.batches import _place
from teachonce.student_train.output.report import SETTINGS, check_same_training
from teachonce.support import files
from teachonce.support.environment import is_main_process
from teachonce.support.errors import UserError, out_of_memory
from teachonce.support.signals import Stopped, stoppable
from teachonce.teacher_dump.job.option_values import shard_of
from teachonce.training import loop
from teachonce.training.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from teachonce.training.device import resolved_device
from teachonce.training.loop import (
    CAPACITY,
    EVERY,
    PRIMITIVES,
    Losses,
    Training,
    limit_primitive_cache,
    release_memory,
)
from teachonce.training.optimizer import Schedule
from teachonce.training.ranks import ALONE, _peer_errors, join_ranks
from teachonce.training.trackers import (
    RunDescription,
    Trackers,
    check_installed,
    check_known,
    parse_trackers,
)
from tests.training.tracker_packages import install, recorded

STEPS = 8


class Line(Training):
    """Fit a line to points, with dropout; store the checkpoints in a list."""

    def __init__(self, seed: int = 0, batches: int = 1, clip: float = 1.0, every: int = 3) -> None:
        torch.manual_seed(11)
        super().__init__(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)), seed, clip
        )
        self.steps, self.batches, self.every = STEPS, batches, every
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seen: list[Losses] = []
        self.saved: list[dict[str, Any]] = []
        self.fails_at, self.stops_at = STEPS + 1, STEPS + 1
        self.scale = 1.0

    def _batches(self) -> Iterator[tuple[int, int]]:
        if self.step + 1 == self.fails_at:
            raise RuntimeError("no batch")
        return ((number, number) for number in range(self.batches))

    def losses(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        data = torch.Generator().manual_seed(100 * self.step + number)
        points = torch.randn(16, 4, generator=data)
        error = (self.model(points)[:, 0] - points.sum(dim=1)).square().mean() * self.scale
        return error, {"error": error, "number": torch.tensor(float(number))}

    def updates(self) -> Iterator[Losses]:
        while self.step < self.steps:
            yield self.update(0.01, self._batches(), self.losses, self.batches)

    def after(self, losses: Losses, progress: Any) -> None:
        self.seen.append(losses)
        if self.step == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def is_due(self) -> bool:
        return self.step % self.every == 0

    def save(self) -> None:
        self.saved.append(copy.deepcopy(self.state()))

    def fit(self) -> "Line":
        with stoppable(lambda: "kept") as stop:
            self.run(stop, "line")
        return self

    def weights(self) -> list[list[float]]:
        return [each.flatten().tolist() for each in self.model.state_dict().values()]


def test_a_training_goes_on_from_any_checkpoint_along_the_same_curve() -> None:
    whole = Line().fit()
    assert [each["step"] for each in whole.saved] == [3, 6]
    assert whole.step == STEPS and whole.seen[-1]["loss"] < whole.seen[0]["loss"]
    for state in whole.saved:
        resumed = Line()
        torch.manual_seed(state["step"])  # random numbers drawn earlier have no effect on it
        resumed.restore(state)
        resumed.fit()
        assert resumed.seen == whole.seen[state["step"] :]
        assert resumed.weights() == whole.weights()


def test_dropout_follows_the_seed_and_the_step() -> None:
    assert Line(seed=1).fit().seen == Line(seed=1).fit().seen != Line(seed=2).fit().seen


def test_a_signal_stops_between_two_steps_and_saves() -> None:
    training = Line()
    training.stops_at = 4
    with pytest.raises(Stopped):
        training.fit()
    assert training.step == 4 and [each["step"] for each in training.saved] == [3, 4]
    resumed = Line()
    resumed.restore(training.saved[-1])
    assert resumed.fit().weights() == Line().fit().weights()


def test_an_error_in_a_step_leaves_the_last_checkpoint_as_it_was() -> None:
    training = Line()
    training.fails_at = 5
    with pytest.raises(RuntimeError, match="no batch"):
        training.fit()
    assert [each["step"] for each in training.saved] == [3]
    resumed = Line()
    resumed.restore(training.saved[0])
    assert resumed.fit().weights() == Line().fit().weights()


def test_losses_are_means_over_the_batches_of_a_step() -> None:
    training = Line(batches=3).fit()
    assert all(losses["number"] == pytest.approx(1) for losses in training.seen)
    assert all(losses["loss"] == pytest.approx(losses["error"]) for losses in training.seen)


def test_a_step_follows_the_gradient_of_the_mean_loss_clipped() -> None:
    """An update with SGD at learning rate 1 equals the clipped gradient of the mean loss."""
    for clip in (1e9, 0.5):
        training = Line(batches=3, clip=clip)
        training.model.eval()  # without dropout
        training.optimizer = torch.optim.SGD(training.model.parameters())
        parameters = list(training.model.parameters())
        losses = torch.stack([training.losses(number)[0] for number in range(3)])
        wanted = nn.utils.parameters_to_vector(torch.autograd.grad(losses.mean(), parameters))
        wanted = wanted * min(1, clip / float(wanted.norm()))
        before = nn.utils.parameters_to_vector(parameters).detach().clone()
        training.update(1.0, training._batches(), training.losses, 3)
        after = nn.utils.parameters_to_vector(parameters).detach()
        torch.testing.assert_close(before - after, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("done", "words"),
    [
        (1, r"step 2: training has diverged \(error .*, loss .* lower --lr \(now 0\.01"),
        (0, r"step 1: training cannot start \(error .*, loss .* values of the training data"),
    ],
)
def test_a_training_that_diverges_names_the_step_and_the_rate(
    scale: float, done: int, words: str
) -> None:
    training = Line()
    training.scale, training.step = scale, done
    before = training.weights()
    with pytest.raises(UserError, match=words):
        training.fit()
    assert training.weights() == before and training.saved == []


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def half_written(path: Path) -> None:
    """Blank the second half of a file at equal length, as a power cut does."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def flipped(path: Path) -> None:
    """Flip one bit of the weights, which no format check would detect."""
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((64,), 3.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)


def state(step: int) -> dict[str, object]:
    return {"weights": torch.full((64,), float(step)), "metrics": 10 * step}


@pytest.mark.parametrize("spoil", [truncated, empty, half_written, flipped])
def test_torn(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, state(step))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000002.pt",
        "step-000000003.pt",
    ]
    spoil(tmp_path / "step-000000003.pt")
    found, torn = load_checkpoint(tmp_path)
    assert found is not None and found["step"] == 2 and found["weights"].tolist() == [2.0] * 64
    assert [path.name for path in torn] == ["step-000000003.pt"]
    save_checkpoint(tmp_path, 4, state(4))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000002.pt",
        "step-000000004.pt",
    ]
    assert newest_checkpoint(tmp_path).startswith("saved at step 4 ")


def test_none_is_left(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "nowhere") == (None, [])
    save_checkpoint(tmp_path, 1, state(1))
    truncated(tmp_path / "step-000000001.pt")
    found, torn = load_checkpoint(tmp_path)
    assert found is None and len(torn) == 1


def test_no_code_is_run_by_loading(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"code": print})
    with pytest.raises(Exception, match="weights_only|Unsupported"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("data", [b"", b"PK no archive", b"x" * 500])
def test_what_is_no_checkpoint_is_a_line(tmp_path: Path, data: bytes) -> None:
    """A file with a valid checksum that is not a checkpoint is refused in one line."""
    save_checkpoint(tmp_path, 1, state(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(data + hashlib.sha256(data).digest())
    with pytest.raises(UserError, match=r"step-000000001\.pt: .* remove it to start from scratch"):
        load_checkpoint(tmp_path)


@contextmanager
def killed() -> Iterator[None]:
    """Stop a save before its file is renamed."""

    def die(*_: object) -> None:
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(files, "rename", die)
        yield


def test_what_a_killed_save_leaves_goes_with_the_next(tmp_path: Path) -> None:
    with killed():
        save_checkpoint(tmp_path, 1, state(1))
    assert len(list(tmp_path.iterdir())) == 1 and load_checkpoint(tmp_path) == (None, [])
    save_checkpoint(tmp_path, 2, state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002.pt"]


def test_a_training_that_was_killed_as_it_began_begins_again(tmp_path: Path) -> None:
    with killed():
        files.write(tmp_path / SETTINGS, b"{}")
    assert len(list(tmp_path.iterdir())) == 1
    assert check_same_training(tmp_path, {}, resume=False) is None
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="exists already"):
        check_same_training(tmp_path, {}, resume=False)


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-999999999.pt").mkdir()
    for name in ("step-000000009 2.pt", "step-000000009_copy.pt", "step-9.pt"):
        (tmp_path / name).write_bytes(b"mine")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {})
    state, torn = load_checkpoint(tmp_path)
    assert state is not None and state["step"] == 3 and not torn
    assert newest_checkpoint(tmp_path).startswith("saved at step 3 (")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000002.pt", "step-000000003.pt", "step-000000009 2.pt", "step-000000009_copy.pt",
        "step-9.pt", "step-999999999.pt",
    ]  # fmt: skip


class Watched(Line):
    """Record at each step how many primitives oneDNN may cache."""

    def after(self, losses: Losses, progress: Any) -> None:
        super().after(losses, progress)
        self.printed = os.environ.get(CAPACITY)


def test_a_training_keeps_few_primitives_and_gives_freed_blocks_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CAPACITY, raising=False)
    given: list[int] = []
    training = Watched()
    monkeypatch.setattr(loop, "release_memory", lambda: given.append(training.step))
    with stoppable() as stop:
        training.run(stop, "train")
    assert training.printed == PRIMITIVES and CAPACITY not in os.environ
    assert given == list(range(EVERY, STEPS + 1, EVERY)) != []
    release_memory()  # harmless, wherever it is set


def test_a_number_that_somebody_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPACITY, "9")
    with limit_primitive_cache():
        assert os.environ[CAPACITY] == "9"
    assert os.environ[CAPACITY] == "9"


def test_a_constant_rate_stays_after_warm_up() -> None:
    constant = Schedule("constant", 100, 10)
    assert [constant.factor(step) for step in (0, 9, 10, 99, 200)] == [0.1, 1, 1, 1, 1]


def test_patience_counts_validations_since_the_best() -> None:
    schedule, endless = Schedule("linear", 100, 0, patience=2), Schedule("plateau", 100, 0)
    over = []
    for loss in (3.0, 4.0, 2.0, 2.0, 1.0, 1.5, 1.2):
        schedule.validated(loss)
        endless.validated(loss)
        over.append(schedule.is_over)
    assert over == [False] * 6 + [True] and not endless.is_over


@pytest.mark.parametrize(("kind", "third"), [("linear", 2 / 3), ("cosine", 0.75)])
def test_both_go_down_to_their_end(kind: str, third: float) -> None:
    schedule = Schedule(kind, 100, 10, end=0.2)
    assert schedule.factor(4) == 0.5 and schedule.factor(10) == 1.0
    assert schedule.factor(40) == pytest.approx(0.2 + 0.8 * third)
    assert schedule.factor(100) == schedule.factor(120) == pytest.approx(0.2)


def test_after_warm_up_it_is_the_cosine_of_transformers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, 10, 100)
    rates = []
    for _ in range(100):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = [Schedule("cosine", 100, 10).factor(step) for step in range(100)]
    assert ours[10:] == pytest.approx(rates[10:])


def join() -> None:
    with join_ranks("cpu"):
        pass


@pytest.mark.parametrize(
    ("name", "word", "read"),
    [
        ("RANK", "first", is_main_process),
        ("WORLD_SIZE", "two", lambda: shard_of(None)),
        ("WORLD_SIZE", "²", join),
        ("RANK", "-1", lambda: _place(None, None)),
        ("LOCAL_RANK", "gpu", lambda: resolved_device("cuda")),
    ],
)
def test_a_variable_that_is_no_number(
    monkeypatch: pytest.MonkeyPatch, name: str, word: str, read: Callable[[], object]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for variable, number in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(variable, number)
    monkeypatch.setenv(name, word)
    expected = f"^environment variable {name}={word}: expected a whole number, as torchrun sets it;"
    with pytest.raises(UserError, match=expected):
        read()


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    assert is_main_process() and shard_of(None) is None
    with join_ranks("cpu") as ranks:
        assert ranks == ALONE


NAMES = ("wandb", "mlflow", "trackio")
RUN_SETTINGS = {"lr": 0.1, "loss": {"mlm": 1.0}, "freeze": [], "word_vectors": None}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the file of the calls that the packages of the trackers receive."""
    yield install(tmp_path, monkeypatch)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def facts(tmp_path: Path) -> RunDescription:
    folder = tmp_path / "sweep" / "student"
    folder.mkdir(parents=True)
    return RunDescription(folder, RUN_SETTINGS)


@pytest.mark.parametrize("name", NAMES)
def test_figures_arrive_and_a_resume_goes_on_with_the_run(
    name: str, file: Path, facts: RunDescription
) -> None:
    lines: list[str] = []
    run = Trackers([name], facts, False, lines.append)
    run.add({"loss": 2.5, "lr": 0.1}, 1)
    run.add({"valid_loss": 3.0}, 1)
    run.close(False)
    first = recorded(file)
    figures = {key: value for each in first for key, value in each.get("log", {}).items()}
    assert figures == {"loss": 2.5, "lr": 0.1, "valid_loss": 3.0}
    assert {each["step"] for each in first if "log" in each} == {1}
    (started,) = (each for each in first if "init" in each)
    assert started["project"] == "teachonce" and started["group"] == "sweep"
    assert started["init"].startswith("student")
    (config,) = (each["config"] for each in first if "config" in each)
    assert {key: str(value) for key, value in config.items()} == {
        "lr": "0.1",
        "loss": '{"mlm": 1.0}',
    }
    assert first[-1]["finish"] in (1, "KILLED", 0)
    again = Trackers([name], facts, True, lines.append)
    again.add({"loss": 2.0}, 2)
    again.close(True)
    assert {each["id"] for each in recorded(file)} == {started["id"]}, "one run"
    assert recorded(file)[-1]["finish"] in (0, "FINISHED")
    other = Trackers([name], facts, False, lines.append)
    other.close(True)
    assert name == "mlflow" or recorded(file)[-1]["id"] != started["id"], (
        "a new training, a new run"
    )
    assert not lines


def test_mlflow_is_not_waited_for_at_every_step(file: Path, facts: RunDescription) -> None:
    run = Trackers(["mlflow"], facts, False, print)
    for step in range(7):
        run.add({"loss": 1.0, "lr": 0.1}, step)
    assert not any("log" in each for each in recorded(file))
    run.close(True)
    assert sum("log" in each for each in recorded(file)) == 14


def test_settings_are_sent_without_secrets(file: Path, facts: RunDescription) -> None:
    secret = replace(facts, settings={"store": "https://me:SECRETPW@host/a.zarr?token=SECRETPW"})
    Trackers(NAMES, secret, False, print).close(True)
    assert "SECRETPW" not in file.read_text() and "https://host/a.zarr" in file.read_text()


def test_a_tracker_that_fails_does_not_end_the_training(
    file: Path, facts: RunDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    run = Trackers(["wandb", "trackio"], facts, False, lines.append)
    monkeypatch.setenv("fail", "1")
    run.add({"loss": 1.0}, 1)
    run.add({"loss": 1.0}, 2)
    assert [each["step"] for each in recorded(file) if "log" in each] == [1, 2], "trackio's"
    (line,) = lines
    assert "wandb fails" in line and "the network is gone" in line and "metrics.jsonl" in line


def test_a_tracker_that_cannot_begin_is_reported_in_a_line(
    file: Path, facts: RunDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("refuse", "1")
    with pytest.raises(UserError, match=r"--log wandb: cannot start \(api_key not configured\)"):
        Trackers(["trackio", "wandb"], facts, False, print)
    assert recorded(file)[-1] == {"finish": 0, "id": recorded(file)[0]["id"]}, (
        "trackio's run is ended"
    )


def test_words_and_packages_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_trackers(("wandb,mlflow", "wandb")) == ("wandb", "mlflow")
    with pytest.raises(UserError, match="--log neptune: expected wandb, mlflow, trackio"):
        check_known(["neptune"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="--log mlflow: mlflow is not installed; `pip install mlflow`"
    ):
        check_installed(["mlflow"])


def test_the_ids_are_stored_next_to_the_student(file: Path, facts: RunDescription) -> None:
    Trackers(NAMES, facts, False, print).close(True)
    path = facts.folder / "trackers.json"
    assert json.loads(path.read_text()).keys() == set(NAMES)
    path.write_text("{")
    with pytest.raises(UserError, match=r"trackers.json: is not JSON .*; remove it to start new"):
        Trackers(NAMES, facts, True, print)


def test_an_exhausted_memory_is_not_taken_for_a_process_that_has_ended() -> None:
    with pytest.raises(RuntimeError) as caught, _peer_errors():
        torch.empty(2**60)
    assert out_of_memory(caught.value)
