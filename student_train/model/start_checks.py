"""Checks the layers, stores, folders and files that --init and --word-vectors name, before torch is
imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from teachonce.checkpoints.declared import layers_of
from teachonce.checkpoints.unreadable import not_a_model
from teachonce.store import FeatureStore, open_store
from teachonce.store.errors import StoreError
from teachonce.student_train.data.vocabularies import read_vocabulary
from teachonce.student_train.model.decoder_sizes import Sizes, check_cut, shape_of_folder
from teachonce.student_train.settings.option_values import FOLDER
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.shapes import Shape, parse_student
from teachonce.support import files
from teachonce.support.console import counted
from teachonce.support.errors import UserError

ANOTHER = "svd:"  # before the path of a store
LAYERS = "layers:"  # before numbers of layers, and perhaps @ and a folder
# A cut runs the teacher over some thousand tokens, in float32: 2 GB of memory and a minute on two
# cores for this many weights of layers. Larger teachers are cut if --init requests it.
CUT_BY_DEFAULT = 2**29


def check_start_source(options: TrainOptions, store: FeatureStore) -> None:
    """Raise UserError if `--init` names a missing store or folder, layers that the model lacks by
    its config.json, or a folder that does not fit `--student` and `--vocab`."""
    how, shape = options.init, options.shape
    if (other := other_teacher(how, store)) is not None:
        with closing(other):
            return
    if how.startswith(FOLDER):
        config, folder = start_config(how, store)
        if not shape.causal:
            raise UserError(
                f"--init {how}: only a decoder starts with all weights of a folder, and"
                f" --student is {options.student}; give --student {folder} if it is a decoder, else"
                f" --init layers:I,J,...@{folder}"
            )
        if Path(options.vocab) != Path(folder):
            raise UserError(
                f"--vocab {options.vocab}: the weights of {folder} are for its own vocabulary; give"
                f" --vocab {folder}, or --init vocab"
            )
        folder_shape = shape_of_folder(config, folder, f"--init {how}")
        if parse_student(folder_shape) != shape:
            raise UserError(
                f"--init {how}: the model in this folder has the shape {folder_shape}, and"
                f" --student has another; give --student {folder}"
            )
        return
    if not copies_layers(how) or not (shape.causal or how.startswith(LAYERS)):
        return
    config, where = start_config(how, store)
    layers, layer_list = layers_of(config), how.removeprefix(LAYERS).partition("@")[0]
    # A kind without attention has no layers to copy.
    if layers is not None and shape.heads and how.startswith(LAYERS):
        layer_numbers(layer_list, layers, shape.layers)
    if shape.causal:
        check_cut(how, shape, config, where)


def copies_layers(how: str) -> bool:
    """Return whether `--init` copies layers of a model."""
    return how == "teacher" or how.startswith((LAYERS, FOLDER))


def resolved_start(how: str, shape: Shape, store: FeatureStore) -> str:
    """Return `teacher` for `--init auto` of a decoder that can be cut out of the store's teacher,
    else `how` unchanged."""
    # A cut is a better start than `vocab`: 2.255 and 2.372 bits per byte after .5M tokens (RESULTS,
    # "Decoder students").
    if how != "auto" or not shape.causal or "config.json" not in store.teacher_files():
        return how
    config = store.teacher_settings("config.json")
    try:
        check_cut("teacher", shape, config, str(store.path))
    except UserError:
        return how
    layers, sizes = layers_of(config) or 0, Sizes.of_config(config, str(store.path))
    fits = shape.layers <= layers and layers * sizes.layer_weights <= CUT_BY_DEFAULT
    return "teacher" if fits and store.teacher_weights() else how


def start_config(how: str, store: FeatureStore) -> tuple[Mapping[str, Any], str]:
    """Return the config.json of the model whose layers `--init` copies, and its path.

    Raises UserError if its folder is missing.
    """
    _, at, folder = how.partition("@")
    if how.startswith(FOLDER):
        at, folder = FOLDER, how.removeprefix(FOLDER)
    if at:
        return checked_folder(folder, f"--init {how}"), folder
    return store.teacher_settings("config.json"), str(store.path)


def layer_numbers(layer_list: str, teacher_layers: int, student_layers: int) -> list[int]:
    """Parse the teacher's layers (from 1), one for each layer of the student.

    Raises UserError for another number of layers, or a layer that the teacher does not have.
    """
    try:
        numbers = [int(word) for word in layer_list.split(",")]
    except ValueError:
        raise UserError(
            f"--init layers:{layer_list}: expected layer numbers, such as layers:1,3,5"
        ) from None
    if len(numbers) != student_layers or not all(1 <= n <= teacher_layers for n in numbers):
        raise UserError(
            f"--init layers:{layer_list}: expected {counted(student_layers, 'number')} (one per"
            f" student layer) from 1 to {teacher_layers}"
        )
    return numbers


def checked_folder(path: str, option: str) -> Mapping[str, Any]:
    """Read the config.json of a transformers folder; return {} if it is invalid. Raises UserError
    if it is missing."""
    folder = Path(path)
    files.check_utf8(folder)
    files.check_model_folder(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{option}: {path}: {not_a_model(folder)}")
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):  # reported when the model is loaded
        return {}
    return config if isinstance(config, dict) else {}


def other_teacher(how: str, store: FeatureStore) -> FeatureStore | None:
    """Open the store of `--init svd:STORE`, which the caller closes; return None for any other
    `--init`.

    Raises UserError if there is no such store, or if its teacher has other pieces.
    """
    if not how.startswith(ANOTHER):
        return None
    try:
        other = open_store(how.removeprefix(ANOTHER))
    except StoreError as error:
        raise UserError(f"--init {how}: {error}") from error
    with ExitStack() as refused:
        refused.enter_context(closing(other))
        tokenizer = other.teacher_file("tokenizer.json").decode()
        check_same_pieces(how, store, tokenizer, "teacher", "a store of a teacher")
        refused.pop_all()  # the caller closes it
    return other


def check_same_pieces(how: str, store: FeatureStore, tokenizer: str, owner: str, kind: str) -> None:
    """Raise UserError unless another tokenizer.json has the same pieces as the store's teacher."""
    # Pieces and their ids, which number the rows of the weights; normalisers may differ.
    content = store.teacher_file("tokenizer.json").decode()
    expected = read_vocabulary(content, str(store.path)).tokens
    pieces = read_vocabulary(tokenizer, f"--init {how}").tokens
    if pieces != expected:
        raise UserError(
            f"--init {how}: the {len(pieces)} pieces of its {owner} differ from the"
            f" {len(expected)} of {store.path}; give {kind} with the same vocabulary"
        )


def check_word_vectors(path: Path) -> None:
    """Raise UserError if the file of --word-vectors cannot be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise no_word_vectors(path, error) from None


def no_word_vectors(path: Path, error: OSError) -> UserError:
    return UserError(f"word vectors {path}: cannot be read: {error.strerror}; check the path")
