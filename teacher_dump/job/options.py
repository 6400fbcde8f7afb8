"""Options of a dump: the values that each accepts, and combinations that contradict each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from teachonce.checkpoints.first_token import bos_value
from teachonce.checkpoints.names import ALIASES, corpus_of, features_of_alias
from teachonce.store.errors import NO_QUEUE
from teachonce.store.format.codecs.levels import BUILT_IN, GROUP
from teachonce.store.format.features import TASKS
from teachonce.support.console import DEVICES, check_device
from teachonce.support.errors import UserError
from teachonce.support.options import (
    INNER_SHARE,
    NOT_NEGATIVE,
    at_least,
    check_values,
    flag_of,
    option,
)
from teachonce.support.ray_cluster import check_address, check_gpus
from teachonce.teacher_dump.corpus.labelled_text import DEFAULT_COLUMN, pair_of
from teachonce.teacher_dump.teacher.layer_groups import feature_words
from teachonce.training.device import resolved_device, resolved_precision
from teachonce.training.rare_masks import MASK_WORDS

PART_TOKENS = 1 << 17  # a kill loses at most one part; a part is in memory until it is written
DEFAULT_CORPUS = "python-docs"
DEFAULT_MAX_LENGTH = 256
# Not compared itself. `topk:160` teaches as well as the head's input does (4.86 and 4.84 nats a
# token), `topk:16` less well (5.15), at 60 bytes a token (RESULTS, "Quality by tier").
DEFAULT_LOGITS = "topk:64"
AUTO = "auto"
# Heads of whole texts: states and maps of tokens are stored with them only on request.
TEXT_HEADS = ("embedding", "score")
MAX_DRAWS = 2**16 - 1  # for one token: a store counts them in uint16


class Shard(NamedTuple):
    """The place of a process among the processes that write one store together.

    place: 0..size - 1, as torchrun's RANK. size: the number of processes.
    """

    place: int
    size: int


def shard_of(spec: str | None) -> Shard | None:
    """Return the place of this process: from `--shard`, else from torchrun's RANK and WORLD_SIZE.

    Returns None if it is the only process. Raises UserError if `--shard` is not i/n.
    """
    if spec is None:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return Shard(int(os.environ.get("RANK", "0")), size) if size > 1 else None
    place, _, number = spec.partition("/")
    if place.isdecimal() and number.isdecimal() and int(place) < int(number):
        return Shard(int(place), int(number))
    raise UserError(
        f"--shard {spec}: expected i/n, where i is one of the numbers 0 to n - 1, as 0/4"
    )


def tier_and_size(spec: str) -> tuple[str, int]:
    """Parse `--logits` into tier and size; the size is 0 for `none` and `head`.

    Raises UserError if it has another form. Whether the size fits the teacher is checked later.
    """
    tier, _, size = spec.partition(":")
    if spec in ("none", "head"):
        return spec, 0
    if tier in ("topk", "sample") and size.isdecimal() and int(size) > 0:
        if tier == "sample" and int(size) > MAX_DRAWS:
            raise UserError(f"--logits {spec}: at most {MAX_DRAWS} draws per token; request fewer")
        return tier, int(size)
    raise UserError(f"--logits {spec}: expected topk:K, sample:DRAWS (at least 1), head or none")


def place_of(word: str) -> Path | str:
    """Return `--out` as a Path, or as str if it is a URL."""
    return word if "://" in word else Path(word)  # Path("s3://a") would be "s3:/a"


def listed(words: tuple[str, ...] | str) -> tuple[str, ...]:
    """Split the values of a repeated option at their commas."""
    values = (words,) if isinstance(words, str) else words
    return tuple(part for value in values for part in value.split(",") if part)


@dataclass(frozen=True)
class DumpOptions:
    """Everything that decides what a store holds, for the command line and for Python.

    Raises UserError if an option does not accept its value, or if options contradict each other.
    Checks that need the teacher follow in `plan.py`.
    """

    model: str = option(
        help="Teacher: model id, folder, or an alias (rubert-base, minilm).",
        required=True,
        words=ALIASES,
        paths=True,
    )
    out: str | Path = option(  # the first kind is how click reads it, before `place_of`
        help="The store: NAME.zarr or NAME.h5, or in a bucket s3://BUCKET/NAME.zarr (gs://, az://).",
        required=True,
        read=place_of,
    )
    corpus: tuple[str, ...] = option(
        (),
        "Text: .txt (a document a line), .json/.jsonl/.csv/.tsv/.parquet, words with tags (.tsv,"
        " .conll, .conllu), packed as .gz/.bz2/.xz/.zst, a folder, hf:NAME[@CONFIG][:SPLIT], or"
        " python-docs. Repeatable.",
        words=("hf:", "python-docs"),
        paths=True,
        repeated=True,
        read=listed,
        default_text="the alias's own corpus, else python-docs (embedded)",
    )
    text_column: str | None = option(
        None,
        "Column with the text in tables and hf: sources; data.text names a nested column."
        " A,B: two columns with pairs of texts, for a teacher that classifies pairs.",
        check=pair_of,
    )
    messages: str | None = option(
        None,
        "Column with chats (lists of role and content) instead of texts, for a causal teacher: its"
        " chat template is applied, and the rendered text is stored.",
        default_text="no chats",
    )
    learn: str | None = option(
        None,
        "With --messages: contents that students are trained on, each with the token that ends the"
        " message.",
        choices=("assistant", "all"),
        default_text="assistant",
    )
    student_column: str | None = option(
        None,
        "With --head embedding: column with the student's text, such as a translation. The teacher"
        " reads --text-column.",
        default_text="the student reads the teacher's text",
    )
    label_column: str | None = option(
        None,
        "Column with the gold label, a name or a number, if the teacher classifies texts; with tags"
        " or spans if it tags words.",
    )
    head: str = option(
        AUTO,
        "Head whose logits are stored. auto: the task head of a fine-tuned checkpoint"
        " (classification, tagging), else its LM head (masked or causal). embedding: one vector per"
        " text, from the modules of a sentence-transformers folder or --pooling. score: one number"
        " per pair of texts (rerankers).",
        choices=(AUTO, "mlm", "classification", "tagging", "causal", "embedding", "score", "none"),
    )
    bos: str = option(
        AUTO,
        "Token that a causal teacher reads in front of each window, so that the first token of the"
        " text is predicted, too: auto | none | ID. auto: the tokenizer's bos token if it is also"
        " its eos token. A token that the tokenizer itself puts there stays.",
        words=(AUTO, "none"),
        check=bos_value,
    )
    pooling: str | None = option(
        None,
        "With --head embedding: how the last hidden states of a text are pooled to a vector.",
        choices=("mean", "cls", "max", "last"),
        default_text="the model's own (modules.json)",
    )
    prompt: str | None = option(
        None,
        "With --head embedding: name of the model's prompt, which is put before each text.",
        default_text="the model's own default, if it has one",
    )
    logits: str | None = option(  # None: DEFAULT_LOGITS where there is an LM head
        None,
        "Logits of an LM head to store: topk:K | sample:DRAWS | head (its input) | none.",
        default_text=DEFAULT_LOGITS,
        words=("topk:", "sample:", "head", "none"),
        check=tier_and_size,
    )
    hidden: str = option(
        AUTO,
        "Hidden states: mean (of all layers) | mean:0 (with the embeddings) | groups:N (means of N"
        " groups of layers) | layer:I (0 = embeddings) | none; a comma list for several. auto:"
        " mean; none with --head embedding or score; layer:6 for minilm if no feature is"
        " requested.",
        words=(AUTO, "mean", "mean:0", "groups:", "layer:", "none"),
        check=partial(feature_words, where="--hidden "),
    )
    attention: str = option(
        AUTO,
        "Attention maps, averaged over heads: mean | groups:N | layer:I | none. auto: mean; none"
        " with --head embedding or score.",
        words=(AUTO, "mean", "groups:", "layer:", "none"),
        check=partial(feature_words, where="--attention "),
    )
    views: int = option(
        1,
        "Forward passes over each sequence; view 0 is the plain text, words are masked in the"
        " others.",
        within=at_least(1),
    )
    mask_prob: float = option(0.15, "Share of words masked in views 1, 2, ...", within=INNER_SHARE)
    mask_words: str = option(
        "uniform",
        "uniform: all words are masked equally often. rare: rare words of the corpus are masked"
        " more often (views 1, 2, ...).",
        choices=MASK_WORDS,
    )
    seed: int = option(0, "Seed of masks and draws.", within=at_least(0))
    # Students are as good as from exact values (5.64 and 5.68 nats), at half of float16's bytes.
    codec: str = option(
        "default", "Precision of stored values.", choices=tuple(sorted(BUILT_IN)), added=GROUP
    )
    max_length: int | None = option(
        None,
        "Longest window in tokens, special tokens included.",
        within=at_least(4),
        default_text=f"{DEFAULT_MAX_LENGTH}, or the teacher's limit if that is lower",
    )
    stride: int = option(
        0,
        "Overlap in tokens between windows of one document. Students of a causal teacher read the"
        " repeated tokens, and are not trained on them.",
        within=at_least(0),
    )
    batch_tokens: int = option(
        8192,
        "Tokens in a batch of the teacher, padding included; bounds memory.",
        within=at_least(1),
    )
    gguf: str | None = option(
        None,
        "GGUF file with the weights of --model, in its folder or a path. The folder has config.json"
        " and tokenizer.json. Needs `pip install 'teachonce[gguf]'`.",
        paths=True,
        default_text="the weights in the folder",
    )
    device: str = option("auto", "auto | cpu | cuda | cuda:N.", words=DEVICES, check=check_device)
    precision: str = option(
        "auto",
        "auto: bf16 if the hardware supports it (on a CPU also if it agrees with fp32 on the first"
        " texts), else fp32. An unfinished store keeps its precision.",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
    limit: int | None = option(
        None, "Stop after this many tokens of the corpus: 50k, 2m.", within=at_least(1)
    )
    grow_from: str | Path | None = option(
        None,
        "A finished store of the same teacher and options, made from an earlier version of the"
        " corpus. Its documents are copied; the teacher reads only new ones. The store is not"
        " changed.",
        read=place_of,
        default_text="none: the teacher reads the whole corpus",
    )
    gone: str | None = option(
        None,
        "With --grow-from: whether to leave out (forget) or copy (keep) documents of that store"
        " that were removed from the corpus or changed.",
        choices=("forget", "keep"),
        default_text="an error with their number",
    )
    part_tokens: int = PART_TOKENS
    weights: bool = option(
        True, "Store the encoder's weights (fp16), so that students can start from them."
    )
    plan: bool = option(
        False,
        "Do not dump; estimate from a sample: bytes per feature, time, free space on the disk.",
        flag="--plan",
    )
    shard: str | None = option(
        None,
        "i/n: run as process i (from 0) of n that write one store, on one machine or on several"
        " that share the folder.",
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
        "With --ray: GPUs per worker; with 0.5 two workers share one.",
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
        check_values(self)
        _refuse(_contradictions(self))

    def _fill_in(self) -> None:
        """Replace `auto` of --hidden and --attention, and the features of an alias."""
        default = "none" if self.head in TEXT_HEADS else "mean"
        found = {name: default for name in ("hidden", "attention") if getattr(self, name) == AUTO}
        free = self.head == self.hidden == self.attention == AUTO and self.logits is None
        if free and not self.text_only and (alias := features_of_alias(self.model)):
            found = {"head": alias[0], "hidden": alias[1], "attention": "none"}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def resolved(self) -> Self:
        """Replace every `auto` for this machine. Raises UserError if it lacks the requested GPU.

        The precision stays `auto` on a CPU that multiplies bfloat16: the outputs decide.
        """
        device = self.device if self.device == "cpu" else resolved_device(self.device)
        precision = resolved_precision(self.precision, device)
        if device == "cpu" and precision == "bf16":
            precision = self.precision
        return replace(self, device=device, precision=precision, corpus=self.sources())

    def sources(self) -> tuple[str, ...]:
        """Return the sources of the corpus, the default ones if none is given."""
        return self.corpus or (corpus_of(self.model) or DEFAULT_CORPUS,)


def _refuse(problems: Iterator[str]) -> None:
    for problem in problems:
        raise UserError(problem)


def _contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield a message for each contradiction between options; none depends on the teacher."""
    if "://" in str(options.out) and (options.ray is not None or shard_of(options.shard)):
        yield f"{options.out}: {NO_QUEUE}"
    if options.ray is not None and options.shard is not None:
        yield (
            f"--shard {options.shard} and --ray contradict each other: Ray starts the processes"
            " itself; leave one out"
        )
    if options.grow_from is None and options.gone is not None:
        yield f"--gone {options.gone}: needs the store of --grow-from; add it, or leave --gone out"
    if options.grow_from is not None:
        if str(options.grow_from).rstrip("/") == str(options.out).rstrip("/"):
            yield (
                f"--grow-from {options.grow_from}: is also --out, and a finished store is not"
                " changed; give the grown store another name (the old one can be removed then)"
            )
        if options.plan:
            yield "--plan and --grow-from: a plan covers a whole dump; leave one of them out"
    if options.ray is None and options.ray_gpus is not None:
        yield f"--ray-gpus {options.ray_gpus:g}: applies to workers of Ray; add --ray"
    if options.mask_words == "rare" and options.views == 1:
        yield (
            "--mask-words rare: no word is masked in view 0, the only view; request masked views"
            " (--views 2), or leave it out"
        )
    yield from _head_contradictions(options)
    yield from _chat_contradictions(options)
    if options.student_column is not None:
        yield from _parallel_contradictions(options, options.student_column)


