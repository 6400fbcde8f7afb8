"""Alignments of a decoder: their speed, the edges they share, and the pieces that come next there.

    python -m benchmarks.speed.decoder_aligning --store STORE

STORE is a store of a decoder; only its text and tokens are read. A student's vocabulary is
trained on its text for each pattern. The time covers joining the texts of a batch and aligning
it; reading the store and tokenizing for the student are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import RESULTS, publish, table
from teachonce.align import Tokenizations, Tokens, VocabularyMap
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data.next_tokens import next_pieces, predicting_tokens
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.data.vocabularies import vocabulary_map
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.support.arrays import Array
from teachonce.support.console import command_errors
from teachonce.training.byte_level import PATTERNS

STRATEGIES = ("span", "bytes")
SIZES = (16_384, 2_048)
"""Teacher tokens of a batch, padding included: of a large one, and as RESULTS trains decoders."""
HEAD = (
    "vocabulary", "alignment", *(f"tokens/s, batches of {size:,}" for size in SIZES),
    "begin at a shared edge", "next by `next_pieces`", "next by the longest prefix",
)  # fmt: skip


def tokenizations(store: FeatureStore, tokenizer: Tokenizer, size: int) -> list[Tokenizations]:
    """Return the batches of a store with the student's tokens."""
    found, original = [], store.teacher_file("tokenizer.json").decode()
    vocabulary = vocabulary_map(original, tokenizer.to_str())
    for batch in store.stream(batch_tokens=size, features=()):
        arrays = (batch.token_ids, batch.offsets, batch.special, batch.start)
        teacher = Tokens(*(each.copy() for each in arrays))  # the next batch reuses the arrays
        texts = list(batch.texts)
        student = tokenize(tokenizer, texts)
        found.append(Tokenizations(texts, teacher, student, vocabulary, len(student.ids)))
    return found


def aligned(strategy: str, batches: Sequence[Tokenizations]) -> Figures:
    """Align all batches; return the teacher tokens per CPU second."""
    # A copy has not joined its texts yet.
    copies = [replace(each) for each in batches]
    started = time.process_time()
    for each in copies:
        each.align(strategy)
    seconds = time.process_time() - started
    return {"speed": sum(len(each.teacher.ids) for each in batches) / seconds}


def longest_prefixes(vocabulary: VocabularyMap) -> Array:
    """Find for each teacher piece the longest student piece that its bytes begin with: int64 [Vt],
    or -1. A special token becomes the student's special token of the same role."""
    own = {raw: number for number, raw in enumerate(vocabulary.student_bytes.written()) if raw}
    found = vocabulary.match.astype(np.int64)
    for number, raw in enumerate(vocabulary.teacher_bytes.written()):
        if raw:
            parts = (raw[:size] for size in range(len(raw), 0, -1))
            found[number] = next((own[part] for part in parts if part in own), -1)
    return found


def shares(strategy: str, batches: Sequence[Tokenizations], ways: Sequence[Array]) -> list[float]:
    """Return the share of the student's predicted tokens that begin at a shared edge, and of these
    the share that each of `ways` (int64 [Vt]) finds by the teacher's next token."""
    predicted, shared, right = 0, 0, [0] * len(ways)
    for each in batches:
        student, alignment = each.align(strategy)
        rows, before = predicting_tokens(alignment, each.teacher, student)
        expected, following = each.teacher.ids[rows + 1], student.ids[before + 1]
        predicted += int(np.maximum(np.diff(student.start) - 1, 0).sum())
        shared += len(rows)
        for place, way in enumerate(ways):
            right[place] += int((way[expected] == following).sum())
    return [shared / predicted, *(count / shared for count in right)]


def measure(store: FeatureStore, vocab: str, pattern: str, repeats: int) -> list[list[object]]:
    """Return rows of `HEAD` of one vocabulary, one for each alignment."""
    tokenizer = student_tokenizer(vocab, store, pattern=pattern).backend_tokenizer
    sized = {size: tokenizations(store, tokenizer, size) for size in SIZES}
    each = [(name, size) for name in STRATEGIES for size in SIZES]
    works = {f"{name} {size}": partial(aligned, name, sized[size]) for name, size in each}
    found = interleaved(works, repeats, separate=False)
    batches = sized[SIZES[0]]
    vocabulary = batches[0].vocabulary
    ways = next_pieces(vocabulary, tokenizer), longest_prefixes(vocabulary)
    return [
        [
            f"{vocab}, {pattern}",
            name,
            *(f"{found[f'{name} {size}']['speed'] / 1e6:.2f}M" for size in SIZES),
            *(f"{share:.1%}" for share in shares(name, batches, ways)),
        ]
        for name in STRATEGIES
    ]


@click.command()
@click.option("--store", "path", required=True, help="A store of a decoder.")
@click.option("--vocab", default="4k", help="Pieces of the student.")
@click.option("--pattern", multiple=True, type=click.Choice(list(PATTERNS)), default=PATTERNS)
@click.option("--repeats", default=7)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(path: str, vocab: str, pattern: tuple[str, ...], repeats: int, results: Path) -> None:
    """Print the table and put it into RESULTS.md."""
    with open_store(path) as store:
        teacher, tokens = store.identity["teacher"]["id"], store.meta["tokens"]
        rows = [row for each in pattern for row in measure(store, vocab, each, repeats)]
    publish(
        "Aligning a decoder",
        f"`python -m benchmarks.speed.decoder_aligning --store STORE --vocab {vocab}`; a store of"
        f" {teacher}, {tokens:,} tokens in windows; the student's vocabularies are trained on its"
        f" text. Teacher tokens per CPU second: medians of {repeats} interleaved rounds of joining"
        " the texts of all batches and aligning them; the student's tokens are known. The first"
        " share is that of the student's tokens that begin at an edge shared with the teacher (the"
        " first token of a text is not counted); the other two are the shares of these tokens that"
        " are the piece found for the teacher's next token.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
