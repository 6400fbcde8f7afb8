"""Gold labels and tags are read from every kind of corpus, and mapped to the teacher's numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from hypothesis import given
from hypothesis import strategies as st

from teachonce.store import TaskSpec, UserError
from teachonce.teacher_dump.corpus.class_names import ClassName
from teachonce.teacher_dump.corpus.documents import Corpus, CorpusError, Document
from teachonce.teacher_dump.corpus.labelled_text import Gold, is_iob
from teachonce.teacher_dump.corpus.tag_schemes import BEGINNING, ENTITIES
from teachonce.teacher_dump.windows.cutting import iter_windows
from teachonce.teacher_dump.windows.label_numbers import Labels
from tests.making.models import Tokenizers, trained_tokenizer
from tests.teacher_dump.corpus.corpora import TABLES, TEXTS, write_table

MOODS = ("negative", "positive", "neither")
TAGS = ("O", "B-PER", "I-PER")


@pytest.mark.parametrize("suffix", TABLES)
def test_labels(tmp_path: Path, suffix: str) -> None:
    """Labels are given by name or number; the column that is not the label column is the text."""
    cells = ["good", "bad", "", "good", "1"]
    rows = [{"s": text, "mood": cell} for text, cell in zip(TEXTS, cells, strict=True)]
    path = write_table(tmp_path / f"a{suffix}", rows)
    lines = tmp_path / "b.txt"
    lines.write_text("one more\n")
    corpus = Corpus.open([str(path), str(lines)], label_column="mood")
    golds = [document.gold and document.gold.label for document in corpus]
    assert golds == ["good", "bad", None, "good", "1", None]
    assert [document.text for document in corpus] == [*TEXTS, "one more"]
    corpus.check()
    assert set(corpus.found_labels("classification")) == {"good", "bad", "1"}
    assert (
        str(path) in corpus.found_labels("classification")["bad"]
        and corpus.found_labels("tagging") == {}
    )
    assert corpus.identity()["label_column"] == "mood"
    with pytest.raises(CorpusError, match=r"no column 'x' of labels; its columns are 's', 'mood'"):
        list(Corpus.open([str(path)], "s", "x"))


def test_labels_of_numbers(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".parquet"):
        rows = [{"text": "a", "y": y} for y in (1.0, None, 0.0, float("nan"))]
        path = write_table(tmp_path / f"a{suffix}", rows)
        corpus = Corpus.open([str(path)], label_column="y")
        assert [d.gold and d.gold.label for d in corpus] == ["1", None, "0", None]
        bad = write_table(tmp_path / f"b{suffix}", [{"text": "a", "y": 1}, {"text": "b", "y": 2}])
        assert [d.gold and d.gold.label for d in Corpus.open([str(bad)], None, "y")] == ["1", "2"]
    half = write_table(tmp_path / "c.parquet", [{"text": "a", "y": 0.5}])
    with pytest.raises(CorpusError, match="row 1: expected a label in column 'y', .* float 0.5"):
        list(Corpus.open([str(half)], None, "y"))


def test_tags_of_words(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('# id = 1\n"\tO\nČo\tB-PER\n.\t\n\nno\tO\n', encoding="utf-8")
    corpus = Corpus.open([str(path)])
    one, two = corpus
    assert one.gold and two.gold and one.gold.tags == ((0, 1, "O"), (2, 4, "B-PER"))
    assert two.gold.tags == ((0, 2, "O"),)
    corpus.check()
    assert corpus.found_labels("tagging") == {"O": f"{path}, line 2", "B-PER": f"{path}, line 3"}


def test_tags_of_entities_follow_one_another(tmp_path: Path) -> None:
    """Tags that do not follow one another in IOB are refused; missing and other tags are not."""
    path = tmp_path / "a.tsv"
    path.write_text("a\tI-PER\nb\tB-PER\nc\t\nd\tI-PER\n\ne\tO\nf\t2\n", encoding="utf-8")
    corpus = Corpus.open([str(path)])
    corpus.check()
    steps = corpus.tag_pairs()
    assert steps == {
        (BEGINNING, "I-PER"): f"{path}, line 1",
        ("I-PER", "B-PER"): f"{path}, line 2",
        (None, "I-PER"): f"{path}, line 4",
        (BEGINNING, "O"): f"{path}, line 6",
        ("O", "2"): f"{path}, line 7",
    }
    labels = Labels(TaskSpec("tagging", TAGS), "t")
    with pytest.raises(UserError, match="line 1: tag 'I-PER' is at the beginning of a sent"):
        labels.check({}, steps)
    del steps[BEGINNING, "I-PER"]
    with pytest.raises(UserError, match="line 7: tag 2 is the teacher's 'I-PER', .* another order"):
        labels.check({}, steps)
    labels.check({}, {step: where for step, where in steps.items() if "O" not in step})
    for others in (("O", "I-PER", "2"), ("O", "I-PER"), (*TAGS, "NOUN")):
        assert not is_iob(others)
    Labels(TaskSpec("tagging", ("O", "I-PER", "B-PER", "2")), "t").check({}, steps)
    later = Labels(TaskSpec("tagging", ("X", *TAGS), "X"), "t")
    with pytest.raises(UserError, match="tag 'I-PER' is after 'O', .* write B-PER"):
        later.check({}, {("O", "I-PER"): "a", ("O", "B-PER"): "b"})
    for word in ("X", "0"):  # no word has this tag
        with pytest.raises(UserError, match=f"a: .* no tag '{word}'; it has O, B-PER, I-PER;"):
            later.check({word: "a"}, {})


def spans_of(words: list[str]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    return [(int(end) - len(word), int(end)) for word, end in zip(words, ends, strict=True)]


class Counting(tuple[tuple[int, int, str], ...]):
    """Tags that count how often they are iterated."""

    read = 0

    def __iter__(self) -> Iterator[tuple[int, int, str]]:
        type(self).read += 1
        return super().__iter__()


@pytest.mark.parametrize("single", ("B-", "S-"))
def test_tags_of_a_long_document_are_not_read_for_each_window(
    make_tokenizer: Tokenizers, single: str
) -> None:
    Counting.read, words = 0, ["dog"] * 400
    tags = Counting((*span, f"{single}PER") for span in spans_of(words))
    document = Document(" ".join(words), "x", 0, Gold(tags=tags))
    labels = Labels(TaskSpec("tagging", TAGS), "t")
    labels.check({}, {(BEGINNING, f"{single}PER"): "line 1"}, {}, {"S-PER": "line 1"})
    windows = list(labels.numbered(iter_windows([document], make_tokenizer("wordpiece"), 12)))
    assert len(windows) > 30 and Counting.read < 10
    numbers = np.concatenate([w.numbers for w in windows if w.numbers is not None])
    assert (numbers == TAGS.index("B-PER")).sum() == len(words)


ALPHABET = st.text(st.sampled_from("abcdo 'x-é東京🙂\u0301\u200b"), min_size=1, max_size=12)
TAGGED = st.lists(st.tuples(ALPHABET, st.sampled_from(("", "-1", *TAGS))), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@given(sentence=TAGGED, size=st.integers(8, 24))
def test_laws_of_tags(
    make_tokenizer: Tokenizers, kind: str, sentence: list[Any], size: int
) -> None:
    """The tag of a token is its word's, if it is the first piece; each word has one tag at most."""
    spans = spans_of([word for word, _ in sentence])
    gold = Gold(tags=tuple((*s, tag) for s, (_, tag) in zip(spans, sentence, strict=True) if tag))
    document = Document(" ".join(word for word, _ in sentence), "x", 0, gold)
    labels = Labels(TaskSpec("tagging", TAGS), "t")
    words: set[int] = set()
    for window in labels.numbered(iter_windows([document], make_tokenizer(kind), size)):
        assert window.numbers is not None and len(window.numbers) == len(window.ids)
        covered = window.document_begin
        for (begin, end), special, tag in zip(
            window.offsets + window.document_begin, window.special, window.numbers, strict=True
        ):
            if tag >= 0:
                assert not special
                touched = [i for i, (b, e) in enumerate(spans) if b < end and begin < e]
                first = [i for i in touched if sentence[i][1] == TAGS[tag] and i not in words]
                assert first and covered <= spans[first[0]][0]
                words.add(first[0])
            if end > begin:
                covered = max(covered, end)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@given(sentence=TAGGED, size=st.integers(8, 24))
