"""The words of a command, read as the command reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


def given(command: click.Command, words: Sequence[str]) -> dict[str, Any]:
    """Read what words give to a command, by the names of its options; what they leave at its
    default is left out."""
    context = command.make_context(command.name or "", list(words))
    default = click.core.ParameterSource.DEFAULT
    return {n: v for n, v in context.params.items() if context.get_parameter_source(n) != default}
