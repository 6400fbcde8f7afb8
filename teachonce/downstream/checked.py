"""What was asked, checked as far as that takes no torch: words of a command line, and the tables of
`student-sweep --downstream`, which `main` reads for a sweep in a process of its own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from teachonce.downstream.early import refuse_early
from teachonce.downstream.options import OPTIONS, TASKS, Asked
from teachonce.downstream.parameters import parameters
from teachonce.downstream.tasks.example_rows import check_columns
from teachonce.support.errors import UserError, nearest
from teachonce.support.options import flag_of, is_flag, read_words, words_of

OF_SWEEP = ("model", "out", "json", "runs")
"""Options that a sweep gives itself."""
STUDENT = "a student that is not trained yet"


def asked_of(words: Mapping[str, Any]) -> Asked:
    """Make what was asked of what click has read. Raises UserError for words that do not fit
    together."""
    given = {name: value for name, value in words.items() if value not in (None, ())}
    return Asked(**read_words(Asked, given))


def check(asked: Asked, models: Sequence[str] | None = None) -> None:
    """Raise UserError for files and models that cannot serve the task, as far as they tell early.
    `models` are those to look at, None for all that were asked for."""
    if len(asked.test) > 1:
        from teachonce.downstream import score_tables

        score_tables.splits_to_test(asked.test)  # refuses a file that is given twice
    refuse_early(asked, models)
    for path in (*asked.train, *([asked.dev] if asked.dev else []), *asked.test):
        check_columns(path, asked.task, asked.columns())


def check_tables(tasks: Mapping[str, Any], models: Mapping[str, str]) -> None:
    """Raise UserError, naming table and key, for a table [tasks.NAME] of a sweep that `downstream`
    would refuse, and for a model of [models] that it would not score."""
    every = {name: _check_task(name, table) for name, table in tasks.items()}
    for asked in every.values():
        for name, model in models.items():
            try:
                refuse_early(asked, [model])
            except UserError as error:
                raise UserError(f"[models] {name}: {error}") from None


def _check_task(name: str, table: Any) -> Asked:
    where = f"[tasks.{name}]"
    if not isinstance(table, dict) or not isinstance(table.get("task"), str):
        raise UserError(f'{where}: expected task = "classify", or another of {", ".join(TASKS)}')
    for key, value in table.items():
        _check_key(where, key, value)
    words = [*words_of(table), "--model", STUDENT, "--out", "scores"]
    try:
        command = click.Command("downstream", params=parameters())
        asked = asked_of(command.make_context("downstream", words).params)
        check(asked, ())
    except click.BadParameter as error:
        key = error.param.name if error.param else ""
        raise UserError(f"{where} {key} {table.get(str(key))}: {error.message}") from None
    except click.UsageError as error:
        raise UserError(f"{where} {_as_keys(error.format_message(), table)}") from None
    except UserError as error:
        raise UserError(f"{where} {_as_keys(str(error), table)}") from None
    return asked


def _check_key(where: str, key: str, value: Any) -> None:
    """Raise UserError for a key that is no option here, and for a value of another kind."""
    known = sorted(OPTIONS.keys() - set(OF_SWEEP))
    name = key.replace("-", "_")
    if name not in known:
        given = "the sweep gives it itself; " if name in OF_SWEEP else nearest(name, known)
        raise UserError(
            f"{where} {key} is no option here; {given}there are {', '.join(known)}, see downstream"
            " --help"
        )
    values, flag = value if isinstance(value, list) else [value], is_flag(Asked, name)
    if any(not isinstance(each, str | int | float) for each in values) or not values:
        raise UserError(f"{where} {key}: expected a text, a number or a list of them")
    if any(isinstance(each, bool) != flag for each in values):
        told = "true or false" if flag else "a text or a number"
        raise UserError(f"{where} {key} {json.dumps(value)}: expected {told}")


def _as_keys(problem: str, table: Mapping[str, Any]) -> str:
    """Name keys in place of options of a command line, and the key of a file that is named."""
    for key, value in table.items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, str) and re.match(re.escape(v) + "[:,]", problem) for v in values):
            problem = f"{key} {problem}"
    spelt = {flag_of(name): name for name in OPTIONS}
    return re.sub(r"--[a-z][a-z-]*", lambda found: spelt.get(found[0], found[0]), problem)


def main() -> None:
    """Read {"tasks": ..., "models": ...} from stdin; print as JSON what is wrong, or ""."""
    given, problem = json.load(sys.stdin), ""
    try:
        check_tables(given["tasks"], given["models"])
    except UserError as error:
        problem = str(error)
    print(json.dumps(problem))
