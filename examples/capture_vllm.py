"""Capture a decoder's logits with vLLM: python capture_vllm.py MODEL TEXTS.txt OUT.parquet

TEXTS.txt has one text per line. Needs a GPU, vllm and pyarrow. Then, with teachonce:
feature-store import OUT.parquet store.zarr --model MODEL
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import parquet

K, TOKENS, WINDOWS = 64, 1024, 256  # ids of a token, tokens of a window, windows at a time
IDS, NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
COLUMNS = {"input_ids": IDS, "token_ids": pa.list_(IDS), "logprobs": pa.list_(NUMBERS)}
SCHEMA = pa.schema(COLUMNS | {"observed": NUMBERS}, metadata={"engine": "vllm"})


def windows(tokenizer: Any, lines: Iterable[str]) -> Iterator[list[int]]:
    """Yield the ids of each window. The last token of a prompt has no logits, so one is added."""
    for line in filter(str.strip, lines):
        cut = {"truncation": True, "max_length": TOKENS, "return_overflowing_tokens": True}
        for ids in tokenizer(line.rstrip("\n"), **cut).input_ids:
            yield [*ids, tokenizer.eos_token_id]


def row(output: Any) -> dict[str, list[Any]]:
    """Return the columns of a window. Entry i of vLLM is of token i, and 0 is empty."""
    ids, flat = list(output.prompt_token_ids), output.prompt_logprobs
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names} | {"input_ids": ids}
    for index in range(1, len(ids)):
        span = slice(flat.start_indices[index], flat.end_indices[index])
        logprobs = dict(zip(flat.token_ids[span], flat.logprobs[span], strict=True))
        columns["token_ids"].append(best := sorted(logprobs, key=lambda t: -logprobs[t])[:K])
        columns["logprobs"].append([logprobs[token] for token in best])
        columns["observed"].append(logprobs[ids[index]])
    return columns


def capture(llm: Any, settings: Any, lines: Iterable[str], out: str) -> None:
    """Run the engine over all lines and write a row for each window."""
    remaining = windows(llm.get_tokenizer(), lines)
    with parquet.ParquetWriter(out, SCHEMA) as file:
        while batch := list(islice(remaining, WINDOWS)):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], settings)
            file.write_table(pa.Table.from_pylist([row(output) for output in outputs], SCHEMA))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(str(__doc__).partition("\n")[0])
    from vllm import LLM, SamplingParams

    model, texts, out = sys.argv[1:]
    off = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    llm = LLM(model, max_logprobs=K, max_model_len=TOKENS + 2, **off)
    with open(texts, encoding="utf-8") as lines:
        settings = SamplingParams(max_tokens=1, prompt_logprobs=K, flat_logprobs=True)
        capture(llm, settings, lines, out)
