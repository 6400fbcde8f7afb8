"""Stored chats in a student's own chat template: the same messages with the student's marks (roles,
special tokens) around them. The offsets of the teacher's tokens are mapped to the new text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from teachonce.align import FlatText, Tokens
from teachonce.checkpoints.chat_template import (
    begin_of_chat,
    closing,
    filled,
    own_bos,
    plain_template,
    render,
    special_tokens,
    texts_around,
    with_first_token,
)
from teachonce.checkpoints.checkpoint_tokenizer import CHAT_TEMPLATE
from teachonce.checkpoints.first_token import prepended_token
from teachonce.store import Batch, FeatureStore, Record
from teachonce.store.errors import VERIFY, StoreError
from teachonce.store.format.features import ROLES
from teachonce.support.arrays import Array, starts
from teachonce.support.bounded import LimitExceeded, run_bounded
from teachonce.support.errors import UserError, first_line

SECONDS, MEMORY = 60.0, 2**30  # bounds of a store's chat template
USER = ROLES.index("user")


def teacher_template(store: FeatureStore) -> str:
    """Return the teacher's chat template, or "". Raises StoreError if it is not UTF-8."""
    if CHAT_TEMPLATE not in store.teacher_files():
        return ""
    try:
        return store.teacher_file(CHAT_TEMPLATE).decode()
    except UnicodeDecodeError:
        raise StoreError(f"{store.path}: {CHAT_TEMPLATE} in it is not UTF-8; {VERIFY}") from None


def template_of_student(store: FeatureStore, tokenizer: Any) -> str:
    """Return the teacher's chat template for the tokenizer of a student; "" if it has none."""
    if not (template := teacher_template(store)) or not own_bos(tokenizer):
        return template
    # A bos token that the teacher's tokenizer does not put in front of each text is a mark of the
    # template, such as SmolLM2's `<|im_start|>`: the dump has not taken it out of the text.
    teacher = store.tokenizer()
    first = prepended_token(teacher)
    teacher_bos = (first is not None and teacher.id_to_token(first)) or ""
    return template_with_first_token(template, tokenizer, str(store.path), teacher_bos)


def template_with_first_token(
    template: str, tokenizer: Any, where: str, template_bos: str = ""
) -> str:
    """Return a template that begins with the token which a tokenizer puts in front of each text;
    see `with_first_token`. `where` names the store or folder of the template in messages."""
    if not own_bos(tokenizer):
        return template
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    begin = _begin_of_chat(template, json.dumps(specials), where)
    return template if begin is None else with_first_token(template, tokenizer, begin, template_bos)


@lru_cache(8)  # each store of a training is looked at several times
def _begin_of_chat(template: str, specials: str, where: str) -> str | None:
    """Return what a chat template writes first; None if it refuses a single message.

    specials: the special tokens by role, as JSON. Raises StoreError if the template exceeds
    `SECONDS` or `MEMORY`.
    """
    # A store is untrusted, and a template can loop for days or write any number of characters.
    arguments = template, json.loads(specials)
    try:
        return str(run_bounded(begin_of_chat, *arguments, seconds=SECONDS, memory=MEMORY))
    except LimitExceeded as error:
        raise StoreError(
            f"{where}: {CHAT_TEMPLATE} in it {error}, for a single message; do not use it, or give"
            " it another chat template"
        ) from None
    except UserError:  # such as for a chat without a system
        return None


def has_own_template(tokenizer: Any, store: FeatureStore) -> bool:
    """Return whether a tokenizer has a chat template that differs from the teacher's."""
    own = plain_template(tokenizer)
    return bool(own) and own not in (teacher_template(store), template_of_student(store, tokenizer))


@dataclass(frozen=True)
class Chat:
    """Holds a stored sequence of a chat.

    text: as the teacher's template writes it. messages: int32 [M, 3], begin, end and role of each
    content. continued: whether the sequence begins inside a document.
    """

    text: str
    messages: Array
    continued: bool

    @classmethod
    def of(cls, record: Record) -> Chat:
        assert record.messages is not None
        return cls(record.text, record.messages, record.document_begin > 0)


@dataclass(frozen=True)
class StudentText:
    """Holds a chat as the student reads it.

    contents: the spans of the messages' contents, [M, 2]. ends: where the special token behind each
        content ends, [M]; the end of the content if there is no such token.
    """

    text: str
    contents: list[tuple[int, int]]
    ends: list[int]


