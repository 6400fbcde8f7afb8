"""TrainOptions from Python, and `--align` by loss.

- TrainOptions from Python: they refuse what the command line refuses, and settings are stored
  unchanged.
- `--align` by loss: parsing, the recorded settings, and refusals.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, assert_type, cast

import numpy as np
import pytest

from teachonce.store import FeatureStore
from teachonce.student_train.arguments import default_losses, fill_in_defaults
from teachonce.student_train.cli import setting_lines
from teachonce.student_train.losses import registry
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.output.run import run
from teachonce.student_train.plan.train_plan import terms_of
from teachonce.student_train.settings.option_fields import MACHINE
from teachonce.student_train.settings.option_values import check_vocabulary
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import VECTOR_TEXTS
from teachonce.support.differences import describe_changes as settings_changed
from teachonce.support.errors import UserError
from teachonce.support.options import options_of, scoped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "nonsense"}, "--schedule nonsense: expected one of linear, cosine, plateau"),
        ({"pool": "max"}, "--pool max: expected one of sum, mean"),
        ({"targets": "some"}, "--targets some: expected one of all, masked"),
        ({"projection": "none"}, "--projection none: expected one of trainable, frozen"),
        ({"precision": "fp16"}, "--precision fp16: expected one of auto, bf16, fp32"),
        ({"optimizer": "sgd"}, "--optimizer sgd: expected one of adamw, lamb, adadelta"),
        ({"loss": {"mlm": 1.0, "kl": 0.0}}, "--loss kl=0: expected a finite weight above 0"),
        ({"loss": {"mlm": "1"}}, "--loss mlm='1': expected a finite weight above 0"),
        ({"loss": {}}, "--loss: expected one or more losses with weights, such as mlm=1"),
        ({"vocab": "Mixed-vocab"}, "--vocab Mixed-vocab: did you mean mixed-vocab? expected a"),
        ({"vocab": "WORDS:5K"}, "--vocab WORDS:5K: expected a size"),
        ({"freeze": ("nose",)}, "--freeze nose: expected embeddings, words"),
        ({"freeze": "nose"}, "--freeze nose: expected embeddings, words"),
        ({"loss": ["mlm=much"]}, "--loss mlm=much: expected NAME=WEIGHT, such as kl=2"),
        ({"loss": ["mlm="]}, "--loss mlm=: expected NAME=WEIGHT, such as kl=2"),
        ({"steps": 2.5}, "--steps 2.5: expected a whole number"),
        ({"steps": 0}, "--steps 0: expected at least 1"),
        ({"matryoshka": (0, 8)}, "--matryoshka 0,8: expected different sizes of vectors, each at"),
        ({"matryoshka": (8, 8)}, "--matryoshka 8,8: expected different sizes of vectors"),
        ({"lr": -1.0}, "--lr -1: expected a finite number above 0"),
        ({"lr": math.nan}, "--lr nan: expected a finite number above 0"),
        ({"epochs": math.inf}, "--epochs inf: "),
        ({"temperature": math.inf}, "--temperature inf: expected a finite"),
        ({"weight_decay": -1.0}, "--weight-decay -1: "),
        ({"weight_decay": math.inf}, "--weight-decay inf: "),
        ({"warmup": 1.0}, "--warmup 1: expected a share"),
        ({"held_out": 1.0}, "--held-out 1: expected a share"),
        ({"loss": {"kl": math.nan}}, "--loss kl=nan: expected a finite weight above 0"),
        ({"seed": -1}, "--seed -1: expected 0 to 4294967295"),
        ({"eval_every": 0}, "--eval-every 0: expected at least 1"),
        ({"eval_every": "day"}, "--eval-every day: expected a whole number, or epoch"),
        ({"patience": 0}, "--patience 0: expected at least 1"),
        ({"patience": 2, "held_out": 0.0}, "--patience 2 and --held-out 0: nothing to validate"),
        ({"batch_texts": 8, "batch_tokens": 99}, "--batch-tokens and --batch-texts contradict"),
        ({"data": "balanced", "loss": {"ce": 1.0}}, "--data balanced: --loss names no loss for"),
        ({"data": "balanced", "loss": {"kl": 1.0}}, "--data balanced: --loss names no loss on"),
        ({"data": "unlabelled", "loss": {"ce": 1.0}}, "--loss ce and --data unlabelled: unl"),
        ({"max_length": 2}, "--max-length 2: expected at least 3: two special tokens"),
        ({"seed": 2**32}, "--seed 4294967296: expected 0 to 4294967295"),
        ({"steps": 1, "epochs": 1.0}, "--steps and --epochs contradict each other"),
        ({"best": True, "held_out": 0.0}, "--best and --held-out 0: nothing to validate on"),
        ({"lr_end": -1e-4}, "--lr-end -0.0001: expected 0 or more, and finite"),
        ({"lr": 1e-3, "lr_end": 2e-3}, "--lr-end 0.002: expected at most --lr, here 0.001"),
        ({"lr_end": 1e-4, "schedule": "plateau"}, "--lr-end 0.0001 and --schedule plateau"),
        ({"lr_end": 1e-4, "schedule": "constant"}, "--lr-end 0.0001 and --schedule constant"),
        ({"mask_prob": 0.0, "loss": "mlm"}, "--mask-prob 0: --loss mlm needs masked tokens"),
        # Refused before the alignment, as no alignment lets a decoder train on it.
        (
            {"loss": {"kl-shared": 1.0}, "student": "llama:8x1x1"},
            "--loss kl-shared: --student llama:8x1x1 is a decoder",
        ),
        ({"cache": "ram", "workers": 2}, "--cache ram and --workers 2: each worker"),
    ],
)
def test_python_is_refused_what_the_command_line_is(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        TrainOptions(store="a.zarr", **changes)
    assert str(error.value).startswith(message)


def test_a_vocabulary_of_the_hub_is_refused_with_the_way_to_save_it(store: FeatureStore) -> None:
    for refuse, word in (
        (lambda word: TrainOptions("a.zarr", vocab=word), "bert-base-uncased"),
        (lambda word: student_tokenizer(word, store), "own/bert"),  # may be a folder, made later
    ):
        with pytest.raises(UserError, match=rf"from_pretrained\('{word}'\)\.save_pretrained\("):
            refuse(word)
    for other in ("5kk", "./a-b/c", "pruned:5-k"):
        with pytest.raises(UserError) as caught:
            check_vocabulary(other)
        assert "hub" not in str(caught.value)


def test_python_takes_what_the_command_line_takes() -> None:
    made = TrainOptions(
        ["a.zarr", Path("b.zarr")],
        vocab=Path("some/folder"),
        out="x",
        loss=["mlm=1"],
        freeze="words",
        stages=[{"loss": "hidden=2", "freeze": "head"}],
    )
    same = TrainOptions(
        "a.zarr",
        others=("b.zarr",),
        vocab="some/folder",
        loss={"mlm": 1.0},
        out=Path("x"),
        freeze=("words",),
        stages=({"loss": {"hidden": 2.0}, "freeze": ("head",)},),
    )
    assert made == same
    numbers: dict[str, Any] = {"loss": {"mlm": np.float32(1)}, "steps": np.int64(5)}
    assert type(TrainOptions("a.zarr", lr=np.float64(0.1)).lr) is float
    assert TrainOptions("a.zarr", best=np.bool_(True)).best is True  # type: ignore[arg-type]
    made = TrainOptions("a.zarr", **numbers, stages=[numbers])
    assert json.loads(json.dumps(made.describing()))["stages"] == [{"loss": {"mlm": 1}, "steps": 5}]
    assert TrainOptions(Path("a.zarr"), loss="mlm=1,hidden=2").loss == {"mlm": 1.0, "hidden": 2.0}
    with pytest.raises(
        UserError, match="^--store: expected at least one store, got an empty list$"
    ):
        TrainOptions([])


def test_a_type_checker_reads_the_narrow_types_and_refuses_wrong_ones() -> None:
    """mypy checks this file: an ignored error that no longer occurs is itself an error."""
    made = TrainOptions("a.zarr", out="x", loss="mlm=1", freeze=["words"])
    assert_type(made.store, str)
    assert_type(made.out, Path | None)
    assert_type(made.loss, Mapping[str, float])
    assert_type(made.freeze, tuple[str, ...])
    assert replace(made, out="y").out == Path("y")
    with pytest.raises(UserError, match="^--out 3: expected a path$"):
        TrainOptions("a.zarr", out=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="^--freeze 3: expected a string$"):
        TrainOptions("a.zarr", freeze=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="^--loss: expected one or more losses"):
        TrainOptions("a.zarr", loss=1.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="^--vocab 5000: expected a string$"):
        TrainOptions("a.zarr", vocab=5000)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        made.out = Path("y")  # type: ignore[misc]
    with pytest.raises(TypeError, match="^TrainOptions: no option .losses.; did you mean loss[?] "):
        TrainOptions("a.zarr", losses="mlm=1")  # type: ignore[call-arg]
    for values in ((), ("a.zarr", "8k")):  # as StudentBatches("a.zarr", "8k")
        with pytest.raises(TypeError, match=r"^TrainOptions: .* call TrainOptions\(store, vocab="):
            TrainOptions(*values)
    with pytest.raises(UserError, match="^s3://bucket/a: is a URL, expected a path on this machin"):
        TrainOptions("a.zarr", out="s3://bucket/a")
    with pytest.raises(UserError, match="^s3:/bucket/a: is a URL, expected a path on this machine"):
        TrainOptions("a.zarr", out=Path("s3://bucket/a"))
    with pytest.raises(TypeError, match=r"^run: expected TrainOptions, got str; call run\(Train"):
        run("a.zarr")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"schedule": "nonsense"}, "stage 2: --schedule nonsense: expected one of linear"),
        ({"student": "tiny"}, "stage 2: student is not a setting of a stage; expected one of"),
        ({"unfreeze": "up"}, "stage 2: unfreeze 'up': expected 'top-down'"),
        ({"steps": 1, "epochs": 2.0}, "stage 2: --steps and --epochs contradict"),
        ({"lr": 1e-5}, "stage 2: --lr-end 0.0001: expected at most --lr, here 1e-05"),
        (
            {"mask_prob": 0.0, "loss": "mlm"},
            "stage 2: --mask-prob 0: --loss mlm needs masked tokens",
        ),
        ({"batch_texts": 8, "batch_tokens": 1024}, "stage 2: --batch-tokens and --batch-texts"),
    ],
)
def test_a_stage_from_python_is_refused_with_its_number(
    stage: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        TrainOptions(store="a.zarr", lr_end=1e-4, stages=({"steps": 3}, stage))
    assert str(error.value).startswith(message)


def test_what_the_stores_decide_is_checked_once_it_is_known(tmp_path: Path) -> None:
    """A default of the losses or the student may be replaced by one that fits the stores."""
    for words, message in (
        ({"mask_prob": 0.0}, "--mask-prob 0: --loss mlm needs masked tokens"),
        ({"loss": "next"}, "--loss next: --student tiny is not a decoder"),
        ({"student": "gpt2:8x1x1"}, "--loss mlm: --student gpt2:8x1x1 is a decoder"),
        ({"stages": ({"loss": "next"},)}, "stage 1: --loss next: --student tiny is not a decoder"),
        (
            {"align": "kl=match"},
            "--align kl=match: kl is not among the losses hidden, mlm; add it to --loss",
        ),
    ):
        options = TrainOptions("a.zarr", **words)
        with pytest.raises(UserError) as error:
            options.resolved()
        assert str(error.value).startswith(message)
    # The rate of `tiny` is not the one of the student that the store decides.
    TrainOptions("a.zarr", student="teacher:2", lr_end=1e-5)
    TrainOptions("a.zarr", init=f"folder:{tmp_path}", vocab=tmp_path)


def test_settings_list_every_option_that_shapes_a_student() -> None:
    message = TrainOptions(store="a.zarr", lr=1e-3).describing()
    apart = scoped(TrainOptions, MACHINE) | {"eval_every"}  # no validation decides anything
    assert message.keys() == options_of(TrainOptions).keys() - apart | {"others", "stages"}
    assert json.loads(json.dumps(message)) == message


def test_what_does_not_shape_a_student_is_not_reported() -> None:
    plain = TrainOptions(store="a.zarr", lr=1e-3)
    moved = replace(
        plain, out=Path("b"), needs={"stores": 1}, device="cuda:7", checkpoint_every=3,
        allow_partial=True, workers=2,
    )  # fmt: skip
    assert moved.describing() == plain.describing() and moved.digest() == plain.digest()
    assert replace(plain, cache="ram").digest() == plain.digest()
    assert replace(plain, precision="bf16").digest() != plain.digest()


def test_a_name_and_a_description_show_what_is_not_the_default() -> None:
    plain = TrainOptions(store="a.zarr", lr=1e-3, steps=5)
    assert plain.chosen().keys() == {"store", "steps", "lr"}
    typed = replace(plain, align="span")
    assert typed.digest() == plain.digest() and typed.describing() == plain.describing()
    assert plain.describing()["align"] == "span"
    changed = replace(plain, dropout=0.1, lr_end=1e-4)
    assert changed.describing() == plain.describing() | {"dropout": 0.1, "lr_end": 1e-4}
    assert changed.digest() != plain.digest()
    assert "seed 0, dropout 0.1, lr_end 0.0001\n" in setting_lines(changed)
    assert "dropout" not in setting_lines(plain)
    then, now = plain.describing(), changed.describing()
    assert settings_changed(then, now).count(" was 0.0 and is ") == 2
    assert not settings_changed(then, then)


def test_every_option_says_what_it_is() -> None:
    for name, about in options_of(TrainOptions).items():
        assert about.help, name


def test_a_stage_counts_its_batches_in_its_own_way() -> None:
    stages: tuple[dict[str, Any], ...] = ({"batch_texts": 8}, {"batch_tokens": 99}, {})
    options = TrainOptions(store="a.zarr", stages=stages, batch_texts=4)
    found = [options.in_stage(stage).batching for stage in stages]
    assert found == [{"batch_texts": 8}, {"batch_tokens": 99}, {"batch_texts": 4}]
    message = options.describing()
    assert (message["batch_texts"], message["batch_tokens"]) == (4, None)
    assert "of 4 x 1 texts in each stage" in setting_lines(options.resolved())


def test_a_folder_is_short_and_found_by_its_hash(tmp_path: Path) -> None:
    """The hash is that of the first release, so that its students can be continued."""
    options = TrainOptions(
        store="a.zarr", lr=1e-3, steps=5, vocab="b/c d", loss={"mlm": 1.0, "kl": 0.5}
    )
    digest = options.digest()
    assert digest == "d2fb70"
    assert options.folder_in(tmp_path).name == f"c_d-tiny-{digest}"
    found = {
        ("loss", "lr"): f"mlm1+kl0.5-lr0.001-{digest}",
        ("seed", "schedule", "loss", "lr", "steps"): f"seed0-mlm1+kl0.5-lr0.001-steps5-{digest}",
        ("loss", "lr", "recipe"): f"mlm1+kl0.5-lr0.001-{digest}",
    }
    for varied, name in found.items():
        assert options.folder_in(tmp_path, varied).name == name and len(name) <= 40
    earlier = tmp_path / f"c_d-tiny-span-mlm1+kl0.5-auto-seed0-{digest}"
    earlier.mkdir()
    (tmp_path / f".copied-{digest}").mkdir()
    (tmp_path / f"a-note-{digest}").touch()
    assert {options.folder_in(tmp_path, varied) for varied in found} == {earlier}
    (newer := tmp_path / f"mlm1+kl0.5-lr0.001-{digest}").mkdir()
    assert options.folder_in(tmp_path, ("loss", "lr")) == newer
    other = replace(options, vocab="my/pieces/", freeze="head,words", best=True)
    varied = ("vocab", "freeze", "best", "max_length")
    name = f"pieces-freezehead.words-best-{other.digest()}"
    assert other.folder_in(tmp_path, varied).name == name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "1 mlm + 30 hidden; span, pool mean, trainable projection"),
        ({"loss": {"kl": 1.0}, "align": "match"}, "1 kl; match, pool mean"),
        (
            {"loss": {"kl": 1.0, "hidden": 2.0}, "align": "kl=match,hidden=reduce"},
            "1 kl + 2 hidden; kl=match,hidden=reduce, pool match=mean,reduce=sum, trainable"
            " projection",
        ),
        ({"loss": {"mlm": 1.0}}, "1 mlm"),
        ({"loss": {"embedding": 1.0}, "student": "static:16"}, "1 embedding"),
        ({"loss": {"next": 1.0, "alm": 1.0}, "student": "llama:8x1x1"}, "1 next + 1 alm; bytes"),
        (
            {"loss": {"alm": 1.0, "hidden": 1.0}, "student": "llama:8x1x1", "align": "span"},
            "1 alm + 1 hidden; span, bytes, last token of a run, trainable projection",
        ),
    ],
)
def test_a_training_says_what_its_losses_pair(words: dict[str, Any], said: str) -> None:
    lines = setting_lines(TrainOptions("a.zarr", **words).resolved()).splitlines()
    assert f"losses    {said}" in lines


def test_a_training_prints_every_setting_of_a_stage() -> None:
    """Also a 0, a False and an empty list, which override the setting of the training."""
    stages: tuple[dict[str, Any], ...] = (
        {"loss": "mlm=1,kl=2", "view": 0, "best": False, "freeze": ""},
        {"unfreeze": ["head", "layers"], "lr_end": 0.0},
    )
    options = TrainOptions("a.zarr", stages=stages, view=1, best=True, freeze="head").resolved()
    lines = setting_lines(options).splitlines()
    assert "stage 1   loss 1 mlm + 2 kl; view 0; best False; freeze nothing" in lines
    assert "stage 2   unfreeze head,layers; lr_end 0.0" in lines
    assert "seed 0, view 1, freeze head, best True" in "".join(lines)


def test_default_losses_fit_every_store(store: FeatureStore) -> None:
    """The losses use the features of both stores, in any order."""
    parts = {"path": "s", "task": None, "teacher_settings": store.teacher_settings}
    without_states = replace(store.features, hidden=())
    bare, least = (
        cast(FeatureStore, SimpleNamespace(**parts, features=features))
        for features in (without_states, replace(without_states, logits=None))
    )
    for stores, loss in (
        ([store, store], {"mlm": 1.0, "hidden": 30.0}),
        ([store, bare], {"mlm": 1.0, "kl": 1.0}),
        ([bare, store], {"mlm": 1.0, "kl": 1.0}),
        ([bare, least], {"mlm": 1.0}),
    ):
        assert default_losses({}, stores) == loss


def test_a_size_of_a_vocabulary_may_have_a_capital() -> None:
    for word in ("5K", "words:5K"):
        assert TrainOptions("a.zarr", vocab=word).vocab == word


def test_a_loss_of_another_package_counts_when_defaults_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even before a training loads it, so that two runs of a sweep agree."""
    (tmp_path / "own_losses.py").write_text(
        "from teachonce.losses import Loss\n"
        "RUNS = Loss('runs', print, 'raw', 'runs', 'units')\n"
        "TEXT = Loss('text', print, 'vector', 'vector', 'units')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_OUTSIDE", {})

    def opened() -> list[FeatureStore]:
        pytest.fail("no default of a loss of runs depends on the store")

    fill_in_defaults(given := {"loss": {"own_losses:RUNS": 1.0}}, opened)
    assert list(given) == ["loss"]
    of_vectors: Any = SimpleNamespace(features=SimpleNamespace(embedding=True))
    texts: dict[str, Any] = {"loss": {"own_losses:TEXT": 1.0}}
    fill_in_defaults(texts, lambda: [of_vectors])
    assert texts["batch_texts"] == VECTOR_TEXTS


