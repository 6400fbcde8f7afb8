"""Options of a dump: what each takes, and which contradict each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

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
from teachonce.training.device import resolved_device
from teachonce.training.rare_masks import MASK_WORDS

PART_TOKENS = 1 << 17  # a kill loses at most so many; a part is in memory until it is written
DEFAULT_CORPUS = "python-docs"
DEFAULT_MAX_LENGTH = 256
DEFAULT_LOGITS = "topk:64"
AUTO = "auto"
OF_TEXTS = ("embedding", "score")  # heads that are stored alone, unless more is requested
MAX_DRAWS = 2**16 - 1  # of a token: a store counts them in 16 bits


class Shard(NamedTuple):
    """Number `place`, from 0, of the `size` processes that make one store."""

    place: int
    size: int


def shard_of(spec: str | None) -> Shard | None:
    """Return which of the processes this is, by `--shard`, else by the environment of torchrun;
    None for the only one. Raises UserError for a `--shard` that is not i/n."""
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
    """Read `--logits` as far as that needs no teacher: tier and size, 0 for tiers without one.

    Raises UserError for anything else.
    """
    tier, _, size = spec.partition(":")
    if spec in ("none", "head"):
        return spec, 0
    if tier in ("topk", "sample") and size.isdecimal() and int(size) > 0:
        if tier == "sample" and int(size) > MAX_DRAWS:
            raise UserError(f"--logits {spec}: at most {MAX_DRAWS} draws of a token; ask for fewer")
        return tier, int(size)
    raise UserError(f"--logits {spec}: expected topk:K, sample:DRAWS (at least 1), head or none")


def place_of(word: str) -> Path | str:
    """Read `--out`: a path, or an address, whose two slashes a path would lose."""
    return word if "://" in word else Path(word)


def listed(words: tuple[str, ...] | str) -> tuple[str, ...]:
    """Split the words of a repeated option, each perhaps a comma list, into their parts."""
    values = (words,) if isinstance(words, str) else words
    return tuple(part for value in values for part in value.split(",") if part)


@dataclass(frozen=True)
class DumpOptions:
    """Everything that decides what a store holds.

    Each field says what it is and what it takes, for the command line and for Python. Raises
    UserError for a value that an option does not take, and for options that contradict each other,
    whatever the teacher is.
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
        "Column with the text in tables and hf: sources, inside of another column as data.text;"
        " A,B: two columns of pairs of texts, for a teacher that classifies pairs.",
        check=pair_of,
    )
    student_column: str | None = option(
        None,
        "With --head embedding: column with the student's text, such as the translation of that in"
        " --text-column, which the teacher reads.",
        default_text="the student reads what the teacher reads",
    )
    label_column: str | None = option(
        None,
        "Column with the gold label by name or number, for a teacher that classifies texts; with"
        " tags or spans, for one that tags words.",
    )
    head: str = option(
        AUTO,
        "Head to read logits from; auto takes what the checkpoint was fine-tuned for"
        " (classification, tagging), else its masked-LM head. embedding: one vector of each text,"
        " by the modules of a sentence-transformers folder or --pooling. score: one number for each"
        " pair of texts (rerankers).",
        choices=(AUTO, "mlm", "classification", "tagging", "causal", "embedding", "score", "none"),
    )
    pooling: str | None = option(
        None,
        "With --head embedding: how a vector is made of a text's last states.",
        choices=("mean", "cls", "max", "last"),
        default_text="the model's own (modules.json)",
    )
    prompt: str | None = option(
        None,
        "With --head embedding: name of the model's prompt that stands before each text.",
        default_text="the model's own default, if it has one",
    )
    logits: str | None = option(  # None: DEFAULT_LOGITS where there is an LM head
        None,
        "What to keep of an LM head's logits: topk:K | sample:DRAWS | head | none.",
        default_text=DEFAULT_LOGITS,
        words=("topk:", "sample:", "head", "none"),
        check=tier_and_size,
    )
    hidden: str = option(
        AUTO,
        "Hidden states: mean | mean:0 (the embeddings count, too) | groups:N | layer:I (0 ="
        " embeddings) | none; a comma list for several; auto: mean, with --head embedding or"
        " score none. Where no feature is asked for of minilm: its embedding and layer:6.",
        words=(AUTO, "mean", "mean:0", "groups:", "layer:", "none"),
        check=partial(feature_words, where="--hidden "),
    )
    attention: str = option(
        AUTO,
        "Attention maps: mean | groups:N | layer:I | none; auto: mean, with --head embedding or"
        " score none.",
        words=(AUTO, "mean", "groups:", "layer:", "none"),
        check=partial(feature_words, where="--attention "),
    )
    views: int = option(
        1,
        "Forward passes over each sequence; view 0 is plain, the others have words masked.",
        within=at_least(1),
    )
    mask_prob: float = option(0.15, "Share of words masked in views 1, 2, ...", within=INNER_SHARE)
    mask_words: str = option(
        "uniform",
        "rare: a word is masked the more often the rarer it is in the corpus (views 1, 2, ...).",
        choices=MASK_WORDS,
    )
    seed: int = option(0, "Seed of masks and draws.", within=at_least(0))
    codec: str = option(
        "default", "Precision of what is kept.", choices=tuple(sorted(BUILT_IN)), added=GROUP
    )
    max_length: int | None = option(
        None,
        "Longest window in tokens, special ones included.",
        within=at_least(4),
        default_text=f"{DEFAULT_MAX_LENGTH} or the teacher's own limit",
    )
    stride: int = option(0, "Tokens by which windows of one document overlap.", within=at_least(0))
    batch_tokens: int = option(
        8192, "Tokens of a teacher batch, padding included: bounds memory.", within=at_least(1)
    )
    device: str = option("auto", "auto | cpu | cuda | cuda:N.", words=DEVICES, check=check_device)
    precision: str = option(
        "auto", "auto: bf16 on a GPU, else fp32.", choices=("auto", "bf16", "fp16", "fp32")
    )
    limit: int | None = option(
        None, "Stop after this many tokens of the corpus: 50k, 2m.", within=at_least(1)
    )
    grow_from: str | Path | None = option(
        None,
        "A finished store of this teacher and these options, of a corpus that has grown since: what"
        " it has of the corpus is taken over, and the teacher reads the rest. It stays as it is.",
        read=place_of,
        default_text="no store: the teacher reads the whole corpus",
    )
    gone: str | None = option(
        None,
        "With --grow-from: what becomes of documents of that store that the corpus does not have"
        " any more, as they were removed or changed.",
        choices=("forget", "keep"),
        default_text="an error that tells how many they are",
    )
    part_tokens: int = PART_TOKENS
    weights: bool = option(True, "Keep the encoder's weights (fp16), from which students start.")
    plan: bool = option(
        False,
        "Only tell what the dump would take, from a sample: bytes by feature, time, room.",
        flag="--plan",
    )
    shard: str | None = option(
        None,
        "i/n: this is number i, from 0, of n processes that make one store, on this machine or"
        " others that see the same folder.",
        check=shard_of,
        default_text="one process; that of torchrun where it started this one",
    )
    ray: str | None = option(
        None,
        "Let the workers of a Ray cluster make the store, on a disk that all nodes see: HOST:PORT,"
        " local (one of this machine, for this dump), or no word: the cluster of RAY_ADDRESS or of"
        " this machine, else local. Needs `pip install 'teachonce[ray]'`.",
        check=check_address,
        bare=AUTO,
        default_text="no Ray",
    )
    ray_gpus: float | None = option(
        None,
        "With --ray: GPUs of a worker, 0.5: two share one.",
        within=NOT_NEGATIVE,
        check=check_gpus,
        default_text="1 where the cluster has any and --device is not cpu, else 0",
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with the checkpoint.", flag="--trust-remote-code"
    )
    text_only: bool = False  # a store without features: stage I keeps its result outside the parts

    def __post_init__(self) -> None:
        self._fill_in()
        check_values(self)
        _refuse(_contradictions(self))

    def _fill_in(self) -> None:
        """Decide the features that were not asked for."""
        default = "none" if self.head in OF_TEXTS else "mean"
        found = {name: default for name in ("hidden", "attention") if getattr(self, name) == AUTO}
        free = self.head == self.hidden == self.attention == AUTO and self.logits is None
        if free and not self.text_only and (alias := features_of_alias(self.model)):
            found = {"head": alias[0], "hidden": alias[1], "attention": "none"}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def resolved(self) -> Self:
        """Decide every `auto` for this machine; raises UserError for a GPU that it lacks."""
        device = self.device if self.device == "cpu" else resolved_device(self.device)
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if device.startswith("cuda") else "fp32"
        return replace(self, device=device, precision=precision, corpus=self.sources())

    def sources(self) -> tuple[str, ...]:
        """List the corpus, or the default one where none was given."""
        return self.corpus or (corpus_of(self.model) or DEFAULT_CORPUS,)