class OwnTemplate:
    """Writes the chats of a store in the chat template of a student's tokenizer (of transformers).
    A template that writes the current time gets the `created` timestamp of the store.

    A sequence that begins or ends inside a message has no marks there. A sequence that continues a
    chat is written as if a message of the user preceded it.
    """

    def __init__(self, tokenizer: Any, store: FeatureStore) -> None:
        self._tokenizer, self._store = tokenizer, store
        # A training that is continued on another day must read the same texts.
        self._time = datetime.fromisoformat(store.meta["created"])
        self._specials = special_tokens(tokenizer)
        self._texts = dict[tuple[tuple[int, ...], bool], tuple[str, ...]]()

    @classmethod
    def of(cls, tokenizer: Any, store: FeatureStore) -> OwnTemplate | None:
        """Make the template; None if the student reads the stored text: the store has no chats, or
        the student has the teacher's template."""
        rewritten = store.features.messages and has_own_template(tokenizer, store)
        return cls(tokenizer, store) if rewritten else None

    def texts(self) -> Iterator[str]:
        """Yield the texts of the store as the student reads them."""
        return (self.write(Chat.of(record)).text for record in self._store)

    def end_of_answers(self) -> str:
        """Return the special token that ends the model's messages; "" if there is none."""
        try:
            behind = self._around((USER, ROLES.index("assistant")), False)[2]
        except UserError:  # such as for a chat without a system
            return ""
        return behind[: closing(behind, self._specials)].lstrip(" ")

    def write(self, chat: Chat) -> StudentText:
        """Write the text of a chat for the student. Raises UserError if the template does not write
        chats with these roles."""
        contents = chat.messages[:, :2].tolist()
        if not contents:  # a window of marks alone, of which no student learns anything
            return StudentText(chat.text, [], [])
        around = list(self._around(tuple(chat.messages[:, 2].tolist()), chat.continued))
        if chat.continued and contents[0][0] == 0:
            around[0] = ""
        if contents[-1][1] == len(chat.text):
            around[-1] = ""
        text, spans = filled(around, [chat.text[begin:end] for begin, end in contents])
        ends = [end + closing(text, self._specials, end) for _, end in spans]
        return StudentText(text, spans, ends)

    def read(
        self, chats: Sequence[Chat], teacher: Tokens, learnt: Array
    ) -> tuple[list[str], Tokens, Array]:
        """Return the texts that the student reads, the teacher's tokens with offsets in them, and
        bool [C]: which characters of the joined texts are the template's own, and not trained on.

        learnt: bool [N], which of the teacher's tokens students are trained on.

        A token of the teacher's marks is aligned with all of the student's marks at the same place.
        If the student has no mark there, the token counts as special.
        """
        texts, unlearnt = list[str](), list[Array]()
        offsets, special = teacher.offsets.copy(), teacher.special.copy()
        for chat, (low, high) in zip(chats, pairwise(teacher.start.tolist()), strict=True):
            written, rows = self.write(chat), slice(low, high)
            texts.append(written.text)
            positions = _Positions.of(chat, written, offsets[rows], learnt[rows])
            offsets[rows] = positions.moved(offsets[rows])
            unlearnt.append(positions.marks(written.text))
        had_text = teacher.offsets[:, 0] < teacher.offsets[:, 1]
        special |= had_text & (offsets[:, 0] == offsets[:, 1])
        offsets[special] = 0
        tokens = replace(teacher, offsets=offsets, special=special)
        return texts, tokens, np.concatenate(unlearnt)

    def of_batch(self, batch: Batch) -> tuple[Batch, Array]:
        """Return a batch with the student's texts, and which of their characters are the template's
        own: bool [C]; see `read`."""
        assert batch.messages is not None and batch.learnt is not None
        start, messages = batch.messages
        continued = batch.stored["sequence/document_begin"] > 0
        sequences = zip(batch.texts, pairwise(start.tolist()), continued.tolist(), strict=True)
        chats = [Chat(text, messages[low:high], inside) for text, (low, high), inside in sequences]
        teacher = Tokens(batch.token_ids, batch.offsets, batch.special, batch.start)
        texts, tokens, marks = self.read(chats, teacher, batch.learnt)
        offsets, special = np.asarray(tokens.offsets), np.asarray(tokens.special)
        moved = replace(batch, offsets=offsets, special=special, load_texts=lambda: texts)
        return moved, marks

    def _around(self, roles: tuple[int, ...], continued: bool) -> tuple[str, ...]:
        """Return what the template writes around contents with these roles."""
        if (roles, continued) not in self._texts:
            self._texts[roles, continued] = self._texts_around(roles, continued)
        return self._texts[roles, continued]

    def _texts_around(self, roles: tuple[int, ...], continued: bool) -> tuple[str, ...]:
        if max(roles) >= len(ROLES):
            raise UserError(f"the chat has a role other than {', '.join(ROLES)}")
        if continued:
            # A template may write a system message at the start of a chat; this text continues one.
            with suppress(UserError):
                return self._texts_around((USER, *roles), False)[1:]
        write = partial(render, self._tokenizer, time=self._time)
        try:
            texts = texts_around(write, [ROLES[number] for number in roles])
        except Exception as error:  # templates raise errors of any type
            raise UserError(first_line(error)) from error
        if texts is None:
            raise UserError(
                "the template drops a message, writes one twice, or changes their order"
            )
        return tuple(texts)


