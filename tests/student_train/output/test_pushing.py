"""A student is pushed to a hub, a server on loopback, and loads from there by its name."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, AutoTokenizer

from teachonce.store import FeatureStore
from teachonce.student_export.formats.registry import FORMATS
from teachonce.student_export.run_code import LIBRARIES
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.output.card import model_card
from teachonce.student_train.output.pushing import _is_sent
from tests.end_to_end.support import STUDENT, Word, ok, refused, report_of, says
from tests.hub_contents import READER, Hub
from tests.hub_server import asked_by_this_process, serving
from tests.student_train.support import same_weights


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with serving(tmp_path_factory.mktemp("storage")) as hub:
        yield hub


@pytest.fixture(autouse=True)
def online(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked_by_this_process(hub, monkeypatch, tmp_path / "home")
    yield
    hub.fails = {}


def words(store: FeatureStore, out: Path) -> tuple[Word, ...]:
    return ("--store", store.path, "--vocab", "450", "--steps", "2", "--out", out, *STUDENT)


@pytest.fixture(scope="module")
def student(hub: Hub, store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a student with a command that also pushes it."""
    folder = tmp_path_factory.mktemp("pushed")
    with pytest.MonkeyPatch.context() as patch:
        asked_by_this_process(hub, patch, folder / "home")
        more = ("--push-to-hub", "user/mine", "--license", "mit", "--language", "en")
        printed = ok(student_train, *words(store, folder / "mine"), *more)
    assert f"pushed    {hub.address}/user/mine/commit/" in printed
    return folder / "mine"


def test_a_pushed_student_loads_by_its_name(student: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained("user/mine")
    same_weights(model, AutoModelForMaskedLM.from_pretrained(student))
    tokenizer = AutoTokenizer.from_pretrained("user/mine")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(student).get_vocab()


def test_what_is_sent_has_nothing_of_this_machine(hub: Hub, student: Path) -> None:
    files = hub.repositories["models/user/mine"].files()
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert not [name for name in files if name.startswith(("tensorboard", "checkpoints", "."))]
    assert "metrics.jsonl" not in files
    for name in ("README.md", "training.json"):
        sent = hub.read("models/user/mine", name).decode()
        assert str(student.parents[1]) not in sent and "/tmp" not in sent, name
    report = json.loads(hub.read("models/user/mine", "training.json"))
    assert report["settings"]["store"] == "store.zarr" and report["result"]["steps"] == 2
    card = ModelCard(hub.read("models/user/mine", "README.md").decode())
    card.validate()
    data = vars(card.data)
    assert (data["license"], data["language"]) == ("mit", ["en"])  # given with the training
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "fill-mask")
    assert data["tags"] == ["distillation", "teachonce"] and data["base_model"] is None
    (entry,) = {(each.task_type, each.dataset_type) for each in data["eval_results"]}
    assert entry == ("fill-mask", "text")
    assert 'pipeline("fill-mask", "user/mine")' in card.text
    assert '"this folder"' in (student / "README.md").read_text()


@pytest.fixture
def copied(student: Path, tmp_path: Path) -> Path:
    """Copy the student to a folder that a test may change, next to an unrelated file."""
    (tmp_path / "id_rsa").write_text("PRIVATEKEY")
    return Path(shutil.copytree(student, tmp_path / "copied"))


def texts_of(hub: Hub, name: str) -> list[bytes]:
    """Return all files of a repository except the weights, of which the hub has only chunks."""
    return [
        hub.read(name, each) for each in hub.repositories[name].files() if "model.s" not in each
    ]


def test_what_does_not_belong_to_a_student_is_not_sent(hub: Hub, copied: Path) -> None:
    (copied / "notes.txt").symlink_to(copied.parent / "id_rsa")
    (copied / "vault").symlink_to(copied.parent)
    (copied / "my.key").write_text("PRIVATEKEY")
    (copied / "1_Pooling").mkdir()
    (copied / "1_Pooling" / "config.json").write_text("{}")
    words = ("--license", "apache-2.0", "--language", "ru", "--language", "en")
    ok(student_train, "push", copied, "user/chosen", *words)
    data = ModelCard(hub.read("models/user/chosen", "README.md").decode()).data
    assert (data["license"], data["language"]) == ("apache-2.0", ["ru", "en"])
    files = hub.repositories["models/user/chosen"].files()
    assert files.keys() == {
        "README.md", "1_Pooling/config.json", "config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.json",
    }  # fmt: skip
    assert not any(b"PRIVATEKEY" in text for text in texts_of(hub, "models/user/chosen"))


