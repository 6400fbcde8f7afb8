"""What a command line gets wrong, told before torch and transformers are loaded."""

from __future__ import annotations

import os
from pathlib import Path

from downstream.options import FINE_TUNED, Asked
from student_train.settings.shapes import parse_student
from support.errors import UserError
from teacher_dump.teacher.checkpoint_names import is_sentence_folder, resolve_model
from teacher_dump.teacher.declared_heads import check_declared, config_of
from training.trackers import check_installed

HEADS = {"pos": "tagging", "ner": "tagging", "classify": "classification", "pair": "classification"}
PREFIX = "scratch:"
OPTION = f"--model {PREFIX}"
KIND = "modernbert"  # of a model from scratch that names none


def refuse_early(asked: Asked) -> None:
    """Raise UserError for a task without the files that it needs, for files and folders that are
    not there, for a model from scratch that has no such size or vocabulary, and for a tracker that
    is not installed."""
    check_installed(asked.log)
    if asked.task in FINE_TUNED and not asked.as_is and asked.dev is None:
        raise UserError(f"--task {asked.task} needs --dev: the best epoch is chosen on it")
    if asked.task == "speed" and asked.text_column and not asked.test:
        raise UserError("--text-column needs --test, the file that has the column")
    for path in (*asked.train, asked.dev, *asked.test):
        if path is not None and not path.exists():
            raise UserError(f"{path}: cannot be read: No such file or directory; check the path")
    for name in (*asked.model, *([asked.teacher] if asked.teacher else [])):
        if asked.task == "mlm" and name.startswith(PREFIX):
            parse_student(name.removeprefix(PREFIX), OPTION, KIND)
            _check_vocabulary(asked.vocab)
        elif asked.task == "mlm" and asked.vocab:
            raise UserError("--vocab needs --model scratch:HxLxA: a checkpoint brings its own")
        else:
            _check_model(asked, name)


def _check_vocabulary(word: str | None) -> None:
    from training.wordpiece import vocabulary_size

    if word is not None and vocabulary_size(word) is None:
        raise UserError(f"--vocab {word}: expected a number of pieces, e.g. 30k or 512")


def _check_model(asked: Asked, name: str) -> None:
    """Raise UserError for a model that is not there, and for one that is scored as it is and has no
    head for that, as far as its config.json tells."""
    if is_sentence_folder(Path(os.path.expanduser(name))):
        return
    model = resolve_model(name)
    if asked.as_is and asked.task in HEADS:
        check_declared(model, config_of(model), HEADS[asked.task])
