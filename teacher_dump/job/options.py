"""What a dump is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from store import LogitsSpec
from store.format.features import TASKS
from support.console import check_device
from support.errors import UserError
from teacher_dump.teacher.checkpoint_names import corpus_of

PART_TOKENS = (
    1 << 17
)  # work lost at most by a kill; a part is also what lies in memory before it is written
DEFAULT_CORPUS = "python-docs"
DEFAULT_MAX_LENGTH = 256
DEFAULT_LOGITS = "topk:64"
MAX_DRAWS = 2**16 - 1  # of a token: a store counts them in 16 bits


@dataclass(frozen=True)
class DumpOptions:
    """Everything that decides what a store holds; see `teacher-dump --help` for each."""

    model: str
    out: Path
    corpus: tuple[str, ...] = ()
    text_column: str | None = None
    label_column: str | None = None
    head: str = "auto"
    logits: str | None = None  # DEFAULT_LOGITS where there is an LM head
    hidden: str = "mean"
    attention: str = "mean"
    views: int = 1
    mask_prob: float = 0.15
    mask_words: str = "uniform"
    seed: int = 0
    codec: str = "default"
    max_length: int | None = None
    stride: int = 0
    batch_tokens: int = 8192
    device: str = "auto"
    precision: str = "auto"
    limit: int | None = None
    part_tokens: int = PART_TOKENS
    weights: bool = True
    trust_remote_code: bool = False
    text_only: bool = False  # what the store is for may lie outside the parts

    def resolved(self) -> DumpOptions:
        """The same options with every `auto` decided for this machine. UserError for a GPU that it
        does not have."""
        device = self.device
        if device != "cpu":
            import torch  # here and not above: neither --help nor a mistake must wait for it

            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            check_device(device, torch.cuda.device_count())
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if device.startswith("cuda") else "fp32"
        return replace(self, device=device, precision=precision, corpus=self.sources())

    def sources(self) -> tuple[str, ...]:
        """The corpus, also where none was given."""
        return self.corpus or (corpus_of(self.model) or DEFAULT_CORPUS,)


def describe(options: DumpOptions, corpus_was_given: bool) -> str:
    """The settings that are known before the teacher is loaded, one line each."""
    source = "" if corpus_was_given else " (no --corpus given: the default)"
    rows = {
        "teacher": options.model,
        "corpus": ", ".join(options.corpus) + source,
        "codec": options.codec,
        "device": (
            f"{options.device}, {options.precision}, {options.batch_tokens} tokens a batch, seed"
            f" {options.seed}"
        ),
        "out": str(options.out),
    }
    if options.trust_remote_code:
        rows["warning"] = f"the Python code that comes with {options.model} runs on this machine"
    return "\n".join(f"{name:9} {value}" for name, value in rows.items())


def check_options(options: DumpOptions) -> None:
    """Refuse, in one line, what cannot work whatever the teacher is; without torch, which takes
    seconds to load."""
    if options.views < 1:
        raise UserError(f"--views {options.views}: view 0 is the plain text, so at least 1")
    if not 0 < options.mask_prob < 1:
        raise UserError(
            f"--mask-prob {options.mask_prob}: expected a share of words between 0 and 1"
        )
    if options.mask_words == "rare" and options.views == 1:
        raise UserError(
            "--mask-words rare: in view 0, the only one, no word is masked; ask for masked views"
            " (--views 2), or leave it out"
        )
    for name, tokens in (("--batch-tokens", options.batch_tokens), ("--limit", options.limit)):
        if tokens is not None and tokens < 1:
            raise UserError(f"{name} {tokens}: counts tokens, at least 1")
    head = "--head" if options.head == "none" else "--logits"
    logits = options.head if options.head == "none" else options.logits
    nothing = logits == options.hidden == options.attention == "none"
    if nothing and options.head not in TASKS and not options.text_only:
        raise UserError(
            f"{head}, --hidden and --attention are all none: the store would hold nothing of the"
            " teacher; ask for one of them"
        )
    if options.head in ("mlm", "causal") and options.logits == "none":
        raise UserError(
            f"--head {options.head} and --logits none contradict each other: leave one out"
        )
    if options.head != "auto":
        check_head(options, options.head)
    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: expected 0 or more")
    if options.logits is not None:
        _tier_and_size(options.logits)
    for spec in (options.hidden, options.attention):
        feature_words(spec)
    if options.device != "auto":
        check_device(options.device)


def check_head(options: DumpOptions, head: str) -> None:
    """Refuse options that mean nothing for a head."""
    if head in TASKS and options.logits not in (None, "none"):
        raise UserError(
            f"--logits {options.logits}: such tiers are for a vocabulary; of a {head} head all"
            " logits are stored: leave --logits out"
        )
    if head != "classification" and options.label_column is not None:
        raise UserError(
            f"--label-column {options.label_column}: labels are kept beside a classification head,"
            f" and the teacher's is: {head}; leave it out, or fine-tune the teacher for them first"
        )
    if head == "classification" and options.stride:
        raise UserError(
            f"--stride {options.stride}: for a classification head a document is one sequence, cut"
            " at --max-length; leave --stride out"
        )
    if head == "causal" and options.views > 1:
        raise UserError(
            f"--views {options.views}: a causal head reads no masked words; use --views 1"
        )


def feature_words(spec: str) -> list[tuple[str, int]]:
    """`mean`, `groups:3`, `layer:4` or a comma list of them as (kind, number); [] for `none`.

    Raises UserError for an unknown word and for `none` beside others.
    """
    words = [part.strip() for part in spec.split(",")]
    found = []
    for word in words if words != ["none"] else ():
        kind, _, number = word.partition(":")
        if word == "none":
            raise UserError(f"{spec}: none beside others; leave it out")
        if word == "mean":
            found.append((kind, 0))
        elif number.isdecimal() and (kind == "layer" or (kind == "groups" and int(number) > 0)):
            found.append((kind, int(number)))
        else:
            raise UserError(f"unknown feature {word!r}: expected mean, groups:N, layer:I or none")
    return found


def parse_logits(
    spec: str, width: int, vocabulary: int, next_token: bool = False
) -> LogitsSpec | None:
    """`topk:K`, `sample:DRAWS`, `head` or `none` as a LogitsSpec; UserError for anything else."""
    tier, size = _tier_and_size(spec)
    if tier == "none":
        return None
    if tier == "topk" and size >= vocabulary:
        raise UserError(
            f"--logits {spec}: the teacher's vocabulary has {vocabulary} tokens; keep fewer"
        )
    return LogitsSpec(tier, size or width, next_token)


def _tier_and_size(spec: str) -> tuple[str, int]:
    """What can be told of `--logits` before the teacher is loaded; size 0 where it has none."""
    tier, _, size = spec.partition(":")
    if spec in ("none", "head"):
        return spec, 0
    if tier in ("topk", "sample") and size.isdecimal() and int(size) > 0:
        if tier == "sample" and int(size) > MAX_DRAWS:
            raise UserError(f"--logits {spec}: at most {MAX_DRAWS} draws of a token; ask for fewer")
        return tier, int(size)
    raise UserError(f"--logits {spec}: expected topk:K, sample:DRAWS, head or none")
