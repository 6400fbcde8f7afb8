"""A store grows with its corpus and forgets documents, also while a student trains from it.

- A store grows with its corpus and forgets documents: its content then equals a dump of the
  resulting text.
- Documents are forgotten while a student trains from the store: the training ends with a line.
"""

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, StoreWriter, open_store
from teachonce.store.tools.document_hashes import document_texts, stored_digests
from teachonce.store.tools.info import info_lines
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data.token_cache import token_table
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.support.files import cache_folder
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job import part_writing
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.growing import _match_hashes
from teachonce.teacher_dump.job.option_values import ProcessShard
from teachonce.teacher_dump.job.sharing import share
from teachonce.teacher_dump.windows.sequences import window_digests, windows_as_in
from tests.end_to_end.support import STUDENT, Words, ok, refused, says, tree
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Teachers, Tokenizers
from tests.making.stores import copied
from tests.making.texts import ENGLISH, RUSSIAN
from tests.store.dying import Killed, dies_at
from tests.store.tools import forgetting
from tests.teacher_dump.windows.test_label_numbers import MOODS

CLOSE = 2e-4  # other batches round otherwise
PAIRS = [(ENGLISH[n] * 3, ENGLISH[n + 1] * 3) for n in range(3)]
OPTIONS: dict[str, Any] = {"codec": "exact", "views": 2, "part_tokens": 600, "weights": False}


def lines_of(corpus: Path) -> list[str]:
    return corpus.read_text("utf-8").splitlines()


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def values_of(store: FeatureStore, index: int) -> dict[str, Array]:
    """Return the teacher's values for a sequence."""
    record, found = store[index], dict[str, Array]()
    for view in record.views:
        here = f"view{view.number}"
        found |= {f"{here} {name}": view.hidden[name] for name in store.features.hidden}
        found |= {f"{here} {name} map": view.attention[name] for name in store.features.attention}
        if store.features.logits:
            logits = view.logits
            found |= {f"{here} logprobs": logits.logprobs, f"{here} rest": logits.rest}
        if store.features.task:
            found[f"{here} classes"] = view.class_logits
    return found


