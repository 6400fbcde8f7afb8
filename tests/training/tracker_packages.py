"""Stand-ins for the packages of trackers, which are too large to install for tests. Each has only
the functions and arguments in use, and records its calls."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

COMMON = """
import json, os, pathlib
def tell(**what):
    with open(os.environ["RECORDED"], "a") as file:
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
validation = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
utils = SimpleNamespace(validation=validation)
active, waiting = [], []
def search_experiments(filter_string=None): return []
def create_experiment(name, artifact_location=None, tags=None):
    global experiment
    experiment = name
    return "7"
def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, tags=None,
              description=None):
    assert experiment_id == "7" and not active
    active.append(run_id or "r1")
    if run_id: tell(again="RUNNING", id=run_id)
    else: tell(init=run_name, project=experiment, group=tags["group"], id="r1")
    return SimpleNamespace(info=SimpleNamespace(run_id=active[-1]))
def log_params(params):
    assert all(len(value) <= 6000 for value in params.values())
    tell(config=params, id=active[-1])
def log_metrics(metrics, step=None, synchronous=None):
    assert synchronous is False, "a server would be waited for at every step"
    waiting.extend(((name, value, step) for name, value in metrics.items()))
def flush_async_logging():
    for name, value, step in waiting: tell(log={{name: value}}, step=step, id=active[-1])
    waiting.clear()
def end_run(status="FINISHED"): tell(finish=status, id=active.pop())
"""
PACKAGES = {"wandb": WANDB, "trackio": TRACKIO, "mlflow": MLFLOW}


def install(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make the stand-ins importable until the test ends; return the file of the recorded calls."""
    packages = folder / "packages"
    packages.mkdir()
    for name, code in PACKAGES.items():
        (packages / f"{name}.py").write_text(code)
        patch.delitem(sys.modules, name, raising=False)
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        patch.delenv(name, raising=False)
    patch.syspath_prepend(packages)
    patch.setenv("RECORDED", str(folder / "recorded"))
    return folder / "recorded"


def recorded(file: Path) -> list[dict[str, Any]]:
    """Return the recorded calls of the stand-ins, in order."""
    return [json.loads(line) for line in file.read_text().splitlines()]
