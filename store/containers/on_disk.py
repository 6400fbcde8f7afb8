"""What every store under construction on a disk has, whatever its format."""

from __future__ import annotations

import os
from pathlib import Path

from teachonce.support.errors import UserError
from teachonce.support.files import WRITABLE
from teachonce.support.lease import Lease, check_free


class OnDisk:
    """Where a store lies, and who may write it. See `interface.Staging`."""

    path: Path

    def exists(self) -> bool:
        return self.path.exists()

    def check_place(self) -> None:
        folder = self.path.parent
        if not folder.is_dir():
            raise UserError(f"{self.path}: folder {folder} does not exist; make it")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{self.path}: folder {folder} cannot be written to; {WRITABLE}")

    def check_free(self) -> None:
        check_free(self.path)

    def lease(self) -> Lease:
        return Lease(self.path)
