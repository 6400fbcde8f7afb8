"""The parameters of `downstream`, and the checks that need no torch.

`student-sweep` checks its tables of tasks here, in a separate process that must not import torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from teachonce.checkpoints.declared import check_declared, config_of, declared_kind
from teachonce.checkpoints.names import resolve_vectors
from teachonce.downstream.options import (
    FINE_TUNED,
    LM,
    LM_EVAL,
    OF_TEXTS,
    OPTION,
    OPTIONS,
    SEARCHES,
    TASK_FORMS,
    TASK_LIBRARIES,
    TASKS,
    TRAINED,
    DownstreamOptions,
    read_paths,
    splits_to_test,
)
from teachonce.downstream.search.collections import read_collection
from teachonce.downstream.settings import KINDS
from teachonce.downstream.tasks.example_rows import check_columns
from teachonce.downstream.text_lines import iterate_lines
from teachonce.student_train.settings.shapes import SCRATCH, parse_student
from teachonce.support.click_types import LocalPath
from teachonce.support.errors import UserError, suggest, suggest_path
from teachonce.support.options import (
    click_option,
    command_words,
    default_of,
    flag_of,
    is_flag,
    options_of,
    read_words,
)
from teachonce.support.packages import check_library
from teachonce.teacher_dump.corpus.tables import is_table
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
    "Rankings, next tokens and speed": (
        *("teacher", "store", "documents_by", "candidates", "candidates_by", "depth", "repeat"),
    ),
    "Output": ("log", "json"),
}
"""Headings of --help, and the options under each."""


def parameters() -> list[click.Parameter]:
    """Return the parameters of the command: the options of `DownstreamOptions`, and the argument
    RUN."""
    options: list[click.Parameter] = []
    for name in OPTIONS:
        if name != "runs":
            plural: dict[str, Any] = {"metavar": "PATH"} if OPTIONS[name].read is read_paths else {}
            if name == "task":
                plural = {"metavar": f"[{'|'.join(TASK_FORMS)}]"}
            options.append(click_option(DownstreamOptions, name, help=_help(name), **plural))
    runs = click.Argument(["runs"], nargs=-1, type=LocalPath(), metavar="[RUN]...")
    return [*options, runs]


def _help(name: str) -> str:
    """Return the help of an option with its default and range, after the names of the tasks that
    accept it; no task is named if every training accepts the option."""
    about = OPTIONS[name]
    tasks = [task for task in TASKS if task in about.scope]
    if set(FINE_TUNED) <= set(tasks):
        tasks = ["fine-tuning", *(task for task in tasks if task not in FINE_TUNED)]
    prefix = "" if set(TRAINED) <= about.scope else f"{', '.join(tasks)}: "
    default = about.default_text or _default(name)
    extra = [f"default: {default}"] if default else []
    extra += [about.within.expected] if about.within else []
    return f"{prefix}{about.help}" + (f"  [{'; '.join(extra)}]" if extra else "")


def _default(name: str) -> str:
    """Return, as text, the default of an option for each kind of task."""
    kinds: dict[Any, list[str]] = {}
    for kind, settings in KINDS.items():
        default = default_of(settings, name) if name in options_of(settings) else None
        if default is not None and default is not False:
            kinds.setdefault(default, []).append(kind)
    if len(kinds) == 1:
        return "".join(map(_number, kinds))
    return ", ".join(f"{' and '.join(names)} {_number(value)}" for value, names in kinds.items())


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


HEADS = {
    **dict.fromkeys(("pos", "ner"), "tagging"),
    **dict.fromkeys(("classify", "pair"), "classification"),
    "mlm": "mlm",
}


def check_inputs(options: DownstreamOptions, models: Sequence[str] | None) -> None:
    """Check the files, models and libraries of a task, without loading any of them.

    models: models to check in place of `options.model`; None for `options.model`.

    Raises UserError for missing files, folders, trackers and libraries, and for a model from
    scratch with an invalid size.
    """
    check_installed(options.log)
    if module := TASK_LIBRARIES.get(options.kind):
        check_library(module, options.kind, f"--task {options.task}")
    if options.task in FINE_TUNED and not options.as_is and options.dev is None:
        raise UserError(f"--task {options.task} needs --dev: the best epoch is chosen on it")
    files = [path for path in (*options.train, options.dev, *options.test) if path]
    for path in filter(None, (*files, options.candidates, options.store)):
        if not path.exists():
            if str(path).startswith("hf:"):
                raise UserError(
                    f"{path}: only teacher-dump reads the hub; save the data set in Python:"
                    " load_dataset(NAME, split=SPLIT).save_to_disk(FOLDER), and give the folder"
                )
            raise UserError(f"{path}: no such file or folder; {suggest_path(path)}check the path")
    if options.kind in OF_TEXTS and options.text_column and not any(map(is_table, files)):
        needed = "a table (.csv, .tsv, .jsonl, ...) that has the column"
        raise UserError(f"--text-column needs {needed}; give one, or leave the option out")
    other_models = filter(None, (options.teacher, options.documents_by, options.candidates_by))
    names = options.model if models is None else models
    if options.vocab and not any(name.startswith(SCRATCH) for name in names):
        raise UserError(
            "--vocab needs --model scratch:HxLxA: a checkpoint has a vocabulary already"
        )
    for name in (*names, *other_models):
        if options.task == "mlm" and name.startswith(SCRATCH):
            shape = parse_student(name.removeprefix(SCRATCH), OPTION)
            if shape.causal or shape.kind == "static":
                raise UserError(
                    f"--model {name}: a {shape.kind} student has no masked-LM head; give"
                    f" {SCRATCH}HxLxA, {SCRATCH}bert:HxLxA or {SCRATCH}bilstm:E,H"
                )
        else:
            _check_model(options, name)


NO_MASKED = "give a ...ForMaskedLM, or train one (`downstream --task mlm` without --as-is)"
SCORE_DECODER = "score its next tokens with `--task lm`"
NO_DECODER = "give a decoder (...ForCausalLM), or score a masked LM with `--task mlm --as-is`"


def _check_model(options: DownstreamOptions, name: str) -> None:
    """Raise UserError if the model `name` is missing, or is a static model and the task needs more
    than vectors of texts. With `--as-is`, also raise it if the model's config.json does not declare
    the head that the task needs."""
    model = resolve_vectors(name)
    config, remedy = config_of(model), ""
    if (
        options.task in TRAINED
        and options.task != "sts"
        and config.get("architectures") == ["StaticModel"]
    ):
        raise UserError(
            f"model {name}: is a static model, which gives vectors of texts only; score it with"
            " `downstream --task sts --as-is`, or with --task retrieval, rerank or mteb:NAME"
        )
    if options.kind in (LM, LM_EVAL):
        check_declared(model, config, "causal", NO_DECODER)
    if options.as_is and options.task in HEADS:
        if options.task == "mlm":
            remedy = SCORE_DECODER if declared_kind(config) == "causal" else NO_MASKED
        check_declared(model, config, HEADS[options.task], remedy)


OF_SWEEP = ("model", "out", "json", "runs")
"""Options that a sweep sets itself."""
STUDENT = "a student that is not trained yet"


def read_options(values: Mapping[str, Any]) -> DownstreamOptions:
    """Make the options from the values that click parsed. Raises UserError for contradictions."""
    given = {name: value for name, value in values.items() if value not in (None, ())}
    return DownstreamOptions(**read_words(DownstreamOptions, given))


def check_task(options: DownstreamOptions, models: Sequence[str] | None = None) -> None:
    """Check a task as `check_inputs` does, and check its files: the columns of a table, the queries
    of a collection, the first text of any other file. Raises UserError, also for a --test file that
    is given twice."""
    splits_to_test(options.test)
    check_inputs(options, models)
    for path in filter(None, (*options.train, options.dev, *options.test)):
        if options.kind in ("mlm", LM):
            # The first text alone, because a file may have gigabytes.
            next(iterate_lines(path, options.text_column))
        elif options.kind in SEARCHES:
            read_collection(path)
        else:
            check_columns(path, options.task, options.columns())


def check_tables(tasks: Mapping[str, Any], models: Mapping[str, str]) -> None:
    """Check the tables [tasks.NAME] and [models] of a sweep, as name -> content. Raises UserError,
    which names table and key, if `downstream` would refuse a task or a model."""
    every = {name: _check_task(name, table) for name, table in tasks.items()}
    for options in every.values():
        for name, model in models.items():
            try:
                check_inputs(options, [model])
            except UserError as error:
                raise UserError(f"[models] {name}: {error}") from None


def _check_task(name: str, table: Any) -> DownstreamOptions:
    where = f"[tasks.{name}]"
    if not isinstance(table, dict) or not isinstance(table.get("task"), str):
        raise UserError(f'{where}: expected task = "classify", or another of {", ".join(TASKS)}')
    for key, value in table.items():
        _check_key(where, key, value)
    arguments = [*command_words(table), "--model", STUDENT, "--out", "scores"]
    try:
        # Parsed by click as the command line is, so that ranges and choices are checked, too.
        command = click.Command("downstream", params=parameters())
        options = read_options(command.make_context("downstream", arguments).params)
        check_task(options, ())
    except click.BadParameter as error:
        key = error.param.name if error.param else ""
        raise UserError(f"{where} {key} {table.get(str(key))}: {error.message}") from None
    except click.UsageError as error:
        raise UserError(f"{where} {_as_keys(error.format_message(), table)}") from None
    except UserError as error:
        raise UserError(f"{where} {_as_keys(str(error), table)}") from None
    return options


def _check_key(where: str, key: str, value: Any) -> None:
    """Raise UserError for an unknown key, and for a value of the wrong type."""
    options = sorted(OPTIONS.keys() - set(OF_SWEEP))
    name = key.replace("-", "_")
    if name not in options:
        hint = "the sweep sets it itself; " if name in OF_SWEEP else suggest(name, options)
        raise UserError(
            f"{where} {key} is not an option here; {hint}options are {', '.join(options)}, see"
            " downstream --help"
        )
    values, flag = value if isinstance(value, list) else [value], is_flag(DownstreamOptions, name)
    if any(not isinstance(item, str | int | float) for item in values) or not values:
        raise UserError(f"{where} {key}: expected a string, a number or a list of these")
    # A bool passes the check above, as it is an int in Python.
    if any(isinstance(item, bool) != flag for item in values):
        expected = "true or false" if flag else "a string or a number"
        raise UserError(f"{where} {key} {json.dumps(value)}: expected {expected}")


def _as_keys(problem: str, table: Mapping[str, Any]) -> str:
    """Replace each option in a message (`--max-length`) by its key in the table. If the message
    begins with a value of the table, such as a file, put the key of this value in front."""
    for key, value in table.items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, str) and re.match(re.escape(v) + "[:,]", problem) for v in values):
            problem = f"{key} {problem}"
    spelt = {flag_of(name): name for name in OPTIONS}
    return re.sub(r"--[a-z][a-z-]*", lambda match: spelt.get(match[0], match[0]), problem)


def main() -> None:
    """Read {"tasks": ..., "models": ...} from stdin; print the error as a JSON string, or ""."""
    request, problem = json.load(sys.stdin), ""
    try:
        check_tables(request["tasks"], request["models"])
    except UserError as error:
        problem = str(error)
    print(json.dumps(problem))
