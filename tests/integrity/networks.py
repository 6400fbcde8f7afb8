"""A store behind networks that lose, tear, alter and refuse answers is read correctly, or one line
reports that it could not be fetched; no data are reported as damaged."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

from teachonce.store import Unreachable, open_store
from teachonce.store.containers import network
from teachonce.store.tools.copy import convert, upload
from teachonce.store.tools.verify import verify
from tests.integrity.damage import problems, small_store
from tests.integrity.support import content_of
from tests.rough_network import BUCKET, S3, Weather, running_s3

URL = f"s3://{BUCKET}/store.zarr"
LOST = ("500", "503", "429", "reset", "torn", "truncated", "slow")  # up to three of ten answers
ALTERED = ("flipped", "unmatched", "short", "404")  # up to three of a hundred
REFUSED = ("403", "expired", "unknown key", "skewed", "redirect", "region")
ACCUSATIONS = ("damaged", "dump", "repair", "restore")
HURRY, LONG = 0.3, 120.0  # seconds until a dead network, or a rough network, is given up


def _streamed(folder: Path, s3: S3) -> str:
    with closing(open_store(URL)) as store:
        texts = [text for batch in store.stream(seed=1) for text in batch.texts]
    with closing(open_store(folder / "sound.zarr")) as store:
        expected = [text for batch in store.stream(seed=1) for text in batch.texts]
    return "" if texts == expected else "another text"


def _verified(folder: Path, s3: S3) -> str:
    return "; ".join(verify(URL).problems)


def _converted(folder: Path, s3: S3) -> str:
    copy = folder / "copy.zarr"
    convert(URL, copy)
    same = not problems(copy) and content_of(copy) == content_of(folder / "sound.zarr")
    shutil.rmtree(copy)
    return "" if same else "another copy"


def _uploaded(folder: Path, s3: S3) -> str:
    url = f"s3://{BUCKET}/{s3.weather.seed}.zarr"
    upload(folder / "sound.zarr", url)
    s3.weather = Weather()
    return "; ".join(verify(url).problems)


WAYS: dict[str, Callable[[Path, S3], str]] = {
    "stream": _streamed,
    "verify": _verified,
    "convert": _converted,
    "upload": _uploaded,
}


def rough(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Try `count` networks; yield the faults of each, and the error or ""."""
    chance = random.Random(seed)
    small: dict[str, Any] = {"views": 1, "hidden": ("mean",), "attention": (), "logits": None}
    sound = small_store(folder / "sound.zarr", **small)
    with running_s3() as s3:
        upload(sound, URL)
        for number in range(count):
            way, dies = chance.choice(list(WAYS)), chance.random() < 0.5
            weather = _dying(chance, number) if dies else _rough(chance, number, way)
            shares = ", ".join(f"{name} {share:.0%}" for name, share in weather.faults.items())
            yield f"{way}, {'in the end ' * dies}{shares}", _outcome(way, dies, folder, s3, weather)


def _rough(chance: random.Random, seed: int, way: str) -> Weather:
    faults = {chance.choice(LOST): chance.uniform(0.05, 0.3)}
    if way != "upload":  # the server checks the checksums of an upload
        faults[chance.choice(ALTERED)] = chance.uniform(0.005, 0.03)
    return Weather(faults, seed=seed)


def _dying(chance: random.Random, seed: int) -> Weather:
    """Return weather in which every request fails from some request on."""
    left = iter(range(chance.randrange(60)))
    fault = chance.choice((*REFUSED, "500", "503", "429", "reset"))
    return Weather({fault: 1.0}, lambda method, path: next(left, None) is None, seed)


def _outcome(way: str, dies: bool, folder: Path, s3: S3, weather: Weather) -> str:
    patience = HURRY if dies else LONG
    with (
        mock.patch.object(network, "FIRST_PAUSE", 0.01),
        mock.patch.object(network, "PATIENCE", patience),
        mock.patch.object(network, "FIRST_PATIENCE", patience),
    ):
        s3.weather = weather
        try:
            return WAYS[way](folder, s3)
        except Unreachable as error:
            line = str(error)
            accused = any(word in line for word in ACCUSATIONS) or "\n" in line
            return "" if dies and not accused else line
        except Exception as error:  # false damage, or a crash: both are findings
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            s3.weather = Weather()
            shutil.rmtree(folder / "copy.zarr", ignore_errors=True)
