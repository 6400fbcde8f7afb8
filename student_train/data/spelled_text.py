"""Measures how much of a text a decoder's tokenizer changes or drops, in the runs that it shares
with the teacher's tokenizer, or in its own tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from teachonce.align import Tokenizations, Tokens
from teachonce.align.byte_edges import TextBytes, token_ends
from teachonce.store import FeatureStore
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.own_template import Chat
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.data.vocabularies import vocabulary_map
from teachonce.support.arrays import spread, starts
from teachonce.support.errors import UserError

SEQUENCES = 64  # spread over the store
REPORTED, REFUSED = 0.05, 0.5  # shares of the bytes that are not spelled


def check_spelling(collator: Collator, store: FeatureStore, vocab: str) -> str:
    """Describe how much of the text a decoder's tokenizer changes or drops; "" if it is little.

    vocab: the value of `--vocab`, for messages. Raises UserError if it is more than half.
    """
    share = 1 - spelled_share(sampled(collator, store))
    if share > REFUSED:
        raise UserError(
            f"--vocab {vocab}: its tokenizer changes or drops {share:.0%} of the text of"
            f" {store.path}: the student would be trained on other text; give a size such as 8k, or"
            " a tokenizer without a normaliser"
        )
    if share <= REPORTED:
        return ""
    return (
        f"{share:.0%} of the text is changed or dropped by the tokenizer of --vocab {vocab}: bits"
        " per byte measure the changed text, and where it differs the teacher is not compared"
    )


def changed_text(tokenizer: Tokenizer, texts: Sequence[str]) -> str:
    """Describe how much of the text a tokenizer without truncation changes or drops, measured in
    evenly spaced texts; "" if it is little."""
    sample = [texts[number] for number in spread(len(texts), SEQUENCES)]
    tokens, settings = tokenize(tokenizer, sample), tokenizer.to_str()
    mapping = vocabulary_map(settings, settings)
    share = 1 - spelled_share(Tokenizations(sample, tokens, tokens, mapping, len(tokens.ids)))
    if share <= REPORTED:
        return ""
    return (
        f"{share:.0%} of the text is changed or dropped by the tokenizer: bits per byte measure the"
        " changed text, and cannot be compared with other models"
    )


def sampled(collator: Collator, store: FeatureStore) -> Tokenizations:
    """Tokenize evenly spaced sequences of a store."""
    records = [store[number] for number in spread(len(store), SEQUENCES)]
    teacher = Tokens(
        np.concatenate([record.token_ids for record in records]),
        np.concatenate([record.offsets for record in records]),
        np.concatenate([record.special for record in records]),
        starts([len(record.token_ids) for record in records]),
    )
    texts = [record.text for record in records]
    if collator.own_template:
        chats = [Chat.of(record) for record in records]
        learnt = np.concatenate([np.asarray(record.learn) for record in records])
        texts, teacher, _ = collator.own_template.read(chats, teacher, learnt)
    # Whole texts: where a text is cut, its last run has no end, and the tokenizer changed nothing.
    tokenizer = copy.deepcopy(collator.tokenizer)
    tokenizer.no_truncation()
    student = tokenize(tokenizer, texts)
    return Tokenizations(texts, teacher, student, collator.vocabulary, collator.max_length)


def spelled_share(sides: Tokenizations) -> float:
    """Return the share of bytes, up to the last token of each text, in runs of the alignment
    `bytes` whose student pieces equal the text. White space at the edges is ignored."""
    student, runs = sides.align("bytes")
    octets, pieces = TextBytes.of(sides.text), sides.vocabulary.student_bytes
    lengths = np.diff(student.start)
    starts_of_texts = np.repeat(octets.start[:-1], lengths)
    ends = np.maximum(token_ends(sides.text, octets, student, pieces), starts_of_texts)
    # One running maximum serves all texts, because their positions ascend.
    reach = np.maximum.accumulate(ends)
    begin = np.maximum(np.append(0, reach[:-1]), starts_of_texts)
    has_tokens = lengths > 0
    read = int((reach[student.start[1:][has_tokens] - 1] - octets.start[:-1][has_tokens]).sum())
    written, text_bytes, spelled = pieces.written(), octets.flat.tobytes(), 0
    vocabulary = sides.vocabulary.student
    for number in np.flatnonzero(vocabulary.special).tolist():
        # Special tokens have no bytes in `pieces`, but the text of a chat contains them.
        written[number] = vocabulary.tokens[number].encode()
    for first, last in runs.student.tolist():
        low, high = int(begin[first]), int(reach[last - 1])
        spelling = b"".join(written[number] for number in student.ids[first:last].tolist())
        if spelling.strip() == text_bytes[low:high].strip():
            spelled += high - low
    return spelled / read if read else 1.0
