"""Contents of the tests' hub: repositories, their commits, and file contents by hash."""

import hashlib
import re
import struct
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

USER = "user"
WRITER, READER, NOBODY = "hf_writer", "hf_reader", "hf_nobody"
"""Tokens: of USER, of USER without the right to write, and one that the hub does not know."""
REGULAR = 2**14  # limit in bytes of a text file outside LFS; the hub's own is larger
COMMITS = "0123456789abcdef" * 2 + "{:08x}"
KNOWN = {
    "base_model_relation": "adapter|merge|quantized|finetune",
    "language": "[a-z]{2,3}|code|multilingual",
    "license": "apache-2.0|mit|cc-by(-nc)?(-sa)?-4.0|gpl-3.0|openrail[+][+]|other|unknown",
    "pipeline_tag": "feature-extraction|fill-mask|sentence-similarity|text-classification"
    "|text-generation|text-ranking|token-classification",
    "size_categories": "n<1K|1K<n<10K|10K<n<100K|100K<n<1M|1M<n<10M|10M<n<100M|100M<n<1B|n>1T",
    "task_categories": "text-classification|token-classification",
}
"""Some values of a card's entries, of those that huggingface/hub-docs lists (August 2026) in
modelcard.md, docs/hub/model-cards.md and docs/hub/repositories-licenses.md."""
VERIFIED, HASHED = 0x80000000, 0x40000000  # flags of a file in a shard of Xet


class Refused(Exception):
    """Represents an error response with the hub's error code and message."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class Blob:
    """Describes a file of a commit: SHA-256 of its content, whether it is in LFS, and git's
    hash."""

    sha256: str
    size: int
    lfs: bool
    oid: str


@dataclass
class Repository:
    """Stores the commits of a repository, each with all of its files, and the heads of its
    branches."""

    private: bool = False
    commits: list[dict[str, Blob]] = field(default_factory=lambda: [{}])
    messages: list[str] = field(default_factory=lambda: ["initial commit"])
    branches: dict[str, int] = field(default_factory=lambda: {"main": 0})

    def number(self, revision: str) -> int:
        """Return the number of the commit that a branch or hash means."""
        if revision in self.branches:
            return self.branches[revision]
        for number in range(len(self.commits)):
            if COMMITS.format(number) == revision:
                return number
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def files(self, revision: str = "main") -> dict[str, Blob]:
        return self.commits[self.number(revision)]


@dataclass
class Hub:
    """Stores the server's repositories. Tests add repositories and inspect the uploads."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)  # by `models/user/name`
    contents: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    # Folder of the content-addressed storage; without it the server uses LFS.
    xet: Path | None = None
    requests: list[str] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)  # status of requests that begin so
    twists: dict[str, Any] = field(default_factory=dict)  # see `tests.twisted_hub`; by their start
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def storage(self) -> str:
        """Return the address of contents. It has another host, to which the client sends no
        token."""
        return self.address.replace("127.0.0.1", "localhost")

    def environment(self, home: Path, token: str | None = WRITER) -> dict[str, str]:
        """Return the environment for a process that uses this server, with an empty cache."""
        variables = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        variables |= {} if self.xet else {"HF_HUB_DISABLE_XET": "1"}
        return variables | ({"HF_TOKEN": token} if token else {})

    def add(self, name: str, folder: Path) -> Repository:
        """Put a folder into a new repository, such as `models/user/name`."""
        repo = self.repositories[name] = Repository()
        files = {p: (folder / p).read_bytes() for p in relative_files(folder)}
        self.commit(repo, "main", {path: self.keep(data, path) for path, data in files.items()})
        return repo

    def keep(self, data: bytes, path: str, lfs: bool | None = None) -> Blob:
        """Store the content of a file."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.contents[sha256] = data
        if lfs is None:
            lfs = is_large(data[:512], len(data))
        return Blob(sha256, len(data), lfs, git_oid(pointer(sha256, len(data)) if lfs else data))

    def commit(
        self,
        repository: Repository,
        branch: str,
        changed: Mapping[str, Blob | None],
        message: str = "",
    ) -> str:
        """Add a commit and return its hash. A file whose value is None is removed."""
        files = {**repository.files(branch), **changed}
        repository.commits.append({path: blob for path, blob in files.items() if blob})
        repository.messages.append(message)
        repository.branches[branch] = len(repository.commits) - 1
        return COMMITS.format(repository.branches[branch])

    def read(self, name: str, path: str) -> bytes:
        """Return a file of the newest commit of a repository."""
        return self.contents[self.repositories[name].files()[path].sha256]


def relative_files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """Return the pointer file that git stores for a file in LFS."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


def is_large(sample: bytes, size: int) -> bool:
    """Return whether a file belongs in LFS: a binary or large file does."""
    try:
        sample.decode()
    except UnicodeDecodeError as error:
        return size > REGULAR or error.end < len(sample)  # a character may be cut at the end
    return size > REGULAR or b"\0" in sample


def wrong_in_card(request: Mapping[str, str]) -> list[dict[str, str]]:
    """Describe the first error in the metadata of a card, as the hub does before it accepts a
    card."""
    _, begin, text = request["content"].partition("---\n")
    data = yaml.safe_load(text.partition("\n---\n")[0]) if begin else None
    if not isinstance(data, dict):
        return [{"message": "the card has no metadata"}]
    lists = ("tags", "size_categories", "task_categories", "datasets", "source_datasets")
    texts = ("library_name", "pipeline_tag", "base_model", "pretty_name")
    wrong = [name for name in lists if name in data and not _are_texts(data[name])]
    wrong += [name for name in texts if name in data and not isinstance(data[name], str)]
    errors = [{"message": f'"{name}" is of the wrong type'} for name in wrong]
    for name, pattern in KNOWN.items():
        values = data.get(name, [])
        values = values if isinstance(values, list) else [values]
        errors += [
            {"message": f'"{name}" with value {value!r} is not valid'}
            for value in values
            if not re.fullmatch(pattern, str(value))
        ]
    return errors


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def xet_hashes(storage: Path) -> dict[str, str]:
    """Return the Xet hashes of all files in a content-addressed storage, by their SHA-256.

    A shard has a header of 48 bytes, followed by rows of 48 bytes. The first row of a file has its
    hash, its flags and its number of segments. Then come the segments, the same number of
    verification rows if a flag says so, and the SHA-256. A row of ones ends the list.
    """
    hashes = {}
    for shard in storage.rglob("shards/*.mdb"):
        data, at = shard.read_bytes(), 48
        while (row := struct.unpack_from("<4Q2I", data, at))[0] != 2**64 - 1:
            *words, flags, pieces = row
            at += 48 * (1 + pieces * (2 if flags & VERIFIED else 1))
            if flags & HASHED:
                sha256 = _hexadecimal(struct.unpack_from("<4Q", data, at))
                hashes[sha256] = _hexadecimal(words)
                at += 48
    return hashes


def fetched(storage: Path, xet_hash: str) -> bytes:
    """Return a file of a content-addressed storage, assembled from its chunks."""
    from hf_xet import XetFileInfo, XetSession

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with XetSession().new_file_download_group(endpoint=f"local://{storage}") as group:
            group.start_download_file(XetFileInfo(xet_hash, None), str(path))
        return path.read_bytes()


def _hexadecimal(words: Iterable[int]) -> str:
    return "".join(f"{word:016x}" for word in words)
