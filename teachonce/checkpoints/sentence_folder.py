"""Reads and writes sentence-transformers folders: the modules after a transformer.

modules.json                        the modules, in order: a transformer, a pooling, others
config_sentence_transformers.json   prompts, the name of the default prompt, truncate_dim
sentence_bert_config.json           the longest text in tokens
1_Pooling/config.json, 2_Dense/...  one folder for each module

The modules are classes of sentence-transformers. Importing it takes seconds, so it is imported
inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from teachonce.checkpoints.field_checks import unlisted
from teachonce.checkpoints.fields import LENGTHS, MODULES, OF_FEATURES, SETTINGS, STATIC
from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.sentence_settings import (
    EMBEDDER,
    RERANKER,
    STATES,
    VECTOR,
    SentenceSettings,
    library_class,
    listed_modules,
    read_folder_json,
    read_sentence_settings,
)
from teachonce.checkpoints.unreadable import folder_errors
from teachonce.support.errors import UserError

if TYPE_CHECKING:
    from sentence_transformers.sentence_transformer.modules import Pooling

OF_STATES = ("Dense", "Normalize")  # modules that may be between a transformer and its Pooling
OF_VECTORS = ("Dense", "LayerNorm", "Normalize", "Dropout")  # after a Pooling or StaticEmbedding
FIRST = ("Transformer", STATIC)


class VectorHead(nn.Module):
    """Computes vectors from states with modules of sentence-transformers: a Pooling, then others.

    before: modules that change the states before the Pooling.
    truncate_dim: size to which vectors are cut after all modules, as by `encode()`; None for no
    cut.
    """

    def __init__(
        self,
        pooling: Pooling,
        *steps: nn.Module,
        before: Sequence[nn.Module] = (),
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.before = nn.Sequential(*before)
        self.pooling, self.steps = pooling, nn.Sequential(*steps)
        self.truncate_dim = truncate_dim

    def forward(self, states: torch.Tensor, present: torch.Tensor, prompt: int = 0) -> torch.Tensor:
        """Compute vectors float32 [B,W] of states [B,L,D].

        `present` bool [B,L] is False on padding. The first `prompt` tokens of each text are a
        prompt, which some poolings leave out.
        """
        features: dict[str, Any] = {STATES: states.float(), "attention_mask": present.long()}
        if prompt:
            features["prompt_length"] = prompt
        vectors: torch.Tensor = self.steps(self.pooling(self.before(features)))[VECTOR]
        return vectors[:, : self.truncate_dim]

    @property
    def states_width(self) -> int:
        """Return the size D of the states that the first module reads."""
        first = next((m for m in self.before if type(m).__name__ == "Dense"), None)
        width: Any = self.pooling.embedding_dimension if first is None else first.in_features
        return int(width)

    @property
    def width(self) -> int:
        """Return the size W of the vectors."""
        widths = [self.pooling.pooling_output_dimension]
        widths += [int(step.out_features) for step in self._dense()]
        return min(widths[-1], self.truncate_dim or widths[-1])

    @property
    def normalised(self) -> bool:
        """Return whether the vectors have length 1."""
        names = (type(step).__name__ for step in self.steps)
        kinds = [name for name in names if name != "Dropout"]
        # Vectors that are cut after a Normalize have a length below 1, and `encode()` does not
        # normalise them again.
        return kinds[-1:] == ["Normalize"] and self.truncate_dim is None

    @property
    def description(self) -> str:
        """Return the steps as text, such as `mean, dense 256 Tanh, first 64`."""
        mode = self.pooling.pooling_mode
        names = [_step_name(step) for step in self.before]
        names.append(mode if isinstance(mode, str) else "+".join(mode))
        names += [_step_name(s) for s in self.steps if type(s).__name__ in ("Dense", "LayerNorm")]
        return ", ".join(names + ([f"first {self.truncate_dim}"] if self.truncate_dim else []))

    def _dense(self) -> Iterator[Any]:
        return (step for step in self.steps if type(step).__name__ == "Dense")


def _step_name(step: Any) -> str:
    """Return the name of a step for the description."""
    if type(step).__name__ != "Dense":
        return {"LayerNorm": "layer norm", "Normalize": "length 1"}[type(step).__name__]
    return f"dense {step.out_features} {type(step.activation_function).__name__}"


def read_sentence_folder(
    model: ResolvedModel, width: int
) -> tuple[VectorHead | None, SentenceSettings]:
    """Read a folder: its vector head and its settings. Without modules.json the head is None and
    the settings are empty.

    width: hidden size of the transformer, or size of the word vectors.

    Raises UserError, which names the file, for damaged files, unknown kinds of modules and refused
    fields.
    """
    listed = listed_modules(model)
    if listed is None:
        return None, SentenceSettings()
    kinds = [kind for kind, _ in listed]
    if not kinds or kinds[0] not in FIRST:
        raise UserError(
            f"{model.name}: its first module is {kinds[0] if kinds else 'missing'}, expected a"
            f" Transformer or {STATIC} ({MODULES}); give a folder whose vectors come from one"
        )
    static = kinds[0] == STATIC
    settings = read_sentence_settings(model, None if static else listed[0][1])
    check_modules(model)
    return _head(model, listed[1:], settings.truncate_dim, width if static else None), settings


def check_modules(model: ResolvedModel) -> None:
    """Raise UserError for a folder of another class than EMBEDDER, if no pooling follows the
    transformer, and for a dense layer with an unknown activation."""
    if (kind := library_class(model)) != EMBEDDER:
        scored = "; `downstream --task pair --as-is` scores a reranker" if kind == RERANKER else ""
        raise UserError(
            f"{model.name}: is a {kind:.60} ({SETTINGS}), which gives no vector of a text; give an"
            f" embedding model{scored}"
        )
    # sentence-transformers would silently use another activation for an unknown one.
    listed = listed_modules(model) or []
    kinds = [kind for kind, _ in listed]
    if kinds[:1] == ["Transformer"] and "Pooling" not in kinds:
        raise UserError(
            f"{model.name}: no pooling in it ({MODULES}), so it gives no vector of a text; save it"
            f" with the pooling of its training, or without {MODULES} for the mean"
        )
    for kind, path in listed:
        config = read_folder_json(model, f"{path}/config.json") if kind == "Dense" else None
        word = config.get("activation_function") if isinstance(config, dict) else None
        if word is None:
            continue
        module, _, activation = str(word).rpartition(".")
        # torch defines Identity in nn.modules.linear, the other activations in
        # nn.modules.activation.
        valid = activation == "Identity" or hasattr(nn.modules.activation, activation)
        if not module.startswith("torch.nn") or not valid:
            raise UserError(
                f"{model.name}: {path}/config.json: unknown activation {activation!r}: expected one"
                " of torch.nn without arguments, such as Tanh, GELU or Identity"
            )


def module_kinds(model: ResolvedModel) -> list[str]:
    """List the kinds of a folder's modules, in order; [] if it has no modules.json."""
    return [kind for kind, _ in listed_modules(model) or ()]