def check_same(one: Path, other: Path, numbers: bool = True) -> None:
    """Check that both stores have the same features of the same sequences. Without `numbers` the
    order may differ and only view 0 is compared, as masks depend on the number of a sequence."""
    with open_store(one) as a, open_store(other) as b:
        assert len(a) == len(b)
        each = [list(s.texts()) for s in (a, b)]
        order = [sorted(range(len(texts)), key=texts.__getitem__) for texts in each]
        if numbers:
            order = [list(range(len(a)))] * 2
        for i, k in zip(*order, strict=True):
            left, right = a[i], b[k]
            assert (left.text, left.label) == (right.text, right.label)
            assert np.array_equal(left.token_ids, right.token_ids)
            if numbers:
                assert left.document == right.document
                assert left.document_begin == right.document_begin
                assert np.array_equal(left.views[-1].spans, right.views[-1].spans)
            mine, theirs = values_of(a, i), values_of(b, k)
            for name, values in mine.items():
                if numbers or name.startswith("view0"):
                    assert np.allclose(values, theirs[name], CLOSE, CLOSE), (i, name)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the sequences that the teacher reads in view 0, by their text."""
    seen, plain = Counter[str](), part_writing.dump_part

    def counting(plan: Any, writer: Any, part: Any, *rest: Any) -> None:
        seen.update(window.text for window in part.windows)
        plain(plan, writer, part, *rest)

    monkeypatch.setattr(part_writing, "dump_part", counting)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("ext", ("zarr", pytest.param("h5", marks=pytest.mark.apart)))
def test_a_grown_store_is_what_a_whole_dump_gives(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, read: Counter[str], ext: str
) -> None:
    """The teacher reads only the new texts, and the old store is unchanged."""
    lines, teacher = lines_of(corpus)[:16], tiny_teacher("bert")
    first, text = written(tmp_path / "first.txt", lines[:12]), tmp_path / "text.txt"
    old = dumped(teacher, first, tmp_path / f"old.{ext}", **OPTIONS)
    whole = dumped(teacher, written(text, lines), tmp_path / f"whole.{ext}", **OPTIONS)
    before = tree(old) if old.is_dir() else {"": old.read_bytes()}
    read.clear()
    out = dumped(teacher, text, tmp_path / f"new.{ext}", grow_from=old, **OPTIONS)
    assert sum(read.values()) == 4 and set(read) == set(lines[12:])
    check_same(out, whole)
    assert verify(out).problems == verify(out).unknown == []
    assert before == (tree(old) if old.is_dir() else {"": old.read_bytes()})
    with open_store(out) as grown, open_store(old) as origin:
        shared = [part.arrays for part in origin.manifest.parts]
        assert [part.arrays for part in grown.manifest.parts][: len(shared)] == shared
        printed = grown.identity["corpus"]
        assert printed["grown_from"] == {"content": origin.manifest.content()}
        assert printed["sources"][0]["name"] == "text.txt"
    again = dumped(teacher, text, out, grow_from=old, **OPTIONS)
    assert sum(read.values()) == 4 and again == out
    if ext == "zarr":
        assert (out / "parts/0/text/utf8/c/0").stat().st_nlink == 2
        shutil.rmtree(old)
        assert verify(out).problems == []


@pytest.mark.slow
def test_documents_that_are_missing_moved_or_doubled(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, read: Counter[str]
) -> None:
    lines, teacher = lines_of(corpus)[:16], tiny_teacher("bert")
    old = dumped(teacher, written(tmp_path / "a.txt", lines), tmp_path / "a.zarr", **OPTIONS)
    now = [lines[9], "A new one stands first.", *lines[:5], lines[9], *lines[6:]]
    text, out = written(tmp_path / "b.txt", now), tmp_path / "b.zarr"
    changes = {**OPTIONS, "grow_from": old}
    with pytest.raises(UserError, match=r"1 document of .*a.zarr, removed or changed.*number 5\)"):
        dumped(teacher, text, out, **changes)
    assert not out.exists()
    read.clear()
    done = dump(dump_options(teacher, text, out, gone="forget", **changes))
    assert done.documents == len(now)  # the number of the document that is gone is not used
    assert read == Counter({"A new one stands first.": 1, lines[9]: 2})
    whole = dumped(teacher, text, tmp_path / "whole.zarr", **OPTIONS)
    check_same(out, whole, numbers=False)
    kept = dumped(teacher, text, tmp_path / "kept.zarr", gone="keep", **changes)
    with open_store(kept) as store, open_store(old) as origin:
        assert Counter(store.texts()) == Counter(now) + Counter([lines[5]])
        assert [r.document for r in store] == list(range(len(lines) + 3))
        assert store.identity["corpus"]["grown_from"]["corpora"] == [origin.identity["corpus"]]
        printed = info_lines(store)
        assert any("a.txt" in line for line in printed) and any(
            "grown from" in line for line in printed
        )
    for path in (out, kept):
        assert verify(path).problems == []
    with open_store(out) as store:
        assert [r.document for r in store][:6] == [0, 1, 2, 3, 4, 6]


def test_labels_limits_and_words(tmp_path: Path, tiny_teacher: Teachers) -> None:
    """A document with another label is a new document; a larger limit lets a store grow; rare words
    are the old store's."""
    teacher = tiny_teacher("bert", "classification", MOODS)
    rows = [f"{text}\t{MOODS[n % 2]}" for n, text in enumerate([*ENGLISH[:5], *RUSSIAN[:4]])]
    columns = {"text_column": "sentence", "label_column": "mood", "logits": None}
    options = {**OPTIONS, **columns, "head": "classification", "mask_words": "rare"}
    old = tmp_path / "old.zarr"
    dumped(teacher, written(tmp_path / "a.tsv", ["sentence\tmood", *rows]), old, **options)
    rows[2] = rows[2].replace(MOODS[0], MOODS[1])
    text = written(tmp_path / "b.tsv", ["sentence\tmood", *rows, f"{ENGLISH[7]}\t{MOODS[1]}"])
    grown = dumped(teacher, text, tmp_path / "b.h5", grow_from=old, gone="forget", **options)
    whole = dumped(teacher, text, tmp_path / "whole.zarr", **options)
    check_same(grown, whole, numbers=False)
    with open_store(grown) as store, open_store(old) as origin:
        name = "calibration/words/text"
        assert store.outside(name).tobytes() == origin.outside(name).tobytes()
        assert len(store) == 10
    limited = tmp_path / "limited.zarr"
    dumped(teacher, text, limited, limit=120, **options)
    more = dumped(teacher, text, tmp_path / "more.zarr", limit=200, grow_from=limited, **options)
    at_once = dumped(teacher, text, tmp_path / "once.zarr", limit=200, **options)
    check_same(more, at_once, numbers=False)
    assert len(open_store(more)) > len(open_store(limited))


