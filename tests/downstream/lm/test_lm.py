"""Bits per byte equal one forward pass's, and tasks of lm-evaluation-harness its values.

- --task lm: bits per byte equal one forward pass's for every cut into windows.
- lm-eval:NAME reports the values of lm-evaluation-harness, on tasks defined here without a
  download.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from teachonce.checkpoints.first_token import prepend_token
from teachonce.downstream.lm.scoring import load_decoder, score_lm
from teachonce.downstream.lm.windows import read_documents, sliding_windows
from teachonce.downstream.options import TEST
from teachonce.downstream.settings import LmSettings
from teachonce.support.errors import UserError
from teachonce.training.byte_level import SPECIALS, train_byte_level
from tests.downstream.support import done, refused, scores_of
from tests.end_to_end.support import Words
from tests.making.decoders import save_decoder
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers, trained_tokenizer
from tests.making.stores import features_of, make_store
from tests.making.texts import ENGLISH, RUSSIAN

REACH = 7
"""Tokens that the prediction of `near_sighted` depends on: two layers that look back at three."""


@pytest.fixture(scope="module")
def near_sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a decoder with attention over four tokens (including the token itself) and a byte-level
    tokenizer."""
    folder = tmp_path_factory.mktemp("near-sighted")
    backend = train_byte_level(ENGLISH + RUSSIAN, 400, "llama-bpe")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=2048, sliding_window=4,
        initializer_range=0.5,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text("\n".join([*ENGLISH[:3], " ".join(RUSSIAN[:4])]) + "\n", "utf-8")
    return path


def in_one_pass(folder: Path, lines: Sequence[str], start: str | None) -> tuple[float, int, int]:
    """Nats, tokens and bytes of all lines by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = [] if start is None else [tokenizer.convert_tokens_to_ids(start)]
    nats, tokens, size = 0.0, 0, 0
    for line in lines:
        ids = torch.tensor([before + tokenizer(line, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            nats += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
        first = "" if before else str(tokenizer.decode(ids[0, :1]))
        size += len(line.removeprefix(first).encode())
    return nats, tokens, size


def test_bits_match_transformers(near_sighted: Path, text: Path, tmp_path: Path) -> None:
    nats, tokens, size = in_one_pass(
        near_sighted, text.read_text().splitlines(), SPECIALS["bos_token"]
    )
    said = done("--task", "lm", "--model", near_sighted, "--test", text, "--out", tmp_path / "out")
    assert "4 documents" in said and "<|begin_of_text|> in front" in said
    scores = scores_of(tmp_path / "out")
    found = scores["mean"]["test"]
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert f"{found['bits_per_byte']:.3f}" in said
    assert scores["examples"] == {"test": 4}
    assert "lm" in done("--task", "table", tmp_path / "out")


def test_texts_of_a_named_column_score_like_their_lines(near_sighted: Path, tmp_path: Path) -> None:
    lines, rows = tmp_path / "lines.txt", tmp_path / "rows.csv"
    lines.write_text("ababab\nbaba\n")
    rows.write_text("id,body\n1st,ababab\n2nd,baba\n")
    expected = _score(near_sighted, lines, LmSettings())
    assert _score(near_sighted, rows, LmSettings(text_column="body")) == expected


@pytest.fixture(scope="module")
def whole(near_sighted: Path, text: Path) -> dict[str, float]:
    return _score(near_sighted, text, LmSettings())


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_bits_do_not_depend_on_where_windows_are_cut(
    near_sighted: Path, text: Path, whole: dict[str, float], data: st.DataObject
) -> None:
    """Bits per byte are equal for all windows whose overlap is the model's attention span."""
    size = data.draw(st.integers(REACH + 1, 200), "window")
    shared = data.draw(st.integers(REACH, size - 1), "shared")
    found = _score(near_sighted, text, LmSettings(max_length=max(8, size), stride=shared))
    assert found == pytest.approx(whole, rel=1e-5)


def _score(folder: Path, text: Path, given: LmSettings) -> dict[str, float]:
    scores = score_lm(str(folder), {TEST: text}, given, lambda line: None)
    return dict(scores["mean"][TEST])


@given(st.lists(st.integers(0, 60), max_size=4), st.integers(2, 20), st.integers(1, 19))
def test_every_token_is_predicted_once(lengths: list[int], size: int, shared: int) -> None:
    shared = min(shared, size - 1)
    windows = list(sliding_windows(lengths, size, shared))
    found = [(each.number, n) for each in windows for n in range(each.scored, each.end)]
    assert found == [(number, n) for number, length in enumerate(lengths) for n in range(1, length)]
    for window in windows:
        assert window.end - window.begin <= size
        assert window.begin == 0 or window.scored - window.begin == shared


