"""Runs batches through the teacher. Halves batches that do not fit into memory; runs sequences with
NaN or infinity again in float32."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from teachonce.support.arrays import Array, begins
from teachonce.support.errors import UserError, out_of_memory
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.teacher_dump.windows.window import Window, padded

QUOTED = 40  # characters of a text that a message quotes, so that a person can find the text
ReadLogits = Callable[[torch.Tensor, Array], dict[str, Array]]


@dataclass
class BatchOutput:
    """Holds the teacher's output for B sequences with N tokens in all: float32, without padding."""

    sequences: Array  # [B] numbers in the part
    lengths: Array  # [B]
    hidden: dict[str, Array]  # [N,D]
    attention: dict[str, list[Array]]  # B maps [L,L]
    # By the names of `PartWriter.put_logits`; for a task `values` alone: [N,...], or [B,...] if
    # `of_sequences`.
    logits: dict[str, Array]
    of_sequences: bool = False
    vectors: Array | None = None  # [B,W]

    def of(self, chosen: Array) -> BatchOutput:
        """Select sequences: `chosen` is bool [B]."""
        tokens = np.repeat(chosen, self.lengths)
        return BatchOutput(
            self.sequences[chosen],
            self.lengths[chosen],
            {name: states[tokens] for name, states in self.hidden.items()},
            {
                name: [one for one, take in zip(maps, chosen, strict=True) if take]
                for name, maps in self.attention.items()
            },
            {
                name: values[chosen if self.of_sequences else tokens]
                for name, values in self.logits.items()
            },
            self.of_sequences,
            None if self.vectors is None else self.vectors[chosen],
        )

    def unusable(self) -> dict[str, Array]:
        """Find the sequences that hold NaN or infinity: bool [B] for each feature."""
        masks = dict[str, Array]()
        for name, states in self.hidden.items():
            masks[f"hidden {name}"] = self._any(~np.isfinite(states).all(axis=1))
        for name, maps in self.attention.items():
            masks[f"attention {name}"] = np.array([not np.isfinite(one).all() for one in maps])
        if self.logits:
            # A logit of NaN or +inf makes the log-partition NaN or +inf.
            values = self.logits["log_partition" if "log_partition" in self.logits else "values"]
            bad = np.asarray(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
            masks["logits"] = bad if self.of_sequences else self._any(bad)
        if self.vectors is not None:
            masks["embedding"] = np.asarray(~np.isfinite(self.vectors).all(axis=1))
        return masks

    def _any(self, tokens: Any) -> Array:
        return np.logical_or.reduceat(tokens, begins(self.lengths))


def forward(
    teacher: Teacher,
    windows: Sequence[Window],
    inputs: Sequence[Array],
    batches: Sequence[Array],
    first_sequence: int,
    tally: Counter[str],
    logits: ReadLogits | None = None,
) -> Iterator[BatchOutput]:
    """Run batches of sequences, given as indices into `windows` and their token ids `inputs`.

    A batch that does not fit into memory is halved until it fits. If the teacher computes in bf16
    or fp16, sequences with NaN or infinity are run again in float32. `logits` receives the head's
    input of a batch: [N,D] for tokens, [B,D] if the head classifies sequences. `tally` counts
    `halved` batches and `widened` sequences. Raises UserError, which names the sequence, if one
    sequence alone does not fit, or is not finite in float32 either.
    """

    def name(i: int) -> str:
        text = windows[i].text
        quoted = text[:QUOTED] + "…" * (len(text) > QUOTED)
        return f"sequence {first_sequence + i} (document {windows[i].document}, {quoted!r})"

    if teacher.one_length:
        batches = [part for batch in batches for part in _of_one_length(batch, inputs)]
    queue = deque((batch, False) for batch in batches)
    while queue:
        batch, in_float32 = queue.popleft()
        output = _run(teacher, windows, inputs, batch, logits, in_float32)
        if output is None:
            if len(batch) == 1:
                raise UserError(
                    f"{name(batch[0])}: its {len(inputs[batch[0]])} tokens alone do not fit into"
                    " memory; close other programs or use another --device, and run the same"
                    " command again, or start a new dump with a smaller --max-length or --attention"
                    " none"
                )
            half = len(batch) // 2
            # Reversed by `extendleft`: the first half is run first.
            queue.extendleft([(batch[half:], in_float32), (batch[:half], in_float32)])
            tally["halved"] += 1
            continue
        features = output.unusable()
        bad = np.logical_or.reduce(list(features.values()))
        if bad.any():
            if in_float32 or not teacher.narrow:
                i = int(np.flatnonzero(bad)[0])
                where = ", ".join(feature for feature, mask in features.items() if mask[i])
                raise UserError(f"{name(batch[i])}: {teacher.unusable(where)}")
            queue.appendleft((batch[bad], True))
            tally["widened"] += int(bad.sum())
            output = output.of(~bad)
        if len(output.sequences):
            yield output


def _of_one_length(batch: Array, inputs: Sequence[Array]) -> list[Array]:
    """Split a batch by the lengths of its `inputs`, the longest first."""
    lengths = np.array([len(inputs[i]) for i in batch])
    return [batch[lengths == length] for length in np.unique(lengths)[::-1]]


def _run(
    teacher: Teacher,
    windows: Sequence[Window],
    inputs: Sequence[Array],
    batch: Array,
    logits: ReadLogits | None,
    in_float32: bool,
) -> BatchOutput | None:
    """Run one batch; None if it does not fit into memory."""
    try:
        with ExitStack() as stack:
            if in_float32:
                stack.enter_context(teacher.widened())
            # Without a padding token any id serves: the attention mask excludes it.
            ids, present = padded([inputs[i] for i in batch], teacher.tokenizer.pad_token_id or 0)
            types = [type_ids for i in batch if (type_ids := windows[i].types) is not None]
            output = teacher.run(ids, present, padded(types, 0)[0] if types else None)
            lengths = present.sum(axis=1)
            mask = torch.from_numpy(present).to(teacher.device)
            read: dict[str, Array] = {}
            values, of_sequences = output.head_input, False
            if logits and values is not None:
                of_sequences = values.dim() == 2
                # Without padding, for which the head would compute logits in vain.
                read = logits(values if of_sequences else values[mask], batch)
            hidden = {name: states[mask].cpu().numpy() for name, states in output.hidden.items()}
            attention = {
                name: [one[:n, :n] for one, n in zip(maps.cpu().numpy(), lengths, strict=True)]
                for name, maps in output.attention.items()
            }
            vectors = None if output.vectors is None else output.vectors.cpu().numpy()
            return BatchOutput(batch, lengths, hidden, attention, read, of_sequences, vectors)
    # NumPy raises MemoryError; torch raises RuntimeError, also as its subclass OutOfMemoryError.
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
    # Outside of `except`, whose error holds the stack and thus the tensors of the batch.
    torch.cuda.empty_cache()
    return None
