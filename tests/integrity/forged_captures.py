"""Change small captures of other tools: values, types, shapes, bytes, members and files."""

import gzip
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from numcodecs import Zstd
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from tests.making import captures

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint16,
)  # fmt: skip
NUMBERS_OF_CELLS: tuple[Any, ...] = (5, 300, 99999, -3.5)
NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e30, -1.0, 2.0**40, 0.0, 0.5, 7.0, -2e38)
ODD: tuple[Any, ...] = (
    None, -1, 0, 1, 2**31, 2**70, "x", "", [], {}, True, 1.5, float("nan"), float("inf"), [[1]],
    {"a": 1}, -(2**40), "é\udc80"[:1], 1e308,
)  # fmt: skip


def forge(source: Path, chance: random.Random) -> str:
    """Change a capture, including its table of tokens, in one to three ways; describe them."""
    printed = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in source.rglob("*") if path.is_file())
        if not files:
            break
        path = chance.choice(files)
        change, whole = chance.choices((_values, _bytes, _file), (5, 3, 2))[0], path.read_bytes()
        try:
            printed.append(f"{path.name}: {change(path, files, chance)}")
        except Exception as error:  # the file has no place for this change
            path.write_bytes(whole)
            printed.append(f"{path.name}: {_bytes(path, files, chance)} ({type(error).__name__})")
    return "; ".join(printed)


def _bytes(path: Path, files: list[Path], chance: random.Random) -> str:
    """Alter some bytes, or remove or repeat a piece."""
    data = bytearray(path.read_bytes())
    size = len(data)
    how = chance.choice(
        ("flip", "flip", "set", "cut", "cut", "insert", "remove", "double", "append")
    )
    place, more = chance.randrange(size + 1), chance.randrange(1, 64)
    if how == "flip" and size:
        data[place % size] ^= 1 << chance.randrange(8)
    elif how == "set":
        data[place : place + more] = chance.randbytes(min(more, size - place))
    elif how == "cut":
        del data[place:]
    elif how == "insert":
        data[place:place] = chance.choice((chance.randbytes(more), bytes(more), b"\xff" * more))
    elif how == "remove":
        del data[place : place + more]
    elif how == "double":
        data[place:place] = data[max(0, place - more * 8) : place]
    else:
        data += chance.choice((bytes(more * 16), chance.randbytes(more), bytes(data)))
    path.write_bytes(data)
    return f"{how} at {place}"


def _file(path: Path, files: list[Path], chance: random.Random) -> str:
    """Remove a file, or replace it with something else."""
    how = chance.choice(("gone", "empty", "folder", "pipe", "zero", "null", "link", "swap", "copy"))
    other = chance.choice(files)
    if how == "copy":
        name = path.name.replace("0", "7").replace("1", "8")
        shutil.copy(other, path.with_name(name))
        return f"copy of {other.name} as {name}"
    if how == "swap":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
        return f"swapped with {other.name}"
    content = other.read_bytes() if how == "link" and other != path else b""
    path.unlink()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how in ("zero", "null"):
        path.symlink_to(f"/dev/{how}")
    elif how == "link" and content:
        path.symlink_to(other)
    return how


def _values(path: Path, files: list[Path], chance: random.Random) -> str:
    """Write the file again with another value, type or shape in it."""
    suffix = path.suffix
    if suffix == ".safetensors":
        tensors = load_file(path)
        printed = _tensors(tensors, chance)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return printed
    if suffix in (".ckpt", ".gz"):
        data = path.read_bytes()
        data, printed = _torch(gzip.decompress(data) if suffix == ".gz" else data, chance)
        path.write_bytes(gzip.compress(data) if suffix == ".gz" else data)
        return printed
    by_suffix: dict[str, Callable[[Path, random.Random], str]] = {
        ".tar": _archive, ".npy": _array, ".parquet": _table, ".arrow": _table, ".yaml": _settings,
        ".json": _settings,
    }  # fmt: skip
    return by_suffix[suffix](path, chance)


