"""The exports of `teachonce`, and its wheel.

- Every export of `teachonce` exists, is documented, and is the object of its own package.
- The wheel has one top-level package, which works without extras and next to a user's own modules.
"""

import ast
import inspect
import os
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import teachonce
from teachonce import align, store
from teachonce.student_train.losses.loss import Loss
from teachonce.student_train.losses.registry import LOSSES
from tests.end_to_end.support import ROOT, STUDENT
from tests.making.dumps import write_corpus
from tests.making.environment import printed_by

NAMES = [name for name in dir(teachonce) if name not in ("__version__", "losses")]
PROMISED = {
    *("open_store", "FeatureStore", "Record", "Batch", "StoreError", "UserError"),
    *("Features", "StoreWriter", "Vocabulary", "VocabularyMap", "Alignment"),
    *("align_match", "align_span", "align_reduce", "FlatText", "Tokens"),
    *("TrainOptions", "train", "run", "DumpOptions", "dump", "losses", "__version__"),
}


def test_all_that_is_promised_is_there() -> None:
    assert set(dir(teachonce)) >= PROMISED | set(store.__all__) | set(align.__all__)
    assert sorted(teachonce.__all__) == dir(teachonce)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_documented_and_the_object_of_its_package(name: str) -> None:
    found = getattr(teachonce, name)
    assert found is getattr(import_module(inspect.getmodule(found).__name__), name)  # type: ignore[union-attr]
    assert found.__module__.startswith("teachonce.")
    printed = inspect.getdoc(found)
    # A dataclass without a docstring has its signature as one.
    assert printed and not printed.startswith(f"{name}(")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: str(loss.formula))
def test_every_loss_is_there_and_documented(loss: Loss) -> None:
    module, _, function = str(loss.formula).partition(".")
    found = getattr(getattr(teachonce.losses, module), function)
    measured = getattr(loss.function, "func", loss.function)  # without its parameter
    assert found is measured and inspect.getdoc(found)


def test_the_version_matches_the_installed_package() -> None:
    assert teachonce.__version__ == version("teachonce")


def test_the_front_door_holds_nothing_of_its_own() -> None:
    stub = ast.parse(Path(teachonce.__file__).with_suffix(".pyi").read_text("utf-8"))
    assert {type(statement) for statement in stub.body} == {ast.ImportFrom, ast.AnnAssign}


BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
# Modules of a user with the same names as packages.
OWN_MODULES = ("store", "align", "support", "training", "downstream")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist of this checkout, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    files = printed_by(*listed, cwd=ROOT)
    for name in files.splitlines():
        source, copy = ROOT / name, folder / "checkout" / name
        if source.is_file() or source.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                copy.symlink_to(os.readlink(source))
            else:
                copy.write_bytes(source.read_bytes())
    printed_by(sys.executable, "-c", BUILD.format("sdist"), folder, cwd=folder / "checkout")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    printed_by(sys.executable, "-c", BUILD.format("wheel"), folder, cwd=unpacked)
    return folder


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
    printed_by(*install, "--no-index", *built.glob("*.whl"), cwd=built)
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
    links = [path.name for path in (ROOT / "teachonce").iterdir() if path.is_symlink()]
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("teachonce", *(f"teachonce/{link}" for link in links))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "teachonce/store/FORMAT.md" in sources and "teachonce/py.typed" in sources
    assert {name for name in names if ".dist-info/" not in name} == sources


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
    for number, name in enumerate(OWN_MODULES):
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
        printed_by(environment / str(command), *words, cwd=folder, PYTHONPATH=".")
    script = (
        "import sys, teachonce\n"
        "from transformers import AutoModelForMaskedLM as Model; Model.from_pretrained('s')\n"
        "print(len(teachonce.open_store('new.zarr')), teachonce.__file__)\n"
        f"assert not {{{', '.join(map(repr, OWN_MODULES))}}} & set(sys.modules)"
    )
    said = printed_by(environment / "python", "-c", script, cwd=folder, PYTHONPATH=".")
    assert str(environment.parent) in said
