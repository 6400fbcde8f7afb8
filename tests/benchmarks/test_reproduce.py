"""The miniatures of the sources: their mechanism with a tiny teacher, their words, their data."""

import itertools
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoModel

from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce import costs, examples, slovakbert, steps, verdicts
from benchmarks.reproduce.chance import chance, is_trained
from benchmarks.reproduce.examples import CHOSEN, PARTS, SCORED, Data
from benchmarks.reproduce.mukherjee import cut_labels, few_labels
from benchmarks.reproduce.reproduction import Reproduction, dump, shortened
from benchmarks.reproduce.source import (
    OURS,
    Arm,
    Claim,
    Prepared,
    Probe,
    Published,
    Scores,
    Source,
    Task,
    Work,
    selected,
)
from benchmarks.reproduce.steps import Steps
from benchmarks.reproduce.tinymbert import few_tags
from harness import processes
from teachonce.support.errors import UserError
from tests.end_to_end.support import ok, refused
from tests.making.dumps import write_corpus
from tests.making.models import Teachers
from tests.making.texts import ENGLISH, RUSSIAN
from tests.teacher_dump.windows.test_label_numbers import TAGS

WORDS = ("--student", "bilstm:8,8", "--vocab", "300", "--device", "cpu", "--steps", "2")


def in_this_process(module: str, *words: str | Path, jobs: int = 1) -> None:
    ok(import_module(module).main, *words)


@pytest.mark.slow
def test_arms_are_trained_scored_and_judged(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "in_own_process", in_this_process)
    lines = []
    for text in (ENGLISH + RUSSIAN) * 2:
        lines += [f"{word}\t{TAGS[0]}" for word in text.split()] + [""]
    corpus, model = tmp_path / "corpus.tsv", tiny_teacher("bert", "tagging", TAGS)
    corpus.write_text("\n".join(lines) + "\n", "utf-8")

    def prepare(work: Work) -> Prepared:
        words = ("--model", model, "--head", "tagging", "--hidden", "layer:4", "--device", "cpu")
        stores = [dump(work, work.folder / f"{name}.zarr", corpus, *words) for name in "ab"]
        return Prepared(stores, model, [corpus] * 2)

    one = tmp_path / "de.tsv"
    one.write_text("\n".join(lines[: lines.index("")]) + "\n", "utf-8")
    words = ("--task", "pos", "--test", str(corpus), "--as-is")
    again = Probe("with more steps", ("--steps", "3"))
    source = Source(
        title="a",
        about="s",
        words=WORDS,
        tasks=[Task("", "macro F1", words), Task("mean", "accuracy", (*words, "--test", str(one)))],
        arms={
            "tags": Arm(("--loss", "ce=1")),
            OURS: Arm(("--loss", "ce=1,logit=1", "--vocab", "{work}/tags-{seed}"), (0, 1)),
        },
        claims=[Claim("logits help", "Table 9", OURS, "tags", probe=again)],
        best="tags",
        prepare=prepare,
        published=Published("Table 9", ("F1",), {"tags": (71.3,)}),
    )
    work = Work(tmp_path / "a", Steps())
    run = Reproduction(source, work, 1)
    scores = run.scores()
    assert 0 < run.minutes() < 10
    assert list(scores) == ["teacher", "tags", OURS]
    assert {tuple(found) for found in scores.values()} == {
        ("macro F1", "corpus", "de", "mean accuracy")
    }
    for found in scores.values():
        assert found["corpus"][0] != found["macro F1"][0]  # other figures, each under its name
        assert found["mean accuracy"] == pytest.approx([(found["corpus"][0] + found["de"][0]) / 2])
    other = replace(source, words=(*WORDS, "--lr", "1e-3"))
    with pytest.raises(UserError, match=r"work of other settings \(settings.txt\)"):
        Reproduction(other, work, 1).scores()
    with pytest.raises(UserError, match=r"work of other settings \(settings.txt\)"):
        Reproduction(source, replace(work, scale=0.5), 1).scores()
    learnt = json.loads((work.folder / f"{OURS}-0/training.json").read_text())
    assert [Path(other).name for other in learnt["settings"]["others"]] == ["b.zarr"]
    (one_task,) = source.tasks[1:]
    apart = replace(source, tasks=[one_task], joined={"both": {"corpus": "tags", "de": OURS}})
    rows = Reproduction(apart, work, 1).scores()
    assert list(rows) == ["teacher", "both"]
    (of_corpus,), (of_de,) = scores["tags"]["corpus"], scores[OURS]["de"]
    assert rows["both"] == {
        "corpus": [of_corpus], "de": [of_de],
        "mean accuracy": [pytest.approx((of_corpus + of_de) / 2)],
    }  # fmt: skip
    assert "| both | --vocab 300 --loss ce=1 |" in verdicts.arms_table(apart, rows, run.chances())
    before = (work.folder / "tags-0/model.safetensors").stat().st_mtime_ns
    probed = run.probed((OURS, "tags"), again)
    assert probed.keys() == {"tags", OURS}
    (folder,) = work.folder.glob("probe*")
    steps_of = json.loads((folder / "tags-0/training.json").read_text())["settings"]["steps"]
    assert steps_of == 3
    monkeypatch.setattr(reproduce, "NAMES", ("a",))
    monkeypatch.setattr(reproduce, "sources", lambda *_: {"a": source})
    results = tmp_path / "RESULTS.md"
    ok(reproduce.main, "all", "--work", tmp_path, "--seeds", "1", "--results", results)
    said = results.read_text()
    assert [line for line in said.splitlines() if line.startswith("## ")] == [
        "## a", "## Our recipe against those of the sources"
    ]  # fmt: skip
    assert "| teacher |" in said
    assert f"| {OURS} | --vocab {{work}}/tags-{{seed}} --loss ce=1,logit=1 |" in said
    assert "All arms: `--student bilstm:8,8 --vocab" not in said  # with another vocabulary
    assert "All arms: `--student bilstm:8,8 --device cpu --steps 2`." in said
    assert "| published: F1 |" in said and "Published: Table 9." in said
    (of_tags,) = [line for line in said.splitlines() if line.startswith("| tags |")]
    assert of_tags.endswith(" | 71.3 |")
    # A single tag: the constant answer is always right.
    assert "| logits help | Table 9 | not trained: ours, tags | " in said
    assert "| a | tags | macro F1 |" in said and "| macro F1 | mean accuracy |" in said
    assert (work.folder / "tags-0/model.safetensors").stat().st_mtime_ns == before


