"""Loads a student for export: a network from token ids to one output, and its tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from teachonce.checkpoints.chat_template import plain_template
from teachonce.checkpoints.declared import declared_kind
from teachonce.checkpoints.embedders import Embedder
from teachonce.checkpoints.fields import MODULES, SETTINGS
from teachonce.checkpoints.labels import score_activation, task_of, trained_on_pairs
from teachonce.checkpoints.loading import (
    check_pieces,
    input_limit,
    load_config,
    load_tokenizer,
    load_with_head,
    load_with_tokenizer,
)
from teachonce.checkpoints.names import ResolvedModel, resolve_model, resolve_vectors
from teachonce.checkpoints.sentence_folder import check_modules, module_kinds
from teachonce.checkpoints.sentence_settings import read_sentence_settings
from teachonce.checkpoints.static import longest_text
from teachonce.checkpoints.text_vectors import text_vectors
from teachonce.student_export.options import DECODER
from teachonce.student_export.student_inputs import INPUTS, LONGEST_CHECKED, StudentInputs
from teachonce.student_train.output.report import trained_on_chats
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


CLASSIFIER = "classification"
LONGEST = 8192
"""The most tokens of a text that a student reads, if its own limit is larger."""


@dataclass(frozen=True, kw_only=True)
class LoadedStudent(StudentInputs):
    """Holds a student that is ready to be exported.

    network: a module whose arguments are `inputs`, int64 [B,S] each. It returns logits [B,S,V] or
        [B,C], or vectors [B,D] and the states [B,S,H] before the pooling.
    chat_template: the template of a decoder that was trained on chats; "" for other students.
    """

    folder: Path
    network: nn.Module
    config: Any = None
    chat_template: str = ""

    def run(self, inputs: dict[str, Array]) -> Array:
        """Compute the output of the network itself."""
        with torch.inference_mode():
            output = self.network(*(torch.as_tensor(inputs[n]) for n in self.inputs))
        answer: Array = (output[0] if isinstance(output, tuple) else output).numpy()
        return answer


Both = tuple[Tensor, Tensor]
"""Vectors [B,D], and states [B,S,H]."""


class LogitsNetwork(nn.Module):
    """Wraps a transformers network for exporters: inputs are positional, in the order of INPUTS."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
        extra = {} if types is None else {"token_type_ids": types}
        logits: Tensor = self.network(input_ids=ids, attention_mask=mask, **extra).logits
        return logits


class VectorNetwork(nn.Module):
    """Runs an encoder with its pooling and further modules. `prompt`: number of the prompt's
    tokens."""

    def __init__(self, encoder: Any, head: Any, prompt: int) -> None:
        super().__init__()
        self.encoder, self.head, self.prompt = encoder, head, prompt
        # sentence-transformers branches on the mask, to find padding on the left; torch.export
        # cannot trace this.
        head.pooling._exclude_prompt_from_mask = lambda mask, n: mask * (mask.cumsum(dim=1) > n)

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Both:
        extra = {} if types is None else {"token_type_ids": types}
        states: Tensor = self.encoder(input_ids=ids, attention_mask=mask, **extra).last_hidden_state
        vectors: Tensor = self.head(states, mask.bool(), self.prompt)
        return vectors, states


