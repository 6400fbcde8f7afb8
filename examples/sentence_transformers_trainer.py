"""Train a student of text vectors with sentence-transformers:
python examples/sentence_transformers_trainer.py STORE MODEL OUT

STORE holds vectors of texts (teacher-dump --head embedding). MODEL is the encoder to train: a
folder or a model id of transformers.
"""

import sys

from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MSELoss
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from torch import nn

from teachonce import open_store


def train(store: str, model: str, out: str, epochs: int = 1, batch: int = 32) -> None:
    teacher = open_store(store)
    rows = teacher.to_datasets(columns=["text", "embedding"])
    rows = rows.rename_column("embedding", "label")  # the trainer's name for the target
    transformer = Transformer(model)
    width, target = transformer.get_embedding_dimension(), teacher.features.embedding
    assert target is not None, "the store holds no vectors of texts"
    dense = Dense(width, target.width, activation_function=nn.Identity())
    # MSELoss compares the vectors themselves, so the student normalises if the teacher did.
    normalize = [Normalize()] if target.normalised else []
    student = SentenceTransformer(modules=[transformer, Pooling(width, "mean"), dense, *normalize])
    arguments = SentenceTransformerTrainingArguments(
        out, num_train_epochs=epochs, per_device_train_batch_size=batch, learning_rate=1e-3,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(student, arguments, rows, loss=MSELoss(student))
    trainer.train()
    student.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    train(sys.argv[1], sys.argv[2], sys.argv[3])
