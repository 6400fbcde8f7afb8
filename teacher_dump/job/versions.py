"""Checks whether a dump may continue with other versions of the libraries: only if the teacher's
output is the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.checkpoints.fields import CONFIG, FIELDS
from teachonce.store import FeatureStore, StoreWriter, open_store
from teachonce.store.format.identity import object_in
from teachonce.support.console import counted
from teachonce.support.differences import ABSENT, differences, first_few
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.packages import other_versions, version_words

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher

# Fields of config.json that change no number: the precision is an argument of a dump, the class of
# the model is a key of its identity. Hashes in stores leave out exactly these, so this set is part
# of the format: another set would give finished and unfinished stores other hashes.
UNHASHED = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
)
# Top-level fields of config.json that may differ between two runs of a dump.
HARMLESS = {
    name for fields in FIELDS[CONFIG] if fields.treatment == "harmless" for name in fields.names
} | UNHASHED
SAMPLE = 16  # sequences that the teacher reads again


def config_hash(config: bytes) -> str:
    """Hash a config.json without the fields of UNHASHED: hexadecimal SHA-256."""
    return hashlib.sha256(
        json.dumps(_hashed_fields(json.loads(config)), sort_keys=True).encode()
    ).hexdigest()


def _hashed_fields(value: Any) -> Any:
    if isinstance(value, list):
        return [_hashed_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _hashed_fields(field) for name, field in value.items() if name not in UNHASHED}


def config_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], other: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the differences between two config.json files, except in the fields of HARMLESS.

    other: whether the versions of the libraries differ; fields that only one file has are then
        ignored.
    """
    for key, old, new in differences(_hashed_fields(then), _hashed_fields(now), "config"):
        harmless = key.split(".")[1] in HARMLESS
        # Releases of transformers add and drop fields with their defaults.
        if not (harmless or (other and ABSENT in (old, new))):
            yield key, old, new


def changes_no_value(key: str, one_sided: bool, versions: Collection[str]) -> bool:
    """Return whether dumps that differ in this key of their identity may still store the same
    values.

    `versions` are the libraries whose versions differ; `one_sided` means that only one dump has the
    key. Sequences and a sample of values are compared later.
    """
    if key == "tokenizer_hash":
        return not {"tokenizers", "transformers"}.isdisjoint(versions)
    *above, field = key.split(".")
    return above[:1] == ["config"] and (
        field in UNHASHED or key.split(".")[1] in HARMLESS or (one_sided and bool(versions))
    )


def identity_as_stored(
    identity: dict[str, Any], files: Mapping[str, bytes], out: Path | str
) -> dict[str, Any]:
    """Return the identity of a dump. If the store at `out` has other hashes of the same teacher,
    they replace the dump's.

    Raises UserError if the configuration differs but the weights are the same.
    """
    # Hashes of one teacher differ because older releases of this software hashed all fields of
    # config.json, and because libraries add fields to config.json and tokenizer.json.
    attributes = StoreWriter.peek(out, None)
    if not attributes or not (old := object_in(attributes["identity"], "teacher")):
        return identity
    versions, updated = other_versions(attributes["software"]), deepcopy(identity)
    new, config = updated["teacher"], files["config.json"]
    if old.get("config_hash") == hashlib.sha256(config).hexdigest():  # an older release's hash
        new["config_hash"] = old["config_hash"]
    elif old.get("config_hash") != new["config_hash"]:
        differ = [*config_differences(_stored_config(out), json.loads(config), bool(versions))]
        if not differ:
            new["config_hash"] = old.get("config_hash")
        # With other weights it is another teacher, which the comparison of identities reports.
        elif old.get("weights_hash") == new["weights_hash"]:
            note = f" ({version_words(versions)})" if versions else ""
            diff = first_few([f"{key} is {a} in the store and {b} now" for key, a, b in differ])
            raise UserError(
                f"{out}: holds a dump of a teacher with another config.json: {diff}{note}; restore"
                f" that config.json to continue, or {ANOTHER}"
            )
    has_parts = attributes["state"] == "sealed" or StoreWriter.published_counts(out)[0]
    if versions.keys() & {"tokenizers", "transformers"} and has_parts:
        # Safe: `check_published` compares the tokens of each written part with the tokenizer's.
        updated["tokenizer_hash"] = attributes["identity"].get("tokenizer_hash")
    return updated


def _stored_config(out: Path | str) -> dict[str, Any]:
    """Return the teacher's config.json in a store, finished or not; {} if it cannot be read."""
    try:
        with closing(open_store(out, allow_partial=True)) as store:
            return store.teacher_settings("config.json")
    except UserError:  # the writer of the store reports it
        return {}


def check_numbers(
    out: Path | str, grown_from: FeatureStore | None, teacher: Teacher, say: Callable[[str], object]
) -> None:
    """Compare a sample of the unfinished store, and of the store of --grow-from, with the teacher's
    output, if they were written with other versions of the libraries.

    Raises UserError, with the versions to install, if the values differ.
    """
    attributes = StoreWriter.peek(out)
    if attributes is not None and other_versions(attributes["software"]):
        with closing(open_store(out, allow_partial=True)) as store:
            _check_store(store, teacher, say)
    if grown_from is not None:
        _check_store(grown_from, teacher, say)


def _check_store(store: FeatureStore, teacher: Teacher, say: Callable[[str], object]) -> None:
    versions = other_versions(store.meta["software"])
    if not versions or not len(store):
        return
    from teachonce.teacher_dump.comparison.rerun import compare  # loads torch

    problems = compare(store, teacher, SAMPLE, 0).problems
    if problems:
        install = " ".join(f"{name}=={then}" for name, (then, _) in versions.items())
        raise UserError(
            f"{store.path}: the teacher's output differs with other versions of the libraries"
            f" ({version_words(versions)}): {first_few(problems)}; install the earlier versions to"
            f" continue (pip install {install}), or {ANOTHER}"
        )
    sample = counted(min(SAMPLE, len(store)), "sequence")
    named = version_words(versions)
    say(f"versions  {named}; {sample} of {store.path} compared: the numbers are the same")
