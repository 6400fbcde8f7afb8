"""Tagging: words and their first pieces, scores computed by hand, and a tagger and a probe that
learn."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

from teachonce.downstream.settings import FineTuneSettings
from teachonce.downstream.tasks.fine_tune import default_lr, fine_tune
from teachonce.downstream.tasks.tagging import LATER, Entities, PartsOfSpeech, Sentence, read_tagged
from teachonce.downstream.tasks.task_interface import IGNORED
from teachonce.downstream.tasks.word_windows import joined, run_starts, word_pieces, word_windows
from teachonce.store import TaskSpec
from teachonce.support.errors import UserError
from tests.downstream.support import splits, write_tagged
from tests.making.models import TOKENIZER_KINDS, Teachers, Tokenizers
from tests.making.texts import SENTENCES


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_first_piece_covers_the_first_character(kind: str, make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer(kind)
    for text in SENTENCES:
        words = text.split()
        ids, pieces = word_pieces(tokenizer, *joined(words), 128)
        first = run_starts(pieces)
        spans = tokenizer(" ".join(words), return_offsets_mapping=True)["offset_mapping"]
        assert len(spans) == len(ids) and len(first) == len(words)
        begin = 0
        for word, position in zip(words, first, strict=True):
            assert position > 0
            assert spans[position][0] <= begin < spans[position][1]
            begin += len(word) + 1


def test_words_that_are_cut_off_have_no_piece(make_tokenizer: Tokenizers) -> None:
    ids, pieces = word_pieces(make_tokenizer("wordpiece"), *joined(["lamp"] * 20), 8)
    first = run_starts(pieces)
    assert len(ids) == 8
    kept = [position for position in first if position >= 0]
    assert 0 < len(kept) < 7 and set(first[len(kept) :]) == {-1}


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("limit", [8, 16, 40])
def test_windows_have_every_word_once(kind: str, limit: int, make_tokenizer: Tokenizers) -> None:
    """No window exceeds the limit in tokens, a word inside a window has context on both sides, and
    a sentence that fits has a single window."""
    tokenizer, words = make_tokenizer(kind), " ".join(SENTENCES).split()
    windows = list(word_windows(tokenizer, *joined(words), limit))
    assert [word for window in windows for word in window.own] == list(range(len(words)))
    assert all(len(window.ids) <= limit for window in windows)
    for before, window in zip(windows, windows[1:], strict=False):
        assert before.words.start < window.words.start <= before.words.stop
        assert window.words.start <= window.own.start <= before.words.stop
    shared = sum(len(window.words) for window in windows) - len(words)
    assert shared > len(windows) or limit < 40  # texts without blanks are words as long as a window
    for window in windows:
        firsts = dict(zip(window.words, run_starts(window.pieces), strict=True))
        assert all(firsts[word] > 0 for word in window.own)
    (whole,) = word_windows(tokenizer, *joined(words), 10_000)
    assert (whole.ids, whole.pieces) == word_pieces(tokenizer, *joined(words), None)


def test_labels_are_at_first_pieces_only(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("wordpiece")
    sentence = Sentence(("Donaudampfschifffahrt", "lamp", "?"), ("X", "NOUN", "unseen"))
    task = PartsOfSpeech()
    task.labels = ["NOUN", "X"]
    (row,) = task.encode(tokenizer, [sentence], 64)
    first = row["first"]
    assert first[1] - first[0] > 1
    assert [row["labels"][position] for position in first] == [1, 0, IGNORED]
    assert sum(label != IGNORED for label in row["labels"]) == 2


def test_the_other_pieces_of_a_word_may_have_a_label(make_tokenizer: Tokenizers) -> None:
    """Later pieces have a label even if the word's own tag is unknown. [CLS], [SEP] and words of
    another window have none."""
    sentence = Sentence(("Donaudampfschifffahrt", "lamp", "Wolkenkratzer"), ("B-X", "O", "unseen"))
    task = Entities(pieces="all")
    task.prepare({"train": [Sentence(("a", "b"), ("O", "B-X"))]})
    assert task.labels == ["B-X", "O", LATER] and task.head()["later_label"] == LATER
    (row,) = task.encode(make_tokenizer("wordpiece"), [sentence], 64)
    first, labels = row["first"], row["labels"]
    expected = [2] * len(labels)
    expected[0] = expected[-1] = IGNORED
    for position, tag in zip(first, (0, 1, IGNORED), strict=True):
        expected[position] = tag
    assert labels == expected and labels.count(2) > 3
    rows = task.encode(make_tokenizer("wordpiece"), [sentence], 8)  # fewer than the first word has
    places = [(row["labels"], place) for row in rows for place in row["first"]]
    assert len(rows) > 1 and [labels[place] for labels, place in places] == [0, 1, IGNORED]
    assert all(row["labels"][0] == row["labels"][-1] == IGNORED for row in rows)
    assert Entities().head()["later_label"] is None


def test_a_word_taken_for_a_later_piece_goes_on_with_the_entity() -> None:
    task = Entities(pieces="all")
    task.labels = ["B-PER", "I-PER", "O", LATER]
    sentences = [Sentence(tuple("abcdef"), ("O",) * 6), Sentence(("g",), ("O",))]
    rows = [{"first": [0, 1, 2, 3, 4, -1], "example": 0}, {"first": [0], "example": 1}]
    logits = np.eye(4)[[[3, 0, 3, 3, 2], [3, 3, 3, 3, 3]]]
    _, found = task.tags_of_words(sentences, rows, logits)
    assert found == [["O", "B-PER", "I-PER", "I-PER", "O", "O"], ["O"]]
    task.later = None  # here X is a tag like any other
    _, found = task.tags_of_words(sentences, rows, logits)
    assert found[1] == [LATER]


def test_the_label_of_later_pieces_is_no_tag_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "test").write_text(f"a\tN\nb\t{LATER}\n")
    splits = {"test": read_tagged(tmp_path / "test")}
    for later, message in ((None, ""), (LATER, "line 2: tag 'X' is unknown to the model")):
        with pytest.raises(UserError, match=message) if message else nullcontext():
            PartsOfSpeech().adopt(TaskSpec("tagging", ("N", LATER), later), splits)


def test_scores_by_hand() -> None:
    sentences = [Sentence(("a", "b", "c"), ("N", "V", "N")), Sentence(("d",), ("N",))]
    rows = [{"first": [1, 2, -1], "example": 0}, {"first": [1], "example": 1}]  # no third piece
    logits = np.zeros((2, 4, 2))
    logits[0, 1, 0] = logits[0, 2, 1] = logits[1, 1, 1] = 1  # N, V; V
    task = PartsOfSpeech()
    task.prepare({"train": sentences})
    score = task.score(sentences, rows, logits)
    assert score["accuracy"] == pytest.approx(2 / 4)
    # N: precision 1, recall 1/3, F1 1/2; V: precision 1/2, recall 1, F1 2/3
    assert score["macro_f1"] == pytest.approx((1 / 2 + 2 / 3) / 2)


@pytest.mark.parametrize(
    ("tags", "found", "scores"),
    [
        # the first entity is cut short, the second is right; both have one type
        ("B-PER I-PER O B-PER", "B-PER O O B-PER", (1 / 2, 1 / 2, 3 / 4)),
        # PER: precision 3/4, recall 1, F1 6/7; LOC: 0; all: precision and recall 3/4
        ("B-PER B-PER B-PER B-LOC", "B-PER B-PER B-PER B-PER", (3 / 4, (6 / 7 + 0) / 2, 3 / 4)),
        # LOC is only predicted, and is no type of the macro F1; PER: precision 1, recall 1/2
        ("B-PER O O B-PER", "B-PER O O B-LOC", (1 / 2, 2 / 3, 3 / 4)),
        ("O O O O", "B-PER O O O", (0, 0, 3 / 4)),
    ],
)
def test_entities_count_whole(tags: str, found: str, scores: tuple[float, ...]) -> None:
    task, sentences = Entities(), [Sentence(tuple("abcd"), tuple(tags.split()))]
    task.labels = sorted({*tags.split(), *found.split()})
    logits = np.eye(len(task.labels))[[[task.labels.index(each) for each in found.split()]]]
    score = task.score(sentences, [{"first": [0, 1, 2, 3], "example": 0}], logits)
    assert [score[name] for name in ("entity_f1", "macro_f1", "accuracy")] == pytest.approx(scores)


def test_tags_that_training_lacks_are_refused_or_counted(tmp_path: Path) -> None:
    files = {"train": "a\tN\nb\tV\n", "test": "\na\tN\nb\tV\n\n\nc\tN\nd\tX\n"}
    splits = {}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        splits[name] = read_tagged(tmp_path / name)
    message = r"test, line 7: tag 'X' does not occur in training, which has N, V; train .* count$"
    with pytest.raises(UserError, match=message):
        PartsOfSpeech().prepare(splits)
    task = PartsOfSpeech("count")
    task.prepare(splits)
    assert task.head()["id2label"] == {0: "N", 1: "V"}
    assert task.options() == {"unseen_labels": "count"}
    rows = [{"first": [0, 1], "example": 0}, {"first": [0, 1], "example": 1}]
    score = task.score(splits["test"], rows, np.eye(2)[[[0, 1], [0, 1]]])
    assert score["accuracy"] == pytest.approx(3 / 4)
    # N: 1; V: precision 1/2, recall 1, F1 2/3; X: 0
    assert score["macro_f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ("O I-PER", "line 3: tag 'I-PER' is after 'O', without a PER before it; write B-PER"),
        ("I-LOC O", "line 2: tag 'I-LOC' is at the beginning of a sentence, without a LOC"),
        ("B-PER I-LOC", "line 3: tag 'I-LOC' is after 'B-PER'"),
        ("B-PER I-PER I-LOC", "line 4: tag 'I-LOC' is after 'I-PER'"),
        ("O PER", "line 3: tag 'PER' is neither O nor B-... nor I-...; .* --task pos"),
    ],
)
def test_tags_that_are_not_iob_are_refused(tags: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "dev"
    path.write_text("\n" + "".join(f"a\t{tag}\n" for tag in tags.split()))
    train = [Sentence(("a",) * 5, ("B-PER", "I-PER", "B-LOC", "I-LOC", "O"))]
    with pytest.raises(UserError, match=message) as caught:
        Entities().prepare({"train": train, "dev": read_tagged(path)})
    assert str(caught.value).startswith(f"tags {path}, ")


@pytest.mark.slow
def test_fine_tuning_learns_and_reports_every_seed(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """The test file is the shortest, so each split must be scored against its own words."""
    sizes = {"train": 60, "dev": 50, "test": 40}
    files = splits(write_tagged, tmp_path, "", **sizes)
    settings = FineTuneSettings(epochs=6, batch_size=4, lr=5e-3, seeds=2)
    model = str(tiny_teacher("bert"))
    result = fine_tune(PartsOfSpeech(), model, files, settings, say=lambda _: None)
    assert [run["seed"] for run in result["seeds"]] == [0, 1] and result["examples"] == sizes
    scores = [run["test"]["macro_f1"] for run in result["seeds"]]
    assert min(scores) > 0.9
    assert result["mean"]["test"]["primary"] == pytest.approx(np.mean(scores))
    assert result["deviation"]["test"]["primary"] == pytest.approx(np.std(scores, ddof=1))


def test_narrow_encoders_learn_at_a_higher_rate() -> None:
    for width, rate in ((264, 5e-4), (383, 5e-4), (384, 5e-5), (768, 5e-5)):
        config = BertConfig(
            hidden_size=width, num_attention_heads=1, num_hidden_layers=0, vocab_size=9
        )
        assert default_lr(BertModel(config)) == rate
    other = DistilBertConfig(dim=128, n_heads=1, n_layers=1, hidden_dim=8, vocab_size=9)
    assert default_lr(DistilBertModel(other)) == 5e-4


def test_every_word_of_a_long_sentence_is_scored(make_tokenizer: Tokenizers) -> None:
    """Predictions that are right everywhere score 1: no word beyond a cut counts as O."""
    words = ("old", "lamp", "Wolkenkratzer") * 20
    sentences = [Sentence(words, ("B-X", "I-X", "O") * 20), Sentence(("lamp",), ("B-X",))]
    task = Entities()
    task.prepare({"train": sentences})
    rows = task.encode(make_tokenizer("wordpiece"), sentences, 16)
    (said,) = task.take_notes()
    assert said.startswith("1 sentence of 2 have more than 16 tokens") and task.take_notes() == []
    longest = max(len(row["input_ids"]) for row in rows)
    numbers = np.array([[*r["labels"], *[IGNORED] * (longest - len(r["labels"]))] for r in rows])
    assert (numbers >= 0).sum() == len(words) + 1 and longest <= 16
    logits = np.eye(len(task.labels))[np.where(numbers >= 0, numbers, 2)]
    assert task.score(sentences, rows, logits) == {
        "entity_f1": 1.0,
        "macro_f1": 1.0,
        "accuracy": 1.0,
    }


NAMES = ["O", "B-PER", "I-PER"]


def test_words_and_tags_of_tables(tmp_path: Path) -> None:
    features = Features(
        {"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=NAMES))}
    )
    rows = {"tokens": [["Bo", "Li", "is"], [], ["x"]], "ner_tags": [[1, 2, 0], [], [0]]}
    expected = [Sentence(("Bo", "Li", "is"), ("B-PER", "I-PER", "O")), Sentence(("x",), ("O",))]
    made = Dataset.from_dict(rows, features=features)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    spans = [{"text": "Bo Li is", "label": [[0, 5, "PER"]]}, {"text": "x", "label": []}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, spans)))
    for name in ("a.parquet", "saved", "a.jsonl"):
        assert Entities().read(tmp_path / name) == expected, name
    renamed = Entities(columns={"text": "words", "label": "y"})
    (tmp_path / "b.jsonl").write_text('{"words": ["Bo"], "y": ["B-PER"]}\n')
    assert renamed.read(tmp_path / "b.jsonl") == [Sentence(("Bo",), ("B-PER",))]
    for content, printed in (
        ('{"tokens": ["a", "b"], "tags": ["O", null]}', "expected a tag for every word"),
        ('{"tokens": ["a", "b"], "tags": ["O"]}', "expected a tag for each of 2 words"),
        ('{"tokens": ["a"]}', "no column 'tags'"),
        ('{"word": "a"}', "no column 'tokens'.*, or name the right one with --text-column$"),
    ):
        (tmp_path / "b.jsonl").write_text(content)
        with pytest.raises(UserError, match=f"b.jsonl, line 1: .*{printed}"):
            Entities().read(tmp_path / "b.jsonl")
    path = tmp_path / "a.tsv"
    path.write_text("a\tO\n")
    with pytest.raises(
        UserError, match="no column names; leave --text-column and --label-column out"
    ):
        renamed.read(path)
    with pytest.raises(UserError, match="no column names; leave --label-column out"):
        Entities(columns={"label": "bar"}).read(path)


def test_columns_and_schemes_of_tagged_files(tmp_path: Path) -> None:
    path = tmp_path / "eng.train"
    path.write_text("-DOCSTART- -X- O O\n\nBo NNP I-NP I-PER\nLi NNP I-NP I-PER\nis VBZ I-VP O\n")
    ner, pos = Entities(), PartsOfSpeech()
    assert ner.read(path) == [Sentence(("Bo", "Li", "is"), ("B-PER", "I-PER", "O"))]
    assert pos.read(path) == [Sentence(("Bo", "Li", "is"), ("NNP", "NNP", "VBZ"))]
    assert [line.split(": ")[1] for line in ner.take_notes()] == [
        "of 4 columns the first holds the words, and column 4 the tags",
        "tags are IOB1; they are converted to IOB2",
    ]
    assert "column 2 the tags" in pos.take_notes()[0]
    path.write_text("Bo\tB-PER\t\nis\tO\t\n")  # a tab at the end starts no column
    for task in (ner, pos):
        assert task.read(path) == [Sentence(("Bo", "is"), ("B-PER", "O"))]
        assert not task.take_notes()
    path.write_text("Bo\tPROPN\t\nis\tAUX\t\n")
    assert pos.read(path)[0].tags == ("PROPN", "AUX")
    path.write_text("Bo\tB-PER\nLi\tE-PER\nis\tO\nOslo\tS-LOC\n")
    assert ner.read(path)[0].tags == ("B-PER", "I-PER", "O", "B-LOC")
    assert ner.take_notes() == [f"{path}: tags are BIOES; they are converted to IOB2"]
