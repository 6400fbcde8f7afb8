"""The command `feature-store`: inspect, verify, repair and copy stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from teachonce.checkpoints.names import ALIASES
from teachonce.feature_store.exchange import export, import_
from teachonce.feature_store.output import Output, bars, printed, say, written
from teachonce.store.format.codecs.levels import BUILT_IN, GROUP
from teachonce.student_train.settings.naming import path_next_to
from teachonce.student_train.settings.option_values import VOCABULARIES, check_vocabulary_word
from teachonce.support.click_types import PATH, LocalPath, NameOrAdded, Text
from teachonce.support.commands import OneLineGroup, examples, is_given, version_option
from teachonce.support.console import CONTEXT, DEVICES
from teachonce.support.errors import UserError
from teachonce.support.hub import push_options
from teachonce.support.options import flag_of

VOCAB_HELP = "as in student-train: a size, a folder, teacher, pruned:N or words."
VOCABULARY, MODEL = Text(VOCABULARIES, paths=True), Text(ALIASES, paths=True)
part_bars = partial(bars, unit="part")
allow_partial = click.option(
    "--allow-partial", is_flag=True, help="Read the published parts of an unfinished store."
)


# Commands import what they need themselves: --help and completion must not wait for NumPy or torch.


@click.group(
    cls=OneLineGroup,
    epilog=examples("feature-store info store.zarr", "feature-store verify store.zarr"),
    context_settings=CONTEXT,
)
@version_option
def main() -> None:
    """Inspect, verify, repair and copy feature stores."""


def command(
    *lines: str, cls: type[click.Command] | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Add a command. Its --help ends in examples: `lines`, each after `feature-store`."""
    return main.command(cls=cls, epilog=examples(*(f"feature-store {line}" for line in lines)))


@command("info store.zarr", "info store.zarr --vocab 5k")
@click.argument("path", type=PATH)
@click.option(
    "--vocab",
    type=VOCABULARY,
    help="Print which share of the tokens each alignment pairs for a student of this vocabulary,"
    f" {VOCAB_HELP}",
)
@allow_partial
@printed
def info(path: str, vocab: str | None, allow_partial: bool) -> Iterator[Output]:
    """Describe a store: teacher, corpus, features, codec, sizes.

    With --vocab, print for each alignment the share of the teacher's and of the student's tokens
    that are paired, and the sizes of the runs. For a large store this is measured on a sample.
    """
    from teachonce.store.read.store import open_store
    from teachonce.store.tools.info import describe, info_lines

    if vocab is not None:
        check_vocabulary_word(vocab)
    store = open_store(path, allow_partial=allow_partial)
    facts = describe(store)
    yield Output(facts, info_lines(store, facts))
    if vocab is not None:
        from teachonce.feature_store.coverage import coverage, coverage_lines
        from teachonce.feature_store.student_vocabulary import StudentVocabulary

        fit = coverage(StudentVocabulary(vocab, store))
        yield Output(fit, coverage_lines(fit))


@command("verify store.zarr", "verify store.zarr --model my-teacher --sample 128")
@click.argument("path", type=PATH)
@allow_partial
@click.option(
    "--model",
    type=MODEL,
    help="Compare a sample with the output of this teacher (named as for teacher-dump).",
)
@click.option(
    "--sample",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Run N sequences through --model.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Draw the sequences of --sample with this seed.",
)
@click.option(
    "--device",
    type=Text(DEVICES),
    default="auto",
    show_default=True,
    help="Run --model on this device: auto | cpu | cuda | cuda:N.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with --model.")
@printed
def verify(
    path: str,
    allow_partial: bool,
    model: str | None,
    sample: int,
    seed: int,
    device: str,
    trust_remote_code: bool,
) -> Iterator[Output]:
    """Read a whole store and compare it with its checksums.

    Also tokenize the texts with the stored tokenizer and compare the tokens. With --model, run the
    teacher over a sample and compare its output with the stored features. Exit code 1 if anything
    differs. Unknown files and objects are listed; they are not an error.
    """
    for name in () if model is not None else ("sample", "seed", "device", "trust_remote_code"):
        if is_given(name):
            option = flag_of(name)
            raise UserError(
                f"{option}: applies only to --model; add --model MODEL, or leave {option} out"
            )
    from teachonce.store.tools.verify import verify as read_everything

    report = read_everything(path, progress=bars, allow_partial=allow_partial)
    yield Output(report.facts(path), report.lines(path))
    report.check(path)
    if model is not None:
        from teachonce.store.read.store import open_store
        from teachonce.teacher_dump.comparison.rerun import check

        store = open_store(path, allow_partial=allow_partial)
        result = check(store, model, sample, seed, device, trust_remote_code)
        yield Output({"teacher": {"model": model, **asdict(result)}}, result.lines(path, model))
        result.check(path, model)


