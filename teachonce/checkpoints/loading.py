"""Loads checkpoints with transformers: config, tokenizer, network with its head.

Missing and damaged files raise UserError with one line. Importing this module registers BiLSTM and
static students, which transformers lacks, with its Auto classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)
from transformers.utils import logging

import teachonce.checkpoints.bilstm  # registers its models with the Auto classes
import teachonce.checkpoints.static  # noqa: F401
from teachonce.checkpoints.checkpoint_tokenizer import why_unloadable
from teachonce.checkpoints.declared import (
    RERANKER,
    another_head,
    check_no_encoder_decoder,
    declared_head,
    longest_input,
    no_head,
)
from teachonce.checkpoints.field_checks import check_checkpoint
from teachonce.checkpoints.labels import task_of
from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.sentence_settings import (
    apply_settings,
    declared_activation,
    read_classifier,
)
from teachonce.checkpoints.unreadable import damaged_file
from teachonce.checkpoints.weights import check_all_read, check_no_whole_numbers
from teachonce.store import TaskSpec
from teachonce.support.console import counted
from teachonce.support.errors import UserError, first_line, out_of_memory

EMBEDDING = "embedding"  # a value of `--head`; no head of transformers, so not in FACTORIES
SCORE = "score"  # a value of `--head`: classification with one output (rerankers)
FACTORIES = {
    "mlm": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
    "tagging": AutoModelForTokenClassification,
}
"""The Auto class of each head in DECLARED."""


@contextmanager
def without_log_lines() -> Iterator[None]:
    """Switch off log lines and progress bars of transformers inside the `with` block."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # this package checks what it would warn about
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def load_resolved(factory: Any, model: ResolvedModel, flag: str = "", **options: Any) -> Any:
    """Call `factory.from_pretrained` for the resolved commit, without log lines.

    flag: the option that names the model, for errors; "" for --model.

    Raises UserError for every error of transformers except a lack of memory.
    """
    try:
        with without_log_lines():
            if model.gguf and factory not in (AutoConfig, AutoTokenizer):
                # Without `config` transformers would guess one from the file.
                config = AutoConfig.from_pretrained(model.path_or_id)
                options = {"gguf_file": model.gguf, "config": config, **options}
            return factory.from_pretrained(
                model.path_or_id,
                revision=model.revision or "main",
                trust_remote_code=model.trusted,
                **options,
            )
    except Exception as error:  # libraries raise errors of any type for a bad file
        # A lack of memory is not the checkpoint's fault; `command_errors` prints its own line.
        if out_of_memory(error):
            raise
        raise _unloadable(error, factory, model, flag) from error


def _unloadable(error: Exception, factory: Any, model: ResolvedModel, flag: str) -> UserError:
    """Return the error for a checkpoint that transformers cannot load; its cause is `error`."""
    if not (flag or model.trusted) and "trust_remote_code" in str(error):
        return UserError(
            f"model {model.name}: comes with Python code, which is not run; read that code, then"
            " give --trust-remote-code to teacher-dump or feature-store verify"
        )
    where = f"{flag}: {model.name}" if flag else f"model {model.name}"
    if damage := damaged_file(Path(model.path_or_id)):
        return UserError(f"{where}: cannot be loaded: {damage}; copy the checkpoint again")
    is_tokenizer = factory is AutoTokenizer
    why = why_unloadable(model.path_or_id, error) if is_tokenizer else first_line(error)
    # transformers advises this argument, which no command has.
    if "ignore_mismatched_sizes" in why:
        why = "its weights have other sizes than its config.json declares"
    where += " cannot be loaded as a model with its tokenizer" if flag else ": cannot be loaded"
    remedy = ", with its tokenizer" if is_tokenizer and not flag else ""
    return UserError(f"{where}: {why}; give a folder that save_pretrained wrote{remedy}")


# Classes of transformers that are only the encoder of an encoder-decoder, such as T5EncoderModel.
HALVES = {name for name in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values() if "Encoder" in name}


