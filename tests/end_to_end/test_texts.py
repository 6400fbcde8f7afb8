"""Stores have the values of plain transformers, for odd texts and for texts in two languages.

- A store has the values of plain transformers, within the error that each codec states.
- Odd texts of every kind run through the whole pipeline: nothing crashes, no character is lost, and
  all invariants hold.
- `--student-column`: the teacher reads a text in one language, the student in another.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForMaskedLM, AutoTokenizer

from teachonce.align import FlatText, Tokens, align_span
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, Record, open_store
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main as student_train
from teachonce.support.arrays import Array
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.option_values import ProcessShard
from teachonce.teacher_dump.job.sharing import share
from teachonce.teacher_dump.windows.masked_views import (
    DrawKey,
    MaskVocabulary,
    maskable_spans,
    masked_input,
)
from tests.align.support import check_laws
from tests.end_to_end.support import Words, ok, refused, says
from tests.end_to_end.test_embedding_students import encoded
from tests.integrity.odd_texts import KINDS, ODD, check_documents, odd_texts, run
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Teachers
from tests.making.texts import SENTENCES
from tests.teacher_dump.windows.cutting import cut_windows

SEED = 3
CASES = [
    ("exact", "zarr", "bert"),
    ("exact", "h5", "xlmr"),
    ("default", "zarr", "modernbert"),
    ("default", "h5", "bert"),
    ("small", "zarr", "roberta"),
    ("small", "h5", "electra"),
]
Expected = dict[str, Array]


class Plain:
    """Run the teacher in the plain way: one sequence at a time, with all states."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForMaskedLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def __call__(self, ids: Array) -> Expected:
        with torch.no_grad():
            output = self.model(
                torch.from_numpy(np.asarray(ids, np.int64))[None],
                output_hidden_states=True,
                output_attentions=True,
            )
        states = torch.stack(output.hidden_states[1:])[:, 0]
        maps = torch.stack(output.attentions)[:, 0].mean(dim=1)
        half = len(states) // 2
        return {
            "mean": states.mean(0).numpy(),
            "groups2.0": states[:half].mean(0).numpy(),
            "groups2.1": states[half:].mean(0).numpy(),
            "attention": maps.mean(0).numpy(),
            "logits": output.logits[0].numpy(),
            "logprobs": output.logits[0].double().log_softmax(-1).numpy(),
        }

    def masked(self, record: Record) -> Array:
        """Reconstruct the teacher's input of view 1 from the stored spans alone. A store has no ids
        of random words, so these come from the masking rule."""
        view = record.views[1]
        ids = np.array(record.token_ids, np.int64)
        drawn = masked_input(
            ids,
            record.offsets,
            record.special,
            view.spans,
            MaskVocabulary(
                self.tokenizer.mask_token_id,
                self.model.config.vocab_size,
                self.tokenizer.all_special_ids,
            ),
            DrawKey(SEED, 1, record.index),
        )
        for token, (begin, end) in enumerate(record.offsets):
            if record.special[token]:
                continue
            for first, last, action in view.spans:
                if begin < last and first < end:
                    ids[token] = (self.tokenizer.mask_token_id, drawn[token], ids[token])[action]
                    break
        return ids


def sampled(store: FeatureStore, count: int = 6) -> list[Record]:
    chosen = np.random.default_rng(0).choice(len(store), count - 2, replace=False)
    return [store[int(index)] for index in (0, len(store) - 1, *chosen)]


@pytest.mark.parametrize(("codec", "ext", "kind"), CASES)
def test_features(tmp_path: Path, tiny_teacher: Teachers, codec: str, ext: str, kind: str) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 14, SENTENCES)
    store = open_store(
        dumped(
            tiny_teacher(kind), corpus, tmp_path / f"store.{ext}", codec=codec, views=2, seed=SEED,
            hidden="mean,groups:2", max_length=48, part_tokens=200,
        )
    )  # fmt: skip
    assert store.meta["parts"] > 1
    plain = Plain(tiny_teacher(kind))
    for record in sampled(store):
        check_tokens(plain, record)
        check_mask(record)
        for view, ids in enumerate((record.token_ids, plain.masked(record))):
            expected = plain(ids)
            check_states(store, record, view, expected, codec)
            check_logits(record.views[view].logits, expected, codec)