class StaticVectorNetwork(nn.Module):
    """Averages the word vectors of a text's pieces, and applies the modules after the average."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        first: Any = model[0]
        weights, modules = first.embedding.weight, list(model)[1:]
        self.truncate_dim = model.truncate_dim
        self.embedding = nn.Embedding.from_pretrained(weights.detach().float())
        self.steps = nn.ModuleList(modules)

    def forward(self, ids: Tensor, mask: Tensor) -> Both:
        present, states = mask.unsqueeze(-1).float(), self.embedding(ids)
        total = (states * present).sum(1)
        # At least 1: a text without pieces has the vector 0 and not NaN.
        features: dict[str, Tensor] = {"sentence_embedding": total / present.sum(1).clamp(min=1)}
        for step in self.steps:
            features = step(features)
        return features["sentence_embedding"][:, : self.truncate_dim], states


def load_student(folder: Path) -> LoadedStudent:
    """Load a folder of transformers or sentence-transformers.

    Raises UserError if the folder is not a model, or if the model has neither a head nor a pooling.
    """
    # First, because a static student's folder may lack the config.json that `resolve_model` needs.
    if (listed := module_kinds(resolve_vectors(str(folder)))) and listed[0] == "StaticEmbedding":
        return _static(folder)
    model = resolve_model(str(folder))
    config = load_config(model)
    kind = declared_kind({"architectures": config.architectures})
    if kind == DECODER:
        return _decoder(model, config, folder)
    if listed and not kind:
        check_modules(model)
        return _embedding(model, folder)
    if kind is None:
        raise UserError(
            f"{folder}: {(config.architectures or ['its network'])[0]} has neither a head that can"
            f" be exported nor a pooling ({MODULES}); give a masked LM, a classifier, a tagger or a"
            " model of sentence vectors"
        )
    tokenizer, network = load_with_tokenizer(model, kind)
    task = task_of(network.config, kind, str(folder))
    activation = score_activation(str(folder), network.config, task)
    return LoadedStudent(
        folder=folder,
        kind=kind,
        network=LogitsNetwork(network.eval()).eval(),
        tokenizer=tokenizer,
        inputs=_inputs(tokenizer),
        max_length=min(input_limit(config, tokenizer), LONGEST),
        task=task,
        pairs=_reads_pairs(network.config, activation) if kind == CLASSIFIER else None,
        activation=activation,
        config=config,
    )


def _reads_pairs(config: Any, activation: str) -> bool | None:
    """Return whether a classifier reads pairs of texts; None if its config has no record of it."""
    pairs = trained_on_pairs(config)
    # A model with one output that Teachonce did not train is taken for a reranker.
    return True if pairs is None and activation else pairs


def _decoder(model: ResolvedModel, config: Any, folder: Path) -> LoadedStudent:
    tokenizer = load_tokenizer(model)
    network, _ = load_with_head(model, config, DECODER, {"dtype": torch.float32})
    embeddings: Any = network.get_input_embeddings()
    check_pieces(tokenizer, embeddings.num_embeddings, str(folder))
    if tokenizer.pad_token is None:
        # Padding is on the right, where no token of the text reads it: any token will do.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    return LoadedStudent(
        folder=folder,
        kind=DECODER,
        network=LogitsNetwork(network.eval()).eval(),
        tokenizer=tokenizer,
        inputs=INPUTS[:2],
        max_length=min(input_limit(config, tokenizer), LONGEST_CHECKED),
        config=config,
        chat_template=plain_template(tokenizer) if trained_on_chats(folder) else "",
    )


def _inputs(tokenizer: Any) -> tuple[str, ...]:
    return tuple(name for name in INPUTS if name in tokenizer.model_input_names)


def _embedding(model: ResolvedModel, folder: Path) -> LoadedStudent:
    tokenizer, encoder = load_with_tokenizer(model)
    vectors = text_vectors(model, tokenizer, encoder.config.hidden_size, None, None)
    longest = input_limit(encoder.config, tokenizer)
    return LoadedStudent(
        folder=folder,
        kind="embedding",
        network=VectorNetwork(encoder.eval(), vectors.head, vectors.prompt_tokens).eval(),
        tokenizer=tokenizer,
        inputs=_inputs(tokenizer),
        max_length=min(longest, vectors.max_length or longest, LONGEST),
        prompt=vectors.prompt,
        config=encoder.config,
        about=_prompts(folder),
    )


def _static(folder: Path) -> LoadedStudent:
    """Load word vectors with any modules after them, through sentence-transformers."""
    from transformers import PreTrainedTokenizerFast

    model = Embedder(str(folder)).model
    settings = read_sentence_settings(resolve_vectors(str(folder)), None)
    first = model[0]
    names = first.tokenizer.get_vocab()
    # If no piece has such a name, any piece will do: the mask leaves padding out of the mean.
    padding = next((name for name in ("[PAD]", "<pad>") if name in names), min(names))
    # transformers also takes the side of the truncation from tokenizer.json.
    longest = min(longest_text(first.tokenizer) or LONGEST, LONGEST)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=first.tokenizer, pad_token=padding, model_max_length=longest
    )
    return LoadedStudent(
        folder=folder,
        kind="embedding",
        network=StaticVectorNetwork(model).eval(),
        tokenizer=tokenizer,
        inputs=INPUTS[:2],
        max_length=longest,
        special=False,
        prompt=settings.prompts.get(settings.default_prompt or "", ""),
        about=_prompts(folder),
    )


def _prompts(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    names = ("prompts", "default_prompt_name", "similarity_fn_name")
    return {name: settings[name] for name in names if settings.get(name)}
