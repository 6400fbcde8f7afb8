"""Capture a decoder's logits with SGLang: python capture_sglang.py MODEL TEXTS.txt OUT.parquet

TEXTS.txt has one text per line. Needs a GPU, sglang and pyarrow. Then, with teachonce:
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
SCHEMA = pa.schema(COLUMNS | {"observed": NUMBERS}, metadata={"engine": "sglang"})


def windows(tokenizer: Any, lines: Iterable[str]) -> Iterator[list[int]]:
    """Yield the ids of each window. The last token of a prompt has no logits, so one is added."""
    for line in filter(str.strip, lines):
        cut = {"truncation": True, "max_length": TOKENS, "return_overflowing_tokens": True}
        for ids in tokenizer(line.rstrip("\n"), **cut).input_ids:
            yield [*ids, tokenizer.eos_token_id]


def row(output: Any) -> dict[str, list[Any]]:
    """Return the columns of a window. Entry i of SGLang is of token i, and 0 is empty."""
    observed = output["meta_info"]["input_token_logprobs"]
    tops = output["meta_info"]["input_top_logprobs"][1:]
    return {
        "input_ids": [token for _, token, _ in observed],
        "token_ids": [[token for _, token, _ in top] for top in tops],
        "logprobs": [[value for value, _, _ in top] for top in tops],
        "observed": [value for value, _, _ in observed[1:]],
    }


def capture(engine: Any, tokenizer: Any, lines: Iterable[str], out: str) -> None:
    """Run the engine over all lines and write a row for each window."""
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": K}
    once = {"max_new_tokens": 1, "temperature": 0}
    remaining = windows(tokenizer, lines)
    with parquet.ParquetWriter(out, SCHEMA) as file:
        while batch := list(islice(remaining, WINDOWS)):
            outputs = engine.generate(input_ids=batch, sampling_params=once, **options)
            file.write_table(pa.Table.from_pylist([row(output) for output in outputs], SCHEMA))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(str(__doc__).partition("\n")[0])
    import sglang
    from transformers import AutoTokenizer

    model, texts, out = sys.argv[1:]
    engine = sglang.Engine(model_path=model, disable_radix_cache=True, chunked_prefill_size=-1)
    with open(texts, encoding="utf-8") as lines:
        capture(engine, AutoTokenizer.from_pretrained(model), lines, out)
