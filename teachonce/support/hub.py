"""The hub of models and datasets: a repository to push to, and a line for what goes wrong there."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from teachonce.support.errors import UserError, first_line

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

Command = TypeVar("Command", bound=Callable[..., Any])
CARD = "README.md"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
REMEDIES = {
    401: f"the hub does not know the token: {LOG_IN}",
    403: f"the token may not write there: {LOG_IN}, as somebody to whom the name belongs",
    404: f"there is no such repository, or the token may not see it: check the name, {LOG_IN}",
    409: "somebody else changes the repository: type the command again",
    413: "the hub takes no more at once: check the room that is left there",
    429: "the hub asks to wait: type the command again later",
}


def push_options(command: Command) -> Command:
    """Decorate a click callback that pushes with the options of every such command."""
    for option in (
        click.option("--message", help="Message of the commit.  [default: tells what is sent]"),
        click.option(
            "--revision", metavar="BRANCH", help="Branch, made if there is none.  [default: main]"
        ),
        click.option("--private", is_flag=True, help="Make a new repository private."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Repository:
    """A repository of the hub that may be written, which `open_repository` gives."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str | None = None

    def files(self, folder: str) -> dict[str, int]:
        """Return the sizes of all files in a folder of it, by their names in that."""
        from huggingface_hub import HfApi, RepoFile
        from huggingface_hub.errors import EntryNotFoundError

        with telling(self.id):
            try:
                found = HfApi().list_repo_tree(
                    self.id, folder, recursive=True, revision=self.revision, repo_type=self.kind
                )
                return {
                    file.path.removeprefix(f"{folder}/"): file.size
                    for file in found
                    if isinstance(file, RepoFile)
                }
            except EntryNotFoundError:
                return {}

    def has(self, name: str) -> bool:
        """Tell whether it has a file."""
        from huggingface_hub import HfApi

        with telling(self.id):
            return HfApi().file_exists(self.id, name, revision=self.revision, repo_type=self.kind)

    def holds(self, name: str, path: Path) -> bool | None:
        """Tell whether its file `name` has the bytes of that at `path`; None where it has none."""
        from huggingface_hub import HfApi, RepoFile

        with telling(self.id):
            found = HfApi().get_paths_info(
                self.id, [name], revision=self.revision, repo_type=self.kind
            )
        if not found or not isinstance(found[0], RepoFile):
            return None
        if found[0].lfs:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == found[0].lfs.sha256
        data = path.read_bytes()  # not in LFS, so it is small
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == found[0].blob_id

    def add(self, files: list[CommitOperationAdd], message: str) -> str:
        """Send files as one commit; return its address."""
        from huggingface_hub import HfApi

        with telling(self.id):
            return (
                HfApi()
                .create_commit(
                    self.id,
                    files,
                    commit_message=message,
                    revision=self.revision,
                    repo_type=self.kind,
                )
                .commit_url
            )

    def add_folder(self, path: str, name: str, leave_out: list[str], message: str) -> None:
        """Send a folder under a name, in as many commits as its size takes; what is there is not
        sent again. `leave_out` has patterns of names."""
        from huggingface_hub import HfApi

        with telling(self.id):
            HfApi().upload_folder(
                repo_id=self.id,
                folder_path=path,
                path_in_repo=name,
                ignore_patterns=leave_out,
                commit_message=message,
                revision=self.revision,
                repo_type=self.kind,
            )


def open_repository(
    id: str, kind: Literal["model", "dataset"], private: bool = False, revision: str | None = None
) -> Repository:
    """Find a repository that may be written, or make it.

    `private` says how a new one is made. Raises UserError where the name is none, there is no
    token, it may not write, or the hub gives no answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(id)
        parts = id.split("/")
    except HFValidationError:
        parts = []
    if len(parts) != 2:
        raise UserError(
            f"{id!r}: is no name of a repository on the hub; give USER/NAME, of letters, digits,"
            " '-', '_' and '.'"
        )
    with telling(id):
        if get_token() is None:
            raise UserError(f"{id}: there is no token for the hub; {LOG_IN}")
        api = HfApi()
        api.create_repo(id, private=private or None, repo_type=kind, exist_ok=True)
        api.auth_check(id, repo_type=kind, write=True)
        if revision:
            api.create_branch(id, branch=revision, repo_type=kind, exist_ok=True)
    return Repository(id, kind, revision)


@contextmanager
def telling(id: str) -> Iterator[None]:
    """Turn what the hub's client raises into a UserError of one line about repository `id`."""
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        raise UserError(
            f"{id}: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, so the hub is not asked;"
            " unset it"
        )
    try:
        with _quiet():
            yield
    except UserError:
        raise
    except Exception as error:  # the client passes errors of its transport on, of any kind
        if isinstance(error, OSError) and error.filename:  # of this machine's disk
            raise
        raise UserError(f"{id}: {_told(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client from warnings, which are no news here, and from bars where none belong."""
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    level, barless = get_verbosity(), are_progress_bars_disabled()
    set_verbosity(logging.ERROR)
    if not barless and not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        set_verbosity(level)
        if not barless:
            enable_progress_bars()


def _told(error: BaseException) -> str:
    """Tell what the hub answered, or that it did not, and what to do."""
    while error.__cause__ is not None and not hasattr(error, "response"):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return (
            f"the hub cannot be reached, or gave up ({type(error).__name__}: {first_line(error)});"
            " check the network, and type the same command again: what was sent is kept"
        )
    words = getattr(error, "server_message", None) or first_line(error)
    remedy = REMEDIES.get(status, "type the same command again later: what was sent is kept")
    return f"the hub answered {status} ({' '.join(words.split())}); {remedy}"
