"""Hubs that misbehave, and the metadata of a card.

- If a hub misbehaves, a command ends with one line, within limits of time and memory, and writes
  nothing outside of the cache. `tests.integrity.hostile_hubs` tests the whole commands.
- Licence and languages are entries of a card's metadata, which the hub's own class parses.
"""

import itertools
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfFileSystem, ModelCard, close_session, get_session, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from teachonce.checkpoints.names import resolve_model
from teachonce.store import open_store
from teachonce.store.containers import network
from teachonce.support import hub_client
from teachonce.support.errors import UserError
from teachonce.support.hub import Repository, with_metadata
from teachonce.teacher_dump.corpus.documents import Corpus
from tests.hub_contents import Hub
from tests.hub_server import asked_by_this_process, serving
from tests.twisted_hub import ANSWERS

BOUNDED = ("endless", "long", "dense", "drip", "drip_headers", "circle", "to_file", "wait")
OUTSIDE = ("outside", "commit_outside", "none_outside")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a hub with a model and a data set; the client waits at most a second."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(100))
    monkeypatch.setattr(hub_client, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(hub_client, "MAX_UNDECLARED", 2**24)
    monkeypatch.setattr(network, "FIRST_PATIENCE", 0.3)
    with serving() as hub:
        asked_by_this_process(hub, monkeypatch, tmp_path / "a" / "b" / "c" / "d" / "e" / "home")
        for kind in ("models", "datasets"):
            hub.add(f"{kind}/user/m", made)
        HfFileSystem.clear_instance_cache()
        close_session()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, before[1]))  # if a limit fails
        yield hub
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        close_session()


def refused(hub: Hub, begin: str, twist: str) -> str:
    """Resolve a model while requests with this beginning get a twist; return the error line."""
    hub.twists = {begin: ANSWERS[twist]}
    first = time.monotonic()
    with pytest.raises(UserError) as found:
        resolve_model("user/m")
    assert time.monotonic() - first < 20
    assert any(each.startswith(begin) for each in hub.requests)
    return str(found.value)


def test_a_hub_that_behaves_is_read(hub: Hub) -> None:
    assert resolve_model("user/m").revision
    assert set(Repository("user/m", "dataset").files()) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("twist", BOUNDED)
