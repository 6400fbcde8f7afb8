"""Reads the candidates of a first stage: a run in the format of TREC."""

from __future__ import annotations

from pathlib import Path

from teachonce.downstream.search.beir import Collection
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.text_files import read_lines


def read_run(path: Path, depth: int) -> dict[str, list[str]]:
    """Read `query Q0 document rank score name` lines: of each query the `depth` of highest score,
    best first; of equal ones in the order of the file.

    Raises UserError with file and line.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    try:
        for number, line in enumerate(read_lines(path), 1):
            cells = line.split()
            if not cells:
                continue
            try:
                query, _, document, _, score, _ = cells
                found.setdefault(query, []).append((float(score), document))
            except ValueError:
                raise UserError(
                    f"{path}, line {number}: expected `query Q0 document rank score name`, got"
                    f" {line[:60]!r}"
                ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    return {
        query: [name for _, name in sorted(rows, key=lambda row: -row[0])[:depth]]
        for query, rows in found.items()
    }


def texts_of(
    collection: Collection, candidates: dict[str, list[str]], where: str
) -> dict[str, str]:
    """Take the texts of all candidates from the corpus, by id.

    Raises UserError where a query has no candidate, and where one is not in the corpus; `where`
    says who named them.
    """
    lacking = [name for name in collection.queries if not candidates.get(name)]
    if lacking:
        raise UserError(
            f"{where}: has no candidates for the query {lacking[0]!r}, and {len(lacking) - 1} more;"
            " give a run over these queries"
        )
    wanted = {name for query in collection.queries for name in candidates[query]}
    texts = {name: text for name, text in collection.documents() if name in wanted}
    if strangers := sorted(wanted - set(texts)):
        raise UserError(
            f"{where}: the document {strangers[0]!r}, and {len(strangers) - 1} more, are not in"
            f" {collection.folder}; give a run over this corpus"
        )
    return texts
