"""What a chat template writes around the contents of messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from teachonce.checkpoints.first_token import prepended_token

# A mark in place of a content shows what the template writes around it. It has private-use
# characters, for which no template looks, and no spaces, which a template might trim.
PLACE = "\ue0f0{}\ue0f1"
Messages = list[dict[str, Any]]
PROBE: Messages = [{"role": "user", "content": "x"}]
LONGEST = 10_000  # characters of a rendered PROBE


def texts_around(write: Callable[[Messages], str], roles: Sequence[str]) -> list[str] | None:
    """Return what a template writes before, between and after the contents of M messages: M + 1
    texts. Return None if the template drops a content, repeats a content, or changes their order.

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
    """Write the contents of M messages between the M + 1 texts `around` them. Return the whole
    text, and the span of each content in it."""
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

    # A function in the arguments of `apply_chat_template` would be replaced. transformers compiles
    # a template once, and the template's own globals hide the globals of its environment.
    jinja_globals = _compile_jinja_template(tokenizer.get_chat_template()).globals
    jinja_globals["strftime_now"] = time.strftime
    try:
        yield
    finally:
        del jinja_globals["strftime_now"]


def closing(text: str, specials: Iterable[str], begin: int = 0) -> int:
    """Return the length of the special token that ends a message, with the spaces before the token;
    0 if no special token follows the content.

    begin: the end of the message's content in `text`. specials: see `special_tokens`.
    """
    # Llama 2 writes a space between an answer and its end.
    at = begin
    while text.startswith(" ", at):
        at += 1
    special = next((token for token in specials if text.startswith(token, at)), "")
    return at - begin + len(special) if special else 0


def plain_template(tokenizer: Any) -> str:
    """Return the chat template of a tokenizer, "" if it has none. If it has several templates,
    return the template for plain chats, "" if none of them is."""
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
    """Return the added tokens of a tokenizer, the longest first: a token may begin with another."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return tuple(sorted((token.content for token in added), key=len, reverse=True))


def render(tokenizer: Any, messages: Messages, time: datetime | None) -> str:
    """Apply the chat template of a tokenizer. The template reads `time` as the current time; None
    for the real time. Raises errors of any type.
    """
    with _fixed_time(tokenizer, time):
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    # The tokenizer puts its own bos in front of every text, also of those that begin with it.
    return text.removeprefix(own_bos(tokenizer))


def begin_of_chat(template: str, specials: dict[str, Any]) -> str:
    """Return the first characters that a template writes for PROBE. Raises errors of any type.

    Call it only in a process with bounds: afterwards the process cannot import torch.
    """
    # Importing torch takes longer, and more address space, than the bounds allow.
    sys.modules["torch"] = cast(Any, None)
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template([PROBE], chat_template=template, **specials)
    return str(rendered[0][0])[:LONGEST]


def with_first_token(template: str, tokenizer: Any, begin: str, template_bos: str = "") -> str:
    """Return a chat template that writes the tokenizer's bos token first, if the tokenizer puts its
    bos token in front of each text. `apply_chat_template` does not add this token.

    begin: the first characters that the template writes for this tokenizer.
    template_bos: the token that the teacher's tokenizer puts in front of each text, "" if it puts
        none. If the template begins with this token, the tokenizer's bos token replaces it, because
        the dump removed it from the text.
    """
    if not (bos := own_bos(tokenizer)) or begin.startswith(bos):
        return template
    if template_bos and begin.startswith(template_bos):  # the dump removed it from the text
        rest = f"chat[{len(template_bos)}:]"
        return f"{{% set chat %}}{template}{{% endset %}}{{{{ bos_token + {rest} }}}}"
    return "{{ bos_token }}" + template
