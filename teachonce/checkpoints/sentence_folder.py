"""Reads and writes what a sentence-transformers folder says beside its transformer.

modules.json                        the modules, in order: a transformer, a pooling, others
config_sentence_transformers.json   prompts, and which of them is the default
sentence_bert_config.json           the longest text in tokens
1_Pooling/config.json, 2_Dense/...  one folder for each module
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from teachonce.checkpoints.names import Find
from teachonce.checkpoints.sentence_modules import (
    MODES,
    Dense,
    Normalize,
    Pooling,
    VectorHead,
    activation_of,
)
from teachonce.support.errors import UserError, first_line

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The keys by which a Pooling names its modes, which every release reads; the later `pooling_mode`
is read, too."""
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True)
class SentenceFolder:
    """What a folder says of its vectors.

    `transformer` is the subfolder of the transformer, "" where it lies in the folder itself.
    `head` makes vectors of its last states; None where no pooling is there. `max_length` is the
    longest text in tokens, None where the folder does not say.
    """

    name: str
    transformer: str
    head: VectorHead | None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    lowercases: bool = False

    def prompt(self, name: str | None) -> str:
        """Return the text of a prompt by its name; of the default one for None, "" if none is.

        An empty name stands for no prompt. Raises UserError for a name that is not there.
        """
        chosen = self.default_prompt if name is None else name
        if not chosen:
            return ""
        if chosen not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise UserError(
                f"--prompt {chosen}: {self.name} has no such prompt; it has: {known}"
                f" ({SETTINGS}); give one of them, or leave it out"
            )
        return self.prompts[chosen]


def read_sentence_folder(find: Find, name: str) -> SentenceFolder | None:
    """Read what a folder says beside its transformer; None where it has no modules.json.

    Raises UserError, which names the file, for what is damaged or of an unknown kind.
    """
    listed = _listed(find, name)
    if listed is None:
        return None
    kinds = [kind for kind, _ in listed]
    if unsafe := [path for _, path in listed if ".." in path or path.startswith("/")]:
        raise UserError(
            f"{name}: {MODULES} has the path {unsafe[0]!r}, which leads out of the folder; do not"
            " trust it"
        )
    if kinds[:1] != ["Transformer"]:
        raise UserError(
            f"{name}: its first module is {kinds[0] if kinds else 'missing'}, expected a"
            f" Transformer ({MODULES}); give a folder whose vectors come from one"
        )
    transformer = listed[0][1]
    settings = _json(find, SETTINGS, name) or {}
    lengths: dict[str, Any] = {}
    for path in (f"{transformer}/{LENGTHS}".lstrip("/"), LENGTHS):
        lengths = lengths or _json(find, path, name) or {}
    prompts = {str(k): str(v) for k, v in (settings.get("prompts") or {}).items()}
    return SentenceFolder(
        name,
        transformer,
        _head(find, listed[1:], name),
        prompts,
        settings.get("default_prompt_name"),
        lengths.get("max_seq_length"),
        bool(lengths.get("do_lower_case")),
    )


def check_modules(find: Find, name: str) -> None:
    """Raise UserError for a folder whose transformer no pooling follows, and for a dense layer of
    an unknown activation, for which sentence-transformers would take another."""
    listed = _listed(find, name) or []
    kinds = [kind for kind, _ in listed]
    if kinds[:1] == ["Transformer"] and "Pooling" not in kinds:
        raise UserError(
            f"{name}: no pooling in it ({MODULES}), so it makes no vector of a text; save it with"
            f" the one that it was trained with, or without {MODULES} for the mean"
        )
    for kind, path in listed:
        if kind == "Dense" and isinstance(config := _json(find, f"{path}/config.json", name), dict):
            _activation(config, path, name)


def _listed(find: Find, name: str) -> list[tuple[str, str]] | None:
    """List the modules of a folder, kind and path of each; None where it has no modules.json."""
    modules = _json(find, MODULES, name)
    if modules is None:
        return None
    try:
        return [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in modules]
    except (TypeError, KeyError):
        raise UserError(
            f"{name}: {MODULES} is no list of modules with type and path; copy the whole folder"
        ) from None


def _json(find: Find, file: str, name: str) -> Any:
    path = find(file)
    if path is None:
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{name}: {file} is no JSON ({error}); copy the whole folder") from None