def covers_any(marks: Array, texts: Sequence[str], tokens: Tokens) -> Array:
    """Return bool [N]: which tokens cover a character that `marks`, bool [C] over the joined texts,
    marks. A marked space counts only at the end of a token, because the first token of a content
    may begin with the spaces before it."""
    text = FlatText.of(texts)
    shift = np.repeat(text.start[:-1], np.diff(tokens.start))
    begin, end = tokens.offsets.astype(np.int64).T + shift
    marks_before = starts(marks & (text.codepoints != ord(" ")))
    ends_in_mark = (end > begin) & np.append(False, marks)[end]
    return np.asarray((marks_before[end] > marks_before[begin]) | ends_in_mark)


def _before_blanks(text: str, low: int, high: int) -> int:
    """Return the end of text[low:high] without its trailing spaces, as a position in `text`."""
    return low + len(text[low:high].rstrip(" "))


@dataclass(frozen=True)
class _Positions:
    """Holds the positions that correspond in the teacher's and the student's text of a chat: the
    start of the text; for each message the start and end of its content and the end of the token
    that ends the message; the end of the text. The first token of a content may include spaces
    before it, which do not belong to the marks.

    teacher, student: [3 M + 2], ascending; contents of the teacher begin with the spaces before
    them. ahead: as `student`, but contents begin with the spaces before them. shift: for the start
    of a content, its position in the student's text minus its position in the teacher's; else 0.
    """

    teacher: Array
    student: Array
    ahead: Array
    shift: Array

    @classmethod
    def of(cls, chat: Chat, written: StudentText, offsets: Array, learnt: Array) -> _Positions:
        teacher, student, ahead, shift = [0], [0], [0], [0]
        contents = chat.messages[:, :2].tolist()
        limits = [*(begin for begin, _ in contents), len(chat.text)][1:]
        for (begin, end), limit, (low, high), last in zip(
            contents, limits, written.contents, written.ends, strict=True
        ):
            # The student is trained on the end of a message if the end of the teacher's message is.
            closes = learnt & (offsets[:, 0] >= end) & (offsets[:, 1] <= limit)
            reach = int(offsets[closes, 1].max(initial=end))
            teacher += [_before_blanks(chat.text, teacher[-1], begin), end, reach]
            ahead += [_before_blanks(written.text, student[-1], low), high]
            student += [low, high, last if reach > end else high]
            ahead.append(student[-1])
            shift += [low - begin, 0, 0]
        size = len(written.text)
        columns = [*teacher, len(chat.text)], [*student, size], [*ahead, size], [*shift, 0]
        return cls(*map(np.array, columns))

    def moved(self, offsets: Array) -> Array:
        """Map offsets [T, 2] in the teacher's text to offsets in the student's text."""
        begin, end = offsets.astype(np.int64).T
        first = np.searchsorted(self.teacher, begin, "right") - 1
        last = np.searchsorted(self.teacher, end, "left") - 1
        low = np.where(first % 3 == 1, begin + self.shift[first], 0)
        behind = self.ahead[np.minimum(last + 1, len(self.student) - 1)]
        high = np.where(last % 3 == 1, end + self.shift[last], behind)
        low = np.maximum(low, self.student[first])
        moved = np.stack([low, np.maximum(low, high)], axis=1)
        return np.asarray(np.where((end > begin)[:, None], moved, 0))

    def marks(self, text: str) -> Array:
        """Return bool [C]: which characters of the student's text its chat template wrote, except
        marks that end a message."""
        marks = np.zeros(len(text), bool)
        bounds = self.student.tolist()
        for low, high in zip(bounds[:-1:3], bounds[1::3], strict=True):
            marks[low:high] = True
        return marks
