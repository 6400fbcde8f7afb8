"""Files of examples: their layouts; teacher-dump and downstream read a file in the same way."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.example_rows import read_rows
from teachonce.downstream.tasks.qa import GoldAnswer, Question, read_questions
from teachonce.downstream.tasks.tagging import PartsOfSpeech, Sentence, read_tagged
from teachonce.downstream.text_lines import read_lines
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus import text_files
from teachonce.teacher_dump.corpus.documents import Corpus
from tests.downstream.learnable import table
from tests.teacher_dump.corpus.corpora import texts


def squad(context: str, *questions: dict[str, Any]) -> str:
    """Return one paragraph in the layout of the official files."""
    paragraph = {"context": context, "qas": questions}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


def test_questions_come_in_four_layouts(tmp_path: Path) -> None:
    asked_for = Question("who?", "a lamp, a lamp", (GoldAnswer("lamp", 10),))
    first = Question("who?", "a lamp, a lamp", (GoldAnswer("lamp", 2),))
    none = Question("who?", "a lamp, a lamp", ())
    cells, header = ("who?", "a lamp, a lamp"), "question context answer answer_start"
    lines = [(*cells, "lamp", 10), (*cells, "lamp", ""), (*cells, "", "")]
    assert read_questions(table(tmp_path / "a.tsv", header, lines), {}) == [asked_for, first, none]
    answers: list[Any] = [
        {"text": ["lamp"], "answer_start": [10]},
        {"text": "lamp", "answer_start": 10},
        [{"text": "lamp", "answer_start": 10}],
        ["lamp"],
        [],
        {"text": [], "answer_start": []},
        {},
    ]
    hub = table(tmp_path / "b.jsonl", "question context answers", [(*cells, a) for a in answers])
    assert read_questions(hub, {}) == [asked_for, asked_for, asked_for, first, none, none, none]
    renamed = table(tmp_path / "c.jsonl", "question context reply", [(*cells, "lamp")])
    assert read_questions(renamed, {"answer": "reply"}) == [first]
    known = {"question": "who?", "answers": answers[2]}
    unknown = {"question": "who?", "answers": [], "is_impossible": True}
    empty = {"question": "who?", "answers": {}}
    (tmp_path / "d.json").write_text(squad(cells[1], known, unknown, empty))
    assert read_questions(tmp_path / "d.json", {}) == [asked_for, none, none]


def test_tables_are_read_alike(tmp_path: Path) -> None:
    rows: list[tuple[Any, ...]] = [('say "a"', "x"), ("b", "y")]
    expected = [{"text": 'say "a"', "label": "x"}, {"text": "b", "label": "y"}]
    assert read_rows(table(tmp_path / "a.tsv", "text label", rows)) == expected
    assert read_rows(table(tmp_path / "a.jsonl", "text label", rows)) == expected
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"say ""a""",x\r\n\r\nb,y\r\n')
    assert read_rows(path) == expected
    assert [row.where for row in read_rows(path)] == [f"{path}, line 2", f"{path}, line 4"]


def test_squad_may_be_one_long_line(tmp_path: Path) -> None:
    """SQuAD may be one long line, as in the official files, and may have a byte order mark."""
    context = "a lamp" + " and more" * (text_files.MAX_LINE // 9)
    asked = {"question": "what?", "answers": [{"text": "lamp", "answer_start": 2}]}
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + squad(context, asked), encoding="utf-8")
    assert path.stat().st_size > text_files.MAX_LINE
    assert read_questions(path, {}) == [Question("what?", context, (GoldAnswer("lamp", 2),))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a.json: cannot be read: No such file or directory; check the path"),
        ('{"data": "é"}'.encode("latin-1"), "line 1: not UTF-8 at byte 10 .*iconv -f LATIN1"),
        (b'{"data": ', "a.json: not JSON .*give a file in SQuAD's layout"),
    ],
)
def test_what_is_no_squad_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_questions(path, {})
    assert "\n" not in str(caught.value)


