"""Masked-LM training over seeds, with scores as the other tasks have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from downstream.mlm import BEGUN, MlmSettings, check_new, finished, told, train_mlm
from downstream.report import FILE, over_seeds
from store.errors import UserError

MEASURES = {"nats/token": "loss", "perplexity": "perplexity"}


def train_seeds(
    settings: MlmSettings, seeds: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train once for each of the seeds from `settings.seed` on; the held-out text is the same.

    A single model is saved in `settings.out` itself, each of several in its folder seed-N. Returns
    what `finetune.fine_tune` returns, with the figures at the end of each training as scores on
    `dev`, examples counted in blocks, and `saved`, the models' folders. No score is a share, hence
    `scale` is 1. Resuming goes on with the first training that is not finished.

    Raises UserError as `train_mlm` does.
    """
    out, saved = settings.out, []
    runs: list[dict[str, Any]] = []
    if not settings.resume:
        check_new(out)
    elif (out / FILE).exists():
        raise UserError(f"--resume: the training in {out} is finished; choose another --out")
    for seed in range(settings.seed, settings.seed + seeds):
        folder = out if seeds == 1 else out / f"seed-{seed}"
        # the first is resumed even where it was never begun: `train_mlm` says so
        resume = settings.resume and (not runs or (folder / BEGUN).exists())
        one = replace(settings, seed=seed, out=folder, resume=resume)
        if seeds > 1:
            say(f"seed {seed}: {folder}")
        figures = finished(one) or train_mlm(one, say)
        runs.append(_run(seed, figures))
        saved.append(str(folder))
    files = {"train": [str(path) for path in settings.train]}
    return {
        "task": "mlm",
        "model": settings.model,
        "measures": MEASURES,
        "primary": "loss",
        "scale": 1,
        "files": files | ({"dev": str(settings.dev)} if settings.dev else {}),
        "settings": {**told(settings), "seeds": seeds},
        "examples": figures["blocks"],
        "saved": saved,
        "seeds": runs,
        **over_seeds(runs, ["dev"]),
    }


def _run(seed: int, figures: dict[str, Any]) -> dict[str, Any]:
    loss = figures["held_out_loss"]
    score = {"primary": loss, "loss": loss, "perplexity": figures["perplexity"]}
    return {
        "seed": seed,
        "lr": figures["learning_rate"],
        "steps": figures["steps"],
        "dev": score,
    }
