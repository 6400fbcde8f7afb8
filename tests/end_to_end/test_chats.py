"""Chats: from messages by the teacher's chat template to a student of the answers alone."""

import json
import shutil
import subprocess
import time
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gguf import GGUFReader
from tokenizers.processors import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import chat_template_utils

from teachonce.checkpoints.loading import load_tokenizer
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, StoreWriter, open_store
from teachonce.student_export.cli import main as student_export
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data.blocks import split_blocks
from teachonce.student_train.data.own_template import OwnTemplate, has_own_template
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.options import default_of
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job import plan
from tests.end_to_end.support import Word, invoke, ok, refused, report_of, says
from tests.making.decoders import save_decoder
from tests.making.dumps import write_corpus
from tests.making.texts import ENGLISH
from tests.student_export.test_export import UNMEASURED

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<end>\n{% endfor %}"
Chat = list[dict[str, str]]


def chats(count: int) -> list[Chat]:
    """Make chats in which a message repeats a role's name, and an answer repeats its question."""
    turns = [("system", "user"), ("user", "a"), ("assistant", "a"), ("user", ENGLISH[0])]
    return [
        [{"role": role, "content": text} for role, text in turns]
        + [{"role": "assistant", "content": " ".join(ENGLISH[n % 5 : n % 5 + 1 + n % 3])}]
        for n in range(count)
    ]


