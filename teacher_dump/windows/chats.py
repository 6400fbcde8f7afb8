"""Renders chats by the teacher's chat template, and finds the text that students are trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from teachonce.checkpoints.chat_template import (
    Messages,
    closing,
    filled,
    render,
    special_tokens,
    texts_around,
)
from teachonce.store.format.features import ROLES, UNLISTED_ROLE
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.corpus.labelled_text import Message

NOT_ANSWERS = ROLES[1:]
"""Roles whose messages are not answers of the model."""


def check_chat_template(tokenizer: Any, name: str) -> None:
    """Raise UserError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"--messages: the tokenizer of {name} has no chat template; give a model that has"
            " one, or write the chats as texts and give their column as --text-column"
        )


def template_hash(tokenizer: Any) -> str:
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def reads_clock(tokenizer: Any) -> bool:
    """Return whether the chat template may write the current date (Llama 3.2)."""
    # The only function of time that transformers gives to a template.
    return "strftime_now" in str(tokenizer.chat_template)


class ChatRenderer:
    """Renders messages as the text that the teacher reads.

    learn: which contents students are trained on: `assistant` for its messages only, `all` for all
        messages; each with the special token that ends the message. The marks of the template are
        never included.
    date: the time that the template gets from `strftime_now`; None for the current time.

    Raises UserError for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any, name: str, learn: str, date: datetime | None = None) -> None:
        check_chat_template(tokenizer, name)
        self._tokenizer, self._name, self._learn, self._date = tokenizer, name, learn, date
        self._specials = special_tokens(tokenizer)

    def rendered(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents with the rendered chat as `text`, the spans of its messages as
        `contents`, and as `learn` the spans that students are trained on.

        Raises UserError for messages that the template refuses, or does not render verbatim.
        """
        for document in documents:
            text, spans = self._render(document.messages, document)
            roles = [_number(message.role) for message in document.messages]
            contents = tuple((*span, role) for span, role in zip(spans, roles, strict=True))
            learnt = self._learnt(text, document.messages, spans)
            yield replace(document, text=text, learn=learnt, contents=contents)

    def _render(
        self, messages: Sequence[Message], document: Document
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans of the messages' contents."""
        roles = dict.fromkeys(message.role for message in messages)
        unknown = [role for role in roles if role not in NOT_ANSWERS]
        if self._learn != "all" and unknown and "assistant" not in unknown:
            raise UserError(
                f"{document.source}, chat {document.number + 1}: has no message of `assistant`, on"
                f" which students are trained, but of {', '.join(unknown)}; rename the role of the"
                " answers, or give --learn all"
            )
        apply = partial(self._apply, document=document)
        text = apply([message.fields() for message in messages])
        self._check_other_fields(text, messages, document)
        # Contents are not searched for in the text: a content may be a word of the template, too.
        around = texts_around(apply, [message.role for message in messages])
        # Many templates trim contents; the text then holds them without spaces at their ends.
        verbatim = [message.content for message in messages]
        for contents in (verbatim, [content.strip() for content in verbatim]):
            # Unequal if the template treats a content differently than the mark in its place.
            if around is not None and (chat := filled(around, contents))[0] == text:
                return chat
        raise UserError(
            f"{document.source}, chat {document.number + 1}: the chat template of {self._name} does"
            " not write each content as it is (it drops or changes a message); give chats that it"
            " writes in full, or write them as texts and give --text-column"
        )

    def _check_other_fields(
        self, text: str, messages: Sequence[Message], document: Document
    ) -> None:
        """Raise UserError if the template writes a field of a message other than role and content,
        such as `tool_calls`. `text` is the chat without these fields."""

        def changes(keys: Sequence[str]) -> bool:
            try:
                return text != self._apply([message.fields(keys) for message in messages], document)
            except UserError:  # the template reads the fields, and refuses them
                return True

        keys = list(dict.fromkeys(key for message in messages for key in message.more))
        if keys and changes(keys):
            written = [key for key in keys if changes([key])] or keys
            raise UserError(
                f"{document.source}, chat {document.number + 1}: the chat template of {self._name}"
                f" writes more of a message than role and content: {', '.join(written)}; a dump of"
                " chats stores contents alone; remove these fields, or write the chats as texts and"
                " give --text-column"
            )

    def _apply(self, messages: Messages, document: Document) -> str:
        try:
            return render(self._tokenizer, messages, self._date)
        except Exception as error:  # templates raise errors of any type
            raise UserError(
                f"{document.source}, chat {document.number + 1}: the chat template of {self._name}"
                f" refuses it: {first_line(error)}; correct the template or the chat, or remove"
                " the chat"
            ) from error

    def _learnt(
        self, text: str, messages: Sequence[Message], spans: list[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        learnt = []
        for message, (begin, end) in zip(messages, spans, strict=True):
            if self._learn == "all" or message.role == "assistant":
                learnt.append((begin, end + closing(text, self._specials, end)))
        return tuple(learnt)


def _number(role: str) -> int:
    return ROLES.index(role) if role in ROLES else UNLISTED_ROLE


def messages_of(contents: Sequence[tuple[int, int, int]], begin: int, text: str) -> Array:
    """Return begin, end and role of the messages in a window of a document, int32 [M, 3].

    contents: the spans of all messages, as in `Document`. begin: the position of the window in the
        document, in characters. text: the window's text.
    """
    messages = np.array(contents, np.int32).reshape(-1, 3)
    spans = messages[:, :2] - begin
    messages[:, :2] = np.clip(spans, 0, len(text))
    # A message is in the window if any of its characters is; an empty message, if its position is.
    unclipped = (messages[:, :2] == spans).all(axis=1)
    return np.asarray(messages[unclipped | (messages[:, 0] < messages[:, 1])])


def learnt_of(spans: Sequence[tuple[int, int]], begin: int, offsets: Array, text: str) -> Array:
    """Return which tokens of a window are inside one of the `spans` of its document: bool [T].

    begin: the position of the window in the document, in characters. offsets: [T, 2], the tokens'
        spans in the window's text. A token may begin with spaces before a span of the document.
    """
    pieces = [text[low:high] for low, high in offsets.tolist()]
    blanks = [len(piece) - len(piece.lstrip(" ")) if piece.strip(" ") else 0 for piece in pieces]
    low, high = (offsets + begin).T
    low = low + np.array(blanks, low.dtype)
    edges = np.array(spans, np.int64).reshape(-1, 2)
    span = np.searchsorted(edges[:, 0], low, "right") - 1
    # A special token has an empty span, which is not inside any message.
    inside = (span >= 0) & (high > low)
    return np.asarray(inside & (high <= edges[np.maximum(span, 0), 1] if len(edges) else inside))
