"""A folder beside a store, into which repair moves what is damaged: nothing is removed."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from pathlib import Path

from teachonce.support import files


def asides(store: Path) -> list[Path]:
    """The folders beside a store into which something of it was moved."""
    real = store.resolve() if store.is_dir() else store.absolute()
    names = re.compile(rf"{re.escape(real.name)}\.aside-\d+")
    return sorted(path for path in real.parent.iterdir() if names.fullmatch(path.name))


class Aside:
    """The folder `<name>.aside-<n>` beside a store, made when something first goes there.

    Inside, everything has the path that it had beside the store, so that copying the folder over
    the store's own undoes a repair.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._real = store.resolve() if store.is_dir() else store.absolute()  # beside the data
        names = (f"{self._real.name}.aside-{number}" for number in itertools.count(1))
        places = (self._real.with_name(name) for name in names)
        self.path = next(place for place in places if not os.path.lexists(place))

    @property
    def used(self) -> bool:
        return self.path.is_dir()

    def move(self, path: Path) -> None:
        """Move a file or folder there; nothing happens if there is none. Of what a link gives out
        of the store, the link goes."""
        for above in (*reversed(path.parents), path):
            if above.is_relative_to(self._store) and self._leads_out(above):
                path = above
                break
        if os.path.lexists(path):
            files.rename(path, self._place(path))

    def move_link_out(self, path: Path) -> None:
        """Move a link there if it leads out of the store: nobody looks where it leads."""
        if self._leads_out(path):
            self.move(path)

    def _leads_out(self, path: Path) -> bool:
        """Tell whether a path is a link out of the store, or to nothing, such as to itself."""
        if path == self._store or not path.is_symlink():
            return False
        real = Path(os.path.realpath(path))  # pathlib's resolve raises RuntimeError for a circle
        return not path.exists() or not real.is_relative_to(self._real)

    def keep(self, path: Path) -> None:
        """Keep a file that is replaced in one step: by a link, or a copy where links cannot be."""
        if os.path.lexists(path):
            place = self._place(path)
            try:
                os.link(path, place)
            except OSError:
                shutil.copy2(path, place)
                files.sync(place)
            files.sync(place.parent)

    def _place(self, path: Path) -> Path:
        if path.is_relative_to(self._store):
            place = self.path / self._real.name / path.relative_to(self._store)
        else:
            place = self.path / path.relative_to(self._store.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def undo(self) -> str:
        """The command that puts everything back."""
        return shlex.join(["cp", "-a", f"{self.path}/.", f"{self._real.parent}/"])
