"""The targets of decoders are correct for all texts of six letters from an alphabet of three, and
for teachers that know the next token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM

from teachonce.align import Tokenizations, Tokens, VocabularyMap
from teachonce.store import Batch, Logits
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.next_tokens import chunk_targets, next_pieces, predicting_tokens
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.data.targets import TargetReader
from teachonce.student_train.data.vocabularies import vocabulary_map
from teachonce.support.arrays import Array
from tests.making.decoders import random_llama
from tests.making.dumps import dumped
from tests.making.models import Stores, Teachers
from tests.making.texts import ENGLISH

TEXTS = ["".join(letters) for letters in itertools.product("abc", repeat=6)]
Merges = list[tuple[str, str]]
THEIRS: Merges = [("a", "b"), ("b", "c"), ("c", "a"), ("ab", "c"), ("a", "a"), ("b", "b")]
THEIRS += [("c", "c"), ("c", "ab")]
OWN: Merges = [("b", "a"), ("c", "b"), ("a", "c"), ("ba", "b"), ("a", "a"), ("c", "ba")]


def byte_pairs(merges: Merges) -> Tokenizer:
    pieces = ["<s>", *"abc", *map("".join, merges)]
    made = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return made


class Enumerated:
    """Holds all 729 texts in both tokenizations, and a teacher given by a table."""

    def __init__(self) -> None:
        self.teacher, self.student = byte_pairs(THEIRS), byte_pairs(OWN)
        self.map: VocabularyMap = vocabulary_map(self.teacher.to_str(), self.student.to_str())
        self.theirs, self.own = (tokenize(each, TEXTS) for each in (self.teacher, self.student))
        sides = Tokenizations(TEXTS, self.theirs, self.own, self.map, 512)
        _, self.alignment = sides.align("bytes")

    def table(self, prefix: Sequence[int]) -> Array:
        """Return the log-probabilities of the next of the twelve pieces, given the previous
        ones."""
        values = np.random.default_rng([len(prefix), *prefix]).normal(0, 2, len(THEIRS) + 4)
        found: Array = values - np.log(np.exp(values).sum())
        return found

    def rows(self) -> Array:
        """Return the table at every token: float64 [N,12]."""
        each = zip(self.theirs.start, self.theirs.start[1:], strict=False)
        ids = [self.theirs.ids[low:high].tolist() for low, high in each]
        return np.stack([self.table(one[: n + 1]) for one in ids for n in range(len(one))])

    def observed(self) -> Array:
        rows = self.rows()
        found: Array = rows[np.arange(len(rows)), np.append(self.theirs.ids[1:], 0)]
        return found


@pytest.fixture(scope="module")
def enumerated() -> Enumerated:
    return Enumerated()


def ends(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens = tokenizer.encode(text).tokens[1:]
    return list(itertools.accumulate(map(len, tokens)))


def test_runs_of_all_texts_have_the_probability_of_their_tokens(enumerated: Enumerated) -> None:
    targets = chunk_targets(
        enumerated.alignment, enumerated.theirs, enumerated.own, enumerated.observed()
    )
    wanted, pieces = [], []
    for text in TEXTS:
        ids = enumerated.teacher.encode(text).ids
        mine = enumerated.student.encode(text).ids[1:]
        steps = [enumerated.table(ids[:n])[ids[n]] for n in range(1, len(ids))]
        theirs, own = ends(enumerated.teacher, text), ends(enumerated.student, text)
        last = 0
        for cut in sorted({*theirs} & {*own}):
            wanted.append(sum(s for s, end in zip(steps, theirs, strict=True) if last < end <= cut))
            pieces.append([p for p, end in zip(mine, own, strict=True) if last < end <= cut])
            last = cut
    np.testing.assert_allclose(targets.logprobs.numpy(), wanted, rtol=1e-9)
    assert targets.following.tolist() == list(itertools.chain(*pieces))
    assert targets.begin.tolist() == np.cumsum([0, *map(len, pieces)])[:-1].tolist()
    assert len(wanted) > 2 * len(TEXTS)


def test_mass_goes_to_the_first_piece_of_each_spelling(enumerated: Enumerated) -> None:
    """At every place where tokens of both sides begin; no mass is lost."""
    rows, before = predicting_tokens(enumerated.alignment, enumerated.theirs, enumerated.own)
    logprobs, count = enumerated.rows(), len(THEIRS) + 4
    nothing: Any = np.zeros(len(logprobs))  # float64, as the targets then are
    stored = Logits(
        "topk", nothing, ids=np.tile(np.arange(count), (len(logprobs), 1)), logprobs=logprobs,
        rest=np.full(len(logprobs), -np.inf),
    )  # fmt: skip
    reader = TargetReader(next_pieces(enumerated.map, enumerated.student))
    targets, some = reader.of(stored, rows)
    assert some.all() and len(before) == len(rows)
    spelled = {
        number: enumerated.student.encode(piece).ids[1] if number else 0
        for piece, number in enumerated.teacher.get_vocab().items()
    }
    wanted = np.zeros((len(rows), len(OWN) + 4))
    for theirs, own in spelled.items():
        wanted[:, own] += np.exp(logprobs[rows, theirs])
    found = np.zeros_like(wanted)
    mass = np.where(targets.valid, targets.logprobs.exp(), 0)
    np.add.at(found, (np.arange(len(rows))[:, None], targets.ids.numpy()), mass)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.sum(axis=1) + targets.rest.exp().numpy(), 1, atol=1e-9)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Path:
    """Dump five sentences, each as one text."""
    folder = tmp_path_factory.mktemp("known")
    (folder / "corpus.txt").write_text("\n".join(ENGLISH[:5]) + "\n", "utf-8")
    words = {"attention": "none", "hidden": "none"}
    return dumped(tiny_teacher("gpt2"), folder / "corpus.txt", folder / "store.zarr", **words)


def knowing(batches: StudentBatches, shift: int) -> Iterator[StudentBatch]:
    """Make batches of a teacher that is certain of the token after `shift` others."""
    store, collator = batches.store, batches.collator
    raws = store.stream(0, 0, batch_tokens=4096, view=0, features=collator.features())
    for number, raw in enumerate(raws):
        known = dataclasses.replace(raw, logits=_known(raw, shift))
        yield collator(known, 0, (0, 0, number, 1)).to(torch.device("cpu"))


def _known(batch: Batch, shift: int) -> Logits:
    count = len(batch.token_ids)
    ids = np.roll(batch.token_ids, -1 - shift)[:, None].astype(np.int64)
    nothing = np.zeros(count, np.float32)
    rest = np.full(count, -np.inf, np.float32)
    return Logits(
        "topk", nothing, ids=ids, logprobs=nothing[:, None], rest=rest, observed=nothing.copy()
    )


def learnt(batches: StudentBatches, shift: int, steps: int = 80) -> dict[str, float]:
    """Return the losses after repeated training on the batches; `next` is measured, not trained."""
    torch.manual_seed(0)
    distiller = batches.distiller(random_llama(len(batches.tokenizer)))
    optimizer = torch.optim.Adam(distiller.parameters(), lr=1e-2)
    every = list(knowing(batches, shift))
    trained = [term for term in distiller.terms if term.name != "next"]
    for _ in range(steps):
        for batch in every:
            optimizer.zero_grad()
            losses = distiller.compute(batch, trained).losses
            distiller.weighted(losses, trained).backward()
            optimizer.step()
    with torch.no_grad():
        return {name: float(loss) for name, loss in distiller(every[0]).items()}


@pytest.mark.slow
def test_a_teacher_that_knows_the_next_token_is_learnt(causal: Path) -> None:
    """Nothing is learned from a teacher that is a token ahead."""
    words: dict[str, Any] = {"student": "llama:32x2x4", "loss": {"next": 1.0, "kl-next": 1.0}}
    batches = StudentBatches(causal, "teacher", **words)
    assert learnt(batches, 0)["next"] < 0.02
    ahead = learnt(batches, 1)
    assert ahead["kl-next"] < 0.5 and ahead["next"] > 3


@pytest.mark.slow
def test_a_teacher_of_certain_runs_is_learnt_with_any_vocabulary(causal: Path) -> None:
    words: dict[str, Any] = {"student": "llama:32x2x4", "loss": {"next": 1.0, "alm": 1.0}}
    found = learnt(StudentBatches(causal, "300", **words), 0)
    # Without the first token of each text, for which this teacher has no prediction.
    assert found["alm"] < 0.05 and found["next"] < 0.6


@pytest.mark.parametrize("tier", ["topk:4", "head"])
@pytest.mark.parametrize("vocab", ["300", "teacher"])
def test_probabilities_of_runs_are_those_of_transformers(
    tiny_store: Stores, tiny_teacher: Teachers, tier: str, vocab: str
) -> None:
    store = tiny_store("gpt2", 8, attention="none", hidden="none", codec="exact", logits=tier)
    batches = StudentBatches(store, vocab, student="llama:32x2x4", loss={"alm": 1.0})
    teacher: Any = AutoModelForCausalLM.from_pretrained(tiny_teacher("gpt2"))
    raw = next(batches.store.stream(0, 0, batch_tokens=512, view=0, features=["logits"]))
    targets = batches.collator(raw, 0, (0, 0, 0, 1)).aligned["bytes"].chunks
    assert targets is not None
    steps = np.zeros(len(raw.token_ids))
    for low, high in zip(raw.start, raw.start[1:], strict=False):
        ids = torch.from_numpy(raw.token_ids[low:high].astype(np.int64))
        with torch.no_grad():
            own = teacher(ids[None]).logits[0].log_softmax(dim=1)
        steps[low + 1 : high] = own[:-1].gather(1, ids[1:, None])[:, 0]
    sides = Tokenizations(
        raw.texts, Tokens(raw.token_ids, raw.offsets, raw.special, raw.start),
        tokenize(batches.collator.tokenizer, raw.texts), batches.collator.vocabulary, 512,
    )  # fmt: skip
    student, runs = sides.align("bytes")
    wanted = _sums(steps, runs.teacher, ~np.isin(runs.teacher[:, 0], raw.start[:-1]))
    assert len(student.ids) and len(wanted) > 50
    np.testing.assert_allclose(targets.logprobs.numpy(), wanted, atol=0.02)


def _sums(steps: Array, runs: Array, inside: Array) -> list[float]:
    return [float(steps[low:high].sum()) for low, high in runs[inside]]
