"""Captures of each format become stores whose rows are the teacher's values.

- Captures of logits become stores whose rows are the teacher's values for the next token.
- Files of hidden states become stores whose rows are the teacher's states.
- Vectors in files of sentence-transformers and datasets become stores, and stores become such
  files.
- Captures written by the tools' own code are read as that code reads them.
  `golden/distillkit.json`: settings, columns, and what `LogprobCompressor` makes of them, by
  github.com/arcee-ai/DistillKit at a61c2e7. `golden/cp0_dp0__1.tar`: two iterations of two
  microbatches [12,2,70000] by `LogitsSaverHooks(k=6, p=0.9)` of github.com/NVIDIA/Megatron-LM at
  d98e8a6, and in `megatron.json` the six best of each token before they were cut and rounded.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pyarrow import parquet
from transformers import AutoTokenizer

from teachonce.checkpoints import names as checkpoint_names
from teachonce.feature_store.captures.compressed_logprobs import index_bits, packed_ids
from teachonce.feature_store.captures.distillkit import DistillKit
from teachonce.feature_store.captures.formats import ImportOptions
from teachonce.feature_store.captures.megatron import Megatron
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.plan.vector_space import inherited_settings
from tests.end_to_end.support import STUDENT, Words, ok, says
from tests.end_to_end.support import refused as failing
from tests.feature_store.captures.conftest import imported, refused, run
from tests.feature_store.captures.test_engines import other_model
from tests.feature_store.captures.test_refusals import importing
from tests.making.captures import (
    Taught,
    distillkit,
    megatron,
    specforge,
    speculators,
    stacked,
    taught_by,
)
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import mean_embedder, modules, normalize, pooling
from tests.making.texts import ENGLISH


@pytest.mark.parametrize("packed", (False, True))
def test_distillkit(packed: bool, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    source = distillkit(tmp_path / "capture", samples, 16, 16, packed_rows=packed)
    said = imported(source, tmp_path / "a.zarr", teacher, "--codec", "exact")
    assert f"distillkit, {len(samples)} samples, topk:16" in said and "left out" not in said
    store = open_store(tmp_path / "a.zarr")
    assert store.features.logits and store.features.logits.next_token
    assert (store.features.logits.size, len(store)) == (16, len(samples))
    for record, sample in zip(store, samples, strict=True):
        logits = record.views[0].logits
        assert record.text == sample.text
        assert record.token_ids.tolist() == sample.ids.tolist()
        best = np.take_along_axis(sample.logprobs, logits.ids.astype(np.int64), 1)
        assert np.abs(best[:, 0] - sample.logprobs.max(1)).max() < 0.05
        assert np.abs(logits.logprobs - best).max() < 0.05
        left = np.log1p(-np.exp(logits.logprobs.astype(np.float64)).sum(1))
        assert np.abs(logits.rest - left).max() < 0.01
        assert not logits.log_partition.any()


def test_distillkit_with_a_curve_for_the_tail(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """The fitted curve is near the teacher's tail."""
    source = distillkit(tmp_path / "capture", samples, 8, 24)
    imported(source, tmp_path / "a.zarr", teacher, "--codec", "exact")
    for record, sample in zip(open_store(tmp_path / "a.zarr"), samples, strict=True):
        logits = record.views[0].logits
        best = np.take_along_axis(sample.logprobs, logits.ids.astype(np.int64), 1)
        assert np.abs(logits.logprobs - best).mean() < 0.2
        assert (np.diff(logits.logprobs, axis=1) <= 0).all()


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_megatron(dp: int, cp: int, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """Ranks of data have microbatches in turn, ranks of context have chunks of each sequence."""
    length = 16
    ids, logprobs = stacked(samples[:12], length)
    np.save(tmp_path / "tokens.npy", ids)
    micro = logprobs.split(2, dim=1)  # 6 microbatches of 2 sequences
    per_step = 2  # microbatches of an iteration, of all ranks
    batches = [micro[at : at + per_step] for at in range(0, 6, per_step)]
    source = megatron(tmp_path / "run", batches, 8, dp, cp)
    said = imported(
        source, tmp_path / "a.zarr", teacher, "--tokens", tmp_path / "tokens.npy", "--codec",
        "exact",
    )  # fmt: skip
    assert "megatron, 12 samples, topk:8" in said
    store = open_store(tmp_path / "a.zarr")
    found = {tuple(record.token_ids.tolist()): record for record in store}
    assert len(found) == len(store)
    kept = 0
    for row, sample in zip(ids.tolist(), samples, strict=False):
        if (record := found.get(tuple(row))) is None:
            continue  # cut inside a word
        logits = record.views[0].logits
        best = np.take_along_axis(sample.logprobs[:length], logits.ids.astype(np.int64), 1)
        assert np.abs(logits.logprobs - best).max() < 0.01
        assert np.abs(best[:, 0] - sample.logprobs[:length].max(1)).max() < 0.01
        kept += 1
    assert kept >= 8


def test_megatron_with_a_nucleus(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """Empty entries beyond Megatron's nucleus add to the rest, and their ids are ignored."""
    ids, logprobs = stacked(samples[:4], 16)
    np.save(tmp_path / "tokens.npy", ids)
    source = megatron(tmp_path / "run", [[logprobs]], 32, nucleus=0.03)
    tokens = ("--tokens", tmp_path / "tokens.npy", "--codec", "exact")
    assert "fewer than k ids" in imported(source, tmp_path / "a.zarr", teacher, *tokens)
    for record in open_store(tmp_path / "a.zarr"):
        logits = record.views[0].logits
        empty = np.isneginf(logits.logprobs)
        assert empty.any() and not empty[:, 0].any()
        assert (logits.ids[empty] == np.broadcast_to(logits.ids[:, :1], empty.shape)[empty]).all()
        mass = np.exp(logits.logprobs.astype(np.float64)).sum(1) + np.exp(logits.rest)
        assert np.abs(mass - 1).max() < 1e-3


def test_texts_of_a_packed_sequence_are_documents(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """The token that ends a text is left out with its row, as it is not in the text."""
    end = 0  # <|endoftext|>
    whole = np.concatenate([[*sample.ids.tolist(), end] for sample in samples[:4]])
    logprobs = torch.log_softmax(torch.arange(600.0) / 60, -1).repeat(len(whole), 1, 1)
    np.save(tmp_path / "tokens.npy", whole[None])
    source = megatron(tmp_path / "run", [[logprobs]], 8)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    imported(
        source, tmp_path / "a.zarr", tmp_path / "tokenizer", "--tokens", tmp_path / "tokens.npy"
    )
    store = open_store(tmp_path / "a.zarr")
    assert [record.text for record in store] == [sample.text for sample in samples[:4]]
    assert [record.document for record in store] == [0, 1, 2, 3]
    assert [record.hard_cut for record in store] == [True, False, False, False]


def test_a_store_of_logits_becomes_a_capture(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """Imported again, it is the same except for the name of the source."""
    first, again = tmp_path / "a.zarr", tmp_path / "b.zarr"
    imported(distillkit(tmp_path / "capture", samples, 8, 24), first, teacher)
    assert run("export", first, tmp_path / "made", "--to", "distillkit").exit_code == 0
    imported(tmp_path / "made", again, teacher)
    for one, other in zip(open_store(first), open_store(again), strict=True):
        a, b = one.views[0].logits, other.views[0].logits
        assert one.text == other.text
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs)


def check_states(path: Path, samples: list[Taught], close: float, **states: str) -> None:
    store = open_store(path)
    assert store.features.hidden == tuple(states)
    for record, sample in zip(store, samples, strict=True):
        assert record.text == sample.text
        for name, layer in states.items():
            true = (sample.unnormed if layer == "unnormed" else sample.states[int(layer)]).numpy()
            assert np.abs(record.views[0].hidden[name] - true).max() < close * np.abs(true).max()


def test_speculators(teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """speculators' default layers follow from the teacher's depth; its last layer has no final
    norm."""
    source = speculators(tmp_path / "data", samples, (2, 2, 1))
    said = imported(source, tmp_path / "a.zarr", teacher, "--layers", "2,3,1,4", "--codec", "exact")
    assert "hidden layer2, layer3, layer1, layer4-before-norm (width 32)" in said
    names = {"layer2": "2", "layer3": "2", "layer1": "1", "layer4-before-norm": "unnormed"}
    check_states(tmp_path / "a.zarr", samples, 0.01, **names)


@pytest.mark.parametrize("gz", (False, True))
def test_specforge(gz: bool, teacher: Path, samples: list[Taught], tmp_path: Path) -> None:
    """SpecForge also captures the padding of a batch, which is ignored as it is no text."""
    source = specforge(tmp_path / "data", samples, (1, 2, 3), padded=3, gz=gz)
    said = imported(source, tmp_path / "a.zarr", teacher, "--layers", "1,2,3,4")
    assert f"specforge, {len(samples)} samples" in said and "left out" not in said
    names = {f"layer{n}": str(n) for n in (1, 2, 3, 4)}
    check_states(tmp_path / "a.zarr", samples, 0.02, **names)


def test_a_student_learns_from_an_imported_store(
    teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """States can be trained on; logits of a causal teacher's next token cannot."""
    source = speculators(tmp_path / "data", samples * 2, (1, 2, 3))
    imported(source, tmp_path / "a.zarr", teacher, "--layers", "1,2,3,4")
    words: Words = ("--vocab", "300", *STUDENT, "--steps", "16", "--lr", "1e-2", "--store")
    own = (tmp_path / "a.zarr", "--loss", "hidden=1", "--out", tmp_path / "s")
    ok(student_train, *words, *own)
    result = json.loads((tmp_path / "s/training.json").read_text())["result"]
    assert result["valid_hidden"] < 0.95  # the mean of all states has 1

    capture = distillkit(tmp_path / "logits", samples, 8, 8)
    imported(capture, tmp_path / "b.zarr", teacher)
    own = (tmp_path / "b.zarr", "--loss", "kl=1", "--out", tmp_path / "k")
    assert "next-token logits" in failing(student_train, *words, *own)


@pytest.mark.parametrize("kind", [speculators, specforge])
def test_states_are_compared_with_the_model(
    kind: Any, teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """States are compared with the model: an engine may return the last state on the wrong side of
    the norm, or the states of another text of a batch (vLLM 50815, SpecForge 279)."""
    words, samples = ("--layers", "1,2,3,4", "--model", teacher), samples[:8]
    source = kind(tmp_path / "sound", samples, (1, 2, 3))
    says(imported(source, tmp_path / "a.zarr", teacher, *words), "agree with", "of their length")
    verified = run("verify", tmp_path / "a.zarr", "--model", teacher, "--device", "cpu")
    name = "layer4-before-norm" if kind is speculators else "layer4"
    assert f"view0/hidden/{name} " in verified.output, verified.output
    line = importing(source, teacher, "--layers", "2,1,3,4", *words[2:])
    says(line, "the captured states differ from its own by", "of other layers (--layers)")

    def refused(name: str, captured: list[Taught]) -> str:
        return importing(kind(tmp_path / name, captured, (1, 2, 3)), teacher, *words)

    turned = [
        replace(s, states=[*s.states[:-1], s.unnormed], unnormed=s.states[-1]) for s in samples
    ]
    says(refused("norm", turned), "--model", "differ from its own by", "of their length")
    one, two = samples[5], samples[6]
    size = min(len(one.ids), len(two.ids))
    mixed = [torch.cat([b[:size], a[size:]]) for a, b in zip(one.states, two.states, strict=True)]
    unnormed = torch.cat([two.unnormed[:size], one.unnormed[size:]])
    batch = [*samples[:5], replace(one, states=mixed, unnormed=unnormed), *samples[6:]]
    says(refused("batch", batch), "_5.", "token 0", "are off by up to", "of their length")
    other = taught_by(other_model(tmp_path / "other"), [s.text for s in samples])
    says(refused("rows", other), "--model", "is not the captured model")


@pytest.mark.parametrize("kind", ["states", "logits"])
def test_sequences_without_the_text_before_them_are_not_compared(
    kind: str, teacher: Path, tmp_path: Path
) -> None:
    """Outputs of the second sequence of a cut sample were captured with the tokens before it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(teacher)
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    rows = [tokenizer(text).input_ids for text in ENGLISH[:6]]
    captured = taught_by(teacher, [[*ids[:6], *spelled, *ids[6:]] for ids in rows])
    if kind == "states":
        source = speculators(tmp_path / "c", captured, (1, 2, 3))
    else:
        source = distillkit(tmp_path / "c", captured, 8, 8)
    words: Words = ("--layers", "1,2,3,4") if kind == "states" else ()
    assert "6 in part" in imported(source, tmp_path / "a.zarr", teacher, "--codec", "exact", *words)
    done = run("verify", tmp_path / "a.zarr", "--model", teacher, "--device", "cpu")
    assert done.exit_code == 0, done.output
    says(done.output, "6 sequences, ", "6 sequences left out", "every error is within")


@pytest.fixture(scope="module")
def cached(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts with a teacher's vectors as labels, as a distillation script does."""
    from sentence_transformers import SentenceTransformer

    folder = tmp_path_factory.mktemp("vectors")
    teacher = mean_embedder(tiny_teacher("bert"), folder / "teacher")
    model = SentenceTransformer(str(teacher), device="cpu")
    texts = datasets.Dataset.from_dict({"sentence": [*ENGLISH, ""], "source": [0] * 13})
    made = texts.map(
        lambda batch: {"label": model.encode(batch["sentence"])}, batched=True, batch_size=8
    )
    made.save_to_disk(str(folder / "cached"))
    return folder


def test_cached_vectors(cached: Path, tmp_path: Path) -> None:
    said = imported(cached / "cached", tmp_path / "a.zarr", cached / "teacher", "--codec", "exact")
    assert "13 samples, vectors of width 32, of length 1" in said
    store, made = open_store(tmp_path / "a.zarr"), datasets.load_from_disk(str(cached / "cached"))
    assert len(store) == 12  # the empty text has no token
    for record in store:
        row = made[record.document]
        assert record.text == row["sentence"]
        assert np.abs(record.embedding - np.array(row["label"])).max() < 1e-6


def test_a_tokenizer_is_named_as_a_model_of_teacher_dump(
    cached: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by its alias, from an installed package instead of the hub."""
    folder = tiny_teacher("bert")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(checkpoint_names, "_minilm_package", lambda: folder)
    monkeypatch.setattr(checkpoint_names, "MINILM_SHA256", digest)
    imported(cached / "cached", tmp_path / "a.zarr", "minilm")
    assert open_store(tmp_path / "a.zarr").identity["teacher"]["id"] == "minilm"
    line = refused("import", cached / "cached", tmp_path / "b.zarr", "--tokenizer", "me/gone")
    assert "--tokenizer: model 'me/gone': no such folder, not cached, and the hub" in line


def test_imported_vectors_are_compared_with_their_teacher(
    tiny_teacher: Teachers, cached: Path, tmp_path: Path
) -> None:
    """`verify --model` compares imported vectors with their teacher's; a prompt that `export`
    leaves out of the texts is given to `import`."""
    teacher = modules(
        *(pooling("mean"), normalize()),
        base=tiny_teacher("bert"),
        folder=tmp_path / "teacher",
        prompts={"query": "the moss ", "none": ""},
        default_prompt_name="query",
    )
    corpus = tmp_path / "texts.txt"
    corpus.write_text("\n".join(ENGLISH) + "\n", "utf-8")
    for name, start in (("query", "the moss "), ("none", "")):
        store, labels, again = (tmp_path / f"{name}{end}" for end in (".zarr", "", ".h5"))
        options = {"head": "embedding", "hidden": "none", "attention": "none", "prompt": name}
        dumped(teacher, corpus, store, logits=None, codec="exact", **options)
        said = run("export", store, labels, "--to", "sentence-transformers").output
        assert "Map" not in said and (f"prompts={start!r}" in said) == bool(start)
        words = ("--codec", "exact", "--prompt", start)
        imported(labels, again, teacher, *words)
        assert open_store(again)[3].text == open_store(store)[3].text
        # What a student inherits: prompts and similarity.
        one, other = (inherited_settings([open_store(path)]) for path in (store, again))
        assert one == other and one["prompts"]["query"] == "the moss "
        done = run("verify", again, "--model", teacher, "--device", "cpu")
        assert done.exit_code == 0 and "every error is within" in done.output, done.output
    plain = cached / "teacher"
    line = refused("verify", tmp_path / "query.h5", "--model", plain)
    assert "has no prompt 'the moss ', with which the texts of" in line
    line = refused("verify", tmp_path / "query.zarr", "--model", plain)
    assert "Spec(" not in line


def test_vectors_of_truncated_texts_are_not_compared(cached: Path, tmp_path: Path) -> None:
    """A vector is of the whole text, and a store may have only its beginning."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(cached / "teacher"), device="cpu")
    for name, texts in (("one", ["the lamp", " ".join(ENGLISH)]), ("none", [" ".join(ENGLISH)])):
        vectors = model.encode(texts).tolist()
        # A column of categories, as pandas writes it, is a column of texts, too.
        rows = pa.table({"sentence": pa.array(texts).dictionary_encode(), "label": vectors})
        (tmp_path / name).mkdir()
        pq.write_table(rows, tmp_path / name / "a.parquet")
        imported(tmp_path / name, tmp_path / f"{name}.h5", cached / "teacher", "--max-length", 40)
    words = ("--model", cached / "teacher", "--device", "cpu")
    done = run("verify", tmp_path / "one.h5", *words)
    assert done.exit_code == 0, done.output
    assert "1 sequence, " in done.output and "1 sequence left out" in done.output
    line = refused("verify", tmp_path / "none.h5", *words)
    assert "none.h5: 1 sequence drawn, and each may lack a part of the text" in line


def test_a_store_of_vectors_becomes_labels(cached: Path, tmp_path: Path) -> None:
    """Imported again, it is the same except for the name of the source."""
    first, again = tmp_path / "a.zarr", tmp_path / "b.zarr"
    imported(cached / "cached", first, cached / "teacher", "--codec", "exact")
    assert run("export", first, tmp_path / "labels", "--to", "sentence-transformers").exit_code == 0
    made = datasets.load_from_disk(str(tmp_path / "labels"))
    assert made.column_names == ["sentence", "label"] and not (tmp_path / "labels/.rows").exists()
    imported(tmp_path / "labels", again, cached / "teacher", "--codec", "exact")
    for one, other in zip(open_store(first), open_store(again), strict=True):
        assert one.text == other.text and np.array_equal(one.embedding, other.embedding)


GOLDEN = Path(__file__).parent / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "distillkit.json").read_text())


@pytest.fixture(scope="module")
def large(make_tokenizer: Tokenizers) -> TeacherFiles:
    """Save a teacher of 70,000 pieces, whose tokenizer has the first of them."""
    return TeacherFiles("large", make_tokenizer("bpe-plain"), {}, 70_000)


@pytest.mark.parametrize("case", CASES, ids=[str(n) for n in range(len(CASES))])
def test_golden_distillkit(case: dict[str, Any], large: TeacherFiles, tmp_path: Path) -> None:
    columns = {"input_ids": [1, 2, 3]} | case["columns"]
    table = pa.table({name: pa.array([values]) for name, values in columns.items()})
    parquet.write_table(table, tmp_path / "data_0.parquet")
    if case["settings"]:
        (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(case["settings"]))
    capture = DistillKit(ImportOptions(tmp_path, tmp_path / "a.zarr"), large)
    (sample,) = capture.samples()
    kept = sample.rows().topk
    assert kept is not None and capture.contents.topk == kept[0].shape[1]
    assert kept[0].tolist() == case["ids"]
    assert np.abs(kept[1] - np.array(case["logprobs"])).max() < 1e-4
    if packed := case["columns"].get("bytepacked_indices"):
        bits = index_bits(case["settings"]["d"])
        assert packed_ids(np.array(case["ids"]), bits).tolist() == packed


def test_golden_megatron(large: TeacherFiles, tmp_path: Path) -> None:
    """Ids have 17 bits; the entries within the nucleus are the best pieces, the others empty."""
    shutil.copy(GOLDEN / "cp0_dp0__1.tar", tmp_path)
    np.save(tmp_path / "tokens.npy", np.ones((8, 12), np.int32))
    options = ImportOptions(tmp_path, tmp_path / "a.zarr", tokens=tmp_path / "tokens.npy")
    capture = Megatron(options, large)
    best = json.loads((GOLDEN / "megatron.json").read_text())
    true = [(np.array(best["ids"][m][b]), np.array(best["logprobs"][m][b]))
            for m in range(4) for b in range(2)]  # fmt: skip
    found = [sample.rows().topk for sample in capture.samples()]
    assert len(found) == len(true) and capture.contents.topk == 6
    empty = 0
    for kept, (ids, logprobs) in zip(found, true, strict=True):
        assert kept is not None
        there = np.isfinite(kept[1])
        width = there.shape[1]
        mass = np.exp(logprobs[:, :width]).cumsum(1) - np.exp(logprobs[:, :width])
        assert (there == (mass < 0.9)).all()
        assert (kept[0] == ids[:, :width])[there].all()
        assert np.abs(kept[1] - logprobs[:, :width])[there].max() < 0.01  # float16
        empty += int((~there).sum())
    assert empty and max(ids.max() for ids, _ in true) > 65_535
