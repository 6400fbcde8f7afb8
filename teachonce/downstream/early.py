"""What a command line gets wrong, told before torch and transformers are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from teachonce.checkpoints.declared import check_declared, config_of
from teachonce.checkpoints.names import is_sentence_folder, resolve_vectors
from teachonce.downstream.options import FINE_TUNED, MTEB, Asked
from teachonce.student_train.settings.shapes import parse_student
from teachonce.support.errors import UserError
from teachonce.support.extras import check_library
from teachonce.training.optimizer import check_optimizer
from teachonce.training.trackers import check_installed

HEADS = {"pos": "tagging", "ner": "tagging", "classify": "classification", "pair": "classification"}
PREFIX = "scratch:"
OPTION = f"--model {PREFIX}"
KIND = "modernbert"  # of a model from scratch that names none


def refuse_early(asked: Asked, models: Sequence[str] | None = None) -> None:
    """Raise UserError for a task without the files that it needs, for files and folders that are
    not there, for a model from scratch that has no such size or vocabulary, and for a tracker or
    library that is not installed.

    `models` are those to look at in place of the task's, None for these.
    """
    check_installed(asked.log)
    if asked.optimizer:
        check_optimizer(asked.optimizer)
    if asked.kind == MTEB:
        check_library("mteb", "mteb", f"--task {asked.task}")
    if asked.task in FINE_TUNED and not asked.as_is and asked.dev is None:
        raise UserError(f"--task {asked.task} needs --dev: the best epoch is chosen on it")
    if asked.task == "speed" and asked.text_column and not asked.test:
        raise UserError("--text-column needs --test, the file that has the column")
    for path in (*asked.train, asked.dev, *asked.test, asked.candidates):
        if path is not None and not path.exists():
            raise UserError(f"{path}: cannot be read: No such file or directory; check the path")
    others = filter(None, (asked.teacher, asked.documents_by, asked.candidates_by))
    names = asked.model if models is None else models
    if asked.vocab and not any(name.startswith(PREFIX) for name in names):
        raise UserError("--vocab needs --model scratch:HxLxA: a checkpoint brings its own")
    for name in (*names, *others):
        if asked.task == "mlm" and name.startswith(PREFIX):
            parse_student(name.removeprefix(PREFIX), OPTION, KIND)
            _check_vocabulary(asked.vocab)
        else:
            _check_model(asked, name)


def _check_vocabulary(word: str | None) -> None:
    from teachonce.training.wordpiece import vocabulary_size

    if word is not None and vocabulary_size(word) is None:
        raise UserError(f"--vocab {word}: expected a number of pieces, e.g. 30k or 512")


def _check_model(asked: Asked, name: str) -> None:
    """Raise UserError for a model that is not there, and for one that is scored as it is and has no
    head for that, as far as its config.json tells."""
    model = resolve_vectors(name)
    if is_sentence_folder(Path(model.path_or_id)):
        return
    if asked.as_is and asked.task in HEADS:
        check_declared(model, config_of(model), HEADS[asked.task])
