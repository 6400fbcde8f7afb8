"""Untrusted tokenizers and settings in a store: `verify` and the start of a training end normally,
or in one line, within limits of time and memory."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from harness.processes import finish, fork, in_small_parts
from teachonce.store import StoreWriter, open_store
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from tests.integrity.support import save_teacher

TEACHERS = ("bert", "roberta", "xlmr")
TEXT = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa! The story of a river was told, and nobody knew why."
DEEP = "[" * 3000 + "]" * 3000
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**9, 10**18, 1e300, "", "a", "x" * 5000, [], {}, [[]], {"type": "none"}
)  # fmt: skip
Settings = dict[str, Any]
Change = Callable[[Settings, random.Random], object]


def _step(settings: Settings, part: str, step: Settings, inner: str) -> None:
    """Insert a step before the existing steps of a part of a tokenizer."""
    own = [settings[part]] if settings.get(part) else []
    settings[part] = {"type": "Sequence", inner: [step, *own]}


def _replace(pattern: Settings, content: str, times: int) -> Change:
    def change(settings: Settings, chance: random.Random) -> None:
        for _ in range(times):
            step = {"type": "Replace", "pattern": pattern, "content": content}
            _step(settings, "normalizer", step, "normalizers")

    return change


def _split(regex: str) -> Change:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return lambda settings, chance: _step(settings, "pre_tokenizer", step, "pretokenizers")


def _padding(settings: Settings, chance: random.Random) -> None:
    settings["padding"] = {
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip


def _template(settings: Settings, chance: random.Random) -> None:
    piece = {"SpecialToken": {"id": "x", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*[piece] * 10**5, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": ["x"]}},
    }


def _token(content: str, number: int | None = None, **flags: bool) -> Change:
    def change(settings: Settings, chance: random.Random) -> None:
        known = len(settings["model"]["vocab"])
        for place, text in enumerate(("constructor", content)):
            settings["added_tokens"].append(
                {"id": known + place if number is None else number + place, "content": text,
                 "special": False, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, **flags}
            )  # fmt: skip

    return change


def _erasing(content: str, kind: str, **settings_of_step: bool) -> Change:
    """Add a token that a normalizer makes empty."""

    def change(settings: Settings, chance: random.Random) -> None:
        step = {"type": kind, **settings_of_step}
        _step(settings, "normalizer", step, "normalizers")
        _token(content, normalized=True)(settings, chance)

    return change


def _bytes_of_bytes(settings: Settings, chance: random.Random) -> None:
    """Add steps that each turn one letter into two."""
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    for _ in range(8):
        _step(settings, "pre_tokenizer", step, "pretokenizers")


def _text_of_texts(settings: Settings, chance: random.Random) -> None:
    """Add a template that repeats the text many times, and use it many times."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    step = {"type": "TemplateProcessing", "single": [text] * 60, "pair": pair, "special_tokens": {}}
    settings["post_processor"] = {"type": "Sequence", "processors": [step] * 5}


def _in_the_model(**changes: Any) -> Change:
    return lambda settings, chance: settings["model"].update(changes)


def _anywhere(settings: Settings, chance: random.Random) -> None:
    """Replace or remove the value at a random place."""
    place: Any = settings
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chance.choice(keys)
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or chance.random() < 0.3:
            break
        place = inner
    if chance.random() < 0.3:
        del place[key]
    else:
        place[key] = chance.choice(VALUES)


CHANGES: dict[str, Change] = {
    "padding to 10^9": _padding,
    "a text doubled 40 times": _replace({"String": "a"}, "aa", 40),
    "a letter of 10^6": _replace({"String": "e"}, "e" * 10**6, 1),
    "a pattern that doubles": _replace({"Regex": "(.)"}, "aaaaaaaa", 12),
    "a regex without end": _split(r"^(a+)+\z"),
    "a regex that goes back": _split(r"(x+x+)+y|(a|aa)+$|(.*)*b"),
    "10^5 special tokens around a text": _template,
    "a token with a huge number": _token("zz", 10**9),
    "a token that becomes empty": _erasing("\u0301", "StripAccents"),
    "a blank that becomes empty": _erasing("   ", "Strip", strip_left=True, strip_right=True),
    "a token that is empty": _token(""),
    "a token of 10^6": _token("z" * 10**6),
    "bytes of bytes of bytes": _bytes_of_bytes,
    "a text of texts of texts": _text_of_texts,
    "a mark of 10^6": _in_the_model(continuing_subword_prefix="#" * 10**6),
    "an end of 10^6": _in_the_model(end_of_word_suffix="#" * 10**6),
    "chance": _in_the_model(dropout=0.5),
}
OTHERS = ("[]", "null", "3", "{", '"x"', DEEP, '{"a":' * 3000 + "1" + "}" * 3000, "")


