"""The card of a store on the hub: its content, its teacher, and how to open it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from teachonce.store.format.identity import corpora, corpus_sources, object_in
from teachonce.store.read.store import FeatureStore
from teachonce.store.tools.info import describe, info_lines
from teachonce.support.console import counted, readable
from teachonce.support.redaction import publishable

SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
UNNAMED = "an unnamed teacher"
TASKS = {"classification": "text-classification", "tagging": "token-classification"}


def store_card(store: FeatureStore, repository: str, name: str) -> str:
    """Write Markdown, with the hub's metadata, for a store that is in `repository` under `name`."""
    facts = describe(store)
    teacher = teacher_name(store.identity)
    disk = facts["bytes_on_disk"] or {}
    size = f", {readable(disk['total'])}" if disk else ""
    return f"""---
{_metadata(store)}
---

# Outputs of {teacher}: {name}

{counted(facts["sequences"], "sequence")} of text, {counted(facts["tokens"], "token")}{size}: what
the teacher {teacher} gave for each token, stored by teachonce. Small students are trained from it,
with no teacher in memory.

{_how_to_open(repository, name)}

## What it holds

```text
{_facts(store)}
```

The whole text of the corpus is in it. Its format is described in `FORMAT.md` of teachonce:
{"an HDF5 file" if name.endswith(".h5") else "a Zarr v3 folder"} of ordinary arrays and JSON.
"""


def _how_to_open(repository: str, name: str) -> str:
    fetch = f"hf download {repository} --repo-type dataset --local-dir here"
    train = f"student-train --store here/{name} --vocab 5k"
    commands = f"```sh\n{fetch}\n{train}\n```"
    # An HDF5 file cannot be opened behind a URL.
    if name.endswith(".h5"):
        return commands
    return f"""{commands}

Or read it from the hub, without a copy:

```python
from teachonce import open_store

store = open_store("hf://datasets/{repository}/{name}")
print(store[0].text)
```"""


def _metadata(store: FeatureStore) -> str:
    """Write the hub's metadata as YAML; each value is JSON, which YAML reads."""
    rows: dict[str, Any] = {
        "pretty_name": f"Outputs of {teacher_name(store.identity)}",
        "tags": ["teachonce", "distillation", "features"],
        "size_categories": [_size(store.meta["sequences"])],
        "viewer": False,  # the hub's viewer shows tables
    }
    if task := store.features.task:
        rows["task_categories"] = [TASKS[task.kind]]
    if datasets := sorted(hub_datasets(store.identity.get("corpus"))):
        rows["source_datasets"] = datasets
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in rows.items())


def _size(sequences: int) -> str:
    """Return the hub's size category for a number of sequences."""
    for number, word in enumerate(SIZES):
        if sequences < 1000 * 10**number:
            return f"n<{word}" if number == 0 else f"{SIZES[number - 1]}<n<{word}"
    return f"n>{SIZES[-1]}"


def hub_datasets(corpus: Any) -> Iterator[str]:
    """Yield the names of the hub's datasets that a corpus was read from."""
    for part in corpora(corpus):
        for source in corpus_sources(part):
            # A local folder has the kind `hf` as well, but no revision.
            if source.get("kind") == "hf" and source.get("revision") and source.get("name"):
                yield str(source["name"])


def teacher_name(identity: Mapping[str, Any]) -> str:
    """Return the name of a store's teacher for people. For a path, return the last folder; the last
    two if the last is `model`, the name that `downstream --save` gives to every teacher."""
    name = object_in(identity, "teacher").get("id")
    path = PurePath(str(publishable(str(name or ""))))
    return "/".join(path.parts[-2:] if path.name == "model" else path.parts[-1:]) or UNNAMED


def _facts(store: FeatureStore) -> str:
    """Return the lines of `feature-store info`, without local paths."""
    lines = "\n".join(info_lines(store))
    for path in _paths(store):  # `publishable` would cut a path at a space
        lines = lines.replace(path, PurePath(path).name)
    # Three backquotes in a name would end the block of the card in which the lines are.
    return str(publishable(lines.replace("```", "'''")))


def _paths(store: FeatureStore) -> Iterator[str]:
    yield store.path
    path = str(object_in(store.identity, "teacher").get("id"))
    if path.startswith(("/", ".", "~")) and PurePath(path).name:  # not the folder "."
        yield path
