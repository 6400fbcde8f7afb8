"""Push a finished student to a repository of models on the hub."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

from teachonce.student_train.output.card import THIS_FOLDER
from teachonce.student_train.output.report import SETTINGS, read_report
from teachonce.support.errors import UserError
from teachonce.support.hub import CARD, Repository, open_repository

APART = {
    "checkpoints",
    "tensorboard",
    "trackers.json",
    "wandb",
    "__pycache__",
}  # what a training leaves
MODELS = ("config.json", "modules.json", "export.json")


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Send a finished student's folder to a repository of models; return the commit's address.

    Its README.md is the model card; in its code stands the repository in place of the folder. Logs
    and hidden files stay here, and of paths in training.json only the names are sent. Raises
    UserError where the folder holds no finished student, and as `open_repository` does.
    """
    check_finished(Path(folder))
    return send(Path(folder), open_repository(repository, "model", private, revision), message)


def check_finished(folder: Path) -> None:
    """Raise UserError for a folder that holds no finished student with a card."""
    report = read_report(folder)
    if report is not None and "result" not in report:
        raise UserError(f"{folder}: its training is not finished; end it with --resume first")
    if not (folder / CARD).is_file() or not any((folder / name).is_file() for name in MODELS):
        raise UserError(
            f"{folder}: no model with a card there ({CARD} and {MODELS[0]}); give the folder of a"
            " finished student"
        )


def send(folder: Path, target: Repository, message: str | None = None) -> str:
    """Send a folder as `push` does to an open repository."""
    from huggingface_hub import CommitOperationAdd

    sent = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and name.parts[0] not in APART:
            told = _told(path, target) if len(name.parts) == 1 else None
            sent.append(CommitOperationAdd(name.as_posix(), told or str(path)))
    return target.add(sent, message or f"{folder.name}: a student of teachonce")


def _told(path: Path, target: Repository) -> bytes | None:
    """Return what is sent in place of a file; None for the file itself."""
    if path.name == CARD:
        return path.read_text("utf-8").replace(THIS_FOLDER, f'"{target.id}"').encode()
    if path.name == SETTINGS:
        return json.dumps(_named(json.loads(path.read_text("utf-8"))), indent=1).encode()
    return None


def _named(value: Any) -> Any:
    """Return JSON in which paths of this machine are cut to their last names."""
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_named(each) for each in value]
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../")):
        return PurePath(value).name
    return value