def _torch(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    tensors: Any = torch.load(io.BytesIO(data), weights_only=True)
    printed = _tensors(tensors, chance)
    return captures.saved(tensors), printed


def _tensors(tensors: dict[str, Any], chance: random.Random) -> str:
    """Change one entry of a dictionary of tensors, or of a list in it."""
    name = chance.choice(sorted(tensors))
    value, how = tensors[name], chance.randrange(12)
    if how == 0:
        del tensors[name]
        return f"{name} gone"
    if how == 1:
        tensors[f"{name}s"] = tensors.pop(name)
        return f"{name} renamed"
    if how == 2:
        tensors[name] = chance.choice(ODD)
        return f"{name} is {tensors[name]!r:.20}"
    if isinstance(value, list):
        place = chance.randrange(len(value))
        if how == 3:
            del value[place]
            return f"{name}[{place}] gone"
        if how == 4:
            value.append(value[place])
            return f"{name}[{place}] doubled"
        value[place], printed = _tensor(value[place], chance)
        return f"{name}[{place}] {printed}"
    tensors[name], printed = _tensor(value, chance)
    return f"{name} {printed}"


def _tensor(tensor: Any, chance: random.Random) -> tuple[Any, str]:
    """Change dtype, shape or value of a tensor."""
    how = chance.choice(("dtype", "shape", "value", "value", "value", "rows", "factor", "form"))
    if how == "dtype":
        dtype = chance.choice(DTYPES)
        return tensor.to(dtype), str(dtype)
    if how == "shape":
        shapes = (
            lambda t: t[None], lambda t: t.flatten(), lambda t: t.unsqueeze(-1), lambda t: t[:-1],
            lambda t: t.transpose(0, -1), lambda t: t[:0], lambda t: torch.cat([t, t]),
            lambda t: torch.cat([t, t], -1), lambda t: t[..., :-1], lambda t: t.flatten()[0],
        )  # fmt: skip
        made = chance.choice(shapes)(tensor)
        return made.clone(), f"is {list(made.shape)}"
    if how == "form":
        forms: tuple[Callable[[Any], Any], ...] = (
            lambda t: t.flatten()[:1].expand(10**9), lambda t: t.to_sparse(),
            lambda t: torch.nn.Parameter(t.float()), lambda t: t.flip(0).clone(),
            lambda t: t.tolist(),
        )  # fmt: skip
        return chance.choice(forms)(tensor), "of another form"
    found = tensor.clone()
    if how == "rows":
        generator = torch.Generator().manual_seed(chance.randrange(2**31))
        return found[torch.randperm(len(found), generator=generator)], "in another order"
    if how == "factor":
        factor = chance.choice((2, -1, 0, 0.5, 1e6, 1j))
        return found * factor, f"times {factor}"
    number = chance.choice(NUMBERS)
    flat = found.view(-1)
    places = [chance.randrange(len(flat)) for _ in range(chance.choice((1, 1, 5)))]
    flat[places] = torch.tensor(number).to(found.dtype)
    return found, f"has {number} at {places[0]}"


def _archive(path: Path, chance: random.Random) -> str:
    """Add, remove, rename or change a member of a tar, or truncate it between two members."""
    members = captures.archive_members(path)
    with tarfile.open(path) as archive:
        offsets = [m.offset for m in archive.getmembers()]
    place = chance.randrange(len(members))
    how = chance.choice(
        ("payload", "payload", "payload", "cut", "gone", "doubled", "renamed", "meta")
    )
    if how == "cut":
        os.truncate(path, chance.choice(offsets[1:]))
        return "cut between two members"
    if how == "payload":
        place = chance.randrange(1, len(members))
        data, how = _torch(Zstd().decode(members[place][1]), chance)
        members[place] = members[place][0], bytes(Zstd().encode(data))
    elif how == "gone":
        del members[place]
    elif how == "doubled":
        members.append(members[place])
    elif how == "renamed":
        name = chance.choice(("0.pt.zst", "9999.pt.zst", "x", "../0.pt.zst", "-1.pt.zst"))
        members[place] = name, members[place][1]
    else:
        found = json.loads(members[0][1])
        inner = chance.choice((found, found["saver"]))
        inner[chance.choice(sorted(inner))] = chance.choice(ODD)
        members[0] = members[0][0], json.dumps(found).encode()
    captures.write_archive(path, members)
    return how


def _array(path: Path, chance: random.Random) -> str:
    """Change type, shape or order of the tokens of a run."""
    array = np.load(path)
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda a: a.astype(np.float32), lambda a: a.astype(np.uint8), lambda a: a.astype(np.int8),
        lambda a: a.astype(object), lambda a: a.astype(np.complex64), lambda a: a.astype(">i4"),
        lambda a: a.T, lambda a: a[:-1], lambda a: a[:, :-1], lambda a: a.ravel(), lambda a: a[:0],
        lambda a: a[None], lambda a: a[::-1], lambda a: np.roll(a, 1, 1), lambda a: a - 5,
        lambda a: a * 1000,
    )  # fmt: skip
    number = chance.randrange(len(changes))
    np.save(path, changes[number](array), allow_pickle=True)
    return f"array change {number}"


