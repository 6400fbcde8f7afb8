"""Turns the arguments of a command into TrainOptions. Values from the command line have priority,
then the recipe's, then defaults that depend on the store's teacher and features."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from teachonce.checkpoints.declared import (
    declared_head,
    layers_of,
    stored_config,
    suggested_decoder,
)
from teachonce.store import FeatureStore
from teachonce.student_train.data.blocks import has_gold
from teachonce.student_train.losses.registry import Loss, find
from teachonce.student_train.model.decoder_sizes import Sizes, shape_of_folder
from teachonce.student_train.model.start_checks import checked_folder
from teachonce.student_train.plan.train_plan import Stores
from teachonce.student_train.settings.option_values import (
    AS_TEACHER,
    FOLDER,
    is_model_folder,
)
from teachonce.student_train.settings.options import TrainOptions, ruled_out
from teachonce.student_train.settings.recipe import find_recipe
from teachonce.student_train.settings.shapes import SHAPES, parse_student
from teachonce.student_train.settings.terms import (
    DEFAULT_LOSS,
    NEXT_LOSS,
    NEXT_PIECES_LOSS,
    NEXT_STATES_LOSS,
    NEXT_TEMPERATURE,
    SCORE_LOSS,
    STATES_LOSS,
    STATIC_VOCABULARY,
    TASK_STATES_LOSS,
    VECTOR_LOSS,
    VECTOR_TEXTS,
)
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.options import read_words

HEADS = ("num_attention_heads", "n_heads", "n_head")  # in BERT, DistilBERT, GPT-2
MIXED_VOCAB = "mixed-vocab"  # weights and vocabulary written by teacher-dump mixed-vocab


def stores_of(arguments: Mapping[str, Any]) -> Stores:
    """Return the stores of a command line. They are opened once, on first use."""
    partial = arguments.get("allow_partial") or False
    return Stores(arguments["store"], partial, arguments.get("cache") or "")


def checked_from(arguments: Mapping[str, Any], stores: Stores | None = None) -> TrainOptions:
    """Make TrainOptions from the arguments of a command line, by option name.

    An argument overrides the recipe, in all stages of the recipe. Without `loss` the losses follow
    from the features of the stores. Raises UserError for values that no store could satisfy.
    Imports no torch.
    """
    if stores is None:
        with closing(stores_of(arguments)) as stores:
            return checked_from(arguments, stores)
    given = {name: value for name, value in arguments.items() if value not in (None, ())}
    given["store"], *others = given["store"]
    name = given.pop("recipe", None)
    given = {**read_words(TrainOptions, given), "others": tuple(others)}
    # Called for its error: two lengths, or two sizes of a batch, on one command line.
    ruled_out(given)
    if name:
        given = _over_recipe(given, name)
    if given.get("init") == MIXED_VOCAB:
        given.setdefault("vocab", MIXED_VOCAB)
    if given.get("student", "").startswith(AS_TEACHER):
        given["student"] = _student_like_teacher(given["student"], stores.opened[0])
    if is_model_folder(student := given.get("student", "")):
        option = f"--student {student}"
        shape = shape_of_folder(checked_folder(student, option), student, option)
        # A --vocab or --init that was given stays: `TrainOptions` refuses one that does not fit.
        given = {"vocab": student, "init": FOLDER + student, **given, "student": shape}
    fill_in_vocabulary(given)
    if not given.get("stages"):
        fill_in_batch(given, lambda: stores.opened[0])
    fill_in_decoder(given, lambda: stores.opened[0])
    if "loss" not in given:
        of_stages = [stage["loss"] for stage in given.get("stages", ()) if "loss" in stage]
        every = of_stages and len(of_stages) == len(given["stages"])
        given["loss"] = of_stages[-1] if every else default_losses(given, stores.opened)
    return TrainOptions(**given)


def _over_recipe(given: dict[str, Any], name: str) -> dict[str, Any]:
    recipe = find_recipe(name)
    over = given.keys() | ruled_out(given)
    plain, *stages = (
        {key: value for key, value in table.items() if key not in over}
        for table in (recipe.options, *recipe.stages)
    )
    needs = {**recipe.needs, "recipe": name}
    return {**plain, "stages": tuple(stages), "needs": needs, **given}


def _student_like_teacher(student: str, store: FeatureStore) -> str:
    """Turn `teacher:L` into a shape with the teacher's hidden size and heads, and L layers."""
    number = student.removeprefix(AS_TEACHER)
    if not re.fullmatch("[1-9][0-9]*", number):
        raise UserError(
            f"--student {student}: expected {AS_TEACHER}L with a number of layers as L, such as"
            f" {AS_TEACHER}2"
        )
    config = store.teacher_settings("config.json")
    heads = next((config[name] for name in HEADS if name in config), 0)
    if not isinstance(heads, int) or heads < 1:
        raise UserError(
            f"--student {student}: the teacher of {store.path} has no attention heads; give HxLxA"
        )
    layers = layers_of(config)
    if layers is not None and int(number) > layers:
        raise UserError(
            f"--student {student}: the teacher of {store.path} has {counted(layers, 'layer')}; give"
            f" {AS_TEACHER}{layers} or less, or a shape HxLxA"
        )
    # The same kind as the teacher, so that --init can copy the teacher's layers; for a teacher of
    # another family a kind that predicts what it does.
    other = "llama" if predicts_next(store) else "bert"
    own = str(config.get("model_type"))
    kind = own if own in SHAPES else other
    if SHAPES[kind].causal:
        known = {"hidden_size": store.features.width, "num_attention_heads": heads}
        sizes = Sizes.of_config({**config, **known}, str(store.path))
        # Key-value heads that config.json lacks are not written: the shape is part of the name of
        # the default folder.
        shape = sizes.shape(kind, int(number), grouped=bool(config.get("num_key_value_heads")))
    else:
        shape = f"{kind}:{store.features.width}x{number}x{heads}"
    parse_student(shape, f"--student {student}, which is ")
    return shape


