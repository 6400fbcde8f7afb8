"""StudentBatches: the batches of student-train, for a custom loop."""

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

import teachonce
from teachonce.align import Tokenizations, Tokens
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.data.stream import BatchOrder
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.train.student_training import train
from teachonce.support.errors import UserError
from tests.making.models import Stores
from tests.student_train.support import prepared

CPU = torch.device("cpu")
LOSSES = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0, "attention": 1.0}


def flat(batch: StudentBatch) -> dict[str, Any]:
    """Return all tensors of a batch for comparison."""
    assert batch.distillation is not None
    taught = batch.distillation
    assert taught.logits is not None
    return {
        **vars(batch.inputs), "masked": batch.masked, "labels": batch.labels,
        **taught.normalised, **taught.decoded["maps"], "logprobs": taught.logits.logprobs,
        "members": taught.runs.member,
    }  # fmt: skip


def assert_same(found: list[StudentBatch], wanted: list[StudentBatch]) -> None:
    assert len(found) == len(wanted) > 3
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(flat(one), flat(two), rtol=0, atol=0)


@pytest.fixture(scope="module")
def batches(store: FeatureStore) -> StudentBatches:
    return StudentBatches(store, "400", loss=LOSSES, batch_tokens=512, held_out=0.1, seed=3)


def test_they_equal_the_batches_of_student_train(
    store: FeatureStore, batches: StudentBatches
) -> None:
    collator = prepared(store, student="16x1x2", loss=LOSSES, seed=3)[1]
    blocks, _ = split_blocks(store, 0.1)
    endless = BatchOrder(store, collator, blocks, 3, None, {"batch_tokens": 512}).endless()
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        found = list(batches)
        assert len(found) == len(batches)
        assert_same(found, [next(endless) for _ in found])
    batches.set_epoch(0)
    assert_same(list(StudentBatches(store.path, batches.tokenizer, loss=LOSSES, batch_tokens=512,
                                    held_out=0.1, seed=3)), list(batches))  # fmt: skip


def test_workers_give_the_same_batches_and_see_the_epoch(batches: StudentBatches) -> None:
    # Not forked: workers forked after an MKL product sometimes hang in their own products.
    processes: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "forkserver"}
    loader = DataLoader(batches, batch_size=None, persistent_workers=True, **processes)
    for epoch in (1, 2):
        batches.set_epoch(epoch)
        assert len(loader) == len(batches)
        assert_same(list(loader), list(batches))
    batches.set_epoch(0)


def test_a_loader_that_would_combine_batches_is_refused(batches: StudentBatches) -> None:
    for workers in ({}, {"num_workers": 1, "multiprocessing_context": "forkserver"}):
        loader: Any = DataLoader(batches, **workers)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"call DataLoader\(batches, batch_size=None\)"):
            next(iter(loader))


def test_a_batch_is_moved_to_a_device_by_name(batches: StudentBatches) -> None:
    first = next(iter(batches))
    assert_same([first.to("cpu")] * 4, [first.to(CPU)] * 4)


def test_ranks_share_out_the_batches(store: FeatureStore, batches: StudentBatches) -> None:
    settings: dict[str, Any] = {"loss": LOSSES, "batch_tokens": 512, "held_out": 0.1, "seed": 3}
    every = list(batches)
    for rank in (0, 1, 2):
        mine = StudentBatches(store, 400, rank=rank, world_size=3, **settings)
        count = len(every) // 3
        assert len(mine) == count and f"rank {rank} of 3" in repr(mine)
        for one, two in zip(mine, every[rank : 3 * count : 3], strict=True):
            torch.testing.assert_close(flat(one), flat(two), rtol=0, atol=0)