def _head(
    model: ResolvedModel,
    listed: list[tuple[str, str]],
    truncate_dim: int | None,
    word_width: int | None,
) -> VectorHead:
    """Load the modules after the first one. `check_modules` has found a transformer's Pooling.

    word_width: size of the word vectors of a static model, which are averaged; None for a
    transformer.
    """
    static = word_width is not None
    kinds = [kind for kind, _ in listed]
    at = 0 if static else kinds.index("Pooling")
    for number, (kind, path) in enumerate(listed):
        allowed = OF_STATES if number < at else OF_VECTORS
        if kind not in allowed and (static or number != at):
            where = "before its Pooling" if number < at else "after its vectors"
            raise UserError(
                f"{model.name}: module {path or kind} is a {kind} {where}, expected"
                f" {', '.join(allowed)} ({MODULES}); dump it as a plain checkpoint with --pooling,"
                " or use another model"
            )
    modules = [_module(model, kind, path) for kind, path in listed]
    for number, module in enumerate(modules):
        _check_features(model, listed[number][1], module, number < at)
    if word_width is not None:
        from sentence_transformers.sentence_transformer.modules import Pooling

        # StaticEmbedding averages the vectors of pieces itself, but `StaticModel` does not.
        return VectorHead(Pooling(word_width, "mean"), *modules, truncate_dim=truncate_dim)
    before, pooling, steps = modules[:at], modules[at], modules[at + 1 :]
    return VectorHead(pooling, *steps, before=before, truncate_dim=truncate_dim)


