"""Exports a student: writes, checks and measures each format, and writes the folder around them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from teachonce.checkpoints.tokenizer_folder import save_tokenizer
from teachonce.student_export.checking import BATCH, Check, check_of, drawn
from teachonce.student_export.formats import Format
from teachonce.student_export.formats.registry import FORMATS
from teachonce.student_export.measuring import Figures, figures_of
from teachonce.student_export.options import ExportOptions
from teachonce.student_export.student import Student, load_student
from teachonce.support import files
from teachonce.support.console import readable
from teachonce.support.errors import UserError
from teachonce.support.redaction import without_credentials

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
        "direction": student.tokenizer.truncation_side.capitalize(),
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
        if student.task.problem_type:
            about["problem_type"] = student.task.problem_type
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


Say = Callable[[str], object]
WORST = 3
"""Layers that a refusal names."""
SENTENCES = 20


def export(options: ExportOptions, say: Say = print) -> list[Exported]:
    """Export a student to every format asked for, into a new folder; returns its files.

    The table of exports goes into the card of the folder and of the student.

    Raises UserError where the student, a format or its library does not fit, and where an export
    keeps less than `least`: then no folder is made.
    """
    student = load_student(options.folder)
    check = check_of(student, options.check)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{options.out.name}-", dir=options.out.parent))
    try:
        made = [_exported(student, check, name, options, scratch, say) for name in options.to]
        singles = [student.encode([text]) for text in drawn(student)[:SENTENCES]]
        own = figures_of(
            None, options.folder, student.output, singles, student.encode(drawn(student)[:BATCH])
        )
        write_tokenizer(student, scratch)
        write_about(student, made, scratch)
        card = options.folder / CARD
        before = card.read_text("utf-8") if card.is_file() else f"# {options.folder.name}\n"
        text = without_credentials(before)
        write_card(text, own, made, scratch / CARD)
        scratch.chmod(0o755)
        files.rename(scratch, options.out)
        write_card(text, own, made, card)
        return made
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _exported(
    student: Student, check: Check, name: str, options: ExportOptions, folder: Path, say: Say
) -> Exported:
    format, kind = FORMATS[name], options.quantize
    path = folder / format.names[kind]
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: tuple[str, ...] = ()
    if kind:
        with tempfile.TemporaryDirectory(prefix="float-", dir=folder) as plain:
            source = Path(plain) / Path(format.names[""]).name
            format.write(student, source)
            _refuse(student, check, name, format, source, options.least)
            kept = _quantised(student, check, format, source, path, options)
    else:
        format.write(student, path)
    run = format.open(path, student.output, 1)
    keeps = check.share(run)
    if not kind and keeps < options.least:
        raise _refused(f"--to {name}", keeps, check, options.least, "export another format")
    score = check.figure(run) if check.figure else None
    singles = [student.encode([text]) for text in drawn(student)[:SENTENCES]]
    figures = figures_of(
        name, path, student.output, singles, student.encode(drawn(student)[:BATCH])
    )
    say(f"{format.names[kind]}: keeps {100 * keeps:.2f} % ({check.what})")
    return Exported(format.names[kind], check.what, keeps, score, figures, kept)


def _refuse(
    student: Student, check: Check, name: str, format: Format, source: Path, least: float
) -> None:
    """UserError where the file in float32 does not do what the student does."""
    keeps = check.share(format.open(source, student.output, 1))
    if keeps < least:
        raise _refused(f"--to {name}", keeps, check, least, "export another format")


def _quantised(
    student: Student, check: Check, format: Format, source: Path, path: Path, options: ExportOptions
) -> tuple[str, ...]:
    """Quantise all layers but those to keep; returns the names of those.

    Raises UserError where what is left is less than `least`, with the layers that lose most.
    """
    assert format.layers and format.quantise  # as it has names of quantised files
    layers = format.layers(source)
    kept = tuple(name for name in layers if _is_kept(name, options.keep_float))
    _check_kept(layers, options.keep_float)
    chosen = {name: parts for name, parts in layers.items() if name not in kept}
    if not chosen:
        raise UserError(f"--quantize {options.quantize}: no layer is left to quantise")
    format.quantise(source, path, options.quantize, [p for parts in chosen.values() for p in parts])
    keeps = check.share(format.open(path, student.output, 1))
    if keeps >= options.least:
        return kept
    losses = _losses(student, format, source, chosen, options.quantize)
    worst = sorted(losses, key=lambda name: -losses[name])[:WORST]
    told = ", ".join(f"{name} {100 * losses[name]:.2f} %" for name in worst)
    words = " ".join(f"--keep-float {name}" for name in worst)
    raise _refused(
        f"--quantize {options.quantize}",
        keeps,
        check,
        options.least,
        f"quantised alone, these layers lose most of the outputs: {told}; keep them in float32"
        f" ({words})",
    )


def _losses(
    student: Student, format: Format, source: Path, layers: dict[str, list[str]], kind: str
) -> dict[str, float]:
    """Find what the outputs lose where one layer alone is quantised, by its name.

    On texts of random pieces: a task's file may take minutes for each layer.
    """
    assert format.quantise
    outputs = check_of(student, None)
    losses = {}
    for name, parts in layers.items():
        path = source.with_name(f"alone{source.suffix}")
        format.quantise(source, path, kind, parts)
        losses[name] = 1 - outputs.share(format.open(path, student.output, 1))
    return losses


def _is_kept(layer: str, names: Sequence[str]) -> bool:
    """Whether a layer is one of `names`, or inside one of them."""
    return any(layer == name or layer.startswith(f"{name}.") for name in names)


def _check_kept(layers: dict[str, list[str]], names: Sequence[str]) -> None:
    for name in names:
        if not any(_is_kept(layer, [name]) for layer in layers):
            raise UserError(
                f"--keep-float {name}: the student has no such layer that could be quantised; it"
                f" has {', '.join(layers)[:400]}"
            )


def _refused(what: str, keeps: float, check: Check, least: float, remedy: str) -> UserError:
    return UserError(
        f"{what} keeps {100 * keeps:.2f} % ({check.what}), less than --least {least:g}; {remedy},"
        " or allow it with --least"
    )
