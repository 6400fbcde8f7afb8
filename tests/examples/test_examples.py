"""The examples run unchanged, and a user's package adds a loss and a kind of student.

- The examples that open a store without this software.
- The examples that train run unchanged, on small stores of real teachers.
- An example without arguments prints its usage.
- The notebook runs cell by cell, and the stored outputs are the outputs of each cell.
- A user's package adds a loss and a kind of student, by entry points or by their modules.
"""

import ast
import json
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoTokenizer

from teachonce import StudentBatches, prepare
from teachonce.store import open_store
from teachonce.student_train.cli import main
from teachonce.student_train.losses import registry
from teachonce.student_train.model import kinds
from teachonce.student_train.settings import shapes
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.errors import UserError
from tests.end_to_end.support import ROOT, Words, ok, refused, says
from tests.examples.loading import EXAMPLES, example
from tests.making.dumps import dumped, write_corpus
from tests.making.environment import printed_by
from tests.making.models import Stores, Teachers
from tests.making.sentence_folders import mean_embedder
from tests.making.stores import features_of, make_store


@pytest.mark.parametrize("codec", ["default", "exact"])
def test_zarr_xarray_and_h5py_find_the_same(tmp_path: Path, codec: str) -> None:
    elsewhere, paths = example("open_elsewhere"), [tmp_path / "a.zarr", tmp_path / "a.h5"]
    for path in paths:
        make_store(path, features_of(codec, "ranked-topk"), parts=1)
    in_zarr, in_h5 = map(str, paths)
    readers: list[tuple[Callable[[str], Any], str]] = [
        (elsewhere.with_zarr, in_zarr), (elsewhere.with_xarray, in_zarr),
        (elsewhere.with_h5py, in_h5),
    ]  # fmt: skip
    record = open_store(in_zarr)[0]
    logits = record.views[0].logits
    for reader, where in readers:
        text, tokens, best, logs = reader(where)
        assert text == record.text and tokens == record.token_ids.tolist()
        assert best == logits.ids[1].tolist()
        np.testing.assert_array_equal(np.float32(logs), logits.logprobs[1])


def test_it_needs_nothing_of_ours(tmp_path: Path) -> None:
    make_store(tmp_path / "a.zarr", features_of(tier="ranked-topk"), parts=1)
    code = (
        f"import runpy, sys; sys.argv = ['x', {str(tmp_path / 'a.zarr')!r}]\n"
        f"runpy.run_path({str(EXAMPLES / 'open_elsewhere.py')!r}, run_name='__main__')\n"
        "assert not {'teachonce', 'torch'} & {name.split('.')[0] for name in sys.modules}"
    )
    printed = printed_by(sys.executable, "-c", code).splitlines()
    assert [line.split()[0] for line in printed] == ["with_zarr", "with_xarray"]


@pytest.fixture(scope="module")
def tokens(tiny_store: Stores) -> str:
    return str(tiny_store("bert"))


def test_a_plain_loop(tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    last = example("plain_loop").train(tokens, str(tmp_path), "400", 32)
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 3 and printed[0] > printed[1] > printed[2] == round(last, 3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    student = AutoModelForMaskedLM.from_pretrained(tmp_path)
    found = student(**tokenizer("The stories were long.", return_tensors="pt")).logits
    assert found.shape[2] == len(tokenizer) == 400


def test_the_trainer_of_transformers(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    losses = example("transformers_trainer").train(tokens, str(tmp_path), "400", epochs=4)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config.hidden_size == 64


def test_a_module_and_a_loss_of_your_own(tokens: str, tmp_path: Path) -> None:
    losses = example("own_student").train(tokens, str(tmp_path / "a.pt"), "400", epochs=4)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert torch.load(tmp_path / "a.pt")["embeddings.weight"].shape == (400, 64)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> str:
    folder = tmp_path_factory.mktemp("vectors")
    teacher = mean_embedder(tiny_teacher("bert"), folder / "teacher")
    made: dict[str, Any] = {"head": "embedding", "logits": "none", "hidden": "none"}
    return str(dumped(teacher, write_corpus(folder / "c.txt", 40), folder / "v.zarr", **made))


@pytest.mark.slow
def test_a_trainer_of_sentence_transformers(
    vectors: str, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    train = example("sentence_transformers_trainer").train
    train(vectors, str(tiny_teacher("electra")), str(tmp_path), epochs=5, batch=8)
    with open_store(vectors) as opened:
        texts, wanted = list(opened.texts()), opened.embeddings()
    found = SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    assert found.shape == wanted.shape
    assert (found * wanted).sum(axis=1).mean() > 0.6  # cosines: both have length 1


def test_a_loop_over_vectors_of_texts(vectors: str) -> None:
    batches = StudentBatches(vectors, "400", student="32x1x2", held_out=0.1)
    assert batches.options.loss == {"embedding": 1.0, "similarity": 10.0}
    assert batches.options.batch_texts == 128
    student = prepare(batches.options, batches.store)[0]
    distiller, batch = batches.distiller(student), next(iter(batches))
    losses = distiller(batch)
    assert list(losses) == ["embedding", "similarity"] and distiller.weighted(losses).requires_grad
    own, teacher = distiller.sides(batch).of("embedding")[0]
    assert own.shape == teacher.shape and distiller.vector_head is not None


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_without_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit, match=rf"python .*{name} [A-Z]"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


NOTEBOOK = EXAMPLES / "three_students.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last line if the line is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.slow
def test_three_students(
    tiny_teacher: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("altair")
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", 40)
    small = {"TEACHER": tiny_teacher("bert"), "CORPUS": "corpus.txt", "STEPS": 4, "VOCAB": "450"}
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells), "strip the outputs"
    names: dict[str, Any] = {}
    run_cell(code[0], names)
    assert names.keys() >= small.keys()
    names |= small
    store, record, students, curves, sizes = (run_cell(each, names) for each in code[1:])
    assert "<tr><th>size</th>" in store._repr_html_()
    assert "of document 0" in record._repr_html_()
    assert {row["folder"] for row in students} == {"text-alone", "states", "modernbert"}
    assert students._repr_html_().count("<tr>") == 4
    points = curves.to_dict()["data"]["values"]
    assert {point["student"] for point in points} == {"text-alone", "states", "modernbert"}
    assert (
        all(point["nats"] > 0 for point in points) and len(sizes.to_dict()["data"]["values"]) == 3
    )


SMALL: Words = ("--vocab", 400, "--steps", 3, "--batch-tokens", 512, "--device", "cpu")
PACKAGE = ROOT / "examples/own_package"


@pytest.fixture(scope="module")
def store(tiny_store: Stores) -> Path:
    return tiny_store("bert", 40)


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
DETACHED = made(lambda s, t: mean(s.detach(), t))
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
        "DETACHED": "its value has no gradient, so it trains nothing; compute it from the stu",
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
