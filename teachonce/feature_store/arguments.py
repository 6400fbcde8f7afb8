"""Parse the sequences, layers and documents that a command's arguments name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.read.stored_tokenizer import within_bounds
from teachonce.store.tools.forget import DocumentsToForget
from teachonce.support.errors import UserError
from teachonce.support.parsing import whole_number

if TYPE_CHECKING:
    from teachonce.teacher_dump.corpus.documents import Corpus

MOST = 32  # most sequences on a page: a browser is slow with more


def read_numbers(words: Sequence[str]) -> list[int]:
    """Parse `--sequence 17,42`, without repetitions.

    Raises UserError for a word that is not a number, and for too many numbers.
    """
    parsed = list[int]()
    for word in ",".join(words).split(","):
        try:
            parsed.append(int(word))
        except ValueError:
            raise UserError(
                f"--sequence {','.join(words)}: expected numbers of sequences, such as 17,42, got"
                f" {word.strip()!r}"
            ) from None
    numbers = list(dict.fromkeys(parsed))
    if len(numbers) > MOST:
        raise UserError(
            f"--sequence: a page has {MOST} sequences at most, got {len(numbers)}; write several"
            " pages (--out)"
        )
    return numbers


def read_layers(words: str | None) -> tuple[int, ...]:
    """Parse `--layers 2,14`. Raises UserError for a word that is not a number."""
    try:
        return () if words is None else tuple(int(word) for word in words.split(","))
    except ValueError:
        raise UserError(f"--layers {words}: expected numbers, as in 2,14,25,28") from None


SHA256 = re.compile(r"[0-9a-fA-F]{64}")
SHOWN = 40  # characters of a wrong line that the error shows: it may be a long text


def read_document_list(file: Path) -> DocumentsToForget:
    """Read a list that has, in each line, the number of a document or the SHA-256 of its text.

    Empty lines are skipped. Raises UserError for any other line, and for an empty list.
    """
    numbers, hashes = dict[int, str](), dict[str, str]()
    try:
        lines = file.read_text("utf-8-sig").splitlines()  # Windows writes a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: is not UTF-8 ({error.reason}); give a text file with a document number or"
            " SHA-256 on each line"
        ) from error
    for row, line in enumerate(map(str.strip, lines), 1):
        # First: a hash may consist of decimal digits alone.
        if SHA256.fullmatch(line):
            hashes[line.lower()] = f"{file}, line {row}: {line[:12]}..."
        elif (number := whole_number(line)) is not None:
            numbers[number] = f"{file}, line {row}: number {number}"
        elif line:
            raise UserError(
                f"{file}, line {row}: {line[:SHOWN]!r}; expected the number of a document, or the"
                " SHA-256 of its text (64 hexadecimal digits); give texts themselves by --texts"
            )
    if not numbers and not hashes:
        raise UserError(f"{file}: lists no document, so there is nothing to forget")
    return DocumentsToForget(numbers, hashes)


def documents_to_forget(
    documents: Path | None, texts: tuple[str, ...], text_column: str | None
) -> tuple[str, Callable[[FeatureStore], DocumentsToForget]]:
    """Read the request of `forget`.

    Returns a hash of the request, by which a stopped command recognises that it continues, and a
    function that finds the requested documents in a store. Raises UserError for a list or text that
    cannot be read, if neither is given, and for a column without texts.
    """
    from teachonce.teacher_dump.corpus.documents import Corpus

    if documents is None and not texts:
        raise UserError("name the documents: --documents FILE (numbers, hashes) or --texts FILE")
    if text_column is not None and not texts:
        raise UserError(
            f"--text-column {text_column}: applies only to --texts; add --texts TABLE, or leave"
            " --text-column out"
        )
    listed = read_document_list(documents) if documents is not None else DocumentsToForget()
    corpus = Corpus.open(texts, text_column) if texts else None
    if corpus is None:
        return _hash(listed, ""), lambda store: listed
    corpus.check()

    def find(store: FeatureStore) -> DocumentsToForget:
        # A store has hashes of windows, so the texts are cut with its own, untrusted, tokenizer.
        hashes = within_bounds(
            store.teacher_file("tokenizer.json"),
            # Texts are measured, not files: a pattern or a data set of the hub names no file, and a
            # file may be compressed.
            sum(len(document.text.encode("utf-8", "surrogatepass")) for document in corpus),
            store.path,
            lambda: _digests(store, corpus),
            _digests_in_process,
            (store.source.address, store.source.options, list(texts), text_column),
        )
        digests = {
            bytes.fromhex(digest): f"text {number + 1} of {', '.join(texts)}"
            for number, digest in hashes
        }
        return replace(listed, digests=digests)

    return _hash(listed, str(corpus.identity())), find


def _digests(store: FeatureStore, corpus: Corpus) -> list[tuple[int, str]]:
    """List the number of each document of a corpus, and the hash that a store would have for it."""
    from teachonce.teacher_dump.windows.sequences import window_digests, windows_as_in

    # Without gold labels, which the requested texts do not have.
    digests = window_digests(windows_as_in(store, corpus), gold=False)
    # As text, because a bounded process answers in JSON.
    return [(number, digest.hex()) for number, digest in digests]


def _digests_in_process(
    path: str, options: dict[str, Any] | None, texts: list[str], text_column: str | None
) -> list[tuple[int, str]]:
    """Open store and corpus, and call `_digests`; runs in another process."""
    from teachonce.teacher_dump.corpus.documents import Corpus

    with closing(open_store(path, allow_partial=True, storage_options=options)) as store:
        return _digests(store, Corpus.open(tuple(texts), text_column))


def _hash(listed: DocumentsToForget, corpus: str) -> str:
    parts = (*map(str, sorted(listed.numbers)), *sorted(listed.hashes), corpus)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
