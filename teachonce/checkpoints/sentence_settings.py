"""Reads the settings of a sentence-transformers folder: modules, prompts, similarity, lengths.

The files are JSON; sentence-transformers is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from teachonce.checkpoints.field_checks import (
    check_field,
    check_fields,
    dotted_fields,
    unlisted,
)
from teachonce.checkpoints.fields import FIELDS, LENGTHS, MODULES, OLD_LENGTHS, SETTINGS
from teachonce.checkpoints.names import ResolvedModel, finder
from teachonce.support.errors import UserError

EMBEDDER, RERANKER = "SentenceTransformer", "CrossEncoder"  # values of `library_class`
VECTOR, STATES = "sentence_embedding", "token_embeddings"  # keys of what modules pass on
ARGUMENTS = next(f for f in FIELDS[LENGTHS] if "model_args" in f.names and f.treatment == "refused")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# For each task of a transformer: the output that the library reads, and the key under which the
# next module finds it.
OUTPUTS = {
    "feature-extraction": ("last_hidden_state", STATES),
    "sequence-classification": ("logits", "scores"),
}
VECTORS, CLASSES = OUTPUTS
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
OF_LIBRARY = ("sentence_transformers.", "sentence-transformers.")


@dataclass(frozen=True)
class SentenceSettings:
    """Holds the settings of a folder, without its modules; None if a setting is missing.

    max_length: the maximum length of a text in tokens. lower_case: whether texts are lower-cased
    before the tokenizer. similarity: one of SIMILARITIES. truncate_dim: the size to which vectors
    are cut. activation: the torch class that a CrossEncoder applies to its logits.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str | None = None
    truncate_dim: int | None = None
    max_length: int | None = None
    lower_case: bool = False
    activation: str | None = None


def listed_modules(model: ResolvedModel) -> list[tuple[str, str]] | None:
    """List kind and path of the folder's modules; None if it has no modules.json.

    Raises UserError for a module of another package, and for a path that leads out of the folder.
    """
    listed = _entries(model)
    if listed is None:
        return None
    for kind, path in listed:
        if "." in kind and not kind.startswith(OF_LIBRARY):
            raise UserError(
                f"{model.name}: module {path or kind!r} is {kind}, a class of another package"
                f" ({MODULES}), which is not run; dump it as a plain checkpoint with --pooling, or"
                " use another model"
            )
    return [(kind.rpartition(".")[2], "" if path == "." else path) for kind, path in listed]


def has_modules(model: ResolvedModel) -> bool:
    """Return whether the folder has a modules.json, with modules of any package."""
    return _entries(model) is not None


def module_weights(model: ResolvedModel) -> list[Path]:
    """List the files with the weights of the folder's modules in subfolders, such as a Dense.

    No module is loaded, so modules of other packages are listed as well. Raises UserError for a
    path that leads out of the folder.
    """
    find = finder(model)
    subfolders = [path for _, path in _entries(model) or () if path not in ("", ".")]
    # The second file is searched only without the first: on the hub `find` downloads.
    files = [
        next(filter(None, (find(f"{folder}/{file}") for file in MODULE_WEIGHTS)), None)
        for folder in subfolders
    ]
    return [path for path in files if path]


def _entries(model: ResolvedModel) -> list[tuple[str, str]] | None:
    """Read type and path of each module as they are written; None if there is no modules.json."""
    modules = read_folder_json(model, MODULES)
    if modules is None:
        return None
    try:
        listed = [(str(m["type"]), str(m["path"])) for m in modules]
    except (TypeError, KeyError):
        raise UserError(
            f"{model.name}: {MODULES} is not a list of modules with type and path; copy the whole"
            " folder"
        ) from None
    for _, path in listed:
        # Settings and weights are read at these paths, and a crafted one could name any file.
        if ".." in path or path.startswith("/"):
            raise UserError(
                f"{model.name}: {MODULES} has the path {path!r}, which leads out of the folder; do"
                " not use this folder"
            )
    return listed


def read_folder_json(model: ResolvedModel, file: str) -> Any:
    """Read a file of the folder; None if it is missing. Raises UserError if it is not JSON."""
    path = finder(model)(file)
    if path is None:
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    # The file is untrusted: thousands of nested lists raise RecursionError.
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{model.name}: {file} is not JSON ({error}); copy the whole folder"
        ) from None


def library_class(model: ResolvedModel) -> str:
    """Return the class of sentence-transformers that SETTINGS declares, such as CrossEncoder;
    EMBEDDER if it declares none."""
    return str(_table(model, SETTINGS).get("model_type") or EMBEDDER)


