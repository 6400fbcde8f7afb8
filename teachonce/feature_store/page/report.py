"""Write the page of some sequences of a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from teachonce.feature_store.coverage import common_sizes, coverage
from teachonce.feature_store.page.nearest import Nearest, nearest_sequences
from teachonce.feature_store.page.sequence import (
    SequenceSection,
    TokenRow,
    attention_entries,
    sequence_section,
)
from teachonce.feature_store.piece_names import ReadablePieces
from teachonce.feature_store.student_vocabulary import StudentVocabulary
from teachonce.store import FeatureStore
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.html import write_page
from teachonce.support.redaction import publishable

TEMPLATES = Path(__file__).parent
WHAT = "feature-store page"
# An entry is a byte before compression (`sequence._packed`), so all maps have at most 8 MB.
MOST_ENTRIES = 2**23
"""Entries of all attention maps of a page. With more, the page shows no map."""
LONGEST = 400  # characters of a neighbour's text


def write_store_page(
    store: FeatureStore, numbers: Sequence[int], student: StudentVocabulary | None, out: Path
) -> None:
    """Write the page of some sequences of a store, with a student's tokens if one is given.

    Raises UserError as `teachonce.support.html.check_page` does.
    """
    pieces, size = ReadablePieces(store), attention_entries(store, numbers)
    sections = [
        sequence_section(store, number, student, pieces, size <= MOST_ENTRIES) for number in numbers
    ]
    near, fit = nearest_sequences(store, numbers), coverage(student) if student else None
    store.watch.check()  # raises if `forget` has rewritten the store in the meantime
    write_page(
        out,
        TEMPLATES,
        "look.html.jinja",
        WHAT,
        title=_title(store, numbers),
        lead=list(_lead(store, fit, size > MOST_ENTRIES)),
        sequences=sections,
        alignments=ALIGNMENTS if student else {},
        views=store.features.views,
        maps=store.features.attention if size <= MOST_ENTRIES else (),
        token_headings=_headings(store, student),
        token_rows=lambda section: _teacher_rows(store, student, section),
        student_rows=_student_rows,
        plain=str,
        nearest=near,
        neighbours=lambda number: _neighbours(store, near, number),
        fit=fit and fit["coverage"],
        fit_summary=fit and _fit_summary(fit),
        sizes=common_sizes(fit["coverage"]["alignments"]) if fit else [],
        page=_data(store, sections, student, pieces),
    )


def _title(store: FeatureStore, numbers: Sequence[int]) -> str:
    several = "s" if len(numbers) > 1 else ""
    return f"{Path(store.path).name}: sequence{several} {', '.join(map(str, numbers))}"


def _lead(store: FeatureStore, fit: dict[str, Any] | None, without_maps: bool) -> Iterator[str]:
    """Yield the lines at the top of the page: teacher and store, vocabulary, omissions."""
    teacher = store.identity.get("teacher")
    name = teacher.get("id", "unknown") if isinstance(teacher, dict) else str(teacher)
    tokens = counted(store.meta["tokens"], "teacher token")
    line = (
        f"The teacher is {Path(str(name)).name}; the store has {len(store):,} sequences, {tokens}."
    )
    if fit is None:
        yield f"{line} Give --vocab to see a student's tokens as well."
    else:
        vocab = fit["vocabulary"]
        word = publishable(vocab["word"])  # a page is sent to others, who must not see local paths
        yield (
            f"{line} The student's vocabulary (--vocab {word}) has {vocab['pieces']:,} pieces and"
            f" shares {vocab['shared']:,} of them with the teacher."
        )
        if vocab["note"]:
            yield f"{vocab['note'][0].upper()}{vocab['note'][1:]}."
    if without_maps:
        yield "Attention maps are left out, because they are too large: choose fewer sequences."


def _headings(store: FeatureStore, student: StudentVocabulary | None) -> list[str]:
    views = range(store.features.views)
    headings = ["token", "piece", "characters", "text"]
    headings += [f"{name}: student's pieces" for name in ALIGNMENTS] if student else []
    headings += ["masked in views"] if len(views) > 1 else []
    if logits := store.features.logits:
        predicted = "next token" if logits.next_token else "most likely"
        headings += [f"{predicted}, view {view}" for view in views]
    return headings + (
        ["tag"] if store.features.task and store.features.task.kind == "tagging" else []
    )


def _teacher_rows(
    store: FeatureStore, student: StudentVocabulary | None, section: SequenceSection
) -> Iterator[list[str]]:
    """Yield a row of the table for each token of the teacher, with the columns of `_headings`."""
    views = range(store.features.views)
    for number, (piece, begin, end, special, _, text) in enumerate(section.teacher):
        row = [str(number), piece, "" if special else f"{begin}:{end}", text]
        row += [section.pieces_of(name, number) for name in ALIGNMENTS] if student else []
        row += [section.masked(number)] if len(views) > 1 else []
        row += [section.most_likely(v, number) for v in views] if store.features.logits else []
        facts = section.views[0]["tokens"][number]
        yield row + ([facts["tag"] or ""] if "tag" in facts else [])


def _student_rows(side: Sequence[TokenRow]) -> Iterator[tuple[str, ...]]:
    for number, (piece, begin, end, special, _, text) in enumerate(side):
        yield str(number), piece, "" if special else f"{begin}:{end}", text


def _neighbours(
    store: FeatureStore, near: Nearest, number: int
) -> Iterator[tuple[int, float, str]]:
    for other, cosine in near.neighbours[number]:
        text = " | ".join(store[other].texts)
        yield other, cosine, text[:LONGEST] + ("…" if len(text) > LONGEST else "")


def _fit_summary(fit: dict[str, Any]) -> str:
    vocab, measured = fit["vocabulary"], fit["coverage"]
    among = f"{measured['sequences']:,} of {counted(measured['of'], 'sequence')}"
    return (
        f"Counted in {among} with {measured['teacher_tokens']:,} ordinary tokens of the teacher."
        f" {vocab['teacher_pieces_unknown']:,} of the teacher's {vocab['teacher_pieces']:,} pieces"
        " cannot be spelled with the student's pieces."
    )


def _data(
    store: FeatureStore,
    sections: Sequence[SequenceSection],
    student: StudentVocabulary | None,
    pieces: ReadablePieces,
) -> dict[str, Any]:
    """Collect the data for the page's script.

    `pieces` holds, for each of the most likely pieces, its name, the student's identical piece, and
    the first piece into which the student splits it.
    """
    ids = {id for s in sections for view in s.data["best"] for token in view for id, _ in token}
    logits = store.features.logits
    strategies = ALIGNMENTS if student else {}
    return {
        "alignments": {name: {"predicted": s.predicted} for name, s in strategies.items()},
        "views": store.features.views,
        "maps": list(store.features.attention),
        "hasLogits": logits is not None,
        "draws": logits.size if logits and logits.tier == "sample" else None,
        "nextToken": bool(logits and logits.next_token),
        "pieces": {id: (pieces.name(id), *_student_pieces(student, id)) for id in sorted(ids)},
        "sequences": [section.data for section in sections],
    }


def _student_pieces(student: StudentVocabulary | None, piece: int) -> tuple[str | None, str | None]:
    """Return the student's identical piece for a teacher piece, and the first piece of the
    student's split; None for a piece that the student lacks."""
    if student is None or piece >= len(student.piece_map.match):
        return None, None

    def name(number: int) -> str | None:
        return student.name(number) if number >= 0 else None

    split: Array = student.piece_map.split(piece)
    first = -1 if student.piece_map.unknown[piece] or not len(split) else int(split[0])
    return name(int(student.piece_map.match[piece])), name(first)
