"""A server on loopback that implements the hub's protocol: the requests of huggingface_hub to
create repositories, upload files (as commits, git LFS and Xet), list them and download them."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from tests.hub_contents import (
    COMMITS,
    READER,
    USER,
    WRITER,
    Blob,
    Hub,
    Refused,
    Repository,
    fetched,
    git_oid,
    is_large,
    pointer,
    wrong_in_card,
    xet_hashes,
)

ROLES = {WRITER: "write", READER: "read"}
PAGE = 50  # entries per page of a tree; the hub's own pages are larger
TYPES = ("models", "datasets")
Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def serving(xet: Path | None = None) -> Iterator[Hub]:
    """Run a hub until the end of the block."""
    hub = Hub(xet=xet)

    class Bound(_Handler):
        pass

    Bound.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of a connection in order."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms after its headers

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b"".join(self._chunks())
        split = urlsplit(self.path)
        path, query = unquote(split.path, errors="strict"), parse_qs(split.query)
        request_line = f"{self.command} {path}"
        self.hub.requests.append(request_line)
        try:
            for prefix, status in self.hub.fails.items():
                if request_line.startswith(prefix):
                    raise Refused(status, message="the server of this test says so")
            with self.hub.lock:
                answer = Request(
                    self.hub, self.command, split.path, query, body, self._token()
                ).answer(self.headers.get("Range"))
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            payload = json.dumps({"error": refused.message}).encode()
            answer = refused.status, {k: v for k, v in headers.items() if v}, payload
        for prefix, twist in self.hub.twists.items():
            if request_line.startswith(prefix):
                self.close_connection = True
                twist(self, *answer)
                return
        self.send(*answer)

    def _chunks(self) -> Iterator[bytes]:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def end_headers(self) -> None:
        # Without this header a client may send its next request on a closing connection.
        if self.close_connection:
            self.send_header("Connection", "close")
        super().end_headers()

    def _token(self) -> str | None:
        header = self.headers.get("Authorization", "")
        return header.removeprefix("Bearer ") or None

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@dataclass
class Request:
    """Holds a request and the user who sent it."""

    hub: Hub
    method: str
    path: str
    query: Mapping[str, list[str]]
    body: bytes
    token: str | None

    def answer(self, span: str | None) -> Answer:
        """Find the requested file and respond; `span` is a range of bytes."""
        segments = [unquote(segment) for segment in self.path.strip("/").split("/")]
        if segments[0] == "content":
            return self._content(segments[1], span)
        if self.token is not None and self.token not in ROLES:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        match segments:
            case ["api", "whoami-v2"]:
                return _json(self._whoami())
            case ["api", "repos", "create"]:
                return self._create()
            case ["api", "validate-yaml"]:
                wrong = wrong_in_card(json.loads(self.body))
                # huggingface_hub reads the errors of a 400 alone
                return (400 if wrong else 200, *_json({"errors": wrong, "warnings": []})[1:])
            case ["api", kind, owner, name, *rest] if kind in TYPES:
                return self._api(f"{kind}/{owner}/{name}", rest)
            case ["datasets", owner, name, "resolve", revision, *path]:
                return self._resolve(f"datasets/{owner}/{name}", revision, "/".join(path), span)
            case ["datasets", owner, name, *batch] if batch == ["info", "lfs", "objects", "batch"]:
                return self._batch(f"datasets/{owner}/{name.removesuffix('.git')}")
            case [owner, name, "info", "lfs", "objects", "batch"]:
                return self._batch(f"models/{owner}/{name.removesuffix('.git')}")
            case [owner, name, "resolve", revision, *path]:
                return self._resolve(f"models/{owner}/{name}", revision, "/".join(path), span)
        raise Refused(404, "", f"this server knows no {self.path}")

    def _whoami(self) -> dict[str, Any]:
        role = ROLES.get(self.token or "")
        if role is None:
            raise Refused(401, "", "Invalid username or password.")
        access = {"displayName": "of a test", "role": role}
        return {
            "type": "user", "id": "1", "name": USER, "fullname": USER, "orgs": [],
            "auth": {"type": "access_token", "accessToken": access},
        }  # fmt: skip

    def _check_writer(self, owner: str) -> None:
        if self.token is None:
            raise Refused(401, "", "Invalid username or password.")
        if ROLES[self.token] != "write" or owner != USER:
            raise Refused(403, "", "You don't have the rights to do this under this namespace")

    def _create(self) -> Answer:
        options = json.loads(self.body)
        owner = options.get("organization") or USER
        self._check_writer(owner)
        kind = options.get("type", "model") + "s"
        name = f"{kind}/{owner}/{options['name']}"
        url = f"{self.hub.address}/{name.removeprefix('models/')}"
        if name in self.hub.repositories:
            return (
                409,
                {},
                json.dumps({"error": "You already created this repo", "url": url}).encode(),
            )
        self.hub.repositories[name] = Repository(options.get("visibility") == "private")
        return _json({"url": url, "name": name.partition("/")[2]})

    def _repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self.token is None):
            raise Refused(404 if self.token else 401, "RepoNotFound", "Repository not found")
        return repository

    def _api(self, name: str, rest: list[str]) -> Answer:
        repository = self._repository(name)
        match rest:
            case [] | ["revision", _]:
                return _json(self._info(name, repository, rest[1] if rest else "main"))
            case ["refs"]:
                branches = [
                    {"name": n, "ref": f"refs/heads/{n}", "targetCommit": COMMITS.format(c)}
                    for n, c in repository.branches.items()
                ]
                return _json({"branches": branches, "converts": [], "tags": []})
            case ["tree", revision, *path]:
                return self._tree(repository, revision, "/".join(path))
            case ["paths-info", revision]:
                paths = parse_qs(self.body.decode())["paths"]
                entries = {e["path"]: e for e in self._entries(repository.files(revision))}
                return _json([entries[path] for path in paths if path in entries])
            case ["auth-check", "write"]:
                self._check_writer(name.split("/")[1])
                return _json({})
            case ["branch", branch]:
                self._check_writer(name.split("/")[1])
                if branch in repository.branches:
                    raise Refused(409, "", "Reference already exists")
                repository.branches[branch] = repository.branches["main"]
                return _json({})
            case ["preupload", revision]:
                self._check_writer(name.split("/")[1])
                return self._preupload(repository, revision)
            case ["commit", revision]:
                self._check_writer(name.split("/")[1])
                return self._commit(name, repository, revision)
            case ["xet-write-token" | "xet-read-token", _] if self.hub.xet:
                url, never = f"local://{self.hub.xet}", 4102444800
                headers = {
                    "X-Xet-Cas-Url": url,
                    "X-Xet-Access-Token": "token",
                    "X-Xet-Token-Expiration": str(never),
                }
                body = {"casUrl": url, "accessToken": "token", "exp": never}
                return 200, headers, json.dumps(body).encode()
        raise Refused(404, "", f"this server knows no {self.path}")

    def _info(self, name: str, repository: Repository, revision: str) -> dict[str, Any]:
        number = repository.number(revision)
        files = repository.commits[number]
        return {
            "_id": "1", "id": name.partition("/")[2], "sha": COMMITS.format(number),
            "private": repository.private, "gated": False, "disabled": False, "tags": [],
            "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": path} for path in sorted(files)],
        }  # fmt: skip

    def _entries(self, files: Mapping[str, Blob]) -> list[dict[str, Any]]:
        """Describe all files of a commit, and the folders around them."""
        folders = {"/".join(p.split("/")[:n]) for p in files for n in range(1, p.count("/") + 1)}
        entries = [
            {"type": "directory", "path": path, "oid": git_oid(path.encode()), "size": 0}
            for path in folders
        ]
        for path, blob in files.items():
            entry = {"type": "file", "path": path, "oid": blob.oid, "size": blob.size}
            if blob.lfs:
                size = len(pointer(blob.sha256, blob.size))
                entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": size}
            entries.append(entry)
        return sorted(entries, key=lambda entry: str(entry["path"]))

    def _tree(self, repository: Repository, revision: str, folder: str) -> Answer:
        files, prefix = repository.files(revision), f"{folder}/" if folder else ""
        if folder and not any(path.startswith(prefix) for path in files):
            raise Refused(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        deep = self.query.get("recursive", ["false"])[0].lower() in ("1", "true")
        entries = [
            entry
            for entry in self._entries(files)
            if entry["path"].startswith(prefix)
            and (deep or "/" not in entry["path"].removeprefix(prefix))
        ]
        begin = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if begin + PAGE < len(entries):
            query = "&".join(f"{k}={quote(v[0])}" for k, v in self.query.items() if k != "cursor")
            url = f"{self.hub.address}{self.path}?{query}&cursor={begin + PAGE}"
            headers = {"Link": f'<{url}>; rel="next"'}
        return 200, headers, json.dumps(entries[begin : begin + PAGE]).encode()

    def _preupload(self, repository: Repository, revision: str) -> Answer:
        files, answers = repository.files(revision), []
        for file in json.loads(self.body)["files"]:
            large = is_large(base64.b64decode(file["sample"]), file["size"])
            old = files.get(file["path"])
            answers.append(
                {
                    "path": file["path"], "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": False, **({"oid": oid_of(old)} if old else {}),
                }
            )  # fmt: skip
        return _json({"files": answers})

    def _commit(self, name: str, repository: Repository, revision: str) -> Answer:
        changed: dict[str, Blob | None] = {}
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                data = base64.b64decode(value["content"])
                changed[value["path"]] = self.hub.keep(data, value["path"], lfs=False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.contents and not self._in_xet(value["oid"]):
                    raise Refused(400, "", f"LFS pointer of {value['path']} points to no file")
                size = value["size"]
                oid = git_oid(pointer(value["oid"], size))
                changed[value["path"]] = Blob(value["oid"], size, True, oid)
            elif key == "deletedFile":
                changed[value["path"]] = None
            else:
                raise Refused(400, "", f"this server knows no {key}")
        commit = self.hub.commit(repository, revision, changed, message)
        url = f"{self.hub.address}/{name.removeprefix('models/')}/commit/{commit}"
        return _json({"success": True, "commitOid": commit, "commitUrl": url})

    def _batch(self, name: str) -> Answer:
        self._check_writer(name.split("/")[1])
        self._repository(name)
        objects = []
        for item in json.loads(self.body)["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.contents:
                href = f"{self.hub.storage}/content/{item['oid']}"
                entry["actions"] = {"upload": {"href": href}}
            objects.append(entry)
        return _json({"transfer": "basic", "objects": objects})

    def _content(self, sha256: str, span: str | None) -> Answer:
        """Receive or return an LFS object. The address is sufficient, as the hub's are signed."""
        if self.method == "PUT":
            if hashlib.sha256(self.body).hexdigest() != sha256:
                raise Refused(400, "", "the content is not what was announced")
            self.hub.contents[sha256] = self.body
            return 200, {}, b""
        if sha256 not in self.hub.contents and self.hub.xet:
            self.hub.contents[sha256] = fetched(self.hub.xet, xet_hashes(self.hub.xet)[sha256])
        return _bytes(self.hub.contents[sha256], span, {"ETag": f'"{sha256}"'})

    def _resolve(self, name: str, revision: str, path: str, span: str | None) -> Answer:
        repository = self._repository(name)
        number = repository.number(revision)
        headers = {"X-Repo-Commit": COMMITS.format(number)}
        blob = repository.commits[number].get(path)
        if blob is None:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return 404, headers, b"Entry not found"
        if not blob.lfs:
            return _bytes(
                self.hub.contents[blob.sha256], span, {**headers, "ETag": f'"{blob.oid}"'}
            )
        headers |= {"X-Linked-Size": str(blob.size), "X-Linked-Etag": f'"{blob.sha256}"'}
        if self.hub.xet and (xet_hash := self._in_xet(blob.sha256)):
            headers |= {
                "X-Xet-Hash": xet_hash,
                "X-Xet-Refresh-Route": f"{self.hub.address}/api/{name}/xet-read-token/{revision}",
            }
        return 302, {**headers, "Location": f"{self.hub.storage}/content/{blob.sha256}"}, b""

    def _in_xet(self, sha256: str) -> str | None:
        """Return the Xet hash of a content that was sent by Xet."""
        return xet_hashes(self.hub.xet).get(sha256) if self.hub.xet else None


