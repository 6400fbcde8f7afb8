"""The `downstream` command, its options as data and its files of examples.

- The `downstream` command does the job, and a mistake is one line with its remedy.
- Options as data: Python refuses what the command line refuses, and --help contains every default.
- Files of examples: their layouts; teacher-dump and downstream read a file in the same way.
"""

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from datasets import ClassLabel, Dataset, Features, Value
from transformers import AutoTokenizer

from teachonce.downstream.cli import _task, main
from teachonce.downstream.mlm.scoring import train_seeds
from teachonce.downstream.options import OPTIONS, TASKS, DownstreamOptions
from teachonce.downstream.settings import FineTuneSettings, MlmSettings, SpeedSettings
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.example_rows import read_rows
from teachonce.downstream.tasks.fine_tune import fine_tune
from teachonce.downstream.tasks.qa import QA, GoldAnswer, Question, read_questions
from teachonce.downstream.tasks.tagging import Entities, PartsOfSpeech, Sentence, read_tagged
from teachonce.downstream.text_lines import read_lines
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus import text_files
from teachonce.teacher_dump.corpus.documents import Corpus
from tests.downstream.support import done, entities, refused, run, scores_of, table
from tests.end_to_end.support import Words, says
from tests.making.models import Teachers
from tests.making.texts import SENTENCES
from tests.teacher_dump.corpus.corpora import texts


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(SENTENCES * 3), encoding="utf-8")
    return path


