"""Stand-ins for the packages of trackers, which are too large to install for tests: each has what
is called of the real one, takes no other argument, and writes down what it is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

COMMON = """
import json, os, pathlib
def tell(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
WANDB = f"""{COMMON}
class Run:
    def __init__(self, id): self.id = id
    def log(self, data, step=None, commit=None):
        if "fail" in os.environ: raise RuntimeError("the network is gone")
        tell(log=data, step=step, id=self.id)
    def finish(self, exit_code=None, quiet=None): tell(finish=exit_code, id=self.id)
def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None,
         config=None, group=None, job_type=None, mode=None, reinit=None, resume=None):
    assert pathlib.Path(dir).is_dir() and resume == "allow" and reinit == "create_new"
    if "refuse" in os.environ: raise ValueError("api_key not configured")
    tell(init=name, project=project, group=group, config=config, id=id)
    return Run(id)
"""
TRACKIO = f"""{COMMON}
class Run:
    def __init__(self, name): self.name = name
    def log(self, metrics, step=None): tell(log=metrics, step=step, id=self.name)
    def finish(self): tell(finish=0, id=self.name)
def init(project, name=None, group=None, space_id=None, config=None, resume="never", embed=True):
    assert resume == "allow" and embed is False
    tell(init=name, project=project, group=group, config=config, id=name)
    return Run(name)
"""
MLFLOW = f"""{COMMON}
from types import SimpleNamespace
class Param:
    def __init__(self, key, value):
        assert len(value) <= 6000
        self.key, self.value = key, value
class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.step = key, value, step
        assert abs(timestamp / 1000 - __import__("time").time()) < 60
entities = SimpleNamespace(Param=Param, Metric=Metric)
class MlflowClient:
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name):
        self.experiment = name
        return "7"
    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        assert experiment_id == "7"
        tell(init=run_name, project=self.experiment, group=tags["group"], id="r1")
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    def update_run(self, run_id, status=None, name=None): tell(again=status, id=run_id)
    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        assert len(metrics) <= 1000
        if params: tell(config={{each.key: each.value for each in params}}, id=run_id)
        for each in metrics: tell(log={{each.key: each.value}}, step=each.step, id=run_id)
    def set_terminated(self, run_id, status=None, end_time=None): tell(finish=status, id=run_id)
"""
PACKAGES = {"wandb": WANDB, "trackio": TRACKIO, "mlflow": MLFLOW}


def install(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Let the stand-ins be imported until the test ends; return the file of what they are told."""
    packages = folder / "packages"
    packages.mkdir()
    for name, code in PACKAGES.items():
        (packages / f"{name}.py").write_text(code)
        patch.delitem(sys.modules, name, raising=False)
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        patch.delenv(name, raising=False)
    patch.syspath_prepend(packages)
    patch.setenv("TOLD", str(folder / "told"))
    return folder / "told"


def told(file: Path) -> list[dict[str, Any]]:
    """Return what the stand-ins were told, in its order."""
    return [json.loads(line) for line in file.read_text().splitlines()]
