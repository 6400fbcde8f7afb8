"""The inputs, outputs and tokenizer of a student or an export: all that a program needs to run
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from teachonce.align import AlignmentError, Vocabulary
from teachonce.store import TaskSpec
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.tag_schemes import scheme_of

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# SentenceTransformer(backend="onnx"), Optimum and transformers.js read the states.
OUTPUTS = {"embedding": ("sentence_embedding", "last_hidden_state")}
"""Names of the outputs by kind, the answer first; `logits` for the other kinds."""


BATCH = 16
"""Texts of a batch."""
TEXT_TOKENS = 512
"""A batch of longer texts has fewer of them: it has at most the tokens of BATCH such texts."""
LONGEST_CHECKED = 512
"""Tokens of a text with which a decoder is compared; its export has all of its positions."""


@dataclass(frozen=True, kw_only=True)
class StudentInputs:
    """Describes the inputs and the output of a student, and tokenizes texts for it.

    kind: one of ENCODERS, or DECODER.
    inputs: names of the inputs, int64 [B,S] each.
    max_length: the longest input in tokens, special tokens included.
    special: whether the tokenizer adds special tokens to a text.
    prompt: prepended to each text.
    pairs: whether the student reads pairs of texts, as a reranker does; None if no file records
        this.
    activation: the class of torch.nn that turns a reranker's logit into its score; "" for others.
    about: further entries of export.json, such as `prompts`.
    """

    kind: str
    tokenizer: Any
    inputs: tuple[str, ...]
    max_length: int
    task: TaskSpec | None = None
    special: bool = True
    prompt: str = ""
    pairs: bool | None = None
    activation: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of all outputs."""
        return OUTPUTS.get(self.kind, ("logits",))

    @property
    def output(self) -> str:
        """Return the name of the output from which answers are computed."""
        return self.outputs[0]

    def mask_token(self) -> str:
        """Return the mask token of a masked LM. Raises UserError if its tokenizer has none."""
        if self.tokenizer.mask_token is None:
            raise UserError(
                "the student's tokenizer has no mask token, so it cannot fill in pieces; copy the"
                " whole folder, with tokenizer_config.json"
            )
        return str(self.tokenizer.mask_token)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Return the tokenizer's vocabulary; None for a tokenizer that `align` cannot read."""
        with suppress(AlignmentError):
            return Vocabulary.from_tokenizer_json(self.tokenizer.backend_tokenizer.to_str())
        return None

    @property
    def joins_entities(self) -> bool:
        """Return whether the labels are tags of a scheme such as IOB, whose words form entities."""
        if self.task is None or self.kind != "tagging":
            return False
        return (
            scheme_of(tag for tag in self.task.labels if tag != self.task.later_label) is not None
        )

    def tokenized(
        self, texts: Sequence[str], second: Sequence[str] | None = None, **options: Any
    ) -> Any:
        """Tokenize texts or pairs, truncated to `max_length`; `options` are passed to the
        tokenizer."""
        return self.tokenizer(
            [self.prompt + text for text in texts],
            None if second is None else list(second),
            truncation=True,
            max_length=self.max_length,
            add_special_tokens=self.special,
            **options,
        )

    def encode(self, texts: Sequence[str]) -> dict[str, Array]:
        """Tokenize texts, truncated to `max_length` tokens, into one batch of int64 [B,S] each."""
        encoded = self.tokenized(texts, padding=True, return_tensors="np")
        return {name: np.asarray(encoded[name], np.int64) for name in self.inputs}

    def batches(
        self, rows: Sequence[Mapping[str, Any]], most: int = BATCH
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of tokenized inputs in their order: at most `most` texts, and TEXT_TOKENS
        tokens for each of them; a longer text is a batch of its own."""
        begin = 0
        while begin < len(rows):
            end, width = begin, 0
            while end < min(len(rows), begin + most):
                width = max(width, len(rows[end]["input_ids"]))
                if end > begin and width * (end + 1 - begin) > most * TEXT_TOKENS:
                    break
                end += 1
            yield self.batch(rows[begin:end])
            begin = end

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Make a batch of tokenized inputs, padded on the right to the longest of them."""
        width = max(len(row["input_ids"]) for row in rows)
        arrays = {name: np.zeros((len(rows), width), np.int64) for name in self.inputs}
        arrays["input_ids"] += self.tokenizer.pad_token_id
        for number, row in enumerate(rows):
            for name in self.inputs:
                # Rows of windows have no `token_type_ids`: all tokens of a single text have type 0.
                values = row.get(name, [0] * len(row["input_ids"]))
                arrays[name][number, : len(values)] = values
        return arrays
