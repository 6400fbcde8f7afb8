"""From the words of a command line to the options of a training: recipes, and what the store says
of its teacher and features."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

from store import FeatureStore, open_store
from student_train.data.gold_labels import has_gold
from student_train.settings.options import DEFAULT_LOSS, LENGTH, TrainOptions
from student_train.settings.recipe import find_recipe
from student_train.settings.stages import parse_values
from support.errors import UserError

AS_TEACHER = "teacher:"  # before a number of layers: of the teacher's width and heads
MODERNBERT = "modernbert"
HEADS = ("num_attention_heads", "n_heads", "n_head")  # as BERT calls them, DistilBERT, GPT-2
MIXED_VOCAB = "mixed-vocab"  # start and vocabulary both, of teacher-dump mixed-vocab


def options_of(arguments: dict[str, Any]) -> TrainOptions:
    """TrainOptions from those words of the command line that were given.

    They win over those of a recipe, in all its stages. The default losses are those that the store
    can serve.
    """
    given = {name: value for name, value in arguments.items() if value not in (None, ())}
    given["store"], *others = given["store"]
    given["others"] = tuple(others)
    name = given.pop("recipe", None)
    given = parse_values(given)
    if name:
        recipe = find_recipe(name)
        over = given.keys() | (LENGTH if LENGTH & given.keys() else set())
        stages = tuple(
            {key: value for key, value in stage.items() if key not in over}
            for stage in recipe.stages
        )
        plain = {key: value for key, value in recipe.options.items() if key not in over}
        needs = {**recipe.needs, "recipe": name}
        given = {**plain, "stages": stages, "needs": needs, **given}
    if given.get("init") == MIXED_VOCAB:
        given.setdefault("vocab", MIXED_VOCAB)
    if given.get("student", "").startswith(AS_TEACHER):
        given["student"] = _as_wide_as_teacher(given)
    if "loss" not in given:
        of_stages = [stage["loss"] for stage in given.get("stages", ()) if "loss" in stage]
        every = of_stages and len(of_stages) == len(given["stages"])
        given["loss"] = of_stages[-1] if every else _default_losses(given)
    return TrainOptions(**given).resolved()


def _as_wide_as_teacher(given: dict[str, Any]) -> str:
    with closing(_store(given)) as store:
        config = json.loads(store.teacher_file("config.json"))
        heads = next((config[name] for name in HEADS if name in config), 0)
        if not heads:
            raise UserError(
                f"--student {given['student']}: the teacher of {store.path} has no attention heads;"
                " give HxLxA"
            )
        # a student of its kind, whose layers can be cut out of it
        kind = f"{MODERNBERT}:" if config.get("model_type") == MODERNBERT else ""
        return f"{kind}{store.features.width}x{given['student'].removeprefix(AS_TEACHER)}x{heads}"


def _default_losses(given: dict[str, Any]) -> dict[str, float]:
    with closing(_store(given)) as store:
        features = store.features
        if features.task:
            return {"kl": 1.0, "ce": 1.0} if has_gold(store) else {"kl": 1.0}
        loss = dict(DEFAULT_LOSS) if features.hidden else {"mlm": 1.0}
        if features.logits and not features.logits.next_token and not features.hidden:
            loss["kl"] = 1.0
        return loss


def _store(given: dict[str, Any]) -> FeatureStore:
    return open_store(given["store"], allow_partial=given.get("allow_partial", False))
