"""The batch job: corpus -> windows -> teacher -> store, one sealed part after the other.

Modules that load torch and transformers are imported by `_dump`, after everything that can be
refused without them.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.checkpoints.names import ResolvedModel, resolve_model
from teachonce.store import Features, OutsideParts, StoreWriter, TaskSpec, open_store
from teachonce.store.containers.paths import staging_of
from teachonce.store.extras.word_counts import WordCounts
from teachonce.support.background import Behind, prefetched
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.installed import software
from teachonce.support.lease import Lease
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.chosen_features import features_of, window_length
from teachonce.teacher_dump.job.early import check_config
from teachonce.teacher_dump.job.finished import check_begun, check_finished
from teachonce.teacher_dump.job.growing import Growth, Plan
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.parts import count, first_of, new_parts, opened_corpus
from teachonce.teacher_dump.job.progress import Progress
from teachonce.teacher_dump.job.telling import describe, told
from teachonce.teacher_dump.windows.masked_views import count_words
from teachonce.teacher_dump.windows.window import Window
from teachonce.training.wordpiece import suggested_size

if TYPE_CHECKING:
    from teachonce.teacher_dump.job.identity import StageOne
    from teachonce.teacher_dump.teacher.teacher import Teacher

PARTS_AHEAD = 1  # parts cut into tokens while the teacher runs over the one before
BATCHES_BEHIND = 2  # batches of the teacher that wait to be encoded and written


@dataclass(frozen=True)
class DumpSummary:
    """The counts that a finished dump reports."""

    documents: int
    sequences: int
    tokens: int
    parts: int
    vocab: str  # a --vocab that the text is large enough for
    empty_lines: int = 0
    without_tokens: int = 0
    surrogates: int = 0
    resumed_parts: int = 0
    halved: int = 0  # batches of this run that were too large for the memory
    widened: int = 0  # times in this run that a sequence was run again in float32
    task: str | None = None
    gold: int = 0  # sequences with a gold label, or tokens with a gold tag
    cut: int = 0  # documents that were longer than the one sequence that is kept of them
    finished_before: bool = False  # the same command had made the store: nothing was done


def dump(
    options: DumpOptions,
    say: Callable[[str], object] = lambda line: None,
    stage_one: StageOne | None = None,
) -> DumpSummary:
    """Run the teacher once over the corpus and write the store, or continue a stopped dump. One
    that these options have finished stays as it is.

    `say` is told, in a line each, what a user should know before the work starts. `stage_one` is
    kept beside the teacher. Raises UserError for bad input; nothing that existed before is then
    changed. Raises Stopped, which says what is kept, after SIGINT or SIGTERM: between two batches
    once the teacher runs.
    """
    if options.shard:
        raise UserError(
            f"--shard {options.shard}: from Python call teachonce.teacher_dump.job.sharing.share"
        )
    if options.ray is not None:
        raise UserError("--ray: from Python call teachonce.teacher_dump.job.on_ray.share_on_ray")
    with stoppable(lambda: kept(options.out)) as stop:
        there = check_begun(options)
        resolved, model, corpus = opened(options, say)
        with Growth.of(resolved) as growth:
            return _dump(resolved, model, corpus, say, stop, stage_one, there, growth)


def opened(
    options: DumpOptions, say: Callable[[str], object]
) -> tuple[DumpOptions, ResolvedModel, Corpus]:
    """Find teacher and corpus, decide every `auto`, and say the settings that are known by then.

    Raises UserError for what cannot be found or read.
    """
    model = replace(resolve_model(options.model), trusted=options.trust_remote_code)
    check_config(options, model)
    corpus = opened_corpus(options)
    resolved = options.resolved()
    say(describe(resolved, bool(options.corpus)))
    return resolved, model, corpus


def kept(out: Path | str) -> str:
    """Tell in a line what a stopped dump has written, and how to go on."""
    if StoreWriter.peek(out) is None:
        state = "is finished"
        if not staging_of(out).exists():
            state = "nothing is written yet; the same command begins anew"
        return f"{out}: {state}"
    parts, tokens = StoreWriter.kept(out)
    kept = f"{counted(parts, 'part')} with {counted(tokens, 'token')} kept"
    return f"{out}: {kept}; the same command goes on there"


def _dump(
    options: DumpOptions,
    model: ResolvedModel,
    corpus: Corpus,
    say: Callable[[str], object],
    stop: Stop,
    stage_one: StageOne | None,
    there: dict[str, Any] | None,
    growth: Growth | None,
) -> DumpSummary:
    corpus.check()  # a bad line far down is told now, not after hours
    if stage_one and stage_one.corpus not in (None, corpus.identity()):
        raise UserError(
            f"{', '.join(options.corpus)}: was changed after the training on both vocabularies; put"
            f" it back, or remove {options.out}.mixed-vocab to train on the text that is there now"
        )
    teacher = teacher_of(options, model)
    features = features_of(options, teacher, window_length(options.max_length, teacher))
    if growth:
        stage_one = growth.stage_one()
        check_growth(growth, options, teacher, corpus, features)
    if there:
        now = identity_of(options, teacher, corpus, features, stage_one, growth)
        counts = check_finished(options.out, there, now, features)
        say(f"{options.out}: was finished before, by the same command; nothing to do")
        return DumpSummary(*counts, vocab=_vocab(options.out), finished_before=True)
    counters: Counter[str] = Counter()
    plan, cut = new_parts(options, corpus, teacher, features, counters, stop, growth, say)
    words = word_counts(options, corpus, growth)
    with closing(prefetched(cut, PARTS_AHEAD)) as parts:
        first = first_of(parts, options, plan)
        say(told(options, features))
        writer = begun(options, teacher, corpus, features, first, stage_one, words, growth=growth)
        with closing(writer):
            if plan:
                plan.take(writer, stop.check)
            resumed = len(writer.published)
            every = itertools.chain([first] if first else [], parts)
            counters.update(_write(writer, every, teacher, options, corpus, say, stop, words, plan))
            corpus.check_unchanged()
            writer.seal()
    return summary(options.out, corpus.empty_lines, counters, resumed, teacher.task)


def teacher_of(options: DumpOptions, model: ResolvedModel) -> Teacher:
    """Load the teacher, with what the options want to read of it."""
    from teachonce.teacher_dump.teacher.teacher import load_teacher

    return load_teacher(
        model,
        head="none" if options.logits == "none" and options.head == "auto" else options.head,
        hidden=options.hidden,
        attention=options.attention,
        device=options.device,
        precision=options.precision,
        pooling=options.pooling,
        prompt=options.prompt,
    )


def identity_of(
    options: DumpOptions,
    teacher: Teacher,
    corpus: Corpus,
    features: Features,
    stage_one: StageOne | None,
    growth: Growth | None,
) -> dict[str, Any]:
    """Return the identity of the store that the options ask for."""
    from teachonce.teacher_dump.job.identity import identity

    origin = growth.identity() if growth else None
    files = teacher.files()
    return identity(options, teacher, corpus, files, features.max_length, stage_one, origin)


def check_growth(
    growth: Growth, options: DumpOptions, teacher: Teacher, corpus: Corpus, features: Features
) -> None:
    """Raise UserError unless the store to grow from is of this teacher and these options."""
    now = identity_of(options, teacher, corpus, features, growth.stage_one(), growth)
    growth.check(now, teacher.files()["config.json"], features)


def begun(
    options: DumpOptions,
    teacher: Teacher,
    corpus: Corpus,
    features: Features,
    first: list[Window],
    stage_one: StageOne | None,
    words: WordCounts | None,
    lease: Lease | None = None,
    growth: Growth | None = None,
) -> StoreWriter:
    """Begin the store, or go on with an unfinished one; the first part gives the calibration,
    unless the store that it grew from does.

    `lease` is that of the store, where other processes write parts of it, too.
    """
    from teachonce.teacher_dump.job.calibration import calibration

    head = bool(features.logits and features.logits.tier == "head")
    return StoreWriter.create_or_resume(
        options.out,
        identity=identity_of(options, teacher, corpus, features, stage_one, growth),
        features=features,
        outside=OutsideParts(
            calibration=growth.calibration if growth else calibration(options, teacher, first),
            files=teacher.files(),
            weights=teacher.weights() if options.weights else {},
            head=teacher.head_arrays() if head else None,
            extras=(stage_one.vocab if stage_one else None, words),
        ),
        software=software(),
        lease=lease,
    )


def summary(
    out: Path | str, empty_lines: int, counters: Counter[str], resumed: int, task: TaskSpec | None
) -> DumpSummary:
    """Return what a finished dump reports of itself."""
    return DumpSummary(
        documents=counters["documents"],
        empty_lines=empty_lines,
        without_tokens=counters["no_tokens"],
        surrogates=counters["surrogates"],
        sequences=counters["sequences"],
        tokens=counters["tokens"],
        parts=counters["parts"],
        resumed_parts=resumed,
        vocab=_vocab(out),
        halved=counters["halved"],
        widened=counters["widened"],
        task=task.kind if task else None,
        gold=counters["gold"],
        cut=counters["cut"],
    )


def word_counts(
    options: DumpOptions, corpus: Corpus, growth: Growth | None = None
) -> WordCounts | None:
    """Take word counts from an unfinished store, or from that which it grew from, or count; None if
    all words are masked alike."""
    if options.mask_words == "uniform":
        return None
    kept = WordCounts.unfinished(options.out) if StoreWriter.peek(options.out) else None
    return kept or (growth and growth.words()) or count_words(corpus)


def _write(
    writer: StoreWriter,
    parts: Iterable[list[Window]],
    teacher: Teacher,
    options: DumpOptions,
    corpus: Corpus,
    say: Callable[[str], object],
    stop: Stop,
    words: WordCounts | None,
    plan: Plan | None,
) -> Counter[str]:
    """Write the parts that are not published yet, after those that the `plan` has taken over.

    Returns the counts of all parts, published ones too, and the tally of `forward`.
    """
    from teachonce.teacher_dump.job.part_writing import check_published, write_part

    done = Counter(plan.kept) if plan else Counter[str]()
    limit = plan.tokens if plan else options.limit
    features = writer.features  # where texts are cut, or overlap, characters tell no share
    in_pieces = bool(features.task or features.embedding or options.stride)
    with (
        Behind(BATCHES_BEHIND, say) as behind,
        Progress(None if plan else corpus, limit, in_pieces, say) as progress,
    ):

        def advance(tokens: int) -> None:
            stop.check()
            progress.advance(tokens)

        for number, part in enumerate(parts, done["parts"]):
            begun = time.perf_counter()
            progress.begin(part)
            if number in writer.published:
                check_published(writer, number, part)
                progress.skip(part)
            else:
                with stop.held():
                    write_part(
                        *(writer, number, part, done["sequences"], teacher, options, done),
                        advance,
                        behind,
                        words,
                    )
                progress.end(number, part, time.perf_counter() - begun)
                stop.check()
            count(done, part)
        behind.finish()
    return done


def _vocab(path: Path | str) -> str:
    with closing(open_store(path)) as store:
        size = suggested_size(store.single_texts(), store.tokenizer().normalizer)
    return f"{size // 1000}k" if size % 1000 == 0 else str(size)
