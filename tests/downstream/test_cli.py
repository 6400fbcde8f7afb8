"""The `downstream` command: it does the job, and a mistake is one line that says what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import AutoTokenizer

from teachonce.downstream.cli import main
from teachonce.student_train.output.ranking import constant_answer
from tests.downstream.learnable import entities
from tests.end_to_end.support import Words
from tests.texts import SENTENCES

Teacher = Callable[[str], Path]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(SENTENCES * 3), encoding="utf-8")
    return path


def test_mlm(text: Path, tiny_teacher: Teacher, tmp_path: Path) -> None:
    result = run(
        *("--task", "mlm", "--model", tiny_teacher("distilbert"), "--train", text),
        *("--out", tmp_path / "out", "--steps", 2, "--batch-tokens", 256, "--max-length", 64),
        *("--evaluate-every", 1),
    )
    assert result.exit_code == 0, result.output
    assert "learning rate 0.0002" in result.stdout and "{" not in result.output
    for step in (1, 2):
        assert re.search(
            rf"^step {step}/2: loss \d+\.\d+, held-out loss \d+\.\d+; [1-9][\d,]* tokens/s,"
            r" \d\d:\d\d left$",
            result.stdout,
            re.M,
        )
    assert result.stderr == ""  # no terminal, so no bar
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["tokens"] == 2 * 256
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert scores["mean"]["dev"]["loss"] == metrics["held_out_loss"]
    assert scores["deviation"]["dev"] == dict.fromkeys(("primary", "loss", "perplexity"), 0)
    loss, perplexity = scores["mean"]["dev"]["loss"], scores["mean"]["dev"]["perplexity"]
    assert re.search(rf" {loss:.2f} .* {perplexity:.2f} ", result.stdout)
    words = ("--task", "mlm", "--as-is", "--model", tmp_path / "out", "--test", text)
    assert "exists already" in run(*words, "--out", tmp_path / "out").stderr
    table = run("--task", "table", tmp_path / "out")
    assert "held out of text.txt (dev)" in table.output and f" {loss:.2f} " in table.output


@pytest.mark.slow
def test_mlm_over_seeds(text: Path, tiny_teacher: Teacher, tmp_path: Path) -> None:
    """Each is what a run of its seed alone gives; a run that was stopped trains what is left."""
    out, dev = tmp_path / "out", tmp_path / "dev.txt"
    dev.write_text("\n".join(SENTENCES[:5]), encoding="utf-8")
    words: Words = ("--task", "mlm", "--model", tiny_teacher("bert"), "--train", text, "--dev", dev)
    words = (*words, "--steps", 2, "--test", dev)
    result = run(*words, "--max-length", 16, "--seed", 4, "--seeds", 2, "--out", out)
    assert result.exit_code == 0, result.output
    scores = (out / "scores.json").read_text()
    found = json.loads(scores)
    assert [each["seed"] for each in found["seeds"]] == [4, 5]
    assert found["saved"] == [str(out / "seed-4"), str(out / "seed-5")]
    assert found["files"]["dev"] == str(dev) and found["examples"]["dev"] > 1
    losses = [each["dev"]["loss"] for each in found["seeds"]]
    assert len(set(losses)) == 2 and found["mean"]["dev"]["loss"] == sum(losses) / 2
    half = abs(losses[0] - losses[1]) / 2
    assert found["deviation"]["dev"]["loss"] == pytest.approx(2**0.5 * half)
    # the saved model, scored alone, is as good as it was at the end of its training
    for each in found["seeds"]:
        assert each["test"] == pytest.approx(each["dev"], rel=1e-4)
    alone = ("--task", "mlm", "--as-is", "--model", out / "seed-5", "--max-length", 16)
    result = run(*alone, "--test", dev, "--test", text, "--out", tmp_path / "alone")
    assert result.exit_code == 0 and "nats/token" in result.output, result.output
    mean = json.loads((tmp_path / "alone" / "scores.json").read_text())["mean"]
    assert mean[f"test {dev}"]["loss"] == pytest.approx(losses[1], rel=1e-4)
    both = mean[f"test {dev}"]["loss"] + mean[f"test {text}"]["loss"]
    assert mean["test"]["loss"] == pytest.approx(both / 2)
    assert "nats/character" in result.output
    for path in (dev, text):
        figures, lines = mean[f"test {path}"], path.read_text().splitlines()
        tokenizer = AutoTokenizer.from_pretrained(out / "seed-5")
        tokens = sum(len(tokenizer.tokenize(line)) for line in lines)
        characters = sum(not letter.isspace() for line in lines for letter in line)
        expected = figures["loss"] * tokens / characters
        assert figures["loss_per_character"] == pytest.approx(expected)
    shutil.rmtree(out / "seed-5")
    (out / "scores.json").unlink()
    before = (out / "seed-4" / "model.safetensors").stat().st_mtime_ns
    again = ("--max-length", 16, "--seed", 4, "--seeds", 2, "--out", out, "--resume")
    other = run(*words, *again, "--lr", 1)
    assert other.exit_code == 1 and "other settings: lr was" in other.stderr
    assert run(*words, *again).exit_code == 0
    assert (out / "seed-4" / "model.safetensors").stat().st_mtime_ns == before
    assert (out / "scores.json").read_text() == scores
    assert "is finished" in run(*words, *again).stderr


def test_ner_prints_a_table_and_writes_scores(tiny_teacher: Teacher, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        entities(tmp_path / name, 8, 0)
    result = run(
        *("--task", "ner", "--model", tiny_teacher("electra"), "--train", tmp_path / "train"),
        *("--dev", tmp_path / "dev", "--out", tmp_path / "out", "--seeds", 1, "--epochs", 1),
    )
    assert result.exit_code == 0, result.output
    assert "entity F1" in result.output and "±" not in result.output
    assert "seed 0: learning rate 0.0005" in result.stdout  # the teacher is 32 wide
    assert "seed 0, 1 step of 16 x 1 texts: 1 epoch of 8 texts" in result.stdout
    (line,) = re.findall(r"^seed 0, step \d+/\d+: .*$", result.stdout, re.M)
    for measure in ("loss", "held-out loss", "entity F1", "accuracy"):
        assert re.search(rf" {measure} \d\.\d+", line)
    assert "{" not in result.output and result.stderr == ""
    assert "dev" in json.loads((tmp_path / "out" / "scores.json").read_text())["mean"]


def test_a_tagger_that_gives_every_word_o_is_reported(
    tiny_teacher: Teacher, tmp_path: Path
) -> None:
    dev = entities(tmp_path / "dev", 8, 0)
    first, *others = dev.read_text().split("\n\n")  # entities are rare in training
    others = [re.sub("B-.", "O", text) for text in others]
    train = "\n\n".join([first, *others * 3])
    (tmp_path / "train").write_text(re.sub("^(the|stairs|light)", "wxqzkvjqxz", train, flags=re.M))
    words: Words = ("--task", "ner", "--train", tmp_path / "train", "--dev", dev, "--seeds", 1)
    words = (*words, "--model", tiny_teacher("electra"), "--out", tmp_path / "out", "--save")
    result = run(*words, "--epochs", 2, "--batch-size", 4, "--lr", 1e-3)
    said = "it has learnt nothing, entity F1 is 0, as of a model that gives every word the tag O"
    said += " (dev); raise --lr (0.001) or --epochs (2)"
    assert f"seed 0: {said}" in result.stdout.splitlines(), result.output
    assert "the tokenizer splits a word of the text into" in result.stdout
    assert json.loads((tmp_path / "out/scores.json").read_text())["seeds"][0]["warning"] == said
    assert said in (tmp_path / "out/model/README.md").read_text()
    alone = ("--task", "ner", "--as-is", "--model", tmp_path / "out/model", "--test", dev)
    alone_said = said.partition(" (dev)")[0]
    assert f"{alone_said} (test); train it" in run(*alone, "--out", tmp_path / "alone").stdout
    assert constant_answer({"Matthews": 0, "accuracy": 0.9}).endswith("everything the same label")
    assert constant_answer({"Matthews": 0.1, "accuracy": 0}) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", 1, "--epochs", 1), "contradict"),
        (("--batch-size", 1, "--batch-tokens", 99), "contradict"),
        (("--vocab", "5k"), "a checkpoint brings its own"),
        (("--seeds", 2, "--max-length", 4000), "at most 128 tokens"),
        (("--seeds", 2, "--resume"), "holds no training to continue"),
        (("--max-length", 4000), "at most 128 tokens"),
        (("--resume",), "holds no training to continue"),
        (("--label-column", "x"), "does not take --label-column"),
        (("--model", "minilm"), "takes one --model, got 2"),
    ],
)
def test_mlm_mistakes(
    arguments: tuple[object, ...], message: str, text: Path, tiny_teacher: Teacher, tmp_path: Path
) -> None:
    required = ("--task", "mlm", "--model", tiny_teacher("bert"), "--train", text)
    result = run(*required, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["static:64", "llama:32x2x4"])
def test_models_from_scratch_without_a_masked_lm_head(
    kind: str, text: Path, tmp_path: Path
) -> None:
    result = run(
        "--task", "mlm", "--model", f"scratch:{kind}", "--train", text, "--out", tmp_path / "o"
    )
    assert result.exit_code == 1 and "Traceback" not in result.output
    told = f"a {kind.partition(':')[0]} student has no masked-LM head; give scratch:HxLxA"
    assert told in result.stderr


def test_an_output_that_exists_is_left_alone(
    text: Path, tiny_teacher: Teacher, tmp_path: Path
) -> None:
    required = ("--task", "mlm", "--model", tiny_teacher("bert"), "--train", text)
    result = run(*required, "--out", text)
    assert result.exit_code == 1 and "exists already" in result.output
    assert text.read_text(encoding="utf-8").startswith(SENTENCES[0])
