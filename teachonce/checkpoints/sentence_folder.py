"""Folders of sentence-transformers: reads and writes the modules behind a transformer.

modules.json                        the modules, in order: a transformer, a pooling, others
config_sentence_transformers.json   prompts, the name of the default prompt, truncate_dim
sentence_bert_config.json           the longest text in tokens
1_Pooling/config.json, 2_Dense/...  one folder for each module

The modules are those of the library itself. It takes seconds to import, so only functions import
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from teachonce.checkpoints.names import MODULES, ResolvedModel, finder
from teachonce.support.errors import UserError, first_line, out_of_memory

if TYPE_CHECKING:
    from sentence_transformers.sentence_transformer.modules import Pooling

SETTINGS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
KINDS = ("Pooling", "Dense", "Normalize")
"""Modules that may follow a transformer; a Pooling is the first of them."""
VECTOR = "sentence_embedding"
"""Key of the vectors among the features that the modules pass on."""


class VectorHead(nn.Module):
    """Makes vectors of states by modules of sentence-transformers: a Pooling, then any others.

    truncate_dim: the first numbers of a vector that remain after all modules, as `encode()` cuts
    it; None for all.
    """

    def __init__(
        self, pooling: Pooling, *steps: nn.Module, truncate_dim: int | None = None
    ) -> None:
        super().__init__()
        self.pooling, self.steps = pooling, nn.Sequential(*steps)
        self.truncate_dim = truncate_dim

    def forward(self, states: torch.Tensor, present: torch.Tensor, prompt: int = 0) -> torch.Tensor:
        """Compute vectors float32 [B,W] of states [B,L,D].

        `present` bool [B,L] is False on padding. The first `prompt` tokens of each text are those
        of a prompt, which some poolings leave out.
        """
        features: dict[str, Any] = {
            "token_embeddings": states.float(),
            "attention_mask": present.long(),
        }
        if prompt:
            features["prompt_length"] = prompt
        vectors: torch.Tensor = self.steps(self.pooling(features))[VECTOR]
        return vectors[:, : self.truncate_dim]

    @property
    def width(self) -> int:
        """W of the vectors."""
        widths = [self.pooling.pooling_output_dimension]
        widths += [int(step.out_features) for step in self._dense()]
        return min(widths[-1], self.truncate_dim or widths[-1])

    @property
    def normalised(self) -> bool:
        """Whether the vectors have length 1."""
        kinds = [type(step).__name__ for step in self.steps]
        return kinds[-1:] == ["Normalize"] and self.truncate_dim is None

    @property
    def description(self) -> str:
        """The steps for people, such as `mean, dense 256 Tanh, first 64`."""
        mode = self.pooling.pooling_mode
        words = [mode if isinstance(mode, str) else "+".join(mode)]
        for step in self._dense():
            words.append(f"dense {step.out_features} {type(step.activation_function).__name__}")
        return ", ".join(words + ([f"first {self.truncate_dim}"] if self.truncate_dim else []))

    def _dense(self) -> Iterator[Any]:
        return (step for step in self.steps if type(step).__name__ == "Dense")


def read_sentence_folder(
    model: ResolvedModel,
) -> tuple[VectorHead | None, dict[str, Any], dict[str, Any]]:
    """Read a folder: what makes vectors of its transformer's last states, None if there is no
    pooling; SETTINGS; LENGTHS. Without modules.json the settings are empty.

    Raises UserError, which names the file, for damaged files and unknown kinds of modules.
    """
    name, listed = model.name, _listed(model)
    if listed is None:
        return None, {}, {}
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
    settings = _json(model, SETTINGS) or {}
    lengths: dict[str, Any] = {}
    for path in (f"{transformer}/{LENGTHS}".lstrip("/"), LENGTHS):
        lengths = lengths or _json(model, path) or {}
    return _head(model, listed[1:], settings.get("truncate_dim")), settings, lengths


def check_modules(model: ResolvedModel) -> None:
    """Raise UserError for a folder whose transformer no pooling follows, and for a dense layer of
    an unknown activation, for which sentence-transformers would take another."""
    listed = _listed(model) or []
    kinds = [kind for kind, _ in listed]
    if kinds[:1] == ["Transformer"] and "Pooling" not in kinds:
        raise UserError(
            f"{model.name}: no pooling in it ({MODULES}), so it makes no vector of a text; save it"
            f" with the one that it was trained with, or without {MODULES} for the mean"
        )
    for kind, path in listed:
        config = _json(model, f"{path}/config.json") if kind == "Dense" else None
        word = config.get("activation_function") if isinstance(config, dict) else None
        if word is None:
            continue
        module, _, activation = str(word).rpartition(".")
        known = activation == "Identity" or hasattr(nn.modules.activation, activation)
        if not module.startswith("torch.nn") or not known:
            raise UserError(
                f"{model.name}: {path}/config.json: unknown activation {activation!r}: expected one"
                " of torch.nn without arguments, such as Tanh, GELU or Identity"
            )


def module_kinds(model: ResolvedModel) -> list[str]:
    """List the kinds of a folder's modules, in order; [] if it has no modules.json."""
    return [kind for kind, _ in _listed(model) or ()]