@command("repair store.zarr", "repair store.zarr --json")
@click.argument("path", type=PATH)
@printed
def repair(path: str) -> Iterator[Output]:
    """Verify a store and move damaged files to a quarantine folder.

    Then repeat the command that made the store: it writes only the missing parts. Metadata that can
    be derived from the rest of the store are repaired immediately. No file is deleted; the last
    line of the output describes how to undo the repair.
    """
    from teachonce.store.tools.repair import repair as mend

    parts_left, report = mend(path, progress=bars)
    facts = {"advice": report.advice, "undo": report.undo, "parts_left": parts_left}
    facts["quarantine"] = str(report.quarantine) if report.quarantine else None
    advice = [f"{path}: {report.advice}"] if report.advice else []
    yield Output(report.facts(path) | facts, [*report.lines(path), *advice])


@command("seal store.zarr", "seal store.zarr --json")
@click.argument("path", type=PATH)
@printed
def seal(path: str) -> Iterator[Output]:
    """Finish a store that several processes (--shard) have written.

    The process that writes the last part also does this. A finished store is left unchanged.
    """
    from teachonce.store.tools.seal import seal as finish

    sealed = not finish(path)
    yield Output({"finished_before": sealed}, [f"{path}: is finished already"] if sealed else [])
    yield written(path)


@command("convert store.zarr store.h5", "convert store.zarr small.zarr --codec small")
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--codec",
    type=NameOrAdded(BUILT_IN, GROUP),
    help="Encode values again by this codec, which must have a larger error.  [default: the codec"
    " of SOURCE]",
)
@printed
def convert(source: str, target: str, codec: str | None) -> Iterator[Output]:
    """Copy a store to another format or codec, or to a URL.

    TARGET ends in .zarr or .h5, or is the URL (s3://...) of a .zarr. After a stop, the same command
    continues; an upload to a URL starts again.
    """
    if "://" in target:
        if codec:
            raise UserError(
                "--codec: cannot be given with a URL; convert to a .zarr on this machine first,"
                " then to the URL"
            )
        from teachonce.store.tools.copy import upload

        upload(source, target, progress=part_bars)
    else:
        from teachonce.store.tools.copy import convert as copy

        copy(source, target, codec, progress=part_bars)
    yield written(target)


@command("push store.zarr me/my-store", "push store.zarr me/my-store --private")
@click.argument("path", type=PATH)
@click.argument("repository", metavar="USER/NAME")
@push_options
@printed
def push(path: str, repository: str, **how: Any) -> Iterator[Output]:
    """Copy a store to a dataset repository on the hub.

    The store has the same name there, and a card with the output of `info` is added. After a stop,
    the same command uploads the missing files.
    """
    from teachonce.store.tools.push import push as send

    commit = send(path, repository, **how, say=say)
    yield Output({"repository": repository, "commit": commit}, [f"pushed    {commit}"])


@command(
    "merge news.zarr novels.zarr both.zarr --recode", "merge news.zarr novels.zarr both.h5 --recode"
)
@click.argument("sources", nargs=-1, required=True, type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--recode",
    is_flag=True,
    help="Encode hidden states again if the stores were normalised by different means and"
    " standard deviations, as two dumps with codec default or small are. Adds the codec's error"
    " again.",
)
@printed
def merge(sources: tuple[str, ...], target: str, recode: bool) -> Iterator[Output]:
    """Concatenate dumps of one teacher over several corpora.

    SOURCES must hold the same features. They are copied to TARGET in the given order.
    """
    from teachonce.store.tools.merge import check_sources
    from teachonce.store.tools.merge import merge as join

    # Sources with equal values are refused only here: on the command line they are probably a
    # mistake.
    notes = check_sources(sources)
    join(sources, target, recode, progress=part_bars)
    for line in notes:
        say(line)
    yield written(target)


