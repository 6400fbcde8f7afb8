"""What a command line gets wrong, told before torch and transformers are loaded."""

from __future__ import annotations

import os
from pathlib import Path

from downstream.options import FINE_TUNED, Asked
from student_train.settings.shapes import parse_student
from support.errors import UserError
from teacher_dump.teacher.checkpoint_names import resolve_model

PREFIX = "scratch:"
OPTION = f"--model {PREFIX}"
KIND = "modernbert"  # of a model from scratch that names none


def refuse_early(asked: Asked) -> None:
    """Raise UserError for a task without the files that it needs, for files and folders that are
    not there, and for a model from scratch that has no such size or vocabulary."""
    if asked.task in FINE_TUNED and not asked.as_is and asked.dev is None:
        raise UserError(f"--task {asked.task} needs --dev: the best epoch is chosen on it")
    for path in (*asked.train, asked.dev, *asked.test):
        if path is not None and not path.exists():
            raise UserError(f"{path}: cannot be read: No such file or directory; check the path")
    for name in (*asked.model, *([asked.teacher] if asked.teacher else [])):
        if asked.task == "mlm" and name.startswith(PREFIX):
            parse_student(name.removeprefix(PREFIX), OPTION, KIND)
            _check_vocabulary(asked.vocab)
        elif asked.task == "mlm" and asked.vocab:
            raise UserError("--vocab needs --model scratch:HxLxA: a checkpoint brings its own")
        elif _is_lost(name):
            resolve_model(name)  # says which


def _check_vocabulary(word: str | None) -> None:
    from training.wordpiece import vocabulary_size

    if word is not None and vocabulary_size(word) is None:
        raise UserError(f"--vocab {word}: expected a number of pieces, e.g. 30k or 512")


def _is_lost(name: str) -> bool:
    """Tell whether a name can only be that of a folder, and there is none."""
    return name.startswith((".", "/", "~")) and not Path(os.path.expanduser(name)).exists()
