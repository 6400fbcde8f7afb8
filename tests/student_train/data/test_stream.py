"""Masks, held-out blocks and the stream of student batches."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch

from teachonce.store import Features, FeatureStore, StoreError, TaskSpec, open_store
from teachonce.student_train.data.blocks import describe_masks, split_blocks, view_of
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.stream import BatchOrder, prepared_batches
from teachonce.student_train.data.student_tokens import IGNORED, MASK, RANDOM, Masker, tokenize
from teachonce.support.errors import UserError
from teachonce.training.optimizer import PATIENCE, Schedule
from tests.end_to_end.support import ROOT
from tests.making.models import Stores
from tests.student_train.support import prepared

COMMAND = (
    'if __name__ == "__main__":\n    from teachonce.student_train.cli import main\n    main()\n'
)


@pytest.fixture(scope="module")
def collator(store: FeatureStore) -> Collator:
    made: Collator = prepared(store, student="16x1x2", loss={"mlm": 1.0, "hidden": 1.0})[1]
    return made


def test_dynamic_masks(store: FeatureStore, collator: Collator) -> None:
    tokens = tokenize(collator.tokenizer, list(store.texts()) * 20)
    masker = Masker(4, 400, {0, 1, 2, 3, 4}, 0.15)
    read = masker.dynamic(tokens, (7, 0, 0))
    chosen = read.labels != IGNORED
    assert not (chosen & tokens.special).any()
    assert chosen.sum() / (~tokens.special).sum() == pytest.approx(0.15, abs=0.01)
    np.testing.assert_array_equal(read.labels[chosen], tokens.ids[chosen])
    np.testing.assert_array_equal(read.ids[~chosen], tokens.ids[~chosen])
    masked, kept = read.ids[chosen] == 4, read.ids[chosen] == tokens.ids[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.03)
    assert kept.mean() == pytest.approx(0.1, abs=0.03)
    assert np.isin(read.ids[chosen & ~np.isin(read.ids, [4])], masker.ordinary).all()
    again = masker.dynamic(tokens, (7, 0, 0))
    np.testing.assert_array_equal(again.ids, read.ids)
    assert (masker.dynamic(tokens, (7, 1, 0)).ids != read.ids).any()


@pytest.mark.parametrize("weighted", [False, True])
def test_no_more_masks_of_a_sequence_than_asked_for(
    store: FeatureStore, collator: Collator, weighted: bool
) -> None:
    tokens = tokenize(collator.tokenizer, list(store.texts()))
    counts = np.bincount(tokens.ids, minlength=400) if weighted else None
    free, bound = (Masker(4, 400, {0, 1, 2, 3, 4}, 0.3, counts, most) for most in (None, 8))
    every, few = (masker.dynamic(tokens, (7, 0, 0)).labels != IGNORED for masker in (free, bound))
    assert not (few & ~every).any()
    begin = tokens.start[:-1]
    of_every, of_few = (np.add.reduceat(each.astype(int), begin) for each in (every, few))
    np.testing.assert_array_equal(of_few, np.minimum(of_every, 8))
    assert of_every.max() > 8 > of_every.min()
    places = np.flatnonzero(few) - np.repeat(begin, of_few)
    lengths = np.repeat(np.diff(tokens.start), of_few)
    assert (places / lengths).mean() == pytest.approx(0.5, abs=0.08)  # not the first sequences


def test_stored_masks_hide_the_words_that_the_teacher_saw_masked(
    store: FeatureStore, collator: Collator
) -> None:
    masked: Counter[int] = Counter()
    for batch in store.stream(0, 0, 512, view=1, features=()):
        tokens = tokenize(collator.tokenizer, batch.texts)
        read = collator.masker.stored(tokens, batch.spans, batch.spans_start, (0,))
        for b in range(len(batch)):
            spans = batch.spans[batch.spans_start[b] : batch.spans_start[b + 1]]
            for t in range(tokens.start[b], tokens.start[b + 1]):
                begin, end = tokens.offsets[t]
                over = [s for s in spans if s[0] < end and begin < s[1]]
                assert (read.labels[t] != IGNORED) == (bool(over) and not tokens.special[t])
                if over and not tokens.special[t]:
                    action = int(over[0][2])
                    masked[action] += 1
                    assert action == RANDOM or read.ids[t] == (
                        collator.masker.mask_id if action == MASK else tokens.ids[t]
                    )
                else:
                    assert read.ids[t] == tokens.ids[t]
    assert min(masked[action] for action in range(3)) > 0


@pytest.mark.slow
def test_processes_load_no_module_of_the_current_folder(
    store: FeatureStore, tmp_path: Path
) -> None:
    before = dict(os.environ)
    command, here = tmp_path / "student-train", tmp_path / "downloaded"
    command.write_text(f"import sys; sys.path.append({str(ROOT)!r})\n{COMMAND}")
    here.mkdir()
    for name in ("multiprocessing", "student_train"):
        (here / f"{name}.py").write_text("open('prepared_batches', 'w')")
    words = f"--vocab 300 --student 8x1x1 --steps 1 --loss mlm=1 --workers 1 --out {tmp_path}/out"
    words = f"--store {store.path} {words}"
    subprocess.run([sys.executable, command, *words.split()], cwd=here, check=True)
    assert (tmp_path / "out/model.safetensors").exists()
    assert not (here / "prepared_batches").exists() and dict(os.environ) == before


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))]
)
def test_any_number_of_workers_makes_the_same_batches(
    store: FeatureStore, collator: Collator, workers: int
) -> None:
    blocks, _ = split_blocks(store, 0.1)
    order = BatchOrder(store, collator, blocks, 3, None, {"batch_tokens": 512}, first=5)
    wanted = order.endless()
    environment = dict(os.environ)
    with closing(prepared_batches(order, workers)) as found:
        compared = 0
        assert dict(os.environ) == environment
        for want, got, _ in zip(wanted, found, range(2 * len(blocks)), strict=False):
            compared += 1
            torch.testing.assert_close(vars(got.inputs), vars(want.inputs), rtol=0, atol=0)
            torch.testing.assert_close(got.labels, want.labels, rtol=0, atol=0)
            assert want.distillation and got.distillation
            assert repr(got) == repr(want) and f", {want.tokens} student tokens, " in repr(want)
            assert max(len(repr(each)) for each in (want.inputs, want.aligned)) < 200
            for name, states in want.distillation.normalised.items():
                own = got.distillation.normalised[name]
                torch.testing.assert_close(own, states, rtol=0, atol=0)
        assert compared == 2 * len(blocks) > 10


def test_workers_that_start_after_the_cached_tokens_are_deleted_report_it(
    store: FeatureStore, capfd: pytest.CaptureFixture[str]
) -> None:
    collator = prepared(store, vocab="350", student="16x1x2", loss={"mlm": 1.0})[1]
    blocks, _ = split_blocks(store, 0.1)
    order = BatchOrder(store, collator, blocks, 3, None, {"batch_tokens": 512})
    batches = prepared_batches(order, 1)
    assert collator.table is not None and collator.table.folder is not None
    shutil.rmtree(folder := collator.table.folder)
    with closing(batches), pytest.raises(StoreError, match=f"{folder}/.* was deleted; documents"):
        next(batches)
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_is_killed_is_a_line(store: FeatureStore, collator: Collator) -> None:
    blocks, _ = split_blocks(store, 0.1)
    order = BatchOrder(store, collator, blocks, 3, None, {"batch_tokens": 512})
    batches = prepared_batches(order, 1)
    with closing(batches), pytest.raises(UserError, match="was killed .* --resume"):
        next(batches)
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        for worker in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            os.kill(int(worker), signal.SIGKILL)
        for _ in batches:
            pass


@pytest.mark.slow
def test_a_script_that_workers_run_again_is_reported(store: FeatureStore, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from teachonce import TrainOptions, run\n"
        f"run(TrainOptions({str(store.path)!r}, vocab='350', student='16x1x2', steps=2, workers=1,"
        " out='student', device='cpu'))\n"
    )
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert 'under `if __name__ == "__main__":`, or give fewer --workers' in last


def test_held_out_blocks_are_apart_and_the_same_for_all(store: FeatureStore) -> None:
    train, held_out = split_blocks(store, 0.2)
    assert len(train) and len(held_out)
    rows = [i for begin, end in np.concatenate([train, held_out]) for i in range(begin, end)]
    assert sorted(rows) == list(range(len(store)))
    np.testing.assert_array_equal(split_blocks(store, 0.2)[1], held_out)
    assert len(split_blocks(store, 0.0)[1]) == 0


def test_batches_of_so_many_texts(store: FeatureStore, collator: Collator) -> None:
    blocks, _ = split_blocks(store, 0.1)
    rows = sorted(n for begin, end in blocks.tolist() for n in range(begin, end))
    texts = [b.index.tolist() for b in store.stream(3, 0, blocks=blocks, batch_texts=7)]
    assert sorted(n for batch in texts for n in batch) == rows
    # Blocks of this store are small: pools grow, so that but the last of each is full.
    assert sum(len(batch) < 7 for batch in texts) <= 1 + len(blocks) // 56
    assert len(texts) == store.batch_count(3, 0, blocks=blocks, batch_texts=7)
    batches = BatchOrder(store, collator, blocks, 3, 0, {"batch_texts": 7}).endless()
    sizes = [len(next(batches).inputs.ids) for _ in texts]
    assert sizes == [len(batch) for batch in texts]


def test_views() -> None:
    assert [view_of(e, Features(views=1), None) for e in range(3)] == [0, 0, 0]
    assert [view_of(e, Features(views=3), None) for e in range(4)] == [1, 2, 1, 2]
    assert view_of(5, Features(views=3), 0) == 0
    assert describe_masks(Features(views=4), None, 3) == (
        "a masked view an epoch, 1, 2, 3: new masks each epoch"
    )
    printed = describe_masks(Features(views=3), None, 2.5)
    assert "views 1, 2 in turn, a view an epoch: 3 epochs read 2 masks of each text" in printed
    assert printed.endswith("dump with --views 4")
    assert "view 1 in each epoch: 3 epochs read 1 mask" in describe_masks(
        Features(views=2), None, 3
    )
    assert "view 2 in each epoch" in describe_masks(Features(views=3), 2, 3)
    assert describe_masks(Features(views=2), None, 0.3).endswith("new masks each epoch")
    assert not describe_masks(Features(views=1), None, 3) + describe_masks(Features(views=3), 0, 3)
    task = TaskSpec("tagging", ("O",))
    assert view_of(5, Features(views=3, task=task), None) == 0


def test_the_stream_can_be_entered_anywhere(store: FeatureStore, collator: Collator) -> None:
    blocks, _ = split_blocks(store, 0.1)
    order = BatchOrder(store, collator, blocks, 3, None, {"batch_tokens": 400})
    batches = order.endless()
    some = [next(batches) for _ in range(3 + store.batch_count(3, 0, 400, blocks=blocks))]
    for first in (1, len(some) - 2):
        entered = next(replace(order, first=first).endless())
        torch.testing.assert_close(entered.inputs.ids, some[first].inputs.ids)
        torch.testing.assert_close(entered.labels, some[first].labels)
        mine, theirs = entered.distillation, some[first].distillation
        assert mine and theirs
        torch.testing.assert_close(mine.normalised["mean"], theirs.normalised["mean"])


def test_the_rate_of_a_plateau_is_halved() -> None:
    plateau = Schedule("plateau", 100, 0)
    plateau.validated(2.0)
    for _ in range(PATIENCE):
        assert plateau.factor(50) == 1.0
        plateau.validated(2.5)
    assert plateau.factor(50) == 0.5
    plateau.validated(1.0)
    assert plateau.factor(99) == 0.5 and plateau.best == 1.0


def test_each_epoch_reads_the_masks_of_its_view(tiny_store: Stores) -> None:
    """They depend on (seed, view) alone: a dump with fewer views has the same masks."""
    two, four = (open_store(tiny_store("bert", 8, attention="none", views=n)) for n in (2, 4))
    masks = [_masks(four, view) for view in (1, 2, 3)]
    assert _masks(two, 1) == masks[0]
    assert masks[0] != masks[1] != masks[2] != masks[0]
    maker = prepared(four, vocab="200", student="16x1x2", loss={"mlm": 1.0})[1]
    epoch = {"batch_tokens": 10**6}  # a batch
    batches = BatchOrder(four, maker, four.blocks(), 3, None, epoch).endless()
    for view in (1, 2, 3, 1):
        batch = next(batches)
        read = next(iter(four.stream(3, 0, 10**6, view=view, shuffle=False, features=())))
        native = maker.masker.stored(maker._native(read), read.spans, read.spans_start, (0,))
        labels = native.labels[native.labels != IGNORED]
        assert sorted(batch.labels.tolist()) == sorted(labels.tolist())


def _masks(store: FeatureStore, view: int) -> list[list[list[int]]]:
    return [
        batch.spans.tolist()
        for batch in store.stream(0, 0, 10**6, view=view, shuffle=False, features=())
    ]
