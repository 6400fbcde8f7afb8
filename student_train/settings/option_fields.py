"""The options of a training: each with its type, default, values, help and scope."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, cast

from teachonce.store.containers.cache_option import PREFIX
from teachonce.student_train.losses import registry
from teachonce.student_train.settings import option_values as values
from teachonce.student_train.settings import terms
from teachonce.support.console import DEVICES, check_device
from teachonce.support.differences import describe_changes
from teachonce.support.option_types import (
    DefaultCount,
    DefaultNumber,
    DefaultText,
    DefaultWeights,
    FirstPathWord,
    MaybeCommaList,
    MaybePath,
    MaybePathWord,
    PathWord,
    Sizes,
    Tables,
    Weights,
    Words,
)
from teachonce.support.options import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    at_least,
    names_options,
    option,
)
from teachonce.training.optimizer import OPTIMIZERS, SCHEDULES
from teachonce.training.rare_masks import MASK_WORDS
from teachonce.training.trackers import TRACKERS, check_known, parse_trackers

SEEDS = 2**32

# Scopes: where an option is valid, or what it decides.
STAGE = "stage"  # may differ from one stage to the next
LENGTH = "length"  # the length of a stage; setting one of them removes the others
BATCH = "batch"  # the size of a batch; setting one of them removes the others
COMMAND = "command"  # only on the command line, not in a recipe
ONCE = "once"  # has one value in a sweep
MACHINE = "machine"  # does not change the trained weights, so it is not part of the folder's name
NETWORK = "network"  # a field of the student's config, under the same name
BILSTM = "bilstm"  # only for BiLSTM students
START = "start"  # can be refused only while the student is made


def loss_words(loss: Mapping[str, float]) -> str:
    """Return losses as they are typed, such as `mlm=1,hidden=30`."""
    return ",".join(f"{name}={weight:g}" for name, weight in loss.items())


def describe_changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the settings of `now` that differ from `then`, with losses as they are typed; "" if
    none does. `then` was read from JSON. Stores are not compared: a store that was moved is the
    same store."""
    # Converted to JSON and back like `then`: a tuple becomes a list.
    now = json.loads(json.dumps({n: v for n, v in now.items() if n not in ("store", "others")}))
    if then.get("loss") and now.get("loss") and then["loss"] != now["loss"]:
        then, now = ({**values, "loss": loss_words(values["loss"])} for values in (then, now))
    return describe_changes(then, now)


