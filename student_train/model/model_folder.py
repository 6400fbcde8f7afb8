"""A folder of transformers as a source of weights, beside the teacher that a store keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging

from teachonce.checkpoints.tokenizer_folder import why_unloadable
from teachonce.student_train.model.named_start import checked_folder
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line, out_of_memory


class Source(Protocol):
    """Gives what a student is cut out of: a `FeatureStore` does, of its teacher."""

    path: str

    def teacher_weights(self) -> Mapping[str, Array]: ...
    def teacher_settings(self, name: str) -> dict[str, Any]: ...


class ModelFolder:
    """Reads config, tokenizer and weights of a masked LM that `save_pretrained` wrote.

    Names of weights are those of a store: of the encoder without its own name, and of the masked-LM
    head all but the output embeddings, whose bias is `decoder.bias`. Raises UserError for a folder
    that holds no such model; the weights are loaded when they are asked for.
    """

    def __init__(self, path: str, option: str) -> None:
        self.path, self._option = path, option
        checked_folder(path, option)
        self._config = loaded(AutoConfig, path, option)
        tokenizer = loaded(AutoTokenizer, path, option)
        self.tokenizer_json: str = tokenizer.backend_tokenizer.to_str()

    def teacher_settings(self, name: str) -> dict[str, Any]:
        """Return config.json, the one file that a cut asks for."""
        settings: dict[str, Any] = self._config.to_dict()
        return settings

    def teacher_weights(self) -> Mapping[str, Array]:
        """Return float32 arrays of the model by name."""
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
        network, report = loaded(
            AutoModelForMaskedLM, self.path, self._option, output_loading_info=True
        )
        encoder, missing = f"{network.base_model_prefix}.", set(report["missing_keys"])
        missing |= {key for key, *_ in report["mismatched_keys"]}
        lacking = sorted(key for key in missing if key.startswith(encoder) and "pooler" not in key)
        if lacking:
            raise UserError(
                f"{self._option}: {self.path} lacks weights of its encoder, {len(lacking)}, first"
                f" {lacking[0]}; copy the whole checkpoint"
            )
        found = network.base_model.state_dict()
        output = network.get_output_embeddings()
        if not missing and output is not None and output.bias is not None:
            own = {value.data_ptr() for value in (output.weight, output.bias)}
            whole = network.state_dict().items()
            heads = {name: value for name, value in whole if not name.startswith(encoder)}
            found |= {n: value for n, value in heads.items() if value.data_ptr() not in own}
            found["decoder.bias"] = output.bias.detach()
        return {
            n: v.float().contiguous().numpy() for n, v in found.items() if v.is_floating_point()
        }


def loaded(factory: Any, path: str, asked: str, **options: Any) -> Any:
    """Call `factory.from_pretrained` silently for a folder; `asked` is what asked for it.

    Raises UserError for whatever keeps transformers from reading it, but for a lack of memory.
    """
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn about is checked here
    logging.disable_progress_bar()
    try:
        return factory.from_pretrained(path, local_files_only=True, **options)
    except Exception as error:  # libraries raise errors of any kind for a bad file
        if out_of_memory(error):
            raise
        is_tokenizer = factory is AutoTokenizer
        why = why_unloadable(path, error) if is_tokenizer else first_line(error)
        raise UserError(
            f"{asked}: {path} cannot be loaded as a model with its tokenizer: {why};"
            " give a folder that save_pretrained wrote"
        ) from error
    finally:
        logging.set_verbosity(level)