def test_mlm(text: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    result = run(
        *("--task", "mlm", "--model", tiny_teacher("distilbert"), "--train", text),
        *("--out", tmp_path / "out", "--steps", 2, "--batch-tokens", 256, "--max-length", 64),
        *("--evaluate-every", 1),
    )
    assert result.exit_code == 0, result.output
    assert "learning rate 0.0002" in result.stdout and "{" not in result.output
    for step in (1, 2):
        assert re.search(
            rf"^step {step}/2: loss \d+\.\d+, held-out loss \d+\.\d+; [1-9][\d,]* tokens/s,"
            r" \d\d:\d\d left$",
            result.stdout,
            re.M,
        )
    assert result.stderr == ""  # no terminal, so no bar
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["tokens"] == 2 * 256
    scores = scores_of(tmp_path / "out")
    assert scores["mean"]["dev"]["loss"] == metrics["held_out_loss"]
    assert scores["deviation"]["dev"] == dict.fromkeys(("primary", "loss", "perplexity"), 0)
    loss, perplexity = scores["mean"]["dev"]["loss"], scores["mean"]["dev"]["perplexity"]
    assert re.search(rf" {loss:.2f} .* {perplexity:.2f} ", result.stdout)
    words = ("--task", "mlm", "--as-is", "--model", tmp_path / "out", "--test", text)
    assert "exists already" in refused(*words, "--out", tmp_path / "out")
    before = text.read_bytes()
    assert "exists already" in refused(*words, "--out", text) and text.read_bytes() == before
    table = done("--task", "table", tmp_path / "out")
    assert "held out of text.txt (dev)" in table and f" {loss:.2f} " in table


def test_two_runs_in_one_folder(text: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from teachonce.support.lease import Lease"
    hold += "; lease = Lease(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    words: Words = ("--task", "mlm", "--as-is", "--model", tiny_teacher("distilbert"))
    words += ("--test", text, "--out", tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert "out: another process is writing it" in refused(*words)
        other.communicate()
    done(*words)
    assert [path.name for path in tmp_path.iterdir() if "lease" in path.name] == []


@pytest.mark.slow
def test_mlm_over_seeds(text: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    """A resumed run trains the missing seeds only."""
    out, dev = tmp_path / "out", tmp_path / "dev.txt"
    dev.write_text("\n".join(SENTENCES[:5]), encoding="utf-8")
    words: Words = ("--task", "mlm", "--model", tiny_teacher("bert"), "--train", text, "--dev", dev)
    words = (*words, "--steps", 2, "--test", dev)
    done(*words, "--max-length", 16, "--seed", 4, "--seeds", 2, "--out", out)
    scores = (out / "scores.json").read_text()
    found = json.loads(scores)
    assert [each["seed"] for each in found["seeds"]] == [4, 5]
    assert found["saved"] == [str(out / "seed-4"), str(out / "seed-5")]
    assert found["files"]["dev"] == str(dev) and found["examples"]["dev"] > 1
    losses = [each["dev"]["loss"] for each in found["seeds"]]
    assert len(set(losses)) == 2 and found["mean"]["dev"]["loss"] == sum(losses) / 2
    half = abs(losses[0] - losses[1]) / 2
    assert found["deviation"]["dev"]["loss"] == pytest.approx(2**0.5 * half)
    # the saved model, scored alone, is as good as at the end of its training
    for each in found["seeds"]:
        assert each["test"] == pytest.approx(each["dev"], rel=1e-4)
    alone = ("--task", "mlm", "--as-is", "--model", out / "seed-5", "--max-length", 16)
    said = done(*alone, "--test", dev, "--test", text, "--out", tmp_path / "alone")
    says(said, "nats/token", "nats/character")
    mean = scores_of(tmp_path / "alone")["mean"]
    assert mean[f"test {dev}"]["loss"] == pytest.approx(losses[1], rel=1e-4)
    both = mean[f"test {dev}"]["loss"] + mean[f"test {text}"]["loss"]
    assert mean["test"]["loss"] == pytest.approx(both / 2)
    for path in (dev, text):
        figures, lines = mean[f"test {path}"], path.read_text().splitlines()
        tokenizer = AutoTokenizer.from_pretrained(out / "seed-5")
        tokens = sum(len(tokenizer.tokenize(line)) for line in lines)
        characters = sum(not letter.isspace() for line in lines for letter in line)
        expected = figures["loss"] * tokens / characters
        assert figures["loss_per_character"] == pytest.approx(expected)
    shutil.rmtree(out / "seed-5")
    (out / "scores.json").unlink()
    before = (out / "seed-4" / "model.safetensors").stat().st_mtime_ns
    again = ("--max-length", 16, "--seed", 4, "--seeds", 2, "--out", out, "--resume")
    assert "other settings: lr was" in refused(*words, *again, "--lr", 1)
    done(*words, *again)
    assert (out / "seed-4" / "model.safetensors").stat().st_mtime_ns == before
    assert (out / "scores.json").read_text() == scores
    assert "is finished" in refused(*words, *again)


def test_ner_prints_a_table_and_writes_scores(tiny_teacher: Teachers, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        entities(tmp_path / name, 8, 0)
    result = run(
        *("--task", "ner", "--model", tiny_teacher("electra"), "--train", tmp_path / "train"),
        *("--dev", tmp_path / "dev", "--out", tmp_path / "out", "--seeds", 1, "--epochs", 1),
    )
    assert result.exit_code == 0, result.output
    assert "entity F1" in result.output and "±" not in result.output
    assert "seed 0: learning rate 0.0005" in result.stdout  # the teacher's hidden size is 32
    assert "seed 0, 1 step of 16 x 1 texts: 1 epoch of 8 texts" in result.stdout
    (line,) = re.findall(r"^seed 0, step \d+/\d+: .*$", result.stdout, re.M)
    for measure in ("loss", "held-out loss", "entity F1", "accuracy"):
        assert re.search(rf" {measure} \d\.\d+", line)
    assert "{" not in result.output and result.stderr == ""
    assert "dev" in scores_of(tmp_path / "out")["mean"]


def test_a_tagger_that_gives_every_word_o_is_reported(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    dev = entities(tmp_path / "dev", 8, 0)
    first, *others = dev.read_text().split("\n\n")  # entities are rare in training
    others = [re.sub("B-.", "O", text) for text in others]
    train = "\n\n".join([first, *others * 3])
    (tmp_path / "train").write_text(re.sub("^(the|stairs|light)", "wxqzkvjqxz", train, flags=re.M))
    words: Words = ("--task", "ner", "--train", tmp_path / "train", "--dev", dev, "--seeds", 1)
    words = (*words, "--model", tiny_teacher("electra"), "--out", tmp_path / "out", "--save")
    printed = done(*words, "--epochs", 2, "--batch-size", 4, "--lr", 1e-3)
    said = "it has learnt nothing: every tag that it predicts is 'O'"
    said += "; raise --lr (0.001) or --epochs (2)"
    assert f"seed 0: {said}" in printed.splitlines(), printed
    assert "the tokenizer splits a word of the text into" in printed
    assert scores_of(tmp_path / "out")["seeds"][0]["warning"] == said
    assert said in (tmp_path / "out/model/README.md").read_text()
    alone = ("--task", "ner", "--as-is", "--model", tmp_path / "out/model", "--test", dev)
    alone_said = said.partition(";")[0]
    assert f"{alone_said}; train it" in done(*alone, "--out", tmp_path / "alone")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", 1, "--epochs", 1), "contradict"),
        (("--batch-size", 1, "--batch-tokens", 99), "contradict"),
        (("--vocab", "5k"), "a checkpoint has a vocabulary already"),
        (("--seeds", 2, "--max-length", 4000), "at most 128 tokens"),
        (("--seeds", 2, "--resume"), "holds no training to continue"),
        (("--max-length", 4000), "at most 128 tokens"),
        (("--resume",), "holds no training to continue"),
        (("--model", "a", "--model", "b"), "takes one --model, got 2"),
        (("--model", "scratch:static:64"), "a static student has no masked-LM head; give scratch:"),
        (("--model", "scratch:llama:8x1x1"), "a llama student has no masked-LM head; give scrat"),
    ],
)
def test_mlm_mistakes(
    arguments: Words, message: str, text: Path, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    model = () if "--model" in arguments else ("--model", tiny_teacher("bert"))
    required = ("--task", "mlm", *model, "--train", text, "--out", tmp_path / "out")
    assert message in refused(*required, *arguments)
    assert not (tmp_path / "out").exists()


def test_tasks_of_one_process_refuse_torchrun(
    text: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny_teacher("bert"), tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused("--task", "mlm", "--as-is", "--model", model, "--test", text, "--out", out)
    says(line, "--task mlm --as-is runs in one process, and WORLD_SIZE is 2; start it without")
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\nold\ta\nnew\tb\n", "utf-8")
    files: Words = ("--train", rows, "--dev", rows, "--out", out)
    says(refused("--task", "classify", "--model", model, *files), "--task classify runs in one")
    assert not out.exists()


def mlm(**values: Any) -> MlmSettings:
    return MlmSettings(model="m", train=[Path("a.txt")], out=Path("out"), **values)


def over_seeds(seeds: int) -> Any:
    return train_seeds(mlm(), seeds, {})


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (FineTuneSettings, "epochs", 0, "--epochs 0: expected at least 1"),
        (FineTuneSettings, "seeds", 0, "--seeds 0: expected at least 1"),
        (FineTuneSettings, "lr", 0.0, "--lr 0: expected a finite number above 0"),
        (FineTuneSettings, "lr", math.nan, "--lr nan: expected a finite number above 0"),
        (FineTuneSettings, "max_length", 7, "--max-length 7: expected at least 8"),
        (FineTuneSettings, "limit", 0, "--limit 0: expected at least 1"),
        (FineTuneSettings, "precision", "x", "--precision x: expected one of fp32, bf16"),
        (over_seeds, "seeds", 0, "--seeds 0: expected at least 1"),
        (mlm, "resume", "no", "--resume no: expected true or false"),
        (mlm, "vocab", "many", "--vocab many: expected a number of pieces, e.g. 30k or 512"),
        (mlm, "steps", 0, "--steps 0: expected at least 1"),
        (mlm, "mask_prob", 1.0, "--mask-prob 1: expected a share between 0 and 1"),
        (mlm, "evaluate_every", 0, "--evaluate-every 0: expected at least 1"),
        (mlm, "batch_size", 0, "--batch-size 0: expected at least 1"),
        (mlm, "precision", "fp16", "--precision fp16: expected one of fp32, bf16"),
        (SpeedSettings, "repeat", 0, "--repeat 0: expected at least 1"),
        (SpeedSettings, "batch_size", 2.5, "--batch-size 2.5: expected a whole number"),
        (PartsOfSpeech, "unseen_labels", "x", "--unseen-labels x: expected one of refuse, count"),
        (Classify, "per_class", 0, "--per-class 0: expected at least 1"),
        (Entities, "pieces", "last", "--pieces last: expected one of first, all"),
        (QA, "stride", -1, "--stride -1: expected at least 0"),
    ],
)
def test_python_refuses_what_the_command_line_refuses(
    make: Callable[..., Any], name: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError) as printed:
        make(**{name: value})
    assert str(printed.value) == message


def test_the_last_of_several_seeds_is_within_the_range() -> None:
    expected = "--seed 4294967295 with --seeds 2: the last seed would be 4294967296, above the"
    tuning = FineTuneSettings(seed=2**32 - 1, seeds=2)
    with pytest.raises(UserError, match=expected):
        train_seeds(mlm(seed=2**32 - 1), 2, {})
    with pytest.raises(UserError, match=expected):
        fine_tune(Classify(), "m", {}, tuning)


@pytest.mark.parametrize(
    "words", ["--epochs 0", "--lr 0", "--lr inf", "--max-length 7", "--stride -1", "--mask-prob 1"]
)
def test_the_command_line_refuses_a_value_before_all_else(words: str) -> None:
    assert refused("--task", "table", *words.split()).startswith(f"Error: {words}: expected ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mteb", "--task mteb: expected one of mlm, pos"),
        ("sts:X", "--task sts:X: expected one of"),
        ("table", "needs a RUN"),
        ("table x --seed 0", "does not take --seed"),
        ("classify", "needs --model, --train, --out"),
        ("qa --model m --train a.tsv --train b.tsv", "needs --out"),
        ("retrieval --model m", "--task retrieval needs --test, --out"),
        ("rerank --model m --test t --out o", "needs --candidates RUN or --candidates-by"),
        ("rerank --model m --test t --out o --candidates a --candidates-by b",
         "--candidates and --candidates-by contradict"),
        ("classify --model m --train a --out o --limit 1 --per-class 1",
         "--limit and --per-class contradict each other; give one"),
        ("classify --model m --train a --out o --text-column a --text-a-column b",
         "--text-column and --text-a-column contradict"),
        ("classify --model m --train a --out o --text-column a --text-b-column b",
         "--text-column and --text-b-column contradict"),
        ("speed --model m --text-column x", "needs a table"),
        ("speed --model m --test nowhere.txt", "nowhere.txt: no such file or folder"),
        ("speed --model m --text-column x --test nowhere.txt", "no such file or folder"),
        ("mlm --as-is --model m --out o --test hf:imdb --text-column x",
         "only teacher-dump reads the hub"),
        ("speed --model m --epochs 1", "does not take --epochs"),
        ("pos --stride 3", "does not take --stride"),
        ("pos RUN", "does not take a RUN"),
        ("retrieval --model m --test t --out o --depth 3", "does not take --depth"),
        ("lm --lr 1e-3", "--task lm does not take --lr; leave it out"),
        ("mlm --label-column x", "does not take --label-column"),
        ("pair --as-is --model m", "--task pair --as-is needs --test, --out"),
        ("mlm --as-is --model m", "--task mlm --as-is needs --test, --out"),
        ("qa --as-is --model m", "--task qa does not take --as-is"),
        ("pos --as-is --train a --dev b", "does not take --train, --dev; leave"),
        ("ner --as-is --seeds 1 --seed 0 --epochs 1 --lr 1 --limit 1",
         "ner --as-is does not take --seeds, --seed, --epochs, --lr, --limit; leave them out"),
        ("classify --as-is --save --per-class 2", "not take --save, --per-class"),
        ("ner --as-is --pieces all", "--task ner --as-is does not take --pieces"),
        ("pair --as-is --unseen-labels count", "--as-is does not take --unseen-labels"),
    ],
)  # fmt: skip
def test_what_a_task_needs_and_does_not_take(words: str, expected: str) -> None:
    assert expected in refused("--task", *words.split())


def test_every_option_has_tasks_and_needs_only_what_it_takes() -> None:
    for name, about in OPTIONS.items():
        assert about.scope & set(TASKS), name
        assert about.needed | about.several <= about.scope, name
        assert about.help.endswith("."), name


def test_what_was_given_decides_and_defaults_fill_up() -> None:
    words: dict[str, Any] = {"model": ("m",), "train": (Path("a"),), "out": Path("nowhere")}
    asked = DownstreamOptions("classify", **words, seed=0, lr=1e-3, text_column="sentence")
    assert asked.given() == {**words, "seed": 0, "lr": 1e-3, "text_column": "sentence"}
    assert asked.settings(FineTuneSettings, seeds=1) == FineTuneSettings(lr=1e-3, seeds=1)
    assert asked.columns() == {"text": "sentence"}
    with pytest.raises(UserError, match="s3:/b/a.tsv: is a URL, expected a path on this machine"):
        DownstreamOptions("lm", model=("m",), test=[Path("s3://b/a.tsv")])


def test_help_shows_tasks_defaults_and_ranges() -> None:
    # a wide terminal, so that no line is broken at a hyphen
    printed = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=200).output.split())
    for words in (
        "--epochs INTEGER Train for N passes over the training examples. "
        "[default: mlm 1, fine-tuning 3; at least 1]",
        "--batch-size INTEGER Run batches of N sequences. "
        "[default: mlm 32, fine-tuning and speed 16; at least 1]",
        "--seed INTEGER Use this number as the (first) seed. [default: 0; 0 to 4294967295]",
        "[default: 128, qa 384, speed 512; at least 8]",
        "--evaluate-every INTEGER mlm: Validate and save a checkpoint every N steps. "
        "[default: a tenth of all steps, at most 500; at least 1]",
        "Train in this precision, or score in it with lm and lm-eval. [default: fp32]",
        "--limit INTEGER fine-tuning: Train on the first N examples. [at least 1]",
        "--train PATH Train on the examples of this file.",
    ):
        assert words in printed, words


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ({"task": "pos", "unseen_labels": "count"}, {"unseen_labels": "count"}),
        ({"task": "ner", "pieces": "all"}, {"unseen_labels": "refuse", "pieces": "all"}),
        (
            {"task": "classify", "per_class": 2, "label_column": "class"},
            {"columns": {"label": "class"}, "per_class": 2, "unseen_labels": "refuse"},
        ),
        ({"task": "pair", "score_column": "s"}, {"columns": {"score": "s"}}),
        ({"task": "sts", "text_b_column": "b"}, {"columns": {"text_b": "b"}}),
        ({"task": "qa", "stride": 0}, {"columns": {}, "stride": 0}),
    ],
)
def test_a_task_gets_its_own_options(words: dict[str, Any], own: dict[str, Any]) -> None:
    asked = DownstreamOptions(
        **words, model=("m",), train=(Path("a"),), out=Path("nowhere"), seed=3
    )
    task = _task(asked)
    assert (task.name, task.options()) == (words["task"], own)


