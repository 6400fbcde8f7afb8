"""The parameters of `downstream`, and what can be checked before torch is imported.

`student-sweep` checks its tables of tasks here, in a process of its own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from teachonce.checkpoints.declared import check_declared, config_of
from teachonce.checkpoints.names import is_sentence_folder, resolve_vectors
from teachonce.downstream.options import (
    FINE_TUNED,
    KIND,
    MTEB,
    OPTION,
    OPTIONS,
    PREFIX,
    TASKS,
    TRAINED,
    Asked,
    as_paths,
)
from teachonce.downstream.settings import KINDS
from teachonce.downstream.tasks.example_rows import check_columns
from teachonce.student_train.settings.shapes import parse_student
from teachonce.support.errors import UserError, suggest
from teachonce.support.extras import check_library
from teachonce.support.options import (
    click_option,
    default_of,
    flag_of,
    is_flag,
    options_of,
    read_words,
    words_of,
)
from teachonce.training.optimizer import check_optimizer
from teachonce.training.trackers import check_installed

GROUPS = {
    "The ten that matter most": (
        *("task", "model", "train", "dev", "test", "out", "as_is", "save", "epochs", "lr"),
    ),
    "Training": (
        *("seeds", "seed", "steps", "batch_size", "accumulate", "optimizer", "warmup"),
        *("max_length", "stride", "precision", "limit", "per_class"),
    ),
    "Masked LM": ("vocab", "mask_prob", "batch_tokens", "evaluate_every", "resume"),
    "Labels": ("unseen_labels", "pieces"),
    "Columns": (
        *("text_column", "label_column", "text_a_column", "text_b_column", "score_column"),
        *("question_column", "context_column", "answer_column"),
    ),
    "Rankings and speed": (
        *("teacher", "documents_by", "candidates", "candidates_by", "depth", "repeat"),
    ),
    "Output": ("log", "json"),
}
"""Headings of --help, and the options under each."""


def parameters() -> list[click.Parameter]:
    """Every option of `Asked` for the command, and RUN."""
    found: list[click.Parameter] = []
    for name in OPTIONS:
        if name != "runs":
            plural: dict[str, Any] = {"metavar": "PATH"} if OPTIONS[name].read is as_paths else {}
            if name == "task":
                plural = {"metavar": "[" + "|".join(TASKS).replace(MTEB, f"{MTEB}:NAME") + "]"}
            found.append(click_option(Asked, name, help=_help(name), **plural))
    runs = click.Argument(["runs"], nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
    return [*found, runs]


def _help(name: str) -> str:
    """Which tasks take it (unless every training does), what it is, default and range."""
    about = OPTIONS[name]
    tasks = [task for task in TASKS if task in about.scope]
    if set(FINE_TUNED) <= set(tasks):
        tasks = ["fine-tuning", *(task for task in tasks if task not in FINE_TUNED)]
    told = "" if set(TRAINED) <= about.scope else f"{', '.join(tasks)}: "
    default = about.default_text or _default(name)
    extra = [f"default: {default}"] if default else []
    extra += [about.within.expected] if about.within else []
    return f"{told}{about.help}" + (f"  [{'; '.join(extra)}]" if extra else "")


def _default(name: str) -> str:
    """What the kinds of work take where nothing is given."""
    kinds: dict[Any, list[str]] = {}
    for kind, settings in KINDS.items():
        default = default_of(settings, name) if name in options_of(settings) else None
        if default is not None and default is not False:
            kinds.setdefault(default, []).append(kind)
    if len(kinds) == 1:
        return "".join(map(_number, kinds))
    return ", ".join(f"{' and '.join(some)} {_number(value)}" for value, some in kinds.items())


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


HEADS = {"pos": "tagging", "ner": "tagging", "classify": "classification", "pair": "classification"}


def refuse_early(asked: Asked, models: Sequence[str] | None) -> None:
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
            if str(path).startswith("hf:"):
                raise UserError(
                    f"{path}: only teacher-dump reads the hub; save the data set in Python:"
                    " load_dataset(NAME, split=SPLIT).save_to_disk(FOLDER), and give the folder"
                )
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
        given = "the sweep gives it itself; " if name in OF_SWEEP else suggest(name, known)
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
