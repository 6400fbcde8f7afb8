"""What a store holds, and one sequence of it, for people."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from store.errors import UserError
from store.reader import FeatureStore
from store.record import Record, View
from store.tree import Array
from store.verify import entries

if TYPE_CHECKING:
    from rich.table import Table

BEST = 3


def stored_bytes(path: str) -> int | None:
    """Size on the disk; None for a URL."""
    if "://" in path:
        return None
    target = Path(path)
    if target.is_file():
        return target.stat().st_size
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def describe(store: FeatureStore) -> dict[str, Any]:
    """Everything `feature-store info` prints, as JSON."""
    tokens, kinds = max(1, store.meta["tokens"]), Counter[str]()
    for name, entry in entries(store):
        size = int(np.prod(entry.shape, dtype=np.int64)) * np.dtype(entry.dtype).itemsize
        segments = name.split("/")
        if segments[0] == "parts":
            kinds["/".join(segments[2:-1] if segments[2] != "sequence" else ["sequence"])] += size
    disk = stored_bytes(store.path)
    return store.meta | {
        "path": store.path,
        "bytes_on_disk": disk,
        "bytes_per_token_on_disk": None if disk is None else round(disk / tokens, 2),
        "bytes_per_token_encoded": {k: round(v / tokens, 2) for k, v in sorted(kinds.items())},
        "teacher_files": sorted(store.teacher_files()),
        "teacher_weights": len(store.teacher_weights()),
    }


def info_lines(store: FeatureStore) -> list[str]:
    """A short description, line by line."""
    about, features = describe(store), store.features
    teacher, corpus = store.identity.get("teacher", {}), store.identity.get("corpus", {})
    name = teacher.get("id", "unknown") if isinstance(teacher, dict) else teacher
    logits = f"{features.logits.tier}:{features.logits.size}" if features.logits else "none"
    size = about["bytes_on_disk"]
    lines = [
        f"store       {store.path} (version {about['version']}, {about['state']})",
        f"teacher     {name}",
        f"corpus      {str(corpus)[:160]}",
        f"size        {about['sequences']:,} sequences, {about['tokens']:,} tokens, "
        f"{about['parts']:,} parts"
        + ("" if size is None else f", {size:,} bytes ({about['bytes_per_token_on_disk']}/token)"),
        f"codec       {features.codec}",
        f"views       {features.views}",
        f"hidden      {', '.join(features.hidden) or 'none'} (D={features.width})",
        f"attention   {', '.join(features.attention) or 'none'}",
        f"logits      {logits} (V={features.vocabulary:,})",
        f"created     {about['created']}",
        "bytes per token before compression:",
    ]
    sizes = about["bytes_per_token_encoded"].items()
    return lines + [f"  {kind:<28} {value:>9.2f}" for kind, value in sizes]


def _names(store: FeatureStore) -> Any:
    if "tokenizer.json" not in store.teacher_files():
        return str
    tokenizer = store.tokenizer()
    return lambda number: tokenizer.id_to_token(int(number)) or str(number)


def _best(store: FeatureStore, view: View, token: int) -> list[tuple[int, str]]:
    """The most likely ids of a token with a figure: probability, draws, or logit."""
    if store.features.logits is None:
        return []
    logits = view.logits
    if logits.tier == "topk":
        order = np.argsort(-logits.logprobs[token])[:BEST]
        figures = [f"{np.exp(logits.logprobs[token, place]):.3f}" for place in order]
        return list(zip(logits.ids[token, order].tolist(), figures, strict=True))
    if logits.tier == "sample":
        begin, end = logits.start[token], logits.start[token + 1]
        ids, counts = logits.ids[begin:end], logits.counts[begin:end]
        order = np.argsort(-counts.astype(int), kind="stable")[:BEST]
        figures = [f"{counts[place]}/{logits.draws}" for place in order]
        return list(zip(ids[order].tolist(), figures, strict=True))
    return []


def _head_best(store: FeatureStore, view: View) -> list[list[tuple[int, str]]]:
    weight, bias = store.head()
    raw: Array = view.logits.values @ weight.T + bias
    order = np.argsort(-raw, axis=1)[:, :BEST]
    chance = np.exp(raw - view.logits.log_partition[:, None])
    return [
        [(int(number), f"{row[number]:.3f}") for number in best]
        for row, best in zip(chance, order, strict=True)
    ]


def record_table(store: FeatureStore, index: int, view: int = 0) -> tuple[Record, Table]:
    """One sequence as a table: tokens, spans, masked words, best logits. Raises UserError."""
    from rich.table import Table

    if not -len(store) <= index < len(store):
        raise UserError(f"{store.path}: no sequence {index}; it has 0..{len(store) - 1}")
    if not 0 <= view < store.features.views:
        raise UserError(f"{store.path}: no view {view}; it has 0..{store.features.views - 1}")
    record, name = store[index], _names(store)
    seen, logits = record.views[view], store.features.logits
    head = _head_best(store, seen) if logits and logits.tier == "head" else None
    table = Table("token", "piece", "begin", "end", "text", "masked", *(["teacher"] * bool(logits)))
    for token, (begin, end) in enumerate(record.offsets.tolist()):
        best = head[token] if head else _best(store, seen, token)
        said = "  ".join(f"{name(number)} {figure}" for number, figure in best)
        row = [str(token), name(record.token_ids[token]), str(begin), str(end)]
        row += [record.text[begin:end], "x" if seen.mask[token] else ""]
        table.add_row(*(_plain(cell) for cell in row), *([_plain(said)] if logits else []))
    return record, table


def _plain(text: str) -> str:
    """Text that rich must not read as markup, and no control characters of the corpus."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