def fill_in_decoder(given: dict[str, Any], opened: Callable[[], FeatureStore]) -> None:
    """Set the defaults of a decoder: temperature 1 for its losses, and the unmasked view.

    If `student` is not given and the teacher is a decoder, the student becomes a decoder, unless
    losses were given and none of them compares next tokens.
    """
    losses = _losses_in(given, *given.get("stages", ()))
    of_next = not losses or any(loss.of_next for loss in losses)
    # A store that is not needed here is not opened: it may not exist yet.
    if of_next and "student" not in given and predicts_next(store := opened()):
        given["student"] = suggested_decoder(stored_config(store))
    # The text's own tokens, which a decoder learns as well, are of temperature 1. It reads the text
    # unmasked, so the teacher's states must be of unmasked text, too.
    if _is_decoder(given):
        given.setdefault("temperature", NEXT_TEMPERATURE)
        given.setdefault("view", 0)


def fill_in_vocabulary(given: dict[str, Any]) -> None:
    """Set the default of `vocab` for a static student."""
    if _is_static(given):
        given.setdefault("vocab", STATIC_VOCABULARY)


def of_vectors(given: Mapping[str, Any]) -> bool:
    """Return whether one of the losses, given or default, may compare text vectors."""
    return "loss" not in given or any(loss.of_text for loss in _losses_in(given))


def _losses_in(*tables: Mapping[str, Any]) -> list[Loss]:
    """Return the losses that are given in tables of options. Raises UserError as `find` does."""
    # `find` loads a loss of another package: the defaults must not depend on an earlier training.
    return [loss for table in tables for name in table.get("loss", ()) for loss in find(name)]


def fill_in_batch(given: dict[str, Any], opened: Callable[[], FeatureStore]) -> None:
    """Set `batch_texts` for losses of text vectors if no batch size was given."""
    # These losses compare each text with every other one in the batch: the number of texts matters,
    # not the number of tokens.
    sized = {"batch_texts", "batch_tokens"} & given.keys()
    if of_vectors(given) and not sized and opened().features.embedding:
        given["batch_texts"] = VECTOR_TEXTS


