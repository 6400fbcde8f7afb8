"""Compares an export with its student: by the score of a task, by the agreement of outputs, or, for
a decoder, by its distributions of the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teachonce.downstream.lm.scoring import text_figures
from teachonce.downstream.lm.windows import read_documents, start_token
from teachonce.downstream.options import COLUMN, DownstreamOptions
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.pair import PairScore
from teachonce.downstream.tasks.sts import SentenceSimilarity, cosines_of_rows
from teachonce.downstream.tasks.tagging import Entities, PartsOfSpeech
from teachonce.downstream.text_lines import read_lines
from teachonce.student_export.formats import Runner
from teachonce.student_export.loaded_student import LoadedStudent
from teachonce.student_export.options import DECODER, column_flags
from teachonce.student_export.student_inputs import BATCH
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError
from teachonce.support.options import scoped
from teachonce.teacher_dump.corpus.text_files import suffix_of

RANDOM_TEXTS = 64
LONGEST_RANDOM_TEXT = 48  # tokens
MAX_LINES = 2000
"""Lines compared of a --check file of texts."""
DECODER_TOKENS = 1000
"""Tokens whose distributions are compared: all of a vocabulary of 150,000 are 600 MB."""
DECODER_LENGTH = 64
"""Tokens of a text that a decoder writes."""
DECODER_MEASURE = "entropy of the student's next token / cross-entropy by the export"
AGREEMENT = {
    "embedding": "mean cosine with the student's vectors",
    "classification": "share of texts with the student's label",
    "score": "correlation with the student's scores",
    "several labels": "share of the yes/no decisions for each label that equal the student's",
    "tagging": "share of tokens with the student's tag",
    "mlm": "share of tokens with the student's best piece",
}


@dataclass(frozen=True)
class ExportCheck:
    """Measures how closely an export reproduces its student.

    measure: what is measured, in words for messages and the model card.
    share: given an export's `Runner`, returns its score as a share of the student's, or the
        agreement of their outputs; 1 is full agreement.
    score: given a `Runner`, returns its task score; None if no task is scored.
    student_score: the student's own score; None if no task is scored.
    unit: the unit of `score`; "" for a share, which is printed in percent.
    texts: texts whose token ids are also compared, if a format has a tokenizer of its own.
    """

    measure: str
    share: Callable[[Runner], float]
    score: Callable[[Runner], float] | None = None
    student_score: float | None = None
    unit: str = ""
    texts: Sequence[str] = ()

    def describe(self, share: float) -> str:
        """Describe a share in words: as agreement, or as a share of the student's score, which may
        exceed 1."""
        if self.student_score is not None and not self.unit:
            return f"{100 * share:.2f} % of the student's score ({self.measure})"
        return f"agreement {100 * share:.2f} % ({self.measure})"


def export_check(
    student: LoadedStudent, path: Path | None, columns: Mapping[str, str] | None = None
) -> ExportCheck:
    """Make the check for a `--check` file.

    columns: names of the columns of labelled examples by role, if they differ from the role.

    Labelled examples give the task's score. A .txt, or no file, gives the agreement of outputs.

    Raises UserError if the file does not fit the student, or the student itself scores 0 on it.
    """
    if columns and path is not None and (student.kind == DECODER or suffix_of(path) == ".txt"):
        flags = column_flags(columns)
        raise UserError(
            f"{flags}: --check {path} is read as lines, without columns; leave {flags} out"
        )
    if student.kind == DECODER:
        return _decoder_check(student, path)
    if path is None:
        texts = random_texts(student)
        return _agreement_check(student, texts, f"{len(texts)} texts of random pieces")
    if suffix_of(path) == ".txt":
        texts = read_lines(path)[:MAX_LINES]
        return _agreement_check(student, texts, f"{len(texts):,} lines of {path.name}")
    if student.kind == "mlm":
        raise UserError(f"--check {path}: a masked LM is compared on lines of text; give a .txt")
    return _task_check(student, path, columns or {})


def random_texts(student: LoadedStudent) -> list[str]:
    """Return texts of random pieces; for a decoder, texts that it generates. The same student
    always gives the same texts."""
    if student.kind == DECODER:
        return _own_texts(student)
    draws, tokenizer = np.random.default_rng(0), student.tokenizer
    # The tokenizer of a static student has its special tokens among the added ones alone.
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    pieces = np.setdiff1d(np.arange(len(tokenizer)), [*special, *tokenizer.all_special_ids])
    longest = min(LONGEST_RANDOM_TEXT, student.max_length - 2)
    sizes = draws.integers(1, max(2, longest), RANDOM_TEXTS)
    texts = [tokenizer.decode(draws.choice(pieces, size).tolist()) for size in sizes]
    # A WordPiece at the beginning keeps its ##, which would be two unknown pieces: formats differ
    # there. Pieces may decode to nothing, and a text without tokens has no output to compare.
    return [text.removeprefix("##") or "a" for text in texts]


def _agreement_check(student: LoadedStudent, texts: Sequence[str], where: str) -> ExportCheck:
    batches = _batches(student, texts)
    expected = [student.run(batch) for batch in batches]
    kind = student.kind
    if student.task is not None and student.task.kind == "classification":
        kind = {"several labels": "several labels", "numbers": "score"}.get(
            student.task.output_kind, kind
        )

    def share(run: Runner) -> float:
        outputs = [run(batch) for batch in batches]
        # argmax of NaN is a valid index, so that a broken export could seem to agree
        if not all(np.isfinite(output).all() for output in outputs):
            return 0.0
        if kind == "score":
            both = (np.concatenate(expected).T, np.concatenate(outputs).T)
            # The worst output counts: a mean over all outputs would hide a single wrong one.
            return min(_correlation(*pair) for pair in zip(*both, strict=True))
        agreements = [
            _agreements(kind, target, output, batch["attention_mask"].astype(bool))
            for target, output, batch in zip(expected, outputs, batches, strict=True)
        ]
        return float(np.concatenate(agreements).mean())

    return ExportCheck(f"{AGREEMENT[kind]}, {where}", share)


def _agreements(kind: str, expected: Array, outputs: Array, present: Array) -> Floats:
    """Compute the agreement for each text, or for each token that is `present`: float64 [N]."""
    if kind == "embedding":
        return cosines_of_rows(expected, outputs)
    if kind == "several labels":
        # A logit above 0 is a probability above one half.
        return np.asarray(((expected > 0) == (outputs > 0)).mean(axis=-1), np.float64)
    same = expected.argmax(-1) == outputs.argmax(-1)
    return np.asarray(same if same.ndim == 1 else same[present], np.float64)


def _correlation(expected: Array, outputs: Array) -> float:
    if np.ptp(expected) == 0 or np.ptp(outputs) == 0:  # a constant has no correlation
        return float(np.allclose(expected, outputs))
    return float(np.corrcoef(expected.reshape(-1), outputs.reshape(-1))[0, 1])


def _task_check(student: LoadedStudent, path: Path, columns: Mapping[str, str]) -> ExportCheck:
    if student.task and student.task.output_kind != "one label" and len(student.task.labels) > 1:
        raise UserError(
            f"--check {path}: no task of downstream can score a student with problem_type"
            f" {student.task.problem_type}; give a .txt of lines"
        )
    kind = _task_of(student)
    able = scoped(DownstreamOptions, kind.name)
    if wrong := [role for role in columns if f"{role}{COLUMN}" not in able]:
        raise UserError(
            f"{column_flags(wrong)}: the examples of this student, as for --task {kind.name} of"
            f" downstream, have no such column; leave {column_flags(wrong)} out"
        )
    task: Any = kind(columns=columns)
    if isinstance(task, PairScore):
        task.activation = student.activation
    if isinstance(task, Classify):
        task.pairs = student.pairs
    examples = task.read(path)
    if student.task is not None:
        task.adopt(student.task, {"check": examples})
    if student.kind == "embedding":

        def score(run: Runner) -> float:
            sides = ([getattr(e, name) for e in examples] for name in ("text_a", "text_b"))
            vectors = [np.concatenate([*map(run, _batches(student, texts))]) for texts in sides]
            return float(task.score(examples, (), cosines_of_rows(*vectors))[task.primary])

    else:
        rows = task.encode(student.tokenizer, examples, min(task.max_length, student.max_length))

        def score(run: Runner) -> float:
            predicted = _concatenated([run(batch) for batch in student.batches(rows)])
            return float(task.score(examples, rows, predicted)[task.primary])

    target = score(student.run)
    # The agreement is the score of an export divided by this score.
    if target <= 0:
        raise UserError(
            f"--check {path}: the student itself scores {target:.2f} on it: train it longer, or"
            " with a higher --lr, or give examples of the task that it was trained for"
        )
    heading = next(name for name, key in task.measures.items() if key == task.primary)
    return ExportCheck(
        f"{heading} of {task.name} on {path.name}", lambda run: score(run) / target, score, target
    )


def _task_of(student: LoadedStudent) -> type[Any]:
    """Return the task of `downstream` that scores the student."""
    if student.kind == "embedding":
        return SentenceSimilarity
    assert student.task is not None  # only LM heads have no task
    labels = student.task.labels
    if student.kind == "classification":
        return Classify if len(labels) > 1 else PairScore
    named = (label for label in labels if label != student.task.later_label)
    iob = all(label == "O" or label[:2] in ("B-", "I-") for label in named)
    return Entities if iob else PartsOfSpeech


def _batches(student: LoadedStudent, texts: Sequence[str]) -> list[dict[str, Array]]:
    encoded = student.tokenized(texts)
    rows = [{name: encoded[name][n] for name in student.inputs} for n in range(len(texts))]
    return list(student.batches(rows))


def _concatenated(outputs: Sequence[Array]) -> Array:
    """Concatenate outputs [B,C], or [B,S,L] padded to the largest S."""
    if outputs[0].ndim == 2:
        return np.concatenate(outputs)
    width = max(output.shape[1] for output in outputs)
    return np.concatenate(
        [np.pad(output, ((0, 0), (0, width - output.shape[1]), (0, 0))) for output in outputs]
    )


def _decoder_check(student: LoadedStudent, path: Path | None) -> ExportCheck:
    """Make the check for a `--check` file of a decoder: lines of text. Without a file, the decoder
    writes the texts itself.

    The share is H(p) / H(p, q), for the student's distribution p of the next token and the export's
    q, both summed over DECODER_TOKENS tokens. It is 1 if all distributions are equal. With a file,
    bits per byte are measured as well.

    Raises UserError for a file of another kind.
    """
    if path is None:
        texts = _own_texts(student)
        return ExportCheck(
            f"{DECODER_MEASURE}, {len(texts)} texts that it writes",
            _decoder_share(student, texts),
            texts=texts,
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
        figures = text_figures(predict, documents, size, size // 2, pieces, str(path))
        return figures["bits_per_byte"]

    first = _first_tokens(student, lines)
    measure = f"{DECODER_MEASURE}, {len(first):,} lines of {path.name}"
    return ExportCheck(
        measure, _decoder_share(student, first), score, score(student.run), "bits/byte", first
    )


def _own_texts(student: LoadedStudent) -> list[str]:
    """Let a decoder write BATCH texts of DECODER_LENGTH tokens. The same student writes the same
    texts."""
    network: Any = student.network
    start = start_token(student.tokenizer)
    draws = np.random.default_rng(0).integers(0, len(student.tokenizer), (BATCH, 1))
    first = torch.from_numpy(draws) if start is None else torch.full((BATCH, 1), start)
    length = min(DECODER_LENGTH, student.max_length)
    # `generate` draws from torch's global generator, whose state is restored here.
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        ids = network.network.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            # Of all pieces: `generate` draws from the 50 best by default.
            top_k=0,
            max_length=length,
            # Without eos: a drawn eos would end a text, and fewer tokens would be compared.
            min_length=length,
            pad_token_id=student.tokenizer.pad_token_id,
        )
    texts = student.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [text or "a" for text in texts]


def _first_tokens(student: LoadedStudent, lines: Sequence[str]) -> list[str]:
    """Return the first lines that have at least DECODER_TOKENS tokens in all, or all lines."""
    count = 0
    for number, line in enumerate(lines, 1):
        count += student.encode([line])["input_ids"].size
        if count >= DECODER_TOKENS:
            return list(lines[:number])
    return list(lines)


def _cross_entropy(target: Tensor, output: Tensor) -> float:
    """Return the cross-entropy in nats of log-probabilities `output` [N,V] against `target` [N,V],
    summed over N. Pieces of target probability 0 add nothing."""
    share = target.exp()
    return -float(torch.where(share > 0, share * output, 0.0).sum())


def _decoder_share(student: LoadedStudent, texts: Sequence[str]) -> Any:
    batches = _batches(student, texts)
    expected = [_log_probabilities(student.run(batch), batch) for batch in batches]
    entropy = sum(_cross_entropy(logprobs, logprobs) for logprobs in expected)

    def share(run: Runner) -> float:
        crossed = 0.0
        for batch, target in zip(batches, expected, strict=True):
            output = _log_probabilities(run(batch), batch)
            crossed += _cross_entropy(target, output)
        # NaN counts as no agreement. Only rounding makes a cross-entropy less than the entropy.
        return min(1.0, entropy / crossed) if np.isfinite(crossed) and crossed > 0 else 0.0

    return share


def _log_probabilities(logits: Array, batch: dict[str, Array]) -> Tensor:
    """Return log-probabilities [M,V] at the tokens of a batch."""
    present = batch["attention_mask"].astype(bool)
    return torch.from_numpy(logits[present]).float().log_softmax(dim=1)
