"""A training from an object store, over a network that loses three of ten answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from teachonce.store.containers import network
from teachonce.student_train.cli import main as student_train
from tests.end_to_end.support import STUDENT, ok, refused
from tests.rough_network import BUCKET, Weather, running_s3

URL = f"s3://{BUCKET}/store.zarr"
SHORT = (*STUDENT, "--vocab", 300, "--steps", 4, "--loss", "mlm=1,hidden=1,kl=1", "--eval-every", 2)


@pytest.mark.slow
def test_a_training_gives_the_same_student(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    monkeypatch.setattr(network, "FIRST_PAUSE", 0.01)
    cache = f"disk:{tmp_path / 'cache'},100MB"
    with running_s3() as s3:
        s3.put(store, "store.zarr")
        s3.weather = Weather({"reset": 0.3})
        ok(student_train, "--store", URL, "--out", tmp_path / "far", *SHORT, "--cache", cache)
        assert s3.weather.met["reset"] > 20
        s3.weather = Weather({"reset": 0.3})  # another training finds everything in the cache
        ok(student_train, "--store", URL, "--out", tmp_path / "again", *SHORT, "--cache", cache)
        assert s3.weather.met["reset"] < 20
        monkeypatch.setattr(network, "PATIENCE", 0.3)
        s3.weather = Weather({"503": 1.0}, lambda method, path: "parts/" in path)
        line = refused(student_train, "--store", URL, "--out", tmp_path / "none", *SHORT)
        assert "cannot be reached: parts/" in line and "damaged" not in line
    ok(student_train, "--store", store, "--out", tmp_path / "near", *SHORT)
    words = ("--store", store, "--out", tmp_path / "none", *SHORT, "--cache", cache)
    line = refused(student_train, *words)
    assert "is on this machine; leave --cache out" in line
    names = ("near", "far", "again")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in names]
    assert len(set(weights)) == 1
