"""Push a finished student to a repository of models on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from teachonce.student_train.output.card import THIS_FOLDER
from teachonce.student_train.output.report import SETTINGS, read_report
from teachonce.support.errors import UserError
from teachonce.support.hub import CARD, CREDENTIALS, Repository, open_repository, without_secrets
from teachonce.training.tokenizer_folder import FILES

MODELS = ("config.json", "modules.json", "export.json")
SENT = {
    CARD, SETTINGS, *MODELS, *FILES, "LICENSE", "added_tokens.json", "chat_template.jinja",
    "config_sentence_transformers.json", "generation_config.json", "merges.txt",
    "model.safetensors.index.json", "sentence_bert_config.json", "special_tokens_map.json",
    "tokenizer_config.json",
}  # fmt: skip
"""Files that are sent, with weights and exports: what a model is loaded from, and what documents
it. Logs stay here, as does what lies in the folder for another reason."""
WEIGHTS = re.compile(
    r"(\d+_[A-Za-z]+/)?model(-\d+-of-\d+)?\.safetensors|\d+_[A-Za-z]+/config\.json"
    r"|onnx/model\w*\.onnx(_data|\.data)?|openvino/openvino_model\w*\.(xml|bin)"
    r"|torchscript/model\w*\.pt"
)


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Send a finished student's folder to a repository of models; return the commit's address.

    Its README.md is the model card; the repository replaces the folder in the card's code. Model
    files, the card and training.json are sent, the latter without paths of this machine and without
    the secrets of URLs. Raises UserError if the folder holds no finished student, for a link among
    the files to send, and as `open_repository` does.
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
    files: dict[str, Path | bytes] = dict(_files(folder))
    card = (folder / CARD).read_text("utf-8").replace(THIS_FOLDER, f'"{target.id}"')
    files[CARD] = CREDENTIALS.sub("", card).encode()  # queries are of links that its author wrote
    if SETTINGS in files:
        report = json.loads((folder / SETTINGS).read_text("utf-8"))
        files[SETTINGS] = json.dumps(_named(without_secrets(report)), indent=1).encode()
    return target.commit(files, message or f"{folder.name}: a student of teachonce")


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file to send. Raises UserError for one that a link leads to: the
    link may lead to a file outside of the folder."""
    for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")):
        name = path.relative_to(folder).as_posix()
        if (name in SENT or WEIGHTS.fullmatch(name)) and path.is_file():
            if (
                path.is_symlink()
                or path.parent.resolve() != folder.resolve() / PurePath(name).parent
            ):
                raise UserError(
                    f"{path}: is behind a link, which push does not follow; copy the file"
                )
            yield name, path


def _named(value: Any) -> Any:
    """Return JSON in which paths of this machine are cut to their last names."""
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_named(each) for each in value]
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../")):
        return PurePath(value).name
    return value
