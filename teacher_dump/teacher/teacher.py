"""Loads and checks a teacher, and runs one forward pass over a batch of windows."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from teachonce.checkpoints.declared import longest_input
from teachonce.checkpoints.field_checks import unread, unread_settings
from teachonce.checkpoints.fields import MODULES, SETTINGS
from teachonce.checkpoints.first_token import prepend_token
from teachonce.checkpoints.loading import (
    EMBEDDING,
    FACTORIES,
    check_pieces,
    input_limit,
    load_config,
    load_tokenizer,
    load_with_head,
    task_of,
)
from teachonce.checkpoints.names import ResolvedModel, resolve_teacher
from teachonce.checkpoints.sentence_settings import (
    SentenceSettings,
    fit_tokenizer,
    listed_modules,
    read_classifier,
)
from teachonce.checkpoints.static import load_static, static_module
from teachonce.checkpoints.text_vectors import TextVectors, text_vectors
from teachonce.checkpoints.tokenizer_folder import tokenizer_files
from teachonce.store import TaskSpec
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.heads import Decoder, split_decoder
from teachonce.teacher_dump.teacher.layer_check import (
    ALIKE,
    ALIKE_NARROW,
    check_layers,
    head_outputs,
    padding_changes_numbers,
    reads_ahead,
)
from teachonce.teacher_dump.teacher.layer_groups import layer_groups
from teachonce.teacher_dump.teacher.taps import Accumulator, tapped

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Head:
    """The head of a teacher.

    kind: a key of `loading.FACTORIES`, or `embedding`; None if the checkpoint has no head, or none
    was requested. decoder: the last layer of the head. task: its labels and problem type; None for
    LM heads. text_vectors: pooling and modules for the kind `embedding`.
    """

    kind: str | None = None
    decoder: Decoder | None = None
    task: TaskSpec | None = None
    text_vectors: TextVectors | None = None


class VectorOptions(NamedTuple):
    """The options `--pooling` and `--prompt`; None for the checkpoint's own."""

    pooling: str | None = None
    prompt: str | None = None


CHECKPOINT_VECTORS = VectorOptions()


@dataclass
class Activations:
    """The output of one forward pass, on the device, with padding."""

    hidden: dict[str, torch.Tensor]  # [B,L,D] float32
    attention: dict[str, torch.Tensor]  # [B,L,L] float32
    head_input: torch.Tensor | None  # [B,L,D'] input of the decoder; [B,D'] for classes of texts
    vectors: torch.Tensor | None = None  # [B,W] float32, of the texts

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        found = {f"hidden {name}": states for name, states in self.hidden.items()}
        found |= {f"attention {name}": maps for name, maps in self.attention.items()}
        rest = {"head": self.head_input, "vectors": self.vectors}
        return found | {name: value for name, value in rest.items() if value is not None}


