"""`verify` finds flipped bits, and values that violate the laws of FORMAT.md.

- `verify` finds a single flipped bit and names where it is.
- Stores with valid checksums whose values violate the laws of FORMAT.md are found.
"""

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
from teachonce.store.format import value_laws
from teachonce.store.format.manifest import seal_checksum
from teachonce.store.format.sequences import SEPARATOR
from teachonce.store.read import part_laws, stored_tokenizer
from teachonce.store.read.part import PartReader
from teachonce.store.read.part_laws import check_values
from teachonce.store.tools import stored_tokens
from teachonce.store.tools.copy import convert
from teachonce.store.tools.stored_tokens import check_tokens
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from tests.integrity.damage import damaged, good_stores, problems, random_flips
from tests.integrity.damage import small_store as make_small_store
from tests.integrity.support import memory_folder
from tests.making.stores import SMALL, TOKENIZER, Copy, stores_in, unfinished

EXT = ("zarr", "h5")
FLIPS = 60


@pytest.mark.parametrize("ext", EXT)
@pytest.mark.parametrize("codec", ("default", "small"))
def test_a_sound_store(copy: Copy, ext: str, codec: str) -> None:
    report = verify(copy(ext, codec))
    assert report.problems == [] and report.parts == 2 and report.arrays > 60


@pytest.mark.parametrize("ext", EXT)
def test_any_flipped_bit_is_found(tmp_path: Path, ext: str) -> None:
    path = make_small_store(tmp_path / f"a.{ext}", parts=1, hidden=("mean",), attention=(), views=1)
    for place, found in random_flips(path, FLIPS, seed=1):
        assert found, place
    assert problems(path) == []


