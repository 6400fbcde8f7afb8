"""A part refuses values that it cannot store, and names the sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from teachonce.store import Features, LogitsSpec, PartWriter, Sequences, StoreError, TaskSpec
from tests.making.stores import SMALL, calibration_of, features_of, make_part


def put_one(features: Features = SMALL) -> tuple[Any, Any]:
    part, calibration = make_part(features, 0), calibration_of(features)
    return PartWriter(features, calibration, part.token_counts, 4, "x.zarr: part 4"), part


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.nan, r"part 4, sequence 2, token 1: view0/hidden/mean is NaN or infinite"),
        (np.inf, r"sequence 2, token 1: .* NaN or infinite"),
        (3e38, r"sequence 2, token 1: .* is too large: its squares sum to infinity"),
        (1e17, r"sequence 2, token 1: .* deviations away"),
    ],
)
def test_unusable_states_name_the_sequence(bad: float, message: str) -> None:
    writer, part = put_one()
    rows = np.arange(len(part.token_ids))
    states = part.hidden[0, "mean"].copy()
    states[writer.token_start[2] + 1, 5] = bad
    with pytest.raises(StoreError, match=message):
        writer.put_hidden(0, "mean", rows, states)


def test_rows_are_put_exactly_once() -> None:
    writer, part = put_one()
    states = part.hidden[0, "mean"]
    writer.put_hidden(0, "mean", [3, 1], states[[3, 1]])
    for rows in ([1], [4, 4]):
        with pytest.raises(StoreError, match="written twice"):
            writer.put_hidden(0, "mean", rows, states[rows])
    with pytest.raises(StoreError, match="must lie in 0"):
        writer.put_hidden(0, "mean", [10**6], states[:1])
    with pytest.raises(StoreError, match=r"has shape \[2, 37\], expected \[1, 37\]"):
        writer.put_hidden(0, "mean", [9], states[:2])
    with pytest.raises(StoreError, match="no view0/hidden/max; it has"):
        writer.put_hidden(0, "max", [9], states[:1])
    with pytest.raises(StoreError, match="not written: view0/hidden/mean, view0/logits, sequences"):
        writer.take()


def test_unusable_logits_are_refused() -> None:
    writer, part = put_one()
    put = {name: array[:1].copy() for name, array in part.logits[0].items()}
    for key, value, message in (
        ("ids", 1000, "outside the vocabulary"),
        ("ids", -1, "outside the vocabulary"),
        ("logprobs", 0.5, "not a log-probability"),
        ("rest", np.nan, "not a log-probability"),
        ("log_partition", np.inf, "NaN or infinite"),
        ("log_partition", 1e38, "is too large: its squares sum to infinity in float32"),
    ):
        fresh, bad = put_one()[0], {name: array.copy() for name, array in put.items()}
        bad[key].reshape(-1)[0] = value
        with pytest.raises(StoreError, match=f"sequence 0, token 0: .*{message}"):
            fresh.put_logits(0, [0], bad)
    names = "ids, logprobs, rest, log_partition"
    for other in ({"values": np.ones((1, 4)), "log_partition": [1]}, {**put, "observed": [-1.0]}):
        with pytest.raises(StoreError, match=f"has {', '.join(other)}, expected {names}$"):
            put_one()[0].put_logits(0, [0], other)
    plain = PartWriter(Features(hidden=("mean",), width=37), calibration_of(SMALL), [3])
    with pytest.raises(StoreError, match="no view0/logits; it has view0/hidden/mean"):
        plain.put_logits(0, [0], put)


def test_the_log_probability_of_the_token_that_follows() -> None:
    features = features_of(tier="next-sample", views=1)
    part = make_part(features, 0)
    logits = part.logits[0]
    writer = PartWriter(features, calibration_of(features), part.token_counts)
    rows = np.arange(len(part.token_ids))
    with pytest.raises(StoreError, match="token 0: view0/logits/observed is not a log-prob"):
        writer.put_logits(0, rows, logits | {"observed": np.full(len(rows), 0.5)})
    writer = PartWriter(features, calibration_of(features), part.token_counts)
    # Zeros also where no next token exists.
    writer.put_logits(0, rows, logits | {"observed": np.zeros(len(rows))})
    stored = writer._arrays["view0/logits/observed"]
    assert (stored[writer.token_start[1:] - 1] == 65535).all() and (stored == 0).sum() == len(
        rows
    ) - len(part.texts)


GOOD: dict[str, Any] = {
    "texts": ["ab"], "document": [0], "document_begin": [0], "hard_cut": [False],
    "token_ids": [2, 50, 3], "offsets": [(0, 0), (0, 2), (0, 0)], "special": [1, 0, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ["\ud800x"]}, "sequence 0: the text has half of a surrogate pair"),
        ({"token_ids": [2, 5000, 3]}, "sequence 0, token 1: token id outside the vocabulary"),
        ({"offsets": [(0, 0), (0, 9), (0, 0)]}, "token 1: offsets outside the text"),
        ({"offsets": [(0, 0), (0, 2), (1, 2)]}, "token 2: special token with offsets"),
        ({"document": [1, 2]}, r"document has shape \[2\], expected \[1\]"),
    ],
)
def test_bad_sequences_are_refused(change: dict[str, Any], message: str) -> None:
    features = Features(max_length=9, vocabulary=100)
    writer = PartWriter(features, {}, [3])
    writer.set_sequences(Sequences(**GOOD))
    with pytest.raises(StoreError, match=message):
        writer.set_sequences(Sequences(**(GOOD | change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": [3]}, "context must be 1 numbers of tokens, each below the length"),
        ({"context": [-1]}, "context must be 1 numbers"),
        ({"learn": [True]}, r"learn has shape \[1\], expected \[3\]"),
        ({"messages": [[[0, 2, 7]]]}, "messages must be ascending .* the role 0, 1, .*, 6, 255"),
        ({"messages": [[[2, 1, 0]]]}, "messages must be ascending spans begin <= end"),
        ({"messages": [[], []]}, "messages of 2 sequences, expected 1"),
    ],
)
def test_bad_marks_of_tokens_are_refused(change: dict[str, Any], message: str) -> None:
    features = Features(max_length=9, vocabulary=100, context=True, learn=True, messages=True)
    stored = PartWriter(features, {}, [3]).set_sequences(Sequences(**GOOD))
    assert stored["sequence/context"].tolist() == [0] and stored["token/learn"].all()
    with pytest.raises(StoreError, match=message):
        PartWriter(features, {}, [3]).set_sequences(Sequences(**(GOOD | change)))
    plain = PartWriter(Features(max_length=9, vocabulary=100), {}, [3])
    with pytest.raises(StoreError, match="this store has no"):
        plain.set_sequences(Sequences(**(GOOD | change)))
    with pytest.raises(StoreError, match="learn must be true or absent"):
        Features.from_json(features.to_json() | {"learn": 1})


def test_unusable_labels_and_logits_of_a_task_are_refused() -> None:
    features = features_of(tier="classification")
    part = make_part(features, 0)
    arguments = (part.texts, part.document, part.document, part.document > 9)
    tokens = (part.token_ids, part.offsets, part.special)
    for kind, gold, message in (
        ("classification", [4] * 12, r"sequence 0: gold label 4, expected -1 \(none\) or 0..3"),
        ("classification", [0] * 11, r"shape \[11\], expected \[12\]"),
        ("tagging", part.special.astype(int), "sequence 0: gold label 1, .* -1 for special tokens"),
        (None, [0] * 12, "has no task"),
    ):
        writer = PartWriter(features_of(tier=kind), calibration_of(features), part.token_counts)
        with pytest.raises(StoreError, match=message):
            writer.set_sequences(Sequences(*arguments, *tokens, gold))
        if kind is None:
            with pytest.raises(StoreError, match="has no task"):
                writer.put_task(0, [0], np.zeros((1, 4)))
        elif kind == "classification":
            writer.set_sequences(Sequences(*arguments, *tokens))  # without gold: -1
            with pytest.raises(StoreError, match="sequence 2, token 0: view1/classes is NaN"):
                writer.put_task(1, [2], np.full((1, 4), np.nan))
            with pytest.raises(StoreError, match=r"shape \[1, 3\], expected \[1, 4\]"):
                writer.put_task(0, [2], np.zeros((1, 3)))


def test_features_of_a_task_in_json() -> None:
    features = features_of(tier="tagging")
    assert Features.from_json(features.to_json()) == features
    plain = features_of().to_json()
    with pytest.raises(StoreError, match="lack codec"):
        Features.from_json({key: value for key, value in plain.items() if key != "codec"})
    assert "task" not in plain and set(plain["logits"]) == {"tier", "size"}
    causal = Features(vocabulary=9, logits=LogitsSpec("topk", 3, next_token=True))
    assert causal.to_json()["logits"] == {"tier": "topk", "size": 3, "next_token": True}
    assert Features.from_json(causal.to_json()) == causal
    followed = dataclasses.replace(causal, logits=LogitsSpec("topk", 3, True, observed=True))
    assert Features.from_json(followed.to_json()) == followed != causal
    for wrong in (("topk", 3, False, True), ("head", 3, True, True)):
        with pytest.raises(StoreError, match="observed belongs to"):
            LogitsSpec(*wrong)
    capped = LogitsSpec("head", 3, True, cap=30.0)
    assert LogitsSpec.from_json(capped.to_json()) == capped
    assert np.allclose(capped.capped(np.array([3.0, -300.0])), [2.9900, -30], atol=1e-4)
    for cap in (0, -1.0, np.inf, np.nan, True, "30", 10**400, 1e300, 1e-300):
        with pytest.raises(StoreError, match="cap of logits must be a number"):
            LogitsSpec.from_json({"tier": "head", "size": 3, "cap": cap})
    with pytest.raises(StoreError, match="cap of logits .* got 3.0 with tier topk"):
        LogitsSpec("topk", 3, True, cap=3.0)
    with pytest.raises(StoreError, match="observed must be true or absent"):
        LogitsSpec.from_json({"tier": "topk", "size": 3, "next_token": True, "observed": 1})
    good: dict[str, Any] = {"kind": "tagging", "labels": ["a"]}
    later = TaskSpec.from_json(good | {"later_label": "a"})
    assert later.later_number == 0 and later.to_json() == good | {"later_label": "a"}
    assert TaskSpec.from_json(good).to_json() == good
    bad_tasks: tuple[Any, ...] = (
        None, [], {}, {"kind": "tagging"}, good | {"kind": "parsing"}, good | {"kind": {}},
        good | {"labels": []}, good | {"labels": "ab"}, good | {"labels": ["a", "a"]},
        good | {"labels": ["a", 1]}, good | {"labels": {"a": 1}},
        good | {"labels": [*map(str, range(2**16 - 1)), "0"]},  # refused quickly
        good | {"later_label": "b"}, good | {"later_label": 0},
        good | {"kind": "classification", "later_label": "a"},
    )  # fmt: skip
    for bad in bad_tasks:
        with pytest.raises(StoreError, match="^features: "):
            Features.from_json(plain | {"task": bad})
    for more in ({"next_token": False}, {"next_token": 1}, {"more": 1}):
        with pytest.raises(StoreError, match="^features: "):
            Features.from_json(plain | {"logits": {"tier": "topk", "size": 3} | more})


def test_bad_counts_masks_and_features() -> None:
    features = Features(max_length=9, vocabulary=100, views=2)
    for counts, message in (([], "at least one"), ([3, 10], "sequence 1: 10"), ([0], "0 tokens")):
        with pytest.raises(StoreError, match=message):
            PartWriter(features, {}, counts)
    writer = PartWriter(features, {}, [3])
    offsets = [(0, 1), (1, 2), (2, 4)]
    writer.set_sequences(Sequences(["abcd"], [0], [0], [0], [1, 2, 3], offsets, [0, 0, 0]))
    for spans in (
        [(2, 3, 0), (0, 1, 0)],
        [(0, 2, 0), (1, 3, 0)],
        [(0, 9, 0)],
        [(0, 1, 3)],
        [(1, 1, 0)],
    ):
        with pytest.raises(StoreError, match="sequence 0: masked words must be ascending"):
            writer.set_masks(1, [spans])
    with pytest.raises(StoreError, match="masks of view 1"):
        writer.take()
    writer.set_masks(1, [[(0, 2, 0)]])
    assert writer.take()[0].spans == (0, 1)
    with pytest.raises(StoreError, match="published twice"):
        writer.take()
    for bad in (
        {"hidden": ("../x",)}, {"hidden": ("a", "a")}, {"codec": "zip"}, {"views": 0},
        {"width": True}, {"vocabulary": 2, "logits": LogitsSpec("topk", 3)}, {"attention": ("/",)},
    ):  # fmt: skip
        with pytest.raises(StoreError, match="features|name in a store"):
            Features(**bad)
    with pytest.raises(StoreError, match="tier must be one of"):
        LogitsSpec("all", 3)


def test_numbers_beyond_a_codec_are_reported_as_such() -> None:
    features = features_of(tier="head")
    writer, part = put_one(features)
    put = {name: array[:1].copy() for name, array in part.logits[0].items()}
    for value, message in (
        (7e4, "over 6.55e.04, the largest number .*--codec exact"),
        (np.inf, "infinite"),
    ):
        put["values"][:] = value
        writer, _ = put_one(features)
        with pytest.raises(StoreError, match=message):
            writer.put_logits(0, [0], put)