def check_tokens(plain: Plain, record: Record) -> None:
    again = plain.tokenizer(
        record.text, return_offsets_mapping=True, return_special_tokens_mask=True
    )
    special = np.array(again["special_tokens_mask"], bool)
    np.testing.assert_array_equal(record.token_ids, again["input_ids"])
    np.testing.assert_array_equal(record.special, special)
    offsets = np.array(again["offset_mapping"]) * ~special[:, None]
    np.testing.assert_array_equal(record.offsets, offsets)


def check_mask(record: Record) -> None:
    """Return whole words, and the tokens that share a character with such a word."""
    assert not record.views[0].mask.any() and len(record.views[0].spans) == 0
    spans, mask = record.views[1].spans, record.views[1].mask
    words = {tuple(word) for word in maskable_spans(record.text).tolist()}
    assert len(spans) > 0 and {tuple(span) for span in spans[:, :2].tolist()} <= words
    hidden = {place for begin, end, _ in spans for place in range(begin, end)}
    touched = [bool(hidden & set(range(begin, end))) for begin, end in record.offsets]
    np.testing.assert_array_equal(mask, touched & ~record.special)


def check_states(
    store: FeatureStore, record: Record, view: int, want: Expected, codec: str
) -> None:
    got = record.views[view]
    for name in ("mean", "groups2.0", "groups2.1"):
        error = np.linalg.norm(got.hidden[name] - want[name]) / np.linalg.norm(want[name])
        if codec == "small":
            check_int4(store, name, got.hidden[name], want[name])
        else:
            assert error <= (1e-5 if codec == "exact" else 0.01), name
    error = np.abs(got.attention["mean"] - want["attention"]).max()
    assert error <= {"exact": 1e-5, "default": 0.005, "small": 0.02}[codec]


def check_int4(store: FeatureStore, name: str, got: Array, want: Array) -> None:
    """FORMAT.md: at most 1.001/14 of the largest value of 64 channels, in normalised units."""
    mean, deviation = store.calibration[name]
    normal = (want - mean) / deviation
    largest = np.abs(normal).max(axis=1, keepdims=True)  # hidden size 32, one group
    assert normal.shape[1] == 32
    assert (np.abs((got - mean) / deviation - normal) <= 1.001 * largest / 14 + 1e-4).all()


def check_logits(got: Any, want: Expected, codec: str) -> None:
    best = np.argsort(-want["logprobs"], axis=1)[:, :8]
    np.testing.assert_array_equal(got.ids, best)
    logprobs = np.take_along_axis(want["logprobs"], best, axis=1)
    left = want["logprobs"].copy()
    np.put_along_axis(left, best, -np.inf, axis=1)
    allowed = {
        "exact": 1e-4,
        "default": 2.0**-11 + 1e-4,
        "small": np.sqrt(-logprobs) / 32 + 2.0**-12 + 1e-4,
    }[codec]
    assert (np.abs(got.logprobs - logprobs) <= allowed).all()
    fixed = 1e-4 if codec == "exact" else 2.0**-11 + 1e-4
    assert np.abs(got.rest - np.logaddexp.reduce(left, axis=1)).max() <= fixed
    partition = np.logaddexp.reduce(want["logits"], axis=1)
    np.testing.assert_allclose(got.log_partition, partition, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_draws(tmp_path: Path, tiny_teacher: Teachers) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 30)
    stores = [
        open_store(
            dumped(
                tiny_teacher("bert"), corpus, tmp_path / f"{name}.zarr", logits="sample:50",
                hidden="none", attention="none", batch_tokens=batch_tokens,
            )
        )
        for name, batch_tokens in (("a", 128), ("b", 128), ("c", 2048))
    ]  # fmt: skip
    plain = Plain(tiny_teacher("bert"))
    drawn = [np.concatenate([counts_of(record) for record in store]) for store in stores]
    assert (drawn[0].sum(axis=1) == 50).all()
    np.testing.assert_array_equal(drawn[0], drawn[1])
    # Another batch changes the last bit of a logit, and so a draw at a boundary.
    assert np.abs(drawn[0] - drawn[2]).sum() <= 0.002 * drawn[0].sum()
    chance = np.concatenate([np.exp(plain(record.token_ids)["logprobs"]) for record in stores[0]])
    error = (drawn[0] - 50 * chance).sum(axis=0)
    spread = np.sqrt((50 * chance * (1 - chance)).sum(axis=0))
    assert (np.abs(error) <= 5 * spread).all()


