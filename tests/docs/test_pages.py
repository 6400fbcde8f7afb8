"""README and the site are correct: options exist, command lines parse, links resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields

import click
import pytest

from teachonce.losses import Loss
from teachonce.student_train.losses.registry import loss_names
from teachonce.support.console import CONTEXT
from tests.docs.pages import COMMANDS, PAGES, ROOT, blocks_of, leaf, ours

OTHERS = {  # options of other programs that the pages name
    "docs/coming-from.md": {
        "--teacher_name", "--alpha_ce", "--alpha_mlm", "--alpha_cos", "--mlm_smoothing",
        "--target-layer-ids",
    },
    "docs/guide/processes.md": {"--standalone", "--nproc-per-node", "--no-python"},
    "docs/guide/recipes.md": {"--size", "--work", "--jobs", "--data", "--teacher", "--dry-run"},
    "docs/guide/captures.md": {"--target-layer-ids", "--dataloader-type"},
    "docs/start.md": {"--index-url"},
    "docs/guide/dump.md": {"--no-deps"},
    "docs/guide/share.md": {"--repo-type", "--local-dir", "--logdir"},
    "README.md": {"--ask"},
}  # fmt: skip
HELP = {"--help", "--version"}


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from options(each)


@pytest.mark.parametrize("page", PAGES)
def test_options_that_a_page_names_exist(page: str) -> None:
    if page in ("docs/format.md", "docs/architecture.md"):
        pytest.skip("includes a file of the project")
    known = {option for command in COMMANDS.values() for option in options(command)} | HELP
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", (ROOT / page).read_text("utf-8")))
    others = OTHERS.get(page, set())
    assert named - others <= known
    assert others <= named, "no longer named there"


@pytest.mark.parametrize("page", PAGES)
def test_each_line_of_a_shell_parses(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in {"sh", "python", "toml", "text", "json"}, "not a known language"
        for words in block.commands() if block.language == "sh" else ():
            if found := ours(words):
                command, rest = leaf(*found)
                try:
                    with suppress(click.exceptions.Exit):  # --recipe list
                        command.make_context(words[0], list(rest), **CONTEXT)
                except click.BadParameter as error:  # a file that is not here
                    assert not isinstance(error, click.MissingParameter), words
                    assert "does not exist" in error.format_message(), (words, error)


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_to_them(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)", text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert missing == []


def test_every_page_is_in_a_table_of_contents() -> None:
    pages = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES if "docs/" in page}
    tables = (
        block
        for page in pages
        for block in re.findall(
            r"^```{toctree}\n(.*?)^```$", (ROOT / f"docs/{page}.md").read_text("utf-8"), re.M | re.S
        )
    )
    assert pages - {"index"} == set(re.findall(r"^([\w/-]+)$", "\n".join(tables), re.MULTILINE))


def test_the_page_of_defaults_has_the_commands_own() -> None:
    """Each value in the column of the page is contained in the default of the option's help."""
    rows = 0
    for part in re.split(r"(?m)^## ", (ROOT / "docs/defaults.md").read_text("utf-8")):
        name, _, text = part.partition("\n")
        for option, value in re.findall(r"(?m)^\| `(--[\w-]+)`.*? \| `(.+?)` \|", text):
            command = COMMANDS[name]
            (parameter,) = (each for each in command.params if option in each.opts)
            record = parameter.get_help_record(click.Context(command))
            shown = re.search(r"\[(?:env var.*; )?default: (.+)\]$", record[1] if record else "")
            assert shown, option
            for word in value.split(","):
                assert re.search(rf"(?<![\w=]){re.escape(word)}(?![\w.])", shown[1]), (option, word)
            rows += 1
    assert rows > 8


def test_every_loss_has_an_equation() -> None:
    text = (ROOT / "docs/losses.md").read_text("utf-8").partition("## Equations")[2]
    named = set(re.findall(r"`([a-z-]+)`", text.partition("## What")[0]))
    assert set(loss_names()) <= named


def test_every_optional_field_of_a_loss_is_documented() -> None:
    text = (ROOT / "docs/losses.md").read_text("utf-8").partition("| field |")[2]
    documented = set(re.findall(r"^\| `(\w+)` \|", text.partition("\n## ")[0], re.MULTILINE))
    optional = {field.name for field in fields(Loss) if field.default is not MISSING}
    assert documented == optional - {"parameter", "value"}  # only built-in losses have numbers
