"""Train your own module as a student, with your own loss:
python examples/own_student.py STORE OUT

STORE holds hidden states and logits. The student has convolutions instead of attention.
"""

import sys

from teachonce import StudentBatches, losses
import torch
from torch import Tensor, nn
from torch.nn import functional


class Convolutions(nn.Module):
    """A student with the interface of `teachonce.OwnStudent`: width, layers, states and logits."""

    def __init__(self, pieces: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.width, self.layers = width, layers
        self.embeddings = nn.Embedding(pieces, width)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, width, 5, padding=2) for _ in range(layers)
        )

    def states(self, ids: Tensor, present: Tensor) -> list[Tensor]:
        """Return the states [B,S,D] of the embeddings and of each layer."""
        states = [self.embeddings(ids)]
        for convolution in self.convolutions:
            # Padding is set to 0, or a convolution would mix it into its neighbours.
            inputs = (states[-1] * present[:, :, None]).transpose(1, 2)
            states.append(states[-1] + functional.gelu(convolution(inputs).transpose(1, 2)))
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states over the vocabulary. Output and input embeddings are tied."""
        return states @ self.embeddings.weight.T


def smooth_l1(student: Tensor, teacher: Tensor) -> Tensor:
    """Compare projected student states and normalised teacher states [G,D], robust to outliers."""
    return functional.smooth_l1_loss(student, teacher, beta=0.5)


def train(store: str, out: str, vocab: str = "5k", epochs: int = 3) -> list[float]:
    # The losses decide what is read, aligned and projected. Weights are applied below, so 1 here.
    weights = {"mlm": 1.0, "hidden": 1.0, "kl": 1.0}
    batches = StudentBatches(store, vocab, loss=weights, align="span", batch_tokens=4096)
    student = Convolutions(len(batches.tokenizer))
    distiller = batches.distiller(student)
    optimizer, history = torch.optim.AdamW(distiller.parameters(), lr=4e-3), []
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for batch in batches:
            sides = distiller.sides(batch)  # runs the student
            loss = losses.logits.mlm(*sides.of("mlm")[0])
            loss = loss + 0.5 * losses.logits.kl(*sides.of("kl")[0])
            for pair in sides.of("hidden"):  # a pair for each hidden state of the store
                loss = loss + 30 * smooth_l1(*pair)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
        print(f"epoch {epoch}: loss {history[-1]:.3f}")
    torch.save(student.state_dict(), out)
    return history


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    train(sys.argv[1], sys.argv[2])
