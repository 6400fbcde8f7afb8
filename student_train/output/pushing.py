"""Push a finished student to a repository of models on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from teachonce.checkpoints.tokenizer_folder import FILES
from teachonce.student_train.output.card import THIS_FOLDER
from teachonce.student_train.output.report import SETTINGS, read_report
from teachonce.support.errors import UserError
from teachonce.support.hub import CARD, Repository, open_repository
from teachonce.support.redaction import publishable, without_credentials

MODELS = ("config.json", "modules.json", "export.json")
LOADED = {
    *MODELS, *FILES, "added_tokens.json", "chat_template.jinja",
    "config_sentence_transformers.json", "generation_config.json", "merges.txt",
    "model.safetensors.index.json", "sentence_bert_config.json", "special_tokens_map.json",
    "tokenizer_config.json",
}  # fmt: skip
"""Names of files that a model, or a module of sentence-transformers, is loaded from."""
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
MODULE = re.compile(r"\d+_[A-Za-z]+/")
EXPORT = re.compile(
    r"onnx/model\w*\.onnx(_data|\.data)?|openvino/openvino_model\w*\.(xml|bin)"
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
    files[CARD] = without_credentials(card).encode()  # queries are of links that its author wrote
    if SETTINGS in files:
        report = json.loads((folder / SETTINGS).read_text("utf-8"))
        files[SETTINGS] = json.dumps(publishable(report), indent=1).encode()
    return target.commit(files, message or f"{folder.name}: a student of teachonce")


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file to send. Raises UserError for one that a link leads to: the
    link may lead to a file outside of the folder."""
    for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _is_sent(name):
            if path.resolve() != folder.resolve() / name:
                raise UserError(
                    f"{path}: is behind a link, which push does not follow; copy the file"
                )
            yield name, path


def _is_sent(name: str) -> bool:
    """Return whether a file belongs to a model or documents it. Logs do not, nor does what lies in
    the folder for another reason."""
    within = MODULE.sub("", name, count=1)
    return bool(
        name in (CARD, SETTINGS, "LICENSE")
        or within in LOADED
        or WEIGHTS.fullmatch(within)
        or EXPORT.fullmatch(name)
    )