def _head_contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield a message for each option that contradicts --head."""
    head = "--head" if options.head == "none" else "--logits"
    logits = options.head if options.head == "none" else options.logits
    nothing = logits == options.hidden == options.attention == "none"
    if nothing and options.head not in (*TASKS, *TEXT_HEADS) and not options.text_only:
        yield (
            f"{head}, --hidden and --attention are all none: the store would hold no output of the"
            " teacher; request one of them"
        )
    if options.head in ("mlm", "causal") and options.logits == "none":
        yield f"--head {options.head} and --logits none contradict each other: leave one out"
    if options.head == "score":
        if not pair_of(options.text_column):
            yield (
                "--head score: a score needs two texts; name their columns, --text-column A,B (such"
                " as query,passage)"
            )
        if options.label_column is not None:
            yield (
                f"--label-column {options.label_column}: a score has no classes to label; leave it"
                " out"
            )
        yield from _unfit_for(options, "classification")
    elif options.head != AUTO:
        yield from _unfit_for(options, options.head)
    for name in ("pooling", "prompt", "student_column"):
        if options.head != "embedding" and getattr(options, name) is not None:
            yield (
                f"{flag_of(name)} {getattr(options, name)}: applies to vectors of texts; add --head"
                " embedding, or leave it out"
            )


def _chat_contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield a message for each option that contradicts --messages."""
    if options.messages is None:
        if options.learn is not None:
            yield f"--learn {options.learn}: applies to chats; add --messages, or leave it out"
        return
    for name in ("text_column", "label_column", "student_column"):
        if (column := getattr(options, name)) is not None:
            yield (
                f"--messages {options.messages} and {flag_of(name)} {column} contradict each other:"
                " the text of a chat is its messages; leave one out"
            )


