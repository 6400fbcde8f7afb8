"""Commands whose usage errors are one line; click prints four."""

from __future__ import annotations

import re
from typing import Any

import click

from teachonce.support.errors import did_you_mean, nearest, suggest, suggest_path

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
    """Prints the usage errors of a group of commands in one line, and gives all --version."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command to the group."""
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
        help is unchanged.
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
        near = nearest(error.option_name.lstrip("-"), [name.lstrip("-") for name in names])
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
