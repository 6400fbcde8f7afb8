"""The `downstream` command as a user types it, and small files of each task.

- Run the `downstream` command as a user types it, and read its scores.
- Small files of each task that a tiny model can learn in a second.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.downstream.cli import main
from tests.end_to_end import support

run = partial(support.invoke, main)
done = partial(support.ok, main)
refused = partial(support.refused, main)


def scores_of(out: Path) -> Any:
    """Return the content of a run's scores.json."""
    return json.loads((out / "scores.json").read_text())


WORDS = ("old", "lamp", "stairs", "market", "moss", "stones", "globe", "letters")
TAGS = {"the": "DET", "old": "ADJ", "lamp": "NOUN", "stairs": "NOUN", "light": "VERB"}


def table(path: Path, header: str, rows: list[tuple[Any, ...]]) -> Path:
    """Write a .tsv or .csv of cells without quotes, or a .jsonl with their types."""
    names = header.split()
    if path.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    else:
        separator = "\t" if path.suffix == ".tsv" else ","
        lines = [separator.join(map(str, row)) for row in [tuple(names), *rows]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def phrase(draws: np.random.Generator, *more: str) -> str:
    """Five words and `more`, shuffled."""
    return " ".join(draws.permutation([*draws.choice(WORDS, 5), *more]))


def splits(
    write: Callable[[Path, int, int], Path], folder: Path, suffix: str = "", **sizes: int
) -> dict[str, Path]:
    """Write a file for each split of the given size, each with a different seed."""
    seeds = enumerate(sizes.items())
    return {name: write(folder / f"{name}{suffix}", size, seed) for seed, (name, size) in seeds}


def classified(path: Path, size: int, seed: int, header: str = "text label") -> Path:
    """Make texts whose label is their only animal."""
    draws, animals = np.random.default_rng(seed), ("teacher", "student", "keeper")
    rows = [(phrase(draws, animals[n % 3]), animals[n % 3].upper()) for n in range(size)]
    return table(path, header, rows)


def paired(path: Path, size: int, seed: int, header: str = "text_a text_b score") -> Path:
    """Make pairs whose score, 1 to 3.5, counts the word storm in both texts."""
    draws = np.random.default_rng(seed)
    rows = []
    for _ in range(size):
        a, b = draws.integers(0, 4), draws.integers(0, 3)
        texts = phrase(draws, *["storm"] * a), phrase(draws, *["storm"] * b)
        rows.append((*texts, 1 + float(a + b) / 2))
    return table(path, header, rows)


def compared(path: Path, size: int, seed: int, header: str = "text_a text_b label") -> Path:
    """Make pairs whose label is the animal of one text and the building of the other."""
    draws, animals = np.random.default_rng(seed), ("teacher", "keeper")
    buildings = ("harbour", "tower")
    rows = []
    for number in range(size):
        a, b = animals[number % 2], buildings[number // 2 % 2]
        rows.append((phrase(draws, a), phrase(draws, b), f"{a} {b}"))
    return table(path, header, rows)


def asked(path: Path, size: int, seed: int, length: int = 8, unanswered: float = 0) -> Path:
    """Make SQuAD examples whose answer is the only name among `length` words; a share has no
    answer."""
    draws, names = np.random.default_rng(seed), ("harbour", "lighthouse", "tower")
    paragraphs = []
    for number in range(size):
        words = draws.choice(WORDS, length).tolist()
        answers = []
        if number >= unanswered * size:
            name = names[number % 3]
            words.insert(int(draws.integers(0, length)), name)
            answers = [{"text": name, "answer_start": " ".join(words).index(name)}]
        qas = {"id": str(number), "question": "where is it?", "answers": answers}
        paragraphs.append({"context": " ".join(words), "qas": [qas]})
    path.write_text(json.dumps({"version": "2.0", "data": [{"paragraphs": paragraphs}]}))
    return path


def write_tagged(path: Path, sentences: int, seed: int) -> Path:
    """Make sentences of six words, each word with its tag in TAGS."""
    words = np.random.default_rng(seed).choice(list(TAGS), (sentences, 6))
    rows = ("\n".join(f"{word}\t{TAGS[word]}" for word in row) for row in words)
    path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    return path


def entities(path: Path, size: int, seed: int) -> Path:
    """Write the sentences of `write_tagged` as entities: adjectives have kind X, nouns kind Y."""
    text = write_tagged(path, size, seed).read_text()
    for tag, iob in (("DET", "O"), ("VERB", "O"), ("ADJ", "B-X"), ("NOUN", "B-Y")):
        text = text.replace(f"\t{tag}", f"\t{iob}")
    path.write_text(text)
    return path