def test_laws_of_later_pieces(
    make_tokenizer: Tokenizers, kind: str, sentence: list[Any], size: int
) -> None:
    """First pieces have the same tags as before; exactly the other pieces within a tagged word have
    the label of later pieces."""
    spans = spans_of([word for word, _ in sentence])
    gold = Gold(tags=tuple((*s, tag) for s, (_, tag) in zip(spans, sentence, strict=True) if tag))
    document = Document(" ".join(word for word, _ in sentence), "x", 0, gold)
    both = (TaskSpec("tagging", TAGS), TaskSpec("tagging", ("X", *TAGS), "X"))
    plain, later = (
        list(Labels(task, "t").numbered(iter_windows([document], make_tokenizer(kind), size)))
        for task in both
    )
    for before, window in zip(plain, later, strict=True):
        assert before.numbers is not None and window.numbers is not None
        kept = before.numbers >= 0
        np.testing.assert_array_equal(window.numbers[kept], before.numbers[kept] + 1)
        assert not window.special[window.numbers == 0].any()
        offsets = window.offsets + window.document_begin
        here = [s for s, (_, tag) in zip(spans, sentence, strict=True)
                if tag in TAGS and s[0] >= window.document_begin]  # fmt: skip
        for (begin, end), special, number in zip(
            offsets[~kept], window.special[~kept], window.numbers[~kept], strict=True
        ):
            inside = any(b <= begin < e for b, e in here)
            assert number == (0 if inside and end > begin and not special else -1)


