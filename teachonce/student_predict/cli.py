"""The command `student-predict`."""

from __future__ import annotations

import json
from typing import Any

import click

from teachonce.checkpoints.names import EXPORTED
from teachonce.student_predict.options import PredictOptions, check_folder
from teachonce.support.click_types import LocalPath
from teachonce.support.commands import OneLineCommand, examples, version_option
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.options import click_options

HELP = """Print an answer to each TEXT as a line of JSON, or as a table (--format tsv). FOLDER is a
student, any other model of transformers or sentence-transformers, or a folder of student-export.

\b
classifier    label, probabilities of the labels; several labels or scores
tagger        words with tag, characters and probability; entities
embedder      vector; for a pair the score, a cosine
reranker      score of a pair
masked LM     filled, and the best pieces of each mask

Characters are counted from 0; `end` is the number after the last one. A long text of a classifier,
a tagger or a masked LM is read in overlapping windows: their number is in `windows`, and a
classifier's answer is their mean. Long texts of an embedder, long pairs and words longer than a
window are truncated, and the answer has `cut`. A blank text has `empty` in place of an answer.
"""

EXAMPLES = examples(
    'student-predict moods "What a lovely day." "It rained again."',
    "student-predict tagger --input tags.tsv --format tsv > predicted.tsv",
)


def _parameters() -> list[click.Parameter]:
    folder = click.Argument(["folder"], type=LocalPath())
    texts = click.Argument(["texts"], metavar="[TEXT]...", nargs=-1)
    return [folder, texts, *click_options(PredictOptions)]


@click.command(
    cls=OneLineCommand,
    help=HELP,
    epilog=EXAMPLES,
    context_settings=CONTEXT,
    params=_parameters(),
)
@version_option
@command_errors
def main(**values: Any) -> None:
    """Read the options and the texts, and print an answer to each."""
    options = PredictOptions(**values)
    from teachonce.student_predict.texts import input_texts, note_on_columns

    # Before torch loads, which takes seconds, and before lines of stdin are awaited.
    if not (options.folder / EXPORTED).is_file():
        check_folder(options.folder)
    inputs = input_texts(options)
    if note := note_on_columns(options):
        click.echo(note, err=True)
    from transformers.utils import logging

    from teachonce.student_predict.answers import Predictor, tsv_lines
    from teachonce.student_predict.loading import load_runner

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    predictor = Predictor(*load_runner(options.folder, options.file), inputs, options.top)
    objects = (json.dumps(answer, ensure_ascii=False) for answer in predictor.answers())
    for line in tsv_lines(predictor) if options.format == "tsv" else objects:
        click.echo(line)
    for note in predictor.notes():
        click.echo(note, err=True)
