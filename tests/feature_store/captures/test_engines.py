"""Captures of vLLM and SGLang, which the examples write, and proofs of captures of any kind.

The engines do not run here: `Engine` of tests/making returns outputs of a teacher in their form.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

from teachonce.store import open_store
from tests.end_to_end.support import says
from tests.examples.loading import example
from tests.feature_store.captures.conftest import imported
from tests.feature_store.captures.test_refusals import importing
from tests.making.captures import (
    Engine,
    Taught,
    distillkit,
    engine_rows,
    megatron,
    stacked,
)
from tests.making.models import random_model, trained_tokenizer
from tests.making.texts import ENGLISH, RUSSIAN

TEXTS = (*ENGLISH, *RUSSIAN[:4])
LONG = " ".join(ENGLISH)  # more than one window
ENGINES = ("vllm", "sglang")


def captured(engine: str, folder: Path, out: Path, kept: int = 16) -> Path:
    return engine_rows(engine, folder, out, (*TEXTS, "", LONG), kept)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine(engine: str, teacher: Path, tmp_path: Path) -> None:
    """Each token of an engine's capture has the teacher's log-probabilities of the next token, and
    of the token that follows."""
    source = captured(engine, teacher, tmp_path / "rows.parquet")
    said = imported(source, tmp_path / "a.zarr", teacher, "--model", teacher, "--codec", "exact")
    says(said, f"{engine}, ", "topk:16 of 600, of the next token", "proof", "agree with")
    store, live = open_store(tmp_path / "a.zarr"), Engine(teacher, 16)
    assert store.features.logits and store.features.logits.observed
    assert [record.text for record in store][: len(TEXTS)] == list(TEXTS)
    for number in range(len(TEXTS)):
        record = store[number]
        row, logits = live.logprobs(record.token_ids.tolist()).numpy(), record.views[0].logits
        best = np.take_along_axis(row, logits.ids.astype(np.int64), 1)
        assert np.abs(logits.logprobs - best).max() < 1e-3
        following = record.token_ids[1:].astype(np.int64)
        observed = row[np.arange(len(following)), following]
        assert np.abs(logits.observed[:-1] - observed).max() < 1e-3
    windows = [store[number].token_ids for number in range(len(TEXTS), len(store))]
    assert len(windows) > 1 and sum(map(len, windows)) == len(live.tokenizer(LONG).input_ids)


def rewritten(path: Path, change: Callable[[dict[str, Any]], object], only: int = -1) -> Path:
    """Change all rows of a capture, or only the row with the given number."""
    table = parquet.read_table(path)
    rows = table.to_pylist()
    for number, row in enumerate(rows):
        if only in (-1, number):
            change(row)
    parquet.write_table(type(table).from_pylist(rows, table.schema), path)
    return path


def _later(row: dict[str, Any]) -> None:
    for name in ("token_ids", "logprobs", "observed"):
        row[name] = [row[name][0], *row[name][:-1]]


def _earlier(row: dict[str, Any]) -> None:
    for name in ("token_ids", "logprobs"):
        row[name] = [*row[name][1:], row[name][-1]]


@pytest.mark.parametrize("change", (_later, _earlier))
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_another_place(
    engine: str, change: Callable[[dict[str, Any]], None], teacher: Path, tmp_path: Path
) -> None:
    source = rewritten(captured(engine, teacher, tmp_path / "rows.parquet"), change)
    line = importing(source, teacher)
    says(line, "rows.parquet, row 0, token ", "of the next token", "shifted by one position")


def test_rows_that_a_cache_kept(teacher: Path, tmp_path: Path) -> None:
    """Rows after a cached prefix of another text are refused: by the tokens if the rows belong to
    that text, and by --model if they have the right tokens after a wrong prefix."""
    source, sound = tmp_path / "rows.parquet", tmp_path / "sound.parquet"
    rows = parquet.read_table(captured("vllm", teacher, sound)).to_pylist()

    def other_text(row: dict[str, Any]) -> None:
        for name in ("token_ids", "logprobs", "observed"):
            row[name][:8] = rows[0][name][:8]

    captured("vllm", teacher, source)
    says(importing(rewritten(source, other_text, 5), teacher), "row 5, token ", "prefix caching")
    live = Engine(teacher, 16)
    ids = rows[5]["input_ids"]
    assert len(ids) > 24
    script = example("capture_vllm")
    script.K = 16
    wrong = script.row(live._vllm([*rows[2]["input_ids"][:12], *ids[12:]]))

    def other_prefix(row: dict[str, Any]) -> None:
        for name in ("token_ids", "logprobs", "observed"):
            row[name][12:20] = wrong[name][12:20]

    captured("vllm", teacher, source)
    rewritten(source, other_prefix, 5)
    line = importing(source, teacher, "--model", teacher)
    says(line, "row 5, token 1", "of this text are off by up to", "prefix caching")


def other_model(folder: Path) -> Path:
    """Save another GPT-2 with the same tokenizer."""
    tokenizer = trained_tokenizer("bpe-plain")
    model = random_model("gpt2", tokenizer, "causal")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ("vllm", "distillkit", "megatron"))
def test_rows_of_another_model(
    kind: str, teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    words: list[Any] = []
    if kind == "vllm":
        source = captured("vllm", teacher, tmp_path / "rows.parquet")
    elif kind == "distillkit":
        source = distillkit(tmp_path / "capture", samples, 16, 16)
    else:
        ids, logprobs = stacked(samples[:12], 16)
        np.save(tmp_path / "tokens.npy", ids)
        source = megatron(tmp_path / "run", [[logprobs]], 16)
        words = ["--tokens", tmp_path / "tokens.npy"]
    line = importing(source, teacher, "--model", other_model(tmp_path / "other"), *words)
    says(line, "--model", "differ from its own by", "is not the captured model")
    says(imported(source, tmp_path / "a.zarr", teacher, "--model", teacher, *words), "agree with")


@pytest.mark.parametrize(("place", "words"), [(0, "to the token itself"), (2, "after the next")])
def test_rows_that_predict_another_place(
    place: int, words: str, teacher: Path, samples: list[Taught], tmp_path: Path
) -> None:
    """Found by their predictions, without log-probabilities of the tokens that follow."""
    sure = []
    for sample in samples:
        logits = np.zeros_like(sample.logprobs)
        known = np.roll(sample.ids, -place)
        logits[np.arange(len(known)), known] = 8
        values = torch.from_numpy(logits).log_softmax(-1).numpy()
        sure.append(Taught(sample.text, sample.ids, values, sample.states, sample.unnormed))
    line = importing(distillkit(tmp_path / "capture", sure, 16, 16), teacher)
    says(line, words, "shifted by one position")
    says(
        importing(distillkit(tmp_path / "again", sure, 16, 16), teacher, "--model", teacher),
        "shifted",
    )
    # A few rows prove nothing.
    imported(distillkit(tmp_path / "few", sure[:1], 16, 16), tmp_path / "a.zarr", teacher)


def test_a_teacher_that_predicts_the_token_itself(tmp_path: Path) -> None:
    """Its rows look shifted; a comparison with the checkpoint decides."""
    folder, tokenizer = tmp_path / "copies", trained_tokenizer("bpe-plain")
    model = random_model("gpt2", tokenizer, "causal")
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=2.0)  # tied to the rows of the head
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source = captured("vllm", folder, tmp_path / "rows.parquet")
    says(importing(source, folder), "to the token itself", "give the checkpoint as --model")
    says(imported(source, tmp_path / "a.zarr", folder, "--model", folder), "agree with")


def test_rows_of_an_engine_that_do_not_fit(teacher: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.parquet"

    def refused(change: Callable[[dict[str, Any]], object], *more: Any) -> str:
        captured("vllm", teacher, source, 4)
        return importing(rewritten(source, change, 1), teacher, *more)

    says(refused(lambda row: row["input_ids"].append(1)), "row 1", "logits (of all tokens but")
    says(refused(lambda row: row["observed"].pop()), "row 1: token_ids has", "and observed")
    fewer = lambda row: row.update({n: [v[:3] for v in row[n]] for n in ("token_ids", "logprobs")})  # noqa: E731
    says(refused(fewer), "row 1: has 3 ids for a token, and the first row 4")
    captured("vllm", teacher, source, 4)
    says(importing(source, teacher, "--format", "sglang"), "engine=sglang", "capture_sglang.py")
    says(importing(source, teacher, "--model", tmp_path / "gone"), "--model", "no such folder")


def test_files_of_both_engines_in_a_folder(teacher: Path, tmp_path: Path) -> None:
    """Their columns are equal, but each engine's rows are read in its own way."""
    (tmp_path / "rows").mkdir()
    for number, engine in enumerate(ENGINES):
        captured(engine, teacher, tmp_path / "rows" / f"{number}.parquet", 4)
    line = importing(tmp_path / "rows", teacher)
    says(line, "1.parquet", "engine=sglang", "0.parquet has engine=vllm", "their own folder")