def counts_of(record: Record) -> Array:
    """Dense counts [T,V] of the draws of each token."""
    logits = record.views[0].logits
    assert logits.draws == 50
    counts = np.zeros((len(record.token_ids), record.features.vocabulary))
    token = np.repeat(np.arange(len(counts)), np.diff(logits.start))
    np.add.at(counts, (token, logits.ids), logits.counts)
    return counts


@pytest.mark.parametrize(("codec", "kind"), [("exact", "deberta"), ("default", "electra")])
def test_logits_of_a_slice_from_the_head(
    tmp_path: Path, tiny_teacher: Teachers, codec: str, kind: str
) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 8)
    store = open_store(
        dumped(
            tiny_teacher(kind), corpus, tmp_path / "store.h5", logits="head", hidden="none",
            codec=codec,
        )
    )  # fmt: skip
    plain, (weight, bias) = Plain(tiny_teacher(kind)), store.head()
    pieces = np.arange(5, store.features.vocabulary, 7)
    for record in sampled(store):
        logits = record.views[0].logits
        want = plain(record.token_ids)["logits"]
        got = logits.values @ weight[pieces].T + bias[pieces]
        size = np.abs(logits.values) @ np.abs(weight[pieces]).T + np.abs(bias[pieces])
        relative = 1e-5 if codec == "exact" else 2.0**-11
        assert (np.abs(got - want[:, pieces]) <= relative * size + 1e-5).all()
        partition = np.logaddexp.reduce(want, axis=1)
        np.testing.assert_allclose(logits.log_partition, partition, rtol=1e-5, atol=1e-5)


Tokenizers = dict[str, Any]
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.text(st.characters(), max_size=10),  # lone surrogates, too
        st.lists(st.sampled_from(ODD), max_size=12).map("".join),
    ),
    min_size=1,
    max_size=10,
)


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer: Callable[[str], Any]) -> Tokenizers:
    return {kind: make_tokenizer(kind) for kind in KINDS}


def test_generated_texts(tmp_path: Path, tokenizers: Tokenizers) -> None:
    texts = list(odd_texts(seed=1, count=300))
    counts = run(texts, tmp_path, tokenizers)
    assert counts["windows"] > len(texts) and counts["tokens"] > 10 * len(texts)