def test_an_export_is_sent_with_the_programs_that_its_card_names() -> None:
    for name in LIBRARIES:
        for file in (*FORMATS[name].names.values(), f"answer_{name}.py"):
            assert _is_sent(file), file
    assert not _is_sent("answer_mine.py")


@pytest.mark.parametrize("name", ["vocab.txt", "README.md", "1_Dense/model.safetensors"])
def test_a_link_in_place_of_a_file_is_refused(hub: Hub, copied: Path, name: str) -> None:
    link = copied / name
    if "/" in name:
        link.parent.symlink_to(copied.parent)
        (copied.parent / link.name).write_text("PRIVATEKEY")
    else:
        link.unlink(missing_ok=True)
        link.symlink_to(copied.parent / "id_rsa")
    says(refused(student_train, "push", copied, "user/linked"), name, "is a link or behind one")
    assert not hub.repositories["models/user/linked"].files()


def test_secrets_of_urls_are_not_sent(hub: Hub, copied: Path) -> None:
    secret = "https://me:SECRETPW@host:8/a.zarr?X-Amz-Signature=SECRETPW"
    report = report_of(copied)
    report["settings"] |= {"store": secret, "others": [secret.replace("a.zarr", "b.zarr")]}
    report["start"] = [f"cut out of {secret}, then trained"]
    model = AutoModelForMaskedLM.from_pretrained(copied)
    assert "SECRETPW" not in model_card(report, None, model)
    (copied / "training.json").write_text(json.dumps(report))
    link = "[a film](https://films.org/watch?v=7), [mine](https://me:SECRETPW@host/a)"
    (copied / "README.md").open("a").write(link)
    ok(student_train, "push", copied, "user/quiet")
    assert not any(b"SECRETPW" in text for text in texts_of(hub, "models/user/quiet"))
    sent = json.loads(hub.read("models/user/quiet", "training.json"))
    assert sent["settings"]["store"] == "https://host:8/a.zarr"
    assert sent["start"] == ["cut out of https://host:8/a.zarr then trained"]
    card = hub.read("models/user/quiet", "README.md")
    assert b"[a film](https://films.org/watch?v=7), [mine](https://host/a)" in card


def test_a_finished_folder_is_pushed_without_training(hub: Hub, student: Path) -> None:
    more = ("--private", "--message", "once more")
    printed = ok(student_train, "push", student, "user/again", *more)
    assert "/user/again/commit/" in printed
    repository = hub.repositories["models/user/again"]
    assert repository.private and repository.messages[-1] == "once more"
    assert repository.files().keys() == hub.repositories["models/user/mine"].files().keys()


def test_what_is_no_finished_student_is_refused(student: Path, tmp_path: Path) -> None:
    says(refused(student_train, "push", tmp_path, "user/x"), "expected a model with a card")
    report = report_of(student)
    del report["result"]
    (tmp_path / "training.json").write_text(json.dumps(report))
    says(refused(student_train, "push", tmp_path, "user/x"), "not finished", "--resume")
    says(refused(student_train, "--store", "s.zarr", "--private"), "--private", "--push-to-hub")
    line = refused(student_train, "--store", "s.zarr", "--license", "Apache 2.0")
    says(line, "--license Apache 2.0: expected the hub's name of a licence")


def test_a_card_that_the_hub_refuses_is_one_line(hub: Hub, copied: Path) -> None:
    line = refused(student_train, "push", copied, "user/wrong", "--license", "apache2")
    says(line, "user/wrong: the hub refuses the card (- \"license\" with value 'apache2'")
    says(line, "correct the metadata at the top of README.md, or give another --license")


def test_rights_are_asked_for_before_the_training(
    hub: Hub, store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_by_this_process(hub, monkeypatch, tmp_path / "home", READER)
    line = refused(student_train, *words(store, tmp_path / "out"), "--push-to-hub", "user/mine")
    says(line, "user/mine: the hub answered 403", "hf auth login")
    assert not (tmp_path / "out").exists()


def test_a_student_that_could_not_be_sent_is_finished(
    hub: Hub, student: Path, store: FeatureStore, tmp_path: Path
) -> None:
    spaced = tmp_path / "my student"
    shutil.copytree(student, spaced)
    hub.fails = {"POST /api/models/user/mine/commit": 503}
    again = (*words(store, spaced), "--resume", "--push-to-hub", "user/mine")
    (spaced / "README.md").open("a").write("changed\n")
    line = refused(student_train, *again)
    says(line, "user/mine: the hub answered 503", f"student-train push '{spaced}' user/mine")
    hub.fails = {}
    assert "there is nothing to do" in ok(student_train, *again)
    assert hub.read("models/user/mine", "README.md").endswith(b"changed\n")
