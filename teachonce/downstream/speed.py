"""Measures size, latency and memory of models, as in the table of Kolesnikova et al. 2022."""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from safetensors import safe_open

from teachonce.checkpoints.declared import declared_head
from teachonce.checkpoints.loading import (
    input_limit,
    load_config,
    load_tokenizer,
    load_with_head,
)
from teachonce.checkpoints.names import resolve_model
from teachonce.checkpoints.sentence_settings import has_modules, module_weights
from teachonce.downstream.process_memory import reset_peak, status_bytes
from teachonce.downstream.settings import SpeedSettings
from teachonce.support.console import counted

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8}
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
SENTENCES = 20
SENTENCE_TOKENS = 32
Say = Callable[[str], object]


class MeasuredModel:
    """Holds a model to measure, in float32, and its inputs. An encoder has no head; a decoder has
    its output layer, which computes the logits of the last token only."""

    def __init__(self, name: str) -> None:
        model = resolve_model(name)
        config = load_config(model)
        self.tokenizer = load_tokenizer(model)
        # A decoder with modules gives text vectors, for which its output layer is not used.
        causal = declared_head(config.architectures or ()) == "causal"
        predicts = causal and not has_modules(model)
        # In float32 whatever the file has, so that the times of models can be compared.
        head, options = "causal" if predicts else "none", {"dtype": torch.float32}
        self.network: Any = load_with_head(model, config, head, options)[0]
        # Some families have no such argument: they compute the logits of all tokens.
        arguments = inspect.signature(self.network.forward).parameters
        self._last = {"logits_to_keep": 1} if predicts and "logits_to_keep" in arguments else {}
        folder = model.folder()
        self.network.eval()
        self.name = name
        # Not both: a folder may have the same weights in two formats.
        files = list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))
        modules = [file for file in module_weights(model) if file.parent != folder]
        self.disk = sum(file.stat().st_size for file in [*files, *modules])
        self.stored = _stored_dtype(files)
        self.parameters = sum(parameter.numel() for parameter in self.network.parameters())
        self.parameters += sum(_count(file) for file in modules)
        self.longest = input_limit(self.network.config, self.tokenizer)

    def prepare(self, settings: SpeedSettings, length: int) -> None:
        """Make `batch`, [B, S] random tokens, and `sentences`, each [1, n]."""
        special = set(self.tokenizer.all_special_ids)
        token_ids = torch.tensor([i for i in range(len(self.tokenizer)) if i not in special])
        draws = torch.Generator().manual_seed(settings.seed)

        def random_tokens(rows: int, columns: int) -> torch.Tensor:
            return token_ids[torch.randint(len(token_ids), (rows, columns), generator=draws)]

        self.batch = random_tokens(settings.batch_size, length)
        if settings.texts:
            self.sentences = [
                self.tokenizer(text, truncation=True, max_length=length, return_tensors="pt")[
                    "input_ids"
                ]
                for text in settings.texts[:SENTENCES]
            ]
        else:
            columns = min(SENTENCE_TOKENS, length)
            self.sentences = [random_tokens(1, columns) for _ in range(SENTENCES)]

    @torch.inference_mode()
    def run(self, inputs: Sequence[torch.Tensor], device: str) -> float:
        """Run a forward pass over each of the inputs; return the total time in seconds."""
        # Before the clock starts: copying to a GPU is not part of the time.
        inputs = [ids.to(device) for ids in inputs]
        masks = [torch.ones_like(ids) for ids in inputs]
        _wait(device)
        start = time.perf_counter()
        for ids, mask in zip(inputs, masks, strict=True):
            self.network(input_ids=ids, attention_mask=mask, **self._last)
        _wait(device)
        return time.perf_counter() - start


def measure_speed(
    models: Sequence[str], teacher: str | None, settings: SpeedSettings, say: Say = print
) -> dict[str, Any]:
    """Measure `models` and the teacher, if there is one, on the CPU and, if present, on a GPU.

    Returns `{"task", "settings", "length", "hardware", "devices", "teacher", "models"}`. `models`
    is a list, the teacher last, of `{"model", "parameters", "disk_bytes", "disk_dtype", "cpu",
    "cuda", "ratio"}`. `cpu` and `cuda` have `batch_ms`, `batch_ms_quartiles` and
    `batch_memory_bytes` of a batch, and `sentence_ms`, `sentence_ms_quartiles` and
    `sentence_memory_bytes` of single sentences.

    `ratio` has each figure of the teacher divided by the model's figure; if the dtypes on disk
    differ, `disk_bytes` are compared as in float32. All models run batches of the same length, the
    smallest of their limits. Times are medians over the runs, with the lower and upper quartile,
    because a single slow moment of the machine distorts a mean; the time of a sentence is the mean
    over the sentences. Memory is the size of the weights plus the peak of a forward pass over the
    batch, or over the sentence that needs most; None if the system does not report it.

    Raises UserError for a model that cannot be loaded.
    """
    subjects = [MeasuredModel(name) for name in [*models, *([teacher] if teacher else [])]]
    length = min(settings.max_length, *(subject.longest for subject in subjects))
    if length < settings.max_length:
        least = min(subjects, key=lambda subject: subject.longest)
        say(
            f"batches of {length} tokens, not {settings.max_length}: the limit of {least.name} is"
            f" {length}"
        )
    for subject in subjects:
        subject.prepare(settings, length)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows: list[dict[str, Any]] = [
        {
            "model": subject.name,
            "parameters": subject.parameters,
            "disk_bytes": subject.disk,
            "disk_dtype": subject.stored,
        }
        for subject in subjects
    ]
    for device in devices:
        for row, figures in zip(rows, _on(device, subjects, settings, say), strict=True):
            row[device] = figures
    if teacher:
        for row in rows[:-1]:
            row["ratio"] = _ratios(row, rows[-1])
            if row["disk_dtype"] != rows[-1]["disk_dtype"]:
                row["ratio"]["disk_bytes"] = _in_float32(rows[-1]) / _in_float32(row)
    return {
        "task": "speed",
        "settings": {
            "batch_size": settings.batch_size,
            "max_length": settings.max_length,
            "runs": settings.repeat,
            "seed": settings.seed,
            "texts": len(settings.texts[:SENTENCES]),
        },
        "length": length,
        "hardware": hardware(),
        "devices": devices,
        "teacher": teacher,
        "models": rows,
    }


