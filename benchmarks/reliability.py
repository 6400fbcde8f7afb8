"""Dumps and trainings killed at random moments, each finished by the next start.

    nice python -m benchmarks.reliability [--dump-kills 200] [--train-kills 50]

What ends must be what an undisturbed run gives: the same SHA-256 of every array, the same weights.
Otherwise the script fails. A random teacher of two layers is made for it.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import click

from benchmarks.common.results import publish, results_option, table
from harness.processes import PART_TOKENS, finish, fork, in_small_parts
from harness.store_content import content_of_store
from teachonce.support.console import command_errors
from teachonce.support.files import UNFINISHED

Words = tuple[str | Path | int, ...]
DUMP = ("--logits", "topk:8", "--views", 2, "--max-length", 64, "--batch-tokens", 256)
TRAIN = ("--vocab", 300, "--student", "32x2x4", "--loss", "mlm=1,hidden=1,kl=1", "--steps", 30)
OFTEN = ("--batch-tokens", 256, "--eval-every", 10, "--checkpoint-every", 4)
NEAR = 0.003  # seconds after a moment that was waited for
HEAD = (
    "",
    "SIGKILLs",
    "moment of the kill",
    "finished by the next run",
    "equal to an undisturbed run",
)


@dataclass
class Job:
    """Holds a command whose output can be compared. `moment` reads its stage from the disk."""

    name: str
    out: Path
    words: Words
    moment: Callable[[Path], str]
    content: Callable[[Path], object]
    again: Callable[[Path], Words] = lambda out: ()
    aimed: tuple[str, ...] = ()  # moments too short to be met by chance
    seconds: float = 0.0
    wanted: object = None
    moments: Counter[str] = field(default_factory=Counter)

    @property
    def log(self) -> Path:
        return self.out.with_name("log")

    def clear(self) -> None:
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir(parents=True)

    def undisturbed(self) -> None:
        """Run the job twice, the second time with warm caches, and record its output and
        duration."""
        for _ in range(2):
            self.clear()
            started = time.perf_counter()
            self.finish()
            self.seconds = time.perf_counter() - started
        self.wanted = self.content(self.out)

    def finish(self) -> None:
        """Start the job and let it finish, also if it was killed after its last step."""
        if finish(fork(in_small_parts, *self.words, *self.again(self.out), log=self.log)) != 0:
            raise RuntimeError(f"{self.name}: {self.log.read_text()[-2000:]}")

    def kill(self, chance: random.Random, number: int) -> bool:
        """Start a new process and kill it; return False if it had already finished."""
        self.clear()
        process = fork(in_small_parts, *self.words, log=self.log)
        aim = (None, *self.aimed)[number % (1 + len(self.aimed))]
        end = time.perf_counter() + chance.uniform(0, self.seconds)
        while process.is_alive() and (
            time.perf_counter() < end if aim is None else self.moment(self.out) != aim
        ):
            time.sleep(0.0005)
        if aim is not None:
            time.sleep(chance.uniform(0, NEAR))
        return self.killed(process)

    def kill_real(self, chance: random.Random) -> bool:
        """Kill a process that was started by a command line, with all its imports."""
        self.clear()
        line = [sys.executable, "-m", "harness.processes", *map(str, self.words)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(line, stdout=log, stderr=log)
        while process.poll() is None and self.moment(self.out) == "beginning":
            time.sleep(0.005)
        time.sleep(chance.uniform(0, self.seconds / 2))
        return self.killed(process)

    def killed(self, process: ForkServerProcess | subprocess.Popen[bytes]) -> bool:
        process.kill()
        code = process.wait() if isinstance(process, subprocess.Popen) else finish(process)
        if code == -signal.SIGKILL:
            self.moments[self.moment(self.out)] += 1
        return code == -signal.SIGKILL

    def trials(self, kills: int, seed: int, real: int = 0) -> list[object]:
        """Kill and finish the job `kills` times; return a row. Raises RuntimeError at any
        difference."""
        chance = random.Random(f"{self.name} {seed}")
        number = killed = 0
        while killed < kills:
            number += 1
            by_shell = killed >= kills - real
            if not (self.kill_real(chance) if by_shell else self.kill(chance, number)):
                continue
            killed += 1
            self.finish()
            if self.content(self.out) != self.wanted:
                raise RuntimeError(f"{self.name}: kill {killed} has changed what it gives")
        printed = ", ".join(f"{moment} {count}" for moment, count in sorted(self.moments.items()))
        return [self.name, kills, printed, kills, kills]


def moment_of_dump(out: Path) -> str:
    """Name the current step of a dump, or its step when it was killed."""
    parts = out / "parts" if out.suffix == ".zarr" else Path(f"{out}.parts")
    with suppress(OSError):
        siblings = [path.name for path in out.parent.iterdir()]
        part_files = [path.name for path in parts.iterdir()] if parts.exists() else []
        if not out.exists():
            return "beginning"
        sealing = any(name.startswith(f".{out.name}.new-") for name in siblings)
        if out.suffix == ".zarr":
            names = {path.name for path in out.iterdir()}
            sealing = "manifest" in names or any(name.startswith(".tmp-") for name in names)
        if _sealed(out):
            return "done"
        if sealing:
            return "sealing"
        return "writing" if any(name.startswith(".tmp-") for name in part_files) else "computing"
    return "computing"


def _sealed(out: Path) -> bool:
    if out.suffix == ".zarr":
        return '"sealed"' in (out / "zarr.json").read_text()
    return not Path(f"{out}.parts").exists()


def moment_of_training(out: Path) -> str:
    """Name the current step of a training, or its step when it was killed."""
    settings = out / "training.json"
    if not settings.exists():
        return "beginning"
    with suppress(OSError, ValueError):
        if "result" in json.loads(settings.read_text()):
            return "done"
    if (out / "config.json").exists():
        return "finishing"
    saving = any((out / "checkpoints").glob(f"{UNFINISHED}*"))
    return "saving" if saving else "training"


def content_of_student(out: Path) -> object:
    """Return the student's weights, its tokenizer and every loss."""
    names = ("model.safetensors", "tokenizer.json", "metrics.jsonl")
    return [(out / name).read_bytes() for name in names]


