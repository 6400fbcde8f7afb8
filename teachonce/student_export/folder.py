"""Writes what lies beside an exported file: tokenizer, config, and a table in the model cards."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from teachonce.checkpoints.tokenizer_folder import save_tokenizer
from teachonce.student_export.measuring import Figures
from teachonce.student_export.student import Student
from teachonce.support import files
from teachonce.support.console import readable

CARD, ABOUT, CONFIG = "README.md", "export.json", "config.json"
BEGIN, END = "<!-- exports -->", "<!-- end of exports -->"
HEADINGS = (
    "file",
    "size",
    "keeps of the student",
    "score",
    "one text",
    "batches of 16",
    "loads in",
    "memory",
)


@dataclass(frozen=True)
class Exported:
    """A file of an export: what was held against the student, and what it costs.

    keeps: the share of the student's score, or the agreement with it; `what` says which.
    kept_float: layers that were not quantised, by their names.
    """

    file: str
    what: str
    keeps: float
    score: float | None
    figures: Figures
    kept_float: tuple[str, ...] = ()


def write_tokenizer(student: Student, folder: Path) -> None:
    """Save the tokenizer, such that tokenizer.json alone cuts and fills up texts as the student
    reads them."""
    save_tokenizer(student.tokenizer, folder)
    path = folder / "tokenizer.json"
    words = json.loads(path.read_text("utf-8"))
    if not student.special:
        words["post_processor"] = None
    words["truncation"] = {
        "direction": "Right",
        "max_length": student.max_length,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    words["padding"] = {
        "strategy": "BatchLongest",
        "direction": student.tokenizer.padding_side.capitalize(),
        "pad_to_multiple_of": None,
        "pad_id": student.tokenizer.pad_token_id,
        "pad_type_id": 0,
        "pad_token": student.tokenizer.pad_token,
    }
    files.write(path, (json.dumps(words, ensure_ascii=False) + "\n").encode())


def write_about(student: Student, made: list[Exported], folder: Path) -> None:
    """Write the config, and export.json: the inputs and the output, labels, prompts, figures."""
    if student.config is not None:
        student.config.save_pretrained(folder)
    else:
        words = {"model_type": "static", "hidden_size": student.network.embedding.embedding_dim}  # type: ignore[union-attr]
        files.write(folder / CONFIG, _json(words))
    about: dict[str, Any] = {
        "kind": student.kind,
        "inputs": list(student.inputs),
        "output": student.output,
        "max_length": student.max_length,
        "prompt": student.prompt,
        **student.about,
        "files": [asdict(each) for each in made],
    }
    if student.task is not None:
        about["labels"] = list(student.task.labels)
    files.write(folder / ABOUT, _json(about))


def _json(words: dict[str, Any]) -> bytes:
    return (json.dumps(words, indent=1, ensure_ascii=False) + "\n").encode()


def write_card(card: str, own: Figures, made: list[Exported], path: Path) -> None:
    """Write a model card with a table of exports, beside float32. Of exports that an earlier table
    has, those of other files stay."""
    before, _, rest = card.partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = _rows(old)
    rows["float32, torch"] = ["", "1", *_costs(own)]
    for each in made:
        left = f", but for {', '.join(each.kept_float)}" if each.kept_float else ""
        keeps = f"{100 * each.keeps:.2f} % ({each.what})"
        score = "" if each.score is None else f"{100 * each.score:.2f}"
        rows[f"`{each.file}`{left}"] = [score, keeps, *_costs(each.figures)]
    table = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for name, (score, keeps, size, *others) in rows.items():
        table.append(f"| {' | '.join([name, size, keeps, score, *others])} |")
    note = "Measured on one thread of a CPU, each in a process of its own."
    section = "\n".join([BEGIN, "## Exports", "", *table, "", note, END])
    files.write(path, f"{before.rstrip()}\n\n{section}\n{after.lstrip()}".encode())


def _costs(figures: Figures) -> list[str]:
    memory = "not known" if figures.memory is None else readable(figures.memory)
    return [
        readable(figures.bytes),
        f"{figures.sentence_ms:.2f} ms",
        f"{figures.per_second:,.0f} texts/s",
        f"{figures.load_s:.2f} s",
        memory,
    ]


def _rows(section: str) -> dict[str, list[str]]:
    """Read the rows of a table that `write_card` wrote."""
    found = {}
    _, _, below = section.partition("\n|---")  # the headings' line
    for line in below.splitlines()[1:]:
        cells = [cell.strip() for cell in line.strip("| ").split("|")] if line[:1] == "|" else []
        if len(cells) == len(HEADINGS):
            name, size, keeps, score, *others = cells
            found[name] = [score, keeps, size, *others]
    return found
