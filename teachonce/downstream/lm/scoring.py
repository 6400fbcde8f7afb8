"""Scores decoders by the bits that they need for each byte of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm

from teachonce.checkpoints.loading import (
    check_pieces,
    checked_length,
    input_limit,
    load_config,
    load_tokenizer,
    load_with_head,
)
from teachonce.checkpoints.names import resolve_model
from teachonce.downstream.lm.store_agreement import MEASURES, store_agreement
from teachonce.downstream.lm.windows import (
    Documents,
    ScoredWindow,
    read_documents,
    sliding_windows,
    start_token,
)
from teachonce.downstream.score_tables import result_of
from teachonce.downstream.settings import LmSettings
from teachonce.downstream.text_lines import read_lines
from teachonce.student_train.data.spelled_text import changed_text
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.training.device import resolved_device

Say = Callable[[str], None]
Predict = Callable[[Tensor, Tensor], Tensor]
"""Takes token ids and attention mask, int64 [B,S] on the CPU, returns logits [B,S,V]."""
BITS = "bits/byte"
ABOUT: dict[str, Any] = {
    "task": "lm",
    "measures": {BITS: "bits_per_byte", "nats/token": "loss", "perplexity": "perplexity"},
    "primary": "bits_per_byte",
    "scale": 1,
    "decimals": 3,
}
LONGEST = 1024
"""The default size of a window, in tokens, of models that could read more."""
CELLS = 2**26
"""Logits in memory at once: 256 MB in float32."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def score_lm(
    model: str, tests: Mapping[str, Path], settings: LmSettings, say: Say = print
) -> dict[str, Any]:
    """Score a decoder on the documents of `tests` (from `splits_to_test`).

    Each document is read alone, in overlapping windows (`windows.sliding_windows`), with the
    tokenizer's start token in front. Bits per byte are the summed cross-entropy of all predicted
    tokens, divided by their bytes and ln 2. They can be compared between vocabularies.

    With `settings.store`, each file also gets the figures of `store_agreement`.

    Returns the same dictionary as `fine_tune.score_as_is`; its examples are documents.

    Raises UserError for a wrong model, length or file, and if the model has no causal-LM head.
    """
    # Before the model loads: a file that cannot be read is refused at once.
    texts = {name: read_lines(path, settings.text_column) for name, path in tests.items()}
    tokenizer, network = load_decoder(model, settings.precision)
    size, shared = _window(settings, network.config, tokenizer)
    say(
        f"as is: {counted(network.num_parameters(), 'parameter')}, windows of {size:,} tokens"
        f" that share {shared:,}; {_start(tokenizer)}"
    )
    about: dict[str, Any] = ABOUT
    scores, counts, agreement = {}, {}, dict[str, float]()
    if settings.store is not None:
        agreement = store_agreement(network, tokenizer, settings.store)
        about = {**ABOUT, "measures": {**ABOUT["measures"], **MEASURES}}

    def predict(ids: Tensor, mask: Tensor) -> Tensor:
        inputs = {"input_ids": ids.to(network.device), "attention_mask": mask.to(network.device)}
        # Nothing is generated, so a key-value cache would only take memory.
        logits: Tensor = network(**inputs, use_cache=False).logits
        return logits

    for name, path in tests.items():
        documents = read_documents(tokenizer, texts[name])
        say(f"{path}: {counted(len(documents.ids), 'document')}, the whole file")
        # `read_documents` has switched truncation off.
        if changed := changed_text(tokenizer.backend_tokenizer, texts[name]):
            say(f"{path}: {changed}")
        counts[name] = len(documents.ids)
        pieces = network.config.vocab_size
        figures = text_figures(predict, documents, size, shared, pieces, str(path))
        scores[name] = figures | agreement
    shown = {**asdict(settings), "as_is": True, "max_length": size, "stride": shared}
    return result_of(about, model, tests, shown, counts, [scores])