def _table(path: Path, chance: random.Random) -> str:
    """Change a cell, a column or the order of a table."""
    arrow = path.suffix == ".arrow"
    if arrow:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
        table.validate(full=True)  # otherwise a table that was forged before crashes this process
    else:
        table = parquet.read_table(path)
    rows, name = table.to_pylist(), chance.choice(table.column_names)
    how = chance.choice(
        ("cell", "cell", "cell", "cell", "column", "renamed", "row", "order", "kind")
    )
    row = chance.choice(rows)
    kept: Any = None
    if how == "cell" and "observed" in row and chance.random() < 0.5:
        how = _engine_row(row, chance)
    elif how == "cell":
        row[name], how = _cell(row[name], chance)
        kept = table.schema if chance.random() < 0.5 else None
    elif how == "column":
        rows = [{key: value for key, value in row.items() if key != name} for row in rows]
    elif how == "renamed":
        rows = [
            {f"{key}s" if key == name else key: value for key, value in r.items()} for r in rows
        ]
    elif how == "row":
        rows = chance.choice((rows[:-1], [*rows, {}], rows[:0], [*rows, row]))
    elif how == "order":
        chance.shuffle(rows)
    else:
        for each in rows:
            each[name] = _kind(each[name], chance.choice((float, str, bool)))
    made = pa.Table.from_pylist(rows, schema=kept or (table.schema if how in ("row",) else None))
    # The engine is named in the metadata of its table.
    made = made.replace_schema_metadata(table.schema.metadata)
    if arrow:
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, made.schema) as writer:
            writer.write_table(made)
    else:
        parquet.write_table(made, path)
    return f"{name} {how}"


def _engine_row(row: dict[str, Any], chance: random.Random) -> str:
    """Change the columns of a row of an engine together, so that they may remain consistent."""
    ids, best, logs, observed = (row[n] for n in ("input_ids", "token_ids", "logprobs", "observed"))
    place = chance.randrange(len(observed))
    how = chance.choice(("gone", "twice", "cut", "other id", "order", "less", "empty"))
    if how == "gone":
        for column in (ids, best, logs, observed):
            del column[place]
    elif how == "twice":
        for column in (ids, best, logs, observed):
            column.insert(place, column[place])
    elif how == "cut":
        del ids[place + 1 : -1], best[place + 1 :], logs[place + 1 :], observed[place + 1 :]
    elif how == "other id":
        ids[place + 1] = best[place][chance.randrange(len(best[place]))]
        observed[place] = dict(zip(best[place], logs[place], strict=True))[ids[place + 1]]
    elif how == "order":
        for values in (*best, *logs):
            values.reverse()
    elif how == "less":
        row["logprobs"] = [[value - 1 for value in values] for values in logs]
        row["observed"] = [value - 1 for value in observed]
    else:
        kept = chance.randrange(len(best[0]))
        row["logprobs"] = [[*v[:kept], *[-float("inf")] * len(v[kept:])] for v in logs]
    return f"{how} at {place}"


def _cell(value: Any, chance: random.Random) -> tuple[Any, str]:
    """Change the value of a cell, or of a list in it."""
    if isinstance(value, list) and value and chance.random() < 0.85:
        place, how = (
            chance.randrange(len(value)),
            chance.choice(("inside", "inside", "less", "more")),
        )
        made = list(value)
        if how == "less":
            del made[place]
            return made, f"less at {place}"
        if how == "more":
            made.insert(place, made[place])
            return made, f"more at {place}"
        made[place], printed = _cell(made[place], chance)
        return made, f"[{place}] {printed}"
    other = chance.choice(ODD + NUMBERS_OF_CELLS)
    return other, f"is {other!r:.20}"


def _kind(value: Any, kind: type) -> Any:
    return [_kind(each, kind) for each in value] if isinstance(value, list) else kind(value)


def _settings(path: Path, chance: random.Random) -> str:
    """Change or remove the value of a key in a settings file."""
    is_json = path.suffix == ".json"
    found: Any = json.loads(path.read_text()) if is_json else yaml.safe_load(path.read_text())
    inner, name = found, chance.choice(sorted(found))
    if chance.random() < 0.2:
        del inner[name]
    else:
        more: tuple[Any, ...] = (2, 3, 8, 600, 601, "float32", "float16", [0], ["sqrt"])
        inner[name] = chance.choice(ODD + more)
    path.write_text(json.dumps(found) if is_json else yaml.safe_dump(found))
    return f"{name} is {inner.get(name, 'gone')!r:.20}"
