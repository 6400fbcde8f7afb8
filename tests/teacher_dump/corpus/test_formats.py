"""Common formats: compressed files, arrays, data sets, tagged words, pairs, exports of labels.

- Common formats: compressed files, JSON arrays, data sets, tagged words, exports of labels.
- Pairs of texts in two columns of a table, of every kind of table, and what is refused.
"""

import bz2
import gzip
import json
import lzma
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from hypothesis import given
from hypothesis import strategies as st

from teachonce.downstream.tasks.classify import Classify
from teachonce.store.format.sequences import SEPARATOR
from teachonce.teacher_dump.corpus import text_files
from teachonce.teacher_dump.corpus.class_names import with_class_names
from teachonce.teacher_dump.corpus.documents import Corpus, CorpusError
from teachonce.teacher_dump.corpus.labelled_text import Gold, labelled_row
from tests.teacher_dump.corpus.corpora import TABLES, TEXTS, refusal, texts, write_table


def zstd(raw: bytes) -> bytes:
    return bytes(pa.compress(raw, "zstd", asbytes=True))


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def golds(source: Path | str, text: str | None = None, label: str | None = "label") -> list[Any]:
    """Return the label or tags of every text."""
    found = [document.gold for document in Corpus.open([str(source)], text, label)]
    return [gold and (gold.label or list(gold.tags)) for gold in found]


@pytest.mark.parametrize("kind", PACK)
def test_packed_files(tmp_path: Path, kind: str) -> None:
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    for suffix in (".txt", ".jsonl", ".csv", ".tsv"):
        path = tmp_path / f"a{suffix}"
        if suffix == ".txt":
            path.write_text("\n".join(TEXTS))
        else:
            write_table(path, rows)
        raw = PACK[kind](path.read_bytes())
        made = tmp_path / f"a{suffix}{kind}"
        made.write_bytes(raw)
        assert texts(made) == TEXTS
        corpus = Corpus.open([str(made)])
        before = corpus.identity()  # for the file as it is, compressed
        corpus.check()
        assert corpus.identity() == before and before["sources"][0]["bytes"] == len(raw)
        made.write_bytes(raw[:-7])
        assert f"{made}: cannot be decompressed by" in refusal(made)
        made.write_bytes(raw + raw)  # concatenated, as by `cat`
        assert len(texts(made)) > len(TEXTS) or suffix in (".csv", ".tsv")
        made.write_bytes(b"no such thing" * 9)
        assert "damaged, truncated or has the wrong suffix" in refusal(made)
    assert texts(tmp_path / "*.txt") == TEXTS


@pytest.mark.slow
def test_a_packed_file_of_nothing_but_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "UNPACKED_FREELY", 1 << 20)
    for kind in (".xz", ".zst", ".bz2"):
        path = tmp_path / f"a.txt{kind}"
        path.write_bytes(PACK[kind](b"a\n" * (1 << 20)))
        with pytest.raises(CorpusError, match="decompresses to more than 500 times its size"):
            Corpus.open([str(path)]).check()
    path = tmp_path / "b.txt.xz"
    greedy = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    path.write_bytes(lzma.compress(b"a\n", filters=greedy))
    assert "Memory usage limit" in refusal(path)


