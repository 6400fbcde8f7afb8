"""A sample of a store is run through the teacher again: sound stores pass, wrong stores fail."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForMaskedLM

from teachonce.feature_store.cli import main
from teachonce.store import UserError, open_store
from teachonce.store.tools.copy import convert
from teachonce.store.tools.merge import merge
from teachonce.support.arrays import Array
from teachonce.teacher_dump.comparison import rerun
from teachonce.teacher_dump.comparison.rerun import LiveReport
from teachonce.teacher_dump.job import part_writing
from teachonce.teacher_dump.teacher import loading, teacher
from teachonce.teacher_dump.teacher.forward import forward
from teachonce.teacher_dump.teacher.heads import sampled_logits
from teachonce.teacher_dump.teacher.layer_groups import layer_groups
from teachonce.teacher_dump.windows import sequences
from teachonce.teacher_dump.windows.cutting import iter_windows
from teachonce.teacher_dump.windows.masked_views import mask_spans
from teachonce.teacher_dump.windows.window import Window
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers
from tests.making.sentence_folders import mean_embedder
from tests.store.dying import unsealed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("live") / "corpus.txt", 12)


def report(store: Path, model: Path, sample: int = 999, **options: Any) -> LiveReport:
    return rerun.check(open_store(store, **options), str(model), sample, 0, "cpu")


SOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("bert", {"codec": "exact", "views": 2, "hidden": "mean,layer:0,groups:2"}),
    "default": ("roberta", {"views": 3, "attention": "mean,groups:2", "batch_tokens": 128}),
    "rare": ("bert", {"views": 2, "mask_words": "rare", "logits": "none", "attention": "none"}),
    "small": ("deberta", {"codec": "small", "views": 2}),
    "sample": ("electra", {"logits": "sample:20", "views": 2}),
    "head": ("distilbert", {"logits": "head"}),
    "small head": ("xlmr", {"logits": "head", "codec": "small", "max_length": 32}),
    "no head": ("modernbert", {"logits": "none", "hidden": "layer:4"}),
    "bf16": ("bert", {"precision": "bf16", "views": 2}),
    "bf16 draws": ("roberta", {"precision": "bf16", "logits": "sample:9", "hidden": "groups:4"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SOUND)
def test_sound_stores(tmp_path: Path, tiny_teacher: Teachers, corpus: Path, case: str) -> None:
    kind, options = SOUND[case]
    store = dumped(tiny_teacher(kind), corpus, tmp_path / "a.h5", **options)
    found = report(store, tiny_teacher(kind))
    assert found.problems == [] and found.notes == []
    names = {row.feature.split("/")[1] for row in found.rows if "/" in row.feature}
    features = open_store(store).features
    kept = {"hidden": features.hidden, "attention": features.attention, "logits": features.logits}
    assert names == {name for name, there in kept.items() if there}
    assert ("draws" in {row.feature for row in found.rows}) == ("draws" in case or case == "sample")
    for row in found.rows:
        assert 0 <= row.mean <= row.largest and row.share <= 1
        if case == "default" and "values" in row.feature or "hidden/" in row.feature:
            assert row.largest <= 1.2 * row.promised + 0.01 or "bf16" in case


@pytest.mark.slow
def test_stores_that_were_recoded_merged_or_not_finished(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path
) -> None:
    model, other = tiny_teacher("bert"), write_corpus(tmp_path / "other.txt", 12)
    masked = {"views": 2, "mask_words": "rare"}
    one = dumped(model, corpus, tmp_path / "one.zarr", **masked)
    two = dumped(model, other, tmp_path / "two.zarr", **masked)
    convert(one, tmp_path / "small.h5", "small")
    assert report(tmp_path / "small.h5", model).problems == []
    merge([one, two], tmp_path / "both.zarr", recode=True)
    found = report(tmp_path / "both.zarr", model)
    assert found.problems == [] and "masked sequences left out" in found.notes[0]
    with unsealed():
        dumped(model, corpus, tmp_path / "half.h5", **masked)
    assert report(tmp_path / "half.h5", model, allow_partial=True).problems == []


def test_names_of_states_give_the_option_that_stores_them() -> None:
    spec = "mean:0,layer:2,mean,groups:2"
    assert rerun.states_option(layer_groups(spec, 4)) == spec
    assert rerun.states_option(["mean0", "layer2", "mean"]) == "mean:0,layer:2,mean"


# Changes that make a store wrong.


def other_weights(patch: pytest.MonkeyPatch, model: Path) -> None:
    """Enlarge one matrix of the teacher's files by a tenth, not in the copy that the check uses."""
    network = AutoModelForMaskedLM.from_pretrained(model)
    with torch.no_grad():
        network.bert.encoder.layer[2].output.dense.weight.mul_(1.1)
    network.save_pretrained(model)


