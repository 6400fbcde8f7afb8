"""The student in training: what each loss reads of a batch.

- The student in training: padding and unread tokens change no loss.
- An alignment for each loss: a batch is aligned once in each way, and each loss uses its own
  alignment.
- Distillation over the teacher's whole vocabulary does not compute a logit for every token and
  piece.
- KL over shared pieces, from a store's head tier and from stored logits, at the requested tokens.
- The student makes text vectors of unmasked text, as the teacher does, with any other loss.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from teachonce.align import Tokenizations, Tokens
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.cli import main
from teachonce.student_train.data import stream
from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.data.stream import BatchOrder, prepared_batches
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.model.any_student import Outputs, shared_pass
from teachonce.student_train.output.run import run
from teachonce.student_train.plan.checks import checked_plan
from teachonce.student_train.plan.train_plan import terms_of
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.student_train.train import distiller as distiller_module
from teachonce.student_train.train import evaluate, next_predictions
from teachonce.student_train.train.distiller import Distiller
from teachonce.support.errors import UserError
from tests.end_to_end.support import Words, ok, refused, says
from tests.making.decoders import random_llama
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers
from tests.making.sentence_folders import mean_embedder
from tests.student_train.support import distilling, first_batch, options_for, prepared

LOSSES = ("mlm", "kl", "hidden", "cosine", "sentence")


def padded(inputs: Inputs, columns: int, token: int) -> Inputs:
    """Append columns of `token` that the mask excludes to the inputs."""

    def wider(values: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, columns), value=value)

    return Inputs(wider(inputs.ids, token), wider(inputs.present, 0))


@pytest.mark.parametrize("student", ["16x2x2", "modernbert:16x2x2", "bilstm:12,10"])
def test_padding_changes_no_loss(store: FeatureStore, student: str) -> None:
    losses = dict.fromkeys(LOSSES, 1.0)
    distiller, collator, _ = distilling(store, student=student, loss=losses)
    batch = first_batch(store, collator)
    with torch.no_grad():
        found = distiller(batch)
        assert set(found) == set(LOSSES)
        for token in (collator.padding, 7):
            more = distiller(replace(batch, inputs=padded(batch.inputs, 3, token)))
            for name, value in found.items():
                assert more[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name


def compared(store: FeatureStore, **changes: Any) -> tuple[Distiller, Any]:
    """Make a student with random projections, and a batch for it."""
    distiller, collator, options = distilling(store, align="match", **changes)
    checked_plan(options, store)
    return distiller, first_batch(store, collator)


@torch.no_grad()
def test_raw_states_are_compared_as_the_teacher_gave_them(store: FeatureStore) -> None:
    losses = {"hidden-raw": 1.0, "hidden-raw-sum": 1.0, "hidden": 1.0}
    distiller, batch = compared(store, loss=losses)
    wanted, found = batch.distillation, distiller(batch)
    mean, deviation = store.calibration["mean"]
    raw = wanted.normalised["mean"].numpy() * deviation + mean
    states = torch.stack(distiller.encode(batch.inputs).states[1:]).mean(0)
    own = wanted.runs.pool(states, "mean")
    for name, over in (("hidden-raw", raw.size), ("hidden-raw-sum", len(raw))):
        key = f"{name}_mean"
        gap = distiller.projections[key](own).numpy().astype(np.float64) - raw
        assert found[name].item() == pytest.approx((gap**2).sum() / over, rel=1e-4)
    assert found["hidden-raw"].item() != pytest.approx(found["hidden"].item(), rel=0.01)


def test_projections_start_as_asked(store: FeatureStore) -> None:
    """Kolesnikova et al. 2022, appendix B.2, 3: He, frozen and trained."""
    deviations = {}
    for projection in ("trainable", "frozen"):
        for start in ("he", "pytorch"):
            torch.manual_seed(0)
            distiller, _ = compared(
                store, loss={"hidden": 1.0}, projection=projection, projection_start=start
            )
            (linear,) = distiller.projections.values()
            (weight, _) = linear.parameters()
            deviations[projection, start] = float(weight.std())
            assert weight.requires_grad == (projection == "trainable")
    he, uniform = (2 / 16) ** 0.5, (1 / (3 * 16)) ** 0.5  # of 16 inputs
    for (_, start), found in deviations.items():
        assert found == pytest.approx(he if start == "he" else uniform, rel=0.1)


@pytest.fixture(scope="module")
def counted(tiny_store: Stores) -> FeatureStore:
    """Stores the mean of the layers, and the mean of layers and embeddings."""
    return open_store(tiny_store("bert", 20, hidden="mean:0,mean", attention="none"))


@torch.no_grad()
def test_a_mean_that_counts_the_embeddings_has_its_like(counted: FeatureStore) -> None:
    assert list(counted.features.hidden) == ["mean0", "mean"]
    distiller, batch = compared(counted, loss={"hidden-raw-sum": 1.0})
    read, wanted = distiller.encode(batch.inputs), batch.distillation
    assert len(read.states) == 3  # embeddings and two layers
    expected = 0.0
    for name, states in (("mean0", read.states), ("mean", read.states[1:])):
        own = wanted.runs.pool(torch.stack(states).mean(0), "mean")
        gap = distiller.projections[f"hidden-raw-sum_{name}"](own) - wanted.decoded["raw"][name]
        expected += (gap.double() ** 2).sum().item() / len(gap) / 2
    assert distiller(batch)["hidden-raw-sum"].item() == pytest.approx(expected, rel=1e-4)


def test_embeddings_of_another_width_have_no_such_mean(
    counted: FeatureStore, tmp_path: Path
) -> None:
    options = options_for(counted, student="bilstm:12,10", loss={"hidden": 1.0}, out=tmp_path / "a")
    printed = "--student bilstm:12,10: .* include the embeddings .* 12 is not its hidden size 20;"
    with pytest.raises(UserError, match=printed):
        checked_plan(options, counted)


LOSS = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0, "cosine": 1.0}


def measured(store: FeatureStore, align: str) -> dict[str, torch.Tensor]:
    model, collator, options = prepared(store, loss=LOSS, align=align)
    torch.manual_seed(1)  # the same projections
    distiller = Distiller.of(model, options, store).eval()
    batches = BatchOrder(store, collator, store.blocks(), 0, 0, {"batch_tokens": 256}).endless()
    found: dict[str, torch.Tensor] = distiller(next(batches).to(torch.device("cpu")))
    return found


@pytest.fixture(scope="module")
def plain(store: FeatureStore) -> dict[str, dict[str, torch.Tensor]]:
    return {name: measured(store, name) for name in ALIGNMENTS}


@pytest.mark.parametrize(
    "words", ["kl=match,hidden=reduce", "reduce,kl=match", "match,cosine=reduce,kl=span"]
)
def test_each_loss_is_what_it_is_under_its_own_alignment_alone(
    words: str, store: FeatureStore, plain: dict[str, dict[str, torch.Tensor]]
) -> None:
    options = TrainOptions(store=store.path, loss=LOSS, align=words)
    aligned = {term.name: term.alignment or "span" for term in terms_of(options, None)}
    found = measured(store, words)
    assert list(found) == list(plain["span"])
    for name, value in found.items():
        torch.testing.assert_close(value, plain[aligned[name]][name])
    for name in ("kl", "hidden", "cosine"):  # no two are equal by chance
        assert len({float(values[name].detach()) for values in plain.values()}) == 3


@pytest.fixture
def counted_alignments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    calls: list[str] = []
    aligned = Tokenizations.align

    def counting(sides: Tokenizations, strategy: str) -> Any:
        calls.append(strategy)
        return aligned(sides, strategy)

    monkeypatch.setattr(Tokenizations, "align", counting)
    yield calls


def test_a_batch_is_aligned_once_for_each_kind(
    store: FeatureStore, counted_alignments: list[str]
) -> None:
    measured(store, "reduce,kl=match")
    assert sorted(counted_alignments) == ["match", "reduce"]
    counted_alignments.clear()
    measured(store, "span")
    assert counted_alignments == ["span"]


def test_masked_targets_ask_for_masks_where_logits_are_reduced(
    store: FeatureStore, tmp_path: Path
) -> None:
    words: Words = ("--store", store.path, "--vocab", "400", "--student", "16x2x2", "--view", "0")
    words += ("--batch-tokens", "512", "--device", "cpu", "--steps", "1")
    masked: Words = ("--loss", "mlm=1,kl=1,hidden=1", "--targets", "masked")
    printed = refused(main, *words, *masked, "--align", "kl=reduce", "--out", tmp_path / "a")
    says(printed, "--targets masked: under --align reduce")
    ok(main, *words, *masked, "--align", "kl=match,hidden=reduce", "--out", tmp_path / "b")


NEXT_LOSSES = {
    "next": 0.5,
    "next-inside": 0.5,
    "kl-next": 0.5,
    "reverse-kl": 0.2,
    "jsd:0.3": 0.2,
    "alm": 0.1,
}


@pytest.fixture(scope="module")
def stores(tiny_store: Stores) -> Stores:
    """Return a function of the tier of the logits."""
    words = {"attention": "none", "hidden": "none", "codec": "exact"}
    return lambda tier: tiny_store("gpt2", 30, logits=tier, **words)


@pytest.fixture(scope="module")
def next_store(stores: Stores) -> Path:
    return stores("head")


def distiller_of(batches: StudentBatches) -> Distiller:
    torch.manual_seed(0)
    return batches.distiller(random_llama(len(batches.tokenizer), layers=1))


def gradients(distiller: Distiller, batch: Any) -> tuple[dict[str, float], torch.Tensor]:
    distiller.zero_grad()
    found = distiller(batch)
    distiller.weighted(found).backward()
    every = [weight.grad.flatten() for weight in distiller.parameters() if weight.grad is not None]
    return {name: float(loss.detach()) for name, loss in found.items()}, torch.cat(every)


class LargestLogits(TorchDispatchMode):
    """Records the largest number of rows of any float tensor with a column for each piece."""

    def __init__(self, pieces: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces, self.most = pieces, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            number = isinstance(each, torch.Tensor) and each.is_floating_point()
            if number and self.pieces in each.shape:
                self.most = max(self.most, each.numel() // self.pieces)
        return found


@pytest.mark.parametrize(
    ("tier", "losses"), [("head", ("kl-next", "reverse-kl")), ("topk:599", ("kl-next",))]
)
def test_the_teachers_vocabulary_gives_ordinary_distillation(
    stores: Stores, tiny_teacher: Teachers, tier: str, losses: tuple[str, ...]
) -> None:
    """KL, reverse KL and the gradient equal dense logits', at all tokens after the first."""
    words: dict[str, Any] = {"student": "llama:32x1x4", "batch_tokens": 512}
    batches = StudentBatches(stores(tier), "teacher", loss=dict.fromkeys(losses, 1.0), **words)
    distiller, batch = distiller_of(batches), next(iter(batches))
    found, gradient = gradients(distiller, batch)
    teacher: Any = AutoModelForCausalLM.from_pretrained(tiny_teacher("gpt2"))
    ids, present = batch.inputs.ids, batch.inputs.present
    asked = present[:, 1:]
    with torch.no_grad():
        p = teacher(ids, attention_mask=present.long()).logits[:, :-1][asked].log_softmax(dim=1)
    distiller.zero_grad()
    own = distiller.student(ids, attention_mask=present.long()).logits[:, :-1][asked]
    q = own.log_softmax(dim=1)
    wanted = {
        "kl-next": (p.exp() * (p - q)).sum(dim=1).mean(),
        "reverse-kl": (q.exp() * (q - p.clamp(min=-20))).sum(dim=1).mean(),
    }
    torch.stack([wanted[name] for name in losses]).sum().backward()
    for name in losses:
        assert found[name] == pytest.approx(float(wanted[name].detach()), abs=1e-6), name
    dense = torch.cat([w.grad.flatten() for w in distiller.parameters() if w.grad is not None])
    assert float((gradient - dense).norm() / dense.norm()) < 1e-6


