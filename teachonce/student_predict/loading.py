"""Loads a student's folder with torch, or a file that student-export wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from teachonce.checkpoints.loading import load_tokenizer
from teachonce.checkpoints.names import EXPORTED, ResolvedModel
from teachonce.store import TaskSpec
from teachonce.student_export.formats import Runner
from teachonce.student_export.formats.registry import FORMATS
from teachonce.student_export.loaded_student import load_student
from teachonce.student_export.options import DECODER, ENCODERS
from teachonce.student_export.student_inputs import INPUTS, OUTPUTS, StudentInputs
from teachonce.student_predict.options import check_folder, decoder_refused
from teachonce.support.errors import UserError, first_line
from teachonce.support.json_file import read_json

SHAPE: dict[str, Any] = {
    "kind": str,
    "inputs": [INPUTS],
    "output": ("logits", *(names[0] for names in OUTPUTS.values())),
    "max_length": int,
    "prompt": str,
    "labels?": [str],
    "problem_type?": str,
    "later_label?": str,
    "activation?": str,
    "files": [{"file": str, "*": object}],
    "*": object,
}
"""The shape of export.json."""


def load(folder: Path, file: str | None = None) -> tuple[StudentInputs, Runner]:
    """Load a student, or the `file` of an export; None for its first file.

    Raises UserError if the folder is neither, or cannot be loaded.
    """
    if (folder / EXPORTED).is_file():
        return _export(folder, file)
    if file is not None:
        raise UserError(f"--file {file}: {folder} is not an export ({EXPORTED}); leave --file out")
    check_folder(folder)
    student = load_student(folder)
    return student, student.run


def _export(folder: Path, file: str | None) -> tuple[StudentInputs, Runner]:
    about = read_json(folder / EXPORTED, SHAPE)
    kind = about["kind"]
    if kind == DECODER:
        raise decoder_refused(folder)
    if kind not in ENCODERS:
        raise UserError(
            f"{folder / EXPORTED}: kind is {kind!r:.40}, expected {', '.join(ENCODERS)}"
        )
    names = [each["file"] for each in about["files"]]
    chosen = file or (names[0] if names else "")
    # By the names that the formats write: no path of export.json leads out of the folder.
    format = next((f for f in FORMATS.values() if chosen in f.names.values()), None)
    if chosen not in names or format is None:
        raise UserError(
            f"--file {chosen}: {folder / EXPORTED} lists {', '.join(names)[:200]}; give one"
        )
    if not (folder / chosen).is_file():
        raise UserError(f"{folder / chosen}: is missing; copy the whole folder")
    student = StudentInputs(
        kind=kind,
        tokenizer=load_tokenizer(ResolvedModel(str(folder), str(folder))),
        inputs=tuple(about["inputs"]),
        max_length=about["max_length"],
        task=_task(kind, about),
        prompt=about["prompt"],
        activation=about.get("activation", ""),
    )
    try:
        return student, format.open(folder / chosen, student.output, os.cpu_count() or 1)
    except UserError:
        raise  # a package is missing, or llama.cpp says why
    except Exception as error:  # libraries raise errors of any type for a damaged file
        raise UserError(
            f"{folder / chosen}: cannot be loaded ({first_line(error)}); copy the whole folder"
            " again, or export the student again"
        ) from error


def _task(kind: str, about: dict[str, Any]) -> TaskSpec | None:
    if kind not in ("classification", "tagging"):
        return None
    return TaskSpec(
        kind,
        tuple(about.get("labels", ())),
        about.get("later_label"),
        problem_type=about.get("problem_type"),
    )
