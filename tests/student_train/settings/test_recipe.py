"""Recipes: every recipe of the package can be started; recipes of users are checked in the same
way."""

import re
from pathlib import Path

import pytest

from teachonce.student_train.arguments import checked_from
from teachonce.student_train.cli import main
from teachonce.student_train.model.freezing import check_frozen
from teachonce.student_train.plan.train_plan import stages_of
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.recipe import all_recipes, find_recipe, listed, read_recipes
from teachonce.student_train.sweep import main as sweep
from teachonce.support.errors import UserError
from tests.end_to_end.support import ROOT, ok, refused, says
from tests.making.models import Stores

OWN = """
source = "ours"
[options]
vocab = "400"
loss = "mlm=1"
[recipes.two]
about = "a start without the layers"
options = { lr = 1e-3 }
stages = [
  { freeze = ["embeddings", "positions"], steps = 3 },
  { loss = "hidden=2, mlm=1", epochs = 0.5, lr = 5e-4 },
]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(OWN, "utf-8")
    return path


@pytest.mark.parametrize("name", all_recipes())
def test_every_recipe_of_the_package_can_be_started(name: str) -> None:
    recipe = find_recipe(name)
    settings = dict(recipe.options)
    settings["student"] = re.sub("^teacher:(.*)", r"768x\1x12", settings.get("student", "tiny"))
    options = TrainOptions(store="a.zarr", **settings, stages=recipe.stages).resolved()
    stages = stages_of(options, options.shape.layers)
    assert recipe.about and len(stages) >= len(recipe.stages)
    assert len({stage.seed for stage in stages}) == len(stages)


def test_the_list_shows_each_recipe_under_its_source() -> None:
    said = ok(main, "--recipe", "list")
    assert said.strip() == listed() == ok(sweep, "--recipe", "list").strip()
    for name, recipe in all_recipes().items():
        line = next(line for line in said.splitlines() if line.split()[:1] == [name])
        assert line.endswith(recipe.about) and recipe.source in said.splitlines()


@pytest.mark.parametrize(
    ("kind", "its"), [("bert", "bert:"), ("distilbert", "bert:"), ("modernbert", "modernbert:")]
)
def test_a_student_with_its_teachers_hidden_size(kind: str, its: str, tiny_store: Stores) -> None:
    store = tiny_store(kind, 3, logits=None, text_only=True)
    given = {"store": (str(store),), "recipe": "slovakbert-1"}
    with pytest.raises(UserError, match="has 4 layers; give teacher:4 or less"):  # 6 in the recipe
        checked_from(given).resolved()
    options = checked_from({**given, "student": "teacher:2"}).resolved()
    assert options.student == f"{its}32x2x4"
    check_frozen(options)  # its positions, learned or rotary


def test_options_given_win_in_every_stage(own: Path) -> None:
    plain = checked_from({"store": ("a.zarr",), "recipe": str(own)}).resolved()
    assert (plain.vocab, plain.lr, dict(plain.loss)) == ("400", 1e-3, {"mlm": 1.0})
    first, second = stages_of(plain, 2)
    assert (first.steps, first.epochs, first.lr) == (3, None, 1e-3)
    assert first.freeze == ("embeddings", "positions") and second.freeze == ()
    assert (second.steps, second.epochs, second.lr) == (None, 0.5, 5e-4)
    assert dict(second.loss) == {"hidden": 2.0, "mlm": 1.0}
    given = {"store": ("a.zarr",), "recipe": f"{own}:two", "lr": 2e-3, "steps": 7, "freeze": "head"}
    for stage in stages_of(checked_from(given).resolved(), 2):
        assert (stage.lr, stage.steps, stage.freeze) == (2e-3, 7, ("head",))
    assert plain.digest() != checked_from(given).resolved().digest()


def test_a_recipe_is_read_once(own: Path) -> None:
    options = checked_from({"store": ("a.zarr",), "recipe": f"{own}:two"})
    about = "a start without the layers"
    record = {"name": "own.toml:two", "about": about, "source": "ours"}
    # The training writes it: a process on another machine lacks the file.
    assert options.needs == {"recipe": f"{own}:two", "record": record}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[options]", "[option]", ["unknown key 'option'", "options"]),
        ("about =", "abuot =", ["recipe two", "'abuot'"]),
        ("vocab =", "vocabulary =", ["vocabulary is not an option"]),
        ("lr = 1e-3", 'lr = "fast"', ["recipe two: lr", "fast"]),
        ("lr = 1e-3", "lr = { a = 1 }", ["lr: expected a string, a number"]),
        ("lr = 1e-3", 'store = "b"', ["store is not an option"]),
        ("lr = 1e-3", 'align = "sideways"', ["align", "span"]),
        ("steps = 3", "student = 3", ["stage 1", "student is not a setting of a stage"]),
        ("steps = 3", 'unfreeze = "sideways"', ["stage 1", "unfreeze", "'top-down'"]),
        ('"mlm=1"', '"mlm=much"', ["expected NAME=WEIGHT"]),
        ("[recipes.two]", "[recipes]", ["recipe about"]),
        ('"ours"', "ours", ["not TOML"]),
        ("[options]", "[needs]\nteachers = 2\n[options]", ["needs", "'teachers'", "stores"]),
        ("[options]", '[needs]\nstores = "2"\n[options]', ["needs: stores: expected int"]),
        ("about =", "needs = 2\nabout =", ["recipe two: needs: expected a table"]),
    ],
)
def test_what_is_no_recipe(own: Path, old: str, new: str, words: list[str]) -> None:
    own.write_text(OWN.replace(old, new), "utf-8")
    with pytest.raises(UserError) as printed:
        read_recipes(own)
    says(str(printed.value), str(own), *words)


def test_recipes_that_are_not_there(own: Path, tmp_path: Path) -> None:
    near = refused(main, "--store", "a.zarr", "--recipe", "kolesnikova-tiny30-mlms")
    says(near, "did you mean kolesnikova-tiny30-mlm?", "--recipe list")
    says(refused(main, "--store", "a.zarr", "--recipe", f"{own}:three"), str(own), "two")
    says(refused(main, "--store", "a.zarr", "--recipe", tmp_path / "no.toml"), "cannot be read")
    own.write_bytes(b"#" * 2**21)
    says(refused(main, "--store", "a.zarr", "--recipe", own), "has more than 1,048,576 bytes")
    own.write_bytes(b'source = "\xff"')
    says(refused(main, "--store", "a.zarr", "--recipe", own), "own.toml: cannot be read")


def test_the_guide_shows_a_recipe_that_can_be_started(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guide/recipes.md").read_text("utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    path = tmp_path / "my.toml"
    path.write_text(shown, "utf-8")
    recipe = find_recipe(str(path))
    options = TrainOptions(store="a.zarr", **recipe.options, stages=recipe.stages)
    stages = stages_of(options.resolved(), options.shape.layers)
    assert len(stages) == 6 and stages[0].freeze == ("head",) and stages[-1].freeze == ()
