"""Reads questions about contexts from SQuAD files and from tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.downstream.tasks.example_rows import Row, read_rows
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.text_files import read_lines


@dataclass(frozen=True)
class Answer:
    """An answer: the characters `begin` to `begin + len(text)` of its context."""

    text: str
    begin: int


@dataclass(frozen=True)
class Question:
    """A question, its context and the answers that count as right, none where it has no answer."""

    question: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(path: Path, columns: Mapping[str, str]) -> list[Question]:
    """Read the questions of a file, at least one.

    A .json file has SQuAD's layout, 1.1 or 2.0. Other files have a question in each row: columns
    `question`, `context` and `answer` (in .jsonl also `answers`: {"text": [...], "answer_start":
    [...]}, or a list of texts or of {"text", "answer_start"}). Without an `answer_start` the answer
    is where its text stands first. An empty answer says that the context has none.

    Raises UserError with the place on any other content, and where an answer is not in its context.
    """
    if path.suffix.lower() == ".json":
        if columns:
            raise UserError(f"{path}: SQuAD's layout has no columns; leave their options out")
        questions = list(_squad(path))
    else:
        questions = [_row(row, columns) for row in read_rows(path)]
    if not questions:
        raise UserError(f"{path}: has no questions; give a file in SQuAD's layout")
    return questions


def _squad(path: Path) -> Iterator[Question]:
    try:
        # the official files are a single line of 30 MB and more
        content = json.loads("\n".join(read_lines(path, longest=sys.maxsize - 1)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); give a file in SQuAD's layout") from None
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for asked in paragraph["qas"]:
                    where = f"{path}, question {asked.get('id', asked['question'])!r}"
                    found = [] if asked.get("is_impossible") else asked["answers"]
                    yield Question(asked["question"], context, _answers(found, context, where))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not SQuAD's layout ({type(error).__name__}: {error}); expected data > "
            "paragraphs > context, qas > question, answers > text, answer_start"
        ) from None


def _row(row: Row, columns: Mapping[str, str]) -> Question:
    context = row.text("context", columns)
    several = "answer" not in columns and "answer" not in row and "answers" in row
    value = row["answers"] if several else row.cell("answer", columns)
    if isinstance(value, str) or value is None:
        value = [{"text": value or "", "answer_start": row.get("answer_start")}]
    elif isinstance(value, dict):  # as in the hub's copies of SQuAD
        texts, begins = value.get("text", []), value.get("answer_start")
        value = [
            {"text": text, "answer_start": begin}
            for text, begin in zip(texts, begins or [None] * len(texts), strict=False)
        ]
    try:
        answers = _answers(value, context, row.where)
    except (KeyError, TypeError, AttributeError):
        raise UserError(
            f"{row.where}: expected a text, or texts with answer_start, as answer, "
            f"got {value!r:.60}; mend the row"
        ) from None
    return Question(row.text("question", columns), context, answers)


def _answers(found: Any, context: str, where: str) -> tuple[Answer, ...]:
    told = [{"text": answer} if isinstance(answer, str) else answer for answer in found]
    return tuple(
        _answer(answer["text"], answer.get("answer_start"), context, where)
        for answer in told
        if answer["text"].strip()
    )


def _answer(text: str, begin: Any, context: str, where: str) -> Answer:
    if begin in (None, ""):
        begin = context.find(text)
        if begin < 0:
            raise UserError(
                f"{where}: answer {text[:60]!r} is not in its context; "
                "answers are copied from it letter by letter: mend it, or leave it empty"
            )
    elif not str(begin).isdecimal() or context[int(begin) : int(begin) + len(text)] != text:
        there = context[int(begin) :][: len(text)] if str(begin).isdecimal() else ""
        raise UserError(
            f"{where}: answer {text[:60]!r} is not at character {begin} of its context, where "
            f"{there[:60]!r} stands; mend answer_start (characters from 0)"
        )
    return Answer(text, int(begin))
