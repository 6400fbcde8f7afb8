"""The alignment of each loss, as `--align` gives it: one word for all losses, or words by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from teachonce.student_train.losses.registry import loss_names, named
from teachonce.student_train.settings.alignments import ALIGNMENTS
from teachonce.support.errors import UserError

DEFAULT = "span"


@dataclass(frozen=True)
class LossAlignments:
    """Holds the names of alignments: `others` for the losses that `own` does not name."""

    others: str
    own: Mapping[str, str]

    def of(self, loss: str) -> str:
        """Name the alignment of a loss."""
        return self.own.get(loss, self.others)


@cache
def parse_alignments(words: str) -> LossAlignments:
    """Read `match`, `kl=match,hidden=reduce` or `reduce,kl=match`.

    Raises UserError for an unknown loss or alignment, for a loss that is given twice, and for a
    loss that compares nothing with the teacher.
    """
    own, others = dict[str, str](), list[str]()
    for word in (item.strip() for item in words.split(",")):
        name, given, alignment = word.rpartition("=")
        if alignment not in ALIGNMENTS:
            raise UserError(
                f"--align {word}: expected one of {', '.join(ALIGNMENTS)}, or of a single loss"
                " LOSS=ALIGNMENT, such as kl=match"
            )
        if not given:
            others.append(alignment)
            continue
        if name not in loss_names():
            known = ", ".join(loss_names())
            raise UserError(f"--align {word}: no loss {name!r}; there are {known}")
        if all(loss.of_masked for loss in named([name])):
            raise UserError(
                f"--align {word}: {name} compares the student with its own text, not with the"
                " teacher, and has no alignment; leave it out"
            )
        if name in own:
            raise UserError(f"--align {word}: {name} is given twice; give each loss one alignment")
        own[name] = alignment
    if len(others) > 1:
        raise UserError(
            f"--align {words}: {' and '.join(others)} for all losses; give one, and others by loss"
        )
    return LossAlignments(others[0] if others else DEFAULT, own)


def check_alignments(words: Any) -> None:
    """Check the alignments of losses: raise UserError as `parse_alignments` does."""
    parse_alignments(str(words))


def check_pieces(words: str, losses: Iterable[str]) -> None:
    """Check that losses over shared pieces have an alignment that pairs pieces with themselves:
    raise UserError for another."""
    for loss in named(losses):
        aligned = parse_alignments(words).of(loss.name)
        if loss.teacher == "shared" and ALIGNMENTS[aligned].predicted != "same":
            able = [name for name, each in ALIGNMENTS.items() if each.predicted == "same"]
            raise UserError(
                f"--align {aligned}: --loss {loss.name} compares the pieces that both vocabularies"
                f" have, which {aligned} does not pair with themselves; use"
                f" {' or '.join(f'--align {loss.name}={name}' for name in able)}"
            )
