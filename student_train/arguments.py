"""Turns the arguments of a command into TrainOptions. Values from the command line have priority,
then the recipe's, then defaults that depend on the store's teacher and features."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from typing import Any

from teachonce.checkpoints.declared import (
    declared_head,
    layers_of,
    stored_config,
    suggested_decoder,
)
from teachonce.store import FeatureStore
from teachonce.student_train.data.blocks import has_gold
from teachonce.student_train.data.vocabularies import has_teacher_tokenizer
from teachonce.student_train.losses.loss import Loss
from teachonce.student_train.losses.registry import find
from teachonce.student_train.model.decoder_sizes import Sizes, shape_of_folder
from teachonce.student_train.model.start_checks import (
    checked_folder,
    copies_layers,
    resolved_start,
)
from teachonce.student_train.plan.train_plan import Stores
from teachonce.student_train.settings.option_values import (
    AS_TEACHER,
    CUT_RATE,
    FOLDER,
    is_model_folder,
)
from teachonce.student_train.settings.options import TrainOptions, ruled_out
from teachonce.student_train.settings.recipe import find_recipe, recipe_record
from teachonce.student_train.settings.shapes import SHAPES, Shape, parse_student
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
from teachonce.support.option_types import plain
from teachonce.support.options import default_of, read_words

# In BERT, DistilBERT, GPT-2, XGLM and GPT-Neo.
HEADS = ("num_attention_heads", "n_heads", "n_head", "attention_heads", "num_heads")
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
    excluded = ruled_out(given)
    if name:
        given = _over_recipe(given, name, excluded)
    _fill_in(given, lambda: stores.opened)
    return TrainOptions(**given)


def with_store_defaults(options: TrainOptions, stores: Sequence[FeatureStore]) -> TrainOptions:
    """Set the options that were not given to the defaults of the command, which depend on the
    stores. Raises UserError like `checked_from`."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    given = {name: values[name] for name in options.given if values[name] is not None}
    _fill_in(given, lambda: stores)
    return replace(options, **{name: plain(value) for name, value in (values | given).items()})


def _fill_in(given: dict[str, Any], opened: Callable[[], Sequence[FeatureStore]]) -> None:
    """Set the defaults that depend on the stores, and the options that `--init mixed-vocab`,
    `--student teacher:L` and `--student DIR` imply."""
    if given.get("init") == MIXED_VOCAB:
        given.setdefault("vocab", MIXED_VOCAB)
    if given.get("student", "").startswith(AS_TEACHER):
        given["student"] = _student_like_teacher(given["student"], opened()[0])
    if is_model_folder(student := given.get("student", "")):
        option = f"--student {student}"
        shape = shape_of_folder(checked_folder(student, option), student, option)
        # A --vocab or --init that was given stays: `TrainOptions` refuses one that does not fit.
        for name, value in (("vocab", student), ("init", FOLDER + student)):
            given.setdefault(name, value)
        given["student"] = shape
    fill_in_defaults(given, opened)
    # The stores have now decided the student, and `TrainOptions` compares it with the losses.
    given.setdefault("student", plain(default_of(TrainOptions, "student")))


def _over_recipe(given: dict[str, Any], name: str, excluded: frozenset[str]) -> dict[str, Any]:
    """Return `given` with the options, stages and needs of the recipe `name`. Options in `given` or
    `excluded` are not taken from the recipe."""
    recipe = find_recipe(name)
    over = given.keys() | excluded
    options, *stages = (
        {key: value for key, value in table.items() if key not in over}
        for table in (recipe.options, *recipe.stages)
    )
    needs = {**recipe.needs, "recipe": name, "record": recipe_record(name, recipe)}
    return {**options, "stages": tuple(stages), "needs": needs, **given}


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
    # The student has the teacher's kind, so that --init can copy the teacher's layers. If students
    # cannot have this kind, the student predicts the same as the teacher: next or masked tokens.
    default_kind = "llama" if predicts_next(store) else "bert"
    model_type = str(config.get("model_type"))
    kind = model_type if model_type in SHAPES else default_kind
    if SHAPES[kind].causal:
        overrides = {"hidden_size": store.features.width, "num_attention_heads": heads}
        sizes = Sizes.of_config({**config, **overrides}, str(store.path))
        # The shape omits key-value heads if config.json omits them: it is part of the default
        # folder's name.
        grouped = bool(config.get("num_key_value_heads"))
        shape = sizes.shape(kind, int(number), grouped)
    else:
        shape = f"{kind}:{store.features.width}x{number}x{heads}"
    parse_student(shape, f"--student {student}, which is ")
    return shape


def fill_in_defaults(given: dict[str, Any], opened: Callable[[], Sequence[FeatureStore]]) -> None:
    """Set the options whose defaults depend on the student, the losses or the stores.

    opened: returns the open stores. It is called only if a default depends on them, because a store
        may not exist yet.

    If `student` is not given and the teacher is a decoder, the student becomes a decoder, unless
    losses were given and none of them compares next tokens. Raises UserError as `default_losses`
    does.
    """
    stages = given.get("stages", ())
    losses = _losses_in(given, *stages)
    of_next = not losses or any(loss.of_next for loss in losses)
    if of_next and "student" not in given and predicts_next(store := opened()[0]):
        given["student"] = suggested_decoder(stored_config(store))
    shape = _shape_in(given)
    # A decoder is also trained on the tokens of the text, which correspond to temperature 1, so the
    # teacher's distributions get temperature 1 as well. A decoder reads unmasked text, so the
    # teacher's states must be of unmasked text, too.
    if shape.causal:
        given.setdefault("temperature", NEXT_TEMPERATURE)
        given.setdefault("view", 0)
        own_rate = "lr" in given or given.get("optimizer") == "adadelta"
        if not own_rate and _is_cut(given, shape, opened):
            given["lr"] = CUT_RATE * shape.learning_rate
    if shape.kind == "static":
        given.setdefault("vocab", STATIC_VOCABULARY)
    if "loss" not in given:
        of_stages = [stage["loss"] for stage in stages if "loss" in stage]
        every = of_stages and len(of_stages) == len(stages)
        given["loss"] = of_stages[-1] if every else default_losses(given, opened())
    # Losses of text vectors compare each text with every other one in the batch: the number of
    # texts matters, not the number of tokens.
    sized = {"batch_texts", "batch_tokens"} & given.keys()
    of_vectors = any(loss.of_vectors for loss in _losses_in(given))
    if of_vectors and not (stages or sized) and opened()[0].features.embedding:
        given["batch_texts"] = VECTOR_TEXTS


