"""Masked-LM training has transformers' own loss, converges, can be resumed, and adds a head only on
request."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, TrainingArguments

from teachonce.checkpoints.names import resolve_model
from teachonce.downstream.mlm import masked_training
from teachonce.downstream.mlm.masked_trainer import BatchMasking, MaskedBatches, MlmTrainer
from teachonce.downstream.mlm.masked_training import (
    load_masked_lm,
    start_from_frequencies,
    train_mlm,
    train_tokenizer,
)
from teachonce.downstream.mlm.scoring import score_as_is
from teachonce.downstream.mlm.text_blocks import (
    Spelling,
    blocks,
    hold_out,
    line_tokens,
    spelling,
)
from teachonce.downstream.settings import MlmSettings
from teachonce.downstream.text_lines import read_lines
from teachonce.student_train.model.kinds import make_student
from teachonce.support.errors import UserError
from teachonce.support.signals import Stopped
from tests.making.models import TEACHER_KINDS, Teachers, Tokenizers
from tests.making.texts import ENGLISH, RUSSIAN, SENTENCES


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(SENTENCES * 5) + "\n\n", encoding="utf-8")
    return path


def settings(text: Path, out: Path, model: str, **more: Any) -> MlmSettings:
    common: dict[str, Any] = {"steps": 12, "batch_size": 4, "max_length": 32, "evaluate_every": 6}
    return MlmSettings(model=model, train=[text], out=out, **{**common, **more})


def held_out_trainer(folder: Path, count: int, out: Path) -> tuple[Any, MaskedBatches]:
    """Make a trainer of an untrained model, and its held-out blocks, in batches of four."""
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = blocks(tokenizer, SENTENCES, 32, "text")[:count]
    held_out = MaskedBatches(BatchMasking(tokenizer, 0.3, 0), rows, 4)
    arguments = TrainingArguments(output_dir=str(out), use_cpu=True, report_to="none")
    return MlmTrainer(model=model, args=arguments, fixed_dev=held_out), held_out


@pytest.mark.parametrize("kind", TEACHER_KINDS)
def test_loss_at_masked_positions_is_the_loss_of_transformers(
    kind: str, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    trainer, held_out = held_out_trainer(tiny_teacher(kind), 4, tmp_path)
    with torch.inference_mode():
        ours = trainer.compute_loss(trainer.model, held_out[0])
        theirs = trainer.model(**held_out[0]).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_training_lowers_the_held_out_loss_and_saves_a_plain_folder(
    text: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    few = {"steps": 40, "evaluate_every": 20, "lr": 3e-3}
    figures = train_mlm(settings(text, out, str(tiny_teacher("bert")), **few))
    assert figures["held_out_loss"] < figures["held_out_loss_before"] - 0.3
    assert json.loads((out / "metrics.json").read_text())["steps"] == 40
    _, report = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert AutoTokenizer.from_pretrained(out).tokenize("lighthouse") != ["[UNK]"]
    assert not list(out.glob("checkpoint-*")) and not list(out.glob("*.bin"))


def test_a_stopped_run_continues_to_the_same_model(
    text: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = str(tiny_teacher("bert")), tmp_path / "stopped"
    whole = train_mlm(settings(text, tmp_path / "whole", model))
    step = MlmTrainer.training_step

    def stop_at(number: int, resume: bool) -> None:
        def taken(self: MlmTrainer, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == number:
                raise Stopped
            return step(self, *args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(Stopped, match="and --resume$"):
            patch.setattr(MlmTrainer, "training_step", taken)
            train_mlm(settings(text, out, model, resume=resume))

    stop_at(1, resume=False)  # before the first checkpoint
    stop_at(8, resume=True)
    with pytest.raises(UserError, match="other settings: seed was 0 and is 1"):
        train_mlm(settings(text, out, model, resume=True, seed=1))
    with pytest.raises(UserError, match="text_column was None and is body"):
        train_mlm(settings(text, out, model, resume=True, text_column="body"))
    (log,) = out.glob("checkpoint-*/trainer_state.json")
    state = json.loads(log.read_text())
    assert 0 < state["log_history"][-1]["minutes"] < 9
    assert {row["step"] for row in state["log_history"]} == {6}
    state["log_history"][-1]["minutes"] = 900
    log.write_text(json.dumps(state))
    for step_number, cut in ((9000, None), (9001, "{")):  # a kill or a full disk during saving
        torn = Path(shutil.copytree(log.parent, out / f"checkpoint-{step_number}"))
        (torn / log.name).unlink() if cut is None else (torn / log.name).write_text(cut)
    # Validation changes no weight; by default it runs after each tenth of the steps.
    resumed = train_mlm(settings(text, out, model, resume=True, evaluate_every=None))
    assert [row["step"] for row in resumed["curve"]] == [6, *range(7, 13), 12]
    assert 900 < resumed["minutes"] < 909 and whole["minutes"] < 9
    assert resumed["held_out_loss_before"] == whole["held_out_loss_before"]
    assert resumed["held_out_loss"] == pytest.approx(whole["held_out_loss"], abs=1e-5)
    with pytest.raises(UserError, match="is finished"):
        train_mlm(settings(text, out, model, resume=True))


@pytest.mark.parametrize("length", [{"steps": 3}, {"steps": None}])
def test_less_text_than_a_batch_is_refused(
    length: dict[str, Any], text: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    few = settings(text, out, str(tiny_teacher("bert")), batch_size=4000, **length)
    message = r"^training text: \d+ blocks of 32 tokens, too few for one batch of 4000; add text"
    with pytest.raises(UserError, match=message):
        train_mlm(few)
    assert not out.exists()


@pytest.mark.parametrize("rate", [30, 1e30])  # a finite loss whose exp overflows, and NaN
def test_a_training_that_explodes_saves_no_model(
    rate: float, text: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"^the model's loss is .* after .*; lower --lr and"):
        train_mlm(settings(text, out, str(tiny_teacher("bert")), lr=rate))
    assert not list(out.glob("*.safetensors")) and not (out / "metrics.json").exists()


def test_a_missing_head_is_added_and_said(tiny_teacher: Teachers, tmp_path: Path) -> None:
    source = AutoModel.from_pretrained(tiny_teacher("bert"), dtype=torch.float32)
    source.save_pretrained(tmp_path)
    said: list[str] = []
    model = load_masked_lm(resolve_model(str(tmp_path)), said.append)
    assert len(said) == 1 and "added: cls.predictions" in said[0]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(
        model.bert.encoder.layer[3].output.dense.weight,
        source.encoder.layer[3].output.dense.weight,
    )
    said.clear()
    load_masked_lm(resolve_model(str(tiny_teacher("bert"))), said.append)
    assert not said


def test_from_scratch(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures = train_mlm(settings(text, out, "scratch:16x2x2", vocab="600", lr=3e-3))
    assert figures["held_out_loss"] < figures["held_out_loss_before"]
    model = AutoModelForMaskedLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 2 and model.config.vocab_size == 600
    assert model.config.model_type == "modernbert"  # as --student 16x2x2 of student-train
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert make_student("bert:16x2x2", tokenizer, 64).config.model_type == "bert"


def test_a_random_model_starts_at_the_entropy_of_single_tokens() -> None:
    tokenizer = train_tokenizer(SENTENCES, "600", 64)
    rows = blocks(tokenizer, SENTENCES, 64, "text")
    model = make_student("16x2x2", tokenizer, 64).eval()
    start_from_frequencies(model, rows)
    share = (np.bincount(rows.ravel(), minlength=600) + 1) / (rows.size + 600)
    ids = torch.from_numpy(rows.astype(np.int64))
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.item() == pytest.approx(-np.log(share[rows]).mean(), abs=0.05)


def test_a_wrong_shape_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--model scratch:4x256x4: .* scratch:256x4x4\?$"):
        train_mlm(settings(text, tmp_path / "out", "scratch:4x256x4", vocab="600"))
    assert not (tmp_path / "out").exists()


def test_a_small_text_gives_what_it_has(text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    train_mlm(settings(text, tmp_path / "out", "scratch:16x2x2", vocab="30k"), said.append)
    pieces = len(AutoTokenizer.from_pretrained(tmp_path / "out"))
    line = f"vocabulary of {pieces:,} pieces, not 30,000 (--vocab 30k): the text has no more pieces"
    assert line in said


def test_a_vocabulary_smaller_than_the_characters_is_refused() -> None:
    with pytest.raises(UserError, match="--vocab 3: the text has"):
        train_tokenizer(SENTENCES, "3", 64)


def test_the_held_out_loss_is_a_mean_over_tokens(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """A last batch of one block counts as one block, not as a whole batch."""
    trainer, held_out = held_out_trainer(tiny_teacher("bert"), 5, tmp_path)
    found = trainer.evaluate()["eval_loss"]
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in (held_out[0], held_out[1]):
            tokens = int(batch["labels"].ne(-100).sum())
            total, count = total + float(trainer.model(**batch).loss) * tokens, count + tokens
    assert found == pytest.approx(total / count, rel=1e-5)


def test_a_named_file_is_scored_whole_and_a_sample_is_reported(
    tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_training, "EVAL_TOKENS", 2048)
    model, said = str(tiny_teacher("bert")), list[str]()
    text, half = tmp_path / "text.txt", tmp_path / "half.txt"
    text.write_text("\n".join(ENGLISH * 8 + RUSSIAN * 8), "utf-8")
    half.write_text("\n".join(ENGLISH * 8), "utf-8")
    rows = blocks(AutoTokenizer.from_pretrained(model), read_lines(text), 32, "text")
    assert rows.size > 2048
    whole = score_as_is(model, {"test": text}, 32, said.append)
    assert whole["examples"] == {"test": len(rows)}
    assert f"{text}: {len(rows):,} blocks, the whole file" in said
    part = score_as_is(model, {"test": half}, 32, said.append)
    assert abs(whole["mean"]["test"]["loss"] - part["mean"]["test"]["loss"]) > 1e-3
    said.clear()
    asked = settings(text, tmp_path / "out", model, steps=1, dev=text)
    assert train_mlm(asked, said.append)["blocks"]["dev"] == 64
    assert f"64 held-out blocks (the first of {len(rows):,})" in said[1]


def test_unknown_words_make_no_model_better(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """Unknown words are not predicted, and their characters are not in the divisor."""
    model, text, said = str(tiny_teacher("bert")), tmp_path / "text.txt", list[str]()
    foreign, tokenizer = "მზე ნელა ჩავიდა ზღვაში", AutoTokenizer.from_pretrained(model)
    text.write_text("\n".join(f"{line} {foreign}" for line in ENGLISH * 4), "utf-8")
    mixed = score_as_is(model, {"test": text}, 32, said.append)["mean"]["test"]
    known = sum(len(tokenizer.tokenize(line)) for line in ENGLISH)
    letters = sum(len("".join(line.split())) for line in ENGLISH)
    assert mixed["loss_per_character"] == pytest.approx(mixed["loss"] * known / letters)
    unknown = len(ENGLISH) * len("".join(foreign.split()))
    share = unknown / (letters + unknown)
    assert mixed["unknown"] == pytest.approx(share)
    (line,) = [each for each in said if "[UNK]" in each]
    assert line == (
        f"text {text}: {100 * share:.3g} % of its characters are in unknown words ([UNK]), which"
        " are not predicted: the figures are of the rest; do not compare them with figures of"
        " another vocabulary"
    )
    text.write_text("\n".join([foreign] * 40), "utf-8")
    with pytest.raises(UserError, match=r"100 % of its characters are in unknown words .*; give a"):
        score_as_is(model, {"test": text}, 32)


def test_a_separator_that_is_the_unknown_token(make_tokenizer: Tokenizers) -> None:
    """A separator that is also the unknown token is excluded once, as it is not text."""
    tokenizer = copy.deepcopy(make_tokenizer("wordpiece"))
    tokenizer.sep_token = tokenizer.unk_token
    lines = ["old lamp", "the light მზე"]
    known = sum(len(tokenizer.tokenize(line)) for line in ("old lamp", "the light"))
    found = spelling(tokenizer, line_tokens(tokenizer, lines, "text"), lines)
    assert found == Spelling(known, len("oldlampthelight"), unknown=len("მზე"))


def test_blocks_keep_every_token_in_order(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("bpe")
    rows = blocks(tokenizer, SENTENCES, 16, "text")
    flat = [
        token
        for line in SENTENCES
        for token in [
            *tokenizer(line, add_special_tokens=False)["input_ids"],
            tokenizer.sep_token_id,
        ]
    ]
    assert rows.shape == (len(flat) // 14, 16)
    assert rows[:, 1:-1].ravel().tolist() == flat[: rows.shape[0] * 14]
    assert set(rows[:, 0]) == {tokenizer.cls_token_id} and set(rows[:, -1]) == {
        tokenizer.sep_token_id
    }


def test_held_out_lines_are_not_trained_on() -> None:
    for count, expected in ((1234, 61), (12_345, 123), (201_999, 1999), (456_000, 2000)):
        lines = [str(number) for number in range(count)]
        train, held_out = hold_out(lines)
        assert len(held_out) == expected and sorted(train + held_out, key=int) == lines
    with pytest.raises(UserError, match="too few"):
        hold_out(lines[:19])


def test_words_with_tags_are_read_as_their_words(tmp_path: Path) -> None:
    for name in ("a.conll", "a.tsv"):
        (tmp_path / name).write_text("Bo B-PER\nsang O\n\nred O\n")
        assert read_lines(tmp_path / name) == ["Bo sang", "red"]
    (tmp_path / "a.conllu").write_text("1\tBo\tBo\tPROPN\t_\t_\t0\troot\t_\t_\n")
    assert read_lines(tmp_path / "a.conllu") == ["Bo"]
    (tmp_path / "a.txt").write_text("Bo B-PER\nsang O\n")
    with pytest.raises(UserError, match="looks like words with tags"):
        read_lines(tmp_path / "a.txt")
    (tmp_path / "a.text").write_text("Bo sang\n")
    assert read_lines(tmp_path / "a.text") == ["Bo sang"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", "no text"), ("naïve".encode("latin-1"), "not UTF-8"), (None, "cannot be read")],
)
def test_wrong_text_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_lines(path)


def test_masks_depend_on_seed_and_batch_only(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("wordpiece")
    rows = [{"input_ids": row.tolist()} for row in blocks(tokenizer, SENTENCES, 32, "text")]
    masking = BatchMasking(tokenizer, 0.15, 1)
    first, other, again = masking(rows[:8]), masking(rows[8:16]), masking(rows[:8])
    assert torch.equal(first["labels"], again["labels"])
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["labels"], other["labels"])
    assert not torch.equal(first["labels"], BatchMasking(tokenizer, 0.15, 2)(rows[:8])["labels"])
