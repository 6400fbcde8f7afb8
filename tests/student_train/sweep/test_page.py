"""The page of a sweep and the table of trained students.

- The page of a sweep: made at any time, of files alone; read in a real browser.
- The table of trained students: ranked, with the settings that differ, escaped in a notebook.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from teachonce import student_table
from teachonce.student_train.output.ranking import LOSS, MEASURES, Measure
from teachonce.student_train.sweep import main as student_sweep
from teachonce.student_train.sweep.page import charts
from teachonce.student_train.sweep.page.charts import Point, curves, front, importances
from teachonce.student_train.sweep.page.report import StudentFiles, _lines, _read, write_report
from teachonce.support.errors import UserError
from tests.browser import PHONE, WIDE, check_accessible, opened
from tests.end_to_end.support import refused, report_of, says

pytest.importorskip("altair")
NATS = MEASURES[-1]
EVIL = "</script><img src=x onerror=alert(1)>"


def student(number: int, **figures: float) -> StudentFiles:
    settings = {"lr": str(number / 1000), "loss": "mlm=1" if number % 2 else "mlm=1,kl=1"}
    return StudentFiles(number, f"s{number}", settings, "finished", "", figures)


def write_sweep(folder: Path) -> Path:
    """Write the folder of a sweep: six finished students, one pruned, one failed, one running."""
    states = ["finished"] * 6 + ["pruned", "failed", "running"]
    runs = []
    for number, state in enumerate(states, 1):
        loss = {"mlm": 1.0} if number % 3 == 0 else {"mlm": 1.0, "kl": 1.0}
        printed = "mlm=1" if len(loss) == 1 else "mlm=1,kl=1"
        size, out = (64, 128, 256)[number % 3], folder / f"student{number}"
        settings = {"student": f"{size}x2x2", "loss": printed, "lr": f"{number / 1000:g}"}
        out.mkdir(parents=True)
        quality = 2.5 - size / 400 - 0.1 * len(loss) + 0.01 * number
        report: dict[str, Any] = {"settings": {"loss": loss}, "store": {"content": 1}}
        report |= {"environments": [], "tokenizer": "x"}
        if state == "finished":
            report["result"] = {NATS.name: quality, "parameters": size * 9, "steps": 40}
            (out / "model.safetensors").write_bytes(bytes(size * 900))
            (out / "README.md").write_text(f"# Student {number}\n\nIt says {EVIL}.\n")
        (out / "training.json").write_text(json.dumps(report))
        lines = [
            {"step": n, NATS.name: quality + 4 / n} for n in range(4, 41, 4 * (1 + number % 2))
        ]
        (out / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4')
        speed = {
            "mood": {"accuracy": 90 - quality},
            "speed": {
                "cpu sentence_ms": size / 50 + number / 10,
                "cpu sentence_ms lower quartile": size / 50 + number / 10 - 0.25,
                "cpu sentence_ms upper quartile": size / 50 + number / 10 + 0.5,
                "disk_bytes": size * 900,
            },
        }
        problem = f"step 3: diverged {EVIL}" if state == "failed" else ""
        done = state == "finished"
        runs.append(
            {"folder": out.name, "settings": settings, "params": {}, "state": state}
            | {"problem": problem, "scores": speed if done else {}}
        )
    content: dict[str, Any] = {"varied": ["student", "loss", "lr"], "space": None, "runs": runs}
    content["references"] = {"teacher": {"mood": {"accuracy": 93.0}}}
    (folder / "runs.json").write_text(json.dumps(content))
    return folder


def test_the_front_has_those_that_none_beats() -> None:
    points = [(5, 2.0), (1, 3.0), (3, 1.0), (4, 1.5), (2, 2.5)]  # cost, nats
    made = [
        Point(student(n, **{NATS.name: nats}), *[cost] * 3) for n, (cost, nats) in enumerate(points)
    ]
    assert [point.cost for point in front(made, NATS)] == [1, 2, 3]


def test_noise_of_a_cost_puts_no_student_on_the_front() -> None:
    """The second is .01 ms faster than the better first, within the quartiles of both."""
    points = [(2.00, 1.0), (1.99, 1.1), (1.5, 1.2)]  # ms, nats
    made = [
        Point(student(n, **{NATS.name: x}), ms, ms - 0.02, ms + 0.02)
        for n, (ms, x) in enumerate(points)
    ]
    assert [point.cost for point in front(made, NATS)] == [1.5, 2.0]
    exact = [point._replace(low=point.cost, high=point.cost) for point in made]
    assert [point.cost for point in front(exact, NATS)] == [1.5, 1.99, 2.0]


def test_the_setting_that_decides_matters_most() -> None:
    made = [student(n, **{NATS.name: 2.0 - (n % 2) + n / 1e4}) for n in range(12)]
    shares = importances(made, NATS, ["lr", "loss"])
    assert shares["loss"] > 0.9 and sum(shares.values()) == pytest.approx(1)
    assert importances(made[:3], NATS, ["lr", "loss"]) == {}


def test_losses_of_different_definitions_share_no_axis() -> None:
    """The chart for a task's score uses a figure that is comparable between all students."""
    score, per_character = Measure("mood accuracy", "", largest=True), "valid_mlm_per_character"
    made = [student(1), student(2)]
    for each in made:
        each.curve = [(4, {LOSS.name: 3.0, per_character: 2.0}), (8, {LOSS.name: 2.0})]
    drawn = [curves(made, score, varied, {}) for varied in (["lr"], ["lr", "loss"])]
    assert [chart and chart["headings"][-1] for chart in drawn] == [LOSS.name, per_character]
    made[0].curve = made[1].curve = [(4, {LOSS.name: 3.0})]
    assert curves(made, score, ["lr", "loss"], {}) is None
    assert curves(made, score, ["lr"], {}) and curves(made, LOSS, ["lr"], {})
    assert curves([student(1)], score, ["lr"], {}) is None


