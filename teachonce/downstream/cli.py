"""The command `downstream`: trains and scores checkpoints, and measures their speed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import click

from teachonce.downstream.early_checks import GROUPS, check_task, parameters, read_options
from teachonce.downstream.options import SEARCHES, DownstreamOptions, splits_to_test
from teachonce.downstream.settings import (
    FineTuneSettings,
    LmSettings,
    MlmSettings,
    SearchSettings,
    SpeedSettings,
    check_new_folder,
)
from teachonce.support import files
from teachonce.support.commands import GroupedCommand, examples, version_option
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.environment import check_one_process, check_torchrun
from teachonce.support.lease import Lease

HELP = """Train a checkpoint as a masked LM, fine-tune it for a task, score it or measure its speed.

mlm continues the masked-LM training of MODEL on text with one document per line. If MODEL is
scratch:HxLxA (hidden size x layers x heads), it trains a new ModernBERT; scratch:bert:HxLxA and
scratch:bilstm:E,H train a new BERT and BiLSTM. It prints the mean and standard
deviation of the loss on held-out text over --seeds (default 1).

pos, ner, classify, pair, sts and qa fine-tune MODEL once for each seed, and print the mean and
standard deviation of its scores. The best epoch is chosen on --dev. A label that is missing in
--train is refused; with --unseen-labels count it counts as an error of the model.

With --as-is, all of these tasks except qa score MODEL on --test without training. MODEL needs the
head of the task: a masked LM, a student of a task teacher, or a model saved with --save. sts needs
no head; a folder of sentence-transformers is scored with its own modules.

\b
pos       word<TAB>tag, a blank line between sentences: macro F1, accuracy
ner       word<TAB>IOB tag (B-X first, then I-X): entity and macro F1,
          accuracy
classify  columns text (or text_a, text_b for a pair), label: accuracy, macro
          and weighted F1, Matthews
pair      columns text_a, text_b, score (a number): Pearson, Spearman
sts       columns as for pair, scored by cosine similarity: Spearman, Pearson
qa        SQuAD .json, or columns question, context, answer (empty if the
          context has none): exact match, F1

lm, lm-eval, retrieval, rerank and mteb score models without training. lm and lm-eval need a
decoder. For retrieval, rerank and mteb, a folder of sentence-transformers uses its own modules and
prompts, any other encoder the mean of its last hidden states.

\b
lm         one document per line: bits/byte, comparable between models of any
           vocabulary, and perplexity; long documents are read in windows
retrieval  a folder in BEIR's layout (corpus.jsonl, queries.jsonl, qrels.tsv):
           nDCG@10, MRR@10, recall@100; with --teacher also the agreement of
           both rankings
rerank     nDCG@10 and MRR@10 over candidates; rerankers (cross-encoders), too
mteb:NAME  a task of the package mteb: its main score
lm-eval:NAME  a task of lm-evaluation-harness, or one that is defined in a
           folder of --test: its measures

Files with columns are .tsv, .csv or .jsonl. If a column has another name, give it with the option
of that column, such as --text-column.

