"""Join stores of one teacher over several corpora."""

from __future__ import annotations

import shlex
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from teachonce.store.format.features import Features
from teachonce.store.format.identity import corpora, corpus_sources, object_in
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.tools.copy import Progress, begin_copy, copy_part
from teachonce.store.tools.document_hashes import document_numbers
from teachonce.store.tools.recode import same_calibration
from teachonce.store.write.writer import StoreWriter
from teachonce.support.differences import differences, first_few
from teachonce.support.errors import UserError

FREE = frozenset(
    {
        "teacher.id",  # its name; the weights have a hash
        "teacher.revision",
        "teacher.config_hash",  # covers the next three, so the configuration itself is compared
        "config._name_or_path",
        "config.transformers_version",
        "config.dtype",  # the precision is an argument
        "arguments.seed",  # masks and draws are stored
        "arguments.limit",
        "arguments.stride",
        "arguments.batch_tokens",
        "arguments.part_tokens",
        "arguments.device",
        "arguments.weights",
        "arguments.chat_date",  # the rendered text is stored
        "mixed_vocab",  # a student's vocabulary: no stored value depends on it
    }
)
"""Keys of the identity that do not affect the stored values of a sequence."""


def facts(store: FeatureStore) -> dict[str, Any]:
    """Return the identity of a store, with the teacher's config.json added under the key
    `config`."""
    files = store.teacher_files()
    config = store.teacher_settings("config.json") if "config.json" in files else {}
    return {**store.identity, "config": config}


