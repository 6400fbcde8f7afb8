"""A store's text in a student's tokens, tokenized once for each vocabulary and cached.

Tables are in `$TEACHONCE_CACHE`, by default in the user's cache folder. Their names are hashes of
the text, the tokenizer and the max length, so another text or vocabulary has another name.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.store import FeatureStore, open_store
from teachonce.store.read import derived_copies
from teachonce.store.read.stored_tokenizer import is_plain, within_bounds
from teachonce.student_train.data.student_tokens import ARRAYS, TokenTable, slices, tokenize
from teachonce.support import files
from teachonce.support.arrays import spread
from teachonce.support.files import cache_folder

VERSION = "4"  # the version of these arrays
DIGEST = "sha256"  # file with the digest of a table's other files
# Bounds the encodings in memory: stores of 1,000 and 10,000 parts take 114 and 117 MB (RESULTS,
# "Growth with parts").
TEXTS_AT_ONCE = 4096
UNFINISHED = ".tmp-"  # before the name of a folder that is being written
TRIED = 32  # texts that are tokenized again to check a cached table


def token_table(
    store: FeatureStore, tokenizer: Any, texts: Iterable[str] | None = None
) -> TokenTable:
    """Return the token table of a store for a `tokenizers.Tokenizer`, from the cache if possible.

    texts: what the student reads in place of the store's texts; their table is not cached.

    If the cache folder is not writable, the table is made in a temporary folder each time.
    """
    if texts is not None:
        return _uncached(lambda folder: _write(folder, texts, None, tokenizer))
    try:
        # Tokenizing runs at 435,000 tokens a second, the cache at 18.7M, its checksum included.
        folder = cache_folder() / "tokens" / _key(store, tokenizer)
        if isinstance(store, FeatureStore):
            # Recorded before the table is written: `feature-store forget` must find the table after
            # any kill.
            derived_copies.record_copy(store.source.address, store.manifest, "tokens", folder)
        if not _is_intact(folder) or not _matches(folder, store, tokenizer):
            shutil.rmtree(folder, ignore_errors=True)
            _publish(store, tokenizer, folder)
        return TokenTable.load(folder)
    except OSError:
        return _uncached(lambda folder: _make(store, tokenizer, folder))


def _uncached(make: Callable[[Path], None]) -> TokenTable:
    with tempfile.TemporaryDirectory() as name:  # mapped files stay readable when deleted
        make(Path(name))
        # Without `folder` the arrays are pickled: no other process can map deleted files.
        return replace(TokenTable.load(Path(name)), folder=None)


def drop_tables(store: FeatureStore) -> None:
    """Remove all cached tables of a store's text."""
    with suppress(FileNotFoundError):  # a user without a home, or without a cache
        for folder in (cache_folder() / "tokens").iterdir():
            if folder.name.removeprefix(UNFINISHED).startswith(f"{store.manifest.text_key}-"):
                shutil.rmtree(folder, ignore_errors=True)


def _key(store: FeatureStore, tokenizer: Any) -> str:
    separator = store.features.separator
    # Another release of tokenizers may give other tokens.
    digest = hashlib.sha256(f"{VERSION} {version('tokenizers')} {separator!r}".encode())
    digest.update(tokenizer.to_str().encode())  # includes the truncation
    return f"{store.manifest.text_key}-{digest.hexdigest()[:32]}"


def _is_intact(folder: Path) -> bool:
    """Return whether the files are complete and unchanged."""
    try:
        return (folder / DIGEST).read_bytes() == _digest(folder).encode()
    except OSError:
        return False


