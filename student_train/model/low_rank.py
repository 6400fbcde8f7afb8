"""Low-rank changes of a student's linear layers (LoRA), which are all that is trained of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from teachonce.support.extras import library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALE = 2
"""The alpha of LoRA as a multiple of its rank: the change is added this many times."""


def add_low_rank(student: PreTrainedModel, rank: int) -> None:
    """Add to each linear layer in the student's blocks a product of two matrices of this rank, at
    first zero (Hu et al. 2022, section 4.1).

    Raises UserError if peft is missing.
    """
    peft: Any = library("peft", "lora", "--lora")
    settings = peft.LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules="all-linear")
    # Not `get_peft_model`: a PeftModel is not the PreTrainedModel that `any_student.py` requires.
    peft.inject_adapter_in_model(settings, student)


def is_low_rank(name: str) -> bool:
    """Return whether a parameter is one of the two matrices of a change."""
    return ".lora_" in name


def merge_low_rank(student: PreTrainedModel) -> None:
    """Add the changes to the weights of their layers, so that the student is an ordinary one."""
    # A list, as modules are replaced on the way.
    for name, module in list(student.named_modules()):
        if hasattr(module, "base_layer"):
            merged: Any = module
            merged.merge()
            parent, _, own = name.rpartition(".")
            setattr(student.get_submodule(parent), own, merged.get_base_layer())
