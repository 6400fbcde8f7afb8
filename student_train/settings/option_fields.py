"""The options of a training: each with its type, default, values, help and scope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from teachonce.store.containers.cache_word import PREFIX
from teachonce.student_train.losses import registry
from teachonce.student_train.settings import alignments
from teachonce.student_train.settings.terms import (
    DEFAULT_LOSS,
    SCORE_LOSS,
    STATES_LOSS,
    VECTOR_LOSS,
    check_alignments,
    check_losses,
    parse_losses,
)
from teachonce.student_train.settings.words import (
    CACHES,
    PARTS,
    STARTS,
    STUDENTS,
    VOCABULARIES,
    check_cache_word,
    check_parts,
    check_prune_to,
    check_start,
    check_student,
    check_vocabulary_word,
    check_widths,
    parse_parts,
    parse_widths,
)
from teachonce.support.console import DEVICES, check_device
from teachonce.support.options import NOT_NEGATIVE, POSITIVE, SHARE, Range, at_least, option
from teachonce.training.optimizer import OPTIMIZERS
from teachonce.training.rare_masks import MASK_WORDS
from teachonce.training.schedule import SCHEDULES
from teachonce.training.trackers import TRACKERS, check_known, parse_trackers

SEEDS = 2**32

STAGE = "stage"  # may differ from one stage to the next
LENGTH = "length"  # says how long a stage is; one that is given removes the other
BATCH = "batch"  # says how large a batch is; one that is given removes the other
COMMAND = "command"  # has no place in a recipe
ONCE = "once"  # has one value in a sweep
MACHINE = "machine"  # does not shape the student
NETWORK = "network"  # goes to the config of the student's kind, under its own name
BILSTM = "bilstm"  # only that kind of student has it
START = "start"  # only the making of a student can refuse it


def _told(loss: Mapping[str, float]) -> str:
    return " ".join(f"{name}={weight:g}" for name, weight in loss.items())


@dataclass(frozen=True)
class OptionFields:
    """Declares the options of a training; `TrainOptions` checks them and says what follows."""

    store: str = option(
        help="A sealed store: .zarr, .h5 or an object-store URL. Repeated: the student learns from"
        " all of them, each aligned through its own tokens.",
        required=True,
        scope={COMMAND, ONCE},
    )
    others: tuple[str, ...] = ()
    combine: str = option(
        "losses",
        "What several stores teach: losses: the mean of their losses; outputs: as one teacher, the"
        " geometric mean of their distributions and the mean of their states (stores of the same"
        " text and vocabulary).",
        choices=("losses", "outputs"),
    )
    vocab: str = option(
        "5k",
        "5k | 10k | 20k | 30k | N (WordPiece of the store's text) | a tokenizer folder | teacher |"
        " pruned:N (the teacher's most frequent pieces; WordPiece, Unigram or BPE) | words,"
        " words:N (lower-cased words between blanks, all or the most frequent) |"
        " mixed-vocab (the store's).",
        scope={START},
        words=VOCABULARIES,
        paths=True,
        check=check_vocabulary_word,
    )
    out: Path | None = option(
        None,
        "Folder of the student.",
        default_text="beside the store, named after the settings",
        scope={COMMAND, ONCE, MACHINE},
    )
    student: str = option(
        "tiny",
        "tiny (264x3x12x792) or HxLxA[xF]: width x layers x heads of a BERT, and units of its"
        " feed-forward parts, 4 H by default; of a ModernBERT after modernbert:, 2 H by default;"
        " teacher:L: as wide as the teacher, and a ModernBERT if that is one;"
        " a BiLSTM is bilstm:E,H: width of the embeddings and of its LSTM in each direction;"
        " static:D: vectors of word pieces, D wide, without layers, for vectors of texts alone.",
        scope={START},
        words=STUDENTS,
        check=check_student,
    )
    align: str = option(
        "span",
        f"Runs of tokens that are compared, teacher's and student's; {alignments.help_text()}."
        " Of single losses: kl=match,hidden=reduce.",
        words=tuple(alignments.ALIGNMENTS),
        check=check_alignments,
    )
    pool: str | None = option(
        None,
        "How a run's outputs become one.",
        choices=("sum", "mean"),
        default_text=alignments.pool_help(),
    )
    loss: Mapping[str, float] = option(
        factory=lambda: dict(DEFAULT_LOSS),
        help=f"NAME=WEIGHT, repeated or a comma list: {registry.help_text()}.",
        default_text=f"{_told(DEFAULT_LOSS)};"
        " kl=1 for hidden where the store has no hidden states; of a task kl=1, and ce=1 where"
        f" there are gold labels; of vectors of texts {_told(VECTOR_LOSS)}, and"
        f" {_told(STATES_LOSS)} where the store has hidden states as well; of scores"
        f" {_told(SCORE_LOSS)}",
        repeated=True,
        words=tuple(loss.name for loss in registry.LOSSES),
        read=parse_losses,
        check=check_losses,
        scope={STAGE},
    )
    temperature: float = option(2.0, "Of kl and kl-shared.", within=POSITIVE, scope={STAGE})
    targets: str = option(
        "all",
        "Tokens whose teacher logits are learnt: all, or those masked for the student, or the"
        " others.",
        choices=("all", "masked", "unmasked"),
        scope={STAGE},
    )
    projection: str = option(
        "trainable",
        "From the student's width to the teacher's; student: a part of a BiLSTM, through a GELU,"
        " and its heads stand on it.",
        choices=("trainable", "frozen", "student"),
    )
    outputs: str = option(
        "shared",
        "Of a task's student: separate: logit and log-odds teach an output of their own beside the"
        " classes', where ce, kl or hard teach these. It serves training alone.",
        choices=("shared", "separate"),
    )
    matryoshka: tuple[int, ...] = option(
        (),
        "Widths, a comma list: the first so many numbers of a text's vector are a vector, too"
        " (Kusupati et al. 2022); similarity and similarity-kl teach them.",
        read=parse_widths,
        check=check_widths,
    )
    init: str = option(
        "auto",
        "svd | svd:STORE (of the teacher that another store keeps) | teacher | layers:I,J,...[@DIR]"
        " (of the model in a folder) | mixed-vocab | random | auto: layers, spread evenly (teacher"
        " for a task or vectors of texts), where they can be cut, else svd.",
        scope={START},
        words=STARTS,
        check=check_start,
    )
    dropout: float = option(
        0.0,  # a small student underfits: dropout would only slow it down
        "Share of hidden states and attention that are dropped in training; of a BiLSTM, of"
        " embeddings, layers, and the state between two tokens.",
        within=SHARE,
        scope={NETWORK},
    )
    recurrent_dropout: float | None = option(
        None,
        "Of the state between two tokens of a BiLSTM.",
        within=SHARE,
        default_text="as --dropout",
        scope={NETWORK, BILSTM},
    )
    classifier_pooling: str | None = option(
        None,
        "What a BiLSTM classifies a text by: the largest value of each channel, or the last state"
        " of either direction.",
        choices=("max", "last"),
        default_text="max",
        scope={NETWORK, BILSTM},
    )
    word_vectors: str | None = option(
        None,
        "File of word vectors (GloVe, fastText or word2vec as text), as wide as the embeddings,"
        " for the pieces that are words there; beside --init random the others begin at random in"
        " -0.1 to 0.1.",
        scope={START},
    )
    view: int | None = option(
        None,
        "View of the store to learn from.",
        default_text="the masked views in turn, else view 0",
        scope={STAGE},
    )
    steps: int | None = option(
        None,
        "Optimiser steps; 0 saves a student with random weights (--init random).",
        within=Range("0 or more", low=0),
        scope={STAGE, LENGTH},
    )
    epochs: float | None = option(
        None,
        "Passes over the (first) store, instead of --steps.",
        within=POSITIVE,
        default_text="3",
        scope={STAGE, LENGTH},
    )
    batch_tokens: int = option(
        1024,
        "Teacher tokens of a batch, padding included.",
        within=at_least(1),
        scope={STAGE, BATCH},
    )
    batch_texts: int | None = option(
        None,
        "Texts of a batch, instead of --batch-tokens.",
        within=at_least(1),
        scope={STAGE, BATCH},
    )
    accumulate: int = option(1, "Batches of one optimiser step.", within=at_least(1))
    optimizer: str = option(
        "adamw",
        "lamb (You et al. 2020): for large batches; needs `pip install pytorch-optimizer`."
        " adadelta (Zeiler 2012): has no rate of its own.",
        choices=OPTIMIZERS,
    )
    lr: float | None = option(
        None,
        "Peak learning rate.",
        within=POSITIVE,
        default_text="as found with adamw: 0.5 / width, at most 0.004; of a BiLSTM 0.003; of"
        " adadelta 1",
        scope={STAGE},
    )
    lr_end: float = option(
        0.0,
        "Learning rate at the end of a linear or cosine schedule.",
        within=NOT_NEGATIVE,
        scope={STAGE},
    )
    warmup: float = option(0.05, "Share of the steps.", within=SHARE, scope={STAGE})
    schedule: str = option(
        "linear",
        "After warm-up: linear or cosine down to --lr-end, or halved on a validation plateau.",
        choices=SCHEDULES,
        scope={STAGE},
    )
    weight_decay: float = option(0.01, "Of matrices.", within=NOT_NEGATIVE)
    clip: float = option(1.0, "Gradient norm.", within=POSITIVE)
    mask_prob: float = option(
        0.15, "Share of tokens masked anew each time (view 0).", within=SHARE, scope={STAGE}
    )
    mask_words: str = option(
        "uniform",
        "rare: a piece is masked the more often the rarer it is (view 0).",
        choices=MASK_WORDS,
        scope={STAGE},
    )
    max_masks: int | None = option(
        None,
        "Masked tokens of a sequence at most (view 0).",
        within=at_least(1),
        default_text="as many as are drawn",
        scope={STAGE},
    )
    max_length: int | None = option(
        None,
        "Longest student input.",
        within=Range("at least 3: two special tokens and one of text", low=3),
        default_text="twice the store's, at most 512",
        scope={START},
    )
    min_length: int = option(
        0,
        "Shorter sequences, in teacher tokens, are not learnt from.",
        within=Range("0 or more", low=0),
    )
    data: str = option(
        "all",
        "Sequences to learn from; labelled: those with a gold label or tag; balanced: each step"
        " takes a batch of these for the losses of gold, and one as large of the others for the"
        " other losses.",
        choices=("all", "labelled", "unlabelled", "balanced"),
        scope={STAGE},
    )
    freeze: tuple[str, ...] = option(
        (),
        "Parts that keep their weights, a comma list: embeddings (or of them words, positions,"
        " types), layers, layers.N, head, projection.",
        words=PARTS,
        read=parse_parts,
        check=check_parts,
        scope={STAGE},
    )
    prune_to: str | None = option(
        None,
        "Cut the finished student to the pieces that it has in common with this vocabulary, given"
        " as --vocab is.",
        scope={START},
        words=VOCABULARIES,
        paths=True,
        check=check_prune_to,
    )
    best: bool = option(
        False, "Keep the weights with the best validation loss, not the last.", scope={STAGE}
    )
    stages: tuple[Mapping[str, Any], ...] = ()
    needs: Mapping[str, Any] = field(default_factory=dict)  # what a recipe needs of the stores
    held_out: float = option(
        0.02, "Share of the store kept for validation; the same for every student.", within=SHARE
    )
    eval_every: int | Literal["epoch"] | None = option(
        None,
        "Steps between validations, or `epoch`: one after each pass over the store.",
        within=at_least(1),
        default_text="a tenth of all",
        scope={STAGE},
    )
    patience: int | None = option(
        None,
        "Validations without a better one after which a training, or a stage, ends early.",
        within=at_least(1),
        default_text="it takes all steps",
        scope={STAGE},
    )
    checkpoint_every: int | None = option(
        None,
        "Steps between checkpoints.",
        within=at_least(1),
        default_text="as --eval-every",
        scope={MACHINE},
    )
    seed: int = option(
        0,
        "Of weights, order, masks and dropout.",
        within=Range(f"0 to {SEEDS - 1}", low=0, high=SEEDS - 1),
    )
    device: str = option(
        "auto",
        "auto | cpu | cuda | cuda:N.",
        words=DEVICES,
        check=check_device,
        scope={COMMAND, MACHINE},
    )
    precision: str = option(
        "auto",
        "auto: bf16 where the hardware multiplies it, else fp32.",
        choices=("auto", "bf16", "fp32"),
    )
    workers: int = option(
        0,
        "Processes that prepare batches; 0: a thread. The student is the same, bit for bit.",
        within=Range("0 or more", low=0),
        scope={COMMAND, ONCE, MACHINE},
    )
    cache: str = option(
        "none",
        "none; ram: the store is read and unpacked once, and stays in memory; device: its hidden"
        " states and attention maps in the memory of --device; disk:DIR,SIZE: what is read of a"
        " store behind a URL stays in DIR on a local disk, at most SIZE of it (100GB), for all"
        " trainings that name it. The student is the same.",
        words=(*CACHES, PREFIX),
        check=check_cache_word,
        scope={COMMAND, ONCE, MACHINE},
    )
    log: tuple[str, ...] = option(
        (),
        "wandb | mlflow | trackio, or a comma list: told each step's figures, too, beside"
        " metrics.jsonl and TensorBoard's files.",
        repeated=True,
        default_text="none",
        words=tuple(TRACKERS),
        read=parse_trackers,
        check=check_known,
        scope={COMMAND, ONCE, MACHINE},
    )
    allow_partial: bool = option(
        False,
        "Learn from the published parts of an unfinished store.",
        flag="--allow-partial",
        scope={COMMAND, ONCE, MACHINE},
    )
