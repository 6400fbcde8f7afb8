"""One student of two teachers: of one vocabulary or of two, each through its own tokens."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.cli import main
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.combined_teachers import geometric_mean
from teachonce.student_train.losses.logits import LogitTargets
from teachonce.student_train.plan.train_plan import plan_of
from teachonce.student_train.prepared_student import make_collator, prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.store_training import StoreTraining
from teachonce.student_train.train.student_training import train
from tests.end_to_end.support import Words, ok, refused, report_of, says
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers
from tests.student_train import support
from tests.teacher_dump.windows.test_label_numbers import MOODS

SMALL = ("--vocab", "400", "--student", "16x2x2", "--batch-tokens", "512", "--device", "cpu")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> FeatureStore:
    """Save a teacher with other weights than the folder's store, and the same tokenizer."""
    folder = tmp_path_factory.mktemp("second")
    model = AutoModelForMaskedLM.from_pretrained(tiny_teacher("bert"))
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    (folder / "teacher").mkdir()
    for file in tiny_teacher("bert").iterdir():
        (folder / "teacher" / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(folder / "teacher")
    corpus = write_corpus(folder / "corpus.txt", 60)
    return open_store(dumped(folder / "teacher", corpus, folder / "second.h5", views=2))


@pytest.fixture(scope="module")
def foreign(tiny_store: Stores) -> FeatureStore:
    """Return the store of a byte-level teacher of other texts."""
    return open_store(tiny_store("roberta", 45))


LOSS = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0}
options_for = partial(support.options_for, steps=3, loss=LOSS)


def loss_of(training: StoreTraining, batch: StudentBatch) -> float:
    distiller = training.distiller
    return float(distiller.weighted(distiller(batch)).detach())


def trainings_of(*stores: FeatureStore, **changes: Any) -> tuple[list[StoreTraining], TrainOptions]:
    plan = plan_of(options_for(stores[0], **changes), *stores)
    student, collator, _ = prepare(plan.options, stores[0])
    collators = [collator]
    for other in stores[1:]:
        collators.append(make_collator(plan, other, collator.student_tokenizer))
    torch.manual_seed(plan.options.seed)  # projections as in a training
    found = [
        StoreTraining(plan, student, [each]) for each in zip(plan.sources, collators, strict=True)
    ]
    for training in found:
        training.enter(0)
    return found, plan.options


def test_of_the_same_windows_they_teach_the_same_texts(
    store: FeatureStore, second: FeatureStore
) -> None:
    trainings, _ = trainings_of(store, second)
    batches = [training.batches(0) for training in trainings]
    for _ in range(6):
        one, other = (next(some) for some in batches)
        assert torch.equal(one.inputs.ids, other.inputs.ids)
        assert torch.equal(one.labels, other.labels)
        assert one.distillation and other.distillation
        assert not torch.equal(
            one.distillation.normalised["mean"], other.distillation.normalised["mean"]
        )
    for some in batches:
        some.close()


def test_a_step_has_the_mean_of_both_losses(store: FeatureStore, foreign: FeatureStore) -> None:
    trainings, options = trainings_of(store, foreign)
    batches = [training.batches(0) for training in trainings]
    wanted = [
        loss_of(training, next(some)) for training, some in zip(trainings, batches, strict=True)
    ]
    for some in batches:
        some.close()
    student, collator, _ = prepare(options, store)
    other = make_collator(plan_of(options, store), foreign, collator.student_tokenizer)
    found: list[dict[str, float]] = []
    train(
        store, student, collator, options, others=[(foreign, other)],
        on_step=lambda _, each: found.append(each),
    )  # fmt: skip
    assert abs(wanted[0] - wanted[1]) > 1e-3 * wanted[0]  # above the tolerance below
    assert found[0]["loss"] == pytest.approx(sum(wanted) / 2, rel=1e-5)
    assert found[0]["tokens"] > 0 and len(found) == 3


def test_outputs_of_two_teachers_are_joined(store: FeatureStore, second: FeatureStore) -> None:
    changes: dict[str, Any] = {"loss": {"kl": 1.0, "hidden": 1.0, "cosine": 1.0}}
    alone, options = trainings_of(store, second, **changes)
    student, collator, _ = prepare(options, store)
    plan = plan_of(options, store, second)
    collators = [collator, make_collator(plan, second, collator.student_tokenizer)]
    training = StoreTraining(plan, student, list(zip(plan.sources, collators, strict=True)))
    training.enter(0)
    streams = [each.batches(0) for each in (training, *alone)]
    found, one, two = (next(some).distillation for some in streams)
    for some in streams:
        some.close()
    assert found and one and two and found.logits and one.logits and two.logits
    for side in ("normalised", "raw"):
        mean = (one.decoded[side]["mean"] + two.decoded[side]["mean"]) / 2
        torch.testing.assert_close(found.decoded[side]["mean"], mean)
    assert found.logit_runs and one.logit_runs and two.logit_runs
    begins = [each.member[each.begin].tolist() for each in (one.logit_runs, two.logit_runs)]
    common = sorted(set(begins[0]) & set(begins[1]))
    assert found.logit_runs.member[found.logit_runs.begin].tolist() == common
    row, rows = 3, [b.index(common[3]) for b in begins]
    targets = LogitTargets(*(value[row : row + 1] for value in vars(found.logits).values()))
    each = [
        LogitTargets(*(value[at : at + 1] for value in vars(taught.logits).values()))
        for taught, at in zip((one, two), rows, strict=True)
        if taught.logits
    ]
    pieces = store.features.vocabulary
    want = geometric_mean(each, pieces)
    torch.testing.assert_close(targets.logprobs, want.logprobs)
    assert torch.equal(targets.ids, want.ids)
    # one teacher, twice: the same losses as alone
    twice = [(plan.sources[0], collator), (plan.sources[0], collator)]
    same = StoreTraining(plan, student, twice)
    same.distiller.load_state_dict(alone[0].distiller.state_dict())
    same.enter(0)
    assert same.validate() == pytest.approx(alone[0].validate(), rel=1e-4)


