"""Vectors of texts equal sentence-transformers' vectors, of modules and of tables of words.

- Vectors of texts equal sentence-transformers' vectors, whatever modules a folder has.
- Tables of word vectors as teachers give the vectors of sentence-transformers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model2vec import StaticModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from teachonce.checkpoints.sentence_folder import VectorHead, write_sentence_folder
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import EmbeddingSpec, open_store
from teachonce.store.tools.verify import verify
from teachonce.student_export.formats.model2vec import write_float
from teachonce.student_export.loaded_student import load_student
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.output.run import run
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.teacher.teacher import Teacher, VectorOptions
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import (
    PROMPTS,
    changed,
    decoder,
    dense,
    dropout,
    layer_norm,
    mean_embedder,
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
    folder = mean_embedder(tiny_teacher("bert"), tmp_path / "m", truncate_dim=8)
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


def saved(make_tokenizer: Tokenizers, kind: str, folder: Path, **settings: Any) -> Path:
    """Save a folder of a StaticEmbedding, a Dense and a Normalize with vectors of 12 numbers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tokenizer = make_tokenizer(kind).backend_tokenizer
        words = StaticEmbedding(tokenizer, embedding_dim=8)
    parts = [words, dense(8, 12), normalize()]
    made = SentenceTransformer(modules=parts, device="cpu", **settings)
    made.save(str(folder), create_model_card=False)
    return folder


def like_model2vec(folder: Path) -> Path:
    """Convert a folder to the names and files that Model2Vec writes: a row for several pieces,
    weights of pieces, half precision, a path of `.` and a config.json of its own."""
    weights = load_file(folder / "model.safetensors")["embedding.weight"]
    mapping = torch.arange(len(weights)) // 2
    weight = torch.linspace(0.1, 2, len(weights), dtype=torch.float64)
    tensors = {"embeddings": weights[::2].half(), "mapping": mapping, "weights": weight}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    listed = json.loads((folder / "modules.json").read_text())
    listed[0] |= {"path": ".", "type": "sentence_transformers.models.StaticEmbedding"}
    (folder / "modules.json").write_text(json.dumps(listed))
    fields: dict[str, Any] = {
        "architectures": ["StaticModel"],
        "hidden_dim": 8,
        "seq_length": 1000000,
    }
    return changed(folder, "config.json", model_type="model2vec", normalize=True, **fields)


@pytest.mark.parametrize("kind", ("wordpiece", "bpe", "unigram"))
@pytest.mark.parametrize("model2vec", (False, True))
def test_word_vectors_are_a_teacher(
    make_tokenizer: Tokenizers, tmp_path: Path, kind: str, model2vec: bool
) -> None:
    settings = {"prompts": PROMPTS, "default_prompt_name": "query", "truncate_dim": 9}
    folder = saved(make_tokenizer, kind, tmp_path / "m", **settings)
    if model2vec:
        like_model2vec(folder)
    corpus = texts_of(tmp_path / "a.txt")
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **VECTORS))
    assert np.allclose(store.embeddings(), library(folder, list(ENGLISH[:12])), atol=1e-6)
    assert store.features.embedding == EmbeddingSpec(9, "mean, dense 12 Tanh, first 9", "find: ")
    assert not any(record.special.any() for record in store)
    teacher = load_teacher(str(folder), head="embedding", hidden="none", attention="none")
    assert teacher.weights_hash() == store.identity["teacher"]["weights_hash"]
    assert not teacher.notes
    changed(folder, "config_sentence_transformers.json", swirl=0.5)
    teacher = load_teacher(str(folder), head="embedding", hidden="none", attention="none")
    assert "config_sentence_transformers.json: swirl: not in the list" in teacher.notes[0]


