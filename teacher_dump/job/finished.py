"""A dump that is typed again once it is finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from teachonce.store import Features, StoreWriter, open_store
from teachonce.store.errors import StoreError, without_remedy
from teachonce.support.differences import differences, told
from teachonce.support.errors import ANOTHER, UserError
from teachonce.teacher_dump.job.options import DumpOptions

EARLY = ("seed", "views", "mask_prob", "stride", "batch_tokens", "limit", "weights")
"""Arguments that can be compared before the teacher is loaded."""


def check_begun(options: DumpOptions, shared: bool = False) -> dict[str, Any] | None:
    """Return the root attributes of a finished store at --out, which the same command made, as far
    as its options tell; None where a store can be begun or continued, `shared` with other
    processes.

    Raises UserError where neither is so.
    """
    stored = (
        StoreWriter.peek(options.out, "sealed") if shared else StoreWriter.finished(options.out)
    )
    if stored is None:
        StoreWriter.check(options.out, shared)
        return None
    then = stored["identity"].get("arguments", {})
    now = {name: getattr(options, name) for name in EARLY}
    _refuse(options.out, differences({name: then.get(name) for name in now}, now))
    return stored


def check_finished(
    out: Path | str, stored: Mapping[str, Any], identity: Mapping[str, Any], features: Features
) -> tuple[int, int, int, int]:
    """Count documents, sequences, tokens and parts of a finished store.

    Raises UserError where another teacher, text or option made it, or a part of it is gone.
    """
    found = StoreWriter.begun_otherwise(stored, identity, features.to_json())
    _refuse(out, found)
    try:
        with closing(open_store(out)) as store:
            parts = len(store.manifest.parts)
            numbers = [store.part(place).all("sequence/document") for place in range(parts)]
            documents = 1 + int(numbers[-1][-1])
            return documents, len(store), int(store.meta["tokens"]), parts
    except StoreError as error:
        raise UserError(
            f"{out}: exists already and is finished, but damaged ({without_remedy(error)}); move"
            " what is damaged aside with `feature-store repair` and type this again"
        ) from error


def _refuse(out: Path | str, found: Iterable[tuple[str, str, str]]) -> None:
    each = list(found)
    differ = [f"{key} is {old} there and {new} now" for key, old, new in each]
    if differ:
        grows = all(key.startswith("identity.corpus.sources.") for key, _, _ in each)
        way = f" (to dump only what is new: --grow-from {out} --out ANOTHER)" if grows else ""
        raise UserError(
            f"{out}: exists already and is finished, made by other arguments: {told(differ)}{way};"
            f" {ANOTHER}"
        )