def test_a_model_without_a_start_token(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """The first token of a document is not predicted, and its bytes do not count."""
    path = tmp_path / "held-out.txt"
    path.write_text("\n".join(ENGLISH[:3]) + "\n")
    nats, _, size = in_one_pass(tiny_teacher("gpt2"), ENGLISH[:3], None)
    found = _score(tiny_teacher("gpt2"), path, LmSettings())
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--max-length", 4096), "--max-length 4096: the model takes at most 2048 tokens"),
        (
            ("--max-length", 16, "--stride", 16),
            "--stride 16: consecutive windows must share 1 to 15",
        ),
        (("--stride", 0), "--stride 0: consecutive windows must share 1 to 1,023"),
    ],
)
def test_bad_settings_are_refused(
    near_sighted: Path, text: Path, tmp_path: Path, words: Words, expected: str
) -> None:
    given = ("--task", "lm", "--model", near_sighted, "--test", text, "--out", tmp_path / "out")
    assert expected in refused(*given, *words)


@pytest.mark.parametrize("change", ["unknown pieces", "lower case", "none"])
def test_a_tokenizer_that_changes_the_text_is_reported(change: str, tmp_path: Path) -> None:
    """Unknown pieces are cheap to predict, and cover the bytes of whole words."""
    model = save_decoder(tmp_path / "model", "Llama", bos="<end>")
    tokenizer = AutoTokenizer.from_pretrained(model)
    if change == "unknown pieces":
        tokenizer = trained_tokenizer("unigram")  # without byte fallback
    elif change == "lower case":
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(model)
    path, lines = tmp_path / "held-out.txt", list[str]()
    path.write_text("\n".join(each.title() + " 漢字漢字" for each in ENGLISH[:4]), "utf-8")
    score_lm(str(model), {TEST: path}, LmSettings(), lines.append)
    found = [line for line in lines if "changed or dropped by the tokenizer" in line]
    assert len(found) == (change != "none") and all(str(path) in line for line in found)


def test_bad_inputs_are_refused(
    near_sighted: Path, tiny_teacher: Teachers, text: Path, tmp_path: Path
) -> None:
    words = ("--task", "lm", "--out", tmp_path / "out")
    said = refused(*words, "--model", tiny_teacher("bert"), "--test", text)
    assert (
        "no causal-LM head (missing: it is a BertForMaskedLM)" in said
        and "--task mlm --as-is" in said
    )
    (tmp_path / "empty.txt").write_text("\n\n")
    said = refused(*words, "--model", near_sighted, "--test", tmp_path / "empty.txt")
    assert "has no text; give a file with one document per line" in said


@pytest.mark.parametrize("tier", ["topk:16", "head"])
def test_a_teacher_with_a_token_in_front_agrees_with_its_own_store(
    tier: str, tmp_path: Path
) -> None:
    """The dump puts the token in front of each window; the tokenizer adds none."""
    model = save_decoder(tmp_path / "model", "Llama", bos="<end>")
    corpus = write_corpus(tmp_path / "corpus.txt", 6)
    words = {"attention": "none", "hidden": "none", "logits": tier, "codec": "exact"}
    given = LmSettings(store=dumped(model, corpus, tmp_path / "s.zarr", **words))
    found = _score(model, corpus, given)
    assert found["agreement"] == 1 and abs(found["kl"]) < 1e-5


@pytest.mark.slow
def test_a_teacher_agrees_with_its_own_store(
    near_sighted: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 8)
    made = dumped(
        near_sighted, corpus, tmp_path / "s.zarr", attention="none", hidden="none", logits="topk:16"
    )
    words = ("--task", "lm", "--test", corpus, "--store", made)
    found = {}
    for name, model in (("own", near_sighted), ("other", tiny_teacher("gpt2"))):
        said = done(*words, "--model", model, "--out", tmp_path / name)
        assert "agreement with the store" in said
        found[name] = scores_of(tmp_path / name)["mean"]["test"]
    assert found["own"]["agreement"] > 0.999
    assert abs(found["own"]["kl"]) < found["other"]["kl"] / 10
    assert found["other"]["agreement"] < 0.1
    masked, drawn = tmp_path / "m.zarr", tmp_path / "d.zarr"
    make_store(masked, features_of())
    dumped(near_sighted, corpus, drawn, attention="none", hidden="none", logits="sample:16")
    given = ("--task", "lm", "--test", corpus, "--model", near_sighted, "--out", tmp_path / "no")
    assert "has no logits of next tokens" in refused(*given, "--store", masked)
    assert "random draws" in refused(*given, "--store", drawn)
    assert "missing.zarr: no such file" in refused(*given, "--store", tmp_path / "missing.zarr")


def test_a_tokenizer_whose_bytes_cannot_be_counted_is_one_line() -> None:
    tokenizer = trained_tokenizer("bpe-plain")
    # Python's `re` has no such classes of characters.
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(r"\p{Zs}+"), " ")
    with pytest.raises(UserError, match=r"the bytes of its tokens cannot be counted: .*p[{]Zs"):
        read_documents(tokenizer, ENGLISH[:1])


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


def test_bits_a_byte_match_task_lm(decoder: Path, tasks: Path, tmp_path: Path) -> None:
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
