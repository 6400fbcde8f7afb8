"""A transformers folder as a source of initial weights, as an alternative to a store's teacher."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from teachonce.checkpoints.field_checks import check_checkpoint
from teachonce.checkpoints.loading import load_network, load_resolved
from teachonce.checkpoints.names import ResolvedModel
from teachonce.student_train.model.start_checks import checked_folder
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

OUTPUT = "lm_head.weight"
"""The output embeddings of a decoder."""


class WeightSource(Protocol):
    """Gives the weights to copy into a student: a `FeatureStore`, or a `ModelFolder`."""

    path: str

    def teacher_weights(self) -> Mapping[str, Array]: ...
    def teacher_settings(self, name: str) -> dict[str, Any]: ...


def split_layer(name: str, layers: str) -> tuple[int, str] | None:
    """Split the name of a layer's parameter into the layer's number and the name within the layer;
    None for any other parameter. `layers` is what precedes the number in the name."""
    number, _, part = name.removeprefix(layers).partition(".")
    inside = name.startswith(layers) and number.isdecimal()
    return (int(number), part) if inside else None


class ModelFolder:
    """Reads config, tokenizer and weights of a language model that `save_pretrained` wrote.

    Weights have the same names as in a store: relative to the base model. The masked-LM head is
    included without its output embeddings; its output bias is `decoder.bias`. For a decoder, output
    embeddings are included if they are not its word embeddings. Weights are loaded on first use.
    causal: whether the model is a decoder; else it is a masked LM.

    Raises UserError for a folder without a model of this sort, or without a fast tokenizer.
    """

    def __init__(self, path: str, option: str, causal: bool = False) -> None:
        self.path, self._option, self._causal = path, option, causal
        self._class = AutoModelForCausalLM if causal else AutoModelForMaskedLM
        checked_folder(path, option)
        self._model = ResolvedModel(path, path)
        self._config = load_resolved(AutoConfig, self._model, option, local_files_only=True)
        check_checkpoint(self._model, self._config)
        tokenizer = load_resolved(AutoTokenizer, self._model, option, local_files_only=True)
        if not tokenizer.is_fast:
            raise UserError(
                f"{option}: {path}: {type(tokenizer).__name__} is not a fast tokenizer, and its"
                " pieces cannot be compared; give a model with a tokenizer.json"
            )
        self.tokenizer_json: str = tokenizer.backend_tokenizer.to_str()

    def teacher_settings(self, name: str) -> dict[str, Any]:
        """Return config.json; copying layers needs no other file."""
        settings: dict[str, Any] = self._config.to_dict()
        return settings

    def teacher_weights(self) -> Mapping[str, Array]:
        """Return the model's weights, float32, by name."""
        return self._weights

    def content(self) -> str:
        """Return the SHA-256 of the names and values of the weights."""
        digest = hashlib.sha256()
        for name, values in sorted(self._weights.items()):
            digest.update(name.encode())
            digest.update(values.data)
        return digest.hexdigest()

    @cached_property
    def _weights(self) -> dict[str, Array]:
        network, missing = load_network(
            self._class, self._model, self._option, local_files_only=True
        )
        encoder = f"{network.base_model_prefix}."
        weights = network.base_model.state_dict()
        output = network.get_output_embeddings()
        # A head that the checkpoint lacks is random here, and is not copied.
        if self._causal and not missing:
            untied = output.weight is not network.get_input_embeddings().weight
            weights |= {OUTPUT: output.weight.detach()} if untied else {}
        if not missing and output is not None and output.bias is not None:
            # By memory, not by name: output embeddings may be tied to the word embeddings.
            pointers = {value.data_ptr() for value in (output.weight, output.bias)}
            state = network.state_dict().items()
            heads = {name: value for name, value in state if not name.startswith(encoder)}
            weights |= {n: value for n, value in heads.items() if value.data_ptr() not in pointers}
            weights["decoder.bias"] = output.bias.detach()
        # Contiguous, as `content` hashes the buffers. Integers such as position ids are not
        # weights.
        return {
            n: v.float().contiguous().numpy() for n, v in weights.items() if v.is_floating_point()
        }
