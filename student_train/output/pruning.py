"""Prunes the folder of a finished student to the pieces that another vocabulary has, too."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from teachonce.checkpoints.loading import load
from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.tokenizer_folder import save_tokenizer
from teachonce.student_train.model.pruning import pruned, shared_pieces
from teachonce.support import files
from teachonce.support.errors import ANOTHER, UserError

FACTORIES = {
    "ForMaskedLM": AutoModelForMaskedLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def prune_student(student: str | Path, vocab: str | Path, out: str | Path) -> int:
    """Write the student of a folder, cut to the pieces that the tokenizer of the folder `vocab`
    has, too, to the folder `out`; return the number of its pieces.

    It keeps the rows of these pieces, its special tokens and all other weights (Zhao et al. 2021,
    section 6). Raises UserError for folders that hold no student or tokenizer, for vocabularies
    that are no WordPieces, and where `out` exists.
    """
    target, asked = Path(out), f"prune_student({str(student)!r})"
    if target.exists():
        raise UserError(f"{target} exists already; {ANOTHER}")

    def loaded(factory: Any, path: str | Path) -> Any:
        return load(factory, ResolvedModel(str(path), str(path)), asked, local_files_only=True)

    config = loaded(AutoConfig, student)
    end = next((e for e in FACTORIES if str(config.architectures).rstrip("']").endswith(e)), None)
    if end is None:
        raise UserError(
            f"{asked}: config.json tells the architecture {config.architectures}; expected one of"
            f" {', '.join(FACTORIES)}"
        )
    own = loaded(AutoTokenizer, student)
    kept = shared_pieces(own, loaded(AutoTokenizer, vocab), str(vocab))
    model, tokenizer = pruned(loaded(FACTORIES[end], student), own, kept)
    _write(model, tokenizer, _card(Path(student), len(own), len(kept)), target)
    return len(kept)


def _card(student: Path, before: int, after: int) -> str:
    """Return the card of a student with what was done to it."""
    card = student / "README.md"
    told = card.read_text() if card.is_file() else f"# {student.name}\n"
    return (
        f"{told}\n## Pruned\n\nAfter the training that is described above the vocabulary was cut"
        f" from {before:,} to {after:,} pieces; the figures above are of before.\n"
    )


def _write(model: Any, tokenizer: Any, card: str, out: Path) -> None:
    """Write a folder as a whole, or nothing."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=files.UNFINISHED, dir=out.parent) as folder:
            made = Path(folder) / out.name
            model.save_pretrained(made)
            save_tokenizer(tokenizer, made)
            (made / "README.md").write_text(card)
            files.sync_tree(made)
            made.rename(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {files.reason(error)}") from error
