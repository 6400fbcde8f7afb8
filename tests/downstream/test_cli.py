"""The `downstream` command does the job, and a mistake is one line with its remedy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.downstream.learnable import entities
from tests.downstream.support import done, refused, run, scores_of
from tests.end_to_end.support import Words, says
from tests.making.models import Teachers
from tests.making.texts import SENTENCES


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(SENTENCES * 3), encoding="utf-8")
    return path


def test_mlm(text: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
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
    scores = scores_of(tmp_path / "out")
    assert scores["mean"]["dev"]["loss"] == metrics["held_out_loss"]
    assert scores["deviation"]["dev"] == dict.fromkeys(("primary", "loss", "perplexity"), 0)
    loss, perplexity = scores["mean"]["dev"]["loss"], scores["mean"]["dev"]["perplexity"]
    assert re.search(rf" {loss:.2f} .* {perplexity:.2f} ", result.stdout)
    words = ("--task", "mlm", "--as-is", "--model", tmp_path / "out", "--test", text)
    assert "exists already" in refused(*words, "--out", tmp_path / "out")
    before = text.read_bytes()
    assert "exists already" in refused(*words, "--out", text) and text.read_bytes() == before
    table = done("--task", "table", tmp_path / "out")
    assert "held out of text.txt (dev)" in table and f" {loss:.2f} " in table


def test_two_runs_in_one_folder(text: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from teachonce.support.lease import Lease"
    hold += "; lease = Lease(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    words: Words = ("--task", "mlm", "--as-is", "--model", tiny_teacher("distilbert"))
    words += ("--test", text, "--out", tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert "out: another process is writing it" in refused(*words)
        other.communicate()
    done(*words)
    assert [path.name for path in tmp_path.iterdir() if "lease" in path.name] == []


@pytest.mark.slow
def test_mlm_over_seeds(text: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    """A resumed run trains the missing seeds only."""
    out, dev = tmp_path / "out", tmp_path / "dev.txt"
    dev.write_text("\n".join(SENTENCES[:5]), encoding="utf-8")
    words: Words = ("--task", "mlm", "--model", tiny_teacher("bert"), "--train", text, "--dev", dev)
    words = (*words, "--steps", 2, "--test", dev)
    done(*words, "--max-length", 16, "--seed", 4, "--seeds", 2, "--out", out)
    scores = (out / "scores.json").read_text()
    found = json.loads(scores)
    assert [each["seed"] for each in found["seeds"]] == [4, 5]
    assert found["saved"] == [str(out / "seed-4"), str(out / "seed-5")]
    assert found["files"]["dev"] == str(dev) and found["examples"]["dev"] > 1
    losses = [each["dev"]["loss"] for each in found["seeds"]]
    assert len(set(losses)) == 2 and found["mean"]["dev"]["loss"] == sum(losses) / 2
    half = abs(losses[0] - losses[1]) / 2
    assert found["deviation"]["dev"]["loss"] == pytest.approx(2**0.5 * half)
    # the saved model, scored alone, is as good as at the end of its training
    for each in found["seeds"]:
        assert each["test"] == pytest.approx(each["dev"], rel=1e-4)
    alone = ("--task", "mlm", "--as-is", "--model", out / "seed-5", "--max-length", 16)
    said = done(*alone, "--test", dev, "--test", text, "--out", tmp_path / "alone")
    says(said, "nats/token", "nats/character")
    mean = scores_of(tmp_path / "alone")["mean"]
    assert mean[f"test {dev}"]["loss"] == pytest.approx(losses[1], rel=1e-4)
    both = mean[f"test {dev}"]["loss"] + mean[f"test {text}"]["loss"]
    assert mean["test"]["loss"] == pytest.approx(both / 2)
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
    assert "other settings: lr was" in refused(*words, *again, "--lr", 1)
    done(*words, *again)
    assert (out / "seed-4" / "model.safetensors").stat().st_mtime_ns == before
    assert (out / "scores.json").read_text() == scores
    assert "is finished" in refused(*words, *again)


def test_ner_prints_a_table_and_writes_scores(tiny_teacher: Teachers, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        entities(tmp_path / name, 8, 0)
    result = run(
        *("--task", "ner", "--model", tiny_teacher("electra"), "--train", tmp_path / "train"),
        *("--dev", tmp_path / "dev", "--out", tmp_path / "out", "--seeds", 1, "--epochs", 1),
    )
    assert result.exit_code == 0, result.output
    assert "entity F1" in result.output and "±" not in result.output
    assert "seed 0: learning rate 0.0005" in result.stdout  # the teacher's hidden size is 32
    assert "seed 0, 1 step of 16 x 1 texts: 1 epoch of 8 texts" in result.stdout
    (line,) = re.findall(r"^seed 0, step \d+/\d+: .*$", result.stdout, re.M)
    for measure in ("loss", "held-out loss", "entity F1", "accuracy"):
        assert re.search(rf" {measure} \d\.\d+", line)
    assert "{" not in result.output and result.stderr == ""
    assert "dev" in scores_of(tmp_path / "out")["mean"]


def test_a_tagger_that_gives_every_word_o_is_reported(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    dev = entities(tmp_path / "dev", 8, 0)
    first, *others = dev.read_text().split("\n\n")  # entities are rare in training
    others = [re.sub("B-.", "O", text) for text in others]
    train = "\n\n".join([first, *others * 3])
    (tmp_path / "train").write_text(re.sub("^(the|stairs|light)", "wxqzkvjqxz", train, flags=re.M))
    words: Words = ("--task", "ner", "--train", tmp_path / "train", "--dev", dev, "--seeds", 1)
    words = (*words, "--model", tiny_teacher("electra"), "--out", tmp_path / "out", "--save")
    printed = done(*words, "--epochs", 2, "--batch-size", 4, "--lr", 1e-3)
    said = "it has learnt nothing: every tag that it predicts is 'O'"
    said += "; raise --lr (0.001) or --epochs (2)"
    assert f"seed 0: {said}" in printed.splitlines(), printed
    assert "the tokenizer splits a word of the text into" in printed
    assert scores_of(tmp_path / "out")["seeds"][0]["warning"] == said
    assert said in (tmp_path / "out/model/README.md").read_text()
    alone = ("--task", "ner", "--as-is", "--model", tmp_path / "out/model", "--test", dev)
    alone_said = said.partition(";")[0]
    assert f"{alone_said}; train it" in done(*alone, "--out", tmp_path / "alone")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", 1, "--epochs", 1), "contradict"),
        (("--batch-size", 1, "--batch-tokens", 99), "contradict"),
        (("--vocab", "5k"), "a checkpoint has a vocabulary already"),
        (("--seeds", 2, "--max-length", 4000), "at most 128 tokens"),
        (("--seeds", 2, "--resume"), "holds no training to continue"),
        (("--max-length", 4000), "at most 128 tokens"),
        (("--resume",), "holds no training to continue"),
        (("--model", "a", "--model", "b"), "takes one --model, got 2"),
        (("--model", "scratch:static:64"), "a static student has no masked-LM head; give scratch:"),
        (("--model", "scratch:llama:8x1x1"), "a llama student has no masked-LM head; give scrat"),
    ],
)
def test_mlm_mistakes(
    arguments: Words, message: str, text: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    model = () if "--model" in arguments else ("--model", tiny_teacher("bert"))
    required = ("--task", "mlm", *model, "--train", text, "--out", tmp_path / "out")
    assert message in refused(*required, *arguments)
    assert not (tmp_path / "out").exists()


def test_tasks_of_one_process_refuse_torchrun(
    text: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny_teacher("bert"), tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused("--task", "mlm", "--as-is", "--model", model, "--test", text, "--out", out)
    says(line, "--task mlm --as-is runs in one process, and WORLD_SIZE is 2; start it without")
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\nold\ta\nnew\tb\n", "utf-8")
    files: Words = ("--train", rows, "--dev", rows, "--out", out)
    says(refused("--task", "classify", "--model", model, *files), "--task classify runs in one")
    assert not out.exists()