@pytest.mark.slow
def test_every_kind_of_text(
    tmp_path: Path, tiny_teacher: Teachers, classes: FeatureStore, tags: FeatureStore
) -> None:
    """A document is identified by its sequences, forgetting finds it by its text alone."""
    corpora = {"classes": ("texts.tsv", "sentence"), "tags": ("words.tsv", None)}
    for store in (classes, tags):
        name, column = corpora[Path(store.path).stem]
        corpus = Corpus.open([str(Path(store.path).with_name(name))], column)
        found = list(window_digests(windows_as_in(store, corpus), gold=False))
        assert found == list(stored_digests(store, gold=False))
        assert found != list(stored_digests(store))
    pairs = written(tmp_path / "pairs.tsv", ["a\tb", *("\t".join(p) for p in PAIRS)])
    words = tmp_path / "words.txt"
    written(words, [text * 9 for text in ENGLISH[:3]])
    vectors: dict[str, Any] = {"head": "embedding", "pooling": "mean", "max_length": 32}
    scores: dict[str, Any] = {"head": "classification", "text_column": "a,b", "max_length": 24}
    teacher = tiny_teacher("bert"), tiny_teacher("bert", "classification", MOODS)
    for number, (text, options) in enumerate(((words, vectors), (pairs, scores))):
        path = dumped(teacher[number], text, tmp_path / f"{number}.zarr", logits=None, **options)
        corpus = Corpus.open([str(text)], options.get("text_column"))
        with open_store(path) as store:
            found = list(window_digests(windows_as_in(store, corpus), gold=False))
            assert found == list(stored_digests(store, gold=False))
            texts = dict(document_texts(store))
            assert all(len(texts[d.number]) < len(d.text) for d in corpus)  # they were cut


