"""Write files atomically and durably (synced, then renamed), explain disk errors, and find this
user's cache folder."""

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

UNFINISHED = ".tmp-unfinished-"  # prefix of the name of a file or folder while it is written
WRITABLE = "make it writable or choose another"
NOT_ORDINARY = "is a link, pipe, folder or device, but an ordinary file is needed: remove it"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), WRITABLE),
    # NFS returns ESTALE if another machine has removed the folder.
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), "do not move or delete its folder"),
}


def check_utf8(path: str | os.PathLike[str]) -> None:
    """Raise UserError for a path that is not UTF-8, because tokenizers and safetensors cannot open
    it."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(name).decode("utf-8", "backslashreplace")
        raise UserError(
            f"{shown}: the name is not UTF-8, which models and tokenizers require of their"
            " folders; rename it, or choose another"
        ) from None


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor  # imported late: it would slow --help

    paths = [folder, *folder.rglob("*")]
    # Sixteen threads, so that the file system can combine the journal commits of several files.
    with ThreadPoolExecutor(16) as workers:
        list(workers.map(sync, paths))


def apply_umask(folder: Path) -> None:
    """Give the .safetensors files under a folder the mode that the umask gives new files."""
    # safetensors makes its files readable by their owner only: no other user could load the model.
    # The mode of a new file shows the umask. os.umask can return it only by setting another umask,
    # for all threads.
    probe = _unfinished(folder / "mode")
    file = create(probe)
    mode = stat.S_IMODE(os.fstat(file).st_mode)
    os.close(file)
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        if not path.is_symlink():
            path.chmod(mode)


def discard(folder: Path, prefix: str, suffix: str = "") -> None:
    """Remove everything in `folder` whose name starts with `prefix` and ends with `suffix`.

    The folder may be missing.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(prefix) and path.name.endswith(suffix):
            _remove(path)