@pytest.mark.parametrize("begin", ["GET /user/m/resolve/main/config", "GET /content"])
def test_a_file_has_bounds(
    hub: Hub, begin: str, twist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has limits of size and redirects, also if the hub stores it at another address."""
    if twist == "circle":  # a busy machine needs more than a second for all redirects
        monkeypatch.setattr(hub_client, "ANSWER_SECONDS", 60.0)
    line = refused(hub, begin, twist)
    assert "\n" not in line and ("redirects endlessly" in line) == (twist == "circle")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2**25


def test_a_slow_file_is_reported_with_its_seconds(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message reports the seconds that passed, not the limit of the first bytes."""
    clock = itertools.count(0, 100)
    monkeypatch.setattr(hub_client, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(UserError, match=r"sends too slowly: [0-9]+ bytes in 100 s"):
        resolve_model("user/m")


@pytest.mark.parametrize("pause", ["301", "9" * 18, "9" * 19, "9" * 5000])
def test_a_long_pause_is_refused(hub: Hub, pause: str) -> None:
    hub.twists = {"GET": lambda handler, *_: handler.send(429, {"Retry-After": pause}, b"")}
    with pytest.raises(UserError, match=rf"requests a pause of {pause:.20} s \(HTTP 429\)"):
        resolve_model("user/m")


@pytest.mark.parametrize("twist", OUTSIDE)
def test_names_stay_in_the_cache(hub: Hub, twist: str, tmp_path: Path) -> None:
    line = refused(hub, "HEAD /user/m", twist)
    assert "outside" in line and "which is not a name" in line
    assert not [path for path in tmp_path.rglob("*") if "outside" in path.name]


@pytest.mark.parametrize(
    "twist", [*BOUNDED[:5], "wait", "pages", "moved_pages", "nested", "names", "sizes"]
)
def test_a_list_has_bounds(hub: Hub, twist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "MAX_PAGES", 20)
    hub.twists = {"GET /api/datasets/user/m/tree": ANSWERS[twist]}
    repository = Repository("user/m", "dataset")
    if twist in ("names", "sizes"):  # compared with the bytes sent, and not used otherwise
        assert set(repository.files()) == {{"names": "../../outside", "sizes": "[]"}[twist]}
        return
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        repository.files()


def test_a_list_that_was_read_in_part_can_be_read_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partly read list can be read again after its time limit. A list without an end still has
    its limits, and so does a list whose next page arrives after the time limit."""
    now = [0.0]
    monkeypatch.setattr(hub_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(hub_client, "MAX_PAGES", 5)
    hub.twists = {"GET /api/datasets/user/m/tree": ANSWERS["moved_pages"]}
    hub_client.bound_hub_client()
    for _ in range(3):
        found = get_session().get(f"{hub.address}/api/datasets/user/m/tree/main")
        now[0] += 1 + hub_client.PAGES_SECONDS
    with pytest.raises(UserError, match="sends a list that is too long"):
        get_session().get(found.links["next"]["url"])
    with pytest.raises(UserError, match="sends a list that is too long"):
        Repository("user/m", "dataset").files()


@pytest.mark.parametrize("twist", ["long", "wait", "circle", "list", "nested"])
def test_a_store_and_a_corpus_end_in_a_line(hub: Hub, twist: str) -> None:
    hub.twists = {"GET /api/datasets/user/m": ANSWERS[twist]}
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        open_store("hf://datasets/user/m/a.zarr")
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        list(Corpus.open(["hf:user/m"]))


def test_no_more_bytes_come_than_a_range_has(hub: Hub) -> None:
    """If a hub sends the whole object instead of the requested range of bytes, it is refused."""
    hub.twists = {"GET /datasets": ANSWERS["long"]}
    with pytest.raises(UserError, match="expected at most 2;"):
        HfFileSystem().cat_file("datasets/user/m/config.json", 0, 1)


def test_the_clients_of_a_caller_stay() -> None:
    made: list[Any] = []

    def own_factory() -> Any:
        made.append(default_client_factory())
        return made[-1]

    set_client_factory(own_factory)
    try:
        hub_client.bound_hub_client()
        hub_client.bound_hub_client()
        assert get_session() is made[0] and len(made[0].event_hooks["response"]) == 2
    finally:
        set_client_factory(default_client_factory)


CARDS = (
    "# Mine\n",
    "---\nlibrary_name: transformers\n---\n\n# Mine\n",
    "---\nlanguage:\n- de\n- fr\nlicense: mit\nlibrary_name: transformers\n---\n# Mine\n",
)


@pytest.mark.parametrize("card", CARDS)
def test_entries_are_added_or_replaced(card: str) -> None:
    found = ModelCard(with_metadata(card, "apache-2.0", ["ru", "en"]))
    assert (found.data["license"], found.data["language"]) == ("apache-2.0", ["ru", "en"])
    assert found.text.strip() == "# Mine"
    assert found.data.get("library_name") == ("transformers" if "lib" in card else None)
    assert with_metadata(card, None, ()) == card
    only = ModelCard(with_metadata(card, None, ["ru"])).data
    assert only["language"] == ["ru"] and only.get("license") == ("mit" if "mit" in card else None)


def test_what_the_hub_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match="--license Apache 2.0: expected the hub's name of a lic"):
        with_metadata("", "Apache 2.0", ())
    for language in ("english", "en-US"):  # the hub does not accept BCP 47
        with pytest.raises(UserError, match=f"--language {language}: expected an ISO 639 code"):
            with_metadata("", None, [language])
    assert "openrail++" in with_metadata("", "openrail++", ())
