"""What a student of chats takes from its teacher: its chat template and its special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from teachonce.checkpoints.first_token import prepended_token
from teachonce.checkpoints.tokenizer_folder import CHAT_TEMPLATE
from teachonce.store import FeatureStore
from teachonce.store.errors import VERIFY, StoreError


def set_chat_template(tokenizer: Any, store: FeatureStore) -> str:
    """Give a student's tokenizer the chat template that rendered a store's chats, if it has any.

    Returns a line if it replaces another one. Raises StoreError if the template is not UTF-8.
    """
    if CHAT_TEMPLATE not in store.teacher_files():
        return ""
    try:
        template = store.teacher_file(CHAT_TEMPLATE).decode()
    except UnicodeDecodeError:
        raise StoreError(f"{store.path}: {CHAT_TEMPLATE} in it is not UTF-8; {VERIFY}") from None
    own = prepended_token(tokenizer.backend_tokenizer)
    if own is not None and own == tokenizer.bos_token_id and "bos_token" not in template:
        # `apply_chat_template` adds no special token, and the student was trained with this one.
        template = "{{ bos_token }}" + template
    before = tokenizer.chat_template
    tokenizer.chat_template = template
    replaced = before is not None and before != template
    return "chat template of the teacher, in place of that of the tokenizer" * replaced


def chat_marks(store: FeatureStore, texts: Iterable[str]) -> list[str]:
    """Return the teacher's special tokens that its chat template writes into `texts`, in the order
    of their ids; [] if the store holds no chats."""
    if not store.features.learn:
        return []
    added = store.tokenizer().get_added_tokens_decoder()
    marks = [token.content for _, token in sorted(added.items()) if token.special]
    found = set[str]()
    for text in texts:
        found.update(mark for mark in marks if mark not in found and mark in text)
    return [mark for mark in marks if mark in found]


def between(marks: Sequence[str], texts: Iterable[str]) -> Iterator[str]:
    """Yield what is between the marks in each text, so that no piece is learnt from a mark."""
    pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
    for text in texts:
        yield from pattern.split(text) if pattern else (text,)