def _listed(model: ResolvedModel) -> list[tuple[str, str]] | None:
    """List the modules of a folder, kind and path of each; None if it has no modules.json."""
    modules = _json(model, MODULES)
    if modules is None:
        return None
    try:
        return [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in modules]
    except (TypeError, KeyError):
        raise UserError(
            f"{model.name}: {MODULES} is no list of modules with type and path; copy the whole"
            " folder"
        ) from None


def _json(model: ResolvedModel, file: str) -> Any:
    path = finder(model)(file)
    if path is None:
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(
            f"{model.name}: {file} is no JSON ({error}); copy the whole folder"
        ) from None


def _head(
    model: ResolvedModel, listed: list[tuple[str, str]], truncate_dim: int | None
) -> VectorHead | None:
    """Load the modules behind the transformer; None if the first of them is no pooling."""
    for kind, path in listed:
        if kind not in KINDS:
            raise UserError(
                f"{model.name}: module {path or kind} is a {kind}, expected {', '.join(KINDS)}"
                f" ({MODULES}); dump it as a plain checkpoint with --pooling, or take another model"
            )
    if not listed or listed[0][0] != "Pooling":
        return None
    check_modules(model)
    pooling, *steps = (_module(model, kind, path) for kind, path in listed)
    return VectorHead(pooling, *steps, truncate_dim=truncate_dim)


def _module(model: ResolvedModel, kind: str, path: str) -> Any:
    """Load a module of a folder by its class in the library. Raises UserError with its path."""
    from sentence_transformers.sentence_transformer import modules

    root = model.root or model.path_or_id
    if kind != "Normalize":  # which older releases saved without one
        config = _json(model, f"{path}/config.json")
        if not isinstance(config, dict):
            raise UserError(f"{model.name}: {path}/config.json is missing; copy the whole folder")
    try:
        found = getattr(modules, kind).load(root, subfolder=path, revision=model.revision)
    except Exception as error:  # of JSON, safetensors or torch, for whatever is damaged
        if out_of_memory(error):
            raise
        raise UserError(
            f"{model.name}: {path} is no {kind} that sentence-transformers can load:"
            f" {first_line(error)}; copy the whole folder"
        ) from error
    if (name := getattr(found, "module_output_name", VECTOR)) != VECTOR:
        raise UserError(
            f"{model.name}: {path}/config.json has module_output_name {name!r}, expected"
            f" {VECTOR!r}: layers of single tokens are not read"
        )
    return found


def write_sentence_folder(
    folder: Path,
    head: VectorHead,
    *,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    static: bool = False,
) -> None:
    """Write, next to a saved transformer, the files with which SentenceTransformer(folder) gives
    the vectors of `head`: its modules, the prompts, and the longest text in tokens.

    A `static` model, whose vectors of pieces are named `embedding.weight`, pools by itself.
    """
    # Names and keys are those that every release of the library reads; its own `save` writes those
    # of today, which older releases cannot load.
    listed = [("StaticEmbedding" if static else "Transformer", "")]
    for number, step in enumerate([*([] if static else [head.pooling]), *head.steps], 1):
        kind = type(step).__name__
        path = f"{number}_{kind}"
        listed.append((kind, path))
        (folder / path).mkdir(parents=True, exist_ok=True)
        if kind != "Normalize":
            write = _pooling_config if kind == "Pooling" else _dense_config
            _write(folder / path / "config.json", write(step))
        if weights := step.state_dict():
            save_file(
                {k: v.detach().float().cpu().contiguous() for k, v in weights.items()},
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


def _pooling_config(pooling: Any) -> dict[str, Any]:
    mode = pooling.pooling_mode
    if not isinstance(mode, str):
        return dict(pooling.get_config_dict())  # only its keys have the order of several modes
    flags = (
        *("cls_token", "max_tokens", "mean_tokens"),
        *("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"),
    )
    return {
        "word_embedding_dimension": pooling.embedding_dimension,
        **{
            f"pooling_mode_{flag}": mode == each
            for flag, each in zip(flags, pooling.POOLING_MODES, strict=True)
        },
        "include_prompt": pooling.include_prompt,
    }


def _dense_config(dense: Any) -> dict[str, Any]:
    config = dense.get_config_dict()
    keys = ("in_features", "out_features", "bias", "activation_function", "use_residual")
    return {key: config[key] for key in keys if key in config}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
