"""Chooses the precision of a teacher on a CPU that multiplies bfloat16. There bf16 takes half to a
sixth of the time of float32, and is chosen if the outputs agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.teacher_dump.windows.window import padded

TEXTS, TOKENS = 8, 64  # the first texts of the corpus; at most this many tokens of each
# In standard deviations of a channel, root mean square. SmolLM2-135M has .027 in its last state (30
# layers), MiniLM .010 (6 layers). The int8 codec of hidden states adds .007.
TOLERANCE = 0.05


def load_fastest(
    load: Callable[[str], Teacher], texts: Iterable[str], say: Callable[[str], object]
) -> tuple[Teacher, str]:
    """Load a decoder in bf16 if its outputs for some texts agree with fp32, else in fp32.

    load: loads the model in a given precision. texts: read once, and only for a decoder. `say`
        receives the choice. Returns the teacher and its precision.
    """
    teacher = load("fp32")
    # Vectors and states of encoders are compared with other libraries to the sixth digit.
    if teacher.head != "causal":
        say("precision fp32, chosen by auto: on a CPU, only decoders run in bf16")
        return teacher, "fp32"
    texts = list(texts)
    expected = _outputs(teacher, texts)
    del teacher  # two copies might not fit into memory
    teacher = load("bf16")
    differences = deviations(expected, _outputs(teacher, texts))
    # NaN counts as the largest: it is unequal to itself.
    order = sorted(differences.items(), key=lambda item: (item[1] != item[1], item[1]))
    name, largest = order[-1] if order else ("nothing", 0.0)
    precision = "bf16" if largest <= TOLERANCE else "fp32"
    say(
        f"precision {precision}: in bf16 {name} differs from fp32 by {largest:.2g} standard"
        f" deviations (at most {TOLERANCE}); --precision bf16 or fp32 skips this comparison"
    )
    if precision == "fp32":
        del teacher  # before the next copy is loaded
        teacher = load("fp32")
    return teacher, precision


def deviations(
    expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return for each output [N,C] the root mean square of the differences, in standard deviations
    of its channels. Constant channels are left out."""
    errors = {}
    for name, values in expected.items():
        scale = values.std(0, correction=0)
        changes = ((actual[name] - values) / scale)[:, scale > 0]
        errors[name] = float(changes.square().mean().sqrt()) if changes.numel() else 0.0
    return errors


def _outputs(teacher: Teacher, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return all outputs of the teacher for the texts by name, float32 [N,C]."""
    length = min(TOKENS, teacher.max_length() or TOKENS)
    rows = [teacher.tokenizer(text, truncation=True, max_length=length).input_ids for text in texts]
    if not (rows := [row for row in rows if row]):
        return {}
    ids, present = padded(rows, teacher.tokenizer.pad_token_id or 0)
    outputs = teacher.run(ids, present).tensors()
    mask = torch.from_numpy(present).to(teacher.device)
    with torch.inference_mode():
        if teacher.decoder is not None:
            inputs = outputs["head"]
            inputs = inputs[mask] if inputs.dim() == 3 else inputs
            outputs["logits"] = torch.cat([chunk for _, chunk in teacher.decoder.logits(inputs)])
        # Outputs for tokens are [B,L,C]; vectors, class logits and scores of texts are [B,C].
        return {name: (x[mask] if x.dim() == 3 else x).float() for name, x in outputs.items()}