def _matches(folder: Path, store: FeatureStore, tokenizer: Any) -> bool:
    """Return whether a cached table matches this store and tokenizer.

    Ids and offsets must be in range, and some evenly spaced texts must have the tokens that the
    tokenizer produces. A tokenizer that is not plain (see `is_plain`) is not run.
    """
    # The cache folder may be shared with other users: its tables are untrusted.
    try:
        table = TokenTable.load(folder)
    except ValueError:
        return False
    # These checks come before `table.of`, which indexes by starts that may be forged.
    columns = (table.ids, table.begin, table.end, table.special, table.types)
    if len(table.start) != len(store) + 1 or table.start[0] != 0:
        return False
    if {*map(len, columns)} != {int(table.start[-1])}:
        return False
    if not _in_range(table, len(tokenizer.get_vocab())):
        return False
    if not is_plain(tokenizer.to_str().encode()):
        return True
    numbers = spread(max(1, len(store)), TRIED)
    texts = [store[number].text for number in numbers]
    expected = tokenize(tokenizer, texts, store.features.separator)
    cached = table.of(np.array(numbers))
    names = ("ids", "offsets", "special", "start", "types")
    return all(np.array_equal(getattr(expected, name), getattr(cached, name)) for name in names)


def _in_range(table: TokenTable, vocabulary: int) -> bool:
    """Return whether starts ascend, ids are in the vocabulary, and offsets are valid spans."""
    for rows in slices(len(table.start)):
        # One row more, so that the step to the next slice is compared as well.
        if (np.diff(table.start[rows.start : rows.stop + 1]) < 0).any():
            return False
    for rows in slices(len(table.ids)):
        ids, begin, end = table.ids[rows], table.begin[rows], table.end[rows]
        if min(ids.min(), begin.min()) < 0 or ids.max() >= vocabulary or (begin > end).any():
            return False
    return True


def _digest(folder: Path) -> str:
    """Return a SHA-256 over the SHA-256 digests of all files."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _publish(store: FeatureStore, tokenizer: Any, folder: Path) -> None:
    """Write a table under a temporary name, then rename it. If two processes do so at once, the
    table of the first one stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The name has the key of the text, so that `drop_tables` finds what a killed process left.
    mark = f"{UNFINISHED}{store.manifest.text_key}-"
    temporary = Path(tempfile.mkdtemp(prefix=mark, dir=folder.parent))
    try:
        _make(store, tokenizer, temporary)
        (temporary / DIGEST).write_bytes(_digest(temporary).encode())
        files.sync_tree(temporary)
        if not _is_intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
        # Fails if the folder has files: then another process has published the same table.
        files.rename(temporary, folder)
    except OSError:
        if not _is_intact(folder):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make(store: FeatureStore, tokenizer: Any, folder: Path) -> None:
    """Write the files of a table. A tokenizer that is not plain runs in a process with limits."""
    # An object that runs a teacher may be given instead of a store: no process can open it again.
    if not isinstance(store, FeatureStore):
        _write(folder, store.texts(), store.features.separator, tokenizer)
        return
    settings = tokenizer.to_str()
    within_bounds(
        settings.encode(),
        sum(part.counts.text_bytes for part in store.manifest.parts),
        store.path,
        lambda: _write(folder, store.texts(), store.features.separator, tokenizer),
        _write_in_process,
        (store.source.address, store.source.options, settings, str(folder)),
    )


def _write_in_process(
    path: str, options: dict[str, Any] | None, settings: str, folder: str
) -> None:
    from tokenizers import Tokenizer

    # Opened again, as only JSON is sent to this process. The first process has decided whether an
    # unfinished store may be read.
    with closing(open_store(path, allow_partial=True, storage_options=options)) as store:
        separator = store.features.separator
        _write(Path(folder), store.texts(), separator, Tokenizer.from_str(settings))


def _write(folder: Path, texts: Iterable[str], separator: str | None, tokenizer: Any) -> None:
    rest = iter(texts)
    total = np.zeros(1, np.int64)
    with ExitStack() as opened:
        columns = {name: opened.enter_context((folder / name).open("wb")) for name in ARRAYS}
        columns["start"].write(total.tobytes())
        while batch := list(islice(rest, TEXTS_AT_ONCE)):
            tokens = tokenize(tokenizer, batch, separator)
            spans = tokens.offsets.T
            start, total = total[-1] + tokens.start[1:], total[-1] + tokens.start[-1:]
            arrays = (start, tokens.ids, *spans, tokens.special, tokens.types)
            for (name, dtype), values in zip(ARRAYS.items(), arrays, strict=True):
                columns[name].write(np.ascontiguousarray(values, dtype).tobytes())