def fact_differences(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return the `differences` of two results of `facts`.

    Differences of the configuration come last, because two teachers have many and only the first
    few are listed.
    """
    return sorted(differences(one, other), key=lambda d: d[0].startswith("config."))


def is_merged(corpus: Any) -> bool:
    """Return whether a store with this corpus was merged from several stores, or grew from a merged
    store."""
    merged = isinstance(corpus, Mapping) and "merged" in corpus
    return merged or object_in(corpus, "grown_from").get("merged") is True


def may_differ(features: Features) -> frozenset[str]:
    """Return the keys of `facts` in which merged stores with these features may differ."""
    return FREE | {"arguments.mask_prob"} if features.views == 1 else FREE


def _free_facts(store: FeatureStore) -> frozenset[str]:
    """Return the keys of `facts` in which stores that are merged with this one may differ."""
    free = may_differ(store.features)
    # An imported capture has no hash of the teacher's weights, only its name.
    hashed = "weights_hash" in object_in(store.identity, "teacher")
    return free if hashed else free - {"teacher.id"}


def _check_alike(stores: Sequence[FeatureStore]) -> None:
    """Raise UserError unless every store would encode a sequence in the same way."""
    first, free = stores[0], _free_facts(stores[0])
    for other in stores[1:]:
        if "mixed_vocab" in other.identity and "mixed_vocab" not in first.identity:
            raise UserError(
                f"{other.path} holds a student's vocabulary, but a merged store takes it from the"
                f" first store, now {first.path}; name {other.path} first"
            )
        pair = f"{first.path} and {other.path}"
        differing = [
            f"{key} is {one} and {two}"
            for key, one, two in fact_differences(facts(first), facts(other))
            if key.split(".")[0] != "corpus" and key not in free
        ]
        if differing:
            raise UserError(
                f"{pair} cannot be merged: {first_few(differing)}; dump one of them again with"
                " the teacher and the options of the other"
            )
        differing = [
            f"{key} is {one} and {two}"
            for key, one, two in differences(_features(first), _features(other))
            # Encodings differ with the codec, which is compared itself; ids are converted.
            if key != "logits.ranked"
            and (key.split(".")[0] != "encodings" or first.features.codec == other.features.codec)
        ]
        if differing:
            raise UserError(
                f"{pair} hold different features: {first_few(differing)}; dump one of them again"
                " with the options of the other (for the codec alone, `feature-store convert"
                " --codec`)"
            )


def _features(store: FeatureStore) -> dict[str, Any]:
    # Older stores have the problem type in config.json alone; `store.task` has it for all stores.
    return replace(store.features, task=store.task).to_json()


def _check_calibration(stores: Sequence[FeatureStore], target: str | Path) -> None:
    """Raise UserError, with the command to type, if states must be encoded again."""
    first, codec = stores[0], stores[0].features.codec
    normalised = first.features.level.hidden.normalised
    for other in stores[1:]:
        if normalised and not same_calibration(first.calibration, other.calibration):
            command = shlex.join([*(store.path for store in stores), str(target)])
            raise UserError(
                f"{other.path}: codec {codec!r} normalises hidden states by the mean and standard"
                f" deviation of their own dump, and {first.path} has others; to encode the states"
                " again, which adds the error of the codec once more, run: feature-store merge"
                f" --recode {command}"
            )


def _identity(stores: Sequence[FeatureStore]) -> dict[str, Any]:
    """Return the identity of the merged store: the first store's, with all corpora, without
    arguments that differ."""
    first = stores[0].identity
    merged = first | {"corpus": {"merged": _corpora(stores)}}
    if isinstance(arguments := first.get("arguments"), dict):
        merged["arguments"] = {
            key: value
            for key, value in arguments.items()
            if all(other.identity["arguments"].get(key) == value for other in stores[1:])
        }
    return merged


def _corpora(stores: Sequence[FeatureStore]) -> list[Any]:
    merged: list[Any] = []
    for store in stores:
        corpus = store.identity.get("corpus")
        # If `corpus` has other keys than `merged`, it stays whole: its `forgotten` and `grown_from`
        # are about documents of this one store.
        fields = object_in(store.identity, "corpus")
        inner = fields["merged"] if fields.keys() == {"merged"} else None
        merged += inner if isinstance(inner, list) else [corpus]
    return merged


def _documents(store: FeatureStore) -> int:
    """Return one more than the largest document number of a store."""
    # Not the number of documents: forgotten ones leave gaps (FORMAT.md, section 6).
    return 1 + max(int(numbers.max()) for numbers in document_numbers(store))


def _content_key(source: Mapping[str, Any]) -> str:
    """Return a key that is equal for sources of the same text: a file may be renamed."""
    # The hash of a local dataset covers all its splits.
    by_content = [source.get(field) for field in ("sha256", "config", "split")]
    return str(by_content if by_content[0] else sorted(source.items()))


def check_sources(sources: Sequence[str | Path]) -> list[str]:
    """Return a line for each file or dataset that two of the stores were dumped from.

    Raises UserError if two stores have equal values: one store, or copies of it, under any names
    and in any container.
    """
    contents, dumped = dict[str, str | Path](), dict[str, str | Path]()
    lines = list[str]()
    for path in sources:
        with open_store(path) as store:
            content = store.manifest.content()
            # Each content once: a merged store may itself have several sources of equal content.
            identities = {
                _content_key(source): source
                for corpus in corpora(store.identity.get("corpus"))
                for source in corpus_sources(corpus)
            }
        if content in contents:
            raise UserError(
                f"{path}: has the same content as {contents[content]} (SHA-256 {content[:12]}... in"
                " `feature-store info`), so each of its texts would be stored twice, and be in both"
                " parts of a held-out split; name each store once"
            )
        contents[content] = path
        for key, source in identities.items():
            if (other := dumped.setdefault(key, path)) != path:
                lines.append(
                    f"{'note':9} {other} and {path} were both dumped from {source.get('name')}:"
                    " texts that both have are stored twice, and may be in both parts of a held-out"
                    " split"
                )
    return lines


def merge(
    sources: Sequence[str | Path],
    target: str | Path,
    recode: bool = False,
    progress: Progress = iter,
) -> None:
    """Join sealed stores of one teacher and one set of features; their corpora may differ.

    Parts and documents are renumbered, store after store.
    Calibration, files and weights are copied from the first store. If the calibrations differ,
    `recode` encodes states again. Raises UserError for fewer than two stores, for stores that do
    not fit together, for calibrations that differ without `recode`, and if `target` is taken;
    StoreError if a source is damaged.
    """
    if len(sources) < 2:
        raise UserError(
            "merge needs at least two stores; name them before the new one, or copy a single one"
            " with `feature-store convert`"
        )
    with ExitStack() as opened:
        stores = [opened.enter_context(open_store(path)) for path in sources]
        _check_alike(stores)
        if not recode:
            _check_calibration(stores, target)
        first = stores[0]
        parts = list(accumulate((len(store.manifest.parts) for store in stores), initial=0))
        documents = list(accumulate(map(_documents, stores[:-1]), initial=0))
        numbers = range(parts[-1])
        StoreWriter.check_writable(target)
        for store in stores:
            record_copy(store.source.address, store.manifest, "store", target)
        writer = begin_copy(target, first, first.features, _identity(stores), numbers)
        opened.callback(writer.close)
        for number in progress(numbers):
            source = bisect(parts, number) - 1
            index = number - parts[source]
            copy_part(writer, number, stores[source], index, first, documents[source])
        for store in stores:
            store.watch.check()
        writer.seal()
