"""An unfinished dump goes on with the same arguments only; the line says which differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.dump import dump
from tests.end_to_end.support import dump_options, tree, write_corpus
from tests.store.dying import unsealed


def other_weights(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "layer.1.output.dense.weight" in name)
    weights[name][0, 0] += 1e-3
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def other_tokenizer(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    backend = tokenizer.backend_tokenizer.to_str()
    tokenizer._tokenizer = Tokenizer.from_str(
        backend.replace('"lowercase":false', '"lowercase":true')
    )
    assert tokenizer.backend_tokenizer.to_str() != backend
    tokenizer.save_pretrained(model)


def other_corpus(corpus: Path) -> None:
    text = corpus.read_text(encoding="utf-8")
    corpus.write_text(text[:-2] + "!\n", encoding="utf-8")


CHANGES = {
    "weights": r"identity\.teacher\.weights_hash is .* in the store and .* now",
    "tokenizer": r"identity\.tokenizer_hash is .* in the store and .* now",
    "corpus": r"identity\.corpus\.sources\.0\.sha256 is .* in the store and .* now",
    "max length": r"identity\.arguments\.max_length is '128' in the store and '64' now.*"
    r"features\.max_length is '128' in the store and '64' now",
    "seed": r"identity\.arguments\.seed is '0' in the store and '1' now",
    "mask words": r"identity\.arguments\.mask_words is not given in the store and 'rare' now",
    "features": r"features\.hidden\.0 is 'mean' in the store and 'layer2' now",
}


@pytest.mark.slow
def test_what_differs_is_named(tmp_path: Path, tiny_teacher: Callable[[str], Path]) -> None:
    """Of an HDF5 store, too: tests/store/write/test_writing.py."""
    corpus, out = write_corpus(tmp_path / "corpus.txt", 30), tmp_path / "store.zarr"
    model = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    spare = Path(shutil.copytree(model, tmp_path / "spare"))

    with unsealed():
        dump(dump_options(model, corpus, out, views=2))
    before = {name: data for name, data in tree(tmp_path).items() if name.startswith("store")}
    text = corpus.read_bytes()
    for what, line in CHANGES.items():
        changes: dict[str, object] = {}
        if what == "weights":
            other_weights(model)
        elif what == "tokenizer":
            other_tokenizer(model)
        elif what == "corpus":
            other_corpus(corpus)
        else:
            others: dict[str, dict[str, object]] = {
                "max length": {"max_length": 64},
                "seed": {"seed": 1},
                "mask words": {"mask_words": "rare"},
                "features": {"hidden": "layer:2"},
            }
            changes = others[what]
        with pytest.raises(UserError, match=line) as refused:
            dump(dump_options(model, corpus, out, views=2, **changes))
        assert "use the same arguments to continue, or give another name" in str(refused.value)
        if what != "max length":
            assert str(refused.value).count(" in the store and ") == 1, refused.value
        shutil.rmtree(model)
        shutil.copytree(spare, model)
        corpus.write_bytes(text)
        left = {name: data for name, data in tree(tmp_path).items() if name.startswith("store")}
        assert left == before
    done = dump(dump_options(model, corpus, out, views=2))
    assert done.resumed_parts == done.parts
