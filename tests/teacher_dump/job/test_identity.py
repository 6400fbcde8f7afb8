"""What a resumed dump finds of itself is compared with what it would make now."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from teachonce.store import StoreWriter, UserError, open_store
from teachonce.store.tools.verify import verify
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.windows import sequences
from teachonce.teacher_dump.windows.cutting import iter_windows
from tests.end_to_end import dumping
from tests.end_to_end.support import write_corpus

Teacher = Callable[..., Path]


class Killed(BaseException):
    pass


@pytest.fixture
def stopped(tmp_path: Path, tiny_teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options of a dump that was killed as it was about to seal."""

    def make(ext: str) -> Any:
        options = dumping.options(
            tiny_teacher("bert"), write_corpus(tmp_path / "c.txt", 60), tmp_path / f"s.{ext}"
        )

        def killed(writer: StoreWriter) -> None:
            raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(StoreWriter, "seal", killed)
            dump(options)
        return options

    return make


def lose(out: Path, part: int) -> None:
    if out.is_dir():
        shutil.rmtree(out / f"parts/{part}")
    else:
        Path(f"{out}.parts/{part}.h5").unlink()


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_parts_of_other_sequences_are_refused(
    stopped: Any, monkeypatch: pytest.MonkeyPatch, ext: str
) -> None:
    """As after another version of the tokenizers, with which some would be in it twice."""
    options = stopped(ext)
    lose(options.out, 2)

    def others(*words: Any, **named: Any) -> Iterator[Any]:
        return (w for n, w in enumerate(iter_windows(*words, **named)) if not 2 <= n <= 5)

    with monkeypatch.context() as patch:
        patch.setattr(sequences, "iter_windows", others)
        with pytest.raises(UserError, match=r"part 0, published before, is of other sequences"):
            dump(options)
    assert StoreWriter.peek(options.out) is not None
    done = dump(options)
    assert done.resumed_parts == done.parts - 1 and verify(options.out).problems == []
    documents = [record.document for record in open_store(options.out)]
    assert documents == sorted(documents)


def test_another_cut_of_the_same_tokens_is_refused(
    stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and texts alone would not tell."""
    options = stopped("zarr")

    def moved(*words: Any, **named: Any) -> Iterator[Any]:
        for window in iter_windows(*words, **named):
            yield dataclasses.replace(window, offsets=np.where(window.offsets > 0, 1, 0))

    monkeypatch.setattr(sequences, "iter_windows", moved)
    monkeypatch.setattr("teachonce.teacher_dump.job.parts.version", lambda name: "9.9")
    with pytest.raises(UserError, match=r"token/begin differs; teachonce .* then and 9\.9 now"):
        dump(options)


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_a_calibration_that_was_altered_is_refused(stopped: Any, ext: str) -> None:
    """New parts would be encoded relative to another mean than the old ones."""
    options = stopped(ext)
    lose(options.out, 1)
    name = "calibration/hidden/mean/mean"
    if ext == "zarr":
        array = zarr.open_array(options.out / name)
        array[3] = np.asarray(array[3]) + 1
    else:
        with h5py.File(options.out, "r+") as file:
            file[name][3] += 1
    with pytest.raises(UserError, match=f"{name} does not match its checksum"):
        dump(options)