def write_chats(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    plain = save_decoder(folder / "plain", "Llama", bos="<end>")
    return with_template(plain, folder / "model", TEMPLATE)


def with_template(model: Path, folder: Path, template: str | None) -> Path:
    """Copy a model to a folder, with another template."""
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


def words_for(model: Path, corpus: Path, out: Path) -> tuple[Any, ...]:
    words: tuple[Any, ...] = ("--model", model, "--corpus", corpus, "--messages", "messages")
    return (*words, "--attention", "none", "--logits", "topk:8", "--device", "cpu", "--out", out)


def dumped(folder: Path, model: Path, rows: list[Any], *more: Word) -> FeatureStore:
    """Dump chats into a.zarr of a folder."""
    corpus, out = write_chats(folder / "chats.jsonl", rows), folder / "a.zarr"
    ok(teacher_dump, *words_for(model, corpus, out), *more)
    return open_store(out)


def learnt_texts(store: FeatureStore, chat: int = 0) -> list[str]:
    """Return the runs of trained characters of a chat, over all its windows."""
    found = ""
    for record in (each for each in store if each.document == chat):
        assert record.learn is not None
        marked = np.zeros(len(record.text), bool)
        for (begin, end), learn in zip(record.offsets, record.learn, strict=True):
            marked[begin:end] |= learn
        found += "".join(c if m else "\0" for c, m in zip(record.text, marked, strict=True))
    return [run for run in found.split("\0") if run]


@pytest.mark.parametrize("learn", ["assistant", "all"])
def test_the_contents_are_learnt_and_the_marks_are_not(
    tmp_path: Path, model: Path, learn: str
) -> None:
    rows, more = chats(6), ("--learn", learn, "--max-length", 128)
    store = dumped(tmp_path, model, rows, *more)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for number, row in enumerate(rows):
        text = "".join(record.text for record in store if record.document == number)
        assert text == tokenizer.apply_chat_template(row, tokenize=False)
        answers = [m["content"] for m in row if learn == "all" or m["role"] == "assistant"]
        assert learnt_texts(store, number) == [f"{answer}<end>" for answer in answers]
    assert store.identity["arguments"]["learn"] == learn
    assert "marked tokens" in ok(feature_store, "info", store.path)
    ok(feature_store, "verify", store.path, "--model", model, "--device", "cpu")
    words = words_for(model, tmp_path / "chats.jsonl", tmp_path / "a.zarr")
    assert "nothing to do" in ok(teacher_dump, *words, *more)


def test_roles_without_an_assistant_are_refused_unless_all_is_learnt(
    tmp_path: Path, model: Path
) -> None:
    chat = [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]
    corpus = write_chats(tmp_path / "chats.jsonl", [chat])
    line = refused(teacher_dump, *words_for(model, corpus, tmp_path / "a.zarr"))
    says(line, "chats.jsonl, chat 1", "of human, gpt;", "or give --learn all")
    store = dumped(tmp_path, model, [chat], "--learn", "all")
    assert learnt_texts(store) == ["a<end>", "b<end>"]


def test_the_command_that_corrects_other_keys_can_be_typed(tmp_path: Path, model: Path) -> None:
    chat = [{"from": "human", "value": 'the "from": '}, {"from": "gpt", "value": "b"}]
    corpus = write_chats(tmp_path / "share.jsonl", [chat])
    line = refused(teacher_dump, *words_for(model, corpus, tmp_path / "a.zarr"))
    says(line, "share.jsonl, line 1: message 1", "(human to user, gpt to assistant)")
    command = line.partition(' and "value" to "content": ')[2]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    corrected = [json.loads(row) for row in (tmp_path / "share.chats.jsonl").open()]
    roles = [{"role": "user", "content": 'the "from": '}, {"role": "assistant", "content": "b"}]
    assert corrected == [{"messages": roles}]


@pytest.mark.parametrize("losses", ["next", "kl-next", "alm"])
def test_a_held_out_part_without_answers_has_no_loss_of_zero(
    tmp_path: Path, model: Path, losses: str
) -> None:
    """The student reads the begin of each chat, and the answers of held-out chats come later."""
    answer, question = ("assistant", "a"), ("user", "the old tower")
    turns = [[answer, question]] * 60
    size = 8

    def words(store: FeatureStore, out: Path = tmp_path / "student") -> tuple[Word, ...]:
        return ("--store", store.path, "--student", "llama:32x1x2", "--steps", 1, "--device", "cpu",
                "--vocab", "300", "--loss", losses, "--max-length", size, "--out", out)  # fmt: skip

    def dump(name: str) -> FeatureStore:
        (tmp_path / name).mkdir()
        rows = [[{"role": role, "content": text} for role, text in chat] for chat in turns]
        return dumped(tmp_path / name, model, rows)

    first = dump("first")
    blocks = split_blocks(first, default_of(TrainOptions, "held_out"))[1]
    for begin, end in blocks:
        turns[begin:end] = [[question, answer]] * int(end - begin)
    store = dump("last")
    problem = f"--loss {losses} compares nothing in the first {size} student tokens of each"
    part = f"in the held-out part of {store.path}"
    says(refused(student_train, *words(store), "--best"), f"--best: {problem}", part)
    recipe = tmp_path / "late.toml"
    recipe.write_text("[recipes.late]\nstages = [{ epochs = 1 }, { best = true }]\n", "utf-8")
    late = ("--recipe", recipe)
    says(refused(student_train, *words(store), *late), f"--best: {problem}")
    assert not (out := tmp_path / "student").exists()
    says(said := ok(student_train, *words(store)), f"no valid_loss: {problem}", part)
    assert "valid_loss" not in said.replace("no valid_loss", "")
    assert not any(name.startswith("valid_") for name in report_of(out)["result"])
    both = ("--store", first.path, *words(store, tmp_path / "both"))
    assert "valid_loss" not in ok(student_train, *both).replace("no valid_loss", "")
    turns[:] = [[question, answer]] * 60
    line = refused(student_train, *words(dump("none"), tmp_path / "none-student"))
    says(line, f"--loss {losses}: compares nothing")


def test_blanks_of_a_template_around_an_answer(tmp_path: Path, model: Path) -> None:
    """Llama 2 writes a blank before an answer, which is part of its first token, and a blank before
    the end token. All of these tokens are trained on."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    )
    llama = with_template(model, tmp_path / "model", template)
    turns = [("user", "the"), ("assistant", "the story"), ("user", "a"), ("assistant", "b")]
    chat = [{"role": role, "content": content} for role, content in turns]
    store = dumped(tmp_path, llama, [chat])
    assert learnt_texts(store) == [" the story <end>", " b <end>"]


def test_a_student_is_trained_on_the_answers(tmp_path: Path, model: Path) -> None:
    rows = chats(6)
    store = dumped(tmp_path, model, rows)
    (raw,) = store.gather([np.arange(len(store))])
    answers = [m["content"] + "<end>" for row in rows for m in row if m["role"] == "assistant"]
    for vocab in ("300", "teacher"):
        losses = {"next": 1, "kl-next": 1}
        batches = StudentBatches(store, vocab, student="llama:32x2x4", loss=losses)
        batch, tokenizer = batches.collator.for_validation(raw, 0, (0,)), batches.tokenizer
        rendered = "".join(record.text for record in store if record.document == 0)
        read = tokenizer.bos_token + rendered  # both tokenizers put this token in front
        assert tokenizer.apply_chat_template(rows[0], tokenize=False) == read
        # The end of an answer is one token, at which `generate` stops, with either vocabulary.
        assert tokenizer.encode("a<end>")[-1] == tokenizer.eos_token_id
        assert (batch.labels == tokenizer.eos_token_id).sum() == len(answers)
        if vocab == "teacher":
            assert batch.predicted_bytes == sum(len(answer.encode()) for answer in answers)
            assert tokenizer.decode(batch.labels) == "".join(answers)
        else:  # a piece over the end of a mark is not trained on
            assert 0 < batch.predicted_bytes <= sum(len(answer.encode()) for answer in answers)


def test_a_student_reads_a_chat_as_in_its_training(tmp_path: Path, model: Path) -> None:
    """For any beginning of the template and any end token of a message."""
    template = "<end>" + TEMPLATE.replace("<end>", "<|endoftext|>")
    rows = chats(6)
    store = dumped(tmp_path, with_template(model, tmp_path / "model", template), rows)
    text = "".join(record.text for record in store if record.document == 0)
    assert text.startswith("<|system|>") and "<|endoftext|>" in text
    for vocab in ("300", "teacher", "pruned:400"):
        batches = StudentBatches(store, vocab, student="llama:32x1x2", loss={"next": 1})
        batches.tokenizer.save_pretrained(tmp_path / "student")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
        read = tokenizer.apply_chat_template(rows[0], tokenize=False)
        assert read == tokenizer.bos_token + text
        assert tokenizer.encode(text)[0] == tokenizer.bos_token_id
        assert tokenizer.eos_token == "<|endoftext|>"
        ids = tokenizer.encode("a<|endoftext|>", add_special_tokens=False)
        assert ids[-1] == tokenizer.eos_token_id


def test_a_bos_token_that_marks_messages_is_left_in_the_chat(tmp_path: Path, model: Path) -> None:
    """The tokenizer does not put it in front of a text, so the dump left it there."""
    template = TEMPLATE.replace("<|", "<|endoftext|><|")
    teacher = with_template(model, tmp_path / "model", template)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    tokenizer.save_pretrained(teacher)
    rows = chats(6)
    store = dumped(tmp_path, teacher, rows)
    text = "".join(record.text for record in store if record.document == 0)
    assert text.startswith("<|endoftext|><|system|>")
    student = StudentBatches(store, "300", student="llama:32x1x2", loss={"next": 1}).tokenizer
    read = student.apply_chat_template(rows[0], tokenize=False)
    assert read == student.bos_token + text


OWN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def with_own_marks(folder: Path, source: Path, template: str = OWN) -> Path:
    """Save a tokenizer with another template, whose marks are additional special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def batches_of(store: FeatureStore, own: Path) -> StudentBatches:
    losses = {"next": 1.0, "alm": 1.0}
    return StudentBatches(store, str(own), student="llama:32x2x4", loss=losses)


# Marks of the teacher that end with a special token, as in DeepSeek and Granite.
SPECIAL = TEMPLATE.replace("|>\n", "|><|endoftext|>")


@pytest.mark.parametrize(
    ("learn", "length", "template"),
    [
        ("assistant", 128, TEMPLATE),
        ("all", 128, TEMPLATE),
        ("assistant", 40, TEMPLATE),
        ("all", 40, TEMPLATE),
        ("assistant", 128, SPECIAL),
    ],
)
def test_a_student_with_its_own_template_is_aligned_message_by_message(
    tmp_path: Path, model: Path, learn: str, length: int, template: str
) -> None:
    cut = length == 40
    rows = chats(6) if cut else [row[-3:] for row in chats(18)[::3]]
    teacher = with_template(model, tmp_path / "model", template)
    store = dumped(tmp_path, teacher, rows, "--max-length", length, "--learn", learn)
    ok(feature_store, "verify", store.path)
    batches = batches_of(store, with_own_marks(tmp_path / "own", model))
    collator, tokenizer = batches.collator, batches.tokenizer
    (raw,) = store.gather([np.arange(len(store))])
    assert collator.own_template is not None and cut == (len(store) > len(rows))
    read, _ = collator.own_template.of_batch(raw)
    # Windows that begin or end inside a message have no marks at that end. Windows that begin
    # inside the marks start with the end of a message.
    expected = "".join(tokenizer.apply_chat_template(row, tokenize=False) for row in rows)
    found = "".join(read.texts)
    assert found == expected or cut
    assert found.replace("<|im_end|>\n", "") == expected.replace("<|im_end|>\n", "")
    batch = collator.for_validation(raw, 0, (0,))
    labels, chunks = tokenizer.decode(batch.labels), batch.aligned["bytes"].chunks
    if not cut:
        answers = [m for row in rows for m in row if learn == "all" or m["role"] == "assistant"]
        assert labels == "".join(f"{answer['content']}<|im_end|>" for answer in answers)
    assert batch.predicted_bytes == len(labels.encode())
    # Both sides have the same pieces, so each token of a content is a run, and so is the end token.
    taught = list[float]()
    for record in store:
        assert record.messages is not None and record.learn is not None
        (places,) = record.learn.nonzero()
        if record.messages[0, 0] == 0:  # the student has no token before the first one
            places = places[places > 1]
        taught += record.views[0].logits.observed[places - 1].tolist()
    assert chunks is not None and len(chunks.begin) == len(batch.labels)
    assert np.array_equal(chunks.following, batch.labels)
    assert np.array_equal(chunks.logprobs, np.array(taught, np.float32))


@pytest.mark.parametrize("length", [128, 24])
def test_an_empty_message_has_its_marks(tmp_path: Path, model: Path, length: int) -> None:
    """Without them a template may insert its own system message, or refuse the chat."""
    turns = [("system", ""), ("user", "a"), ("assistant", ""), ("user", "the story")]
    chat = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "b")]]
    store = dumped(tmp_path, model, [chat] * 30, "--max-length", length)
    ok(feature_store, "verify", store.path)
    assert learnt_texts(store) == ["<end>", "b<end>"]
    strict = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages[1:] %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    own = with_own_marks(tmp_path / "own", model, strict + OWN if length == 128 else OWN)
    batches = batches_of(store, own)
    (raw,) = store.gather([np.arange(len(store))])
    collator, tokenizer = batches.collator, batches.tokenizer
    assert collator.own_template is not None
    read, _ = collator.own_template.of_batch(raw)
    expected = tokenizer.apply_chat_template(chat, tokenize=False) * 30
    found = "".join(read.texts)
    assert found == expected or length == 24
    assert found.replace("<|im_end|>\n", "") == expected.replace("<|im_end|>\n", "")
    batch = collator.for_validation(raw, 0, (0,))
    chunks = batch.aligned["bytes"].chunks
    assert tokenizer.decode(batch.labels) == "<|im_end|>b<|im_end|>" * 30
    assert chunks is not None and np.array_equal(chunks.following, batch.labels)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_the_first_token_of_an_answer_may_begin_with_a_blank_of_the_template(
    tmp_path: Path, model: Path, side: str
) -> None:
    chat = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "a"}]
    theirs = TEMPLATE.replace("|>\n", "|>: ") if side == "teacher" else TEMPLATE
    store = dumped(tmp_path, with_template(model, tmp_path / "model", theirs), [chat] * 60)
    template = OWN.replace("}}\n{{", "}}: {{") if side == "student" else OWN
    batches = batches_of(store, with_own_marks(tmp_path / "own", model, template))
    (raw,) = store.gather([np.arange(1)])
    batch = batches.collator.for_validation(raw, 0, (0,))
    blank = " " * (side == "student")
    assert batches.tokenizer.decode(batch.labels) == f"{blank}a<|im_end|>"
    chunks = batch.aligned["bytes"].chunks
    assert chunks is not None and np.array_equal(chunks.following, batch.labels)
    record = store[0]
    assert record.learn is not None
    (places,) = record.learn.nonzero()
    assert np.array_equal(chunks.logprobs, record.views[0].logits.observed[places - 1])


