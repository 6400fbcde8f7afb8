"""Decoders: from the store of a causal teacher to a folder that generates text.

- Decoders support what every student supports: resume, processes, caches, sweeps, several stores,
  custom loops.
"""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from teachonce.checkpoints.declared import suggested_decoder
from teachonce.store import open_store
from teachonce.student_train.arguments import checked_from, default_losses, with_store_defaults
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.decoder_sizes import check_cut, shape_of_folder
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.plan.checks import checked_plan
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.shapes import SHAPES, parse_student
from teachonce.student_train.settings.terms import NEXT_LOSS
from teachonce.student_train.sweep import main as student_sweep
from teachonce.student_train.train.distiller import Distiller
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.dump import dump
from tests.end_to_end.support import Words, ok, refused, report_of, says
from tests.end_to_end.test_processes import same_curve, same_gradients, trained
from tests.making.decoders import random_llama, save_decoder
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Stores, Teachers

SHORT = ("--steps", "4", "--batch-tokens", "512", "--device", "cpu")
WHOLE = {"codec": "exact", "hidden": "mean", "logits": "topk:599"}  # of 600 pieces


@pytest.fixture(scope="module")
def store(tiny_store: Stores) -> Path:
    return tiny_store("gpt2", **WHOLE)


def test_a_dump_suggests_a_decoder(store: Path, tiny_teacher: Teachers) -> None:
    done = dump(dump_options(tiny_teacher("gpt2"), store.with_name("corpus.txt"), store, **WHOLE))
    assert done.finished_before and done.student == "--student gpt2:256x4x4 --vocab 8k"
    assert suggested_decoder({"model_type": "qwen3", "head_dim": 128}) == "qwen3:256x4x2"
    narrow = {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 64}
    assert suggested_decoder(narrow) == "llama:256x4x8"
    uneven = {"model_type": "llama", "hidden_size": 3200, "num_attention_heads": 32}
    uneven["intermediate_size"] = 8640
    assert suggested_decoder(uneven) == "llama:256x4x2x680x2x100"
    check_cut("auto", parse_student(suggested_decoder(uneven)), uneven, "the teacher")
    assert suggested_decoder({"model_type": "gemma3_text", "head_dim": 256}) == "llama:256x4x4"


@pytest.mark.parametrize(
    ("words", "student"),
    [
        ({}, "gpt2:256x4x4"),
        ({"loss": ("next=0.5,kl-next=0.5",)}, "gpt2:256x4x4"),
        ({"loss": ("mlm=1,hidden=30",)}, "tiny"),
        ({"student": "llama:32x2x4", "loss": ("alm=1",)}, "llama:32x2x4"),
    ],
)
def test_the_default_student_is_one_that_has_the_losses(
    words: dict[str, Any], student: str, store: Path
) -> None:
    options = checked_from({"store": (str(store),), **words})
    assert options.student == student
    assert options.temperature == (2.0 if student == "tiny" else 1.0)
    with open_store(store) as opened:
        assert not [line for line in checked_plan(options, opened).unread() if "--temp" in line]
        python = with_store_defaults(TrainOptions(store, **words), [opened])
    assert python.describing() == options.describing()
    assert StudentBatches(store, "300", **words).options.student == student
    deep = StudentBatches(store, "300", student="teacher:1", loss="next=1").options.student
    assert deep == checked_from({"store": (str(store),), "student": "teacher:1"}).student


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ({}, 0.008),
        ({"init": "layers:2,3", "optimizer": "adamw"}, 0.008),
        ({"init": "vocab"}, 0.004),
        ({"student": "llama:32x2x4"}, 0.004),
        ({"student": "gpt2:32x2x2"}, 0.004),  # heads of another size
        ({"lr": 0.001}, 0.001),
        ({"optimizer": "adadelta"}, 1.0),
    ],
)
def test_a_decoder_cut_out_of_its_teacher_has_twice_the_default_rate(
    words: dict[str, Any], rate: float, store: Path
) -> None:
    given = {"store": (str(store),), "student": "gpt2:32x2x4", **words}
    assert checked_from(given).resolved_lr == rate
    with open_store(store) as opened:
        options = TrainOptions(**{**given, "lr_end": rate})
        assert with_store_defaults(options, [opened]).resolved_lr == rate
        with pytest.raises(UserError, match="--lr-end"):
            TrainOptions(**{**given, "lr_end": 3.0})


