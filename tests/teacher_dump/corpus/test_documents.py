"""Every kind of source is read as documents, also if it is edited while it is read.

- Every kind of source is read as documents, and an unreadable source gives one clear line.
- Corpora that are edited while they are read, or between two readings of one command.
- Sources that are not plain files: datasets of the hub and the docstrings of Python.
"""

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from teachonce.teacher_dump.corpus import files, text_files
from teachonce.teacher_dump.corpus.documents import Corpus, CorpusError, Document
from tests.integrity.edited_corpora import EDITS, HARMLESS, KINDS, edited, write
from tests.teacher_dump.corpus.corpora import TABLES, TEXTS, refusal, texts, write_table


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines(tmp_path: Path, ending: str, mark: str) -> None:
    path = tmp_path / "a.txt"
    lines = [TEXTS[0], "", *TEXTS[1:3], "   ", *TEXTS[3:]]
    path.write_bytes((mark + ending.join(lines)).encode())
    corpus = Corpus.open([str(path)])
    assert list(corpus) == [Document(text, "a.txt", i) for i, text in enumerate(TEXTS)]
    assert (corpus.documents, corpus.empty_lines) == (5, 2)
    assert [document.text for document in corpus] == TEXTS
    assert (corpus.documents, corpus.empty_lines) == (5, 2)


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("a\u2028b\x0bc\u0085d\ne".encode())
    assert texts(path) == ["a\u2028b\x0bc\u0085d", "e"]