def _head(find: Find, listed: list[tuple[str, str]], name: str) -> VectorHead | None:
    """Make the steps behind the transformer; None where the first of them is no pooling."""
    for kind, path in listed:
        if kind not in KINDS[1:]:
            raise UserError(
                f"{name}: module {path or kind} is a {kind}, expected {', '.join(KINDS[1:])}"
                f" ({MODULES}); dump it as a plain checkpoint with --pooling, or take another model"
            )
    if not listed or listed[0][0] != "Pooling":
        return None
    steps: list[nn.Module] = []
    for kind, path in listed:
        if kind == "Normalize":
            steps.append(Normalize())
            continue
        config = _json(find, f"{path}/config.json", name)
        if not isinstance(config, dict):
            raise UserError(f"{name}: {path}/config.json is missing; copy the whole folder")
        make = _pooling if kind == "Pooling" else _dense
        steps.append(make(find, path, config, name))
    pooling, *rest = steps
    assert isinstance(pooling, Pooling)
    return VectorHead(pooling, *rest)


def _pooling(find: Find, path: str, config: dict[str, Any], name: str) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in FLAGS.items() if config.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    width = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    if not set(modes) <= set(MODES) or not isinstance(width, int):
        raise UserError(
            f"{name}: {path}/config.json has pooling {', '.join(map(str, modes))} of width {width},"
            f" expected some of {', '.join(MODES)} and a width; copy the whole folder"
        )
    return Pooling(width, modes, bool(config.get("include_prompt", True)))


def _dense(find: Find, path: str, config: dict[str, Any], name: str) -> Dense:
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise UserError(
                f"{name}: {path}/config.json has {key} {config[key]!r}, expected"
                " 'sentence_embedding': dense layers of single tokens are not read"
            )
    try:
        dense = Dense(
            config["in_features"],
            config["out_features"],
            bool(config.get("bias", True)),
            _activation(config, path, name),
            bool(config.get("use_residual", False)),
        )
    except (KeyError, TypeError):
        raise UserError(
            f"{name}: {path}/config.json lacks in_features or out_features; copy the whole folder"
        ) from None
    weights = find(f"{path}/model.safetensors")
    if weights is None:
        raise UserError(
            f"{name}: {path}/model.safetensors is missing; copy the whole folder, or save it again"
            " with a sentence-transformers of today (older ones wrote pytorch_model.bin)"
        )
    try:
        dense.load_state_dict(load_file(weights))
    except Exception as error:  # of safetensors or torch, for a damaged file or other shapes
        raise UserError(
            f"{name}: {path}/model.safetensors does not fit its config.json: {first_line(error)};"
            " copy the whole folder"
        ) from None
    return dense


def _activation(config: Mapping[str, Any], path: str, name: str) -> str:
    """Name the activation of a dense layer. Raises UserError for one that torch does not have."""
    word = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    try:
        activation_of(word)
    except UserError as error:
        raise UserError(f"{name}: {path}/config.json: {error}") from None
    return word


def write_sentence_folder(
    folder: Path,
    head: VectorHead,
    *,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    static: bool = False,
) -> None:
    """Write, beside a saved transformer, what makes SentenceTransformer(folder) give the vectors
    of `head`: its modules, the prompts, and the longest text in tokens.

    A `static` model, whose vectors of pieces are named `embedding.weight`, pools by itself.
    """
    listed = [("StaticEmbedding" if static else "Transformer", "")]
    for number, step in enumerate([*([] if static else [head.pooling]), *head.steps], 1):
        kind = type(step).__name__
        path = f"{number}_{kind}"
        listed.append((kind, path))
        (folder / path).mkdir(parents=True, exist_ok=True)
        if isinstance(step, Pooling):
            _write(folder / path / "config.json", _pooling_config(step))
        elif isinstance(step, Dense):
            _write(folder / path / "config.json", _dense_config(step))
            save_file(
                {k: v.detach().float().cpu().contiguous() for k, v in step.state_dict().items()},
                folder / path / "model.safetensors",
            )
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(listed)
    ]
    _write(folder / MODULES, modules)
    settings = {
        "prompts": dict(prompts or {}),
        "default_prompt_name": default_prompt,
        "similarity_fn_name": "cosine",
    }
    _write(folder / SETTINGS, settings)
    if not static:
        _write(folder / LENGTHS, {"max_seq_length": max_length, "do_lower_case": False})


def _pooling_config(pooling: Pooling) -> dict[str, Any]:
    flags = {flag: mode in pooling.modes for flag, mode in FLAGS.items()}
    return {
        "word_embedding_dimension": pooling.width,
        **flags,
        "include_prompt": pooling.include_prompt,
    }


def _dense_config(dense: Dense) -> dict[str, Any]:
    kind = type(dense.activation)
    config = {
        "in_features": dense.linear.in_features,
        "out_features": dense.linear.out_features,
        "bias": dense.linear.bias is not None,
        "activation_function": f"{kind.__module__}.{kind.__name__}",
    }
    return config | ({"use_residual": True} if dense.adds else {})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