def test_a_dry_run_lists_every_command_and_makes_nothing(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tiny_teacher("bert"), write_corpus(tmp_path / "text.txt", 20)

    def prepare(work: Work) -> Prepared:
        words = ("--model", work.teacher, "--logits", "topk:4", "--hidden", "mean")
        store = dump(work, work.folder / "a.zarr", text, *words, "--attention", "none")
        return Prepared([store], work.teacher, [text])

    source = Source(
        "a", "s",
        [Task("", "macro F1", ("--task", "pos", "--test", "{data}/x.tsv", "--as-is"))],
        {"one": Arm(("--student", "32x2x4", "--vocab", "300", "--loss", "mlm=1", "--epochs", "2")),
         "two": Arm(("--student", "teacher:2", "--vocab", "teacher", "--loss", "mlm=1"))},
        [], "one", prepare, Published("Table 9", (), {}),
    )  # fmt: skip
    monkeypatch.setattr(reproduce, "sources", lambda *_: {"a": source})
    words = ("zhao", "--size", "full", "--teacher", model, "--data", tmp_path, "--dry-run")
    work = tmp_path / "work"
    said = ok(reproduce.main, *words, "--work", work, "--seeds", "2", "--tflops", 1e-6)
    lines = [line for line in said.splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in lines] == [
        "teacher-dump", "downstream", *["student-train", "downstream"] * 4
    ]  # fmt: skip
    assert f"--test {tmp_path}/x.tsv" in said and "# all 10 commands: about " in said
    assert "hours, " in said and not work.exists()
    only = ok(reproduce.main, *words, "--work", work, "--seeds", "1", "--arm", "two")
    assert only.count("\nstudent-train") == 1
    line = refused(reproduce.main, *words, "--work", work, "--arm", "three")
    assert "--arm three: there are one, two" in line
    line = refused(reproduce.main, "zhao", "--size", "full", "--work", work)
    assert "give your own --teacher and --data" in line


def test_costs_follow_the_sizes(tmp_path: Path, tiny_teacher: Teachers) -> None:
    teacher = costs.size_of(str(tiny_teacher("bert")))
    weights = sum(
        weight.numel() for weight in AutoModel.from_pretrained(tiny_teacher("bert")).parameters()
    )
    assert teacher.parameters == weights
    text = write_corpus(tmp_path / "text.txt", 10)
    twice = tmp_path / "twice.txt"
    twice.write_text(text.read_text() * 2)
    tokens = costs.tokens_of(text, str(tiny_teacher("bert")))
    assert costs.tokens_of(twice, str(tiny_teacher("bert"))) == pytest.approx(2 * tokens)
    words = [
        "--model", "m", "--out", "o", "--hidden", "mean", "--attention", "none", "--logits", "none"
    ]  # fmt: skip
    plain = costs.dump_cost(words, 1000, teacher)
    assert plain.flops == 2 * weights * 1000
    seen = costs.dump_cost([*words, "--views", "3"], 1000, teacher)
    assert seen.flops == 3 * plain.flops and seen.bytes > 2 * plain.bytes
    words = ["--student", "32x2x4", "--vocab", "300", "--loss", "mlm=1"]
    once = costs.student_cost([*words, "--epochs", "1"], 1000, teacher)
    assert costs.student_cost([*words, "--epochs", "2"], 1000, teacher).flops == 2 * once.flops
    mlm = ["--task", "mlm", "--model", "scratch:bert:32x2x4", "--vocab", "300", "--steps", "10"]
    mlm += ["--train", str(text), "--out", "o", "--batch-size", "4", "--max-length", "64"]
    own = costs.masked_lm_cost(mlm)
    assert own.flops == 6 * (12 * 32**2 * 2 + 300 * 32) * 10 * 4 * 64
    mlm[3] = str(tiny_teacher("bert"))
    assert costs.masked_lm_cost(mlm).flops == 6 * weights * 10 * 4 * 64
    with pytest.raises(UserError, match="none.txt: No such file"):
        costs.tokens_of(tmp_path / "none.txt", str(tiny_teacher("bert")))


def test_lengths_are_scaled_whoever_gives_them() -> None:
    work = Work(Path(), Steps(), scale=0.01)
    words = ["--epochs", "64", "--accumulate", "500", "--vocab", "50k"]
    assert shortened(words, work) == [
        "--epochs", "0.64", "--accumulate", "5", "--vocab", "500"
    ]  # fmt: skip
    few = shortened(["--recipe", "zhao-pruned"], work)
    assert few[:4] == ["--steps", "3000", "--batch-texts", "20"]
    assert few[4:] == ["--vocab", "teacher", "--prune-to", "300"]
    assert shortened(["--recipe", "zhao-nokd", "--epochs", "2"], work)[:2] == ["--epochs", "0.02"]
    untrained = shortened(["--recipe", "kolesnikova-tiny30-none", "--steps", "0"], work)
    assert "--steps" not in untrained and "--epochs" not in untrained
    assert shortened([], work) == []


def test_a_command_that_fails_ends_all() -> None:
    processes.in_own_process("teachonce.downstream.cli", "--help")
    with pytest.raises(
        UserError, match="teachonce.downstream.cli --nonsense: ended with exit code 2"
    ):
        processes.in_own_process("teachonce.downstream.cli", "--nonsense")


SCORES: dict[str, dict[str, list[float]]] = {
    "a": {"F1": [0.6, 0.61, 0.62]}, "b": {"F1": [0.5, 0.51, 0.52]}, "c": {"F1": [0.4, 0.6, 0.8]},
    "teacher": {"F1": [1.0]},
}  # fmt: skip


def judged(claim: Claim, scores: Scores = SCORES, **chances: float) -> str:
    return verdicts._cells(verdicts.judge(claim, scores, chances))[0]


def test_an_arm_brings_the_arms_whose_students_are_its_teachers() -> None:
    assert list(selected(slovakbert.MINIATURE, ["4", "6"]).arms) == ["1", "2", "4", "6"]


def test_a_claim_is_decided_by_more_than_the_deviation() -> None:
    expected = {
        ("a", "b", True): "holds", ("b", "a", True): "does not hold",
        ("c", "b", True): "not decided", ("b", "a", False): "holds",
        ("a", "b", False): "does not hold", ("c", "b", False): "not decided",
        ("teacher", "a", False): "does not hold",
    }  # fmt: skip
    for (better, worse, gains), found in expected.items():
        assert judged(Claim("", "", better, worse, gains=gains)) == found
    for share, found in ((0.8, "holds"), (0.84, "not decided"), (0.9, "does not hold")):
        assert judged(Claim("", "", "a", "b", share=share)) == found
    for near, found in ((0.2, "holds"), (0.1, "not decided"), (0.05, "does not hold")):
        assert judged(Claim("", "", "a", "b", near=near)) == found


def test_an_arm_within_its_seeds_of_chance_is_not_judged() -> None:
    claim = Claim("", "", "a", "b")
    assert judged(claim, F1=0.49) == "holds"
    assert judged(claim, F1=0.5) == "not trained: b"  # .51 with a deviation of .01
    assert judged(claim, F1=0.7) == "not trained: a, b"


def test_an_average_is_judged_by_the_mean_of_its_measures() -> None:
    scores = {"a": {"F1": [0.5, 0.5], "EM": [0.9, 0.9]}, "b": {"F1": [0.6, 0.6], "EM": [0.5, 0.5]}}
    claim = Claim("", "", "a", "b")
    assert judged(claim, scores) == "does not hold (F1), holds (EM)"
    average = replace(claim, average=True)
    assert judged(average, scores) == "holds"
    ((_, figures),) = [verdicts._cells(verdicts.judge(average, scores, {}))]
    assert figures == "mean of 2: a 0.700, b 0.550, 2 of 2"
    # By the mean, .7 and .55 of .3, both are above chance.
    assert judged(average, scores, EM=0.5, F1=0.1) == "not trained: b (EM)"
    assert judged(average, scores, F1=0.55, EM=0.5) == "not trained: a (F1), b (EM)"
    assert judged(average, scores, F1=0.6) == "not trained: a, b (F1)"


def test_claims_have_one_row_with_the_published_figures() -> None:
    claim = Claim("first", "Table 1", "b", "a", probe=Probe("with more", ("--steps", "9")))
    published = Published("Table 1", ("F1", "EM"), {"a": (1.5, ""), "b": (2.5, 3)})
    source = Source(
        "", "", [Task("", "F1", ())], {"a": Arm(())}, [claim], "a",
        lambda work: Prepared([], "", []), published=published,
    )  # fmt: skip
    again = {"a": {"F1": [0.5]}, "b": {"F1": [0.6]}}
    said = verdicts.claims_table(source, SCORES, {}, lambda claim: again)
    row = "| first | Table 1 | does not hold | F1: b 0.510, a 0.610, 0 of 3 | F1 2.5 / 1.5 |"
    assert row in said.splitlines()
    assert "| the same, with more |  | holds | F1: b 0.600, a 0.500, 1 of 1 |  |" in said
    of_teacher = replace(claim, better="teacher", worse="a", gains=False)
    level = replace(source, claims=[of_teacher])
    said = verdicts.claims_table(level, SCORES, {}, lambda claim: {"a": {"F1": [1.1]}})
    assert "the same, with more |  | holds | F1: teacher 1.000, a 1.100, 0 of 1 |" in said
    elsewhere, larger = replace(claim, measures=("EM",)), replace(claim, better="larger")
    others = replace(source, claims=[elsewhere, replace(larger, says="second"), elsewhere])
    said = verdicts.claims_table(others, SCORES, {}, lambda claim: again)
    assert said.endswith(" |\n\nNo arm or no data here: first; second.")
    assert len(said.splitlines()) == 4
    best = [Claim(f"a is the best, better than: {other}", "Table 1", "a", other) for other in "bc"]
    of_best = replace(source, claims=best)
    said = verdicts.claims_table(of_best, SCORES, {}, lambda claim: again)
    row = "| a is the best, better than: b | Table 1 | holds | F1: a 0.610, b 0.510, 3 of 3"
    assert said.splitlines()[2].startswith(f"{row} |") and len(said.splitlines()) == 4
    scores = SCORES | {"c": {"F1": [0.4, 0.41, 0.42]}}
    more = replace(published, rows={**published.rows, "c": (0.5, 1)})
    of_best = replace(of_best, published=more)
    said = verdicts.claims_table(of_best, scores, {}, lambda claim: again)
    figures = "F1: a 0.610, b 0.510, 3 of 3; c 0.410, 3 of 3"
    row = (
        f"| a is the best, better than: b; c | Table 1 | holds | {figures} | in the table of arms |"
    )
    assert said.splitlines()[2:] == [row]
    one = replace(source, claims=[replace(claim, columns=("EM",))])
    assert "0 of 3 |  |" in verdicts.claims_table(one, SCORES, {}, lambda claim: again)
    said = verdicts.arms_table(source, SCORES, {"F1": 0.25})
    assert "| a |  | 0.610 ± 0.010 | 61% | 1.5 |  |" in said
    assert "| chance |  | 0.250 |  |  |  |" in said


def test_chance_is_the_better_of_two_guesses(tmp_path: Path) -> None:
    table = tmp_path / "a.tsv"
    table.write_text("text\tlabel\n" + "x\t0\n" * 3 + "x\t1\n")
    words = ("--task", "classify", "--as-is", "--test", str(table))
    assert chance(words, "accuracy") == 3 / 4
    # Always 0: F1 6/7 and 0. At random: 2 * 3/8 / (5/4) = 3/5, and 2 * 1/8 / (3/4) = 1/3.
    assert chance(words, "macro F1") == pytest.approx((3 / 5 + 1 / 3) / 2)
    assert chance(words, "weighted F1") == pytest.approx(3 / 4 * 6 / 7)
    assert chance(words, "F1") == pytest.approx(2 * (1 / 4) / (1 + 1 / 4))  # always 1
    assert chance(words, "Matthews") == 0
    tags = tmp_path / "b.tsv"
    tags.write_text("a\tN\nb\tN\n\nc\tV\nd\tN\n")
    two = ("--task", "pos", "--as-is", "--test", str(tags))
    assert chance(two, "accuracy") == 3 / 4
    assert chance(("--task", "ner", *two[2:]), "entity F1") == 0
    other = tmp_path / "c.tsv"
    other.write_text("a\tN\nb\tV\n")
    assert chance((*two, "--test", str(other)), "accuracy") == (3 / 4 + 1 / 2) / 2
    assert not is_trained([0.75, 0.77], 0.75) and is_trained([0.79, 0.77], 0.75)


@pytest.mark.parametrize("separate", [True, False])
def test_examples_are_cut_into_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separate: bool
) -> None:
    monkeypatch.setattr(examples, "DATA", tmp_path)
    rows = [f"{number}\t{number % 2}" for number in range(2000)]
    (tmp_path / "a.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    by_label = [f"{number}\t{number // 5500}" for number in range(5000, 6000)]
    (tmp_path / "b.tsv").write_text("\n".join(["text\tlabel", *by_label]) + "\n")
    data = Data("", "F1", "cut", "classify", "a.tsv", "b.tsv" if separate else "", few=300)
    data.cut(tmp_path)
    found = {part: (tmp_path / f"cut.{part}.tsv").read_text().splitlines() for part in PARTS}
    assert all(lines.pop(0) == "text\tlabel" for lines in found.values())
    assert {line[-1] for line in found["test"]} == {"0", "1"}
    expected = (300, CHOSEN, SCORED)
    assert tuple(len(found[part]) for part in PARTS) == expected
    assert len(set(itertools.chain(*found.values()))) == sum(expected)
    sentences = "\n\n".join(f"a\tO\n{number}\tB-X" for number in range(10))
    (tmp_path / "c.tsv").write_text(f"#\tbook_1\n{sentences}\n")
    Data("", "entity F1", "tags", "ner", "c.tsv").cut(tmp_path)
    assert not any("#" in path.read_text() for path in tmp_path.glob("tags.*"))
    assert (tmp_path / "tags.test.tsv").read_text().count("\n\n") == 1  # a fifth: two sentences


def test_few_labels_and_few_tags(tmp_path: Path) -> None:
    rows = [f"text {n}\t{n % 2}" for n in range(6000)]
    table = tmp_path / "table.tsv"
    table.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    cut_labels(table, tmp_path, 100)
    few, dev, all_, rest = (
        (tmp_path / f"{name}.tsv").read_text().splitlines()
        for name in ("few", "dev", "all", "rest")
    )
    used = {row.rpartition("\t")[0] for row in (*dev, *all_)}
    assert len(rest) == 1 + 1300 and not used & {row.rpartition("\t")[0] for row in rest[1:]}
    assert len(few) == 1 + 2 * 100 and len(dev) == 501 and len(all_) == 4201
    assert {row for row in all_ if not row.endswith("\t")} == set(few)
    assert not set(dev[1:]) & {row.rpartition("\t")[0] + "\t" for row in all_}
    fewer, some = few_labels([*rows, "without\t"], 5, 20)
    assert len(fewer) == 10 and len(some) == 30
    fewer, every = few_labels(["without\t", *rows], 5)
    assert "without\t" in every and len(fewer) == 10 and len(every) == 6001
    out = few_tags(["a\tO\nb\tB-X", "c\tO"], tmp_path / "few_words.tsv", 1)
    assert out.read_text() == "a\tO\nb\tB-X\n\nc\t\n\n"