def test_a_page_needs_a_sweep(tmp_path: Path) -> None:
    says(refused(student_sweep, "--page", tmp_path), "no runs.json there; give the folder")
    line = refused(student_sweep, "--page", tmp_path, "--out", tmp_path / "b", "--vocab", "5k")
    says(line, "--page writes the page into the folder of its sweep", "leave --vocab, --out out")
    (tmp_path / "runs.json").write_text("{}")
    line = "runs.json is damaged (varied is missing); remove it: the students in the folder are not"
    assert refused(student_sweep, "--page", tmp_path).endswith(f"{line} affected")
    says(refused(student_sweep, "--vocab", "5k"), "--store")


def test_a_page_escapes_what_it_shows(tmp_path: Path) -> None:
    page = write_report(write_sweep(tmp_path / "sweep")).read_text()
    assert EVIL not in page and "It says &lt;/script&gt;" in page
    assert "6 finished, 1 pruned, 1 failed, 1 running" in page
    assert "The best first." in page
    order = re.findall(r'<td><a href="#card-(\d)">', page)
    assert order[0] == "2" and sorted(order) == [*"123456789"] and order[-3:] == [*"789"]


@pytest.mark.slow
def test_the_page_says_which_student_to_ship(tmp_path: Path) -> None:
    """By a task if one was scored, but no student with constant answers."""
    page = write_report(write_sweep(tmp_path / "sweep")).read_text()
    accuracy = 90 - (2.5 - 256 / 400 - 0.2 + 0.02)
    text = f"Ship number 2, because its mood accuracy of {accuracy:.4g} is the best of 6 students"
    assert f"{text} (a score of a task), {100 * accuracy / 93:.1f} % of the" in page
    smaller = 90 - (2.5 - 128 / 400 - 0.2 + 0.01)
    assert f"smaller is number 1, with {smaller:.4g} in 115 kB. " in page
    assert "To export it, run this command in the folder that contains sweep." in page
    assert "student-export sweep/student2 --to onnx --out student2-onnx" in page
    assert "5.32 (5.07 to 5.82)" in page  # ms
    assert "not trained" not in page and "of the teacher's mood accuracy</th>" in page
    content = json.loads((tmp_path / "sweep/runs.json").read_text())
    content["runs"][1]["scores"]["mood"]["Matthews"] = 0.0
    content["runs"][0]["scores"]["mood"]["accuracy deviation"] = 0.5
    content["references"]["other"] = {}
    (tmp_path / "sweep/runs.json").write_text(json.dumps(content))
    page = write_report(tmp_path / "sweep").read_text()
    assert page.count("finished, not trained") == 1
    assert "Ship number 5, because" in page and "± 0.5" in page
    assert "These figures have no standard deviations" in page
    first, second = content["runs"][0]["settings"], content["runs"][4]["settings"]
    content["varied"].append("seed")
    first["seed"], second["seed"] = "0", "1"
    second.update({k: v for k, v in first.items() if k != "seed"})
    one, other = (run["scores"]["mood"]["accuracy"] for run in (content["runs"][n] for n in (0, 4)))
    (tmp_path / "sweep/runs.json").write_text(json.dumps(content))
    seeds = write_report(tmp_path / "sweep").read_text()
    assert f"{other:.5g} ± {abs(one - other) / 2**0.5:.5g}" in seeds  # of two
    assert "These figures have no standard deviations" not in seeds
    assert "No scores yet: other. They follow the last student." in page
    # One seed of a setting is the best student, and the other decides whether it is recommended.
    content["runs"][0]["scores"]["mood"]["accuracy"] = 99.0
    for second, best in (
        (60.0, ""),
        (97.0, "Ship number 1, because its setting has the best mean mood accuracy, 98, of 5 stud"),
    ):
        content["runs"][4]["scores"]["mood"]["accuracy"] = second
        (tmp_path / "sweep/runs.json").write_text(json.dumps(content))
        page = write_report(tmp_path / "sweep").read_text()
        assert best in page and ("Ship number 1," in page) == bool(best)
    assert "(a score of a task); its own, 99 ± 0.5, is the best of these seeds, 106.5 % of" in page
    content["varied"].remove("seed")  # as trials of a search that repeats its settings
    (tmp_path / "sweep/runs.json").write_text(json.dumps(content))
    page = write_report(tmp_path / "sweep").read_text()
    assert "Ship number 1, because its mood accuracy of 99 ± 0.5 is the best of 5 students" in page