@pytest.mark.slow
def test_several_processes_and_stops(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both make the store of one process: several with --shard, and one that was stopped."""
    lines, teacher = lines_of(corpus)[:12], tiny_teacher("bert")
    text = written(tmp_path / "text.txt", lines)
    first = written(tmp_path / "first.txt", lines[:6])
    old = dumped(teacher, first, tmp_path / "old.zarr", **OPTIONS)
    changes = {**OPTIONS, "grow_from": old, "part_tokens": 200}
    alone = dumped(teacher, text, tmp_path / "alone.zarr", **changes)
    share(dump_options(teacher, text, tmp_path / "shared.zarr", **changes), ProcessShard(0, 1))
    broken, stops = tmp_path / "broken.zarr", 0
    for step in range(30):
        with monkeypatch.context() as patch:
            patch.setattr(files, "rename", dies_at(2 + step % 2, done=bool(step % 2)))
            try:
                dumped(teacher, text, broken, **changes)
                break
            except Killed:
                stops += 1
    contents = {open_store(p).manifest.content() for p in (alone, tmp_path / "shared.zarr", broken)}
    assert len(contents) == 1 and stops > 2
    assert verify(broken).problems == verify(broken).unknown == []


def test_a_store_that_is_removed_before_the_end(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, store: Path
) -> None:
    """While a process of a shared dump writes a new part, after the copies of the others."""
    old, out = tmp_path / "old.zarr", tmp_path / "new.zarr"
    old.symlink_to(store)
    text = written(tmp_path / "text.txt", [*lines_of(corpus), "One more."])
    changes: dict[str, Any] = {"hidden": "mean,groups:2", "weights": False, "grow_from": old}
    options = dump_options(tiny_teacher("bert"), text, out, **changes)

    def say(line: str) -> None:
        if line.startswith("part"):
            old.unlink()

    with pytest.raises(UserError, match=r"old\.zarr: was deleted or moved while it was being read"):
        share(options, ProcessShard(0, 1), say)
    assert StoreWriter.peek(out, "sealed") is None


@pytest.mark.apart
def test_killed_often_while_it_grows(tmp_path: Path, tiny_teacher: Teachers, corpus: Path) -> None:
    folder = tmp_path
    lines, teacher = lines_of(corpus)[:40], tiny_teacher("bert")
    text = written(folder / "text.txt", lines)
    options = {**OPTIONS, "part_tokens": 100}
    old = dumped(teacher, written(folder / "first.txt", lines[:25]), folder / "old.zarr", **options)
    out = folder / "new.zarr"
    for delay in (0.02 * n for n in range(30)):
        if not (child := os.fork()):
            try:
                dumped(teacher, text, out, grow_from=old, **options)
            finally:
                os._exit(0)
        started = time.monotonic()
        while not out.exists() and time.monotonic() - started < 60:
            time.sleep(0.005)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    dumped(teacher, text, out, grow_from=old, **options)
    alone = dumped(teacher, text, folder / "alone.zarr", grow_from=old, **options)
    assert open_store(out).manifest.content() == open_store(alone).manifest.content()
    assert verify(out).problems == verify(out).unknown == []


def test_what_cannot_grow(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, store: Path
) -> None:
    teacher, out = tiny_teacher("bert"), tmp_path / "new.zarr"
    words = ("--corpus", corpus, "--out", out, "--logits", "topk:8", "--device", "cpu")
    from_it: Words = ("--grow-from", store)
    features: Words = ("--hidden", "mean,groups:2")
    other = f"--grow-from {store}: was made by another teacher or with other options"
    line = refused(teacher_dump, "--model", tiny_teacher("distilbert"), *words, *from_it, *features)
    says(line, other, "weights_hash")
    line = refused(teacher_dump, "--model", teacher, *words, *from_it)
    says(line, "other options: --hidden", "use the store's teacher and options")
    cases: tuple[tuple[Words, str], ...] = (
        ((*from_it, *features, "--seed", 3), "--seed is 0 in the store and 3 now"),
        (("--grow-from", out), "is also --out, and a finished store is not changed"),
        ((*from_it, "--plan"), "--plan and --grow-from"),
        (("--gone", "keep"), "--gone keep: needs the store of --grow-from"),
    )
    for more, printed in cases:
        says(refused(teacher_dump, "--model", teacher, *words, *more), printed)
    started = shutil.copytree(store, tmp_path / "begun.zarr")
    node = started / "zarr.json"
    node.write_text(node.read_text("utf-8").replace('"sealed"', '"writing"'), "utf-8")
    line = refused(teacher_dump, "--model", teacher, *words, "--grow-from", started, *features)
    says(line, "begun.zarr: is not finished")
    damaged = shutil.copytree(store, tmp_path / "damaged.zarr")
    (damaged / "parts/0/token/id/c/0").write_bytes(b"no shard")
    line = refused(teacher_dump, "--model", teacher, *words, "--grow-from", damaged, *features)
    says(line, "damaged.zarr: array parts/0/token/id", "run `feature-store verify ")
    assert not out.exists()
    grown = written(tmp_path / corpus.name, [*lines_of(corpus), "One more."])
    again = ("--corpus", grown, "--out", store, "--logits", "topk:8", "--device", "cpu")
    small = ("--batch-tokens", 512)
    line = refused(teacher_dump, "--model", teacher, *again, *features, *small)
    says(line, "finished with other arguments: part tokens is")


@pytest.mark.slow
def test_forgetting_by_text(
    tmp_path: Path, tiny_teacher: Teachers, make_tokenizer: Tokenizers, corpus: Path
) -> None:
    """The dump of the first text is left, and the students' token caches lose the second."""
    lines, teacher = lines_of(corpus)[:20], tiny_teacher("bert")
    long = " ".join(lines)  # with several sequences, in more than one part
    first = written(tmp_path / "first.txt", lines[:14])
    both = written(tmp_path / "both.txt", [*lines[:14], long, *lines[14:]])
    gone = written(tmp_path / "gone.txt", [*lines[14:], long])
    path = dumped(teacher, both, tmp_path / "store.zarr", **OPTIONS)
    with open_store(path) as store:
        table = token_table(store, make_tokenizer("bpe").backend_tokenizer)
        cached = table.folder
        other = dumped(teacher, first, tmp_path / "other.zarr", **OPTIONS)
        kept = token_table(open_store(other), make_tokenizer("bpe").backend_tokenizer).folder
    assert cached and cached.is_dir() and kept and kept.parent == cache_folder() / "tokens"
    line = refused(feature_store, "forget", path, "--texts", gone, "--texts", first.with_name("x"))
    says(line, "no such file or folder")
    printed = ok(feature_store, "forget", path, "--texts", gone)
    says(printed, "forgot 7 documents with")
    check_same(path, other)
    assert verify(path).problems == verify(path).unknown == []
    assert not cached.exists() and kept.is_dir()
    says(refused(feature_store, "forget", path, "--texts", gone), "cannot forget 7 documents that")
    grown = tmp_path / "grown.zarr"
    options = dump_options(teacher, both, grown, grow_from=path, **OPTIONS)
    said: list[str] = []
    dump(options, said.append)
    assert any("documents were forgotten there" in line for line in said)
    with open_store(grown) as store:
        assert len(store) > 20


@given(
    st.lists(st.integers(0, 3), max_size=12).map(np.array),
    st.lists(st.integers(0, 3), max_size=12).map(np.array),
)
def test_equal_documents_are_paired_once(stored: Array, corpus: Array) -> None:
    old, new = _match_hashes(stored.astype("S16"), corpus.astype("S16"))
    both = Counter(stored.tolist()) & Counter(corpus.tolist())
    assert Counter(stored[old].tolist()) == both
    assert Counter(corpus[~new].tolist()) == both


@pytest.mark.apart
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.sampled_from(("zarr", "h5")),
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_law(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_teacher: Teachers,
    first: list[int],
    second: list[int],
    ext: str,
) -> None:
    """dump(A + B) equals dump(A) grown by B; after B is forgotten it equals dump(A)."""
    folder, teacher = tmp_path_factory.mktemp("law"), tiny_teacher("bert")
    pool = lines_of(write_corpus(folder / "pool.txt", 10))
    a, b = ([f"{pool[n]} {name}" for n in found] for found, name in ((first, "a"), (second, "b")))
    one, both = written(folder / "a.txt", a), written(folder / "ab.txt", a + b)
    options = {**OPTIONS, "part_tokens": 120}
    old = dumped(teacher, one, folder / f"a.{ext}", **options)
    whole = dumped(teacher, both, folder / f"ab.{ext}", **options)
    grown = dumped(teacher, both, folder / f"grown.{ext}", grow_from=old, **options)
    check_same(grown, whole)
    ok(feature_store, "forget", whole, "--texts", written(folder / "b.txt", b))
    check_same(whole, old)
    for path in (grown, whole):
        assert verify(path).problems == []


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    corpus, teacher = write_corpus(folder / "corpus.txt"), tiny_teacher("distilbert")
    for ext in ("zarr", "h5"):
        dumped(teacher, corpus, folder / f"a.{ext}", max_length=64, weights=False)
    return folder


@pytest.mark.parametrize(
    ("ext", "how"),
    [
        ("zarr", ("--cache", "ram")),
        ("h5", ()),
        ("zarr", ("--workers", 2)),
        pytest.param("h5", ("--cache", "device"), marks=pytest.mark.apart),
    ],
)
def test_a_training_ends(
    tmp_path: Path, stores: Path, ext: str, how: tuple[str | int, ...]
) -> None:
    """Also with a cache in memory; its checkpoints stay unfinished."""
    path, out = copied(stores / f"a.{ext}", tmp_path / f"a.{ext}"), tmp_path / "student"

    def forget() -> None:
        log = out / "metrics.jsonl"
        while not ended.is_set():
            if log.exists() and log.stat().st_size:
                forgetting.run(path, 3)
                break
            time.sleep(0.02)

    ended, thread = Event(), Thread(target=forget)
    thread.start()
    words = ("--store", path, "--vocab", 300, "--out", out, *STUDENT, "--loss", "mlm=1,hidden=1")
    try:
        line = refused(student_train, *words, "--steps", 100_000, *how)
    finally:
        ended.set()
        thread.join()
    says(line, f"{path}: ", "documents were forgotten, or another store now has its name")
    assert not (out / "config.json").exists()
    line = refused(student_train, *words, "--steps", 100_000, "--resume")
    says(line, str(out))
