"""Loads a student's folder with torch, or a file that student-export wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError, first_line, out_of_memory
from teachonce.support.parsing import read_json

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
    "pairs?": bool,
    "files": [{"file": str, "*": object}],
    "*": object,
}
"""The shape of export.json."""
SOME_INPUTS = f"{', '.join(INPUTS[:2])} and perhaps {INPUTS[2]}"
LONGEST = 2**31 - 1
"""Tokens of a text: tokenizers raises OverflowError for more than 64 bits, and below 0."""
AGAIN = "export the student again"


def load_runner(folder: Path, file: str | None = None) -> tuple[StudentInputs, Runner]:
    """Load the folder of a student, or `file` of an export (None: the first that export.json
    lists).

    Raises UserError if the folder is neither a student nor an export, or cannot be loaded, and if
    `file` is given for a student.
    """
    if (folder / EXPORTED).is_file():
        return _export(folder, file)
    if file is not None:
        raise UserError(f"--file {file}: {folder} is not an export ({EXPORTED}); leave --file out")
    check_folder(folder)
    student = load_student(folder)
    return student, student.run


def _export(folder: Path, file: str | None) -> tuple[StudentInputs, Runner]:
    about = read_json(folder / EXPORTED, SHAPE, "; copy it again")
    kind = about["kind"]
    if kind == DECODER:
        raise decoder_refused(folder)
    if kind not in ENCODERS:
        raise UserError(
            f"{folder / EXPORTED}: kind is {kind!r:.40}, expected {', '.join(ENCODERS)}; {AGAIN}"
        )
    names = [entry["file"] for entry in about["files"]]
    name = file or (names[0] if names else "")
    # Only names that the formats write are accepted, so no path in export.json leads out of the
    # folder.
    format = next((f for f in FORMATS.values() if name in f.names.values()), None)
    if name not in names or format is None:
        listed = f"{folder / EXPORTED} lists {', '.join(names)[:200] or 'no file'}"
        if file is None:
            raise UserError(f"{listed}, expected names that student-export writes; {AGAIN}")
        raise UserError(f"--file {file}: {listed}; give one of its files, or leave --file out")
    if not (folder / name).is_file():
        raise UserError(f"{folder / name}: is missing; copy the whole folder")
    student = StudentInputs(
        kind=kind,
        tokenizer=load_tokenizer(ResolvedModel(str(folder), str(folder))),
        inputs=tuple(about["inputs"]),
        max_length=about["max_length"],
        task=_task(folder, kind, about),
        prompt=about["prompt"],
        pairs=about.get("pairs"),
        activation=about.get("activation", ""),
    )
    _check(student, about["output"], folder / EXPORTED)
    path = folder / name
    with _library_errors(f"{path}: cannot be loaded"):
        run = format.open_repeatable(path, student.output, os.cpu_count() or 1)
    return student, _checked(run, student, path)


def _task(folder: Path, kind: str, about: dict[str, Any]) -> TaskSpec | None:
    if kind not in ("classification", "tagging"):
        return None
    labels, later = tuple(about.get("labels", ())), about.get("later_label")
    try:
        return TaskSpec(kind, labels, later, problem_type=about.get("problem_type"))
    except UserError as error:
        problem = str(error).removeprefix("features: ")
        raise UserError(f"{folder / EXPORTED}: {problem}; {AGAIN}") from None


def _check(student: StudentInputs, output: str, path: Path) -> None:
    """Raise UserError for inputs, an output or a length that no export of the student has."""
    special = student.tokenizer.num_special_tokens_to_add(pair=False)
    inputs, least = ", ".join(student.inputs), special + 1
    if student.inputs not in (INPUTS[:2], INPUTS):
        raise UserError(f"{path}: inputs are {inputs or 'none'}, expected {SOME_INPUTS}; {AGAIN}")
    if missing := {*student.inputs} - {*student.tokenizer.model_input_names}:
        raise UserError(
            f"{path}: inputs have {missing.pop()}, which its tokenizer does not return; {AGAIN}"
        )
    if output != student.output:
        raise UserError(
            f"{path}: output is {output} for kind {student.kind}, expected {student.output};"
            f" {AGAIN}"
        )
    if not least <= student.max_length <= LONGEST:
        raise UserError(
            f"{path}: max_length is {student.max_length:.6g}, expected {least} to {LONGEST:,};"
            f" {AGAIN}"
        )


@contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Raise errors of a library inside the `with` block as UserError."""
    try:
        yield
    except UserError:
        raise  # it already names a missing package, or llama.cpp's error
    except Exception as error:  # libraries raise errors of any type for a damaged file
        if out_of_memory(error):
            raise
        raise UserError(
            f"{problem} ({first_line(error)}); copy the whole folder again, or {AGAIN}"
        ) from error


def _checked(run: Runner, student: StudentInputs, path: Path) -> Runner:
    """Return a `Runner` that calls `run`, and raises UserError if the output's shape does not fit
    the student's kind."""
    axes = 3 if student.kind in ("tagging", "mlm") else 2
    labels = len(student.task.labels) if student.task else None
    named = f" with {counted(labels, 'label')}" if labels else ""

    def checked(inputs: dict[str, Array]) -> Array:
        with _library_errors(f"{path}: cannot be run with the inputs of {EXPORTED}"):
            outputs = run(inputs)
        if outputs.ndim != axes or labels not in (None, outputs.shape[-1]):
            raise UserError(
                f"{path}: has outputs of shape {[*outputs.shape]}, which do not fit kind"
                f" {student.kind}{named} in {EXPORTED}; {AGAIN}"
            )
        return outputs

    return checked
