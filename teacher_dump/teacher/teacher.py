"""A loaded teacher: one forward pass over a batch of windows, and what a store records of it."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from teachonce.checkpoints.checkpoint_tokenizer import tokenizer_files
from teachonce.checkpoints.declared import longest_input
from teachonce.checkpoints.fields import SETTINGS
from teachonce.checkpoints.first_token import prepend_token
from teachonce.checkpoints.loading import EMBEDDING
from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.text_vectors import TextVectors
from teachonce.store import TaskSpec
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.heads import Decoder
from teachonce.teacher_dump.teacher.layer_check import check_layers
from teachonce.teacher_dump.teacher.layer_groups import layer_groups
from teachonce.teacher_dump.teacher.taps import Accumulator, tapped


@dataclass(frozen=True)
class TeacherHead:
    """Describes the head of a teacher.

    kind: a key of `loading.FACTORIES`, or `embedding`; None if the checkpoint has no head, or if no
    head was requested. decoder: the last layer of the head. task: the head's labels and problem
    type; None for LM heads. text_vectors: pooling and modules for the kind `embedding`.
    """

    kind: str | None = None
    decoder: Decoder | None = None
    task: TaskSpec | None = None
    text_vectors: TextVectors | None = None


class VectorOptions(NamedTuple):
    """Holds the options `--pooling` and `--prompt`; None means the checkpoint's own value."""

    pooling: str | None = None
    prompt: str | None = None


@dataclass
class Activations:
    """Holds the output of one forward pass, on the device, with padding."""

    hidden: dict[str, torch.Tensor]  # [B,L,D] float32
    attention: dict[str, torch.Tensor]  # [B,L,L] float32
    head_input: torch.Tensor | None  # [B,L,D'] input of the decoder; [B,D'] for classes of texts
    vectors: torch.Tensor | None = None  # [B,W] float32, of the texts

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        tensors = {f"hidden {name}": states for name, states in self.hidden.items()}
        tensors |= {f"attention {name}": maps for name, maps in self.attention.items()}
        rest = {"head": self.head_input, "vectors": self.vectors}
        return tensors | {name: value for name, value in rest.items() if value is not None}