def test_json(tmp_path: Path) -> None:
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    path = tmp_path / "a.json"
    for content in (
        json.dumps(rows),
        json.dumps(rows, indent=2),
        "\n".join(map(json.dumps, rows)),
        "".join(json.dumps(row, indent=1) for row in rows),
    ):
        path.write_text(content)
        assert texts(path) == TEXTS
    (tmp_path / "a.ndjson").write_text("\n".join(map(json.dumps, rows)))
    assert texts(tmp_path / "a.ndjson") == TEXTS
    whole = json.dumps(rows, indent=0)
    path.write_text(whole)
    corpus = Corpus.open([str(path)], label_column="id")
    corpus.check()
    assert corpus.found_labels("classification")["1"] == f"{path}, line 6"
    for content, printed in (
        (whole[:-1], "has no end"),
        (whole[:-9], "not JSON ("),
        (whole + whole, "several files were concatenated"),
        ('["a"]', 'expected an object like {"text": "..."}, got str'),
        ("[" * 100_000, "not JSON ("),
        ('{"text": {"0": "a"}}', "expected text in column 'text', got dict"),
        ('{"text": ["a b", "c"], "label": [1, 0]}', "one object with lists of 2 cells"),
        ('{"text": ["dawn", "sang"]}', "write the table as an array of objects"),
        ('{"train": [{"text": "a"}], "test": []}', "lists of rows ('train', 'test'), expected an"),
        ('{"data": [{"text": "a"}, {"text": "b"}]}', "write each list to a file of its own"),
    ):
        path.write_text(content)
        with pytest.raises(CorpusError) as caught:
            Corpus.open([str(path)]).check()
        assert printed in str(caught.value) and "\n" not in str(caught.value)
    path.write_text('{"chat": [{"from": "human", "value": "a"}]}')  # a lone chat, not lists of rows
    with pytest.raises(CorpusError, match='rename "from" to "role"'):
        Corpus.open([str(path)], messages="chat").check()
    assert "no file with text" in refusal(tmp_path / "*.js*n.none")
    path.unlink()
    (tmp_path / "config.json").write_text("{}")
    assert texts(tmp_path) == TEXTS  # settings are not texts


def test_carriage_returns(tmp_path: Path) -> None:
    """A carriage return ends a line only without line feeds; one in mid-line is refused."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\rtwo\rthree")
    assert texts(path) == ["one", "two", "three"]
    for name, content in (
        ("a.csv", 'text,n\r"one\rmore",1\rtwo,2\r'),
        ("a.tsv", "text\tn\rone\t1\rtwo\t2"),
        ("a.jsonl", '{"text": "one"}\r{"text": "two"}\r'),
    ):
        (tmp_path / name).write_bytes(content.encode())
        assert len(texts(tmp_path / name)) == 2
    corpus = Corpus.open([str(path)])
    before = corpus.identity()
    corpus.check()
    assert corpus.identity() == before
    path.write_bytes(b"one\rtwo\rthree\nfour\n")
    assert "line 1: a carriage return inside the line" in refusal(path)
    path.write_bytes(b"one\ntwo\r\r\nfour\n\r\nfive\r")
    assert texts(path) == ["one", "two\r", "four", "five"]
    (tmp_path / "a.csv").write_bytes(b'text,n\r\n"one\rmore",1\r\n')
    assert texts(tmp_path / "a.csv") == ["one\rmore"]
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"},\r{"text":\r\n"two"}]')
    assert texts(tmp_path / "a.json") == ["one", "two"]
    for name, raw, line in (
        ("a.csv", b"text,n\none\rmore,1\n", 2),
        ("a.tsv", b"text\tn\r\none\t1\rtwo\t2\r\n", 2),
        ("a.jsonl", b'{"text": "a"}\r\n{"text": "b"}\r{"text": "c"}\r\n', 2),
        ("a.conll", b"Bo O\nLi O\rx O\r\n", 2),
        ("a.txt", b"one\n" * 3000 + b"two\rthree\r", 3001),
        ("a.txt", b"one\r" * 300_000 + b"two\n", None),  # far after the first lines
    ):
        path = tmp_path / name
        path.write_bytes(raw)
        where = f"a{path.suffix}, line {line or ''}.*: a carriage return inside the line"
        with pytest.raises(CorpusError, match=where) as caught:
            Corpus.open([str(path)]).check()
    command = str(caught.value).partition("line end: ")[2]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert len(texts(tmp_path / "a.lines.txt")) == 300_001
    path.write_bytes(b"one\r\ntwo\rthree\r\n")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert texts(tmp_path / "a.lines.txt") == ["one", "two", "three"]


def test_labels_have_the_names_of_the_schema(tmp_path: Path) -> None:
    """Label numbers follow the names in the schema, whose order differs from a teacher's."""
    rows = {"text": list("abcd"), "label": [2, 0, None, -1]}
    schema = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "mid", "pos"])})
    made = Dataset.from_dict(rows, features=schema)
    folder = tmp_path / "hub"
    folder.mkdir()
    made.to_parquet(folder / "train.parquet")
    made.save_to_disk(tmp_path / "saved")
    DatasetDict(train=made.select([1]), test=made).save_to_disk(tmp_path / "splits")
    for source in (
        *(folder / "train.parquet", f"hf:{folder}", tmp_path / "saved", f"hf:{tmp_path}/saved"),
        *(tmp_path / "splits" / "test", f"hf:{tmp_path}/splits:test"),
    ):
        assert golds(source) == ["pos", "neg", None, None], source
        corpus = Corpus.open([str(source)], label_column="label")
        corpus.check()
        assert set(corpus.found_labels("classification")) == {"pos", "neg"}
    assert golds(f"hf:{tmp_path}/splits") == ["neg"]  # for `train`
    with pytest.raises(CorpusError, match=r"several splits, 'train', 'test'; name one of them: \S"):
        golds(tmp_path / "splits")
    (tmp_path / "saved" / "state.json").write_text("{")
    assert "not a readable data set" in refusal(tmp_path / "saved")
    table = pq.read_table(folder / "train.parquet")
    forged = b'{"info": {"features": {"label": "ClassLabel"}}}'
    numbers = table.set_column(1, "label", pa.array([5, 0, 0, 0]))
    for meta, printed in (
        (table.schema.metadata, "row 1: 5 is not a label of its schema, which has 3 names"),
        (
            {b"huggingface": forged},
            "row 1: its cells do not have the type that its schema declares, 'ClassLabel'",
        ),
        ({b"huggingface": b"{"}, "its schema describes features in another form"),
    ):
        pq.write_table(numbers.replace_schema_metadata(meta), tmp_path / "a.parquet")
        with pytest.raises(CorpusError, match=printed):
            golds(tmp_path / "a.parquet")


