"""What a dump is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from store import LogitsSpec
from store.errors import UserError
from teacher_dump.models import resolve_model

PART_TOKENS = (
    1 << 17
)  # work lost at most by a kill; a part is also what lies in memory before it is written
DEFAULT_CORPUS = "python-docs"
DEFAULT_MAX_LENGTH = 256


@dataclass(frozen=True)
class DumpOptions:
    """Everything that decides what a store holds; see `teacher-dump --help` for each."""

    model: str
    out: Path
    corpus: tuple[str, ...] = ()
    text_column: str | None = None
    head: str = "auto"
    logits: str = "topk:64"
    hidden: str = "mean"
    attention: str = "mean"
    views: int = 1
    mask_prob: float = 0.15
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

    def resolved(self) -> DumpOptions:
        """The same options with every `auto` decided for this machine."""
        import torch  # here and not above: --help must not wait for it

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if device.startswith("cuda") else "fp32"
        corpus = self.corpus
        if not corpus:
            corpus = (resolve_model(self.model).default_corpus or DEFAULT_CORPUS,)
        return replace(self, device=device, precision=precision, corpus=corpus)


def check_options(options: DumpOptions) -> None:
    """Refuse, in one line, what cannot work whatever the teacher is."""
    import torch

    if options.views < 1:
        raise UserError(f"--views {options.views}: view 0 is the plain text, so at least 1")
    if not 0 < options.mask_prob < 1:
        raise UserError(
            f"--mask-prob {options.mask_prob}: expected a share of words between 0 and 1"
        )
    if options.batch_tokens < 1 or (options.limit is not None and options.limit < 1):
        raise UserError("--batch-tokens and --limit count tokens: at least 1")
    if options.logits == options.hidden == options.attention == "none":
        raise UserError(
            "--logits, --hidden and --attention are all none: the store would hold nothing of the"
            " teacher"
        )
    if options.head == "mlm" and options.logits == "none":
        raise UserError("--head mlm and --logits none contradict each other: leave one out")
    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: expected 0 or more")
    kind, _, number = options.device.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdigit():
        raise UserError(f"--device {options.device}: expected auto, cpu, cuda or cuda:N")
    devices = torch.cuda.device_count()
    if kind == "cuda" and int(number or 0) >= devices:
        raise UserError(
            f"--device {options.device}: this machine has {devices} CUDA devices; use --device cpu"
        )


def parse_logits(spec: str, width: int, vocabulary: int) -> LogitsSpec | None:
    """`topk:K`, `sample:DRAWS`, `head` or `none` as a LogitsSpec; UserError for anything else."""
    tier, _, size = spec.partition(":")
    if spec == "none":
        return None
    if spec == "head":
        return LogitsSpec("head", width)
    if tier in ("topk", "sample") and size.isdigit() and int(size) > 0:
        if tier == "topk" and int(size) >= vocabulary:
            raise UserError(
                f"--logits {spec}: the teacher's vocabulary has {vocabulary} tokens; keep fewer"
            )
        return LogitsSpec(tier, int(size))
    raise UserError(f"--logits {spec}: expected topk:K, sample:DRAWS, head or none")
