"""Shows one sequence of a store to a person."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from store.format.features import TaskSpec
from store.read.record import Record, View
from store.read.store import FeatureStore
from support.arrays import Array
from support.console import counted
from support.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

BEST = 3
SAYS = "the teacher says"


def _names(store: FeatureStore) -> Any:
    if "tokenizer.json" not in store.teacher_files():
        return str
    tokenizer = store.tokenizer()
    return lambda number: (number >= 0 and tokenizer.id_to_token(int(number))) or str(number)


def _best(store: FeatureStore, view: View, token: int) -> list[tuple[int, str]]:
    """Find the most likely ids of a token, each with a figure: probability, or share of draws."""
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


def _said(task: TaskSpec, logits: Array) -> str:
    """Write the most likely labels by their logits [C], with probabilities."""
    raised = np.exp(logits - logits.max())
    order = np.argsort(-raised, kind="stable")[:BEST]
    return "  ".join(f"{task.labels[place]} {raised[place] / raised.sum():.3f}" for place in order)


def _gold(task: TaskSpec, number: int) -> str:
    return task.labels[number] if 0 <= number < len(task.labels) else ""


def _columns(store: FeatureStore, record: Record, seen: View) -> dict[str, Callable[[int], str]]:
    """Return further columns of the table: by heading, a function from a token to its cell."""
    name, logits, task = _names(store), store.features.logits, store.features.task
    found: dict[str, Callable[[int], str]] = {}
    if seen.number:
        found["masked"] = lambda token: "x" if seen.mask[token] else ""
    if logits:
        head = _head_best(store, seen) if logits.tier == "head" else None

        def best(token: int) -> str:
            pairs = head[token] if head else _best(store, seen, token)
            return "  ".join(f"{name(number)} {figure}" for number, figure in pairs)

        found[f"{SAYS} of the next" if logits.next_token else SAYS] = best
    if task and (tags := record.tags) is not None:
        found["tag"] = lambda token: _gold(task, int(tags[token]))
        found[SAYS] = lambda token: _said(task, seen.tag_logits[token])
    return found


def record_table(store: FeatureStore, index: int, view: int = 0) -> tuple[str, Record, Table]:
    """Return a headline, the sequence, and a table of its tokens.

    The table shows spans, masked words and the best logits. Where the teacher was fine-tuned for a
    task, it shows the gold labels and the teacher's. Raises UserError for a number that the store
    does not have.
    """
    from rich.table import Table

    if not -len(store) <= index < len(store):
        raise UserError(f"{store.path}: no sequence {index}; it has 0..{len(store) - 1}")
    if not 0 <= view < store.features.views:
        raise UserError(f"{store.path}: no view {view}; it has 0..{store.features.views - 1}")
    record, name = store[index], _names(store)
    columns = _columns(store, record, record.views[view])
    table = Table("token", "piece", "characters", "text", *columns)
    for token, (begin, end) in enumerate(record.offsets.tolist()):
        span = "" if record.special[token] else f"{begin}:{end}"
        row = [str(token), name(record.token_ids[token]), span, record.text[begin:end]]
        table.add_row(*map(_plain, row + [cell(token) for cell in columns.values()]))
    return _headline(store, record, view), record, table


def _headline(store: FeatureStore, record: Record, view: int) -> str:
    where = f"document {record.document} from character {record.document_begin}"
    cut = ", begins inside a word" if record.hard_cut else ""
    views = f", view {view} of {store.features.views}" if store.features.views > 1 else ""
    tokens = counted(len(record.token_ids), "token")
    if store.features.embedding:
        tokens += f", embedding of length {np.linalg.norm(record.embedding):.3f}"
    line = f"sequence {record.index} of {len(store):,}: {where}{cut}, {tokens}{views}"
    if (task := store.features.task) is None or task.kind != "classification":
        return line
    if task.scores:
        return _plain(f"{line}; score {record.views[view].class_logits[0]:.4g}")
    gold = "none" if record.label is None else _gold(task, record.label)
    said = _said(task, record.views[view].class_logits)
    return _plain(f"{line}; label {gold}, {SAYS} {said}")


def _plain(text: str) -> str:
    """Escape markup of rich in a text, and replace control characters of the corpus."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
