"""GGUF: the files of llama.cpp, written by the package gguf and run by llama-cpp-python."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from teachonce.student_export.formats import Runner
from teachonce.student_export.formats.gguf_contents import (
    architecture_of,
    sizes,
    vocabulary,
    weights,
)
from teachonce.student_export.options import GGUF, K_QUANT_FALLBACKS, check_k_quants
from teachonce.student_export.student_inputs import LONGEST_CHECKED
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line
from teachonce.support.packages import library

if TYPE_CHECKING:
    from teachonce.student_export.loaded_student import LoadedStudent

NAMES = {"": "gguf/model.gguf", **{kind: f"gguf/model-{kind}.gguf" for kind in GGUF}}
EXTRA, RUNNER = "gguf", "llama_cpp"
SET_BY_WRITER = ("general.architecture", "general.file_type")
USAGE = """Continue a text with llama.cpp (`pip install llama-cpp-python`, or `llama-cli -m FILE`):

```python
from llama_cpp import Llama
write = Llama("FILE", n_ctx=0, verbose=False)
print(write("Once upon a time", max_tokens=40)["choices"][0]["text"])
```"""
CHAT = """Chat with it:

```python
from llama_cpp import Llama
chat = Llama("FILE", n_ctx=0, verbose=False).create_chat_completion
print(chat([{"role": "user", "content": "Hello"}], max_tokens=40)["choices"][0]["message"])
```"""


def write_float(student: LoadedStudent, path: Path) -> None:
    """Write the student in float32.

    Raises UserError if the package gguf is missing, or llama.cpp cannot read such a student.
    """
    gguf = library("gguf", EXTRA, "--to gguf")
    network: Any = student.network.network
    where = str(student.folder)
    architecture = architecture_of(network.config, where)
    rows = network.get_input_embeddings().num_embeddings
    writer = gguf.GGUFWriter(path, architecture.name)
    writer.add_name(student.folder.name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_uint32(f"{architecture.name}.vocab_size", rows)
    for key, value in sizes(network.config, architecture).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture.name}.{key}", value)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in vocabulary(student.tokenizer, rows, where).items():
        kinds.get(type(value), writer.add_array)(key, value)
    # With a template llama-cli starts a chat instead of continuing the text.
    if student.chat_template:
        writer.add_chat_template(student.chat_template)
    for name, values in weights(network, architecture, where):
        writer.add_tensor(name, values)
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def usage(file: str, chats: bool) -> str:
    return "\n\n".join((USAGE, CHAT) if chats else (USAGE,)).replace("FILE", file)


def layers(path: Path) -> dict[str, list[str]]:
    """Return the names of the weights that can be quantised: all matrices, except the table of
    positions. The key is the name without the number of the block, so it has the weights of all
    blocks."""
    gguf = library("gguf", EXTRA, "--quantize")
    names: dict[str, list[str]] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        # llama-quantize leaves the table of positions in float, too.
        if len(tensor.shape) == 2 and not tensor.name.startswith("position"):
            name = re.sub(r"^blk\.\d+\.|\.weight$", "", tensor.name)
            names.setdefault(name, []).append(tensor.name)
    return names


def quantise(source: Path, path: Path, kind: str, nodes: Sequence[str]) -> Sequence[str]:
    """Write a copy of `source` with the weights `nodes` quantised to the type `kind`.

    If the length of a row is not a multiple of the block size of `kind`, its type is the fallback
    in `K_QUANT_FALLBACKS`, or float16. Raises UserError if no row can be of this type, or
    llama-cpp-python is missing.
    """
    gguf = library("gguf", EXTRA, "--quantize")
    read = gguf.GGUFReader(path=source)
    _check_rows(gguf, read, kind, nodes)
    writer = gguf.GGUFWriter(path, read.get_field("general.architecture").contents())
    for name, field in read.fields.items():
        # Fields named `GGUF.` are added by the reader, from the file's header.
        if not name.startswith("GGUF.") and name not in SET_BY_WRITER:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    types = gguf.LlamaFileType.__members__
    mostly = f"MOSTLY_{kind.upper()}"
    writer.add_file_type(types.get(mostly) or types[f"{mostly}_S"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in read.tensors:
        values = np.asarray(tensor.data)
        if tensor.name in nodes:
            _add_quantised(gguf, writer, tensor.name, values, kind)
        else:
            writer.add_tensor(tensor.name, values)
    _finish(writer)
    return ()


def _check_rows(gguf: Any, read: Any, kind: str, nodes: Sequence[str]) -> None:
    """Raise UserError if the rows of all weights `nodes` have a length that type `kind` cannot
    store."""
    if kind not in K_QUANT_FALLBACKS:
        return
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][0]
    # GGUF lists the innermost dimension first: shape[0] is the length of a row.
    lengths = sorted({int(tensor.shape[0]) for tensor in read.tensors if tensor.name in nodes})
    if all(length % block for length in lengths):
        listed = ", ".join(map(str, lengths))
        raise UserError(
            f"--quantize {kind}: needs rows with a multiple of {block} numbers, but this student's"
            f" rows have {listed}; give --quantize {K_QUANT_FALLBACKS[kind]}, which llama.cpp also"
            " falls back to"
        )


def _add_quantised(gguf: Any, writer: Any, name: str, values: Array, kind: str) -> None:
    dtype = gguf.GGMLQuantizationType[kind.upper()]
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    if kind in K_QUANT_FALLBACKS and values.shape[-1] % block:
        _add_quantised(gguf, writer, name, values, K_QUANT_FALLBACKS[kind])
    elif kind in K_QUANT_FALLBACKS:
        blocks = np.empty((len(values), values.shape[-1] // block * size), np.uint8)
        _quantise_by_llama_cpp(np.ascontiguousarray(values, np.float32), dtype, blocks)
        writer.add_tensor(name, blocks, raw_dtype=dtype)
    elif kind == "f16" or values.shape[-1] % block:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, dtype), raw_dtype=dtype)


def _quantise_by_llama_cpp(values: Array, dtype: Any, blocks: Array) -> None:
    """Fill `blocks`, uint8 [rows, bytes], with the rows of `values`, float32 [rows, columns]."""
    check_k_quants(dtype.name.lower())
    from llama_cpp import llama_cpp

    quantise = llama_cpp._lib.ggml_quantize_chunk
    # int type, values, blocks, first value, rows, columns, importances of columns (ggml.h)
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    # Without these types ctypes would pass each number as a C int of 32 bits.
    quantise.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    quantise.restype = ctypes.c_size_t
    written = quantise(int(dtype), values.ctypes.data, blocks.ctypes.data, 0, *values.shape, None)
    assert written == blocks.nbytes, (written, blocks.nbytes)


def open_runner(path: Path, output: str, threads: int = 1) -> Runner:
    """Load a file in llama.cpp.

    Raises UserError if llama-cpp-python is missing, or cannot load the file.
    """
    # By default llama.cpp retains the logits of the last token only.
    model = _loaded(path, threads, logits_all=True)

    def run(inputs: dict[str, Array]) -> Array:
        rows = []
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            tokens = ids[mask.astype(bool)].tolist()
            # Without a reset, llama.cpp reads a text as the continuation of the previous one.
            model.reset()
            model.eval(tokens)
            # Logits of padding are 0; no check reads them.
            logits = np.zeros((len(ids), model.n_vocab()), np.float32)
            logits[: len(tokens)] = model.scores[: len(tokens)]
            rows.append(logits)
        return np.stack(rows)

    return run


def token_ids(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize texts with llama.cpp, including the token that it puts in front."""
    model = _loaded(path, 1)
    return [model.tokenize(text.encode(), add_bos=True, special=False) for text in texts]


def _loaded(path: Path, threads: int, **settings: Any) -> Any:
    llama_cpp, gguf = library(RUNNER, EXTRA, "--to gguf"), library("gguf", EXTRA, "--to gguf")
    read = gguf.GGUFReader(path)
    architecture = read.get_field("general.architecture").contents()
    longest = read.get_field(f"{architecture}.context_length").contents()
    context = min(longest, LONGEST_CHECKED)
    try:
        return llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=context,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **settings,
        )
    except Exception as error:  # llama.cpp reports its own errors on stderr, in pages
        raise UserError(
            f"{path}: llama.cpp cannot load it ({first_line(error)}); export the student again"
        ) from error
