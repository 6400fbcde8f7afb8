"""The validation results of a student equal plain transformers over the held-out texts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.nn.functional import cross_entropy

from teachonce.store import FeatureStore
from teachonce.store.format.features import OutputKind
from teachonce.student_train.data.batch import Distillation, Inputs, Runs, StudentBatch
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.data.task_targets import TaskTargets
from teachonce.student_train.settings.options import BatchPlan, TrainOptions
from teachonce.student_train.train.evaluate import (
    StateSpread,
    _Sums,
    check_validation,
    evaluate,
    evaluate_batches,
    warning_of_constant_states,
)
from teachonce.student_train.train.student_training import train
from teachonce.support.errors import UserError
from tests.student_train.support import distilling, first_batch, prepared, validated

ONES = torch.ones(3, 2)
LOSS = {"mlm": 2.0, "hidden": 3.0}


def batch_of(task: TaskTargets) -> StudentBatch:
    """Make a batch with the targets of a task alone."""
    none = torch.zeros(0, dtype=torch.int64)
    inputs = Inputs(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1, dtype=torch.bool))
    targets = Distillation(
        None, Runs(none, none), None, logits=None, shared=None, map_pooling=None, task=task,
        encoded=None,
    )  # fmt: skip
    return StudentBatch(inputs, none, none, 4, {"span": targets})


def test_losses_are_means_over_tokens_characters_and_batches(store: FeatureStore) -> None:
    distiller, collator, options = distilling(store, loss=LOSS, batch_tokens=256, held_out=0.4)
    _, held_out = split_blocks(store, options.held_out)
    found = validated(distiller, store, collator, options)
    nats, tokens, characters, hidden = 0.0, 0, 0, list[float]()
    states = list[torch.Tensor]()
    batches = store.stream(
        0, 0, 256, view=1, blocks=held_out, features=collator.features(), shuffle=False
    )
    for number, raw in enumerate(batches):
        batch = collator(raw, 1, (0, 0, number, 1)).to(torch.device("cpu"))
        assert not batch.characters  # counted for validations alone
        with torch.no_grad():
            logits = distiller.student(
                batch.inputs.ids, attention_mask=batch.inputs.present.long()
            ).logits
            hidden.append(distiller(batch)["hidden"].item())
            read = distiller.encode(batch.inputs).states
            assert batch.distillation is not None
            states.append(batch.distillation.runs.pool(torch.stack(read[1:]).mean(0), "mean"))
        masked = logits[batch.inputs.present][batch.masked]
        nats += cross_entropy(masked, batch.labels, reduction="sum").item()
        tokens += len(batch.labels)
        read = collator.student_tokenizer(raw.texts, return_offsets_mapping=True, truncation=True)
        begin, end = np.concatenate([np.array(each) for each in read["offset_mapping"]]).T
        characters += int((end - begin)[batch.masked.numpy()].sum())
    assert len(hidden) > 2 and characters > tokens > 20
    every = torch.cat(states).numpy().astype(np.float64)
    varying = ((every - every.mean(0)) ** 2).sum() / (every**2).sum()
    assert found == pytest.approx(
        {
            "valid_mlm": nats / tokens,
            "valid_mlm_per_character": nats / characters,
            "valid_hidden": np.mean(hidden),
            "valid_loss": 2 * nats / tokens + 3 * np.mean(hidden),
            "states_varying": varying,
        },
        rel=1e-4,
    )
    plan = BatchPlan(options, distiller.terms)
    assert evaluate(distiller, store, collator, held_out[:0], plan) == {}


def test_a_loss_of_masked_tokens_is_absent_where_none_is_masked(store: FeatureStore) -> None:
    changes: dict[str, Any] = {"view": 0, "mask_prob": 1e-9, "held_out": 0.1}
    distiller, collator, options = distilling(store, loss=LOSS, **changes)
    found = validated(distiller, store, collator, options)
    assert found.keys() == {"valid_hidden", "valid_loss", "states_varying"}
    assert found["valid_loss"] == 3 * found["valid_hidden"] > 0
    # A sum of no losses is no loss of 0.
    distiller, collator, options = distilling(store, loss={"mlm": 1.0}, **changes)
    assert validated(distiller, store, collator, options).keys() == {"states_varying"}


def test_an_interrupted_validation_leaves_the_student_in_training(store: FeatureStore) -> None:
    distiller, collator, options = distilling(store, loss=LOSS)
    distiller.train()

    def interrupted() -> Iterator[StudentBatch]:
        yield first_batch(store, collator)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_batches(distiller, interrupted(), BatchPlan(options, distiller.terms))
    assert distiller.training


def test_nearly_constant_states_are_reported() -> None:
    spread = StateSpread()
    assert spread.figures() == {}
    spread.add({"hidden mean": torch.tensor([[1.0, 0.0], [3.0, 0.0]]), "cosine layer1": ONES})
    spread.add({"hidden mean": torch.tensor([[2.0, 0.0]]), "cosine layer1": ONES})
    assert spread.figures() == {"states_varying": 0.0}  # the least: of the cosine's
    of_one = StateSpread()
    of_one.add({"hidden mean": torch.tensor([[1.0, 0.0], [3.0, 0.0]])})
    assert of_one.figures()["states_varying"] == pytest.approx(2 * 1 / (1 + 9))
    plain = TrainOptions("a.zarr")
    assert warning_of_constant_states(of_one.figures(), plain) == ""
    assert warning_of_constant_states({}, plain) == ""
    line = warning_of_constant_states({"states_varying": 0.006}, plain)
    assert line.startswith("states    0.60% of ")
    assert line.endswith("of the teacher; give a smaller weight of hidden")
    of_last = TrainOptions("a.zarr", loss={"mlm": 1.0})  # compares no states
    assert warning_of_constant_states({"states_varying": 0.006}, of_last) == ""
    line = warning_of_constant_states({"states_varying": 0.001}, of_last)
    assert line.endswith("of the teacher; give a smaller --lr")
    other = TrainOptions("a.zarr", projection="frozen", projection_start="he")
    line = warning_of_constant_states({"states_varying": 0.006}, other)
    assert "give --projection-start pytorch or --projection trainable or a smaller" in line


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [("hidden", "a smaller weight"), ("mlm", "a smaller --lr"), ("kl", "a smaller --lr")],
)
def test_a_training_says_at_each_validation_that_its_states_are_constant(
    loss: str, remedy: str, store: FeatureStore
) -> None:
    changes: dict[str, Any] = {"steps": 2, "eval_every": 1, "held_out": 0.4}
    model, collator, options = prepared(store, student="bert:16x2x2", loss={loss: 1.0}, **changes)
    for name, weight in model.named_parameters():
        if "LayerNorm" in name:  # states are the bias of the last norm
            weight.data.fill_(1.0 if name.endswith("bias") else 0.0)
    said: list[str] = []
    found = train(store, model, collator, options, say=said.append).validation
    assert found["states_varying"] < 0.02
    assert sum(line.startswith("states    ") and remedy in line for line in said) == 2


@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_a_validation_that_is_not_finite_ends_the_training(value: float) -> None:
    check_validation({"valid_kl": 0.5, "valid_loss": 1.0}, 7)
    figures = rf"\(valid_logit {value}, valid_loss {value}\)"
    words = rf"step 7: the held-out loss .* {figures}: .* too large"
    with pytest.raises(UserError, match=words):
        check_validation({"valid_kl": 0.5, "valid_logit": value, "valid_loss": value}, 7)


def held(value: Any) -> int:
    """Return the bytes of all tensors in an object."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if hasattr(value, "__dataclass_fields__"):
        value = list(vars(value).values())
    return sum(map(held, value)) if isinstance(value, list | tuple) else 0