NAMED: dict[str, dict[str, tuple[str, ...]]] = {
    "zarr": {
        "missing file": ("part 1: array text/utf8 cannot be read", "text/utf8/c/0 is missing"),
        "extra file": ("extra file parts/0/notes.txt",),
        "truncated data": ("part 0: array view0/logits/ids cannot be read (chunk 0)",),
        "missing array": ("part 0: array view1/logits/rest cannot be read",),
    },
    "h5": {
        "missing array": ("missing array parts/0/view1/logits/rest",),
        "extra array": ("extra object parts/0/notes",),
        "altered value": ("part 0: array token/id does not match its checksum",),
        "truncated file": ("not a readable HDF5 file",),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("ext", EXT)
def test_lost_swapped_doubled_and_extra_things_are_found(ext: str) -> None:
    with memory_folder() as folder:
        path = make_small_store(folder / f"a.{ext}", hidden=("mean", "groups2.1"), attention=())
        found = dict(damaged(path, folder, ext))
    assert len(found) > 15 and [name for name, lines in found.items() if not lines] == []
    assert len(found["missing part"]) == len(found["duplicated part"]) == 1
    assert "part 1" in found["missing part"][0] and "extra part 9" in found["duplicated part"][0]
    for name in ("swapped arrays", "swapped parts"):
        assert all(line.startswith("part ") for line in found[name] if "SHA-256 at" not in line)
    for name, lines in NAMED[ext].items():
        assert all(any(line in each for each in found[name]) for line in lines), found[name]


def test_no_false_alarm() -> None:
    with memory_folder() as folder:
        for name, found in good_stores(folder, 6):
            assert found == [], name


def test_bytes_of_hdf5_that_belong_to_no_array(copy: Copy) -> None:
    path = copy("h5")
    with path.open("ab") as file:
        file.write(b"more")
    for size in (None, -4 - 32):
        path.write_bytes(path.read_bytes()[:size])
        assert problems(path) == ["the bytes of the file do not match the SHA-256 at its end"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Make smaller stores than other tests: here nearly every test verifies a whole store."""
    return stores_in(tmp_path_factory.mktemp("smaller"), parts=2, sequences=6)


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
    """Set the first two draws of the first token to one id."""
    ids[1] = ids[0]


def no_pair(text: Array) -> None:
    text[text == ord(SEPARATOR)] = ord(" ")


def longer(ends: Array) -> None:
    """Extend each masked word by the character after it."""
    ends += 1


NO_LABEL = "holds a number that is not a label"
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
    "message": ("chat", "chat/end", put(0, 0), "chat is not ascending messages"),
    "role": ("chat", "chat/role", put(0, 9), "chat is not ascending messages"),
    "starts": ("topk", "view1/mask/start", put(-1, 3), "view1/mask/start"),
    "best": ("topk", "view1/logits/ids", put(2, 5000), "logits/ids is outside the vocabulary"),
    "a place": (
        "ranked-topk",
        "view1/logits/places",
        put((2, 1), 5000),
        "distinct ids (sequence 0 of",
    ),
    "distinct": ("ranked-topk", "view0/logits/distinct", put(3, 1000), "distinct is outside the"),
    "distinct twice": ("ranked-topk", "view0/logits/distinct", twice, "distinct has an id twice"),
    "draws": ("sample", "view0/logits/counts", put(1, 200), "does not sum to 12 draws"),
    "drawn": ("sample", "view0/logits/ids", put(1, 7000), "logits/ids is outside the vocabulary"),
    "drawn twice": ("sample", "view0/logits/ids", twice, "has ids that do not ascend"),
    "label": ("classification", "sequence/label", put(3, 4), f"{NO_LABEL} (-1..3)"),
    "tag": ("tagging", "token/tag", put(2, -2), f"token/tag {NO_LABEL}"),
    "tag of a special": ("tagging", "token/tag", put(0, 1), f"token/tag {NO_LABEL}"),
    "classes": (
        "classification",
        "view1/classes/values",
        put((1, 2), np.nan),
        "infinite (sequence 1 of",
    ),
    "tags": (
        "tagging",
        "view0/tags/values",
        put((4, 0), np.inf),
        "infinite (sequence 0 of the part, token 4",
    ),
    "no pair": ("pairs", "text/utf8", no_pair, "needs one '\\x1f'"),
    "a token of both": ("pairs", "token/end", put(1, 10), "tokens: some cover the separator"),
    "a word of both": ("pairs", "view1/mask/end", longer, "view1/mask: some cover the separator"),
    "a vector": ("embedding", "sequence/embedding/scale", put(4, np.inf), "or below 0 (sequence 4"),
    "length": ("embedding", "sequence/embedding/scale", put(2, 0.02), "2 of the part do not have"),
    "prompt": ("embedding", "text/utf8", put(0, ord("T")), "of sequence 0 of the part lacks the"),
    "lengths": ("topk", "sequence/token_start", put(1, 3), "do not match counts.squares"),
}


@pytest.mark.parametrize("law", LAWS)
def test_laws(copy: Copy, law: str) -> None:
    tier, name, change, words = LAWS[law]
    path = copy("h5", "default", tier)
    forge(path, f"parts/1/{name}", change)
    found = verify(path)
    assert found.damaged_parts() == {1}, found.problems
    assert any(words in line and "part 1" in line for line in found.problems), found.problems


def row(place: int, values: list[float]) -> Callable[[Array], Any]:
    return put(place, values)  # type: ignore[arg-type]


TOO_LARGE = "is too large: its squares sum to infinity in float32 (sequence 0 of the part, token 4)"
INFINITE = "is NaN or infinite (sequence 0 of the part, token 4)"
VALUES: list[tuple[str, str, str, Callable[[Array], Any], str]] = [
    ("exact", "topk", "hidden/mean/values", put((4, 3), np.nan), INFINITE),
    ("exact", "topk", "hidden/groups2.1/values", put((4, 3), np.inf), INFINITE),
    ("default", "topk", "hidden/mean/scale", put(4, np.nan), "is NaN, infinite or below 0"),
    ("small", "topk", "hidden/mean/scale", put((4, 0), -1), "is NaN, infinite or below 0"),
    ("exact", "topk", "logits/logprobs", put((4, 1), np.nan), "is not a log-probability"),
    ("exact", "topk", "logits/logprobs", put((4, 0), 5), "is not a log-probability"),
    ("exact", "topk", "logits/logprobs", row(4, [-9, -1, -9, -9, -9]), "is not ordered"),
    ("exact", "topk", "logits/logprobs", row(4, [-0.1, -0.1, -8, -8, -8]), "more than 1"),
    ("default", "topk", "logits/logprobs", row(4, [9, 9, 9, 9, 9]), "more than 1"),
    ("small", "topk", "logits/logprobs", row(4, [9, 9, 9, 9, 9]), "more than 1"),
    ("exact", "topk", "logits/rest", put(4, np.nan), "is not a log-probability"),
    ("exact", "topk", "logits/rest", put(4, 1), "is not a log-probability"),
    ("default", "topk", "logits/rest", put(4, 0), "more than 1"),
    ("exact", "topk", "logits/logprobs", row(4, [-np.inf] * 5), "far too improbable"),
    ("default", "topk", "logits/logprobs", row(4, [60000] * 5), "far too improbable"),
    ("exact", "topk", "logits/logprobs", row(4, [-2, -2, -9, -9, -9]), "less than 1"),
    ("default", "topk", "logits/rest", put(4, 65535), "less than 1"),
    ("small", "topk", "logits/rest", put(4, 65535), "less than 1"),
    ("default", "topk", "logits/ids", row(4, [9, 8, 9, 7, 6]), "has an id twice"),
    ("default", "topk", "logits/log_partition", put(4, np.inf), INFINITE),
    ("default", "topk", "logits/log_partition", put(4, 1e38), TOO_LARGE),
    ("exact", "topk", "hidden/mean/values", put((4, 3), 1e30), TOO_LARGE),
    ("exact", "head", "logits/values", put((4, 3), -1e38), TOO_LARGE),
    ("exact", "tagging", "tags/values", put((4, 0), 1e38), TOO_LARGE),
    ("exact", "embedding", "sequence/embedding/values", put((4, 1), 1e38), "is too large"),
    ("default", "head", "logits/values", put((4, 3), np.inf), INFINITE),
    ("exact", "head", "logits/values", put((4, 3), np.nan), INFINITE),
    ("small", "head", "logits/scale", put(4, np.inf), "is NaN, infinite or below 0"),
    ("exact", "topk", "attention/mean/values", put(4, np.nan), "is not a probability"),
    ("exact", "topk", "attention/mean/values", put(4, -0.5), "is not a probability"),
    ("exact", "topk", "attention/mean/values", put(0, 1), "do not sum to 1"),
    ("default", "topk", "attention/mean/values", put(0, 255), "do not sum to 1"),
    ("default", "sample", "logits/counts", put(1, 0), "logits/counts is 0"),
    ("exact", "classification", "classes/values", put((4, 0), -np.inf), "is NaN or infinite"),
    ("exact", "tagging", "tags/values", put((4, 0), np.nan), INFINITE),
    ("exact", "embedding", "sequence/embedding/values", put((4, 1), np.nan), "(sequence 4 of"),
]


BETWEEN_ARRAYS = ("ordered", "more than 1", "less than 1", "improbable", "twice", "sum to 1")


@pytest.mark.parametrize("case", VALUES, ids=lambda case: f"{case[0]} {case[2]}")
def test_values_that_no_teacher_gives(copy: Copy, case: Any) -> None:
    """`verify` and a checked stream name array, part and token of an impossible value. Without
    `check`, a stream finds only errors within one array."""
    codec, tier, name, change, words = case
    path = copy("h5", codec, tier)
    inner = name if name.startswith("sequence/") else f"view0/{name}"
    forge(path, f"parts/1/{inner}", change)
    (problem,) = verify(path).problems
    inner = inner.replace("rest", "logprobs") if words.endswith("than 1") else inner
    assert f"part 1: {inner}" in problem and words in problem
    by_itself = not any(each in words for each in BETWEEN_ARRAYS)
    for check in (True, False) if by_itself else (True,):
        with open_store(path) as store, pytest.raises(StoreError) as refused:
            list(store.stream(check=check))
        assert f"part 1: {inner}" in str(refused.value) and words in str(refused.value)


def test_laws_of_long_rows_are_checked_in_small_slices(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes, find_violation = copy("h5", "exact"), list[int](), value_laws.find_violation

    def spy(*arguments: Any) -> Any:
        sizes.append(arguments[-1].nbytes)
        return find_violation(*arguments)

    forge(path, "parts/1/view0/hidden/mean/values", put((40, 3), np.nan))
    monkeypatch.setattr("teachonce.store.read.part.SLICE_BYTES", 600)  # 4 of its rows
    monkeypatch.setattr(part_laws, "find_violation", spy)
    with open_store(path) as store:
        part = store.part(1)
        sequence = int(np.searchsorted(part.token_start, 40, "right")) - 1
        token = 40 - part.token_start[sequence]
        words = rf"mean/values is NaN .*sequence {sequence} of the part, token {token}\)"
        with pytest.raises(StoreError, match=words):
            check_values(part, store.calibration)
    assert max(sizes) <= 600


@pytest.mark.parametrize("tier", ("topk", "ranked-topk", "sample", "head", "next-topk"))
def test_laws_between_arrays_read_the_ids_of_tokens_for_observed_alone(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    read, found = PartReader.read, set[str]()

    def spy(self: PartReader, name: str, low: int, high: int) -> Array:
        found.add(name)
        return read(self, name, low, high)

    monkeypatch.setattr(PartReader, "read", spy)
    with open_store(copy("h5", "default", tier)) as store:
        check_values(store.part(1), store.calibration)
    assert ("token/id" in found) == (tier == "next-topk")


@pytest.mark.parametrize("name", ("head/weight", "weights/pooler.bias"))
def test_weights_that_are_not_finite(copy: Copy, name: str) -> None:
    path = copy("h5", "default", "head")
    forge(path, f"teacher/{name}", put(1, np.nan))
    (problem,) = verify(path).problems
    assert f"teacher/{name} has NaN or infinite values" in problem
    with open_store(path) as store, pytest.raises(StoreError, match="has NaN or infinite values"):
        store.head() if "head" in name else dict(store.teacher_weights())


def test_what_encodes_such_values_again_refuses_them(copy: Copy, tmp_path: Path) -> None:
    path = copy("h5", "exact")
    forge(path, "parts/1/view0/hidden/mean/values", put((4, 3), np.nan))
    with pytest.raises(StoreError, match="part 1: view0/hidden/mean/values is NaN or infinite"):
        convert(path, tmp_path / "small.h5", "small")
    convert(path, tmp_path / "copy.zarr")  # the same values, unchanged
    assert verify(tmp_path / "copy.zarr").damaged_parts() == {1}


def test_tokens_are_checked_when_a_training_opens_the_store(copy: Copy) -> None:
    path = copy("h5")
    check_tokens(open_store(path))
    forge(path, "parts/0/token/id", put(3, 11))
    words = "part 0: the tokenizer does not give .* sequence 0 .* run `feature-store verify "
    with pytest.raises(StoreError, match=words):
        check_tokens(open_store(path))
    fs = open_store(path)
    fs.meta["software"] = {"tokenizers": "0.1"}
    with pytest.raises(StoreError, match=r"with tokenizers 0.1, read with \d.*: install 0.1"):
        check_tokens(fs)


def test_the_check_of_a_training_ends_at_the_first_difference(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter([None, "part 0: differs"])
    monkeypatch.setattr(stored_tokens, "other_tokens", lambda *arguments: next(lines))
    with pytest.raises(StoreError, match="part 0: differs; "):
        check_tokens(open_store(copy("h5")))


def test_the_check_of_a_training_passes_errors_of_reading_on(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise StoreError("it cannot be read") from PermissionError()

    store = open_store(copy("h5"))
    monkeypatch.setattr(PartReader, "read", fail)
    with pytest.raises(StoreError, match="^it cannot be read$") as refused:
        check_tokens(store)
    assert isinstance(refused.value.__cause__, PermissionError)


def test_the_check_of_a_training_on_a_store_without_parts(tmp_path: Path) -> None:
    unfinished(tmp_path / "store.zarr", SMALL, 0)
    store = open_store(tmp_path / "store.zarr", allow_partial=True)
    with pytest.raises(StoreError, match="store.zarr: no part was published; "):
        check_tokens(store)


def test_a_bounded_check_of_an_unfinished_store_leaves_out_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished(tmp_path / "store.zarr", SMALL, 3)
    monkeypatch.setattr(stored_tokenizer, "is_plain", lambda data: False)
    store = open_store(tmp_path / "store.zarr", allow_partial=True)
    check_tokens(store)
    (tmp_path / "store.zarr/parts/0/zarr.json").write_text("{}")
    with pytest.raises(StoreError, match="quarantines part 0"):
        check_tokens(store)


def test_another_tokenizer(copy: Copy) -> None:
    path = copy("h5")
    place = TOKENIZER.index(b'"##y"') + 3
    forge(path, "teacher/files/tokenizer.json", put(place, ord("z")))
    assert verify(path).damaged_parts() == {0, 1}
    forge(path, "teacher/files/tokenizer.json", put(0, ord("[")))
    (problem,) = verify(path).problems
    assert "tokenizer.json in it cannot be loaded" in problem


NOT_POSITIVE = "calibration of mean is not finite with deviations over 0"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *(("deviation", value, NOT_POSITIVE) for value in (0, np.nan, -1)),
        ("mean", 1e20, "calibration of mean is too large: its squares sum to infinity in float32"),
        ("deviation", 1e19, "decodes to states whose squares sum to infinity in float32"),
    ],
)
def test_a_calibration_by_which_no_states_can_be_decoded(
    copy: Copy, key: str, value: float, words: str
) -> None:
    path = copy("h5")
    forge(path, f"calibration/hidden/mean/{key}", put(3, value))
    problems = verify(path).problems
    assert any(words in line for line in problems)
    assert words != NOT_POSITIVE or problems == [NOT_POSITIVE]


def test_minus_zero_hides_no_scale_that_is_too_large(copy: Copy) -> None:
    """A scale of -0.0 does not hide a scale that is too large, although its bits are larger."""
    path, scales = copy("h5"), [-0.0, 60000]
    forge(path, "parts/1/view0/hidden/mean/scale", lambda values: np.copyto(values[3:5], scales))
    forge(path, "calibration/hidden/mean/deviation", put(3, 1e13))
    words = "part 1: view0/hidden/mean/scale decodes to states whose squares .* token 4"
    with open_store(path) as store, pytest.raises(StoreError, match=words):
        list(store.stream(features=("hidden",)))


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
