"""The heads that a checkpoint may have, by what its config.json says; nothing is loaded for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.checkpoint_names import ResolvedModel

WITHOUT = "keep hidden states and attention maps alone (`teacher-dump --head none`)"


@dataclass(frozen=True)
class Declared:
    """A head: its name, how to get one, and the end of the names of the transformers classes that
    have it, which tells heads apart whose parameters have the same names."""

    name: str
    remedy: str
    architecture: str | None = None


DECLARED = {
    "mlm": Declared("masked-LM", f"train one with `downstream --task mlm`, or {WITHOUT}"),
    "causal": Declared("causal-LM", WITHOUT),
    "classification": Declared(
        "classification",
        "fine-tune it first with `downstream --task classify`",
        "ForSequenceClassification",
    ),
    "tagging": Declared(
        "tagging",
        "fine-tune it first with `downstream --task pos` or `ner`",
        "ForTokenClassification",
    ),
}


def config_of(model: ResolvedModel, name: str = "config.json") -> dict[str, Any]:
    """Read a table of settings in the folder of a checkpoint; nothing of what cannot be read, which
    loading will tell."""
    try:
        found = json.loads((Path(model.path_or_id) / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_declared(model: ResolvedModel, config: Mapping[str, Any], head: str) -> None:
    """Raise UserError where the config tells that the checkpoint has another head than this one of
    DECLARED."""
    said = config.get("architectures")
    if isinstance(said, list) and (other := another_head([*map(str, said)], head)):
        raise no_head(model.name, head, [other])


def another_head(architectures: Sequence[str], head: str) -> str:
    """Tell which class a checkpoint is of, where that class has another head; "" where it may have
    this one."""
    end = DECLARED[head].architecture
    if end is None or not architectures or any(name.endswith(end) for name in architectures):
        return ""
    return f"it is a {architectures[0]}"


def no_head(model: str, head: str, missing: Sequence[str]) -> UserError:
    """Make the error for a head that a checkpoint lacks; `missing` are its parameters, or why."""
    told = f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
    about = DECLARED[head]
    return UserError(
        f"{model}: the checkpoint has no {about.name} head (missing: {told}); {about.remedy}"
    )