def _altered(files: dict[str, bytes], chance: random.Random) -> tuple[str, dict[str, bytes]]:
    """Return the files of a teacher with one of them altered, and a description of the change."""
    name = chance.choice(["tokenizer.json"] * 4 + ["config.json", "tokenizer_config.json"])
    if chance.random() < 0.15:
        other = chance.choice(OTHERS)
        return f"{name}: {other[:20]}", files | {name: other.encode()}
    settings = json.loads(files[name])
    if name == "tokenizer.json" and chance.random() < 0.4:
        what = chance.choice(list(CHANGES))
        CHANGES[what](settings, chance)
    else:
        what = "another value somewhere"
        for _ in range(chance.choice([1, 1, 3])):
            _anywhere(settings, chance)
    return f"{name}: {what}", files | {name: json.dumps(settings).encode()}


def rewritten(source: Path, target: Path, files: dict[str, bytes]) -> None:
    """Write a sound store like another one, with other files."""
    with closing(open_store(source)) as store:
        weights = store.teacher_weights()
        writer = StoreWriter.create_or_resume(
            target, store.identity, store.features,
            software=store.meta["software"], calibration=store.calibration, files=files,
            weights={name: weights[name] for name in weights},
        )  # fmt: skip
        with closing(writer):
            for place, part in enumerate(store.manifest.parts):
                opened = store.part(place)
                arrays = {name: opened.all(name) for name in opened.names()}
                writer.write_part(part.number, part.counts, arrays)
            writer.seal()


def _teachers(folder: Path) -> list[Path]:
    """Make a store of a small teacher for each kind of tokenizer."""
    text = folder / "text.txt"
    text.write_text(f"{TEXT}\n" * 12)
    stores = []
    for kind in TEACHERS:
        save_teacher(folder / kind, kind)
        stores.append(folder / f"{kind}.zarr")
        dump(
            DumpOptions(
                model=str(folder / kind), out=stores[-1], corpus=(str(text),), logits="topk:4",
                attention="none", device="cpu", precision="fp32",
            )
        )  # fmt: skip
    return stores


def odd_tokenizers(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Alter the files of `count` stores, then verify and train on them; yield the change, and the
    error in the ending ("" if there is none)."""
    chance, stores = random.Random(seed), _teachers(folder)
    for _ in range(count):
        source = chance.choice(stores)
        with closing(open_store(source)) as store:
            what, files = _altered(dict(store.teacher_files()), chance)
        target, out, log = folder / "odd.zarr", folder / "student", folder / "log"
        rewritten(source, target, files)
        vocab = chance.choice(["40", "teacher"])
        train = ("--store", target, "--out", out, "--vocab", vocab, "--student", "16x1x2")
        more = ("--steps", 1, "--held-out", 0, "--device", "cpu")
        for module, *words in (
            ("teachonce.feature_store.cli", "verify", target),
            ("teachonce.student_train.cli", *train, *more),
        ):
            log.write_text("")
            code = finish(fork(in_small_parts, module, *words, log=log))
            yield f"{source.stem}, {what}, {module} --vocab {vocab}", _wrong(code, log.read_text())
        for path in (target, out):
            shutil.rmtree(path, ignore_errors=True)


def _wrong(code: int | None, text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("Error: ")]
    if code not in (0, 1) or "Traceback" in text or "panicked" in text:
        return f"exit code {code}: {text[-300:]}"
    return "" if len(errors) == code else f"{len(errors)} lines of error: {text[-300:]}"
