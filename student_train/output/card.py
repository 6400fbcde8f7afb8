"""The model card of a student, for people and for the Hugging Face hub."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

import torch
from transformers import PreTrainedModel

from teachonce.store import FeatureStore
from teachonce.store.tools.store_card import hub_datasets, teacher_name
from teachonce.student_train.losses.registry import losses_for, named
from teachonce.student_train.model.any_student import head_of
from teachonce.student_train.output.card_code import (
    CHAT,
    EMBEDDER,
    ENCODER,
    HOW_TO_SCORE,
    SCORER,
    CardHead,
    head_for,
    how_to_embed,
    how_to_load,
    output_kind_of_student,
)
from teachonce.student_train.output.report import trained_losses
from teachonce.support.redaction import publishable

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
LONGEST = 1000  # characters of a cell: the names of a corpus of many files would fill pages


def environment(device: str, processes: int = 1) -> dict[str, Any]:
    """Return the versions, device, threads and number of processes, which together with the
    settings determine a student to its last bit."""
    names = ("teachonce", "torch", "transformers", "tokenizers", "numpy")
    versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
    threads = torch.get_num_threads()
    return {**versions, "device": device, "threads": threads, "processes": processes}


def hub_id(store: FeatureStore) -> str | None:
    """Return the teacher's id on the hub; None if it was loaded from a folder, or has none."""
    if not _teacher(store.identity).get("revision"):
        return None
    config = store.teacher_settings("config.json")
    name = config.get("_name_or_path")
    # Only a name that the hub allows: a line break in it would add metadata to the card.
    return name if isinstance(name, str) and HUB_NAME.fullmatch(name) else None


def model_card(
    report: dict[str, Any],
    base_model: str | None,
    student: PreTrainedModel,
    vectors: bool = False,
    unread: Collection[str] = (),
) -> str:
    """Return the model card of a finished student, in Markdown.

    base_model: the teacher's id on the hub, if it has one.
    vectors: whether the student is a sentence embedding model.
    unread: names of the options that had no effect (`TrainPlan.without_effect`).
    """
    report = publishable(report)  # no local paths or credentials: cards are published
    settings, result = report["settings"], report["result"]
    name = base_model or teacher_name(report["store"]["identity"])
    others = [teacher_name(other["identity"]) for other in report.get("others", ())]
    # The hub has no relation for distillation; `finetune` is its nearest word.
    base = f"base_model: {base_model}\nbase_model_relation: finetune\n" if base_model else ""
    if corpora := sorted(_corpora(report)):
        base += f"datasets: {json.dumps(corpora)}\n"
    pairs = "separator" in report["store"]["features"].get("task", {})
    scores = pairs and student.config.num_labels == 1
    of_vocabulary = head_of(student) in ("mlm", "causal")
    untrained = (
        not vectors and of_vocabulary and result["steps"] and not trains_vocabulary(settings)
    )
    library = "sentence-transformers" if vectors or scores else "transformers"
    if vectors:
        head, loading = EMBEDDER, how_to_embed(student)
    elif scores:
        head, loading = SCORER, HOW_TO_SCORE
    else:
        head = ENCODER if untrained else CHAT if report.get("chats") else head_for(student)
        loading = how_to_load(student, pairs, head)
    if untrained:
        loading += (
            "\n\nIts head over the vocabulary was not trained: no loss of the training reads it."
        )
    title = f"{head.noun[:1].upper()}{head.noun[1:]}, student of {' and '.join([name, *others])}"
    article = "An" if head.noun[0] in "aeio" else "A"
    origin = "with its initial weights: it was not trained"
    if result["steps"]:
        origin = "trained by teachonce on a store of\nits teacher's outputs, without the teacher"
    return f"""---
library_name: {library}
pipeline_tag: {head.pipeline}
{base}tags: [distillation, teachonce]
{_model_index(report, head, title)}---

# {title}

{article} {head.noun} of {result["parameters"]:,} parameters, {origin}.
{_recipe(report)}
{loading}
{_answers(settings, student)}
## Held-out results

| measure | value |
|---|---|
{_results(report, student)}

## Settings

| option | value |
|---|---|
{_settings(settings, unread)}

## Origin

| | |
|---|---|
{_origin(report, name)}

The same store content, settings and environment give the same student, bit for bit on a CPU.
`training.json` has all of these values in full.
"""


def _recipe(report: dict[str, Any]) -> str:
    """Return a line on the recipe of a student, "" if it has none."""
    if (recipe := report.get("recipe")) is None:
        return ""
    about = f": {recipe['about']}" if recipe["about"] else ""
    return f"\nRecipe `{recipe['name']}`{about}. After {recipe['source']}.\n"


def _model_index(report: dict[str, Any], head: CardHead, title: str) -> str:
    """Return the entry of the hub's metadata with the held-out figures, "" if there are none."""
    figures = {
        name.removeprefix("valid_"): value
        for name, value in report["result"].items()
        # JSON has neither NaN nor infinity.
        if name.startswith("valid_") and isinstance(value, int | float) and math.isfinite(value)
    }
    if not figures:
        return ""
    corpora = sorted(_corpora(report))
    entry = {
        "task": {"type": head.pipeline},
        "dataset": {
            "name": f"held-out part of {', '.join(corpora) or 'the corpus'}",
            "type": corpora[0] if len(corpora) == 1 else "text",
        },
        "metrics": [
            # `similarity` is a loss, which the hub's readers would take for a similarity.
            {"type": "loss" if named([name]) else name, "name": name, "value": value}
            for name, value in figures.items()
        ],
    }
    # JSON is YAML as well, and quotes whatever a name holds.
    return f"model-index: {json.dumps([{'name': title, 'results': [entry]}])}\n"


