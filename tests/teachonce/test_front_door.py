"""Every export of `teachonce` exists, is documented, and is the object of its own package."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import teachonce
from teachonce import align, store
from teachonce.student_train.losses.loss import Loss
from teachonce.student_train.losses.registry import LOSSES

NAMES = [name for name in dir(teachonce) if name not in ("__version__", "losses")]
PROMISED = {
    *("open_store", "FeatureStore", "Record", "Batch", "StoreError", "UserError"),
    *("Features", "StoreWriter", "Vocabulary", "VocabularyMap", "Alignment"),
    *("align_match", "align_span", "align_reduce", "FlatText", "Tokens"),
    *("TrainOptions", "train", "run", "DumpOptions", "dump", "losses", "__version__"),
}


def test_all_that_is_promised_is_there() -> None:
    assert set(dir(teachonce)) >= PROMISED | set(store.__all__) | set(align.__all__)
    assert sorted(teachonce.__all__) == dir(teachonce)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_documented_and_the_object_of_its_package(name: str) -> None:
    found = getattr(teachonce, name)
    assert found is getattr(import_module(inspect.getmodule(found).__name__), name)  # type: ignore[union-attr]
    assert found.__module__.startswith("teachonce.")
    printed = inspect.getdoc(found)
    # A dataclass without a docstring has its signature as one.
    assert printed and not printed.startswith(f"{name}(")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.formula))
def test_every_loss_is_there_and_documented(loss: Loss) -> None:
    module, _, function = str(loss.formula).partition(".")
    found = getattr(getattr(teachonce.losses, module), function)
    measured = getattr(loss.function, "func", loss.function)  # without its parameter
    assert found is measured and inspect.getdoc(found)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert teachonce.__version__ == version("teachonce")


def test_the_front_door_holds_nothing_of_its_own() -> None:
    stub = ast.parse(Path(teachonce.__file__).with_suffix(".pyi").read_text("utf-8"))
    assert {type(statement) for statement in stub.body} == {ast.ImportFrom, ast.AnnAssign}