LOSS = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0}


@pytest.mark.parametrize(
    ("words", "kl", "hidden"),
    [
        ("match", "match", "match"),
        ("kl=match,hidden=reduce", "match", "reduce"),
        ("reduce, kl=match", "match", "reduce"),
        ("kl=match", "match", "span"),
        ("hidden=reduce,match", "match", "reduce"),
    ],
)
def test_a_loss_without_its_own_takes_the_plain_word(words: str, kl: str, hidden: str) -> None:
    options = TrainOptions(store="a.zarr", loss=LOSS, align=words)
    aligned = {term.name: term.alignment for term in terms_of(options, None)}
    assert (aligned["kl"], aligned["hidden"]) == (kl, hidden)
    assert options.describing()["align"] == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "sideways",
            "--align sideways: expected one of span, match, reduce, bytes, or for a single loss",
        ),
        ("kl=sideways", "--align kl=sideways: expected one of span"),
        ("", "--align : expected one of span"),
        ("kl:match", "--align kl:match: expected one of span"),
        ("hiden=match", "--align hiden=match: no loss 'hiden'; expected one of mlm, next"),
        ("mlm=match", "mlm compares the student with its own text, not .* leave it out"),
        ("kl=match,kl=span", "--align kl=span: kl is given twice"),
        (
            "span,match",
            "--align span,match: span and match cannot both apply to all losses; give one",
        ),
    ],
)
def test_what_is_no_alignment_of_a_loss_is_reported(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainOptions(store="a.zarr", loss=LOSS, align=words)


@pytest.mark.parametrize(
    ("words", "pool", "message"),
    [
        ("span", None, "mean"),
        ("reduce", None, "sum"),
        ("reduce", "mean", "mean"),
        ("kl=match,hidden=reduce", None, "match=mean,reduce=sum"),
        ("kl=match,hidden=reduce", "sum", "sum"),
        ("kl=reduce,hidden=reduce", None, "sum"),  # mlm, the only loss left for span, has no runs
        ("kl=match,hidden=span", None, "mean"),
    ],
)
def test_the_pool_of_each_alignment_is_reported(words: str, pool: str | None, message: str) -> None:
    options = TrainOptions(store="a.zarr", loss=LOSS, align=words, pool=pool)
    assert options.describing()["pool"] == message


@pytest.mark.parametrize("words", ["span", "reduce"])
def test_a_decoder_may_have_an_alignment_that_one_stage_reads(words: str) -> None:
    losses = {"next": 1.0}, {"hidden": 1.0}
    stages = tuple({"loss": loss} for loss in losses)
    given: dict[str, Any] = {"store": "a.zarr", "student": "llama:8x1x1", "align": words}
    options = TrainOptions(**given, loss=losses[1], stages=stages)
    assert options.alignments == (words,)
    with pytest.raises(UserError, match=f"--align {words}: .* trims white space"):
        TrainOptions(**given, loss=losses[0], stages=stages[:1])
