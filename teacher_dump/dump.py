"""The batch job: corpus -> windows -> teacher -> store, one sealed part after the other.

What loads torch and transformers is imported by `_dump`, after everything that can be refused
without them.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from store import Features, StoreWriter, open_store
from store.console import counted
from store.errors import UserError
from store.stopping import Stop, stoppable
from store.wordpiece import suggested_size
from teacher_dump.corpus import Corpus
from teacher_dump.gold import Labels
from teacher_dump.models import ResolvedModel, resolve_model
from teacher_dump.options import (
    DEFAULT_LOGITS,
    DEFAULT_MAX_LENGTH,
    DumpOptions,
    check_head,
    check_options,
    describe,
    parse_logits,
)
from teacher_dump.windows import Window, iter_windows

if TYPE_CHECKING:
    from teacher_dump.identity import StageOne
    from teacher_dump.teacher import Teacher


@dataclass(frozen=True)
class DumpSummary:
    """What a finished dump reports."""

    documents: int
    empty_lines: int
    without_tokens: int
    surrogates: int
    sequences: int
    tokens: int
    parts: int
    resumed_parts: int
    vocab: str  # a --vocab that the text is large enough for
    halved: int  # batches of this run that were too large for the memory
    widened: int  # times in this run that a sequence was run again in float32
    task: str | None = None
    gold: int = 0  # sequences with a gold label, or tokens with a gold tag
    cut: int = 0  # documents of a classification that were longer than a sequence


def dump(
    options: DumpOptions,
    say: Callable[[str], object] = lambda line: None,
    stage_one: StageOne | None = None,
) -> DumpSummary:
    """Run the teacher once over the corpus and write the store; continues a dump that was stopped.

    `say` is told, in a line each, what a user should know before the work starts. `stage_one` is
    kept beside the teacher. Raises UserError for bad input; then nothing that existed before is
    changed. Raises Stopped, with what is kept, after SIGINT or SIGTERM: between two batches once
    the teacher runs.
    """
    with stoppable(lambda: kept(options.out)) as stop:
        check_options(options)
        StoreWriter.check(options.out)
        model = replace(resolve_model(options.model), trusted=options.trust_remote_code)
        corpus = Corpus.open(options.sources(), options.text_column, options.label_column)
        resolved = options.resolved()
        say(describe(resolved, bool(options.corpus)))
        return _dump(resolved, model, corpus, say, stop, stage_one)


def kept(out: Path) -> str:
    """What a stopped dump has, and how to go on."""
    if StoreWriter.peek(out) is None:
        state = "is finished"
        if not out.exists():
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
) -> DumpSummary:
    from teacher_dump.calibration import calibration
    from teacher_dump.identity import identity, software
    from teacher_dump.parts import check_published, write_part
    from teacher_dump.teacher import load_teacher

    corpus.check()  # a bad line far down is told now, not after hours
    teacher = load_teacher(
        model,
        head="none" if options.logits == "none" and options.head == "auto" else options.head,
        hidden=options.hidden,
        attention=options.attention,
        device=options.device,
        precision=options.precision,
    )
    max_length = window_length(options.max_length, teacher)
    counters: Counter[str] = Counter()
    task = teacher.task
    windows = iter_windows(
        corpus,
        teacher.tokenizer,
        max_length,
        options.stride,
        counters,
        one_each=bool(task and task.kind == "classification"),
    )
    features = _features(options, teacher, max_length)
    if task:
        labels = Labels(task, teacher.name)
        labels.check(corpus.met(task.kind))
        windows = labels.numbered(windows)
    parts = gathered(windows, options.part_tokens, options.limit)
    first = next(parts, None)
    if first is None:
        raise UserError(
            f"{', '.join(options.corpus)}: no token in the whole corpus; nothing to dump"
        )
    say(_told(options, features))
    files = teacher.files()
    tally: Counter[str] = Counter()
    writer = StoreWriter.create_or_resume(
        options.out,
        identity=identity(options, teacher, corpus, files, max_length, stage_one),
        features=features,
        calibration=calibration(options, teacher, first),
        files=files,
        weights=teacher.weights() if options.weights else {},
        head=teacher.head_arrays() if features.logits and features.logits.tier == "head" else None,
        software=software(),
        mixed_vocab=stage_one.vocab if stage_one else None,
    )
    resumed = len(writer.published)
    documents = sequences = tokens = number = gold = 0
    with (
        closing(writer),
        tqdm(
            unit="tok", unit_scale=True, desc="dump", disable=None, total=options.limit
        ) as progress,
    ):

        def advance(done: int) -> None:
            stop.check()
            progress.update(done)

        for number, part in enumerate(itertools.chain([first], parts)):
            begun, size = time.perf_counter(), sum(len(w.ids) for w in part)
            if number not in writer.published:
                with stop.held():
                    write_part(
                        writer, number, part, sequences, teacher, features, options, tally, advance
                    )
                if progress.disable:  # no terminal: a line now and then instead of a bar
                    seconds = time.perf_counter() - begun
                    say(
                        f"part {number:<4} {counted(len(part), 'sequence')}, "
                        f"{counted(size, 'token')}, {size / seconds:,.0f} tokens/s; "
                        f"{tokens + size:,} tokens so far"
                    )
                stop.check()
            else:
                check_published(writer, number, part)
                progress.update(size)
            documents = part[-1].document + 1
            sequences += len(part)
            tokens += size
            gold += sum(int((w.numbers >= 0).sum()) for w in part if w.numbers is not None)
        writer.seal()
    return DumpSummary(
        documents,
        corpus.empty_lines,
        counters["no_tokens"],
        counters["surrogates"],
        sequences,
        tokens,
        number + 1,
        resumed,
        _vocab(options.out),
        tally["halved"],
        tally["widened"],
        task.kind if task else None,
        gold,
        counters["cut"],
    )


def _vocab(path: Path) -> str:
    with closing(open_store(path)) as store:
        size = suggested_size(store.texts(), store.tokenizer().normalizer)
    return f"{size // 1000}k" if size % 1000 == 0 else str(size)


def _told(options: DumpOptions, features: Features) -> str:
    """What the store is going to hold: which logits is only known once the teacher is loaded."""
    logits = options.logits or DEFAULT_LOGITS
    if task := features.task:
        logits = f"of {counted(len(task.labels), 'label')} ({task.kind})"
    elif logits != "none" and not features.logits:
        reason = "--head none" if options.head == "none" else "no masked-LM head in the checkpoint"
        logits = f"none ({reason})"
    return (
        f"features  logits {logits}, hidden {options.hidden}, attention {options.attention}, "
        f"{counted(features.views, 'view')}, windows of at most {features.max_length} tokens"
    )


def window_length(asked: int | None, teacher: Teacher) -> int:
    limit = teacher.max_length()
    if asked is not None and limit is not None and asked > limit:
        raise UserError(f"--max-length {asked}: the teacher reads at most {limit} tokens")
    return min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH) if asked is None else asked


def _features(options: DumpOptions, teacher: Teacher, max_length: int) -> Features:
    if options.views > 1 and teacher.tokenizer.mask_token_id is None:
        raise UserError(
            f"--views {options.views}: the teacher's tokenizer has no mask token; use --views 1"
        )
    check_head(options, teacher.head or "none")
    logits = None
    if teacher.decoder and not teacher.task:
        logits = parse_logits(
            options.logits or DEFAULT_LOGITS,
            teacher.decoder.weight.shape[1],
            teacher.vocabulary,
            teacher.head == "causal",
        )
    elif not teacher.task and options.logits not in (None, "none"):
        raise UserError(
            f"--logits {options.logits}: no LM head was read from {teacher.name}; leave --logits"
            " out for hidden states and attention maps only, or train a head first with `downstream"
            " --task mlm`"
        )
    kept = logits or teacher.task or teacher.hidden.groups or teacher.attention.groups
    if not (kept or options.text_only):
        raise UserError(
            "the checkpoint has no LM head and neither --hidden nor --attention was asked for:"
            " nothing to dump"
        )
    return Features(
        views=options.views,
        max_length=max_length,
        width=teacher.width,
        vocabulary=teacher.vocabulary,
        codec=options.codec,
        hidden=tuple(teacher.hidden.groups),
        attention=tuple(teacher.attention.groups),
        logits=logits,
        task=teacher.task,
    )


def gathered(
    windows: Iterator[Window], part_tokens: int, limit: int | None
) -> Iterator[list[Window]]:
    """Consecutive windows in groups of at least `part_tokens` tokens (the last may be smaller)."""
    part: list[Window] = []
    filled = total = 0
    for window in windows:
        if limit is not None and total + len(window.ids) > limit and total:
            break
        part.append(window)
        filled += len(window.ids)
        total += len(window.ids)
        if filled >= part_tokens:
            yield part
            part, filled = [], 0
    if part:
        yield part