def test_tagged_files_are_those_of_teacher_dump(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    content = "\ufeff# sent_id = 1\na\tX\n# between\n#\tY \n\n\n# sent_id = 2\nb c\tX"
    path.write_bytes(content.replace("\n", "\r\n").encode())
    one, two = read_tagged(path)
    assert (one, two) == (Sentence(("a", "#"), ("X", "Y")), Sentence(("b c",), ("X",)))
    assert [one.where(1), two.where(0)] == [f"tags {path}, line {n}" for n in (4, 8)]
    dumped = list(Corpus.open([str(path)]))
    assert [document.text for document in dumped] == ["a #", "b c"]
    assert [d.gold and d.gold.tags for d in dumped] == [((0, 1, "X"), (2, 3, "Y")), ((0, 3, "X"),)]


def test_a_word_without_a_tag_is_refused(tmp_path: Path) -> None:
    """A word without a tag can be dumped, but training and scoring refuse it."""
    path = tmp_path / "a.tsv"
    path.write_text("a\tX\n\n# no tag\nb\t \n")
    assert texts(path) == ["a", "b"]
    with pytest.raises(UserError, match="line 4: expected word<TAB>tag, got 'b' with tag ''"):
        read_tagged(path)


def test_lines_are_those_of_teacher_dump(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone line\r\n \n\u2003\n  two \u2028\nthree".encode())
    assert read_lines(path) == texts(path) == ["one line", "  two \u2028", "three"]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_tables_are_those_of_teacher_dump(suffix: str, tmp_path: Path) -> None:
    """Blank lines, also before the header, are not rows; other rows must have as many columns as
    the header."""
    path, separator = tmp_path / f"a{suffix}", "\t" if suffix == ".tsv" else ","
    good: list[list[str]] = [["one", "x"], ["two ", "y"]]
    if suffix == ".jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in good]
        bad, message = "[]", "expected an object"
    else:
        lines = [separator.join(row) for row in good]
        bad, message = f"a{separator}b{separator}c", "expected 2 columns as in the header, got 3"
    header = [] if suffix == ".jsonl" else [separator.join(("text", "label"))]
    path.write_text("\n".join([" ", *header, lines[0], "", "  ", *lines[1:]]) + "\n")
    rows = read_rows(path)
    assert [list(row.values()) for row in rows] == good
    dumped = list(Corpus.open([str(path)], label_column="label"))
    assert [[d.text, d.gold and d.gold.label] for d in dumped] == good
    place = f"{path}, line {len(header) + 6}: "
    path.write_text(path.read_text() + bad + "\n")
    refusals = []
    for read in (read_rows, lambda path: Corpus.open([str(path)], "text").check()):
        with pytest.raises(UserError) as caught:
            read(path)
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1] and refusals[0].startswith(place) and message in refusals[0]


def test_classes_have_the_names_of_the_schema(tmp_path: Path) -> None:
    """Also in a compressed file, and in nested columns."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    rows = {"text": ["a", "b"], "label": [1, 0]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    one, two = Classify().read(tmp_path / "a.parquet")
    assert (one.label, two.label, two.where) == ("pos", "neg", f"{tmp_path / 'a.parquet'}, row 2")
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        json.dump([{"data": {"text": "a"}, "label": ["pos"]}], file)
    task = Classify({"text": "data.text"})
    assert [each.label for each in task.read(tmp_path / "a.json.gz")] == ["pos"]
    rows = {"text": ["a", "b"], "label": [1, -1]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet, row 2: the text has no label"):
        Classify().read(tmp_path / "a.parquet")


def test_questions_in_an_array_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": "who?", "context": "a lamp", "answer": "lamp"}]))
    assert read_questions(path, {}) == [Question("who?", "a lamp", (GoldAnswer("lamp", 2),))]


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    """An escape in JSON can give half of a character, which no tokenizer encodes."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab\\ud800", "label": "x", "tokens": ["\\udc00"], "tags": ["x"]}\n')
    place = r"(line 1|a.jsonl): character . is '\\u....', half of a character"
    for read in (Classify().read, PartsOfSpeech(columns={"text": "tokens"}).read, read_lines):
        with pytest.raises(UserError, match=place):
            read(path)


def test_lines_of_tables_are_their_texts(tmp_path: Path) -> None:
    """Lines of tables are read as their texts: a masked LM is not trained on the syntax of JSON."""
    path = table(tmp_path / "a.jsonl", "id text", [(1, "one"), (2, " "), (3, "three")])
    assert read_lines(path) == ["one", "three"]
    path = table(tmp_path / "b.jsonl", "s t", [("a", "b")])
    with pytest.raises(
        UserError, match="expected a column 'text', or a single column of texts, got 's'"
    ):
        read_lines(path)