@pytest.mark.slow
@given(TEXTS, st.sampled_from(KINDS))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_texts(tokenizers: Tokenizers, texts: list[str], teacher: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(["a story", *texts], Path(folder), tokenizers, (teacher,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_a_huge_number_of_characters(tokenizers: Tokenizers, kind: str) -> None:
    word = "xé" * 100_000
    windows = cut_windows(word, tokenizers[kind], 512)
    assert "".join(window.text for window in windows) == word


def test_what_is_checked_does_find_things(tokenizers: Tokenizers) -> None:
    text = "The story of the lighthouse keeper. " * 30
    windows = cut_windows(text, tokenizers["bpe"], 48)
    check_documents([text], windows, tokenizers["bpe"])
    with pytest.raises(AssertionError):
        check_documents([text], windows[:2] + windows[3:], tokenizers["bpe"])
    encoding = tokenizers["bpe"].backend_tokenizer.encode(text)
    tokens = Tokens.of([encoding.ids], [encoding.offsets], [encoding.special_tokens_mask])
    flat = FlatText.of([text])
    found = align_span(flat, tokens, tokens)
    check_laws(flat, tokens, tokens, found)
    shifted = type(found)(found.teacher[:-1], found.student[1:])
    with pytest.raises(AssertionError):
        check_laws(flat, tokens, tokens, shifted)
    with pytest.raises(AssertionError):
        check_laws(flat, tokens, tokens, type(found)(found.teacher[::-1], found.student[::-1]))
    assert np.array_equal(found.teacher, found.student)


PAIRS = (
    ("The old keeper lights the lamp.", "Старый смотритель зажигает лампу."),
    ("A story is never finished.", "История никогда не кончается."),
    ("She counted the ships in the harbour.", "Она считала корабли в гавани."),
    ("The student learns from the teacher.", "Ученик учится у учителя."),
    ("Nobody knows why the clock stopped.", "Никто не знает, почему часы остановились."),
    ("Rivers carry stones.", "Реки несут камни."),
    ("The trains leave for the north.", "Поезда уходят на север."),
    ("In the library they keep maps.", "В библиотеке хранятся карты."),
)
COLUMNS = ("--text-column", "en", "--student-column", "ru")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("ru\ten\n" + "".join(f"{ru}\t{en}\n" for en, ru in PAIRS), encoding="utf-8")
    return path


def typed(embedder: Path, table: Path, out: Path) -> Words:
    return ("--model", embedder, "--corpus", table, "--out", out, "--device", "cpu")


def test_vectors_of_one_text_with_the_tokens_of_the_other(
    embedder: Path, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.zarr"
    words = (*typed(embedder, table, out), "--head", "embedding", *COLUMNS, "--codec", "exact")
    message = ok(teacher_dump, *words, "--prompt", "query")
    says(message, "embedding of width 32 (mean, length 1, prompt 'find: ', of column en)")
    store = open_store(out)
    assert list(store.texts()) == [f"find: {ru}" for _, ru in PAIRS]
    english = encoded(embedder, [en for en, _ in PAIRS], prompt_name="query")
    assert np.allclose(store.embeddings(), english, atol=2e-5)
    assert store.identity["corpus"]["text_column"] == "en"
    assert store.identity["corpus"]["student_column"] == "ru"
    assert verify(out).problems == []
    says(ok(feature_store, "info", out), "of length 1, prompt 'find: ', of a parallel text")
    line = refused(feature_store, "verify", out, "--model", embedder)
    says(line, "does not hold the texts of its vectors", "verify it without --model")


def test_processes_that_share_a_dump_make_the_same_store(
    embedder: Path, table: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {
        "head": "embedding", "logits": None, "text_column": "en", "student_column": "ru",
        "part_tokens": 40,
    }  # fmt: skip
    one, two = tmp_path / "one.zarr", tmp_path / "two.zarr"
    dumped(embedder, table, one, **asked)
    share(dump_options(embedder, table, two, **asked), ProcessShard(0, 1))
    assert len(open_store(two).manifest.parts) > 2
    contents = {open_store(path).manifest.content() for path in (one, two)}
    assert len(contents) == 1


@pytest.mark.slow
def test_a_student_of_one_language_finds_what_the_teacher_says_of_another(
    embedder: Path, table: Path, tmp_path: Path
) -> None:
    """With a store of the teacher's own language it learns both."""
    stores = tmp_path / "ru.zarr", tmp_path / "en.zarr"
    for path, columns in zip(stores, (COLUMNS, ("--text-column", "en")), strict=True):
        ok(teacher_dump, *typed(embedder, table, path), "--head", "embedding", *columns)
    both = [word for path in stores for word in ("--store", path)]
    ok(
        student_train, *both, "--out", tmp_path / "s", "--vocab", "300", "--student", "32x1x2",
        "--device", "cpu", "--steps", "150", "--batch-texts", "8", "--lr", "0.006",
        "--held-out", "0",
    )  # fmt: skip
    wanted = encoded(embedder, [en for en, _ in PAIRS])
    for side in (0, 1):
        found = encoded(tmp_path / "s", [pair[side] for pair in PAIRS])
        assert (found * wanted).sum(axis=1).mean() > 0.95
        # A teacher with random weights has nearly the same outputs for all texts, so only the
        # differences identify a text.
        rest, other = (vectors - vectors.mean(axis=0) for vectors in (found, wanted))
        places = (rest @ (other / np.linalg.norm(other, axis=1, keepdims=True)).T).argmax(axis=1)
        assert (places == np.arange(len(PAIRS))).mean() > 0.8


def test_texts_without_another(embedder: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.tsv"
    half.write_text("en\tru\nRivers carry stones.\t\n", encoding="utf-8")
    given = (*typed(embedder, half, tmp_path / "a.zarr"), "--head", "embedding", *COLUMNS)
    message = "the second text of pair 1 is empty ('Rivers carry stones. | ')"
    says(refused(teacher_dump, *given), message, "; fill it in, or remove the row")
