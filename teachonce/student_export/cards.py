"""Writes model cards: the card of an export, with code that runs it, and the table of exports on
the cards of export and student."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from teachonce.student_export.costs import Costs
from teachonce.student_export.formats.registry import FORMATS
from teachonce.student_export.loaded_student import LONGEST, LoadedStudent, VectorNetwork
from teachonce.student_export.options import DECODER
from teachonce.student_export.options import FORMATS as SUPPORT
from teachonce.student_export.run_code import run_code
from teachonce.support import files
from teachonce.support.console import readable

STUDENT = "float32, torch"
"""The row of the student itself in a table of exports."""
BEGIN, END = "<!-- exports -->", "<!-- end of exports -->"
HEADINGS = (
    "file",
    "size",
    "compared with the student",
    "score",
    "one text",
    "batches of 16",
    "loads in",
    "memory",
)
# Code of a student's card, with the paragraphs that explain it. It loads weights, which an export
# does not have.
LOADING = re.compile(
    r'```python\n(?:(?!```).)*"this folder".*?(?=^#|\nIts classifier|\Z)', re.MULTILINE | re.DOTALL
)
# A sentence on training.json, which an export does not have.
RECORD = re.compile(r"^`training\.json` has .*\n", re.MULTILINE)
# The table of exports, and its rows on files, which another export does not have.
SECTION = re.compile(f"{BEGIN}.*?(?:{END}|\\Z)", re.DOTALL)
ROW = re.compile(r"^\| `.*\n", re.MULTILINE)
FRONT = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Exported:
    """Describes an exported file, its agreement with the student, and its costs.

    The names of the fields are the keys of `files` in export.json.

    what: the measure of the agreement.
    keeps: the share of the student's score that the export reaches, or the agreement of outputs; 1
        is full agreement. None if no installed package can run the file.
    score: the score of the task, None if no task was scored.
    kept_float: names of the layers that were not quantised.
    unit: the unit of the score; "" for a share.
    """

    file: str
    what: str
    keeps: float | None
    score: float | None
    figures: Costs
    kept_float: tuple[str, ...] = ()
    unit: str = ""

    def shown_score(self) -> str:
        if self.score is None:
            return ""
        return f"{self.score:.3f} {self.unit}" if self.unit else f"{100 * self.score:.2f}"

    def shown_agreement(self) -> str:
        return "not compared" if self.keeps is None else f"{100 * self.keeps:.2f} % ({self.what})"

    @property
    def format(self) -> str:
        """Return the name of the format, which is the name of its folder."""
        return self.file.partition("/")[0]


def export_card(card: str, student: LoadedStudent, exports: Sequence[Exported]) -> str:
    """Return the card of an export: the student's card, with sections on how to run the export's
    files instead of the student's code."""
    front = FRONT.match(card)
    head, body = (front.group(0), card[front.end() :]) if front else ("", card)
    # The library of this name would load weights, which an export does not have.
    head = re.sub(r"^library_name: .*\n", "", head, flags=re.MULTILINE)
    body = RECORD.sub("", LOADING.sub("", body))
    body = SECTION.sub(lambda section: ROW.sub("", section[0]), body)
    # Before the first section; without one find() returns -1, and -1 + 1 is falsy.
    position = body.find("\n## ") + 1 or len(body)
    sections = [_how_to_run(student, exported) for exported in exports]
    if isinstance(student.network, VectorNetwork) and any(e.format == "onnx" for e in exports):
        sections.append(_with_sentence_transformers(exports))
    if student.kind != DECODER:
        sections.append(_long_texts(student, exports))
    middle = "\n\n".join(["## Run it", *sections])
    return f"{head}{body[:position].rstrip()}\n\n{middle}\n\n{body[position:]}"


def _long_texts(student: LoadedStudent, exports: Sequence[Exported]) -> str:
    """Return a paragraph on texts that are too long, and on `student-predict`."""
    limit = f"Texts of more than {student.max_length} tokens are truncated."
    # model2vec's config.json then has no limit.
    if any(e.format == "model2vec" for e in exports) and student.max_length == LONGEST:
        limit = (
            f"model2vec reads all of a text, the other programs its first {student.max_length}"
            " tokens."
        )
    return (
        f"{limit} `student-predict` of teachonce prints the same answers,\nand reads tables as"
        " well; there classifiers, taggers and masked language models read long texts in windows."
    )


