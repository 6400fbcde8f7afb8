"""A paper as data: its arms, its claims, its figures, and what its arms learn from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.reproduce.steps import Steps
from teachonce.support.errors import UserError

SMALL, TITLE, FULL = SIZES = ("small", "title", "full")
OURS = "ours"
ABOUT = "The published setting, with the given teacher and data."  # of the full size
TEACHER = "teacher"
FEWEST = 300  # pieces of a scaled vocabulary: letters need a few hundred
Scores = dict[str, dict[str, list[float]]]  # of an arm, by measure, for every seed


@dataclass(frozen=True)
class Arm:
    """Describes a student by the options of `student-train`, without its stores and seed.

    In a word, {work} is the folder of all arms, {teacher} the teacher, and {seed} the arm's seed.
    stores: the prepared stores that it is trained on.
    students: other arms; it is also trained on stores that use their students as teachers.
    """

    words: tuple[str, ...]
    stores: tuple[int, ...] = (0,)
    students: tuple[str, ...] = ()

    @property
    def needs_others(self) -> bool:
        """Return whether the arm needs files that another arm writes."""
        return bool(self.students) or any("{work}" in word for word in self.words)


@dataclass(frozen=True)
class Task:
    """Describes a task that models are scored by.

    data: the name of the examples; "" if the source has a single task.
    figure: the reported figure, by its name in the `measures` of `downstream`'s task.
    words: of `downstream` in addition to --model and --out. In a word, {work} is the folder of all
        arms, {data} the user's own folder, and {seed} the seed of the arm.

    If there are several test files, the figure is the mean over the files.
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
    teacher, or a model that the task's options fine-tune.

    path: its folder or name; {work} is the folder of all arms. "" is the user's own teacher.
    tasks: they replace the source's tasks.
    """

    path: str
    tasks: Sequence[Task] = ()


@dataclass(frozen=True)
class Probe:
    """Describes an experiment on the reason for a failed claim: both arms again, with further
    options of `student-train`, which take precedence."""

    about: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """Describes a paper's claim about two of its arms.

    says, where: the claim in the paper's terms, and its table or section.
    measures: the tasks of the claim; all if empty.
    average: the claim is about the average of the tasks, not about each task.
    gains: whether `better` is ahead of `worse`, or has no gain over it.
    near: instead of `gains`: the largest lead of `better`, in the unit of the scores.
    share: instead of `gains`: the smallest share of the scores of `better` that `worse` reaches.
    rows: the rows of the published figures, if their names differ from the arms'.
    columns: the published figures of the claim; all if empty.
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
        """Return whether there is a teacher whose size determines the estimates."""
        return self.steps.dry and bool(self.teacher)

    def scaled(self, count: int) -> str:
        """Multiply a length by the scale, as a word; at least 1."""
        return str(max(1, round(count * self.scale)))

    def pieces(self, vocab: str) -> str:
        """Multiply the pieces of a vocabulary by the scale, at least FEWEST; any value that is not
        a number stays the same."""
        match = re.fullmatch(r"(\d+)(k?)", vocab)
        if not match or self.scale == 1:
            return vocab
        count = int(match[1]) * (1000 if match[2] else 1)
        return str(max(FEWEST, round(count * self.scale)))


@dataclass(frozen=True)
class Prepared:
    """Holds the stores and models that the arms of a source are trained on and compared with.

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
    prepare: makes the stores, and the inputs of the tasks.
    best: the paper's own best arm, which `OURS` is compared with.
    student_dump: words of `teacher-dump` for students that are teachers themselves.
    models: further models that are scored, by the name of their row.
    joined: a row that combines arms or models: by test file, the name of the arm or model.
    remark: returns additional results of a folder of work, as Markdown.
    """

    title: str
    about: str
    tasks: Sequence[Task]
    arms: Mapping[str, Arm]
    claims: Sequence[Claim]
    best: str
    prepare: Callable[[Work], Prepared]
    published: Published
    words: tuple[str, ...] = ()
    student_dump: tuple[str, ...] = ()
    models: Mapping[str, Model] = field(default_factory=dict)
    remark: Callable[[Work], str] | None = None
    joined: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def selected(source: Source, names: Sequence[str]) -> Source:
    """Select the arms with these names, the arms whose students they are trained on, and the claims
    about them that a task can judge; without names all.

    Raises UserError for a name that the source lacks.
    """
    if not names:
        return source
    if unknown := sorted(set(names) - source.arms.keys()):
        raise UserError(f"--arm {unknown[0]}: there are {', '.join(source.arms)}")
    teachers = {student for name in names for student in source.arms[name].students}
    arms = {name: arm for name, arm in source.arms.items() if name in {*names, *teachers}}
    rows, measures = {*arms, *source.models, TEACHER}, {task.measure for task in source.tasks}
    claims = [
        claim
        for claim in source.claims
        if {claim.better, claim.worse} <= rows and measures & set(claim.measures or measures)
    ]
    parts = {part for row in source.joined.values() for part in row.values()}
    models = {name: model for name, model in source.models.items() if name not in parts}
    return replace(source, arms=arms, claims=claims, models=models, joined={})
