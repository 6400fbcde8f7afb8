"""Options of stage I of mixed-vocabulary training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError
from teachonce.support.options import (
    INNER_SHARE,
    SHARE,
    Range,
    at_least,
    check_values,
    default_of,
    flag_of,
    option,
    same_option,
)
from teachonce.teacher_dump.job.options import DumpOptions, check_head
from teachonce.training.optimizer import OPTIMIZERS, check_optimizer

DUMP_ALONE = (
    *("student_column", "label_column", "head", "pooling", "prompt", "views", "mask_prob"),
    *("mask_words", "stride", "grow_from", "gone", "plan", "shard", "ray", "ray_gpus"),
)
"""Options of a dump that stage I does not take."""
LATER = ("warmup", "accumulate", "tie")  # newer than the first stores, which lack them
RATE = Range("a rate between 0 and 1", low=0, high=1, open_low=True, open_high=True)


@dataclass(frozen=True)
class StageOneDump(DumpOptions):
    """Options of the dump that stage I ends in: those of a dump, most of them with other defaults.

    The store keeps nothing of the teacher but what is asked for. Raises UserError as `DumpOptions`
    does, and for an option of a dump alone.
    """

    seed: int = same_option(
        DumpOptions, "seed", 0, help="Seed of words, masks, order, dropout and first embeddings."
    )
    max_length: int | None = same_option(
        DumpOptions,
        "max_length",
        128,
        help="Longest sequence in tokens, special ones included.",
        default_text="",
    )
    logits: str | None = same_option(
        DumpOptions,
        "logits",
        "none",
        help="What the store keeps of the teacher, as teacher-dump does.",
        default_text="",
    )
    hidden: str = same_option(DumpOptions, "hidden", "none")
    attention: str = same_option(DumpOptions, "attention", "none")
    weights: bool = same_option(
        DumpOptions, "weights", False, help="Keep the encoder's weights (fp16), too."
    )
    text_only: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.out, Path):
            raise UserError(
                f"{self.out}: mixed-vocab keeps its training in a folder beside the store; give"
                " --out a local path, and copy the store with `feature-store convert`"
            )
        check_head(self, "mlm")
        for name in sorted(DUMP_ALONE):
            if getattr(self, name) != default_of(DumpOptions, name):
                raise UserError(
                    f"{flag_of(name)} {getattr(self, name)}: mixed-vocab takes no such option;"
                    " leave it out"
                )


# Zhao et al. 2021, section 4: 500K steps of 2,048 sequences of 128 tokens, here 32 batches of 8,192
# tokens; LAMB at 1.25e-3 with 10 % warm-up; half of the words by the student's 5K pieces. The
# widths are 256, and 96 and 192 for SNIPS: --width. The decay after warm-up is BERT's.
_PUBLISHED: dict[str, Any] = {
    "vocab": "5k",
    "steps": 500_000,
    "optimizer": "lamb",
    "lr": 1.25e-3,
    "warmup": 0.1,
    "batch_tokens": 8192,
    "accumulate": 32,
    "max_length": 128,
    "student_share": 0.5,
    "mask_prob": 0.15,  # at most 20 of 128
}
RECIPES: dict[str, dict[str, Any]] = {
    "zhao-mixed": {**_PUBLISHED, "tie": False},
    "zhao-tied": {**_PUBLISHED, "tie": True},  # section 6, alternative vocabulary pruning
}
"""Published settings of stage I, by the name of the recipe of `student-train` that goes on."""


def _check_vocabulary(word: str) -> None:
    from teachonce.training.wordpiece import vocabulary_size

    if vocabulary_size(word) is None and not Path(word).is_dir():
        file = "is a file; " if Path(word).is_file() else ""
        raise UserError(
            f"--vocab {word}: {file}expected a size (5k, 8000) or a folder with a tokenizer"
        )


@dataclass(frozen=True)
class MixedVocabOptions:
    """Options of the training of the student's embeddings.

    `dump` says which teacher and corpus to train on, and what else of the teacher the store keeps.
    Raises UserError for a value that an option does not take.
    """

    dump: StageOneDump
    vocab: str = option(
        "5k",
        "The student's vocabulary: 5k | N (WordPiece of the corpus) | a tokenizer folder.",
        words=("5k", "10k", "20k", "30k"),
        paths=True,
        check=_check_vocabulary,
    )
    width: int = option(
        0, "Width of the student and its word embeddings.", required=True, within=at_least(1)
    )
    steps: int = option(2000, "Optimizer steps.", within=at_least(1))
    lr: float = option(1e-4, "Peak learning rate, from which it falls to 0.", within=RATE)
    warmup: float = option(0.05, "Share of the steps.", within=SHARE)
    accumulate: int = option(1, "Batches of one optimizer step.", within=at_least(1))
    student_share: float = option(
        0.5, "Share of words segmented by the student's vocabulary.", within=INNER_SHARE
    )
    mask_prob: float = option(
        0.15,
        "Share of pieces masked: at most 20 of a sequence, at most 10 of these the teacher's.",
        within=INNER_SHARE,
    )
    optimizer: str = option(
        "adamw",
        "lamb (You et al. 2020): for large batches; needs `pip install pytorch-optimizer`.",
        choices=OPTIMIZERS,
        check=check_optimizer,
    )
    tie: bool = option(
        False, "Pieces that both vocabularies have share an embedding: the student's, projected."
    )
    checkpoint_every: int = option(500, "Steps between checkpoints.", within=at_least(1))

    def __post_init__(self) -> None:
        check_values(self)
        if not isinstance(self.dump, StageOneDump):
            raise UserError("dump: expected the options of a StageOneDump")
        if self.dump.precision == "fp16":
            raise UserError("--precision fp16: gradients vanish in it; train with bf16 or fp32")

    def arguments(self) -> dict[str, Any]:
        """Return as JSON what decides the embeddings, in addition to teacher and text."""
        own = {key: value for key, value in asdict(self).items() if key != "dump"}
        del own["checkpoint_every"]
        for key in LATER:
            if own[key] == default_of(MixedVocabOptions, key):
                del own[key]
        shared = {key: getattr(self.dump, key) for key in ("batch_tokens", "seed", "precision")}
        return {**own, **shared}

    def checkpoint(self) -> Path:
        """Return the path, next to the store, of the checkpoint of a stopped training."""
        out = Path(self.dump.out)
        return out.with_name(f"{out.name}.mixed-vocab")