def test_a_run_prints_its_rate_and_a_loss_that_is_always_0(
    tmp_path: Path, store: Path, tiny_teacher: Teachers
) -> None:
    vocab = tiny_teacher("gpt2")
    words = ("--store", store, "--student", "gpt2:32x1x4", "--vocab", vocab, *SHORT)
    loss = ("--loss", "next=1,next-inside=1")
    said = ok(student_train, *words, *loss, "--out", tmp_path / "student")
    says(said, "lr 0.008 linear", f"losses    next-inside is 0 with --vocab {vocab}: no token")
    assert report_of(tmp_path / "student")["result"]["valid_next-inside"] == 0
    loop = StudentBatches(store, vocab, student="gpt2:32x1x4", loss="next=1").options
    assert loop.resolved_lr == 0.008
    with pytest.raises(UserError, match="--loss next-inside: trains nothing with --vocab /"):
        StudentBatches(store, vocab, student="gpt2:32x1x4", loss="next-inside=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("student", "start"),
    [
        ("llama:32x2x4", "word embeddings of 397 of 400 pieces from their splits"),
        ("qwen2:32x2x4x64x2", "word embeddings of 397 of 400 pieces from their splits"),
        ("qwen3:32x2x4x64x2", "word embeddings of 397 of 400 pieces from their splits"),
        ("gpt2:32x2x4", "layers 1, 4 of 4; "),
        ("teacher:1", "layers 1 of 4; "),
    ],
)
def test_a_decoder_generates_text(tmp_path: Path, store: Path, student: str, start: str) -> None:
    out = tmp_path / "student"
    words = ("--store", store, "--student", student, "--vocab", "400", "--out", out, *SHORT)
    said = ok(student_train, *words)
    assert "0.34 next + 0.33 next-inside + 0.33 kl-next + 0.33 alm" in said
    report = report_of(out)
    assert 3 < report["result"]["valid_bits_per_byte"] < 9
    assert start in " ".join(report["start"]), report["start"]
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    # A class of transformers may add special tokens and split texts by its own rules.
    assert len(tokenizer) == model.config.vocab_size
    with open_store(store) as opened:
        trained = student_tokenizer("400", opened, family=SHAPES[model.config.model_type].family)
        texts = [*opened.texts(), "e\u0301 12345"]
    assert student == "teacher:1" or trained(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    read = tokenizer("The old sea", return_tensors="pt")
    made = model.generate(**read, max_new_tokens=5, do_sample=False)
    assert len(made[0]) == read["input_ids"].shape[1] + 5
    card = (out / "README.md").read_text()
    assert "AutoModelForCausalLM" in card and "text-generation" in card
    assert "`valid_next-inside` is in nats per token, 0 for each that begins where one of" in card
    assert "| lr |" in card
    assert not [name for name in ("mask_prob", "align", "pool") if f"| {name} |" in card]


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("Gemma2", "32x1x4x64x4x16"),
        ("Gemma3nText", "32x1x4x64x4x16"),
        ("GPTNeoX", "32x1x4x64x4"),
        ("XGLM", "32x1x4x64x4"),
        ("Mamba", "32x1x4x64x4"),
    ],
)
def test_a_student_like_a_decoder_of_another_family_is_a_decoder(
    tmp_path: Path, family: str, shape: str
) -> None:
    """It starts from the word embeddings, whatever the family names them."""
    save_decoder(tmp_path / "model", family)
    corpus = write_corpus(tmp_path / "corpus.txt", 20)
    words = {"logits": "topk:8", "attention": "none"}
    store = dumped(tmp_path / "model", corpus, tmp_path / "store.zarr", **words)
    for loss in ({}, {"loss": ("hidden=1",)}):
        options = checked_from({"store": (str(store),), "student": "teacher:1", **loss})
        assert options.student == f"llama:{shape}"
    batches = StudentBatches(store, "300", student="llama:32x1x4")
    assert "word embeddings of 2" in str(prepare(batches.options, batches.store)[2])


