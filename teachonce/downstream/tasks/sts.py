"""The task sts: scores two texts by the cosine similarity of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DataCollatorWithPadding
from transformers.modeling_outputs import SequenceClassifierOutput

from teachonce.checkpoints.embedders import Embedder
from teachonce.checkpoints.loading import load_with_tokenizer
from teachonce.checkpoints.names import ResolvedModel, resolve_vectors
from teachonce.checkpoints.sentence_settings import has_modules
from teachonce.downstream.tasks.pair import Pair, PairScore, check_scores
from teachonce.downstream.tasks.task_interface import encode_cut
from teachonce.store import TaskSpec
from teachonce.support.arrays import Array, Floats


class BiEncoder(nn.Module):
    """Embeds two texts separately by one encoder, and returns their cosine similarity.

    The embedding of a text is the mean of its tokens' last hidden states, special ones included
    (Reimers & Gurevych 2019, https://arxiv.org/abs/1908.10084, section 3).
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = encoder.config

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return the cosines [B] of pairs whose tokens are [B,2,S]; the loss is the mean squared
        error to `labels` [B]."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        flat = {name: tokens.flatten(0, 1) for name, tokens in inputs.items()}
        # Under bf16 autocast, too: bfloat16 has too few bits for sums over many tokens.
        states = self.encoder(**flat).last_hidden_state.float()
        present = flat["attention_mask"].unsqueeze(-1).float()
        means = (states * present).sum(1) / present.sum(1).clamp(min=1)
        cosine = functional.cosine_similarity(*means.unflatten(0, (-1, 2)).unbind(1))
        loss = None if labels is None else functional.mse_loss(cosine, labels)
        return SequenceClassifierOutput(loss=loss, logits=cosine)

    def num_parameters(self, **options: Any) -> int:
        """Return the number of parameters: the encoder has all of them."""
        return int(self.encoder.num_parameters(**options))

    def save_pretrained(self, folder: Path) -> None:
        self.encoder.save_pretrained(folder)


class SentenceSimilarity(PairScore):
    """Scores tables of `text_a`, `text_b` and `score` with a bi-encoder. The best epoch has the
    highest Spearman's rho.

    The cosine is trained by the squared error to the score, scaled to 0 for the lowest and 1 for
    the highest training score. There is no head, so that every encoder can be scored without
    training. A folder of sentence-transformers is then scored with its own modules; fine-tuning
    loads only its transformer.

    columns: names of columns by role (`text_a`, `score`, ...), if they differ from the role.
    """

    name = "sts"
    model_class: Any = None  # the encoder alone is loaded, and the labels of a head are not read
    measures = {"Spearman": "spearman", "Pearson": "pearson"}
    primary = "spearman"

    def prepare(self, splits: Mapping[str, Sequence[Pair]]) -> None:
        super().prepare(splits)
        scores = np.array([pair.score for pair in splits["train"]])
        self.shift, self.scale = float(scores.min()), float(np.ptp(scores))

    def adopt(self, spec: TaskSpec, splits: Mapping[str, Sequence[Pair]]) -> None:
        """Check the scores; the model's own head is not used. Raises UserError if all scores of a
        split are equal."""
        check_scores(splits)

    def load_fresh(self, model: ResolvedModel) -> tuple[Any, Any]:
        tokenizer, encoder = load_with_tokenizer(model)
        return tokenizer, BiEncoder(encoder)

    def finish(self, network: Any) -> str:
        return ""  # there is no head: a cosine has its own scale

    def load_own(self, model: ResolvedModel) -> tuple[Any, Any, TaskSpec]:
        return *self.load_fresh(model), TaskSpec("classification", ("cosine",))

    def predict_own(
        self, model: str, splits: Mapping[str, Sequence[Pair]], max_length: int | None
    ) -> Mapping[str, Any] | None:
        """Compare the vectors of a sentence-transformers folder, with its modules and default
        prompt.

        Returns None if the folder has no modules. Raises UserError if they cannot be loaded, and if
        all scores of a split are equal.
        """
        if not has_modules(resolve_vectors(model)):
            return None
        check_scores(splits)
        embedder = Embedder(model, max_length)
        scores = {name: _similarities(embedder, pairs) for name, pairs in splits.items()}
        if note := embedder.cuts.note():
            self.note(note)
        return scores

    def encode(self, tokenizer: Any, examples: Sequence[Pair], limit: int) -> list[dict[str, Any]]:
        """Make rows with the inputs of both texts, each truncated to `limit` tokens."""
        encoded = encode_cut(self, tokenizer, [self.texts(examples)], limit)
        labels = self.labels(examples)
        return [
            {
                **{name: values[2 * row : 2 * row + 2] for name, values in encoded.items()},
                "labels": label,
            }
            for row, label in enumerate(labels)
        ]

    def collator(self, tokenizer: Any) -> Any:
        padded = DataCollatorWithPadding(tokenizer)

        def batch(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
            inputs = [name for name in rows[0] if name != "labels"]
            texts = [{name: row[name][side] for name in inputs} for row in rows for side in (0, 1)]
            pairs = {name: tokens.unflatten(0, (-1, 2)) for name, tokens in padded(texts).items()}
            # `_predict` of fine_tune.py leaves the labels out.
            labels = [row["labels"] for row in rows if "labels" in row]
            return {**pairs, "labels": torch.tensor(labels)} if labels else pairs

        return batch


def _similarities(embedder: Embedder, pairs: Sequence[Pair]) -> Floats:
    sides = [embedder.vectors([getattr(p, side) for p in pairs]) for side in ("text_a", "text_b")]
    return cosines_of_rows(*sides)


def cosines_of_rows(one: Array, other: Array) -> Floats:
    """Return the cosines of rows, float64 [N]; 0 for a vector of zeros."""
    # A folder with similarity_fn_name "dot" gives vectors of any length.
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.asarray((one * other).sum(axis=1) / np.maximum(lengths, 1e-12), np.float64)
