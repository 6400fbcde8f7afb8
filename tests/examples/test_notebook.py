"""The notebook runs cell by cell, and the stored outputs are the outputs of each cell."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples.loading import EXAMPLES
from tests.making.dumps import write_corpus

NOTEBOOK = EXAMPLES / "three_students.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last line if the line is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.slow
def test_three_students(
    tiny_teacher: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("altair")
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.txt", 40)
    small = {"TEACHER": tiny_teacher("bert"), "CORPUS": "corpus.txt", "STEPS": 4, "VOCAB": "450"}
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells), "strip the outputs"
    names: dict[str, Any] = {}
    run_cell(code[0], names)
    assert names.keys() >= small.keys()
    names |= small
    store, record, students, curves, sizes = (run_cell(each, names) for each in code[1:])
    assert "<tr><th>size</th>" in store._repr_html_()
    assert "of document 0" in record._repr_html_()
    assert {row["folder"] for row in students} == {"text-alone", "states", "modernbert"}
    assert students._repr_html_().count("<tr>") == 4
    points = curves.to_dict()["data"]["values"]
    assert {point["student"] for point in points} == {"text-alone", "states", "modernbert"}
    assert (
        all(point["nats"] > 0 for point in points) and len(sizes.to_dict()["data"]["values"]) == 3
    )
