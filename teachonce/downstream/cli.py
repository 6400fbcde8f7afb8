"""The `downstream` command: uses a checkpoint for a task and tells how well and how fast."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from teachonce.downstream.checked import GROUPS, asked_of, check, parameters
from teachonce.downstream.options import SEARCHES, Asked
from teachonce.downstream.settings import (
    FineTuneSettings,
    MlmSettings,
    SearchSettings,
    SpeedSettings,
)
from teachonce.support import files
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.errors import UserError
from teachonce.support.grouped_help import GroupedCommand

HELP = """Train a checkpoint as a masked LM, fine-tune it for a task, score it or measure its speed.

mlm continues the masked-LM training of MODEL on text (a document a line), or begins it where MODEL
is scratch:HxLxA (width x layers x heads; any that student-train --student takes). It trains once,
with --seeds N N times, and prints mean and deviation of the loss on held-out text.

pos, ner, classify, pair, sts and qa fine-tune MODEL once for each seed and print mean and deviation
of its scores. The epoch is chosen on --dev. A label that training lacks is refused; with
--unseen-labels count it is an error of the model.

With --as-is, all of these but qa score a MODEL that has its head on --test, without training it: a
masked LM, a student of a task teacher, or a model that --save kept. sts needs no head; a folder of
sentence-transformers is scored by its own modules.

\b
pos       word<TAB>tag, a blank line between sentences: macro F1, accuracy
ner       the same with IOB tags (B-X first, then I-X): entity and macro F1, accuracy
classify  columns text (or text_a, text_b of a pair), label: accuracy, macro
          and weighted F1, Matthews
pair      columns text_a, text_b, score (a number): Pearson, Spearman
sts       the same by the cosine of both texts' vectors: Spearman, Pearson
qa        SQuAD .json, or columns question, context, answer (empty: there
          is none): exact match, F1

retrieval, rerank and mteb score models as they are. A folder of sentence-transformers makes vectors
by its own modules and prompts, any other encoder by the mean of its last states.

\b
retrieval  a folder as of BEIR (corpus.jsonl, queries.jsonl, qrels.tsv): nDCG@10,
           MRR@10, recall@100; with --teacher agreement with its ranking
rerank     the same of candidates, also by models that read pairs (rerankers)
mteb:NAME  a task of the package mteb: its main score

Files with columns are .tsv, .csv or .jsonl. Where a column has another name, tell it with the
option of the column, such as --text-column.

