"""Provide small, full and read-only disks in a mount namespace of the calling process."""

import contextlib
import ctypes
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

from harness.processes import in_small_parts

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
CANNOT = 77  # exit code if this machine allows no mounts


def exit_code(run: Callable[..., object], module: str, *words: str | Path | int) -> int:
    """Return the exit code of a command that `run` calls in this process."""
    try:
        run(module, *words)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("a command ends its process")


def with_small_files(bytes_each: int, module: str, *words: str | Path | int) -> None:
    """Run a command that can write no file larger than this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_each, bytes_each))
    in_small_parts(module, *words)


def on_full_disk(
    disk: Path, free: int, copy: Path, module: str, *words: str | Path | int, more: str = ""
) -> None:
    """Run a command on a disk with `free` bytes, make room and run it again (with the option `more`
    if its stage allows), and copy the disk's files."""
    size = free + (1 << 26)
    on_own_disk(disk, size)
    with (disk / "ballast").open("wb") as file:
        file.write(bytes(size - free))
    first = exit_code(in_small_parts, module, *words)
    print(f"first: {first}", flush=True)
    (disk / "ballast").unlink()
    started = (disk / "student" / "training.json").exists()
    second = exit_code(in_small_parts, module, *words, *([more] if more and started else []))
    print(f"second: {second}", flush=True)
    shutil.copytree(disk, copy)


def on_own_disk(disk: Path, size: int, inodes: int = 0) -> None:
    """Mount a disk of `size` bytes at a folder, with a limit on the number of files; 0: no
    limit."""
    _own_mounts()
    _mount("tmpfs", disk, "tmpfs", 0, f"size={max(4096, size)},nr_inodes={inodes}")


def on_read_only_disk(folder: Path, module: str, *words: str | Path | int) -> None:
    """Run a command that finds this folder read-only."""
    if os.geteuid() == 0:  # root ignores the permissions of a folder
        _own_mounts()
        _mount(str(folder), folder, "", BIND)
        _mount(str(folder), folder, "", BIND | REMOUNT | READ_ONLY)
    else:
        folder.chmod(0o555)
    try:
        in_small_parts(module, *words)
    finally:
        with contextlib.suppress(OSError):
            folder.chmod(0o755)


def _own_mounts() -> None:
    user, group = os.geteuid(), os.getegid()
    flags = NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USER
    if ctypes.CDLL(None).unshare(flags) != 0:
        raise SystemExit(CANNOT)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("none", Path("/"), "", RECURSIVE | PRIVATE)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    names = [os.fsencode(str(each)) for each in (source, target, kind)]
    if ctypes.CDLL(None).mount(*names, flags, os.fsencode(options)) != 0:
        raise SystemExit(CANNOT)
