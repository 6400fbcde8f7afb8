"""Share a corpus, and stores of the corpus and of tasks, between modules; no test may change
them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from teachonce.store import FeatureStore, open_store
from tests.end_to_end.test_pairs import trained_reader
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers, Tokenizers
from tests.making.sentence_folders import PROMPTS, mean_embedder
from tests.making.texts import ENGLISH, RUSSIAN
from tests.teacher_dump.windows.test_label_numbers import MOODS, TAGS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: sums of two are rounded differently, and the tests compare for equality."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="session")
def model(tiny_teacher: Teachers) -> Path:
    return tiny_teacher("bert")


@pytest.fixture(scope="session")
def store(tiny_store: Stores) -> Path:
    return tiny_store("bert", hidden="mean,groups:2")


@pytest.fixture(scope="session")
def causal(tiny_store: Stores) -> Path:
    return tiny_store("gpt2", hidden="mean")


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> FeatureStore:
    """Make texts with labels: English is positive, Russian negative; every fifth text has no
    label."""
    folder = tmp_path_factory.mktemp("classes")
    texts = [(text, MOODS[0]) for text in ENGLISH] + [(text, MOODS[1]) for text in RUSSIAN]
    rows = [f"{text}\t{'' if n % 5 == 4 else mood}" for n, (text, mood) in enumerate(texts * 4)]
    corpus = folder / "texts.tsv"
    corpus.write_text("\n".join(["sentence\tmood", *rows]) + "\n", "utf-8")
    words = {"head": "classification", "logits": None, "text_column": "sentence"}
    model = tiny_teacher("bert", "classification", MOODS)
    options = words | {"label_column": "mood", "hidden": "layer:4"}
    return open_store(dumped(model, corpus, folder / "classes.zarr", **options))


@pytest.fixture(scope="session")
def tags(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> FeatureStore:
    """Make tagged sentences: capitalised words have the second tag, others the first; some
    sentences have no tags."""
    folder = tmp_path_factory.mktemp("tags")
    lines = []
    for number, text in enumerate((ENGLISH + RUSSIAN) * 3):
        for word in text.split():
            tag = TAGS[int(word[0].isupper())]
            lines.append(f"{word}\t{'' if number % 4 == 3 else tag}")
        lines.append("")
    corpus = folder / "words.tsv"
    corpus.write_text("\n".join(lines) + "\n", "utf-8")
    model = tiny_teacher("bert", "tagging", TAGS)
    options = {"head": "tagging", "logits": None, "hidden": "layer:4"}
    return open_store(dumped(model, corpus, folder / "tags.h5", **options))


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Path:
    """Save a sentence-transformers folder with prompts, whose vectors are means of length 1."""
    folder = tmp_path_factory.mktemp("embedder") / "model"
    return mean_embedder(tiny_teacher("bert"), folder, prompts=PROMPTS)


@pytest.fixture(scope="session")
def pair_teacher(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Tokenizers) -> Path:
    """Train a classifier of pairs that compares the middle words of both texts."""
    folder = tmp_path_factory.mktemp("pair_teacher")
    for each in trained_reader(make_tokenizer):
        each.save_pretrained(folder)
    return folder
