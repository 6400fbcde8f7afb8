"""The list of benchmarks contains each command, and each command that a page names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as listing
from tests.making.environment import printed_by

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / page
        for page in ("README.md", "CONTRIBUTING.md", "Makefile", "benchmarks/RESULTS.md")
    ),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]


def test_help_lists_all_with_a_sentence_and_runs_none() -> None:
    printed = printed_by(sys.executable, "-m", "benchmarks", "--help")
    found = listing.benchmarks()
    assert {"demo", "reading", "integrity", "reproduce", "gpu", "latency", "reliability"} <= {
        *found
    }
    assert len(found) >= 12
    for name, shows in found.items():
        assert re.search(f"^ +{re.escape(name)} +{re.escape(shows)}$", printed, re.MULTILINE)
        assert shows.endswith((".", "?")), name


def test_those_named_run_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(words: list[str]) -> subprocess.CompletedProcess[bytes]:
        assert words[:2] == [sys.executable, "-m"]
        ran.append(words[2])
        return subprocess.CompletedProcess(words, 3 if words[2] == "benchmarks.gpu" else 0)

    monkeypatch.setattr("benchmarks.__main__.subprocess.run", run)
    assert CliRunner().invoke(listing.main, ["latency", "speed.stepping"]).exit_code == 0
    assert ran == ["benchmarks.latency", "benchmarks.speed.stepping"]
    ran.clear()
    failed = CliRunner().invoke(listing.main, ["gpu", "latency"])
    assert failed.exit_code == 1 and "benchmarks.gpu ended with exit code 3" in failed.output
    assert ran == ["benchmarks.gpu"]
    for words, named in ((["nonsense"], "nonsense"), ([], "Missing argument 'NAME...'")):
        assert named in CliRunner().invoke(listing.main, words).output


def test_commands_that_pages_name_are_there() -> None:
    sections = [part for page in PAGES for part in page.read_text("utf-8").split("\n## ")]
    named = {
        name
        for section in sections
        if "\nScript: removed; " not in section
        for name in re.findall(r"-m benchmarks\.([a-zA-Z_.]*\w)", section)
    }
    assert len(named) > 10
    assert named <= listing.benchmarks().keys() | {"NAME"}


def test_removed_scripts_are_named_with_the_commit_that_has_them() -> None:
    lines = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8").splitlines()
    removed = [line for line in lines if line.startswith("Script: removed")]
    form = r"Script: removed; last at commit [0-9a-f]{7}, `(benchmarks/[a-z_/]+\.py)`\."
    for line in removed:
        assert re.fullmatch(form, line), line


def test_each_of_the_twenty_figures_is_in_the_section_that_it_links_to() -> None:
    _, *parts = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8").split("\n## ")
    sections = {part.partition("\n")[0]: part for part in parts}
    rows = [
        line.strip("| ").split(" | ")
        for line in sections["Twenty figures"].splitlines()
        if line.startswith("| ") and "](#" in line
    ]
    assert len(rows) == 20
    for _, figure, _, links in rows:
        anchors = dict(re.findall(r"\[(.*?)\]\(#(.*?)\)", links))
        assert anchors == {
            title: re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in anchors
        }
        linked = "".join(sections[title] for title in anchors)
        for number in re.findall(r"\d[\d.,]*\d(?: ± [\d.]+)?", re.sub("`.*?`", "", figure)):
            assert number in linked, (links, number)