@pytest.mark.usefixtures("no_forests")
def test_a_student_of_stages_is_none_of_mlm_alone(tmp_path: Path) -> None:
    """Whatever the losses of its last stage are."""
    sweep = write_sweep(tmp_path / "sweep")
    alone = float(report_of(sweep / "student3")["result"][NATS.name])
    path = sweep / "student6/training.json"
    report = json.loads(path.read_text())
    report["settings"]["stages"] = [{"loss": {"hidden": 1.0}}, {"loss": {"mlm": 1.0}}]
    report["result"][NATS.name] = alone - 1
    path.write_text(json.dumps(report))
    students = [
        _read(sweep, sweep / f"student{n}", n, run)
        for n, run in enumerate(json.loads((sweep / "runs.json").read_text())["runs"], 1)
    ]
    assert _lines(students, NATS) == {"MLM only": alone}


def elsewhere(folder: Path) -> Path:
    """Write a student outside of the sweep."""
    made = folder / "elsewhere"
    made.mkdir()
    for name in ("README.md", "model.safetensors", "metrics.jsonl"):
        (made / name).write_text("TOPSECRET")
    return made


@pytest.fixture
def no_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the forests that estimate the importance of settings: half of a page's time."""
    monkeypatch.setattr(charts, "FEWEST", 99)


