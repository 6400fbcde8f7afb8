"""Quality of students by codec and by tier of logits.

    python -m benchmarks.quality.codec_students --work DIR [--model DIR --corpus TEXT]

Codecs: one dump, kept exactly and in each codec; beside them, as an experiment, states by product
quantisation (Jegou et al. 2011), of which no codec was made. Tiers: the same text dumped with the
best logits and their rest, with random draws and with the head's input, at three sizes; the
students of these learn from logits alone, so they are cut out of the teacher: one from nothing
would stay for thousands of steps where all tiers are alike. All students are judged by the exact
store. What is finished in --work is not made again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from sklearn.cluster import MiniBatchKMeans

from benchmarks.common.results import NOVELS, RESULTS, TEACHER, mean_and_deviation, publish, table
from benchmarks.quality.distillation_helps import MASKED, finished, scores_of
from teachonce.store import FeatureStore, open_store
from teachonce.store.format.codecs.levels import LEVELS
from teachonce.store.tools.copy import begin_copy, convert
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.settings.loss_weights import parse_losses
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.arrays import Array
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

FITTED = 20_000  # tokens that product codes are fitted to
CODES = 256
PRODUCT = {"product, 2 bits": 4, "product, 1 bit": 8}  # channels of one byte
MEASURED = 2000  # tokens of which the whole distribution is computed
CUT = {"init": "layers:2,4,6", "vocab": "teacher"}
JUDGED = {"mlm": "MLM nats/token", "agreement": "agreement", "kl": "KL to the teacher"}


def product(source: FeatureStore, target: Path, size: int) -> None:
    """Copy an exact store with its states as precise as one byte for `size` channels allows.

    The states are written decoded.
    """
    numbers = [part.number for part in source.manifest.parts]
    writer = begin_copy(target, source, source.features, source.identity, numbers)
    books: dict[str, list[Any]] = {}
    for place, part in enumerate(source.manifest.parts):
        stored = source.part(place)
        arrays = {name: stored.all(name) for name in stored.names()}
        for name in arrays:
            if "/hidden/" not in name:
                continue
            mean, deviation = source.calibration[name.split("/")[2]]
            states = (arrays[name] - mean) / deviation
            pieces = np.split(states, range(size, states.shape[1], size), axis=1)
            if name not in books:
                books[name] = [
                    MiniBatchKMeans(CODES, n_init=1, batch_size=2048, random_state=0).fit(
                        piece[:FITTED]
                    )
                    for piece in pieces
                ]
            decoded = [
                book.cluster_centers_[book.predict(piece)]
                for book, piece in zip(books[name], pieces, strict=True)
            ]
            arrays[name] = (np.concatenate(decoded, axis=1) * deviation + mean).astype(np.float32)
        writer.write_part(part.number, part.counts, arrays)
    writer.seal()
    writer.close()


def bytes_of(path: Path, group: str) -> float:
    """Bytes a token and view of the arrays whose names have `/group/`."""
    store = open_store(path)
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and f"/{group}/" in str(f))
    return size / float(store.meta["tokens"]) / store.features.views


def state_error(exact: FeatureStore, other: FeatureStore) -> float:
    """Mean relative L2 of the states of some sequences."""
    found = []
    for i in range(0, len(exact), 10):
        want, got = exact[i].views[0].hidden["mean"], other[i].views[0].hidden["mean"]
        found.append(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1))
    return float(np.concatenate(found).mean())


def divergences(store: FeatureStore, whole: Array) -> tuple[float, float]:
    """Mean KL of the stored to the whole distribution, and of the whole to the stored one with its
    rest spread evenly; `whole` [n,V]: log-probabilities of the first n tokens of view 1."""
    forward, backward, token = list[float](), list[float](), 0
    head = store.head() if store.features.logits and store.features.logits.tier == "head" else None
    for record in store:
        logits = record.views[1].logits
        for t in range(len(record.token_ids)):
            if token == len(whole):
                return float(np.mean(backward)), float(np.mean(forward))
            told = distribution(logits, t, whole.shape[1], head)
            p = np.exp(whole[token].astype(np.float64))
            with np.errstate(divide="ignore", invalid="ignore"):
                forward.append(np.where(p > 0, p * np.log(p / told), 0).sum())
                backward.append(np.where(told > 0, told * np.log(told / p), 0).sum())
            token += 1
    raise AssertionError("too few tokens")


def distribution(logits: Any, t: int, vocabulary: int, head: Any) -> Array:
    """Probabilities [V] of token t, as a student can know them."""
    told = np.zeros(vocabulary)
    if logits.tier == "topk":
        told += np.exp(float(logits.rest[t])) / (vocabulary - logits.ids.shape[1])
        told[logits.ids[t]] = np.exp(logits.logprobs[t].astype(np.float64))
    elif logits.tier == "sample":
        some = slice(int(logits.start[t]), int(logits.start[t + 1]))
        told[logits.ids[some]] = logits.counts[some]
    else:
        weight, bias = head
        scores = weight @ logits.values[t].astype(np.float32) + bias
        told = np.exp((scores - scores.max()).astype(np.float64))
    found: Array = told / told.sum()
    return found


def whole_distribution(exact_head: FeatureStore) -> Array:
    """Log-probabilities [n,V] of the first tokens of view 1, of the exact input of the head."""
    weight, bias = exact_head.head()
    values = []
    for record in exact_head:
        values.append(record.views[1].logits.values)
        if sum(map(len, values)) >= MEASURED:
            break
    scores = (np.concatenate(values)[:MEASURED] @ weight.T + bias).astype(np.float64)
    highest = scores.max(axis=1, keepdims=True)
    partition = highest + np.log(np.exp(scores - highest).sum(axis=1, keepdims=True))
    found: Array = (scores - partition).astype(np.float32)
    return found


class Trial:
    """One text, one teacher, students that differ in what the store kept."""

    def __init__(self, work: Path, dumps: DumpOptions, base: TrainOptions, seeds: list[int]):
        work.mkdir(parents=True, exist_ok=True)
        self.work, self.dumps, self.base, self.seeds = work, dumps, base, seeds
        self.exact = self.dumped("exact", codec="exact")

    def dumped(self, name: str, **settings: Any) -> Path:
        """Dump the text, unless that is done already."""
        path = self.work / f"{name}.zarr"
        done = path.with_suffix(".done")
        if not done.exists():
            dump(replace(self.dumps, out=path, **settings))
            done.touch()
        return path

    def vocabulary(self) -> str:
        """The folder of a vocabulary for students that do not have the teacher's."""
        path = self.work / "vocabulary"
        if not path.exists():
            student_tokenizer("5k", open_store(self.exact)).save_pretrained(path)
        return str(path)

    def students(self, name: str, path: Path, losses: str, **settings: Any) -> list[str]:
        """Cells of a row: the scores of students of a store."""
        store, by = open_store(path), open_store(self.exact)
        learnt: dict[str, Any] = {"store": str(path), "loss": parse_losses((losses,))}
        options = replace(self.base, **{**learnt, **MASKED, **settings})
        found = [
            scores_of(finished(name, replace(options, seed=seed), store, self.work, by))
            for seed in self.seeds
        ]
        return [mean_and_deviation([of[key] for of in found]) for key in JUDGED]

    def codecs(self, losses: str) -> list[list[object]]:
        """Rows of the table of codecs."""
        rows: list[list[object]] = []
        exact, vocabulary = open_store(self.exact), self.vocabulary()
        for name in (*LEVELS, *PRODUCT):
            path = self.work / f"{name.replace(', ', '-').replace(' ', '-')}.zarr"
            done = path.with_suffix(".done")
            if not done.exists():
                if name in PRODUCT:
                    product(exact, path, PRODUCT[name])
                else:
                    convert(self.exact, path, name)
                done.touch()
            size = bytes_of(path, "hidden")
            if name in PRODUCT:
                size = exact.features.width / PRODUCT[name]
            error = state_error(exact, open_store(path))
            cells = self.students(name, path, losses, vocab=vocabulary)
            rows.append([name, f"{size:.0f}", error, *cells])
        return rows

    def tiers(self, losses: str, tiers: list[str], student: str) -> list[list[object]]:
        """Rows of the table of tiers. The students have the teacher's width."""
        exact = self.dumped("exact-head", codec="exact", logits="head", limit=4 * MEASURED)
        whole = whole_distribution(open_store(exact))
        rows: list[list[object]] = []
        for logits in tiers:
            path = self.dumped(logits.replace(":", "-"), logits=logits)
            size = bytes_of(path, "logits")
            both = divergences(open_store(path), whole)
            cells = self.students(logits, path, losses, student=student, **CUT)
            rows.append([logits, f"{size:.0f}", *both, *cells])
        return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--model", default=str(TEACHER))
