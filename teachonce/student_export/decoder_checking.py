"""Compares the export of a decoder with its student: by its distributions of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teachonce.downstream.lm.scoring import bits_per_byte
from teachonce.downstream.lm.windows import read_documents, start_token
from teachonce.downstream.text_lines import read_lines
from teachonce.student_export.export_check import ExportCheck
from teachonce.student_export.formats import Runner
from teachonce.student_export.loaded_student import LoadedStudent
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.packed import suffix_of

TOKENS = 1000
"""Tokens whose distributions are compared: all of a vocabulary of 150,000 are 600 MB."""
MAX_LINES = 2000
"""Lines of a --check file that are scored."""
BATCH = 16
LENGTH = 64
"""Tokens of a text that a decoder writes."""
MEASURE = "entropy of the student's next token / cross-entropy by the export"


def decoder_check(student: LoadedStudent, path: Path | None) -> ExportCheck:
    """Make the check for a `--check` file of a decoder: lines of text. Without a file, the decoder
    writes the texts itself.

    The share is H(p) / H(p, q), for the student's distribution p of the next token and the export's
    q, both summed over TOKENS tokens: 1 if all are equal. With a file, bits per byte are measured
    as well.

    Raises UserError for a file of another kind.
    """
    if path is None:
        texts = own_texts(student)
        return ExportCheck(
            f"{MEASURE}, {len(texts)} texts that it writes", _share(student, texts), texts=texts
        )
    if suffix_of(path) != ".txt":
        raise UserError(f"--check {path}: a decoder is compared on lines of text; give a .txt")
    lines = read_lines(path)[:MAX_LINES]
    size = student.max_length
    documents = read_documents(student.tokenizer, lines)

    def score(run: Runner) -> float:
        def predict(ids: Tensor, mask: Tensor) -> Tensor:
            batch = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
            return torch.from_numpy(run(batch))

        pieces = student.config.vocab_size
        return bits_per_byte(predict, documents, size, size // 2, pieces, str(path))

    first = _first_tokens(student, lines)
    measure = f"{MEASURE}, {len(first):,} lines of {path.name}"
    return ExportCheck(
        measure, _share(student, first), score, score(student.run), "bits/byte", first
    )


def own_texts(student: LoadedStudent) -> list[str]:
    """Let a decoder write BATCH texts of LENGTH tokens. The same student writes the same texts."""
    network: Any = student.network
    start = start_token(student.tokenizer)
    draws = np.random.default_rng(0).integers(0, len(student.tokenizer), (BATCH, 1))
    first = torch.from_numpy(draws) if start is None else torch.full((BATCH, 1), start)
    length = min(LENGTH, student.max_length)
    # `generate` draws from torch's global generator, whose state is restored here.
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        found = network.network.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            # Of all pieces: `generate` draws from the 50 best by default.
            top_k=0,
            max_length=length,
            # Else a drawn eos would end a text, and fewer tokens would be compared.
            min_length=length,
            pad_token_id=student.tokenizer.pad_token_id,
        )
    texts = student.tokenizer.batch_decode(found, skip_special_tokens=True)
    return [text or "a" for text in texts]


def _first_tokens(student: LoadedStudent, lines: Sequence[str]) -> list[str]:
    """Return the first lines that have at least TOKENS tokens in all."""
    count = 0
    for number, line in enumerate(lines, 1):
        count += student.encode([line])["input_ids"].size
        if count >= TOKENS:
            return list(lines[:number])
    return list(lines)


def _share(student: LoadedStudent, texts: Sequence[str]) -> Any:
    batches = [student.encode(texts[n : n + BATCH]) for n in range(0, len(texts), BATCH)]
    expected = [_log_probabilities(student.run(batch), batch) for batch in batches]
    entropy = -sum(float((each.exp() * each).sum()) for each in expected)

    def share(run: Runner) -> float:
        crossed = 0.0
        for batch, own in zip(batches, expected, strict=True):
            found = _log_probabilities(run(batch), batch)
            crossed -= float((own.exp() * found).sum())
        # NaN counts as no agreement. Only rounding makes a cross-entropy less than the entropy.
        return min(1.0, entropy / crossed) if np.isfinite(crossed) and crossed > 0 else 0.0

    return share


def _log_probabilities(logits: Array, batch: dict[str, Array]) -> Tensor:
    """Return log-probabilities [M,V] at the tokens of a batch."""
    present = batch["attention_mask"].astype(bool)
    return torch.from_numpy(logits[present]).float().log_softmax(dim=1)
