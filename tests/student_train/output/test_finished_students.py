"""Finished students: their cards, their cut vocabularies, and the best of a sweep.

- The model card contains the student's origin, and nothing about this machine.
- A finished student is cut to the pieces that two vocabularies have.
- The choice of a sweep's best student, and sweeps without a comparable score.
"""

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ByT5Tokenizer,
)

from teachonce.store import FeatureStore, TaskSpec, open_store
from teachonce.store.tools.store_card import teacher_name
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.pruning import pruned, shared_pieces
from teachonce.student_train.model.student_tokenizer import (
    student_tokenizer,
    train_student_wordpiece,
)
from teachonce.student_train.output.card import hub_id
from teachonce.student_train.output.card_code import how_to_embed, how_to_load
from teachonce.student_train.output.pruned_folder import prune_student
from teachonce.student_train.output.ranking import (
    OF_LOSS,
    answers_alike,
    compares_losses,
    describe_best,
    flat_row,
    measure_of,
    measures_of,
    over_seeds,
    ranked,
)
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.table import table
from teachonce.support.errors import UserError
from teachonce.support.options import options_of
from tests.end_to_end.support import STUDENT, Words, ok, refused, report_of, says
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers, Tokenizers
from tests.making.texts import ENGLISH

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the id of a model in the hub's cache."""
    repository = tmp_path / "hub" / "models--acme--mini"
    shutil.copytree(tiny_teacher("bert"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "acme/mini"


def card(store: str | Path, folder: Path, *more: str) -> str:
    words = ("--store", store, "--vocab", "450", "--steps", "2", "--out", folder / "student")
    ok(student_train, *words, *STUDENT, *more)
    return (folder / "student" / "README.md").read_text()


def test_a_name_that_the_hub_does_not_allow_is_no_base_model() -> None:
    """A store is untrusted: a line break in the name of its teacher would be metadata."""
    names = ("acme/mini", "bert-base", "a: b", "a\nlicense: mit", "/home/me/bert", "", 3)
    stores: list[Any] = [
        SimpleNamespace(
            identity={"teacher": {"revision": "1a2b"}},
            teacher_settings=lambda _, name=name: {"_name_or_path": name},
        )
        for name in names
    ]
    assert [*map(hub_id, stores)] == ["acme/mini", "bert-base", *[None] * 5]


def test_a_teacher_of_the_hub_is_the_base_model(hub: str, tmp_path: Path) -> None:
    store = dumped(Path(hub), write_corpus(tmp_path / "corpus.txt", 20), tmp_path / "store.zarr")
    text = card(store, tmp_path)
    assert "\n# Masked language model, student of acme/mini\n" in text
    data = ModelCard.load(tmp_path / "student/README.md").data
    assert (data["base_model"], data["base_model_relation"]) == ("acme/mini", "finetune")
    report = report_of(tmp_path / "student")["result"]
    results = vars(data)["eval_results"]
    scores = {each.metric_name: each.metric_value for each in results}
    # `hidden`, `similarity` and others are losses: no reader takes them for scores.
    assert {each.metric_type for each in results} == {"loss", "mlm_per_character"}
    assert scores["mlm"] == report["valid_mlm"] and scores["loss"] == report["valid_loss"]
    assert {each.task_type for each in results} == {"fill-mask"}
    assert open_store(store).identity["teacher"]["revision"] == COMMIT


def test_a_teacher_of_this_machine_is_not(
    store: FeatureStore, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    text = card(store.path, tmp_path, "--student", "bert:32x2x4")
    assert "base_model" not in text and "model, student of bert\n" in text
    assert "| store | store.zarr |" in text
    for folder in (tmp_path, Path(store.path).parent, tiny_teacher("bert").parent):
        assert str(folder) not in text
    assert "pipeline_tag: fill-mask\n" in text and "A masked language model of " in text
    assert "`AutoModelForMaskedLM` loads it as well. No pooler was trained:\n" in text
    (call,) = re.findall(r"`AutoModel(\.from_pretrained\(.*?\))` leaves it out", text)
    call = call.replace("this folder", str(tmp_path / "student"))
    model = eval(f"AutoModel{call}", {"AutoModel": AutoModel})
    assert model(torch.tensor([[1, 2]])).pooler_output is None
    for figure, printed in (
        ("mlm", "is in nats per masked token"),
        ("mlm_per_character", "divides it by the number of characters of the masked tokens"),
        ("hidden", "is in squared standard deviations of a channel"),
    ):
        assert f"`valid_{figure}` {printed}" in text
    assert "`valid_kl`" not in text  # not one of its losses


def test_a_tagger_of_entities_is_read_by_words(make_tokenizer: Tokenizers) -> None:
    """transformers merges neighbours of one part of speech, but not words with IOB tags."""
    for labels, by_words in (("O", "B-PER", "I-PER"), True), (("NOUN", "VERB", "X"), False):
        spec = TaskSpec("tagging", labels)
        student = make_student("32x1x4", make_tokenizer("wordpiece"), 64, task=spec)
        assert ('aggregation_strategy="first"' in how_to_load(student)) == by_words


def test_a_head_that_no_loss_trained_fills_no_mask(
    store: FeatureStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = card(store.path, tmp_path, "--loss", "hidden=1")
    assert "pipeline_tag: feature-extraction\n" in text and "fill-mask" not in text
    assert "# Encoder of texts, student of bert\n" in text
    assert "Its head over the vocabulary was not trained: no loss of the training reads it." in text
    code = text.partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    exec(code.replace("this folder", str(tmp_path / "student")), {})
    assert capsys.readouterr().out.startswith("tensor([[[")


def test_a_loss_without_a_unit_has_none_in_the_card(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = """from torch.nn.functional import smooth_l1_loss
from teachonce.losses import Loss
PLAIN = Loss("plain", smooth_l1_loss, teacher="normalised", student="runs", unit="",
             projection="always")
"""
    (tmp_path / "loss_without_unit.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = card(store.path, tmp_path, "--loss", "mlm=1,loss_without_unit:PLAIN=3")
    assert "| valid_loss_without_unit:PLAIN | " in text
    assert "`valid_mlm` is in nats per masked token; `valid_mlm_per_character` divides" in text
    assert "is in ;" not in text and "`valid_loss_without_unit:PLAIN`" not in text


@pytest.mark.parametrize(
    ("teacher", "name"),
    [
        ("work/tagger/model", "tagger/model"),  # as `downstream --save` writes it
        ("work/tagger", "tagger"),
        ("model", "model"),
        ("/home/ann/model", "model"),  # no card names the folders of a machine
        (None, "an unnamed teacher"),
    ],
)
def test_a_teacher_is_named_by_its_folder(teacher: str | None, name: str) -> None:
    assert teacher_name({"teacher": {"id": teacher}}) == name


def test_only_encoders_are_loaded_by_the_auto_class(make_tokenizer: Tokenizers) -> None:
    """`AutoModel` has no class for word vectors, which sentence-transformers alone loads."""
    tokenizer = make_tokenizer("wordpiece")
    assert "AutoModel" not in how_to_embed(make_student("static:16", tokenizer, 64))
    with_layers = how_to_embed(make_student("32x1x4", tokenizer, 64))
    assert "`AutoModel` loads the encoder only, without pooling" in with_layers


@pytest.mark.parametrize("size", ["gpt2:32x1x4", "llama:32x1x4"])
def test_the_code_of_a_decoders_card_stays_within_its_positions(
    size: str, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """A GPT-2 has an embedding for each position, and the pipeline would write 256 tokens."""
    tokenizer = make_tokenizer("bpe-plain")
    student = make_student(size, tokenizer, 64)
    student.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", how_to_load(student), re.S)
    assert "max_new_tokens=32" in code
    exec(code.replace("this folder", str(tmp_path)), {})


@pytest.mark.parametrize("task", [None, "classification", "tagging"])
@pytest.mark.parametrize("size", ["32x1x4", "modernbert:32x1x4", "bilstm:8,8"])
def test_the_code_of_the_card_loads_the_student_and_predicts(
    size: str,
    task: str | None,
    make_tokenizer: Tokenizers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = make_tokenizer("wordpiece")
    labels = ("NOUN", "VERB", "X")
    spec = TaskSpec(task, labels) if task else None
    student = make_student(size, tokenizer, 64, task=spec)
    student.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = how_to_load(student)
    found_code = re.search(r"```python\n(.*?)```", text, re.S)
    assert found_code
    code = found_code[1].replace("this folder", str(tmp_path))
    made = {None: "MaskedLM", "classification": "SequenceClassification"}
    name = f"For{made.get(task, 'TokenClassification')}"
    if size.startswith("bilstm"):
        assert "import teachonce.checkpoints.bilstm\n" in code
        assert f"Its class, `BiLstm{name}`" in text
    else:
        assert "student_train" not in text and f"`AutoModel{name}` loads it" in text
    capsys.readouterr()
    exec(code, {})
    said = eval(capsys.readouterr().out, {"np": np})
    if task is None:
        assert len(said) > 1 and {found["token_str"] for found in said} <= {*tokenizer.get_vocab()}
    elif task == "classification":
        assert [found["label"] in labels for found in said] == [True]
    else:
        assert {found["word"] for found in said} <= {*tokenizer.get_vocab()}
        assert len(said) > 1 and {found["entity"] for found in said} <= {*labels}


KINDS = ("16x2x2", "modernbert:16x2x2", "bilstm:8,8")


def folders(store: FeatureStore, root: Path, student: str, **changes: Any) -> tuple[Path, Path]:
    """Save a student with 400 pieces and random weights, and another tokenizer with 200."""
    torch.manual_seed(3)
    tokenizer = student_tokenizer("400", store)
    model = make_student(student, tokenizer, 64, **changes)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(root / "student")
    tokenizer.save_pretrained(root / "student")
    train_student_wordpiece(ENGLISH * 3, 200, None).save_pretrained(root / "small")
    return root / "student", root / "small"


@pytest.mark.parametrize("student", KINDS)
def test_a_pruned_student_says_of_the_kept_pieces_what_it_said(
    store: FeatureStore, tmp_path: Path, student: str
) -> None:
    whole, small = folders(store, tmp_path, student)
    count = prune_student(whole, str(small), tmp_path / "out" / "pruned")
    old, few = (AutoTokenizer.from_pretrained(folder) for folder in (whole, small))
    cut = AutoTokenizer.from_pretrained(tmp_path / "out/pruned")
    both = old.get_vocab().keys() & few.get_vocab().keys()
    assert cut.get_vocab().keys() == both and 5 < count == len(both) < 200
    assert sorted(cut.get_vocab().values()) == list(range(count))
    models = [AutoModelForMaskedLM.from_pretrained(f).eval() for f in (whole, tmp_path / "out/pruned")]  # fmt: skip  # noqa: E501
    assert models[1].config.vocab_size == count
    assert models[1].config.pad_token_id == cut.pad_token_id
    ids = cut(list(store.texts())[:4], padding=True, return_tensors="pt")
    assert ids["input_ids"][0, 0] == cut.cls_token_id and (ids["input_ids"] < count).all()
    rows = torch.tensor(old.convert_tokens_to_ids(cut.convert_ids_to_tokens(list(range(count)))))
    with torch.no_grad():
        mask = ids["attention_mask"]
        before = models[0](rows[ids["input_ids"]], attention_mask=mask).logits[..., rows]
        after = models[1](ids["input_ids"], attention_mask=mask).logits
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()])
    assert "from 400 to" in (tmp_path / "out/pruned/README.md").read_text()
    weights, card = (tmp_path / "out/pruned" / name for name in ("model.safetensors", "README.md"))
    assert weights.stat().st_mode == card.stat().st_mode  # other users may read both or neither


def test_the_student_of_a_task_keeps_its_labels(store: FeatureStore, tmp_path: Path) -> None:
    task = TaskSpec("tagging", ("O", "B", "I"))
    whole, small = folders(store, tmp_path, "16x2x2", task=task)
    prune_student(whole, small, tmp_path / "pruned")
    models = [AutoModelForTokenClassification.from_pretrained(f) for f in (whole, tmp_path / "pruned")]  # fmt: skip  # noqa: E501
    assert torch.equal(models[0].classifier.weight, models[1].classifier.weight)
    assert models[1].config.id2label == {0: "O", 1: "B", 2: "I"}


def test_a_static_student_reads_the_same_of_a_text(store: FeatureStore) -> None:
    """It still reads the end of a long text, and no special piece is in the mean."""
    tokenizer = student_tokenizer("400", store)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    tokenizer.truncation_side = tokenizer.init_kwargs["truncation_side"] = "left"
    whole = make_student("static:16", tokenizer, 64)
    pieces = shared_pieces(tokenizer, train_student_wordpiece(ENGLISH * 3, 200, None), "small")
    student, cut = pruned(whole, tokenizer, pieces)
    assert cut.truncation_side == "left"
    special = cut.convert_ids_to_tokens(student.config.special_ids)
    assert special == tokenizer.convert_ids_to_tokens(whole.config.special_ids)
    assert "<mark>" in special


def test_what_cannot_be_pruned_is_refused_in_a_line(
    store: FeatureStore, tmp_path: Path, tiny_teacher: Teachers
) -> None:
    whole, small = folders(store, tmp_path, "16x2x2")
    (tmp_path / "empty").mkdir()
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    out = tmp_path / "pruned"
    for student, vocab, target, line in (
        (whole, tiny_teacher("roberta"), out, "is a BPE and the student's a WordPiece"),
        (whole, whole, out, "has all of the student's 400 pieces"),
        (tmp_path / "empty", small, out, "empty cannot be loaded as a model"),
        (whole, tmp_path / "empty", out, "empty cannot be loaded as a model with its tokenizer"),
        (whole, tmp_path / "slow", out, "slow: ByT5Tokenizer is not a fast tokenizer"),
        (whole, small, small, "small exists already"),
        (whole, small, "s3://bucket/a", "s3://bucket/a: is a URL, expected a path on this machine"),
        (whole, "300", out, "300 is no folder; give the folders of a student and of a tokenizer"),
        (tmp_path / "none", small, out, "none is no folder"),
    ):
        with pytest.raises(UserError, match=line):
            prune_student(student, vocab, target)
        assert not out.exists()


def test_a_training_can_end_with_it(store: FeatureStore, tmp_path: Path) -> None:
    words: Words = ("--store", store.path, "--vocab", "400", "--student", "16x2x2", "--steps", "2")
    words = (*words, "--loss", "mlm=1", "--batch-tokens", "256", "--device", "cpu")
    ok(student_train, *words, "--prune-to", "250", "--out", tmp_path / "a")
    report = report_of(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "a")
    assert report["pruned"] == {"pieces": len(tokenizer), "of": 400}
    assert model.config.vocab_size == len(tokenizer) == 250
    assert report["result"]["parameters"] == model.num_parameters()
    assert f"from 400 to {len(tokenizer)} pieces" in (tmp_path / "a/README.md").read_text()
    out = tmp_path / "b"
    for word, printed in (
        ("nowhere", "--prune-to nowhere"),
        ("400", "has all of the student's 400"),
    ):
        says(refused(student_train, *words, "--prune-to", word, "--out", out), printed)
        assert not out.exists()


NATS = "valid_mlm_per_character"


def row(folder: str, **figures: Any) -> dict[str, Any]:
    return {"folder": folder, **figures}


def test_nats_a_character_rank_students_of_any_losses() -> None:
    rows = [
        row("a", loss="hidden=1", valid_loss=0.2),
        row("b", loss="mlm=1", valid_loss=6.1, **{NATS: 1.5}),
        row("c", loss="mlm=1,hidden=30", valid_loss=23.7, **{NATS: 1.2}),
        row("d", loss="mlm=2", **{NATS: math.nan}),
    ]
    found = ranked(rows)
    assert [each["folder"] for each in found] == ["c", "b", "a", "d"]
    printed = describe_best(found)
    assert printed.startswith(f"best      c: {NATS} 1.2 ") and "2 without it come last" in printed


@pytest.mark.parametrize(
    ("worse", "better", "printed"),
    [
        ({"valid_accuracy": 0.5, "valid_agreement": 0.9}, {"valid_accuracy": 0.7},
         "b: valid_accuracy 0.7"),
        ({"valid_agreement": 0.5}, {"valid_agreement": 0.7}, "b: valid_agreement 0.7"),
        ({"valid_spearman": 0.7, "valid_loss": 0.1}, {"valid_spearman": 0.9},
         "b: valid_spearman 0.9 (rank correlation with"),
        ({"scores": {"text": {"bits/byte": 2.0}}}, {"scores": {"text": {"bits/byte": 1.0}}},
         "b: text bits/byte 1"),
        ({"scores": {"x": {"brier_score ↓": 0.7}}}, {"scores": {"x": {"brier_score ↓": 0.2}}},
         "b: x brier_score ↓ 0.2"),
        ({"valid_accuracy": 0.5, "valid_agreement": 0.2},  # equal: the next measure decides
         {"valid_accuracy": 0.5, "valid_agreement": 0.9}, "b: valid_accuracy 0.5"),
    ],
)  # fmt: skip
def test_the_first_measure_that_both_have_decides(
    worse: dict[str, Any], better: dict[str, Any], printed: str
) -> None:
    found = ranked([row("a", **worse), row("b", **better)])
    assert [each["folder"] for each in found] == ["b", "a"] and printed in describe_best(found)


def test_the_loss_ranks_students_that_learnt_by_the_same_one() -> None:
    same = [row("a", seed="0", valid_loss=2.0), row("b", seed="1", valid_loss=1.0)]
    assert [each["folder"] for each in ranked(same)] == ["b", "a"]
    assert "which is the same for all of them" in describe_best(ranked(same))
    other = [{**each, "loss": f"hidden={n + 1}"} for n, each in enumerate(same)]
    assert measure_of(other) is None and ranked(other) == other
    assert "best      unknown" in describe_best(other)
    assert compares_losses(["seed", "lr"]) and not compares_losses(["seed", "vocab"])


def test_the_best_setting_has_the_best_mean_not_the_luckiest_seed() -> None:
    figures = {("1e-3", 0): 2.0, ("1e-3", 1): 2.2, ("4e-3", 0): 1.9, ("4e-3", 1): 2.9}
    rows = ranked(
        [row(f"{lr}-{seed}", lr=lr, seed=seed, **{NATS: figures[lr, seed]}) for lr, seed in figures]
    )
    assert rows[0]["folder"] == "4e-3-0"
    means = over_seeds(rows, ["lr", "seed"])
    assert [(mean["lr"], mean["seeds"], mean[NATS]) for mean in means] == [
        ("1e-3", 2, "2.1 ± 0.1"),
        ("4e-3", 2, "2.4 ± 0.7"),
    ]
    printed = describe_best(rows, means)
    assert printed.startswith(f"best      lr 1e-3, 2 seeds: {NATS} 2.1 ± 0.1 (")
    assert printed.endswith("; its best student is 1e-3-0")
    assert table(means, ["lr", "seeds"])[0] == ["lr", "seeds", NATS]
    assert over_seeds(rows[:1], ["lr", "seed"]) == over_seeds(rows, ["lr"]) == []


def test_the_score_of_a_task_comes_before_figures_of_the_validation() -> None:
    def scored(folder: str, accuracy: float, nats: float, **more: float) -> dict[str, Any]:
        scores = {"speed": {"cpu sentence_ms": 1.0}, "mood": {"accuracy": accuracy, **more}}
        return row(folder, scores=scores, **{NATS: nats})

    rows = [scored("a", 80.0, 1.2), scored("b", 90.0, 1.5, **{"accuracy deviation": 99.0})]
    assert [each["folder"] for each in ranked(rows)] == ["b", "a"]
    printed = describe_best(ranked(rows))
    assert printed.startswith("best      b: mood accuracy 90 (a score of a task")
    names = [measure.name for measure in measures_of([flat_row(each) for each in rows], ["lr"])]
    assert names == ["mood accuracy", NATS]


def test_students_with_one_answer_are_not_the_best() -> None:
    """All labels of `a` and `c` are equal; the held-out texts of `d` have one label, which it
    gives to all."""

    def labelled(folder: str, share: float, matthews: float) -> dict[str, Any]:
        return row(folder, valid_agreement=share, valid_agreement_matthews=matthews)

    rows = [labelled("a", 0.9, 0.0), labelled("b", 0.4, 0.1), labelled("c", 0.8, 0.0)]
    found = ranked(rows)
    assert [each["folder"] for each in found] == ["b", "a", "c"]
    assert describe_best(found).startswith("best      b: valid_agreement 0.4")
    assert describe_best(found[1:]).startswith("best      none: the figures show that each student")
    alone = [labelled("d", 1.0, 0.0), labelled("e", 0.9, 0.0)]
    assert describe_best(ranked(alone)).startswith("best      d: ")
    for accuracy, alike in ((100.0, False), (60.0, True)):
        scores = {"mood": {"accuracy": accuracy, "Matthews": 0.0}}
        assert (
            answers_alike(flat_row(row("f", scores=scores, valid_agreement_matthews=0.5))) == alike
        )
    both = {"mood": {"accuracy": 60.0, "Matthews": 0.0}, "names": {"entity F1": 40.0}}
    assert not answers_alike(flat_row(row("f", scores=both)))


def test_settings_of_the_loss_are_options() -> None:
    assert OF_LOSS - {"recipe"} <= options_of(TrainOptions).keys() | {"others"}
