"""Every kind of student is an ordinary model, learns, and gives equal results in parts.

- Every kind of student, with every head, is an ordinary model of transformers and learns with every
  loss.
- Masked LMs of other types, given to `train`, learn, or a line names the types that do.
- A batch that is read in parts has the outputs, gradients and training of the whole batch, and
  needs less memory.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from teachonce.store import FeatureStore, TaskSpec
from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.losses.registry import losses_for
from teachonce.student_train.model import any_student as room
from teachonce.student_train.model.any_student import (
    bytes_of_text,
    class_logits,
    forward_pass,
    has_attention,
    head_of,
    kind_of,
    sentence_states,
    tag_logits,
)
from teachonce.student_train.model.kinds import KINDS, make_student
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.shapes import SHAPES, Shape, parse_student
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.student_training import train
from teachonce.student_train.train.training_log import METRICS
from teachonce.support.errors import UserError
from tests.examples.loading import example
from tests.making.models import Tokenizers
from tests.making.texts import SENTENCES
from tests.student_train.support import first_batch, prepared

SIZES = {"bert": "32x2x4", "modernbert": "32x2x4", "bilstm": "24,16"}
# A static student reads texts as a whole alone; decoders are in end_to_end/test_decoders.py.
WITH_HEADS = [kind for kind in KINDS if kind != "static" and not SHAPES[kind].causal]
LABELS = ("yes", "no", "may be")
AUTO: dict[str | None, Any] = {
    None: AutoModelForMaskedLM,
    "classification": AutoModelForSequenceClassification,
    "tagging": AutoModelForTokenClassification,
}


def named(kind: str) -> str:
    return f"{kind}:{SIZES[kind]}"


@pytest.fixture
def student(make_tokenizer: Tokenizers) -> Callable[..., PreTrainedModel]:
    """Make a student in evaluation mode, with weights large enough for all of them to matter."""

    def made(kind: str, task: str | None = None) -> PreTrainedModel:
        torch.manual_seed(0)
        spec = TaskSpec(task, LABELS) if task else None
        model = make_student(named(kind), make_tokenizer("wordpiece"), 64, task=spec)
        model.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.2)
        return model

    return made


def read(model: PreTrainedModel, tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return flat last states [N,D] of texts of different lengths, the mask of present tokens
    [B,S], and the logits of the class itself."""
    batch = tokenizer(SENTENCES[:4], padding=True, truncation=True, return_tensors="pt")
    asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
    present = asked["attention_mask"].bool()
    assert not present.all()
    with torch.no_grad():
        states = model.base_model(**asked, output_hidden_states=True).hidden_states
        return states[-1][present], present, model(**asked).logits


def test_every_shape_has_its_model() -> None:
    assert list(SHAPES) == list(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_HEADS)
@pytest.mark.parametrize("align", ALIGNMENTS)
def test_trained_under_every_loss(
    kind: str, align: str, store: FeatureStore, tmp_path: Path
) -> None:
    sides = ("masked", "pieces", "runs")
    able = [loss for loss in losses_for(None) if loss.student in sides and not loss.of_next]
    names = [loss.name for loss in able]
    if ALIGNMENTS[align].predicted != "same":  # only of pieces that both have
        names.remove("kl-shared")
    names += ["attention"] if parse_student(named(kind)).heads else []
    out = tmp_path / "student"
    options = TrainOptions(
        store=str(store.path), vocab="400", out=out, student=named(kind), align=align,
        loss=dict.fromkeys(names, 1.0), steps=30, eval_every=1000, batch_tokens=512, lr=5e-3,
        view=0, device="cpu", precision="fp32",
    )  # fmt: skip
    result = run(options.resolved())["result"]
    records = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 30 and set(names) <= set(steps[0])
    assert sum(r["loss"] for r in steps[-5:]) < sum(r["loss"] for r in steps[:5])
    student = AutoModelForMaskedLM.from_pretrained(out)
    assert student.config.model_type == kind
    assert student.num_parameters() == result["parameters"]