def read_sentence_settings(model: ResolvedModel, transformer: str | None) -> SentenceSettings:
    """Read SETTINGS, and LENGTHS of the transformer in the subfolder `transformer` (None: only
    SETTINGS). Raises UserError for refused fields and wrong values."""
    table = _table(model, SETTINGS)
    check_fields(model.name, SETTINGS, table)
    settings = settings_from(table, model.name)
    if transformer is None:
        return settings
    length, lower_case = _lengths(model, transformer, VECTORS)
    return replace(settings, max_length=length, lower_case=lower_case)


def read_classifier(model: ResolvedModel) -> SentenceSettings:
    """Read the settings of a CrossEncoder's folder; for other checkpoints return empty settings.

    Raises UserError for a default prompt, for modules after the transformer, and like
    `read_sentence_settings`.
    """
    if library_class(model) != RERANKER:
        return SentenceSettings()
    table = _table(model, SETTINGS)
    listed = listed_modules(model) or [("Transformer", "")]
    if [kind for kind, _ in listed] != ["Transformer"]:
        raise UserError(
            f"{model.name}: a CrossEncoder of the modules {', '.join(k for k, _ in listed)}"
            f" ({MODULES}), expected only a Transformer, whose logits are the scores; use another"
            " model"
        )
    settings = settings_from(table, model.name)
    if settings.default_prompt and settings.prompts.get(settings.default_prompt):
        raise UserError(
            f"{model.name}: default_prompt_name is {settings.default_prompt!r:.60} in {SETTINGS}:"
            " the model puts a prompt before every pair, a dump of classes or scores does not;"
            " write it into the corpus, and set default_prompt_name to null"
        )
    length, lower_case = _lengths(model, listed[0][1], CLASSES)
    activation = _of(model.name, SETTINGS, table, "activation_fn", str)
    check_activation(model.name, activation, SETTINGS)
    return replace(settings, max_length=length, lower_case=lower_case, activation=activation)


def declared_activation(where: str, config: Any) -> str | None:
    """Return the CrossEncoder's activation in a config.json; None if the file does not name any.

    Raises UserError if it is not a class of torch.nn; `where` names the checkpoint or store.
    """
    table = getattr(config, "sentence_transformers", None)
    new = table.get("activation_fn") if isinstance(table, dict) else None
    # Releases of the library before 4 wrote the second field.
    activation = new or getattr(config, "sbert_ce_default_activation_function", None)
    check_activation(where, activation, "config.json")
    return activation


