"""The features of a store: views, hidden states, attention maps, a tier of logits, a codec."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.format.codecs.levels import KINDS, Level, form_of, forms_of
from teachonce.support.arrays import Floats

Calibration = dict[str, tuple[Floats, Floats]]
"""Mean and standard deviation [D] of the channels of each hidden state, by its name."""

TIERS = ("topk", "sample", "head")
SMALLEST_CAP, LARGEST_CAP = 1e-30, 1e30
"""Bounds of `cap`. Beyond them a float32 cap may become 0 or infinity, and capped logits NaN."""
MARKS = ("context", "learn", "messages")
"""Keys of `features` that are true or absent: each announces arrays of the parts."""
CONTEXT, LEARN = "sequence/context", "token/learn"
"""Arrays of a part that say which tokens students are trained on."""
MESSAGES = "chat"
"""The group of a part with the spans and roles of the messages of chats."""
ROLES = ("assistant", "system", "developer", "user", "tool", "function", "ipython")
"""Roles of messages by number; UNLISTED_ROLE is any other."""
UNLISTED_ROLE = 255
ACTIONS = 3
"""How many actions a masked word may have: FORMAT.md, section 6."""
TASKS = {"classification": ("sequence/label", "classes"), "tagging": ("token/tag", "tags")}
"""For each task, the array of a part with the gold labels, and the group of a view's logits."""

SEVERAL_LABELS = "multi_label_classification"
PROBLEM_TYPES = (SEVERAL_LABELS, "regression")
"""Values of transformers' `problem_type` that change the meaning of a classifier's outputs."""
OutputKind = Literal["one label", "several labels", "numbers"]

MAX_LABELS = 2**16
# 255 characters, as a file system allows. No name begins with a dot, as temporary files and leases
# do.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
# Exclusive limit of ids, so that a reader may hold them as int32.
LIMIT = 2**31


def check_name(name: object, subject: str) -> str:
    """Return `name` if it can be a path segment of a store. Raises StoreError otherwise."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name:
        raise StoreError(
            f"{subject} {name!r} cannot be a name in a store: use letters, digits, '_', '-', '.'"
        )
    return name


def _whole(value: object, subject: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise StoreError(f"features: {subject} must be a whole number {low}..{high}, got {value!r}")
    return value


def _checked_object(value: object, subject: str, spec: type[Any]) -> Mapping[str, Any]:
    """Check a JSON object against the dataclass `spec`, whose fields are the keys; return the
    object.

    Keys without a default are required. A key is omitted if its value is the default, so a flag
    with default false is true or omitted. Raises StoreError, also for an unknown key.
    """
    defaults = {field.name: field.default for field in fields(spec)}
    keys = [name for name, default in defaults.items() if default is MISSING]
    # An unknown key may change the meaning of the others (FORMAT.md, section 6).
    if not isinstance(value, Mapping) or not set(keys) <= set(value) <= set(defaults):
        raise StoreError(f"features: {subject} must have {' and '.join(keys)}, got {value!r:.80}")
    _check_flags(value, [name for name, default in defaults.items() if default is False])
    for name in value:
        if value[name] == defaults[name]:  # a second form of an absent key, as for `_check_flags`
            raise StoreError(f"features: {name} of {subject} is {value[name]!r}: omit the key")
    return value


def _check_flags(value: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise StoreError for a key with another value than true."""
    # `false` would be a second form of an absent key, and equal features must have equal bytes.
    for key in keys:
        if value.get(key, True) is not True:
            raise StoreError(f"features: {key} must be true or absent, got {value[key]!r:.80}")