@names_options("student-train")
@dataclass(frozen=True)
class OptionFields:
    """Declares the options of a training. The subclass `TrainOptions` checks and resolves them."""

    SWEEP: ClassVar = ("student-sweep", ONCE)
    """The command in which options may be repeated, except those with this scope."""

    store: FirstPathWord = option(
        help="Train on this sealed store: .zarr, .h5 or an object-store URL. Repeat it to train on"
        " several stores, each aligned by its own tokens.",
        required=True,
        scope={COMMAND, ONCE},
    )
    others: tuple[str, ...] = ()  # the stores after the first, if `store` is a list
    combine: str = option(
        "losses",
        "Combine several stores by their losses (train on the mean of the losses), or by their"
        " outputs (treat them as one teacher, with the geometric mean of their distributions and"
        " the mean of their states; for stores of the same text and vocabulary).",
        choices=("losses", "outputs"),
    )
    # For text vectors, a student of two layers (STS mean .686 with 5k, .715 with 20k) and a static
    # student gain from more pieces, up to 20k; at equal size, two layers do not (RESULTS, "Students
    # of sentence embeddings"). A decoder is trained much faster with few pieces of its own than
    # with the teacher's 49,152 (RESULTS, "A decoder student's step").
    vocab: PathWord = option(
        DefaultText("5k"),
        "Use this vocabulary: 5k, 10k, 20k, 30k or N (N pieces, trained on the store's text: a"
        " WordPiece, for a decoder a byte-level BPE), a tokenizer folder, teacher (all of the"
        " teacher's pieces), pruned:N (the teacher's N most frequent pieces; WordPiece, Unigram or"
        " BPE), words or words:N (lower-cased words between spaces, all or the N most frequent), or"
        " mixed-vocab (stored by teacher-dump mixed-vocab).",
        default_text=f"5k; {terms.STATIC_VOCABULARY} for a static student",
        scope={START},
        words=values.VOCABULARIES,
        paths=True,
        check=values.check_vocabulary_word,
    )
    out: MaybePath = option(
        None,
        "Write the student to this folder.",
        default_text="a folder next to the store, named after the settings",
        scope={COMMAND, ONCE, MACHINE},
    )
    student: PathWord = option(
        DefaultText("tiny"),
        "Train a student of this shape. HxLxA[xF]: a ModernBERT with hidden size H, L layers, A"
        " heads and feed-forward size F (default 2 H); tiny is 264x3x12. bert:HxLxA[xF]: a BERT"
        " (F: default 4 H; bert:tiny is 264x3x12x792). teacher:L: the teacher's hidden size and"
        " heads with L layers, of the teacher's architecture if students can have it, else a BERT."
        " llama:, qwen2:, qwen3: or gpt2:HxLxA[xF[xKV[xD]]]: a decoder (KV: key-value heads; D:"
        " size of a head, default H/A; gpt2 has neither). DIR: continue the training of the decoder"
        " in this folder, with its vocabulary. bilstm:E,H: a BiLSTM with embedding size E and LSTM"
        " size H in each direction. static:D: one vector of D numbers per piece and no layers, for"
        " text vectors only.",
        default_text="tiny; for a causal teacher a decoder of its kind, hidden size 256, 4 layers",
        scope={START},
        words=values.STUDENTS,
        check=values.check_student,
    )
    align: MaybeCommaList = option(
        None,
        f"Pair teacher and student tokens by one of these alignments. {terms.alignment_help()}."
        " One alignment per loss: kl=match,hidden=reduce.",
        default_text=terms.DEFAULT_ALIGNMENT,
        words=tuple(terms.ALIGNMENTS),
        check=terms.parse_alignments,
    )
    pool: str | None = option(
        None,
        "Pool the outputs of a run of tokens into one in this way.",
        choices=("sum", "mean"),
        default_text=terms.pool_help(),
    )
    loss: Weights = option(
        factory=lambda: DefaultWeights(terms.DEFAULT_LOSS),
        help="Train on the weighted sum of these losses, NAME=WEIGHT (NAME alone: weight 1),"
        f" repeated or a comma-separated list: {registry.help_text()}.",
        default_text=f"{loss_words(terms.DEFAULT_LOSS)};"
        " kl=1 instead of hidden if the store has no hidden states; for a task kl=1, ce=1 if there"
        f" are gold labels, and {loss_words(terms.TASK_STATES_LOSS)} if the store has hidden"
        f" states; for text vectors {loss_words(terms.VECTOR_LOSS)}, and"
        f" {loss_words(terms.STATES_LOSS)} if the store has hidden states; for scores"
        f" {loss_words(terms.SCORE_LOSS)}; for a decoder {loss_words(terms.NEXT_LOSS)};"
        f" {loss_words(terms.NEXT_PIECES_LOSS)} with --combine outputs or without logits.observed,"
        f" {loss_words(terms.NEXT_STATES_LOSS)} without logits",
        repeated=True,
        words=tuple(loss.name for loss in registry.LOSSES),
        read=terms.parse_losses,
        check=terms.check_losses,
        scope={STAGE},
    )
    temperature: float = option(
        DefaultNumber(2.0),
        "Divide the logits of kl, kl-shared, kl-next, reverse-kl and jsd by this temperature.",
        within=POSITIVE,
        default_text="2; 1 for a decoder",
        scope={STAGE},
    )
    targets: str = option(
        "all",
        "Compare with the teacher's logits at these student tokens: all, only masked ones, or only"
        " unmasked ones.",
        choices=("all", "masked", "unmasked"),
        scope={STAGE},
    )
    # With states summed over the channels, a trained projection gives 6.19 nats a token, a frozen
    # one 6.34 (RESULTS, "Projections: start, mode and reduction").
    projection: str = option(
        "trainable",
        "Linear map from the student's hidden size to the teacher's: trainable (dropped after"
        " training), frozen (random), or student (BiLSTM only: kept in the model, followed by a"
        " GELU; the heads use its output).",
        choices=("trainable", "frozen", "student"),
    )
    # From He's start, states summed over the channels outweigh the other losses: a frozen
    # projection gives a part-of-speech accuracy of .650, not .764 (same section).
    projection_start: str = option(
        "pytorch",
        "Initialise the projection as pytorch does (uniform), or as he (normal, larger; He et al."
        " 2015).",
        choices=("pytorch", "he"),
    )
    outputs: str = option(
        "shared",
        "Train one output layer for a task (shared), or two (separate): logit and log-odds then"
        " train an extra output layer that is discarded after training; ce, kl and hard train the"
        " classifier.",
        choices=("shared", "separate"),
    )
    matryoshka: Sizes = option(
        (),
        "Compute similarity and similarity-kl on the first N numbers of a text vector as well, for"
        " each N of a comma-separated list such as 256,128, so that the vector can be truncated"
        " (Kusupati et al. 2022).",
        read=values.parse_widths,
        check=values.check_widths,
    )
    # A masked LM of 128x2x2 has 4.57 nats from single layers, 5.07 from means of groups. Students
    # of text vectors are better from means (RESULTS, "Where a student starts"). A decoder that is
    # cut out of its teacher has 2.255 bits per byte, from word embeddings alone 2.372.
    init: str = option(
        DefaultText("auto"),
        "Start from these weights. layers:I,J,...: the teacher's embeddings and these layers of it"
        " (from 1), one for each student layer, cut to the student's hidden size."
        " layers:I,J,...@DIR: layers of the model in DIR. teacher: the same with averages of"
        " consecutive teacher layers. svd: the teacher's word embeddings only, reduced by SVD;"
        " svd:STORE: the word embeddings of another store's teacher. mixed-vocab: the embeddings"
        " that teacher-dump mixed-vocab stored. random: random weights. auto: layers, evenly spaced"
        " (teacher for a task or text vectors), if the shapes fit, else svd; random if the store"
        " has no embeddings. For decoders: layers and teacher (evenly spaced layers) copy the"
        " channels, heads and units that contribute most. vocab: word embeddings only, each the"
        " mean of the teacher's embeddings of the tokens that the teacher splits the piece into."
        " folder:DIR: all weights of the decoder in DIR, the default of --student DIR. auto:"
        " teacher if its architecture and head size are the student's and its layers have at most"
        " half a billion weights, else vocab.",
        scope={START},
        words=values.STARTS,
        check=values.check_start,
    )
    lora: int | None = option(
        None,
        "Train only low-rank updates (LoRA) of this rank in the linear layers, and merge them into"
        " the weights at the end. Needs --student DIR, a trained model.",
        within=at_least(1),
        default_text="train all weights",
        scope={START},
    )
    dropout: float = option(
        0.0,  # a small student underfits: dropout would only slow it down
        "Drop out hidden states and attention at this rate; in a llama, qwen2 or qwen3 attention"
        " alone, in a BiLSTM embeddings, layers and the recurrent state.",
        within=SHARE,
        scope={NETWORK},
    )
    recurrent_dropout: float | None = option(
        None,
        "Drop out a BiLSTM's recurrent state, between two tokens, at this rate.",
        within=SHARE,
        default_text="as --dropout",
        scope={NETWORK, BILSTM},
    )
    classifier_pooling: str | None = option(
        None,
        "Classify a BiLSTM's text by the maximum of each channel over the tokens (max), or by the"
        " last state of each direction (last).",
        choices=("max", "last"),
        default_text="max",
        scope={NETWORK, BILSTM},
    )
    word_vectors: MaybePathWord = option(
        None,
        "Initialise pieces that are whole words from a file of word vectors (GloVe, fastText or"
        " word2vec as text) of the embedding size. With --init random the other pieces are drawn"
        " uniformly from -0.1 to 0.1.",
        scope={START},
    )
    view: int | None = option(
        None,
        "Train on this view of the store.",
        default_text="the masked views in turn; view 0 if there are none, and for a task",
        scope={STAGE},
    )
    steps: int | None = option(
        None,
        "Train for N optimizer steps, instead of --epochs. 0 saves the initial student (--init"
        " random only).",
        within=Range("0 or more", low=0),
        scope={STAGE, LENGTH},
    )
    epochs: float | None = option(
        None,
        "Train for this number of passes over the first store.",
        within=POSITIVE,
        default_text="3",
        scope={STAGE, LENGTH},
    )
    batch_tokens: int = option(
        DefaultCount(1024),
        "Train on batches of at most N teacher tokens, padding included.",
        within=at_least(1),
        scope={STAGE, BATCH},
    )
    batch_texts: int | None = option(
        None,
        "Train on batches of N texts, instead of --batch-tokens.",
        within=at_least(1),
        scope={STAGE, BATCH},
    )
    accumulate: int = option(
        1, "Accumulate the gradients of N batches per optimizer step.", within=at_least(1)
    )
    optimizer: str = option(
        "adamw",
        "Train with adamw; lamb (You et al. 2020), for large batches, which needs `pip install"
        " 'teachonce[lamb]'`; or adadelta (Zeiler 2012), which adapts its own learning rate.",
        choices=OPTIMIZERS,
    )
    lr: float | None = option(
        None,
        "Train at this peak learning rate.",
        within=POSITIVE,
        default_text="0.5 / hidden size, at most 0.004; twice that for a decoder cut out of the"
        " teacher; 0.003 for a BiLSTM; 0.01 for a static student; 1 for adadelta; a tenth with"
        " --student DIR without --lora",
        scope={STAGE},
    )
    lr_end: float = option(
        0.0,
        "End a linear or cosine schedule at this learning rate.",
        within=NOT_NEGATIVE,
        scope={STAGE},
    )
    warmup: float = option(
        0.05, "Warm up linearly over this share of the steps.", within=SHARE, scope={STAGE}
    )
    schedule: str = option(
        "linear",
        "Change the learning rate after warm-up: linear or cosine decay to --lr-end, constant, or"
        " plateau (halved when the validation loss stops falling).",
        choices=SCHEDULES,
        scope={STAGE},
    )
    weight_decay: float = option(
        0.01,
        "Apply this weight decay to matrices; biases and norms have none.",
        within=NOT_NEGATIVE,
    )
    clip: float = option(1.0, "Clip gradients to this norm.", within=POSITIVE)
    mask_prob: float = option(
        0.15,
        "Mask this share of the student tokens, drawn again in each epoch (view 0).",
        within=SHARE,
        scope={STAGE},
    )
    mask_words: str = option(
        "uniform",
        "Mask all pieces equally often (uniform), or rarer pieces more often (rare; view 0).",
        choices=MASK_WORDS,
        scope={STAGE},
    )
    max_masks: int | None = option(
        None,
        "Mask at most N student tokens per sequence (view 0).",
        within=at_least(1),
        default_text="no limit",
        scope={STAGE},
    )
    max_length: int | None = option(
        None,
        "Truncate the student's input to N student tokens.",
        within=Range("at least 3: two special tokens and one of text", low=3),
        default_text="twice the store's window, at most 512",
        scope={START},
    )
    min_length: int = option(
        0, "Skip sequences of fewer than N teacher tokens.", within=Range("0 or more", low=0)
    )
    data: str = option(
        "all",
        "Train on these sequences. labelled: sequences with a gold label or tag. balanced: each"
        " step takes one labelled batch for the losses on gold labels, and one unlabelled batch of"
        " the same size for the other losses.",
        choices=("all", "labelled", "unlabelled", "balanced"),
        scope={STAGE},
    )
    freeze: Words = option(
        (),
        "Do not train these parts, a comma-separated list: embeddings (or words, positions, types"
        " separately), layers, layers.N, head, projection.",
        words=values.PARTS,
        read=values.parse_parts,
        check=values.check_student_parts,
        scope={STAGE},
    )
    prune_to: MaybePathWord = option(
        None,
        "Reduce the finished student to the pieces that it shares with this vocabulary (same"
        " values as --vocab).",
        scope={START},
        words=values.VOCABULARIES,
        paths=True,
        check=partial(values.check_vocabulary_word, option="--prune-to"),
    )
    best: bool = option(
        False,
        "Save the weights of the best validation instead of the last step.",
        scope={STAGE},
    )
    stages: Tables = cast(Any, ())
    # What a recipe requires (`Recipe.needs`), its name, and its `record` in training.json.
    needs: Mapping[str, Any] = field(default_factory=dict)
    held_out: float = option(
        0.02,
        "Hold out this share of the sequences for validation, the same for every student.",
        within=SHARE,
    )
    eval_every: int | Literal["epoch"] | None = option(
        None,
        "Validate every N steps, or, with `epoch`, after each pass over the store.",
        within=at_least(1),
        default_text="a tenth of the steps of each stage",
        scope={STAGE},
    )
    patience: int | None = option(
        None,
        "Stop a training, or a stage, after N validations without a better loss.",
        within=at_least(1),
        default_text="no early stopping",
        scope={STAGE},
    )
    checkpoint_every: int | None = option(
        None,
        "Save a checkpoint every N steps.",
        within=at_least(1),
        default_text="at each validation, and whenever the last one is ten minutes old",
        scope={MACHINE},
    )
    seed: int = option(
        0,
        "Seed initial weights, order, masks and dropout with this number.",
        within=Range(f"0 to {SEEDS - 1}", low=0, high=SEEDS - 1),
    )
    device: str = option(
        "auto",
        "Train on this device: auto, cpu, cuda or cuda:N.",
        words=DEVICES,
        check=check_device,
        scope={COMMAND, MACHINE},
    )
    # On an AMD EPYC, 128x2x2 is trained on 16,425 tokens a second in bf16, and on 11,769 in fp32
    # (RESULTS, "A student's step").
    precision: str = option(
        "auto",
        "Compute matrix products in this precision. auto: bf16 if the hardware supports it, else"
        " fp32.",
        choices=("auto", "bf16", "fp32"),
    )
    # A thread is enough: steps of 128x2x2 wait for their batches at most 0.4 % of the time
    # (RESULTS, "A student's step").
    workers: int = option(
        0,
        "Prepare batches in N processes; 0: in a thread. Does not change the student.",
        within=Range("0 or more", low=0),
        scope={COMMAND, ONCE, MACHINE},
    )
    cache: str = option(
        "none",
        "Cache the store. none: read it again in each epoch. ram: decode it once and hold it in"
        " memory. device: hold hidden states and attention maps in the memory of --device."
        " disk:DIR,SIZE: cache what is read from a remote store in DIR on a local disk, up to SIZE"
        " (such as 100GB), shared by all trainings that name DIR. Does not change the student.",
        words=(*values.CACHES, PREFIX),
        check=values.check_cache_word,
        scope={COMMAND, ONCE, MACHINE},
    )
    log: Words = option(
        (),
        "Log each step's figures to wandb, mlflow, trackio, or a comma-separated list of these, in"
        " addition to metrics.jsonl and the TensorBoard files.",
        repeated=True,
        default_text="none",
        words=tuple(TRACKERS),
        read=parse_trackers,
        check=check_known,
        scope={COMMAND, ONCE, MACHINE},
    )
    allow_partial: bool = option(
        False,
        "Train on the published parts of an unfinished store.",
        flag="--allow-partial",
        scope={COMMAND, ONCE, MACHINE},
    )

    def __post_init__(self) -> None:
        """Do nothing. The generated `__init__` calls `__post_init__` only if this class has one;
        `TrainOptions` overrides it."""
