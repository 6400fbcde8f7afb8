"""The batch job: corpus -> windows -> teacher -> store, one sealed part after the other."""

from __future__ import annotations

import hashlib
import itertools
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from store import Features, StoreWriter
from store.console import counted
from store.errors import UserError
from store.stopping import Stop, Stopped, stoppable
from teacher_dump.batches import length_batches
from teacher_dump.corpus import Corpus
from teacher_dump.forward import forward
from teacher_dump.models import resolve_model
from teacher_dump.options import DEFAULT_MAX_LENGTH, DumpOptions, check_options, parse_logits
from teacher_dump.parts import write_part
from teacher_dump.teacher import Teacher, load_teacher
from teacher_dump.windows import Window, iter_windows

CALIBRATION_TOKENS = 1 << 14


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
    halved: int  # batches of this run that were too large for the memory
    widened: int  # times in this run that a sequence was run again in float32


def dump(options: DumpOptions, say: Callable[[str], object] = lambda line: None) -> DumpSummary:
    """Run the teacher once over the corpus and write the store; continues a dump that was stopped.

    `say` is told, in a line each, what a user should know before the work starts. Raises UserError
    for bad input; then nothing that existed before is changed. Raises Stopped, with what is kept,
    after SIGINT or SIGTERM: between two batches once the teacher runs.
    """
    with stoppable() as stop:
        try:
            return _dump(options.resolved(), say, stop)
        except Stopped as stopped:
            raise Stopped(stopped.number, _kept(options.out)) from None


def _kept(out: Path) -> str:
    if StoreWriter.peek(out) is None:
        state = "is finished"
        if not out.exists():
            state = "nothing is written yet; the same command begins anew"
        return f"{out}: {state}"
    parts, tokens = StoreWriter.kept(out)
    return f"{out}: {parts} parts with {tokens:,} tokens are kept; the same command goes on there"


def _dump(options: DumpOptions, say: Callable[[str], object], stop: Stop) -> DumpSummary:
    check_options(options)
    StoreWriter.check(options.out)
    corpus = Corpus.open(list(options.corpus), text_column=options.text_column)
    corpus.check()  # a bad line far down is told now, not after hours
    teacher = load_teacher(
        options.model,
        head="none" if options.logits == "none" else options.head,
        hidden=options.hidden,
        attention=options.attention,
        device=options.device,
        precision=options.precision,
    )
    max_length = _max_length(options.max_length, teacher)
    counters: Counter[str] = Counter()
    windows = iter_windows(corpus, teacher.tokenizer, max_length, options.stride, counters)
    features = _features(options, teacher, max_length)
    parts = _parts(windows, options.part_tokens, options.limit)
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
        identity=_identity(options, teacher, corpus, files, max_length),
        features=features,
        calibration=_calibration(options, teacher, first),
        files=files,
        weights=teacher.weights() if options.weights else {},
        head=teacher.head_arrays() if features.logits and features.logits.tier == "head" else None,
        software=software(),
    )
    resumed = len(writer.published)
    documents = sequences = tokens = number = 0
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
                progress.update(size)
            documents = part[-1].document + 1
            sequences += len(part)
            tokens += size
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
        tally["halved"],
        tally["widened"],
    )


def _told(options: DumpOptions, features: Features) -> str:
    """What the store is going to hold: which logits is only known once the teacher is loaded."""
    logits = options.logits
    if logits != "none" and not features.logits:
        reason = "--head none" if options.head == "none" else "no masked-LM head in the checkpoint"
        logits = f"none ({reason})"
    return (
        f"features  logits {logits}, hidden {options.hidden}, attention {options.attention}, "
        f"{counted(features.views, 'view')}, windows of at most {features.max_length} tokens"
    )


def software() -> dict[str, str]:
    """Versions of everything that shapes the numbers in a store."""
    names = ("teachonce", "torch", "transformers", "tokenizers", "numpy", "zarr", "h5py")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _max_length(asked: int | None, teacher: Teacher) -> int:
    limit = teacher.max_length()
    if asked is not None and limit is not None and asked > limit:
        raise UserError(f"--max-length {asked}: the teacher reads at most {limit} tokens")
    return min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH) if asked is None else asked


def _features(options: DumpOptions, teacher: Teacher, max_length: int) -> Features:
    if options.views > 1 and teacher.tokenizer.mask_token_id is None:
        raise UserError(
            f"--views {options.views}: the teacher's tokenizer has no mask token; use --views 1"
        )
    logits = None
    if teacher.decoder:
        logits = parse_logits(options.logits, teacher.decoder.weight.shape[1], teacher.vocabulary)
    if not (logits or teacher.hidden.groups or teacher.attention.groups):
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
    )


def _identity(
    options: DumpOptions, teacher: Teacher, corpus: Corpus, files: dict[str, bytes], max_length: int
) -> dict[str, Any]:
    kept = (
        "seed",
        "views",
        "mask_prob",
        "stride",
        "batch_tokens",
        "part_tokens",
        "precision",
        "limit",
        "weights",
    )
    arguments = {name: getattr(options, name) for name in kept}
    return {
        "teacher": {
            "id": teacher.name,
            "revision": resolve_model(options.model).revision,
            "architecture": type(teacher.model).__name__,
            "weights_hash": teacher.weights_hash(),
            "config_hash": hashlib.sha256(files["config.json"]).hexdigest(),
        },
        "tokenizer_hash": hashlib.sha256(files["tokenizer.json"]).hexdigest(),
        "corpus": corpus.identity(),
        "arguments": {
            **arguments,
            "max_length": max_length,
            "device": torch.device(options.device).type,
        },
    }


def _parts(
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


def _calibration(
    options: DumpOptions, teacher: Teacher, windows: list[Window]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """That of the unfinished store, else a new one."""
    if StoreWriter.peek(options.out):
        return StoreWriter.calibration(options.out)
    return _calibrate(teacher, windows, options.batch_tokens)


def _calibrate(
    teacher: Teacher, windows: list[Window], batch_tokens: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and deviation of every channel over windows spread evenly through the first part."""
    step = max(1, sum(len(w.ids) for w in windows) // CALIBRATION_TOKENS)
    inputs = [w.ids for w in windows]
    chosen = np.arange(0, len(windows), step)
    batches = length_batches([len(inputs[i]) for i in chosen], batch_tokens)
    states: dict[str, list[np.ndarray]] = {name: [] for name in teacher.hidden.groups}
    for known in forward(teacher, windows, inputs, [chosen[b] for b in batches], 0, Counter()):
        for name, values in known.hidden.items():
            states[name].append(values)
    statistics = {}
    for name, parts in states.items():
        joined = np.concatenate(parts).astype(np.float64)
        deviation = joined.std(axis=0)
        deviation[deviation == 0] = 1.0
        statistics[name] = (joined.mean(axis=0).astype(np.float32), deviation.astype(np.float32))
    return statistics
