"""Forged stores: metadata altered at random, with checksums that fit again.

Each must be refused in one line, or read as it was; nothing else may happen.

    python -m benchmarks.integrity.forgery FOLDER SEED COUNT

forges COUNT stores in a process with little memory and a short time for each, and prints what
went wrong.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

from benchmarks.integrity.damage import FORMATS, problems, small_store
from store import FeatureStore, UserError, open_store
from store.containers.hdf5.file import append_digest, write_attributes
from store.containers.hdf5.tree import Hdf5Source
from store.format.manifest import seal_checksum
from store.tools.info import info_lines
from store.tools.laws import check_tokens
from store.tools.show import record_table

MEMORY = 2**30  # bytes that the process may take beyond what it has when it begins
SECONDS = 60  # for one store; many times what a sound one takes
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FORBIDDEN = {"pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "socket.connect"}
FORBIDDEN |= {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"}


DEEP = "[" * 100_000 + "]" * 100_000

JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 7, 2**31, 2**40, 2**63, 10**30, 1.5, -1e308, float("nan"),
    float("inf"), "", "x", "../x", "/etc/passwd", "a/../../b", "int64", "object", "<f8", "\x00",
    "\ud800", "💥" * 99, [], {}, [[]], [0], [-1], [2**40], [2**62, 2**62], {"a": 1}, {"": {}},
    "DEEP",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value but itself."""
    found = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in found:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with one thing in it removed, doubled, renamed or replaced."""
    value = copy.deepcopy(value)
    *path, key = chance.choice(list(places(value)))
    holder = value
    for step in path:
        holder = holder[step]
    kind = chance.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == 1:
        holder[chance.choice(["../up", "/abs", "..", "parts/0", "x" * 999, ""])] = holder.pop(key)
    elif kind == 2 and type(holder[key]) is int:
        holder[key] = holder[key] * chance.choice([-1, 2, 10**6, 10**12]) + chance.randrange(3)
    else:
        holder[key] = chance.choice(JUNK)
    return value


def _text(value: Any) -> bytes:
    return json.dumps(value).replace('"DEEP"', DEEP).encode("ascii")


def _seal_zarr(path: Path, manifest: bytes, root: dict[str, Any]) -> None:
    array = zarr.create_array(
        path / "manifest", shape=len(manifest), dtype="uint8", compressors=None, overwrite=True
    )
    array[:] = np.frombuffer(manifest, np.uint8)
    root["attributes"].pop("arrays", None)  # tells again what the manifest says
    root["attributes"]["checksum"] = seal_checksum(manifest, root["attributes"]["created"])
    (path / "zarr.json").write_bytes(_text(root))


def forge_zarr(path: Path, chance: random.Random) -> str:
    """Alter one zarr.json or the manifest, and with it the checksums over it."""
    manifest = json.loads(np.asarray(zarr.open_array(path / "manifest", mode="r")[:]).tobytes())
    root = json.loads((path / "zarr.json").read_bytes())
    kind = chance.randrange(4)
    if kind == 0:
        _seal_zarr(path, _text(mutated(manifest, chance)), root)
        return "manifest"
    if kind == 1:
        (path / "zarr.json").write_bytes(_text(mutated(root, chance)))
        return "root"
    if kind == 2:  # the attributes as they are in both places
        attributes = mutated({"attributes": manifest["attributes"]}, chance).get("attributes")
        root["attributes"] |= attributes if isinstance(attributes, dict) else {}
        _seal_zarr(path, _text(manifest | {"attributes": attributes}), root)
        return "attributes"
    file = chance.choice(sorted(path.glob("*/**/zarr.json")))
    altered = _text(mutated(json.loads(file.read_bytes()), chance))
    known = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(altered)
    data = _text(manifest).replace(known.encode(), hashlib.sha256(altered).hexdigest().encode())
    _seal_zarr(path, data, root)
    return str(file.relative_to(path))


def _other_dataset(old: h5py.Dataset, chance: random.Random) -> dict[str, Any]:
    shape, dtype = old.shape, old.dtype
    return chance.choice(
        [
            {"shape": (2**40, *shape[1:]), "dtype": dtype, "chunks": True},
            {"shape": (2**45,), "dtype": dtype, "chunks": (2**20,)},
            {"shape": shape, "dtype": "S9"},
            {"shape": shape, "dtype": ">i8"},
            {"shape": shape, "dtype": h5py.string_dtype()},
            {"shape": (), "dtype": dtype},
            {"shape": shape, "dtype": np.dtype([("a", "i4"), ("b", "f8")])},
            {"shape": shape, "dtype": h5py.ref_dtype},
            {"shape": shape, "dtype": dtype, "external": [("/etc/passwd", 0, 2**20)]},
        ]
    )


def forge_hdf5(path: Path, chance: random.Random) -> str:
    """Alter attributes, the manifest, a dataset or a link, and with it the checksums over them."""
    attributes = Hdf5Source(str(path)).attributes()
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        data = file["manifest"][:].tobytes()
        kind = chance.randrange(4)
        if kind == 0:
            data = _text(mutated(json.loads(data), chance))
        elif kind == 1:
            group = file[chance.choice([n for n in ["/", *names] if len(file[n].attrs)])]
            key = chance.choice(list(group.attrs))
            group.attrs.create(
                key,
                chance.choice([5, 1.5, "text", b"{", [1, 2], np.zeros((3, 3)), h5py.Empty("f4")]),
            )
        elif kind == 2:
            altered = mutated({k: v for k, v in attributes.items() if k != "checksum"}, chance)
            for key in altered:
                with suppress(Exception):  # what HDF5 cannot hold, no forger can write
                    write_attributes(file, {key: altered[key]})
            data = _text(json.loads(data) | {"attributes": altered})
        else:
            name = chance.choice([n for n in names if isinstance(file[n], h5py.Dataset)])
            settings = _other_dataset(file[name], chance)
            links = [h5py.SoftLink("/"), h5py.ExternalLink("/etc/passwd", "/"), h5py.SoftLink(name)]
            del file[name]
            if chance.randrange(3) and name != "manifest":
                file.create_dataset(name, **settings)
            else:
                file[name] = chance.choice(links)
        if kind != 3:
            del file["manifest"]
            if "arrays" in file.attrs:
                del file.attrs["arrays"]
            file["manifest"] = np.frombuffer(data, np.uint8)
            created = file.attrs.get("created")
            if isinstance(created, bytes):
                checksum = seal_checksum(data, created.decode("ascii", "replace"))
                file.attrs.create("checksum", np.bytes_(checksum))
    append_digest(path)
    return f"kind {kind}"


def link_out(path: Path, chance: random.Random) -> str:
    """Put a link out of the store, a pipe or a loop in the place of a file or folder."""
    target = chance.choice([p for p in sorted(path.rglob("*")) if p.name != "manifest"])
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    kind = chance.choice(["/etc/passwd", "/dev/zero", "/", ".", "..", target.name, "pipe"])
    os.mkfifo(target) if kind == "pipe" else target.symlink_to(kind)
    return f"{target.relative_to(path)} is {kind}"


FORGERIES: dict[str, tuple[Callable[[Path, random.Random], str], ...]] = {
    "zarr": (forge_zarr, forge_zarr, forge_zarr, link_out),
    "h5": (forge_hdf5,),
}


def everything(store: FeatureStore) -> dict[str, str]:
    """Digests of all that a store gives: records and batches, each file, each weight."""
    digest = hashlib.sha256()

    def add(*values: Any) -> None:
        for value in values:
            digest.update(value if isinstance(value, bytes) else np.ascontiguousarray(value).data)

    info_lines(store)
    for record in store:
        add(record.text.encode(), record.token_ids, record.offsets, record.special)
        for view in record.views:
            add(view.mask, view.spans, *view.hidden.values(), *view.attention.values())
            add(view.logits.ids, view.logits.logprobs, view.logits.rest, view.logits.log_partition)
    record_table(store, 0, 0)
    for batch in store.stream(batch_tokens=64):
        add(batch.index, batch.token_ids, *batch.attention.values())
        add(*(states.states() for states in batch.hidden.values()))
    optional = dict(store.teacher_files()) | dict(store.teacher_weights())
    check_tokens(store)
    store.close()
    digests = {name: hashlib.sha256(bytes(value)).hexdigest() for name, value in optional.items()}
    return digests | {"": digest.hexdigest()}


def outcome(path: Path) -> dict[str, str] | str:
    """Read a store: digests of everything, `refused: ...`, or `WRONG: ...`."""
    try:
        return everything(open_store(path))
    except UserError as error:
        line = " ".join(str(error).split())
        return f"refused: {line}" if line else "WRONG: an error without a word"
    except BaseException as error:
        return f"WRONG: {type(error).__name__}: {error}"[:300]


def _watch() -> None:
    """End this process if it writes a file, starts another, or runs what a store names."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if watching and (event in FORBIDDEN or writes):
            print(json.dumps({"forbidden": f"{event} {arguments}"[:300]}), flush=True)
            os._exit(3)

    sys.addaudithook(hook)


