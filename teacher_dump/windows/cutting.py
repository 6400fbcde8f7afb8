"""Cuts documents into windows: inputs of the teacher, with text, tokens and offsets.

Documents are cut between words, so that the text of a window, tokenized alone, gives its tokens.
Each document is tokenized once. A document that is too long is cut by its offsets, and each of its
windows is tokenized again, alone.

Characters that UTF-8 cannot encode (lone surrogates, which JSON escapes can contain) become U+FFFD.
Windows without any token (white space, control characters) are left out. Both are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from teachonce.store.format.sequences import spans_of
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.chats import learnt_of, messages_of
from teachonce.teacher_dump.windows.masked_views import cjk_positions, joins, maskable_spans
from teachonce.teacher_dump.windows.window import Window, make_window, storable

SEGMENT = 50_000  # characters of a long document that are tokenized at once to find cuts
LOOKAHEAD = 64  # windows of one document that are proposed at once
BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 1_000_000  # a batch ends at whichever is reached first

Encode = Callable[[list[Any]], list[Any]]  # encodes texts, or pairs of texts
Sizes = tuple[int, int, int]  # max_length, max_length less the special tokens, stride


def iter_windows(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    stride: int = 0,
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield the windows of all documents in order, each with at most `max_length` tokens.

    `tokenizer` is a fast tokenizer of transformers. With stride 0 the concatenated windows are the
    document. With stride N windows overlap: each begins at the first word that is at most N tokens
    before the end of the previous window. Cuts are made before whitespace and CJK characters, else
    between words (`masked_views.maskable_spans`). A word longer than a window is cut inside, but
    not between a letter and its combining marks.

    `counters` receives `no_tokens` (windows left out) and `surrogates` (characters replaced).
    Raises UserError for a slow tokenizer, for a `max_length` or `stride` out of range, and for a
    character that alone gives more tokens than a window holds.
    """
    budget = checked_budget(tokenizer, max_length)
    if not 0 <= stride < budget:
        raise UserError(
            f"--stride {stride}: expected 0 to {budget - 1} (less than --max-length {max_length}"
            f" minus {max_length - budget} special tokens)"
        )
    tally = Counter[str]() if counters is None else counters
    sizes = max_length, budget, stride
    encode = encoder(fast_backend(tokenizer))
    return (
        window
        for batch in document_batches(documents)
        for window in _cut_batch(batch, encode, sizes, tally)
    )


def checked_budget(tokenizer: Any, max_length: int) -> int:
    """Return `max_length` minus the number of special tokens.

    Raises UserError for a slow tokenizer, and if fewer than two tokens of text fit.
    """
    specials = int(fast_backend(tokenizer).num_special_tokens_to_add(is_pair=False))
    if max_length < specials + 2:
        raise UserError(
            f"--max-length {max_length}: expected at least {specials + 2} "
            f"({specials} special tokens and 2 of text)"
        )
    return max_length - specials


def check_tokenizer(tokenizer: Any) -> None:
    """Raise UserError for a slow tokenizer, and for one with BPE dropout."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"tokenizer {name}: is a slow tokenizer, without the offsets that the store needs for"
            " each token; give a model with a fast tokenizer (tokenizer.json)"
        )
    if dropout := getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        raise UserError(
            f"tokenizer {name}: drops {dropout:.0%} of its merges at random, so a text has other"
            " tokens each time; set model.dropout in tokenizer.json to null"
        )


def fast_backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` of a tokenizer. Raises as `check_tokenizer` does."""
    check_tokenizer(tokenizer)
    return tokenizer.backend_tokenizer


def encoder(backend: Any) -> Encode:
    """Return a function that encodes texts, or pairs of texts, without truncation and padding."""

    def encode(texts: list[Any]) -> list[Any]:
        # transformers sets truncation and padding on the backend and does not reset them.
        # Not if nothing is set: tokenizers 0.22 refuses to change a tokenizer in use by a thread.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return list(backend.encode_batch(texts))

    return encode


