"""The hub of models and datasets: opens a repository to push to, adds licence and languages to the
metadata of a card (the YAML above its text), and explains the hub's errors in one line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isgenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from teachonce.support.errors import UserError, first_line
from teachonce.support.hub_client import bound_hub_client

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

Command = TypeVar("Command", bound=Callable[..., Any])
CARD = "README.md"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
REFUSED_CARD = "Invalid metadata in README.md."  # the start of an error of huggingface_hub
REMEDIES = {
    401: f"the hub does not accept the token: {LOG_IN}",
    403: f"the token may not write there: give a repository of its user, or {LOG_IN} to this"
    " repository",
    404: f"there is no such repository, or the token may not see it: check the name, {LOG_IN}",
    409: "another program is changing the repository: run the command again",
    413: "the hub refuses the size of the upload: check the free storage of your account",
    429: "the hub allows no more requests now: run the command again later",
}


def metadata_options(command: Command) -> Command:
    """Decorate a click callback with --language and --license, the metadata of a card."""
    for option in (
        click.option(
            "--language",
            multiple=True,
            help="Write this language into the card's metadata, such as en. Repeatable.  [default:"
            " unchanged]",
        ),
        click.option(
            "--license",
            help="Write this licence into the card's metadata, such as mit.  [default: unchanged]",
        ),
    ):
        command = option(command)
    return command


LICENSE = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*(\+\+)?")  # openrail++ is a licence
LANGUAGE = re.compile(r"[a-z]{2,3}|multilingual|code")
FRONT = "---\n"


def check_card_metadata(license: str | None, languages: Sequence[str]) -> None:
    """Raise UserError for a licence or language that the hub does not accept."""
    if license is not None and not LICENSE.fullmatch(license):
        raise UserError(
            f"--license {license}: expected the hub's name of a licence in lower case, such as mit,"
            " apache-2.0 or cc-by-4.0"
        )
    for code in languages:
        if not LANGUAGE.fullmatch(code):
            raise UserError(
                f"--language {code}: expected an ISO 639 code, such as en or ru, or multilingual"
            )


def with_metadata(card: str, license: str | None, languages: Sequence[str]) -> str:
    """Return a card with licence and languages in its metadata; existing values are replaced.

    Raises UserError as `check_card_metadata` does.
    """
    check_card_metadata(license, languages)
    new = {"license": license, "language": list(languages)}
    # JSON is YAML, too, and its quotes keep the language `no` (Norwegian) from being read as false.
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in new.items() if value]
    if not lines:
        return card
    front, text = "", card
    # Search from 3, the line break of the first ---, so that empty metadata are found as well.
    if card.startswith(FRONT) and (end := card.find(f"\n{FRONT}", 3)) > 0:
        front, text = card[4 : end + 1], card[end + 1 + len(FRONT) :]
    for name, value in new.items():
        if value:  # an entry may be a list over several lines
            front = re.sub(rf"^{name}:.*\n(?:[ -].*\n)*", "", front, flags=re.MULTILINE)
    return f"{FRONT}{front}{''.join(lines)}{FRONT}{text}"


def push_options(command: Command) -> Command:
    """Decorate a click callback with the options of all commands that push to the hub."""
    command = metadata_options(command)
    for option in (
        click.option(
            "--message", help="Commit with this message.  [default: the name of what is uploaded]"
        ),
        click.option(
            "--revision",
            metavar="BRANCH",
            help="Upload to this branch, which is created if it is missing.  [default: main]",
        ),
        click.option("--private", is_flag=True, help="Make a new repository private."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Repository:
    """Describes a repository of the hub with write access; `open_repository` returns one."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str | None = None

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of `HfApi` for this repository. Raises UserError if the hub refuses the
        request."""
        from huggingface_hub import HfApi

        where = {"repo_id": self.id, "repo_type": self.kind, "revision": self.revision}
        with hub_errors(self.id):
            result = getattr(HfApi(), method)(**where, **arguments)
            # A generator sends its requests while it is iterated: their errors belong in the block.
            return list(result) if isgenerator(result) else result

    def files(self) -> dict[str, RepoFile]:
        """Return name, size and hashes of all files of the repository, by name."""
        from huggingface_hub import RepoFile

        tree = self.call("list_repo_tree", recursive=True)
        return {str(file.path): file for file in tree if isinstance(file, RepoFile)}

    def commit(self, files: Mapping[str, Path | bytes], message: str) -> str:
        """Upload files, given by their names in the repository, as one commit; return its URL."""
        from huggingface_hub import CommitOperationAdd

        sent = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        info = self.call("create_commit", operations=sent, commit_message=message)
        return str(info.commit_url)


def open_repository(
    id: str, kind: Literal["model", "dataset"], private: bool = False, revision: str | None = None
) -> Repository:
    """Find a repository with write access, or create it, as `private` if set.

    Raises UserError for an invalid repository name, an empty revision, a missing token, a token
    without write access, and if the hub does not answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(id)
        parts = id.split("/")
    except HFValidationError:
        parts = []
    if len(parts) != 2:
        raise UserError(
            f"{id!r}: is not a valid name of a repository on the hub; give USER/NAME, of letters,"
            " digits, '-', '_' and '.'"
        )
    if revision == "":  # such as an unset shell variable: the hub would use main
        raise UserError("--revision: is empty; give the name of a branch, or leave it out for main")
    with hub_errors(id):
        if get_token() is None:
            raise UserError(f"{id}: there is no token for the hub; {LOG_IN}")
        api = HfApi()
        # None leaves it to the owner: an organisation's repositories may be private by default.
        api.create_repo(id, private=private or None, repo_type=kind, exist_ok=True)
        # `create_repo` also succeeds for an existing repository in which the token may not write.
        api.auth_check(id, repo_type=kind, write=True)
        if revision:
            api.create_branch(id, branch=revision, repo_type=kind, exist_ok=True)
    return Repository(id, kind, revision)


@contextmanager
def hub_errors(id: str) -> Iterator[None]:
    """Raise errors of the hub's client inside the `with` block as UserError, in one line about
    repository `id`."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    if is_offline_mode():
        raise UserError(
            f"{id}: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, so the hub is not used;"
            " unset it"
        )
    verbosity = get_verbosity()
    bound_hub_client()
    set_verbosity(logging.ERROR)  # without the client's warnings, such as of an empty commit
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client passes on transport errors of any type
        # An error with a file name is of this machine's disk, not of the network.
        if isinstance(error, OSError) and error.filename:
            raise
        raise UserError(f"{id}: {_explained(error)}") from error
    finally:
        set_verbosity(verbosity)


def _explained(error: BaseException) -> str:
    """Describe an error of the hub, or that it did not answer, and what to do."""
    title, _, problems = str(error).partition("\n")
    if title == REFUSED_CARD:  # its cause, HTTP status 400, does not name the entry
        return (
            f"the hub refuses the card ({' '.join(problems.split())}); correct the metadata at the"
            " top of README.md, or give another --license or --language"
        )
    while error.__cause__ is not None and not hasattr(error, "response"):
        error = error.__cause__
    if isinstance(error, UserError):  # raised by `hub_client` in a thread of an upload
        return str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return (
            f"the hub cannot be reached, or stopped answering ({type(error).__name__}:"
            f" {first_line(error)}); check the network, and run the same command again: it"
            " continues the upload"
        )
    answer = getattr(error, "server_message", None) or first_line(error)
    remedy = REMEDIES.get(status, "run the same command again later: it continues the upload")
    return f"the hub answered {status} ({' '.join(answer.split())}); {remedy}"
