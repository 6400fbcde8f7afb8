"""Options of a dump, and the values that each accepts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from teachonce.checkpoints.first_token import parse_bos
from teachonce.checkpoints.names import ALIASES, corpus_of
from teachonce.store.format.codecs.levels import BUILT_IN, GROUP
from teachonce.support.console import DEVICES, check_device
from teachonce.support.errors import UserError
from teachonce.support.option_types import (
    CommaList,
    MaybeCommaList,
    MaybePathOrUrl,
    MaybePathWord,
    PathOrUrl,
    PathWord,
    PathWords,
)
from teachonce.support.options import (
    INNER_SHARE,
    NOT_NEGATIVE,
    at_least,
    names_options,
    option,
    parse_values,
)
from teachonce.support.ray_cluster import check_address, check_gpus
from teachonce.teacher_dump.corpus.labelled_text import pair_of
from teachonce.teacher_dump.job.contradictions import check_together
from teachonce.teacher_dump.job.option_values import (
    AUTO,
    DEFAULT_CORPUS,
    DEFAULT_LOGITS,
    DEFAULT_MAX_LENGTH,
    PART_TOKENS,
    TEXT_HEADS,
    place_of,
    read_sources,
    shard_of,
    tier_and_size,
)
from teachonce.teacher_dump.teacher.layer_groups import feature_words
from teachonce.training.device import resolved_device, resolved_precision
from teachonce.training.rare_masks import MASK_WORDS


def _check_features(spec: str, where: str) -> None:
    """Raise UserError like `feature_words`, except for `auto`."""
    if spec != AUTO:
        feature_words(spec, where)


@names_options("teacher-dump")
@dataclass(frozen=True)
class DumpOptions:
    """Holds the options of a dump, for the command line and for Python.

    Raises UserError if an option does not accept its value, or if options contradict each other.
    Checks that need the teacher are in `plan.py`.
    """

    model: PathWord = option(
        help="Run this teacher: a hub id, a folder, or an alias (rubert-base, minilm).",
        required=True,
        words=ALIASES,
        paths=True,
    )
    out: PathOrUrl = option(  # click reads a str; `place_of` makes a Path of it, except of a URL
        help="Write the store to NAME.zarr or NAME.h5, or to a bucket: s3://BUCKET/NAME.zarr"
        " (gs://, az://).",
        required=True,
        read=place_of,
    )
    corpus: PathWords = option(
        (),
        "Read text from .txt (one document per line), .json/.jsonl/.csv/.tsv/.parquet, words with"
        " tags (.tsv, .conll, .conllu), any of these but Parquet compressed as .gz/.bz2/.xz/.zst,"
        " a folder, hf:NAME[@CONFIG][:SPLIT], or python-docs (the docstrings of Python's standard"
        " library). Repeatable.",
        words=("hf:", "python-docs"),
        paths=True,
        repeated=True,
        read=read_sources,
        default_text="the corpus of the alias, else python-docs",
    )
    text_column: MaybeCommaList = option(
        None,
        "Read the text from this column of tables and hf: sources; data.text names a nested"
        " column. A,B: read pairs of texts from two columns, for a teacher that classifies pairs.",
        default_text="text, or the only column of texts or lists of words",
        check=pair_of,
    )
    messages: str | None = option(
        None,
        "Read chats (lists of role and content) from this column instead of texts. A causal"
        " teacher's chat template is applied, and the rendered text is stored.",
        default_text="no chats",
    )
    learn: str | None = option(
        None,
        "With --messages: train students on the contents of these messages only, each with the"
        " token that ends the message.",
        choices=("assistant", "all"),
        default_text="assistant",
    )
    student_column: str | None = option(
        None,
        "With --head embedding: let students read this column, such as a translation, while the"
        " teacher reads --text-column.",
        default_text="the student reads the teacher's text",
    )
    label_column: str | None = option(
        None,
        "Store the gold labels (names or numbers) of this column if the teacher classifies texts,"
        " or its tags or spans if the teacher tags words.",
    )
    head: str = option(
        AUTO,
        "Store the logits of this head. auto: the task head of a fine-tuned checkpoint"
        " (classification, tagging), else its LM head (masked or causal). embedding: one vector"
        " per text, from the modules of a sentence-transformers folder or --pooling. score: one"
        " number per pair of texts (rerankers).",
        choices=(AUTO, "mlm", "classification", "tagging", "causal", "embedding", "score", "none"),
    )
    bos: str = option(
        AUTO,
        "Put this token in front of each window of a causal teacher, so that the first token of"
        " the text is predicted, too: auto | none | ID. auto: the tokenizer's bos token if it is"
        " also its eos token. A token that the tokenizer itself adds is never removed.",
        words=(AUTO, "none"),
        check=parse_bos,
    )
    pooling: str | None = option(
        None,
        "With --head embedding: pool the last hidden states of a text into its vector in this way.",
        choices=("mean", "cls", "max", "last"),
        default_text="the model's own (modules.json)",
    )
    prompt: str | None = option(
        None,
        "With --head embedding: put the model's prompt of this name before each text; '' for none.",
        words=("",),
        default_text="the model's own default, if it has one",
    )
    logits: str | None = option(  # None: DEFAULT_LOGITS where there is an LM head
        None,
        "Store these logits of an LM head: topk:K (the K largest) | sample:DRAWS (random draws) |"
        " head (the input of the head, which gives all logits) | none.",
        default_text=DEFAULT_LOGITS,
        words=("topk:", "sample:", "head", "none"),
        check=tier_and_size,
    )
    hidden: CommaList = option(
        AUTO,
        "Store hidden states: mean (of all layers) | mean:0 (with the embeddings) | groups:N"
        " (means of N groups of layers) | layer:I (0 = embeddings) | none; a comma-separated list"
        " for several. auto: mean; none with --head embedding, score or causal; layer:6 for minilm"
        " if no feature is requested.",
        words=(AUTO, "mean", "mean:0", "groups:", "layer:", "none"),
        check=partial(_check_features, where="--hidden "),
    )
    attention: CommaList = option(
        AUTO,
        "Store attention maps, averaged over heads: mean | groups:N | layer:I | none. auto: mean;"
        " none with --head embedding, score or causal.",
        words=(AUTO, "mean", "groups:", "layer:", "none"),
        check=partial(_check_features, where="--attention "),
    )
    views: int = option(
        1,
        "Run the teacher N times over each sequence: on the plain text (view 0), then with masked"
        " words (views 1, 2, ...).",
        within=at_least(1),
    )
    # As in BERT's pre-training (Devlin et al. 2019, section 3.1), but a share of words.
    mask_prob: float = option(
        0.15, "Mask this share of the words in views 1, 2, ...", within=INNER_SHARE
    )
    mask_words: str = option(
        "uniform",
        "Mask all words equally often (uniform), or rare words of the corpus more often (rare), in"
        " views 1, 2, ...",
        choices=MASK_WORDS,
    )
    seed: int = option(0, "Seed masks and draws with this number.", within=at_least(0))
    # Students are as good as from exact values (5.64 and 5.68 nats), at half of float16's bytes.
    codec: str = option(
        "default",
        "Store values in this precision: exact (float32), default (mostly 8 bits) or small"
        " (4-bit hidden states).",
        choices=tuple(sorted(BUILT_IN)),
        added=GROUP,
    )
    max_length: int | None = option(
        None,
        "Cut the text into windows of at most N teacher tokens, special tokens included.",
        within=at_least(4),
        default_text=f"{DEFAULT_MAX_LENGTH}, or the teacher's limit if it is lower",
    )
    stride: int = option(
        0,
        "Let neighbouring windows of a document overlap by N tokens. Students of a causal teacher"
        " read the repeated tokens, but are not trained on them.",
        within=at_least(0),
    )
    batch_tokens: int | None = option(
        None,
        "Run batches of at most N teacher tokens, padding included; bounds memory.",
        within=at_least(1),
        default_text="8,192; 2,048 on a CPU",
    )
    gguf: MaybePathWord = option(
        None,
        "Read the weights of --model from this GGUF file, in its folder or at a path. The folder"
        " must have config.json and tokenizer.json. Needs `pip install 'teachonce[gguf]'`.",
        paths=True,
        default_text="the weights in the folder",
    )
    device: str = option(
        "auto", "Run on this device: auto | cpu | cuda | cuda:N.", words=DEVICES, check=check_device
    )
    precision: str = option(
        "auto",
        "Run in this precision. auto: bf16 if the hardware supports it and, on a CPU, if the"
        " teacher is a decoder whose outputs for the first texts agree with fp32; else fp32. A"
        " continued dump uses the precision of its first run.",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
    limit: int | None = option(
        None,
        "Stop after N teacher tokens of the corpus, such as 50k or 2m.",
        within=at_least(1),
        default_text="the whole corpus",
    )
    grow_from: MaybePathOrUrl = option(
        None,
        "Copy the documents of this finished store, made from an earlier version of the corpus"
        " with the same teacher and options, and run the teacher on new documents only. The"
        " earlier store is not changed.",
        read=place_of,
        default_text="run the teacher on the whole corpus",
    )
    gone: str | None = option(
        None,
        "With --grow-from: leave out (forget) or copy (keep) the documents of the earlier store"
        " that were removed from the corpus or changed.",
        choices=("forget", "keep"),
        default_text="stop with an error that counts them",
    )
    # Not an option of the command: larger parts are for stores of very many tokens (docs/scale.md).
    part_tokens: int = PART_TOKENS
    weights: bool = option(
        True, "Store the teacher's weights (fp16), so that students can start from them."
    )
    plan: bool = option(
        False,
        "Do not dump; estimate bytes per feature, time and disk space from a sample.",
        flag="--plan",
    )
    shard: str | None = option(
        None,
        "Run as process i (from 0) of n that write one store together, given as i/n, on one"
        " machine or on several that share the folder.",
        check=shard_of,
        default_text="one process; under torchrun its rank and world size",
    )
    ray: str | None = option(
        None,
        "Dump with the workers of a Ray cluster, on a disk that all nodes share: HOST:PORT; local"
        " (a cluster of this machine, for this dump); no value: the cluster of RAY_ADDRESS or of"
        " this machine, else local. Needs `pip install 'teachonce[ray]'`.",
        check=check_address,
        bare=AUTO,
        default_text="no Ray",
    )
    ray_gpus: float | None = option(
        None,
        "With --ray: give each worker N GPUs; with 0.5 two workers share one.",
        within=NOT_NEGATIVE,
        check=check_gpus,
        default_text="1 if the cluster has GPUs and --device is not cpu, else 0",
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with the checkpoint.", flag="--trust-remote-code"
    )
    # A store without features: stage I of `mixed-vocab` stores its result outside the parts.
    text_only: bool = False

    def __post_init__(self) -> None:
        self._fill_in()
        parse_values(self)
        if self.part_tokens < 1:
            raise UserError(f"part_tokens {self.part_tokens}: expected at least 1")
        check_together(self)

    def _fill_in(self) -> None:
        """Replace `auto` of --hidden and --attention if --head decides their values. For an alias,
        set its default head and features if no option names any."""
        values = dict[str, Any]()
        if self.head != AUTO:
            values = self._features(self.head)
        free = self.head == self.hidden == self.attention == AUTO and self.logits is None
        alias = ALIASES.get(self.model)
        if free and not self.text_only and alias and alias.features:
            head, hidden = alias.features
            values = {"head": head, "hidden": hidden, "attention": "none"}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _features(self, head: str | None) -> dict[str, Any]:
        # The default losses of a decoder read logits alone, and states do not improve it.
        logits_alone = head == "causal" and self.logits != "none"
        default = "none" if head in TEXT_HEADS or logits_alone else "mean"
        return {name: default for name in ("hidden", "attention") if getattr(self, name) == AUTO}

    def for_head(self, kind: str | None) -> Self:
        """Replace `auto` of --hidden and --attention for a teacher with a head of this kind (a key
        of `DECLARED`; None if its config.json declares none)."""
        return replace(self, **self._features(kind))

    def resolved(self) -> Self:
        """Replace every `auto` for this machine. Raises UserError if the machine lacks the
        requested GPU.

        On a CPU that multiplies bfloat16, the precision stays `auto`: `precision.load_fastest`
        compares outputs to choose it.
        """
        device = self.device if self.device == "cpu" else resolved_device(self.device)
        precision = resolved_precision(self.precision, device)
        if device == "cpu" and precision == "bf16":
            precision = self.precision
        # Larger batches do not fit into the caches of a CPU: MiniLM runs at 1.18 times the speed
        # that it has with 8,192 tokens (RESULTS, "Batches of a teacher").
        batch_tokens = self.batch_tokens or (2048 if device == "cpu" else 8192)
        return replace(
            self,
            device=device,
            precision=precision,
            batch_tokens=batch_tokens,
            corpus=self.sources(),
        )

    @property
    def tokens_per_batch(self) -> int:
        """Return the maximum number of teacher tokens in a batch, padding included. Call it for
        `resolved` options only."""
        assert self.batch_tokens is not None
        return self.batch_tokens

    def sources(self) -> tuple[str, ...]:
        """Return the sources of the corpus, the default ones if none is given."""
        return self.corpus or (corpus_of(self.model) or DEFAULT_CORPUS,)
