"""Prints the answers of a tagger or a classifier as tables, the forms that the tasks read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from teachonce.student_predict.answers import Predictor
from teachonce.support.errors import UserError

# A TAB, and every line end of `str.splitlines`, by which other programs may read the table.
BREAK = re.compile(r"\r\n|[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""A character in a text that would end a cell or a line."""
OTHERS = {"mlm": "filled masks", "embedding": "vectors", "numbers": "scores"}


def tsv_lines(predictor: Predictor) -> Iterator[str]:
    """Yield the lines of `--format tsv`.

    For a tagger, a word and its tag, with an empty line between texts. For a classifier, a header
    and each text or pair with its label. Tabs and line ends in texts are replaced by spaces.

    Raises UserError for other kinds of students.
    """
    student = predictor.student
    kind = student.task.output_kind if student.task else student.kind
    if kind != "one label":
        raise UserError(
            f"--format tsv: prints words with tags, or texts with one label, and this student gives"
            f" {OTHERS.get(kind, kind)}; leave --format out"
        )
    if student.kind == "tagging":
        for number, answer in enumerate(predictor.answers()):
            if number:
                yield ""
            for word in answer.get("words", ()):
                yield _line(word["word"], word["tag"])
        return
    yield _line(*predictor.names, "label")
    for answer in predictor.answers():
        yield _line(*(answer[name] for name in predictor.names), answer.get("label", ""))


def _line(*cells: str) -> str:
    return "\t".join(BREAK.sub(" ", cell) for cell in cells)
