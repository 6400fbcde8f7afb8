"""sts, classify, pair and qa: tiny models learn them, and each mistake is one line.

- classify, pair and qa: tiny models learn them, scores equal hand computation, and each mistake is
  one line.
- sts: a bi-encoder learns similarity, and its scores equal plain transformers and numpy.
"""

import copy
import json
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from transformers import AutoModel, AutoTokenizer

from teachonce.downstream.settings import FineTuneSettings
from teachonce.downstream.tasks.classify import Classify, Labelled
from teachonce.downstream.tasks.fine_tune import fine_tune, score_as_is
from teachonce.downstream.tasks.pair import Pair, PairScore
from teachonce.downstream.tasks.qa import (
    QA,
    GoldAnswer,
    Question,
    best_answer,
    exact_match,
    word_f1,
)
from teachonce.downstream.tasks.sts import BiEncoder, SentenceSimilarity
from teachonce.downstream.tasks.tagging import PartsOfSpeech
from teachonce.downstream.tasks.task_interface import IGNORED, Task
from teachonce.store import TaskSpec
from teachonce.student_export.loaded_student import load_student
from teachonce.support.arrays import Floats
from teachonce.support.errors import UserError
from tests.downstream.support import (
    asked,
    classified,
    compared,
    done,
    paired,
    phrase,
    scores_of,
    splits,
    table,
)
from tests.downstream.test_models import saved
from tests.making.dumps import dumped
from tests.making.models import TOKENIZER_KINDS, Teachers, Tokenizers
from tests.making.sentence_folders import changed
from tests.making.texts import SENTENCES

LEARNING = FineTuneSettings(epochs=5, batch_size=4, lr=3e-3, seeds=1, max_length=64)


def tuned(task: Task, model: Path, files: dict[str, Path], settings: Any = LEARNING) -> Any:
    return fine_tune(task, str(model), files, settings, say=lambda _: None)


