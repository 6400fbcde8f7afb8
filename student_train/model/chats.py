"""What a student of chats takes from its teacher: its chat template and its special tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from teachonce.checkpoints.first_token import prepended_token
from teachonce.checkpoints.tokenizer_folder import CHAT_TEMPLATE, SETTINGS
from teachonce.store import FeatureStore
from teachonce.store.errors import VERIFY, StoreError

PROBE = [{"role": "user", "content": "x"}]
SEQUENCES = 64  # whose messages show with which token they end


def set_up_chat(tokenizer: Any, stores: Sequence[FeatureStore]) -> str:
    """Give a student's tokenizer the chat template of the first store that has one, and as eos the
    token that ends a message there.

    Returns a line if another template is replaced, else "". Raises StoreError if the template is
    not UTF-8.
    """
    store = next((each for each in stores if CHAT_TEMPLATE in each.teacher_files()), None)
    if store is None:
        return ""
    try:
        template = store.teacher_file(CHAT_TEMPLATE).decode()
    except UnicodeDecodeError:
        raise StoreError(f"{store.path}: {CHAT_TEMPLATE} in it is not UTF-8; {VERIFY}") from None
    before, end = tokenizer.chat_template, _end_of_message(store)
    if end is not None and end in tokenizer.get_vocab():
        tokenizer.eos_token = end  # `generate` stops there
    tokenizer.chat_template = template
    tokenizer.chat_template = _with_first_token(template, tokenizer, store)
    replaced = before is not None and before != template
    return "chat template of the teacher, in place of that of the tokenizer" * replaced


def chat_marks(stores: Sequence[FeatureStore], texts: Iterable[str]) -> list[str]:
    """Return the special tokens of the teachers of chats that occur in `texts`, each once, in the
    order of their ids."""
    marks = list[str]()
    for store in (each for each in stores if each.features.learn):
        added = sorted(store.tokenizer().get_added_tokens_decoder().items())
        marks += [token.content for _, token in added if token.special]
    if not marks:
        return []
    found = set[str]()
    for text in texts:
        found.update(mark for mark in marks if mark not in found and mark in text)
    return [mark for mark in dict.fromkeys(marks) if mark in found]


def between(marks: Sequence[str], texts: Iterable[str]) -> Iterator[str]:
    """Yield what is between the marks in each text, so that no piece is trained on a mark."""
    pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
    for text in texts:
        yield from pattern.split(text) if pattern else (text,)


def _end_of_message(store: FeatureStore) -> str | None:
    """Return the special token on which students of the first chats are trained most often; None
    if there is none. Of all special tokens they are trained on those that end messages alone."""
    added = store.tokenizer().get_added_tokens_decoder()
    special = [number for number, token in added.items() if token.special]
    found = Counter[int]()
    for record in store[:SEQUENCES]:
        if record.learn is not None:
            learnt = record.token_ids[record.learn]
            found.update(learnt[np.isin(learnt, special)].tolist())
    return added[found.most_common(1)[0][0]].content if found else None


def _with_first_token(template: str, tokenizer: Any, store: FeatureStore) -> str:
    """Let a template begin with the token that the student's tokenizer puts in front of a text, for
    `apply_chat_template` adds none. `tokenizer` has the template."""
    first = prepended_token(tokenizer.backend_tokenizer)
    if first is None or first != tokenizer.bos_token_id:
        return template
    try:
        text = str(tokenizer.apply_chat_template(PROBE, tokenize=False))
    except Exception:  # templates raise errors of any type, such as for a chat without a system
        return template
    if text.startswith(tokenizer.bos_token):
        return template
    held = SETTINGS in store.teacher_files()
    theirs = store.teacher_settings(SETTINGS).get("bos_token") if held else None
    if theirs and text.startswith(theirs):  # which the dump took out of the text
        rest = f"chat[{len(theirs)}:]"
        return f"{{% set chat %}}{template}{{% endset %}}{{{{ bos_token + {rest} }}}}"
    return "{{ bos_token }}" + template