def check_activation(where: str, name: object, file: str) -> None:
    """Raise UserError if a CrossEncoder's activation, in a `file` of `where`, is not a class of
    torch.nn."""
    from torch import nn

    # sentence-transformers imports and calls whatever the field names: untrusted code.
    if name is None:
        return
    short = str(name).rpartition(".")[2]
    activation = getattr(nn, short, None)
    names = (f"torch.nn.{short}", f"{getattr(activation, '__module__', None)}.{short}")
    if not (name in names and isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise UserError(
            f"{where}: the activation of a CrossEncoder is {name!r:.60} in {file}, expected a class"
            " of torch.nn such as torch.nn.modules.activation.Sigmoid; correct it, or remove the"
            " field"
        )


def apply_settings(tokenizer: Any, settings: SentenceSettings, shorten: bool = False) -> None:
    """Apply the folder's lower-casing and maximum length to a fast tokenizer. As in
    sentence-transformers, these override the tokenizer's own files.

    shorten: also apply a maximum length below the tokenizer's limit, as a CrossEncoder does. The
        maximum length of an embedder is only the default of `--max-length`, which may be larger.
    """
    if settings.lower_case:
        _lower_case(tokenizer.backend_tokenizer)
    if settings.max_length and (shorten or settings.max_length > tokenizer.model_max_length):
        tokenizer.model_max_length = settings.max_length


def _lower_case(backend: Any) -> None:
    """Prepend a Lowercase normalizer, unless the tokenizer lower-cases already."""
    from tokenizers import normalizers

    # The sample's Σ is not at the end of a word, where Python's lower() gives ς, tokenizers σ.
    steps, sample = [] if backend.normalizer is None else [backend.normalizer], "AbCdÄÉДΣX"
    as_it_is = normalizers.Sequence(steps).normalize_str
    if as_it_is(sample) != as_it_is(sample.lower()):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def settings_from(given: Mapping[str, Any], model: str) -> SentenceSettings:
    """Read the settings from the content of the file SETTINGS. `model` names the model or the store
    with the file. Raises UserError for a wrong value."""
    return SentenceSettings(
        prompts=_prompts(model, given.get("prompts")),
        default_prompt=_of(model, SETTINGS, given, "default_prompt_name", str),
        similarity=check_similarity(model, given.get("similarity_fn_name")),
        truncate_dim=_positive(model, SETTINGS, "truncate_dim", given.get("truncate_dim")),
    )


def check_similarity(model: str, name: object) -> str | None:
    """Return `name`, the similarity of a folder, or None. Raises UserError for an unknown one."""
    # sentence-transformers would silently use the cosine.
    if name is not None and name not in SIMILARITIES:
        raise _wrong(model, SETTINGS, "similarity_fn_name", name, ", ".join(SIMILARITIES))
    return None if name is None else str(name)


def _lengths(model: ResolvedModel, transformer: str, task: str) -> tuple[int | None, bool]:
    """Return the maximum length in tokens (None: no limit is set), and whether texts are
    lower-cased. `task` is the expected task of the transformer, a key of OUTPUTS."""
    # In the library's order; the first file that is there has all settings.
    paths = [f"{transformer}/{file}".lstrip("/") for file in (LENGTHS, *OLD_LENGTHS)]
    content: Mapping[str, Any] = {}
    for file in dict.fromkeys((*paths, LENGTHS)):
        if content := _table(model, file):
            break
    fields = dict(dotted_fields(content, ARGUMENTS.names))
    top_level = {
        name: value
        for name, value in content.items()
        if name not in ARGUMENTS.names and (name, value) != ("transformer_task", task)
    }
    check_fields(model.name, file, top_level, kind=LENGTHS)
    # A table of arguments is refused if the list of fields lacks one of its arguments.
    for name, value in fields.items():
        table, _, argument = name.partition(".")
        if table in ARGUMENTS.names and (not argument or unlisted(LENGTHS, {name: value})):
            refused = {argument: value} if argument else value
            check_field(model.name, file, {table: refused}, ARGUMENTS)
    _check_outputs(model.name, file, content, *OUTPUTS[task])
    longest = [
        _positive(model.name, file, name, fields.get(name))
        for name in (
            *("max_seq_length", "processing_kwargs.text.max_length"),
            *("tokenizer_args.model_max_length", "processor_kwargs.model_max_length"),
        )
    ]
    lower = _of(model.name, file, content, "do_lower_case", bool)
    return min((n for n in longest if n is not None), default=None), bool(lower)


def _check_outputs(
    model: str, file: str, content: Mapping[str, Any], expected: str, key: str
) -> None:
    """Raise UserError unless sentence-transformers takes the output named `expected` from the
    transformer, as `key`."""
    table = content.get("modality_config")
    modes = {"text": {}} if table is None else table if isinstance(table, Mapping) else {}
    text = modes.get("text")
    output = text.get("method_output_name", expected) if isinstance(text, Mapping) else 0
    features = content.get("module_output_name")
    if "message" in modes or output != expected or features not in (None, key):
        declared = "chat messages" if "message" in modes else f"output {output!r} as {features!r}"
        raise UserError(
            f"{model}: {file} declares {declared} (modality_config, module_output_name), expected"
            f" output {expected!r} as {key!r}; use another model"
        )


def _table(model: ResolvedModel, file: str) -> dict[str, Any]:
    table = read_folder_json(model, file)
    if table is not None and not isinstance(table, dict):
        raise UserError(f"{model.name}: {file} is not a table of settings; copy the whole folder")
    return table or {}


def _prompts(model: str, value: object) -> dict[str, str]:
    """Return the prompts by name; null means an empty prompt."""
    prompts = {} if value is None else value
    if not isinstance(prompts, dict) or not all(
        text is None or isinstance(text, str) for text in prompts.values()
    ):
        raise _wrong(model, SETTINGS, "prompts", prompts, "a string for each name")
    return {name: text or "" for name, text in prompts.items()}


def _of(model: str, file: str, content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    if value is not None and not isinstance(value, kind):
        raise _wrong(model, file, name, value, {str: "a string", bool: "true or false"}[kind])
    return value


def _positive(model: str, file: str, name: str, value: object) -> int | None:
    if value is None:
        return None
    # JSON's true becomes a bool, which is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(model, file, name, value, "a whole number from 1")
    return value


def _wrong(model: str, file: str, name: str, value: object, expected: str) -> UserError:
    return UserError(f"{model}: {name} is {value!r:.60} in {file}, expected {expected}; correct it")
