"""A paper as data: its arms, its claims, its figures, and what its arms learn from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reproduce.steps import Steps

SMALL, FULL = SIZES = ("small", "full")
OURS = "ours"
ABOUT = "The published setting, with the given teacher and data."  # of the full size
TEACHER = "teacher"
FEWEST = 300  # pieces of a scaled vocabulary: letters need some hundred
Scores = dict[str, dict[str, list[float]]]  # of an arm, by measure, for every seed


@dataclass(frozen=True)
class Arm:
    """Describes a student by the options of `student-train`, without its stores and seed.

    In a word, {work} is the folder of all arms, {teacher} the teacher, and {seed} the arm's seed.
    stores: which of the prepared stores it learns from.
    students: other arms; it also learns from stores that their students make as teachers.
    """

    words: tuple[str, ...]
    stores: tuple[int, ...] = (0,)
    students: tuple[str, ...] = ()

    @property
    def needs_others(self) -> bool:
        """Tell whether the arm needs what another arm leaves in the folder."""
        return bool(self.students) or any("{work}" in word for word in self.words)


@dataclass(frozen=True)
class Task:
    """Describe a task that models are scored by.

    data: the name of the examples; "" where the source has a single task.
    figure: the figure that is reported, by its name in the `measures` of `downstream`'s task.
    words: of `downstream` in addition to --model and --out. In a word, {work} is the folder of all
        arms, {data} the user's own folder, and {seed} the seed of the arm.

    Each of several files to test has a column of its own next to the mean over the files.
    """

    data: str
    figure: str
    words: tuple[str, ...]

    @property
    def measure(self) -> str:
        """Return the heading of the task's column: the examples and the name of the figure."""
        return f"{self.data} {self.figure}".lstrip()


@dataclass(frozen=True)
class Model:
    """Describes a model that is scored with the arms but not trained by `student-train`: a larger
    teacher, or one that the task's options fine-tune.

    path: its folder or name; {work} is the folder of all arms. "" is the user's own teacher.
    tasks: in place of those of the source.
    """

    path: str
    tasks: Sequence[Task] = ()


@dataclass(frozen=True)
class Probe:
    """Describes an experiment on why a claim does not hold here: both arms again, with further
    options of `student-train`, which take precedence."""

    about: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """Describes what a paper claims about two of its arms.

    says, where: the claim in the paper's terms, and its table or section.
    measures: the tasks of which the paper says it; all if empty.
    average: the paper speaks of the average of the tasks, not of each.
    gains: whether `better` is ahead of `worse`, or else brings nothing over it.
    near: in place of `gains`: how far `better` may be ahead at most, in the unit of the scores.
    share: in place of `gains`: the part of the scores of `better` that `worse` reaches at least.
    rows: the rows of the published figures, where they are not named as the arms.
    columns: the published figures that the paper says it of; all if empty.
    """

    says: str
    where: str
    better: str
    worse: str
    measures: tuple[str, ...] = ()
    average: bool = False
    gains: bool = True
    near: float | None = None
    share: float | None = None
    rows: tuple[str, str] | None = None
    columns: tuple[str, ...] = ()
    probe: Probe | None = None


@dataclass(frozen=True)
class Published:
    """Holds figures of a paper by the name of the arm, their columns, and where they are."""

    where: str
    columns: tuple[str, ...]
    rows: Mapping[str, Sequence[float | str]]


@dataclass(frozen=True)
class Work:
    """Holds the folder of a reproduction, and the inputs of its steps.

    teacher, larger, data: the user's own, of the full size; `larger` may be "".
    scale: the factor for the lengths, batches and vocabularies of the full size.
    """

    folder: Path
    steps: Steps
    teacher: str = ""
    larger: str = ""
    data: Path = Path()
    scale: float = 1.0

    @property
    def estimated(self) -> bool:
        """Tell whether there is a teacher by whose size the steps are estimated."""
        return self.steps.dry and bool(self.teacher)

    def scaled(self, count: int) -> str:
        """Multiply a length by the scale, as a word; at least 1."""
        return str(max(1, round(count * self.scale)))

    def pieces(self, vocab: str) -> str:
        """Multiply the pieces of a vocabulary by the scale, at least FEWEST; one that is no number
        stays as it is."""
        found = re.fullmatch(r"(\d+)(k?)", vocab)
        if not found or self.scale == 1:
            return vocab
        whole = int(found[1]) * (1000 if found[2] else 1)
        return str(max(FEWEST, round(whole * self.scale)))


@dataclass(frozen=True)
class Prepared:
    """Holds what the arms of a source are trained on and compared with.

    teacher: the model that is scored with the arms.
    texts: the text of each store.
    """

    stores: Sequence[Path]
    teacher: str | Path
    texts: Sequence[Path]


@dataclass(frozen=True)
class Source:
    """Describes the experiments of a paper at one size.

    about: the setting in words.
    words: of `student-train`, for all arms.
    prepare: makes the stores, and what the tasks need.
    best: the paper's own best arm, which `OURS` is compared with.
    student_dump: words of `teacher-dump` for students that are teachers themselves.
    models: further models that are scored, by the name of their row.
    joined: a row of several arms or models, which do not have one each: by test file the name of
        the one that it is of.
    remark: returns what a folder of work shows beside the scores, as Markdown.
    """

    title: str
    about: str
    words: tuple[str, ...]
    tasks: Sequence[Task]
    arms: Mapping[str, Arm]
    claims: Sequence[Claim]
    best: str
    prepare: Callable[[Work], Prepared]
    published: Published
    student_dump: tuple[str, ...] = ()
    models: Mapping[str, Model] = field(default_factory=dict)
    remark: Callable[[Work], str] | None = None
    joined: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
