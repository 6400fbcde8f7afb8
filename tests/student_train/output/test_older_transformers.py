"""A student's folder has the same outputs in transformers 4, transformers 5 and
sentence-transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from teachonce.checkpoints.checkpoint_tokenizer import common_settings, save_tokenizer
from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from tests.end_to_end.support import Word, Words, ok
from tests.making.environment import borrowing_python, printed_by
from tests.making.models import Tokenizers
from tests.making.texts import ENGLISH, RUSSIAN

TEXTS = (" ".join(ENGLISH[:5]), *RUSSIAN[:2])  # the first is longer than a local attention sees
STUDENTS: dict[str, Words] = {
    "wordpiece": ("--student", "32x2x4", "--vocab", 500),
    "teacher": ("--student", "32x2x4", "--vocab", "teacher"),
    "modernbert": ("--student", "modernbert:32x4x2", "--vocab", 500),
    "unigram": ("--student", "32x2x4", "--vocab", "FOLDER"),
}


@pytest.fixture(scope="module")
def students(
    store: FeatureStore, make_tokenizer: Tokenizers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Train students whose tokenizers have different origins; one has special tokens without a
    role.

    Their weights are large, so that any difference in attention changes the logits.
    """
    root = tmp_path_factory.mktemp("students")
    unigram = make_tokenizer("unigram")
    unigram.save_pretrained(root / "vocabulary")
    other = AutoTokenizer.from_pretrained(root / "vocabulary")
    other.add_special_tokens({"additional_special_tokens": ["<new>", "<newer>"]})
    other.save_pretrained(root / "vocabulary")
    found = {}
    for name, words in STUDENTS.items():
        given: list[Word] = [root / "vocabulary" if word == "FOLDER" else word for word in words]
        more = ("--init", "random", "--steps", 0, "--loss", "mlm", "--device", "cpu")
        ok(main, "--store", store.path, "--out", root / name, *given, *more)
        found[name] = root / name
        weights = load_file(root / name / "model.safetensors")
        grown = {key: 15 * value if value.ndim == 2 else value for key, value in weights.items()}
        save_file(grown, root / name / "model.safetensors", metadata={"format": "pt"})
    return found


def test_the_settings_of_a_tokenizer_are_those_that_both_know(students: dict[str, Path]) -> None:
    for folder in students.values():
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not settings.keys() & {"backend", "is_local", "extra_special_tokens"}
    assert settings["additional_special_tokens"] == ["<new>", "<newer>"]
    again = AutoTokenizer.from_pretrained(students["unigram"])
    assert again.convert_ids_to_tokens(again("<newer>")["input_ids"])[1:-1] == ["<newer>"]
    assert set(again.extra_special_tokens) == {"<new>", "<newer>"}


def test_a_class_of_its_own_and_a_table_of_tokens_stay() -> None:
    settings = {"tokenizer_class": "BertTokenizer", "extra_special_tokens": {"image": "<i>"}}
    assert common_settings(settings) == settings


def test_a_saved_tokenizer_is_the_same(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    for kind in ("wordpiece", "bpe", "unigram"):
        tokenizer = make_tokenizer(kind)
        save_tokenizer(tokenizer, tmp_path / kind)
        again = AutoTokenizer.from_pretrained(tmp_path / kind)
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        assert again.special_tokens_map == tokenizer.special_tokens_map
        assert again.model_max_length == tokenizer.model_max_length
        assert again.model_input_names == tokenizer.model_input_names


FOREIGN = """
import json, sys
import torch, transformers
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoTokenizer
texts, folders = json.load(sys.stdin)
found = {"version": transformers.__version__}
for name, folder in folders.items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
    vectors = SentenceTransformer(folder, device="cpu").encode(texts)
    found[name] = [batch["input_ids"].tolist(), logits.tolist(), vectors.tolist()]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with transformers 4."""
    packages = ("transformers>=4.57,<5", "sentence-transformers>=5,<6", "datasets<5")
    return borrowing_python(tmp_path_factory.mktemp("older") / "venv", *packages)


@pytest.mark.apart
def test_a_students_folder_in_transformers_4_and_sentence_transformers(
    students: dict[str, Path], older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    asked = json.dumps([TEXTS, {name: str(folder) for name, folder in students.items()}])
    printed = printed_by(older, "-c", FOREIGN, given=asked)
    found = json.loads(printed[printed.index("{") :])
    assert found["version"].startswith("4.")
    for name, folder in students.items():
        ids, logits, vectors = found[name]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        batch = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
        assert batch["input_ids"].tolist() == ids, name
        model = AutoModelForMaskedLM.from_pretrained(folder).eval()
        with torch.no_grad():
            output = model(**batch, output_hidden_states=True)
        present = batch["attention_mask"].bool()
        own, theirs = output.logits[present], torch.tensor(logits)[present]
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
        if name != "modernbert":  # whose last state is normalised again
            states = output.hidden_states[-1] * present[:, :, None]
            means = states.sum(1) / present.sum(1, keepdim=True)
            torch.testing.assert_close(means, torch.tensor(vectors), rtol=1e-4, atol=1e-4)