def _how_to_run(student: LoadedStudent, exported: Exported) -> str:
    usage = FORMATS[exported.format].usage
    program = program_of(student, exported)
    if usage is not None and not program:
        return usage(exported.file, bool(student.chat_template))
    _, package = FORMATS[exported.format].runner
    line = "line, two texts with a TAB between them" if student.pairs else "line of a file"
    return f"""```sh
pip install {package} tokenizers numpy
python {program} texts.txt
```

prints a JSON line for each {line}; without a file it reads stdin. The function `answer` of
[{program}]({program}) is for programs of your own."""


def program_of(student: LoadedStudent, exported: Exported) -> str:
    """Return the name of the Python program that runs an exported file; "" for a format that other
    programs run."""
    both = DECODER in SUPPORT[exported.format].kinds and student.kind != DECODER
    return f"answer_{exported.format}.py" if both or FORMATS[exported.format].usage is None else ""


def write_programs(student: LoadedStudent, exports: Sequence[Exported], folder: Path) -> None:
    """Write the programs that run the exported files."""
    for exported in exports:
        if name := program_of(student, exported):
            (folder / name).write_text(run_code(student, exported.format, exported.file), "utf-8")


def _with_sentence_transformers(exports: Sequence[Exported]) -> str:
    (file, *_) = (exported.file for exported in exports if exported.format == "onnx")
    return f"""Optimum needs transformers 4. With
`pip install 'sentence-transformers[onnx]<6' 'transformers<5' 'datasets<5'`:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".", backend="onnx", model_kwargs={{"file_name": "{file}"}})
print(model.encode(["A text.", "Another text."]))
```"""


def write_card(card: str, student_row: Exported, exports: Sequence[Exported], path: Path) -> None:
    """Write a model card with a table that compares the exports with the student in float32.

    student_row: the student itself, as the row STUDENT.

    If `card` already has such a table, its rows for other files remain. The student's score remains
    if `student_row` has no score.
    """
    before, _, rest = card.partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = _table_rows(old)
    scored = rows.get(STUDENT, [""])[:2] if student_row.score is None else [""]
    rows[STUDENT] = _cells(student_row)
    if scored[0]:
        rows[STUDENT][:2] = scored
    for exported in exports:
        suffix = f", but for {', '.join(exported.kept_float)}" if exported.kept_float else ""
        rows[f"`{exported.file}`{suffix}"] = _cells(exported)
    table = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for name, (score, agreement, size, *costs) in rows.items():
        table.append(f"| {' | '.join([name, size, agreement, score, *costs])} |")
    note = "Measured on one thread of a CPU, each in a process of its own."
    section = "\n".join([BEGIN, "## Exports", "", *table, "", note, END])
    files.write(path, f"{before.rstrip()}\n\n{section}\n{after.lstrip()}".encode())


def _cells(exported: Exported) -> list[str]:
    """Return the cells of a row, in the order of `_table_rows`: score, agreement, size and
    costs."""
    costs = exported.figures
    figures = (
        (costs.sentence_ms, lambda ms: f"{ms:.2f} ms"),
        (costs.per_second, lambda rate: f"{rate:,.0f} texts/s"),
        (costs.load_s, lambda seconds: f"{seconds:.2f} s"),
        (costs.memory, readable),
    )
    shown = ["not known" if value is None else text(value) for value, text in figures]
    return [exported.shown_score(), exported.shown_agreement(), readable(costs.bytes), *shown]


def _table_rows(section: str) -> dict[str, list[str]]:
    """Parse the table of exports in a section that `write_card` wrote. Returns, by the name of each
    row, its score, agreement, size and costs."""
    rows = {}
    _, _, below = section.partition("\n|---")  # the line below the headings
    for line in below.splitlines()[1:]:
        cells = [cell.strip() for cell in line.strip("| ").split("|")] if line[:1] == "|" else []
        if len(cells) == len(HEADINGS):
            name, size, agreement, score, *costs = cells
            rows[name] = [score, agreement, size, *costs]
    return rows