def squad(context: str, *questions: dict[str, Any]) -> str:
    """Return one paragraph in the layout of the official files."""
    paragraph = {"context": context, "qas": questions}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


def test_questions_come_in_four_layouts(tmp_path: Path) -> None:
    asked_for = Question("who?", "a lamp, a lamp", (GoldAnswer("lamp", 10),))
    first = Question("who?", "a lamp, a lamp", (GoldAnswer("lamp", 2),))
    none = Question("who?", "a lamp, a lamp", ())
    cells, header = ("who?", "a lamp, a lamp"), "question context answer answer_start"
    lines = [(*cells, "lamp", 10), (*cells, "lamp", ""), (*cells, "", "")]
    assert read_questions(table(tmp_path / "a.tsv", header, lines), {}) == [asked_for, first, none]
    answers: list[Any] = [
        {"text": ["lamp"], "answer_start": [10]},
        {"text": "lamp", "answer_start": 10},
        [{"text": "lamp", "answer_start": 10}],
        ["lamp"],
        [],
        {"text": [], "answer_start": []},
        {},
    ]
    hub = table(tmp_path / "b.jsonl", "question context answers", [(*cells, a) for a in answers])
    assert read_questions(hub, {}) == [asked_for, asked_for, asked_for, first, none, none, none]
    renamed = table(tmp_path / "c.jsonl", "question context reply", [(*cells, "lamp")])
    assert read_questions(renamed, {"answer": "reply"}) == [first]
    known = {"question": "who?", "answers": answers[2]}
    unknown = {"question": "who?", "answers": [], "is_impossible": True}
    empty = {"question": "who?", "answers": {}}
    (tmp_path / "d.json").write_text(squad(cells[1], known, unknown, empty))
    assert read_questions(tmp_path / "d.json", {}) == [asked_for, none, none]


