"""Which options a task of `downstream` takes, and which it needs."""

from __future__ import annotations

from typing import Any

from support.errors import UserError

COLUMNS = {
    "classify": ("text", "label"),
    "pair": ("text_a", "text_b", "score"),
    "qa": ("question", "context", "answer"),
    "speed": ("text",),
}
"""What the columns of a task's tables are called; each has an option."""
TRAINING = {"model", "train", "dev", "out", "seed", "epochs", "batch_size", "lr", "max_length"}
FINE_TUNING = TRAINING | {"test", "seeds", "limit", "save", "precision", "group_by_length"}
MLM = {"steps", "batch_tokens", "vocab", "mask_prob", "evaluate_every", "precision", "resume"}
AS_IS = {"as_is", "model", "test", "out", "max_length"}
LABELS = {"unseen_labels"}
TAKES = {
    "mlm": TRAINING | MLM | AS_IS | {"seeds"},
    "pos": FINE_TUNING | AS_IS | LABELS,
    "ner": FINE_TUNING | AS_IS | LABELS | {"pieces"},
    "classify": FINE_TUNING | AS_IS | LABELS | {"per_class"},
    "pair": FINE_TUNING | AS_IS,
    "qa": FINE_TUNING | {"stride"},
    "speed": {"model", "teacher", "test", "out", "seed", "batch_size", "max_length", "repeat"},
    "table": {"runs", "out"},
}
NEEDS = {task: ("model", "train", "out") for task in TAKES} | {
    "speed": ("model",),
    "table": ("runs",),
}


def refuse(task: str, given: dict[str, Any]) -> None:
    """Raises UserError for options that a task does not take or lacks."""
    what, takes, needs = f"--task {task}", TAKES[task], NEEDS[task]
    if "as_is" in given and "as_is" in takes:
        what, takes, needs = f"{what} --as-is", takes & (AS_IS | LABELS), ("model", "test", "out")
    takes = takes | {f"{role}_column" for role in COLUMNS.get(task, ())}
    wrong = [_flag(name) for name in given if name not in takes]
    if wrong:
        raise UserError(f"{what} does not take {', '.join(wrong)}; leave out")
    missing = [_flag(name) for name in needs if name not in given]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}; see downstream --help")
    models = task == "speed" or "as_is" in given
    several_of = {"model": models, "train": task == "mlm", "test": task != "speed"}
    for name, several in several_of.items():
        if len(given.get(name, ())) > 1 and not several:
            raise UserError(f"--task {task} takes one {_flag(name)}, got {len(given[name])}")
    out = given.get("out")
    goes_on = task == "mlm" and "as_is" not in given  # a training looks itself
    if not goes_on and out and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {out}: exists already; choose another")


def _flag(name: str) -> str:
    return "a RUN" if name == "runs" else f"--{name.replace('_', '-')}"
