"""The options of `downstream`: the values and the default of each, and the tasks that accept it.

`DownstreamOptions` has every option of the command line. The settings of a kind of task
(`settings.py`) are made from these options, and add defaults. The command, its --help
(`early_checks.py`) and the checks are derived from these fields, so that Python refuses the same
values as the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from teachonce.checkpoints.names import ALIASES
from teachonce.student_train.settings.shapes import SCRATCH
from teachonce.support.errors import UserError, suggest
from teachonce.support.option_types import MaybePath, MaybePathWord, Paths, PathWords, Words
from teachonce.support.options import (
    INNER_SHARE,
    KEY,
    POSITIVE,
    SHARE,
    Option,
    Range,
    at_least,
    check_value,
    flag_of,
    names_options,
    options_of,
    parse_values,
)
from teachonce.training.optimizer import OPTIMIZERS, check_optimizer
from teachonce.training.trackers import TRACKERS, check_known, parse_trackers

Settings = TypeVar("Settings")

SCORED = ("pair", "sts")
FINE_TUNED = ("pos", "ner", "classify", *SCORED, "qa")
TRAINED = ("mlm", *FINE_TUNED)
SEARCHES = ("retrieval", "rerank")
MTEB, LM_EVAL = "mteb", "lm-eval"
TASK_LIBRARIES = {MTEB: "mteb", LM_EVAL: "lm_eval"}
"""The tasks `mteb:NAME` and `lm-eval:NAME`, and the module that has the tasks of these names."""
LM = "lm"
OF_TEXTS = ("mlm", LM, "speed")  # tasks that read texts without labels, from .txt files or tables
UNTRAINED = (LM, *SEARCHES, *TASK_LIBRARIES)
"""Tasks that score models without training."""
TASKS = (*TRAINED, *UNTRAINED, "speed", "table")
TASK_FORMS = tuple(f"{task}:NAME" if task in TASK_LIBRARIES else task for task in TASKS)
WORDS = tuple(f"{task}:" if task in TASK_LIBRARIES else task for task in TASKS)
LABELLED = ("pos", "ner", "classify")
AS_IS = "as-is"
"""In scopes, in addition to tasks: the option can be combined with --as-is."""
COLUMN = "_column"  # the suffix of options that name columns
SHORTEST = 8
"""The smallest --max-length, in tokens."""
LARGEST_SEED = 2**32 - 1
"""`set_seed` of transformers passes the seed to NumPy, whose seeds have 32 bits."""
TEST = "test"  # name of the split of one test file, or of the mean over several
OPTION = f"--model {SCRATCH}"
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
    """Describes an option of `downstream`. Its `scope` contains the tasks that accept it, and AS_IS
    if it applies to scoring without training.

    needed: the tasks (or AS_IS) that require it.
    several: the tasks (or AS_IS) that accept more than one value of it.
    """

    needed: frozenset[str] = frozenset()
    several: frozenset[str] = frozenset()


def _option(
    help: str,
    tasks: Iterable[str],
    *,
    default: Any = None,
    needed: Iterable[str] = (),
    several: Iterable[str] = (),
    **about: Any,
) -> Any:
    """Declare a field of `DownstreamOptions`; `about` holds the other fields of `TaskOption`."""
    option = TaskOption(
        help,
        scope=frozenset(tasks),
        needed=frozenset(needed),
        several=frozenset(several),
        repeated=bool(several),
        **about,
    )
    return dataclasses.field(default=default, metadata={KEY: option})


def _flag(help: str, tasks: Iterable[str], flag: str) -> Any:
    """Declare a field of `DownstreamOptions` that is a flag."""
    return _option(help, tasks, default=False, flag=flag)


def _column(role: str, *tasks: str) -> Any:
    """Declare a field of `DownstreamOptions`: the name of the column that holds `role`."""
    return _option(f"Read this column instead of `{role}`.", (*tasks, AS_IS))


def read_paths(words: Sequence[str | Path]) -> tuple[Path, ...]:
    return tuple(map(Path, words))


def _check_task(task: str) -> None:
    """Raise UserError for an unknown task, for `mteb` or `lm-eval` without `:NAME`, and for `:NAME`
    after another task."""
    kind, _, name = task.partition(":")
    if kind not in TASKS or bool(name) != (kind in TASK_LIBRARIES):
        near = suggest(kind, TASKS)
        raise UserError(f"--task {task}: {near}expected one of {', '.join(TASK_FORMS)}")


def _check_vocabulary(word: str) -> None:
    from teachonce.training.wordpiece import vocabulary_size  # imports tokenizers

    if vocabulary_size(word) is None:
        raise UserError(f"--vocab {word}: expected a number of pieces, e.g. 30k or 512")


@names_options("downstream")
@dataclass(frozen=True)
class DownstreamOptions:
    """Holds the options of a command line. None, () or False means that an option was not given."""

    task: str = _option("Run this task.", TASKS, required=True, words=WORDS, check=_check_task)
    runs: Paths = _option(
        "Print the scores of these finished runs.",
        ["table"],
        default=(),
        needed=["table"],
        several=["table"],
        flag="a RUN",
    )
    model: PathWords = _option(
        "Train or score this model: a folder, a hub id, an alias (rubert-base, minilm) or"
        " scratch:HxLxA (a new model; shapes as for student-train --student). Repeatable for"
        " speed, all tasks without training and --as-is.",
        [*TRAINED, *UNTRAINED, "speed", AS_IS],
        default=(),
        needed=[*TRAINED, *UNTRAINED, "speed", AS_IS],
        several=[*UNTRAINED, "speed", AS_IS],
        words=(*ALIASES, SCRATCH),
        paths=True,
    )
    train: Paths = _option(
        "Train on the examples of this file. Repeatable for mlm.",
        TRAINED,
        default=(),
        needed=TRAINED,
        several=["mlm"],
        read=read_paths,
    )
    dev: MaybePath = _option(
        "Validate on these held-out examples.",
        TRAINED,
        default_text="mlm: every 20th line of --train; from 10,000 lines on every 100th",
    )
    test: Paths = _option(
        "Score on this file as well. Repeatable, e.g. one file per language: prints the scores of"
        " each and their mean. speed: time these texts. retrieval, rerank: folders of corpus.jsonl,"
        " queries.jsonl and qrels.tsv. lm-eval: folders with definitions of tasks (YAML).",
        [*TRAINED, LM, LM_EVAL, *SEARCHES, "speed", AS_IS],
        default=(),
        needed=[LM, *SEARCHES, AS_IS],
        several=[*TRAINED, LM, LM_EVAL, *SEARCHES, AS_IS],
        read=read_paths,
        default_text="speed: random tokens",
    )
    out: MaybePath = _option(
        "Write to this folder, which must not exist. Optional for speed and table.",
        [*TASKS, AS_IS],
        needed=[*TRAINED, *UNTRAINED, AS_IS],
    )
    seeds: int | None = _option(
        "Train N times, with N seeds; mlm saves several models in OUT/seed-N.",
        TRAINED,
        within=at_least(1),
        default_text="mlm 1, fine-tuning 3",
    )
    seed: int | None = _option(
        "Use this number as the (first) seed.",
        [*TRAINED, "speed"],
        within=Range(f"0 to {LARGEST_SEED}", low=0, high=LARGEST_SEED),
    )
    steps: int | None = _option("Train for N optimizer steps.", TRAINED, within=at_least(1))
    epochs: int | None = _option(
        "Train for N passes over the training examples.", TRAINED, within=at_least(1)
    )
    batch_size: int | None = _option(
        "Run batches of N sequences.", [*TRAINED, "speed"], within=at_least(1)
    )
    batch_tokens: int | None = _option(
        "Train on batches of N tokens, in place of --batch-size.", ["mlm"], within=at_least(1)
    )
    lr: float | None = _option(
        "Train at this peak learning rate.",
        TRAINED,
        within=POSITIVE,
        default_text="mlm 2e-4 (from scratch 1e-3), fine-tuning 5e-5 (hidden size below 384:"
        " 5e-4, BiLSTMs 3e-3, adadelta 1)",
    )
    accumulate: int | None = _option(
        "Accumulate the gradients of N batches per optimizer step.", FINE_TUNED, within=at_least(1)
    )
    optimizer: str | None = _option(
        "Train with adamw; lamb (You et al. 2020), for large batches, which needs `pip install"
        " 'teachonce[lamb]'`; or adadelta (Zeiler 2012).",
        FINE_TUNED,
        choices=OPTIMIZERS,
        check=check_optimizer,
    )
    warmup: float | None = _option(
        "Warm up over this share of the steps.",
        FINE_TUNED,
        within=SHARE,
    )
    max_length: int | None = _option(
        "Truncate inputs to N tokens; mlm and lm: read windows of N tokens. All tasks except mlm"
        " and lm reduce it to the model's limit; the limit is the default of lm and lm-eval (at"
        " most 1,024), retrieval, rerank and sentence-transformers folders.",
        [*TRAINED, *UNTRAINED, "speed", AS_IS],
        within=at_least(SHORTEST),
        default_text="128, qa 384, speed 512",
    )
    vocab: str | None = _option(
        "Give a model from scratch a WordPiece vocabulary of this size, e.g. 30k.",
        ["mlm"],
        check=_check_vocabulary,
    )
    mask_prob: float | None = _option(
        "Mask this share of the tokens in training; validation always masks 0.15.",
        ["mlm"],
        within=INNER_SHARE,
    )
    evaluate_every: int | None = _option(
        "Validate and save a checkpoint every N steps.",
        ["mlm"],
        within=at_least(1),
        default_text="a tenth of all steps, at most 500",
    )
    precision: str | None = _option(
        "Train in this precision, or score in it with lm and lm-eval.",
        [*TRAINED, LM, LM_EVAL],
        choices=("fp32", "bf16"),
    )
    resume: bool = _flag("Continue the interrupted training in --out.", ["mlm"], "--resume")
    save: bool = _flag(
        "Save the first seed's model in OUT/model; it can be a teacher.", FINE_TUNED, "--save"
    )
    as_is: bool = _flag(
        "Score MODEL on --test without training.", ["mlm", *LABELLED, *SCORED, AS_IS], "--as-is"
    )
    limit: int | None = _option("Train on the first N examples.", FINE_TUNED, within=at_least(1))
    per_class: int | None = _option(
        "Train on N examples of each class, drawn again for each seed.",
        ["classify"],
        within=at_least(1),
    )
    unseen_labels: str | None = _option(
        "Refuse a --dev or --test file with labels that are missing in training (--as-is: in the"
        " model), or count each as an error.",
        [*LABELLED, AS_IS],
        choices=("refuse", "count"),
        default_text="refuse",
    )
    pieces: str | None = _option(
        "Label the first piece of a word, or all. With all, pieces after the first have the label"
        " X, as in TinyMBERT, also in stores and students of this model.",
        ["ner"],
        choices=("first", "all"),
        default_text="first",
    )
    stride: int | None = _option(
        "Let neighbouring windows of a long context, or of a long document, share N tokens.",
        ["qa", LM],
        within=at_least(0),
        default_text="qa a third of --max-length, lm half of it",
    )
    text_column: str | None = _column("text", "classify", "pos", "ner", *OF_TEXTS)
    label_column: str | None = _column("label", "classify", "pos", "ner")
    text_a_column: str | None = _column("text_a", "classify", *SCORED)
    text_b_column: str | None = _column("text_b", "classify", *SCORED)
    score_column: str | None = _column("score", *SCORED)
    question_column: str | None = _column("question", "qa")
    context_column: str | None = _column("context", "qa")
    answer_column: str | None = _column("answer", "qa")
    teacher: MaybePathWord = _option(
        "Compare speed or rankings with this model.",
        ["speed", *SEARCHES],
        words=ALIASES,
        paths=True,
    )
    store: MaybePath = _option(
        "Also compare predictions of next tokens with the teacher's in this store.", [LM], read=Path
    )
    documents_by: MaybePathWord = _option(
        "Embed the documents with this model, such as the teacher of an existing index; MODEL"
        " embeds the queries.",
        ["retrieval"],
        words=ALIASES,
        paths=True,
    )
    candidates: MaybePath = _option(
        "Rank the documents of this TREC run: lines `query Q0 document rank score name`.",
        ["rerank"],
    )
    candidates_by: MaybePathWord = _option(
        "Rank the documents that this embedding model finds, in place of --candidates.",
        ["rerank"],
        words=ALIASES,
        paths=True,
    )
    depth: int | None = _option("Rank N candidates per query.", ["rerank"], within=at_least(1))
    repeat: int | None = _option(
        "Measure N runs and print their medians.", ["speed"], within=at_least(1)
    )

    log: Words = _option(
        "Log losses, scores on --dev and, at the end, on --test to wandb, mlflow, trackio, or a"
        " comma-separated list of these. One tracked run per seed.",
        TRAINED,
        default=(),
        several=TRAINED,
        words=tuple(TRACKERS),
        read=parse_trackers,
        check=check_known,
    )
    json: bool = _flag(
        "Print the content of scores.json in place of the table, and progress to stderr.",
        [*TASKS, AS_IS],
        "--json",
    )

    def __post_init__(self) -> None:
        parse_values(self)
        self._check_scope()
        given = self.given()
        for one, other in CONTRADICTING:
            if one in given and other in given:
                raise UserError(
                    f"{flag_of(one)} and {flag_of(other)} contradict each other; give one"
                )
        if self.task == "rerank" and not (self.candidates or self.candidates_by):
            raise UserError(
                "--task rerank needs --candidates RUN or --candidates-by MODEL, the documents to"
                " rank; --task retrieval ranks all documents"
            )

    @property
    def kind(self) -> str:
        """Return the task without `:NAME`: `mteb` for `mteb:NAME`."""
        return self.task.partition(":")[0]

    def given(self) -> dict[str, Any]:
        """Return the values of the options that were given, except the task, by name. 0 counts as
        given (`--stride 0`)."""
        return {
            name: value
            for name in OPTIONS
            if name != "task"
            and (value := getattr(self, name)) not in (None, ())
            # Not in the tuple above, because 0 equals False.
            and value is not False
        }

    def settings(self, kind: type[Settings], **overrides: Any) -> Settings:
        """Make settings of the class `kind` from the given options, else from the defaults of
        `kind`; `overrides` replace both."""
        fields = {field.name for field in dataclasses.fields(cast(Any, kind))}
        given = {name: value for name, value in self.given().items() if name in fields}
        return kind(**{**given, **overrides})

    def columns(self) -> dict[str, str]:
        """Return the names of columns that were given, by role (`text`, `label`, ...)."""
        names = {name: column for name, column in self.given().items() if name.endswith(COLUMN)}
        return {name.removesuffix(COLUMN): column for name, column in names.items()}

    def _check_scope(self) -> None:
        """Raise UserError for options that the task does not accept, for required options that are
        missing, and for repeated options of which the task accepts only one value."""
        given, scope, task = self.given(), {self.kind}, f"--task {self.task}"
        if self.as_is and self.kind in OPTIONS["as_is"].scope:
            scope, task = {self.kind, AS_IS}, f"{task} --as-is"
        mode = AS_IS if AS_IS in scope else self.kind
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
            raise UserError(f"{task} does not take {', '.join(wrong)}; leave {them} out{instead}")
        missing = [
            _spelt(name) for name in OPTIONS if mode in OPTIONS[name].needed and name not in given
        ]
        if missing:
            scored = mode == self.kind and self.kind in OPTIONS["as_is"].scope
            instead = ", or --as-is" if scored else ""
            raise UserError(f"{task} needs {', '.join(missing)}{instead}; see downstream --help")
        for name, value in given.items():
            if OPTIONS[name].repeated and len(value) > 1 and mode not in OPTIONS[name].several:
                raise UserError(
                    f"--task {self.task} takes one {_spelt(name)}, got {len(value)}; give it once"
                )


OPTIONS = cast(Mapping[str, TaskOption], options_of(DownstreamOptions))


def check_option(name: str, value: Any) -> None:
    """Raise UserError for a value that the option `name` of the command line does not accept."""
    check_value(DownstreamOptions, name, OPTIONS[name], value)


def splits_to_test(paths: Sequence[Path]) -> dict[str, Path]:
    """Name the splits of files to test: "test" for one file, "test FILE" for each of several.

    Raises UserError for a file that is given twice.
    """
    for path in paths:
        # Splits are named by their paths, and two of the same name would become one.
        if paths.count(path) > 1:
            raise UserError(f"--test {path}: is given twice; give each file once")
    return {TEST if len(paths) == 1 else f"{TEST} {path}": path for path in paths}


def _spelt(name: str) -> str:
    return flag_of(name) if name != "runs" else OPTIONS[name].flag