@pytest.mark.parametrize("vocab", ["teacher", "400"])
def test_slices_change_nothing_and_no_tensor_has_a_logit_of_every_token(
    next_store: Path, vocab: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: dict[str, Any] = {"student": "llama:32x1x4", "batch_tokens": 1024, "loss": NEXT_LOSSES}
    batches = StudentBatches(next_store, vocab, **words)
    distiller, batch = distiller_of(batches), max(batches, key=lambda each: each.tokens)
    size, most = len(batches.tokenizer), len(batch.labels)
    with LargestLogits(size) as at_once:
        losses, gradient = gradients(distiller, batch)
    monkeypatch.setitem(next_predictions.MOST_LOGITS, "cpu", 128 * size)
    with LargestLogits(size) as sliced:
        again, other = gradients(distiller, batch)
    assert 500 < at_once.most <= most and sliced.most == 128
    assert again == pytest.approx(losses, rel=1e-5) and set(losses) == set(NEXT_LOSSES)
    assert float((gradient - other).norm() / gradient.norm()) < 1e-5


@pytest.mark.slow
def test_processes_send_batches_without_the_head(next_store: Path) -> None:
    batches = StudentBatches(next_store, "teacher", student="llama:32x1x4", loss={"kl-next": 1.0})
    parts = batches.store, batches.collator, batches._blocks
    order = BatchOrder(*parts, 0, 0, {"batch_tokens": 256})
    with closing(prepared_batches(order, 1)) as made:
        targets = [next(made).aligned["bytes"].head for _ in range(3)]
    assert batches.collator.distributions.whole is not None
    assert all(
        each is not None and each.head is batches.collator.distributions.whole for each in targets
    )


SHARED_LOSS = {"kl-shared": 1.0}
SMALL: Words = ("--vocab", "400", "--student", "16x2x2", "--batch-tokens", "512", "--device", "cpu")


@pytest.fixture(scope="module")
def head(tiny_store: Stores) -> FeatureStore:
    return open_store(tiny_store("bert", 30, logits="head", hidden="none", attention="none"))


distilled = partial(distilling, loss=SHARED_LOSS, align="match")


@torch.no_grad()
@pytest.mark.parametrize("align", ["match", "reduce"])
def test_all_shared_pieces_of_the_head_are_compared(head: FeatureStore, align: str) -> None:
    distiller, collator, _ = distilled(head, align=align)
    raw = next(iter(head.stream(0, 0, 512, features=collator.features())))
    batch = collator(raw, 0, (0,)).to(torch.device("cpu"))
    wanted, match = batch.distillation, collator.vocabulary.match
    assert wanted is not None and wanted.shared is not None and wanted.logits is None
    read = distiller.encode(wanted.inputs or batch.inputs)
    logits = distiller.logits(read.last)
    weight, bias = head.head()
    shared = np.flatnonzero(match >= 0)
    assert len(np.unique(match[shared])) == len(shared) == wanted.shared.ids.shape[1]
    sides = Tokenizations(
        raw.texts, Tokens(raw.token_ids, raw.offsets, raw.special, raw.start),
        tokenize(collator.tokenizer, raw.texts), collator.vocabulary, collator.max_length,
    )  # fmt: skip
    _, alignment = sides.align(align)
    assert raw.logits is not None and wanted.logit_runs is not None
    rows = alignment.teacher[:, 0]  # each run has one token of the teacher
    teacher = torch.from_numpy(raw.logits.values[rows] @ weight[shared].T + bias[shared])
    member, begin = wanted.logit_runs.member, wanted.logit_runs.begin
    runs = list(torch.tensor_split(member, begin[1:]))
    assert max(map(len, runs)) == 1 if align == "match" else max(map(len, runs)) > 1
    pooled = torch.stack([logits[run].sum(0) for run in runs])[:, match[shared]]
    log_p, log_q = (teacher / 2).log_softmax(1), (pooled / 2).log_softmax(1)
    want = 4 * (log_p.exp() * (log_p - log_q)).sum(1).mean()
    torch.testing.assert_close(distiller(batch)["kl-shared"], want, rtol=1e-3, atol=1e-5)


def test_masked_and_other_tokens_are_all_tokens(store: FeatureStore) -> None:
    tokens, labelled = {}, set[int]()
    for targets in ("all", "masked", "unmasked"):
        _, collator, _ = distilled(store, targets=targets)
        raw = next(iter(store.stream(0, 0, 2048, features=collator.features())))
        batch = collator(raw, 0, (0,))
        assert batch.distillation is not None and batch.distillation.logit_runs is not None
        tokens[targets] = set(batch.distillation.logit_runs.member.tolist())
        labelled = set(batch.masked.tolist())
    assert tokens["masked"] and tokens["unmasked"]
    assert tokens["masked"] | tokens["unmasked"] == tokens["all"]
    assert tokens["masked"] <= labelled and not tokens["unmasked"] & labelled


def test_a_run_with_a_masked_token_is_not_unmasked(store: FeatureStore) -> None:
    """View 1 of a student that reads the teacher's tokens split: a masked word is masked whole."""
    runs = {}
    for targets in ("all", "unmasked"):
        _, collator, _ = distilled(store, targets=targets, align="reduce")
        raw = next(iter(store.stream(0, 0, 2048, view=1, features=collator.features())))
        taught = collator(raw, 1, (0,)).distillation
        assert taught is not None and taught.inputs is not None and taught.logit_runs is not None
        ids = taught.inputs.ids[taught.inputs.present]
        masked = set((ids == collator.student_tokenizer.mask_token_id).nonzero()[:, 0].tolist())
        runs[targets] = set(taught.logit_runs.member.tolist())
        assert masked & runs["all"] and not masked & runs.get("unmasked", set())
    assert runs["unmasked"] < runs["all"]


@pytest.mark.parametrize(("loss", "number"), [("kl-shared", 1), ("kl", 4)])
def test_a_logit_for_each_piece_is_prepared_for_few_batches(
    head: FeatureStore, loss: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, collator, _ = distilled(head, loss={loss: 1.0})
    seen = list[int]()
    monkeypatch.setattr(stream, "prefetched", lambda batches, ready: seen.append(ready))
    order = BatchOrder(head, collator, head.blocks(), 0, 0, {"batch_tokens": 512})
    prepared_batches(order, 0)
    assert seen == [number]


def test_the_card_shows_what_a_store_of_kept_logits_lacks(
    store: FeatureStore, head: FeatureStore, tmp_path: Path
) -> None:
    loss: Words = (*SMALL, "--steps", "2", "--loss", "mlm=1,kl-shared=1", "--align", "match")
    cards = {}
    for name, each in (("kept", store), ("head", head)):
        ok(main, "--store", each.path, *loss, "--out", tmp_path / name)
        cards[name] = (tmp_path / name / "README.md").read_text()
    assert each.features.logits is not None and store.features.logits is not None
    printed = f"among the {store.features.logits.size} best of a token"
    assert printed in cards["kept"] and "best of a token" not in cards["head"]
    line = refused(main, "--store", store.path, *loss[:-2], "--out", tmp_path / "c")
    says(line, "--align span: --loss kl-shared ", "--align kl-shared=match")


@pytest.fixture(scope="module")
def vector_store(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has vectors, and states of a masked view as well."""
    folder = tmp_path_factory.mktemp("vectors")
    corpus = write_corpus(folder / "corpus.txt", 30)
    model = mean_embedder(tiny_teacher("bert"), folder / "model")
    words: dict[str, Any] = {"head": "embedding", "logits": None, "hidden": "layer:4", "views": 2}
    return dumped(model, corpus, folder / "store.zarr", **words)


def test_a_stage_of_single_texts_has_none_to_compare(vector_store: Path) -> None:
    words: dict[str, Any] = {"student": "static:8", "vocab": "400", "loss": "similarity=1"}
    with open_store(vector_store) as opened:
        one, several = (
            TrainOptions(
                str(vector_store), batch_texts=count, stages=({"batch_texts": other},), **words
            )
            for count, other in ((4, 1), (1, 4))
        )
        with pytest.raises(UserError, match="stage 1: --batch-texts 1: --loss similarity compares"):
            checked_plan(one, opened)
        assert checked_plan(several, opened).stages[0].options.batch_texts == 4


@pytest.mark.parametrize(
    ("loss", "view", "passes"),
    [
        ("mlm=1,embedding=1", 0, 2),
        ("embedding=1,hidden=1", 1, 2),
        ("embedding=1", 1, 1),
        ("embedding=1,hidden=1", 0, 1),
    ],
)
@torch.no_grad()
def test_vectors_are_of_the_whole_text(
    vector_store: Path, loss: str, view: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = StudentBatches(
        vector_store, "400", student="16x1x2", loss=loss, view=view, batch_texts=8
    )
    distiller = batches.distiller(prepare(batches.options, batches.store)[0]).eval()
    read = list[Inputs]()

    def counted(student: Any, inputs: Inputs, *more: Any) -> Outputs:
        read.append(inputs)
        return shared_pass(student, inputs, *more)

    monkeypatch.setattr(distiller_module, "shared_pass", counted)
    batch = next(iter(batches))
    ((found, _),) = distiller.sides(batch).of("embedding")
    assert len(read) == passes
    raw = next(iter(batches.store.stream(0, 0, batch_texts=8, blocks=batches._blocks, features=())))
    plain = batches.tokenizer(raw.texts, padding=True, return_tensors="pt")
    inputs = Inputs(plain["input_ids"], plain["attention_mask"].bool())
    torch.testing.assert_close(found, distiller.vectors(inputs, distiller.encode(inputs)))
    # Masked tokens are still predicted from masked text.
    assert torch.equal(batch.inputs.ids, inputs.ids) == (view == 0 and "mlm" not in loss)


@torch.no_grad()
def test_a_validation_ranks_pairs_of_held_out_texts(
    vector_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all held-out texts, not within batches, from the vectors of the student."""
    batches = StudentBatches(
        vector_store, "400", student="static:16", loss="embedding=1", batch_texts=4, held_out=0.4
    )
    distiller = batches.distiller(prepare(batches.options, batches.store)[0]).eval()
    sides = [distiller.sides(batch).of("embedding")[0] for batch in batches.held_out()]
    assert len(sides) > 2
    own, teacher = (torch.cat(each).numpy() for each in zip(*sides, strict=True))

    def expected(count: int) -> float:
        pairs = np.triu_indices(count, 1)
        first = (own[:count], teacher[:count])
        unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in first]
        one, other = ((each @ each.T)[pairs] for each in unit)
        return float(spearmanr(one, other).statistic)

    assert len(own) < evaluate.LEAST_TEXTS and "valid_spearman" not in batches.validate(distiller)
    monkeypatch.setattr(evaluate, "LEAST_TEXTS", 3)
    found = batches.validate(distiller)
    assert found["valid_spearman"] == pytest.approx(expected(len(own)), abs=1e-3)
    monkeypatch.setattr(evaluate, "MOST_TEXTS", 5)
    assert batches.validate(distiller)["valid_spearman"] == pytest.approx(expected(5), abs=1e-3)
    monkeypatch.setattr(evaluate, "MOST_TEXTS", 2)  # one pair has no order
    assert "valid_spearman" not in batches.validate(distiller)


@torch.no_grad()
def test_a_batch_of_one_text_has_no_pairs_to_validate(vector_store: Path) -> None:
    def validated(**words: Any) -> tuple[dict[str, float], list[int], float]:
        words |= {"student": "static:8", "loss": "embedding=1,similarity=10", "held_out": 0.1}
        batches = StudentBatches(vector_store, "400", **words)
        distiller = batches.distiller(prepare(batches.options, batches.store)[0]).eval()
        held_out = list(batches.held_out())
        sizes = [len(batch.inputs.ids) for batch in held_out]
        return batches.validate(distiller), sizes, float(distiller(held_out[0])["similarity"])

    figures, sizes, first = validated(batch_texts=4)
    assert sizes == [4, 1]
    assert figures["valid_similarity"] == pytest.approx(first)
    figures, sizes, _ = validated(batch_tokens=1)
    assert set(sizes) == {1}
    assert "valid_similarity" not in figures
    assert figures["valid_loss"] == figures["valid_embedding"]


def test_a_training_without_pairs_is_refused(vector_store: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"student": "static:8", "vocab": "400", "loss": "similarity=1"}
    options = TrainOptions(
        str(vector_store), steps=1, out=tmp_path / "student", batch_tokens=1, **words
    )
    problem = "--loss similarity: compares the texts of a batch, and there is only one in each"
    with pytest.raises(UserError, match=f"{problem} batch of .*; raise --batch-tokens"):
        run(options)
    assert not (tmp_path / "student").exists()
