"""One trainer has the same loss curve with stored features and with an online teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.online_teacher import OnlineTeacher
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.student_training import train
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.making.dumps import dumped, write_corpus

STEPS, KEPT = 8, 8
LOSSES = {"mlm": 1.0, "kl": 1.0, "logit": 0.1, "hidden": 3.0, "cosine": 1.0, "attention": 10.0}
EXACT = 1e-5
DEFAULT = {"attention": 5e-2, "valid_attention": 5e-2}  # a small loss, of maps in 8 bits
Curve = list[dict[str, float]]


@pytest.fixture(scope="module")
def stores(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[[str], Path]
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("online")
    corpus = write_corpus(folder / "corpus.txt", 40)
    return {
        codec: dumped(
            tiny_teacher("bert"), corpus, folder / f"{codec}.zarr", codec=codec, views=2,
            hidden="mean,groups:2", logits=f"topk:{KEPT}", batch_tokens=1,
        )
        for codec in ("exact", "default")
    }  # fmt: skip


def curve(
    store: FeatureStore, source: Any, align: str, view: int, **batches: Any
) -> tuple[Curve, dict[str, float]]:
    options = TrainOptions(
        store=store.path, vocab="500", student="32x2x4", align=align, loss=LOSSES, view=view,
        steps=STEPS, eval_every=STEPS, **batches, held_out=0.1, device="cpu",
    ).resolved()  # fmt: skip
    student, collator, _ = prepare(options, store)
    steps: Curve = []
    done = train(source, student, collator, options, on_step=lambda _, found: steps.append(found))
    assert len(steps) == STEPS
    return steps, done.validation


# Padding changes the last bit of the teacher's outputs, and each training step amplifies the
# difference. So use batches of one sequence, as in the dump of these stores, or larger batches
# without updates.
ONE_BY_ONE = {"batch_tokens": 1, "accumulate": 2}
STANDING_STILL = {"batch_tokens": 512, "lr": 1e-12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("align", "view", "batches", "bound"),
    [
        ("span", 1, ONE_BY_ONE, 1e-2),
        pytest.param("reduce", 0, ONE_BY_ONE, 1e-2, marks=pytest.mark.apart),
        ("span", 0, STANDING_STILL, 1e-3),
    ],
)
def test_same_losses(
    stores: dict[str, Path],
    tiny_teacher: Callable[[str], Path],
    align: str,
    view: int,
    batches: dict[str, Any],
    bound: float,
) -> None:
    """`bound` is the relative error allowed to codec default; `exact` has EXACT."""
    exact, default = (open_store(stores[codec]) for codec in ("exact", "default"))
    teacher = load_teacher(str(tiny_teacher("bert")), hidden="mean,groups:2", attention="mean")
    online, online_end = curve(exact, OnlineTeacher(exact, teacher), align, view, **batches)
    for store, bounds, others in ((exact, {}, EXACT), (default, DEFAULT, bound)):
        assert len(split_blocks(store, 0.1)[1]) > 0
        stored, stored_end = curve(store, store, align, view, **batches)
        for ours, theirs in zip([*stored, stored_end], [*online, online_end], strict=True):
            assert ours.keys() == theirs.keys() and len(ours) > len(LOSSES)
            for name, value in theirs.items():
                wanted = pytest.approx(value, rel=bounds.get(name, others), abs=others / 100)
                assert ours[name] == wanted, name
    if batches is ONE_BY_ONE:
        first, last = (sum(step["loss"] for step in part) for part in (online[:4], online[-4:]))
        assert last < first
