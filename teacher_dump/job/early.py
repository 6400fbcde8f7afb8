"""Compares the options of a dump with the config of its teacher, before the teacher is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from teacher_dump.job.options import DumpOptions, parse_logits
from teacher_dump.teacher.checkpoint_names import ResolvedModel
from teacher_dump.teacher.layer_groups import layer_groups

LAYERS = ("num_hidden_layers", "n_layers", "n_layer")


def check_config(options: DumpOptions, model: ResolvedModel) -> None:
    """Raise UserError for layers and numbers of logits that the teacher does not have, as far as
    its config.json tells."""
    config = _config(model)
    layers = next((config[name] for name in LAYERS if isinstance(config.get(name), int)), None)
    if layers is not None:
        for spec in (options.hidden, options.attention):
            layer_groups(spec, layers)
    pieces = config.get("vocab_size")
    if options.logits and isinstance(pieces, int):
        parse_logits(options.logits, 1, pieces)


def _config(model: ResolvedModel) -> dict[str, Any]:
    """Read config.json of a folder; nothing of what cannot be read, which loading will tell."""
    try:
        found = json.loads((Path(model.path_or_id) / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
