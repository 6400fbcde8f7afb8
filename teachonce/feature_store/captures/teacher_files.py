"""The tokenizer and the configuration of the captured teacher."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.checkpoints.checkpoint_tokenizer import tokenizer_files
from teachonce.checkpoints.declared import layers_of, longest_input
from teachonce.checkpoints.fields import SETTINGS
from teachonce.checkpoints.names import finder, resolve_model
from teachonce.checkpoints.sentence_settings import read_sentence_settings
from teachonce.support.errors import UserError


@dataclass(frozen=True, eq=False)
class TeacherFiles:
    """Holds a fast tokenizer of transformers, and the teacher's configuration if it is known.

    vocabulary: the number of the teacher's logits if known, else the number of pieces.
    settings: the content of SETTINGS, from which students inherit prompts and similarity; None if
        the teacher is no model of sentence-transformers.
    """

    name: str
    tokenizer: Any
    config: dict[str, Any]
    vocabulary: int
    settings: bytes | None = None

    @property
    def layers(self) -> int | None:
        """Return the number of layers, or None if unknown."""
        return layers_of(self.config)

    @property
    def width(self) -> int | None:
        """Return the hidden size, or None if unknown."""
        names = (name for name in ("hidden_size", "n_embd", "dim") if name in self.config)
        size = self.config.get(next(names, ""))
        return size if isinstance(size, int) and size > 0 else None

    @property
    def limit(self) -> int | None:
        """Return the tokenizer's limit for a text, in tokens, or None if it has no limit."""
        return longest_input(self.tokenizer.model_max_length, None, self.config)

    def files(self, max_length: int) -> dict[str, bytes]:
        """Return the teacher's files that a store holds: content in bytes by file name."""
        config = json.dumps(self.config, sort_keys=True).encode()
        config_files = {"config.json": config} if self.config else {}
        settings = {SETTINGS: self.settings} if self.settings else {}
        return {**tokenizer_files(self.tokenizer, max_length), **config_files, **settings}


def open_teacher(name: str | None) -> TeacherFiles:
    """Load the tokenizer and the configuration of a folder, a model id or an alias.

    No weights are read. Raises UserError if tokenizer or configuration cannot be loaded, for a slow
    tokenizer, and for wrong settings of sentence-transformers.
    """
    from teachonce.checkpoints.loading import load_config, load_tokenizer
    from teachonce.teacher_dump.windows.cutting import check_tokenizer

    if name is None:
        raise UserError(
            "--tokenizer: missing; a capture holds ids or texts, and a store needs for each token"
            " the characters that it covers: give the folder of the teacher, or of its tokenizer"
        )
    try:
        model = resolve_model(name, weights=False)
    except UserError as error:
        raise UserError(f"--tokenizer: {error}") from error
    path = Path(model.path_or_id)
    tokenizer = load_tokenizer(model)
    check_tokenizer(tokenizer)
    config: dict[str, Any] = {}
    if not path.is_dir() or (path / "config.json").is_file():
        # A multimodal configuration has the layers and the vocabulary in its text part.
        config = load_config(model).get_text_config().to_dict()
        config.pop("_name_or_path", None)  # a path of this machine, which must not be published
    pieces = 1 + max(tokenizer.get_vocab().values())
    declared = config.get("vocab_size")  # often padded to a multiple, so more than the pieces
    vocabulary = max(pieces, declared) if isinstance(declared, int) else pieces
    known_by = Path(name).name if path.is_dir() else name
    read_sentence_settings(model, None)
    settings = finder(model)(SETTINGS)
    return TeacherFiles(
        known_by, tokenizer, config, vocabulary, settings.read_bytes() if settings else None
    )