@pytest.mark.parametrize(
    ("kind", "bytes_of_a_token"),
    [("one label", 3 * 8), ("several labels", 2 * 20 + 8), ("numbers", 2 * 80 + 8)],
)
def test_a_validation_holds_the_answers_to_a_task(kind: OutputKind, bytes_of_a_token: int) -> None:
    """Not the logits, which a tagger has for each held-out token and label."""
    own = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    teacher = own[[2, 3, 2, 3]]  # two of four tokens have another row
    gold = own.argmax(dim=1)
    gold[0] += 1
    sums, device = _Sums(()), torch.device("cpu")
    for rows in (slice(0, 3), slice(3, 4)):
        task = TaskTargets(None, teacher[rows], gold[rows], kind)
        sums.add(batch_of(task).to(device), {}, own[rows])
    assert held(sums.answers) == 4 * bytes_of_a_token
    found = sums.figures()
    if kind == "one label":
        assert (found["valid_accuracy"], found["valid_agreement"]) == (0.75, 0.5)
    elif kind == "several labels":
        assert found["valid_agreement"] == float(((own > 0) == (teacher > 0)).float().mean())
    else:
        ranks = (spearmanr(own[:, n], teacher[:, n]).statistic for n in range(20))
        assert found["valid_spearman"] == pytest.approx(sum(ranks) / 20)