def dropout(patch: pytest.MonkeyPatch, model: Path) -> None:
    real = loading.load_teacher

    def load(*words: Any, **options: Any) -> teacher.Teacher:
        loaded = real(*words, **options)
        loaded.model.train()
        for name, module in loaded.model.named_modules():
            if name.endswith("attention.self.dropout"):
                module.p = 0  # a map whose rows do not sum to 1 is refused by the writer
        return loaded

    patch.setattr(loading, "load_teacher", load)


def wrong_layer(patch: pytest.MonkeyPatch, model: Path) -> None:
    def shifted(spec: str, layers: int) -> dict[str, list[int]]:
        groups = layer_groups(spec, layers)
        return groups | ({"layer3": [2]} if "layer3" in groups else {})

    patch.setattr(teacher, "layer_groups", shifted)


def changed_windows(patch: pytest.MonkeyPatch, change: Callable[[Window], Window]) -> None:
    def windows(*words: Any, **named: Any) -> Iterator[Window]:
        return map(change, iter_windows(*words, **named))

    patch.setattr(sequences, "iter_windows", windows)


def shifted_tokens(patch: pytest.MonkeyPatch, model: Path) -> None:
    """Shift every id by one: the teacher reads the shifted ids too, so its output matches them."""

    def change(window: Window) -> Window:
        ids = window.ids.copy()
        ids[~window.special] = np.roll(ids[~window.special], 1)
        return dataclasses.replace(window, ids=ids)

    changed_windows(patch, change)


def shifted_offsets(patch: pytest.MonkeyPatch, model: Path) -> None:
    def change(window: Window) -> Window:
        moved = np.maximum(window.offsets - ~window.special[:, None], 0)
        return dataclasses.replace(window, offsets=moved)

    changed_windows(patch, change)


def swapped_texts(patch: pytest.MonkeyPatch, model: Path) -> None:
    """Swap the features of two sequences of equal length."""

    def mistaken(teacher: Any, windows: Any, inputs: list[Array], *words: Any) -> Any:
        swapped = list(inputs)
        for i, j in combinations(range(len(inputs)), 2):
            if len(inputs[i]) == len(inputs[j]) and (windows[i].ids != windows[j].ids).any():
                swapped[i], swapped[j] = inputs[j], inputs[i]
                return forward(teacher, windows, swapped, *words)
        return forward(teacher, windows, inputs, *words)

    patch.setattr(part_writing, "forward", mistaken)


WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], str]] = {
    "other weights": (other_weights, "view0/hidden/mean: "),
    "dropout": (dropout, "view0/hidden/mean: "),
    "wrong layer": (wrong_layer, "view0/hidden/layer3: "),
    "shifted tokens": (shifted_tokens, "tokens: "),
    "shifted offsets": (shifted_offsets, "tokens: "),
    "swapped texts": (swapped_texts, "view0/logits/logprobs: "),
}


NARROW = [
    pytest.param(case, "bf16", marks=pytest.mark.slow)
    for case in ("other weights", "dropout", "wrong layer")
]


@pytest.mark.parametrize(("case", "precision"), [*((case, "fp32") for case in WRONG), *NARROW])
def test_wrong_stores(
    tmp_path: Path,
    tiny_teacher: Teachers,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    precision: str,
) -> None:
    (spoil, words), model = WRONG[case], tmp_path / "model"
    shutil.copytree(tiny_teacher("bert"), model)
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, model)
        options = {"hidden": "mean,layer:3", "precision": precision, "views": 2}
        store = dumped(model, corpus, tmp_path / "a.h5", **options)
    reports: list[LiveReport] = []
    plain = rerun.check

    def check(*given: Any) -> LiveReport:
        reports.append(plain(*given))
        return reports[-1]

    monkeypatch.setattr(rerun, "check", check)
    model = tiny_teacher("bert")
    command = ["verify", str(store), "--model", str(model), "--sample", "99", "--device", "cpu"]
    result = CliRunner().invoke(main, command)
    # If the tokens already differ, the command does not run the teacher.
    found = reports[0] if reports else report(store, model)
    assert any(line.startswith(words) for line in found.problems), found.problems
    assert bool(found.notes) == (case == "other weights")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    last = result.output.strip().splitlines()[-1]
    assert last.startswith(f"Error: {store}: ")


@pytest.mark.parametrize("case", ["dropout", "swapped texts", "other weights"])
def test_wrong_draws(tmp_path: Path, tiny_teacher: Teachers, corpus: Path, case: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_teacher("bert"), model)
    with pytest.MonkeyPatch.context() as patch:
        WRONG[case][0](patch, model)
        only = {"logits": "sample:20", "hidden": "none", "attention": "none"}
        store = dumped(model, corpus, tmp_path / "a.h5", **only)
    assert report(store, tiny_teacher("bert")).problems != []