def test_tags_have_the_names_of_the_schema(tmp_path: Path) -> None:
    names = ClassLabel(names=["O", "B-PER", "I-PER"])
    rows = {"tokens": [["Bo", "Li", "is"], ["x"]], "ner_tags": [[1, 2, 0], [-1]]}
    features = Features({"tokens": List(Value("string")), "ner_tags": List(names)})
    path = tmp_path / "a.parquet"
    Dataset.from_dict(rows, features=features).to_parquet(path)
    assert golds(path, "tokens", "ner_tags") == [
        [(0, 2, "B-PER"), (3, 5, "I-PER"), (6, 8, "O")],
        [],
    ]
    assert texts(path, "tokens") == ["Bo Li is", "x"]
    inside = Features({"d": {"text": Value("string"), "labels": names}})
    rows = {"d": [{"text": "a", "labels": 2}]}
    Dataset.from_dict(rows, features=inside).to_parquet(path)
    assert golds(path, "d.text", "d.labels") == ["I-PER"]


def test_categories_and_truth_values(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    words = pa.array(["pos", "neg", None]).dictionary_encode()
    pq.write_table(pa.table({"text": list("abc"), "label": words}), path)
    assert golds(path) == ["pos", "neg", None]
    pq.write_table(pa.table({"text": list("ab"), "label": [True, False]}), path)
    assert golds(path) == ["True", "False"]


def test_columns_inside_of_columns(tmp_path: Path) -> None:
    rows = [{"id": i, "data": {"text": text, "n": 1}} for i, text in enumerate(TEXTS)]
    for suffix in (".jsonl", ".parquet"):
        path = write_table(tmp_path / f"a{suffix}", rows)
        assert texts(path) == texts(path, "data.text") == TEXTS
        assert "no column 'data.body'; did you mean" in refusal(path, "data.body")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(rows[0]) + '\n{"data": null}\n')
    with pytest.raises(CorpusError, match="line 2: no column 'data.text'"):
        texts(path)