@pytest.mark.usefixtures("no_forests")
def test_a_page_reads_no_folder_elsewhere_that_runs_json_names(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep")
    elsewhere(tmp_path)
    content = json.loads((sweep / "runs.json").read_text())
    names = (f"{tmp_path}/elsewhere", "../elsewhere", "student3/../../elsewhere")
    for run, name in zip(content["runs"], names, strict=False):
        run["folder"] = name
    (sweep / "runs.json").write_text(json.dumps(content))
    page = write_report(sweep).read_text()
    assert "TOPSECRET" not in page and page.count("is not a file of the sweep") == len(names)


@pytest.mark.usefixtures("no_forests")
def test_a_page_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    sweep, other = write_sweep(tmp_path / "sweep"), elsewhere(tmp_path)
    names = ("student1", "student2/README.md", "student3/metrics.jsonl")
    for name in names:
        link = sweep / name
        link.rename(tmp_path / name.replace("/", "-"))
        link.symlink_to(other if "/" not in name else other / link.name)
    page = write_report(sweep).read_text()
    assert "TOPSECRET" not in page and page.count("is not a file of the sweep") == len(names)
    runs = sweep / "runs.json"
    runs.rename(tmp_path / "runs.json")
    runs.symlink_to(tmp_path / "runs.json")
    with pytest.raises(UserError, match="no runs.json there"):
        write_report(sweep)


def score_a_second_task(sweep: Path) -> None:
    """Add scores of a task `tone`, which ranks the finished students in reverse order."""
    content = json.loads((sweep / "runs.json").read_text())
    for number, run in enumerate(content["runs"][:6], 1):
        run["scores"]["tone"] = {"accuracy": 60.0 + number}
    content["references"]["teacher"]["tone"] = {"accuracy": 80.0}
    (sweep / "runs.json").write_text(json.dumps(content))


def check_table_follows_measure(page: Any) -> None:
    """Check the order of the students, and their shares of the teacher's figure, by measure."""
    table = page.locator("#table")
    for view, (measure, order, share) in enumerate(
        [
            ("mood accuracy", "251436789", "95.0 %"),
            ("tone accuracy", "654321789", "82.5 %"),
            (NATS.name, "251436789", None),
        ]
    ):
        page.get_by_label("Choose by").select_option(measure)
        page.wait_for_selector(f"body[data-drawn='{view}']")
        numbers = table.locator("tbody tr td:first-child")
        assert "".join(numbers.all_inner_texts()) == order
        headings = [
            each for each in table.locator("th:visible").all_inner_texts() if "of the" in each
        ]
        assert headings == ([f"of the teacher's {measure}"] if share else [])
        assert (share in table.locator("tbody tr:visible").first.inner_text()) if share else True
        table.get_by_role("button", name="size").click()
        assert "".join(numbers.all_inner_texts()) != order
        assert table.locator("[aria-sort]").count() == 1
    page.get_by_label("Choose by").select_option("mood accuracy")
    assert table.locator("[aria-sort]").count() == 0


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (PHONE, True)])
def test_a_page_in_a_browser(tmp_path: Path, size: tuple[int, int], dark: bool) -> None:
    sweep = write_sweep(tmp_path / "sweep")
    score_a_second_task(sweep)
    with opened(write_report(sweep), size, dark) as page:
        page.wait_for_selector("body[data-drawn]")
        assert page.locator(".chart svg:visible").count() == 4
        check_accessible(page)
        page.wait_for_selector("body[data-drawn='0']")
        assert page.get_by_text("Ship number 2, because its mood accuracy").is_visible()
        assert page.locator(".chart svg:visible").first.locator("text", has_text="teacher").count()
        check_table_follows_measure(page)
        page.get_by_label("Choose by").select_option(NATS.name)
        page.wait_for_selector("body[data-drawn='2']")
        assert page.get_by_text(f"Ship number 2, because its {NATS.name}").is_visible()
        assert page.locator(".chart svg:visible").count() == 4
        heading = page.get_by_role("button", name=NATS.name)
        heading.press("Enter")
        first = page.locator("#table tbody tr").first
        assert first.locator("td").first.inner_text() == "2"
        page.get_by_label("Filter by words").fill("failed")
        assert page.locator("#table tbody tr:visible").count() == 1
        assert page.locator("#shown").inner_text() == "1 of 9 shown"
        page.get_by_label("Filter by words").fill("")
        page.locator("#table a", has_text="2").first.click()
        page.wait_for_selector("#card-2[open]")
        assert "Student 2" in page.locator("#card-2 pre").inner_text()
        check_accessible(page)


