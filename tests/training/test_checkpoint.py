"""A torn checkpoint is skipped for the previous one; a whole one is loaded without pickle."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from teachonce.store import UserError
from teachonce.student_train.output.report import SETTINGS, check_same_training
from teachonce.support import files
from teachonce.training.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint


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