def oid_of(blob: Blob) -> str:
    """Return the hash that the client compares with its own file: for a file in LFS its SHA-256."""
    return blob.sha256 if blob.lfs else blob.oid


def _json(body: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


def _bytes(data: bytes, span: str | None, headers: Mapping[str, str]) -> Answer:
    """Respond with bytes, or with the requested range of them."""
    headers = {**headers, "Accept-Ranges": "bytes"}
    if span is None:
        return 200, headers, data
    begin, _, end = span.removeprefix("bytes=").partition("-")
    if not begin:
        first, last = max(0, len(data) - int(end)), len(data) - 1
    else:
        first, last = int(begin), min(int(end or len(data)), len(data) - 1)
    if first >= len(data):
        return 416, {**headers, "Content-Range": f"bytes */{len(data)}"}, b""
    content_range = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
    return 206, {**headers, **content_range}, data[first : last + 1]


def asked_by_this_process(
    hub: Hub, patch: pytest.MonkeyPatch, home: Path, token: str | None = WRITER
) -> None:
    """Direct the client in this process to the server, with an empty cache.

    The client reads its environment once, when it is imported. Separate processes therefore receive
    `Hub.environment`.
    """
    from huggingface_hub import constants
    from transformers.utils import hub as client_of_transformers

    # A cached session would use the hub of an earlier test or the network.
    patch.setattr(client_of_transformers, "_hf_api", None, raising=False)
    host = urlsplit(hub.address).hostname
    for name, value in {
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_URL_HOSTS": frozenset({str(host)}),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": hub.xet is None,
    }.items():
        patch.setattr(constants, name, value)
    for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        patch.delenv(proxy, raising=False)
    patch.delenv("HF_TOKEN", raising=False)
    if token:
        patch.setenv("HF_TOKEN", token)