class Teacher:
    """Runs a model in evaluation mode, with hooks that average states and maps.

    `name` is what the user typed, `revision` the commit on the hub (None for a folder). `trusted`
    is True if Python code of the checkpoint may run. `head`, `decoder`, `task` and `text_vectors`
    are the fields of `TeacherHead`. `notes` are lines about fields of the checkpoint's files that
    nothing reads. `one_length` is True if padding changes the output for a text: each batch then
    has texts of the same length. `first_token` is the id that `start_with` lets the tokenizer put
    in front of each text, or None.
    """

    def __init__(
        self,
        resolved: ResolvedModel,
        model: PreTrainedModel,
        tokenizer: Any,
        head: TeacherHead,
        hidden: str,
        attention: str,
        notes: Sequence[str] = (),
    ) -> None:
        self.notes, self.one_length = notes, False
        self.first_token: int | None = None
        self.head, self.decoder = head.kind, head.decoder
        self.task, self.text_vectors = head.task, head.text_vectors
        self.name, self.revision = resolved.name, resolved.revision
        self.trusted = resolved.trusted
        self.model, self.tokenizer = model, tokenizer
        self.base = cast(Any, model.base_model)
        self.config = cast(Any, self.base.config)
        self.layers = int(self.config.num_hidden_layers)
        self.width = int(self.config.hidden_size)
        self.vocabulary = int(self.config.vocab_size)
        self.hidden = Accumulator(layer_groups(hidden, self.layers))
        self.attention = Accumulator(layer_groups(attention, self.layers))
        if any(0 in members for members in self.attention.groups.values()):
            raise UserError(
                f"--attention {attention}: the embeddings (layer 0) attend to nothing; count from 1"
            )
        self.device = next(model.parameters()).device
        # Families whose base model has this argument return maps only if it is set. In other
        # families it is not set: they would hold the maps of all layers in memory, which the hooks
        # do not need.
        has_flag = "output_attentions" in inspect.signature(self.base.forward).parameters
        self._arguments = {"output_attentions": True} if has_flag and self.attention.groups else {}
        caches = "use_cache" in inspect.signature(self.base.forward).parameters
        if head.kind == "causal" or (head.kind == EMBEDDING and caches):
            self._arguments["use_cache"] = False  # nothing is generated: no KV cache
        # BigBird: transformers switches to full attention at the first batch that is short enough,
        # and never back. Outputs would depend on the order of batches.
        if self.sparse_from is not None:
            self.base.set_attention_type("original_full")

    def start_with(self, bos: str) -> None:
        """Apply `--bos` to the tokenizer of a causal teacher. Raises UserError as `prepend_token`
        does."""
        if self.head == "causal":
            self.first_token = prepend_token(self.tokenizer, bos, self.name)

    @property
    def reads_types(self) -> bool:
        """Return whether the model and its tokenizer use token_type_ids."""
        types = getattr(self.config, "type_vocab_size", None) or 0
        return types > 1 and "token_type_ids" in self.tokenizer.model_input_names

    @torch.inference_mode()
    def run(self, ids: Array, present: Array, types: Array | None = None) -> Activations:
        """Run the model over token ids [B,L]; `present` bool [B,L] is False on padding.

        `types` [B,L], the token types of pairs of texts, are passed if the model `reads_types`.
        """
        self.hidden.take()  # drops the sums of a pass that ran out of memory
        self.attention.take()
        inputs = {
            "input_ids": torch.from_numpy(ids).long().to(self.device),
            "attention_mask": torch.from_numpy(present).long().to(self.device),
        }
        if types is not None and self.reads_types:
            inputs["token_type_ids"] = torch.from_numpy(types).long().to(self.device)
        tap = self.hidden.groups or self.attention.groups
        taps = (self.base, self.layers, ids.shape[1], self.hidden, self.attention)
        with tapped(*taps) if tap else nullcontext():
            output = self.model(**inputs, **self._arguments)
        self.hidden.check()
        self.attention.check()
        head_input, vectors = output.logits if self.decoder else None, None
        if embedder := self.text_vectors:
            mask = torch.from_numpy(present).to(self.device)
            vectors = embedder.head(output.last_hidden_state, mask, embedder.prompt_tokens)
        return Activations(self.hidden.take(), self.attention.take(), head_input, vectors)

    @property
    def narrow(self) -> bool:
        """Return whether the model computes in fewer bits than float32."""
        return bool(self._narrow())

    def _narrow(self) -> list[torch.Tensor]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [t for t in tensors if t.is_floating_point() and t.itemsize < 4]

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Compute in float32 while this context is open, with the weights as bf16 or fp16 rounded
        them."""
        # One by one: converting the whole model back would also round its float32 buffers.
        dtypes = [(tensor, tensor.dtype) for tensor in self._narrow()]
        try:
            for tensor, _ in dtypes:
                tensor.data = tensor.data.float()
            yield
        finally:
            for tensor, dtype in dtypes:
                tensor.data = tensor.data.to(dtype)

    def unusable(self, where: str) -> str:
        """Return the message for NaN or infinity that also occurs in float32."""
        line = f"the teacher {self.name} gives NaN or infinity ({where}), in float32, too"
        for name, value in self.model.state_dict().items():
            if value.is_floating_point() and not value.isfinite().all():
                cause = "the checkpoint is damaged"
                if value.itemsize < 4:
                    cause += ", or too large for it: try --precision fp32"
                return f"{line}: its {name} holds NaN or infinity in {value.dtype}; {cause}"
        return f"{line}; leave the document out, or use another checkpoint"

    @property
    def sparse_from(self) -> int | None:
        """Return the longest input in tokens for which BigBird's sparse attention is full; None for
        other models.

        For longer inputs, its output depends on the longest text of the batch.
        """
        if getattr(self.config, "attention_type", None) != "block_sparse":
            return None
        return int((5 + 2 * self.config.num_random_blocks) * self.config.block_size)

    def check_layers(self) -> None:
        """Raise UserError if the layers do not give the requested states and maps."""
        maps = bool(self.attention.groups)
        if self.hidden.groups or maps:
            limit = self.max_length()
            check_layers(self.name, self.base, self.layers, limit, maps, self._arguments)

    def max_length(self) -> int | None:
        """Return the longest input in tokens, special tokens included; None if it is unknown."""
        positions = getattr(self.config, "max_position_embeddings", None)
        if self.sparse_from is not None:
            positions = min(positions or self.sparse_from, self.sparse_from)
        return longest_input(self.tokenizer.model_max_length, positions, self.config.to_dict())

    def weights(self) -> Iterator[tuple[str, Array]]:
        """Yield the parameters of the base model and of a masked-LM head, without output
        embeddings, by name and in a fixed order. A store rounds them to float16."""
        parameters = self.base.state_dict()
        if self.head == "mlm" and self.decoder:
            encoder = f"{self.model.base_model_prefix}."
            for name, value in self.model.state_dict().items():
                # BERT has the bias of its decoder twice, under two names.
                if not name.startswith(encoder) and value.shape != self.decoder.bias.shape:
                    parameters[name] = value
            # Under one name, whatever the model calls it (FORMAT.md, 6).
            parameters["decoder.bias"] = self.decoder.bias
        for name, value in sorted(parameters.items()):
            if value.is_floating_point():
                yield name, value.float().cpu().numpy()

    def weights_hash(self) -> str:
        """Return the SHA-256 of the names and values of all parameters.

        Copies of a checkpoint in other folders or file formats have the same hash.
        """
        digest = hashlib.sha256()

        def add(module: torch.nn.Module) -> None:
            for name, value in sorted(module.state_dict().items()):
                digest.update(name.encode())
                # NumPy has no bfloat16; float32 represents all of its values.
                digest.update(value.float().cpu().contiguous().numpy().data)

        add(self.model)
        # `split_decoder` has taken the decoder out of the model.
        if self.decoder:
            for array in self.head_arrays():
                digest.update(array.data)
        if self.text_vectors:
            add(self.text_vectors.head)
        return digest.hexdigest()

    def head_arrays(self) -> tuple[Array, Array]:
        """Return weight [V,D] and bias [V] of the decoder, float32."""
        assert self.decoder is not None
        return self.decoder.weight.cpu().numpy(), self.decoder.bias.cpu().numpy()

    def files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer (see `tokenizer_files`) and config.json as bytes, by
        name; for a sentence embedder also SETTINGS."""
        config = self.config.to_dict()
        if Path(config["_name_or_path"]).exists():
            del config["_name_or_path"]  # a path on this machine does not describe the model
        settings = self.text_vectors.settings if self.text_vectors else None
        return {
            **tokenizer_files(self.tokenizer, self.max_length() or 512),
            "config.json": json.dumps(config, sort_keys=True).encode(),
            **({SETTINGS: settings} if settings else {}),
        }
