"""Show one sequence of a store: as JSON, or as a headline and a table of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from teachonce.store.format.features import TaskSpec
from teachonce.store.read.record import Record, View
from teachonce.store.read.store import FeatureStore
from teachonce.support.arrays import Array, Floats
from teachonce.support.console import counted
from teachonce.support.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table
    from tokenizers import Tokenizer

BEST = 3
PREDICTS = "the teacher predicts"
# Over 250,000 pieces these are 32 MB of float32.
ROWS_AT_ONCE = 32  # of logits over a whole vocabulary
Best = list[tuple[int, float]]
"""The most likely pieces of a token: ids with probabilities, or with shares of the draws."""


def check_number(store: FeatureStore, index: int) -> int:
    """Return the number of a sequence; a negative index counts from the end. Raises UserError if
    the store has no such sequence."""
    if not -len(store) <= index < len(store):
        raise UserError(f"{store.path}: no sequence {index}; it has 0..{len(store) - 1}")
    return index % len(store)


class Pieces:
    """Finds the names of the teacher's vocabulary pieces, and the most likely pieces of each token.

    Tokenizer and LM head are loaded once for all sequences.
    """

    def __init__(self, store: FeatureStore) -> None:
        self.store = store

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        stored = "tokenizer.json" in self.store.teacher_files()
        return self.store.tokenizer() if stored else None

    @cached_property
    def _head(self) -> tuple[Floats, Floats]:
        return self.store.head()

    def name(self, number: int) -> str:
        """Return the piece of an id; the id itself if the tokenizer has no such piece."""
        named = self._tokenizer.id_to_token(number) if self._tokenizer and number >= 0 else None
        return named or str(number)

    def best(self, view: View, count: int) -> list[Best]:
        """Find the `count` most likely pieces of each token, in any tier; [] without logits."""
        if self.store.features.logits is None:
            return []
        logits = view.logits
        if logits.tier == "head":
            return self._head_best(view, count)
        if logits.tier == "sample":
            edges = zip(logits.start[:-1], logits.start[1:], strict=True)
            rows = [(logits.ids[b:e], logits.counts[b:e] / logits.draws) for b, e in edges]
        else:
            rows = list(zip(logits.ids, np.exp(logits.logprobs), strict=True))
        return [_largest(ids, shares, count) for ids, shares in rows]

    def _head_best(self, view: View, count: int) -> list[Best]:
        (weight, bias), items = self._head, list[Best]()
        values, partition = view.logits.values, view.logits.log_partition
        spec = self.store.features.logits
        assert spec is not None
        count = min(count, len(bias))
        for begin in range(0, len(values), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            logits = spec.capped(values[rows] @ weight.T + bias)
            chance = np.exp(logits - partition[rows, None])
            best = np.sort(np.argpartition(-chance, count - 1)[:, :count])
            items += [_largest(ids, row[ids], count) for ids, row in zip(best, chance, strict=True)]
        return items


def _largest(ids: Array, shares: Array, count: int) -> Best:
    order = np.argsort(-shares, kind="stable")[:count]
    return list(zip(np.asarray(ids)[order].tolist(), shares[order].tolist(), strict=True))


def _likely_labels(task: TaskSpec, logits: Array) -> list[dict[str, Any]]:
    """List the most likely labels by their logits [C], with probabilities."""
    if task.output_kind == "several labels":
        shares = 1 / (1 + np.exp(-np.float64(logits)))
    else:
        raised = np.exp(logits - logits.max())
        shares = raised / raised.sum()
    order = np.argsort(-shares, kind="stable")[:BEST]
    return [{"label": task.labels[index], "probability": float(shares[index])} for index in order]


def _gold(task: TaskSpec, number: int | None) -> str | None:
    return task.labels[number] if number is not None and 0 <= number < len(task.labels) else None


def sequence_facts(
    store: FeatureStore,
    index: int,
    view: int = 0,
    best: int = BEST,
    pieces: Pieces | None = None,
) -> dict[str, Any]:
    """Return a sequence as JSON: texts, and tokens with spans, masks and the `best` most likely
    pieces.

    If the teacher was fine-tuned for a task, the gold labels and the teacher's labels are included.
    Pass one `pieces` for several sequences: it loads the tokenizer once. Raises UserError if the
    store has no such sequence or view.
    """
    number = check_number(store, index)
    if not 0 <= view < store.features.views:
        raise UserError(f"{store.path}: no view {view}; it has 0..{store.features.views - 1}")
    record, logits = store[number], store.features.logits
    facts = {
        "sequence": number,
        "sequences": len(store),
        "document": record.document,
        "document_begin": record.document_begin,
        "hard_cut": record.hard_cut,
        "view": view,
        "views": store.features.views,
        "texts": list(record.texts),
        "next_token": bool(logits and logits.next_token),
        "draws": logits.size if logits and logits.tier == "sample" else None,
    }
    if store.features.embedding:
        facts["embedding_length"] = float(np.linalg.norm(record.embedding))
    task = store.task
    if task and task.is_score:
        facts["score"] = float(record.views[view].class_logits[0])
    elif task and task.output_kind == "numbers":
        outputs = zip(task.labels, record.views[view].class_logits.tolist(), strict=True)
        facts["says"] = [{"label": label, "number": number} for label, number in outputs]
    elif task and task.kind == "classification":
        if task.output_kind == "one label":
            facts["label"] = _gold(task, record.label)
        facts["says"] = _likely_labels(task, record.views[view].class_logits)
    return facts | {"tokens": _tokens(pieces or Pieces(store), record, record.views[view], best)}


def _tokens(pieces: Pieces, record: Record, view: View, best: int) -> list[dict[str, Any]]:
    task, tags, tokens = record.features.task, record.tags, []
    predicted = pieces.best(view, best)
    masks = view.mask if view.number else None
    for number, (begin, end) in enumerate(record.offsets.tolist()):
        token_id = int(record.token_ids[number])
        token = {"token": number, "id": token_id, "piece": pieces.name(token_id)}
        span = None if record.special[number] else [begin, end]
        token |= {"characters": span, "text": record.text[begin:end] if span else ""}
        if masks is not None:
            token["masked"] = bool(masks[number])
        if predicted:
            token["best"] = [
                {"id": piece_id, "piece": pieces.name(piece_id), "probability": share}
                for piece_id, share in predicted[number]
            ]
        if task and tags is not None:
            token["tag"] = _gold(task, int(tags[number]))
            token["says"] = _likely_labels(task, view.tag_logits[number])
        tokens.append(token)
    return tokens


def headline(facts: Mapping[str, Any]) -> str:
    """Return one line: document, number of tokens, and label of a sequence."""
    line = (
        f"sequence {facts['sequence']} of {facts['sequences']:,}: document {facts['document']}"
        f" from character {facts['document_begin']}"
    )
    line += ", begins inside a word" if facts["hard_cut"] else ""
    line += f", {counted(len(facts['tokens']), 'teacher token')}"
    if "embedding_length" in facts:
        line += f", embedding of length {facts['embedding_length']:.3f}"
    line += f", view {facts['view']} of {facts['views']}" if facts["views"] > 1 else ""
    if "score" in facts:
        line += f"; score {facts['score']:.4g}"
    elif "says" in facts:
        line += f"; label {facts['label'] or 'none'}, " if "label" in facts else "; "
        line += f"{PREDICTS} {_labels(facts['says'])}"
    return printable(line)


def _labels(labels: Sequence[Mapping[str, Any]]) -> str:
    return "  ".join(
        f"{entry['label']} {entry.get('probability', entry.get('number')):.3f}" for entry in labels
    )


def best_pieces(best: Sequence[Mapping[str, Any]], draws: int | None) -> str:
    """Return the most likely pieces with their probabilities; for tier `sample`, with their counts
    among the `draws`."""

    def figure(share: float) -> str:
        return f"{share:.3f}" if draws is None else f"{round(share * draws)}/{draws}"

    return "  ".join(f"{piece['piece']} {figure(piece['probability'])}" for piece in best)


def token_lines(facts: Mapping[str, Any]) -> Table:
    """Return the table of a sequence's tokens for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "token": lambda token: str(token["token"]),
        "piece": lambda token: str(token["piece"]),
        "characters": lambda token: "{}:{}".format(*token["characters"] or ("", "")).strip(":"),
        "text": lambda token: str(token["text"]),
    }
    following = " next" if facts["next_token"] else ""
    optional: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
        "masked": ("masked", lambda token: "x" if token["masked"] else ""),
        "best": (PREDICTS + following, lambda token: best_pieces(token["best"], facts["draws"])),
        "tag": ("tag", lambda token: token["tag"] or ""),
        "says": (PREDICTS, lambda token: _labels(token["says"])),
    }
    keys = facts["tokens"][0].keys() if facts["tokens"] else ()
    columns |= {heading: cell for key, (heading, cell) in optional.items() if key in keys}
    table = Table(*columns)
    for token in facts["tokens"]:
        # rich would take a piece such as `[unused1]` for markup, and leave it out.
        table.add_row(*(escape(printable(cell(token))) for cell in columns.values()))
    return table


def printable(text: str) -> str:
    """Replace control characters, which would move the cursor of a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