def load_config(model: ResolvedModel) -> Any:
    """Load the config. Raises UserError for an encoder-decoder, an adapter, and a refused field
    (`fields.FIELDS`)."""
    config = load_resolved(AutoConfig, model)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if model.gguf and causal and not config.architectures:
        # transformers makes the config.json of a GGUF file without architectures.
        config.architectures = [causal]
    check_checkpoint(model, config)
    check_no_encoder_decoder(model, config.to_dict())
    halves = [str(name) for name in config.architectures or () if str(name) in HALVES]
    if halves:
        raise UserError(
            f"model {model.name}: is the encoder of an encoder-decoder ({halves[0]}), which cannot"
            " be dumped; choose an encoder such as BERT"
        )
    return config


def load_tokenizer(model: ResolvedModel) -> Any:
    """Load the tokenizer. Raises UserError if it has only special tokens."""
    tokenizer = load_resolved(AutoTokenizer, model)
    # For a folder without tokenizer files transformers creates a tokenizer without pieces.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"model {model.name}: its tokenizer has only special tokens, because tokenizer.json or"
            " the vocabulary is missing or empty; copy the whole checkpoint with its tokenizer"
        )
    return tokenizer


# If these texts get the same ids from a tokenizer and its tokenizer.json, all texts should.
PROBES = ("The old", " A b", "été 12,5%", "x")


def check_pieces(tokenizer: Any, rows: int | None, name: str) -> None:
    """Raise UserError if a fast tokenizer has ids beyond the `rows` of the embedding table, or
    gives other ids than its tokenizer.json, by which texts are cut."""
    pieces = tokenizer.get_vocab()
    highest = max(pieces, key=pieces.__getitem__, default="")
    if isinstance(rows, int) and pieces and pieces[highest] >= rows:
        raise UserError(
            f"{name}: its tokenizer has ids up to {pieces[highest]:,} ({highest!r}), but its"
            f" embedding table has only {rows:,} rows; use the tokenizer that belongs to the"
            " checkpoint, or resize its embeddings (resize_token_embeddings)"
        )
    backend = tokenizer.backend_tokenizer
    # The backend retains the truncation and padding of the tokenizer's last call.
    backend.no_truncation()
    backend.no_padding()
    for text in PROBES:
        backend_ids, token_ids = backend.encode(text).ids, list(tokenizer(text)["input_ids"])
        if backend_ids != token_ids:
            raise UserError(
                f"{name}: {type(tokenizer).__name__} gives the ids {token_ids} for {text!r}, but"
                f" its tokenizer.json gives {backend_ids}; save a tokenizer that is completely"
                " described by its tokenizer.json (PreTrainedTokenizerFast)"
            )


def load_network(
    factory: Any, model: ResolvedModel, flag: str = "", **options: Any
) -> tuple[Any, list[str]]:
    """Load a network. Return it, and the names of the parameters of its head and pooler that the
    checkpoint lacks, whose values are random.

    Raises UserError if the checkpoint lacks parameters of the base model, or if their sizes differ.
    """
    network, report = load_resolved(factory, model, flag, output_loading_info=True, **options)
    if model.gguf and hasattr(network.config, "quantization_config"):
        del network.config.quantization_config  # the weights were dequantised when they were read
    # With `ignore_mismatched_sizes` these weights are random, as missing ones are.
    other_sizes = {key for key, *_ in report["mismatched_keys"]}
    missing = sorted(k for k in report["missing_keys"] | other_sizes if "position_ids" not in k)
    prefix = "" if network.base_model is network else f"{network.base_model_prefix}."
    # Checkpoints of masked LMs have no pooler, so a missing one is not damage.
    encoder = [key for key in missing if key.startswith(prefix) and "pooler" not in key]
    name = f"{flag}: {model.name}" if flag else model.name
    if encoder:
        subject = name if flag else f"model {name}: the checkpoint"
        raise UserError(
            f"{subject} lacks {counted(len(encoder), 'weight')} of its encoder, such as"
            f" {encoder[0]}; copy the whole checkpoint"
        )
    # transformers ignores weights that the network lacks, and its warning is switched off.
    check_all_read(network, sorted(report["unexpected_keys"]), name)
    check_no_whole_numbers(network, model.folder(), name)
    network.config.return_dict = True  # this project reads outputs by name
    for module in network.modules():
        if getattr(module, "chunk_size_feed_forward", 0):
            module.chunk_size_feed_forward = 0  # fails unless it divides the length of a batch
    return network, missing