speed measures parameters, size on disk, time and peak memory of MODEL on the CPU, and on a GPU if
there is one. table prints one table of finished RUNs (--out folders) of any tasks: a model's scores
and its speed in one row. scores.json in --out holds all figures.
"""

EXAMPLES = examples(
    "downstream --task classify --model student --train sst.tsv --dev dev.tsv --out sst --save",
    "downstream --task mlm --model student --as-is --test held-out.txt --out scores",
)


@click.command(
    cls=GroupedCommand,
    groups=GROUPS,
    help=HELP,
    epilog=EXAMPLES,
    context_settings=CONTEXT,
    params=parameters(),
)
@version_option
@command_errors
def main(**values: Any) -> None:
    """Read the options, check them against the task and its files, and run the task."""
    # Mistakes in options and files are reported before torch is imported, which takes seconds.
    options = read_options(values)
    _check_out(options)
    check_task(options)
    work = WORK.get(options.kind, _fine_tune)
    trains_mlm = work is _mlm and not options.as_is
    if options.kind != "table":
        if trains_mlm:
            check_torchrun()  # the Trainer reads torchrun's variables
        else:
            check_one_process(f"--task {options.task}" + " --as-is" * options.as_is)
        _quiet_transformers()
    from teachonce.downstream import score_tables

    # A masked-LM training makes its own folder, for --resume.
    with _made_early(options.out) if options.out and not trains_mlm else nullcontext():
        results = work(options)
        if results is None:
            return
        result = score_tables.of_models(results) if isinstance(results, list) else results
        if options.out:
            score_tables.save(result, options.out)
    if options.json:
        click.echo(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        tables = {"speed": score_tables.speed_table, "table": score_tables.combined_table}
        score_tables.show(tables.get(options.kind, score_tables.seed_table)(result))
    if options.out:
        _say(options)(_where(options.out))


def _where(out: Path) -> str:
    """Describe where the scores and the saved models are."""
    from teachonce.downstream.score_tables import FILE

    folders = [path for path in (out, *sorted(out.iterdir())) if (path / "config.json").is_file()]
    return "; ".join([f"scores in {out / FILE}", *(f"model in {folder}" for folder in folders)])


def _check_out(options: DownstreamOptions) -> None:
    """Raise UserError if --out exists, unless a masked-LM training is resumed in it."""
    if options.out:
        files.check_utf8(options.out)
        if not options.resume:
            check_new_folder(options.out, resumable=options.task == "mlm" and not options.as_is)


def _say(options: DownstreamOptions, model: str = "") -> Callable[[str], None]:
    """Return the function that prints progress: to stderr if --json uses stdout.

    model: the model that is scored; each line begins with its name if there are several models.
    """
    prefix = f"{model}: " if model and len(options.model) > 1 else ""
    return lambda line: click.echo(prefix + line, err=options.json)


def _quiet_transformers() -> None:
    """Silence the progress bars of loading weights, and warnings about new heads, which are
    expected here."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


Result = dict[str, Any]