def test_sizes_that_gpt2_does_not_read_are_not_its_own(tmp_path: Path) -> None:
    """transformers ignores fields of other kinds in its config.json."""
    model = save_decoder(tmp_path / "gpt2", "GPT2")
    config = json.loads((model / "config.json").read_text())
    assert config["n_inner"] is None and config["intermediate_size"] != 4 * config["n_embd"]
    words = {"logits": "topk:8", "attention": "none"}
    store = dumped(model, write_corpus(tmp_path / "corpus.txt", 20), tmp_path / "a.zarr", **words)
    given = ("--store", store, "--student", "teacher:1", "--vocab", "teacher", *SHORT)
    said = ok(student_train, *given, "--init", "teacher", "--out", tmp_path / "student")
    says(said, "student   gpt2:32x1x4x128", "128 of 128 feed-forward units")
    assert shape_of_folder(config, "d", "--student d").startswith("gpt2:32x2x4x128")


def test_its_own_loss_matches_transformers(store: Path) -> None:
    batches = StudentBatches(store, "400", student="llama:32x2x4", loss={"next": 1.0})
    model = random_llama(len(batches.tokenizer))
    distiller = Distiller.of(model, batches.options, batches.store)
    batch = next(iter(batches))
    found = distiller(batch)
    labels = batch.inputs.ids.masked_fill(~batch.inputs.present, -100)
    with torch.no_grad():
        expected = model(batch.inputs.ids, batch.inputs.present.long(), labels=labels).loss
    assert float(found["next"].detach()) == pytest.approx(float(expected), rel=1e-5)
    batch = next(batches.held_out())
    texts = [
        batches.tokenizer.decode(row[here][1:])
        for row, here in zip(batch.inputs.ids, batch.inputs.present, strict=True)
    ]
    assert batch.predicted_bytes == sum(len(text.encode()) for text in texts)


def test_a_loss_of_another_module_has_bits_a_byte_as_well(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_next_loss.py").write_text(
        "from teachonce.losses import Loss\n"
        "OWN = Loss('own', lambda s: -s.mean(), 'nothing', 'next', 'nats')\n"
    )
    loss = {"own_next_loss:OWN": 1.0}
    batches = StudentBatches(store, "400", student="llama:32x1x4", loss=loss)
    distiller = batches.distiller(random_llama(len(batches.tokenizer), layers=1))
    figures = batches.validate(distiller)
    assert figures["valid_loss"] == pytest.approx(figures["valid_next"])
    assert 3 < figures["valid_bits_per_byte"] < 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vocab", "words"), ("--vocab words", "every byte")),
        (("--vocab", "200"), ("--vocab 200", "256 bytes", "259")),
        (
            ("--student", "qwen2:32x2x4", "--vocab", "teacher"),
            ("--vocab teacher", "Qwen2's own rules", "such as 8k, or --student qwen3:"),
        ),
    ],
)
def test_vocabularies_that_a_decoder_cannot_have(
    tmp_path: Path, store: Path, words: tuple[str, ...], message: tuple[str, ...]
) -> None:
    given = ("--store", store, "--out", tmp_path / "s", "--student", "llama:32x2x4", *SHORT)
    says(refused(student_train, *given, *words), *message)


def test_bits_a_byte_are_nats_a_token_over_bytes(tmp_path: Path, store: Path) -> None:
    """One held-out figure for two vocabularies, over the same bytes."""
    found = []
    for vocab in ("300", "teacher"):
        out = tmp_path / vocab
        words = ("--store", store, "--student", "llama:32x1x4", "--vocab", vocab, "--out", out)
        ok(student_train, *words, *SHORT, "--loss", "next")
        result = report_of(out)["result"]
        found.append(result["valid_bits_per_byte"])
        assert result["valid_bits_per_byte"] < result["valid_next"] / math.log(2)
    assert found[0] != found[1]


