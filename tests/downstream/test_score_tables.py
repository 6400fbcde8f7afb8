"""The command runs each task, and those of mteb, and writes the tables of scores and of speed.

- The command runs each task, writes the joined table, and writes the table of speed.
- mteb:NAME is the main score of mteb, on a task defined here without a download.
"""

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from teachonce.downstream.process_memory import STATUS
from teachonce.downstream.score_tables import of_models, result_of, save, seed_table
from teachonce.downstream.settings import SpeedSettings
from teachonce.downstream.speed import MeasuredModel, peak_memory
from teachonce.downstream.tasks.sts import SentenceSimilarity
from tests.downstream.support import (
    asked,
    classified,
    done,
    paired,
    refused,
    run,
    scores_of,
    write_tagged,
)
from tests.downstream.tasks.test_tasks import alike
from tests.end_to_end.support import Words, says
from tests.making.decoders import save_decoder
from tests.making.models import Teachers
from tests.making.sentence_folders import modules, pooling


@pytest.fixture
def runs(tiny_teacher: Teachers, tmp_path: Path) -> list[Path]:
    """Run classify (with renamed columns), pair and qa."""
    classified(tmp_path / "classify.csv", 12, 0, "sentence class")
    paired(tmp_path / "pair.jsonl", 12, 0)
    asked(tmp_path / "qa.json", 9, 0)
    options = {
        "classify.csv": ("--text-column", "sentence", "--label-column", "class", "--per-class", 2),
        "pair.jsonl": ("--seeds", 2, "--test", tmp_path / "pair.jsonl"),
        "qa.json": ("--stride", 0, "--max-length", 500),
    }
    outs = []
    for name, more in options.items():
        task, file = name.split(".")[0], tmp_path / name
        said = done(
            *("--task", task, "--model", tiny_teacher("electra"), "--train", file, "--dev", file),
            *("--out", tmp_path / task, "--epochs", 1, "--seeds", 1, *more),
        )
        assert ("the model's limit" in said) == (task == "qa")
        outs.append(tmp_path / task)
    return outs


def test_runs_are_joined_in_one_table(runs: list[Path], tmp_path: Path) -> None:
    scores = scores_of(runs[0])
    assert scores["settings"]["per_class"] == 2 and scores["examples"]["train"] == 6
    assert scores_of(runs[2])["settings"]["stride"] == 0
    said = done("--task", "table", *reversed(runs), "--out", tmp_path / "all")
    says(said, "accuracy", "Matthews", "Pearson", "exact match")
    says(said, "classify.csv (dev)", "pair.jsonl ", "qa.json (dev)")
    rows = scores_of(tmp_path / "all")["rows"]
    assert [row["task"] for row in rows] == ["classify", "pair", "qa"]
    pair = scores_of(runs[1])
    assert rows[1]["mean"]["test"] == pair["mean"]["test"] and rows[1]["seeds"] == 2


def test_several_models_as_they_are_have_a_mean_and_a_deviation(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    test = write_tagged(tmp_path / "test.tsv", 20, 0)
    labels = tuple(sorted({line.split("\t")[1] for line in test.read_text().split("\n") if line}))
    models = [tiny_teacher("bert", "tagging", each) for each in (labels, labels[::-1])]
    given: list[Words] = [("--model", models[n]) for n in (0, 1, 0)]
    scores = []
    for number, some in enumerate([given[:1], given[1:2], given]):
        out = tmp_path / str(number)
        words = ("--task", "pos", "--as-is", "--test", test, "--out", out)
        said = done(*words, *itertools.chain(*some))
        scores.append(scores_of(out))
    assert "3 models as they are" in said
    for model in models:  # a row for each, before their mean
        assert f"{model.name}: test" in said.replace("\n", "")
    assert "mean: test" in said
    first, second = (each["mean"]["test"]["accuracy"] for each in scores[:2])
    assert first != second
    found = [first, second, first]
    assert scores[2]["mean"]["test"]["accuracy"] == pytest.approx(np.mean(found))
    assert scores[2]["deviation"]["test"]["accuracy"] == pytest.approx(np.std(found, ddof=1))
    assert [each["model"] for each in scores[2]["seeds"]] == [str(models[n]) for n in (0, 1, 0)]
    joined = done("--task", "table", *(tmp_path / n for n in "012"), "--out", tmp_path / "all")
    rows = scores_of(tmp_path / "all")["rows"]
    assert [row["run"] for row in rows] == ["0", "1", "2", "2", "2", "2"] and " run " in joined
    assert rows[-1]["model"] == "mean" and rows[-1]["seeds"] == 3
    assert rows[-1]["deviation"] == scores[2]["deviation"] and "±" in joined
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "0", tmp_path / "again" / "0")
    runs = tmp_path / "0", tmp_path / "again" / "0"  # of one name
    done("--task", "table", *runs, "--out", tmp_path / "both")
    assert [row["run"] for row in scores_of(tmp_path / "both")["rows"]] == [*map(str, runs)]
    other = tiny_teacher("electra", "tagging", labels)
    said = done(*words[:-1], tmp_path / "3", "--model", models[0], "--model", other)
    assert "2 models as they are" in said and "mean: test" not in said


