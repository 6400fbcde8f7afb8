"""One part of the store: the teacher run over its windows, every view."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from store import Features, LogitsSpec, PartWriter, StoreWriter
from teacher_dump.batches import length_batches, padded
from teacher_dump.heads import Decoder, log_partitions, sampled_logits, top_logits
from teacher_dump.masking import mask_spans, masked_input
from teacher_dump.options import DumpOptions
from teacher_dump.teacher import Activations, Teacher
from teacher_dump.windows import Window


def write_part(
    writer: StoreWriter,
    number: int,
    windows: list[Window],
    first_sequence: int,
    teacher: Teacher,
    features: Features,
    options: DumpOptions,
    progress: Callable[[int], object],
) -> None:
    """Run every view of `windows` through the teacher and publish them as part `number`.

    Masks and draws depend on (seed, view, number of the sequence in the store), never on the batch.
    """
    lengths = np.array([len(w.ids) for w in windows])
    start = np.concatenate([[0], np.cumsum(lengths)])
    part = writer.part(number, lengths)
    part.set_sequences(
        texts=[w.text for w in windows],
        document=np.array([w.document for w in windows]),
        document_begin=np.array([w.document_begin for w in windows]),
        hard_cut=np.array([w.hard_cut for w in windows]),
        token_ids=np.concatenate([w.ids for w in windows]),
        offsets=np.concatenate([w.offsets for w in windows]),
        special=np.concatenate([w.special for w in windows]),
    )
    for view in range(features.views):
        keys = [(options.seed, view, first_sequence + i) for i in range(len(windows))]
        inputs = (
            _view_inputs(part, view, windows, keys, teacher, options)
            if view
            else [w.ids for w in windows]
        )
        for batch in length_batches(lengths, options.batch_tokens):
            ids, present = padded([inputs[i] for i in batch], teacher.tokenizer.pad_token_id or 0)
            rows = np.concatenate([np.arange(start[i], start[i + 1]) for i in batch])
            activations = teacher.run(ids, present)
            _put_states(part, view, batch, rows, lengths, present, activations)
            if teacher.decoder and activations.head_input is not None and features.logits:
                values = activations.head_input[torch.from_numpy(present).to(teacher.device)]
                uniform = [_uniform(keys[i], int(lengths[i]), features.logits) for i in batch]
                _put_logits(
                    part,
                    view,
                    rows,
                    values,
                    teacher.decoder,
                    features.logits,
                    np.concatenate(uniform),
                )
            progress(len(rows) if view == 0 else 0)
    part.publish()


def _view_inputs(
    part: PartWriter,
    view: int,
    windows: list[Window],
    keys: list[tuple[int, int, int]],
    teacher: Teacher,
    options: DumpOptions,
) -> list[np.ndarray]:
    spans = [
        mask_spans(w.text, *key, options.mask_prob) for w, key in zip(windows, keys, strict=True)
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


def _put_states(
    part: PartWriter,
    view: int,
    batch: np.ndarray,
    rows: np.ndarray,
    lengths: np.ndarray,
    present: np.ndarray,
    got: Activations,
) -> None:
    for name, states in got.hidden.items():
        part.put_hidden(view, name, rows, states.cpu().numpy()[present])
    for name, maps in got.attention.items():
        for sequence, probabilities in zip(batch, maps.cpu().numpy(), strict=True):
            length = lengths[sequence]
            part.put_attention(view, name, int(sequence), probabilities[:length, :length])


def _put_logits(
    part: PartWriter,
    view: int,
    rows: np.ndarray,
    values: torch.Tensor,
    decoder: Decoder,
    spec: LogitsSpec,
    uniform: np.ndarray,
) -> None:
    with torch.inference_mode():
        if spec.tier == "topk":
            part.put_topk(view, rows, *top_logits(decoder, values, spec.size))
        elif spec.tier == "sample":
            part.put_samples(view, rows, *sampled_logits(decoder, values, uniform))
        else:
            part.put_head(view, rows, values.float().cpu().numpy(), log_partitions(decoder, values))


def _uniform(key: tuple[int, int, int], tokens: int, spec: LogitsSpec) -> np.ndarray:
    """Chances [tokens, draws] of one sequence; none unless draws are asked for."""
    draws = spec.size if spec.tier == "sample" else 0
    return np.random.default_rng([*key, 1]).random((tokens, draws))