@pytest.mark.parametrize("kind", WITH_HEADS)
def test_logits_of_flat_states_are_the_models_own(
    kind: str, student: Callable[..., PreTrainedModel], make_tokenizer: Tokenizers
) -> None:
    tokenizer = make_tokenizer("wordpiece")
    for task, logits in ((None, KINDS[kind].lm), ("tagging", tag_logits)):
        model = student(kind, task)
        states, present, own = read(model, tokenizer)
        torch.testing.assert_close(logits(model, states), own[present])
        assert own.std() > 0.1
    model = student(kind, "classification")
    poolings = {"modernbert": ("cls", "mean"), "bilstm": ("max", "last")}
    for pooling in poolings.get(kind, (None,)):
        model.config.classifier_pooling = pooling
        states, present, own = read(model, tokenizer)
        torch.testing.assert_close(class_logits(model, states, present), own)
        assert own.std() > 0.1 and own.shape == (4, len(LABELS))
    assert sentence_states(model, states, present).shape == (4, model.config.hidden_size)


@pytest.mark.parametrize("kind", WITH_HEADS)
@pytest.mark.parametrize("task", AUTO)
def test_a_saved_student_is_loaded_whole(
    kind: str, task: str | None, student: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    made = student(kind, task)
    made.save_pretrained(tmp_path)
    found, report = AUTO[task].from_pretrained(tmp_path, output_loading_info=True)
    assert type(found) is type(made) and not any(report.values())
    for name, value in made.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)
    assert has_attention(found) == (kind != "bilstm")
    if task:
        assert tuple((found.config.id2label or {}).values()) == LABELS
        assert found.config.label2id == {label: n for n, label in enumerate(LABELS)}
        assert found.config.num_labels == len(LABELS)


def test_sizes() -> None:
    assert parse_student("bert:tiny") == Shape("bert", 264, 3, 12, 264, 792)
    assert parse_student("bert:264x3x12") == Shape("bert", 264, 3, 12, 264, 4 * 264)
    assert parse_student("64x2x4x100") == Shape("modernbert", 64, 2, 4, 64, 100)
    assert parse_student("tiny") == parse_student("modernbert:tiny")
    assert parse_student("tiny") == Shape("modernbert", 264, 3, 12, 264, 2 * 264)
    assert parse_student("modernbert:64x2x4x96") == Shape("modernbert", 64, 2, 4, 64, 96)
    assert parse_student("bilstm:300,600") == Shape("bilstm", 1200, 1, 0, 300)
    found = [parse_student(word).positions for word in ("bert:tiny", "tiny", "bilstm:8,8")]
    assert found == ["learnt", "rotary", "none"]


@pytest.mark.parametrize(
    ("pieces", "millions"), [(30_500, 10.4), (20_000, 7.6), (10_000, 5.0), (5_000, 3.6)]
)
def test_tiny_has_the_published_parameters(pieces: int, millions: float) -> None:
    """Kolesnikova et al. 2022, Table 3: distil-tiny30, 20, 10 and 5, inputs of 512 tokens."""
    shape, kind = parse_student("bert:tiny"), KINDS["bert"]
    with torch.device("meta"):
        model = kind.models["mlm"](kind.config(shape, None, 512, vocab_size=pieces, pad_token_id=0))
    assert round(model.num_parameters() / 1e6, 1) == millions
    assert model.config.intermediate_size == 792


def test_the_units_of_the_feed_forward_parts_are_those_asked_for(
    make_tokenizer: Tokenizers,
) -> None:
    for student, units in (("bert:32x2x4x40", 40), ("bert:32x2x4", 128), ("32x2x4x40", 40),
                           ("modernbert:32x2x4", 64)):  # fmt: skip
        model = make_student(student, make_tokenizer("wordpiece"), 64)
        assert model.config.intermediate_size == units


