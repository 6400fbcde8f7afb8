"""What the commands of a plan will take: operations and bytes, from sizes alone.

A forward pass takes two operations for each parameter and token, training six (Kaplan et al. 2020,
section 2.1). Bytes are those before compression.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from teachonce.student_train.settings.shapes import Shape, parse_student
from teachonce.support.errors import UserError
from teachonce.training.wordpiece import vocabulary_size

SAMPLE_BYTES = 2**18  # of a text, for an estimate of its tokens
FORWARD, TRAINING = 2, 6  # operations for each parameter and token
SEQUENCE = 128  # tokens; attention reads one byte for each of them
MIXED = "mixed-vocab"
OFFSETS = 13  # bytes per token: id, begin, end and the special flag


@dataclass(frozen=True)
class Cost:
    """Counts floating-point operations, and bytes that stay on the disk."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


NOTHING = Cost()


def given(command: click.Command, words: Sequence[str]) -> dict[str, Any]:
    """Read the options that words give to a command, by their names, without options at their
    defaults."""
    context = command.make_context(command.name or "", list(words))
    default = click.core.ParameterSource.DEFAULT
    return {n: v for n, v in context.params.items() if context.get_parameter_source(n) != default}


@dataclass(frozen=True)
class Size:
    """Holds the size of a model: parameters, hidden size, layers, heads and vocabulary."""

    parameters: float
    width: int
    layers: int
    heads: int
    pieces: int


@functools.cache
def size_of(model: str) -> Size:
    """Return the size of a transformers model from its config, without reading weights.

    Raises UserError if the config cannot be read.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            network = AutoModel.from_config(config)
    except (OSError, ValueError) as error:
        raise UserError(f"--teacher {model}: {str(error).splitlines()[0]}") from None
    parameters = sum(weight.numel() for weight in network.parameters())
    config = config.get_text_config()
    return Size(
        parameters,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.vocab_size,
    )


@functools.cache
def tokens_of(path: Path, model: str) -> float:
    """Estimate the tokens of a file with the tokenizer of a model, from the beginning of the file.

    Raises UserError if the file is missing.
    """
    from transformers import AutoTokenizer

    try:
        with path.open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not sample:
        return 0.0
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(sample.decode("utf-8", "ignore"), add_special_tokens=False)["input_ids"]
    return float(len(ids)) * size / len(sample)


def dump_cost(words: Sequence[str], tokens: float, teacher: Size) -> Cost:
    """Estimate a dump of `tokens` tokens from the words of `teacher-dump`: a forward pass for each
    view, and the bytes of its features with the default codec."""
    from teachonce.teacher_dump.cli import main as teacher_dump

    if words[0] == MIXED:
        return _stage_one(words[1:], tokens, teacher)
    options = teacher_dump.make_context("teacher-dump", list(words)).params
    views = int(options["views"])
    per_token = _logit_bytes(str(options["logits"] or "none"), teacher)
    for option, values in (("hidden", teacher.width), ("attention", SEQUENCE)):
        kind, _, count = str(options[option] or "none").partition(":")
        per_token += 0 if kind == "none" else values * (int(count) if kind == "groups" else 1)
    flops = FORWARD * teacher.parameters * tokens * views
    return Cost(flops, tokens * (OFFSETS + views * per_token))


def _stage_one(words: Sequence[str], tokens: float, teacher: Size) -> Cost:
    from teachonce.teacher_dump.mixed_vocab.cli import mixed_vocab
    from teachonce.teacher_dump.mixed_vocab.options import RECIPES

    options = given(mixed_vocab, words)
    lengths = {**RECIPES.get(options.get("recipe", ""), {}), **options}
    trained_tokens = lengths["steps"] * lengths["batch_tokens"] * lengths.get("accumulate", 1)
    return Cost(TRAINING * teacher.parameters * trained_tokens, tokens * OFFSETS)


def _logit_bytes(logits: str, teacher: Size) -> float:
    kind, _, count = logits.partition(":")
    if kind == "head":
        return 2 * teacher.width + 4
    return {"topk": 4, "sample": 5}.get(kind, 0) * int(count or 0) + 8


def student_cost(words: Sequence[str], tokens: float, teacher: Size) -> Cost:
    """Estimate a training from the words of `student-train` except its stores, and the tokens of an
    epoch."""
    from teachonce.student_train.arguments import checked_from
    from teachonce.student_train.cli import main as student_train
    from teachonce.student_train.plan.train_plan import stages_of

    arguments = given(student_train, ["--store", "none", *words])
    arguments["student"] = _shape(_option(arguments, "student", "tiny"), teacher)
    options = checked_from(arguments).resolved()
    shape = parse_student(options.student)
    passes = 0.0
    for stage in stages_of(options, shape.layers):
        if stage.epochs is not None:
            passes += stage.epochs * tokens
        else:
            passes += (stage.steps or 0) * stage.batch_tokens * stage.accumulate
    parameters = _parameters(shape, _pieces(options.vocab, teacher))
    return Cost(TRAINING * parameters * passes, 4 * parameters)


def _parameters(shape: Shape, pieces: int) -> int:
    body = 4 * shape.width**2 * shape.layers * 3  # attention, and a feed-forward of four widths
    return body + pieces * shape.embeddings


def masked_lm_cost(words: Sequence[str], like: Path | None = None) -> Cost:
    """Estimate a masked-LM training from the words of `downstream`: by its steps, or by epochs of
    an existing model over its texts or over `like`."""
    from teachonce.downstream.cli import main as downstream
    from teachonce.downstream.settings import MlmSettings

    args = given(downstream, words)
    (model,) = args["model"]
    size = model.removeprefix("scratch:")
    if size == model:
        parameters = size_of(model).parameters
    else:
        parameters = _parameters(parse_student(size), vocabulary_size(args["vocab"]) or 0)
    if "steps" in args:
        length = args.get("max_length", MlmSettings.max_length)
        batch = args.get("batch_tokens", args.get("batch_size", MlmSettings.batch_size) * length)
        trained_tokens = args["steps"] * batch
    else:
        text = sum(tokens_of(path, model) for path in ([like] if like else args["train"]))
        trained_tokens = args.get("epochs", MlmSettings.epochs) * text
    return Cost(TRAINING * parameters * trained_tokens, 4 * parameters)


def _option(options: Mapping[str, object], name: str, default: str) -> str:
    from teachonce.student_train.settings.recipe import find_recipe

    if name in options:
        return str(options[name])
    recipe = options.get("recipe")
    return str(find_recipe(str(recipe)).options.get(name, default)) if recipe else default


def _shape(student: str, teacher: Size) -> str:
    layers = student.removeprefix("teacher:")
    return student if layers == student else f"{teacher.width}x{layers}x{teacher.heads}"


def _pieces(vocab: str, teacher: Size) -> int:
    if size := vocabulary_size(vocab):
        return size
    config = Path(vocab) / "config.json"
    if config.exists():
        return int(json.loads(config.read_text())["vocab_size"])
    return teacher.pieces
