"""The student, an ordinary transformers model, and the projections that exist only while it is
trained."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from student_train.data.batch import Distillation, Inputs, StudentBatch
from student_train.data.targets import TaskTargets
from student_train.losses import formulas, task
from student_train.model.kinds import class_logits, lm_logits, sentence_states, tag_logits
from student_train.settings.options import TrainOptions

MEASURES = {
    "hidden": formulas.hidden,
    "hidden-sum": formulas.hidden_sum,
    "hidden-gelu": formulas.hidden_gelu,
    "hidden-kld": formulas.hidden_kld,
    "cosine": formulas.cosine,
    "contrastive": formulas.contrastive,
    "sentence": formulas.hidden,
    "sentence-kld": formulas.hidden_kld,
}


@dataclass(frozen=True)
class Outputs:
    """Of one forward pass: flat states [N,D] by layer (0 is the embeddings) and attention maps
    [B,S,S] by layer."""

    states: list[Tensor]
    maps: list[Tensor]
    present: Tensor  # bool [B,S]

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
        wanted = options.losses()
        for loss in (name for name in formulas.OF_HIDDEN if name in wanted):
            for name in hidden:
                if loss == "cosine" and own == width:
                    continue  # same width: compared as they are (Sanh et al. 2019)
                self.projections[_key(loss, name)] = self._projection(own, width)

    def _projection(self, own: int, width: int) -> nn.Linear:
        linear = nn.Linear(own, width)
        if self.options.projection == "frozen":
            nn.init.kaiming_normal_(linear.weight)  # He et al. 2015, as in the published code
            nn.init.zeros_(linear.bias)
        return linear

    def forward(self, batch: StudentBatch) -> dict[str, Tensor]:
        """Unweighted losses by name, each a scalar with its own normaliser
        (student_train.losses)."""
        return self.measured(batch)[0]

    def measured(self, batch: StudentBatch) -> tuple[dict[str, Tensor], Tensor | None]:
        """The same, and the logits [G,C] that a task's were measured by."""
        found, wanted = dict[str, Tensor](), batch.distillation
        assert wanted is None or wanted.encoded is None  # `StudentBatch.to` has decoded it
        native = None
        if "mlm" in self.options.loss or wanted is None or wanted.inputs is None:
            native = self.encode(batch.inputs, "attention" in self.options.loss)
        if native and "mlm" in self.options.loss:
            found["mlm"] = formulas.mlm(self.logits(native.last[batch.masked]), batch.labels)
        if wanted is None:
            return found, None
        read = native
        if wanted.inputs is not None:
            read = self.encode(wanted.inputs, "attention" in self.options.loss)
        assert read is not None
        self._of_states(found, wanted, read)
        self._of_maps(found, wanted, read)
        self._of_logits(found, wanted, read)
        if wanted.task is None:
            return found, None
        logits = self._task_logits(wanted.task, read)
        self._of_task(found, wanted.task, logits)
        return found, logits

    def _of_states(self, found: dict[str, Tensor], wanted: Distillation, read: Outputs) -> None:
        pool = self.options.resolved_pool
        for loss in formulas.OF_RUNS:
            targets = wanted.states if loss in formulas.OF_RAW else wanted.normalised
            for name, target in targets.items() if loss in self.options.loss else ():
                own = wanted.runs.pool(self._layers(read.states[1:], name), pool)
                value = MEASURES[loss](self._projected(loss, name, own), target)
                found[loss] = found.get(loss, 0.0) + value / len(targets)
        for loss in formulas.OF_SENTENCE:
            for name, target in wanted.sentences.items() if loss in self.options.loss else ():
                own = sentence_states(self.student, read.last, read.present)
                value = MEASURES[loss](self._projected(loss, name, own), target)
                found[loss] = found.get(loss, 0.0) + value / len(wanted.sentences)

    def _of_maps(self, found: dict[str, Tensor], wanted: Distillation, read: Outputs) -> None:
        for name, target in wanted.maps.items():
            assert wanted.map_pooling is not None
            here = wanted.map_pooling.present
            maps = wanted.map_pooling.pool(self._layers(read.maps, name))
            value = formulas.attention(maps, target, here[:, :, None] & here[:, None, :])
            found["attention"] = found.get("attention", 0.0) + value / len(wanted.maps)

    def _of_logits(self, found: dict[str, Tensor], wanted: Distillation, read: Outputs) -> None:
        if wanted.logits is None or wanted.logit_runs is None:
            return
        runs, how = wanted.logit_runs, self.options.resolved_pool
        if self.options.align == "reduce":  # outputs are summed, not what they are made of
            logits = runs.pool_members(self.logits(read.last[runs.member]).float(), how)
        else:
            logits = self.logits(runs.pool(read.last, how))
        if "kl" in self.options.loss:
            found["kl"] = formulas.kl(logits, wanted.logits, self.options.temperature)
        if "logit" in self.options.loss:
            found["logit"] = formulas.logit(logits, wanted.logits)
        if "hard" in self.options.loss:
            found["hard"] = formulas.hard(logits, wanted.logits)

    def _task_logits(self, targets: TaskTargets, read: Outputs) -> Tensor:
        if targets.tokens is None:
            return class_logits(self.student, read.last, read.present)
        return tag_logits(self.student, read.last[targets.tokens])

    def _of_task(self, found: dict[str, Tensor], targets: TaskTargets, logits: Tensor) -> None:
        if "ce" in self.options.loss:
            found["ce"] = task.ce(logits, targets.gold)
        if targets.logits is None:
            return
        if "kl" in self.options.loss:
            found["kl"] = task.kl(logits, targets.logits, self.options.temperature)
        for loss, measure in (("logit", task.logit), ("hard", task.hard),
                              ("log-odds", task.log_odds)):  # fmt: skip
            if loss in self.options.loss:
                found[loss] = measure(logits, targets.logits)

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
        averaged = [m.mean(dim=1) for m in output.attentions] if maps else []
        return Outputs(states, averaged, inputs.present)

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