def test_tables_are_read_alike(tmp_path: Path) -> None:
    rows: list[tuple[Any, ...]] = [('say "a"', "x"), ("b", "y")]
    expected = [{"text": 'say "a"', "label": "x"}, {"text": "b", "label": "y"}]
    assert read_rows(table(tmp_path / "a.tsv", "text label", rows)) == expected
    assert read_rows(table(tmp_path / "a.jsonl", "text label", rows)) == expected
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"say ""a""",x\r\n\r\nb,y\r\n')
    assert read_rows(path) == expected
    assert [row.where for row in read_rows(path)] == [f"{path}, line 2", f"{path}, line 4"]


def test_squad_may_be_one_long_line(tmp_path: Path) -> None:
    """SQuAD may be one long line, as in the official files, and may have a byte order mark."""
    context = "a lamp" + " and more" * (text_files.MAX_LINE // 9)
    asked = {"question": "what?", "answers": [{"text": "lamp", "answer_start": 2}]}
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + squad(context, asked), encoding="utf-8")
    assert path.stat().st_size > text_files.MAX_LINE
    assert read_questions(path, {}) == [Question("what?", context, (GoldAnswer("lamp", 2),))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a.json: cannot be read: No such file or directory; check the path"),
        ('{"data": "é"}'.encode("latin-1"), "line 1: not UTF-8 at byte 10 .*iconv -f LATIN1"),
        (b'{"data": ', "a.json: not JSON .*give a file in SQuAD's layout"),
    ],
)
def test_what_is_no_squad_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_questions(path, {})
    assert "\n" not in str(caught.value)


