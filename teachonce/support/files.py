"""Write files that last: synced to the disk, whole or not at all; explain errors of the disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from teachonce.support.errors import UserError

UNFINISHED = ".tmp-unfinished-"  # begins the name of a file or folder that is not whole yet
WRITABLE = "make it writable or choose another"
NOT_ORDINARY = "is a link, pipe, folder or device, where an ordinary file must be: remove it"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), WRITABLE),
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), "leave its folder in place"),
}


def check_utf8(path: str | os.PathLike[str]) -> None:
    """Raise UserError for a path that is not UTF-8: tokenizers and safetensors take no other."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(name).decode("utf-8", "backslashreplace")
        raise UserError(
            f"{shown}: the name is not UTF-8, and models and tokenizers can only lie in folders"
            " whose names are; rename it, or choose another"
        ) from None


def sync(path: Path) -> None:
    """fsync a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder of a tree, many at once, so that the disk joins the writes."""
    from concurrent.futures import ThreadPoolExecutor  # a --help must not wait for it

    paths = [folder, *folder.rglob("*")]
    with ThreadPoolExecutor(16) as workers:
        list(workers.map(sync, paths))


def open_weights(folder: Path) -> None:
    """Give weights in a folder and below the mode that a new file there gets.

    safetensors writes its files for their owner alone, whatever the umask says, so that nobody else
    could load what they belong to.
    """
    probe = _unfinished(folder / "mode")
    file = create(probe)
    mode = stat.S_IMODE(os.fstat(file).st_mode)
    os.close(file)
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        if not path.is_symlink():
            path.chmod(mode)


def discard(folder: Path, prefix: str, suffix: str = "") -> None:
    """Remove everything in `folder` whose name begins with `prefix` and ends with `suffix`; the
    folder may be missing."""
    for left in folder.iterdir() if folder.is_dir() else ():
        if left.name.startswith(prefix) and left.name.endswith(suffix):
            folder_itself = left.is_dir() and not left.is_symlink()
            shutil.rmtree(left) if folder_itself else left.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder and sync its folder, so that the new name lasts."""
    os.rename(source, target)
    sync(target.parent)


def _unfinished(path: Path) -> Path:
    """Return a random name next to `path`: if another user of the folder could guess it, a link of
    that name would lead a write outside. Removes what a killed process left there for `path`."""
    prefix = f"{UNFINISHED}{path.name}-"
    discard(path.parent, prefix)
    return path.with_name(f"{prefix}{os.urandom(8).hex()}")


def create(path: Path, mode: int = 0o666) -> int:
    """Create a file and open it for writing. Raises FileExistsError for any name that is taken, by
    a link too."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_ordinary(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open an ordinary file of a folder in which others may write. Raises OSError for a link, which
    may lead anywhere, and for a pipe or device, for which the caller would wait."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise
        raise OSError(errno.EPERM, NOT_ORDINARY, os.fspath(path)) from error
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EPERM, NOT_ORDINARY, os.fspath(path))


def check_model_folder(folder: Path) -> None:
    """Raise UserError for what libraries that load a model would wait for, or take for a missing
    file: a pipe, socket or device, and a file that this user may not read."""
    private = "may not be read by this user: ask its owner to permit it (chmod)"
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"{folder}: {private}")
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path}: is a pipe or device, where a file must be: remove it")
        is_read = path.exists() and path.suffix in (".json", ".safetensors", ".bin")
        if is_read and not os.access(path, os.R_OK):
            raise UserError(f"{path}: {private}")


def append(path: Path, data: bytes) -> None:
    """Add to a file, which is made if there is none; see `open_ordinary`."""
    with os.fdopen(open_ordinary(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(data)


def shorten(path: Path, size: int) -> None:
    """Cut a file, which is made if there is none, to its first bytes; see `open_ordinary`."""
    with os.fdopen(open_ordinary(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        file.truncate(size)


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a file whole or not at all: under a temporary name, then renamed."""
    new = _unfinished(path)
    try:
        with os.fdopen(create(new), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rename(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        if error.filename in (None, os.fspath(new)):
            error.filename = os.fspath(path)  # a temporary name explains nothing
        raise


@contextmanager
def begun(path: Path) -> Iterator[Path]:
    """Yield the name that a new file or folder has until it is whole, then sync and rename it. If
    the block fails, nothing of it is left."""
    new = _unfinished(path)
    try:
        yield new
        sync_tree(new) if new.is_dir() else sync(new)
        rename(new, path)
    except BaseException:
        discard(new.parent, new.name)
        raise


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield a new folder for files of `folder`; after the block each is synced and renamed to its
    place there. So a link that has the name of one is replaced, not followed."""
    new = _unfinished(folder / "files")
    new.mkdir()
    try:
        yield new
        sync_tree(new)
        for path in sorted(new.rglob("*")):
            target = folder / path.relative_to(new)
            if path.is_dir():
                if target.is_symlink():
                    target.unlink()
                target.mkdir(exist_ok=True)
            else:
                os.replace(path, target)
        sync_tree(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, in folders that are made where they lack; a copy of it where the
    file system has no hard links, or the file is a link itself."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if source.is_symlink():
            raise OSError(errno.EMLINK, "a link of a link")
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _number(error: BaseException) -> int:
    found = re.search(r"(?:errno =|os error) (\d+)", str(error))  # of HDF5, safetensors
    return getattr(error, "errno", None) or (int(found[1]) if found else 0)


def cause(error: BaseException) -> str:
    """The cause of a failed read or write: "No space left on device"."""
    if isinstance(error, OSError) and error.strerror == NOT_ORDINARY:
        return f"{os.fsdecode(error.filename)} {NOT_ORDINARY}"
    number = _number(error)
    return os.strerror(number) if number else " ".join(str(error).split())


def reason(error: BaseException) -> str:
    """The cause of a failed write and what to do first: "No space left on device; make room"."""
    return f"{cause(error)}; {REMEDIES.get(_number(error), 'put that right')}"


def lock(file: int, wait: bool) -> bool | None:
    """Lock an open file. Returns whether this process has the lock; None if the file system has no
    locks."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
