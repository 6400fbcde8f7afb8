"""lm-eval:NAME reports the values of lm-evaluation-harness, on tasks defined here without a
download."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from teachonce.checkpoints.first_token import prepend_token
from teachonce.downstream.lm.scoring import load_decoder, score_lm
from teachonce.downstream.options import TEST
from teachonce.downstream.settings import LmSettings
from tests.downstream.support import done, refused, scores_of
from tests.making.decoders import save_decoder
from tests.making.models import Teachers
from tests.making.texts import ENGLISH

CHOICES = [" cold", " a cat", " green and old"]
QUESTIONS = [f"The {word} was" for word in ("sea", "house", "old man", "letter", "night", "road")]
DEFINITIONS = {
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: brier_score, aggregation: brier_score, higher_is_better: false}
""",
    "novels": """
task: novels
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/novels.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
}


@pytest.fixture(params=["plain", "own-bos"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Save a decoder whose tokenizer puts either no token or bos in front of a text."""
    folder = save_decoder(tmp_path / "decoder", "Llama", bos="<s>")
    if request.param == "own-bos":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert prepend_token(tokenizer, "auto", "it") is not None
        tokenizer.save_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"][0] == tokenizer.bos_token_id
    return folder


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, definition in DEFINITIONS.items():
        (folder / f"{name}.yaml").write_text(definition.replace("FOLDER", str(folder)))
    asked = [
        {"question": question, "choices": CHOICES, "answer": number % 3}
        for number, question in enumerate(QUESTIONS)
    ]
    (folder / "choices.jsonl").write_text("\n".join(map(json.dumps, asked)))
    texts = [{"text": text} for text in ENGLISH[:4]]
    (folder / "novels.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


def test_an_encoder_is_refused_before_the_harness_is_loaded(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    words = ("--task", "lm-eval:choices", "--model", tiny_teacher("bert"), "--out", tmp_path / "x")
    assert "give a decoder (...ForCausalLM)" in refused(*words)


def test_without_the_harness_one_line_says_how_to_get_it(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    words = ("--task", "lm-eval:arc_easy", "--model", decoder, "--out", tmp_path / "out")
    assert "pip install 'teachonce[lm-eval]'" in refused(*words)


def test_a_choice_is_the_most_probable_answer(decoder: Path, tasks: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    out = tmp_path / "out"
    words = ("--task", "lm-eval:choices", "--model", decoder, "--test", tasks)
    said = done(*words, "--out", out)
    tokenizer, network = load_decoder(str(decoder))

    def log_probability(question: str, choice: str) -> float:
        before = len(tokenizer(question)["input_ids"])
        ids = torch.tensor([tokenizer(question + choice)["input_ids"]])
        with torch.no_grad():
            found = network(ids).logits.log_softmax(-1)
        taken: torch.Tensor = found[0, before - 1 : -1].gather(1, ids[0, before:, None])
        return float(taken.sum())

    best = [np.argmax([log_probability(each, choice) for choice in CHOICES]) for each in QUESTIONS]
    accuracy = np.mean([number % 3 == chosen for number, chosen in enumerate(best)])
    scores = scores_of(out)
    assert scores["mean"]["test"]["acc"] == pytest.approx(accuracy)
    assert scores["examples"] == {"test": len(QUESTIONS)} and f"{accuracy:.4f}" in said
    assert "lm-eval:choices" in done("--task", "table", out)
    said = refused("--task", "lm-eval:choice", "--model", decoder, "--test", tasks, "--out", "x")
    assert "did you mean choices?" in said
    assert scores["measures"] == {"acc": "acc", "brier_score ↓": "brier_score"}


def test_bits_a_byte_are_those_of_task_lm(decoder: Path, tasks: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    words = ("--task", "lm-eval:novels", "--model", decoder, "--test", tasks)
    done(*words, "--out", tmp_path / "out")
    text = tmp_path / "novels.txt"
    text.write_text("\n".join(ENGLISH[:4]) + "\n")
    own = score_lm(str(decoder), {TEST: text}, LmSettings(), lambda line: None)
    scores = scores_of(tmp_path / "out")
    assert scores["measures"] == {"bits/byte": "bits_per_byte"}
    expected = own["mean"][TEST]["bits_per_byte"]
    assert scores["mean"]["test"]["bits_per_byte"] == pytest.approx(expected, rel=1e-4)
