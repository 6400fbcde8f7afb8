"""What a chat template writes around the contents of messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from teachonce.checkpoints.first_token import prepended_token

# A mark in place of a content shows what the template writes around it. Private-use characters:
# no template looks for them, and spaces at the ends would be trimmed.
PLACE = "\ue0f0{}\ue0f1"
Messages = list[dict[str, Any]]
PROBE: Messages = [{"role": "user", "content": "x"}]
LONGEST = 10_000  # characters of a rendered PROBE


def texts_around(write: Callable[[Messages], str], roles: Sequence[str]) -> list[str] | None:
    """Return what a template writes before, between and after the contents of M messages: M + 1
    texts; None if it drops a content, writes one twice, or changes their order.

    write: applies the template, and may raise errors of any type.
    """
    marks = [PLACE.format(number) for number in range(len(roles))]
    rest = write([{"role": r, "content": p} for r, p in zip(roles, marks, strict=True)])
    texts = list[str]()
    for mark in marks:
        before, match, rest = rest.partition(mark)
        if not match:
            return None
        texts.append(before)
    return None if PLACE[0] in rest else [*texts, rest]


def filled(around: Sequence[str], contents: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Write the contents of M messages between M + 1 texts. Return the text and their spans."""
    pieces, spans, length = [around[0]], list[tuple[int, int]](), len(around[0])
    for content, behind in zip(contents, around[1:], strict=True):
        spans.append((length, length + len(content)))
        pieces += [content, behind]
        length += len(content) + len(behind)
    return "".join(pieces), spans


@contextmanager
def _fixed_time(tokenizer: Any, time: datetime | None) -> Iterator[None]:
    """Let the chat template of a tokenizer write this time inside the `with` block; None for the
    current time."""
    if time is None:
        yield
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # `apply_chat_template` replaces functions in its arguments. It compiles a template once;
    # its own globals hide the globals of its environment.
    jinja_globals = _compile_jinja_template(tokenizer.get_chat_template()).globals
    jinja_globals["strftime_now"] = time.strftime
    try:
        yield
    finally:
        del jinja_globals["strftime_now"]


def closing(text: str, specials: Iterable[str], begin: int = 0) -> int:
    """Return the length of the special token that ends a message whose content ends at `begin` of a
    text, with spaces before it; 0 if there is none.

    specials: see `special_tokens`.
    """
    # Llama 2 writes a space between an answer and its end.
    at = begin
    while text.startswith(" ", at):
        at += 1
    special = next((token for token in specials if text.startswith(token, at)), "")
    return at - begin + len(special) if special else 0


def plain_template(tokenizer: Any) -> str:
    """Return the chat template of a tokenizer; of several, the one for plain chats; "" if there is
    none."""
    try:
        return str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""
    except ValueError:  # several named templates, and none of them for plain chats
        return ""


def own_bos(tokenizer: Any) -> str:
    """Return the bos token that a tokenizer puts in front of each text; "" if it puts none."""
    first = prepended_token(tokenizer.backend_tokenizer)
    bos = first is not None and first == tokenizer.bos_token_id
    return str(tokenizer.bos_token) if bos else ""


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the added tokens, the longest first, as a token may begin with another."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return tuple(sorted((token.content for token in added), key=len, reverse=True))


def render(tokenizer: Any, messages: Messages, time: datetime | None) -> str:
    """Apply the chat template of a tokenizer. `time` is what the template reads as the current
    time, if given. Raises errors of any type.
    """
    with _fixed_time(tokenizer, time):
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    # The tokenizer puts its own bos in front of every text, also of those that begin with it.
    return text.removeprefix(own_bos(tokenizer))


def begin_of_chat(template: str, specials: dict[str, Any]) -> str:
    """Return the first characters that a template writes for PROBE. Raises errors of any type.

    For a process with bounds: it must not be able to load torch later.
    """
    # Importing torch takes longer, and more address space, than the bounds allow.
    sys.modules["torch"] = cast(Any, None)
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template([PROBE], chat_template=template, **specials)
    return str(rendered[0][0])[:LONGEST]


def with_first_token(template: str, tokenizer: Any, begin: str, template_bos: str = "") -> str:
    """Return a chat template that writes the tokenizer's bos token first, if the tokenizer puts one
    in front of each text: `apply_chat_template` does not add it.

    begin: the first characters that the template writes for this tokenizer.
    template_bos: the token that the teacher's tokenizer puts in front of each text, "" if it puts
        none. The dump took it out of the text: it is replaced if the template begins with it.
    """
    if not (bos := own_bos(tokenizer)) or begin.startswith(bos):
        return template
    if template_bos and begin.startswith(template_bos):  # which the dump took out of the text
        rest = f"chat[{len(template_bos)}:]"
        return f"{{% set chat %}}{template}{{% endset %}}{{{{ bos_token + {rest} }}}}"
    return "{{ bos_token }}" + template
