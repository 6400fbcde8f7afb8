"""Bad input prints one line with the cause and the remedy, and changes nothing.

- `teacher-dump` with bad input prints one line with the cause and the remedy, and changes nothing.
- Invalid paths, and paths that are not files, give one line with the path, for every option.
- A damaged, unfinished or invalid store gives one line with the file and the remedy.
import json
- `student-train` and `student-sweep` with bad input print one line with the cause and the remedy,
  and change nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import h5py
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, StoreError, open_store
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data import own_template
from teachonce.student_train.sweep import main as student_sweep
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.dump import dump
from tests.end_to_end.support import STUDENT, invoke, ok, refused, says, tree
from tests.making.decoders import save_decoder
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Stores, Teachers
from tests.making.stores import copied
from tests.store.dying import unsealed

MB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path, tiny_teacher: Teachers) -> Path:
    """Copy a teacher, to be damaged."""
    return Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "teacher"))


# the kind of teacher


def headless(folder: Path) -> None:
    AutoModel.from_pretrained(folder).save_pretrained(folder)


def slow(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "CanineTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mystery"}')


def more_pieces(folder: Path) -> None:
    """Save a teacher whose tokenizer has more tokens than its embedding table."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"added{n}" for n in range(50)])
    tokenizer.save_pretrained(folder)


