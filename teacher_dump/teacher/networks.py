"""Loads the network of a checkpoint with the head that is in it, never with a random one."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from teachonce.store import TaskSpec
from teachonce.support.errors import UserError
from teachonce.teacher_dump.teacher.checkpoint_names import ResolvedModel
from teachonce.teacher_dump.teacher.declared_heads import DECLARED, another_head, no_head
from teachonce.teacher_dump.teacher.loading import load_network

EMBEDDING = "embedding"
"""What `--head` calls the steps from the states to one vector of a text: no head of transformers,
so no entry of FACTORIES."""
SCORE = "score"
"""What `--head` calls a head of classification with one output: rerankers, cross-encoders."""
FACTORIES = {
    "mlm": AutoModelForMaskedLM,
    "causal": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
    "tagging": AutoModelForTokenClassification,
}
"""What loads each head of DECLARED."""


def load_with_head(
    resolved: ResolvedModel, config: Any, head: str, options: dict[str, Any]
) -> tuple[PreTrainedModel, str | None]:
    """Load the network of a checkpoint; returns it, and the key of its head in FACTORIES or None.

    `head` is one of FACTORIES, EMBEDDING, SCORE, `none` or `auto`. `auto` takes the head of the
    task that the checkpoint says it was fine-tuned for, else a masked-LM head if there is one.
    Raises UserError where the checkpoint lacks the head asked for.
    """
    scores = head == SCORE
    head = "classification" if scores else head
    kind = _declared(config) if head == "auto" else head
    network, missing = None, ["asked for none"]
    if kind in FACTORIES:
        network, missing = _load(kind, resolved, config, options)
    if network is not None and not missing:
        if scores and (outputs := network.config.num_labels) != 1:
            raise UserError(
                f"{resolved.name}: --head score is for one output, and the checkpoint has"
                f" {outputs}; use --head classification, which keeps them all"
            )
        return network, kind
    if head in FACTORIES:
        raise no_head(resolved.name, kind, missing)
    network, missing = load_network(AutoModel, resolved, **options)
    if any("pooler" in key for key in missing):
        network.pooler = None  # random: it would differ at every load
    return network, EMBEDDING if kind == EMBEDDING else None


def _declared(config: Any) -> str:
    for name in config.architectures or ():
        for kind, head in DECLARED.items():
            if head.architecture and name.endswith(head.architecture):
                return kind
    return "mlm"


def _load(
    head: str, resolved: ResolvedModel, config: Any, options: dict[str, Any]
) -> tuple[PreTrainedModel | None, list[str]]:
    """Load a model with the head; returns it, and the parameters that the checkpoint lacks.

    The model is None where the checkpoint has another head, or its family has no such head; the
    reason then stands for the parameters.
    """
    if other := another_head(config.architectures or (), head):
        return None, [other]
    try:
        return load_network(FACTORIES[head], resolved, **options)
    except UserError as error:
        if "Unrecognized configuration class" in str(error):
            return None, ["this family has none"]
        raise


def task_of(network: PreTrainedModel, head: str | None, name: str) -> TaskSpec | None:
    """Read the task and the labels that a head was fine-tuned for; None for LM heads.

    Raises UserError for a head whose logits are not the output of its last layer, and for labels
    that cannot be told apart.
    """
    config: Any = network.config
    if head not in ("classification", "tagging"):
        if head == "causal" and getattr(config, "final_logit_softcapping", None):
            raise UserError(
                f"{name}: caps its logits behind the LM head (final_logit_softcapping), which is"
                " not stored; use --head none"
            )
        return None
    if head == "classification" and config.pad_token_id is None:
        raise UserError(f"{name}: its config.json has no pad_token_id; give it the tokenizer's")
    names = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
    if len(set(names)) < len(names):
        raise UserError(f"{name}: two labels have one name in id2label of its config.json")
    later = getattr(config, "later_label", None) if head == "tagging" else None
    if later is not None and later not in names:
        raise UserError(
            f"{name}: later_label of its config.json is {later!r}, which is none of its labels,"
            f" {', '.join(names)[:200]}; take it out, or name the label of a word's later pieces"
        )
    return TaskSpec(head, tuple(names), later)
