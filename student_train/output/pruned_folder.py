"""Prunes a finished student's folder to the pieces that are also in another vocabulary."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from teachonce.checkpoints.checkpoint_tokenizer import save_tokenizer
from teachonce.checkpoints.declared import declared_kind
from teachonce.checkpoints.loading import FACTORIES, load_resolved
from teachonce.checkpoints.names import ResolvedModel
from teachonce.student_train.model.pruning import pruned, shared_pieces
from teachonce.support import files
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.parsing import local_path


def prune_student(student: str | Path, vocab: str | Path, out: str | Path) -> int:
    """Prune a student to the pieces that are also in another tokenizer, and write it to `out`.

    student, vocab: folders of the student and of the other tokenizer.

    Returns the number of pieces. The student retains the embeddings of these pieces, its special
    tokens and all other weights (Zhao et al. 2021, section 6). Raises UserError for a folder
    without a student or tokenizer, for a vocabulary that is not a WordPiece, and if `out` exists or
    is a URL.
    """
    target, caller = local_path(out), f"prune_student({str(student)!r})"
    if target.exists():
        raise UserError(f"{target} exists already; {ANOTHER}")

    for path in (student, vocab):
        # transformers would take another name for a model of the hub.
        if not Path(path).is_dir():
            raise UserError(
                f"{caller}: {path} is no folder; give the folders of a student and of a tokenizer"
            )

    def load_local(factory: Any, path: str | Path) -> Any:
        return load_resolved(
            factory, ResolvedModel(str(path), str(path)), caller, local_files_only=True
        )

    config = load_local(AutoConfig, student)
    kind = declared_kind({"architectures": config.architectures})
    if kind is None or kind == "causal":
        raise UserError(
            f"{caller}: config.json has the architecture {config.architectures}; expected a masked"
            " LM, a classifier or a tagger"
        )
    original = load_local(AutoTokenizer, student)
    pieces = shared_pieces(original, load_local(AutoTokenizer, vocab), str(vocab))
    model, tokenizer = pruned(load_local(FACTORIES[kind], student), original, pieces)
    _write_folder(model, tokenizer, _card(Path(student), len(original), len(pieces)), target)
    return len(pieces)


def _card(student: Path, before: int, after: int) -> str:
    """Return the student's card with a section on the pruning."""
    card = student / "README.md"
    text = card.read_text("utf-8") if card.is_file() else f"# {student.name}\n"
    return (
        f"{text}\n## Pruned\n\nAfter the training described above, the vocabulary was pruned from"
        f" {before:,} to {after:,} pieces. The figures above were measured before.\n"
    )


def _write_folder(model: Any, tokenizer: Any, card: str, out: Path) -> None:
    """Write the complete folder; after an error, leave nothing behind."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Next to `out`, because a rename works only within one file system.
        with tempfile.TemporaryDirectory(prefix=files.UNFINISHED, dir=out.parent) as folder:
            temporary = Path(folder) / out.name
            model.save_pretrained(temporary)
            save_tokenizer(tokenizer, temporary)
            (temporary / "README.md").write_text(card, "utf-8")
            files.apply_umask(temporary)
            files.sync_tree(temporary)
            files.rename(temporary, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {files.reason(error)}") from error
