"""The stub of a package lists its public names; each is imported when it is first used."""

import pickle
import subprocess
import sys

import pytest

import teachonce
import teachonce.student_train.train as rooms
from teachonce import store, student_train, teacher_dump
from teachonce.support import environment


@pytest.mark.parametrize("package", [store, teachonce, student_train, teacher_dump, rooms])
def test_every_listed_name_is_there(package: object) -> None:
    names = dir(package)
    assert len(names) > (10 if package in (store, teachonce) else 1) and all(
        getattr(package, name) is not None for name in names
    )
    with pytest.raises(AttributeError, match="has no attribute 'opne_store'"):
        package.opne_store  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_and_commands_begin_without_what_their_work_needs() -> None:
    program = """
import sys
import teachonce
ours = ("store", "student_train", "teacher_dump")
heavy = {"zarr", "torch", "transformers", *(f"teachonce.{name}" for name in ours)}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import teachonce.feature_store.cli, teachonce.support.console
assert "rich" not in sys.modules
import teachonce.teacher_dump.cli
import teachonce.student_train.cli, teachonce.downstream.cli
import teachonce.student_train.losses.registry  # the list of losses does not wait for torch
heavy = {"zarr", "h5py", "torch", "transformers", "datasets", "tokenizers", "scipy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from teachonce import align_span, open_store
assert "zarr" in sys.modules and not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_torch_waits_asleep() -> None:
    program = """
import os, sys
os.environ.pop("OMP_WAIT_POLICY", None)
os.environ["OMP_DISPLAY_ENV"] = "TRUE"  # OpenMP tells its settings as it is loaded
from teachonce import train
assert "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
import warnings
from teachonce.support.environment import warn_of_spinning
warnings.simplefilter("error")
warn_of_spinning(2)  # says nothing
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    if "OMP_WAIT_POLICY" in run.stderr:  # an OpenMP other than GNU's may not report it
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in run.stderr


def test_who_imported_torch_first_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_imported_sleeping", False)

    def train(count: int) -> None:
        environment.warn_of_spinning(count)

    train(2)  # the environment of the tests sets a passive wait policy for threads
    monkeypatch.delenv("OMP_WAIT_POLICY")
    train(1)
    with pytest.warns(
        RuntimeWarning, match="its 2 threads spin.* set OMP_WAIT_POLICY=PA"
    ) as printed:
        train(2)
    assert printed[0].filename == __file__


def test_what_is_exported_is_what_its_room_has() -> None:
    from teachonce.store.format.features import Features
    from teachonce.student_train.train.student_training import train

    assert store.Features is Features and teachonce.train is rooms.train is train
    assert pickle.loads(pickle.dumps(store.Features())) == Features()