@pytest.mark.parametrize("suffix", TABLES)
def test_tables(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": i, "text": text, "title": "x"} for i, text in enumerate(TEXTS)]
    path = write_table(tmp_path / f"a{suffix}", rows)
    assert texts(path) == TEXTS
    assert texts(path, "title") == ["x"] * 5
    assert "no column 'body'; its columns are 'id', 'text', 'title'" in refusal(path, "body")


@pytest.mark.parametrize("suffix", TABLES)
def test_only_column_of_text_is_found(tmp_path: Path, suffix: str) -> None:
    one = write_table(tmp_path / f"one{suffix}", [{"n": 1.5, "s": t} for t in TEXTS])
    assert texts(one) == TEXTS
    two = write_table(tmp_path / f"two{suffix}", [{"s": t, "label": "b"} for t in TEXTS])
    assert "no column 'text'; its columns are 's', 'label'; name the one" in refusal(two)
    assert texts(two, "s") == TEXTS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_words_are_texts_next_to_ids(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"id": f"{n}", "tokens": text.split() or ["a"], "n": [1]} for n, text in enumerate("ab")
    ]
    path = write_table(tmp_path / f"a{suffix}", rows)
    assert "no column 'text'; its columns are 'id', 'tokens', 'n'; name the one" in refusal(path)
    assert texts(path, "tokens") == ["a", "b"]
    for row in rows:
        del row["id"]
    assert texts(write_table(path, rows)) == ["a", "b"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_ids_are_no_texts_next_to_empty_words_or_chats(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    chat, shared = {"role": "user", "content": "hi"}, {"from": "human", "value": "hi"}
    cells: list[list[Any]] = [[[], ["a"]], [None, "a"], [[chat]] * 2, [[shared]] * 2]
    for column in cells:
        rows = [{"id": f"{n}", "x": cell} for n, cell in enumerate(column)]
        assert "its columns are 'id', 'x'; name the one" in refusal(write_table(path, rows))
    for span in ({"start": 0, "end": 1, "label": "Y"}, {"from": 0, "to": 1}):
        assert texts(write_table(path, [{"s": "a", "spans": [span], "x": None}])) == ["a"]
    assert texts(write_table(path, [{"id": 1, "x": []}, {"id": 2, "x": ["a"]}])) == ["a"]


def test_ids_are_no_texts_next_to_texts_with_a_number(tmp_path: Path) -> None:
    for column in (["a", 5], [5, "a"], [["in"], ["in", 1999]]):
        rows = [{"id": f"{n}", "x": cell} for n, cell in enumerate(column)]
        assert "its columns are 'id', 'x'; name the one" in refusal(
            write_table(tmp_path / "a.jsonl", rows)
        )


def test_quotes_in_csv_and_in_tsv(tmp_path: Path) -> None:
    comma = tmp_path / "a.csv"
    comma.write_text('text,n\n"one, ""two""\nthree",1\n\n', encoding="utf-8")
    assert texts(comma) == ['one, "two"\nthree']
    tab = tmp_path / "a.tsv"
    tab.write_text('text\tlabel\n" Маркетинг " удивляет\tx\n"open\ty\n', encoding="utf-8")
    assert texts(tab) == ['" Маркетинг " удивляет', '"open']


@pytest.mark.parametrize(
    ("name", "header", "expected"),
    [
        ("a.csv", "id;text", "semicolons"),
        ("a.csv", "id\ttext", "tabs"),
        ("a.csv", "id|text", "bars"),
        ("a.tsv", "id,text", "commas"),
        ("a.tsv", "id;text", "semicolons"),
    ],
)
def test_a_table_divided_by_another_separator(
    tmp_path: Path, name: str, header: str, expected: str
) -> None:
    """A table with another separator is refused: it would be one column of text and numbers."""
    path = tmp_path / name
    path.write_text(f"{header}\n{header.replace('id', '1')}\n")
    message = refusal(path)
    assert f"one column with {expected} in its name" in message and f"{path}, line 1" in message


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_two_columns_of_one_name(tmp_path: Path, suffix: str) -> None:
    """Two columns of the same name are refused if the name is read, and allowed otherwise."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
        pq.write_table(pa.Table.from_arrays(columns, ["text", "x", "x"]), path)
    else:
        separator = "," if suffix == ".csv" else "\t"
        path.write_text("text,x,x\na,b,c\n".replace(",", separator))
    message = refusal(path, "x")
    assert "2 columns have the name 'x'; rename all but one" in message and str(path) in message
    assert texts(path) == ["a"]
    with pytest.raises(CorpusError, match="2 columns have the name 'x'"):
        Corpus.open([str(path)], label_column="x")


@pytest.mark.parametrize("option", ["text_column", "label_column"])
@pytest.mark.parametrize("name", ["a.txt", "a.tsv"])
def test_a_column_of_no_table(tmp_path: Path, name: str, option: str) -> None:
    path = tmp_path / name
    path.write_text("words\tNN\n\nmore\tJJ\nwords\tNN\n")
    with pytest.raises(
        CorpusError, match=rf"(--\w+-column) nope: {name} has no columns; leave \1 out"
    ):
        Corpus.open([str(path)], **{option: "nope"})
    table = write_table(tmp_path / "b.csv", [{"nope": "1", "text": "more"}])
    Corpus.open([str(path), str(table)], **{option: "nope"})


def test_tokens_and_tags(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('# id = 1\n"\tO\nČo\tB-PER\n.\tO\n\n\n# id = 2\nno\tO\n', encoding="utf-8")
    assert texts(path) == ['" Čo .', "no"]
    path.write_text("a\tO\n\nb\tO\n" * 600 + "c O\n")
    message = refusal(path)
    assert f"{path}, line 1801: expected token<TAB>tag" in message and (
        "got 1 column; divide its columns by tabs" in message
    )


def test_null_is_an_empty_text(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".parquet"):
        path = write_table(tmp_path / f"a{suffix}", [{"text": "a"}, {"text": None}, {"text": "b"}])
        corpus = Corpus.open([str(path)])
        assert [document.text for document in corpus] == ["a", "b"]
        assert corpus.empty_lines == 1


def test_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".git/d.txt", "README.md"):
        (tmp_path / name).write_text(name)
    write_table(tmp_path / "z.jsonl", [{"text": "row"}])
    (tmp_path / "empty.txt").touch()
    assert texts(tmp_path) == ["a.txt", "b.txt", "sub/c.txt", "row"]
    assert texts(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    both = Corpus.open([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    assert [(d.text, d.source, d.number) for d in both] == [
        ("b.txt", "b.txt", 0),
        ("a.txt", "a.txt", 1),
    ]


def test_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "abc"}\n')
    corpus = Corpus.open([str(path)], "body")
    assert corpus.identity() == {
        "text_column": "body",
        "sources": [
            {
                "kind": "file",
                "name": "a.jsonl",
                "bytes": 16,
                "sha256": hashlib.sha256(b'{"body": "abc"}\n').hexdigest(),
            }
        ],
    }
    before = corpus.identity()
    assert json.loads(json.dumps(before)) == before
    path.write_text('{"body": "abd"}\n')
    assert corpus.identity()["sources"] != before["sources"]


def test_checking_hashes_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    paths = [write_table(tmp_path / f"a{suffix}", rows) for suffix in TABLES]
    paths += [tmp_path / "b.txt", tmp_path / "tagged.tsv"]
    paths[-2].write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo")
    paths[-1].write_text("a\tX\nb\tY\n\nc\tX\n\n")
    hashed: list[str] = []

    def whole(path: Path, first: int = 0) -> Any:
        hashed.append(path.name)
        return digests(path, first)

    digests = files.digests
    monkeypatch.setattr(files, "digests", whole)
    unchecked, checked = (Corpus.open([str(path) for path in paths]) for _ in range(2))
    before = unchecked.identity()
    assert len(hashed) == len(paths)
    checked.check()
    hashed.clear()
    assert checked.identity() == before
    assert hashed == []


def test_opening_a_corpus_hashes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a corpus does not hash its files, since some of them would be read twice."""
    hashed = list[bytes]()
    monkeypatch.setattr(files._Digest, "add", lambda digest, raw: hashed.append(raw))
    packed, table = tmp_path / "a.txt.gz", tmp_path / "a.parquet"
    packed.write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    pq.write_table(pa.table({"text": list(TEXTS)}), table)
    corpus = Corpus.open([str(packed), str(table)])
    assert hashed == []
    assert len(list(corpus)) == 2 * len(TEXTS)
    assert b"".join(hashed).startswith(packed.read_bytes())


def test_refused_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.txt"
    assert f"{missing}: no such file or folder" in refusal(missing)
    assert "hf:wikimedia/wikipedia" in refusal("wikimedia/wikipedia")
    for name in ("nothing.txt", "nothing.jsonl.gz", "/nowhere/texts", "~/texts", "a b"):
        assert refusal(name).endswith("check the name")
    assert "standard input is not read" in refusal("-")
    assert "no file with text in it, expected some of .txt" in refusal(tmp_path)
    assert "no file with text in it" in refusal(tmp_path / "*.csv")
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    assert "unknown suffix '.pdf', expected one of .txt, .jsonl" in refusal(tmp_path / "a.pdf")
    assert "to read .json files" not in refusal(tmp_path / "*.pdf") + refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert f"to read .json files give {tmp_path}/*.json" in refusal(tmp_path)
    assert "to read .json files" not in refusal(tmp_path / "*")
    (tmp_path / "empty.txt").touch()
    assert "empty.txt: the file is empty" in refusal(tmp_path / "empty.txt")
    (tmp_path / "blank.txt").write_text("\n  \n\n")
    with pytest.raises(CorpusError, match=r"no text in the whole corpus \(3 empty lines\)"):
        Corpus.open([str(tmp_path / "blank.txt")])  # before a teacher is loaded
    for name, rows in (("a.json", "[]"), ("a.jsonl", "\n\n"), ("a.csv", "\n")):
        (tmp_path / name).write_text(rows)
        line = refusal(tmp_path / name)
        assert f"{name}: has no rows; give a table with a text in each row" in line
    with pytest.raises(CorpusError, match="no corpus given"):
        Corpus.open([])


@pytest.mark.parametrize(
    ("encoding", "text", "label", "remedy"),
    [
        ("latin-1", "ok\nUn café très agréable\n", "Latin-1", "LATIN1"),
        ("cp1251", "ok\nСтарый смотритель маяка\n", "cp1251", "CP1251"),
        ("koi8-r", "ok\nСтарый смотритель маяка\n", "KOI8-R", "KOI8-R"),
        ("cp1250", "ok\nStaň sa, dieťa, veľmi šťastným človekom\n", "cp1250", "CP1250"),
        ("cp1250", "ok\nŘeka šumí, žena pláče a člověk se směje\n", "cp1250", "CP1250"),
        ("cp1250", "ok\nZażółć gęślą jaźń\n", "cp1250", "CP1250"),
        ("iso-8859-2", "ok\nStaň sa, dieťa, veľmi šťastným človekom\n", "ISO", "ISO-8859-2"),
        ("cp1252", "ok\nL’été « œuvre » – 5 €\n", "cp1252", "CP1252"),
        ("cp1252", "ok\nÀ bientôt\nune œuvre\n", "cp1252", "CP1252"),
    ],
)
def test_not_utf8(tmp_path: Path, encoding: str, text: str, label: str, remedy: str) -> None:
    raw = text.encode(encoding)
    position = next(i for i, byte in enumerate(raw) if byte >= 0x80)
    (tmp_path / "it's").mkdir()
    for suffix in (".txt", ".jsonl", ".csv", ".tsv"):
        path = tmp_path / "it's" / f"a{suffix}"
        path.write_bytes(raw)
        if suffix == ".jsonl":
            path.write_bytes(raw.replace(b"ok", b"  "))
        message = refusal(path)
        place = f"line 2: not UTF-8 at byte {position} (0x{raw[position]:02x})"
        assert f"{place}: looks like {label}" in message
        # The user sees whether the guess is right, by this line alone.
        assert repr(text.split("\n")[1][:20])[:13] in message and r"\n" not in message
        command = message.partition(f" than {remedy} if that is wrong: ")[2]
        assert f"iconv -f {remedy} -t UTF-8 > a.utf8{suffix}" in command
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
        converted = (tmp_path / f"a.utf8{suffix}").read_text()
        assert converted == (text if suffix != ".jsonl" else text.replace("ok", "  "))


@pytest.mark.parametrize("broken", [0, 2, 5])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".txt.gz"])
def test_a_cut_character_in_utf8(tmp_path: Path, suffix: str, broken: int) -> None:
    lines = [f'{{"text": "{text}"}}'.encode() for text in ["Un café “serré”, très bon"] * 6]
    lines[broken] = lines[broken].replace("”".encode(), b"\xe2\x80")
    path, made = tmp_path / f"a{suffix}", tmp_path / "made"
    packed = suffix.endswith(".gz")
    path.write_bytes((gzip.compress if packed else bytes)(b"\n".join(lines) + b"\n"))
    made.mkdir()
    message = refusal(path)
    assert f"line {broken + 1}: not UTF-8 at byte" in message
    assert "(0xe2): a broken character in UTF-8 text, cut off or of another encoding" in message
    command = message.partition("all broken characters: ")[2]
    # Some releases of iconv write the whole text and then exit with 1.
    subprocess.run(["sh", "-c", command], cwd=made, check=False)
    (found,) = made.iterdir()
    assert found.read_text().count("café “serré”, très") == 5
    assert found.read_text().count("café “serré, très") == 1


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
def test_two_encodings_in_one_file(tmp_path: Path, suffix: str) -> None:
    line = '{"text": "Сегодня тихо и тепло"}'
    path = tmp_path / f"a{suffix}"
    path.write_bytes(f"{line}\n".encode() * 40 + f"{line}\n".encode("cp1251") * 3)
    message = refusal(path)
    assert "line 41: not UTF-8 at byte" in message and "iconv" not in message
    assert "earlier lines are UTF-8, and this one looks like cp1251" in message
    broken = line.encode().replace("т".encode(), b"\xd1").replace("о".encode(), b"\xd0")
    path.write_bytes(f"{line}\n".encode() * 40 + broken + b"\n")
    assert "line 41: not UTF-8 at byte" in refusal(path)
    assert "a broken character in UTF-8 text" in refusal(path)


