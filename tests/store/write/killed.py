"""Write a store in a process that will be killed (python -m tests.store.write.killed PATH)."""

import sys
from pathlib import Path

from teachonce.store import UserError
from tests.making.stores import SMALL, begin, make_part, put_part

PARTS = 4


def main(path: Path | str) -> None:
    try:
        writer = begin(path, SMALL)
    except UserError as error:
        if "exists already" not in str(error):
            raise
        return
    for number in range(PARTS):
        if number not in writer.published:
            put_part(writer, number, make_part(SMALL, number))
    writer.seal()


if __name__ == "__main__":
    print("started", flush=True)
    main(sys.argv[1])