def document_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in lists of bounded size."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _cut_batch(
    documents: list[Document],
    encode: Encode,
    sizes: Sizes,
    counters: Counter[str],
) -> Iterator[Window]:
    texts = [storable(document.text, counters) for document in documents]
    short = [i for i, text in enumerate(texts) if len(text) <= SEGMENT]
    encodings = dict(zip(short, encode([texts[i] for i in short]), strict=True))
    long = {
        i: Cutter(text, documents[i].number, encodings.get(i), encode, sizes)
        for i, text in enumerate(texts)
        if i not in encodings or len(encodings[i]) > sizes[0]
    }
    active = list(long.values())
    while active:
        plans = [cutter.plan() for cutter in active]
        proposed = list(zip(active, plans, strict=True))
        # One call for all documents: `encode_batch` uses all cores.
        tried = iter(encode([cutter.text[b:e] for cutter, plan in proposed for b, e, _ in plan]))
        for cutter, plan in proposed:
            cutter.accept(plan, [next(tried) for _ in plan])
        active = [cutter for cutter in active if not cutter.done]
    for i, document in enumerate(documents):
        if i in long:
            windows = long[i].windows
        else:
            windows = [make_window(texts[i], document.number, 0, False, encodings[i])]
        for window in windows:
            if window.special.all():
                counters["no_tokens"] += 1
            else:
                yield _annotated(window, document)


def _annotated(window: Window, document: Document) -> Window:
    """Add to a window the document's gold labels. For a chat, add the messages, and which tokens
    students are trained on."""
    if document.learn is not None:
        begin = window.document_begin
        learn = learnt_of(document.learn, begin, window.offsets, window.text)
        messages = messages_of(document.contents, begin, window.text)
        window = replace(window, learn=learn, messages=messages)
    return replace(window, gold=document.gold) if document.gold else window


def _tokens_before(window: Window, position: int) -> int:
    """Count the leading tokens of a window that end at the character `position` or before it."""
    if position <= 0:
        return 0
    after = ~window.special & (window.offsets[:, 1] > position)
    return int(after.argmax()) if after.any() else 0


