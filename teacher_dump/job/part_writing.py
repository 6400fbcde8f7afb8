"""Writes one part of the store: runs the teacher over its windows in every view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch

from teachonce.store import Features, PartWriter, Sequences, StoreWriter
from teachonce.store.extras.word_counts import WordCounts
from teachonce.support.arrays import Array, ranges, starts
from teachonce.support.background import Calls
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher.forward import Known, Logits, forward
from teachonce.teacher_dump.teacher.heads import (
    Decoder,
    all_logits,
    log_partitions,
    sampled_logits,
    top_logits,
)
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.teacher_dump.windows.masked_views import mask_spans, masked_input
from teachonce.teacher_dump.windows.window import Window, length_batches

Keys = list[tuple[int, int, int]]  # of each window: seed, view, number of the sequence in the store

VERSIONS = ("teachonce", "transformers", "tokenizers")  # packages that cut a corpus into sequences


def write_part(
    writer: StoreWriter,
    number: int,
    windows: list[Window],
    first_sequence: int,
    teacher: Teacher,
    options: DumpOptions,
    tally: Counter[str],
    progress: Callable[[int], object],
    behind: Calls,
    words: WordCounts | None = None,
) -> None:
    """Run every view of `windows` through the teacher, and write them as part `number`.

    `behind` encodes and publishes them. With `words` rare words are masked more often. Masks and
    draws depend on (seed, view, number of the sequence in the store), never on the batch.
    `tally` is that of `forward`; `progress` is told the tokens of every batch (0 in masked views).
    """
    features, lengths = writer.features, np.array([len(w.ids) for w in windows])
    start = starts(lengths)
    part = writer.part(number, lengths)
    part.set_sequences(sequences_of(windows, features))
    batches = length_batches([len(w.teacher_ids) for w in windows], options.batch_tokens)
    for view in range(features.views):
        keys = [(options.seed, view, first_sequence + i) for i in range(len(windows))]
        inputs = (
            _view_inputs(part, view, windows, keys, teacher, options, words)
            if view
            else [w.teacher_ids for w in windows]
        )
        if not (features.of_tokens or features.task or (features.embedding and not view)):
            progress(0 if view else int(lengths.sum()))
            continue
        read = _reader(teacher.decoder, features, keys, lengths)
        for known in forward(teacher, windows, inputs, batches, first_sequence, tally, read):
            rows = ranges(start[known.sequences], lengths[known.sequences])
            behind.call(_put, part, view, rows, known, features)
            progress(len(rows) if view == 0 else 0)
    behind.call(writer.publish, part)


def check_published(writer: StoreWriter, number: int, windows: list[Window]) -> None:
    """Raise UserError unless the published part `number` was made of these windows.

    Other versions of the libraries may cut other windows. The store would then hold some sequences
    twice and others not at all.
    """
    lengths = np.array([len(w.ids) for w in windows])
    differ = writer.differing(number, lengths, sequences_of(windows, writer.features))
    if differ:
        raise other_sequences(writer, number, "published before", f"{differ[0]} differs")


def other_sequences(writer: StoreWriter, number: int, when: str, what: str) -> UserError:
    """The error for a part that was cut before and would be cut otherwise now."""
    versions = [
        f"{name} {then} then and {version(name)} now"
        for name, then in writer.software.items()
        if name in VERSIONS and then != version(name)
    ]
    return UserError(
        f"{writer.path}: part {number}, {when}, is of other sequences than the corpus gives now"
        f" ({what}; {', '.join(versions) or 'with the same libraries'}); install the versions that"
        " began it, or give another name"
    )


def sequences_of(windows: list[Window], features: Features) -> Sequences:
    """Make the sequences of a part of windows."""
    return Sequences(
        texts=[w.text for w in windows],
        document=[w.document for w in windows],
        document_begin=[w.document_begin for w in windows],
        hard_cut=[w.hard_cut for w in windows],
        token_ids=np.concatenate([w.ids for w in windows]),
        offsets=np.concatenate([w.offsets for w in windows]),
        special=np.concatenate([w.special for w in windows]),
        gold=_gold(windows) if features.task else None,
    )


def _gold(windows: list[Window]) -> Array:
    return np.concatenate([w.numbers for w in windows if w.numbers is not None])


def _view_inputs(
    part: PartWriter,
    view: int,
    windows: list[Window],
    keys: Keys,
    teacher: Teacher,
    options: DumpOptions,
    words: WordCounts | None,
) -> list[Array]:
    spans = [
        mask_spans(w.text, *key, options.mask_prob, words)
        for w, key in zip(windows, keys, strict=True)
    ]
    part.set_masks(view, spans)
    specials = teacher.tokenizer.all_special_ids
    return [
        masked_input(
            w.ids,
            w.offsets,
            w.special,
            s,
            teacher.tokenizer.mask_token_id,
            len(teacher.tokenizer),  # some models pad their vocabulary with rows never trained
            specials,
            key,
        )[0]
        for w, s, key in zip(windows, spans, keys, strict=True)
    ]


def _reader(
    decoder: Decoder | None, features: Features, keys: Keys, lengths: Array
) -> Logits | None:
    """Make a function from the decoder's input of a batch to what is kept of its logits."""
    spec = features.logits
    if decoder is None or not (spec or features.task):
        return None

    @torch.inference_mode()
    def read(values: torch.Tensor, batch: Array) -> tuple[Array, ...]:
        if spec is None:
            return (all_logits(decoder, values),)
        if spec.tier == "topk":
            return top_logits(decoder, values, spec.size)
        if spec.tier == "head":
            return values.float().cpu().numpy(), log_partitions(decoder, values)
        chances = [
            np.random.default_rng([*keys[i], 1]).random((lengths[i], spec.size)) for i in batch
        ]
        return sampled_logits(decoder, values, np.concatenate(chances))

    return read


def _put(part: PartWriter, view: int, rows: Array, known: Known, features: Features) -> None:
    for name, states in known.hidden.items():
        part.put_hidden(view, name, rows, states)
    for name, maps in known.attention.items():
        for sequence, probabilities in zip(known.sequences, maps, strict=True):
            part.put_attention(view, name, int(sequence), probabilities)
    if known.vectors is not None and not view:
        part.put_embedding(known.sequences, known.vectors)
    if features.task:
        part.put_task(view, known.sequences if known.of_sequences else rows, *known.logits)
    if spec := features.logits:
        puts: dict[str, Callable[..., None]] = {
            "topk": part.put_topk,
            "sample": part.put_samples,
            "head": part.put_head,
        }
        puts[spec.tier](view, rows, *known.logits)