SPOILED: dict[str, tuple[Callable[[Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "unknown family": (unknown_family, (), ("mystery",)),
    "more pieces than rows": (more_pieces, (), ("its tokenizer has ids up to", "resize")),
    "slow tokenizer": (slow, (), ("CanineTokenizer", "offsets", "tokenizer.json")),
    "nothing left": (
        headless,
        ("--hidden", "none", "--attention", "none"),
        ("no LM head", "nothing to dump"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPOILED)
def test_teacher(tmp_path: Path, folder: Path, corpus: Path, case: str) -> None:
    spoil, more, words = SPOILED[case]
    spoil(folder)
    out = tmp_path / "out.zarr"
    says(refused(teacher_dump, "--model", folder, "--corpus", corpus, "--out", out, *more), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_corpus(tmp_path: Path, tiny_teacher: Teachers) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"plain\n" * 5000 + "schön\n".encode("latin-1"))
    words = ("--model", tiny_teacher("bert"), "--corpus", path, "--out", tmp_path / "out.zarr")
    line = refused(teacher_dump, *words)
    says(line, "text.txt", "line 5001", "not UTF-8", "iconv")
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


LATER = {  # test_commands.py has the refusals before torch is loaded
    "--attention layer:0": ("--attention", "layer:0"),
    "--attention mean:0": ("--attention mean:0", "layer 0", "count from 1"),
    "--max-length 16 --stride 15": ("--stride 15", "0 to 13"),
    "--device cuda": ("--device cuda", "use --device cpu"),
}


@pytest.mark.parametrize("options", LATER)
def test_dump_options(tmp_path: Path, tiny_teacher: Teachers, corpus: Path, options: str) -> None:
    if options == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    words = ("--model", tiny_teacher("bert"), "--corpus", corpus, "--out", tmp_path / "out.zarr")
    says(refused(teacher_dump, *words, *options.split()), *LATER[options])
    assert list(tmp_path.iterdir()) == []


def test_out_exists(
    tmp_path: Path,
    tiny_teacher: Teachers,
    corpus: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused before the teacher runs: a big one takes minutes to calibrate."""
    words = ("--model", tiny_teacher("bert"), "--corpus", corpus, "--out")
    (tmp_path / "file.zarr").write_text("mine")
    (tmp_path / "file.h5").write_text("mine")
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "folder.zarr" / "mine").write_text("mine")
    before, sealed = tree(tmp_path), tree(store)
    monkeypatch.setattr("teachonce.teacher_dump.teacher.teacher.Teacher.run", lambda *_: 1 / 0)
    says(refused(teacher_dump, *words, store, "--seed", 1), "exists already", "another name")
    for name in ("file.zarr", "file.h5", "folder.zarr"):
        says(refused(teacher_dump, *words, tmp_path / name), name, "exists", "another name")
    assert (tree(tmp_path), tree(store)) == (before, sealed)


def test_weights_beyond_float16_are_reported_as_such(
    tmp_path: Path, folder: Path, corpus: Path
) -> None:
    """They are finite, and the teacher runs with them."""
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][-1, 0] = 1.5e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = ("--model", folder, "--corpus", corpus, "--out", tmp_path / "a.zarr", "--device", "cpu")
    line = refused(teacher_dump, *words)
    says(line, "teacher/weights/embeddings.word_embeddings.weight has the value 150000", "65504")
    assert line.endswith("leave the weights out (teacher-dump --no-weights)")
    ok(teacher_dump, *words, "--no-weights")


LONG = "n" * 300  # a file system allows 255 bytes
STRANGER = "~nosuchuser"

WORDS: dict[str, tuple[click.Command, str]] = {
    "model": (teacher_dump, "--model PATH --corpus {text} --out {here}/a.zarr"),
    "corpus": (teacher_dump, "--model {model} --corpus PATH.txt --out {here}/a.zarr"),
    "out": (teacher_dump, "--model {model} --corpus {text} --out PATH.zarr"),
    "info": (feature_store, "info PATH.zarr"),
    "verify": (feature_store, "verify PATH.h5"),
    "repair": (feature_store, "repair PATH.zarr"),
    "convert": (feature_store, "convert PATH.zarr {here}/b.h5"),
    "merge": (feature_store, "merge PATH.h5 {text} {here}/b.h5"),
    "store": (student_train, "--store PATH.zarr --vocab 5k --out {here}/s"),
    "checkpoint": (downstream, "--task mlm --model PATH --train {text} --out {here}/s"),
    "train": (downstream, "--task mlm --model {model} --train PATH --out {here}/s"),
    "new": (downstream, "--task mlm --model {model} --train {text} --out PATH"),
}


def refused_path(option: str, path: str, text: Path, model: Path, here: Path) -> str:
    """Return the error line for a path in place of PATH, in a command whose text and model
    exist."""
    text.write_text("Some words.\n" * 30)
    command, words = WORDS[option]
    filled = words.format(text=text, model=model, here=here).replace("PATH", path)
    return refused(command, *filled.split())


@pytest.mark.parametrize("option", WORDS)
def test_a_name_that_is_too_long(tmp_path: Path, tiny_teacher: Teachers, option: str) -> None:
    known = (tmp_path / "text.txt", tiny_teacher("bert"), tmp_path)
    says(refused_path(option, str(tmp_path / LONG), *known), LONG, "too long")
    assert os.listdir(tmp_path) == ["text.txt"]


@pytest.mark.parametrize("option", ["model", "corpus", "checkpoint"])
def test_the_home_of_an_unknown_user(tmp_path: Path, tiny_teacher: Teachers, option: str) -> None:
    known = (tmp_path / "text.txt", tiny_teacher("bert"), tmp_path)
    says(refused_path(option, f"{STRANGER}/x", *known), STRANGER, "no such")


@pytest.mark.parametrize("option", ["model", "checkpoint", "new"])
def test_a_folder_of_a_model_whose_name_is_not_utf8(
    tmp_path: Path, tiny_teacher: Teachers, option: str
) -> None:
    """tokenizers and safetensors cannot use it. Corpora and stores with such names work."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    shutil.copytree(tiny_teacher("bert"), folder / "model")
    known = (folder / "text.txt", tiny_teacher("bert"), tmp_path)
    line = refused_path(option, str(folder / "model"), *known)
    says(line, r"\xff/model: the name is not UTF-8", "choose another")


def test_a_student_in_a_folder_whose_name_is_not_utf8(store: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    words = ("--vocab", "300", "--student", "16x2x2", "--steps", "2")
    shutil.copytree(store, there := folder / "store.zarr")
    line = refused(student_train, "--store", there, *words)  # its folder would be next to the store
    says(line, "the name is not UTF-8")
    assert os.listdir(folder) == ["store.zarr"]
    ok(student_train, "--store", there, *words, "--out", tmp_path / "student")


COMMANDS = {
    "teachonce.teacher_dump.cli": "--model m --corpus c.txt --out s.zarr",
    "teachonce.student_train.cli": "--store s.zarr",
    "teachonce.student_train.sweep": "--store s.zarr",
    "teachonce.downstream.cli": "--task mlm --model m --train c.txt --out o",
    "teachonce.feature_store.cli": "verify s.zarr",
}


def test_python_without_docstrings_is_refused() -> None:
    """With -OO transformers would fail in the middle of its imports."""
    code = (
        "import importlib\n"
        f"for module, words in {COMMANDS}.items():\n"
        "    try:\n"
        "        importlib.import_module(module).main(words.split())\n"
        "    except SystemExit as end:\n"
        "        print(end.code)"
    )
    call = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"] * len(COMMANDS)
    lines = done.stderr.splitlines()
    assert len(lines) == len(COMMANDS)
    for line in lines:
        says(line, "Python runs with -OO", "run it without")


def test_a_pipe_is_no_store(tmp_path: Path, tiny_teacher: Teachers) -> None:
    pipe, text = tmp_path / "pipe.h5", tmp_path / "text.txt"
    os.mkfifo(pipe)
    text.write_text("Some words.\n")
    for name in ("info", "verify"):
        says(refused(feature_store, name, pipe), "pipe.h5", "not a feature store")
    says(refused(feature_store, "repair", pipe), "pipe.h5", "not a folder or an ordinary file")
    words = ("--model", tiny_teacher("bert"), "--corpus", text, "--out", pipe)
    says(refused(teacher_dump, *words), "pipe.h5", "ordinary file; give another name")


def test_what_the_system_refuses_is_a_store_error_in_python(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"File name too long; check the name"):
        open_store(tmp_path / LONG)


def truncated(path: Path) -> None:
    target = path if path.suffix == ".h5" else path / "zarr.json"
    target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])


def truncated_array(path: Path) -> None:
    """Damage the metadata of an array, which opening does not read."""
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            del file["parts/1/view0/hidden/mean/values"]
    else:
        file = path / "parts/1/view0/hidden/mean/values/zarr.json"
        file.write_text(file.read_text()[:100])


def missing_part(path: Path) -> None:
    if path.suffix == ".h5":
        with h5py.File(path, "r+") as file:
            del file["parts/1"]
    else:
        shutil.rmtree(path / "parts" / "1")


def flipped(path: Path) -> None:
    """Flip one bit in the stored states of every part."""
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            places = [
                part["view0/hidden/mean/values"].id.get_chunk_info(0).byte_offset
                for part in file["parts"].values()
            ]
        targets = [(path, place + 9) for place in places]
    else:
        files = path.glob("parts/*/view0/hidden/mean/values/c/*/*")
        targets = [(file, 9) for file in files]
    assert len(targets) > 1
    for file, place in targets:
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)


STORES: dict[Callable[[Path], None], tuple[str, ...]] = {
    truncated: ("not ", "`feature-store repair {}`"),
    truncated_array: ("parts/1/view0/hidden/mean/values", "`feature-store verify {}`"),
    missing_part: ("parts/1", "damaged", "`feature-store verify {}`"),
    flipped: ("parts/", "hidden/mean/values", "`feature-store verify {}`"),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, store: Path) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("both") / "copy.h5"
    ok(feature_store, "convert", store, path)
    return {"zarr": store, "h5": path}


@pytest.mark.parametrize("ext", ["zarr", "h5"])
@pytest.mark.parametrize("spoil", STORES, ids=lambda spoil: spoil.__name__)
def test_store(
    tmp_path: Path, both: dict[str, Path], spoil: Callable[[Path], None], ext: str
) -> None:
    copy = copied(both[ext], tmp_path / f"copy.{ext}")
    spoil(copy)
    before, out = tree(tmp_path), tmp_path / "student"
    given = ("--store", copy, "--vocab", "500", "--out", out, *STUDENT, "--steps", "99")
    line = refused(student_train, *given, "--loss", "hidden=1")
    says(line, f"copy.{ext}", *(words.format(copy) for words in STORES[spoil]))
    if spoil not in (flipped, truncated_array):  # found when the training reads it
        assert tree(tmp_path) == before
    result = invoke(feature_store, "verify", str(copy))
    assert result.exit_code == 1 and "Traceback" not in result.output
    says(result.stderr, f"copy.{ext}")
    assert "feature-store verify" not in result.output  # the training has just run


NO_STORES = {  # the content of the path, and its description in the line
    "nowhere.zarr": "teacher-dump",
    "nowhere.h5": "teacher-dump",
    "corpus.txt": "not a feature store (a text file); `teacher-dump --model MODEL --corpus {}",
    "empty.zarr": "if this was one, run `feature-store repair {}`",
    "torn.h5": "if this was one, run `feature-store repair {}`",
    "folder": "teacher-dump",
    "model": "(the folder of a model); give the store that a teacher wrote",
    "sweep": "(the folder of a sweep)",
    "a.h5.parts": "give {here}/a.h5",
    "a.zarr.aside-1": "(the quarantine folder of a repair)",
    "several": "(a folder with a.zarr, b.h5); give one of these",
}


@pytest.mark.parametrize("name", NO_STORES)
def test_no_store(tmp_path: Path, corpus: Path, name: str) -> None:
    shutil.copy(corpus, tmp_path)
    for folder in ("empty.zarr", "folder", "a.h5.parts", "a.zarr.aside-1", "several/a.zarr"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("torn.h5", "several/b.h5", "model/config.json", "sweep/runs.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    out, path = tmp_path / "student", tmp_path / name
    line = refused(student_train, "--store", path, "--vocab", "500", "--out", out)
    says(line, f"Error: {path}: ", NO_STORES[name].format(path, here=tmp_path))
    assert "nowhere" in name or "not a feature store" in line
    assert not out.exists()


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_torn_part_of_an_unfinished_store(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, ext: str
) -> None:
    """After the command in the line, the dump continues and gives the same store."""
    path = tmp_path / f"store.{ext}"
    options = dump_options(tiny_teacher("bert"), corpus, path)
    with unsealed():
        dump(options)
    torn = tmp_path / ("store.zarr/parts/1" if ext == "zarr" else "store.h5.parts/1.h5")
    file = torn / "zarr.json" if ext == "zarr" else torn
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(UserError) as caught:
        dump(options)
    says(str(caught.value), f"`feature-store repair {path}`, which quarantines part 1")
    says(ok(feature_store, "repair", path), "part 1: cannot be opened", "repeat the command")
    assert not torn.exists()
    dump(options)
    assert "sound" in ok(feature_store, "verify", path)


@pytest.mark.parametrize(
    ("attack", "limit"),
    [
        ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "took longer than 3 s"),
        ("{{ 'a' * 9999999999 }}", "needed more than 1 GB of memory"),
    ],
)
def test_a_hostile_template_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, limit: str
) -> None:
    """A store may have any template, also one that no dump has rendered."""
    if "longer" in limit:
        monkeypatch.setattr(own_template, "SECONDS", 3.0)
    model = save_decoder(tmp_path / "model", "Llama", bos="<end>")
    (model / "chat_template.jinja").write_text(attack)
    corpus = write_corpus(tmp_path / "texts.txt", 4)
    path = dumped(model, corpus, tmp_path / "a.zarr", attention="none", hidden="none")
    words = ("--store", path, "--student", "llama:32x1x2", "--vocab", "teacher", "--steps", 1)
    line = refused(student_train, *words, "--device", "cpu", "--out", tmp_path / "student")
    says(line, "a.zarr: chat_template.jinja in it", limit, "do not use it")
    assert not (tmp_path / "student").exists()


LATER_IN_TRAININGS = {  # test_commands.py has the refusals before torch is loaded
    "--student 32x3x4 --loss hidden=1": ("groups2", "3 student layers", "--student"),
    "--student bert:32x6x4 --init teacher": ("has 6 layers, the teacher only 4", "--init svd"),
    "--resume": ("no training to resume", "leave --resume out"),
    "--out corpus.txt/student": ("corpus.txt", "--out"),
    "--device cuda": ("--device cuda", "use --device cpu"),
}


@pytest.mark.parametrize("options", LATER_IN_TRAININGS)
def test_train_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path, corpus: Path, options: str
) -> None:
    if options == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    shutil.copy(corpus, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("--store", store, "--vocab", "500", "--out", "student", *STUDENT, "--steps", "3")
    says(refused(student_train, *words, *options.split()), *LATER_IN_TRAININGS[options])
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_vocabulary_larger_than_the_text_is_taken_as_far_as_it_goes(
    tmp_path: Path, store: Path
) -> None:
    words = ("--store", store, *STUDENT, "--loss", "mlm", "--out", tmp_path / "out")
    huge = "999999999999999999"
    said = ok(student_train, *words, "--vocab", huge, "--init", "random", "--steps", 0)
    pieces = len(AutoTokenizer.from_pretrained(tmp_path / "out"))
    says(said, f"start     vocabulary of {pieces:,} pieces, not ")
    says(said, f"(--vocab {huge})", "has no more")
    assert f"(--vocab {huge})" in (tmp_path / "out" / "training.json").read_text()
    sweep = (*words[:-1], tmp_path / "sweep", "--steps", 1)
    said = ok(student_sweep, *sweep, "--vocab", "500", "--vocab", "5k")
    assert said.count("has no more") == said.count("not 5,000 (--vocab 5k)") == 1
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[recipes.mine]\noptions = { vocab = "5k" }\n')
    said = ok(student_train, *words[:-1], tmp_path / "r", "--recipe", recipe, "--steps", 1)
    says(said, "not 5,000 (--vocab 5k)")
    pruned = (*words[:-1], tmp_path / "p", "--vocab", "500", "--steps", 1, "--prune-to", "words:5k")
    says(refused(student_train, *pruned), "two WordPieces")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--loss hidden=1", ("--loss hidden", "has no hidden states")),
        ("--loss attention=1", ("--loss attention", "has no attention maps")),
        ("--loss logit=1", ("--loss logit", "use kl")),
        ("--loss mlm=1 --init svd", ("no word embeddings", "--init random")),
    ],
)
def test_store_lacks_what_is_asked_for(
    tmp_path: Path, tiny_store: Stores, options: str, words: tuple[str, ...]
) -> None:
    """The store has draws alone: no states, no maps, no weights."""
    bare = tiny_store("bert", logits="sample:5", hidden="none", attention="none", weights=False)
    given = ("--store", bare, "--vocab", "500", "--out", tmp_path / "student", *STUDENT)
    says(refused(student_train, *given, *options.split()), *words)
    assert not (tmp_path / "student").exists()


def test_student_exists(tmp_path: Path, store: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    words = ("--store", store, "--vocab", "500", *STUDENT, "--steps", "3", "--out")
    line = refused(student_train, *words, tmp_path)
    says(line, "exists already; give another --out")
    assert "--resume" not in line  # there is no training to continue
    says(refused(student_train, *words, tmp_path / "mine"), "exists already", "--out")
    says(refused(student_train, *words, tmp_path, "--resume"), "no training.json")
    assert tree(tmp_path) == {"mine": b"mine"}
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    says(refused(student_train, *words, link), "link exists already; give another --out")


def test_a_training_that_diverged_is_started_again(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "student"
    words = ("--store", store, "--vocab", "500", *STUDENT, "--steps", 3, "--out", out, "--lr")
    assert "lower --lr" in refused(student_train, *words, 1e30)
    assert (out / "metrics.jsonl").exists()
    ok(student_train, *words, 1e-3)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
    assert steps == sorted(steps) and len([*(out / "tensorboard").iterdir()]) == 1


def test_tokenizer_folder(tmp_path: Path, store: Path, tiny_teacher: Teachers) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_teacher("bert"))
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "maskless")
    (tmp_path / "bare").mkdir()
    for name, printed in (("maskless", "mask"), ("bare", "(it has no tokenizer.json, nor")):
        words = ("--store", store, "--vocab", tmp_path / name, "--out", tmp_path / "out", *STUDENT)
        says(refused(student_train, *words), "--vocab", name, "tokenizer", printed)
    assert not (tmp_path / "out").exists()


def test_training_that_diverges(tmp_path: Path, store: Path) -> None:
    words = ("--store", store, "--vocab", "500", "--out", tmp_path / "student", *STUDENT)
    line = refused(student_train, *words, "--steps", "20", "--lr", "1e30", "--loss", "mlm")
    says(line, "step ", "diverged", "lower --lr")
    assert not (tmp_path / "student" / "model.safetensors").exists()
    other = ("--store", store, "--vocab", "500", "--out", tmp_path / "wild", *STUDENT)
    said = ok(student_train, *other, "--steps", "10", "--lr", "9", "--loss", "mlm")
    warnings = [line for line in said.splitlines() if line.startswith("warning")]
    assert "far above the loss before the first step" in warnings[-1] and "(9)" in warnings[-1]


@pytest.mark.parametrize("content", ["{}", "[]", '{"settings": {}}', "{"])
def test_damaged_settings(tmp_path: Path, store: Path, content: str) -> None:
    out = tmp_path / "student"
    out.mkdir()
    (out / "training.json").write_text(content)
    words = ("--store", store, "--vocab", "500", *STUDENT, "--steps", "3", "--out", out)
    says(refused(student_train, *words, "--resume"), "training.json is damaged", "remove")


def test_sweep(tmp_path: Path, store: Path) -> None:
    words = ("--store", store, "--out", tmp_path / "sweep", *STUDENT, "--steps", "2")
    says(refused(student_sweep, *words[2:], "--store", tmp_path / "nowhere.h5"), "nowhere.h5")
    for more, printed in (
        ("--vocab 500 --vocab 3", ("--vocab 3", "give more")),
        ("--vocab 500 --lr 1e-3,1e-2", ("--lr 1e-3,1e-2: ", "repeat it: --lr 1e-3 --lr 1e-2")),
        ("--vocab 500 --seed 1,2", ("repeat it: --seed 1 --seed 2",)),
    ):
        says(refused(student_sweep, *words, *more.split()), *printed)
    alone = tmp_path / "alone"
    ok(student_train, *words[:2], "--out", alone, *words[4:], "--vocab", "500", "--loss", "mlm")
    before = sorted(path.name for path in alone.iterdir())
    said = refused(student_sweep, *words[:2], "--out", alone, *words[4:], "--vocab", "500")
    says(said, f"--out {alone}: is the folder of a student")
    assert sorted(path.name for path in alone.iterdir()) == before
    assert not (tmp_path / "sweep").exists()  # reported before the first student is trained


def test_stores_are_closed(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, closed = FeatureStore.close, list[str]()

    def close(self: FeatureStore) -> None:
        closed.append(self.path)
        real(self)

    monkeypatch.setattr(FeatureStore, "close", close)
    words = ("--store", store, "--out", tmp_path / "out", *STUDENT, "--loss", "mlm", "--view", "1")
    for command in (student_train, student_sweep):
        says(refused(command, *words), "--view 1")
    assert closed == [str(store)] * 2


def test_address_without_out() -> None:
    line = refused(student_train, "--store", "memory://store.zarr", "--loss", "mlm", "--steps", "2")
    says(line, "memory://store.zarr", "--out")