@pytest.mark.parametrize("side", ("right", "left"))
def test_texts_are_truncated_as_by_the_tokenizer_of_the_folder(
    make_tokenizer: Tokenizers, tmp_path: Path, side: str
) -> None:
    """A StaticEmbedding that was made from a transformer's tokenizer often has its truncation."""
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.enable_truncation(5, direction=side)
    made.save(str(folder / "tokenizer.json"))
    corpus, texts = texts_of(tmp_path / "a.txt"), list(ENGLISH[:12])
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **VECTORS))
    wanted = library(folder, texts)
    assert all(len(record.token_ids) <= 5 for record in store)
    if side == "left":  # a dump begins at the next word
        read = zip(texts, (record.text for record in store), strict=True)
        assert all(text.endswith(part) and text != part for text, part in read)
    else:
        assert np.allclose(store.embeddings(), wanted, atol=1e-6)
    with pytest.raises(UserError, match="at most 5 tokens"):
        dumped(folder, corpus, tmp_path / "b.zarr", **VECTORS, max_length=6)
    student = load_student(folder)
    assert np.allclose(student.run(student.encode(texts)), wanted, atol=1e-6)
    about = json.loads((tmp_path / "m" / "modules.json").read_text())[:1]
    (folder / "modules.json").write_text(json.dumps(about))  # model2vec has no Dense with Tanh
    (tmp_path / "x").mkdir()
    if side == "left":
        with pytest.raises(UserError, match="leaves out the start of a long text"):
            write_float(load_student(folder), tmp_path / "x" / "model.safetensors")
        return
    write_float(load_student(folder), tmp_path / "x" / "model.safetensors")
    # Its `encode` also cuts long texts by their characters, before it tokenizes them.
    assert StaticModel.from_pretrained(tmp_path / "x").max_length == 5


def test_a_student_is_trained_on_word_vectors(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    corpus, store = texts_of(tmp_path / "a.txt"), tmp_path / "a.zarr"
    words = ("--model", folder, "--corpus", corpus, "--device", "cpu")
    ok(teacher_dump, *words, "--head", "embedding", "--out", store)
    says(ok(feature_store, "verify", store, "--model", folder), "sound")
    ok(
        *(student_train, "--store", store, "--vocab", "450", "--student", "static:8"),
        *("--steps", "4", "--batch-texts", "6", "--device", "cpu", "--out", tmp_path / "s"),
    )
    assert library(tmp_path / "s", ["The old"]).shape == (1, 12)
    again = open_store(dumped(tmp_path / "s", corpus, tmp_path / "b.zarr", **VECTORS))
    assert np.allclose(again.embeddings(), library(tmp_path / "s", list(ENGLISH[:12])), atol=1e-6)
    line = refused(teacher_dump, *words, "--out", tmp_path / "c.zarr")
    assert "a table of word vectors, which gives only vectors of texts; add --head embed" in line
    for feature in ("--hidden", "--attention"):
        line = refused(
            *(teacher_dump, *words, "--head", "embedding", feature, "mean"),
            *("--out", tmp_path / "c.zarr"),
        )
        assert "has no hidden states and no attention maps; give --hidden none --att" in line


def test_a_static_student_reads_whole_texts(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    """A tokenizer of a transformer often has a truncation, which a StaticEmbedding would apply."""
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    store = dumped(folder, texts_of(tmp_path / "a.txt"), tmp_path / "a.zarr", **VECTORS)
    make_tokenizer("wordpiece").save_pretrained(tmp_path / "v")
    made = Tokenizer.from_file(str(tmp_path / "v" / "tokenizer.json"))
    made.enable_truncation(5)
    made.save(str(tmp_path / "v" / "tokenizer.json"))
    ok(
        *(student_train, "--store", store, "--vocab", tmp_path / "v", "--student", "static:8"),
        *("--steps", "1", "--device", "cpu", "--out", tmp_path / "s"),
    )
    assert Tokenizer.from_file(str(tmp_path / "s" / "tokenizer.json")).truncation is None
    short, long = library(tmp_path / "s", [ENGLISH[0], f"{ENGLISH[0]} {ENGLISH[1]}"])
    assert not np.allclose(short, long, atol=1e-4)


def test_a_damaged_table_is_one_line(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot load its StaticEmbedding: .*copy the whole") as e:
        load_teacher(str(folder), head="embedding", hidden="none", attention="none")
    assert "\n" not in str(e.value)
