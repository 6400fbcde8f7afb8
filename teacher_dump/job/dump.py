"""The batch job: corpus -> windows -> teacher -> store, one part after the other.

Modules that load torch and transformers are imported inside functions: loading them takes seconds,
and wrong arguments are refused before.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from teachonce.checkpoints.declared import suggested_decoder
from teachonce.store import Features, StoreWriter, open_store
from teachonce.store.containers.paths import staging_of
from teachonce.store.errors import StoreError, command, without_remedy
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.format.identity import object_in
from teachonce.store.tools.info import unread_line
from teachonce.support.background import BackgroundCalls, prefetched
from teachonce.support.console import counted, takes_option
from teachonce.support.differences import describe_differences, differences, first_few
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.lease import Lease
from teachonce.support.packages import software
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.job.growing import CopyPlan
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.parts import (
    FirstPass,
    NumberedPart,
    check_published,
    count,
    first_part,
    parts_of,
)
from teachonce.teacher_dump.job.plan import DumpPlan, StageOne, planned
from teachonce.teacher_dump.job.progress import DumpProgress
from teachonce.teacher_dump.job.versions import check_numbers
from teachonce.teacher_dump.windows.masked_views import count_words
from teachonce.teacher_dump.windows.window import Window
from teachonce.training.wordpiece import suggested_size

# Because cutting runs ahead of the teacher, and encoding behind it, a dump of states has 0.97 of
# the speed of the bare forward pass (RESULTS, "Dumping hidden states, bf16").
PARTS_AHEAD = 1  # parts that are tokenized while the teacher runs over the part before
BATCHES_BEHIND = 2  # batches of the teacher that wait to be encoded and written
# Arguments that are compared before the teacher is loaded: no `auto` is among them.
EARLY_ARGUMENTS = ("seed", "views", "mask_prob", "stride", "batch_tokens", "limit", "weights")


@dataclass(frozen=True)
class DumpSummary:
    """Holds the counts that a finished dump reports."""

    documents: int
    sequences: int
    tokens: int
    parts: int
    student: str  # suggested options of student-train
    unread: str  # a line on the stored features that no default loss reads, or ""
    empty_lines: int = 0
    without_tokens: int = 0
    surrogates: int = 0
    resumed_parts: int = 0
    halved: int = 0  # batches of this run that did not fit into memory
    widened: int = 0  # sequences of this run that were run again in float32
    gold_task: str | None = None  # the kind of a task that can have gold labels, else None
    gold: int = 0  # sequences with a gold label, or tokens with a gold tag
    cut: int = 0  # documents that were truncated to one sequence
    read: int = 0  # sequences that the teacher read
    lost: float = 0.0  # share of all characters that was cut off
    finished_before: bool = False  # the store was finished already; nothing was done


def dump(
    options: DumpOptions,
    say: Callable[[str], object] = lambda line: None,
    stage_one: StageOne | None = None,
) -> DumpSummary:
    """Run the teacher once over the corpus and write the store, or continue a stopped dump.

    A store that was finished with the same options is left unchanged. `say` receives the lines of
    settings and progress. `stage_one` is stored with the teacher's output.

    Raises UserError for bad input, before any existing file is changed. After SIGINT or SIGTERM it
    raises Stopped, which reports what is written; while the teacher runs, this happens between two
    batches.
    """
    if not isinstance(options, DumpOptions):
        raise TypeError(
            f"dump: expected DumpOptions, got {type(options).__name__}; call"
            " dump(DumpOptions(model, out, corpus=...))"
        )
    if options.shard:
        raise UserError(
            f"--shard {options.shard}: from Python call teachonce.teacher_dump.job.sharing.share"
        )
    if options.ray is not None:
        raise UserError("--ray: from Python call teachonce.teacher_dump.job.on_ray.share_on_ray")
    with stoppable(lambda: written_line(options.out)) as stop:
        finished = check_existing(options)
        # A finished store is planned, too: only the plan has the hashes to compare it with.
        with planned(options, say, stage_one) as plan:
            plan.check_growth()
            if finished is None:
                return _dump(plan, say, stop)
            counts = count_finished(options.out, finished, plan.identity, plan.features)
            say(f"{options.out}: was finished before, by the same command; nothing to do")
            return DumpSummary(*counts, *_advice(plan), finished_before=True)


def written_line(out: Path | str) -> str:
    """Describe in a line what a stopped dump has written, and how to continue it."""
    if StoreWriter.peek(out) is None:
        state = "is finished"
        if not staging_of(out).exists():
            state = "nothing is written yet; the same command starts from the beginning"
        return f"{out}: {state}"
    parts, tokens = StoreWriter.published_counts(out)
    written = f"{counted(parts, 'part')} with {counted(tokens, 'teacher token')} written"
    return f"{out}: {written}; run the same command to continue"


def _dump(plan: DumpPlan, say: Callable[[str], object], stop: Stop) -> DumpSummary:
    """Cut the corpus, write the parts and seal the store."""
    counters: Counter[str] = Counter()
    copy_plan, cut = parts_of(plan, counters, stop, say)
    # Before the thread starts to cut: counting reads the sources as well, and a source hashes only
    # the pass that was started last.
    words = word_counts(plan)
    with closing(prefetched(cut, PARTS_AHEAD)) as parts:
        first = first_part(parts, plan, say, copy_plan)
        say(plan.features_line())
        grown_from = plan.growth.store if plan.growth else None
        # Before the writer opens the store: a refusal must not change it.
        check_numbers(plan.options.out, grown_from, plan.teacher, say)
        first_pass = FirstPass()
        writer = open_writer(plan, first, words, say, first_pass=first_pass)
        with closing(writer):
            if copy_plan:
                copy_plan.copy(writer, stop.check)
            resumed = len(writer.published)
            every = itertools.chain([first] if first else [], parts)
            counters.update(_write(plan, writer, every, first_pass, words, copy_plan, say, stop))
            # A corpus that was edited during the dump would give a store that no corpus gives.
            plan.corpus.check_unchanged()
            if copy_plan:
                # If that store was rewritten meanwhile, the copied parts may be of two stores.
                copy_plan.store.watch.check()
            writer.seal()
    return summary(plan, plan.corpus.empty_lines, counters, resumed)


def open_writer(
    plan: DumpPlan,
    first: list[Window],
    words: WordCounts | None,
    say: Callable[[str], object],
    lease: Lease | None = None,
    first_pass: FirstPass | None = None,
) -> StoreWriter:
    """Create the store, or open the unfinished one.

    The calibration is copied from the store of --grow-from, or measured on the `first` part; `say`
    receives its progress. Pass the store's `lease` if other processes write parts, too, and a
    `first_pass` if this process writes the first part.
    """
    from teachonce.teacher_dump.job.part_writing import measured_calibration

    teacher, growth, out, versions = plan.teacher, plan.growth, plan.options.out, software()
    # The writer compares the arguments, too, but the calibration before it takes minutes.
    StoreWriter.check_joinable(out, plan.identity, plan.features, versions, lease is not None)
    return StoreWriter.create_or_resume(
        out,
        identity=plan.identity,
        features=plan.features,
        # Copied parts remain encoded relative to their own calibration, so new parts must use it.
        calibration=growth.store.calibration
        if growth
        else measured_calibration(plan, first, say, first_pass),
        files=teacher.files(),
        weights=teacher.weights() if plan.options.weights else {},
        head=plan.stored_head(),
        extras=(plan.stage_one.vocab if plan.stage_one else None, words),
        software=versions,
        lease=lease,
    )


def summary(plan: DumpPlan, empty_lines: int, counters: Counter[str], resumed: int) -> DumpSummary:
    """Gather the counts of a finished dump."""
    (student, unread), task = _advice(plan), plan.features.task
    return DumpSummary(
        documents=counters["documents"] - counters["unused"],
        empty_lines=empty_lines,
        without_tokens=counters["no_tokens"],
        surrogates=counters["surrogates"],
        sequences=counters["sequences"],
        tokens=counters["tokens"],
        parts=counters["parts"],
        resumed_parts=resumed,
        student=student,
        unread=unread,
        halved=counters["halved"],
        widened=counters["widened"],
        gold_task=task.kind if task and task.output_kind == "one label" else None,
        gold=counters["gold"],
        cut=counters["cut"],
        read=counters["read"],
        lost=counters["lost"] / max(1, counters["characters"]),
    )


def word_counts(plan: DumpPlan) -> WordCounts | None:
    """Return the word counts of the unfinished store, of --grow-from, or of the corpus, in this
    order. None if all words are masked equally often."""
    if plan.options.mask_words == "uniform":
        return None
    out = plan.options.out
    # The counts decide which words are masked, so a continued dump must use its first counts.
    stored = WordCounts.unfinished(out) if StoreWriter.peek(out) else None
    grown = WordCounts.stored(plan.growth.store) if plan.growth else None
    return stored or grown or count_words(plan.corpus)


def _write(
    plan: DumpPlan,
    writer: StoreWriter,
    parts: Iterable[list[Window]],
    first_pass: FirstPass | None,
    words: WordCounts | None,
    copy_plan: CopyPlan | None,
    say: Callable[[str], object],
    stop: Stop,
) -> Counter[str]:
    """Write the parts that are not published yet, numbered after the copied parts. `first_pass`
    belongs to the first of `parts`.

    Returns the counts of all parts, published ones too, and the tally of `forward`.
    """
    from teachonce.teacher_dump.job.part_writing import dump_part

    done = Counter(copy_plan.counts) if copy_plan else Counter[str]()
    # Progress of a grown store counts the tokens of new documents, which the comparison knows. The
    # numbers of new documents begin after the old store's, and give no share of the corpus.
    limit = copy_plan.tokens if copy_plan else plan.options.limit
    # If texts are truncated or rendered, or windows overlap, the characters read are not a share of
    # the corpus.
    by_documents = any(
        (plan.features.task, plan.features.embedding, plan.options.stride, plan.options.messages)
    )
    with (
        BackgroundCalls(BATCHES_BEHIND, say) as behind,
        DumpProgress(None if copy_plan else plan.corpus, limit, by_documents, say) as progress,
    ):

        def advance(tokens: int) -> None:
            stop.check()
            progress.advance(tokens)

        for number, windows in enumerate(parts, done["parts"]):
            start = time.perf_counter()
            progress.begin(windows)
            if number in writer.published:
                check_published(writer, number, windows)
                progress.skip(windows)
            else:
                part = NumberedPart(number, done["sequences"], windows, first_pass)
                # A signal is raised by `advance`, between batches, not inside of a library.
                with stop.deferred():
                    dump_part(plan, writer, part, words, done, advance, behind)
                # If the calibration ran the teacher over this part, its time counts as well.
                first_seconds = first_pass.seconds if first_pass else 0.0
                progress.end(number, windows, time.perf_counter() - start + first_seconds)
                stop.check()
            first_pass = None
            count(done, windows)
        behind.finish()
    return done


def check_existing(options: DumpOptions, shared: bool = False) -> dict[str, Any] | None:
    """Return the root attributes of a finished store at --out, or None if a store can be created or
    continued there.

    shared: other processes may write the store now. Raises UserError if one of EARLY_ARGUMENTS
    differs from the store's, or if the path cannot be used.
    """
    stored = (
        StoreWriter.peek(options.out, "sealed") if shared else StoreWriter.finished(options.out)
    )
    if stored is None:
        StoreWriter.check_writable(options.out, shared)
        return None
    then = object_in(stored["identity"], "arguments")
    now = {name: getattr(options, name) for name in EARLY_ARGUMENTS}
    if options.batch_tokens is None:  # then the store's value is used
        del now["batch_tokens"]
    check_same_dump(options.out, differences({name: then.get(name) for name in now}, now))
    return stored


def count_finished(
    out: Path | str, stored: Mapping[str, Any], identity: Mapping[str, Any], features: Features
) -> tuple[int, int, int, int]:
    """Count documents, sequences, tokens and parts of a finished store.

    Raises UserError if the teacher, the text or an option differs, or if a part is missing.
    """
    changes = StoreWriter.changed_arguments(stored, identity, features.to_json())
    check_same_dump(out, changes)
    try:
        with closing(open_store(out)) as store:
            # An array of each part is read, so that a missing part is found here.
            parts = len(store.manifest.parts)
            numbers = [store.part(index).all("sequence/document") for index in range(parts)]
            # Documents are numbered from 0, and parts hold them in order.
            documents = 1 + int(numbers[-1][-1])
            return documents, len(store), int(store.meta["tokens"]), parts
    except StoreError as error:
        raise UserError(
            f"{out}: exists already and is finished, but damaged ({without_remedy(error)}); run"
            f" {command('repair', out)}, which quarantines damaged parts, then run this command"
            " again"
        ) from error


def check_same_dump(out: Path | str, changes: Iterable[tuple[str, str, str]]) -> None:
    """Raise UserError if the finished store at `out` was made with other arguments. `changes` is
    the result of `differences`."""
    changes = list(changes)
    differ = describe_differences(changes)
    if differ:
        # If only the sources differ, the corpus may have grown: most of the work can be reused.
        grows = all(key.startswith("identity.corpus.sources.") for key, _, _ in changes)
        offered = takes_option("grow_from") is not False  # imports lack the option
        hint = f" (to dump only what is new: --grow-from {quote(str(out))} --out ANOTHER)"
        raise UserError(
            f"{out}: exists already and was finished with other arguments:"
            f" {first_few(differ)}{hint if grows and offered else ''}; {ANOTHER}"
        )


def _advice(plan: DumpPlan) -> tuple[str, str]:
    """Suggest options of student-train for the finished store, and describe the features that no
    default loss reads. For a causal teacher, the suggested student is a decoder."""
    teacher, logits = plan.teacher, plan.features.logits
    with closing(open_store(plan.options.out)) as store:
        unread = unread_line(store)
        if logits and logits.next_token:
            return f"--student {suggested_decoder(teacher.config.to_dict())} --vocab 8k", unread
        size = suggested_size(store.single_texts(), teacher.tokenizer.backend_tokenizer.normalizer)
    return f"--vocab {size // 1000}k", unread
