"""A causal teacher's outputs over a few texts, and the command that imports captures of them."""

from pathlib import Path

import pytest
from click.testing import Result

from teachonce.feature_store.cli import main
from tests.end_to_end.support import Word, invoke
from tests.making.captures import Taught, taught_by
from tests.making.models import Teachers
from tests.making.texts import ENGLISH, RUSSIAN


@pytest.fixture(scope="session")
def teacher(tiny_teacher: Teachers) -> Path:
    """Save a GPT-2 of 4 layers."""
    return tiny_teacher("gpt2")


@pytest.fixture(scope="session")
def samples(teacher: Path) -> list[Taught]:
    return taught_by(teacher, [*ENGLISH, *RUSSIAN[:4]])


def run(*words: Word) -> Result:
    """Run `feature-store` with these words; a user error ends with its line."""
    return invoke(main, *words)


def imported(source: Path, target: Path, tokenizer: Word, *words: Word) -> str:
    """Import a capture and return the output."""
    result = run("import", source, target, "--tokenizer", tokenizer, *words)
    assert result.exit_code == 0, result.output
    verified = run("verify", target)
    assert verified.exit_code == 0 and "sound" in verified.output, verified.output
    return result.output


def refused(*words: Word, code: int = 1) -> str:
    """Run a command that must fail, and return its single error line."""
    result = run(*words)
    assert result.exit_code == code, result.output
    (line,) = [each for each in result.output.splitlines() if each.startswith("Error: ")]
    return line