speed measures parameters, size on disk, time and peak memory of MODEL on the CPU, and on a GPU
where there is one. table joins finished RUNs (--out folders) of any tasks into one table, the speed
of a model beside its scores. scores.json in --out holds all figures.
"""


@click.command(
    cls=GroupedCommand, groups=GROUPS, help=HELP, context_settings=CONTEXT, params=parameters()
)
@command_errors
def main(**words: Any) -> None:
    """Read what was asked, refuse what does not fit the task, run."""
    asked = asked_of(words)
    _check_out(asked)
    check(asked)
    if asked.kind != "table":
        _quiet_transformers()
    work, table = WORK.get(asked.kind, (_fine_tune, "seed_table"))
    from teachonce.downstream import score_tables

    trained = asked.kind == "mlm"  # makes its own folder, for --resume
    with _made(asked.out) if asked.out and not trained else nullcontext():
        result = work(asked)
        if result is None:
            return
        if asked.out:
            score_tables.save(result, asked.out)
    if asked.json:
        click.echo(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        score_tables.show(getattr(score_tables, table)(result))


def _check_out(asked: Asked) -> None:
    """UserError for an output that exists; a masked-LM training looks itself, for --resume."""
    if asked.out:
        files.check_utf8(asked.out)
    goes_on = asked.task == "mlm" and not asked.as_is
    out = asked.out
    if not goes_on and out and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: exists already; choose another")


def _say(asked: Asked) -> Callable[[str], None]:
    """Return what prints a line for a person: to stderr where stdout is for another program."""
    return partial(click.echo, err=asked.json)


def _quiet_transformers() -> None:
    """Silence warnings of heads that are new on purpose, and bars of reading weights."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _mlm(asked: Asked) -> dict[str, Any] | None:
    """Score masked LMs as they are, or train one; None for all processes but the first."""
    from teachonce.downstream import score_tables
    from teachonce.downstream.mlm.scoring import score_as_is, train_seeds

    length, more = asked.max_length or MlmSettings.max_length, {}
    if asked.batch_tokens:
        more["batch_size"] = max(1, asked.batch_tokens // length)
    tests = score_tables.splits_to_test(asked.test)
    if asked.as_is:
        each = [score_as_is(model, tests, length, _say(asked)) for model in asked.model]
        return score_tables.of_models(each)
    from teachonce.training.device import resolved_device
    from teachonce.training.ranks import join_ranks

    settings = asked.settings(MlmSettings, model=asked.model[0], **more)
    with join_ranks(resolved_device("auto")) as ranks:
        say = _say(asked) if ranks.lead else lambda line: None
        result = train_seeds(settings, asked.seeds or 1, tests, say, ranks, asked.log)
        return result if ranks.lead else None


def _fine_tune(asked: Asked) -> dict[str, Any]:
    from teachonce.downstream import score_tables
    from teachonce.downstream.tasks.fine_tune import fine_tune, score_as_is
    from teachonce.downstream.tracking import Log

    task, tests, out = _task(asked), score_tables.splits_to_test(asked.test), asked.out
    if asked.as_is:
        length = asked.max_length
        each = [score_as_is(task, model, tests, length, _say(asked)) for model in asked.model]
        return score_tables.of_models(each)
    assert asked.dev is not None and out is not None  # the task needs them
    splits = {"train": asked.train[0], "dev": asked.dev, **tests}
    settings, keep = asked.settings(FineTuneSettings), out / "model" if asked.save else None
    return fine_tune(task, asked.model[0], splits, settings, _say(asked), keep, Log(asked.log, out))


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """Make a folder now, so that it is told before hours of work if it cannot be; remove it if
    nothing came of the work."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            out.rmdir()


def _search(asked: Asked) -> dict[str, Any]:
    from teachonce.downstream import score_tables
    from teachonce.downstream.search.scoring import score_search

    tests, settings = score_tables.splits_to_test(asked.test), asked.settings(SearchSettings)
    return score_tables.of_models(
        score_search(asked.task, asked.model, tests, settings, _say(asked))
    )


def _mteb(asked: Asked) -> dict[str, Any]:
    from teachonce.downstream import score_tables
    from teachonce.downstream.mteb_task import score_benchmark

    each = [score_benchmark(asked.task, model, asked.max_length) for model in asked.model]
    return score_tables.of_models(each)


def _task(asked: Asked) -> Any:
    """Make the task with those of the options that its class takes."""
    from teachonce.downstream.tasks.classify import Classify
    from teachonce.downstream.tasks.pair import PairScore
    from teachonce.downstream.tasks.qa import QA
    from teachonce.downstream.tasks.sts import SentenceSimilarity
    from teachonce.downstream.tasks.tagging import Entities, PartsOfSpeech

    tagging, texts = (PartsOfSpeech, Entities), (Classify, PairScore, SentenceSimilarity, QA)
    kinds: tuple[Any, ...] = (*tagging, *texts)
    (kind,) = (kind for kind in kinds if kind.name == asked.task)
    given = {**asked.given(), "columns": asked.columns()}
    taken = inspect.signature(kind).parameters
    return kind(**{name: given[name] for name in taken if name in given})


def _speed(asked: Asked) -> dict[str, Any]:
    from teachonce.downstream.speed import measure_speed

    texts = _texts(asked.test[0], asked.columns()) if asked.test else []
    settings = asked.settings(SpeedSettings, texts=texts)
    return measure_speed(asked.model, asked.teacher, settings, say=_say(asked))


def _texts(path: Path, columns: dict[str, str]) -> list[str]:
    from teachonce.downstream.mlm.text_blocks import read_lines
    from teachonce.downstream.tasks.example_rows import read_rows
    from teachonce.teacher_dump.corpus.packed import suffix_of

    if suffix_of(path) == ".txt":
        return read_lines(path)
    return [row.text("text", columns) for row in read_rows(path)]


def _table(asked: Asked) -> dict[str, Any]:
    from teachonce.downstream import score_tables

    return score_tables.joined(asked.runs)


WORK: dict[str, tuple[Callable[[Asked], dict[str, Any] | None], str]] = {
    "mlm": (_mlm, "seed_table"),
    "mteb": (_mteb, "seed_table"),
    **dict.fromkeys(SEARCHES, (_search, "seed_table")),
    "speed": (_speed, "speed_table"),
    "table": (_table, "joined_table"),
}
"""What does the work of a task, and shows its result; all other tasks are fine-tuned for."""


if __name__ == "__main__":
    main()
