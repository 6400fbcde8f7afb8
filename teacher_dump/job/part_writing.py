"""Writes a part of the store: runs the teacher over its windows in every view. Measures the
calibration of hidden states on the first part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from teachonce.store import Features, PartWriter, StoreWriter
from teachonce.store.extras.word_counts import WordCounts
from teachonce.support.arrays import Array, ranges, starts
from teachonce.support.background import Calls
from teachonce.support.console import counted
from teachonce.teacher_dump.job.parts import FirstPass, NumberedPart, sequences_of
from teachonce.teacher_dump.job.plan import DumpPlan
from teachonce.teacher_dump.job.progress import DumpProgress
from teachonce.teacher_dump.teacher.forward import BatchOutput, ReadLogits, forward
from teachonce.teacher_dump.teacher.heads import (
    Decoder,
    all_logits,
    log_partitions,
    observed_logprobs,
    sampled_logits,
    top_logits,
)
from teachonce.teacher_dump.windows.masked_views import (
    DrawKey,
    MaskVocabulary,
    mask_spans,
    masked_input,
)
from teachonce.teacher_dump.windows.window import Window, count_tokens, length_batches

# Every eighth window of a first part of PART_TOKENS is read; below 32,768 tokens, every window.
CALIBRATION_TOKENS = 1 << 14
# 256 MiB in float32. Only maps are bounded: they grow with the square of a window's length.
KEPT_WEIGHTS = 1 << 26  # attention weights that the first pass may hold in memory


def dump_part(
    plan: DumpPlan,
    writer: StoreWriter,
    part: NumberedPart,
    words: WordCounts | None,
    tally: Counter[str],
    progress: Callable[[int], object],
    behind: Calls,
) -> None:
    """Run every view of a part's windows through the teacher, and write the part.

    `behind` encodes and publishes it in a thread. With `words`, rare words are masked more often.
    `tally` is passed to `forward`; `progress` receives the number of tokens of every batch (0 in
    masked views).
    """
    teacher, features, windows = plan.teacher, plan.features, part.windows
    lengths = np.array([len(w.ids) for w in windows])
    start = starts(lengths)
    part_writer = writer.part(part.number, lengths)
    part_writer.set_sequences(sequences_of(windows, features))
    inputs = [w.ids if w.read is None else w.read for w in windows]
    vocabulary = MaskVocabulary.of(teacher.tokenizer)
    # For all views: masking changes no length.
    batches = length_batches([len(ids) for ids in inputs], plan.options.tokens_per_batch)
    for view in range(features.views):
        # Masks and draws depend on these keys, never on the batch: so a dump that was killed, or
        # one with another --batch-tokens, draws the same.
        first, seed = part.first_sequence, plan.options.seed
        keys = [DrawKey(seed, view, first + i) for i in range(len(windows))]
        if view:
            spans = [
                mask_spans(w.text, *key, plan.options.mask_prob, words)
                for w, key in zip(windows, keys, strict=True)
            ]
            part_writer.set_masks(view, spans)
            inputs = [
                masked_input(w.ids, w.offsets, w.special, span, vocabulary, key)
                for w, span, key in zip(windows, spans, keys, strict=True)
            ]
        # The vector of a text is computed from view 0 (FORMAT.md, 5): with vectors alone the
        # teacher has nothing to read in masked views.
        if not (features.has_token_features or features.task or (features.embedding and not view)):
            progress(0 if view else int(lengths.sum()))
            continue
        if view == 0 and part.first_pass and part.first_pass.outputs:
            run = part.first_pass.take()
            tally.update(part.first_pass.tally)
        else:
            read = _reader(teacher.decoder, features, keys, windows)
            run = forward(teacher, windows, inputs, batches, part.first_sequence, tally, read)
        for output in run:
            rows = ranges(start[output.sequences], lengths[output.sequences])
            behind.call(_put, part_writer, view, rows, output, features)
            progress(len(rows) if view == 0 else 0)
    # `behind` has then put all rows: a part with missing rows is refused.
    behind.call(writer.publish, part_writer)


def _reader(
    decoder: Decoder | None, features: Features, keys: list[DrawKey], windows: list[Window]
) -> ReadLogits | None:
    """Return the function that computes the stored logits of a batch from the decoder's input; None
    if the store holds no logits."""
    spec = features.logits
    if decoder is None or not (spec or features.task):
        return None

    @torch.inference_mode()
    def read(values: torch.Tensor, batch: Array) -> dict[str, Array]:
        if spec is None:
            return {"values": all_logits(decoder, values)}
        if spec.tier == "head":
            inputs = values.float().cpu().numpy()
            return {"values": inputs, "log_partition": log_partitions(decoder, values)}
        if spec.tier == "topk":
            logits = top_logits(decoder, values, spec.size)
        else:
            uniform = [_uniform(keys[i], (len(windows[i].ids), spec.size)) for i in batch]
            logits = sampled_logits(decoder, values, np.concatenate(uniform))
        if spec.observed:
            # The last row of a window has no next token; the writer stores -inf there.
            following = np.concatenate([np.roll(windows[i].ids, -1) for i in batch])
            partition = logits["log_partition"]
            logits["observed"] = observed_logprobs(decoder, values, following, partition)
        return logits

    return read


def _uniform(key: DrawKey, shape: tuple[int, int]) -> Array:
    """Draw numbers from 0 (included) to 1 (excluded), the same in every release of NumPy."""
    # What `default_rng(...).random(shape)` draws today: NumPy guarantees the raw numbers of a bit
    # generator, but not the methods of `Generator`.
    raw = np.random.PCG64([*key, 1]).random_raw(shape[0] * shape[1])
    return (raw >> np.uint64(11)).reshape(shape) * 2.0**-53


def _put(part: PartWriter, view: int, rows: Array, output: BatchOutput, features: Features) -> None:
    for name, states in output.hidden.items():
        part.put_hidden(view, name, rows, states)
    for name, maps in output.attention.items():
        for sequence, probabilities in zip(output.sequences, maps, strict=True):
            part.put_attention(view, name, int(sequence), probabilities)
    if output.vectors is not None and not view:
        part.put_embedding(output.sequences, output.vectors)
    if features.task:
        numbers = output.sequences if output.of_sequences else rows
        part.put_task(view, numbers, output.logits["values"])
    if features.logits:
        part.put_logits(view, rows, output.logits)


def measured_calibration(
    plan: DumpPlan,
    windows: list[Window],
    say: Callable[[str], object],
    first_pass: FirstPass | None = None,
) -> dict[str, tuple[Array, Array]]:
    """Return mean and standard deviation [D] of the channels of each hidden state; codecs encode
    relative to them.

    An unfinished store has them already. Otherwise they are measured on windows spread evenly over
    the first part, over which the teacher then runs again. If these are all of its windows,
    `first_pass` receives the outputs, so that nothing is computed twice. `say` receives the number
    of tokens, and the progress.
    """
    teacher, out = plan.teacher, plan.options.out
    if not teacher.hidden.groups:
        return {}
    stored = StoreWriter.calibration(out) if StoreWriter.peek(out) else None
    if stored:
        return stored
    step = max(1, count_tokens(windows) // CALIBRATION_TOKENS)
    inputs = [w.ids for w in windows]
    sampled = np.arange(0, len(windows), step)
    groups = length_batches([len(inputs[i]) for i in sampled], plan.options.tokens_per_batch)
    batches = [sampled[batch] for batch in groups]
    states: dict[str, list[Array]] = {name: [] for name in teacher.hidden.groups}
    tokens = count_tokens([windows[i] for i in sampled])
    maps = sum(len(batch) * max(len(inputs[i]) for i in batch) ** 2 for batch in batches)
    fits = maps * len(plan.features.attention) <= KEPT_WEIGHTS
    # The outputs are stored if possible: a second pass over a small first part took three of ten
    # minutes (135M teacher, CPU). They are not stored if only some windows were run: rounding
    # depends on the batch, and the dump has other batches.
    same = step == 1 and all(w.read is None for w in windows)
    cache = first_pass if fits and same else None
    again = "" if cache else "; the dump reads them again"
    say(
        f"calibrate {counted(tokens, 'teacher token')} of the first part are read to measure the"
        f" mean and standard deviation of the states{again}"
    )
    # If the outputs are not stored, the dump reads and counts this part again: the tally is
    # discarded.
    tally, read = Counter[str](), None
    if cache:
        # Numbered from 0: a grown store, whose new sequences follow copied ones, is not calibrated.
        keys = [DrawKey(plan.options.seed, 0, i) for i in range(len(windows))]
        tally, read = cache.tally, _reader(teacher.decoder, plan.features, keys, windows)
    start = time.perf_counter()
    with DumpProgress(None, tokens, False, say, "calibrate") as progress:
        for output in forward(teacher, windows, inputs, batches, 0, tally, read):
            for name, values in output.hidden.items():
                states[name].append(values)
            if cache:
                cache.outputs.append(output)
            progress.advance(int(output.lengths.sum()))
    if cache:
        cache.seconds = time.perf_counter() - start
    return {name: mean_and_deviation(parts) for name, parts in states.items()}


def mean_and_deviation(parts: list[Array]) -> tuple[Array, Array]:
    """Measure mean and standard deviation [D] of states [n,D]. The deviation of a constant channel
    is set to 1."""
    # Along this axis NumPy adds one row after the other, which in float32 loses digits.
    states = np.concatenate(parts).astype(np.float64)
    deviation = states.std(axis=0)
    deviation[deviation == 0] = 1.0  # encoding divides by it
    return states.mean(axis=0).astype(np.float32), deviation.astype(np.float32)
