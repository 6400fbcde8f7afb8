"""What the bytes mean: a store whose checksums fit, but which breaks the laws of FORMAT.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from teachonce.store import StoreError, open_store
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.store.format.manifest import seal_checksum
from teachonce.store.format.pairs import SEPARATOR
from teachonce.store.tools.laws import check_tokens
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.store.making import TOKENIZER

Copy = Callable[..., Path]


def forge(path: Path, name: str, change: Callable[[Array], Any]) -> None:
    """Alter an array of an HDF5 store, and every checksum over it."""
    with h5py.File(path, "r+") as file:
        values = file[name][:]
        before = hashlib.sha256(values.tobytes()).hexdigest()
        change(values)
        after = hashlib.sha256(values.tobytes()).hexdigest()
        file[name][...] = values
        data = file["manifest"][:].tobytes()
        value = json.loads(data)
        arrays = value["arrays"]
        if name_in_part := name.startswith("parts/"):
            _, number, inner = name.split("/", 2)
            part = file[f"parts/{number}"]
            arrays = value["parts"][int(number)]["arrays"]
            text = part.attrs["part"].decode().replace(before, after)
            part.attrs.create("part", np.bytes_(text.encode()))
            name = inner
        arrays[name]["sha256"] = after
        if not name_in_part:
            text = json.dumps(arrays)
            file.attrs.create("arrays", np.bytes_(text.encode("ascii")))
        data = json.dumps(value).encode()
        del file["manifest"]
        file["manifest"] = np.frombuffer(data, np.uint8)
        checksum = seal_checksum(data, file.attrs["created"].decode())
        file.attrs.create("checksum", np.bytes_(checksum))
    append_digest(path)


def put(place: int | tuple[int, ...], value: float) -> Callable[[Array], Any]:
    return lambda values: values.__setitem__(place, value)


def twice(ids: Array) -> None:
    """Give the first two draws of the first token one id."""
    ids[1] = ids[0]


def no_pair(text: Array) -> None:
    text[text == ord(SEPARATOR)] = ord(" ")


def longer(ends: Array) -> None:
    """Let each masked word reach over the character behind it."""
    ends += 1


LAWS: dict[str, tuple[str, str, Callable[[Array], Any], str]] = {
    "id": ("topk", "token/id", put(5, 1000), "token ids outside the vocabulary"),
    "end": ("topk", "token/end", put(3, 9999), "offsets outside the text"),
    "begin": ("topk", "token/begin", put(3, 50), "offsets outside the text"),
    "special": ("topk", "token/special", put(3, True), "special tokens with offsets"),
    "another token": ("topk", "token/id", put(3, 11), "does not give the stored tokens"),
    "another offset": ("topk", "token/end", put(1, 1), "does not give the stored tokens"),
    "text": ("topk", "text/utf8", put(2, 255), "text is not UTF-8"),
    "letters": ("topk", "text/utf8", put(0, ord("X")), "does not give the stored tokens"),
    "mask": ("topk", "view1/mask/end", put(0, 0), "view1/mask is not ascending"),
    "action": ("topk", "view1/mask/action", put(0, 3), "view1/mask is not ascending"),
    "starts": ("topk", "view1/mask/start", put(-1, 3), "view1/mask/start"),
    "best": ("topk", "view1/logits/ids", put(2, 5000), "ids are outside the vocabulary"),
    "draws": ("sample", "view0/logits/counts", put(1, 200), "do not sum to 12 draws"),
    "drawn": ("sample", "view0/logits/ids", put(1, 7000), "ids are outside the vocabulary"),
    "drawn twice": ("sample", "view0/logits/ids", twice, "of a token do not ascend"),
    "label": ("classification", "sequence/label", put(3, 4), "sequence/label holds what is no"),
    "tag": ("tagging", "token/tag", put(2, -2), "token/tag holds what is no label"),
    "tag of a special": ("tagging", "token/tag", put(0, 1), "token/tag holds what is no label"),
    "classes": ("classification", "view1/classes/values", put((1, 2), np.nan), "are not finite"),
    "tags": ("tagging", "view0/tags/values", put((4, 0), np.inf), "are not finite"),
    "no pair": ("pairs", "text/utf8", no_pair, "has not one '\\x1f'"),
    "a token of both": ("pairs", "token/end", put(1, 10), "tokens: some cover the separator"),
    "a word of both": ("pairs", "view1/mask/end", longer, "view1/mask: some cover the separator"),
    "a vector": ("embedding", "sequence/embedding/scale", put(4, np.inf), "are not finite"),
    "length": ("embedding", "sequence/embedding/scale", put(2, 0.02), "2 of the part have not"),
    "prompt": ("embedding", "text/utf8", put(0, ord("T")), "of sequence 0 of the part lacks the"),
    "lengths": ("topk", "sequence/token_start", put(1, 3), "do not give the squares"),
}


@pytest.mark.parametrize("law", LAWS)
def test_laws(copy: Copy, law: str) -> None:
    tier, name, change, words = LAWS[law]
    path = copy("h5", "default", tier)
    forge(path, f"parts/1/{name}", change)
    found = verify(path)
    assert found.damaged_parts() == {1}, found.problems
    assert any(words in line and "part 1" in line for line in found.problems), found.problems


def test_tokens_are_checked_when_a_training_opens_the_store(copy: Copy) -> None:
    path = copy("h5")
    check_tokens(open_store(path))
    forge(path, "parts/0/token/id", put(3, 11))
    words = "part 0: the tokenizer does not give .* sequence 0 .* run `feature-store verify`"
    with pytest.raises(StoreError, match=words):
        check_tokens(open_store(path))
    fs = open_store(path)
    fs.meta["software"] = {"tokenizers": "0.1"}
    with pytest.raises(StoreError, match=r"with tokenizers 0.1, read with \d.*: install that"):
        check_tokens(fs)


def test_another_tokenizer(copy: Copy) -> None:
    path = copy("h5")
    place = TOKENIZER.index(b'"##y"') + 3
    forge(path, "teacher/files/tokenizer.json", put(place, ord("z")))
    assert verify(path).damaged_parts() == {0, 1, 2}
    forge(path, "teacher/files/tokenizer.json", put(0, ord("[")))
    (problem,) = verify(path).problems
    assert "tokenizer.json in it cannot be loaded" in problem


@pytest.mark.parametrize("value", (0, np.nan, -1))
def test_a_calibration_by_which_nothing_can_be_decoded(copy: Copy, value: float) -> None:
    path = copy("h5")
    forge(path, "calibration/hidden/mean/deviation", put(3, value))
    assert verify(path).problems == ["calibration of mean is not finite with deviations over 0"]


def test_values_outside_the_parts_are_checked_when_they_are_read(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        file["teacher/weights/pooler.bias"][1] = 7
    with pytest.raises(StoreError, match="pooler.bias does not match its checksum"):
        open_store(path).teacher_weights()["pooler.bias"]
    with h5py.File(path, "r+") as file:
        file["calibration/hidden/mean/deviation"][1] = 7
    with pytest.raises(StoreError, match="deviation does not match its checksum"):
        open_store(path)


def test_content_is_the_same_in_both_formats(made: Callable[..., Any], copy: Copy) -> None:
    one, other = (open_store(made(ext)[0]).manifest.content() for ext in ("zarr", "h5"))
    assert one == other and len(one) == 64
    path = copy("h5")
    forge(path, "parts/1/token/id", put(3, 11))
    assert open_store(path).manifest.content() != one
