"""Train a student in a plain PyTorch loop: python examples/plain_loop.py STORE OUT"""

import sys

from teachonce import StudentBatches  # before torch, so that its idle threads free the cores
import torch
from transformers import BertConfig, BertForMaskedLM


def train(store: str, out: str, vocab: str = "5k", width: int = 128, epochs: int = 3) -> float:
    losses = {"mlm": 1.0, "hidden": 30.0}
    batches = StudentBatches(store, vocab, loss=losses, batch_tokens=4096, held_out=0.05)
    config = BertConfig(
        vocab_size=len(batches.tokenizer), hidden_size=width, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=4 * width, hidden_dropout_prob=0.0,
    )  # fmt: skip
    student = BertForMaskedLM(config)
    distiller = batches.distiller(student)  # the student and projections to the teacher's width
    optimizer = torch.optim.AdamW(distiller.parameters(), lr=0.5 / width)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for batch in batches:
            loss = distiller.weighted(distiller(batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(distiller.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        valid = batches.validate(distiller)["valid_loss"]
        print(f"epoch {epoch}: valid_loss {valid:.3f}")
    student.save_pretrained(out)
    batches.tokenizer.save_pretrained(out)
    return valid


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    train(sys.argv[1], sys.argv[2])