def _remove(path: Path) -> None:
    # A link is removed, never the folder to which it leads.
    folder_itself = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if folder_itself else path.unlink(missing_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, and sync its parent folder so that a crash cannot undo it."""
    os.rename(source, target)
    sync(target.parent)


def _unfinished(path: Path) -> Path:
    """Remove temporary files of killed processes for `path`, and return a random temporary name
    next to it."""
    prefix = f"{UNFINISHED}{path.name}-"
    # The whole pattern must match: temporary files of `rows-f16`, next to `rows`, begin with the
    # same characters, and another process may be writing them.
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{16}")
    for leftover in path.parent.iterdir() if path.parent.is_dir() else ():
        if pattern.fullmatch(leftover.name):
            _remove(leftover)
    # Random: if another user of the folder could guess it, a link placed there would redirect the
    # write to a file of that user's choice.
    return path.with_name(f"{prefix}{os.urandom(8).hex()}")


def is_taken(path: Path) -> bool:
    """Return whether something has this name, also a link to a missing file."""
    # Not `os.path.lexists`, which hides a name that is too long.
    return path.exists() or path.is_symlink()


def create(path: Path, mode: int = 0o666) -> int:
    """Create a file and open it for writing. Raises FileExistsError if the name exists, even if it
    is a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_ordinary(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file in a folder where other users may write.

    Raises OSError for a link, which may lead anywhere, and for a pipe or device, which may block.
    """
    try:
        # O_NONBLOCK: otherwise opening a pipe waits until another process opens its other end.
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        # ELOOP (on BSD EMLINK) is a link, ENXIO a pipe without a reader, or a socket.
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise
        raise OSError(errno.EPERM, NOT_ORDINARY, os.fspath(path)) from error
    # `fstat` of the open file: another user may replace the file of this name after a `stat`.
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EPERM, NOT_ORDINARY, os.fspath(path))


def check_model_folder(folder: Path) -> None:
    """Raise UserError if a model's folder has a pipe, socket or device, or a file that this user
    may not read.

    Libraries that load a model block on a pipe, and report an unreadable file as missing.
    """
    private = "may not be read by this user: ask its owner to permit it (chmod)"
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"{folder}: {private}")
    # Two levels, because the modules of sentence-transformers have folders of their own.
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path}: is a pipe or device, but a file is needed: remove it")
        is_read = path.exists() and path.suffix in (".json", ".safetensors", ".bin")
        if is_read and not os.access(path, os.R_OK):
            raise UserError(f"{path}: {private}")


def append(path: Path, data: bytes) -> None:
    """Append to a file, created if missing; raises OSError as `open_ordinary` does."""
    with os.fdopen(open_ordinary(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(data)


def truncate(path: Path, size: int) -> None:
    """Truncate a file, created if missing, to `size` bytes; raises OSError as `open_ordinary`
    does."""
    with os.fdopen(open_ordinary(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        file.truncate(size)


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically: under a temporary name, synced, then renamed."""
    new = _unfinished(path)
    try:
        with os.fdopen(create(new), "wb") as file:
            file.write(data)
            # Without a sync before the rename, a crash may leave an empty file under its name.
            file.flush()
            os.fsync(file.fileno())
        rename(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        if error.filename in (None, os.fspath(new)):
            error.filename = os.fspath(path)  # users do not know the temporary name
        raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder. After the `with` block, sync it and rename
    it to `path`.

    If the block fails, the temporary file or folder is removed.
    """
    new = _unfinished(path)
    try:
        yield new
        sync_tree(new) if new.is_dir() else sync(new)
        rename(new, path)
    except BaseException:
        _remove(new)
        raise


@contextmanager
def staged_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. After the `with` block, sync each file in it and move it into
    `folder`.

    An existing file or link of the same name is replaced; a link is never followed.
    """
    new = _unfinished(folder / "files")
    new.mkdir()
    try:
        yield new
        sync_tree(new)
        # Sorted, so that a folder is created before its files are moved into it.
        for path in sorted(new.rglob("*")):
            target = folder / path.relative_to(new)
            if path.is_dir():
                if target.is_symlink():
                    target.unlink()
                target.mkdir(exist_ok=True)
            else:
                os.replace(path, target)
        # A rename is durable only when its folder is synced.
        sync_tree(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def link(source: Path, target: Path) -> None:
    """Hard-link `source` to `target`, creating missing folders.

    Copies the file if the file system has no hard links, or if `source` is a symbolic link.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # On Linux, os.link would link the link itself, which may lead elsewhere from `target`.
        if source.is_symlink():
            raise OSError(errno.EMLINK, "a link of a link")
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _number(error: BaseException) -> int:
    match = re.search(r"(?:errno =|os error) (\d+)", str(error))  # as HDF5 and safetensors write it
    return getattr(error, "errno", None) or (int(match[1]) if match else 0)


def cause(error: BaseException) -> str:
    """Return the cause of a failed read or write, such as "No space left on device"."""
    if isinstance(error, OSError) and error.strerror == NOT_ORDINARY:
        return f"{os.fsdecode(error.filename)} {NOT_ORDINARY}"
    number = _number(error)
    return os.strerror(number) if number else " ".join(str(error).split())


def reason(error: BaseException) -> str:
    """Return the cause of a failed write and a remedy, such as "No space left on device; free some
    space"."""
    remedy = REMEDIES.get(_number(error), "fix the cause")
    if isinstance(error, FileExistsError | NotADirectoryError):
        remedy = f"{_not_a_folder(error)} has the name of a folder: rename it"
    return f"{cause(error)}; {remedy}"


def _not_a_folder(error: OSError) -> str:
    """Describe the file, or link to a missing target, that is in the place of a folder: the path of
    the error or one of its parents."""
    for name in (error.filename2, error.filename):  # `filename2` is the target of a rename
        path = Path(os.fsdecode(name or ""))
        for each in (path, *path.parents):
            if os.path.lexists(each) and not each.is_dir():
                return f"the file or link {each}"
    return "a file"


def lock(file: int, wait: bool) -> bool | None:
    """Lock an open file. Returns whether this process holds the lock; None if the file system does
    not support locks."""
    import fcntl

    try:
        # flock, not lockf: a process loses a POSIX lock when it closes any descriptor of the file,
        # as it does after reading a lease.
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def cache_folder() -> Path:
    """Return `$TEACHONCE_CACHE`, else `teachonce` in the user's cache folder.

    Raises FileNotFoundError if the user has no home, as in many containers.
    """
    if os.environ.get("TEACHONCE_CACHE"):
        return Path(os.environ["TEACHONCE_CACHE"])
    try:
        # The XDG specification requires that an empty variable counts as unset.
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "teachonce"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home folder") from error
