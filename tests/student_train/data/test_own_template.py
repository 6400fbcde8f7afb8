"""Laws of chats in a student's own template: contents stay the same inside any marks."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.align import Tokens
from teachonce.checkpoints.chat_template import filled, texts_around
from teachonce.store.format.features import ROLES
from teachonce.student_train.data.own_template import Chat, OwnTemplate, covers_any
from teachonce.support.errors import UserError
from teachonce.teacher_dump.windows.chats import messages_of
from tests.making.models import trained_tokenizer

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
        "{% else %}{{ m.role | upper }}: {{ m.content }}\n{% endif %}{% endfor %}"
    ),
    "strict": (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    ),
}
LETTERS = "aé文🙂 \n.<|/s>[]:"


@cache
def tokenizer(template: str) -> Any:
    found = trained_tokenizer("bpe-plain")
    marks = ["<|im_start|>", "<|im_end|>", "</s>"]
    found.add_special_tokens({"additional_special_tokens": marks})
    found.chat_template = TEMPLATES[template]
    return found


def render(template: str, messages: list[dict[str, str]]) -> str:
    return str(tokenizer(template).apply_chat_template(messages, tokenize=False))


def own_template(template: str) -> OwnTemplate:
    store = mock.Mock(meta={"created": "2026-01-31T12:00:00Z"})
    return OwnTemplate(tokenizer(template), store)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_contents_and_their_tokens_stay(data: st.DataObject) -> None:
    theirs, ours = (data.draw(st.sampled_from(sorted(TEMPLATES))) for _ in range(2))
    roles = ["user", *data.draw(st.lists(st.sampled_from(ROLES), max_size=4))]
    each = st.text(LETTERS, max_size=8)
    contents = data.draw(st.lists(each, min_size=len(roles), max_size=len(roles)))
    around = texts_around(lambda messages: render(theirs, messages), roles)
    assert around is not None
    whole, spans = filled(around, contents)
    begin = data.draw(st.integers(0, len(whole) - 1))
    text = whole[begin : data.draw(st.integers(begin + 1, len(whole)))]
    stored = [(low, high, ROLES.index(r)) for (low, high), r in zip(spans, roles, strict=True)]
    chat = Chat(text, messages_of(stored, begin, text), begin > 0)
    found = tokenizer(theirs)(text, return_offsets_mapping=True)
    offsets = np.array(found["offset_mapping"], np.int32).reshape(-1, 2)
    count = len(offsets)
    start, special = np.array([0, count]), np.zeros(count, bool)
    teacher = Tokens(np.array(found["input_ids"]), offsets, special, start)
    marked = st.lists(st.booleans(), min_size=count, max_size=count)
    learnt = np.array(data.draw(marked), bool)
    own = own_template(ours)
    try:
        (read,), moved, marks = own.read([chat], teacher, learnt)
    except UserError as error:
        assert ours == "strict" and "user first" in str(error) and begin == 0
        return
    if not len(chat.messages):
        assert read == text
        return
    student = own.write(chat)
    kept = [text[low:high] for low, high, _ in chat.messages.tolist()]
    assert [read[low:high] for low, high in student.contents] == kept
    if text == whole:
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        assert read == render(ours, messages)
    assert (moved.offsets >= 0).all() and (moved.offsets <= len(read)).all()
    inside = np.zeros(len(offsets), bool)
    for (low, high, _), (first, _) in zip(chat.messages.tolist(), student.contents, strict=True):
        within = (offsets[:, 0] >= low) & (offsets[:, 1] <= high)
        inside |= within
        assert (moved.offsets[within] == offsets[within] + first - low).all()
        # The first token of a content may start with blanks before it.
        ahead = (offsets[:, 0] < low) & (offsets[:, 1] > low) & (offsets[:, 1] <= high)
        for n in np.flatnonzero(ahead):
            if not text[offsets[n, 0] : low].strip(" "):
                assert moved.offsets[n].tolist() == [first, offsets[n, 1] + first - low]
    assert len(marks) == len(read) and not moved.special[inside].any()
    unmarked = np.ones(len(read), bool)
    for (low, high), end in zip(student.contents, student.ends, strict=True):
        assert not marks[low:high].any()
        unmarked[low:end] = False
    # Text that is neither a content nor its end is a mark, except blanks before a content.
    left = [read[n] for n in np.flatnonzero(unmarked & ~marks)]
    assert set(left) <= {" "}
    native = Tokens(teacher.ids, moved.offsets, moved.special, teacher.start)
    assert not covers_any(marks, [read], native)[inside].any()