def test_the_default_learning_rate_falls_with_the_width_of_a_transformer() -> None:
    for student, rate in (("bert:tiny", 0.5 / 264), ("32x2x4", 4e-3), ("tiny", 0.5 / 264),
                          ("bilstm:300,600", 3e-3), ("bilstm:8,8", 3e-3)):  # fmt: skip
        assert parse_student(student).learning_rate == rate
        assert TrainOptions(store="", student=student).resolved_lr == rate


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (
            "mamba:64x2x4",
            r"unknown kind of student mamba; did you mean llama\? expected one of bert",
        ),
        ("modernbert:64x2", "expected tiny, HxLxA or bert:HxLxA"),
        ("300,600", r"expected tiny, HxLxA or bert:HxLxA .*, bilstm:E,H"),
        ("65x2x4", "the hidden size 65 must be a multiple of the 4 heads"),
        ("0x2x2", "the hidden size 0 must be a multiple of the 2 heads, and all at least 1"),
        ("3x264x1x99", r"264 layers of hidden size 3; .*: 264x3x1x99\?"),
        ("64x2x4x0", "feed-forward size 0; give at least 1"),
        ("64x2x4x", "expected tiny, HxLxA or"),
        ("llama:65x2x4x96x2x16", "the hidden size 65 must be a multiple of the 4 heads"),
        ("llama:64x2x4x96x2x15", "heads of size 15; rotary positions need an even number"),
        ("llama:64x2x4x96x2x0", "heads of size 0; rotary positions need an even number, such as 2"),
        ("gpt2:64x2x4x96x2", r"expected HxLxA\[xF\] "),
        ("3x264x1", r"264 layers of hidden size 3; .*: 264x3x1\?"),
        ("modernbert:12x2x4", "3 dimensions per head; rotary positions need an even number"),
        ("bilstm:tiny", "expected E,H, both at least 1"),
        ("bilstm:300,0", "expected E,H, both at least 1"),
        ("bilstm:300x600", "expected E,H"),
        ("teacher:2", "only student-train, run and StudentBatches look up"),
        ("long" * 100, "expected tiny, HxLxA"),  # too long for the name of a folder
    ],
)
def test_wrong_students_are_refused(student: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^--student {student}: {message}"):
        parse_student(student)


def test_a_folder_is_no_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(
        UserError, match="StudentBatches look up the shape of a model; give the shape itself"
    ):
        parse_student(str(tmp_path))


SMALL: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 300,
    "pad_token_id": 0,
}
TYPES: dict[str, dict[str, Any]] = {
    "distilbert": {
        "vocab_size": 500,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 32,
        "pad_token_id": 0,
    },
    "albert": {**SMALL, "embedding_size": 8},
    "deberta": {**SMALL, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    "deberta-v2": {**SMALL, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    "electra": {**SMALL, "embedding_size": 8},
    "roberta": SMALL,
}


def made(kind: str, factory: Any = AutoModelForMaskedLM) -> Any:
    torch.manual_seed(0)
    return factory.from_config(AutoConfig.for_model(kind, **TYPES[kind]))


@pytest.mark.parametrize("kind", TYPES)
def test_the_head_of_any_masked_lm_gives_its_logits(kind: str) -> None:
    student = made(kind).eval()
    ids = torch.randint(5, 500, (2, 9))
    with torch.no_grad():
        states = student.base_model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        expected = student(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        found = kind_of(student).lm(student, states.flatten(0, 1))
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-5, atol=1e-6)
    assert head_of(student) == "mlm"


@pytest.mark.parametrize("kind", TYPES)
def test_it_learns(kind: str, store: FeatureStore) -> None:
    losses = {"mlm": 1.0, "kl": 1.0, "hidden": 1.0}
    few = {"steps": 12, "batch_tokens": 256, "lr": 5e-3}
    _, collator, options = prepared(store, vocab="500", loss=losses, **few)
    seen: list[float] = []
    student = made(kind)
    train(store, student, collator, options, on_step=lambda _, found: seen.append(found["loss"]))
    assert sum(seen[-3:]) < sum(seen[:3])


def test_what_can_be_no_student_is_refused_in_a_line(store: FeatureStore) -> None:
    _, collator, options = prepared(store, vocab="500", steps=1)
    for factory in (AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(UserError, match="cannot be a student: expected a masked LM of transf"):
            train(store, made("albert", factory), collator, options)
    with pytest.raises(UserError, match="deberta cannot be trained in bf16.* use precision fp32"):
        train(store, made("deberta"), collator, replace(options, precision="bf16"))
    with pytest.raises(UserError, match="type albert can be trained as a masked LM only"):
        class_logits(made("albert"), torch.zeros(1, 16), torch.ones(1, 1, dtype=torch.bool))


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of a store for one epoch of an external training loop."""

    def __init__(self, store: FeatureStore, collator: Any) -> None:
        self.store, self.collator = store, collator

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number, raw in enumerate(self.store.stream(0, 0, 256)):
            yield self.collator(raw, 0, (0, 0, number)).masked_lm()


def test_a_batch_in_the_trainer_of_transformers(store: FeatureStore, tmp_path: Path) -> None:
    student, collator, options = prepared(store, vocab="500", steps=1, loss={"mlm": 1.0})
    batch = first_batch(store, collator, 256)
    ours = Distiller.of(student, options, store)(batch)["mlm"]
    theirs = student(**batch.masked_lm()).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True,
        logging_steps=1,
    )  # fmt: skip
    trainer = OneBatchAtATime(student, arguments, train_dataset=Batches(store, collator))
    trainer.train()
    assert len([row for row in trainer.state.log_history if row.get("loss", 0) > 0]) == 3


class OneBatchAtATime(Trainer):
    """The dataset yields complete batches."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=None)  # type: ignore[arg-type]


STUDENTS = ("16x2x2", "modernbert:16x2x2", "bilstm:12,10", "static:16")
LOSS = {"mlm": 1.0, "hidden": 1.0}


def student_and_inputs(store: FeatureStore, student: str, **changes: Any) -> tuple[Any, Inputs]:
    model, collator, _ = prepared(store, student=student, loss=LOSS, **changes)
    return model, first_batch(store, collator).inputs


def hold(monkeypatch: pytest.MonkeyPatch, student: Any, inputs: Inputs, texts: int) -> None:
    """Limit each part of the inputs to `texts` texts."""
    monkeypatch.setattr(room, "CPU_BUDGET", texts * bytes_of_text(student, inputs.ids.shape[1]))


def outputs_and_gradients(student: Any, inputs: Inputs, maps: bool) -> list[Tensor]:
    student.zero_grad()
    read = forward_pass(student, inputs, maps)
    found = [*read.states, *read.maps]
    torch.stack([each.sin().square().sum() for each in found]).sum().backward()
    gradients = [weight.grad for weight in student.parameters() if weight.grad is not None]
    assert gradients and read.present is inputs.present
    return [*found, *gradients]


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("student", [*STUDENTS, "of my own"])
def test_parts_give_what_the_whole_gives(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch, student: str, texts: int
) -> None:
    own = student == "of my own"
    model, inputs = student_and_inputs(store, "16x2x2" if own else student)
    model = example("own_student").Convolutions(400, 8) if own else model
    maps = "x" in student
    assert len(inputs.ids) > 2 * texts
    monkeypatch.setattr(room, "CPU_BUDGET", 2**60)
    expected = outputs_and_gradients(model, inputs, maps)
    hold(monkeypatch, model, inputs, texts)
    found = outputs_and_gradients(model, inputs, maps)
    assert len(found) == len(expected)
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def test_a_part_drops_the_same_in_both_passes(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = student_and_inputs(store, "16x2x2", dropout=0.3)
    model.train()

    def gradient(again: bool) -> Tensor:
        torch.manual_seed(3)
        model.zero_grad()
        if again:
            last = forward_pass(model, inputs).last
        else:  # the parts by hand, with all activations stored
            last = torch.cat([forward_pass(model, part).last for part in inputs.split(2)])
        last.square().sum().backward()
        weight: Tensor = next(model.parameters())
        assert weight.grad is not None
        return weight.grad.clone()

    hold(monkeypatch, model, inputs, 2)
    assert torch.equal(gradient(again=True), gradient(again=False))


@pytest.mark.parametrize("student", ["16x2x2", "modernbert:16x2x2", "bilstm:12,10"])
def test_less_is_held(store: FeatureStore, monkeypatch: pytest.MonkeyPatch, student: str) -> None:
    model, inputs = student_and_inputs(store, student)

    def held() -> int:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            last = forward_pass(model, inputs).last
        assert last.requires_grad
        weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        return sum(size for at, size in kept.items() if at not in weights)

    whole = held()
    hold(monkeypatch, model, inputs, 2)
    assert held() < whole / 4


def test_a_training_in_parts_is_the_training(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses() -> list[float]:
        model, collator, options = prepared(store, loss=LOSS, steps=6, lr=1e-2)
        seen: list[float] = []
        train(store, model, collator, options, on_step=lambda _, found: seen.append(found["loss"]))
        return seen

    whole = losses()
    monkeypatch.setattr(room, "CPU_BUDGET", 1)
    assert losses() == pytest.approx(whole, rel=1e-3)
    assert whole[-1] < whole[0]


def test_a_text_counts_as_its_square_where_attention_is_eager(store: FeatureStore) -> None:
    model, _ = student_and_inputs(store, "16x2x2")
    states = 2 * 34 * 16 * 100
    assert bytes_of_text(model, 100) == states + 2 * 5 * 2 * 100**2
    model.set_attn_implementation("sdpa")
    assert bytes_of_text(model, 100) == states
    assert bytes_of_text(student_and_inputs(store, "static:16")[0], 100) == 1