def resume(out: Path) -> Words:
    return ("--resume",) if (out / "training.json").exists() else ()


def make_teacher(folder: Path, corpus: Path) -> None:
    """Make a random BERT with a tokenizer of the corpus."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer, set_seed

    folder.mkdir()
    pieces = BertWordPieceTokenizer()
    pieces.train([str(corpus)], vocab_size=600, show_progress=False)
    pieces.save(str(folder / "pieces.json"))
    tokenizer = BertTokenizer(tokenizer_file=str(folder / "pieces.json"), model_max_length=64)
    tokenizer.save_pretrained(folder)
    set_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)


def jobs(folder: Path, texts: int = 30) -> list[Job]:
    """Return a dump of `texts` to each format, and a training from the last, with their inputs."""
    from teachonce.teacher_dump.corpus.documents import Corpus

    model, corpus = folder / "teacher", folder / "corpus.txt"
    passages = (" ".join(d.text.split())[:300] for d in Corpus.open(["python-docs"]))
    corpus.write_text("\n".join(islice(passages, texts)) + "\n", encoding="utf-8")
    make_teacher(model, corpus)
    runs = []
    for ext in ("zarr", "h5"):
        out = folder / ext / f"store.{ext}"
        command: Words = (
            "teachonce.teacher_dump.cli",
            "--model",
            model,
            "--corpus",
            corpus,
            "--out",
            out,
            *DUMP,
        )
        runs.append(Job(f"dump to .{ext}", out, (*command, "--device", "cpu"), moment_of_dump,
                        content_of_store, aimed=("writing", "sealing")))  # fmt: skip
    store, out = folder / "store.h5", folder / "training" / "student"
    runs[1].undisturbed()
    shutil.copy(runs[1].out, store)
    command = (
        "teachonce.student_train.cli",
        "--store",
        store,
        "--out",
        out,
        *TRAIN,
        *OFTEN,
        "--device",
        "cpu",
    )
    runs.append(Job("training", out, command, moment_of_training, content_of_student, resume,
                    aimed=("saving", "finishing")))  # fmt: skip
    return runs


@click.command()
@click.option("--dump-kills", default=200, help="Half of them for each format.")
@click.option("--train-kills", default=50)
@click.option("--real", default=3, help="How many of each row are of processes of their own.")
@click.option("--seed", default=0)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work.  [default: /tmp]")
@results_option
@command_errors
def main(
    dump_kills: int, train_kills: int, real: int, seed: int, folder: Path | None, results: Path
) -> None:
    """Print the table and write it to RESULTS.md."""
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for job in jobs(Path(name)):
            job.undisturbed()
            kills = train_kills if job.name == "training" else dump_kills // 2
            rows.append(job.trials(kills, seed, real))
            click.echo(f"{rows[-1]} ({job.seconds:.1f} s undisturbed)", err=True)
    publish(
        "Never lose a dump",
        f"`python -m benchmarks.reliability --dump-kills {dump_kills} --train-kills {train_kills}`."
        " A dump or training is killed with SIGKILL at a random moment of the undisturbed duration;"
        " then the same command runs again and must finish. Two thirds of the kills are aimed at"
        " the short moments (dump: writing a part, sealing; training: saving, finishing). For a"
        " dump, the SHA-256 of all arrays, the order of the texts, the result of `verify` and the"
        " files next to the store are compared with those of an undisturbed run. For a training,"
        " the bytes of weights, tokenizer and losses are compared. Dumps: a random teacher of 2"
        f" layers, parts of {PART_TOKENS} tokens, 2 views. Trainings: 30 steps, a checkpoint every"
        f" 4 steps. The last {real} kills of each row hit separate processes, started as a shell"
        " starts them.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
