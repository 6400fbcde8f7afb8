"""Loads a teacher with its head and checks that it computes what a store records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from teachonce.checkpoints.field_checks import unread, unread_settings
from teachonce.checkpoints.fields import MODULES
from teachonce.checkpoints.labels import task_of
from teachonce.checkpoints.loading import (
    EMBEDDING,
    FACTORIES,
    check_pieces,
    input_limit,
    load_config,
    load_tokenizer,
    load_with_head,
)
from teachonce.checkpoints.names import ResolvedModel, resolve_teacher
from teachonce.checkpoints.sentence_settings import (
    SentenceSettings,
    apply_settings,
    listed_modules,
    read_classifier,
)
from teachonce.checkpoints.static import load_static, static_module
from teachonce.checkpoints.text_vectors import text_vectors
from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.heads import Decoder, split_decoder
from teachonce.teacher_dump.teacher.layer_check import (
    ALIKE,
    ALIKE_NARROW,
    head_outputs,
    padding_changes_numbers,
    reads_ahead,
)
from teachonce.teacher_dump.teacher.teacher import Teacher, TeacherHead, VectorOptions

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHECKPOINT_VECTORS = VectorOptions()
CAPS = ("final_logit_softcapping", "output_logit_soft_cap")  # Gemma and NanoChat; xLSTM


def load_teacher(
    model: str | ResolvedModel,
    *,
    head: str = "auto",
    hidden: str = "mean",
    attention: str = "mean",
    device: str = "cpu",
    precision: str = "fp32",
    vectors: VectorOptions = CHECKPOINT_VECTORS,
    check_tokenizer: Callable[[Any], object] = lambda tokenizer: None,
) -> Teacher:
    """Load a checkpoint (folder, model id or alias).

    `head` is a key of `loading.FACTORIES`, `none`, `embedding`, or `auto` for the head that is in
    the checkpoint. `vectors` applies to the head `embedding`. `check_tokenizer` receives the
    tokenizer before the weights are loaded, and may raise.

    Raises UserError if the model cannot be found, is an encoder-decoder, has a slow tokenizer or
    none, or lacks the requested head, which transformers would fill with random numbers.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve_teacher(model)
    local = Path(resolved.path_or_id).is_dir()
    if (head == EMBEDDING or local) and (subfolder := static_module(resolved)) is not None:
        if head != EMBEDDING:
            raise UserError(
                f"{resolved.name}: is a table of word vectors, which gives only vectors of texts;"
                " add --head embedding"
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
    check_tokenizer(tokenizer)
    network, kind = load_with_head(resolved, config, head, options)
    pairs = read_classifier(resolved) if kind == "classification" else SentenceSettings()
    apply_settings(tokenizer, pairs, shorten=True)
    task = task_of(network.config, kind, resolved.name)
    network = network.eval().to(device)
    outputs = len(task.labels) if task else int(network.config.vocab_size)
    decoder = None
    if kind in FACTORIES:
        limit = input_limit(config, tokenizer)
        decoder = _split(resolved.name, network, outputs, kind == "causal", limit)
    embedder = None
    if kind == EMBEDDING:
        embedder = text_vectors(resolved, tokenizer, int(network.config.hidden_size), *vectors)
        embedder.head.to(device)
    notes = unread(resolved, network.config)
    if vectors.pooling and listed_modules(resolved):
        replaced = "replaces its modules, prompts and lengths"
        notes.append(f"{MODULES}: --pooling {vectors.pooling} {replaced}")
    teacher = Teacher(
        resolved,
        network,
        tokenizer,
        TeacherHead(kind, decoder, task, embedder),
        hidden,
        attention,
        notes=notes,
    )
    teacher.check_layers()
    if kind == "causal" and reads_ahead(teacher):
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
    field = next((name for name in CAPS if getattr(network.config, name, None) is not None), "")
    cap = getattr(network.config, field) if causal and field else None
    if cap is not None:
        # Only causal heads apply a cap. The network itself, without its decoder, must apply none;
        # the config of its layers is unchanged.
        network.config = copy.deepcopy(network.config)
        vars(network.config)[field] = None  # some configs refuse None as an attribute
    decoder = replace(split_decoder(network, outputs), cap=cap)
    logits = torch.cat([chunk for _, chunk in decoder.logits(head_outputs(name, network, limit))])
    narrow = next(network.parameters()).itemsize < 4
    error = (logits - expected).norm(dim=-1) if logits.shape == expected.shape else None
    if error is None or (error > (ALIKE_NARROW if narrow else ALIKE) * expected.norm(dim=-1)).any():
        raise UserError(
            f"{name}: {type(network).__name__} scales or caps its logits in a way that a store"
            " cannot hold; use --head none"
        )
    return decoder


def _check_sizes(config: Any, name: str) -> None:
    """Raise UserError if the configuration lacks a size that each store holds."""
    for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, size, None), int):
            raise UserError(
                f"{name}: a {config.model_type} model has no {size}, because it does not read"
                " pieces of a tokenizer with one stack of layers; choose an encoder or a decoder"
                " that reads text only"
            )


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
    embedder = text_vectors(model, tokenizer, network.config.hidden_size, *vectors)
    embedder.head.to(device)
    head = TeacherHead(EMBEDDING, text_vectors=embedder)
    network.train(False).to(device)
    notes = unread_settings(model)
    return Teacher(model, network, tokenizer, head, hidden, attention, notes=notes)
