"""A resumed dump compares the existing parts with the parts that it would write now."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from safetensors.torch import load_file, save_file

from teachonce.store import StoreWriter, UserError, open_store
from teachonce.store.tools.verify import verify
from teachonce.teacher_dump.job.dump import EARLY_ARGUMENTS, dump
from teachonce.teacher_dump.job.option_values import Shard
from teachonce.teacher_dump.job.sharing import share
from teachonce.teacher_dump.job.versions import check_numbers
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.windows import sequences
from teachonce.teacher_dump.windows.cutting import iter_windows
from tests.end_to_end import dumping
from tests.making.dumps import dump_options, write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.stores import copied, features_of, make_store


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Any:
    """Return the options of a dump in its own folder that was killed just before it sealed."""
    root = tmp_path_factory.mktemp("killed")
    corpus = write_corpus(root / "c.txt", 60)

    def seal(writer: StoreWriter) -> None:
        raise Killed

    @cache
    def made(ext: str) -> Any:
        options = dumping.options(tiny_teacher("bert"), corpus, root / ext / f"s.{ext}")
        (root / ext).mkdir()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(StoreWriter, "seal", seal)
            dump(options)
        return options

    return made


@pytest.fixture
def stopped(tmp_path: Path, killed: Any) -> Any:
    """Return the options of a copy of such a dump, which the test may change."""

    def make(ext: str) -> Any:
        options = killed(ext)
        folder = shutil.copytree(options.out.parent, tmp_path / "copy")
        return dataclasses.replace(options, out=folder / options.out.name)

    return make


def lose(out: Path, part: int) -> None:
    if out.is_dir():
        shutil.rmtree(out / f"parts/{part}")
    else:
        Path(f"{out}.parts/{part}.h5").unlink()


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_parts_of_other_sequences_are_refused(
    stopped: Any, monkeypatch: pytest.MonkeyPatch, ext: str
) -> None:
    """Parts of other sequences are refused: other tokenizers could store a sequence twice."""
    options = stopped(ext)
    lose(options.out, 2)

    def others(*words: Any, **named: Any) -> Iterator[Any]:
        return (w for n, w in enumerate(iter_windows(*words, **named)) if not 2 <= n <= 5)

    with monkeypatch.context() as patch:
        patch.setattr(sequences, "iter_windows", others)
        with pytest.raises(UserError, match=r"part 0, published before, has other sequences"):
            dump(options)
    assert StoreWriter.peek(options.out) is not None
    done = dump(options)
    assert done.resumed_parts == done.parts - 1 and verify(options.out).problems == []
    documents = [record.document for record in open_store(options.out)]
    assert documents == sorted(documents)


def test_another_cut_of_the_same_tokens_is_refused(
    stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = stopped("zarr")

    def moved(*words: Any, **named: Any) -> Iterator[Any]:
        for window in iter_windows(*words, **named):
            yield dataclasses.replace(window, offsets=np.where(window.offsets > 0, 1, 0))

    monkeypatch.setattr(sequences, "iter_windows", moved)
    monkeypatch.setattr("teachonce.teacher_dump.job.parts.version", lambda name: "9.9")
    with pytest.raises(UserError, match=r"token/begin differs; teachonce was .* and is 9\.9"):
        dump(options)


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_a_calibration_that_was_altered_is_refused(stopped: Any, ext: str) -> None:
    """A changed calibration is refused, since new parts would be encoded with another mean."""
    options = stopped(ext)
    lose(options.out, 1)
    name = "calibration/hidden/mean/mean"
    if ext == "zarr":
        array = zarr.open_array(options.out / name)
        array[3] = np.asarray(array[3]) + 1
    else:
        with h5py.File(options.out, "r+") as file:
            file[name][3] += 1
    with pytest.raises(UserError, match=f"{name} does not match its checksum"):
        dump(options)


def begun_by(out: Path, changed: Callable[[dict[str, Any]], object]) -> None:
    """Change the root attributes of an unfinished store to what another release would write."""
    path = out / "zarr.json"
    node = json.loads(path.read_text())
    changed(node["attributes"])
    path.write_text(json.dumps(node))


def test_another_release_of_transformers_goes_on(stopped: Any) -> None:
    """A dump continues after an update of transformers, also from an old release whose
    `config_hash` covers all of config.json and the version."""
    options, said = stopped("zarr"), list[str]()
    lose(options.out, 2)
    with closing(open_store(options.out, allow_partial=True)) as store:
        config = store.teacher_settings("config.json")
    others = config | {"transformers_version": "5.0.0", "a_field_of_then": True}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()

    def older(attributes: dict[str, Any]) -> None:
        attributes["identity"]["teacher"]["config_hash"] = digest
        attributes["software"]["transformers"] = "5.0.0"

    begun_by(options.out, older)
    done = dump(options, said.append)
    assert done.resumed_parts == done.parts - 1 and verify(options.out).problems == []
    (line,) = (line for line in said if line.startswith("versions  "))
    assert f"transformers was 5.0.0 and is {version('transformers')}; 16 sequences of" in line
    assert open_store(options.out).identity["teacher"]["config_hash"] == digest
    assert dump(options).finished_before


def test_other_forms_of_the_hashes_go_on(stopped: Any) -> None:
    """A dump continues if `config_hash` covers all of config.json, or if tokenizer.json has another
    form but gives equal tokens."""
    options = stopped("zarr")
    with closing(open_store(options.out, allow_partial=True)) as store:
        digest = hashlib.sha256(store.teacher_file("config.json")).hexdigest()

    def older(attributes: dict[str, Any]) -> None:
        attributes["identity"]["teacher"]["config_hash"] = digest
        attributes["identity"]["tokenizer_hash"] = "12" * 32

    begun_by(options.out, older)
    with pytest.raises(UserError, match="the model's tokenizer is '121212"):
        dump(options)
    begun_by(options.out, lambda found: found["software"].update(tokenizers="0.20.0"))
    assert dump(options).resumed_parts


def test_other_numbers_of_another_release_are_refused(stopped: Any, tiny_teacher: Teachers) -> None:
    options = stopped("zarr")
    begun_by(options.out, lambda found: found["software"].update(torch="2.0.0"))
    model = copied(tiny_teacher("bert"), options.out.parent / "other")
    weights = load_file(model / "model.safetensors")
    weights["bert.encoder.layer.3.output.LayerNorm.bias"] += 0.1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    other = load_teacher(str(model))
    with pytest.raises(UserError) as error:
        check_numbers(options.out, None, other, print)
    line = str(error.value)
    assert "output differs with other versions of the libraries (torch was 2.0.0 and is" in line
    assert "view0/hidden/mean: " in line and "(pip install torch==2.0.0)" in line


def test_another_config_is_reported_by_its_fields(stopped: Any, tmp_path: Path) -> None:
    options = stopped("zarr")
    model = copied(Path(options.model), tmp_path / "model")
    changed(model, "config.json", layer_norm_eps=0.5)
    moved = {"id": model.name}
    begun_by(options.out, lambda found: found["identity"]["teacher"].update(moved))
    with pytest.raises(UserError, match="layer_norm_eps is '1e-12' in the store and '0.5' now"):
        dump(dataclasses.replace(options, model=str(model)))


def test_fields_that_change_no_number_go_on(stopped: Any, tmp_path: Path) -> None:
    options = stopped("zarr")
    model = copied(Path(options.model), tmp_path / "model")
    changed(model, "config.json", hidden_dropout_prob=0.3, use_cache=False, initializer_range=0.5)
    moved = {"id": str(model)}
    begun_by(options.out, lambda found: found["identity"]["teacher"].update(moved))
    lose(options.out, 2)
    done = dump(dataclasses.replace(options, model=str(model)))
    assert done.resumed_parts == done.parts - 1 and verify(options.out).problems == []


def test_batches_keep_the_size_that_a_store_was_started_with(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    """The default depends on the device, and earlier versions had another one."""
    corpus, first = write_corpus(tmp_path / "c.txt", 12), tmp_path / "a.zarr"
    options = dump_options(tiny_teacher("bert"), corpus, first, batch_tokens=8192)
    dump(options)
    default = dataclasses.replace(options, batch_tokens=None)
    assert dump(default).finished_before
    with pytest.raises(UserError, match="--batch-tokens is '8192' in the store and '64' now"):
        dump(dataclasses.replace(options, batch_tokens=64))
    dump(dataclasses.replace(default, out=tmp_path / "b.zarr"))
    assert open_store(tmp_path / "b.zarr").identity["arguments"]["batch_tokens"] == 2048


@pytest.mark.parametrize(
    "identity",
    [{"arguments": [1]}, {"corpus": 3}, {"corpus": {"sources": 3}}, {"corpus": {"sources": [3]}}],
    ids=str,
)
def test_an_identity_of_any_form_is_compared(
    identity: dict[str, Any], tmp_path: Path, tiny_teacher: Teachers
) -> None:
    corpus, out = write_corpus(tmp_path / "c.txt", 12), tmp_path / "s.zarr"
    options = dump_options(tiny_teacher("bert"), corpus, out)
    arguments = {name: getattr(options, name) for name in EARLY_ARGUMENTS}
    make_store(out, features_of(), identity={"arguments": arguments} | identity)
    with pytest.raises(UserError, match="was finished with other arguments"):
        share(options, Shard(0, 1))
