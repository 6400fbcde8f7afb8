"""How much of a store each alignment with a student's tokens makes use of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from teachonce.align import Tokens
from teachonce.feature_store.spread_sample import spread_sample
from teachonce.feature_store.student_vocabulary import StudentVocabulary

SAMPLE_TOKENS = 2**17
SIZES = 5  # of runs, that a table for people has a column of
BATCH_TOKENS = 2**15


def coverage(student: StudentVocabulary) -> dict[str, Any]:
    """Tell how a student's vocabulary fits a store: `vocabulary`, and `coverage` of each alignment
    over a sample.

    Shares are of the ordinary tokens of a side: special ones take part in no run. Sizes of runs are
    `T:S`, tokens of the teacher and of the student.
    """
    store, chosen = student.store, spread_sample(student.store, SAMPLE_TOKENS)
    teacher, tallies = 0, dict[str, Counter[Any]]()
    for batch in store.stream(
        blocks=chosen.blocks, features=(), shuffle=False, batch_tokens=BATCH_TOKENS
    ):
        tokens = Tokens(batch.token_ids, batch.offsets, batch.special, batch.start)
        teacher += int((~tokens.special).sum())
        for name, (own, pairs) in student.align_all(
            student.tokenizations(batch.texts, tokens)
        ).items():
            sizes = np.diff(pairs.teacher, axis=1)[:, 0], np.diff(pairs.student, axis=1)[:, 0]
            tally = tallies.setdefault(name, Counter())
            tally.update(Counter(zip(*(size.tolist() for size in sizes), strict=True)))
            tally["tokens"] += int((~own.special).sum())
            tally["unknown"] += int(student.unknown(own).sum())
    return {
        "vocabulary": _vocabulary(student),
        "coverage": {
            "sequences": chosen.sequences,
            "of": chosen.all,
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
    runs = {size: count for size, count in tally.most_common() if isinstance(size, tuple)}
    taught, learns = (sum(size[side] * count for size, count in runs.items()) for side in (0, 1))
    student = tally["tokens"]
    return {
        "runs": sum(runs.values()),
        "student_tokens": student,
        "teacher_share": taught / max(1, teacher),
        "student_share": learns / max(1, student),
        "unknown": tally["unknown"],
        "runs_by_size": {f"{t}:{s}": count for (t, s), count in runs.items()},
    }


def common_sizes(alignments: Mapping[str, Any]) -> list[str]:
    """List the most frequent sizes of runs, in any alignment, the smallest first."""
    counts = Counter[str]()
    for each in alignments.values():
        counts.update(each["runs_by_size"])
    sizes = [size for size, _ in counts.most_common(SIZES)]
    return sorted(sizes, key=lambda size: [int(n) for n in size.split(":")])


def coverage_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Tell coverage in lines."""
    own, found = facts["vocabulary"], facts["coverage"]
    yield (
        f"student     {own['pieces']:,} pieces (--vocab {own['word']}), of which {own['shared']:,}"
        f" are the teacher's, too; {own['teacher_pieces_unknown']:,} of the teacher's"
        f" {own['teacher_pieces']:,} cannot be spelled in them"
    )
    if own["note"]:
        yield f"            {own['note']}"
    yield (
        f"alignments  of {found['sequences']:,} of {found['of']:,} sequences, with"
        f" {found['teacher_tokens']:,} tokens of the teacher; special tokens take part in none"
    )
    sizes = common_sizes(found["alignments"])
    heads = ("teacher's", "student's", "[UNK]", "runs", *sizes, "other")
    yield f"{'':<10}" + "".join(f"{head:>11}" for head in heads)
    for name, each in found["alignments"].items():
        runs, shares = max(1, each["runs"]), [each["runs_by_size"].get(size, 0) for size in sizes]
        cells = [f"{each['teacher_share']:.1%}", f"{each['student_share']:.1%}"]
        cells += [f"{each['unknown'] / max(1, each['student_tokens']):.2%}", f"{each['runs']:,}"]
        cells += [f"{share / runs:.1%}" for share in (*shares, each["runs"] - sum(shares))]
        yield f"{name:<10}" + "".join(f"{cell:>11}" for cell in cells)
    yield (
        "teacher's, student's: the share of its tokens that take part; then how many runs there"
        " are, and which share has so many tokens of the teacher : of the student"
    )
