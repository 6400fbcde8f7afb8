"""Every block of README and of the site runs unchanged, in order, in a folder with the pages'
inputs: tiny teachers under the names that the pages use."""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from teachonce.checkpoints import names as checkpoint_names
from teachonce.checkpoints.names import Alias
from teachonce.store import open_store
from tests.docs.pages import PAGES, blocks_of, ours
from tests.downstream.search.collections import collection
from tests.end_to_end.test_pairs import reader_of_pairs
from tests.making.dumps import write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import PROMPTS, mean_embedder
from tests.making.texts import ENGLISH, RUSSIAN

QUICK = "README.md"
MADE_BEFORE: dict[str, tuple[str, ...]] = {  # by commands of other pages
    "README.md": (),
    "docs/guide/train.md": ("one.zarr", "another.zarr", "store.zarr"),
    "docs/guide/grow.md": ("store.zarr",),
    "docs/guide/processes.md": (),
    "docs/guide/python.md": ("store.zarr",),
    "docs/guide/captures.md": ("store.zarr",),
    "docs/guide/recipes.md": ("store.zarr",),
    "docs/guide/sweeps.md": ("store.zarr",),
    "docs/guide/trust.md": ("store.zarr",),
    "docs/guide/look.md": ("store.zarr",),
    "docs/guide/score.md": ("student",),
    "docs/guide/predict.md": ("sst-student",),
    "docs/guide/export.md": ("student", "sst-student", "decoder"),
    "docs/losses.md": ("store.zarr",),
}


def table(path: Path, head: str, rows: list[str]) -> None:
    path.write_text("\n".join([head, *rows]) + "\n", "utf-8")


def tables(folder: Path) -> None:
    """Write the texts, tables and collections that the pages speak of."""
    chance = random.Random(0)
    for name, documents in {"novels": 60, "texts": 40, "held-out": 20}.items():
        write_corpus(folder / f"{name}.txt", documents)
    (folder / "takedown.txt").write_text("3\n17\n", "utf-8")
    (folder / "texts").mkdir()
    write_corpus(folder / "texts/first.txt")
    for name in ("sst", "dev", "test"):
        rows = [f"{text}\t{'good' if len(text) > 70 else 'bad'}" for text in ENGLISH]
        table(folder / f"{name}.tsv", "text\tlabel", rows)
    pairs = [tuple(chance.sample(ENGLISH, 2)) for _ in range(40)]
    table(folder / "pairs.tsv", "query\tpassage", ["\t".join(pair) for pair in pairs])
    parallel = [f"{one}\t{other}" for one, other in zip(ENGLISH, RUSSIAN, strict=False)]
    table(folder / "parallel.tsv", "en\tru", parallel * 4)
    nli = [f"{one}\t{other}\t{chance.choice(['yes', 'no'])}" for one, other in pairs]
    table(folder / "nli.tsv", "premise\thypothesis\tlabel", nli)
    stsb = [f"{one}\t{other}\t{chance.random():.2f}" for one, other in pairs]
    table(folder / "stsb.tsv", "text_a\ttext_b\tscore", stsb)
    reviews = [
        {"data": {"text": text}, "annotations": chance.choice(["bad", "good"])} for text in ENGLISH
    ]
    with gzip.open(folder / "reviews.json.gz", "wt", encoding="utf-8") as file:
        json.dump(reviews, file)
    words = "".join(
        "".join(f"{word}\t{'NOUN' if len(word) > 4 else 'OTHER'}\n" for word in text.split()) + "\n"
        for text in ENGLISH
    )
    for name in ("pos.train", "pos.dev", "tags"):
        (folder / f"{name}.tsv").write_text(words, "utf-8")
    (folder / "beir").mkdir()
    collection(folder / "beir/scifact")


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_teacher: Teachers,
    make_tokenizer: Callable[..., Any],
) -> Path:
    """Make a folder with teachers, texts and tables under the names of the pages."""
    folder = tmp_path_factory.mktemp("docs")
    tables(folder)
    shutil.copytree(tiny_teacher("bert"), folder / "my-teacher")
    shutil.copytree(tiny_teacher("gpt2"), folder / "my-decoder")
    shutil.copytree(tiny_teacher("bert", "tagging", ("NOUN", "OTHER")), folder / "tagger")
    mean_embedder(tiny_teacher("bert"), folder / "my-embedder", prompts=PROMPTS)
    labelled = {"my-classifier": ("bad", "good"), "my-pair-classifier": ("no", "yes")}
    heads: dict[str, dict[str, Any]] = {
        name: {"id2label": dict(enumerate(labels))} for name, labels in labelled.items()
    }
    for name, head in (heads | {"my-reranker": {"num_labels": 1}}).items():
        for part in reader_of_pairs(make_tokenizer, **head):
            part.save_pretrained(folder / name)
    return folder