def test_a_seed_repeats(tiny_teacher: Teachers, tmp_path: Path) -> None:
    files = splits(classified, tmp_path, ".tsv", train=12, dev=6)
    weights, short = [], replace(LEARNING, steps=3)
    for keep in (tmp_path / "once", tmp_path / "again"):
        fine_tune(Classify(), str(tiny_teacher("bert")), files, short, lambda _: None, keep)
        weights.append((keep / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_examples_that_were_trained_on_are_counted(tiny_teacher: Teachers, tmp_path: Path) -> None:
    files = splits(classified, tmp_path, ".tsv", train=12, dev=6)
    lines = files["train"].read_text().splitlines()
    files["again.tsv"] = tmp_path / "again.tsv"
    files["again.tsv"].write_text("\n".join(lines[:4]) + "\n")
    said = list[str]()
    fine_tune(Classify(), str(tiny_teacher("bert")), files, replace(LEARNING, steps=1), said.append)
    (line,) = [line for line in said if "of a training example" in line]
    assert line.startswith(f"3 of 3 examples of {files['again.tsv']} have the text")


def test_texts_are_refused_for_a_model_of_pairs() -> None:
    task, text = Classify(), Labelled(("a",), "no", "a.tsv, line 2")
    task.pairs = True
    with pytest.raises(UserError, match="line 2: is a text, and the model was trained on pairs"):
        task.adopt(TaskSpec("classification", ("no", "yes")), {"test": [text]})


@pytest.mark.apart
def test_bfloat16_learns_as_well(
    tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    files = splits(classified, tmp_path, ".tsv", train=120, dev=31)
    bilstm = saved(make_tokenizer("wordpiece"), tmp_path / "bilstm", None)
    for number, model in enumerate((tiny_teacher("bert"), bilstm)):
        weights = []
        for precision in ("fp32", "bf16"):
            settings = replace(LEARNING, precision=precision)
            keep = tmp_path / f"{precision}-{number}"
            found = fine_tune(Classify(), str(model), files, settings, lambda _: None, keep)
            assert found["mean"]["dev"]["accuracy"] > 0.8
            weights.append((keep / "model.safetensors").read_bytes())
        assert len(weights[0]) == len(weights[1]) and weights[0] != weights[1]


@pytest.mark.parametrize(
    "kind",
    ["bilstm", *(pytest.param(k, marks=pytest.mark.apart) for k in ("distilbert", "modernbert"))],
)
def test_pairs_are_classified_by_both_texts(
    kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """One of the texts alone gives an accuracy of a half. The models have no token types."""
    bilstm = kind == "bilstm"
    train, epochs = (120, 6) if bilstm else (200, 8)
    files = splits(compared, tmp_path, ".tsv", train=train, dev=32, test=32)
    model = (
        saved(make_tokenizer("wordpiece"), tmp_path / kind, None) if bilstm else tiny_teacher(kind)
    )
    settings = replace(LEARNING, epochs=epochs, lr=1e-2 if bilstm else 1e-3)
    test = tuned(Classify(), model, files, settings)["mean"]["test"]
    assert test["accuracy"] > 0.9 and test["primary"] == test["macro_f1"] > 0.9
    assert test["weighted_f1"] > 0.9 and test["matthews"] > 0.85


def test_a_pair_that_is_too_long_loses_the_end_of_its_longer_text(
    make_tokenizer: Tokenizers,
) -> None:
    tokenizer, task = copy.deepcopy(make_tokenizer("wordpiece")), Classify()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    task.labels = ["a"]
    texts = ("old lamp", "the stairs " * 40)
    for turned in (texts, texts[::-1]):
        (row,) = task.encode(tokenizer, [Labelled(turned, "a", "")], 32)
        short = len(tokenizer(texts[0])["input_ids"]) - 2
        kept = 1 + (short if turned == texts else 32 - 3 - short) + 1
        first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in turned)
        sep = tokenizer.sep_token_id
        expected = [tokenizer.cls_token_id, *first[: kept - 2], sep, *second[: 31 - kept], sep]
        assert row["input_ids"] == expected
        assert task.take_notes() == ["1 of 1 pair cut to 32 tokens (--max-length)"]
        assert row["token_type_ids"] == [0] * kept + [1] * (32 - kept)


def test_rows_are_pairs_where_their_columns_are_there_or_named(tmp_path: Path) -> None:
    cells = ("one", "two", "three", "x")
    both = table(tmp_path / "both.tsv", "text text_a text_b label", [cells])
    pairs = table(tmp_path / "pairs.tsv", "text_a text_b label", [cells[1:]])
    other = table(tmp_path / "other.tsv", "text hypothesis text_b label", [cells])
    for path, columns, texts in (
        (both, {}, ("one",)),
        (both, {"text_a": "text_a"}, ("two", "three")),
        (pairs, {}, ("two", "three")),
        (pairs, {"text": "text_b"}, ("three",)),
        (other, {"text_a": "hypothesis"}, ("two", "three")),
    ):
        (example,) = Classify(columns).read(path)
        assert example.texts == texts


def test_texts_and_pairs_in_one_file_are_refused(tmp_path: Path) -> None:
    task = Classify()
    splits = {
        "train": task.read(classified(tmp_path / "train.tsv", 6, 0)),
        "dev": task.read(compared(tmp_path / "dev.tsv", 6, 0)),
    }
    for use in (task.prepare, partial(task.adopt, TaskSpec("classification", ("a", "b")))):
        with pytest.raises(UserError, match=r"dev.tsv, line 2: is a pair, but .*line 2 is a text"):
            use(splits)


@pytest.mark.slow
def test_pair_learns(tiny_teacher: Teachers, tmp_path: Path) -> None:
    files = splits(paired, tmp_path, ".csv", train=100, dev=30, test=30)
    settings = replace(LEARNING, epochs=4)
    result = tuned(PairScore(), tiny_teacher("roberta"), files, settings)
    assert result["mean"]["test"]["pearson"] > 0.7
    assert result["mean"]["test"]["spearman"] > 0.7


def test_a_saved_model_of_pairs_takes_another_head(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """The fields of the scale are then removed, and the record of pairs is of the new texts."""
    pair, classifier, said = tmp_path / "pair", tmp_path / "classifier", list[tuple[str, bool]]()
    quick = replace(LEARNING, epochs=1)

    def say(line: str) -> None:
        whole = all((pair / name).exists() for name in ("model.safetensors", "tokenizer.json"))
        said.append((line, whole))

    file = paired(tmp_path / "pairs.csv", 12, 0)
    model = str(tiny_teacher("bert"))
    fine_tune(PairScore(), model, {"train": file, "dev": file}, quick, say, pair)
    assert [whole for line, whole in said if line.startswith(f"{pair}: its scores")] == [True]
    file = classified(tmp_path / "texts.tsv", 12, 0)
    fine_tune(Classify(), str(pair), {"train": file, "dev": file}, quick, str, classifier)
    left = {"score_mean", "score_deviation", "sentence_transformers"}
    for folder, pairs, fields in ((pair, True, left), (classifier, False, set[str]())):
        assert load_student(folder).pairs is pairs
        assert left & {*json.loads((folder / "config.json").read_text())} == fields


def test_a_saved_classifier_of_pairs_reads_no_single_texts(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    pairs = compared(tmp_path / "pairs.tsv", 12, 0)
    texts = table(tmp_path / "texts.tsv", "text label", [("a", "keeper tower")])
    quick, folder = replace(LEARNING, steps=1), tmp_path / "model"
    files = {"train": pairs, "dev": pairs}
    fine_tune(Classify(), str(tiny_teacher("bert")), files, quick, str, folder)
    assert load_student(folder).pairs is True
    with pytest.raises(UserError, match="is a text, and the model was trained on pairs"):
        score_as_is(Classify(), str(folder), {"test": texts}, say=str)
    store: dict[str, Any] = {"out": tmp_path / "a.zarr", "logits": None, "head": "classification"}
    with pytest.raises(UserError, match="--text-column text: .*trained on pairs of texts; give"):
        dumped(folder, texts, text_column="text", **store)
    dumped(folder, pairs, text_column="text_a,text_b", **store)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "unanswered"), [pytest.param(8, 0.0, marks=pytest.mark.apart), (30, 0.3)]
)
def test_qa_learns(length: int, unanswered: float, tiny_teacher: Teachers, tmp_path: Path) -> None:
    """Contexts of 30 words are read in several windows of 40 tokens."""
    write = partial(asked, length=length, unanswered=unanswered)
    files = splits(write, tmp_path, ".json", train=80, dev=24, test=30)
    settings = FineTuneSettings(epochs=6, batch_size=8, lr=3e-3, seeds=1, max_length=40)
    result = tuned(QA(), tiny_teacher("bert"), files, settings)
    assert result["mean"]["test"]["exact_match"] > 0.6
    assert result["mean"]["test"]["f1"] >= result["mean"]["test"]["exact_match"]


def test_per_class_takes_as_many_of_each_by_seed(tmp_path: Path) -> None:
    task = Classify(per_class=4)
    train = task.read(classified(tmp_path / "train.tsv", 60, 0))
    task.prepare({"train": train})
    chosen = [task.sample(train, seed) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    for examples in chosen:
        assert set(Counter(example.label for example in examples).values()) == {4}
        assert len({example.where for example in examples}) == 12


def test_classes_are_scored_by_hand() -> None:
    task = Classify()
    task.labels = ["a", "b"]
    examples = [Labelled((), label, "") for label in "aaab"]
    score = task.score(examples, [], np.array([[1, 0], [1, 0], [0, 1], [0, 1]]))
    # a: precision 1, recall 2/3, F1 4/5; b: precision 1/2, recall 1, F1 2/3
    assert score["accuracy"] == pytest.approx(3 / 4)
    assert score["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert score["weighted_f1"] == pytest.approx((3 * 4 / 5 + 2 / 3) / 4)
    assert score["matthews"] == pytest.approx((2 * 1 - 1 * 0) / np.sqrt(2 * 2 * 3 * 1))
    assert "f1" not in score
    task.prepare({"train": examples})
    assert task.measures["F1"] == "f1"
    score = task.score(examples, [], np.array([[1, 0], [1, 0], [0, 1], [0, 1]]))
    assert score["f1"] == pytest.approx(2 / 3)  # of b, the last
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # scikit-learn warns of a single label
        alone = task.score(examples[:3], [], np.array([[1, 0], [1, 0], [0, 1]]))
        right = task.score(examples[:3], [], np.array([[1, 0]] * 3))
    # a: precision 1, recall 2/3; b is in no gold label, and does not count
    assert alone["macro_f1"] == pytest.approx(4 / 5) == alone["weighted_f1"]
    assert right["macro_f1"] == right["accuracy"] == 1 and right["matthews"] == 0


def test_correlations_see_no_scale_and_survive_a_constant() -> None:
    pairs = [Pair("a", "b", score) for score in (1, 2, 5)]
    score = PairScore().score(pairs, [], np.array([[-2.0], [-1.0], [2.0]]))
    assert score == {"pearson": pytest.approx(1), "spearman": pytest.approx(1)}
    assert PairScore().score(pairs, [], np.ones((3, 1))) == {"pearson": 0, "spearman": 0}


@pytest.mark.parametrize(
    ("found", "gold", "exact", "overlap"),
    [
        ("The Tower!", "tower", 1, 1),
        ("in the old tower", "a tower", 0, 2 * 1 / (3 + 1)),
        ("tower tower", "tower", 0, 2 * 1 / (2 + 1)),
        ("lamp", "tower", 0, 0),
        ("", "", 1, 1),
        ("", "tower", 0, 0),
    ],
)
def test_answers_are_compared_as_squad_does(
    found: str, gold: str, exact: float, overlap: float
) -> None:
    assert exact_match(found, gold) == exact
    assert word_f1(found, gold) == pytest.approx(overlap)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_the_gold_tokens_of_a_window_give_the_answer(kind: str, make_tokenizer: Tokenizers) -> None:
    """The score is 1 through windows, offsets and the choice of spans."""
    context = " ".join(SENTENCES[:7])
    places = (context.index("lighthouse"), context.index("1887"), context.index("clock in the"))
    texts = ("lighthouse", "1887", "clock in the tower")
    questions = [
        Question("Where? " * repeated, context, (GoldAnswer(text, begin),))
        for text, begin, repeated in zip(texts, places, (1, 2, 90), strict=True)
    ]
    task = QA()
    task.prepare({"train": questions})
    rows = task.encode(make_tokenizer(kind), questions, 64)
    assert len(rows) > 3 and max(len(row["input_ids"]) for row in rows) == 64
    longest = max(len(row["input_ids"]) for row in rows)
    start, end = (np.zeros((len(rows), longest)) for _ in range(2))
    held = set()
    for number, row in enumerate(rows):
        if row["start_positions"] != row["cls"]:
            start[number, row["start_positions"]] = end[number, row["end_positions"]] = 9
            held.add(row["example"])
    assert held == {0, 1, 2}
    assert task.score(questions, rows, (start, end)) == {"exact_match": 1, "f1": 1}


def test_no_answer_is_said_where_training_has_some_and_cls_wins() -> None:
    row = {"spans": np.array([[-1, -1], [0, 3], [4, 7]]), "cls": 0}
    windows = [(row, np.array([2.0, 1.0, 0.0]), np.array([2.0, 0.0, 1.5]))]
    assert best_answer("one two", windows, may_decline=True) == ""
    assert best_answer("one two", windows, may_decline=False) == "one two"
    windows.append((row, np.array([0.0, 1.0, 0.0]), np.array([0.0, 2.0, 0.0])))
    assert best_answer("one two", windows, may_decline=True) == "one"


MISTAKES: list[tuple[Task, str, bytes, str]] = [
    (Classify(), "a.tsv", b"text\tclass\na\tx\n", r"no column 'label'.*'class'.*--label-column"),
    (
        Classify({"text": "t"}),
        "a.tsv",
        b"text\tlabel\na\tx\n",
        r"no column 't'.*--text-column \(pairs: --text-a",
    ),
    (Classify(), "a.tsv", b"text\tlabel\na\t\n", r"line 2: the text has no label"),
    (Classify(), "a.tsv", b"text\tlabel\n \tx\n", r"line 2: expected text in column 'text'"),
    (
        Classify(),
        "a.jsonl",
        b'{"text": "a", "label": ["x", "y"]}\n',
        r"line 1: 2 labels of one text.*expected one",
    ),
    (Classify(), "a.csv", b"text,label\n", r"has no rows"),
    (Classify(), "a.csv", b"text,text\na,b\n", r"two columns of the header are named .text."),
    (Classify(), "a.txt", b"a\n", r"ends in \.jsonl, .*\.tsv"),
    (PairScore(), "a.tsv", b"text_a\ttext_b\tscore\na\tb\t3,5\n", r"line 2: expected a number"),
    (PairScore(), "a.tsv", b"text_a\ttext_b\tscore\na\tb\tnan\n", r"line 2: expected a number"),
    (PairScore(), "a.tsv", b"text_a\tb\tscore\na\tb\t1\n", r"no column 'text_b'.*--text-b-column"),
    (
        Classify(),
        "a.tsv",
        b"text_a\tb\tlabel\na\tb\t1\n",
        r"no column 'text_b'.*'b'.*--text-b-column",
    ),
    (Classify(), "a.tsv", b"text_a\ttext_b\tb\na\tb\t1\n", r"no column 'label'.*--label-co"),
    (Classify(), "a.jsonl", b'{"text_a": "a", "text_b": 3}\n', r"expected text in .*'text_b'"),
    (PartsOfSpeech(), "a.tsv", b"a\tX\nb\n", r"line 2"),
    (PartsOfSpeech(), "a.tsv", b"a\tX\tY\n", r"line 1"),
    (PartsOfSpeech(), "a.tsv", b"\n\n", r"no sentence"),
    (PartsOfSpeech(), "a.tsv", b"\xfe\tX\n", r"not UTF-8"),
    (QA(), "a.json", b"{}", r"not SQuAD's layout"),
    *(
        (QA(), "a.json", f'{{"data": [{{"paragraphs": [{paragraph}]}}]}}'.encode(), message)
        for paragraph, message in (
            ('{"context": "ab", "qas": [{"question": "q", "answers": "ab"}]}', "must be a list"),
            ('{"context": "ab", "qas": [{"question": null, "answers": []}]}', "must be texts"),
            ('{"context": 5, "qas": [{"question": "q", "answers": []}]}', "must be texts"),
        )
    ),
    (QA({"answer": "x"}), "a.json", b"{}", r"leave the options of columns out"),
    (QA(), "a.tsv", b"question\tcontext\tanswer\nq\ta b\tc\n", r"line 2: answer 'c' is not in its"),
    *(
        (
            QA(),
            "a.jsonl",
            b'{"question": "q", "context": "a b", "answer": %b}\n' % answer,
            r"expected a text",
        )
        for answer in (
            b"7",
            b'{"text": null}',
            b'{"begin": 0}',
            b'{"text": ["a", "b"], "answer_start": [0]}',
        )
    ),
    (
        QA(),
        "a.jsonl",
        b'{"question": "q", "context": "a b", "answer": "b", "answer_start": 1}\n',
        r"not at character 1 of its context, where the text is ' '",
    ),
]


@pytest.mark.parametrize(("task", "name", "content", "message"), MISTAKES)
def test_wrong_files_are_refused(
    task: Task, name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        task.read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_splits_that_do_not_fit_are_refused(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    rows = Classify().read(classified(tmp_path / "a.tsv", 9, 0))
    with pytest.raises(UserError, match=r"line 4: label 'KEEPER' does not occur in training"):
        Classify().prepare({"train": rows[:2], "dev": rows})
    counting = Classify(unseen_labels="count")
    counting.prepare({"train": rows[:2], "dev": rows})
    tokenizer = make_tokenizer("bpe")
    known = [row["labels"] for row in counting.encode(tokenizer, rows[:3], 64)]
    assert counting.labels == ["STUDENT", "TEACHER"] and known == [1, 0, IGNORED]
    score = counting.score(rows[:3], [], np.eye(2)[[1, 0, 0]])
    assert score["accuracy"] == pytest.approx(2 / 3)
    assert score["macro_f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    (tmp_path / "b.csv").write_text("text,label\na,1\nb,0\nc,-1\nd,-100\ne,-1.0\n")
    numbers = Classify().read(tmp_path / "b.csv")
    for row, line in ((numbers[2], 4), (numbers[3], 5), (numbers[4], 6)):
        with pytest.raises(UserError, match=f"b.csv, line {line}: label -1.* means no label"):
            Classify().prepare({"train": [*numbers[:2], row]})
    signs = Classify()
    signs.prepare({"train": [numbers[0], numbers[2]]})
    assert signs.labels == ["-1", "1"]
    asked = {"text": "a", "label": "A", "_task_hash": 1}
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({**asked, "answer": answer}) + "\n" for answer in ("accept", "reject"))
    )
    with pytest.raises(UserError, match=r"p.jsonl, line 2: the annotator's answer is 'reject'"):
        Classify().read(tmp_path / "p.jsonl")
    with pytest.raises(UserError, match="every label is 'TEACHER'"):
        Classify().prepare({"train": rows[:1]})
    with pytest.raises(UserError, match="'KEEPER' has 3 training examples"):
        Classify(per_class=4).prepare({"train": rows})
    with pytest.raises(UserError, match="--dev: every score is 2"):
        PairScore().prepare(
            {"train": [Pair("a", "b", 1.0), Pair("a", "b", 2.0)], "dev": [Pair("a", "b", 2.0)]}
        )
    question = Question("who?", "a lamp", ())
    with pytest.raises(UserError, match="no question has an answer"):
        QA().prepare({"train": [question]})
    for task, limit in ((QA(stride=32), 64), (QA(), 16)):
        with pytest.raises(UserError, match="stride below half"):
            task.encode(make_tokenizer("bpe"), [question], limit)


def test_a_training_that_explodes_says_so(tiny_teacher: Teachers, tmp_path: Path) -> None:
    path = classified(tmp_path / "a.tsv", 12, 0)
    settings = FineTuneSettings(epochs=3, batch_size=2, lr=1e30, seeds=1)
    with pytest.raises(UserError, match="NaN or infinity.*lower --lr"):
        tuned(Classify(), tiny_teacher("electra"), {"train": path, "dev": path}, settings)


LEARNING_STS = FineTuneSettings(epochs=4, batch_size=8, lr=3e-3, seeds=1)


def alike(path: Path, size: int, seed: int, header: str = "text_a text_b score") -> Path:
    """Make pairs with score 5 if both texts contain the same animal, otherwise 1."""
    draws, animals = np.random.default_rng(seed), ("teacher", "keeper")
    rows = []
    for number in range(size):
        a, b = animals[number % 2], animals[number // 2 % 2]
        rows.append(
            (phrase(draws, a), phrase(draws, b, *["lamp"] * (number % 3)), 1 + 4 * (a == b))
        )
    return table(path, header, rows)


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def embedded(folder: Path, text: str) -> Floats:
    """Return the mean of the last states of a single text without padding."""
    tokenizer, model = loaded(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        states = model(input_ids=ids).last_hidden_state
    return np.asarray(states[0].numpy().mean(0), np.float64)


def cosine(a: Floats, b: Floats) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def correlations(folder: Path, pairs: list[Pair]) -> dict[str, float]:
    found = [cosine(embedded(folder, one.text_a), embedded(folder, one.text_b)) for one in pairs]
    gold = [pair.score for pair in pairs]
    return {
        "spearman": float(spearmanr(gold, found).statistic),
        "pearson": float(pearsonr(gold, found).statistic),
    }


def student(kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, folder: Path) -> Path:
    if kind == "bilstm":
        return saved(make_tokenizer("wordpiece"), folder, None)
    if kind == "classifier":
        return tiny_teacher("bert", "classification", ("other", "same"))
    return tiny_teacher(kind)


@pytest.mark.parametrize(
    "kind", ["bert", "classifier", "roberta", "modernbert", "distilbert", "bilstm"]
)
def test_any_encoder_is_scored_as_it_is(
    kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """Padding, batches and the checkpoint's head do not change the scores of an encoder."""
    model = student(kind, tiny_teacher, make_tokenizer, tmp_path / "model")
    test, task = alike(tmp_path / "test.tsv", 20, 0), SentenceSimilarity()
    result = score_as_is(task, str(model), {"test": test}, say=lambda _: None)
    found = result["mean"]["test"]
    expected = correlations(model, task.read(test))
    assert found["pearson"] == pytest.approx(expected["pearson"], abs=1e-4)
    assert found["primary"] == found["spearman"] == pytest.approx(expected["spearman"], abs=0.02)
    assert result["primary"] == "spearman" and list(result["measures"]) == ["Spearman", "Pearson"]


def test_the_labels_of_a_head_that_is_not_used_may_be_equal(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_teacher("bert", "classification", ("x", "y")), tmp_path / "model")
    changed(model, "config.json", id2label={"0": "x", "1": "x"}, label2id={"x": 0})
    files = {"test": alike(tmp_path / "test.tsv", 8, 0)}
    assert score_as_is(SentenceSimilarity(), str(model), files)["mean"]["test"]
    table(tmp_path / "labels.tsv", "text label", [("a", "x")])
    with pytest.raises(UserError, match="is number 1 in id2label"):
        score_as_is(Classify(), str(model), {"test": tmp_path / "labels.tsv"})


@pytest.mark.parametrize("kind", ["modernbert", "bilstm"])
def test_it_learns_and_a_kept_model_scores_as_it_did(
    kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    model = student(kind, tiny_teacher, make_tokenizer, tmp_path / "model")
    files = splits(alike, tmp_path, ".tsv", train=96, dev=32, test=40)
    task, keep, quiet = SentenceSimilarity(), tmp_path / "kept", lambda _: None
    before = score_as_is(task, str(model), {"test": files["test"]}, say=quiet)["mean"]["test"]
    tuned = fine_tune(task, str(model), files, LEARNING_STS, quiet, keep)["mean"]["test"]
    # half of the scores are 5: no order of cosines has a Spearman above 0.87
    assert tuned["spearman"] > 0.8 > 0.5 > before["spearman"]
    again = score_as_is(SentenceSimilarity(), str(keep), {"test": files["test"]}, say=quiet)
    assert again["mean"]["test"] == pytest.approx(tuned, abs=1e-3)


def test_the_loss_is_the_squared_error_of_the_cosine(tiny_teacher: Teachers) -> None:
    """Scores from 2 to 7 are 0 to 1. The texts of a batch differ in length."""
    folder, task = tiny_teacher("roberta"), SentenceSimilarity()
    pairs = [
        Pair("old lamp", "the stairs of the tower", 2),
        Pair("light", "moss", 4),
        Pair("a market", "a market", 7),
    ]
    task.prepare({"train": pairs})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BiEncoder(AutoModel.from_pretrained(folder).eval())
    batch = task.collator(tokenizer)(task.encode(tokenizer, pairs, 64))
    assert batch["input_ids"].shape[:2] == (3, 2)
    with torch.inference_mode():
        loss = model(**batch).loss
    found = [cosine(embedded(folder, one.text_a), embedded(folder, one.text_b)) for one in pairs]
    errors = np.array(found) - np.array([0, 2 / 5, 1])
    assert float(loss) == pytest.approx(float(np.mean(errors**2)), abs=1e-5)
    assert found[2] == pytest.approx(1)


def test_each_text_has_its_own_limit(make_tokenizer: Tokenizers) -> None:
    task, tokenizer = SentenceSimilarity(), make_tokenizer("wordpiece")
    (row,) = task.encode(tokenizer, [Pair("lamp " * 40, "old lamp", 1)], 16)
    assert [len(ids) for ids in row["input_ids"]] == [16, len(tokenizer("old lamp")["input_ids"])]


def test_the_command_tunes(tiny_teacher: Teachers, tmp_path: Path) -> None:
    train = alike(tmp_path / "train.jsonl", 24, 0, "one two score")
    columns = ("--text-a-column", "one", "--text-b-column", "two")
    out, model = tmp_path / "out", tiny_teacher("bert")
    assert "Spearman" in done(
        *("--task", "sts", "--model", model, "--train", train, "--dev", train, "--out", out),
        *("--seeds", 1, "--epochs", 1, "--accumulate", 2, "--batch-size", 4, *columns),
    )
    found = scores_of(out)
    assert found["task"] == "sts" and found["settings"]["accumulate"] == 2


def test_equal_scores_and_a_model_that_cannot_pad_are_refused(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    same = table(tmp_path / "b.tsv", "text_a text_b score", [("a", "b", 1.0), ("b", "c", 1.0)])
    test = alike(tmp_path / "a.tsv", 8, 0)
    for model, file, message in (
        ("bert", same, r"--test: every score is 1 \(from .*b.tsv, line 2 on\)"),
        ("gpt2", test, "has no padding token"),
    ):
        with pytest.raises(UserError, match=message):
            score_as_is(SentenceSimilarity(), str(tiny_teacher(model)), {"test": file})
