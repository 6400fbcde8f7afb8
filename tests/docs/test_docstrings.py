"""The docstring of a function or class begins with a verb (CONTRIBUTING.md, Habits)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

Documented = ast.FunctionDef | ast.ClassDef
ROOT = Path(__file__).parents[2]
FOLDERS = ("align", "store", "student_train", "teacher_dump", "teachonce")
NO_VERBS = re.compile(
    "A|An|The|Whether|What|Which|Where|How|Of|In|With|For|By|Each|All|Every|One|Two|Both|None|Its"
    "|Names|Numbers|Bytes|Paths?|Keys|Texts|Files|Arrays|Logits|Size|Width|Raises|This|Everything"
    "|Settings|Options|Keyword|Shape|Objects|Errors|Fields|Costs|Residuals|Words|Tokens|Workers"
    "|Sizes|[a-z].*"
)
"""First words of docstrings that are, or begin, a noun or a dtype."""


def summaries() -> Iterator[tuple[str, str]]:
    """Yield the place of each function and class with a docstring, and its first word."""
    for file in sorted(each for folder in FOLDERS for each in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", text.split()[0].strip(",.:;`")


def test_a_docstring_begins_with_a_verb() -> None:
    found = list(summaries())
    assert len(found) > 2000
    wrong = [f"{place}: {word}" for place, word in found if NO_VERBS.fullmatch(word)]
    assert wrong == []
