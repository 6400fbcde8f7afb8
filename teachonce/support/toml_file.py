"""Reads a TOML file of a user. Its errors are one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError

MAX_BYTES = 2**20


def read_toml(path: Path, option: str, kind: str) -> dict[str, Any]:
    """Read a TOML file that `option` names and that should be a `kind`, such as `recipe`. Raises
    UserError if it cannot be read, is too large or is not TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(
                f"{path}: has over {MAX_BYTES:,} bytes, so it is not a {kind}; check {option}"
            )
        return tomllib.loads(data.decode())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check {option}") from None
    except (ValueError, RecursionError) as error:  # what TOML and UTF-8 raise
        raise UserError(f"{path}: not TOML ({error}); correct it") from None