def test_numbers_are_not_taken_for_names() -> None:
    named = Labels(TaskSpec("classification", MOODS), "t")
    assert [named.number(word, "x") for word in ("0", "2.0", "-1.0")] == [0, 2, -1]
    stars = Labels(TaskSpec("classification", ("1", "2", "3")), "t")
    assert [stars.number(word, "x") for word in ("1", "3", "-1")] == [0, 2, -1]
    with pytest.raises(UserError, match="x: the teacher t has no label '0'; it has 1, 2, 3"):
        stars.number("0", "x")
    assert [stars.number(ClassName(word), "x") for word in ("1", "3")] == [0, 2]
    with pytest.raises(UserError, match="x: the teacher t has no label named '1'; it has neg"):
        named.check({ClassName("1"): "x"}, {})
    with pytest.raises(UserError, match=r"no label named '-1'.*; name the classes in the schema"):
        stars.number(ClassName("-1"), "x")
    signs = Labels(TaskSpec("classification", ("-1", "0", "1")), "t")
    assert [signs.number(word, "x") for word in ("-1", "0", "1")] == [0, 1, 2]


def test_blanks_around_the_teachers_names_do_not_count() -> None:
    """A teacher that was trained on `text, label` has such names; corpora are read without."""
    labels = Labels(TaskSpec("classification", ("neg", "pos ")), "t")
    assert [labels.number(name, "a") for name in ("pos", "neg")] == [1, 0]


