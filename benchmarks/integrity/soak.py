"""Memory and open files of a training and several readers on one store, over a long time.

python -m benchmarks.integrity.soak STORE     is one of the readers
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from scipy import stats

from benchmarks.common.results import table

SAMPLE_SECONDS = 1.0
GREATEST_SLOPE = 0.01  # of the memory, in the whole second half: a leak of a step adds up to more
SLACK = 4.0  # MB: allocators keep what they once had
HEAD = ("process", "samples", "anonymous memory, MB: halfway, last, most", "its slope, MB an hour",
        "all memory, MB: third quarter, last", "open files: third quarter, last, most",
        "flat")  # fmt: skip


@dataclass
class Series:
    """Samples of a process: its own memory, its memory with mapped files (MB), its open files."""

    anonymous: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def sample(self, process: int) -> None:
        """Add what the process holds now. Raises OSError if it is gone."""
        status = Path(f"/proc/{process}/status").read_text()
        kilobytes = {
            line.split(":")[0]: int(line.split()[1])
            for line in status.splitlines()
            if line.startswith(("RssAnon", "VmRSS"))
        }
        self.anonymous.append(kilobytes["RssAnon"] / 2**10)
        self.resident.append(kilobytes["VmRSS"] / 2**10)
        self.files.append(sum(1 for _ in Path(f"/proc/{process}/fd").iterdir()))

    def flat(self) -> bool:
        """Whether neither memory of its own nor open files grew in the second half of the time:
        the line through the former, Theil's, which single peaks do not move."""
        begin, end = self._line()
        files = _ends(self.files)
        return end - begin <= GREATEST_SLOPE * begin + SLACK and files[1] <= files[0] + 1

    def _line(self) -> tuple[float, float]:
        """Anonymous memory halfway and at the end, by the line through the second half."""
        half = self.anonymous[len(self.anonymous) // 2 :]
        some = half[:: max(1, len(half) // 300)]  # all pairs of the rest would take minutes
        slope, intercept, _, _ = stats.theilslopes(some)
        return float(intercept), float(intercept + slope * (len(some) - 1))

    def row(self, name: str) -> list[object]:
        all_, files = (_ends(values) for values in (self.resident, self.files))
        begin, end = self._line()
        hours = len(self.files) / 2 * SAMPLE_SECONDS / 3600
        return [
            name,
            len(self.files),
            f"{begin:.0f}, {end:.0f}, {max(self.anonymous):.0f}",
            f"{(end - begin) / hours:+.1f}",
            f"{all_[0]:.0f}, {all_[1]:.0f}",
            f"{files[0]:.0f}, {files[1]:.0f}, {max(self.files)}",
            "yes" if self.flat() else "NO",
        ]


def _ends(values: list[float] | list[int]) -> tuple[float, float]:
    """Medians of the third and of the last quarter."""
    quarter = max(1, len(values) // 4)
    third = values[2 * quarter : 3 * quarter] or values
    return statistics.median(third), statistics.median(values[-quarter:])


def watch(processes: dict[str, subprocess.Popen[bytes]], seconds: float) -> dict[str, Series]:
    """Sample processes for some time. RuntimeError if one of them ends before."""
    series = {name: Series() for name in processes}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, process in processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode} while it was watched")
            series[name].sample(process.pid)
        time.sleep(SAMPLE_SECONDS)
    return series


def read_for_ever(path: str) -> None:
    """Stream the store with ever other orders, look into single sequences, open it anew, verify."""
    from teachonce.store import open_store
    from teachonce.store.tools.verify import verify

    for seed in range(10**9):
        store = open_store(path)
        views = store.features.views
        for number, batch in enumerate(store.stream(seed, seed, view=seed % views)):
            for states in batch.hidden.values():
                states.states()
            if number > 200:
                break
        for index in range(seed % 97, len(store), 97):
            record = store[index]
            assert len(record.views[seed % views].mask) == len(record.token_ids)
        if seed % 20 == 0:  # the first time at once: it takes threads and buffers that stay
            assert verify(path).problems == []
        store.close()


def soak(store: Path, folder: Path, minutes: float, readers: int) -> tuple[bool, str]:
    """Train on a store and read it in other processes; whether all were flat, and the table."""
    python = [sys.executable, "-c"]
    train = [*python, "from teachonce.student_train.cli import main; main()", "--store", str(store)]
    train += ["--vocab", "2k", "--student", "64x2x4", "--steps", "100000000", "--device", "cpu"]
    train += ["--eval-every", "200", "--out", str(folder / "student")]
    commands = {"training": train}
    for number in range(readers):
        module = [sys.executable, "-m", "benchmarks.integrity.soak", str(store)]
        commands[f"reader {number + 1}"] = module
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(command, stdout=log, stderr=log)
        series = watch(running, 60 * minutes)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    rows = [found.row(name) for name, found in series.items()]
    return all(found.flat() for found in series.values()), table(HEAD, rows)


if __name__ == "__main__":
    read_for_ever(sys.argv[1])
