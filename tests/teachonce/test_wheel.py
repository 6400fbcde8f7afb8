"""The wheel has one top-level package, which works without extras and next to a user's own
modules."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.end_to_end.support import ROOT, STUDENT
from tests.making.dumps import write_corpus

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
# Modules of a user with the same names as packages.
NAMES = ("store", "align", "support", "training", "downstream")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist of this checkout, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        source, copy = ROOT / name, folder / "checkout" / name
        if source.is_file() or source.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                copy.symlink_to(os.readlink(source))
            else:
                copy.write_bytes(source.read_bytes())
    _run([sys.executable, "-c", BUILD.format("sdist"), folder], folder / "checkout")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    _run([sys.executable, "-c", BUILD.format("wheel"), folder], unpacked)
    return folder


def _run(words: list[object], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _required(lines: Iterable[str]) -> set[str]:
    """Return the distributions that requirements name, and all that these need in turn."""
    found, waiting = set[str](), [(line, "") for line in lines]
    while waiting:
        line, extra = waiting.pop()
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for each in ("", *wanted.extras):
            key = f"{wanted.name}[{each}]"
            if key not in found:
                found.add(key)
                waiting += [(more, each) for more in distribution(wanted.name).requires or ()]
    return {key.partition("[")[0] for key in found}


@pytest.fixture(scope="module")
def environment(built: Path) -> Path:
    """Install the wheel's programs into an environment; packages that it needs without extras are
    links."""
    folder = built / "environment"
    venv.create(folder, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", folder, "install", "-q", "--no-deps"]
    _run([*install, "--no-index", *built.glob("*.whl")], built)
    (metadata,) = folder.glob("lib/*/site-packages/teachonce-*.dist-info")
    for name in _required(Distribution.at(metadata).requires or ()):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            if top != "__pycache__" and not (metadata.parent / top).exists():
                (metadata.parent / top).symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin"


def test_the_wheel_holds_one_package_and_its_data(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"teachonce"}
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("teachonce", *(f"teachonce/{link.name}" for link in _links()))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "teachonce/store/FORMAT.md" in sources and "teachonce/py.typed" in sources
    assert {name for name in names if ".dist-info/" not in name} == sources


def _links() -> list[Path]:
    return [path for path in (ROOT / "teachonce").iterdir() if path.is_symlink()]


def test_the_sdist_has_the_pages_and_no_test(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "ARCHITECTURE.md", "docs/index.md", "examples"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


@pytest.mark.slow
def test_the_main_job_among_modules_of_the_same_names(
    built: Path, environment: Path, tiny_teacher: Callable[[str], Path]
) -> None:
    folder = built / "user"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        own = folder / name / "__init__.py" if number % 2 else folder / f"{name}.py"
        own.parent.mkdir(exist_ok=True)
        own.write_text("raise SystemExit('the user’s own module was imported')\n")
    corpus, teacher = write_corpus(folder / "corpus.txt", 20), tiny_teacher("bert")
    dump = ["teacher-dump", "--model", teacher, "--corpus", corpus, "--out", "new.zarr"]
    train = ["student-train", "--store", "new.zarr", "--vocab", 300, "--out", "s", *STUDENT]
    for command, *words in (
        [*dump, "--logits", "topk:8", "--device", "cpu"],
        [*train, "--steps", 2],
        ["feature-store", "verify", "new.zarr"],
    ):
        _run([environment / str(command), *words], folder, PYTHONPATH=".")
    script = (
        "import sys, teachonce\n"
        "from transformers import AutoModelForMaskedLM as Model; Model.from_pretrained('s')\n"
        "print(len(teachonce.open_store('new.zarr')), teachonce.__file__)\n"
        f"assert not {{{', '.join(map(repr, NAMES))}}} & set(sys.modules)"
    )
    said = _run([environment / "python", "-c", script], folder, PYTHONPATH=".")
    assert str(environment.parent) in said
