"""Load tensors from files of torch.save and safetensors, without running pickled code."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any

from teachonce.feature_store.captures.files import regular
from teachonce.support.errors import UserError, first_line

BUILDERS = frozenset(
    f"{module} {name}"
    for module, name in (
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),  # uint16 and other recent dtypes
        ("torch._utils", "_rebuild_parameter"),
    )
)
"""The functions that the pickle of a dictionary of tensors may name, in addition to types of
storages."""


def load_tensors(data: Path | bytes, where: str) -> dict[str, Any]:
    """Load a dictionary that torch.save wrote: tensors and plain values only.

    Raises UserError if the file holds other pickled objects; none of them is run.
    """
    import torch

    if isinstance(data, Path):
        regular([data])
    source: Any = data if isinstance(data, Path) else io.BytesIO(data)
    try:
        _check_archive(source, where)
        if not isinstance(data, Path):
            source.seek(0)
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # the library raises errors of any kind for a bad file
        pickled = "weights_only" in str(error) or "Unsupported" in str(error)
        raise UserError(
            f"{where}: {PICKLED}"
            if pickled
            else f"{where}: cannot be read as tensors ({first_line(error)}); copy it again"
        ) from None
    if not isinstance(tensors, dict):
        raise UserError(
            f"{where}: holds a {type(tensors).__name__}, expected a dictionary of tensors; save one"
        )
    return tensors


PICKLED = (
    "holds pickled objects other than tensors, which could run untrusted code and are not read;"
    " save only tensors"
)


def _check_archive(source: Path | io.BytesIO, where: str) -> None:
    """Raise UserError for a file that could take more memory than its size, or that names objects
    other than tensors."""
    # A pickle from before torch 1.6 declares itself how much memory to allocate.
    if not zipfile.is_zipfile(source):
        raise UserError(
            f"{where}: {PICKLED}, with torch.save of torch 1.6 or later; or copy the file again, if"
            " it is truncated"
        )
    size = source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        # torch.save compresses nothing; overlapping or compressed members expand beyond the file.
        if any(m.compress_type for m in members) or sum(m.file_size for m in members) > size:
            raise UserError(
                f"{where}: holds compressed members, which torch.save does not write; save the"
                " tensors again"
            )
        # weights_only allows more than tensors: `bytearray`, for one, allocates any size.
        pickles = [member for member in members if member.filename.endswith("/data.pkl")]
        for member in pickles:
            for opcode, argument, _ in pickletools.genops(archive.read(member)):
                # STACK_GLOBAL takes its names from the stack, where they cannot be checked here.
                # torch.save writes protocol 2, which lacks it.
                named = opcode.name in ("GLOBAL", "INST")
                if opcode.name == "STACK_GLOBAL" or (named and not _is_tensor(str(argument))):
                    raise UserError(f"{where}: {PICKLED}")


def _is_tensor(name: str) -> bool:
    import torch

    module, _, attr = name.partition(" ")
    if module not in ("torch", "torch.storage"):
        return name in BUILDERS
    return attr.endswith("Storage") or isinstance(getattr(torch, attr, None), torch.dtype)


def load_safetensors(path: Path) -> dict[str, Any]:
    """Load a .safetensors file. Raises UserError if it is not one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    regular([path])
    try:
        return dict(load_file(path))
    except (SafetensorError, ValueError, OSError, KeyError, RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); copy it again") from None
