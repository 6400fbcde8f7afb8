"""A few commands in difficult environments; `python -m benchmarks.integrity hard-places` has
all."""

from pathlib import Path

import pytest

from tests.integrity.hard_places import ENDINGS, Case, given_in, problem_of, tried


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return given_in(tmp_path_factory.mktemp("hard"))


@pytest.mark.parametrize(
    ("name", "place", "amount"),
    [
        pytest.param("forget", "no inodes", 20, marks=pytest.mark.apart),
        pytest.param("export", "full disk", 5000, marks=pytest.mark.slow),
        ("page", "full disk", 0),
        ("convert", "another user", 0.5),
        pytest.param("mixed-vocab", "another user", 0.95, marks=pytest.mark.apart),
        ("student-train", "another user", 0.3),
        pytest.param("downstream mlm", "full disk", 400_000, marks=pytest.mark.apart),
        pytest.param("student-sweep", "random kill", 3.0, marks=pytest.mark.apart),
    ],
)
def test_a_line_or_the_whole(
    tmp_path: Path, given: Path, name: str, place: str, amount: float
) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    ending, problem = tried(folder, given, Case(name, place, amount))
    assert problem == "" and ending in (*ENDINGS, "no mounts allowed")


def test_what_is_wrong() -> None:
    assert problem_of("Error: no\n", 1) == problem_of("fine\n", 0) == ""
    assert problem_of("Traceback (most recent call last)", 1) == "a traceback"
    for said, code in (("", 1), ("Error: a\nError: b", 1), ("Error: a", 0), ("", -9)):
        assert problem_of(said, code)
