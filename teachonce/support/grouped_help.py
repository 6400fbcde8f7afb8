"""Commands whose --help groups their options, and commands that also have subcommands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from teachonce.support.usage_errors import OneLineCommand, OneLineGroup

REST = "Other options"
Groups = Mapping[str, Sequence[str]]
"""Names of options, in their order, by heading."""


def examples(*lines: str) -> str:
    """Return the end of a command's --help: examples, one per line."""
    # click joins the lines of a paragraph, unless the paragraph starts with \b.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


class GroupedCommand(OneLineCommand):
    """Shows options in --help under headings; options without a group come last."""

    def __init__(self, *args: Any, groups: Groups, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group that has options, and one for subcommands."""
        options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        every = {option.name: option.get_help_record(ctx) for option in options}
        records = {name: record for name, record in every.items() if record is not None}
        for heading, names in self.groups.items():
            self._section(formatter, heading, [records.pop(n) for n in names if n in records])
        self._section(formatter, REST, list(records.values()))
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)

    def _section(
        self, formatter: click.HelpFormatter, heading: str, rows: list[tuple[str, str]]
    ) -> None:
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)


class GroupedCommandWithSubcommands(GroupedCommand, OneLineGroup):
    """Adds subcommands to a command with grouped help: a first word that names one runs the
    subcommand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # With a subcommand, the required options of the command itself must not be demanded.
        before = ctx.resilient_parsing  # True while a shell completes an unfinished command line
        ctx.resilient_parsing = before or (bool(args) and args[0] in self.commands)
        rest = super().parse_args(ctx, args)
        ctx.resilient_parsing = before
        return rest

    def unknown(self, word: str) -> str:
        """Return the message for an extra word, which is most often a second value of an option."""
        return (
            f"unexpected word {word!r}; an option takes one word: join several by commas"
            f" (mlm=1,hidden=30), and quote spaces; the subcommands are {', '.join(self.commands)}"
        )
