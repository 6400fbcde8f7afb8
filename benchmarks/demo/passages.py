"""Python's own documentation, cut into passages: what every machine that runs this can read."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from teachonce.teacher_dump.corpus.sources import library_sources

LONGEST = 300  # characters to which the paragraphs of a docstring are joined
SHORTEST = 20
SKIPPED = {"distutils", "ensurepip", "idlelib", "pydoc_data", "turtledemo"}
"""Packages of the library that hardly anybody imports."""
COMPILED = (
    *("array", "binascii", "bisect", "builtins", "cmath", "collections", "csv", "datetime"),
    *("functools", "gc", "heapq", "io", "itertools", "math", "operator", "os", "pickle", "random"),
    *("re", "select", "signal", "socket", "sqlite3", "statistics", "string", "struct", "sys"),
    *("threading", "time", "unicodedata", "weakref", "zlib"),
)
"""Modules with members written in C, whose docstrings no source file has."""
QUESTIONS = (
    "read a file line by line",
    "round to even",
    "wait until several threads are done",
    "copy a folder with all files in it",
    "parse the arguments of a command line",
    "the most common elements of a list",
    "difference between two dates in days",
    "pick a random element",
    "run another program and get its output",
    "write rows to a csv file",
    "compress a string of bytes",
    "greatest common divisor",
    "split a string at commas",
    "remember results of a function that was called before",
    "sort a list by a key",
    "send an email over an encrypted connection",
    "replace text that matches a regular expression",
    "how much time does a piece of code take",
    "delete a temporary file automatically",
    "decode a URL into its parts",
    "check whether a path exists",
    "stop the debugger at a line",
    "median of a list of numbers",
    "what does the with statement do",
)
"""Questions that are asked of teacher and student."""


@cache
def passages() -> tuple[str, ...]:
    """Make passages from the docstrings of public names and from the language reference.

    Each starts with the name of its subject, such as `fractions.Fraction.limit_denominator: `, and
    each text appears once.
    """
    texts: dict[str, str] = {}
    for name, text in [*_of_sources(), *_of_compiled(), *_of_reference()]:
        for piece in pieces(text):
            texts.setdefault(piece, f"{name}: {piece}")
    return tuple(texts.values())


def write_passages(path: Path, every: int) -> int:
    """Write every `every`-th of the passages, one per line; return their number."""
    texts = passages()[::every]
    path.write_text("".join(f"{passage}\n" for passage in texts), "utf-8")
    return len(texts)


def pieces(text: str) -> Iterator[str]:
    """Join paragraphs without examples, line breaks folded, to at most LONGEST characters; a longer
    paragraph is cut there."""
    joined = ""
    for paragraph in re.split(r"\n\s*\n", text):
        folded = " ".join(paragraph.split())
        if ">>>" in folded or not re.search(r"\w\s\w", folded):
            continue
        if joined and len(joined) + len(folded) >= LONGEST:
            yield joined[:LONGEST]
            joined = ""
        joined = f"{joined} {folded}".strip()
    if len(joined) >= SHORTEST:
        yield joined[:LONGEST]


def _of_sources() -> Iterator[tuple[str, str]]:
    for root, path in library_sources():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if module.split(".")[0] in SKIPPED:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        yield from _of_node(tree, module)


def _of_node(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    if not _public(name):
        return
    yield name, ast.get_docstring(node) or ""
    for inner in node.body:
        if isinstance(inner, ast.ClassDef):
            yield from _of_node(inner, f"{name}.{inner.name}")
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and _public(inner.name):
            yield f"{name}.{inner.name}", ast.get_docstring(inner) or ""


def _public(name: str) -> bool:
    return not any(re.match(r"_(?!_)", part) for part in name.split("."))


def _of_compiled() -> Iterator[tuple[str, str]]:
    for name in COMPILED:
        module = importlib.import_module(name)
        yield from _of_members(module, name.replace("builtins", ""))


def _of_members(owner: ModuleType | type, name: str) -> Iterator[tuple[str, str]]:
    for inner, member in sorted(vars(owner).items()):
        if not _public(inner) or inspect.ismodule(member):
            continue
        full_name = f"{name}.{inner}".strip(".")
        if inspect.isroutine(member) or inspect.isclass(member):
            yield full_name, inspect.getdoc(member) or ""
        if inspect.isclass(member) and inspect.ismodule(owner):
            yield from _of_members(member, full_name)


def _of_reference() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    yield from topics.items()