def put(content: Any, path: str, value: Any) -> None:
    """Set a value in nested content: `path` has keys and places, with dots between them."""
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in keys:
        content = content[key]
    if value is ...:
        del content[last]
    else:
        content[last] = value


RUNS: list[tuple[str, Any, str]] = [
    ("runs", 3, "runs is a number, expected a list"),
    ("runs.0", [], "runs[0] is a list, expected an object"),
    ("runs.0.folder", ..., "folder of runs[0] is missing"),
    ("runs.0.folder", 3, "runs[0].folder is a number"),
    ("runs.0.folder", "a\0b", "runs[0].folder is 'a\\x00b', which is not a valid string"),
    ("runs.0.folder", "\ud800", "which is not a valid string"),
    ("runs.0.settings", ["lr"], "runs[0].settings is a list"),
    ("runs.0.settings.lr", {}, "runs[0].settings.lr is an object, expected a string"),
    ("runs.0.params", None, "runs[0].params is null"),
    ("runs.0.state", "done", "runs[0].state is 'done', expected one of waiting"),
    ("runs.0.state", [], "runs[0].state is []"),
    ("runs.0.problem", None, "runs[0].problem is null"),
    ("runs.0.scores", [1], "runs[0].scores is a list"),
    ("runs.0.scores.mood", 90, "runs[0].scores.mood is a number, expected an object"),
    ("runs.0.scores.mood.accuracy", "90", "scores.mood.accuracy is a string, expected a number"),
    ("runs.0.scores.mood.accuracy", True, "scores.mood.accuracy is true or false"),
    ("runs.0.scores.mood.accuracy", 10**400, "scores.mood.accuracy is 1000"),
    ("varied", "lr", "varied is a string, expected a list"),
    ("varied.0", 1, "varied[0] is a number"),
    ("space", ..., "space is missing"),
    ("references", [], "references is a list"),
    ("references.teacher", 3, "references.teacher is a number"),
    ("references.teacher.mood.accuracy", None, "references.teacher.mood.accuracy is null"),
]


@pytest.mark.parametrize(("path", "value", "words"), RUNS)
def test_a_damaged_list_of_runs(tmp_path: Path, path: str, value: Any, words: str) -> None:
    runs = write_sweep(tmp_path / "sweep") / "runs.json"
    content = json.loads(runs.read_text())
    put(content, path, value)
    runs.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        write_report(runs.parent)
    line = str(refused.value)
    assert line.startswith(f"{runs} is damaged (") and words in line and "\n" not in line


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "3", "NaN", "\xff", "null"])
def test_runs_that_are_no_json(tmp_path: Path, text: str) -> None:
    runs = write_sweep(tmp_path / "sweep") / "runs.json"
    runs.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"runs.json is damaged \("):
        write_report(runs.parent)