def load_with_head(
    resolved: ResolvedModel, config: Any, head: str, options: dict[str, Any]
) -> tuple[PreTrainedModel, str | None]:
    """Load the network of a checkpoint. Return it, and the key of its head in FACTORIES or None.

    `head` is a key of FACTORIES, EMBEDDING, SCORE, `none` or `auto`. `auto` loads the task head or
    causal-LM head that the config declares, else a masked-LM head if there is one. Raises UserError
    if the checkpoint lacks the requested head.
    """
    scores = head == SCORE
    head = "classification" if scores else head
    kind = head
    if head == "auto":
        kind = declared_head(config.architectures or ()) or "mlm"
    network, missing = None, ["none was requested"]
    if kind == "mlm" and getattr(config, "is_decoder", False):
        raise UserError(
            f"{resolved.name}: is_decoder is true in its config.json: a token attends only to"
            " tokens before it, so its LM head predicts next tokens, not masked ones; use --head"
            " causal or --head none"
        )
    if kind in FACTORIES:
        network, missing = _load(kind, resolved, config, options)
    if network is not None and not missing:
        if kind == "classification":
            _set_activation(resolved.name, network.config, read_classifier(resolved).activation)
        if scores and (outputs := network.config.num_labels) != 1:
            raise UserError(
                f"{resolved.name}: --head score needs one output, and the checkpoint has"
                f" {outputs}; use --head classification, which stores all of them"
            )
        return network, kind
    if head in FACTORIES:
        raise no_head(resolved.name, kind, missing, RERANKER if scores else "")
    network, missing = load_network(AutoModel, resolved, **options)
    if any("pooler" in key for key in missing):
        network.pooler = None  # it is random, and would change the hash of the weights
    return network, EMBEDDING if kind == EMBEDDING else None


def _set_activation(name: str, config: Any, activation: str | None) -> None:
    """Write the activation of a CrossEncoder to a config, from which students copy it. Do nothing
    if the config has this activation already, or by default. Raises UserError like
    `declared_activation`."""
    default = "Sigmoid" if config.num_labels == 1 else "Identity"
    now = str(declared_activation(name, config) or default)
    if activation and activation.rpartition(".")[2] != now.rpartition(".")[2]:
        table = getattr(config, "sentence_transformers", None)
        fields = table if isinstance(table, dict) else {}
        config.sentence_transformers = fields | {"activation_fn": activation}


def _load(
    head: str, resolved: ResolvedModel, config: Any, options: dict[str, Any]
) -> tuple[PreTrainedModel | None, list[str]]:
    """Load a model with the head. Return it, and the parameters that the checkpoint lacks.

    If the checkpoint has another head, or its family has no such head, the model is None and the
    list has the reason.
    """
    # By the declared class: the weights of a tagger and of a classifier have the same names, so
    # either head would load them.
    if other := another_head(config.architectures or (), head):
        return None, [other]
    try:
        return load_network(FACTORIES[head], resolved, **options)
    except UserError as error:
        if "Unrecognized configuration class" in str(error):
            return None, ["this family has none"]
        raise