def test_tagged_files_match_teacher_dump(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    content = "\ufeff# sent_id = 1\na\tX\n# between\n#\tY \n\n\n# sent_id = 2\nb c\tX"
    path.write_bytes(content.replace("\n", "\r\n").encode())
    one, two = read_tagged(path)
    assert (one, two) == (Sentence(("a", "#"), ("X", "Y")), Sentence(("b c",), ("X",)))
    assert [one.where(1), two.where(0)] == [f"tags {path}, line {n}" for n in (4, 8)]
    dumped = list(Corpus.open([str(path)]))
    assert [document.text for document in dumped] == ["a #", "b c"]
    assert [d.gold and d.gold.tags for d in dumped] == [((0, 1, "X"), (2, 3, "Y")), ((0, 3, "X"),)]


def test_a_word_without_a_tag_is_refused(tmp_path: Path) -> None:
    """A word without a tag can be dumped, but training and scoring refuse it."""
    path = tmp_path / "a.tsv"
    path.write_text("a\tX\n\n# no tag\nb\t \n")
    assert texts(path) == ["a", "b"]
    with pytest.raises(UserError, match="line 4: expected word<TAB>tag, got 'b' with tag ''"):
        read_tagged(path)


def test_lines_match_teacher_dump(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone line\r\n \n\u2003\n  two \u2028\nthree".encode())
    assert read_lines(path) == texts(path) == ["one line", "  two \u2028", "three"]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_tables_match_teacher_dump(suffix: str, tmp_path: Path) -> None:
    """Blank lines, also before the header, are not rows; other rows must have as many columns as
    the header."""
    path, separator = tmp_path / f"a{suffix}", "\t" if suffix == ".tsv" else ","
    good: list[list[str]] = [["one", "x"], ["two ", "y"]]
    if suffix == ".jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in good]
        bad, message = "[]", "expected an object"
    else:
        lines = [separator.join(row) for row in good]
        bad, message = f"a{separator}b{separator}c", "expected 2 columns as in the header, got 3"
    header = [] if suffix == ".jsonl" else [separator.join(("text", "label"))]
    path.write_text("\n".join([" ", *header, lines[0], "", "  ", *lines[1:]]) + "\n")
    rows = read_rows(path)
    assert [list(row.values()) for row in rows] == good
    dumped = list(Corpus.open([str(path)], label_column="label"))
    assert [[d.text, d.gold and d.gold.label] for d in dumped] == good
    place = f"{path}, line {len(header) + 6}: "
    path.write_text(path.read_text() + bad + "\n")
    refusals = []
    for read in (read_rows, lambda path: Corpus.open([str(path)], "text").check()):
        with pytest.raises(UserError) as caught:
            read(path)
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1] and refusals[0].startswith(place) and message in refusals[0]


def test_classes_have_the_names_of_the_schema(tmp_path: Path) -> None:
    """Also in a compressed file, and in nested columns."""
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    rows = {"text": ["a", "b"], "label": [1, 0]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    one, two = Classify().read(tmp_path / "a.parquet")
    assert (one.label, two.label, two.where) == ("pos", "neg", f"{tmp_path / 'a.parquet'}, row 2")
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        json.dump([{"data": {"text": "a"}, "label": ["pos"]}], file)
    task = Classify({"text": "data.text"})
    assert [each.label for each in task.read(tmp_path / "a.json.gz")] == ["pos"]
    rows = {"text": ["a", "b"], "label": [1, -1]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet, row 2: the text has no label"):
        Classify().read(tmp_path / "a.parquet")


def test_questions_in_an_array_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"question": "who?", "context": "a lamp", "answer": "lamp"}]))
    assert read_questions(path, {}) == [Question("who?", "a lamp", (GoldAnswer("lamp", 2),))]


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    """An escape in JSON can give half of a character, which no tokenizer encodes."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab\\ud800", "label": "x", "tokens": ["\\udc00"], "tags": ["x"]}\n')
    place = r"(line 1|a.jsonl): character . is '\\u....', half of a character"
    for read in (Classify().read, PartsOfSpeech(columns={"text": "tokens"}).read, read_lines):
        with pytest.raises(UserError, match=place):
            read(path)


def test_lines_of_tables_are_their_texts(tmp_path: Path) -> None:
    """Lines of tables are read as their texts: a masked LM is not trained on the syntax of JSON."""
    path = table(tmp_path / "a.jsonl", "id text", [(1, "one"), (2, " "), (3, "three")])
    assert read_lines(path) == ["one", "three"]
    path = table(tmp_path / "b.jsonl", "s t", [("a", "b")])
    with pytest.raises(UserError, match="no column 'text'.*'s', 't'.* with --text-column"):
        read_lines(path)
    assert read_lines(path, "t") == ["b"]