def _parallel_contradictions(options: DumpOptions, column: str) -> Iterator[str]:
    """Yield a message for each option that needs teacher and student to read the same text."""
    start = f"--student-column {column}: teacher and student read different texts"
    if column in (options.text_column or DEFAULT_COLUMN).split(","):
        yield f"--student-column {column}: is also the teacher's column; name another, or none"
    if not options.hidden == options.attention == "none":
        yield (
            f"{start}, so their tokens cannot be aligned; store vectors only: --head embedding,"
            " without --hidden and --attention"
        )
    if options.views > 1:
        yield f"{start}, so the same words cannot be masked in both; use --views 1"
    if options.grow_from is not None:
        yield (
            f"{start}, and the store holds no teacher's text to compare with the corpus; leave"
            " --grow-from out"
        )


def check_head(options: DumpOptions, head: str) -> None:
    """Raise UserError for options that do not apply to a head."""
    _refuse(_unfit_for(options, head))


def _unfit_for(options: DumpOptions, head: str) -> Iterator[str]:
    """Yield a message for each option that does not apply to a head."""
    article = "an" if head == "embedding" else "a"
    if head in TASKS and options.logits not in (None, "none"):
        yield (
            f"--logits {options.logits}: applies to the logits of a vocabulary; all logits of a"
            f" {head} head are stored: leave --logits out"
        )
    if head not in ("classification", "tagging") and options.label_column is not None:
        yield (
            f"--label-column {options.label_column}: labels are stored with the logits of a"
            f" classification or tagging head, and the teacher's head is: {head}; leave it out, or"
            " fine-tune the teacher on them first"
        )
    if head != "classification" and pair_of(options.text_column):
        yield (
            f"--text-column {options.text_column}: pairs of texts need a classification head, and"
            f" the teacher's head is: {head}; give one column, or fine-tune the teacher on pairs"
            " first"
        )
    if head == "embedding" and options.logits not in (None, "none"):
        yield (
            f"--logits {options.logits}: --head embedding reads no LM head; leave --logits out, or"
            " dump the logits into another store"
        )
    if head in ("classification", "embedding") and options.stride:
        yield (
            f"--stride {options.stride}: for {article} {head} head a document is one sequence, cut"
            " at --max-length; leave --stride out"
        )
    if head != "causal" and options.messages is not None:
        yield (
            f"--messages {options.messages}: applies to a causal head, and the teacher's head is:"
            f" {head}; give a decoder, or leave it out"
        )
    if head != "causal" and options.bos not in (AUTO, "none"):
        yield (
            f"--bos {options.bos}: applies to a causal head, and the teacher's head is: {head};"
            " leave it out"
        )
    if head == "causal" and options.views > 1:
        # A causal teacher never saw [MASK]; its logits for masked words would mean nothing.
        yield f"--views {options.views}: a causal head reads no masked words; use --views 1"
