"""Reads collections in the layout of BEIR (Thakur et al. 2021), and TREC runs.

corpus.jsonl    _id, title (optional), text
queries.jsonl   _id, text
qrels.tsv       query-id, corpus-id, score; or qrels/test.tsv; optional: the judgements
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.downstream.text_lines import check_unicode
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.tables import named_rows
from teachonce.teacher_dump.corpus.text_files import read_lines

CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"
JUDGED = ("qrels.tsv", "qrels/test.tsv", "qrels/dev.tsv")
"""Files of judgements; the first that exists is read."""
Judgements = dict[str, dict[str, int]]
"""Grades by query and document; a document with a grade of 0 or below is not relevant."""


@dataclass(frozen=True)
class Collection:
    """Holds a folder's queries by id, in the order of their file, and its judgements if it has any.

    With judgements, queries without a relevant document are left out, as in BEIR.
    """

    folder: Path
    queries: dict[str, str]
    judgements: Judgements | None

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the id and the text of each document, title first. Only ids stay in memory.

        Raises UserError with file and line for a line that cannot be read, and for a duplicate id.
        """
        met = set()
        for where, cells in _rows(self.folder / CORPUS):
            name = _id(cells, where)
            if name in met:
                raise UserError(f"{where}: duplicate id {name!r}; rename one")
            met.add(name)
            title = cells.get("title") or ""
            text = cells.get("text")
            for key, value in (("title", title), ("text", text)):
                if not isinstance(value, str):
                    raise UserError(
                        f"{where}: expected a string as {key}, got {value!r:.60}; correct the line"
                    )
            # Title, space, text, as in BEIR's own evaluation.
            yield name, check_unicode(f"{title} {text}".strip(), where)
        if not met:
            raise UserError(f"{self.folder / CORPUS}: has no documents; give one per line")

    def missing(self) -> list[str]:
        """Return the relevant documents that are not in the corpus. Raises UserError as `documents`
        does."""
        if self.judgements is None:
            return []
        judged = {
            document
            for grades in self.judgements.values()
            for document, grade in grades.items()
            if grade > 0
        }
        return sorted(judged - {name for name, _ in self.documents()})


def read_collection(folder: Path) -> Collection:
    """Read queries and judgements. Raises UserError with file and line."""
    if not folder.is_dir():
        raise UserError(f"--test {folder}: expected a folder with {CORPUS} and {QUERIES}")
    queries: dict[str, str] = {}
    for where, cells in _rows(folder / QUERIES):
        name, text = _id(cells, where), cells.get("text")
        if name in queries:
            raise UserError(f"{where}: duplicate id {name!r}; rename one")
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: expected text in `text`, got {text!r:.60}")
        queries[name] = check_unicode(text, where)
    if not queries:
        raise UserError(f"{folder / QUERIES}: has no queries; give one per line")
    path = next((folder / name for name in JUDGED if (folder / name).is_file()), None)
    if path is None:
        return Collection(folder, queries, None)
    judgements = _judgements(path, queries)
    return Collection(
        folder, {name: queries[name] for name in queries if name in judgements}, judgements
    )


def _judgements(path: Path, queries: dict[str, str]) -> Judgements:
    """Read the grades of the queries that are in the collection and have a relevant document."""
    judgements: Judgements = {}
    for where, cells in _rows(path):
        grade = cells.get("score")
        try:
            query, document = str(cells["query-id"]), str(cells["corpus-id"])
            judgements.setdefault(query, {})[document] = int(str(grade))
        except KeyError:
            raise UserError(
                f"{where}: expected the columns query-id, corpus-id and score, got"
                f" {', '.join(map(repr, cells))}; correct the header"
            ) from None
        except ValueError:
            raise UserError(
                f"{where}: expected a whole number as score, got {grade!r:.60}"
            ) from None
    answered = {
        query: grades
        for query, grades in judgements.items()
        if query in queries and max(grades.values()) > 0
    }
    if not answered:
        raise UserError(
            f"{path}: no query of {QUERIES} has a document with a score above 0; check that the"
            " ids of both files are the same"
        )
    return answered


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield from ((where, cells) for where, cells, _ in named_rows(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the folder") from None


def _id(cells: dict[str, Any], where: str) -> str:
    name = cells.get("_id")
    if not isinstance(name, str | int) or name == "":
        raise UserError(f"{where}: expected an _id, got {name!r:.60}")
    return str(name)


def read_run(path: Path, depth: int) -> dict[str, list[str]]:
    """Read a TREC run: for each query the `depth` documents of highest score, best first.

    Lines are `query Q0 document rank score name`. Documents of equal score stay in the order of the
    file. Raises UserError with file and line.
    """
    scored: dict[str, list[tuple[float, str]]] = {}
    try:
        for number, line in enumerate(read_lines(path), 1):
            cells = line.split()
            if not cells:
                continue
            try:
                query, _, document, _, word, _ = cells
                if math.isnan(score := float(word)):  # NaN cannot be sorted
                    raise ValueError
                scored.setdefault(query, []).append((score, document))
            except ValueError:
                raise UserError(
                    f"{path}, line {number}: expected `query Q0 document rank score name`, got"
                    f" {line[:60]!r}"
                ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    return {
        # By score: trec_eval does not read the rank either.
        query: [name for _, name in sorted(rows, key=lambda row: -row[0])[:depth]]
        for query, rows in scored.items()
    }


def texts_of(
    collection: Collection, candidates: dict[str, list[str]], where: str
) -> dict[str, str]:
    """Return the texts of all candidates by id.

    where: the option that gave the candidates, for errors.
    Raises UserError if a query has no candidate, or a candidate is not in the corpus.
    """
    lacking = [name for name in collection.queries if not candidates.get(name)]
    if lacking:
        raise UserError(
            f"{where}: has no candidates for {len(lacking):,} of {len(collection.queries):,}"
            f" queries, such as {lacking[0]!r}; give a run over these queries"
        )
    listed = {name for query in collection.queries for name in candidates[query]}
    texts = {name: text for name, text in collection.documents() if name in listed}
    if missing := sorted(listed - set(texts)):
        raise UserError(
            f"{where}: lists {counted(len(missing), 'document')} not in {collection.folder}, such"
            f" as {missing[0]!r}; give a run over this corpus"
        )
    return texts