def default_losses(given: Mapping[str, Any], stores: list[FeatureStore]) -> dict[str, float]:
    """Return the losses of a training for which none were given, with their weights.

    Raises UserError if the default losses do not fit the teacher's predictions: a decoder is
    trained on the outputs of decoders, any other student on those of encoders.
    """
    for store in stores:
        _check_direction(given, store)
    if _is_decoder(given):
        return _next_losses(stores, given.get("combine") == "outputs")
    store, task = stores[0], stores[0].task
    states = not _is_static(given) and all(each.features.hidden for each in stores)
    if task and task.output_kind == "numbers":
        return dict(SCORE_LOSS)
    if task:
        gold = {"ce": 1.0} if has_gold(store) and task.output_kind == "one label" else {}
        return {"kl": 1.0, **gold, **(TASK_STATES_LOSS if states else {})}
    if store.features.embedding:
        return {**VECTOR_LOSS, **(STATES_LOSS if states else {})}
    if states:
        return dict(DEFAULT_LOSS)
    # Without states, `kl` gains .17 nats for a ModernBERT; in addition to states it costs .2 nats
    # (RESULTS, "What these three tables say").
    specs = [each.features.logits for each in stores]
    pieces = all(spec is not None and not spec.next_token for spec in specs)
    return {"mlm": 1.0, **({"kl": 1.0} if pieces else {})}


def _check_direction(given: Mapping[str, Any], store: FeatureStore) -> None:
    """Raise UserError for a decoder trained on an encoder's outputs, and for an encoder trained on
    a decoder's."""
    decoder, taught = _is_decoder(given), predicts_next(store)
    if taught is None or taught == decoder:
        return
    student = f"--student {given['student']}" if "student" in given else "the default --student"
    if decoder:
        raise UserError(
            f"{student}: is a decoder, but the teacher of {store.path} is not; choose HxLxA or"
            " bert:HxLxA, dump a decoder (teacher-dump --head causal), or give --loss (next=1"
            " trains on the text alone)"
        )
    raise UserError(
        f"{student}: is not a decoder, but the teacher of {store.path} is; give --student"
        " llama:256x4x4 or teacher:L, or give --loss (mlm=1,hidden=30 trains a masked LM on its"
        " states)"
    )


def predicts_next(store: FeatureStore) -> bool | None:
    """Return whether the outputs of a store's teacher predict next tokens, as a decoder's; None if
    that is unknown, or if it has no outputs."""
    features = store.features
    if features.logits:
        return features.logits.next_token
    if features.embedding:
        return False  # whatever the teacher is: the students of vectors are no decoders
    if store.task or not (features.hidden or features.attention):
        return None  # `plan/checks.py` compares the student with a task
    config = store.teacher_settings("config.json")
    own = config.get("architectures")
    if declared_head(own if isinstance(own, list) else ()) == "causal":
        return True
    kind = SHAPES.get(str(config.get("model_type")))
    return None if kind is None else kind.causal


def _next_losses(stores: list[FeatureStore], combined: bool) -> dict[str, float]:
    """Return the default losses of a decoder. `combined`: the stores count as one teacher.

    Raises UserError if no default loss can be computed from all stores.
    """
    every = [store.features for store in stores]
    specs = [each.logits for each in every if each.logits and each.logits.next_token]
    if len(specs) == len(every):
        # The mean of several teachers has no probability of the text, nor has an older store.
        observed = not combined and all(spec.has_text for spec in specs)
        return dict(NEXT_LOSS if observed else NEXT_PIECES_LOSS)
    if all(each.hidden for each in every):
        return dict(NEXT_STATES_LOSS)
    if any(store.task for store in stores):
        return {"next": 1.0}  # `plan/checks.py` refuses a decoder for a task
    raise UserError(
        f"--store {stores[-1].path}: the default losses of a decoder need logits of next tokens or"
        f" hidden states in {'it' if len(stores) == 1 else 'all of these stores'}; give --loss"
        " (next=1 trains on the text alone)"
    )


def _is_decoder(given: Mapping[str, Any]) -> bool:
    return "student" in given and parse_student(given["student"]).causal


def _is_static(given: Mapping[str, Any]) -> bool:
    return parse_student(given["student"]).kind == "static" if "student" in given else False
