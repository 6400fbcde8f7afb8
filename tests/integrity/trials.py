"""The checks of integrity at any length, and the errors that each finds."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import click

from tests.integrity import (
    damage,
    edited_corpora,
    forgery,
    laundering,
    networks,
    odd_texts,
    odd_tokenizers,
)
from tests.integrity.support import memory_folder
from tests.making.models import trained_tokenizer

BATCH = 2000  # texts that are processed together
HEAD = ("what", "cases", "as required", "failures", "seconds")
Found = tuple[int, list[str]]


def flips(folder: Path, ext: str, count: int, seed: int) -> Found:
    """Check that every flipped bit is reported, with its part and array if it is in their data, and
    that no problem remains after it is restored."""
    store = damage.small_store(folder / f"flips.{ext}")
    missed = [place for place, printed in damage.random_flips(store, count, seed) if not printed]
    return count + 1, missed + damage.problems(store)


def damages(folder: Path, ext: str, count: int, seed: int) -> Found:
    """Check that truncated, missing, swapped, duplicated and extra files are reported."""
    store = damage.small_store(folder / f"damages.{ext}")
    missed = [name for name, found in damage.damaged(store, folder, ext) if not found]
    return len(damage.DAMAGES[ext]), missed


def good(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check that none of many kinds of sound stores is reported."""
    alarms = [f"{name}: {found[0]}" for name, found in damage.good_stores(folder, count) if found]
    return count, alarms


def forgeries(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check that forged stores with valid checksums are refused, read as before, or reported."""
    found = [forgery.in_process(folder, ext, seed, count // 2) for ext in damage.FORMATS]
    return count // 2 * 2, [line for each in found for line in each["wrong"]]


def launderings(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check that every copying command refuses an array whose change only the manifest detects."""
    cases = list(laundering.laundered(folder, count, seed))
    return len(cases), [what for what, line in cases if not line]


def rough_networks(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check that object stores behind rough networks give the same bytes or one line."""
    cases = list(networks.rough(folder, count, seed))
    return len(cases), [f"{what}: {wrong}" for what, wrong in cases if wrong]


def edits(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check that corpora edited during a dump are refused, or give a store of the hashed text."""
    cases = list(edited_corpora.edited(folder, count, seed))
    return count, [f"{what}: {end}" for what, end in cases if end not in ("refused", "sound")]


def tokenizers(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check that untrusted tokenizers and settings end verify and a training normally or in a
    line."""
    cases = list(odd_tokenizers.odd_tokenizers(folder, count, seed))
    return len(cases), [f"{what}: {wrong}" for what, wrong in cases if wrong]


def texts(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check unusual texts in corpus, windows, store and alignment, with three tokenizers."""
    return count, _broken(folder, odd_texts.odd_texts(seed, count))


def characters(folder: Path, _: str, count: int, seed: int) -> Found:
    """Check every code point up to `count` in corpus, windows, store and alignment."""
    return count, _broken(folder, odd_texts.characters(count))


def _broken(folder: Path, odd: Iterator[str]) -> list[str]:
    tokenizers = {kind: trained_tokenizer(kind) for kind in odd_texts.KINDS}
    broken: list[str] = []
    while batch := list(islice(odd, BATCH)):
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            try:
                odd_texts.run(batch, Path(inner), tokenizers)
            except Exception as error:  # a violated law, or a crash: both are findings
                broken.append(f"{type(error).__name__}: {error}"[:200])
    return broken


Check = Callable[[Path, str, int, int], Found]
CHECKS: tuple[tuple[str, Check, str, str], ...] = (
    ("flipped bits, Zarr: found", flips, "zarr", "flips"),
    ("flipped bits, HDF5: found", flips, "h5", "flips"),
    ("lost, swapped, duplicated files, Zarr: found", damages, "zarr", "flips"),
    ("lost, swapped, duplicated arrays, HDF5: found", damages, "h5", "flips"),
    ("sound stores: no alarm", good, "", "stores"),
    ("forged stores: refused, read unchanged, or reported by `verify`", forgeries, "", "forgeries"),
    (
        "altered arrays with matching chunk checksums: copying is refused",
        launderings,
        "",
        "launderings",
    ),
    ("corpora edited during a dump: refused, or a sound store", edits, "", "edits"),
    (
        "an untrusted tokenizer or settings: correct end or one-line error, within bounds",
        tokenizers,
        "",
        "tokenizers",
    ),
    (
        "unreliable networks in front of S3: the same bytes, or a one-line error",
        rough_networks,
        "",
        "networks",
    ),
    ("every code point, 3 tokenizers: nothing lost, invariants hold", characters, "", "characters"),
    ("odd texts, 3 tokenizers: nothing lost, invariants hold", texts, "", "texts"),
)


def checked(seed: int, **counts: int) -> tuple[list[list[object]], list[str]]:
    """Run each check with a count; return the rows of HEAD, and the errors."""
    rows, wrong = list[list[object]](), Counter[str]()
    for name, check, ext, option in CHECKS:
        if not counts.get(option):
            continue
        started = time.perf_counter()
        with memory_folder() as folder:
            cases, others = check(folder, ext, counts[option], seed)
        seconds = time.perf_counter() - started
        rows.append([name, cases, cases - len(others), len(others), f"{seconds:.0f}"])
        wrong.update(f"{name}: {other}" for other in others)
        click.echo(f"{name}: {cases} cases, {len(others)} failures, {seconds:.0f} s", err=True)
    return rows, list(wrong)
