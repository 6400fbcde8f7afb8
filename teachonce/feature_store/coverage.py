"""Measure the share of a store's tokens that each alignment pairs with a student's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from teachonce.align import Tokens
from teachonce.feature_store.spread_sample import spread_sample
from teachonce.feature_store.student_vocabulary import StudentVocabulary

SAMPLE_TOKENS = 2**17  # tokens of the teacher in the measured sample
SIZES = 5  # most frequent sizes of runs, each with a column in the printed table
BATCH_TOKENS = 2**15


def coverage(student: StudentVocabulary) -> dict[str, Any]:
    """Measure how a student's vocabulary fits a store, on a sample of its sequences.

    Returns facts on the `vocabulary`, and the `coverage`: shares and runs of each alignment. Shares
    count ordinary tokens, because special tokens are in no run. A size of runs is `T:S`: T tokens
    of the teacher are paired with S tokens of the student.
    """
    store, sample = student.store, spread_sample(student.store, SAMPLE_TOKENS)
    teacher, tallies = 0, dict[str, Counter[Any]]()
    # Alignments need texts and tokens alone, so no feature is read or decoded.
    for batch in store.stream(
        blocks=sample.blocks, features=(), shuffle=False, batch_tokens=BATCH_TOKENS
    ):
        tokens = Tokens(batch.token_ids, batch.offsets, batch.special, batch.start)
        teacher += int((~tokens.special).sum())
        for name, (student_tokens, pairs) in student.align_all(
            student.tokenizations(batch.texts, tokens)
        ).items():
            sizes = np.diff(pairs.teacher, axis=1)[:, 0], np.diff(pairs.student, axis=1)[:, 0]
            tally = tallies.setdefault(name, Counter())
            tally.update(Counter(zip(*(size.tolist() for size in sizes), strict=True)))
            tally["tokens"] += int((~student_tokens.special).sum())
            tally["unknown"] += int(student.unknown(student_tokens).sum())
    return {
        "vocabulary": _vocabulary(student),
        "coverage": {
            "sequences": sample.sequences,
            "of": sample.all,
            "teacher_tokens": teacher,
            "alignments": {name: _facts(tally, teacher) for name, tally in tallies.items()},
        },
    }


def _vocabulary(student: StudentVocabulary) -> dict[str, Any]:
    match, unknown = student.piece_map.match, student.piece_map.unknown
    pieces = sorted(student.store.tokenizer().get_vocab().values())  # some ids may have no piece
    return {
        "word": student.vocab,
        "pieces": len(student.tokenizer),
        "shared": len(np.unique(match[match >= 0])),
        "teacher_pieces": len(pieces),
        "teacher_pieces_unknown": int(unknown[pieces].sum()),
        "note": student.note,
    }


def _facts(tally: Counter[Any], teacher: int) -> dict[str, Any]:
    # Keys (T, S) count pairs of runs; the keys `tokens` and `unknown` count tokens.
    runs = {size: count for size, count in tally.most_common() if isinstance(size, tuple)}
    paired = [sum(size[side] * count for size, count in runs.items()) for side in (0, 1)]
    student = tally["tokens"]
    return {
        "runs": sum(runs.values()),
        "student_tokens": student,
        "teacher_share": paired[0] / max(1, teacher),
        "student_share": paired[1] / max(1, student),
        "unknown": tally["unknown"],
        "runs_by_size": {f"{t}:{s}": count for (t, s), count in runs.items()},
    }


def common_sizes(alignments: Mapping[str, Any]) -> list[str]:
    """List the most frequent sizes of runs over all alignments, the smallest first."""
    counts = Counter[str]()
    for alignment in alignments.values():
        counts.update(alignment["runs_by_size"])
    sizes = [size for size, _ in counts.most_common(SIZES)]
    return sorted(sizes, key=lambda size: [int(n) for n in size.split(":")])


def coverage_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Format the result of `coverage` as lines of a table."""
    vocab, measured = facts["vocabulary"], facts["coverage"]
    yield (
        f"student     {vocab['pieces']:,} pieces (--vocab {vocab['word']}), {vocab['shared']:,}"
        f" of them shared with the teacher; {vocab['teacher_pieces_unknown']:,} of the teacher's"
        f" {vocab['teacher_pieces']:,} pieces cannot be spelled with them"
    )
    if vocab["note"]:
        yield f"            {vocab['note']}"
    yield (
        f"alignments  of {measured['sequences']:,} of {measured['of']:,} sequences, with"
        f" {measured['teacher_tokens']:,} tokens of the teacher; special tokens are not paired"
    )
    sizes = common_sizes(measured["alignments"])
    heads = ("teacher's", "student's", "[UNK]", "runs", *sizes, "other")
    yield f"{'':<10}" + "".join(f"{head:>11}" for head in heads)
    for name, row in measured["alignments"].items():
        runs, counts = max(1, row["runs"]), [row["runs_by_size"].get(size, 0) for size in sizes]
        cells = [f"{row['teacher_share']:.1%}", f"{row['student_share']:.1%}"]
        cells += [f"{row['unknown'] / max(1, row['student_tokens']):.2%}", f"{row['runs']:,}"]
        cells += [f"{count / runs:.1%}" for count in (*counts, row["runs"] - sum(counts))]
        yield f"{name:<10}" + "".join(f"{cell:>11}" for cell in cells)
    yield (
        "teacher's, student's: share of tokens that are paired; [UNK]: share of student's tokens;"
        " runs: their number, then the share of each size (teacher's tokens : student's tokens)"
    )