@command(
    "forget store.zarr --documents removed.txt",
    "forget store.zarr --texts removed-texts.txt --missing-ok",
)
@click.argument("path", type=PATH)
@click.option(
    "--documents",
    type=LocalPath(exists=True, dir_okay=False),
    help="Read documents from this file: in each line the number of a document, or the SHA-256 of"
    " its text.",
)
@click.option(
    "--texts",
    multiple=True,
    type=PATH,
    help="Read the texts themselves from this source, named as --corpus of teacher-dump."
    " Repeatable.",
)
@click.option("--text-column", help="Read this column of --texts, as for teacher-dump.")
@click.option(
    "--missing-ok",
    is_flag=True,
    help="List documents that the store does not have, instead of stopping with an error.",
)
@printed
def forget(
    path: str,
    documents: Path | None,
    texts: tuple[str, ...],
    text_column: str | None,
    missing_ok: bool,
) -> Iterator[Output]:
    """Remove documents from a store permanently.

    Only the parts that hold them are rewritten. After a stop, the same command continues; until it
    ends, the store counts as unfinished. If the store lacks one of the documents, nothing is
    changed (exit code 1), unless --missing-ok is given. Caches of the texts are deleted. Pages,
    exports, copies and students that were made from the store are listed.
    """
    from teachonce.feature_store.arguments import documents_to_forget
    from teachonce.store.tools.forget import forget as take_out
    from teachonce.store.tools.text_copies import remaining_copies
    from teachonce.student_train.data.token_cache import drop_tables

    request, find = documents_to_forget(documents, texts, text_column)
    done = take_out(path, request, find, missing_ok, drop_tables, part_bars)
    copies = remaining_copies(path, done.text, done.removed)
    facts = {
        "forgotten_documents": done.documents,
        "forgotten_sequences": done.sequences,
        "unknown": done.unknown,
        "shared_parts": done.shared,
        "removed_caches": done.removed,
        "copies": [copy._asdict() for copy in copies.there],
        "copies_not_found": [copy._asdict() for copy in copies.lost],
    }
    yield Output(facts, (*done.lines(path), *copies.lines()))
    yield written(path)


class _WithNegativeNumber(click.Command):
    """Parses a word such as -1 as a number, not as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Only if a number was typed, so that a mistyped option is still reported.
        ctx.ignore_unknown_options = any(re.fullmatch(r"-\d+", word) for word in args)
        return super().parse_args(ctx, args)


@command("show store.zarr 17", "show store.zarr -1 --json", cls=_WithNegativeNumber)
@click.argument("path", type=PATH)
@click.argument("number", type=int)
@click.option(
    "--view", default=0, show_default=True, help="Show the masks and logits of this view."
)
@allow_partial
@printed
def show(path: str, number: int, view: int, allow_partial: bool) -> Iterator[Output]:
    """Print one sequence: text, tokens, most likely pieces. -1 is the last one."""
    from teachonce.store.read.store import open_store
    from teachonce.store.tools.show import headline, printable, sequence_facts, token_lines

    facts = sequence_facts(open_store(path, allow_partial=allow_partial), number, view)
    lines = [printable(line) for text in facts["texts"] for line in text.split("\n")]
    yield Output(facts, [headline(facts), *lines, token_lines(facts)])


@command("page store.zarr --sequence 17,42", "page store.zarr --vocab 5k --out look.html")
@click.argument("path", type=PATH)
@click.option(
    "--sequence",
    "sequences",
    multiple=True,
    default=("0",),
    show_default=True,
    help="Show these sequences, a comma-separated list of numbers such as 17,42; negative numbers"
    " count from the end.",
)
@click.option(
    "--vocab",
    type=VOCABULARY,
    help=f"Show the tokens of a student of this vocabulary as well, {VOCAB_HELP}"
    "  [default: show only the teacher's tokens]",
)
@click.option(
    "--out",
    type=LocalPath(),
    help="Write the page to this file; an earlier page is replaced.  [default: STORE-page.html,"
    " next to the store]",
)
@allow_partial
@printed
def page(
    path: str, sequences: tuple[str, ...], vocab: str | None, out: Path | None, allow_partial: bool
) -> Iterator[Output]:
    """Write an HTML page that shows sequences.

    It shows the tokens of the teacher and of a student over the text, the runs of each alignment,
    the most likely pieces, attention maps and masks. It also lists the nearest sequences of the
    store (of a sample if it is large). The page is one file that needs no network.
    """
    from teachonce.feature_store.arguments import read_numbers
    from teachonce.support.html import check_page

    out = out or path_next_to(path, "page.html")
    numbers = read_numbers(sequences)
    if vocab is not None:
        check_vocabulary_word(vocab)
    # Options are checked before torch is loaded, so that a mistake is reported at once.
    check_page(out, "feature-store page")
    from teachonce.feature_store.page.report import write_store_page
    from teachonce.feature_store.student_vocabulary import StudentVocabulary
    from teachonce.store.read.derived_copies import record_copy
    from teachonce.store.read.store import open_store
    from teachonce.store.tools.show import check_number

    store = open_store(path, allow_partial=allow_partial)
    numbers = list(dict.fromkeys(check_number(store, number) for number in numbers))
    # Recorded before it is written: `forget` lists the page even if this process is killed.
    record_copy(store.source.address, store.manifest, "page", out)
    write_store_page(
        store, numbers, StudentVocabulary(vocab, store) if vocab is not None else None, out
    )
    yield Output({"page": str(out), "sequences": numbers}, [f"page in {out}"])


main.add_command(import_)
main.add_command(export)
