"""Decides whether a dump may resume under other versions of the libraries: only if the teacher's
numbers are the same."""

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
from teachonce.support.console import counted
from teachonce.support.differences import ABSENT, differences, first_few
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.installed import other_versions, version_words

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher

IDLE = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"})
"""Fields of config.json that decide no number: the precision is an argument of a dump, the class of
the model is a key of its identity. Hashes in stores leave out these, and no others."""
HARMLESS = {
    name for some in FIELDS[CONFIG] if some.treatment == "harmless" for name in some.names
} | IDLE
"""Fields of config.json, not of the tables in it, that may differ between two runs of a dump."""
SAMPLE = 16  # sequences that the teacher reads again


def config_hash(config: bytes) -> str:
    """Hash the fields of a config.json without those of IDLE: hexadecimal SHA-256."""
    return hashlib.sha256(
        json.dumps(_deciding(json.loads(config)), sort_keys=True).encode()
    ).hexdigest()


def _deciding(value: Any) -> Any:
    if isinstance(value, list):
        return [_deciding(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _deciding(each) for name, each in value.items() if name not in IDLE}


def config_differences(
    then: Mapping[str, Any], now: Mapping[str, Any], other: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield what differs between two config.json, without the fields of HARMLESS. Under `other`
    versions of the libraries, fields that only one of the two has are left out: releases of
    transformers add and drop fields with their defaults."""
    for key, old, new in differences(_deciding(then), _deciding(now), "config"):
        harmless = key.split(".")[1] in HARMLESS
        if not (harmless or (other and ABSENT in (old, new))):
            yield key, old, new


def idle(key: str, one_sided: bool, versions: Collection[str]) -> bool:
    """Whether a difference between the facts of two dumps, made with other `versions` of some
    libraries, decides no number: sequences and a sample of numbers are compared later."""
    if key == "tokenizer_hash":
        return not {"tokenizers", "transformers"}.isdisjoint(versions)
    *above, field = key.split(".")
    return above[:1] == ["config"] and (
        field in IDLE or key.split(".")[1] in HARMLESS or (one_sided and bool(versions))
    )


def identity_as_begun(
    identity: dict[str, Any], files: Mapping[str, bytes], out: Path | str
) -> dict[str, Any]:
    """Return the identity of a dump. If the store at `out` has hashes of another form of the same
    config.json and tokenizer.json, the identity has these hashes: older releases of this software
    hashed all fields of config.json, and libraries write fields of their own.

    Raises UserError if only the configuration differs.
    """
    attributes = StoreWriter.peek(out) or StoreWriter.peek(out, "sealed")
    begun = (attributes or {}).get("identity", {})
    theirs, found = begun.get("teacher"), deepcopy(identity)
    if attributes is None or not isinstance(theirs, dict):
        return identity
    versions = other_versions(attributes["software"])
    ours, config = found["teacher"], files["config.json"]
    if theirs.get("config_hash") == hashlib.sha256(config).hexdigest():  # of all fields
        ours["config_hash"] = theirs["config_hash"]
    elif theirs.get("config_hash") != ours["config_hash"]:
        differ = [*config_differences(_stored_config(out), json.loads(config), bool(versions))]
        if not differ:
            ours["config_hash"] = theirs.get("config_hash")
        elif theirs.get("weights_hash") == ours["weights_hash"]:
            more = f" ({version_words(versions)})" if versions else ""
            each = first_few([f"{key} is {old} there and {new} now" for key, old, new in differ])
            raise UserError(
                f"{out}: is of a teacher with another config.json: {each}{more}; put that back to"
                f" go on, or {ANOTHER}"
            )
    there = attributes["state"] == "sealed" or StoreWriter.published_counts(out)[0]
    if versions.keys() & {"tokenizers", "transformers"} and there:
        # Each part that is there is compared with what the tokenizer gives now.
        found["tokenizer_hash"] = begun.get("tokenizer_hash")
    return found


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
    """Compare some sequences of the unfinished store, and of the one that it grows from, with what
    the teacher gives, if they were made with other versions of the libraries.

    Raises UserError, with the versions to install, if the numbers are others.
    """
    attributes = StoreWriter.peek(out)
    if attributes is not None and other_versions(attributes["software"]):
        with closing(open_store(out, allow_partial=True)) as store:
            _check(store, teacher, say)
    if grown_from is not None:
        _check(grown_from, teacher, say)


def _check(store: FeatureStore, teacher: Teacher, say: Callable[[str], object]) -> None:
    versions = other_versions(store.meta["software"])
    if not versions or not len(store):
        return
    from teachonce.teacher_dump.comparison.rerun import compare  # loads torch

    problems = compare(store, teacher, SAMPLE, 0).problems
    if problems:
        install = " ".join(f"{name}=={then}" for name, (then, _) in versions.items())
        raise UserError(
            f"{store.path}: the teacher gives other numbers with other versions"
            f" ({version_words(versions)}): {first_few(problems)}; go on with those of then"
            f" (pip install {install}), or {ANOTHER}"
        )
    some = counted(min(SAMPLE, len(store)), "sequence")
    named = version_words(versions)
    say(f"versions  {named}; {some} of {store.path} compared: the numbers are the same")
