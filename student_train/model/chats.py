"""What a student of chats takes from its teacher: its chat template and its special tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from teachonce.store import FeatureStore
from teachonce.student_train.data.own_template import (
    OwnTemplate,
    has_own_template,
    teacher_template,
    template_of_student,
    template_with_first_token,
)
from teachonce.support.errors import UserError

SEQUENCES = 64  # sequences that are searched for the token that ends messages


def set_up_chat(tokenizer: Any, stores: Sequence[FeatureStore]) -> str:
    """Set the chat template of a student's tokenizer, and its eos token: the token that ends a
    message.

    A template of the tokenizer's own is retained if it writes the chats of all stores. Otherwise
    the tokenizer gets the template of the first store that has a template. Returns a line if the
    tokenizer had another template, or lacks the token that ends a message, else "". Raises
    StoreError if a template is not UTF-8, and UserError if the stores have several templates and
    the first does not write all chats.
    """
    chats = [store for store in stores if store.features.learn and teacher_template(store)]
    if not chats:
        return ""
    line = ""
    if has_own_template(tokenizer, chats[0]):
        if not (reason := _refusal(tokenizer, chats)):
            _set_eos(tokenizer, OwnTemplate(tokenizer, chats[0]).end_of_answers())
            template = tokenizer.get_chat_template()  # if it has several, the one for plain chats
            where = str(tokenizer.name_or_path)
            tokenizer.chat_template = template_with_first_token(template, tokenizer, where)
            return "chats in the chat template of the tokenizer, aligned message by message"
        line = f"the tokenizer gets the teacher's chat template: {reason}"
    lines = [line, _set_eos(tokenizer, _end_of_message(chats[0]))]
    tokenizer.chat_template = template_of_student(chats[0], tokenizer)
    other_stores = [store for store in chats[1:] if store.features.messages]
    if reason := _refusal(tokenizer, other_stores):
        raise UserError(
            f"the student gets the chat template of the first store, {chats[0].path}, which does"
            f" not fit the other stores: {reason}; give another store first, or only stores with"
            " one template"
        )
    return "; ".join(filter(None, lines))


def _refusal(tokenizer: Any, stores: Sequence[FeatureStore]) -> str:
    """Return why the template of a tokenizer cannot write the chats of the stores; "" if it can."""
    for store in stores:
        if not store.features.messages:
            return f"{store.path} has no spans of messages; dump it again with --messages"
        template = OwnTemplate.of(tokenizer, store)
        try:
            for _ in template.texts() if template else ():
                pass
        except UserError as error:
            return f"the tokenizer's template does not write the chats of {store.path} ({error})"
    return ""


def _set_eos(tokenizer: Any, token: str) -> str:
    """Make a special token the eos token, at which generation stops. Return a line if the
    vocabulary lacks it, else ""."""
    if token and token not in tokenizer.get_vocab():
        count = len(tokenizer.tokenize(token))
        return (
            f"the vocabulary has no token {token}, which ends a message: the student writes it as"
            f" {count} pieces, and `generate` does not stop there; add it to the tokenizer and the"
            " embeddings (transformers: add_special_tokens, resize_token_embeddings), or train a"
            " new decoder with --vocab teacher or 8k"
        )
    if token:
        tokenizer.eos_token = token  # `generate` stops there
    return ""


def chat_marks(stores: Sequence[FeatureStore], texts: Iterable[str]) -> list[str]:
    """Return the teachers' special tokens that occur in `texts`, each once, in the order of their
    ids. Only stores of chats count."""
    marks = list[str]()
    for store in (s for s in stores if s.features.learn):
        added = sorted(store.tokenizer().get_added_tokens_decoder().items())
        marks += [token.content for _, token in added if token.special]
    if not marks:
        return []
    present = set[str]()
    for text in texts:
        present.update(mark for mark in marks if mark not in present and mark in text)
    return [mark for mark in dict.fromkeys(marks) if mark in present]


def between(marks: Sequence[str], texts: Iterable[str]) -> Iterator[str]:
    """Yield the text between the marks of each text, so that no piece of a vocabulary contains a
    mark."""
    pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
    for text in texts:
        yield from pattern.split(text) if pattern else (text,)


def _end_of_message(store: FeatureStore) -> str:
    """Return the special token that ends messages, "" if none does: the special token on which
    students are trained most often in the first `SEQUENCES` sequences. The only special tokens on
    which students are trained are ends of messages."""
    added = store.tokenizer().get_added_tokens_decoder()
    special = [number for number, token in added.items() if token.special]
    counts = Counter[int]()
    for record in store[:SEQUENCES]:
        if record.learn is not None:
            learnt = record.token_ids[record.learn]
            counts.update(learnt[np.isin(learnt, special)].tolist())
    return added[counts.most_common(1)[0][0]].content if counts else ""
