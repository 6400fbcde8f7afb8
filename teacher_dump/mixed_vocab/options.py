"""Options of stage I of mixed-vocabulary training."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from teachonce.checkpoints.checkpoint_tokenizer import save_from_hub
from teachonce.support.errors import UserError
from teachonce.support.option_types import PathOrUrl
from teachonce.support.options import (
    INNER_SHARE,
    SHARE,
    Range,
    at_least,
    default_of,
    flag_of,
    names_options,
    option,
    parse_values,
    same_option,
)
from teachonce.teacher_dump.job.contradictions import check_head
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.training.optimizer import OPTIMIZERS, check_optimizer

ONLY_DUMP = (
    *("student_column", "label_column", "head", "pooling", "prompt", "views", "mask_prob"),
    *("bos", "gguf", "messages", "learn", "mask_words", "stride", "grow_from", "gone", "plan"),
    *("shard", "ray", "ray_gpus"),
)
"""Options of a dump that stage I does not accept."""
# Options that the first stores lack. The identity omits an option that has its default value.
LATER = ("warmup", "accumulate", "tie")
RATE = Range("a rate between 0 and 1", low=0, high=1, open_low=True, open_high=True)


@dataclass(frozen=True)
class StageOneDump(DumpOptions):
    """Holds the options of the dump that ends stage I; some defaults differ from `DumpOptions`.

    By default the store holds no output of the teacher. Raises UserError like `DumpOptions`, and
    for an option in ONLY_DUMP.
    """

    out: PathOrUrl = same_option(
        DumpOptions, "out", MISSING, help="Write the store to NAME.zarr or NAME.h5."
    )
    text_column: str | None = same_option(
        DumpOptions,
        "text_column",
        None,
        help="Read the text from this column of tables and hf: sources; data.text names a nested"
        " column.",
    )
    seed: int = same_option(
        DumpOptions,
        "seed",
        0,
        help="Seed segmentation, masks, order, dropout and initial embeddings with this number.",
    )
    max_length: int | None = same_option(
        DumpOptions,
        "max_length",
        128,
        help="Cut the text into sequences of at most N tokens, special tokens included.",
        default_text="",
    )
    # The size of a training step, which must not depend on the device.
    batch_tokens: int = same_option(DumpOptions, "batch_tokens", 8192, default_text="")
    logits: str | None = same_option(
        DumpOptions,
        "logits",
        "none",
        help="Store these logits of the teacher, as in teacher-dump.",
        default_text="",
    )
    hidden: str = same_option(
        DumpOptions, "hidden", "none", help="Store these hidden states, as in teacher-dump."
    )
    attention: str = same_option(
        DumpOptions, "attention", "none", help="Store these attention maps, as in teacher-dump."
    )
    weights: bool = same_option(
        DumpOptions, "weights", False, help="Store the teacher's weights, as in teacher-dump."
    )
    text_only: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.out, Path):
            raise UserError(
                f"{self.out}: mixed-vocab writes its checkpoints next to the store; give a local"
                " path as --out, and copy the store with `feature-store convert`"
            )
        check_head(self, "mlm")
        for name in sorted(ONLY_DUMP):
            if getattr(self, name) != default_of(DumpOptions, name):
                raise UserError(
                    f"{flag_of(name)} {getattr(self, name)}: mixed-vocab has no such option; leave"
                    " it out"
                )

    def resolved(self) -> Self:
        options = super().resolved()
        # On a CPU only decoders run in bf16 (`precision.load_fastest`), and this teacher is none.
        return replace(options, precision="fp32") if options.precision == "auto" else options


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
"""Published settings of stage I, by the name of `student-train`'s recipe for stage II."""


def _check_vocabulary(word: str) -> None:
    from teachonce.training.wordpiece import vocabulary_size

    if vocabulary_size(word) is None and not Path(word).is_dir():
        file = "is a file; " if Path(word).is_file() else ""
        raise UserError(
            f"--vocab {word}: {file}expected a size (5k, 8000) or a folder with a tokenizer"
            f"{'' if file else save_from_hub(word)}"
        )


@names_options("teacher-dump mixed-vocab")
@dataclass(frozen=True)
class MixedVocabOptions:
    """Holds the options of the training of the student's embeddings.

    `dump` names the teacher, the corpus, and features to store. Raises UserError if an option does
    not accept its value.
    """

    dump: DumpOptions  # a StageOneDump, whose inherited fields mypy would read wrongly; see `Given`
    vocab: str = option(
        "5k",
        "Train embeddings of this student vocabulary: 5k | N (a WordPiece of N pieces, trained on"
        " the corpus) | a tokenizer folder.",
        words=("5k", "10k", "20k", "30k"),
        paths=True,
        check=_check_vocabulary,
    )
    width: int = option(
        0,
        "Train embeddings of this hidden size, which the student must have, too.",
        required=True,
        within=at_least(1),
    )
    steps: int = option(2000, "Train for N optimizer steps.", within=at_least(1))
    lr: float = option(
        1e-4, "Train at this peak learning rate, which decays linearly to 0.", within=RATE
    )
    warmup: float = option(0.05, "Warm up linearly over this share of the steps.", within=SHARE)
    accumulate: int = option(
        1, "Accumulate the gradients of N batches per optimizer step.", within=at_least(1)
    )
    student_share: float = option(
        0.5, "Segment this share of the words by the student's vocabulary.", within=INNER_SHARE
    )
    mask_prob: float = option(
        0.15,
        "Mask this share of the pieces: at most 20 in a sequence, and at most 10 of the teacher's.",
        within=INNER_SHARE,
    )
    optimizer: str = option(
        "adamw",
        "Train with adamw; lamb (You et al. 2020), for large batches, which needs `pip install"
        " 'teachonce[lamb]'`; or adadelta (Zeiler 2012).",
        choices=OPTIMIZERS,
        check=check_optimizer,
    )
    tie: bool = option(
        False,
        "Use the student's projected embedding in the teacher, too, for pieces that both"
        " vocabularies have.",
    )
    checkpoint_every: int = option(500, "Save a checkpoint every N steps.", within=at_least(1))

    def __post_init__(self) -> None:
        parse_values(self)
        if not isinstance(self.dump, StageOneDump):
            raise UserError("dump: expected the options of a StageOneDump")
        if self.dump.precision == "fp16":
            raise UserError("--precision fp16: gradients underflow; train with bf16 or fp32")

    def arguments(self) -> dict[str, Any]:
        """Return the options that change the embeddings, as values of JSON."""
        values = {key: value for key, value in asdict(self).items() if key != "dump"}
        # A training that continues from a checkpoint has the same losses as one without a stop.
        del values["checkpoint_every"]
        for key in LATER:
            if values[key] == default_of(MixedVocabOptions, key):
                del values[key]
        shared = {key: getattr(self.dump, key) for key in ("batch_tokens", "seed", "precision")}
        return {**values, **shared}

    def checkpoint(self) -> Path:
        """Return the path of the checkpoint, next to the store."""
        out = Path(self.dump.out)
        return out.with_name(f"{out.name}.mixed-vocab")


def check_width(width: int, teacher_width: int, teacher: str) -> None:
    """Raise UserError if the student's embeddings are larger than the teacher's."""
    if width > teacher_width:
        raise UserError(
            f"--width {width}: the student's embeddings are projected up to the size of the"
            f" teacher's, which is {teacher_width} in {teacher}; choose 1 to {teacher_width}"
        )
