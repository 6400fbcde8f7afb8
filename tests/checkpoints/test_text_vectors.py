"""Vectors of texts equal sentence-transformers' vectors, whatever modules a folder has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from teachonce.checkpoints.sentence_folder import VectorHead, write_sentence_folder
from teachonce.store import EmbeddingSpec, open_store
from teachonce.store.tools.verify import verify
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.teacher.teacher import Teacher, VectorOptions
from tests.making.dumps import dumped
from tests.making.models import Teachers
from tests.making.sentence_folders import (
    PROMPTS,
    changed,
    decoder,
    dense,
    dropout,
    layer_norm,
    modules,
    normalize,
    pooling,
)
from tests.making.texts import ENGLISH

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
BEHIND: dict[str, Callable[[], list[Any]]] = {
    "mean, length 1": lambda: [pooling("mean"), normalize()],
    "max": lambda: [pooling("max")],
    "dense": lambda: [
        pooling("cls"),
        dense(32, 8),
        dense(8, 12, bias=False, activation_function=torch.nn.GELU(), use_residual=True),
        normalize(),
    ],
    "all ways": lambda: [pooling(MODES)],
    "in another order": lambda: [pooling(("cls", "mean", "max"))],
    "layer norm and dropout": lambda: [pooling("mean"), layer_norm(32), dropout(), normalize()],
    "length 1 between": lambda: [pooling("mean"), normalize(), dense(32, 8)],
    "states first": lambda: [
        dense(32, 16, module_input_name="token_embeddings"),
        normalize("token_embeddings"),
        pooling("mean", width=16),
        normalize(),
    ],
    "without the prompt": lambda: [pooling(("mean", "weightedmean"), include_prompt=False)],
}


VECTORS: dict[str, Any] = {"head": "embedding", "logits": None, "codec": "exact"}


def library(
    folder: Path,
    texts: list[str],
    prompt: str | None = None,
    batch: int = 3,
    longest: int | None = None,
) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    if longest:
        model.max_seq_length = longest
    return model.encode(texts, batch_size=batch, prompt_name=prompt)


def texts_of(path: Path, texts: tuple[str, ...] = ENGLISH[:12]) -> Path:
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("prompt", ("query", None))
def test_a_folder_is_read_as_it_is(
    tiny_teacher: Teachers, tmp_path: Path, name: str, prompt: str | None
) -> None:
    base = tiny_teacher("bert")
    folder = modules(*BEHIND[name](), base=base, folder=tmp_path / "m", prompts=PROMPTS)
    corpus = texts_of(tmp_path / "a.txt")
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **VECTORS, prompt=prompt))
    wanted = library(folder, list(ENGLISH[:12]), prompt)
    assert np.allclose(store.embeddings(), wanted, atol=2e-5)
    spec = store.features.embedding
    assert spec and spec.prompt == (PROMPTS["query"] if prompt else "")
    ends = ("mean, length 1", "dense", "layer norm and dropout", "states first")
    assert spec.normalised == (name in ends)
    assert [record.text for record in store] == [spec.prompt + text for text in ENGLISH[:12]]
    assert not store.features.has_token_features and len(store) == 12
    assert json.loads(store.teacher_file("config_sentence_transformers.json"))["prompts"] == PROMPTS


LONG = (
    "storiesandriversandcities" * 3,  # a WordPiece of more than 100 characters is unknown
    "ACGTTGCA" * 12,
    "see https://a.example/" + "old/story?x=1&y=" * 20,
    "это " + "старыедеревни" * 7,
    " ".join(ENGLISH[:9]),
    "short",
)


@pytest.mark.parametrize("kind", ("bert", "roberta", "xlmr"))
@pytest.mark.parametrize("prompt, side", (("query", "right"), (None, "right"), (None, "left")))
def test_long_texts_have_the_vectors_of_the_library(
    tiny_teacher: Teachers, tmp_path: Path, kind: str, prompt: str | None, side: str
) -> None:
    folder = modules(
        pooling("mean"), base=tiny_teacher(kind), folder=tmp_path / "m", prompts=PROMPTS
    )
    changed(folder, "tokenizer_config.json", truncation_side=side)
    texts = [*LONG[4:]] if side == "left" else [*LONG]
    # alone, a piece from inside a word becomes another piece
    if side == "left" and kind != "roberta":
        texts = ["the " * 60, "short"]
    corpus = texts_of(tmp_path / "a.txt", tuple(texts))
    asked = VECTORS | {"prompt": prompt, "max_length": 24}
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **asked))
    wanted = library(folder, texts, prompt, 1, 24)
    assert np.allclose(store.embeddings(), wanted, atol=2e-5)
    assert verify(store.path).problems == []
    if (kind, side) == ("bert", "left"):
        options: dict[str, Any] = {"vocab": "120", "student": "8x1x1", "steps": 1, "held_out": 0}
        run(
            TrainOptions(
                store=store.path,
                out=tmp_path / "s",
                device="cpu",
                loss={"embedding": 1.0},
                **options,
            )
        )
        assert AutoTokenizer.from_pretrained(tmp_path / "s").truncation_side == "left"


def test_a_prompt_and_texts_cut_at_their_beginning(tiny_teacher: Teachers, tmp_path: Path) -> None:
    folder = modules(
        pooling("mean"), base=tiny_teacher("bert"), folder=tmp_path / "m", prompts=PROMPTS
    )
    changed(folder, "tokenizer_config.json", truncation_side="left")
    with pytest.raises(UserError, match="--prompt query: .*truncation_side .* --prompt ''"):
        load_teacher(
            str(folder), head="embedding", attention="none", vectors=VectorOptions(prompt="query")
        )


def test_vectors_are_cut_as_the_folder_says(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """Vectors are truncated after all modules, as in the library, so their length is not 1."""
    behind = [pooling("mean"), normalize()]
    folder = modules(*behind, base=tiny_teacher("bert"), folder=tmp_path / "m", truncate_dim=8)
    corpus = texts_of(tmp_path / "a.txt")
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **VECTORS))
    wanted = library(folder, list(ENGLISH[:12]))
    assert wanted.shape == (12, 8) and np.allclose(store.embeddings(), wanted, atol=2e-5)
    assert store.features.embedding == EmbeddingSpec(8, "mean, first 8")


@pytest.mark.parametrize("side", ("left", "right"))
def test_decoders_pool_their_last_token(tiny_teacher: Teachers, tmp_path: Path, side: str) -> None:
    """The last token is pooled after an instruction, whichever side the library pads.

    The reference encodes one text at a time: GPT-2's positions count left padding.
    """
    base = decoder(tiny_teacher, tmp_path / "base", side)
    behind = [pooling("lasttoken"), normalize()]
    folder = modules(*behind, base=base, folder=tmp_path / "m", prompts=PROMPTS)
    corpus, asked = texts_of(tmp_path / "a.txt"), VECTORS | {"prompt": "query", "hidden": "layer:4"}
    store = open_store(dumped(folder, corpus, tmp_path / "a.h5", **asked))
    wanted = library(folder, list(ENGLISH[:12]), "query", batch=1)
    assert np.allclose(store.embeddings(), wanted, atol=2e-5)
    last = store[0].views[0].hidden["layer4"][-1]
    assert np.allclose(last / np.linalg.norm(last), wanted[0], atol=2e-5)


def test_a_plain_checkpoint_takes_a_pooling(tiny_teacher: Teachers, tmp_path: Path) -> None:
    base = tiny_teacher("roberta")
    for word, mode in {"mean": "mean", "cls": "cls", "max": "max", "last": "lasttoken"}.items():
        folder = modules(pooling(mode), base=base, folder=tmp_path / word)
        teacher = load_teacher(
            str(base), head="embedding", vectors=VectorOptions(pooling=word), attention="none"
        )
        assert teacher.text_vectors and teacher.text_vectors.spec == EmbeddingSpec(32, mode)
        vectors = _vectors(teacher, list(ENGLISH[:5]))
        assert np.allclose(vectors, library(folder, list(ENGLISH[:5])), atol=2e-5)
    replaced = load_teacher(
        str(folder), head="embedding", vectors=VectorOptions(pooling="mean"), attention="none"
    )
    assert replaced.text_vectors and replaced.text_vectors.spec.pooling == "mean"


def _vectors(teacher: Teacher, texts: list[str]) -> Any:
    found = []
    for text in texts:
        ids = np.array([teacher.tokenizer(text)["input_ids"]])
        vectors = teacher.run(ids, np.ones(ids.shape, bool)).vectors
        assert vectors is not None
        found.append(vectors[0].numpy())
    return np.stack(found)


def test_what_is_written_is_what_the_library_reads(tiny_teacher: Teachers, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    torch.manual_seed(0)
    base = tiny_teacher("bert")
    head = VectorHead(pooling("mean"), dense(32, 7), normalize())
    AutoModel.from_pretrained(base).save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "m")
    write_sentence_folder(
        tmp_path / "m", head, max_length=11, prompts=PROMPTS, default_prompt="query"
    )
    model = SentenceTransformer(str(tmp_path / "m"), device="cpu")
    assert model.prompts == PROMPTS and model.default_prompt_name == "query"
    assert model.max_seq_length == 11 and model.similarity_fn_name == "cosine"
    teacher = load_teacher(str(tmp_path / "m"), head="embedding", attention="none")
    assert teacher.text_vectors and teacher.text_vectors.max_length == 11
    assert teacher.text_vectors.prompt == PROMPTS["query"]  # the default
    wanted = model.encode(["The old"])
    assert np.allclose(_vectors(teacher, [PROMPTS["query"] + "The old"]), wanted, atol=2e-5)
    read = teacher.text_vectors.head.state_dict()
    assert all(torch.equal(values, read[name]) for name, values in head.state_dict().items())


BAD: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "no pooling": (
        lambda f: (f / "modules.json").unlink(), {}, "no pooling in it .* give --pooling mean",
    ),
    "unknown prompt": (
        lambda f: None, {"prompt": "title"}, r"--prompt title: .* it has: document, query",
    ),
    "unknown activation": (
        lambda f: changed(f, "2_Dense/config.json", activation_function="mine.Swirl"), {},
        "2_Dense/config.json: unknown activation 'Swirl': expected one of torch.nn",
    ),
    "no activation": (
        lambda f: changed(f, "2_Dense/config.json", activation_function="torch.nn.Linear"), {},
        "unknown activation 'Linear'",
    ),
    "lost weights": (
        lambda f: (f / "2_Dense/model.safetensors").unlink(), {},
        "2_Dense is not a Dense that .* can load: Could not find 'model.safetensors'",
    ),
    "other weights": (
        lambda f: changed(f, "2_Dense/config.json", out_features=9), {},
        "2_Dense is not a Dense that .* can load: .*size mismatch",
    ),
    "damaged weights": (
        lambda f: (f / "2_Dense/model.safetensors").write_bytes(b"no"), {},
        "2_Dense is not a Dense that sentence-transformers can load",
    ),
    "lost config": (
        lambda f: (f / "1_Pooling/config.json").unlink(), {}, "1_Pooling/config.json is missing",
    ),
    "no JSON": (lambda f: (f / "modules.json").write_text("{"), {}, "modules.json is not JSON"),
    "no list": (lambda f: (f / "modules.json").write_text("[7]"), {}, "is not a list of modules"),
    "another width": (
        lambda f: changed(f, "1_Pooling/config.json", embedding_dimension=64), {},
        "its pooling expects states of size 64, and the transformer's hidden size is 32",
    ),
    "another way": (
        lambda f: changed(f, "1_Pooling/config.json", pooling_mode="median"), {},
        "1_Pooling is not a Pooling that .* can load: Invalid pooling mode: 'median'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_folders_that_cannot_be_read(tiny_teacher: Teachers, tmp_path: Path, name: str) -> None:
    spoil, options, printed = BAD[name]
    behind = [pooling("mean"), dense(32, 8), normalize()]
    base = tiny_teacher("bert")
    folder = modules(*behind, base=base, folder=tmp_path / "m", prompts=PROMPTS)
    spoil(folder)
    with pytest.raises(UserError, match=printed) as error:
        load_teacher(
            str(folder), head="embedding", attention="none", vectors=VectorOptions(**options)
        )
    assert "\n" not in str(error.value)


def test_modules_that_are_none_of_ours(tiny_teacher: Teachers, tmp_path: Path) -> None:
    base = tiny_teacher("bert")
    folder = modules(pooling("mean"), base=base, folder=tmp_path / "m")
    listed = json.loads((folder / "modules.json").read_text())
    for changes, printed in (
        ({"type": "x.Pooling"}, "module '1_Pooling' is x.Pooling, a class of another package"),
        ({"type": "sentence_transformers.models.Dropout"}, "no pooling in it"),
        ({"path": "../1_Pooling"}, "which leads out of the folder"),
    ):
        text = json.dumps([listed[0], listed[1] | changes])
        (folder / "modules.json").write_text(text)
        with pytest.raises(UserError, match=printed):
            load_teacher(str(folder), head="embedding", attention="none")
    weights = listed[1] | {"type": "sentence_transformers.models.WordWeights", "path": "2"}
    (folder / "modules.json").write_text(json.dumps([*listed, weights]))
    with pytest.raises(UserError, match="module 2 is a WordWeights after its vectors, expected D"):
        load_teacher(str(folder), head="embedding", attention="none")
    (folder / "modules.json").write_text(json.dumps([listed[0] | {"type": "Router"}]))
    with pytest.raises(UserError, match="its first module is Router, expected a Transformer or S"):
        load_teacher(str(folder), head="embedding", attention="none")
