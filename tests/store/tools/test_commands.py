"""The commands: info, verify, convert, show, push.

- The commands: info, verify, convert, show.
- A store is pushed to a hub (a server on loopback) whole or not at all, with a card.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import DatasetCard, HfApi, snapshot_download
from tokenizers import Tokenizer, models

from teachonce.feature_store.cli import main
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.tools.copy import convert
from teachonce.store.tools.push import push
from teachonce.store.tools.store_card import hub_datasets, store_card
from teachonce.store.tools.verify import verify
from teachonce.support.errors import UserError
from tests.end_to_end.support import ok, says
from tests.end_to_end.support import refused as refused_by
from tests.hub_contents import NOBODY, READER, WRITER, Hub, wrong_in_card
from tests.hub_server import asked_by_this_process, serving
from tests.making.stores import (
    IDENTITY,
    LABELS,
    SMALL,
    Made,
    begin,
    features_of,
    make_part,
    make_store,
    put_part,
    unfinished,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


refused = partial(refused_by, main)


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_info(made: Made, ext: str) -> None:
    path, parts = made(ext)
    tokens = sum(int(part.token_counts.sum()) for part in parts)
    text = run("info", path).output
    assert f"36 sequences, {tokens:,} teacher tokens, 3 parts" in text and "topk:5" in text
    about = json.loads(run("info", path, "--json").output)
    assert about["tokens"] == tokens and about["teacher_weights"] == 2
    assert about["bytes_per_token_encoded"]["view0/hidden/mean"] == 39
    assert "no such file" in refused("info", "none.h5")


def test_bytes_of_states_of_any_name(tmp_path: Path) -> None:
    """Zarr has shards in a folder `c`, and a hidden state may have this name, too."""
    sizes = []
    for name in ("m", "c"):
        make_store(tmp_path / f"{name}.zarr", replace(SMALL, hidden=(name,)), parts=1)
        about = json.loads(run("info", tmp_path / f"{name}.zarr", "--json").output)
        sizes.append(about["bytes_by_feature"][f"view0/hidden/{name}"])
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_info_separates_features_and_teacher(tmp_path: Path, ext: str) -> None:
    features = features_of(codec="exact", tier=None)
    sizes = []
    for name, rows in (("small", 8), ("large", 100_000)):
        path = tmp_path / f"{name}.{ext}"
        weights = {"embeddings": np.random.default_rng(0).normal(size=(rows, 4))}
        make_store(path, features, parts=1, weights=weights)
        about = json.loads(run("info", path, "--json").output)
        sizes.append(about["bytes_on_disk"])
        whole = path.stat().st_size if ext == "h5" else bytes_of(path)
        assert sizes[-1]["total"] == whole
        assert sizes[-1]["features"] / about["tokens"] == pytest.approx(
            about["feature_bytes_per_token_on_disk"], abs=0.01
        )
        if ext == "zarr":
            assert sizes[-1]["features"] == bytes_of(path / "parts")
    small, large = sizes
    assert small["features"] == pytest.approx(large["features"], rel=0.01)
    assert large["teacher"] - small["teacher"] > 500_000  # float16, which hardly compresses
    each = f"{large['features'] / about['tokens']:,.2f} bytes per teacher token"
    assert each in run("info", path).output


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_info_shows_the_corpus_to_people(tmp_path: Path) -> None:
    novels = {"kind": "file", "name": "novels.txt", "bytes": 12345, "sha256": "ab" * 32}
    wiki = {"kind": "hf", "name": "wiki", "config": None, "split": "train", "revision": "f1"}
    corpus = {
        "merged": [
            {"text_column": "body", "sources": [novels, wiki]},
            {"text_column": None, "sources": [{"kind": "file", "name": f"{n}.txt"} for n in "123"]},
        ]
    }
    make_store(
        tmp_path / "a.h5", features_of(tier=None), parts=1, identity=IDENTITY | {"corpus": corpus}
    )
    text = run("info", tmp_path / "a.h5").output
    assert "novels.txt (bytes 12,345, sha256 abababababab, column body)" in text
    assert "wiki (split train, revision f1, column body)" in text and "{" not in text
    assert all(f"{n}.txt" in text for n in "123")


def test_info_of_an_unfinished_store(tmp_path: Path) -> None:
    features = features_of(tier=None)
    unfinished(tmp_path / "a.h5", features)
    line = refused("info", tmp_path / "a.h5")
    assert "is not finished (1 part)" in line and line.endswith("with --allow-partial")
    line = refused("export", tmp_path / "a.h5", tmp_path / "a", "--to", "parquet")
    assert "is not finished (1 part)" in line and "partial" not in line  # it has no such option
    assert "(version 1, writing)" in run("info", "--allow-partial", tmp_path / "a.h5").output
    about = json.loads(run("info", "--allow-partial", "--json", tmp_path / "a.h5").output)
    assert about["bytes_on_disk"]["features"] > about["tokens"] * 37


def test_verify(made: Made, copy: Callable[..., Path]) -> None:
    result = run("verify", made("h5")[0])
    assert result.exit_code == 0 and "sound: 3 parts" in result.output
    path = copy("zarr")
    shard = path / "parts/2/token/end/c/0"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert "damaged: 1 problem" in refused("verify", path)
    text = run("verify", path).output
    assert "part 2: array token/end cannot be read" in text
    assert "feature-store verify" not in text  # it has just run


@pytest.mark.parametrize(("one", "other"), [("zarr", "h5"), ("h5", "zarr")])
def test_convert_between_formats(made: Made, tmp_path: Path, one: str, other: str) -> None:
    source, target = made(one)[0], tmp_path / f"b.{other}"
    assert "36 sequences" in run("convert", source, target).output
    first, second = open_store(source), open_store(target)
    assert first.identity == second.identity and first.features == second.features
    for a, b in zip(first.manifest.parts, second.manifest.parts, strict=True):
        assert a.counts == b.counts and a.number == b.number
        assert [e.sha256 for e in a.arrays.values()] == [e.sha256 for e in b.arrays.values()]
    assert run("verify", target).exit_code == 0
    line = refused("convert", source, target)
    assert "exists already" in line and "give another name, or remove what is there" in line


@pytest.mark.parametrize("name", ("text.h5", "text.zarr", "folder.h5", "folder.zarr"))
def test_convert_onto_what_is_no_store(made: Made, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    target.mkdir() if name.startswith("folder") else target.write_text("mine")
    line = refused("convert", made("h5")[0], target)
    assert "nothing was changed" in line and "another name, or remove what is there" in line


@pytest.mark.parametrize("tier", ("topk", "head", "tagging"))
@pytest.mark.parametrize("codec", ("default", "small"))
def test_recoding_equals_writing_with_the_codec(
    made: Made, tmp_path: Path, tier: str, codec: str
) -> None:
    source, target = made("h5", "exact", tier)[0], tmp_path / "b.h5"
    assert run("convert", source, target, "--codec", codec).exit_code == 0
    recoded, direct = open_store(target), open_store(made("h5", codec, tier)[0])
    assert recoded.manifest.parts == direct.manifest.parts
    assert "cannot become 'exact'" in refused("convert", target, "c.h5", "--codec", "exact")


def test_recoding_in_two_steps_adds_the_errors(made: Made, tmp_path: Path) -> None:
    source, _ = made("h5", "default")
    run("convert", source, tmp_path / "b.h5", "--codec", "small")
    before, after = open_store(source)[5].views[0], open_store(tmp_path / "b.h5")[5].views[0]
    maps = before.attention["mean"]
    changed = np.abs(maps - after.attention["mean"])
    assert changed.max() > 0 and (changed <= 5 * np.sqrt(maps) / 255 + 1e-4).all()
    assert (before.logits.ids == after.logits.ids).all()
    mean, deviation = open_store(source).calibration["mean"]
    peak = np.abs((before.hidden["mean"] - mean) / deviation).max(axis=1, keepdims=True)
    change = np.abs(before.hidden["mean"] - after.hidden["mean"]) / deviation
    assert change.max() > 0 and (change <= 1.002 * peak / 14).all()


def stop(items: Sequence[Any]) -> Any:
    yield items[0]
    raise KeyboardInterrupt


ZEROS = dict.fromkeys(("mean", "groups2.1"), (np.zeros(37), np.ones(37)))
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "calibration": ({"calibration": ZEROS}, "calibration/hidden/mean/mean differs"),
    "weights": ({"weights": {"pooler.bias": np.zeros(4)}}, "teacher/weights/pooler.bias differs"),
    "parts": ({}, "of part 0 differs"),
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("codec", ("default", "small"))
def test_a_stopped_conversion_does_not_go_on_with_another_store(
    made: Made, tmp_path: Path, other: str, codec: str
) -> None:
    """A stopped conversion does not continue with another store of equal identity."""
    changes, printed = OTHER[other]
    source, target = made("zarr")[0], tmp_path / "b.h5"
    writer = begin(tmp_path / "other.h5", features_of(), **changes)
    for number in range(3):
        put_part(writer, number, make_part(features_of(), number + (other == "parts")))
    writer.seal()
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "other.h5", target, codec, progress=stop)
    before = target.read_bytes()
    line = refused("convert", source, target, "--codec", codec)
    assert f"started from another store than {source}" in line and printed in line
    assert target.read_bytes() == before
    convert(tmp_path / "other.h5", target, codec)
    assert run("verify", target).exit_code == 0


@pytest.mark.parametrize("tier", ("topk", "sample", "head"))
def test_show(tmp_path: Path, tier: str) -> None:
    features = features_of(tier=tier)
    vocabulary = {"[UNK]": 0} | {f"piece{n}": n for n in range(1, 1000)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    parts = make_store(tmp_path / "a.h5", features, parts=1, files=files)
    result = CliRunner().invoke(
        main, ["show", str(tmp_path / "a.h5"), "2", "--view", "1"], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    assert parts[0].texts[2] in result.output.replace("\n", "")
    record = open_store(tmp_path / "a.h5")[2]
    size = f"{len(record.token_ids)} teacher tokens"
    assert f"sequence 2 of 12: document 1 from character 7, {size}" in result.output
    lines = [line for line in result.output.splitlines() if "piece" in line and "text" not in line]
    assert len(lines) == len(record.token_ids)
    for line, token, mask in zip(lines, record.token_ids, record.views[1].mask, strict=True):
        assert f" piece{token} " in line and (" x " in line) == mask
    path = tmp_path / "a.h5"
    last = run("show", path, -1)
    assert "sequence 11 of 12" in last.output and last.output == run("show", path, 11).output
    for number, words in ((99, "no sequence 99"), (-13, "no sequence -13; it has 0..11")):
        assert words in refused("show", tmp_path / "a.h5", number)
    assert "--vew: no such option" in refused("show", tmp_path / "a.h5", 0, "--vew", 1)
    assert "no view 5" in refused("show", tmp_path / "a.h5", 0, "--view", 5)


def test_a_task_is_shown_by_name(made: Made) -> None:
    texts, tokens = made("h5", "default", "classification"), made("zarr", "default", "tagging")
    for (path, parts), kind in ((texts, "classification"), (tokens, "tagging")):
        assert f"{kind}, 4 labels: dull, bright, надо, [x]" in run("info", path).output
        about = json.loads(run("info", path, "--json").output)
        assert about["features"]["task"] == {"kind": kind, "labels": list(LABELS)}
        assert ("view0/tags" in about["bytes_per_token_encoded"]) == (kind == "tagging")
        assert run("verify", path).exit_code == 0
        for number in range(6):
            said = run("show", path, number, "--view", 1).output
            part, record = parts[0], open_store(path)[number]
            if kind == "classification":
                name = LABELS[part.gold[number]] if part.gold[number] >= 0 else "none"
                best = LABELS[part.task[1][number].argmax()]
                assert f"label {name}, the teacher predicts {best} " in " ".join(said.split())
            else:
                assert record.tags is not None
                names = [LABELS[tag] for tag in record.tags if tag >= 0]
                assert all(name in said for name in names) and "│ tag" in said.replace("┃", "│")


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


def test_the_card_shows_what_the_store_is(made: Made) -> None:
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