def test_draws_of_another_distribution(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws at another temperature are found, even if their log-partition is right."""

    def warm(decoder: Any, values: torch.Tensor, uniform: Array) -> Any:
        draws = sampled_logits(decoder, 0.9 * values, uniform)["draws"]
        return sampled_logits(decoder, values, uniform) | {"draws": draws}

    monkeypatch.setattr(part_writing, "sampled_logits", warm)
    only = {"logits": "sample:50", "hidden": "none", "attention": "none"}
    store = dumped(tiny_teacher("bert"), corpus, tmp_path / "a.h5", **only)
    (problem,) = report(store, tiny_teacher("bert")).problems
    assert problem.startswith("draws: ")


@pytest.mark.parametrize("wrong", ["seed", "counts"])
def test_another_mask_is_found(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, wrong: str
) -> None:
    masked = {"views": 2, "mask_words": "rare"}

    def mistaken(text: str, seed: int, view: int, number: int, *drawn_by: Any) -> Array:
        if wrong == "seed":
            return mask_spans(text, 9, view, number, *drawn_by)
        return mask_spans(text, seed, view, number, drawn_by[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_writing, "mask_spans", mistaken)
        store = dumped(tiny_teacher("bert"), corpus, tmp_path / "a.h5", **masked)
    assert any(
        line.startswith("view1/mask: ") for line in report(store, tiny_teacher("bert")).problems
    )


def test_command(tiny_store: Stores, tiny_teacher: Teachers) -> None:
    store = tiny_store("bert", 12)

    def run(*words: object) -> str:
        return CliRunner().invoke(main, ["verify", str(store), *map(str, words)]).output

    said = run("--model", tiny_teacher("bert"), "--sample", 3, "--seed", 7)
    assert "3 sequences" in said and "tolerance in addition to the codec's error: 0.0003" in said
    assert "every error is within" in said
    line = run("--model", tiny_teacher("roberta")).strip().splitlines()[-1]
    assert line.startswith("Error: ") and "give the model" in line
    for option, wrong, printed in (
        ("--sample", 0, "x>=1"),
        ("--seed", -1, "x>=0"),
        ("--device", "toaster", "cuda:N"),
    ):
        said = run("--model", tiny_teacher("bert"), option, wrong).splitlines()[-1]
        assert said.startswith("Error: ") and option in said and printed in said
    for words in (("--sample", 3), ("--seed", 0), ("--device", "cpu"), ("--trust-remote-code",)):
        assert run(*words).startswith(f"Error: {words[0]}: applies only to --model; add --model")


def test_a_model_that_cannot_be_the_teacher(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path
) -> None:
    """The error does not advise options of a dump, such as another layer or --pooling."""
    embedder = mean_embedder(tiny_teacher("bert"), tmp_path / "embedder")
    vectors = dumped(embedder, corpus, tmp_path / "v.zarr", logits=None, head="embedding")
    last = dumped(tiny_teacher("bert"), corpus, tmp_path / "l.zarr", hidden="layer:4")
    short = shutil.copytree(tiny_teacher("bert"), tmp_path / "short")
    AutoModelForMaskedLM.from_pretrained(short, num_hidden_layers=2).save_pretrained(short)
    for store, model, named in (
        (vectors, tiny_teacher("bert"), "architectures.0 is BertModel in the store"),
        (last, short, "layers is 4 in the store and 2 here"),
        (last, tiny_teacher("gpt2"), "model_type is bert in the store and gpt2 here"),
    ):
        with pytest.raises(UserError, match=rf"another model .*{named}.*; give the model that"):
            report(store, model)


def test_arguments_that_no_dump_has(tiny_store: Stores, tiny_teacher: Teachers) -> None:
    store = open_store(tiny_store("bert", 12))
    wrong: dict[str, list[Any]] = {
        "precision": ["int8", "auto", None, ["fp32"]],
        "seed": ["x", None, -1, 1.5],
        "mask_prob": ["x", None, float("nan"), 7],
        "batch_tokens": ["x", None, 0],
        "remote_code": ["yes", None, 1],
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        store.identity["arguments"] = {name: value}
        with pytest.raises(UserError, match=rf"identity.arguments.{name} is .* without --model"):
            rerun.check(store, str(tiny_teacher("bert")), 3, 0, "cpu")
    store.identity["arguments"] = "not told"
    assert rerun.check(store, str(tiny_teacher("bert")), 3, 0, "cpu").problems == []
    store.identity["arguments"] = {"remote_code": True}
    (note,) = rerun.check(store, str(tiny_teacher("bert")), 3, 0, "cpu").notes
    assert "may have run Python code of the model" in note and "--trust-remote-code" in note
    assert rerun.check(store, str(tiny_teacher("bert")), 3, 0, "cpu", trusted=True).notes == []
