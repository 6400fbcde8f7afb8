"""Train a student that is a module of your own, by a loss of your own:
python examples/own_student.py STORE OUT

STORE holds hidden states and logits. The student has convolutions in place of attention.
"""

import sys

from teachonce import StudentBatches, losses
import torch
from torch import Tensor, nn
from torch.nn import functional


class Convolutions(nn.Module):
    """Has all that a `teachonce.OwnStudent` needs: width, layers, states; for logits `logits`."""

    def __init__(self, pieces: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.width, self.layers = width, layers
        self.embeddings = nn.Embedding(pieces, width)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, width, 5, padding=2) for _ in range(layers)
        )

    def states(self, ids: Tensor, present: Tensor) -> list[Tensor]:
        found = [self.embeddings(ids)]
        for convolution in self.convolutions:
            seen = (found[-1] * present[:, :, None]).transpose(1, 2)
            found.append(found[-1] + functional.gelu(convolution(seen).transpose(1, 2)))
        return found

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.embeddings.weight.T


def nearness(student: Tensor, teacher: Tensor) -> Tensor:
    """A loss of your own: of projected and of normalised states [G,D], mild with outliers."""
    return functional.smooth_l1_loss(student, teacher, beta=0.5)


def train(store: str, out: str, vocab: str = "5k", epochs: int = 3) -> list[float]:
    # The weights say what is read of the store, aligned and projected; 1 here, as we weigh below.
    asked = {"mlm": 1.0, "hidden": 1.0, "kl": 1.0}
    batches = StudentBatches(store, vocab, loss=asked, align="span", batch_tokens=4096)
    student = Convolutions(len(batches.tokenizer))
    distiller = batches.distiller(student)
    optimizer, found = torch.optim.AdamW(distiller.parameters(), lr=4e-3), []
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for batch in batches:
            sides = distiller.sides(batch)  # runs the student
            loss = losses.logits.mlm(*sides.of("mlm")[0])
            loss = loss + 0.5 * losses.logits.kl(*sides.of("kl")[0])
            for pair in sides.of("hidden"):  # one for each hidden state of the store
                loss = loss + 30 * nearness(*pair)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        print(f"epoch {epoch}: loss {found[-1]:.3f}")
    torch.save(student.state_dict(), out)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    train(sys.argv[1], sys.argv[2])