class Cutter:
    """Cuts a long document: proposes windows by the offsets of a segment, and accepts them if they
    fit.

    A text tokenized alone occasionally has more tokens than the same characters have inside the
    document. Its window is then proposed again, shorter.
    """

    def __init__(
        self,
        text: str,
        number: int,
        encoding: Any,
        encode: Encode,
        sizes: Sizes,
    ) -> None:
        self.text = text
        self.windows: list[Window] = []
        self._number = number
        self._encode = encode
        self._max_length, self._budget, self._stride = sizes
        # int64 and contiguous: np.searchsorted would copy any other array at every call.
        spans = maskable_spans(text).astype(np.int64)
        self._word_begin, self._word_end = spans.T.copy()
        # Before whitespace: in many vocabularies a token begins with the space before its word.
        blanks = [match.start() for match in re.finditer(r"(?<=\S)\s", text)]
        first_choice = np.concatenate([np.array(blanks, np.int64), cjk_positions(text)])
        # Places to cut, each list ascending: preferred places, then all ends and begins of words.
        self._cuts = (np.sort(first_choice), spans.reshape(-1))
        # Begin of the next window, and end of the last accepted window.
        self._begin = self._end = 0
        self._lookahead = LOOKAHEAD
        # How many tokens the rejected window had too many, and the last end that may be tried.
        self._surplus, self._ceiling = 0, len(text)
        self._reach = SEGMENT
        if encoding is None:
            self._load(0)
        else:
            self._set_segment(0, len(text), encoding)

    @property
    def done(self) -> bool:
        return self._end >= len(self.text)

    def plan(self) -> list[tuple[int, int, int]]:
        """Propose at most `_lookahead` windows: (begin, end, begin of the next window)."""
        spans: list[tuple[int, int, int]] = []
        begin, last = self._begin, self._end
        while len(spans) < self._lookahead and last < len(self.text):
            # Only the first proposal repeats a window that was rejected.
            surplus, ceiling = (0, len(self.text)) if spans else (self._surplus, self._ceiling)
            begin, end = self._next(begin, last, surplus, ceiling)
            following = self._overlapping(begin, end)
            spans.append((begin, end, following))
            begin, last = following, end
        return spans

    def accept(self, spans: list[tuple[int, int, int]], encodings: list[Any]) -> None:
        """Accept the proposed windows up to the first that is too long."""
        for (begin, end, following), encoding in zip(spans, encodings, strict=True):
            surplus = len(encoding) - self._max_length
            if surplus > 0:
                self._shorten(begin, end, surplus)
                return
            word = np.searchsorted(self._word_begin, begin) - 1
            hard = bool(word >= 0 and begin < self._word_end[word])
            window = make_window(self.text[begin:end], self._number, begin, hard, encoding)
            self.windows.append(replace(window, context=_tokens_before(window, self._end - begin)))
            self._begin, self._end = following, end
            self._surplus, self._ceiling = 0, len(self.text)
        # A rejection discards all windows proposed after it, so the number starts again from 1.
        self._lookahead = min(LOOKAHEAD, 2 * self._lookahead)

    def _shorten(self, begin: int, end: int, surplus: int) -> None:
        """Make `plan` propose the window at `begin` again, ending before `end`."""
        self._lookahead = 1
        if end - 1 > max(begin, self._end):
            self._begin = begin
            self._surplus, self._ceiling = self._surplus + surplus, end - 1
        elif begin < self._end:
            # No new text fits after the overlap: start without the overlap.
            self._begin, self._surplus, self._ceiling = self._end, 0, len(self.text)
        else:
            raise UserError(
                f"--max-length {self._max_length}: the character {self.text[begin]!a} alone gives"
                f" {self._max_length + surplus} tokens; give at least this number"
            )

    def _next(self, begin: int, last: int, surplus: int, ceiling: int) -> tuple[int, int]:
        """Return (begin, end) of the next window. It starts at `begin`, or at `last`, the end of
        the previous window, if a window from `begin` would have no new text.

        surplus: tokens by which the rejected window was too long. ceiling: the largest end.
        """
        # SentencePiece tokenizers may put a token before a text that does not begin with a space.
        budget = max(1, self._budget - surplus - (begin > 0 and not self.text[begin].isspace()))
        first, high = self._limit(begin, budget)
        high = min(high, ceiling)
        if high == len(self.text):
            return begin, high
        low = max(begin, last)
        for cuts in self._cuts:
            cut = int(cuts[at]) if (at := np.searchsorted(cuts, high, "right") - 1) >= 0 else 0
            # A cut before the first token would leave a window without tokens.
            if cut > low and cut > first:
                return begin, cut
        if begin < last:
            return self._next(last, last, 0, len(self.text))
        cut = high
        while cut > begin and (joins(self.text[cut]) or self.text[cut - 1] == "\u200d"):
            cut -= 1
        return begin, cut if cut > begin else high

    def _limit(self, begin: int, budget: int) -> tuple[int, int]:
        """Return two positions in the text for a window from `begin` with `budget` tokens: where
        its first token starts, and the last position at which the window may end."""
        while True:
            if begin < self._segment[0]:
                self._load(begin)
            first = int(np.searchsorted(self._token_end, begin, "right"))
            if first + budget < len(self._token_begin):
                start = int(self._token_begin[first])
                return start, max(int(self._token_begin[first + budget]), begin + 1)
            if self._segment[1] == len(self.text):
                return begin, len(self.text)
            if self._segment[0] == begin:
                # The segment began here and did not suffice: one word may be longer than it.
                self._reach *= 4
            self._load(begin)

    def _overlapping(self, begin: int, end: int) -> int:
        """Return where the window after the window (begin, end) starts, so that the two overlap."""
        if self._stride == 0 or end == len(self.text):
            return end
        after = int(np.searchsorted(self._token_begin, end))
        low = int(self._token_end[after - self._stride - 1]) if after > self._stride else 0
        low = max(low, begin + 1)
        for cuts in self._cuts:
            at = np.searchsorted(cuts, low)
            if at < len(cuts) and cuts[at] < end:
                return int(cuts[at])
        return end

    def _load(self, begin: int) -> None:
        end = min(len(self.text), begin + self._reach)
        self._set_segment(begin, end, self._encode([self.text[begin:end]])[0])

    def _set_segment(self, begin: int, end: int, encoding: Any) -> None:
        ordinary = ~np.array(encoding.special_tokens_mask, bool)
        offsets = spans_of([encoding]).astype(np.int64)[ordinary] + begin
        self._segment = (begin, end)
        # A normalizer may swap characters: make the spans ascend.
        self._token_begin = np.maximum.accumulate(offsets[:, 0])
        self._token_end = np.maximum.accumulate(offsets[:, 1])