def _module(model: ResolvedModel, kind: str, path: str) -> Any:
    """Load a module with its class in the library. Raises UserError with its path."""
    from sentence_transformers.sentence_transformer import modules

    root = model.root or model.path_or_id
    config = read_folder_json(model, f"{path}/config.json")
    if config is None and kind == "Normalize":  # older releases saved it without a config.json
        config = {}
    if not isinstance(config, dict):
        raise UserError(f"{model.name}: {path}/config.json is missing; copy the whole folder")
    if unread := unlisted(kind, config):
        raise UserError(
            f"{model.name}: {path}/config.json has {', '.join(unread)[:100]}, which the installed"
            f" {kind} does not read; update sentence-transformers, or remove it"
        )
    with folder_errors(f"{model.name}: {path} is not a {kind} that sentence-transformers can load"):
        return getattr(modules, kind).load(root, subfolder=path, revision=model.revision)


def _check_features(model: ResolvedModel, path: str, module: Any, of_states: bool) -> None:
    """Raise UserError unless a module before the Pooling reads and writes the states, and a module
    after it the vector."""
    expected = STATES if of_states else VECTOR
    for field in OF_FEATURES.names:
        if (name := getattr(module, field, expected)) != expected:
            raise UserError(
                f"{model.name}: {path}/config.json has {field} {name!r}, expected {expected!r}"
                f" {'before' if of_states else 'after'} the Pooling; use another model"
            )


def write_sentence_folder(
    folder: Path,
    head: VectorHead,
    *,
    max_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    similarity: str = "cosine",
    static: bool = False,
) -> None:
    """Write the files of a sentence-transformers folder next to a saved transformer, so that
    SentenceTransformer(folder) gives the vectors of `head`.

    A `static` model, whose embeddings are named `embedding.weight`, pools by itself.
    """
    # Every release of the library reads these names and keys; its own `save` writes names and keys
    # that older releases cannot load.
    listed = [("StaticEmbedding" if static else "Transformer", "")]
    pooling = [] if static else [*head.before, head.pooling]
    for number, step in enumerate([*pooling, *head.steps], 1):
        kind = type(step).__name__
        path = f"{number}_{kind}"
        listed.append((kind, path))
        (folder / path).mkdir(parents=True, exist_ok=True)
        # As in older releases a Normalize has no config.json, unless it normalises states.
        if kind != "Normalize" or step in head.before:
            config = dict(CONFIGS[kind](step) if kind in CONFIGS else step.get_config_dict())
            if step in head.before:  # only newer releases of the library have these fields
                config |= {name: getattr(step, name) for name in OF_FEATURES.names}
            _write(folder / path / "config.json", config)
        if weights := step.state_dict():
            save_file(
                # safetensors refuses tensors that are not contiguous.
                {k: v.detach().float().cpu().contiguous() for k, v in weights.items()},
                folder / path / "model.safetensors",
            )
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(listed)
    ]
    _write(folder / MODULES, modules)
    settings: dict[str, Any] = {
        "prompts": dict(prompts or {}),
        "default_prompt_name": default_prompt,
        "similarity_fn_name": similarity,
    }
    if head.truncate_dim:
        settings["truncate_dim"] = head.truncate_dim
    _write(folder / SETTINGS, settings)
    if not static:
        _write(folder / LENGTHS, {"max_seq_length": max_length, "do_lower_case": False})


def _pooling_config(pooling: Any) -> dict[str, Any]:
    mode = pooling.pooling_mode
    if not isinstance(mode, str):
        return dict(pooling.get_config_dict())  # old keys cannot express the order of modes
    flags = (
        *("cls_token", "max_tokens", "mean_tokens"),
        *("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"),
    )
    return {
        "word_embedding_dimension": pooling.embedding_dimension,
        **{
            f"pooling_mode_{flag}": mode == name
            # `strict`: a mode that a release adds must not shift the flags.
            for flag, name in zip(flags, pooling.POOLING_MODES, strict=True)
        },
        "include_prompt": pooling.include_prompt,
    }


def _dense_config(dense: Any) -> dict[str, Any]:
    config = dense.get_config_dict()
    keys = ("in_features", "out_features", "bias", "activation_function", "use_residual")
    return {key: config[key] for key in keys if key in config}


CONFIGS = {"Pooling": _pooling_config, "Dense": _dense_config}
"""Functions that make a module's config.json of keys that every release of the library reads."""


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