def _refuse(problems: Iterator[str]) -> None:
    for problem in problems:
        raise UserError(problem)


def _contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield what is wrong with options that contradict each other, whatever the teacher is."""
    if "://" in str(options.out) and (options.ray is not None or shard_of(options.shard)):
        yield f"{options.out}: {NO_QUEUE}"
    if options.ray is not None and options.shard is not None:
        yield (
            f"--shard {options.shard} and --ray contradict each other: Ray starts the processes"
            " itself; leave one out"
        )
    if options.grow_from is None and options.gone is not None:
        yield f"--gone {options.gone}: of documents of another store; add --grow-from"
    if options.grow_from is not None:
        if str(options.grow_from).rstrip("/") == str(options.out).rstrip("/"):
            yield (
                f"--grow-from {options.grow_from}: is --out, too, and a finished store is not"
                " changed; give the grown store another name, and remove the old one when you like"
            )
        if options.plan:
            yield "--plan and --grow-from: a plan is of a whole dump; leave one of them out"
    if options.ray is None and options.ray_gpus is not None:
        yield f"--ray-gpus {options.ray_gpus:g}: for workers of Ray; add --ray"
    if options.mask_words == "rare" and options.views == 1:
        yield (
            "--mask-words rare: in view 0, the only one, no word is masked; ask for masked views"
            " (--views 2), or leave it out"
        )
    yield from _head_contradictions(options)
    if options.student_column is not None:
        yield from _parallel_contradictions(options, options.student_column)


def _head_contradictions(options: DumpOptions) -> Iterator[str]:
    """Yield what is wrong with options for the head that is requested."""
    head = "--head" if options.head == "none" else "--logits"
    logits = options.head if options.head == "none" else options.logits
    nothing = logits == options.hidden == options.attention == "none"
    if nothing and options.head not in (*TASKS, *OF_TEXTS) and not options.text_only:
        yield (
            f"{head}, --hidden and --attention are all none: the store would hold nothing of the"
            " teacher; ask for one of them"
        )
    if options.head in ("mlm", "causal") and options.logits == "none":
        yield f"--head {options.head} and --logits none contradict each other: leave one out"
    if options.head == "score":
        if not pair_of(options.text_column):
            yield (
                "--head score: a score is of two texts; name their columns, --text-column A,B (such"
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
                f"{flag_of(name)} {getattr(options, name)}: for vectors of texts; add --head"
                " embedding, or leave it out"
            )


def _parallel_contradictions(options: DumpOptions, column: str) -> Iterator[str]:
    """Yield what cannot be stored of two texts, of which the teacher reads one."""
    start = f"--student-column {column}: the teacher reads another text than the student"
    if column in (options.text_column or DEFAULT_COLUMN).split(","):
        yield f"--student-column {column}: is the teacher's, too; name another, or none"
    if not options.hidden == options.attention == "none":
        yield (
            f"{start}, so of its tokens nothing can be aligned; keep vectors alone: --head"
            " embedding, without --hidden and --attention"
        )
    if options.views > 1:
        yield f"{start}, and a masked word of one is none of the other; use --views 1"
    if options.grow_from is not None:
        yield (
            f"{start}, and the store keeps no teacher's text that could be compared with the"
            " corpus; leave --grow-from out"
        )


def check_head(options: DumpOptions, head: str) -> None:
    """Raise UserError for options that mean nothing for a head."""
    _refuse(_unfit_for(options, head))


def _unfit_for(options: DumpOptions, head: str) -> Iterator[str]:
    """Yield what is wrong with options that mean nothing for a head."""
    article = "an" if head == "embedding" else "a"
    if head in TASKS and options.logits not in (None, "none"):
        yield (
            f"--logits {options.logits}: such tiers are for a vocabulary; of a {head} head all"
            " logits are stored: leave --logits out"
        )
    if head not in ("classification", "tagging") and options.label_column is not None:
        yield (
            f"--label-column {options.label_column}: labels are stored with the logits of a"
            " classification or tagging head,"
            f" and the teacher's is: {head}; leave it out, or fine-tune the teacher for them first"
        )
    if head != "classification" and pair_of(options.text_column):
        yield (
            f"--text-column {options.text_column}: pairs of texts are for a classification head,"
            f" and the teacher's is: {head}; give one column, or fine-tune the teacher for pairs"
            " first"
        )
    if head == "embedding" and options.logits not in (None, "none"):
        yield (
            f"--logits {options.logits}: with --head embedding no LM head is read; leave --logits"
            " out, or dump the logits into a store of their own"
        )
    if head in ("classification", "embedding") and options.stride:
        yield (
            f"--stride {options.stride}: for {article} {head} head a document is one sequence, cut"
            " at --max-length; leave --stride out"
        )
    if head == "causal" and options.views > 1:
        yield f"--views {options.views}: a causal head reads no masked words; use --views 1"