OF_A_STUDENT: list[tuple[str, str | bytes, str]] = [
    ("training.json", "[]", "training.json is damaged (it is a list"),
    ("training.json", '{"settings": 3, "store": {}, "environments": [], "tokenizer": 1}',
     "settings is a number"),
    ("training.json", '{"settings": {"loss": "mlm"}, "store": {}, "environments": [], "tokenizer":'
     ' 1}', "settings.loss is a string"),
    ("training.json", '{"settings": {"stages": [3]}, "store": {}, "environments": [], "tokenizer":'
     ' 1}', "stages[0] is a number"),
    ("training.json", '{"settings": {}, "store": [], "environments": [], "tokenizer": 1}',
     "store is a list"),
    ("training.json", '{"settings": {}, "store": {}, "environments": [], "tokenizer": 1, "result":'
     ' 7}', "result is a number"),
    ("training.json", "[" * 100_000, "is not JSON"),
    ("metrics.jsonl", "3\n", "line 1: it is a number, expected an object"),
    ("metrics.jsonl", '{"step": 4}\n{"valid_loss": 2}\n', "line 2: step is missing"),
    ("metrics.jsonl", '{"step": 0.5, "valid_loss": 2}', "line 1: step is 0.5"),
    ("metrics.jsonl", '{"step": 4, "valid_loss": "2"}', "line 1: valid_loss is a string"),
    ("metrics.jsonl", b"\xff\xfe", "metrics.jsonl: cannot be read"),
    ("README.md", bytes(2 << 20), "README.md: has more than 1,048,576 bytes"),
]  # fmt: skip


@pytest.mark.usefixtures("no_forests")
@pytest.mark.parametrize("cases", [OF_A_STUDENT[:5], OF_A_STUDENT[5:11], OF_A_STUDENT[11:]])
def test_damaged_students(tmp_path: Path, cases: list[tuple[str, str | bytes, str]]) -> None:
    """The page contains the undamaged students, and reports the error of each damaged one."""
    sweep = write_sweep(tmp_path / "sweep")
    for number, (name, text, _) in enumerate(cases, 1):
        data = text.encode() if isinstance(text, str) else text
        (sweep / f"student{number}" / name).write_bytes(data)
    page = write_report(sweep).read_text()
    assert [words for *_, words in cases if words not in page] == []
    assert "9 students: 6 finished" in page


