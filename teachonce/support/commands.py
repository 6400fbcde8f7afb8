"""Commands of click: usage errors of one line (click prints four), a --help that groups options,
subcommands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from teachonce.support.errors import did_you_mean, most_similar, suggest, suggest_path

version_option = click.version_option(package_name="teachonce", message="%(prog)s %(version)s")


class OneLineCommand(click.Command):
    """Prints the usage errors of a command in one line: an unknown option, a wrong value, a missing
    argument."""

    def make_context(self, info_name: str | None, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(info_name, *args, **kwargs)
        except click.UsageError as error:
            raise one_line(error, str(info_name)) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)  # a group parses the words of its subcommand here
        except click.UsageError as error:
            raise one_line(error, ctx.command_path) from error


class OneLineGroup(OneLineCommand, click.Group):
    """Prints the usage errors of a group of commands in one line, and adds --version to the
    group."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        super().add_command(version_option(cmd), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command whose name is the first word."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            ctx.fail(self.unknown(args[0]))
        return super().resolve_command(ctx, args)

    def unknown(self, word: str) -> str:
        """Return the message for a first word that is not the name of a command."""
        names = sorted(self.commands)
        return f"{word}: no such command; {suggest(word, names)}expected one of {', '.join(names)}"


class UsageLine(click.UsageError):
    """Prints a usage error as one line."""

    def show(self, file: Any = None) -> None:
        click.ClickException.show(self, file)


def one_line(error: click.UsageError, path: str) -> click.UsageError:
    """Return a usage error as one line, which ends with the command that lists the options.

    path: the command's name, for errors without a context. If a group is called without a word, its
        help is printed unchanged.
    """
    if isinstance(error, UsageLine | click.exceptions.NoArgsIsHelpError):
        return error
    line, near = _described(error)
    ctx = error.ctx
    return UsageLine(
        f"{line}; {near}`{ctx.command_path if ctx else path} --help` lists all options", ctx
    )


def _described(error: click.UsageError) -> tuple[str, str]:
    """Return a description of the error, and a suggestion, which may be ""."""
    ctx = error.ctx
    if isinstance(error, click.NoSuchOption):
        params = ctx.command.get_params(ctx) if ctx else []
        options = [param for param in params if isinstance(param, click.Option)]
        names = [name for option in options for name in (*option.opts, *option.secondary_opts)]
        # Without the dashes, which all options have in common.
        near = most_similar(error.option_name.lstrip("-"), [name.lstrip("-") for name in names])
        return f"{error.option_name}: no such option", did_you_mean(f"--{near}") if near else ""
    if isinstance(error, click.MissingParameter) and error.param:
        return f"{_name(error.param, ctx)} is missing", ""
    if isinstance(error, click.BadParameter) and error.param:
        value, message = "", error.message
        if match := re.fullmatch(r"\w+ '(.*)' does not exist\.", message):  # of click.Path
            near = suggest_path(match[1])
            return f"{_name(error.param, ctx)} {match[1]}: no such file or folder", near
        if match := re.fullmatch(r"('[^']*'|\"[^\"]*\"):? (.*)", message):
            value, message = f" {match[1][1:-1]}", match[2]
        return f"{_name(error.param, ctx)}{value}: {message.rstrip('.')}", ""
    return re.sub("^Option '(.+?)'", r"\1", error.format_message().rstrip(".")), ""


def _name(param: click.Parameter, ctx: click.Context | None) -> str:
    """Return an option as it is typed; for an argument, its name in the help."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.make_metavar(ctx) if ctx else param.human_readable_name


REST = "Other options"
Groups = Mapping[str, Sequence[str]]
"""Names of options, in their order, by heading."""


def is_given(name: str) -> bool:
    """Return whether a parameter of the running command was typed. Its value does not show this,
    because an option may be typed with its default value."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.DEFAULT


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