def _on(
    device: str, subjects: Sequence[MeasuredModel], settings: SpeedSettings, say: Say
) -> list[dict[str, Any]]:
    for subject in subjects:
        subject.network.to(device)
    # Measured first: these passes also warm up the libraries for the times.
    memory = [
        {
            "sentence_memory_bytes": peak_memory(subject, subject.sentences, device),
            "batch_memory_bytes": peak_memory(subject, [subject.batch], device),
        }
        for subject in subjects
    ]
    batches: list[list[float]] = [[] for _ in subjects]
    sentences: list[list[float]] = [[] for _ in subjects]
    # Models in turn within each run, so that a slow moment of the machine hits all of them.
    for run in range(settings.repeat):
        for number, subject in enumerate(subjects):
            batches[number].append(1000 * subject.run([subject.batch], device))
            seconds = subject.run(subject.sentences, device)
            sentences[number].append(1000 * seconds / len(subject.sentences))
        say(f"{device}: run {run + 1} of {settings.repeat}")
    for subject in subjects:
        subject.network.to("cpu")
    return [
        {
            "batch_ms": median(batch),
            "sentence_ms": median(sentence),
            "batch_ms_quartiles": _quartiles(batch),
            "sentence_ms_quartiles": _quartiles(sentence),
            **peaks,
        }
        for batch, sentence, peaks in zip(batches, sentences, memory, strict=True)
    ]


def _quartiles(times: Sequence[float]) -> list[float]:
    """Return the lower and upper quartile; for a single run, its time twice."""
    # Before Python 3.13 `quantiles` refuses a single number.
    low, _, high = quantiles(
        [*times, *times] if len(times) == 1 else times, n=4, method="inclusive"
    )
    return [low, high]


def _weights(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the dtype and the number of elements of each weight in a safetensors file, without
    reading the weights."""
    with safe_open(file, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  # no mapping
            part = weights.get_slice(name)
            yield part.get_dtype(), math.prod(part.get_shape())


def _count(file: Path) -> int:
    """Count the parameters in a file of weights."""
    if file.suffix == ".safetensors":
        return sum(count for _, count in _weights(file))
    # `weights_only`: no pickle of an untrusted folder runs code.
    return sum(part.numel() for part in torch.load(file, "cpu", weights_only=True).values())


def _stored_dtype(files: Sequence[Path]) -> str:
    """Return the dtype in which most bytes of the weights are stored; "" if the files are not
    safetensors."""
    sizes: Counter[str] = Counter()
    for file in files:
        if file.suffix == ".safetensors":
            for dtype, count in _weights(file):
                sizes[dtype] += count * BYTES.get(dtype, 1)
    ((dtype, _),) = sizes.most_common(1) or [("", 0)]
    return DTYPES.get(dtype, dtype.lower())


def _in_float32(row: dict[str, Any]) -> float:
    return float(row["disk_bytes"]) * 4 / (2 if row["disk_dtype"] in ("bf16", "fp16") else 4)


def _ratios(row: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """Divide each figure of the teacher by the same figure of a model (`row`)."""
    ratios: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            ratios[name] = _ratios(value, teacher[name])
        elif isinstance(value, int | float) and teacher[name]:
            ratios[name] = teacher[name] / value
    return ratios


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(subject: MeasuredModel, inputs: Sequence[torch.Tensor], device: str) -> int | None:
    """Return the memory in bytes of the weights plus the peak of the forward passes.

    On a CPU the peak is the growth of the process, from /proc; None on a system without /proc.
    """
    weights: int = sum(
        tensor.numel() * tensor.element_size()
        for tensor in [*subject.network.parameters(), *subject.network.buffers()]
    )
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        subject.run(inputs, device)
        return weights + torch.cuda.max_memory_allocated() - before
    subject.run([subject.sentences[0]], device)  # libraries allocate buffers at their first call
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else a batch reuses freed memory, and nothing grows
        reset_peak()
        before = status_bytes("VmRSS")
        subject.run(inputs, device)
        return weights + status_bytes("VmHWM") - before
    except (OSError, AttributeError):
        # /proc is missing or cannot be written, or the C library has no malloc_trim.
        return None


def processor() -> str:
    if Path("/proc/cpuinfo").exists():
        named = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if named:
            return named[1]
    return platform.processor() or platform.machine()


def hardware() -> str:
    """Describe processor, threads, GPU and torch in one line."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = f"{counted(torch.get_num_threads(), 'thread')} of {os.cpu_count()}"
    return f"{processor()}, {threads}{gpu}, torch {version('torch')}, fp32"