def _mlm(options: DownstreamOptions) -> list[Result] | Result | None:
    """Score masked LMs without training, or train one. Only the first process returns a result."""
    from teachonce.downstream.mlm.scoring import score_as_is, train_seeds

    length, sizes = options.max_length or MlmSettings.max_length, {}
    if options.batch_tokens:
        sizes["batch_size"] = max(1, options.batch_tokens // length)
    tests = splits_to_test(options.test)
    if options.as_is:
        return [
            score_as_is(model, tests, length, _say(options, model), options.text_column)
            for model in options.model
        ]
    from teachonce.training.device import resolved_device
    from teachonce.training.ranks import join_ranks

    settings = options.settings(MlmSettings, model=options.model[0], **sizes)
    with join_ranks(resolved_device("auto")) as ranks:
        say = _say(options) if ranks.is_main else lambda line: None
        result = train_seeds(settings, options.seeds or 1, tests, say, ranks, options.log)
        return result if ranks.is_main else None


def _fine_tune(options: DownstreamOptions) -> list[Result] | Result:
    from teachonce.downstream.tasks.fine_tune import fine_tune, score_as_is
    from teachonce.downstream.trainer import TrackerSettings

    task, tests, out = _task(options), splits_to_test(options.test), options.out
    if options.as_is:
        length = options.max_length
        return [
            score_as_is(task, model, tests, length, _say(options, model)) for model in options.model
        ]
    assert options.dev is not None and out is not None  # the task needs them
    splits = {"train": options.train[0], "dev": options.dev, **tests}
    settings, save_to = options.settings(FineTuneSettings), out / "model" if options.save else None
    log = TrackerSettings(options.log, out)
    return fine_tune(task, options.model[0], splits, settings, _say(options), save_to, log)


@contextmanager
def _made_early(out: Path) -> Iterator[None]:
    """Make the folder `out` and hold its lease during the `with` block; afterwards remove the
    folder if it is empty. Raises UserError if another process writes to the folder."""
    # Before the work: a folder that cannot be made is an error now, not after hours.
    out.mkdir(parents=True, exist_ok=True)
    with closing(Lease(out)):
        check_new_folder(
            out, resumable=False
        )  # again: another process may have filled the folder while this one loaded torch
        try:
            yield
        finally:
            with suppress(OSError):  # fails if the block has written files into it
                out.rmdir()


def _search(options: DownstreamOptions) -> list[Result]:
    from teachonce.downstream.search.scoring import score_search

    tests, settings = splits_to_test(options.test), options.settings(SearchSettings)
    return score_search(options.task, options.model, tests, settings, _say(options))


def _mteb(options: DownstreamOptions) -> list[Result]:
    from teachonce.downstream.mteb_task import score_benchmark

    return [score_benchmark(options.task, model, options.max_length) for model in options.model]


def _harness(options: DownstreamOptions) -> list[Result]:
    from teachonce.downstream.lm.harness import score_harness_task

    settings = options.settings(LmSettings)
    return [
        score_harness_task(options.task, model, options.test, settings) for model in options.model
    ]


def _lm(options: DownstreamOptions) -> list[Result]:
    from teachonce.downstream.lm.scoring import score_lm

    tests, settings = splits_to_test(options.test), options.settings(LmSettings)
    return [score_lm(model, tests, settings, _say(options, model)) for model in options.model]


def _task(options: DownstreamOptions) -> Any:
    """Make the task with the options that its class accepts."""
    from teachonce.downstream.tasks.classify import Classify
    from teachonce.downstream.tasks.pair import PairScore
    from teachonce.downstream.tasks.qa import QA
    from teachonce.downstream.tasks.sts import SentenceSimilarity
    from teachonce.downstream.tasks.tagging import Entities, PartsOfSpeech

    tagging, texts = (PartsOfSpeech, Entities), (Classify, PairScore, SentenceSimilarity, QA)
    kinds: tuple[Any, ...] = (*tagging, *texts)
    (kind,) = (kind for kind in kinds if kind.name == options.task)
    given = {**options.given(), "columns": options.columns()}
    # `DownstreamOptions` has refused options of other tasks. The given options that the class does
    # not accept are settings of the training.
    taken = inspect.signature(kind).parameters
    return kind(**{name: given[name] for name in taken if name in given})


def _speed(options: DownstreamOptions) -> Result:
    from teachonce.downstream.speed import SENTENCES, measure_speed

    texts = (
        list(islice(_texts(options.test[0], options.columns()), SENTENCES)) if options.test else ()
    )
    settings = options.settings(SpeedSettings, texts=texts)
    return measure_speed(options.model, options.teacher, settings, say=_say(options))


def _texts(path: Path, columns: dict[str, str]) -> Iterator[str]:
    from teachonce.downstream.tasks.example_rows import iterate_rows
    from teachonce.downstream.text_lines import iterate_lines
    from teachonce.teacher_dump.corpus.text_files import suffix_of

    if suffix_of(path) == ".txt":
        return iterate_lines(path)
    return (row.text("text", columns) for row in iterate_rows(path))


def _table(options: DownstreamOptions) -> Result:
    from teachonce.downstream import score_tables

    return score_tables.combine_runs(options.runs)


WORK: dict[str, Callable[[DownstreamOptions], list[Result] | Result | None]] = {
    "mlm": _mlm,
    "lm": _lm,
    "mteb": _mteb,
    "lm-eval": _harness,
    **dict.fromkeys(SEARCHES, _search),
    "speed": _speed,
    "table": _table,
}
"""The function that runs a task; it returns a list of results if each of several models has one.
Tasks that are not listed fine-tune a model."""