def test_numbers_that_cannot_be_drawn_are_left_out(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep")
    content = json.loads((sweep / "runs.json").read_text())
    for number, value in enumerate(("nan", "inf", "1e999", "-1e300", "4e38")):
        content["runs"][number]["settings"]["lr"] = value
    content["runs"][0]["scores"]["mood"]["accuracy"] = float("nan")
    content["runs"][1]["scores"]["speed"]["cpu sentence_ms"] = float("inf")
    content["references"]["teacher"]["mood"]["accuracy"] = float("-inf")
    content["varied"].append("other")
    content["runs"].append(content["runs"][0])  # the same student twice
    (sweep / "runs.json").write_text(json.dumps(content))
    (sweep / "student1/README.md").unlink()
    path = sweep / "student2/training.json"
    path.write_text(path.read_text().replace('"parameters": ', '"parameters": 1' + "0" * 400))
    page = write_report(sweep).read_text()
    assert "10 students: 7 finished" in page


def write_student(
    folder: Path, loss: dict[str, float], figure: float | None, content: str = "aa", **more: Any
) -> Path:
    """Write the record of a training. content: the hash of its store."""
    settings = {"loss": loss, "vocab": "5k", "store": f"{folder}.zarr", **more}
    report: dict[str, Any] = {"settings": settings, "environments": []}
    report["store"] = {"content": content}
    if figure is not None:
        report["result"] = {"parameters": 1200, "valid_mlm_per_character": figure, "valid_loss": 9}
    folder.mkdir()
    (folder / "training.json").write_text(json.dumps(report | {"tokenizer": "x"}))
    return folder


def test_students_are_ranked_by_a_figure_that_is_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_student(tmp_path / "one", {"mlm": 1.0}, 2.5)
    two = write_student(tmp_path / "<b>two", {"mlm": 1.0, "hidden": 30.0}, 2.25)
    found = student_table(one, str(two))
    assert [row["folder"] for row in found] == ["<b>two", "one"] and found[-1]["loss"] == "mlm=1"
    assert found.varied == ("loss",)
    monkeypatch.chdir(two)
    assert [row["folder"] for row in student_table(".", one)] == ["<b>two", "one"]
    # Losses that differ cannot be compared: valid_loss is left out.
    assert str(found) == (
        "| folder | loss | parameters | valid_mlm_per_character |\n"
        "| --- | --- | --- | --- |\n"
        "| <b>two | mlm=1,hidden=30 | 1,200 | 2.25 |\n"
        "| one | mlm=1 | 1,200 | 2.5 |"
    )
    shown = found._repr_html_()
    assert "<th>valid_mlm_per_character</th>" in shown and "<td>mlm=1,hidden=30</td>" in shown
    assert "<td>&lt;b&gt;two</td>" in shown and "<b>" not in shown


def test_the_finished_students_of_a_sweep_are_listed(tmp_path: Path) -> None:
    figures = {"one": 2.5, "two": 2.25, "stopped": None}
    for name, figure in figures.items():
        write_student(tmp_path / name, {"mlm": 1.0}, figure)
    assert [row["folder"] for row in student_table(tmp_path)] == ["two", "one"]
    (tmp_path / "other").mkdir()
    other = write_student(tmp_path / "other/one", {"mlm": 1.0}, 2.75)
    named = [row["folder"] for row in student_table(tmp_path, other)]
    assert named == ["two", f"{tmp_path.name}/one", "other/one"]
    with pytest.raises(UserError, match="student_table: no folder given; give folders that"):
        student_table()
    folders: Any = [tmp_path]
    with pytest.raises(TypeError, match=r"expected folders, got list; call .*\(\*folders\)"):
        student_table(folders)


def test_a_setting_that_is_true_or_false_is_no_number(tmp_path: Path) -> None:
    folders = [
        write_student(tmp_path / str(best), {"mlm": 1.0}, 2.5, best=best, seed=1000 + best)
        for best in (False, True)
    ]
    lines = str(student_table(*folders)).splitlines()
    assert lines[2:] == [
        "| False | False | 1,000 | 1,200 | 9 | 2.5 |",
        "| True | True | 1,001 | 1,200 | 9 | 2.5 |",
    ]


def test_students_of_different_stores_are_not_ranked(tmp_path: Path) -> None:
    worse = write_student(tmp_path / "worse", {"mlm": 1.0}, 2.5)
    better = write_student(tmp_path / "better", {"mlm": 1.0}, 2.25, content="bb")
    found = student_table(worse, better)
    assert [row["folder"] for row in found] == ["worse", "better"]
    assert found.varied == ("store",) and found[0]["store"] == f"{worse}.zarr"


def test_masks_that_differ_are_no_rank(tmp_path: Path) -> None:
    """A validation with fewer masks is easier."""
    folders = [
        write_student(tmp_path / str(share), {"mlm": 1.0}, 3 - share, mask_prob=share)
        for share in (0.15, 0.5)
    ]
    assert [row["folder"] for row in student_table(*folders)] == ["0.15", "0.5"]


def test_what_is_no_finished_student_is_refused(tmp_path: Path) -> None:
    started = write_student(tmp_path / "started", {"mlm": 1.0}, None)
    for folder in (started, tmp_path / "missing"):
        with pytest.raises(UserError, match=f"^{folder}: no finished student; give folders that"):
            student_table(folder)


def test_each_column_has_its_own_name(tmp_path: Path) -> None:
    folders = [write_student(tmp_path / f"s{n}", {"mlm": 1.0}, 2.5, steps=n) for n in (3, 6)]
    for folder, steps in zip(folders, (3, 5), strict=True):  # the second was stopped early
        report = json.loads((folder / "training.json").read_text())
        report["result"]["steps"] = steps
        (folder / "training.json").write_text(json.dumps(report))
    lines = str(student_table(*folders)).splitlines()
    assert lines[0] == "| folder | steps | parameters | valid_loss | valid_mlm_per_character |"
    assert [line.split(" | ")[1] for line in lines[2:]] == ["3", "5"]
