"""The formats of captures: how each is recognised, read, and what it has to be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from teachonce.feature_store.captures import cached_vectors, distillkit, hidden_files, megatron
from teachonce.feature_store.captures.options import FORMATS, ImportOptions
from teachonce.feature_store.captures.sample import Capture
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.support.errors import UserError


@dataclass(frozen=True)
class Format:
    """A format of captures; `takes` are the options that it has a use for."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[ImportOptions, TeacherFiles], Capture]
    takes: frozenset[str] = frozenset()


def _states(kind: hidden_files.Kind) -> Format:
    recognises = partial(hidden_files.recognises, kind)
    return Format(
        kind.name, recognises, partial(hidden_files.HiddenFiles, kind), frozenset({"layers"})
    )


REGISTRY = {
    each.name: each
    for each in (
        Format(
            "distillkit",
            distillkit.recognises,
            distillkit.DistillKit,
            frozenset({"compression"}),
        ),
        Format("megatron", megatron.recognises, megatron.Megatron, frozenset({"tokens"})),
        _states(hidden_files.SPECULATORS),
        _states(hidden_files.SPECFORGE),
        Format(
            "sentence-transformers",
            cached_vectors.recognises,
            cached_vectors.CachedVectors,
            frozenset({"text_column", "max_length"}),
        ),
    )
}


def format_of(options: ImportOptions) -> Format:
    """Return the format of a capture, which is asked for or seen. Raises UserError."""
    source = options.source
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; check the path")
    if options.format is not None:
        found = [options.format]
    else:
        found = [name for name, each in REGISTRY.items() if each.recognises(source)]
    if not found:
        raise UserError(
            f"{source}: is no capture that can be read ({', '.join(FORMATS)}); check the path, or"
            " say by --format what it is"
        )
    if len(found) > 1:
        raise UserError(
            f"{source}: may be a capture of {' or of '.join(found)}; say by --format which one"
        )
    chosen = REGISTRY[found[0]]
    options.check(chosen.takes, chosen.name)
    return chosen
