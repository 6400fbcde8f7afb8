"""sts scores with the modules of a folder equal the library's; missing parts give one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from teachonce.checkpoints.embedders import Embedder, TruncationCount
from teachonce.checkpoints.fields import CONFIG, MODULES, SETTINGS
from teachonce.downstream.tasks.sts import SentenceSimilarity
from tests.downstream.support import refused
from tests.downstream.tasks.test_sts import alike
from tests.downstream.test_as_is import scored
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import changed, dense, modules, normalize, pooling


def static(make_tokenizer: Tokenizers, folder: Path) -> Path:
    """Save word vectors with their mean, without a transformer."""
    tokenizer = make_tokenizer("wordpiece").backend_tokenizer
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    model.save(str(folder), create_model_card=False)
    return folder


@pytest.mark.parametrize("kind", ["modules", "static"])
def test_a_folder_is_scored_by_its_own_modules(
    kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    folder, pairs = tmp_path / "model", alike(tmp_path / "test.tsv", 24, 0)
    if kind == "static":
        static(make_tokenizer, folder)
    else:
        parts = (pooling("lasttoken"), dense(32, 8), normalize())
        prompt = {"prompts": {"all": "moss "}, "default_prompt_name": "all"}
        modules(*parts, base=tiny_teacher("bert"), folder=folder, **prompt)
    rows = SentenceSimilarity().read(pairs)
    evaluator = EmbeddingSimilarityEvaluator(
        [row.text_a for row in rows],
        [row.text_b for row in rows],
        [row.score for row in rows],
        write_csv=False,
    )
    expected = evaluator(SentenceTransformer(str(folder), device="cpu"))
    found = scored("sts", folder, pairs, tmp_path / "out")["mean"]["test"]
    assert found["pearson"] == pytest.approx(expected["pearson_cosine"], abs=1e-5)
    assert found["spearman"] == pytest.approx(expected["spearman_cosine"], abs=1e-3)


def test_loading_prints_nothing(tiny_teacher: Teachers, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers would report the masked-LM head, which the embedder does not load."""
    folder = tiny_teacher("bert")
    capfd.readouterr()  # saving the teacher prints
    assert Embedder(str(folder)).vectors(["a text"]).shape == (1, 32)
    assert capfd.readouterr() == ("", "")


def in_subfolder(folder: Path, name: str) -> Path:
    """Move the transformer of a folder into a subfolder; return the folder."""
    files = [path for path in folder.iterdir() if path.is_file()]
    (folder / name).mkdir()
    for path in files:
        if path.name not in (MODULES, SETTINGS):
            path.rename(folder / name / path.name)
    listed = json.loads((folder / MODULES).read_text())
    listed[0]["path"] = name
    (folder / MODULES).write_text(json.dumps(listed))
    return folder


RELATIVE: dict[str, Any] = {"position_embedding_type": "relative_key"}
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "damaged": (
        lambda f: (f / "1_Pooling" / CONFIG).write_text("{"),
        "sentence-transformers cannot load it",
    ),
    "no pooling": (
        lambda f: (f / MODULES).write_text(json.dumps(json.loads((f / MODULES).read_text())[:1])),
        "no pooling in it (modules.json), so it gives no vector of a text; save it with",
    ),
    # The library ignores these.
    "positions": (lambda f: changed(f, CONFIG, **RELATIVE), "is 'relative_key' in config.json"),
    "positions, in the layout of older releases": (
        lambda f: changed(in_subfolder(f, "0_Model"), f"0_Model/{CONFIG}", **RELATIVE),
        "is 'relative_key' in config.json",
    ),
    "similarity": (
        lambda f: changed(f, SETTINGS, similarity_fn_name="euclidean"), "compared by euclidean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_what_cannot_be_scored_is_refused_in_a_line(
    tiny_teacher: Teachers, tmp_path: Path, case: str
) -> None:
    spoil, line = SPOILED[case]
    folder = modules(pooling("mean"), base=tiny_teacher("bert"), folder=tmp_path / "model")
    spoil(folder)
    words = ("--task", "sts", "--as-is", "--model", folder, "--out", tmp_path / "out")
    assert line in refused(*words, "--test", alike(tmp_path / "test.tsv", 8, 0))


def test_a_text_without_pieces_has_a_vector_in_half_precision_too(tmp_path: Path) -> None:
    """In float16, whose smallest number is above the guard 1e-12, an empty text has a vector."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    static = StaticEmbedding(tokenizer, embedding_dim=8)
    SentenceTransformer(modules=[static, Normalize()]).half().save(str(tmp_path / "half"))
    found = Embedder(str(tmp_path / "half")).vectors(["", "cat"])
    embedder = Embedder(str(tmp_path / "half"), max_length=2)
    assert np.array_equal(embedder.vectors(["cat cat dog", "cat cat"]), found[[1, 1]])
    assert embedder.cuts.note() == "1 of 2 texts cut to 2 tokens"
    static.tokenizer.enable_truncation(1)  # the folder's own limit is the shorter one
    SentenceTransformer(modules=[static, Normalize()]).save(str(tmp_path / "short"))
    embedder = Embedder(str(tmp_path / "short"), max_length=2)
    embedder.vectors(["cat cat", "cat"])
    assert embedder.cuts.note() == "1 of 2 texts cut to 1 token"
    read = list[str]()

    def split(number: int, text: Any) -> list[Any]:
        read.append(str(text))
        return [text]

    static.tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(
        SimpleNamespace(pre_tokenize=lambda text: text.split(split))
    )
    static.tokenizer.enable_truncation(20)
    # The model tokenizes it once: a text of so few bytes cannot be truncated.
    cuts = TruncationCount()
    cuts.add(SimpleNamespace(max_seq_length=None, tokenizer=static.tokenizer), ["cat", "cat " * 9])
    assert read == ["cat " * 9]
    assert not found[0].any() and abs(float((found[1] ** 2).sum()) - 1) < 1e-3


def test_a_folder_that_compares_by_dot_products_is_scored_by_cosines(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    folder, test = static(make_tokenizer, tmp_path / "model"), alike(tmp_path / "test.tsv", 20, 0)
    expected = scored("sts", folder, test, tmp_path / "cosine")["mean"]
    changed(folder, SETTINGS, similarity_fn_name="dot")
    found = scored("sts", folder, test, tmp_path / "dot")["mean"]
    assert found["test"] == pytest.approx(expected["test"], abs=1e-5)