def test_byte_positions_behind_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfab\xff\n")
    assert "line 1: not UTF-8 at byte 5 (0xff)" in refusal(path)


def test_cut_off_file_and_utf16(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("ok\nконец".encode()[:-1])
    assert "line 2: not UTF-8 at byte 11 (0xd1): the text ends inside a character" in refusal(path)
    path.write_text("text", encoding="utf-16")
    assert f"looks like UTF-16, expected UTF-8; convert it: cat {path} | iconv" in refusal(path)


def test_binary(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ok\nab\x00\xff\xd8")
    assert f"{path}, line 2: a NUL byte at byte 5: this is a binary file" in refusal(path)


def test_huge_line_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.write(b"ok\n")
        file.write(b"x")
        file.truncate(200_000_000)
        file.seek(3)
        for _ in range(12):
            file.write(b"\xd0\xb9" * 500_000)
    tracemalloc.start()
    message = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message == f"{path}, line 2: longer than 10,000,000 bytes; put one document on a line"
    assert peak < 80_000_000


def test_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, expected in [
        ('{"text": "b"', "not JSON (Expecting"),
        ('["b"]', 'expected an object like {"text": "..."}, got list'),
        ('{"txt": "b"}', "no column 'text'; did you mean txt? its columns are 'txt'"),
        ('{"id": "b"}', "its columns are 'id'; if this row has no text, write null there"),
        ('{"text": 5}', "expected text in column 'text', got int 5"),
        ("[" * 100_000, "not JSON ("),
    ]:
        path.write_text('{"text": "a"}\n\n' + line + "\n")
        message = refusal(path)
        assert message.startswith(f"{path}, line 3: ") and expected in message
    path.write_text('{"text": "a", "label": "b"}\n{"text": "c"}\n')
    line = "line 2: no column 'label' of labels; its columns are 'text'; if this text has no label"
    with pytest.raises(CorpusError, match=line):
        [*Corpus.open([str(path)], label_column="label")]
    path.write_text('{"text": "a", "label": "b"}\n{"text": "c", "label": null}\n')  # the remedy
    documents = [*Corpus.open([str(path)], label_column="label")]
    assert [bool(document.gold) for document in documents] == [True, False]
    path.write_text('{"chat": [{"role": "user", "content": "a"}]}\n{"text": "c"}\n')
    line = "line 2: no column 'chat'; its columns are 'text'; remove the row$"  # null is no chat
    with pytest.raises(CorpusError, match=line):
        [*Corpus.open([str(path)], messages="chat")]
    path = tmp_path / "a.csv"
    for line, expected in [
        ("b,c,2", "line 3: expected 2 columns as in the header, got 3; quote texts"),
        ('"b,2', "line 3: unexpected end of data; close every quote"),
        ('"b"x,2', "line 3: ',' expected after '\"'; close every quote"),
    ]:
        path.write_text("text,n\na,1\n" + line + "\n")
        assert expected in refusal(path)
    path = tmp_path / "a.tsv"
    path.write_text("text\tn\na\t1\nb\n")
    assert "line 3: expected 2 columns as in the header, got 1" in refusal(path)


def test_quote_that_is_never_closed_in_a_long_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE", 10_000)
    path = tmp_path / "a.csv"
    path.write_text('text,n\n"a,1\n' + "row,1\n" * 5000)
    assert "line 2: field larger than field limit (10000)" in refusal(path)


def test_bad_parquet(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", [{"text": 1, "s": "a"}])
    assert "expected text in column 'text', got int64" in refusal(path)
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{path}: not a readable parquet file (" in refusal(path)


def test_bad_line_far_down_is_reported_by_check(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * 5000 + b"\xff\n")
    corpus = Corpus.open([str(path)])
    with pytest.raises(CorpusError, match=r"line 5001: not UTF-8"):
        corpus.check()


LINES = [f"line {n} of the text" for n in range(3000)]
FILES = [kind for kind in KINDS if kind != "hf"]


def opened(path: Path) -> Corpus:
    """Open a corpus, check and describe it, as a dump does before it reads."""
    write(path, LINES)
    corpus = Corpus.open([str(path)])
    corpus.check()
    corpus.identity()
    return corpus


@pytest.mark.parametrize("suffix", FILES)
def test_a_line_written_over_while_it_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    corpus = opened(path)
    documents = iter(corpus)
    list(islice(documents, 10))
    EDITS["a line written over"][1](path, [*LINES[:-1], "line 2999 of the TEXT"])
    with pytest.raises(
        CorpusError,
        match=r"a\.\w+: was changed while it was being read, from .* remove it, and run",
    ):
        list(documents)
        corpus.check_unchanged()


@pytest.mark.parametrize("suffix", FILES)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_behind_what_is_read(tmp_path: Path, suffix: str, edit: str) -> None:
    """An edit after the last text read (`--limit`) is refused, since the hash is recorded."""
    path = tmp_path / f"a{suffix}"
    corpus = opened(path)
    list(islice(iter(corpus), 10))
    changed = [*LINES[:-5], "another end"] if edit not in HARMLESS else LINES
    EDITS[edit][1](path, changed)
    if edit in HARMLESS or suffix == ".parquet":  # each reading of Parquet starts with a hash
        corpus.check_unchanged()
        return
    with pytest.raises(CorpusError, match=r"was changed while it was being read|cannot be read"):
        corpus.check_unchanged()


@pytest.mark.parametrize("edit", sorted(set(EDITS) - set(HARMLESS)))
def test_a_library_reads_a_file_that_is_edited(tmp_path: Path, edit: str) -> None:
    path = tmp_path / "a.parquet"
    write(path, LINES)
    corpus = Corpus.open([str(path)])
    documents = iter(corpus)
    next(documents)
    EDITS[edit][1](path, ["other text", *LINES[1:]])
    with pytest.raises(CorpusError, match=r"was changed while it was being read|cannot be read"):
        corpus.identity()
        list(documents)
        corpus.check_unchanged()


def test_an_edit_that_is_taken_back(tmp_path: Path) -> None:
    """An edit that is reverted is found: the file equals the old one, but the texts read do not."""
    path = tmp_path / "a.txt"
    corpus = opened(path)
    EDITS["a line written over"][1](path, ["other text", *LINES[1:]])
    list(islice(iter(corpus), 10))
    EDITS["a line written over"][1](path, LINES)
    with pytest.raises(CorpusError, match="was changed while it was being read"):
        corpus.check_unchanged()


def test_what_was_read_whole_may_change_or_go(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    corpus = opened(path)
    assert len(list(corpus)) == len(LINES)
    path.write_text("other text\n")
    corpus.check_unchanged()
    path.unlink()
    corpus.check_unchanged()


def test_a_local_dataset(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", LINES)
    corpus = Corpus.open([f"hf:{tmp_path}"])
    corpus.check()
    documents = iter(corpus)
    next(documents)
    os.utime(tmp_path / "train.jsonl")
    corpus.identity()
    corpus.check_unchanged()
    write(tmp_path / "train.jsonl", LINES[:-1])
    with pytest.raises(CorpusError, match="the folder was changed while it was being read"):
        corpus.check_unchanged()


@pytest.mark.apart
def test_dumps_of_edited_corpora(tmp_path: Path) -> None:
    found = dict(edited(tmp_path, 6, 12))
    assert set(found.values()) == {"refused", "sound"}, found


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_hub_dataset_in_a_local_folder(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "name"
    folder.mkdir()
    rows = [{"n": i, "text": text} for i, text in enumerate(TEXTS)]
    write_table(folder / f"train{suffix}", rows)
    write_table(folder / f"test{suffix}", rows[:2])
    assert texts(f"hf:{folder}") == TEXTS
    assert texts(f"hf:{folder}:test") == TEXTS[:2]
    corpus = Corpus.open([f"hf:{folder}:test"])
    assert [document.text for document in corpus] == [document.text for document in corpus]
    (source,) = corpus.identity()["sources"]
    assert len(source.pop("sha256")) == 64
    assert source == {
        "kind": "hf",
        "name": "name",
        "config": None,
        "split": "test",
        "revision": None,
    }
    line = refusal(f"hf:{folder}:dev")
    assert "'dev'" in line and "check hf:NAME@CONFIG:SPLIT and the files in the folder" in line
    assert "no column 'body'; its columns are 'n', 'text'" in refusal(f"hf:{folder}", "body")
    assert "row 1: expected text in column 'n', got int 0" in refusal(f"hf:{folder}", "n")


def test_saved_data_sets_have_the_named_split(tmp_path: Path) -> None:
    """Neither a split nor a configuration that the folder lacks is ignored."""
    rows = Dataset.from_dict({"text": list(TEXTS)})
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    assert texts(f"hf:{tmp_path}/one") == texts(f"hf:{tmp_path}/several:test") == TEXTS
    assert "is one data set without splits; leave :dev out" in refusal(f"hf:{tmp_path}/one:dev")
    assert "of several splits, 'test'; name one" in refusal(f"hf:{tmp_path}/several:dev")
    (file,) = (tmp_path / "one").glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(TEXTS[1].encode(), b"\xff" * len(TEXTS[1].encode())))
    for source in (tmp_path / "one", f"hf:{tmp_path}/one"):
        assert "invalid start byte; save it again" in refusal(source)
    for name in ("one", "several"):
        line = refusal(f"hf:{tmp_path}/{name}@en:test")
        assert "`save_to_disk` stores no configurations; leave @en out" in line


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    message = refusal("hf:owner/name@config:test")
    assert "hf:owner/name@config:test: the hub cannot be reached" in message
    assert "check the network, or give a local file or folder" in message
    assert "has a dataset" in refusal(f"hf:{tmp_path}/nothing")


@pytest.mark.slow
def test_python_docs() -> None:
    modules = set(sys.modules)
    corpus = Corpus.open(["python-docs"])
    found = [document.text for document in corpus]
    assert all(name.startswith("encodings.") for name in set(sys.modules) - modules)
    assert len(found) > 5000 and sum(map(len, found)) > 500_000
    assert len(set(found)) == len(found)
    assert not any("\n" in text or "  " in text for text in found)
    assert "JSON (JavaScript Object Notation) <https://json.org> is a subset of" in " ".join(found)
    (source,) = corpus.identity()["sources"]
    assert source["documents"] == len(found)
    assert source["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
