"""Uploads a finished student to a model repository of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from teachonce.checkpoints.checkpoint_tokenizer import FILES
from teachonce.student_train.output.card_code import THIS_FOLDER
from teachonce.student_train.output.report import SETTINGS, read_report
from teachonce.support.errors import UserError
from teachonce.support.files import write
from teachonce.support.hub import CARD, Repository, open_repository, with_metadata
from teachonce.support.redaction import publishable, without_credentials

MODELS = ("config.json", "modules.json", "export.json")
# A list of what is sent, not of what is left out: folders also hold checkpoints, logs and the
# user's own files.
LOADED = {
    *MODELS, *FILES, "added_tokens.json", "chat_template.jinja",
    "config_sentence_transformers.json", "generation_config.json", "merges.txt",
    "model.safetensors.index.json", "sentence_bert_config.json", "special_tokens_map.json",
    "tokenizer_config.json",
}  # fmt: skip
"""Files from which a model, or a module of sentence-transformers, is loaded."""
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
MODULE = re.compile(r"\d+_[A-Za-z]+/")
EXPORT = re.compile(
    r"onnx/model\w*\.onnx(_data|\.data)?|openvino/openvino_model\w*\.(xml|bin)"
    r"|torchscript/model\w*\.pt|answer_(onnx|openvino|torchscript)\.py"
)
"""Exported files, and the programs that run them, which the card of an export names."""


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    license: str | None = None,
    language: Sequence[str] = (),
) -> str:
    """Upload a finished student's folder to a model repository. Returns the commit's URL.

    Only model files, exports, LICENSE, the card (README.md) and training.json are uploaded.
    training.json is uploaded without local paths and credentials of URLs; the code of the card
    loads the repository. Licence and languages are written into the card, in the local folder as
    well. Raises UserError if the folder has no finished student, if a file to upload is a link, and
    as `open_repository` does.
    """
    check_finished(Path(folder))
    write_card_metadata(Path(folder), license, language)
    return send(Path(folder), open_repository(repository, "model", private, revision), message)


def write_card_metadata(folder: Path, license: str | None, language: Sequence[str]) -> None:
    """Write licence and languages into the model card of a folder.

    Raises UserError for an invalid licence or language.
    """
    card = folder / CARD
    before = card.read_text("utf-8")
    if (after := with_metadata(before, license, language)) != before:
        write(card, after.encode())


def check_finished(folder: Path) -> None:
    """Raise UserError unless a folder has a finished student with a card."""
    report = read_report(folder)
    if report is not None and "result" not in report:
        raise UserError(f"{folder}: its training is not finished; finish it with --resume first")
    if not (folder / CARD).is_file() or not any((folder / name).is_file() for name in MODELS):
        raise UserError(
            f"{folder}: expected a model with a card ({MODELS[0]} and {CARD}); give the folder of a"
            " finished student"
        )


def send(folder: Path, target: Repository, message: str | None = None) -> str:
    """Upload a folder to an open repository, as `push` does."""
    files: dict[str, Path | bytes] = dict(_files(folder))
    card = (folder / CARD).read_text("utf-8").replace(THIS_FOLDER, f'"{target.id}"')
    # Queries of URLs stay: the author of the card may have written links with queries.
    files[CARD] = without_credentials(card).encode()
    if SETTINGS in files:
        report = json.loads((folder / SETTINGS).read_text("utf-8"))
        files[SETTINGS] = json.dumps(publishable(report), indent=1).encode()
    return target.commit(files, message or f"{folder.name}: a student of teachonce")


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file to upload. Raises UserError for a link, which may lead out
    of the folder."""
    for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and _is_sent(name):
            if path.resolve() != folder.resolve() / name:
                raise UserError(
                    f"{path}: is a link or behind one, and push follows no links; copy the file"
                )
            yield name, path


def _is_sent(name: str) -> bool:
    """Return whether a file belongs to a model or documents it. Logs and unknown files do not."""
    within = MODULE.sub("", name, count=1)
    return bool(
        name in (CARD, SETTINGS, "LICENSE")
        or within in LOADED
        or WEIGHTS.fullmatch(within)
        or EXPORT.fullmatch(name)
    )