def test_the_default_losses_are_those_that_the_stores_serve(
    store: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    given = {"student": "llama:32x1x4"}
    with open_store(store) as whole, open_store(store) as old, open_store(store) as states:
        assert old.features.logits is not None
        spec = replace(old.features.logits, observed=False)
        old.features = replace(old.features, logits=spec)
        states.features = replace(states.features, logits=None)
        every = {"next": 0.34, "next-inside": 0.33, "kl-next": 0.33, "alm": 0.33}
        assert default_losses(given, [whole, whole]) == every
        shared = {**given, "vocab": "teacher"}
        assert default_losses(shared, [whole]) == {"next": 0.34, "kl-next": 0.33, "alm": 0.33}
        assert default_losses(shared, [whole, whole]) == every
        folder = {**given, "vocab": str(tiny_teacher("gpt2"))}
        assert default_losses(folder, [whole]) == default_losses(shared, [whole])
        file = tmp_path / "tokenizer.json"
        student_tokenizer("300", whole, family="gpt-2").save_pretrained(tmp_path)
        assert default_losses({**given, "vocab": str(tmp_path)}, [whole]) == every
        tokenizer = json.loads((tiny_teacher("gpt2") / file.name).read_text("utf-8"))
        merges = [*reversed(tokenizer["model"]["merges"])]
        other_merges = {**tokenizer, "model": {**tokenizer["model"], "merges": merges}}
        number = len(tokenizer["model"]["vocab"])
        mark = {**tokenizer["added_tokens"][0], "id": number, "content": "the"}
        marked = {**tokenizer, "added_tokens": [*tokenizer["added_tokens"], mark]}
        for other in (other_merges, marked, "damaged"):
            file.write_text(json.dumps(other), "utf-8")
            assert default_losses({**given, "vocab": str(tmp_path)}, [whole]) == every
        assert "next-inside" not in default_losses({**shared, "combine": "outputs"}, [whole, whole])
        both = {"next": 0.5, "next-inside": 0.5, "kl-next": 0.5}
        assert default_losses(given, [whole, old]) == both
        assert default_losses({**given, "combine": "outputs"}, [whole, whole]) == both
        assert default_losses(given, [whole, states]) == {"next": 1.0, "hidden": 1.0}
        states.features = replace(states.features, hidden=())
        with pytest.raises(UserError, match="default losses of a decoder need .* in all of these"):
            default_losses(given, [whole, states])


@pytest.mark.slow
def test_several_teachers_of_one_text(tmp_path: Path, store: Path) -> None:
    """The mean of a teacher and itself is the teacher."""
    loss = "next=0.5,next-inside=0.5,kl-next=0.5"  # the default of several teachers
    words = ("--student", "llama:32x1x4", "--vocab", "400", "--loss", loss)
    found = []
    for name, stores in (("one", (store,)), ("two", (store, store))):
        given = [word for each in stores for word in ("--store", each)]
        given += ["--combine", "outputs"] if len(stores) > 1 else []
        ok(student_train, *given, *(words if len(stores) == 1 else words[:-2]), *SHORT, "--out",
           tmp_path / name)  # fmt: skip
        found.append(report_of(tmp_path / name)["result"]["valid_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_random_draws_train_forwards_only(tmp_path: Path, tiny_store: Stores) -> None:
    drawn = tiny_store("gpt2", 20, attention="none", logits="sample:16")
    words = ("--store", drawn, "--student", "llama:32x1x4", "--vocab", "300", *SHORT)
    said = refused(student_train, *words, "--loss", "reverse-kl", "--out", tmp_path / "reverse")
    says(said, "--loss reverse-kl", "random draws", "kl-next")
    assert "0.33 kl-next + 0.33 alm" in ok(student_train, *words, "--out", tmp_path / "forward")


def test_losses_with_a_number_and_of_runs(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "student"
    words = ("--store", store, "--student", "llama:32x1x4", "--vocab", "300", *SHORT)
    ok(student_train, *words, "--loss", "next=1,jsd:0.3=1,alm=0.5", "--out", out)
    result = report_of(out)["result"]
    parts = result["valid_next"] + result["valid_jsd:0.3"] + 0.5 * result["valid_alm"]
    assert result["valid_loss"] == pytest.approx(parts, rel=1e-6)
    said = refused(student_train, *words, "--store", store, "--combine", "outputs", "--loss", "alm",
                   "--out", tmp_path / "no")  # fmt: skip
    says(said, "--combine outputs", "--loss alm", "--combine losses")
    old = open_store(store)
    assert old.features.logits is not None
    spec = replace(old.features.logits, observed=False)
    old.features = replace(old.features, logits=spec)
    options = TrainOptions(str(store), student="llama:32x1x4", loss={"alm": 1.0})
    with pytest.raises(
        UserError, match=r"--loss alm: .*logits.observed.* use kl-next, or make the store"
    ):
        checked_plan(options, old)
    assert "`valid_jsd:0.3` is in nats" in (out / "README.md").read_text()


def test_a_decoder_reads_unmasked_text_only(
    tmp_path: Path, tiny_teacher: Teachers, tiny_store: Stores
) -> None:
    """Of a store with masked views; it cannot use a task's store."""
    masked = tiny_store("bert", views=2)
    words = ("--student", "llama:32x1x4", "--vocab", "300", *SHORT)
    out = tmp_path / "student"
    line = refused(student_train, "--store", masked, *words, "--out", out)
    says(line, "is a decoder, but the teacher of", "is not;", "--head causal", "or give --loss")
    ok(student_train, "--store", masked, *words, "--loss", "next=1,hidden=0.3", "--out", out)
    assert report_of(out)["settings"]["view"] == 0
    tagger = tiny_teacher("bert", "classification", ("a", "b"))
    lines = ["text,label"] + [f"{line},{'ab'[n % 2]}" for n, line in enumerate("stuv" * 5)]
    (tmp_path / "labels.csv").write_text("\n".join(lines) + "\n")
    labelled = dumped(
        tagger, tmp_path / "labels.csv", tmp_path / "t.zarr", attention="none", logits=None,
        head="classification", label_column="label",
    )  # fmt: skip
    given = ("--store", labelled, "--held-out", "0", "--out", tmp_path / "no")
    said = refused(student_train, *words, *given)
    says(said, "llama:32x1x4", "a decoder has no head for classification", "HxLxA")


DECODER: Words = (
    *("--student", "llama:16x2x2", "--vocab", 400, "--held-out", 0.1),
    *("--device", "cpu", "--precision", "fp32"),
)
STEPS: Words = ("--batch-tokens", 256, "--accumulate", 2, "--steps", 5, "--eval-every", 2)


@pytest.fixture(scope="module")
def alone(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "student"
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1, "--out", out)
    found = trained(1, words)
    assert found.codes == [0], found.said
    return out


def same_student(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_stopped_training_resumes_to_the_same_bytes(
    causal: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "student"
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1, "--out", out)
    stopped = trained(1, words, stopped=0)
    assert stopped.codes != [0]
    again = trained(1, (*words, "--resume"))
    assert again.codes == [0] and "resume    after step 3" in again.said[0], again.said
    same_student(out, alone)


def test_two_processes_train_what_one_trains(causal: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "student"
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1, "--out", out)
    found = trained(2, words)
    assert found.codes == [0, 0], found.said
    same_gradients(f"{alone}.gradient", f"{out}.gradient", 2)
    same_curve(out, alone)


def test_a_cache_changes_nothing(causal: Path, alone: Path, tmp_path: Path) -> None:
    words = ("--store", causal, *DECODER, *STEPS, "--dropout", 0.1)
    for cache in ("ram", "device"):
        ok(student_train, *words, "--cache", cache, "--out", tmp_path / cache)
        same_student(tmp_path / cache, alone)


@pytest.mark.slow
def test_stores_of_different_texts_are_trained_on_together(
    causal: Path, tiny_store: Stores, tmp_path: Path
) -> None:
    """The second teacher has other tokens, and stored states only."""
    words: Words = ("--store", causal, *DECODER, "--steps", 2, "--loss", "next=1,hidden=1")
    other = tiny_store("bert", 30, attention="none", logits=None)
    ok(student_train, *words, "--store", other, "--out", tmp_path / "both")
    ok(student_train, *words, "--out", tmp_path / "one")
    both, one = (report_of(tmp_path / name)["result"] for name in ("both", "one"))
    assert both["tokens"] > 1.5 * one["tokens"]
    assert both["valid_bits_per_byte"] != one["valid_bits_per_byte"]


@pytest.mark.slow
def test_a_sweep_is_ranked_by_bits_a_byte(causal: Path, tmp_path: Path) -> None:
    """With different losses and vocabularies, also without `next`."""
    out = tmp_path / "sweep"
    words: Words = ("--student", "llama:16x1x2", "--steps", 3, "--batch-tokens", 512)
    words += ("--vocab", 300, "--vocab", "teacher", "--loss", "next", "--loss", "kl-next")
    said = ok(student_sweep, "--store", causal, *words, "--device", "cpu", "--out", out)
    rows = json.loads((out / "sweep.json").read_text())
    bits = [row["valid_bits_per_byte"] for row in rows]
    best = min(rows, key=lambda row: row["valid_bits_per_byte"])
    assert len(bits) == 4 and 3 < min(bits) < max(bits) < 9
    assert f"best      {best['folder']}: valid_bits_per_byte {min(bits):.5g} (bits per" in said
    heading, _, *lines = ([c.strip() for c in line.split("|")[1:-1]]
                          for line in said.splitlines() if line.startswith("| "))  # fmt: skip
    place = heading.index("valid_bits_per_byte")
    assert [line[place] for line in lines] == [f"{each:.5g}" for each in sorted(bits)]
    with (out / "sweep.csv").open() as file:
        found = {float(row["valid_bits_per_byte"]) for row in csv.DictReader(file)}
    assert found == set(bits)
    page = (out / "index.html").read_text()
    assert "Curves of valid_bits_per_byte" in page and "next alone" in page


def test_a_sweep_shows_the_losses_and_rates_that_differ_by_default(
    causal: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    words: Words = ("--student", "gpt2:32x1x4", "--steps", 1, "--batch-tokens", 512)
    words += ("--init", "vocab", "--init", "teacher", "--vocab", 300, "--vocab", "teacher")
    said = ok(student_sweep, "--store", causal, *words, "--device", "cpu", "--out", out)
    rows = json.loads((out / "sweep.json").read_text())
    rates = {(row["init"], row["lr"]) for row in rows}
    assert rates == {("vocab", "0.004"), ("teacher", "0.008")}
    losses = {(row["vocab"], "next-inside" in row["loss"]) for row in rows}
    assert losses == {("300", True), ("teacher", False)}
    assert "| init | vocab | loss | lr |" in said or "| vocab | init | loss | lr |" in said
    assert "<td>0.008</td>" in (out / "index.html").read_text()


def test_the_card_says_in_what_its_figures_are(alone: Path) -> None:
    card = (alone / "README.md").read_text()
    figure = report_of(alone)["result"]["valid_bits_per_byte"]
    assert f"| valid_bits_per_byte | {figure:.5g} |" in card
    assert "`valid_kl-next` is in nats" in card
    assert "`valid_bits_per_byte` is `next` per byte of the text" in card
    assert re.search(r"student's start \| `word embeddings of 397 of 400 pieces", card)


def test_a_loop_of_ones_own_trains_a_decoder(causal: Path) -> None:
    batches = StudentBatches(causal, "400", student="llama:16x2x2", held_out=0.1, batch_tokens=512)
    assert dict(batches.options.loss) == NEXT_LOSS
    torch.manual_seed(0)
    distiller = batches.distiller(random_llama(len(batches.tokenizer), 16, heads=2))
    before = batches.validate(distiller)
    optimizer = torch.optim.AdamW(distiller.parameters(), lr=1e-2)
    for epoch in range(3):
        batches.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            distiller.weighted(distiller(batch)).backward()
            optimizer.step()
    after = batches.validate(distiller)
    assert after["valid_bits_per_byte"] < before["valid_bits_per_byte"] - 1
    assert after["valid_kl-next"] < before["valid_kl-next"]
