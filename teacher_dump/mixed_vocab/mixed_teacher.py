"""Adds the student's vocabulary to a teacher (Zhao et al. 2021, stage I)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.mixed_vocab.options import check_width
from teachonce.teacher_dump.mixed_vocab.segmentation import MixedBatch
from teachonce.teacher_dump.teacher.teacher import Teacher


class MixedTeacher(nn.Module):
    """A masked LM that reads and predicts pieces of its own vocabulary and of a student's.

    The input embedding of a student's piece with embedding e [d] is x = W e + c, with W [D, d] and
    c [D], where D is the teacher's embedding size. The teacher's head gives a state h [D]. Each
    vocabulary has its own softmax: the teacher's decoder for the teacher's pieces, and the logits
    h · (W e_i) + b_i for the student's pieces, with the same e and W. The logits omit h · c, which
    is equal for all pieces and changes no probability. So the softmax is that of h over the
    projected embeddings x_i, and equally that of Wᵀh over the embeddings e_i.

    `same` int64 [teacher's pieces] ties the pieces that both vocabularies have: the student's id
    of each teacher's piece, or -1. The projected embedding of a tied piece replaces the teacher's
    embedding in the input, and also in the output if the teacher ties input and output embeddings
    (Zhao et al. 2021, section 6).

    Raises UserError if the student is wider than the teacher's embeddings, and if the input of the
    teacher's head has another size than its embeddings.
    """

    same: torch.Tensor

    def __init__(
        self, teacher: Teacher, pieces: int, width: int, seed: int, same: Array | None = None
    ) -> None:
        super().__init__()
        assert teacher.decoder is not None  # loaded with --head mlm
        self.network: Any = teacher.model
        words: Any = self.network.get_input_embeddings()
        wide = words.weight.shape[1]
        check_width(width, wide, teacher.name)
        if teacher.decoder.weight.shape[1] != wide:
            raise UserError(
                f"{teacher.name}: the input of its masked-LM head has size"
                f" {teacher.decoder.weight.shape[1]} and its embeddings have size {wide}, so one"
                " projection cannot serve both; choose a teacher with tied embeddings, such as BERT"
            )
        # `Decoder.of` copies no float32 weight, so tied ones still share their memory.
        tied = teacher.decoder.weight.data_ptr() == words.weight.data_ptr()
        self.weight = words.weight if tied else nn.Parameter(teacher.decoder.weight.clone())
        self.bias = nn.Parameter(teacher.decoder.bias.clone())
        self.student, self.up = nn.Embedding(pieces, width), nn.Linear(width, wide)
        self.student_bias = nn.Parameter(torch.zeros(pieces))
        ids = torch.full((len(words.weight),), -1)
        if same is not None:
            ids[: len(same)] = torch.from_numpy(same.astype("int64"))
        # Not in checkpoints: it follows from the two tokenizers.
        self.register_buffer("same", ids, persistent=False)
        self._one_output = tied and same is not None
        self._start(words.weight.detach(), seed)
        if same is not None:
            self._start_tied(words.weight.detach(), seed)

    @torch.no_grad()
    def _start(self, words: torch.Tensor, seed: int) -> None:
        """Initialise embeddings at random; the projected embeddings get the mean and deviation of
        `words`."""
        chance = torch.Generator().manual_seed(seed)
        width = self.student.weight.shape[1]
        mean = words.mean(0)
        self.student.weight.normal_(0, float((words - mean).std()), generator=chance)
        # A sum of `width` products with this deviation has the deviation of the embeddings.
        self.up.weight.normal_(0, width**-0.5, generator=chance)
        self.up.bias.copy_(mean)

    @torch.no_grad()
    def _start_tied(self, words: torch.Tensor, seed: int) -> None:
        """Initialise tied pieces from the principal components of the teacher's embeddings. The
        other pieces are drawn at random with the same deviations."""
        # Zhao et al. do not describe this start: principal components approximate the teacher's
        # embeddings best.
        rows, ids = self._tied()
        shared = words[rows]
        mean = shared.mean(0)
        # `eigh` sorts eigenvalues ascending; its [D,D] matrix is smaller than the rows of an SVD.
        _, directions = torch.linalg.eigh((shared - mean).T @ (shared - mean))
        main = directions.flip(1)[:, : self.student.weight.shape[1]]
        narrow = (shared - mean) @ main
        chance = torch.Generator().manual_seed(seed)
        self.student.weight.normal_(generator=chance).mul_(narrow.std(0))
        self.student.weight[ids] = narrow
        self.up.weight.copy_(main)
        self.up.bias.copy_(mean)

    def _tied(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's and the student's ids of tied pieces."""
        rows = (self.same >= 0).nonzero().flatten()
        return rows, self.same[rows]

    def _words(self, batch: MixedBatch) -> torch.Tensor:
        """Return input embeddings [B,L,D] of pieces of both vocabularies."""
        # 0 in place of the student's ids, which the teacher's table may lack; replaced below.
        ids = batch.ids.masked_fill(batch.own, 0)
        words: torch.Tensor = self.network.get_input_embeddings()(ids)
        same = self.same[ids]
        projected = batch.own | (same >= 0)
        own = torch.where(batch.own, batch.ids, same)[projected]
        # Under autocast the projection gives bfloat16, but both tensors must have one dtype.
        return words.masked_scatter(
            projected[..., None], self.up(self.student(own)).to(words.dtype)
        )

    def _outputs(self) -> torch.Tensor:
        """Return the teacher's output embeddings [V,D]."""
        if not self._one_output:
            return self.weight
        rows, ids = self._tied()
        return self.weight.index_copy(0, rows, self.up(self.student(ids)).to(self.weight.dtype))

    def forward(self, batch: MixedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross-entropies, in nats, of masked teacher's and student's pieces."""
        words = self._words(batch)
        states = self.network(inputs_embeds=words, attention_mask=batch.present.long()).logits
        states = states.flatten(0, 1)[batch.rows]
        own = batch.labels_own
        logits = functional.linear(states[~own], self._outputs(), self.bias)
        # Down to the student's width: projecting all embeddings up would take more multiplications.
        narrow = functional.linear(states[own], self.up.weight.T)
        own_logits = functional.linear(narrow, self.student.weight, self.student_bias)
        return _summed(logits, batch.labels[~own]), _summed(own_logits, batch.labels[own])


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")
