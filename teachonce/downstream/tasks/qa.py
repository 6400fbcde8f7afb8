"""The task qa: finds the span of a context that answers a question.

Questions come from SQuAD files and from tables.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import AutoModelForQuestionAnswering

from teachonce.downstream.options import check_option
from teachonce.downstream.tasks.example_rows import Row, is_squad, read_rows
from teachonce.downstream.tasks.task_interface import Task
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.text_files import read_lines


@dataclass(frozen=True)
class GoldAnswer:
    """Describes a correct answer: the characters `begin` to `begin + len(text)` of its context."""

    text: str
    begin: int


@dataclass(frozen=True)
class Question:
    """Holds a question, its context and its correct answers. `answers` is empty if the context does
    not answer the question."""

    question: str
    context: str
    answers: tuple[GoldAnswer, ...]


def read_questions(path: Path, columns: Mapping[str, str]) -> list[Question]:
    """Read the questions of a file, at least one.

    A .json file has SQuAD's layout, 1.1 or 2.0, or is an array of rows. Other files have one
    question per row: columns `question`, `context` and `answer`. In .jsonl, `answers` may replace
    `answer`: a table {"text": ..., "answer_start": ...}, whose values may be lists, or a list of
    texts or of such tables. Without `answer_start`, the first occurrence of the text is the answer.
    An empty answer, list or table means that the context does not answer the question.

    Raises UserError with file and line for any other content, and if an answer is not in its
    context.
    """
    try:
        squad = is_squad(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    if squad:
        if columns:
            raise UserError(
                f"{path}: SQuAD's layout has no columns; leave the options of columns out"
            )
        questions = list(_squad(path))
    else:
        questions = [_question(row, columns) for row in read_rows(path)]
    if not questions:
        raise UserError(f"{path}: has no questions; give a file in SQuAD's layout")
    return questions


def _squad(path: Path) -> Iterator[Question]:
    try:
        # the official files are a single line of 30 MB and more
        content = json.loads("\n".join(read_lines(path, longest=sys.maxsize - 1)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); give a file in SQuAD's layout") from None
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for entry in paragraph["qas"]:
                    question = entry["question"]
                    if not (isinstance(context, str) and isinstance(question, str)):
                        raise TypeError("context and question must be texts")
                    where = f"{path}, question {entry.get('id', question)!r}"
                    answers = [] if entry.get("is_impossible") else entry["answers"]
                    yield Question(question, context, _answers(answers, context, where))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path}: not SQuAD's layout ({type(error).__name__}: {error}); expected data > "
            "paragraphs > context, qas > question, answers > text, answer_start"
        ) from None


def _question(row: Row, columns: Mapping[str, str]) -> Question:
    context = row.text("context", columns)
    several = "answer" not in columns and "answer" not in row and "answers" in row
    value = row["answers"] if several else row.cell("answer", columns)
    if isinstance(value, str) or value is None:
        value = {"text": value or "", "answer_start": row.get("answer_start")}
    try:
        answers = _answers(value, context, row.where)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise UserError(
            f"{row.where}: expected a text, or texts with answer_start, as answer, "
            f"got {value!r:.60}; correct the row"
        ) from None
    return Question(row.text("question", columns), context, answers)


def _answers(answers: Any, context: str, where: str) -> tuple[GoldAnswer, ...]:
    """Read a list of answers, each a text or a table of text and answer_start; or one such table,
    whose values may be lists."""
    if isinstance(answers, str):  # its characters would be read as answers
        raise TypeError("answers must be a list")
    if answers and isinstance(answers, dict):
        texts, begins = answers["text"], answers.get("answer_start")
        if isinstance(texts, str):
            texts, begins = [texts], [begins]
        # Lists, as in the hub's copies of SQuAD.
        pairs = [*zip(texts, begins or [None] * len(texts), strict=True)]
    else:
        tables = [{"text": answer} if isinstance(answer, str) else answer for answer in answers]
        pairs = [(table["text"], table.get("answer_start")) for table in tables]
    return tuple(_answer(text, begin, context, where) for text, begin in pairs if text.strip())


def _answer(text: str, begin: Any, context: str, where: str) -> GoldAnswer:
    if begin in (None, ""):
        begin = context.find(text)
        if begin < 0:
            raise UserError(
                f"{where}: answer {text[:60]!r} is not in its context; "
                "answers must be literal parts of the context: correct it, or leave it empty"
            )
    elif not str(begin).isdecimal() or context[int(begin) : int(begin) + len(text)] != text:
        there = context[int(begin) :][: len(text)] if str(begin).isdecimal() else ""
        raise UserError(
            f"{where}: answer {text[:60]!r} is not at character {begin} of its context, where the"
            f" text is {there[:60]!r}; correct answer_start (characters are counted from 0)"
        )
    return GoldAnswer(text, int(begin))


SHORTEST = 32
ANSWER_TOKENS = 30
"""Tokens of the longest predicted answer, as in the script of BERT (Devlin et al. 2019)."""
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


class QA(Task):
    """Answers the questions of a file. The best epoch has the highest F1.

    A long context is split into windows. Each window repeats the last `stride` tokens of the
    previous window, by default a third of a window. A question is truncated to half a window. If
    training has questions without an answer, the model may predict that there is no answer: it does
    so if every window scores the cls token above all spans (Devlin et al. 2019, section 4.3).

    columns: names of columns by role (`question`, ...), if they differ from the role.
    """

    name = "qa"
    model_class = AutoModelForQuestionAnswering
    measures = {"exact match": "exact_match", "F1": "f1"}
    primary = "f1"
    # Windows of 384 tokens that share 128, as in BERT's script for SQuAD (run_squad.py).
    max_length: ClassVar[int] = 384

    def __init__(self, columns: Mapping[str, str] | None = None, stride: int | None = None) -> None:
        check_option("stride", stride)
        self.columns, self.stride = columns or {}, stride
        self.may_decline = False

    def options(self) -> dict[str, Any]:
        return {"columns": dict(self.columns), "stride": self.stride}

    def read(self, path: Path) -> list[Question]:
        return read_questions(path, self.columns)

    def prepare(self, splits: Mapping[str, Sequence[Question]]) -> None:
        """Raise UserError if no training question has an answer."""
        answered = {bool(question.answers) for question in splits["train"]}
        if True not in answered:
            raise UserError("--train: no question has an answer; add questions with answers")
        self.may_decline = False in answered

    def head(self) -> dict[str, Any]:
        return {"num_labels": 2}

    def texts(self, examples: Sequence[Question]) -> list[str]:
        return [question.context for question in examples]

    def encode(
        self, tokenizer: Any, examples: Sequence[Question], limit: int
    ) -> list[dict[str, Any]]:
        """Make the windows of every question.

        `start_positions` and `end_positions` are the first and last token of the first gold answer,
        or the cls token if the window does not contain the whole answer. `score` needs `example`
        (the question's number), `cls` (its position) and `spans`, int [S, 2]: the characters of
        each token, -1 outside the context. Raises UserError if windows are too short.
        """
        half = limit // 2
        stride = limit // 3 if self.stride is None else self.stride
        # About half a window is left for the context, and tokenizers requires a smaller stride than
        # this.
        if limit < SHORTEST or stride >= half:
            raise UserError(
                f"--task qa with windows of {limit} tokens and a stride of {stride}: expected "
                f"windows of {SHORTEST} tokens or more, and a stride below half of a window; "
                "change --max-length or --stride"
            )
        return [
            {"example": number, **row}
            for number, example in enumerate(examples)
            for row in _windows(tokenizer, example, limit, half, stride)
        ]

    def score(
        self, examples: Sequence[Question], rows: Sequence[dict[str, Any]], predictions: Any
    ) -> dict[str, float]:
        """Compute the mean exact match and word F1; each prediction is compared with all gold
        answers of its question, and the best match counts."""
        starts, ends = predictions[:2]
        windows: dict[int, list[Any]] = defaultdict(list)
        for row, start, end in zip(rows, starts, ends, strict=True):
            windows[row["example"]].append((row, start, end))
        exact, overlap = [], []
        for number, example in enumerate(examples):
            predicted = best_answer(example.context, windows[number], self.may_decline)
            gold = [answer.text for answer in example.answers] or [""]
            exact.append(max(exact_match(predicted, text) for text in gold))
            overlap.append(max(word_f1(predicted, text) for text in gold))
        return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(overlap))}


def _windows(
    tokenizer: Any, example: Question, limit: int, half: int, stride: int
) -> Iterator[dict[str, Any]]:
    query = example.question.strip()
    pieces = tokenizer(query, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if len(pieces["input_ids"]) > half - 4:  # a pair has up to four special tokens
        query = query[: pieces["offset_mapping"][half - 5][1]]
    encoded = tokenizer(
        query,
        example.context,
        truncation="only_second",
        max_length=limit,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    for number, ids in enumerate(encoded["input_ids"]):
        inside = np.array([part == 1 for part in encoded.sequence_ids(number)])
        spans = np.where(inside[:, None], np.array(encoded["offset_mapping"][number]), -1)
        cls = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
        start, end = _answer_tokens(example, spans) or (cls, cls)
        names = [name for name in tokenizer.model_input_names if name in encoded]
        yield {
            **{name: encoded[name][number] for name in names},
            "start_positions": start,
            "end_positions": end,
            "spans": spans,
            "cls": cls,
        }


def _answer_tokens(example: Question, spans: Array) -> tuple[int, int] | None:
    """Return the first and last token of the answer; None if the window lacks a part of it."""
    begins, ends = spans.T
    read = np.flatnonzero(ends > begins)  # tokens outside the context have empty spans
    if not example.answers or not len(read):
        return None
    begin = example.answers[0].begin
    end = begin + len(example.answers[0].text)
    if begins[read[0]] > begin or ends[read[-1]] < end:
        return None
    covering = read[(ends[read] > begin) & (begins[read] < end)]
    return (int(covering[0]), int(covering[-1])) if len(covering) else None


def best_answer(context: str, windows: Sequence[Any], may_decline: bool) -> str:
    """Choose the span of at most 30 tokens with the largest sum of start and end logit.

    `windows` are (row of `QA.encode`, start logits [S], end logits [S]). The answer is "" if the
    model `may_decline` and the cls token of every window has a higher sum than this span.
    """
    best, text, none = -np.inf, "", np.inf
    for row, start, end in windows:
        tokens = np.flatnonzero(row["spans"][:, 1] > row["spans"][:, 0])
        none = min(none, start[row["cls"]] + end[row["cls"]])
        if not len(tokens):
            continue
        # All pairs, where BERT's script compares the 20 best starts and ends.
        sums = start[tokens][:, None] + end[tokens][None, :]
        sums = np.where(_allowed(len(tokens)), sums, -np.inf)
        first, last = np.unravel_index(np.argmax(sums), sums.shape)
        if sums[first, last] > best:
            best = sums[first, last]
            text = context[row["spans"][tokens[first], 0] : row["spans"][tokens[last], 1]].strip()
    return "" if may_decline and none > best else text


def _allowed(size: int) -> Array:
    """Return whether an answer may start at token i and end at token j: bool [size, size]."""
    ahead = np.arange(size)[None, :] - np.arange(size)[:, None]
    return (ahead >= 0) & (ahead < ANSWER_TOKENS)


def normalised(answer: str) -> list[str]:
    """Split an answer into words in lower case, without ASCII punctuation and English articles."""
    return ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split()


def exact_match(predicted: str, gold: str) -> float:
    """Return 1 if the words of both answers are equal, else 0 (Rajpurkar et al. 2016, 6.1)."""
    return float(normalised(predicted) == normalised(gold))


def word_f1(predicted: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of words (Rajpurkar et al. 2016, 6.1).

    If one answer has no words, F1 is 1 if the other has none either, else 0.
    """
    words, gold_words = normalised(predicted), normalised(gold)
    if not words or not gold_words:
        return float(words == gold_words)
    shared = (Counter(words) & Counter(gold_words)).total()
    return 2 * shared / (len(words) + len(gold_words))