def _is_cut(
    given: Mapping[str, Any], shape: Shape, opened: Callable[[], Sequence[FeatureStore]]
) -> bool:
    """Return whether a decoder begins with layers of its teacher or of another model."""
    how = given.get("init", default_of(TrainOptions, "init"))
    if how == "auto":
        how = resolved_start(how, shape, opened()[0])
    return copies_layers(how) and not how.startswith(FOLDER)


def _losses_in(*tables: Mapping[str, Any]) -> list[Loss]:
    """Return the losses that are given in tables of options. Raises UserError as `find` does."""
    # `find` loads a loss of another package: the defaults must not depend on an earlier training.
    return [loss for table in tables for name in table.get("loss", ()) for loss in find(name)]


def default_losses(given: Mapping[str, Any], stores: Sequence[FeatureStore]) -> dict[str, float]:
    """Return the losses of a training for which none were given, with their weights.

    Raises UserError if the default losses do not fit the teacher's predictions: a decoder is
    trained on the outputs of decoders, any other student on the outputs of encoders.
    """
    shape = _shape_in(given)
    for store in stores:
        _check_direction(given, shape.causal, store)
    if shape.causal:
        combined = given.get("combine") == "outputs"
        losses = _next_losses(stores, combined)
        vocab = given.get("vocab", default_of(TrainOptions, "vocab"))
        if has_teacher_tokenizer(vocab, stores, combined):
            losses.pop("next-inside", None)  # no token begins inside one of the teacher's
        return losses
    store, task = stores[0], stores[0].task
    states = shape.kind != "static" and all(store.features.hidden for store in stores)
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
    specs = [store.features.logits for store in stores]
    pieces = all(spec is not None and not spec.next_token for spec in specs)
    return {"mlm": 1.0, **({"kl": 1.0} if pieces else {})}


def _check_direction(given: Mapping[str, Any], decoder: bool, store: FeatureStore) -> None:
    """Raise UserError for a decoder trained on an encoder's outputs, and for an encoder trained on
    a decoder's outputs."""
    causal = predicts_next(store)
    if causal is None or causal == decoder:
        return
    student = f"--student {given['student']}" if "student" in given else "the default --student"
    if decoder:
        raise UserError(
            f"{student}: is a decoder, but the teacher of {store.path} is not; choose HxLxA or"
            " bert:HxLxA, dump a decoder (teacher-dump --head causal), or give --loss (next=1"
            " trains on the text alone)"
        )
    loss = "mlm=1 trains a masked LM on the text alone"
    if store.features.hidden:
        loss = "mlm=1,hidden=30 trains a masked LM on its states"
    raise UserError(
        f"{student}: is not a decoder, but the teacher of {store.path} is; give --student"
        f" {suggested_decoder(stored_config(store))} or teacher:L, or give --loss ({loss})"
    )


def predicts_next(store: FeatureStore) -> bool | None:
    """Return whether the outputs in a store predict next tokens, as a decoder's outputs do. Return
    None if this is unknown, for a store of a task, and for a store without outputs."""
    features = store.features
    if features.logits:
        return features.logits.next_token
    if features.embedding:
        return False  # whatever the teacher is: the students of vectors are not decoders
    if store.task or not (features.hidden or features.attention):
        return None  # `plan/checks.py` compares the student with a task
    config = store.teacher_settings("config.json")
    architectures = config.get("architectures")
    if declared_head(architectures if isinstance(architectures, list) else ()) == "causal":
        return True
    kind = SHAPES.get(str(config.get("model_type")))
    return None if kind is None else kind.causal


def _next_losses(stores: Sequence[FeatureStore], combined: bool) -> dict[str, float]:
    """Return the default losses of a decoder. `combined`: the stores count as one teacher.

    Raises UserError if no default loss can be computed from all stores.
    """
    features = [store.features for store in stores]
    specs = [f.logits for f in features if f.logits and f.logits.next_token]
    if len(specs) == len(features):
        # Neither the mean of several teachers nor an older store has the probabilities of the
        # text's tokens.
        observed = not combined and all(spec.has_text for spec in specs)
        return dict(NEXT_LOSS if observed else NEXT_PIECES_LOSS)
    if all(f.hidden for f in features):
        return dict(NEXT_STATES_LOSS)
    if any(store.task for store in stores):
        return {"next": 1.0}  # `plan/checks.py` refuses a decoder for a task
    raise UserError(
        f"--store {stores[-1].path}: the default losses of a decoder need logits of next tokens or"
        f" hidden states in {'it' if len(stores) == 1 else 'all of these stores'}; give --loss"
        " (next=1 trains on the text alone)"
    )


def _shape_in(given: Mapping[str, Any]) -> Shape:
    return parse_student(given.get("student", default_of(TrainOptions, "student")))