CONLL = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
# NN B-NP O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER

-DOCSTART- -X- -X- O

no\u00a0one NN B-NP O
"""


def test_conll(tmp_path: Path) -> None:
    """In a file of blank-separated columns, the first has the words and the last the tags."""
    expected = ["EU rejects #", "Peter Blackburn", "no\u00a0one"]
    for name in ("a.conll", "a.tsv"):
        (tmp_path / name).write_text(CONLL)
        assert texts(tmp_path / name) == expected
        assert golds(tmp_path / name, label=None)[0] == [
            (0, 2, "B-ORG"),
            (3, 10, "O"),
            (11, 12, "O"),
        ]
    corpus = Corpus.open([str(tmp_path / "a.conll")])
    assert "of 4 columns the first holds the words, and column 4 the tags" in corpus.notes()[0]
    spaces = "# group O\nKurt B-PER\n# O\n#tag O\n\n# a comment\nis O\n# id\n"
    for content in (
        spaces,
        spaces.replace(" O", "\tO")
        .replace(" B", "\tB")
        .replace("group\t", "group ")
        .replace(" id", "\tid"),
    ):
        (tmp_path / "a.conll").write_text(content)
        assert texts(tmp_path / "a.conll") == ["Kurt # #tag", "is"]
        (note,) = Corpus.open([str(tmp_path / "a.conll")]).notes()
        assert "comments, and skipped (3 of the first 1,000 lines)" in note
    for content, sentences in (
        ("Kurt B-PER\nis O\n", ["Kurt is"]),
        ("Kurt B-PER\n\nis O\n", ["Kurt", "is"]),
        ("a X\nb Y\n\nc X\nd Y\n", ["a b", "c d"]),
    ):
        (tmp_path / "a.tsv").write_text(content)
        assert texts(tmp_path / "a.tsv") == sentences
    (tmp_path / "a.tsv").write_text(CONLL + "one column\n")
    with pytest.raises(CorpusError, match="line 13: expected 4 columns with spaces .* got 2 col"):
        texts(tmp_path / "a.tsv")
    for name, other in (("a.b.txt", "a.b.conll"), ("a.TXT", "a.conll")):
        (tmp_path / name).write_text(CONLL)
        printed = refusal(tmp_path / name)
        assert "looks like words with tags ('-DOCSTART-" in printed
        assert printed.endswith(f"rename it to {other}")
    rows = "1\tBo\tB-PER\tB-LOC\n2\tis\tO\tO\n3\tx\tO\tO\n"
    for name, content in (("a.tsv", rows), ("a.conll", rows.replace("\t", "  "))):
        (tmp_path / name).write_text(content)
        printed = refusal(tmp_path / name)
        assert "its first column counts the words" in printed
        subprocess.run(["sh", "-c", printed.partition("both: ")[2]], cwd=tmp_path, check=True)
        assert golds(tmp_path / f"a.words{Path(name).suffix}", label=None)[0][0] == (0, 2, "B-LOC")
    for content in ("Bo\tB-PER\t\nis\tO\t\n", "Bo\tB-PER\nis\tO\t\n", "Bo\tB-PER\t\nis\tO\n"):
        (tmp_path / "c.conll").write_text(content)  # a tab at the end starts no column
        assert golds(tmp_path / "c.conll", label=None) == [[(0, 2, "B-PER"), (3, 5, "O")]]
    (tmp_path / "b.tsv").write_text("text\nTwo words\n\nTwo words\n")  # a table with one column
    assert texts(tmp_path / "b.tsv") == ["Two words", "Two words"]


def test_conllu(tmp_path: Path) -> None:
    rows = [
        "# text = don't go",
        "1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_",
        "1\tdo\tdo\tAUX\tVB\t_\t0\troot\t_\t_",
        "2\tn't\tnot\tPART\tRB\t_\t1\tadvmod\t_\t_",
        "2.1\tghost\t_\tVERB\t_\t_\t_\t_\t_\t_",
        "3\tgo\tgo\t_\tVB\t_\t1\tx\t_\t_",
        "",
        "1\t10 000\t10000\tNUM\tCD\t_\t0\troot\t_\t_",
    ]
    for name in ("a.conllu", "a.tsv"):
        path = tmp_path / name
        path.write_text("\n".join(rows))
        assert texts(path) == ["do n't go", "10 000"]
        assert golds(path, label=None) == [[(0, 2, "AUX"), (3, 6, "PART")], [(0, 6, "NUM")]]
    path = tmp_path / "a.conllu"
    path.write_text("1\tdo\tAUX\n")
    assert "line 1: expected 10 columns" in refusal(path)


def test_blanks_around_labels_do_not_count(tmp_path: Path) -> None:
    """teacher-dump and downstream read the same labels."""
    cells = ("good ", [" good"], {"choices": ["\tgood"]}, "  ", 1)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "a b", "label": each}) + "\n" for each in cells))
    assert golds(path) == ["good", "good", "good", None, "1"]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert [example.label for example in Classify().read(path)] == ["good"] * 3
    path.write_text(json.dumps({"text": "a b", "label": [[0, 1, " PER "]]}))
    assert golds(path) == [[(0, 1, "B-PER"), (2, 3, "O")]]


def test_exports_of_doccano_and_label_studio(tmp_path: Path) -> None:
    """Spans of characters become tags of the words that they touch, which are cut at their ends."""
    text = "(Bo Li) is in Oslo."
    tags = [(0, 1, "O"), (1, 3, "B-PER"), (4, 6, "I-PER"), (6, 7, "O"), (8, 10, "O"), (11, 13, "O"),
            (14, 18, "B-LOC"), (18, 19, "O")]  # fmt: skip
    spans = [(14, 18, "LOC"), (1, 6, "PER")]
    doccano = [{"start_offset": b, "end_offset": e, "label": kind} for b, e, kind in spans]
    results: list[dict[str, Any]] = [
        {"type": "labels", "from_name": "ner",
         "value": {"start": b, "end": e, "text": text[b:e], "labels": [kind]}}
        for b, e, kind in spans
    ]  # fmt: skip
    studio = {"id": 1, "data": {"text": text}, "annotations": [{"result": results}]}
    choice = {"type": "choices", "from_name": "mood", "value": {"choices": ["pos"]}}
    path = tmp_path / "a.json"
    row: Any
    for row, columns in (
        ({"text": text, "label": spans}, ("text", "label")),
        ({"text": text, "entities": doccano}, ("text", "entities")),
        ({"text": text, "label": [r["value"] for r in results]}, ("text", "label")),
        (studio, ("data.text", "annotations")),
    ):  # fmt: skip
        path.write_text(json.dumps([row]))
        assert golds(path, *columns) == [tags]
    one = {**studio, "annotations": [{"result": [choice]}, {"was_cancelled": True, "result": []}]}
    none = {**studio, "annotations": []}
    path.write_text(json.dumps([one, none]))
    assert golds(path, None, "annotations") == ["pos", None]
    for cell in (["pos"], {"choices": ["pos"]}):
        path.write_text(json.dumps([{"text": "a", "label": cell}]))
        assert golds(path) == ["pos"]
    prodigy = {"text": "dawn sang", "spans": [{"start": 0, "end": 4, "label": "A"}]}
    for answer in ("accept", "reject", "ignore"):
        path.write_text(json.dumps([{**prodigy, "answer": answer}]))
        if answer == "accept":
            assert golds(path, None, "spans") == [[(0, 4, "B-A"), (5, 9, "O")]]
            continue
        with pytest.raises(CorpusError, match=f"line 1: the annotator's answer is '{answer}'"):
            golds(path, None, "spans")
    assert texts(path) == ["dawn sang"]  # if no labels are read
    relation = {"type": "relation", "from_id": "a", "to_id": "b", "direction": "right"}
    path.write_text(json.dumps([{**studio, "annotations": [{"result": [*results, relation]}]}]))
    assert golds(path, "data.text", "annotations") == [tags]
    rating = {"type": "rating", "from_name": "stars", "value": {"rating": 4}}
    offsets = {"startOffset": 0, "endOffset": 4, "hypertextlabels": ["A"]}
    hyper = {"type": "hypertextlabels", "from_name": "ner", "value": offsets}
    other = {**choice, "value": {"choices": ["neg"]}}
    moved = {**results[0], "value": {**results[0]["value"], "start": 13}}
    for row, printed in (
        (
            {**studio, "annotations": [{"result": [choice]}, {"result": [other]}]},
            "2 annotators disagree",
        ),
        ({**studio, "annotations": [{"result": [choice, *results]}]}, "answers several questions"),
        ({**studio, "annotations": [{"result": [rating]}]}, "'stars' .* answers of type 'rating'"),
        ({**studio, "annotations": [{"result": [hyper]}]}, "answers of type 'hypertextlabels'"),
        ({**studio, "annotations": [{"result": [rating, choice]}]}, "answers several questions"),
        ({"data": {"text": text}, "annotations": [[3, 4, "A"]]}, "holds no word, but ' '"),
        ({**studio, "annotations": [{"result": [moved]}]}, "characters 13 to 18 of the text are"),
        ({"data": {"text": text}, "annotations": ["a", "b"]}, "2 labels of one text, "),
        ({"data": {"text": text}, "annotations": ["a", [0, 4, "A"]]}, "2 labels of one text, "),
        ({"data": {"text": text}, "annotations": [[0, 4, "A"], [3, 6, "B"]]}, "overlap"),
        ({"data": {"text": text}, "annotations": [[0, 400, "A"]]}, "ends after the text"),
        (
            {"data": {"text": text}, "annotations": [[4, 2, "A"]]},
            "expected a span with 0 <= begin < end",
        ),
    ):
        path.write_text(json.dumps([row]))
        with pytest.raises(CorpusError, match=f"a.json, line 1: .*{printed}"):
            golds(path, "data.text", "annotations")


def test_a_first_line_that_is_no_header(tmp_path: Path) -> None:
    """A first line that looks like a text is refused as a header, unless its name is given."""
    for name, content in (
        ("a.tsv", "A good thing.\nA bad thing.\n"),
        ("a.csv", "A very good thing at dawn,0\nA bad thing at night,1\n"),
    ):
        (tmp_path / name).write_text(content)
        assert "looks like a text; write a header above it" in refusal(tmp_path / name)
        first = content.splitlines()[0].split(",")[0]
        assert len(texts(tmp_path / name, first)) == 1
    (tmp_path / "a.csv").write_text("the sentence,n\nA bad thing,1\n")
    assert texts(tmp_path / "a.csv") == ["A bad thing"]


KEYS = [
    "start", "end", "labels", "label", "choices", "result", "value", "type", "from_name", "text",
]  # fmt: skip
KEYS += ["start_offset", "end_offset", "was_cancelled"]
CELLS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats()
    | st.sampled_from(["", "a", "PER"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS), inner | st.sampled_from(["labels", "choices"]), max_size=4
        )
    ),
    max_leaves=12,
)


@given(cell=CELLS, text=st.sampled_from(["", "a b", "PER a"]) | st.lists(CELLS, max_size=3))
def test_cells_of_any_form_are_read_or_refused_in_a_line(cell: Any, text: Any) -> None:
    try:
        found = labelled_row({"text": text, "label": cell}, ["text"], "label", 1, "a.json, line 1")
    except CorpusError as error:
        assert str(error).startswith("a.json, line 1: ") and "\n" not in str(error)
    else:
        assert all(0 <= b <= e <= len(found.text) for b, e, _ in (found.gold or Gold()).tags)


@given(cell=CELLS, feature=CELLS | st.fixed_dictionaries({"_type": CELLS, "names": CELLS}))
def test_features_of_any_form_are_read_or_refused_in_a_line(cell: Any, feature: Any) -> None:
    try:
        with_class_names(cell, feature, "a.parquet, row 1")
    except CorpusError as error:
        assert str(error).startswith("a.parquet, row 1: ") and "\n" not in str(error)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_chat_may_be_json(tmp_path: Path, suffix: str) -> None:
    """Tables of single values store lists as JSON."""
    chat = [{"role": "user", "content": 'the "lamp",\told'}, {"role": "assistant", "content": "é"}]
    rows = [{"n": str(n), "messages": json.dumps(chat)} for n in range(3)]
    corpus = Corpus.open([str(write_table(tmp_path / f"a{suffix}", rows))], messages="messages")
    messages = [[(m.role, m.content) for m in document.messages] for document in corpus]
    assert messages == [[(m["role"], m["content"]) for m in chat]] * 3


ROWS: list[dict[str, Any]] = [
    {"two": "second", "n": "7", "one": "first", "gold": "yes"},
    {"two": "", "n": "8", "one": "alone", "gold": ""},
    {"two": "no first", "n": "9", "one": "", "gold": "no"},
    {"two": "", "n": "1", "one": "", "gold": "no"},
]


@pytest.mark.parametrize("suffix", TABLES)
def test_two_columns(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path / f"a{suffix}", ROWS)
    corpus = Corpus.open([str(path)], "one,two", "gold")
    found = [(d.text.split(SEPARATOR), d.gold and d.gold.label) for d in corpus]
    want = [(["first", "second"], "yes"), (["alone", ""], None), (["", "no first"], "no")]
    assert found == want and corpus.empty_lines == 1
    assert corpus.identity()["text_column"] == "one,two"
    swapped = Corpus.open([str(path)], "two,one", "gold")
    assert next(iter(swapped)).text == f"second{SEPARATOR}first"
    assert swapped.identity() != corpus.identity()
    assert next(iter(Corpus.open([str(path)], "one"))).text == "first"


@pytest.mark.parametrize("suffix", TABLES)
def test_a_column_that_is_missing(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path / f"a{suffix}", ROWS)
    printed = (
        rf"a{suffix}.*no column 'three'; its columns are '.*'one'.*; give one of them as --text"
    )
    for words in ("one,three", "three,one"):
        with pytest.raises(CorpusError, match=printed):
            Corpus.open([str(path)], words)


def test_a_row_that_lacks_a_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"one": "a", "two": "b"}\n{"one": "c"}\n')
    with pytest.raises(CorpusError, match=r"line 2: no column 'two'; its columns are 'one'"):
        list(Corpus.open([str(path)], "one,two"))


@pytest.mark.parametrize("words", ["one,two,n", "one,", ",two", "one,one", ","])
def test_columns_that_are_no_pair(tmp_path: Path, words: str) -> None:
    path = write_table(tmp_path / "a.csv", ROWS)
    with pytest.raises(CorpusError, match=rf"--text-column {words}: expected one column, or A,B"):
        Corpus.open([str(path)], words)


def test_what_cannot_be_pairs(tmp_path: Path) -> None:
    path, lines = write_table(tmp_path / "a.csv", ROWS), tmp_path / "b.txt"
    lines.write_text("one\n")
    with pytest.raises(CorpusError, match=r"b\.txt has no columns, so no pairs of texts"):
        Corpus.open([str(path), str(lines)], "one,two")
    with pytest.raises(CorpusError, match="--label-column two: is the column of the text"):
        Corpus.open([str(path)], "one,two", "two")
    for suffix in TABLES:
        rows = [*ROWS, {**ROWS[0], "two": f"a{SEPARATOR}b"}]
        with pytest.raises(CorpusError, match=r"(line|row) \d.*'two' holds the control.*U\+001F"):
            list(Corpus.open([str(write_table(tmp_path / f"c{suffix}", rows))], "one,two"))
