"""What a decoder is trained on: the next token after each token, the bytes that are predicted, and
the positions at which the teacher's distribution over its next piece can be mapped to the
student's.

Shape letters: N flat tokens, G runs, Vt pieces of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from teachonce.align import Alignment, FlatText, Tokens, VocabularyMap
from teachonce.align.byte_edges import NO_EDGE, PieceBytes, TextBytes, token_ends
from teachonce.align.vocabulary import Marks, character_of_byte
from teachonce.store import Logits, LogitsSpec
from teachonce.student_train.data.student_tokens import IGNORED, MaskedTokens
from teachonce.student_train.losses.next_token import ChunkTargets, TeacherHead
from teachonce.support.arrays import Array, Floats, begins, covering_spans_of_texts, ranges, starts


def learnt_of_student(learnt: Array, teacher: Tokens, student: Tokens) -> Array:
    """Return which student tokens the student is trained on: bool [N].

    learnt: bool [T], the teacher tokens that the store marks for training (`token/learn`). A
        student token is left out if it shares a character with a teacher token that is not marked.
    """
    begin, end = teacher.offsets.astype(np.int64).T
    left_out = ~learnt & (end > begin)
    text = np.repeat(np.arange(len(teacher.start) - 1), np.diff(teacher.start))[left_out]
    stretch = int(end.max(initial=0)) + 1  # one number line for all texts
    begin, end = begin[left_out] + text * stretch, end[left_out] + text * stretch
    # Spans must be disjoint for the search below: tokens that share a character become one.
    reach = np.maximum.accumulate(end)
    first = np.append(True, begin[1:] > reach[:-1])[: len(begin)]
    last = np.append(first[1:], True)[: len(begin)]
    spans = np.stack([begin[first], reach[last]], axis=1) - (text[first] * stretch)[:, None]
    counts = np.bincount(text[first], minlength=len(teacher.start) - 1)
    lengths = np.diff(student.start)
    return np.asarray(covering_spans_of_texts(student.offsets, lengths, spans, counts) < 0)


def learnt_runs(alignment: Alignment, learnt: Array) -> Alignment:
    """Select the runs whose student tokens are all `learnt`, bool [N]."""
    count = starts(learnt)
    begin, end = alignment.student.astype(np.int64).T
    all_learnt = count[end] - count[begin] == end - begin
    return Alignment(alignment.teacher[all_learnt], alignment.student[all_learnt])


def following(tokens: Tokens, learnt: Array | None = None) -> MaskedTokens:
    """Label each token with the next token of its text. The label is IGNORED for the last token of
    a text, and where `learnt`, bool [N], is false for the next token (None: true for all)."""
    labels = np.full(len(tokens.ids), IGNORED, np.int64)
    labels[:-1] = tokens.ids[1:]
    if learnt is not None:
        labels[:-1][~learnt[1:]] = IGNORED
    last = tokens.start[1:][np.diff(tokens.start) > 0] - 1
    labels[last] = IGNORED
    return MaskedTokens(np.asarray(tokens.ids, np.int64), labels, learnt)


def predicted_bytes(
    texts: Sequence[str], tokens: Tokens, pieces: PieceBytes, learnt: Array | None = None
) -> int:
    """Count the bytes of the tokens that the student is trained on and that have a token before
    them.

    learnt: bool [N], the tokens that the student is trained on; None for all.
    """
    text = FlatText.of(texts)
    octets = TextBytes.of(text)
    ends = token_ends(text, octets, tokens, pieces)
    count = 0
    for sequence, (low, high) in enumerate(zip(tokens.start, tokens.start[1:], strict=False)):
        text_ends = ends[low:high]
        if len(text_ends) > 1:
            begin = octets.start[sequence] if text_ends[0] == NO_EDGE else text_ends[0]
            # The bytes of a token without a known end count for the next token with a known end.
            sizes = np.diff(np.maximum.accumulate(np.maximum(text_ends, begin)))
            count += int(sizes.sum() if learnt is None else sizes[learnt[low + 1 : high]].sum())
    return count


def predicting_tokens(
    alignment: Alignment, teacher: Tokens, student: Tokens
) -> tuple[Array, Array]:
    """Return the flat positions of the teacher's and of the student's token before each run, int64
    [G'] each. The run's first token is predicted there. Runs at the start of a sequence are left
    out."""
    teacher_runs, student_runs = _runs_inside(alignment, teacher, student)
    return teacher_runs[:, 0] - 1, student_runs[:, 0] - 1


def _runs_inside(alignment: Alignment, teacher: Tokens, student: Tokens) -> tuple[Array, Array]:
    """Select the runs that have a token before them on both sides. Return the teacher's and the
    student's runs, int64 [G',2] each."""
    runs = [side.astype(np.int64) for side in (alignment.teacher, alignment.student)]
    heads = [tokens.start[:-1] for tokens in (teacher, student)]
    inside = ~np.isin(runs[0][:, 0], heads[0]) & ~np.isin(runs[1][:, 0], heads[1])
    return runs[0][inside], runs[1][inside]


def chunk_targets(
    alignment: Alignment, teacher: Tokens, student: Tokens, observed: Floats
) -> ChunkTargets:
    """Return the runs that have a token before them on both sides, with the teacher's
    log-probability of each run.

    observed: [N], in row t the teacher's log-probability of token t + 1. The result has its dtype.
    """
    teacher_runs, student_runs = _runs_inside(alignment, teacher, student)
    lengths = np.diff(teacher_runs)[:, 0]
    rows = ranges(teacher_runs[:, 0] - 1, lengths)
    sums = np.zeros(len(teacher_runs))
    # `sums[runs] += ...` would add only one token of each run.
    np.add.at(sums, np.repeat(np.arange(len(sums)), lengths), observed[rows].astype(np.float64))
    lengths = np.diff(student_runs)[:, 0]
    before = ranges(student_runs[:, 0] - 1, lengths)
    return ChunkTargets(
        torch.from_numpy(before),
        torch.from_numpy(np.asarray(student.ids, np.int64)[before + 1]),
        torch.from_numpy(begins(lengths)),
        # Not always float32: tests compare float64 sums with an enumerated language, to 1e-9.
        torch.from_numpy(sums.astype(observed.dtype)),
    )


def inside_tokens(alignment: Alignment, labels: Array) -> Tensor:
    """Return bool [M]: which of the next tokens begin no run of the alignment. The teacher has no
    distribution for these tokens.

    labels: int64 [N], the label of each token: the M next tokens, or IGNORED (see `following`).
    """
    inside = np.ones(len(labels) + 1, bool)
    inside[alignment.student[:, 0]] = False
    return torch.from_numpy(inside[np.flatnonzero(labels != IGNORED) + 1])


def observed_logprobs(
    logits: Logits,
    token_ids: Array,
    head: tuple[Array, Array] | None,
    spec: LogitsSpec | None = None,
) -> Floats:
    """Return in row t the log-probability of token t + 1, float [N]. It is stored, or computed from
    the inputs of the teacher's head. The last row of a text is meaningless.

    head: weight [V,D] and bias [V] of the head. spec: has the soft cap of its logits.
    """
    if logits.observed is not None:
        observed: Floats = logits.observed
        return observed
    assert head is not None  # `plan/checks.py` refuses a store without either
    following = np.append(token_ids[1:], token_ids[:1])
    # One product for each token: with the stored log-partition no other logit is needed.
    token_logits = np.einsum("nd,nd->n", logits.values, head[0][following]) + head[1][following]
    return np.asarray((spec.capped(token_logits) if spec else token_logits) - logits.log_partition)


def whole_head(
    vocabulary: VocabularyMap, size: int, head: tuple[Array, Array], spec: LogitsSpec | None
) -> TeacherHead | None:
    """Return the teacher's head, weight [V,D] and bias [V], cut to `size` rows, if the student's
    pieces are the teacher's first `size` pieces in the same order; else None. `spec` has the soft
    cap of its logits."""
    if not np.array_equal(vocabulary.match[:size], np.arange(size)):
        return None
    # Rows behind the vocabulary are padding, without probability.
    weight, bias = (torch.from_numpy(part[:size]) for part in head)
    return TeacherHead(weight, bias, spec)


def last_tokens(alignment: Alignment) -> Alignment:
    """Pair the last tokens of each run: at these tokens a decoder has first read the whole run."""
    last = (
        np.stack([runs[:, 1] - 1, runs[:, 1]], axis=1)
        for runs in (alignment.teacher, alignment.student)
    )
    return Alignment(*last)


def next_pieces(vocabulary: VocabularyMap, tokenizer: Tokenizer, *, blank: bool = False) -> Array:
    """Find for each teacher piece the student piece that would come next in its place: int64 [Vt],
    or -1.

    It is the first piece of the student's own encoding of the teacher piece's bytes. A special
    token of the teacher becomes the student's special token of the same role.

    blank: whether the text has a space before the piece that no teacher piece contains.
    """
    # Not the longest student piece with which the bytes begin. It differs for 17 % of the pieces,
    # and is the student's next token at 95.1 % of the positions; the first piece is it at 97.5 %
    # (SmolLM2, 4k; RESULTS, Aligning a decoder).
    pieces = vocabulary.teacher_bytes
    marks = vocabulary.student.marks
    next_ids = vocabulary.match.astype(np.int64)
    inside, normalised = vocabulary.teacher.marks.style == "prefix", _normalised(tokenizer)
    for number, raw in enumerate(pieces.written()):
        if raw:
            # No space is in front of a WordPiece such as `##ing`.
            spaced = blank and not (inside and vocabulary.teacher.pieces[number].marked)
            piece = _first_piece(tokenizer, marks, normalised(b" " * spaced + raw))
            next_ids[number] = -1 if piece is None else piece
    return next_ids


def _normalised(tokenizer: Tokenizer) -> Callable[[bytes], bytes]:
    """Return a function that normalizes the UTF-8 bytes of a piece inside a text as the tokenizer
    does, for example to lower case. Bytes that are not UTF-8 (part of a character), and bytes that
    would be deleted, are returned unchanged."""
    if tokenizer.normalizer is None:
        return lambda raw: raw
    # Behind a sign, because some normalizers put a mark in front of the whole text. A letter could
    # be composed with an accent.
    normalize = tokenizer.normalizer.normalize_str
    prefix = normalize("_")

    def changed(raw: bytes) -> bytes:
        try:
            return normalize(f"_{raw.decode()}").removeprefix(prefix).encode() or raw
        except UnicodeDecodeError:
            return raw

    return changed


def _first_piece(tokenizer: Tokenizer, marks: Marks, raw: bytes) -> int | None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:  # a part of a character
        text = ""
    if marks.byte_level:
        word = "".join(character_of_byte()[byte] for byte in raw)
        if text:
            # The student's pre-tokenizer may cut a teacher's piece into several words, of which the
            # first one has the next token.
            word = tokenizer.pre_tokenizer.pre_tokenize_str(text)[0][0]
        if raw[:1] != b" ":
            word = word.removeprefix(marks.mark)  # the space that some pre-tokenizers add in front
        tokens = tokenizer.model.tokenize(word)
    elif text:
        tokens = tokenizer.model.tokenize(text.replace(" ", marks.mark))
    else:
        # A tokenizer with byte fallback spells a part of a character by tokens of single bytes.
        return tokenizer.token_to_id(f"<0x{raw[0]:02X}>")
    return tokens[0].id if tokens else None
