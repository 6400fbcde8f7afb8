"""A store is pushed to a hub (a server on loopback) whole or not at all, with a card."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard, HfApi, snapshot_download

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import UserError, open_store
from teachonce.store.tools.push import push
from teachonce.store.tools.store_card import hub_datasets, store_card
from teachonce.store.tools.verify import verify
from tests.end_to_end.support import ok, says
from tests.hub_contents import NOBODY, READER, WRITER, Hub, wrong_in_card
from tests.hub_server import asked_by_this_process, serving
from tests.making.stores import features_of, make_store
from tests.store.tools.test_commands import refused, run

Made = Callable[..., Any]
NAME = "datasets/user/what"


@pytest.fixture(params=["lfs"])
def hub(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    with serving(tmp_path / "storage" if request.param == "xet" else None) as hub:
        asked_by_this_process(hub, monkeypatch, tmp_path / "home")
        yield hub


@pytest.mark.slow
@pytest.mark.parametrize("hub", ["xet", "lfs"], indirect=True)
def test_a_pushed_store_is_the_same_store(hub: Hub, store: Path, tmp_path: Path) -> None:
    (store / "parts" / "notes.txt").write_text("unknown")
    printed = ok(feature_store, "push", store, "user/what", "--private")
    assert f"{hub.address}/datasets/user/what/commit/" in printed
    repository = hub.repositories[NAME]
    assert repository.private
    came = snapshot_download("user/what", repo_type="dataset", local_dir=tmp_path / "here")
    assert not verify(f"{came}/a.zarr").problems
    assert open_store(f"{came}/a.zarr").manifest.content() == open_store(store).manifest.content()
    assert not (Path(came) / "a.zarr/parts/notes.txt").exists()
    sealed = [n for n, files in enumerate(repository.commits) if "a.zarr/zarr.json" in files]
    assert sealed == [len(repository.commits) - 1], "the root comes last"
    # The repeated command sends nothing, and the reader's changes to the card remain.
    before = len(repository.commits)
    again = run("push", store, "user/what", "--json")
    assert json.loads(again.stdout).keys() == {"repository", "commit"}
    assert "README.md of user/what is not changed" in again.stderr
    assert len(repository.commits) == before


def test_a_stopped_push_is_no_store_and_goes_on(
    hub: Hub, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fails = {"PUT /content/": 403}
    done = run("push", store, "user/what")  # and its progress bars
    assert done.exit_code == 1 and "Traceback" not in done.stderr
    says(done.stderr.splitlines()[-1], "Error: user/what: the hub answered 403", "hf auth login")
    hub.fails = {}
    sent = len(hub.contents)
    monkeypatch.chdir(store)
    push(".", "user/what")
    files = hub.repositories[NAME].files()
    assert "a.zarr/zarr.json" in files and len(hub.contents) > sent


def test_what_has_not_arrived_whole_is_not_sealed(
    hub: Hub, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_half(api: HfApi, *, ignore_patterns: list[str], **how: Any) -> Any:
        return upload_folder(api, ignore_patterns=[*ignore_patterns, "parts/*"], **how)

    upload_folder = HfApi.upload_folder
    monkeypatch.setattr(HfApi, "upload_folder", send_half)
    with pytest.raises(UserError, match=r"a.zarr/parts/\S+ arrived incomplete"):
        push(store, "user/what")
    assert "a.zarr/zarr.json" not in hub.repositories[NAME].files()


@pytest.mark.parametrize("store", ["zarr", "h5"], indirect=True)
def test_another_store_of_the_name_is_left_alone(hub: Hub, store: Path, tmp_path: Path) -> None:
    push(store, "user/what")
    before = dict(hub.repositories[NAME].files())
    other = tmp_path / "other" / store.name
    other.parent.mkdir()
    make_store(other, features_of(tier=None, views=1))
    with pytest.raises(UserError, match=f"has a different store {store.name}"):
        push(other, "user/what")
    assert hub.repositories[NAME].files() == before


def test_a_damaged_store_is_not_pushed(hub: Hub, store: Path) -> None:
    shard = max(store.rglob("c/0*/**/*"), key=lambda file: file.stat().st_size * file.is_file())
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(UserError, match="damaged"):
        push(store, "user/what")
    assert not hub.repositories[NAME].files()


def test_the_card_tells_what_the_store_is(made: Made) -> None:
    store = open_store(made("zarr", "default", "classification")[0])
    card = DatasetCard(store_card(store, "user/what", "a.zarr"))
    assert not wrong_in_card({"content": str(card)})
    data = vars(card.data)
    assert data["tags"] == ["teachonce", "distillation", "features"] and data["viewer"] is False
    assert data["size_categories"] == ["n<1K"] and data["task_categories"] == [
        "text-classification"
    ]
    assert 'open_store("hf://datasets/user/what/a.zarr")' in card.text
    for fact in ("teacher     tiny", store.manifest.content(), "hidden", "bytes per teacher token"):
        assert fact in card.text
    assert str(Path(store.path).parent) not in card.text
    store.identity["teacher"] = {"id": "."}  # teacher-dump --model .
    assert " 39.00" in store_card(store, "user/what", "a.zarr")


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("user/what", None, ("no token", "hf auth login", "HF_TOKEN")),
        ("user/what", NOBODY, ("401", "does not accept the token", "hf auth login")),
        ("user/what", READER, ("403", "may not write")),
        ("another/what", WRITER, ("403", "may not write")),
        ("what", WRITER, ("not a valid name of a repository", "USER/NAME")),
        ("a/b/c", WRITER, ("not a valid name of a repository", "USER/NAME")),
        ("user/wh at", WRITER, ("not a valid name of a repository", "USER/NAME")),
    ],
)
def test_who_may_not_push_is_reported_in_a_line(
    hub: Hub,
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    token: str | None,
    words: tuple[str, ...],
) -> None:
    asked_by_this_process(hub, monkeypatch, tmp_path / "home", token)
    line = refused("push", made("zarr")[0], name)
    says(line, name, *words)
    assert token is None or token not in line


def test_a_hub_that_is_not_there_is_reported_in_a_line(
    hub: Hub, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    says(refused("push", made("zarr")[0], "user/what"), "HF_HUB_OFFLINE", "unset it")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    line = refused("push", made("zarr")[0], "user/what")
    says(line, "user/what: the hub cannot be reached", "check the network")


def test_a_branch_is_made_for_the_copy(hub: Hub, made: Made) -> None:
    path = made("h5")[0]
    line = refused("push", path, "user/what", "--revision", "")
    says(line, "--revision: is empty", "leave it out for main")
    assert not hub.repositories
    ok(feature_store, "push", path, "user/what", "--revision", "next", "--message", "as it is")
    repository = hub.repositories[NAME]
    assert not repository.files() and path.name in repository.files("next")
    assert repository.messages[-1] == "as it is"


def test_a_card_names_the_datasets_of_all_corpora() -> None:
    def read(name: str) -> dict[str, Any]:
        return {"sources": [{"kind": "hf", "name": name, "revision": "1a"}, {"kind": "file"}]}

    merged = {"merged": [read("user/a"), read("user/b")]}
    grown = {**read("user/c"), "grown_from": {"content": "00", "corpora": [merged]}}
    assert sorted(hub_datasets(grown)) == ["user/a", "user/b", "user/c"]
    for corpus in ("words of another tool", {"merged": 5}, read("")):
        assert not list(hub_datasets(corpus))
