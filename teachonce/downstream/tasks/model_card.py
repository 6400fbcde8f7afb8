"""The model card of a fine-tuned checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teachonce.downstream.options import LABELLED
from teachonce.support import files

PIPELINES = {
    "pos": "token-classification",
    "ner": "token-classification",
    "classify": "text-classification",
    "pair": "text-classification",
    "qa": "question-answering",
    "sts": "sentence-similarity",
}
CARD = "README.md"


def write_card(result: dict[str, Any], folder: Path) -> None:
    """Write the model card of the first seed's model: base model, task, scores and settings. A path
    is shortened to its last component.

    `result` is the dictionary that `fine_tune` returns.
    """
    first, measures, scale = result["seeds"][0], result["measures"], result["scale"]
    splits = [name for name in result["mean"] if name in first]
    heads = "".join(f" {name} |" for name in measures)
    rows = "\n".join(
        f"| {_short(split)} | {result['examples'][split]:,} |"
        + "".join(f" {scale * first[split][key]:.2f} |" for key in measures.values())
        for split in splits
    )
    settings = {**result["settings"], "lr": first["lr"], "best_epoch": first["best_epoch"]}
    options = "\n".join(
        f"| {name} | {format(value, 'g') if isinstance(value, float) else value} |"
        for name, value in settings.items()
        # Not by `in (None, False)`, because 0 equals False.
        if value is not None and value is not False
    )
    # Cards are published, and a whole path may name a user of this machine.
    source, task = Path(result["model"]).name, result["task"]
    seeds = len(result["seeds"])
    seed_note = f" It is the model of seed {first['seed']}, one of {seeds}." if seeds > 1 else ""
    warning = f"\n\n**Warning:** {first['warning']}." if "warning" in first else ""
    note = f"\n\nIn use, {first['note']}." if "note" in first else ""
    text = f"""---
library_name: transformers
pipeline_tag: {PIPELINES.get(task, task)}
tags: [teachonce, {task}]
---

# {source}, fine-tuned for {task}

{source} was fine-tuned by `downstream --task {task}` of teachonce.{seed_note}{_uses(task)}{note}

## Scores

| split | examples |{heads}
|---|---|{"---|" * len(measures)}
{rows}

Scores are of this model, times {scale}; its epoch was chosen on dev.{warning}

## Settings

| option | value |
|---|---|
{options}
"""
    files.write(folder / CARD, text.encode())


def _uses(task: str) -> str:
    teaches = " `teacher-dump --model` takes this folder as a teacher." if task in LABELLED else ""
    if task == "qa":
        return teaches
    return f"{teaches}\n`downstream --task {task} --as-is --model` scores it."


def _short(split: str) -> str:
    """Return the name of a split; in `test PATH`, shorten the path to its last component."""
    prefix, blank, path = split.partition(" ")
    return f"{prefix} {Path(path).name}" if blank else prefix