class Teacher:
    """A model in evaluation mode, with hooks that average states and maps.

    `name` is what the user typed, `revision` the commit on the hub (None for a folder). `head`,
    `decoder`, `task` and `text_vectors` are the fields of `Head`. `notes` are lines about fields of
    the checkpoint's files that nothing reads. `one_length` is True if padding changes the output
    for a text: each batch then has texts of one length. `first_token` is the id that `start_with`
    lets the tokenizer put in front of each text, or None.
    """

    def __init__(
        self,
        resolved: ResolvedModel,
        model: PreTrainedModel,
        tokenizer: Any,
        head: Head,
        hidden: str,
        attention: str,
        notes: Sequence[str] = (),
    ) -> None:
        self.notes, self.one_length = notes, False
        self.first_token: int | None = None
        self.head, self.decoder = head.kind, head.decoder
        self.task, self.text_vectors = head.task, head.text_vectors
        self.name, self.revision = resolved.name, resolved.revision
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
        # Families with this argument return maps only if it is set. Other families would then hold
        # the maps of all layers in memory, which the hooks do not need.
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
        if how := self.text_vectors:
            mask = torch.from_numpy(present).to(self.device)
            vectors = how.head(output.last_hidden_state, mask, how.prompt_tokens)
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
        before = [(tensor, tensor.dtype) for tensor in self._narrow()]
        try:
            for tensor, _ in before:
                tensor.data = tensor.data.float()
            yield
        finally:
            for tensor, dtype in before:
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
        return f"{line}; leave that document out, or use another checkpoint"

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
        """Yield the parameters of the encoder and of a masked-LM head, without its output
        embeddings, by name and in a fixed order. A store rounds them to float16."""
        found = self.base.state_dict()
        if self.head == "mlm" and self.decoder:
            encoder = f"{self.model.base_model_prefix}."
            for name, value in self.model.state_dict().items():
                # BERT has the bias of its decoder twice, under two names.
                if not name.startswith(encoder) and value.shape != self.decoder.bias.shape:
                    found[name] = value
            # Under one name, whatever the model calls it (FORMAT.md, 6).
            found["decoder.bias"] = self.decoder.bias
        for name, value in sorted(found.items()):
            if value.is_floating_point():
                yield name, value.float().cpu().numpy()

    def weights_hash(self) -> str:
        """Return the SHA-256 of the names and values of all parameters.

        Copies of a checkpoint in other folders or file formats have the same hash.
        """
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            # NumPy has no bfloat16, all of whose values float32 has.
            digest.update(value.float().cpu().contiguous().numpy().data)
        # `split_decoder` has taken the decoder out of the model.
        if self.decoder:
            for value in self.head_arrays():
                digest.update(value.data)
        if self.text_vectors:
            for name, value in sorted(self.text_vectors.head.state_dict().items()):
                digest.update(name.encode())
                digest.update(value.float().cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def head_arrays(self) -> tuple[Array, Array]:
        """Return weight [V,D] and bias [V] of the decoder, float32."""
        assert self.decoder is not None
        return self.decoder.weight.cpu().numpy(), self.decoder.bias.cpu().numpy()

    def files(self) -> dict[str, bytes]:
        """Return tokenizer.json, tokenizer_config.json and config.json as bytes, by name; of a
        sentence embedder also SETTINGS."""
        config = self.config.to_dict()
        if Path(config.get("_name_or_path", "")).exists():
            del config["_name_or_path"]  # a path on this machine does not describe the model
        settings = self.text_vectors.settings if self.text_vectors else None
        return {
            **tokenizer_files(self.tokenizer, self.max_length() or 512),
            "config.json": json.dumps(config, sort_keys=True).encode(),
            **({SETTINGS: settings} if settings else {}),
        }


def load_teacher(
    model: str | ResolvedModel,
    *,
    head: str = "auto",
    hidden: str = "mean",
    attention: str = "mean",
    device: str = "cpu",
    precision: str = "fp32",
    vectors: VectorOptions = CHECKPOINT_VECTORS,
) -> Teacher:
    """Load a checkpoint (folder, model id or alias).

    `head` is a key of `loading.FACTORIES`, `none`, `embedding`, or `auto` for the head that is in
    the checkpoint. `vectors` applies to the head `embedding`.

    Raises UserError if the model cannot be found, is an encoder-decoder, has a slow tokenizer or
    none, or lacks the requested head, which transformers would fill with random numbers.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve_teacher(model)
    local = Path(resolved.path_or_id).is_dir()
    if (head == EMBEDDING or local) and (subfolder := static_module(resolved)) is not None:
        if head != EMBEDDING:
            raise UserError(
                f"{resolved.name}: a table of word vectors, which has only vectors of texts; add"
                " --head embedding"
            )
        return _static_teacher(resolved, subfolder, hidden, attention, device, vectors)
    config = load_config(resolved)
    options: dict[str, Any] = {"dtype": PRECISIONS[precision]}
    if attention != "none":
        options["attn_implementation"] = "eager"  # the other implementations give no probabilities
    tokenizer = load_tokenizer(resolved)
    if not tokenizer.is_fast:
        raise UserError(
            f"{resolved.name}: {type(tokenizer).__name__} gives no character offsets, which the"
            " store needs for each token; add a tokenizer.json (fast tokenizer) to the checkpoint"
        )
    _check_sizes(config, resolved.name)
    check_pieces(tokenizer, config.vocab_size, resolved.name)
    network, found = load_with_head(resolved, config, head, options)
    pairs = read_classifier(resolved) if found == "classification" else SentenceSettings()
    fit_tokenizer(tokenizer, pairs, shorten=True)
    task = task_of(network.config, found, resolved.name)
    network = network.eval().to(device)
    outputs = len(task.labels) if task else int(network.config.vocab_size)
    decoder = None
    if found in FACTORIES:
        limit = input_limit(config, tokenizer)
        decoder = _split(resolved.name, network, outputs, found == "causal", limit)
    how = None
    if found == EMBEDDING:
        how = text_vectors(resolved, tokenizer, int(network.config.hidden_size), *vectors)
        how.head.to(device)
    teacher = Teacher(
        resolved,
        network,
        tokenizer,
        Head(found, decoder, task, how),
        hidden,
        attention,
        notes=[*unread(resolved, network.config), *_replaced(resolved, vectors)],
    )
    teacher.check_layers()
    if found == "causal" and reads_ahead(teacher):
        raise UserError(
            f"{resolved.name}: {type(network).__name__} attends to later tokens, so its head does"
            " not predict the next one; choose a decoder, or use --head none"
        )
    teacher.one_length = padding_changes_numbers(teacher)
    return teacher


def _split(name: str, network: PreTrainedModel, outputs: int, causal: bool, limit: int) -> Decoder:
    """Split the decoder from the network. Raises UserError if the network changes the decoder's
    output in a way that a store does not record. limit: the longest input in tokens."""
    expected = head_outputs(name, network, limit)
    cap = _take_cap(network) if causal else None  # only causal heads apply it
    decoder = replace(split_decoder(network, outputs), cap=cap)
    found = torch.cat([each for _, each in decoder.logits(head_outputs(name, network, limit))])
    narrow = next(network.parameters()).itemsize < 4
    off = (found - expected).norm(dim=-1) if found.shape == expected.shape else None
    if off is None or (off > (ALIKE_NARROW if narrow else ALIKE) * expected.norm(dim=-1)).any():
        raise UserError(
            f"{name}: {type(network).__name__} scales or caps its logits in a way that a store"
            " cannot hold; use --head none"
        )
    return decoder


def _take_cap(network: PreTrainedModel) -> float | None:
    """Return the cap of the logits (Gemma), and make the network itself, without its decoder, apply
    none. The config of its layers is unchanged."""
    cap = getattr(network.config, "final_logit_softcapping", None)
    if cap is not None:
        network.config = copy.deepcopy(network.config)
        network.config.final_logit_softcapping = None
    return cap


def _check_sizes(config: Any, name: str) -> None:
    """Raise UserError if the configuration lacks a size that each store holds."""
    for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, size, None), int):
            raise UserError(
                f"{name}: a model of {config.model_type} has no {size}, as it does not read pieces"
                " of a tokenizer with one stack of layers; choose a BERT-like encoder"
            )


def _replaced(model: ResolvedModel, vectors: VectorOptions) -> list[str]:
    """Return a note if --pooling replaces the modules of a sentence-transformers folder."""
    if not (vectors.pooling and listed_modules(model)):
        return []
    return [f"{MODULES}: --pooling {vectors.pooling} replaces its modules, prompts and lengths"]


def _static_teacher(
    model: ResolvedModel,
    subfolder: str,
    hidden: str,
    attention: str,
    device: str,
    vectors: VectorOptions,
) -> Teacher:
    """Load a table of word vectors as a teacher. Raises UserError for hidden states and attention
    maps, which it does not have."""
    if not hidden == attention == "none":
        raise UserError(
            f"{model.name}: a table of word vectors has no hidden states and no attention maps;"
            " give --hidden none --attention none"
        )
    network, tokenizer = load_static(model, subfolder)
    check_pieces(tokenizer, network.config.vocab_size, model.name)
    how = text_vectors(model, tokenizer, network.config.hidden_size, *vectors)
    how.head.to(device)
    head = Head(EMBEDDING, text_vectors=how)
    network.train(False).to(device)
    notes = unread_settings(model)
    return Teacher(model, network, tokenizer, head, hidden, attention, notes=notes)
