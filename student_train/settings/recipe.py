"""Recipes: settings and stages of a training in TOML files, of this package or of the user."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from teachonce.student_train.settings.option_fields import COMMAND
from teachonce.student_train.settings.options import TrainOptions, check_stage, ruled_out
from teachonce.support.errors import UserError, suggest
from teachonce.support.options import options_of, read_values, scoped
from teachonce.support.parsing import read_toml

FOLDER = Path(__file__).with_name("recipes")
KEYS = {"source", "needs", "options", "recipes"}
OF_RECIPE = {"about", "needs", "options", "stages"}
NEEDS = {
    "stores": int,
    "masked": bool,
    "hidden": str,
    "attention": str,
    "model": bool,
    "tied": bool,
}


@dataclass(frozen=True)
class Recipe:
    """Holds the options and stages of a recipe, a one-line description and its source.

    needs: what the recipe requires of the stores.
        stores: their number.
        masked: whether they need masked views.
        hidden, attention: the required form: `mean` accepts a dump with `mean` or `mean:0`,
            `mean:0` and `groups:N` accept the same form, and `layer:I`, with the letter I, accepts
            any single layer.
        model: whether `--init layers:...` needs the folder of another model.
        tied: whether the mixed-vocabulary training in the store used `--tie`.
    """

    name: str
    about: str
    source: str
    options: Mapping[str, Any]
    stages: tuple[Mapping[str, Any], ...]
    needs: Mapping[str, Any]


def find_recipe(name: str) -> Recipe:
    """Find a built-in recipe by name, or `FILE.toml:NAME` in a user's file.

    `FILE.toml` alone is enough if the file has a single recipe. Raises UserError for an unknown
    name and for a file that has no recipes.
    """
    path, colon, inner = name.rpartition(":")
    if not colon or not path.endswith(".toml"):
        path, inner = (name, "") if name.endswith(".toml") else ("", name)
    recipes = read_recipes(Path(path)) if path else all_recipes()
    if path and not inner and len(recipes) == 1:
        return next(iter(recipes.values()))
    if inner not in recipes:
        where = f"{path}: " if path else ""
        one = f"expected one of {', '.join(recipes)}"
        remedy = one if path else "--recipe list prints all of them"
        near = suggest(inner, recipes)
        raise UserError(f"--recipe {name}: {where}no recipe {inner!r}; {near}{remedy}")
    return recipes[inner]


def recipe_record(name: str, recipe: Recipe) -> dict[str, str]:
    """Return name, description and source of a recipe for the record of a training, without the
    folder of its file. `name` is as given."""
    source = recipe.source
    if source.endswith(".toml"):  # the file names no source, so this is its path as given
        source = PurePath(source).name
    return {"name": PurePath(name).name, "about": recipe.about, "source": source}


# Reading and checking all of them takes 60 ms, and a command does it several times.
@functools.cache
def all_recipes() -> Mapping[str, Recipe]:
    """Read the recipes of this package, by name."""
    return {
        name: recipe
        for path in sorted(FOLDER.glob("*.toml"))
        for name, recipe in read_recipes(path).items()
    }


def listed() -> str:
    """Return the text of `--recipe list`: a line for each recipe, under the paper it is from."""
    lines: list[str] = []
    recipes = all_recipes()
    width = max(map(len, recipes))
    for name, recipe in recipes.items():
        if recipe.source not in lines:
            lines.append(recipe.source)
        lines.append(f"  {name:{width}}  {recipe.about}")
    return "\n".join(lines)


def read_recipes(path: Path) -> dict[str, Recipe]:
    """Read a TOML file of recipes; returns them by name.

    Raises UserError, which names the file and the key, if a recipe is invalid.
    """
    content = read_toml(path)
    _check_keys(content, KEYS, str(path))
    parsed = {}
    shared, recipes = content.get("options", {}), content.get("recipes")
    if not isinstance(shared, dict) or not isinstance(recipes, dict) or not recipes:
        raise UserError(f"{path}: expected tables [options] and [recipes.NAME]")
    for name, recipe in recipes.items():
        where = f"{path}, recipe {name}"
        if not isinstance(recipe, dict):
            raise UserError(f"{where}: expected a table [recipes.{name}]")
        _check_keys(recipe, OF_RECIPE, where)
        values, stages = recipe.get("options", {}), recipe.get("stages", [])
        listed = isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)
        if not isinstance(values, dict) or not listed:
            raise UserError(f"{where}: expected a table of options, and stages that are tables")
        over = ruled_out(values)
        options = _options({k: v for k, v in shared.items() if k not in over} | values, where)
        typed = tuple(
            _stage(stage, f"{where}, stage {number}") for number, stage in enumerate(stages, 1)
        )
        needs = _needs(content.get("needs", {}), recipe.get("needs", {}), where)
        about, source = str(recipe.get("about", "")), str(content.get("source", path))
        parsed[name] = Recipe(name, about, source, options, typed, needs)
    return parsed


def _check_keys(table: Mapping[str, Any], allowed: set[str], where: str) -> None:
    if unknown := sorted(table.keys() - allowed):
        raise UserError(
            f"{where}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(allowed))}"
        )


def _needs(shared: object, recipe_needs: object, where: str) -> dict[str, Any]:
    if not isinstance(shared, dict) or not isinstance(recipe_needs, dict):
        raise UserError(f"{where}: needs: expected a table")
    needs = shared | recipe_needs
    _check_keys(needs, set(NEEDS), f"{where}: needs")
    for name, value in needs.items():
        # Not isinstance, for which true is an int.
        if type(value) is not NEEDS[name]:
            raise UserError(f"{where}: needs: {name}: expected {NEEDS[name].__name__}")
    return needs


def _stage(stage: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = {name: value for name, value in stage.items() if name != "unfreeze"}
    check_stage(stage, where)
    return {**stage, **read_values(TrainOptions, values, where, values)}


def _options(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    allowed = options_of(TrainOptions).keys() - scoped(TrainOptions, COMMAND)
    if unknown := sorted(values.keys() - allowed):
        raise UserError(
            f"{where}: {unknown[0]} is not an option of student-train; see student-train --help"
        )
    return read_values(TrainOptions, values, where, allowed)