@click.option("--corpus", default=str(NOVELS))
@click.option("--tokens", default=100_000)
@click.option("--student", default="128x2x2", help="Of the codecs.")
@click.option("--cut", default="384x3x12", help="Of the tiers, as wide as the teacher.")
@click.option("--steps", default=500)
@click.option("--seeds", default="0,1,2")
@click.option(
    "--tiers",
    default="head,topk:160,sample:5000,topk:16,sample:300,topk:4,sample:25",
    help="Three of about 500 bytes a token, two of 70, two of 20.",
)
@click.option("--parts", default="codecs,tiers")
@click.option("--precision", default="bf16")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    work: Path,
    model: str,
    corpus: str,
    tokens: int,
    student: str,
    cut: str,
    steps: int,
    seeds: str,
    tiers: str,
    parts: str,
    precision: str,
    results: Path,
) -> None:
    """Train what is not finished, print the tables and put them into RESULTS.md."""
    dumps = DumpOptions(
        model, work / "exact.zarr", (corpus,), limit=tokens, views=2, attention="none",
        max_length=128, precision=precision,
    )  # fmt: skip
    base = TrainOptions(
        store="", student=student, steps=steps, batch_tokens=1024, held_out=0.04,
        eval_every=10**9, precision=precision, init="svd",
    )  # fmt: skip
    trial = Trial(work, dumps, base, [int(seed) for seed in seeds.split(",")])
    settings = (
        f"`python -m benchmarks.quality.codec_students`; teacher {Path(model).name}, {tokens:,}"
        f" tokens, masked"
        f" view; {steps} steps of 1,024 tokens, {len(trial.seeds)} seeds, ± sample deviation,"
        " judged by the exact store. "
    )
    judged = tuple(JUDGED.values())
    if "codecs" in parts:
        losses = "mlm=1,kl=1,hidden=30"
        head = ("codec", "states, B/token", "their relative L2", *judged)
        publish(
            "Quality by codec",
            f"{settings}Students {student}, 5k WordPiece, losses {losses}. Of product quantisation,"
            " an experiment, the bytes of the codes alone.",
            table(head, trial.codecs(losses)),
            results,
        )
    if "tiers" in parts:
        losses = "kl=1"
        columns = ("KL, stored to whole", "KL, whole to stored")
        publish(
            "Quality by tier",
            f"{settings}Students {cut}, {CUT['init']}, the teacher's vocabulary, losses"
            f" {losses}; codec default. Divergences over {MEASURED:,} tokens; the rest is spread"
            " evenly over what is not kept.",
            table(
                ("logits", "B/token", *columns, *judged), trial.tiers(losses, tiers.split(","), cut)
            ),
            results,
        )


if __name__ == "__main__":
    main()