def load_with_fresh_head(
    model: ResolvedModel, factory: Any, head: dict[str, Any]
) -> tuple[Any, Any]:
    """Load tokenizer and network (float32) of a checkpoint. The network has the checkpoint's head
    if its labels equal those in `head`, else a new, random head.

    factory: an AutoModelFor... of transformers.
    head: fields of the config that the head needs.

    Raises UserError if the checkpoint cannot be loaded, lacks weights of the base model, or has no
    fast tokenizer with a padding token.
    """
    config = load_config(model)
    labels = dict(config.id2label)
    config.update(head)
    tokenizer = _padding_tokenizer(model)
    network, missing = load_network(
        factory,
        model,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # the checkpoint's head may have other labels
    )
    heads = [name for name, _ in network.named_children() if name != network.base_model_prefix]
    loaded = network.base_model is not network and not {k.split(".")[0] for k in missing} & {*heads}
    if loaded and "id2label" in head and labels != network.config.id2label:
        # The checkpoint's head has the same size, but its outputs mean other labels.
        fresh = factory.from_config(config, dtype=torch.float32)
        for name in heads:
            setattr(network, name, getattr(fresh, name))
    _match_inputs(tokenizer, network)
    return tokenizer, network


def load_with_own_head(model: ResolvedModel, factory: Any) -> tuple[Any, Any, TaskSpec]:
    """Load tokenizer, network (float32) and labels of a checkpoint that has the head of `factory`.

    Raises UserError like `load_with_fresh_head`, and if the checkpoint lacks the head or has labels
    with equal names.
    """
    (kind,) = (kind for kind, value in FACTORIES.items() if value is factory)
    tokenizer, network = load_with_tokenizer(model, kind)
    task = task_of(network.config, kind, model.name)
    assert task is not None  # only LM heads have no task
    return tokenizer, network, task


def declared_task(model: ResolvedModel, factory: Any) -> TaskSpec | None:
    """Read the labels of a checkpoint before its weights are loaded. Return None if its config does
    not declare the head of `factory`, or does not name its labels.

    Raises UserError as `load_with_own_head` does.
    """
    config = load_config(model)
    kind = declared_head([*map(str, config.architectures or ())])
    # LABEL_0 and so on are the defaults of transformers: such a config does not name its labels.
    named = any(name != f"LABEL_{number}" for number, name in config.id2label.items())
    if kind is None or FACTORIES.get(kind) is not factory or not named:
        return None
    return task_of(config, kind, model.name)


def load_with_tokenizer(model: ResolvedModel, head: str = "none") -> tuple[Any, Any]:
    """Load tokenizer and network (float32) of a checkpoint; see `load_with_head` for `head`.

    Raises UserError like `load_with_fresh_head`, and if the checkpoint lacks the head.
    """
    config = load_config(model)
    tokenizer = _padding_tokenizer(model)
    network, kind = load_with_head(model, config, head, {"dtype": torch.float32})
    if kind == "classification":
        apply_settings(tokenizer, read_classifier(model), shorten=True)
    _match_inputs(tokenizer, network)
    return tokenizer, network


def _padding_tokenizer(model: ResolvedModel) -> Any:
    tokenizer = load_tokenizer(model)
    if not tokenizer.is_fast or tokenizer.pad_token is None:
        lack = "has no padding token" if tokenizer.is_fast else "is not a fast one"
        raise UserError(f"model {model.name}: its tokenizer {lack}; choose an encoder such as BERT")
    return tokenizer


def _match_inputs(tokenizer: Any, network: Any) -> None:
    """Remove `token_type_ids` from the tokenizer's output if the network has fewer than two token
    types."""
    if (getattr(network.config, "type_vocab_size", None) or 0) < 2:  # no type for a second text
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = names


def input_limit(config: Any, tokenizer: Any) -> int:
    """Return the longest input in tokens, special tokens included."""
    positions = getattr(config, "max_position_embeddings", None)
    tokens = int(tokenizer.model_max_length)
    return longest_input(tokens, positions, config.to_dict()) or tokens


def checked_length(length: int, config: Any, tokenizer: Any) -> int:
    """Return `length` in tokens. Raises UserError if it is above the model's limit."""
    limit = input_limit(config, tokenizer)
    if length > limit:
        raise UserError(
            f"--max-length {length}: the model takes at most {limit} tokens; give at most that"
        )
    return length