def test_each_of_several_models_has_its_own_number_of_blocks(tiny_teacher: Teachers) -> None:
    about = {"task": "mlm", "measures": {"nats/token": "loss"}, "primary": "loss", "scale": 1}
    found = [
        result_of(
            *(about, str(tiny_teacher(kind)), {"test": "a.txt"}, {"as_is": True}, {"test": blocks}),
            runs=[{"test": {"primary": 1.0, "loss": 1.0}}],
        )
        for kind, blocks in (("bert", 401), ("distilbert", 435))
    ]
    _, examples, _ = seed_table(of_models(found)).columns
    assert list(examples.cells) == ["401", "435"]


def test_several_files_to_test_are_scored_apart_and_together(
    tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a tuned model, for a model as it is, and in the joined table."""
    monkeypatch.setenv("COLUMNS", "1000")  # otherwise a long path is folded
    train, dev, first, second = (
        write_tagged(tmp_path / f"{name}.tsv", size, seed)
        for seed, (name, size) in enumerate({"tr": 60, "dev": 20, "de": 30, "sk": 10}.items())
    )
    tests, tuned, whole, alone = (
        ("--test", first, "--test", second),
        *map(tmp_path.joinpath, ("tuned", "whole", "alone")),
    )
    words: Words = ("--train", train, "--dev", dev, "--epochs", 2, "--lr", 5e-3)
    words = (*words, "--seeds", 2, "--save")
    ran = [
        done("--task", "pos", "--model", tiny_teacher("bert"), *words, *tests, "--out", tuned),
        done("--task", "pos", "--model", tuned / "model", "--as-is", *tests, "--out", whole),
        done("--task", "pos", "--model", tuned / "model", "--as-is", *tests[2:], "--out", alone),
        done("--task", "table", tuned, whole),
    ]
    card = (tuned / "model" / "README.md").read_text()
    kept = scores_of(tuned)["seeds"][0]
    assert "pipeline_tag: token-classification" in card and "fine-tuned for pos" in card
    assert f"| test {first.name} | 30 | {100 * kept[f'test {first}']['macro_f1']:.2f} |" in card
    assert "| lr | 0.005 |" in card and "seed 0, one of 2" in card and str(tmp_path) not in card
    assert "| seed | 0 |" in card and "| steps |" not in card
    words = ("--task", "pos", "--model", tuned, "--as-is", *tests, *tests)
    assert f"--test {first}: is given twice" in refused(*words, "--out", tmp_path / "twice")
    names = [f"test {first}", f"test {second}", "test"]
    found = {out: scores_of(out) for out in (tuned, whole, alone)}
    for result in (found[tuned], found[whole]):
        assert [name for name in result["mean"] if name != "dev"] == names
        assert [result["examples"][name] for name in names] == [30, 10, 40]
        for run_of_seed in result["seeds"]:
            of_files = [run_of_seed[name]["macro_f1"] for name in names[:2]]
            assert run_of_seed["test"]["macro_f1"] == pytest.approx(np.mean(of_files))
        means = [result["mean"][name]["macro_f1"] for name in names[:2]]
        assert result["file_deviation"]["macro_f1"] == pytest.approx(np.std(means, ddof=1))
    assert "between files" in ran[1] and "between files" not in ran[2]
    assert found[whole]["mean"][names[1]] == pytest.approx(found[alone]["mean"]["test"])
    seed = found[tuned]["seeds"][0]
    assert found[whole]["mean"][names[0]] == pytest.approx(seed[names[0]], abs=1e-6)
    for cell in ("de.tsv", "sk.tsv", " mean of 2 files "):
        assert ran[3].count(cell) == 2


def test_speed_compares_with_a_teacher(tiny_teacher: Teachers, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("The old lamp.\n\nA story is never finished.\n")
    said = done(
        *("--task", "speed", "--model", tiny_teacher("bert"), "--teacher", tiny_teacher("xlmr")),
        *("--repeat", 2, "--batch-size", 2, "--test", texts, "--out", tmp_path / "speed"),
    )
    says(said, "batches of 128 tokens, not 512", "2 x 128")
    found = scores_of(tmp_path / "speed")
    assert found["settings"]["texts"] == 2 and found["length"] == 128
    student, teacher = found["models"]
    file = tiny_teacher("bert") / "model.safetensors"
    assert student["disk_bytes"] == file.stat().st_size
    assert student["ratio"]["disk_bytes"] == teacher["disk_bytes"] / student["disk_bytes"]
    for device in found["devices"]:
        for name in ("sentence_ms", "batch_ms"):
            expected = teacher[device][name] / student[device][name]
            assert student["ratio"][device][name] == expected
            low, high = teacher[device][f"{name}_quartiles"]
            assert low <= teacher[device][name] <= high
    joins_speed(tmp_path, tiny_teacher("bert"), found)


def test_sizes_of_other_dtypes_are_compared_as_in_one(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    half = tmp_path / "half"
    teacher = AutoModel.from_pretrained(tiny_teacher("bert"), dtype=torch.bfloat16)
    teacher.save_pretrained(half)
    AutoTokenizer.from_pretrained(tiny_teacher("bert")).save_pretrained(half)
    words = ("--model", tiny_teacher("bert"), "--teacher", half, "--repeat", 1, "--batch-size", 1)
    said = done("--task", "speed", *words, "--out", tmp_path / "speed")
    student, other = scores_of(tmp_path / "speed")["models"]
    assert (student["disk_dtype"], other["disk_dtype"]) == ("fp32", "bf16")
    in_float32 = 2 * other["disk_bytes"] / student["disk_bytes"]
    assert student["ratio"]["disk_bytes"] == pytest.approx(in_float32)
    says(said, " fp32 (1/", " bf16")
    again = run(*("--task", "speed", *words, "--json"))
    assert json.loads(again.stdout)["models"][0]["model"] == str(tiny_teacher("bert"))
    assert "run 1 of 1" in again.stderr


def joins_speed(folder: Path, model: Path, found: dict[str, Any]) -> None:
    """The row of speed is next to the scores of the same model in two tasks; a model without scores
    has a row of its own."""
    score = {"primary": 0.5, "accuracy": 0.5}
    scores: dict[str, Any] = {
        "task": "pos", "model": f"{model}/", "measures": {"accuracy": "accuracy"},
        "seeds": [{}, {}], "files": {"dev": "dev.tsv"},
        "mean": {"dev": score}, "deviation": {"dev": score}, "scale": 100,
    }  # fmt: skip
    mlm = {**scores, "task": "mlm", "model": "scratch:1x1x1", "saved": [str(model)], "scale": 1}
    runs = [folder / name for name in ("speed", "pos", "mlm")]
    for run_folder, result in zip(runs[1:], (scores, mlm), strict=True):
        save(result, run_folder)
    joined = done("--task", "table", *runs, "--out", folder / "table")
    assert found["hardware"].split(",")[0] in joined
    *scored, teacher = scores_of(folder / "table")["rows"]
    assert [row["task"] for row in scored] == ["mlm", "pos"]
    assert all(row["speed"]["cpu"] == found["models"][0]["cpu"] for row in scored)
    assert teacher["task"] == "speed" and teacher["speed"]["model"] == found["teacher"]
    millions = f"{found['models'][0]['parameters'] / 1e6:.2f} M (1/"
    (line,) = (line for line in joined.splitlines() if "50.00 ± 50.00" in line)
    assert "dev.tsv (dev)" in line and millions in line
    (line,) = (line for line in joined.splitlines() if "0.50 ± 0.50" in line)
    assert "scratch:1x1x1" in line and millions in line
    assert "measured" not in joined
    elsewhere = {**found, "hardware": "another machine"}
    save(elsewhere, folder / "elsewhere")
    joined = done("--task", "table", *runs, folder / "elsewhere")
    assert joined.count("50.00 ± 50.00") == 2 and " measured " in joined
    assert "2: median of 2 runs (lower to upper quartile) on another machine" in joined
    ways = [line.split("│")[-2].strip() for line in joined.splitlines() if " M " in line]
    assert ways == ["1", "2"] * 2 + ["1", "2"]
    assert "is several runs in a table; give" in refused("--task", "table", folder / "table")
    save({name: value for name, value in scores.items() if name != "seeds"}, folder / "other")
    assert "is not a run of downstream; give" in refused("--task", "table", folder / "other")


@pytest.mark.skipif(not STATUS.exists(), reason="the peak of memory is told by Linux alone")
def test_peak_memory_counts_weights_and_grows_with_the_batch(tiny_teacher: Teachers) -> None:
    subject = MeasuredModel(str(tiny_teacher("bert")))
    assert all("pooler" not in name for name, _ in subject.network.named_parameters())
    peaks = []
    for size in (1, 256):
        subject.prepare(SpeedSettings(batch_size=size), 128)
        peaks.append(peak_memory(subject, [subject.batch], "cpu") or 0)
    assert 4 * subject.parameters <= peaks[0] < 50 * 2**20  # of the model, not of the process
    # one state of the feed-forward layer of size 64
    assert peaks[1] - peaks[0] > 255 * 128 * 64 * 4
    single = peak_memory(subject, subject.sentences, "cpu") or 0
    assert 4 * subject.parameters <= single < peaks[1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_is_measured_with_its_output_layer(tied: bool, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path / "decoder", "Llama", tie_word_embeddings=tied)
    subject = MeasuredModel(str(folder))
    assert subject.parameters == AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    subject.prepare(SpeedSettings(batch_size=2), 16)
    logits = list[Any]()
    subject.network.register_forward_hook(lambda *given: logits.append(given[-1].logits.shape))
    assert subject.run([subject.batch], "cpu") > 0
    assert logits == [(2, 1, subject.network.config.vocab_size)]
    # Text vectors need no output layer, whatever package has the modules behind the network.
    modules = [{"idx": 0, "name": "0", "path": "", "type": "other.package.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    network = AutoModel.from_pretrained(folder)
    assert MeasuredModel(str(folder)).parameters == network.num_parameters()


@pytest.fixture
def folder(tiny_teacher: Teachers, tmp_path: Path) -> Path:
    return modules(pooling("cls"), base=tiny_teacher("bert"), folder=tmp_path / "model")


def test_without_mteb_one_line_says_how_to_get_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    words = ("--task", "mteb:STS12", "--model", folder, "--out", tmp_path / "out")
    assert "pip install 'teachonce[mteb]'" in refused(*words)


def local_task(pairs: Path) -> Any:
    """An mteb task with a local table as its data."""
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    rows = SentenceSimilarity().read(pairs)

    class LocalSTS(AbsTaskSTS):  # type: ignore[misc]  # untyped where mteb is not installed
        min_score, max_score = 0, 5
        metadata = TaskMetadata(
            name="LocalSTS",
            dataset={"path": "nowhere/local", "revision": "0"},
            description="Sentences with and without the same animal.",
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )

        def load_data(self, **ignored: Any) -> None:
            columns = {
                "sentence1": [row.text_a for row in rows],
                "sentence2": [row.text_b for row in rows],
                "score": [row.score for row in rows],
            }
            self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
            self.data_loaded = True

    return LocalSTS


def test_the_main_score_of_a_local_task(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mteb")
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "cache"))
    pairs = alike(tmp_path / "test.tsv", 24, 0)
    registry = sys.modules["mteb.get_tasks"]._TASKS_REGISTRY
    monkeypatch.setitem(registry, "LocalSTS", local_task(pairs))
    out = tmp_path / "out"
    said = done("--task", "mteb:LocalSTS", "--model", folder, "--out", out)
    rows, model = SentenceSimilarity().read(pairs), SentenceTransformer(str(folder), device="cpu")
    sides = [model.encode([getattr(row, side) for row in rows]) for side in ("text_a", "text_b")]
    cosines = model.similarity_pairwise(*sides)
    expected = spearmanr([row.score for row in rows], cosines).statistic
    assert "cosine_spearman" in said and f"{100 * expected:.2f}" in said
    assert "mteb:LocalSTS" in done("--task", "table", out)
    words = ("--model", folder, "--out", tmp_path / "no")
    assert "mteb has no such task" in refused("--task", "mteb:Nonsense", *words)
