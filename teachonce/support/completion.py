"""What a shell offers for a text on the command line: paths, as it does by itself, and words."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem


class Text(click.types.StringParamType):
    """A text. A shell completes it to paths, to `words`, or to both.

    words: those that the text may be or begin with; a function gives them where they take work.
    paths: whether it may be a path; else it may where there are no words.
    """

    def __init__(
        self, words: Iterable[str] | Callable[[], Iterable[str]] = (), paths: bool = False
    ) -> None:
        self._words, self._paths = words, paths or words == ()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Offer words for what follows the last comma, as some texts are lists. Files come first:
        bash forgets what was offered before them, and shows them where no word fits."""
        before, comma, begun = incomplete.rpartition(",")
        words = self._words() if callable(self._words) else self._words
        files = [CompletionItem(incomplete, type="file")] if self._paths else []
        fitting = (word for word in words if word.startswith(begun))
        return [*files, *(CompletionItem(f"{before}{comma}{word}") for word in fitting)]


PATH = Text()
"""The path of a file or a folder, or an address."""
