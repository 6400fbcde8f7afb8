"""Shell completion for the commands: paths, as the shell itself completes, and words."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem


class Text(click.types.StringParamType):
    """A click type for text. A shell completes it to paths, to `words`, or to both.

    words: the words that a value may equal or start with, or a function that returns them if that
        takes time. paths: complete paths as well; without `words`, paths are always completed.
    """

    def __init__(
        self, words: Iterable[str] | Callable[[], Iterable[str]] = (), paths: bool = False
    ) -> None:
        self._words, self._paths = words, paths or words == ()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the word after the last comma, because some options are comma lists."""
        # Files come first: bash drops what was offered before them, and shows them if no word fits.
        before, comma, typed = incomplete.rpartition(",")
        words = self._words() if callable(self._words) else self._words
        files = [CompletionItem(incomplete, type="file")] if self._paths else []
        fitting = (word for word in words if word.startswith(typed))
        return [*files, *(CompletionItem(f"{before}{comma}{word}") for word in fitting)]


PATH = Text()
"""The path of a file or a folder, or an address."""
