"""Scores of a folder of sentence-transformers or of a CrossEncoder equal the library's.

- sts scores with the modules of a folder equal the library's; missing parts give one line.
- Settings for scores in a CrossEncoder folder are applied, or refused.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from teachonce.checkpoints.embedders import Embedder, TruncationCount
from teachonce.checkpoints.fields import CONFIG, LENGTHS, MODULES, SETTINGS
from teachonce.checkpoints.loading import load_with_tokenizer
from teachonce.checkpoints.names import resolve_model
from teachonce.checkpoints.sentence_settings import declared_activation
from teachonce.downstream.tasks.sts import SentenceSimilarity
from teachonce.store import open_store
from teachonce.store.format.features import SEVERAL_LABELS
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.downstream.support import done, refused
from tests.downstream.tasks.test_tasks import alike
from tests.downstream.test_models import scored
from tests.end_to_end.support import ok
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import changed, dense, modules, normalize, pooling
from tests.making.texts import ENGLISH


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


PAIRS = (
    ("The OLD stories", "were long"),
    ("A house", "by the Sea"),
    ("short", "also short"),
    (ENGLISH[0], ENGLISH[6]),
)
IDENTITY = "torch.nn.modules.linear.Identity"
SCORES: dict[str, Any] = {"head": "score", "logits": None, "text_column": "one,two"}


def saved(
    tiny_teacher: Teachers, folder: Path, labels: tuple[str, ...] = ("s",), **settings: Any
) -> Path:
    """Save a folder with the installed CrossEncoder, which stores its activation in SETTINGS."""
    from sentence_transformers import CrossEncoder

    base = tiny_teacher("bert", "classification", labels)
    CrossEncoder(str(base), device="cpu", **settings).save_pretrained(str(folder))
    return folder


def predicted(folder: Path) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu").predict(PAIRS)


def scores(folder: Path, tmp_path: Path) -> Any:
    corpus = tmp_path / "pairs.csv"
    corpus.write_text("\n".join(["one,two", *(",".join(pair) for pair in PAIRS)]) + "\n", "utf-8")
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **SCORES))
    return store, np.array([record.views[0].class_logits[0] for record in store])


def test_scores_match_the_library(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """Scores follow the activation, the lower-casing and the maximum length (12 tokens, although
    the tokenizer allows 128) of the folder."""
    folder = saved(tiny_teacher, tmp_path / "m", activation_fn=torch.nn.Identity())
    changed(folder, LENGTHS, max_seq_length=12)
    before = predicted(folder)
    changed(folder, LENGTHS, do_lower_case=True)
    wanted = predicted(folder)
    assert not np.allclose(before, wanted, atol=1e-3)
    store, found = scores(folder, tmp_path)
    assert np.allclose(found, wanted, atol=1e-6)
    assert max(len(record.token_ids) for record in store) == 12
    about = store.teacher_settings("config.json")["sentence_transformers"]
    assert about["activation_fn"] == IDENTITY
    tokenizer, _ = load_with_tokenizer(resolve_model(str(folder)), "classification")
    assert tokenizer("OLD")["input_ids"] == tokenizer("old")["input_ids"]
    assert tokenizer.model_max_length == 12


def test_a_reranker_is_not_taken_for_an_embedding_model(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """`teacher-dump` offers no vectors; `downstream --task sts` names the task that scores it."""
    folder, table = saved(tiny_teacher, tmp_path / "m"), alike(tmp_path / "test.tsv", 8, 0)
    plan = ("--corpus", table, "--text-column", "text_a,text_b", "--device", "cpu", "--plan")
    assert "embedding" not in ok(teacher_dump, "--model", folder, *plan, "--out", tmp_path / "a.h5")
    words = ("--task", "sts", "--as-is", "--model", folder, "--test", table)
    line = refused(*words, "--out", tmp_path / "sts")
    assert f"{folder}: is a CrossEncoder ({SETTINGS}), which gives no vector of a text" in line
    assert "`downstream --task pair --as-is` scores a reranker" in line
    changed(folder, SETTINGS, model_type="SparseEncoder")
    line = refused(*words, "--out", tmp_path / "sts")
    assert "is a SparseEncoder" in line and line.endswith("give an embedding model")
    changed(folder, SETTINGS, model_type="CrossEncoder")
    done("--task", "pair", *words[2:], "--out", tmp_path / "pair")


def test_what_the_library_does_by_itself_is_not_noted(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    folder = saved(tiny_teacher, tmp_path / "m")
    teacher = load_teacher(str(folder), head="score", attention="none")
    assert not hasattr(teacher.config, "sentence_transformers")
    several = saved(tiny_teacher, tmp_path / "n", ("a", "b"), activation_fn=torch.nn.Sigmoid())
    task = load_teacher(str(several), head="classification", attention="none").task
    assert task and task.problem_type == SEVERAL_LABELS


Spoil = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("spoil", "line"),
    (
        (
            lambda f: changed(f, SETTINGS, prompts={"q": "find: "}, default_prompt_name="q"),
            "default_prompt_name is 'q' in .*set default_prompt_name to null",
        ),
        (
            lambda f: changed(f, SETTINGS, activation_fn="os.system"),
            "is 'os.system' in config_sentence_transformers.json, expected a class of torch.nn",
        ),
        (
            lambda f: changed(f, SETTINGS, activation_fn="torch.nn.functional.Sigmoid"),
            "is 'torch.nn.functional.Sigmoid' in config_sentence",
        ),
        (
            lambda f: changed(f, "config.json", sentence_transformers={"activation_fn": "os.fork"}),
            "is 'os.fork' in config.json",
        ),
        (
            lambda f: changed(f, "config.json", sbert_ce_default_activation_function="os.fork"),
            "is 'os.fork' in config.json",
        ),
        (
            lambda f: changed(f, LENGTHS, transformer_task="text-generation"),
            "transformer_task is 'text-generation'",
        ),
        (
            lambda f: (f / "modules.json").write_text(
                '[{"type": "sentence_transformers.X.Transformer", "path": ""},'
                ' {"type": "sentence_transformers.X.LogitScore", "path": "1"}]'
            ),
            "a CrossEncoder of the modules Transformer, LogitScore",
        ),
    ),
)
def test_settings_that_are_refused(
    tiny_teacher: Teachers, tmp_path: Path, spoil: Spoil, line: str
) -> None:
    folder = saved(tiny_teacher, tmp_path / "m")
    spoil(folder)
    with pytest.raises(UserError, match=line):
        load_teacher(str(folder), head="score", attention="none")


def test_an_activation_in_a_store_is_checked() -> None:
    """An untrusted store cannot name an arbitrary function as the activation of a CrossEncoder."""
    for good in (IDENTITY, "torch.nn.Sigmoid", None):
        config = SimpleNamespace(sentence_transformers={"activation_fn": good})
        assert declared_activation("s.zarr", config) == good
    with pytest.raises(UserError, match=r"s\.zarr: the activation .* is 'os\.system'"):
        declared_activation(
            "s.zarr", SimpleNamespace(sbert_ce_default_activation_function="os.system")
        )


def test_a_cross_encoder_makes_no_vectors(tiny_teacher: Teachers, tmp_path: Path) -> None:
    folder = saved(tiny_teacher, tmp_path / "m")
    with pytest.raises(UserError, match="model_type is 'CrossEncoder' .*--head score"):
        load_teacher(str(folder), head="embedding", attention="none")