def _corpora(report: dict[str, Any]) -> set[str]:
    """Return the names of the hub datasets that the student was trained on."""
    stores = (report["store"], *report.get("others", ()))
    return {name for store in stores for name in hub_datasets(store["identity"].get("corpus"))}


def _results(report: dict[str, Any], student: PreTrainedModel) -> str:
    """Return table rows of the held-out measures, and a line on their units."""
    result = report["result"]
    rows = "\n".join(f"| {name} | {_format(value)} |" for name, value in result.items())
    units = "; ".join(f"`{name}` {unit}" for name, unit in _units(student, result))
    return f"{rows}\n\n{units and units + '.'}{_note_on_shared(report)}"


def _settings(settings: dict[str, Any], unread: Collection[str]) -> str:
    """Return table rows of the options that have a value and are not `unread`. Local paths are
    reduced to their last component."""
    paths = {key: PurePath(settings[key]).name for key in ("store", "vocab")}
    paths["others"] = ", ".join(PurePath(path).name for path in settings.get("others", ()))
    shown = {
        k: v
        for k, v in {**settings, **paths}.items()
        if v not in (None, "", []) and k not in unread
    }
    return "\n".join(f"| {key} | {_format(value)} |" for key, value in shown.items())


def trains_vocabulary(settings: Mapping[str, Any]) -> bool:
    """Return whether a loss in the settings of a report trains a head over the vocabulary."""
    losses = losses_for(None, trained_losses(settings))
    return any(loss.head == "vocabulary" for loss in losses)


def _answers(settings: dict[str, Any], student: PreTrainedModel) -> str:
    """Return a line that names the losses that trained the task outputs; "" without a task."""
    if (output_kind := output_kind_of_student(student)) is None:
        return ""
    trained = {
        side: [
            loss.name
            for loss in losses_for(output_kind, trained_losses(settings))
            if loss.student == side
        ]
        for side in ("classes", "scores")
    }
    separate = settings.get("outputs") == "separate" and trained["classes"] and trained["scores"]
    names = trained["classes"] if separate else [*trained["classes"], *trained["scores"]]
    if not names:
        return ""
    scores = _list(trained["scores"])
    note = f"; the extra output, trained with {scores}, is not part of it" if separate else ""
    return f"\nIts classifier was trained with {_list(names)}{note}.\n"


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _units(student: PreTrainedModel, result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each figure in a result, and a phrase with its unit."""
    names = [name.removeprefix("valid_") for name in result if name.startswith("valid_")]
    for loss in losses_for(output_kind_of_student(student), names):
        if loss.unit:
            yield f"valid_{loss.name}", f"is in {loss.unit}"
        if loss.student == "masked" and f"{loss.name}_per_character" in names:
            phrase = "divides it by the number of characters of the masked tokens"
            yield f"valid_{loss.name}_per_character", phrase
    for name, labels in (("accuracy", "gold labels"), ("agreement", "teacher's labels")):
        if f"{name}_matthews" in names:
            phrase = f"is Matthews' correlation with the {labels}, 0 for one label for everything"
            yield f"valid_{name}_matthews", phrase
    if "spearman" in names:
        compared = "scores" if output_kind_of_student(student) else "cosines of pairs of texts"
        yield "valid_spearman", f"is the rank correlation with the teacher's {compared}"
    if "bits_per_byte" in names:
        yield "valid_bits_per_byte", "is `next` per byte of the text instead of per token"


def _note_on_shared(report: dict[str, Any]) -> str:
    """Return a note if `kl-shared` was computed on only a part of the shared pieces."""
    settings, logits = report["settings"], report["store"]["features"].get("logits")
    trained = trained_losses(settings)
    if "kl-shared" not in trained or logits is None or logits["tier"] == "head":
        return ""
    return (
        f" `kl-shared` is over the shared pieces among the {logits['size']} best of a token, which"
        " are in the store, not over all shared pieces."
    )


def _origin(report: dict[str, Any], name: str) -> str:
    """Return table rows with the origin of the store and of the student."""
    store = report["store"]
    rows = {
        "teacher": {**_teacher(store["identity"]), "id": name},
        "corpus": store["identity"].get("corpus"),
        "dump": store["identity"].get("arguments"),
        "features": {k: v for k, v in store["features"].items() if k != "encodings"},
        "dump's software": store["software"],
        "store's content, SHA-256": store["content"],
        "store's state": store["state"],
        "student's start": "; ".join(report["start"]),
        **_pruned(report.get("pruned")),
        "environment": report["environments"],
        "tokenizer, SHA-256": report["tokenizer"],
    }
    return "\n".join(f"| {label} | `{_json(value)}` |" for label, value in rows.items())


def _pruned(cut: dict[str, int] | None) -> dict[str, str]:
    if cut is None:
        return {}
    change = f"pruned after training from {cut['of']:,} to {cut['pieces']:,} pieces"
    return {"vocabulary": f"{change}; the student was validated before"}


def _json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # In Markdown a bar ends a cell even inside of code.
    return text.replace("|", "\\|").replace("`", "'")[:LONGEST]


def _teacher(identity: dict[str, Any]) -> dict[str, Any]:
    """Return a store's description of its teacher, or {}. Its keys are not specified."""
    teacher = identity.get("teacher")
    return teacher if isinstance(teacher, dict) else {}


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {weight:g}" for key, weight in value.items())
    return str(value)