def test_a_template_that_refuses_the_chats_is_replaced(tmp_path: Path, model: Path) -> None:
    store = dumped(tmp_path, model, chats(6))
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with_own_marks(tmp_path / "own", model, refusing + OWN)
    words = ("--store", store.path, "--student", "llama:32x1x2", "--steps", 1, "--device", "cpu")
    said = ok(student_train, *words, "--vocab", tmp_path / "own", "--out", tmp_path / "student")
    says(said, "the tokenizer gets the teacher's chat template", "no system")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<end>"
    # A student with the teacher's template does not count as one with its own template.
    said = ok(student_train, *words, "--vocab", tmp_path / "student", "--out", tmp_path / "next")
    assert "chat template" not in said
    # A store's template does not replace another store's template whose chats it refuses.
    strict = with_template(model, tmp_path / "strict", refusing + TEMPLATE)
    users = write_chats(tmp_path / "users.jsonl", [row[-2:] for row in chats(40)])
    ok(teacher_dump, *words_for(strict, users, tmp_path / "b.zarr"))
    both = ("--store", tmp_path / "b.zarr", *words, "--vocab", "300")
    line = refused(student_train, *both, "--out", tmp_path / "both")
    says(line, "does not write the chats of", "a.zarr (no system)", "give another store first")
    with_own_marks(tmp_path / "own", model)
    said = ok(student_train, *words, "--vocab", tmp_path / "own", "--out", tmp_path / "other")
    says(said, "chat template of the tokenizer", "message by message")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    assert tokenizer.chat_template == OWN and tokenizer.eos_token == "<|im_end|>"
    # Several named templates without one for plain chats.
    tokenizer.chat_template = {"tool_use": OWN, "rag": OWN}
    assert not has_own_template(tokenizer, store)
    # A continued training uses the same time.
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%dT%H:%M:%SZ') }}" + OWN
    texts = list(OwnTemplate(tokenizer, store).texts())
    assert texts[0].startswith(f"{store.meta['created']}<|im_start|>system")


