"""The options of `downstream`: what each may be, which tasks take it and need it, its default.

`Asked` has every option of the command line. The settings of a kind of work (`settings.py`) take
theirs from it and add a default. The command, its --help (`checked.py`) and the refusals follow
from these fields, so that Python refuses what the command line refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from teachonce.checkpoints.names import ALIASES
from teachonce.support.errors import UserError, suggest
from teachonce.support.options import (
    INNER_SHARE,
    KEY,
    POSITIVE,
    SHARE,
    Option,
    Range,
    at_least,
    check_value,
    check_values,
    flag_of,
    options_of,
)
from teachonce.training.optimizer import OPTIMIZERS
from teachonce.training.trackers import TRACKERS, check_known, parse_trackers

Settings = TypeVar("Settings")

SCORED = ("pair", "sts")
FINE_TUNED = ("pos", "ner", "classify", *SCORED, "qa")
TRAINED = ("mlm", *FINE_TUNED)
SEARCHES = ("retrieval", "rerank")
MTEB = "mteb"
"""Stands in scopes for the tasks `mteb:NAME` of the package mteb."""
UNTRAINED = (*SEARCHES, MTEB)
"""Tasks that score models as they are, and train none."""
TASKS = (*TRAINED, *UNTRAINED, "speed", "table")
WORDS = tuple(f"{task}:" if task == MTEB else task for task in TASKS)
LABELLED = ("pos", "ner", "classify")
AS_IS = "as-is"
"""Stands in a scope beside the tasks: the option may be given together with --as-is."""
COLUMN = "_column"  # ends the names of options that name columns
SHORTEST = 8
"""Tokens of the shortest --max-length."""
PREFIX = "scratch:"
OPTION = f"--model {PREFIX}"
KIND = "modernbert"  # of a model from scratch that names none
CONTRADICTING = (
    ("steps", "epochs"),
    ("batch_size", "batch_tokens"),
    ("limit", "per_class"),
    ("text_column", "text_a_column"),
    ("text_column", "text_b_column"),
    ("candidates", "candidates_by"),
)


@dataclass(frozen=True)
class TaskOption(Option):
    """An option whose `scope` are the tasks that take it, and AS_IS.

    needed: the tasks (or AS_IS) that cannot do without it.
    several: the tasks (or AS_IS) that take more than one value of it.
    """

    needed: frozenset[str] = frozenset()
    several: frozenset[str] = frozenset()


def _asked(
    help: str,
    tasks: Iterable[str],
    *,
    default: Any = None,
    needed: Iterable[str] = (),
    several: Iterable[str] = (),
    **about: Any,
) -> Any:
    """A field of `Asked`; `about` has the other fields of `Option`."""
    found = TaskOption(
        help,
        scope=frozenset(tasks),
        needed=frozenset(needed),
        several=frozenset(several),
        repeated=bool(several),
        **about,
    )
    return dataclasses.field(default=default, metadata={KEY: found})


def _flag(help: str, tasks: Iterable[str], flag: str) -> Any:
    """A field of `Asked` that is given or not."""
    return _asked(help, tasks, default=False, flag=flag)


def _column(role: str, *tasks: str) -> Any:
    """A field of `Asked` with the name of the column that holds `role`."""
    return _asked(f"Name of the column, where it is not {role}.", (*tasks, AS_IS))


def as_paths(words: Sequence[str | Path]) -> tuple[Path, ...]:
    return tuple(map(Path, words))


def _check_task(task: str) -> None:
    """UserError for what is none of TASKS, and for MTEB without a name or a name elsewhere."""
    kind, _, name = task.partition(":")
    if kind not in TASKS or bool(name) != (kind == MTEB):
        known = ", ".join(f"{each}:NAME" if each == MTEB else each for each in TASKS)
        raise UserError(f"--task {task}: {suggest(kind, TASKS)}expected one of {known}")


@dataclass(frozen=True)
class Asked:
    """What a command line asks for. None, () or False: not given."""

    task: str = _asked("What to do.", TASKS, required=True, words=WORDS, check=_check_task)
    runs: tuple[Path, ...] = _asked(
        "Finished runs.", ["table"], default=(), needed=["table"], several=["table"], flag="a RUN"
    )
    model: tuple[str, ...] = _asked(
        "Folder, hub id, alias (rubert-base, minilm) or scratch:HxLxA. Repeatable for speed,"
        " retrieval, rerank, mteb and --as-is.",
        [*TRAINED, *UNTRAINED, "speed", AS_IS],
        default=(),
        needed=[*TRAINED, *UNTRAINED, "speed", AS_IS],
        several=[*UNTRAINED, "speed", AS_IS],
        words=(*ALIASES, PREFIX),
        paths=True,
    )
    train: tuple[Path, ...] = _asked(
        "Training examples. Repeatable for mlm.",
        TRAINED,
        default=(),
        needed=TRAINED,
        several=["mlm"],
        read=as_paths,
    )
    dev: Path | None = _asked(
        "Held-out examples.", TRAINED, default_text="mlm: a hundredth of the lines of --train"
    )
    test: tuple[Path, ...] = _asked(
        "Report this as well. Repeatable, e.g. a file for each language: each of them and their"
        " mean. speed: single texts. retrieval, rerank: folders of corpus.jsonl, queries.jsonl and"
        " qrels.tsv.",
        [*TRAINED, *SEARCHES, "speed", AS_IS],
        default=(),
        needed=[*SEARCHES, AS_IS],
        several=[*TRAINED, *SEARCHES, AS_IS],
        read=as_paths,
        default_text="speed: random tokens",
    )
    out: Path | None = _asked(
        "A new folder. speed and table do not need it.",
        [*TASKS, AS_IS],
        needed=[*TRAINED, *UNTRAINED, AS_IS],
    )
    seeds: int | None = _asked(
        "Number of runs; mlm saves several in OUT/seed-N.",
        TRAINED,
        within=at_least(1),
        default_text="mlm 1, fine-tuning 3",
    )
    seed: int | None = _asked(
        "The (first) seed.",
        [*TRAINED, "speed"],
        within=Range(f"0 to {2**32 - 1}", low=0, high=2**32 - 1),
    )
    steps: int | None = _asked("Optimiser steps.", TRAINED, within=at_least(1))
    epochs: int | None = _asked("Passes over the training examples.", TRAINED, within=at_least(1))
    batch_size: int | None = _asked("Sequences.", [*TRAINED, "speed"], within=at_least(1))
    batch_tokens: int | None = _asked("Instead of --batch-size.", ["mlm"], within=at_least(1))
    lr: float | None = _asked(
        "Peak learning rate.",
        TRAINED,
        within=POSITIVE,
        default_text="mlm 2e-4 (from scratch 1e-3), fine-tuning 5e-5 (less than 384 wide 5e-4,"
        " BiLSTMs 3e-3, adadelta 1)",
    )
    accumulate: int | None = _asked(
        "Batches of one optimiser step.", FINE_TUNED, within=at_least(1)
    )
    optimizer: str | None = _asked(
        "lamb (You et al. 2020): for large batches; needs `pip install pytorch-optimizer`. adadelta"
        " (Zeiler 2012).",
        FINE_TUNED,
        choices=OPTIMIZERS,
    )
    warmup: float | None = _asked(
        "Share of the steps in which the learning rate rises.",
        FINE_TUNED,
        within=SHARE,
    )
    max_length: int | None = _asked(
        "Tokens; all but mlm cut it to what the model takes, which retrieval, rerank and folders of"
        " sentence-transformers take where none is given.",
        [*TRAINED, *UNTRAINED, "speed", AS_IS],
        within=at_least(SHORTEST),
        default_text="128, qa 384, speed 512",
    )
    vocab: str | None = _asked("From scratch: pieces of its WordPiece, e.g. 30k.", ["mlm"])
    mask_prob: float | None = _asked(
        "Share of tokens masked in training; validation always masks 0.15.",
        ["mlm"],
        within=INNER_SHARE,
    )
    evaluate_every: int | None = _asked("Steps between validations.", ["mlm"], within=at_least(1))
    precision: str | None = _asked("Of the training.", TRAINED, choices=("fp32", "bf16"))
    resume: bool = _flag("Continue a run that was stopped, in --out.", ["mlm"], "--resume")
    save: bool = _flag("Keep the first seed's model in OUT/model, a teacher.", FINE_TUNED, "--save")
    as_is: bool = _flag(
        "Score MODEL on --test, untrained.", ["mlm", *LABELLED, *SCORED, AS_IS], "--as-is"
    )
    limit: int | None = _asked("First N training examples.", FINE_TUNED, within=at_least(1))
    per_class: int | None = _asked(
        "N training examples of each class, other ones for each seed.",
        ["classify"],
        within=at_least(1),
    )
    unseen_labels: str | None = _asked(
        "Labels of --dev or --test that training (--as-is: the model) does not have; count: the"
        " model has each of them wrong.",
        [*LABELLED, AS_IS],
        choices=("refuse", "count"),
        default_text="refuse",
    )
    pieces: str | None = _asked(
        "What of a word is taught, its first word piece or all: those after it the label X, which"
        " the model, its store and its students keep (TinyMBERT).",
        ["ner"],
        choices=("first", "all"),
        default_text="first",
    )
    stride: int | None = _asked(
        "Tokens that two windows of a long context share.",
        ["qa"],
        within=at_least(0),
        default_text="a third of --max-length",
    )
    text_column: str | None = _column("text", "classify", "pos", "ner", "speed")
    label_column: str | None = _column("label", "classify", "pos", "ner")
    text_a_column: str | None = _column("text_a", "classify", *SCORED)
    text_b_column: str | None = _column("text_b", "classify", *SCORED)
    score_column: str | None = _column("score", *SCORED)
    question_column: str | None = _column("question", "qa")
    context_column: str | None = _column("context", "qa")
    answer_column: str | None = _column("answer", "qa")
    teacher: str | None = _asked(
        "The model that the others are compared with: their speed, or its ranking with theirs.",
        ["speed", *SEARCHES],
        words=ALIASES,
        paths=True,
    )
    documents_by: str | None = _asked(
        "The model that embeds the documents, such as the teacher whose index there is; MODEL"
        " embeds the queries.",
        ["retrieval"],
        words=ALIASES,
        paths=True,
    )
    candidates: Path | None = _asked(
        "The documents to rank: a run of TREC, `query Q0 document rank score name` lines.",
        ["rerank"],
    )
    candidates_by: str | None = _asked(
        "Or the model of vectors that finds the documents to rank.",
        ["rerank"],
        words=ALIASES,
        paths=True,
    )
    depth: int | None = _asked("Candidates of a query.", ["rerank"], within=at_least(1))
    repeat: int | None = _asked("Runs to take medians of.", ["speed"], within=at_least(1))

    log: tuple[str, ...] = _asked(
        "wandb | mlflow | trackio, or a comma list: told the losses, the scores on --dev and, at"
        " the end, on --test; a run for each seed.",
        TRAINED,
        default=(),
        several=TRAINED,
        words=tuple(TRACKERS),
        read=parse_trackers,
        check=check_known,
    )
    json: bool = _flag(
        "Print what scores.json holds in place of the table, and all else to stderr.",
        [*TASKS, AS_IS],
        "--json",
    )

    def __post_init__(self) -> None:
        check_values(self)
        self._check_scope()
        self._check_contradictions()
        if self.task == "rerank" and not (self.candidates or self.candidates_by):
            raise UserError(
                "--task rerank needs --candidates RUN or --candidates-by MODEL: the documents to"
                " rank; --task retrieval ranks all"
            )

    @property
    def kind(self) -> str:
        """The task without the name that follows it: `mteb` of `mteb:NAME`."""
        return self.task.partition(":")[0]

    def given(self) -> dict[str, Any]:
        """What was given, but for the task. 0 is a value: `--stride 0` was said."""
        return {
            name: value
            for name in OPTIONS
            if name != "task"
            and (value := getattr(self, name)) not in (None, ())
            and value is not False
        }

    def settings(self, kind: type[Settings], **more: Any) -> Settings:
        """Settings of what was given and the defaults of their kind; `more` goes over both."""
        fields = {field.name for field in dataclasses.fields(cast(Any, kind))}
        given = {name: value for name, value in self.given().items() if name in fields}
        return kind(**{**given, **more})

    def columns(self) -> dict[str, str]:
        """Names of columns that are not called as what they hold, by what they hold."""
        names = {name: each for name, each in self.given().items() if name.endswith(COLUMN)}
        return {name.removesuffix(COLUMN): each for name, each in names.items()}

    def _check_scope(self) -> None:
        """UserError for options that the task does not take, lacks, or has too often."""
        given, scope, what = self.given(), {self.kind}, f"--task {self.task}"
        if self.as_is and self.kind in OPTIONS["as_is"].scope:
            scope, what = {self.kind, AS_IS}, f"{what} --as-is"
        where = AS_IS if AS_IS in scope else self.kind
        wrong = [_spelt(name) for name in given if not scope <= OPTIONS[name].scope]
        if wrong:
            columns = [
                _spelt(name)
                for name, option in OPTIONS.items()
                if name.endswith(COLUMN) and scope <= option.scope
            ]
            named = any(word.endswith("-column") for word in wrong) and columns
            them = "it" if len(wrong) == 1 else "them"
            instead = f", or name columns by {', '.join(columns)}" if named else ""
            raise UserError(f"{what} does not take {', '.join(wrong)}; leave {them} out{instead}")
        missing = [
            _spelt(name) for name in OPTIONS if where in OPTIONS[name].needed and name not in given
        ]
        if missing:
            raise UserError(f"{what} needs {', '.join(missing)}; see downstream --help")
        for name, value in given.items():
            if OPTIONS[name].repeated and len(value) > 1 and where not in OPTIONS[name].several:
                raise UserError(f"--task {self.task} takes one {_spelt(name)}, got {len(value)}")

    def _check_contradictions(self) -> None:
        given = self.given()
        for one, other in CONTRADICTING:
            if one in given and other in given:
                raise UserError(
                    f"{flag_of(one)} and {flag_of(other)} contradict each other; give one"
                )


OPTIONS = cast(Mapping[str, TaskOption], options_of(Asked))


def check(name: str, value: Any) -> None:
    """UserError for a value that an option of the command line does not take."""
    check_value(Asked, name, OPTIONS[name], value)


def _spelt(name: str) -> str:
    return flag_of(name) if name != "runs" else OPTIONS[name].flag