def test_the_place_matches_torchrun(store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = StudentBatches(store, "400", loss={"mlm": 1.0})
    assert (found.rank, found.world_size) == (1, 2)


def test_the_distiller_gives_both_sides_of_each_loss(batches: StudentBatches) -> None:
    student, _, _ = prepare(batches.options, batches.store)
    distiller = batches.distiller(student).eval()
    batch = next(iter(batches))
    with torch.no_grad():
        losses, sides = distiller(batch), distiller.sides(batch)
        assert list(losses) == ["mlm", "hidden", "attention", "kl"]
        formulas: dict[str, Callable[..., Tensor]] = {
            "mlm": teachonce.losses.logits.mlm, "hidden": teachonce.losses.states.hidden,
            "kl": teachonce.losses.logits.kl, "attention": teachonce.losses.maps.attention,
        }  # fmt: skip
        for name, formula in formulas.items():
            (arguments,) = sides.of(name)
            torch.testing.assert_close(formula(*arguments), losses[name], rtol=0, atol=0)
        weighted = sum(losses.values())
        torch.testing.assert_close(distiller.weighted(losses), weighted)
    with pytest.raises(
        ValueError, match="no loss 'hard' is trained; expected one of mlm, hidden, attention, kl"
    ):
        sides.of("hard")
    assert batches.validate(distiller)["valid_loss"] > 0
    assert sum(batch.tokens for batch in batches.held_out()) > 0
    encoded = StudentBatches(batches.store, batches.tokenizer, loss=LOSSES, device="cpu")
    raw = next(encoded._batches(encoded._order))
    with pytest.raises(ValueError, match=r"the batch is encoded: call batch.to\(device\) first"):
        distiller(raw)


class Own(nn.Module):
    """A student without layers."""

    width, layers = 8, 1

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(400, 8)
        self.projection = nn.Linear(8, 3)  # used by the model itself

    def states(self, ids: Tensor, present: Tensor) -> list[Tensor]:
        found: Tensor = self.table(ids)
        return [found, found * 2]


def test_a_module_of_ones_own(batches: StudentBatches) -> None:
    batch = next(iter(batches))
    states = StudentBatches(batches.store, batches.tokenizer, loss={"hidden": 1.0})
    distiller = states.distiller(Own())
    assert distiller(batch)["hidden"].requires_grad
    own, teacher = distiller.sides(batch).of("hidden")[0]
    assert own.shape == teacher.shape == (len(batch.aligned["span"].runs.begin), 32)
    with pytest.raises(
        UserError, match=r"Own: has no method logits\(states\).*choose losses on hidden st"
    ):
        StudentBatches(batches.store, batches.tokenizer, loss={"mlm": 1.0}).distiller(Own())(batch)
    with pytest.raises(UserError, match="Own: your own module has no attention maps"):
        batches.distiller(Own())(batch)
    with pytest.raises(UserError, match="Linear: cannot be a student: .* see OwnStudent"):
        states.distiller(nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"groups2\.1: .* 3 layers cannot be divided into 2 groups"):
        distiller.counterpart([own, own, own], "groups2.1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 1.0}, "no setting 'lr'; expected one of align, batch_texts, batch_tokens"),
        ({"losss": "mlm=1"}, "no setting 'losss'; did you mean loss\\? expected one of align"),
        ({"view": 7}, "--view 7: .* has views 0 to 1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2: expected both or neither"),
        ({"rank": 1}, "rank 1 of world_size None"),
        ({"device": "gpu"}, "--device gpu: expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_is_refused(
    store: FeatureStore, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        StudentBatches(store, "400", **settings)


def test_a_wrong_object_is_refused_with_the_right_one(batches: StudentBatches) -> None:
    options, path, wrong = batches.options, cast(Any, batches.store.path), cast(Any, batches)
    student, collator, _ = prepare(options, batches.store)
    for call, printed in (
        (lambda: prepare(options, path), rf"prepare: .* is a path; give open_store\('{path}'\)"),
        (lambda: train(path, student, collator, options), "train: .* is a path; give open_store"),
        (lambda: prepare(wrong, batches.store), "prepare: expected TrainOptions, got StudentBat"),
        (
            lambda: batches.validate(cast(Any, student)),
            r"got .*; call validate\(batches.dist",
        ),
    ):
        with pytest.raises(TypeError, match=printed):
            call()


@pytest.mark.parametrize("align", ["span", "match", "reduce"])
def test_a_long_text_is_truncated_at_the_side_of_its_tokenizer(
    store: FeatureStore, batches: StudentBatches, align: str
) -> None:
    tokenizer = copy.deepcopy(batches.tokenizer)
    tokenizer.truncation_side = "left"
    words: dict[str, Any] = {"loss": "hidden=1", "align": align, "max_length": 10, "view": 0}
    if align == "reduce":
        with pytest.raises(UserError, match="--align reduce: truncates the end .* --align span"):
            StudentBatches(store, tokenizer, **words)
        return
    collator = StudentBatches(store, tokenizer, **words).collator
    raw = next(iter(store.stream(0, 0, 512, features=collator.features())))
    native, taught = collator._native(raw), collator(raw, 0, (0,)).distillation
    last = native.start[1:] - 2  # a special token follows
    assert native.offsets[last, 1].tolist() == [len(text) for text in raw.texts]
    # Of each text, the last tokens are compared.
    assert taught is not None and len(taught.runs.begin) > len(last)
    assert torch.isin(torch.from_numpy(last), taught.runs.member).all()


def test_states_of_a_decoder_are_compared_at_the_last_token_of_each_run(
    tiny_store: Stores,
) -> None:
    """There it has read the whole run. `span` pairs states as well."""
    words = {"attention": "none", "hidden": "mean", "codec": "exact"}
    store = open_store(tiny_store("gpt2", 20, **words))
    losses = {"next": 1.0, "hidden-raw": 1.0, "cosine": 1.0}
    for align in ("bytes", "span"):
        collator = StudentBatches(
            store, "300", student="llama:32x1x4", loss=losses,
            align=f"hidden-raw={align},cosine={align}",
        ).collator  # fmt: skip
        raw = next(iter(store.stream(0, 0, 512, features=collator.features())))
        teacher = Tokens(raw.token_ids, raw.offsets, raw.special, raw.start)
        student = tokenize(collator.tokenizer, raw.texts)
        sides = Tokenizations(raw.texts, teacher, student, collator.vocabulary, 512)
        _, runs = sides.align(align)
        assert (np.diff(runs.teacher) > 1).any() and (np.diff(runs.student) > 1).any()
        taught = collator(raw, 0, (0,)).to(CPU).aligned[align]
        assert taught.runs.member.tolist() == (runs.student[:, 1] - 1).tolist()
        states = raw.hidden["mean"].states()[runs.teacher[:, 1] - 1]
        np.testing.assert_allclose(taught.decoded["raw"]["mean"].numpy(), states, rtol=1e-6)


def test_repr_describes_it(store: FeatureStore, batches: StudentBatches) -> None:
    message = f"<StudentBatches {store.path}: epoch 0 of {len(batches)} batches; 400 pieces; "
    assert repr(batches) == f"{message}mlm=1,kl=1,hidden=1,attention=1; span>"
    default = StudentBatches(open_store(store.path), "400")
    assert default.options.loss == {"mlm": 1.0, "hidden": 30.0}
    decoder = StudentBatches(store, "400", device="auto", student="llama:32x2x4", loss="next=1")
    assert decoder.options.loss == {"next": 1.0} and decoder.device.type in ("cpu", "cuda")
    with pytest.raises(ValueError, match="epoch: expected at least 0, got -1"):
        batches.set_epoch(-1)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        batches.set_epoch(1.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="vocab: expected a word .* got float"):
        StudentBatches(store, 4.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, r"room for 100 pieces, .* up to 400; .* vocab_size, or give the tok"),
        (
            {"max_position_embeddings": 16},
            "room for 16 tokens, .* max_position_emb.*set max_length",
        ),
    ],
)
def test_a_model_with_too_few_pieces_or_positions_is_refused(
    batches: StudentBatches, changes: dict[str, int], message: str
) -> None:
    sizes: dict[str, Any] = {"vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 8, **changes}
    config = BertConfig(**sizes)
    student = BertForMaskedLM(config)
    with pytest.raises(UserError, match=f"BertForMaskedLM: has {message}"):
        batches.distiller(student)
    with pytest.raises(UserError, match=f"BertForMaskedLM: has {message}"):
        train(batches.store, student, batches.collator, batches.options)