def test_a_student_chats(tmp_path: Path, model: Path) -> None:
    store, out = dumped(tmp_path, model, chats(6)), tmp_path / "student"
    words = ("--store", store.path, "--student", "llama:32x1x2", "--vocab", "300", "--steps", "1")
    ok(student_train, *words, "--device", "cpu", "--out", out)
    lines = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    exec(lines.replace("this folder", str(out)).partition("print(")[0], scope)
    (call,) = [line for line in lines.splitlines() if line.startswith("print(")]
    turns = eval(call.removeprefix("print(").removesuffix(")"), scope)[0]["generated_text"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    assert exported_chat(out, tmp_path / "spoken")
    # A training that continues it on texts continues a model of chats.
    texts = tmp_path / "b.zarr"
    corpus = ("--corpus", write_corpus(tmp_path / "texts.txt"), "--attention", "none")
    ok(teacher_dump, "--model", model, *corpus, "--device", "cpu", "--out", texts)
    given = ("--student", out, "--steps", 1, "--device", "cpu", "--out", tmp_path / "next")
    ok(student_train, "--store", texts, *given)
    assert exported_chat(tmp_path / "next", tmp_path / "after")


def exported_chat(student: Path, out: Path) -> bool:
    """Return whether a student is offered as a partner of chats, which its card, its GGUF file and
    the card of the export must agree on."""
    with mock.patch("teachonce.student_export.job.costs_of", return_value=UNMEASURED):
        ok(student_export, student, "--to", "gguf", "--out", out)
    file = GGUFReader(out / "gguf/model.gguf").get_field("tokenizer.chat_template")
    chats = [
        '"role": "user"' in (student / "README.md").read_text(),
        "Chat with it" in (out / "README.md").read_text(),
        file is not None,
    ]
    assert len(set(chats)) == 1, chats
    return chats[0]


def test_the_teachers_vocabulary_has_its_template(tmp_path: Path, model: Path) -> None:
    """Also from a store without chats. A vocabulary trained on its texts lacks the marks."""
    path = tmp_path / "a.zarr"
    given = ("--model", model, "--corpus", write_corpus(tmp_path / "texts.txt"), "--out", path)
    ok(teacher_dump, *given, "--attention", "none", "--device", "cpu")
    words = ("--store", path, "--student", "llama:32x1x2", "--steps", 1, "--device", "cpu")
    whole = "{{ bos_token }}" + TEMPLATE  # the tokenizer puts it in front of each text
    for number, (vocab, template) in enumerate(
        [("teacher", whole), ("pruned:300", whole), ("300", None)]
    ):
        out = tmp_path / str(number)
        assert "chat template" not in ok(student_train, *words, "--vocab", vocab, "--out", out)
        assert AutoTokenizer.from_pretrained(out).chat_template == template
        assert not exported_chat(out, tmp_path / f"spoken-{number}")
    # A training that continues such a student is not one of chats, either.
    continued = ("--student", tmp_path / "0", "--out", tmp_path / "next")
    ok(student_train, *words[:2], *words[4:], *continued)
    assert AutoTokenizer.from_pretrained(tmp_path / "next").chat_template == whole
    assert not exported_chat(tmp_path / "next", tmp_path / "after")
    # A teacher without a template gives none, although its tokenizer begins with bos, too.
    plain = with_template(model, tmp_path / "plain", None)
    given = ("--model", plain, *given[2:-1], tmp_path / "b.zarr")
    ok(teacher_dump, *given, "--attention", "none", "--device", "cpu")
    store, out = tmp_path / "b.zarr", tmp_path / "student"
    ok(student_train, "--store", store, *words[2:], "--vocab", "teacher", "--out", out)
    assert AutoTokenizer.from_pretrained(out).chat_template is None


def test_a_template_writes_the_date_of_the_first_start(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{ strftime_now('%d %b %Y, %H:%M:%S') }}\n" + TEMPLATE
    folder = with_template(model, tmp_path / "model", dated)
    corpus, out = write_chats(tmp_path / "chats.jsonl", chats(2)), tmp_path / "a.zarr"
    words = words_for(folder, corpus, out)
    with monkeypatch.context() as stopped:
        stopped.setattr(StoreWriter, "seal", mock.Mock(side_effect=KeyboardInterrupt))
        assert invoke(teacher_dump, *words).exit_code

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Tomorrow":
            return cls.fromtimestamp(time.time() + 86_400, tz)

    for module in (chat_template_utils, plan):
        monkeypatch.setattr(module, "datetime", Tomorrow)
    ok(teacher_dump, *words)
    assert "nothing to do" in ok(teacher_dump, *words)
    store = open_store(out)
    started = datetime.fromisoformat(store.identity["arguments"]["chat_date"])
    assert store[0].text.startswith(started.strftime("%d %b %Y, %H:%M:%S"))
    ok(teacher_dump, *words_for(folder, corpus, tmp_path / "b.zarr"))
    other = open_store(tmp_path / "b.zarr")
    assert other[0].text != store[0].text
    # Outside of a dump the template writes the time as before.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = str(tokenizer.apply_chat_template(chats(1)[0], tokenize=False))
    assert text.startswith(Tomorrow.now().strftime("%d %b %Y"))
    ok(feature_store, "merge", out, tmp_path / "b.zarr", tmp_path / "both.zarr", "--recode")


def test_chats_are_tried_before_the_weights_are_loaded(tmp_path: Path, model: Path) -> None:
    """The tokenizer is loaded once for both, and a dump that is only estimated tries them, too."""
    strict = TEMPLATE + "{{ raise_exception('no system') }}"
    folder = with_template(model, tmp_path / "model", strict)
    (folder / "model.safetensors").write_bytes(b"")
    corpus, out = write_chats(tmp_path / "chats.jsonl", chats(2)), tmp_path / "a.zarr"
    says(refused(teacher_dump, *words_for(folder, corpus, out)), "chat 1", "no system")
    says(refused(teacher_dump, *words_for(folder, corpus, out), "--plan"), "chat 1", "no system")
    words = (*words_for(model, corpus, out), "--precision", "fp32")
    where = "teachonce.teacher_dump.teacher.loading.load_tokenizer"
    with mock.patch(where, wraps=load_tokenizer) as loads:
        ok(teacher_dump, *words)
    assert loads.call_count == 1


def test_fields_that_the_template_writes_are_not_dropped(tmp_path: Path, model: Path) -> None:
    calling = TEMPLATE.replace("<end>", "{% if m.tool_calls %}CALL{% endif %}<end>")
    folder = with_template(model, tmp_path / "calling", calling)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    (asked, *_), named = chats(1), [{**each, "name": "bob"} for each in chats(1)[0]]
    corpus = write_chats(tmp_path / "chats.jsonl", [named, [*asked, call]])
    line = refused(teacher_dump, *words_for(folder, corpus, tmp_path / "a.zarr"))
    says(line, "chats.jsonl, chat 2", "writes more of a message than role and content: tool_calls;")
    says(line, "give --text-column")
    # Fields that the template does not read change nothing.
    ok(teacher_dump, *words_for(model, corpus, tmp_path / "b.zarr"))
    assert "CALL" not in open_store(tmp_path / "b.zarr")[1].text


def test_a_vocabulary_without_the_end_of_messages_is_reported(tmp_path: Path, model: Path) -> None:
    store, plain = dumped(tmp_path, model, chats(6)), save_decoder(tmp_path / "plain", "Llama")
    words = ("--store", store.path, "--steps", 1, "--device", "cpu")
    said = ok(student_train, *words, "--student", plain, "--out", tmp_path / "student")
    says(said, "has no token <end>, which ends a message", "as 4 pieces", "resize_token_embeddings")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    network = AutoModelForCausalLM.from_pretrained(plain)
    network.resize_token_embeddings(len(tokenizer))
    network.save_pretrained(tmp_path / "with-end")
    tokenizer.save_pretrained(tmp_path / "with-end")
    out = tmp_path / "chatting"
    said = ok(student_train, *words, "--student", tmp_path / "with-end", "--out", out)
    assert "has no token" not in said
    assert AutoTokenizer.from_pretrained(out).eos_token == "<end>"


def test_what_is_refused(tmp_path: Path, model: Path) -> None:
    corpus, out = write_chats(tmp_path / "chats.jsonl", chats(2)), tmp_path / "a.h5"
    words = words_for(model, corpus, out)
    plain = save_decoder(tmp_path / "plain", "Llama")
    says(refused(teacher_dump, *words_for(plain, corpus, out)), "--messages", "no chat template")
    given = ("--model", plain, "--corpus", corpus, "--out", out, "--text-column", "messages")
    says(refused(teacher_dump, *given), "expected words", "give chats as --messages messages")
    says(refused(teacher_dump, *given[:-2]), "expected words", "give chats as --messages messages")
    first, upper = "chats.jsonl, chat 1", TEMPLATE.replace("m['content']", "m['content'] | upper")
    strict = TEMPLATE + "{{ raise_exception('no system') }}"
    for name, template, *printed in [
        ("upper", upper, first, "does not write each content as it is"),
        ("strict", strict, first, "refuses it: no system"),
        ("broken", TEMPLATE + "{{ }", "unexpected '}'; correct the"),
    ]:
        changed = with_template(plain, tmp_path / name, template)
        says(refused(teacher_dump, *words_for(changed, corpus, out)), *printed)
    texts = write_corpus(tmp_path / "texts.txt", 3)
    says(refused(teacher_dump, *words_for(model, texts, out)), "--messages messages", "no columns")
    for cell, found in [
        ([], "expected a list of"),
        ("a", "expected a list of"),
        ("[{", "expected a list of"),
        ('{"role": "user", "content": "a"}', "or its JSON, in column 'messages', got '{"),
        (["a"], "expected a list of"),
        ([{"role": "user"}], "message 1 in column 'messages': expected a text as 'content', which"),
        ([*chats(1)[0], {"role": "user", "content": 3}], "message 6 in"),
        ([{"role": "assistant", "content": None}], "'content', got None; give a text"),
    ]:
        wrong = write_chats(tmp_path / "wrong.jsonl", [*chats(1), cell])
        says(refused(teacher_dump, *words_for(model, wrong, out)), "wrong.jsonl, line 2", found)
    says(refused(teacher_dump, *words, "--text-column", "a"), "--text-column a", "leave one out")
    line = refused(teacher_dump, *words, "--head", "none", "--logits", "none")
    says(line, "--messages", "causal head")
    bare = ("--model", model, "--corpus", texts, "--out", out, "--learn", "all")
    says(refused(teacher_dump, *bare), "--learn all", "add --messages")
    trim = TEMPLATE.replace("m['content']", "m['content'] | trim")
    chat = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "\nb"}]
    store = dumped(tmp_path, with_template(plain, tmp_path / "trim", trim), [chat])
    assert learnt_texts(store) == ["b"]
