"""training.json: the record of a training, and the checks before a stopped training is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from teachonce.student_train.settings.option_fields import describe_changed_settings
from teachonce.support import files
from teachonce.support.differences import describe_changes
from teachonce.support.errors import UserError
from teachonce.support.parsing import read_json
from teachonce.training.checkpoint import remove_checkpoints

SETTINGS = "training.json"
LOGS = ("metrics.jsonl", "tensorboard")
"""What a training writes before its first checkpoint."""
LOSS = {"*": float}
SHAPE = {
    "settings": {"loss?": LOSS, "stages?": [{"loss?": LOSS, "*": object}], "*": object},
    "recipe?": {"name": str, "about": str, "source": str},
    "store": dict,
    "others?": [dict],
    "environments": [dict],
    "tokenizer": object,
    "chats?": bool,
    "result?": dict,
}
"""The schema of training.json."""


def read_report(out: Path) -> dict[str, Any] | None:
    """Read the training.json of a student; None if there is none. If the student is finished, it
    has `result`.

    Raises UserError if it is damaged.
    """
    return read_record(out / SETTINGS, SHAPE, "remove the folder to train that student again")


def read_record(path: Path, shape: Any, remedy: str) -> dict[str, Any] | None:
    """Read a JSON file of a student or a sweep, or return None if there is none. Raises UserError,
    whose message ends in `remedy`, if the file is damaged."""
    try:
        record: dict[str, Any] | None = read_json(path, shape) if path.exists() else None
    except (OSError, UserError) as error:
        problem = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{path} is damaged ({problem}); {remedy}") from None
    return record


def trained_on_chats(folder: Path) -> bool:
    """Return whether a decoder, whose tokenizer has a chat template, was trained on chats. Without
    a training.json in its folder the template is the only sign, and the answer is True."""
    report = None
    with suppress(UserError):  # another program may have written a file of this name
        report = read_report(folder)
    return report is None or bool(report.get("chats", True))


def store_contents(report: dict[str, Any]) -> list[Any]:
    """Return the content hash of every store that a student was trained on."""
    return [store["content"] for store in (report["store"], *report.get("others", ()))]


def trained_losses(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the losses of all stages in the settings of a report."""
    stages = settings.get("stages") or [{}]
    return {name for stage in stages for name in stage.get("loss", settings.get("loss", ()))}


def check_output(out: Path, resume: bool) -> dict[str, Any] | None:
    """Check that an output folder is free, or can be resumed.

    Returns the report of the training to resume or of the finished student; None for a free folder.
    Without `--resume`, a folder that has only settings and LOGS is free, too: its training failed
    before the first checkpoint. Raises UserError for other existing files, and for `--resume`
    without a training.
    """
    # A training that is killed early leaves a temporary file with this prefix.
    unfinished = f"{files.UNFINISHED}{SETTINGS}"

    def has_only(*prefixes: str) -> bool:
        return out.is_dir() and all(path.name.startswith(prefixes) for path in out.iterdir())

    if not files.is_taken(out) or has_only(unfinished):
        if resume:
            raise UserError(f"{out}: has no training to resume; leave --resume out")
        return None
    before = None
    # Without --resume a damaged folder is refused as any other existing folder.
    with nullcontext() if resume else suppress(UserError):
        before = read_report(out)
    if not resume and (before is None or "result" not in before):
        if before is not None and has_only(SETTINGS, unfinished, *LOGS):
            return None  # without a checkpoint, --resume would start from the beginning, too
        stopped = (out / SETTINGS).is_file()
        remedy = ", or add --resume to continue it" if stopped else ""
        raise UserError(f"{out} exists already; give another --out{remedy}")
    if before is None:
        raise UserError(
            f"{out}: has no training.json, so there is no training to resume; give the folder of a"
            " stopped training, or another --out without --resume"
        )
    return before


def check_same_training(out: Path, report: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """Check an output as `check_output` does, and that it has the same stores and settings.

    report: the report of the new training. Returns the earlier report, with `result` if the student
    is finished, or None. Raises UserError for other stores or settings.
    """
    before = check_output(out, resume)
    if before is None:
        return None
    settings = report["settings"]
    for which, paths in (("store", [settings["store"]]), ("others", settings["others"])):
        if before.get(which, []) != json.loads(json.dumps(report[which])):
            stores = ", ".join(paths) or "a single store"
            problem = f"{stores} is not the store that it was trained on"
            raise UserError(
                f"{out}: cannot resume: {problem}; give the earlier --store, or another --out"
                if resume
                else f"{out} exists already, a finished student: {problem}; give another --out"
            )
    check_same_settings(out, before, settings, resume=resume)
    # Checkpoints are left if a kill came after the result was written and before their removal.
    if "result" in before:
        remove_checkpoints(out / "checkpoints")
    return before


def check_same_settings(
    out: Path,
    before: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
    of_sweep: bool = False,
) -> None:
    """Raise UserError if the student in `out`, with the report `before`, has other settings.

    of_sweep: ignore `device`, `precision` and the options that an earlier version lacked. For a
        student of a sweep, the hash in the folder's name covers the options, but only the last
        component of a path.
    """
    if of_sweep:
        # `auto` is another precision on another machine.
        ignored = {"device", "precision", *(settings.keys() - before["settings"].keys())}
        settings = {name: value for name, value in settings.items() if name not in ignored}
    changed = describe_changed_settings(before["settings"], settings)
    if changed and resume:
        raise UserError(
            f"{out}: cannot resume with other settings: {changed}; give the earlier settings,"
            " or another --out"
        )
    if changed:
        also = ", or rename the folder or store" if of_sweep else ""
        raise UserError(
            f"{out} exists already, a finished student with other settings: {changed};"
            f" give another --out{also}"
        )


def add_earlier_environments(
    out: Path, before: dict[str, Any], report: dict[str, Any], say: Any
) -> None:
    """Prepend the earlier environments of a resumed training to its new report, in place.

    Raises UserError if `--vocab` now gives another tokenizer.
    """
    now = report["environments"]
    earlier = before["environments"]
    if before.get("tokenizer") != report["tokenizer"]:
        names = ("tokenizers", "transformers")
        versions = describe_changes(earlier[-1], {name: now[0][name] for name in names})
        cause = f" or install the earlier versions ({versions})," if versions else ""
        raise UserError(
            f"{out}: cannot resume: --vocab {report['settings']['vocab']} is not the tokenizer that"
            f" the training started with; restore that tokenizer,{cause} or train again with"
            " another --out"
        )
    if now[0] != earlier[-1]:
        differences = describe_changes(earlier[-1], now[0])
        say(f"resume    the last bits may differ from a training without a stop: {differences}")
        report["environments"] = earlier + now
    else:
        report["environments"] = earlier