def test_numbers_are_explained_and_not_mixed_with_names() -> None:
    said: list[str] = []
    labels = Labels(TaskSpec("classification", MOODS), "t", said.append)
    labels.check({"-1": "a", "2": "b", "0": "c"}, {})
    assert said == [
        "labels of the corpus are taken as the teacher's label ids: 0 = negative, 1 = positive,"
        " 2 = neither"
    ]
    with pytest.raises(
        UserError, match=r"b: label '2' is a number, but 'positive' \(d\) is a name"
    ):
        labels.number("positive", "d")
    names = Labels(TaskSpec("classification", MOODS), "t", said.append)
    names.check({"-1": "a", "neither": "b"}, {})
    assert len(said) == 1


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("Positive", "did you mean positive? it has negative"),
        (" positive", "did you mean positive?"),
        ("positve", "did you mean positive?"),
        ("3", "no label '3'; it has negative, positive, neither; correct the corpus"),
        ("True", "no label 'True'; it has"),
    ],
)
def test_labels_that_are_nearly_the_teachers(label: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Labels(TaskSpec("classification", MOODS), "t").check({label: "x, line 3"}, {})
    assert message in str(caught.value) and str(caught.value).startswith("x, line 3: ")


def test_a_teacher_whose_labels_have_no_names() -> None:
    """If labels have no names, numbers are the teacher's own, and names are refused."""
    unnamed = TaskSpec("classification", ("LABEL_0", "LABEL_1"))
    assert Labels(unnamed, "t").number("1", "x") == 1
    with pytest.raises(UserError, match="no label 'pos'; .* write their names into id2label"):
        Labels(unnamed, "t").number("pos", "x")


BIOES = ("O", "B-A", "I-A", "E-A", "S-A", "B-C", "I-C", "E-C", "S-C")
IOB = ("O", "B-A", "I-A", "B-C", "I-C")


def numbers_of(tags: str, names: tuple[str, ...], folder: Path) -> list[str]:
    """Return the names of the dumped tags of a sentence, then the messages."""
    path, said = folder / "a.tsv", list[str]()
    path.write_text("".join(f"w\t{tag}\n" for tag in tags.split()) + "\nw\tO\n")
    corpus = Corpus.open([str(path)])
    corpus.check()
    labels = Labels(TaskSpec("tagging", names), "t", said.append)
    labels.check(
        corpus.found_labels("tagging"), corpus.tag_pairs(), {}, corpus.found_labels(ENTITIES)
    )
    (window, _) = labels.numbered(iter_windows(corpus, trained_tokenizer("wordpiece"), 64))
    assert window.numbers is not None
    return [names[number] for number in window.numbers if number >= 0] + said


@pytest.mark.parametrize(
    ("tags", "labels", "found", "scheme"),
    [
        ("I-A I-A O I-C B-C O", IOB, "B-A I-A O B-C B-C O", "IOB1"),
        ("I-A I-C I-C", IOB, "B-A B-C I-C", "IOB1"),
        ("B-A E-A S-C S-C O B-A I-A E-A", IOB, "B-A I-A B-C B-C O B-A I-A I-A", "BIOES"),
        ("B-A L-A U-C U-C -1 O", IOB, "B-A I-A B-C B-C O", "BILOU"),
        ("B-A I-A B-C O B-C I-C I-C", BIOES, "B-A E-A S-C O B-C I-C E-C", "IOB2"),
        ("B-A I-A O B-C", IOB, "B-A I-A O B-C", None),
        ("B-A E-A S-C", BIOES, "B-A E-A S-C", None),
        ("I-A I-A O", ("O", "I-A"), "I-A I-A O", None),
    ],
)
def test_tags_in_the_scheme_of_the_teacher(
    tags: str, labels: tuple[str, ...], found: str, scheme: str | None, tmp_path: Path
) -> None:
    target = "BIOES" if labels == BIOES else "IOB2"
    line = f"tags of the corpus are {scheme}; they are converted to {target}, the scheme"
    line += " of the teacher"
    assert numbers_of(tags, labels, tmp_path) == found.split() + ([line] if scheme else [])


@pytest.mark.parametrize(
    ("tags", "labels", "message"),
    [
        ("S-A O B-C E-C", ("O", "B-A", "I-A", "B-C"), "line 4: the teacher t has no tag 'I-C'"),
        ("B-A I-A I-A", ("O", "B-A", "E-A", "S-A"), "line 2: the teacher t has no tag 'I-A'"),
        ("B-A I-A O I-D", BIOES, "line 4: the teacher t has no tag 'S-D'"),
        ("B-A I-A O", ("O", "B-A", "I-A", "U-A"), "line 2: the teacher t has no tag 'L-A'"),
    ],
)
def test_converted_tags_are_checked_before_the_dump(
    tags: str, labels: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"a.tsv, {message}"):
        numbers_of(tags, labels, tmp_path)
    # The teacher lacks B-A, which no tag is mapped to.
    assert numbers_of("B-A O", ("O", "S-A"), tmp_path)[0] == "S-A"


def test_labels_of_texts_for_a_tagger_and_the_other_way_round() -> None:
    with pytest.raises(UserError, match="b: 'pos' is a label of a whole text, but the teacher t"):
        Labels(TaskSpec("tagging", TAGS), "t").check({}, {}, {"pos": "b"})
    texts = Labels(TaskSpec("classification", MOODS), "t")
    texts.check({}, {}, {"O": "a"})
    with pytest.raises(UserError, match="b: 'B-PER' is a tag of a word, but the teacher t classif"):
        texts.check({}, {}, {"O": "a", "B-PER": "b"})


def test_classes_of_a_data_set_match_the_teachers(
    tmp_path: Path, make_tokenizer: Tokenizers
) -> None:
    """Classes of a data set are mapped by name to the teacher's labels in another order."""
    moods = Features({"text": Value("string"), "y": ClassLabel(names=["neither", "negative"])})
    stars = Features({"text": Value("string"), "y": ClassLabel(names=["2", "1", "0"])})
    counted = Features({"text": Value("string"), "y": ClassLabel(names=["0", "1", "2"])})
    rows: dict[str, Any] = {"text": ["a lamp", "the stairs"], "y": [1, 0]}
    words = Features({"w": List(Value("string")), "y": List(ClassLabel(names=["B-PER", "O"]))})
    sentences: dict[str, Any] = {"w": [["lamp", "old"], ["lamp"]], "y": [[1, 0], [0]]}
    path = tmp_path / "a.parquet"
    for features, content, column, task, expected in (
        (moods, rows, "text", TaskSpec("classification", MOODS), [["negative"], ["neither"]]),
        (words, sentences, "w", TaskSpec("tagging", TAGS), [["O", "B-PER"], ["B-PER"]]),
    ):
        Dataset.from_dict(content, features=features).to_parquet(path)
        corpus, said = Corpus.open([str(path)], column, "y"), list[str]()
        corpus.check()
        labels = Labels(task, "t", said.append)
        labels.check(corpus.found_labels(task.kind), corpus.tag_pairs())
        windows = labels.numbered(iter_windows(corpus, make_tokenizer("wordpiece"), 32))
        found = [[n for n in w.numbers if n >= 0] for w in windows if w.numbers is not None]
        assert [[task.labels[n] for n in numbers] for numbers in found] == expected
        assert said == []
    for features, met, named in ((stars, {"1", "2"}, True), (counted, {"1", "0"}, False)):
        Dataset.from_dict(rows, features=features).to_parquet(path)
        corpus = Corpus.open([str(path)], "text", "y")
        corpus.check()
        found_names = corpus.found_labels("classification")
        assert {*found_names} == met
        assert {isinstance(name, ClassName) for name in found_names} == {named}