def load_decoder(model: str, precision: str = "fp32") -> tuple[Any, Any]:
    """Load the tokenizer and the network of a decoder, on a GPU if there is one.

    Raises UserError if the model has no causal-LM head, or no fast tokenizer.
    """
    resolved = resolve_model(model)
    config = load_config(resolved)
    tokenizer = load_tokenizer(resolved)
    if not tokenizer.is_fast:
        raise UserError(
            f"model {model}: its tokenizer is not a fast one; save it as tokenizer.json"
        )
    network, _ = load_with_head(resolved, config, "causal", {"dtype": DTYPES[precision]})
    embeddings: Any = network.get_input_embeddings()
    check_pieces(tokenizer, embeddings.num_embeddings, f"model {model}")
    return tokenizer, network.eval().to(torch.device(resolved_device("auto")))


def _window(settings: LmSettings, config: Any, tokenizer: Any) -> tuple[int, int]:
    """Return the number of tokens of a window, and the number that consecutive windows share."""
    size = settings.max_length or min(LONGEST, input_limit(config, tokenizer))
    size = checked_length(size, config, tokenizer)
    shared = size // 2 if settings.stride is None else settings.stride
    if not 0 < shared < size:
        raise UserError(
            f"--stride {shared}: consecutive windows must share 1 to {size - 1:,} tokens of"
            f" --max-length {size:,}; leave --stride out to share half of a window"
        )
    return size, shared


def _start(tokenizer: Any) -> str:
    start = start_token(tokenizer)
    if start is None:
        return "nothing in front of a document, its first token is not predicted"
    return f"{tokenizer.convert_ids_to_tokens(start)} in front of each document"


def text_figures(
    predict: Predict, documents: Documents, size: int, shared: int, pieces: int, name: str
) -> dict[str, float]:
    """Return the scores of documents: bits per byte, loss in nats per token, and perplexity.
    `predict` reads windows of `size` tokens; consecutive windows share `shared` tokens.

    pieces: the size of the vocabulary. name: the name of the text, for messages. Raises UserError
        if there is nothing to predict, or if a prediction is not finite.
    """
    if not documents.bytes:
        raise UserError(
            f"text {name}: each document has at most one token, so that there is no next token to"
            " score; give longer documents"
        )
    windows = list(sliding_windows([len(ids) for ids in documents.ids], size, shared))
    nats = 0.0
    with tqdm(total=len(windows), desc=name, unit="window", disable=None) as bar:
        for batch in batches(windows, pieces):
            nats += float(_nats(predict, documents, batch))
            bar.update(len(batch))
    if not math.isfinite(nats):
        raise UserError(
            f"text {name}: the model's loss is {nats:g}, so its weights are damaged; train it again"
        )
    loss, bits = nats / documents.predicted, nats / documents.bytes / math.log(2)
    # exp of a larger number overflows a float.
    perplexity = math.exp(min(loss, 700))
    return {"primary": bits, "bits_per_byte": bits, "loss": loss, "perplexity": perplexity}


def batches(windows: Sequence[ScoredWindow], pieces: int) -> Iterator[list[ScoredWindow]]:
    """Yield batches of windows of similar lengths, the longest first, so that a lack of memory
    shows at once. `pieces` is the size of the vocabulary."""
    order = sorted(windows, key=lambda window: window.begin - window.end)
    begin = 0
    while begin < len(order):
        count = max(1, CELLS // (pieces * (order[begin].end - order[begin].begin)))
        yield order[begin : begin + count]
        begin += count


@torch.inference_mode()
def _nats(predict: Predict, documents: Documents, windows: Sequence[ScoredWindow]) -> Tensor:
    """Return the summed cross-entropy in nats, float64, of all tokens that the windows predict."""
    longest = max(window.end - window.begin for window in windows)
    # Any id pads on the right, where no token of a causal model attends to it.
    ids = np.zeros((len(windows), longest), np.int64)
    present, scored = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for row, window in enumerate(windows):
        length = window.end - window.begin
        ids[row, :length] = documents.ids[window.number][window.begin : window.end]
        present[row, :length] = 1
        scored[row, window.scored - window.begin : length] = True
    logits = predict(torch.from_numpy(ids), torch.from_numpy(present))
    mask = torch.from_numpy(scored[:, 1:])
    labels = torch.from_numpy(ids[:, 1:])[mask].to(logits.device)
    # Chosen before the cast: padding and the tokens that windows share get no float32 copy.
    predicted = logits[:, :-1][mask.to(logits.device)].float()
    # In float64, as sums of millions of tokens lose digits in float32.
    return functional.cross_entropy(predicted, labels, reduction="none").double().sum()
