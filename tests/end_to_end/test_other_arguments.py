"""An unfinished dump continues with the same arguments only; the error line names the differing
ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from teachonce.support.errors import UserError
from teachonce.teacher_dump.job.dump import dump
from tests.end_to_end.support import tree
from tests.making.dumps import dump_options, write_corpus
from tests.making.models import Teachers
from tests.store.dying import unsealed


def other_weights(folder: Path) -> None:
    model = folder / "model"
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "layer.1.output.dense.weight" in name)
    weights[name][0, 0] += 1e-3
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    model = folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    backend = tokenizer.backend_tokenizer.to_str()
    lower = backend.replace('"lowercase":false', '"lowercase":true')
    tokenizer._tokenizer = Tokenizer.from_str(lower)
    assert tokenizer.backend_tokenizer.to_str() != backend
    tokenizer.save_pretrained(model)


def other_corpus(folder: Path) -> None:
    corpus = folder / "corpus.txt"
    text = corpus.read_text(encoding="utf-8")
    corpus.write_text(text[:-2] + "!\n", encoding="utf-8")


CHANGES: list[tuple[Callable[[Path], None] | dict[str, Any], str]] = [
    (other_weights, r"the model \(weights_hash\) is .* in the store and .* now"),
    (other_tokenizer, r"the model's tokenizer is .* in the store and .* now"),
    (other_corpus, r"the corpus \(source 1, sha256\) is .* in the store and .* now"),
    ({"max_length": 64}, r"--max-length is '128' in the store and '64' now"),
    ({"seed": 1}, r"--seed is '0' in the store and '1' now"),
    ({"mask_words": "rare"}, r"--mask-words is not given in the store and 'rare' now"),
    ({"hidden": "layer:2"}, r"--hidden \(0\) is 'mean' in the store and 'layer2' now"),
]


@pytest.mark.slow
def test_what_differs_is_named(tmp_path: Path, tiny_teacher: Teachers) -> None:
    """For HDF5 stores see tests/store/write/test_writing.py."""
    corpus, out = write_corpus(tmp_path / "corpus.txt", 30), tmp_path / "store.zarr"
    model = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    spare = Path(shutil.copytree(model, tmp_path / "spare"))

    with unsealed():
        dump(dump_options(model, corpus, out, views=2))
    before = {name: data for name, data in tree(tmp_path).items() if name.startswith("store")}
    text = corpus.read_bytes()
    for change, line in CHANGES:
        changes = change if isinstance(change, dict) else {}
        if callable(change):
            change(tmp_path)
        with pytest.raises(UserError, match=line) as refused:
            dump(dump_options(model, corpus, out, views=2, **changes))
        assert "use the same arguments to continue, or give another name" in str(refused.value)
        printed = " in the store and "
        assert str(refused.value).count(printed) == line.count(printed), refused.value
        shutil.rmtree(model)
        shutil.copytree(spare, model)
        corpus.write_bytes(text)
        left = {name: data for name, data in tree(tmp_path).items() if name.startswith("store")}
        assert left == before
    done = dump(dump_options(model, corpus, out, views=2))
    assert done.resumed_parts == done.parts
