"""model2vec: one table of vectors and a tokenizer, for static students; it runs in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.student_export.formats import Runner
from teachonce.student_export.loaded_student import LONGEST, StaticVectorNetwork
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError

NAMES = {"": "model2vec/model.safetensors"}
TABLE = "embeddings"  # the names of the library's own files
CONFIG, TOKENIZER = "config.json", "tokenizer.json"


def write_float(student: Any, path: Path) -> None:
    """Write the table, config.json and tokenizer.json, as model2vec's own `save_pretrained` does.

    Raises UserError for a student that is not a table of word vectors, or truncates at the left.
    """
    from safetensors.numpy import save_file

    if not isinstance(student.network, StaticVectorNetwork):
        raise UserError(
            "--to model2vec: exports only static students (static:256), and this student has"
            " layers; give --to onnx"
        )
    if student.max_length < LONGEST and student.tokenizer.truncation_side == "left":
        raise UserError(
            "--to model2vec: the student leaves out the start of a long text (truncation in its"
            " tokenizer.json), and model2vec the end; give --to onnx"
        )
    table, normalised = _table_of(student.network)
    save_file({TABLE: table}, path, {"format": "np"})
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "normalize": normalised,
        # The library's default would truncate texts at 512 tokens.
        "max_length": student.max_length if student.max_length < LONGEST else None,
        "embedding_dtype": "float32",
    }
    (path.parent / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    tokenizer = json.loads(student.tokenizer.backend_tokenizer.to_str())
    tokenizer |= {"truncation": None, "padding": None, "post_processor": None}
    text = json.dumps(tokenizer, ensure_ascii=False)
    (path.parent / TOKENIZER).write_text(text + "\n", "utf-8")


def _table_of(network: StaticVectorNetwork) -> tuple[Floats, bool]:
    """Return the word vectors, to which the student's dense layers are applied, and whether a
    text's vector is normalised.

    A linear layer may be applied before the mean over words or after it. Raises UserError for
    modules that do not commute with the mean.
    """
    import torch

    vectors, normalised = network.embedding.weight.detach(), False
    steps: Any = network.steps
    for step in steps:
        kind = type(step).__name__
        linear = kind == "Dense" and isinstance(step.activation_function, torch.nn.Identity)
        if kind == "Normalize" and not normalised:
            normalised = True
        elif linear and not normalised and not getattr(step, "use_residual", False):
            vectors = step.linear(vectors)
        else:
            raise UserError(
                f"--to model2vec: the student's {kind} cannot be part of a table of word vectors;"
                " give --to onnx"
            )
    if network.truncate_dim is not None and network.truncate_dim < vectors.shape[1]:
        if normalised:
            raise UserError(
                "--to model2vec: the student truncates a normalised vector to"
                f" {network.truncate_dim} numbers, which no table of word vectors can do; give --to"
                " onnx"
            )
        vectors = vectors[:, : network.truncate_dim]
    return np.ascontiguousarray(vectors.detach().numpy(), np.float32), normalised


def open_runner(path: Path, output: str, threads: int = 1) -> Runner:
    """Load a table. The `Runner` averages the word vectors of a text's pieces except unknown ones,
    as the library does, and normalises the mean if `normalize` in config.json is true."""
    from safetensors.numpy import load_file

    table: Floats = load_file(path)[TABLE]
    unknown = _unknown_piece(path.parent / TOKENIZER)
    normalised = json.loads((path.parent / CONFIG).read_text("utf-8"))["normalize"]

    def run(inputs: dict[str, Array]) -> Array:
        mask = inputs["attention_mask"] * (inputs["input_ids"] != unknown)
        present = mask[..., None].astype(np.float32)
        total = (table[inputs["input_ids"]] * present).sum(1)
        vectors = total / np.maximum(present.sum(1), 1)
        if normalised:
            # 1e-12 as in torch's `normalize`: the vector of an empty text is 0, not NaN.
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.asarray(vectors, np.float32)

    return run


def _unknown_piece(path: Path) -> int:
    """Return the id of a tokenizer's unknown piece; -1 if it has none."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    if name := getattr(tokenizer.model, "unk_token", None):
        number = tokenizer.token_to_id(name)
    else:  # Unigram has only the id, and only in the JSON
        number = json.loads(path.read_text("utf-8"))["model"].get("unk_id")
    return -1 if number is None else int(number)


def usage(file: str, chats: bool) -> str:
    """Return Markdown that shows how to run a file."""
    return f"""In this folder, with `pip install model2vec`:

```python
from model2vec import StaticModel

model = StaticModel.from_pretrained("{Path(file).parent}")
print(model.encode(["A text.", "Another text."]))
```

model2vec leaves out unknown pieces, which sentence-transformers averages with the others. If
export.json has a `prompt`, put it before each text."""
