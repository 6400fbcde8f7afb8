"""A training that is stopped continues equally, with any optimizer; trackers receive its content.

- The steps at which a training saves, with and without --checkpoint-every.
- A resumed training with an altered checkpoint or altered metrics gives an error line or a complete
  curve.
- Validation once per epoch, and stages that end early, are the same after a stop.
- Dropout is active in training only, the same after a stop, and recorded with the student.
- LAMB and Adadelta: the papers' steps, the same training after a stop, and the message without
  LAMB's package.
- `--log`: a tracker receives the content of metrics.jsonl.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
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
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.output.report import check_same_training
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.cli import main as student_sweep
from teachonce.student_train.train import student_training
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.student_training import BETAS, train
from teachonce.student_train.train.training_log import METRICS
from teachonce.support.errors import UserError
from teachonce.training.checkpoint import load_checkpoint, write_checkpoint
from teachonce.training.optimizer import optimizer_of
from tests.end_to_end.support import STUDENT, ok, refused, report_of, says
from tests.student_train import support
from tests.student_train.support import options_for, resume, same_weights, stop
from tests.training.lamb import LONGEST, check_steps
from tests.training.tracker_packages import install, recorded


def saved(out: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    return sorted(int(path.stem[5:]) for path in (out / "checkpoints").glob("step-*.pt"))


@pytest.mark.parametrize(
    ("seconds", "every", "expected"), [(1e9, None, [4]), (0.0, None, [4, 5]), (0.0, 3, [3])]
)
def test_a_slow_training_saves_between_validations(
    store: FeatureStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    every: int | None,
    expected: list[int],
) -> None:
    monkeypatch.setattr(student_training, "UNSAVED", seconds)
    changes: dict[str, Any] = {"eval_every": 4, "schedule": "plateau", "best": True, "dropout": 0.1}
    changes |= {"loss": {"mlm": 1.0}, "steps": 7, "lr": 1e-2, "checkpoint_every": every}
    options = options_for(store, **changes)
    straight, collator, _ = prepare(options, store)
    whole, torn = tmp_path / "new" / "whole", tmp_path / "torn"
    with pytest.raises(UserError, match="resume=True needs out"):
        train(store, straight, collator, options, resume=True)
    train(store, straight, collator, options, whole)
    stop(store, options, torn, 5)
    assert saved(torn) == expected
    again, _, said = resume(store, options, torn)
    assert said[0] == f"resume    after step {expected[-1]}"
    same_weights(straight, again)
    assert (torn / METRICS).read_bytes() == (whole / METRICS).read_bytes()


def test_a_training_neither_replaces_nor_continues_another(
    store: FeatureStore, tmp_path: Path
) -> None:
    options = options_for(store, loss={"mlm": 1.0}, steps=7, checkpoint_every=2)
    stop(store, options, tmp_path, 6)
    student, collator, _ = prepare(options, store)
    # The checkpoints of a new training would be removed as older ones: a resume read the others.
    with pytest.raises(UserError, match=r"saved at step 6 .*continue it with resume=True, remove"):
        train(store, student, collator, options, tmp_path)
    other = options_for(store, loss={"mlm": 2.0}, steps=7, checkpoint_every=2, seed=4)
    changed = "loss was mlm=1 and is mlm=2, seed was 0 and is 4"
    with pytest.raises(UserError, match=f"cannot resume with other settings: {changed}; give"):
        resume(store, other, tmp_path)
    assert saved(tmp_path) == [4, 6]
    assert resume(store, options, tmp_path)[2][0] == "resume    after step 6"
    first = resume(store, options, tmp_path / "empty")[2][0]
    assert first.startswith("resume    no checkpoint in") and "starts from the beginning" in first


@pytest.fixture
def stopped(store: FeatureStore, tmp_path: Path) -> Callable[[], list[str]]:
    """Stop a training after its third step, and return a function that resumes it and returns the
    lines."""
    options = options_for(store, loss={"mlm": 1.0}, steps=5, checkpoint_every=1)
    stop(store, options, tmp_path, 3)
    return lambda: resume(store, options, tmp_path)[2]


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(key)


FOREIGN: dict[str, Callable[[dict[str, Any]], object]] = {
    "no model": without("model"),
    "no schedule": without("schedule"),
    "another model": lambda state: state.update(model={"weight": torch.zeros(3)}),
    "another shape": lambda state: state["model"].update(
        {name: torch.zeros(1) for name in state["model"]}
    ),
    "no optimizer": lambda state: state.update(optimizer={}),
    "an odd step": lambda state: state.update(step="three"),
    "an odd stage": lambda state: state.update(stage=7),
    "odd tokens": lambda state: state.update(tokens=None),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_checkpoint_of_something_else(
    stopped: Callable[[], list[str]], tmp_path: Path, what: str
) -> None:
    state, _ = load_checkpoint(tmp_path / "checkpoints")
    assert state is not None
    FOREIGN[what](state)
    for path in (tmp_path / "checkpoints").iterdir():
        write_checkpoint(path, state)
    with pytest.raises(UserError, match="is not a checkpoint of this training .* remove"):
        stopped()


def test_metrics_that_have_lost_lines_are_reported(
    stopped: Callable[[], list[str]], tmp_path: Path
) -> None:
    metrics = tmp_path / METRICS
    os.truncate(metrics, 20)  # in the middle of the first line
    resumed, printed, _ = stopped()  # and also the masks that it reads
    assert "lacks lines from before step 4" in printed and "after step 3" in resumed
    lines = metrics.read_text().splitlines()
    assert len(lines) > 2 and all(line.startswith('{"step"') for line in lines)


def test_missing_metrics(stopped: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / METRICS).unlink()
    assert any("lacks lines" in line for line in stopped())


AWAY = 0.3  # a rate at which a student loses its progress
STAGES: tuple[dict[str, Any], ...] = (
    {"lr": AWAY, "patience": 2, "eval_every": 2, "steps": 40},
    {"loss": {"hidden": 1.0}, "steps": 4},
)


early_options = partial(support.options_for, loss={"mlm": 1.0}, clip=50.0, warmup=0.0)


def validations(out: Path) -> dict[int, float]:
    """Return the validation losses by step; each step has one."""
    rows = map(json.loads, (out / METRICS).read_text().splitlines())
    found = [(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_a_stage_ends_when_patience_does_and_the_next_begins(
    store: FeatureStore, tmp_path: Path
) -> None:
    options = early_options(store, stages=STAGES)
    student, collator, _ = prepare(options, store)
    trained = train(store, student, collator, options, tmp_path)
    first = list(validations(tmp_path).items())[: -len(range(1, 5))]
    steps, losses = zip(*first, strict=True)
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 20  # two more after the best
    assert steps[-1] == 2 * len(losses) and trained.steps == steps[-1] + 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "later", [0, *(pytest.param(later, marks=pytest.mark.apart) for later in (-1, 2))]
)
def test_a_stop_about_the_early_end_changes_nothing(
    store: FeatureStore, tmp_path: Path, later: int
) -> None:
    options = early_options(store, stages=STAGES, checkpoint_every=1)
    whole, collator, _ = prepare(options, store)
    straight = tmp_path / "straight"
    straight.mkdir()
    trained = train(store, whole, collator, options, straight)
    torn = tmp_path / "torn"
    stop(store, options, torn, trained.steps - 4 + later)
    again, resumed, _ = resume(store, options, torn)
    assert resumed.steps == trained.steps and resumed.validation == trained.validation
    assert validations(torn) == validations(straight)
    same_weights(whole, again)


def test_validation_once_an_epoch(store: FeatureStore, tmp_path: Path) -> None:
    options = early_options(store, eval_every="epoch", epochs=3.0, batch_texts=9, accumulate=2)
    student, collator, _ = prepare(options, store)
    train(store, student, collator, options, tmp_path)
    blocks, _ = split_blocks(store, options.held_out)
    epoch = store.batch_count(0, 0, blocks=blocks, batch_texts=9) / 2
    assert list(validations(tmp_path)) == [round(epoch), 2 * round(epoch), round(3 * epoch)]


def test_from_the_command_line(store: FeatureStore, tmp_path: Path) -> None:
    words = ("--store", store.path, "--vocab", 400, "--student", "16x2x2", "--device", "cpu")
    length = ("--steps", 2, "--eval-every", "epoch", "--patience", 3, "--best")
    said = ok(main, *words, *length, "--batch-texts", 8, "--optimizer", "adadelta",
              "--out", tmp_path / "a")  # fmt: skip
    assert "2 steps of 8 x 1 texts, adadelta, lr 1 linear" in said


LOSS = {"mlm": 1.0, "hidden": 1.0}
dropout_options = partial(support.options_for, loss=LOSS, steps=4, lr=1e-2, checkpoint_every=1)
MASKS = "masks     a masked view an epoch, 1: new masks each epoch"
DROPPED = {
    "bert:16x2x2": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "16x2x2": ("embedding_dropout", "mlp_dropout", "attention_dropout", "classifier_dropout"),
    "bilstm:8,8": ("dropout", "recurrent_dropout"),
}


def weights(model: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("student", DROPPED)
def test_a_stopped_training_drops_the_same(
    store: FeatureStore, tmp_path: Path, student: str
) -> None:
    options = dropout_options(store, student=student, dropout=0.3)
    straight, collator, _ = prepare(options, store)
    expected = train(store, straight, collator, options).validation
    stop(store, options, tmp_path, 2)
    again, resumed, said = resume(store, options, tmp_path)
    assert said == ["resume    after step 2", MASKS] and resumed.validation == expected
    assert torch.equal(weights(again), weights(straight))
    plainly = replace(options, dropout=0.0, device="auto")  # as options that are made in Python
    plain, _, _ = prepare(plainly, store)
    train(store, plain, collator, plainly)
    assert not torch.equal(weights(plain), weights(straight))


def test_states_that_a_bilstm_is_taught_are_dropped_too(store: FeatureStore) -> None:
    """Mukherjee & Awadallah 2019, section 6, use dropout after every layer."""
    options = dropout_options(store, student="bilstm:8,8", dropout=0.5)
    model, collator, _ = prepare(options, store)
    distiller = Distiller.of(model, options, store)
    read = list[torch.Tensor]()
    for linear in distiller.projections.values():
        linear.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    batch = support.first_batch(store, collator)
    for training, share in ((True, 0.5), (False, 0.0)):
        distiller.train(training)
        distiller(batch)
        assert float((read.pop() == 0).float().mean()) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("student", DROPPED)
def test_it_is_recorded_and_validation_drops_nothing(
    store: FeatureStore, student: str, tmp_path: Path
) -> None:
    options = dropout_options(store, student=student, dropout=0.3)
    model, collator, _ = prepare(options, store)
    plain, _, _ = prepare(replace(options, dropout=0.0), store)
    assert torch.equal(weights(model), weights(plain))
    model.save_pretrained(tmp_path)
    saved = type(model.config).from_pretrained(tmp_path)
    for name in DROPPED[student]:
        assert getattr(saved, name) == 0.3 and getattr(plain.config, name) == 0.0, name
    found = []
    for each in (model, plain):
        torch.manual_seed(0)
        distiller = Distiller.of(each, options, store).train()
        found.append(support.validated(distiller, store, collator, options))
        assert distiller.training
    assert found[0] == found[1] and found[0]["valid_loss"] > 0


WORDS = ("--vocab", 400, "--student", "16x2x2", "--batch-tokens", 512, "--steps", 2)
GIVEN = "settings: optimizer was {} and is {}; give the earlier settings"


optimizer_options = partial(support.options_for, steps=4, loss=LOSS, optimizer="lamb", lr=1e-2)


def test_steps_match_the_paper() -> None:
    torch.manual_seed(3)
    short, long, frozen = nn.Linear(3, 4), nn.Linear(8, 6), nn.Linear(3, 3)
    model = nn.ModuleDict({"a": short, "long": long, "frozen": frozen, "n": nn.LayerNorm(4)})
    with torch.no_grad():
        long.weight *= 40
    assert short.weight.norm() < LONGEST < long.weight.norm()
    frozen.requires_grad_(False)
    made = optimizer_of(model, "lamb", lr=0.004, weight_decay=0.3, betas=BETAS)
    check_steps(made, model, BETAS, 0.3)


def test_steps_of_adadelta_match_the_paper() -> None:
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
    options = optimizer_options(
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
        settings = optimizer_options(store, **changes).describing()
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


def test_without_the_package_nothing_is_started(
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
