"""training.json: how a student came to be, and whether a stopped training may go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from teachonce.support import files
from teachonce.support.differences import describe_changes
from teachonce.support.errors import UserError
from teachonce.support.json_file import read_json
from teachonce.training.checkpoint import remove_checkpoints

SETTINGS = "training.json"
SHAPE = {
    "settings": {"loss?": {"*": float}, "*": object},
    "store": dict,
    "others?": [dict],
    "environments": [dict],
    "tokenizer": object,
    "result?": dict,
}
"""What training.json holds."""


def read_report(out: Path) -> dict[str, Any] | None:
    """Read the training.json of a student, with `result` once it is finished; None if there is
    none.

    Raises UserError for one that is damaged.
    """
    path = out / SETTINGS
    try:
        if not path.exists():
            return None
        report: dict[str, Any] = read_json(path, SHAPE)
    except (OSError, UserError) as error:
        problem = str(error).removeprefix(f"{path}: ")
        raise UserError(
            f"{path} is damaged ({problem}); remove the folder to train that student again"
        ) from None
    return report


def learnt_from(report: dict[str, Any]) -> list[Any]:
    """Return the content of every store that a student has learnt from."""
    return [store["content"] for store in (report["store"], *report.get("others", ()))]


def losses_learnt(settings: Mapping[str, Any]) -> set[str]:
    """Name the losses of a training, by the settings of its report: those of all its stages."""
    stages = settings.get("stages") or [{}]
    return {name for stage in stages for name in stage.get("loss", settings["loss"])}


def check_way(out: Path, resume: bool) -> dict[str, Any] | None:
    """Refuse an output that is in the way, or a `--resume` of no training. Return the report of a
    training to resume, or of a finished student; None where nothing is there."""
    left = f"{files.UNFINISHED}{SETTINGS}"  # begins the name of what a training killed early leaves
    if not out.exists() or (out.is_dir() and all(p.name.startswith(left) for p in out.iterdir())):
        if resume:
            raise UserError(f"{out}: nothing to resume there; leave --resume out")
        return None
    before = None
    with nullcontext() if resume else suppress(UserError):  # what is damaged is in the way, too
        before = read_report(out)
    if not resume and (before is None or "result" not in before):
        raise UserError(f"{out} exists already; give another --out, or --resume to go on with it")
    if before is None:
        raise UserError(
            f"{out}: no training.json there, so it is no training that could be resumed"
        )
    return before


def check_out(out: Path, begun: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """Refuse as `check_way` does, and a student of other settings. Return the report to resume,
    with `result` where the student is finished, or None."""
    before = check_way(out, resume)
    if before is None:
        return None
    begun = json.loads(json.dumps(begun))
    now = begun["settings"]
    for which, paths in (("store", [now["store"]]), ("others", now["others"])):
        if before.get(which, []) != begun[which]:
            told = ", ".join(paths) or "one store alone"
            problem = f"{told} is not the store it was begun with"
            raise UserError(
                f"{out}: cannot resume: {problem}"
                if resume
                else f"{out} exists already, a finished student: {problem}; give another --out"
            )
    del now["store"], now["others"]  # a store that was moved is the same store
    if told := describe_changes(before["settings"], now):
        raise UserError(
            f"{out}: cannot resume with other settings: {told}; give those of then, or another"
            " --out"
            if resume
            else f"{out} exists already, a finished student of other settings: {told}; give"
            " another --out"
        )
    if "result" in before:
        remove_checkpoints(out / "checkpoints")
    return before


def go_on(out: Path, before: dict[str, Any], begun: dict[str, Any], say: Any) -> None:
    """Refuse another vocabulary of the same name; keep what the student was trained on so far."""
    now = begun["environments"]
    known = [{"processes": 1, **each} for each in before["environments"]]
    if before.get("tokenizer") != begun["tokenizer"]:
        names = ("tokenizers", "transformers")
        versions = describe_changes(known[-1], {name: now[0][name] for name in names})
        cause = f" or install the versions of then ({versions})," if versions else ""
        raise UserError(
            f"{out}: cannot resume: --vocab {begun['settings']['vocab']} is not the tokenizer that"
            f" it was begun with; put that back,{cause} or train again with another --out"
        )
    if now[0] != known[-1]:
        told = describe_changes(known[-1], now[0])
        say(f"resume    the last bits may differ from a training without a stop: {told}")
        begun["environments"] = known + now
    else:
        begun["environments"] = known


def tokenizer_hash(tokenizer: Any) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
