"""What the words of --init and --word-vectors name: layers, another store, the folder of another
model, a file. Checked before torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from teachonce.align import Vocabulary
from teachonce.checkpoints.declared import layers_of
from teachonce.store import FeatureStore, open_store
from teachonce.store.errors import StoreError
from teachonce.student_train.settings.shapes import Shape
from teachonce.support import files
from teachonce.support.errors import UserError

ANOTHER = "svd:"  # before the path of a store
LAYERS = "layers:"  # before numbers of layers, and perhaps @ and a folder


def check_named(how: str, shape: Shape, store: FeatureStore) -> None:
    """Raise UserError for a store or a folder that is not there, and for layers that the model does
    not have, as far as its config.json tells."""
    if (other := other_teacher(how, store)) is not None:
        with closing(other):
            return
    if not how.startswith(LAYERS):
        return
    chosen, at, folder = how.removeprefix(LAYERS).partition("@")
    option = f"--init {how}"
    config = checked_folder(folder, option) if at else store.teacher_settings("config.json")
    layers = layers_of(config)
    if layers is not None and shape.heads:  # what has no heads cannot be cut out of layers
        layer_numbers(chosen, layers, shape.layers)


def layer_numbers(chosen: str, teacher_layers: int, student_layers: int) -> list[int]:
    """Read the teacher's layers (from 1) that a student's are taken from, one for each.

    Raises UserError for other numbers than there are.
    """
    try:
        numbers = [int(word) for word in chosen.split(",")]
    except ValueError:
        raise UserError(f"--init layers:{chosen}: expected numbers such as layers:1,3,5") from None
    if len(numbers) != student_layers or not all(1 <= n <= teacher_layers for n in numbers):
        raise UserError(
            f"--init layers:{chosen}: expected {student_layers} numbers (one a student layer) from"
            f" 1 to {teacher_layers}"
        )
    return numbers


def checked_folder(path: str, option: str) -> Mapping[str, Any]:
    """Read the config.json of a folder of transformers; {} where it is no table. Raises UserError
    where there is none."""
    folder = Path(path)
    files.check_utf8(folder)
    files.check_model_folder(folder)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{option}: no config.json in {path}; give a folder that save_pretrained wrote"
        )
    try:
        found = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):  # told by who loads the model
        return {}
    return found if isinstance(found, dict) else {}


def other_teacher(how: str, store: FeatureStore) -> FeatureStore | None:
    """Open the store of another teacher with the same pieces, where `--init` names one.

    Raises UserError where there is no store, or its teacher has other pieces.
    """
    if not how.startswith(ANOTHER) or how == ANOTHER:
        return None
    try:
        other = open_store(how.removeprefix(ANOTHER))
    except StoreError as error:
        raise UserError(f"--init {how}: {error}") from error
    what = "a store of a teacher"
    check_pieces(how, store, other.teacher_file("tokenizer.json").decode(), "teacher", what)
    return other


def check_pieces(how: str, store: FeatureStore, tokenizer: str, owner: str, what: str) -> None:
    """Raise UserError where another tokenizer.json has other pieces than the store's teacher."""
    ours, theirs = (
        Vocabulary.from_tokenizer_json(each).tokens
        for each in (store.teacher_file("tokenizer.json").decode(), tokenizer)
    )
    if theirs != ours:
        raise UserError(
            f"--init {how}: its {owner} has {len(theirs)} pieces, other ones than the"
            f" {len(ours)} of {store.path}; give {what} with the same vocabulary"
        )


def check_word_vectors(path: Path) -> None:
    """Raise UserError where no file of --word-vectors can be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise no_word_vectors(path, error) from None


def no_word_vectors(path: Path, error: OSError) -> UserError:
    return UserError(f"word vectors {path}: cannot be read: {error.strerror}; check the path")