def _without_defaults(spec: Any) -> dict[str, Any]:
    """Return the fields of a spec as JSON. Defaults are absent: stores from before a key existed
    keep their bytes."""
    values = {field.name: (getattr(spec, field.name), field.default) for field in fields(spec)}
    return {key: value for key, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class LogitsSpec:
    """Describes the tier of the stored logits.

    tier: `topk`, `sample` or `head`.
    size: the number of best logits K, the number of random draws, or the size of the head's input.
    next_token: row t is the teacher's distribution of token t + 1 (causal teachers).
    observed: the log-probability of token t + 1 itself is stored, even if it is not among the K
        best.
    ranked: the K best ids are stored as indices into a list of the part's different ids, the most
        frequent first, which takes a third less than the ids. Only in tier `topk`.
    cap: the teacher's logits are cap * tanh(z / cap), where z is the head's output (Gemma); None if
        the logits are z itself. Only in tier `head`: the other tiers store probabilities of capped
        logits.
    """

    tier: str
    size: int
    next_token: bool = False
    observed: bool = False
    cap: float | None = None
    ranked: bool = False

    @property
    def has_text(self) -> bool:
        """Return whether the log-probability of every token of the text is known."""
        return self.observed or self.tier == "head"

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise StoreError(f"features: tier must be one of {', '.join(TIERS)}, got {self.tier!r}")
        # `count_dtype` has at most 16 bits; `MAX_COUNT` rows of 2^20 numbers do not overflow int64.
        _whole(self.size, f"size of {self.tier}", 1, 65535 if self.tier == "sample" else 2**20)
        # From tier `head` the log-probability of any token can be computed.
        if self.observed and not (self.next_token and self.tier != "head"):
            raise StoreError(
                "features: observed belongs to logits of next_token in tier topk or sample, got"
                f" {self.to_json()!r:.80}"
            )
        if self.ranked and self.tier != "topk":
            raise StoreError(f"features: ranked belongs to logits of tier topk, got {self.tier}")
        # The comparisons also refuse NaN, and JSON integers too large for a float.
        if self.cap is not None and not (
            self.tier == "head"
            and type(self.cap) in (int, float)
            and SMALLEST_CAP <= self.cap <= LARGEST_CAP
        ):
            raise StoreError(
                f"features: cap of logits must be a number {SMALLEST_CAP:g}..{LARGEST_CAP:g}, and"
                f" only tier head has it, got {self.cap!r:.80} with tier {self.tier}"
            )

    def capped(self, outputs: Any, xp: Any = np) -> Any:
        """Apply `cap` to outputs of the teacher's head, and return the teacher's logits. `xp` is
        the arrays' module: numpy or torch."""
        return outputs if self.cap is None else self.cap * xp.tanh(outputs / self.cap)

    def to_json(self) -> dict[str, Any]:
        return _without_defaults(self)

    @staticmethod
    def from_json(value: object) -> LogitsSpec:
        return LogitsSpec(**_checked_object(value, "logits", LogitsSpec))


@dataclass(frozen=True)
class TaskSpec:
    """Describes the task that the teacher was fine-tuned for.

    kind: `classification` of texts or `tagging` of tokens.
    labels: names of the C classes or tags, by number.
    later_label: the label of a word's pieces after its first, if the tagger was trained on them
        (Mukherjee & Awadallah 2020, "X" in their published code).
    separator: the character between the two texts of a pair; None for single texts.
    problem_type: as in transformers; None if each text has one label, or one score.

    Raises StoreError for values that contradict each other.
    """

    kind: str
    labels: tuple[str, ...]
    later_label: str | None = None
    separator: str | None = None
    problem_type: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in tuple(TASKS):  # a dict would raise TypeError for an unhashable kind
            raise StoreError(f"features: task must be one of {', '.join(TASKS)}, got {self.kind!r}")
        # JSON gives a list, which would not equal the tuple when features are compared.
        object.__setattr__(self, "labels", tuple(self.labels))
        if not all(isinstance(label, str) for label in self.labels):
            raise StoreError(f"features: labels of a task must be strings, got {self.labels!r:.80}")
        _whole(len(self.labels), "number of labels", 1, MAX_LABELS)
        twice, times = Counter(self.labels).most_common(1)[0]
        if times > 1:
            raise StoreError(f"features: the label {twice!r:.80} of the task occurs twice")
        if self.later_label is not None and self.later_number is None:
            raise StoreError(
                "features: later_label must be one of the labels of a tagging task, got"
                f" {self.later_label!r:.80}"
            )
        if self.separator is not None and not (
            self.kind == "classification"
            and isinstance(self.separator, str)
            and len(self.separator) == 1
            and self.separator.isspace()
        ):
            raise StoreError(
                "features: separator must be one white-space character, and the task a"
                f" classification, got {self.separator!r:.80}"
            )
        if self.problem_type is not None and (
            self.problem_type not in PROBLEM_TYPES or self.kind != "classification"
        ):
            raise StoreError(
                f"features: problem_type of a classification must be {' or '.join(PROBLEM_TYPES)},"
                f" or absent, got {self.problem_type!r:.80} of {self.kind}"
            )

    @property
    def is_score(self) -> bool:
        """Return whether the teacher returns one score for a text, as a reranker does."""
        return self.kind == "classification" and len(self.labels) == 1

    @property
    def output_kind(self) -> OutputKind:
        """Return what the teacher's C outputs for a text or token mean.

        "one label": logits of a softmax. "several labels": a logit of a sigmoid for each.
        "numbers": regression values.
        """
        if self.problem_type == SEVERAL_LABELS:
            return "several labels"
        return "numbers" if self.problem_type or self.is_score else "one label"

    @property
    def gold(self) -> str:
        """Return the path of the gold labels in a part. They are int32, with -1 for a text or token
        without a label."""
        return TASKS[self.kind][0]

    @property
    def outputs(self) -> str:
        """Return the path, in a view, of the group with the teacher's task logits."""
        return TASKS[self.kind][1]

    @property
    def later_number(self) -> int | None:
        """Return the label id of `later_label`; None if no label of a tagger has this name."""
        if self.kind != "tagging" or self.later_label not in self.labels:
            return None
        return self.labels.index(self.later_label)

    def to_json(self) -> dict[str, Any]:
        return _without_defaults(self) | {"labels": list(self.labels)}

    @staticmethod
    def from_json(value: object) -> TaskSpec:
        values = _checked_object(value, "task", TaskSpec)
        if not isinstance(values["labels"], list):
            raise StoreError(f"features: labels must be a list, got {values['labels']!r:.80}")
        return TaskSpec(**values)


AS_CAPTURED = "as captured"
"""Value of `EmbeddingSpec.pooling` for imported vectors, whose pooling is unknown."""


@dataclass(frozen=True)
class EmbeddingSpec:
    """Describes one vector for each sequence, computed from the plain text (view 0).

    width: number of elements W.
    pooling: how the teacher pools its states, described for people.
    prompt: the teacher's prompt; every text of the store starts with it.
    normalised: the vectors have length 1.
    parallel: the teacher encoded another text, such as a translation, which is not stored.

    Raises StoreError for values of another type or size.
    """

    width: int
    pooling: str
    prompt: str = ""
    normalised: bool = False
    parallel: bool = False

    def __post_init__(self) -> None:
        _whole(self.width, "width of the embedding", 1, 2**20)
        for key in ("pooling", "prompt"):
            if not isinstance(value := getattr(self, key), str):
                raise StoreError(f"features: {key} must be a string, got {value!r:.80}")

    def to_json(self) -> dict[str, Any]:
        return _without_defaults(self)

    @staticmethod
    def from_json(value: object) -> EmbeddingSpec:
        return EmbeddingSpec(**_checked_object(value, "embedding", EmbeddingSpec))


@dataclass(frozen=True)
class Features:
    """Describes the features that every part of a store holds.

    width: hidden size D. vocabulary: vocabulary size V. form: index into `forms_of(codec)`.
    context: for each sequence, the number of its first tokens that only give context is stored:
        these tokens also end the previous sequence.
    learn: for each token it is stored whether students are trained on it.
    messages: sequences are chats, and the spans and roles of their messages are stored.
    """

    views: int = 1
    max_length: int = 512
    width: int = 1
    vocabulary: int = 1
    codec: str = "default"
    hidden: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    logits: LogitsSpec | None = None
    task: TaskSpec | None = None
    embedding: EmbeddingSpec | None = None
    form: int = 0  # 0 is the form that is written; others are only read
    context: bool = False
    learn: bool = False
    messages: bool = False

    def __post_init__(self) -> None:
        _whole(self.views, "views", 1, 1024)
        _whole(self.max_length, "max_length", 1, 2**20)
        _whole(self.width, "width", 1, 2**20)
        _whole(self.vocabulary, "vocabulary", 1, LIMIT)
        # `forms_of` also refuses an unknown codec.
        _whole(self.form, f"form of codec {self.codec}", 0, len(forms_of(self.codec)) - 1)
        for field in ("hidden", "attention"):
            names = tuple(getattr(self, field))
            object.__setattr__(self, field, names)
            for name in names:
                check_name(name, f"features: {field}")
            if len(set(names)) != len(names):
                raise StoreError(f"features: {field} lists a name twice: {', '.join(names)}")
        if self.messages and not self.learn:
            raise StoreError(
                "features: messages requires learn, which marks the tokens that students are"
                " trained on; store both"
            )
        if self.logits is not None and not isinstance(self.logits, LogitsSpec):
            raise StoreError(f"features: logits must be a LogitsSpec, got {self.logits!r}")
        if self.logits and self.logits.tier == "topk" and self.logits.size > self.vocabulary:
            raise StoreError(
                f"features: topk:{self.logits.size} is more than the vocabulary of "
                f"{self.vocabulary}; request fewer logits"
            )

    @property
    def separator(self) -> str | None:
        """Return the character between the two texts of a pair; None in a store of single texts."""
        return self.task.separator if self.task else None

    @property
    def has_token_features(self) -> bool:
        """Return whether the store has hidden states, attention maps or logits of tokens."""
        return bool(self.hidden or self.attention or self.logits)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of arrays that the store has a codec for."""
        return (*KINDS, *(["embedding"] if self.embedding else []))

    @property
    def level(self) -> Level:
        """Return the codecs of the store, by kind of array."""
        return forms_of(self.codec)[self.form]

    def in_codec(self, codec: str) -> Features:
        """Return the same features with another codec, in the form that is written today."""
        # A copy in the same codec retains its codes, and so their form, which may be an older one.
        return self if codec == self.codec else replace(self, codec=codec, form=0)

    def to_json(self) -> dict[str, Any]:
        """Return the `features` attribute of a store, with the encodings of its arrays."""
        attributes: dict[str, Any] = {
            "views": self.views,
            "max_length": self.max_length,
            "width": self.width,
            "vocabulary": self.vocabulary,
            "codec": self.codec,
            "hidden": list(self.hidden),
            "attention": list(self.attention),
            "logits": None if self.logits is None else self.logits.to_json(),
            "encodings": self.level.encodings(self.kinds),
        }
        optional = {"task": self.task, "embedding": self.embedding}
        attributes |= {key: spec.to_json() for key, spec in optional.items() if spec}
        # Absent if false, as for the keys of logits.
        return attributes | {key: True for key in MARKS if getattr(self, key)}

    @staticmethod
    def from_json(value: object) -> Features:
        """Check and read a `features` attribute. Raises StoreError, which names the wrong key."""
        if not isinstance(value, Mapping):
            raise StoreError(f"features must be a JSON object, got {type(value).__name__}")
        keys = {"views", "max_length", "width", "vocabulary", "codec", "hidden", "attention"}
        missing = sorted((keys | {"logits", "encodings"}) - set(value))
        if missing:
            raise StoreError(f"features lack {', '.join(missing)}")
        logits = None if value["logits"] is None else LogitsSpec.from_json(value["logits"])
        task = TaskSpec.from_json(value["task"]) if "task" in value else None
        vector = EmbeddingSpec.from_json(value["embedding"]) if "embedding" in value else None
        marks: dict[str, Any] = {key: key in value for key in MARKS}
        _check_flags(value, MARKS)
        for key in ("hidden", "attention"):
            if not isinstance(value[key], list):
                raise StoreError(f"features: {key} must be a list of names, got {value[key]!r}")
        # The form is found afterwards, because `form_of` needs `kinds` of checked features.
        features = Features(
            **{key: value[key] for key in keys}, **marks, logits=logits, task=task, embedding=vector
        )
        form = form_of(features.codec, value["encodings"], features.kinds)
        return replace(features, form=form)
