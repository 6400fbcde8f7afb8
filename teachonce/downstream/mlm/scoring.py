"""Scores masked LMs, trained over seeds or without training, with results like other tasks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from teachonce.checkpoints.loading import checked_length, load_config, load_with_head
from teachonce.checkpoints.names import resolve_model
from teachonce.downstream.mlm.masked_trainer import MlmTrainer, on_one_device
from teachonce.downstream.mlm.masked_training import (
    SETTINGS_FILE,
    check_loss,
    held_out_batches,
    masking_tokenizer,
    recorded_settings,
    resumed_figures,
    train_mlm,
)
from teachonce.downstream.mlm.text_blocks import Spelling, cut, line_tokens, spelling
from teachonce.downstream.options import check_option
from teachonce.downstream.progress import Scoring
from teachonce.downstream.score_tables import FILE, NATS, result_of
from teachonce.downstream.settings import MlmSettings, check_new_folder, seeds_from
from teachonce.downstream.text_lines import read_lines
from teachonce.downstream.trainer import TrackedRun, folder_of
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.training.ranks import ALONE, Ranks
from teachonce.training.trackers import RunDescription

Say = Callable[[str], None]
ABOUT = {
    "task": "mlm",
    "measures": {"nats/token": "loss", "perplexity": "perplexity"},
    "primary": "loss",
    "scale": 1,
}
PER_CHARACTER = "loss_per_character"
AS_IS = {
    **ABOUT,
    "measures": {NATS: PER_CHARACTER, "nats/token": "loss", "perplexity": "perplexity"},
}
"""Nats per character compare models of any vocabulary; nats per token do not."""
MOST_UNKNOWN = 0.01
"""The share of characters in unknown words, above which a line warns of comparisons: the words that
a vocabulary lacks are the rare ones, which are predicted worst."""


def train_seeds(
    settings: MlmSettings,
    seeds: int,
    tests: Mapping[str, Path],
    say: Say = print,
    ranks: Ranks = ALONE,
    log: Sequence[str] = (),
) -> dict[str, Any]:
    """Train with each of `seeds` seeds, from `settings.seed` upwards, and score the models.

    The held-out text is the same for all seeds. A single model is saved in `settings.out`, each of
    several in its folder seed-N. With `settings.resume`, training continues with the first seed
    that is not finished.

    ranks: the processes that train together; the first of them scores.
    log: names of the trackers of each training.

    Returns the same dictionary as `fine_tune.fine_tune`: scores on `dev` are the figures at the end
    of each training, scores on `tests` are computed as in `score_as_is`, examples are blocks, and
    `saved` lists the folders of the models.

    Raises UserError as `train_mlm` does.
    """
    check_option("seeds", seeds)
    out, saved = settings.out, []
    runs: list[dict[str, Any]] = []
    if not settings.resume:
        check_new_folder(out)
    elif (out / FILE).exists():
        raise UserError(f"--resume: the training in {out} is finished; choose another --out")
    for seed in seeds_from(settings.seed, seeds):
        folder = folder_of(out, seed, seeds)
        # The first seed is resumed even if it never started, so that `train_mlm` reports it.
        resume = settings.resume and (not runs or (folder / SETTINGS_FILE).exists())
        one = replace(settings, seed=seed, out=folder, resume=resume)
        if seeds > 1:
            say(f"seed {seed}: {folder}")
        facts = RunDescription(folder, recorded_settings(one), "metrics.json and scores.json")
        with TrackedRun(log, facts, resume, say) as tracked:
            figures = resumed_figures(one) or train_mlm(one, say, ranks, [tracked])
            tested = str(folder), tests, settings.max_length, say, settings.text_column
            scored = _scores(*tested) if tests and ranks.is_main else ({}, {})
            scores, counts = ranks.broadcast(scored)
            tracked.add_scores(scores)
        run = {"seed": seed, "lr": figures["learning_rate"], "steps": figures["steps"]}
        runs.append({**run, "dev": _score(figures["held_out_loss"]), **scores})
        saved.append(str(folder))
    dev = {"dev": settings.dev} if settings.dev else {}
    files = {"train": [*settings.train], **dev, **tests}
    all_settings = {**recorded_settings(settings), "seeds": seeds}
    result = result_of(ABOUT, settings.model, files, all_settings, figures["blocks"] | counts, runs)
    return {**result, "saved": saved}


def score_as_is(
    model: str,
    tests: Mapping[str, Path],
    max_length: int,
    say: Say = print,
    text_column: str | None = None,
) -> dict[str, Any]:
    """Score a masked LM on `tests` (from `splits_to_test`) without training it.

    Each file is read completely, in blocks of `max_length` tokens, masked as in the validation of a
    training. Nats per character are nats per token times the tokens per non-blank character.
    Unknown tokens are never masked; neither they nor their characters count. `unknown` of a score
    is the share of these characters. `text_column` names the column of texts in tables.

    Returns the same dictionary as `fine_tune.score_as_is`; its examples are blocks.

    Raises UserError for a wrong model, length or file, and if the model has no masked-LM head.
    """
    scores, counts = _scores(model, tests, max_length, say, text_column, by_character=True)
    settings: dict[str, Any] = {"as_is": True, "max_length": max_length}
    if text_column is not None:
        settings["text_column"] = text_column
    return result_of(AS_IS, model, tests, settings, counts, [scores])


def _scores(
    model: str,
    tests: Mapping[str, Path],
    max_length: int,
    say: Say,
    text_column: str | None,
    by_character: bool = False,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compute the score and count the blocks of each file."""
    lines = {name: read_lines(path, text_column) for name, path in tests.items()}
    resolved = resolve_model(model)
    config = load_config(resolved)
    tokenizer = masking_tokenizer(resolved)
    network, _ = load_with_head(resolved, config, "mlm", {"dtype": torch.float32})
    length = checked_length(max_length, network.config, tokenizer)
    say(f"as is: {counted(network.num_parameters(), 'parameter')}, blocks of {length} tokens")
    scores, counts = {}, {}
    # A Trainer creates its output folder even where nothing is saved.
    with tempfile.TemporaryDirectory(prefix="score-") as scratch:
        arguments = TrainingArguments(output_dir=scratch, disable_tqdm=True, report_to="none",
                                      dataloader_pin_memory=torch.cuda.is_available())  # fmt: skip
        for name, text in lines.items():
            flat = line_tokens(tokenizer, text, f"text {tests[name]}")
            spelt = spelling(tokenizer, flat, text)
            _say_unknown(spelt, f"text {tests[name]}", tokenizer.unk_token, say)
            rows = cut(tokenizer, flat, length, f"text {tests[name]}")
            say(f"{tests[name]}: {counted(len(rows), 'block')}, the whole file")
            batches = held_out_batches(tokenizer, rows)
            trainer = MlmTrainer(model=network, args=on_one_device(arguments), fixed_dev=batches)
            Scoring(str(tests[name])).follow(trainer)
            loss = trainer.evaluate()["eval_loss"]
            check_loss(loss, "; its weights are damaged, train it again")
            scores[name] = _score(loss)
            if by_character:
                scores[name][PER_CHARACTER] = loss * (spelt.tokens / max(1, spelt.characters))
                scores[name]["unknown"] = spelt.unknown_share
            counts[name] = len(rows)
    return scores, counts


def _say_unknown(spelt: Spelling, name: str, token: str, say: Say) -> None:
    """Print the share of a text that is unknown. Raises UserError if all of it is."""
    if not spelt.unknown:
        return
    share = f"{100 * spelt.unknown_share:.3g} % of its characters are in unknown words ({token})"
    if not spelt.characters:
        raise UserError(
            f"{name}: {share}; give a text whose characters are in the tokenizer's vocabulary"
        )
    much = spelt.unknown_share > MOST_UNKNOWN
    other = "; do not compare them with figures of another vocabulary" if much else ""
    say(f"{name}: {share}, which are not predicted: the figures are of the rest{other}")


def _score(loss: float) -> dict[str, float]:
    return {"primary": loss, "loss": loss, "perplexity": math.exp(loss)}
