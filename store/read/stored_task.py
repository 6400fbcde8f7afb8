"""Determine the task of a store's teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from teachonce.store.format.features import PROBLEM_TYPES, TaskSpec
from teachonce.store.read.stored_tokenizer import json_object


def stored_task(
    task: TaskSpec | None, teacher_files: Mapping[str, bytes], where: str
) -> TaskSpec | None:
    """Return `task` of a store's features, with its `problem_type`.

    Stores that were written before features had this key have it in the teacher's config.json.
    Raises StoreError if that file is damaged.
    """
    written_before = task and task.kind == "classification" and not task.problem_type
    if not task or not written_before or "config.json" not in teacher_files:
        return task
    config = json_object(teacher_files["config.json"], f"{where}: config.json in it")
    found = config.get("problem_type")
    return replace(task, problem_type=found) if found in PROBLEM_TYPES else task
