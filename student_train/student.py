"""The student, an ordinary masked LM, and the projections that exist only while it is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from student_train import losses
from student_train.architecture import lm_logits
from student_train.batches import Inputs, StudentBatch
from student_train.options import TrainOptions


@dataclass(frozen=True)
class Outputs:
    """Of one forward pass: flat states [N,D] by layer (0 is the embeddings) and attention maps
    [B,S,S] by layer."""

    states: list[Tensor]
    maps: list[Tensor]

    @property
    def last(self) -> Tensor:
        return self.states[-1]


class Distiller(nn.Module):
    """A student with one projection for each hidden state of the teacher that it is compared
    with."""

    def __init__(
        self, student: PreTrainedModel, options: TrainOptions, hidden: tuple[str, ...], width: int
    ) -> None:
        super().__init__()
        self.student, self.options = student, options
        self.layers = student.config.num_hidden_layers
        self.projections = nn.ModuleDict()
        own = student.config.hidden_size
        for loss in (name for name in losses.OF_HIDDEN if name in options.loss):
            for name in hidden:
                if loss == "cosine" and own == width:
                    continue  # same width: compared as they are (Sanh et al. 2019)
                self.projections[_key(loss, name)] = self._projection(own, width)

    def _projection(self, own: int, width: int) -> nn.Linear:
        linear = nn.Linear(own, width)
        if self.options.projection == "frozen":
            nn.init.kaiming_normal_(linear.weight)  # He et al. 2015, as in the published code
            nn.init.zeros_(linear.bias)
            linear.requires_grad_(False)
        return linear

    def forward(self, batch: StudentBatch) -> dict[str, Tensor]:
        """Unweighted losses by name, each a scalar with its own normaliser
        (student_train.losses)."""
        wants_maps = "attention" in self.options.loss
        native = self.encode(batch.inputs, wants_maps)
        found = {}
        if "mlm" in self.options.loss:
            found["mlm"] = losses.mlm(self.logits(native.last[batch.masked]), batch.labels)
        wanted = batch.distillation
        if wanted is None:
            return found
        read = native if wanted.inputs is None else self.encode(wanted.inputs, wants_maps)
        pool = self.options.resolved_pool
        for loss, targets in (("hidden", wanted.normalised), ("cosine", wanted.states)):
            for name, target in targets.items():
                own = wanted.runs.pool(self._layers(read.states[1:], name), pool)
                value = getattr(losses, loss)(self._projected(loss, name, own), target)
                found[loss] = found.get(loss, 0.0) + value / len(targets)
        for name, target in wanted.maps.items():
            assert wanted.map_pooling is not None
            here = wanted.map_pooling.present
            maps = wanted.map_pooling.pool(self._layers(read.maps, name))
            value = losses.attention(maps, target, here[:, :, None] & here[:, None, :])
            found["attention"] = found.get("attention", 0.0) + value / len(wanted.maps)
        if wanted.logits is not None and wanted.logit_runs is not None:
            logits = self.logits(wanted.logit_runs.pool(read.last, pool))
            if "kl" in self.options.loss:
                found["kl"] = losses.kl(logits, wanted.logits, self.options.temperature)
            if "logit" in self.options.loss:
                found["logit"] = losses.logit(logits, wanted.logits)
            if "hard" in self.options.loss:
                found["hard"] = losses.hard(logits, wanted.logits)
        return found

    def _projected(self, loss: str, name: str, pooled: Tensor) -> Tensor:
        key = _key(loss, name)
        return self.projections[key](pooled) if key in self.projections else pooled

    def logits(self, states: Tensor) -> Tensor:
        """LM-head logits [M,V] of flat states [M,D]."""
        return lm_logits(self.student, states)

    def encode(self, inputs: Inputs, maps: bool = False) -> Outputs:
        """One forward pass of the student; attention maps only where asked for."""
        output = self.student.base_model(
            input_ids=inputs.ids,
            attention_mask=inputs.present.long(),
            output_hidden_states=True,
            output_attentions=maps,
        )
        states = [state[inputs.present] for state in output.hidden_states]
        return Outputs(states, [m.mean(dim=1) for m in output.attentions] if maps else [])

    def _layers(self, values: list[Tensor], name: str) -> Tensor:
        """The student's counterpart of a teacher feature: `mean` of all layers, group i of N, or
        the last layer."""
        if name == "mean":
            return torch.stack(values).mean(dim=0)
        group = re.fullmatch(r"groups(\d+)\.(\d+)", name)
        if group is None:
            return values[-1]
        count, i = int(group[1]), int(group[2])
        size = self.layers // count
        return torch.stack(values[i * size : (i + 1) * size]).mean(dim=0)


def _key(loss: str, name: str) -> str:
    return f"{loss}_{name.replace('.', '_')}"