def make(name: str) -> list[list[str]]:
    """Return the commands that produce the outputs of another page."""
    if name.endswith(".zarr"):
        return [["teacher-dump", "--model", "my-teacher", "--corpus", "novels.txt", "--out", name]]
    if name == "decoder":
        dump = [
            "teacher-dump", "--model", "my-decoder", "--corpus", "novels.txt", "--out", "c.zarr",
        ]  # fmt: skip
        train = ["student-train", "--store", "c.zarr", "--student", "llama:64x1x2"]
        return [[*dump, "--attention", "none"], [*train, "--vocab", "400", "--out", name]]
    train = ["student-train", "--vocab", "5k", "--student", "64x2x2", "--out", name, "--store"]
    if name == "student":
        return [*make("store.zarr"), [*train, "store.zarr"]]
    table_of = ["--corpus", "sst.tsv", "--text-column", "text", "--label-column", "label"]
    dump = ["teacher-dump", "--model", "my-classifier", *table_of, "--out", "sst.zarr"]
    return [dump, [*train, "sst.zarr"]]


def run(words: list[str]) -> None:
    """Run a line of a shell in this process if it is a command of the project."""
    words, to = (words[:-2], words[-1:]) if words[-2:-1] == [">"] else (words, [])
    found = ours(words)
    assert found is not None, f"{words[0]} is no command of ours: say above the block why not run"
    result = CliRunner().invoke(found[0], found[1])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"
    if to:
        Path(to[0]).write_text(result.stdout, "utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "without"),
    [
        pytest.param(QUICK, "student-export"),  # half of the time
        *(
            pytest.param(page, None, marks=pytest.mark.apart)
            for page in PAGES
            if blocks_of(page) and page not in ("docs/format.md", "docs/architecture.md")
        ),
    ],
)
def test_the_blocks_of_a_page_run(
    page: str, without: str | None, house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(house, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if without is not None:  # few steps, too
        write_corpus(tmp_path / "novels.txt", 20)
    aliases = {
        "rubert-base": Alias("my-teacher", "novels.txt"),
        "minilm": Alias("my-embedder", features=("embedding", "layer:4")),
    }
    monkeypatch.setattr(checkpoint_names, "ALIASES", aliases)
    monkeypatch.setattr(checkpoint_names, "_minilm_package", lambda: None)
    monkeypatch.setenv("TEACHONCE_CACHE", str(tmp_path / "cache"))
    for name in MADE_BEFORE.get(page, ()):
        for words in make(name):
            run(words)
    names = dict[str, Any]()  # a block continues the previous one
    for block in blocks_of(page):
        if block.language == "toml":
            name = block.text.partition("\n")[0].removeprefix("# ")
            Path(name).write_text(block.text, "utf-8")
        elif block.language == "python" and block.run:
            exec(compile(block.text, page, "exec"), names)
        elif block.language == "sh" and block.run:
            for words in block.commands():
                if words[0] != without:
                    run(words)
    assert all(len(open_store(str(path))) for path in tmp_path.glob("*.zarr"))
