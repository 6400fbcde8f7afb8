"""A user's package adds a loss and a kind of student, by entry points or by their modules."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from teachonce.student_train.cli import main
from teachonce.student_train.losses import registry
from teachonce.student_train.model import kinds
from teachonce.student_train.settings import shapes
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.errors import UserError
from tests.end_to_end.support import ROOT, Words, ok, refused, says
from tests.making.dumps import dumped, write_corpus

SMALL: Words = ("--vocab", 400, "--steps", 3, "--batch-tokens", 512, "--device", "cpu")
PACKAGE = ROOT / "examples/own_package"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path]) -> Path:
    folder = tmp_path_factory.mktemp("own_package")
    return dumped(tiny_teacher("bert"), write_corpus(folder / "a.txt", 40), folder / "a.zarr")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put the package on the path, with its entry points as an installation writes them."""
    monkeypatch.setattr(registry, "_OUTSIDE", {})
    monkeypatch.setattr(shapes, "SHAPES", dict(shapes.SHAPES))
    monkeypatch.setattr(kinds, "SHAPES", shapes.SHAPES)
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(folder: Path) -> None:
    info = folder / "teachonce_own-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: teachonce-own\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[teachonce.losses]\nhuber = teachonce_own:HUBER\nbroken = teachonce_own:NOTHING\n"
        "[teachonce.student_kinds]\ndistilbert = teachonce_own:DISTILBERT\n"
    )


@pytest.mark.parametrize("installed", [True, False])
def test_a_loss_and_a_kind_of_another_package(
    installed: bool, importable: Path, store: Path, tmp_path: Path
) -> None:
    loss, kind = ("huber", "distilbert") if installed else (
        "teachonce_own:HUBER", "teachonce_own:DISTILBERT",
    )  # fmt: skip
    if installed:
        install(importable)
    out = tmp_path / "student"
    words: Words = ("--store", store, *SMALL, "--student", f"{kind}:32x2x4", "--out", out)
    ok(main, *words, "--loss", f"mlm=1,{loss}=3", "--align", f"{loss}=match")
    report = json.loads((out / "training.json").read_text())
    assert report["settings"]["loss"] == {"mlm": 1.0, loss: 3.0}
    assert report["result"][f"valid_{loss}"] > 0
    card = (out / "README.md").read_text()
    assert f"{loss} 3" in card and f"`valid_{loss}` is in Huber losses of a channel" in card
    assert f"{kind}:32x2x4" in card
    assert AutoModelForMaskedLM.from_pretrained(out).config.model_type == "distilbert"


def test_options_are_sent_to_a_process_that_has_not_loaded_the_kind(importable: Path) -> None:
    options = TrainOptions("a.zarr", student="teachonce_own:DISTILBERT:32x2x4", lr=1e-3)
    sent = pickle.dumps(options)
    del shapes.SHAPES["teachonce_own:DISTILBERT"]
    received = pickle.loads(sent)
    assert received == options and received.shape == options.shape
    assert received.resolved_lr == 1e-3 and not received.shape.causal


def test_what_is_missing_is_reported_in_a_line(importable: Path, store: Path) -> None:
    install(importable)
    for words, printed in {
        ("--loss", "hubert=1"): "--loss hubert: unknown; expected one of mlm",
        (
            "--loss",
            "broken=1",
        ): "--loss broken: teachonce_own:NOTHING, which an installed package adds",
        ("--loss", "nowhere:LOSS=1"): "No module named 'nowhere'",
        (
            "--loss",
            "teachonce_own:huber=1",
        ): "expected a Loss (teachonce.losses.Loss), got function",
        ("--student", "gru:16"): "unknown kind of student gru",
        ("--student", "teachonce_own:HUBER:16"): "expected a ShapeKind, got Loss",
        ("--student", "distilbert:16"): "expected HxLxA, such as 64x2x2",
    }.items():
        says(refused(main, "--store", store, *SMALL, *words), printed)


WRONG = """
import torch
from teachonce.losses import Loss

def made(formula, teacher="normalised", student="runs", projection="always"):
    return Loss("own", formula, teacher=teacher, student=student, unit="", projection=projection)

def mean(student, teacher):
    return (student - teacher).square().mean()

NO_TEACHER, NO_STUDENT = made(mean, teacher="hidden"), made(mean, student="states")
NO_MAP = made(mean, projection="sometimes")
NUMBER, ROWS = made(lambda s, t: 1.0), made(lambda s, t: (s - t).square().mean(1))
ARGUMENTS, FAILS = made(lambda s, t, more: s.sum()), made(lambda s, t: s @ t)
"""


@pytest.mark.parametrize(
    ("name", "printed"),
    {
        "NO_TEACHER": "teacher='hidden': expected one of gold, nothing, edges, normalised,",
        "NO_STUDENT": "student='states': with teacher='normalised' expected one of runs (docs",
        "NO_MAP": "projection='sometimes': expected none, always or widths differ",
        "NUMBER": "its formula returns float; expected a tensor of one number, the mean",
        "ROWS": "]; expected a tensor of one number, the mean over the batch",
        "ARGUMENTS": "its formula fails (<lambda>() missing 1 required positional argument",
        "FAILS": "wrong_losses.py:14); its arguments are the student's side and the teacher's",
    }.items(),
)
def test_a_wrong_loss_of_another_module_is_reported_in_a_line(
    name: str, printed: str, importable: Path, store: Path
) -> None:
    (importable / "wrong_losses.py").write_text(WRONG)
    words: Words = ("--store", store, *SMALL, "--student", "32x1x4", "--out", importable / "out")
    line = refused(main, *words, "--loss", f"mlm=1,wrong_losses:{name}=1")
    says(line, f"--loss wrong_losses:{name}: ", printed)
    with pytest.raises(UserError, match="expected names with weights, .* got Loss"):
        TrainOptions("a.zarr", loss={registry.LOSSES[0]: 1})  # type: ignore[dict-item]
