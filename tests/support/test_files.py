"""Files are written whole or not at all."""

import os
from functools import partial
from pathlib import Path

import pytest

from teachonce.support import files
from teachonce.support.errors import UserError


def test_two_files_of_a_folder_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.rename

    def rename(source: Path, target: Path) -> None:
        # the second writer arrives when the first is about to rename its file
        if target.name == "a":
            files.write(tmp_path / "b", b"other")
        real(source, target)

    monkeypatch.setattr(files, "rename", rename)
    files.write(tmp_path / "a", b"one")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a": b"one",
        "b": b"other",
    }


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_get_the_mode_of_a_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    weights = [tmp_path / "model.safetensors", tmp_path / "1_Dense" / "model.safetensors"]
    weights[1].parent.mkdir()
    other = tmp_path / "secret.json"
    other.touch(0o400)
    before = os.umask(umask)
    try:
        for path in weights:
            save_file({"a": np.zeros(2, np.float32)}, path)
        files.apply_umask(tmp_path)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in weights] == [mode, mode]
    assert other.stat().st_mode & 0o777 == 0o400
    assert {path.name for path in tmp_path.iterdir()} == {weights[0].name, "1_Dense", other.name}


def test_temporary_names_lead_nowhere(tmp_path: Path) -> None:
    """A temporary file is never written through a link that has its name in a shared folder."""
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    victim.chmod(0o600)
    folder.mkdir()
    for name in (".tmp-unfinished-a", ".tmp-unfinished-mode", "a", "model.safetensors"):
        (folder / name).symlink_to(victim)
    files.write(folder / "a", b"one")
    with files.atomic_path(folder / "a") as new:
        new.write_bytes(b"two")
    files.apply_umask(folder)
    assert victim.read_text() == "precious" and victim.stat().st_mode & 0o777 == 0o600
    assert (folder / "a").read_bytes() == b"two" and not (folder / "a").is_symlink()


def test_what_a_killed_write_leaves_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(files, "rename", die)
        files.write(tmp_path / "a", b"one")
    assert [path.name for path in tmp_path.iterdir()] != ["a"]
    files.write(tmp_path / "b", b"other")
    assert len(list(tmp_path.iterdir())) == 2
    files.write(tmp_path / "a", b"one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_write_leaves_a_longer_name_alone(tmp_path: Path) -> None:
    """A write to `rows` removes leftovers of `rows`, but not the open folder of `rows-f16`."""
    left = tmp_path / f"{files.UNFINISHED}rows-{'0f' * 8}"
    left.mkdir()
    with files.atomic_path(tmp_path / "rows-f16") as other:
        other.mkdir()
        (other / "a").write_text("half")
        with files.atomic_path(tmp_path / "rows") as new:
            assert not left.exists()
            new.mkdir()
    assert (tmp_path / "rows-f16" / "a").read_text() == "half"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "rows-f16"]


def test_links_and_pipes_of_a_shared_folder(tmp_path: Path) -> None:
    """Files of a shared folder are not opened through links, and pipes are not awaited."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link").symlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError) as raised:
                files.open_ordinary(tmp_path / name, flags)
            assert name == "folder" or f"{name} is a link, pipe" in files.cause(raised.value)
    assert victim.read_text() == "precious"
    with pytest.raises(UserError, match="pipe: is a pipe or device, but a file is needed"):
        files.check_model_folder(tmp_path)
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "link")


def test_a_folder_is_filled_without_following_links(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    (victim / "inner").mkdir(parents=True)
    for path in (victim / "a", victim / "inner" / "b"):
        path.write_text("precious")
    folder.mkdir()
    (folder / "mine").write_text("stays")
    (folder / "a").symlink_to(victim / "a")
    (folder / "inner").symlink_to(victim / "inner")
    with files.staged_files(folder) as new:
        (new / "inner").mkdir()
        (new / "a").write_text("one")
        (new / "inner" / "b").write_text("two")
    assert (victim / "a").read_text() == (victim / "inner" / "b").read_text() == "precious"
    assert (folder / "a").read_text() == "one" and (folder / "inner" / "b").read_text() == "two"
    assert {path.name for path in folder.iterdir()} == {"mine", "a", "inner"}
    with pytest.raises(OSError, match="full"), files.staged_files(folder) as new:
        (new / "a").write_text("half")
        raise OSError("the disk is full")
    assert (folder / "a").read_text() == "one"


def test_a_file_in_the_place_of_a_folder_has_a_remedy(tmp_path: Path) -> None:
    (file := tmp_path / "a").touch()
    (folder := tmp_path / "folder").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, make in (
        (file, file.mkdir),
        (file, (file / "b").mkdir),
        (link, link.mkdir),
        (link, partial(files.rename, folder, link)),
    ):
        with pytest.raises(OSError) as raised:
            make()
        remedy = f"; the file or link {path} has the name of a folder: rename it"
        assert files.reason(raised.value).endswith(remedy)