watching = False


def fuzz(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """Forge `count` stores of either format; how many were refused and read, and what was wrong."""
    global watching
    found: dict[str, Any] = {"refused": 0, "unchanged": 0, "verified": 0, "wrong": []}
    _watch()
    for ext in FORMATS:
        sound, forged = folder / f"sound.{ext}", folder / f"forged.{ext}"
        small_store(sound, parts=2, sequences=2, hidden=("mean",))
        expected, chance = outcome(sound), random.Random(f"{ext} {seed}")
        assert isinstance(expected, dict), expected
        held = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, resource.RLIM_INFINITY))
        for number in range(count):
            shutil.copytree(sound, forged) if sound.is_dir() else shutil.copy(sound, forged)
            what = chance.choice(FORGERIES[ext])(forged, chance)
            print(f"{ext} {number} {what}", file=sys.stderr, flush=True)
            signal.alarm(SECONDS)
            watching = True
            result = outcome(forged)
            watching = False
            signal.alarm(0)
            if isinstance(result, dict) and result.items() <= expected.items():
                found["unchanged"] += 1
            elif isinstance(result, str) and result.startswith("refused"):
                found["refused"] += 1
            elif isinstance(result, dict) and problems(forged):  # a list of fewer parts, say
                found["verified"] += 1
            else:
                found["wrong"].append(f"{ext} {number} {what}: {result}")
            shutil.rmtree(forged) if forged.is_dir() else forged.unlink()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return found


def in_process(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """`fuzz` in a process of its own, which it may crash."""
    words = map(str, (folder, seed, count))
    command = [sys.executable, "-m", "benchmarks.integrity.forgery", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    last = (done.stdout.splitlines() or ["{}"])[-1]
    found: dict[str, Any] = json.loads(last)
    if done.returncode or "wrong" not in found:
        at = (done.stderr.splitlines() or [""])[-1]
        raise AssertionError(f"ended with {done.returncode} at: {at} {found.get('forbidden', '')}")
    return found


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
