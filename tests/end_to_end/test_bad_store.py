"""A damaged, unfinished or invalid store gives one line with the file and the remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from teachonce.feature_store.cli import main as feature_store
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data import own_template
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.dump import dump
from tests.end_to_end.support import STUDENT, invoke, ok, refused, says, tree
from tests.making.decoders import save_decoder
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Teachers
from tests.making.stores import copied
from tests.store.dying import unsealed


def truncated(path: Path) -> None:
    target = path if path.suffix == ".h5" else path / "zarr.json"
    target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])


def truncated_array(path: Path) -> None:
    """Damage the metadata of an array, which opening does not read."""
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            del file["parts/1/view0/hidden/mean/values"]
    else:
        file = path / "parts/1/view0/hidden/mean/values/zarr.json"
        file.write_text(file.read_text()[:100])


def missing_part(path: Path) -> None:
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            del file["parts/1"]
    else:
        shutil.rmtree(path / "parts" / "1")


def flipped(path: Path) -> None:
    """Flip one bit in the stored states of every part."""
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            places = [
                part["view0/hidden/mean/values"].id.get_chunk_info(0).byte_offset
                for part in file["parts"].values()
            ]
        targets = [(path, place + 9) for place in places]
    else:
        files = path.glob("parts/*/view0/hidden/mean/values/c/*/*")
        targets = [(file, 9) for file in files]
    assert len(targets) > 1
    for file, place in targets:
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)


STORES: dict[Callable[[Path], None], tuple[str, ...]] = {
    truncated: ("not ", "`feature-store repair {}`"),
    truncated_array: ("parts/1/view0/hidden/mean/values", "`feature-store verify {}`"),
    missing_part: ("parts/1", "damaged", "`feature-store verify {}`"),
    flipped: ("parts/", "hidden/mean/values", "`feature-store verify {}`"),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, store: Path) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("both") / "copy.h5"
    ok(feature_store, "convert", store, path)
    return {"zarr": store, "h5": path}


@pytest.mark.parametrize("ext", ["zarr", "h5"])
@pytest.mark.parametrize("spoil", STORES, ids=lambda spoil: spoil.__name__)
def test_store(
    tmp_path: Path, both: dict[str, Path], spoil: Callable[[Path], None], ext: str
) -> None:
    copy = copied(both[ext], tmp_path / f"copy.{ext}")
    spoil(copy)
    before, out = tree(tmp_path), tmp_path / "student"
    given = ("--store", copy, "--vocab", "500", "--out", out, *STUDENT, "--steps", "99")
    line = refused(student_train, *given, "--loss", "hidden=1")
    says(line, f"copy.{ext}", *(words.format(copy) for words in STORES[spoil]))
    if spoil not in (flipped, truncated_array):  # found when the training reads it
        assert tree(tmp_path) == before
    result = invoke(feature_store, "verify", str(copy))
    assert result.exit_code == 1 and "Traceback" not in result.output
    says(result.stderr, f"copy.{ext}")
    assert "feature-store verify" not in result.output  # the training has just run


NO_STORES = {  # the content of the path, and its description in the line
    "nowhere.zarr": "teacher-dump",
    "nowhere.h5": "teacher-dump",
    "corpus.txt": "not a feature store (a text file); `teacher-dump --model MODEL --corpus {}",
    "empty.zarr": "if this was one, run `feature-store repair {}`",
    "torn.h5": "if this was one, run `feature-store repair {}`",
    "folder": "teacher-dump",
    "model": "(the folder of a model); give the store that a teacher wrote",
    "sweep": "(the folder of a sweep)",
    "a.h5.parts": "give {here}/a.h5",
    "a.zarr.aside-1": "(the quarantine folder of a repair)",
    "several": "(a folder with a.zarr, b.h5); give one of these",
}


@pytest.mark.parametrize("name", NO_STORES)
def test_no_store(tmp_path: Path, corpus: Path, name: str) -> None:
    shutil.copy(corpus, tmp_path)
    for folder in ("empty.zarr", "folder", "a.h5.parts", "a.zarr.aside-1", "several/a.zarr"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("torn.h5", "several/b.h5", "model/config.json", "sweep/runs.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    out, path = tmp_path / "student", tmp_path / name
    line = refused(student_train, "--store", path, "--vocab", "500", "--out", out)
    says(line, f"Error: {path}: ", NO_STORES[name].format(path, here=tmp_path))
    assert "nowhere" in name or "not a feature store" in line
    assert not out.exists()


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_torn_part_of_an_unfinished_store(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, ext: str
) -> None:
    """After the command in the line, the dump continues and gives the same store."""
    path = tmp_path / f"store.{ext}"
    options = dump_options(tiny_teacher("bert"), corpus, path)
    with unsealed():
        dump(options)
    torn = tmp_path / ("store.zarr/parts/1" if ext == "zarr" else "store.h5.parts/1.h5")
    file = torn / "zarr.json" if ext == "zarr" else torn
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(UserError) as caught:
        dump(options)
    says(str(caught.value), f"`feature-store repair {path}`, which quarantines part 1")
    says(ok(feature_store, "repair", path), "part 1: cannot be opened", "repeat the command")
    assert not torn.exists()
    dump(options)
    assert "sound" in ok(feature_store, "verify", path)


@pytest.mark.parametrize(
    ("attack", "limit"),
    [
        ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "took longer than 3 s"),
        ("{{ 'a' * 9999999999 }}", "needed more than 1 GB of memory"),
    ],
)
def test_a_hostile_template_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, limit: str
) -> None:
    """A store may have any template, also one that no dump has rendered."""
    if "longer" in limit:
        monkeypatch.setattr(own_template, "SECONDS", 3.0)
    model = save_decoder(tmp_path / "model", "Llama", bos="<end>")
    (model / "chat_template.jinja").write_text(attack)
    corpus = write_corpus(tmp_path / "texts.txt", 4)
    path = dumped(model, corpus, tmp_path / "a.zarr", attention="none", hidden="none")
    words = ("--store", path, "--student", "llama:32x1x2", "--vocab", "teacher", "--steps", 1)
    line = refused(student_train, *words, "--device", "cpu", "--out", tmp_path / "student")
    says(line, "a.zarr: chat_template.jinja in it", limit, "do not use it")
    assert not (tmp_path / "student").exists()