@pytest.mark.slow
def test_a_student_of_joined_teachers_trains_and_goes_on(
    store: FeatureStore, second: FeatureStore, foreign: FeatureStore, tmp_path: Path,
    tiny_store: Stores,
) -> None:  # fmt: skip
    words: Words = ("--combine", "outputs", "--loss", "mlm=1,kl=1,hidden=1", "--steps", "4", *SMALL)
    pair: Words = ("--store", store.path, "--store", second.path)
    said = ok(main, *pair, *words, "--out", tmp_path / "a")
    assert second.path in said
    report = report_of(tmp_path / "a")
    assert report["settings"]["combine"] == "outputs"
    ok(main, *pair, *words, "--align", "kl=match,hidden=reduce", "--out", tmp_path / "two ways")
    assert not any(name.startswith("store2_") for name in report["result"])
    out = tmp_path / "b"
    shared: Words = (*words[:2], "--loss", "kl-shared=1", "--align", "match", *SMALL)
    line = refused(main, *pair, *shared, "--out", out)
    says(line, "kl-shared of several teachers", "--logits head", "--combine losses")
    line = refused(main, "--store", store.path, *words, "--out", out)
    says(line, "--combine outputs", "is the only one", "--store twice")
    line = refused(main, "--store", store.path, "--store", foreign.path, *words, "--out", out)
    says(line, foreign.path, "pieces that differ from", "--combine losses")
    for changes, printed in (
        ({"limit": 900}, "other text"),
        ({"seed": 7}, "other masked views than"),
        ({"hidden": "layer:1"}, "hidden layer1 of size 32"),
        ({"logits": "sample:5"}, "random draws"),
    ):
        wrong = tiny_store("bert", views=2, **changes)
        line = refused(main, "--store", store.path, "--store", wrong, *words, "--out", out)
        says(line, "--combine outputs", str(wrong), printed, "--combine losses")
    assert not out.exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_two_vocabularies_teach_one_student(
    store: FeatureStore, foreign: FeatureStore, tmp_path: Path, workers: int
) -> None:
    out = tmp_path / "student"
    words: Words = ("--store", store.path, "--store", foreign.path, "--out", out, *SMALL)
    words = (*words, "--steps", "6", "--loss", "mlm=1,kl=1,hidden=1", "--workers", workers)
    said = ok(main, *words)
    assert f"{store.path}, {foreign.path}" in said
    report = report_of(out)
    assert report["settings"]["others"] == [foreign.path]
    assert report["others"][0]["content"] == foreign.manifest.content()
    result = report["result"]
    names = [
        f"{store}valid_{loss}" for store in ("", "store2_") for loss in ("mlm", "kl", "hidden")
    ]
    assert result["valid_loss"] == pytest.approx(sum(result[name] for name in names) / 2)
    AutoModelForMaskedLM.from_pretrained(out)
    card = (out / "README.md").read_text()
    assert "student of bert and roberta\n" in card and foreign.path not in card


def test_stores_that_do_not_fit_together(
    store: FeatureStore, tmp_path: Path, tiny_teacher: Teachers, tiny_store: Stores
) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 20)
    model = tiny_teacher("bert", "classification", MOODS)
    task = dumped(model, corpus, tmp_path / "t.zarr", head="classification", logits=None)
    out = tmp_path / "out"
    line = refused(main, "--store", store.path, "--store", task, "--out", out, *SMALL)
    says(line, str(task), "is for classification", "for masked LM", "for each store")
    for labels, printed in (
        (MOODS[::-1], "the labels in another order than"),
        ((*MOODS[:2], "bored"), "other labels than"),
    ):
        other = tmp_path / f"{labels[2]}.zarr"
        teacher = tiny_teacher("bert", "classification", labels)
        dumped(teacher, corpus, other, head="classification", logits=None, limit=100)
        line = refused(main, "--store", task, "--store", other, "--out", out, *SMALL)
        number = next(n for n in range(3) if labels[n] != MOODS[n])
        says(line, f"{printed} the teacher of {task}: number {number} is {labels[number]} instead")
        says(line, str(other), MOODS[number], "in the same order", "for each store")
    narrow = tiny_store("roberta", 20, hidden="none")
    line = refused(main, "--store", store.path, "--store", narrow, "--out", out, *SMALL,
                   "--loss", "hidden=1")  # fmt: skip
    says(line, str(narrow), "no hidden states")
    assert not out.exists()
