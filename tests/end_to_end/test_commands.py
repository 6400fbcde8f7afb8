"""The commands as users type them, and mistakes in their words.

- The commands as users type them.
- Mistakes in the words of a command are reported, one line each, before torch and transformers are
  loaded, which takes seconds.
"""

import errno
import io
import json
import operator
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console
from transformers import AutoModel

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.student_export.cli import main as student_export
from teachonce.student_predict.cli import main as student_predict
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.start import initialise
from teachonce.student_train.sweep import main as student_sweep
from teachonce.student_train.sweep.table import aligned, table
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.corpus import sources
from teachonce.teacher_dump.mixed_vocab.cli import mixed_vocab
from tests.end_to_end.support import (
    ROOT,
    STUDENT,
    Words,
    invoke,
    ok,
    refused,
    report_of,
    says,
    tree,
)
from tests.making.dumps import dumped, write_corpus
from tests.making.environment import printed_by
from tests.making.models import Stores, Teachers


@pytest.fixture(scope="module")
def store(tiny_store: Stores) -> Path:
    return tiny_store("bert", attention="none")


MODULES = ("teacher_dump.cli", "student_train.cli", "student_train.sweep", "feature_store.cli")
HELP = """
import importlib, sys
for module in sys.argv[1:]:
    try:
        importlib.import_module(f"teachonce.{module}").main(["--help"])
    except SystemExit as end:
        print(end.code, {"torch", "transformers"} & set(sys.modules))
"""


def test_help_loads_no_torch() -> None:
    printed = printed_by(sys.executable, "-c", HELP, *MODULES, cwd=ROOT)
    assert printed.count("0 set()\n") == len(MODULES)


COMMANDS: list[tuple[click.Command, tuple[str, ...]]] = [
    (command, ())
    for command in (teacher_dump, student_train, student_sweep, downstream, feature_store)
] + [(teacher_dump, ("mixed-vocab",))]
COMMANDS += [(feature_store, (name,)) for name in ("info", "verify", "convert", "merge", "show")]


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_help_is_short_or_long(command: click.Command, words: tuple[str, ...]) -> None:
    short, long = (ok(command, *words, option) for option in ("-h", "--help"))
    assert short == long and "-h, --help" in short
    assert "..." not in short.partition("Commands:")[2]  # each in one short sentence


def test_sweep_shows_the_defaults_of_its_repeatable_options() -> None:
    context = click.Context(student_sweep)
    records = [param.get_help_record(context) for param in student_sweep.params]
    printed = " ".join(record[1] for record in records if record)
    assert "[default: tiny; for a causal teacher" in printed
    assert "1 for adadelta; a tenth with --student DIR without --lora]" in printed
    assert "[default: STORE-sweep next to STORE.zarr]" in printed


@pytest.mark.parametrize(
    "command",
    [
        *(teacher_dump, student_train, student_sweep, student_export, student_predict, downstream),
        *(feature_store, mixed_vocab, feature_store.commands["info"]),
    ],
)
def test_version(command: click.Command) -> None:
    assert ok(command, "--version").strip().endswith(version("teachonce"))


def test_files_of_a_folder_that_are_not_read_are_named(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    write_corpus(tmp_path / "texts.txt", 5)
    (tmp_path / "scan.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty.txt").touch()
    words = ("--model", tiny_teacher("bert"), "--corpus", tmp_path, "--out", tmp_path / "a.zarr")
    said = ok(teacher_dump, *words)
    line = f"skipped   {tmp_path / 'empty.txt'}; {tmp_path / 'scan.pdf'}: empty, or of a suffix"
    assert line in said and "texts.txt" not in said


def test_dump_without_a_head_says_what_is_stored(tmp_path: Path, tiny_teacher: Teachers) -> None:
    model, out = shutil.copytree(tiny_teacher("bert"), tmp_path / "headless"), tmp_path / "a.zarr"
    AutoModel.from_pretrained(model).save_pretrained(model)
    words = ("--model", model, "--corpus", write_corpus(tmp_path / "a.txt", 5), "--out", out)
    said = ok(teacher_dump, *words)
    assert "logits none (no masked-LM head in the checkpoint), hidden mean" in said
    assert "topk" not in said and open_store(out).features.logits is None
    out = tmp_path / "b.zarr"
    said = ok(teacher_dump, *words[:-1], out, "--head", "none", "--attention", "none")
    assert "logits none (--head none), hidden mean, attention none" in said


def test_dump_without_a_corpus_takes_the_docs_of_python_and_says_so(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses a part of the library here; test_documents.py reads all of it."""
    some = [each for each in sources.library_sources() if each[1].parent.name == "json"]
    monkeypatch.setattr(sources, "library_sources", lambda: some)
    out = tmp_path / "store.zarr"
    said = ok(teacher_dump, "--model", tiny_teacher("bert"), "--out", out, "--limit", "1500")
    assert "python-docs (no --corpus given: the default)" in said
    assert "logits topk:64, hidden mean, attention mean, 1 view, windows of at most 128" in said
    calibrated = "are read to measure the mean and standard deviation of the states"
    assert f"tokens of the first part {calibrated}\n" in said
    assert "part 0    " in said and "tokens/s" in said  # no terminal, so a line for each part
    assert said.strip().endswith(f"next: student-train --store {out} --vocab 5k")
    store = open_store(out)
    assert 1000 < store.meta["tokens"] <= 1500
    assert store.identity["corpus"]["sources"][0]["kind"] == "python-docs"
    assert store.features.codec == "default" and store.features.hidden == ("mean",)


def test_a_training_in_a_pipe_prints_its_progress_at_each_validation(
    store: Path, tmp_path: Path
) -> None:
    words = ("--store", store, "--vocab", "450", "--steps", 9, "--eval-every", 3, *STUDENT)
    said = ok(student_train, *words, "--out", tmp_path / "student")
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    form = r"step +{} of 9: loss [\d.]+, valid_loss [\d.]+; [\d,]+ student tokens/s, [\d:]+ left"
    assert all(re.fullmatch(form.format(n), x) for n, x in zip((3, 6), lines, strict=True))


def test_student_without_out_is_written_next_to_the_store(store: Path) -> None:
    said = ok(student_train, "--store", store, "--vocab", "450", "--steps", "2", *STUDENT)
    (folder,) = (store.parent / "store-students").iterdir()
    assert f"out       {folder}" in said and f"student in {folder}" in said
    assert f"next: student-predict {folder} 'This is a [MASK].'" in said
    assert folder.name.startswith("450-32x2x4-")
    says(said, "vocabulary 450", "start auto", "pieces (SVD to 32)", "1 mlm + 30 hidden")
    says(said, "2 steps", "lr 0.004")
    files = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md", "metrics.jsonl"} <= files


NATS = "valid_mlm_per_character"


@pytest.mark.slow
def test_sweep(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def counted(student: Any, how: str, *others: Any) -> list[str]:
        starts.append(how)
        return initialise(student, how, *others)

    monkeypatch.setattr("teachonce.student_train.prepared_student.initialise", counted)
    out = store.parent / "store-sweep"  # the destination without --out
    words: Words = ("--store", store, *STUDENT, "--steps", "2", "--eval-every", "2")
    words += ("--vocab", "450", "--vocab", "500", "--loss", "mlm=1", "--loss", "mlm=1,kl=1")
    said = ok(student_sweep, *words)
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")]
    assert rows[0][:2] == ["| vocab", "loss"] and len(rows) == 2 + 4
    assert sorted(tuple(row[:2]) for row in rows[2:]) == sorted(
        (f"| {vocab}", loss) for vocab in (450, 500) for loss in ("mlm=1", "mlm=1,kl=1")
    )
    assert len(json.loads((out / "sweep.json").read_text())) == 4
    weights = {path: path.stat().st_mtime_ns for path in out.glob("*/model.safetensors")}
    assert len(weights) == 4
    assert len(starts) == 4  # no run is prepared once for the checks and again for training

    again = ok(student_sweep, *words, "--cache", "ram")  # which does not change the student
    assert again.count("finished before") == 4
    assert [line for line in again.splitlines() if line.startswith("| ")] == [
        line for line in said.splitlines() if line.startswith("| ")
    ]
    assert weights == {path: path.stat().st_mtime_ns for path in weights}

    by_nats = sorted(json.loads((out / "sweep.json").read_text()), key=operator.itemgetter(NATS))
    headings = [heading.strip("| ") for heading in rows[0]]
    shown = [row[headings.index(NATS)].strip(" |") for row in rows[2:]]
    assert shown == [f"{row[NATS]:,.5g}" for row in by_nats]  # the best first
    assert "valid_loss" not in headings  # with other losses, so another quantity
    best = f"best      {by_nats[0]['folder']}: {NATS} {by_nats[0][NATS]:.5g} (nats per character,"
    assert best in said and "comparable between vocabularies and losses" in said
    table = out.parent / "joined"
    assert "nats/character" in ok(downstream, "--task", "table", out, "--out", table)
    joined = json.loads((table / "scores.json").read_text())["rows"]
    assert [row["model"] for row in joined] == [str(out / row["folder"]) for row in by_nats]
    assert joined[0]["mean"]["held-out"] == {"nats/character": by_nats[0][NATS]}
    assert json.loads(invoke(student_sweep, *words, "--json").stdout) == by_nats
    (out / "sweep.json").write_text("[]")  # as a sweep begins
    line = refused(downstream, "--task", "table", out)
    assert "none of its students is finished; run the same student-sweep again" in line
    (out / "sweep.json").write_text("[3]")
    line = refused(downstream, "--task", "table", out)
    assert "sweep.json was not written by student-sweep" in line


def test_a_sweep_over_a_flag(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--store", store, *STUDENT, "--vocab", "450", "--loss", "mlm", "--steps", "2")
    for given, expected in (("--best", [True]), ("--no-best --best", [False, True])):
        said = ok(student_sweep, *words, "--out", tmp_path, *given.split())
        rows = json.loads((tmp_path / "sweep.json").read_text())
        reports = [report_of(tmp_path / r["folder"]) for r in rows]
        assert [report["settings"]["best"] for report in reports] == expected
    assert [row["best"] for row in rows] == ["False", "True"]
    assert said.count("finished before") == 1
    line = refused(student_sweep, *words, "--out", tmp_path, "--no-best")
    assert f"{tmp_path}: its table has 1 student with other settings" in line
    assert "give another --out" in line

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    line = refused(student_sweep, *words, "--out", tmp_path, "--no-best", "--best")
    assert "No space left" in line
    assert json.loads((tmp_path / "sweep.json").read_text()) == rows  # complete and unchanged


def test_the_table_of_a_sweep_at_a_terminal() -> None:
    rows = [
        {"loss": "mlm=1", "parameters": 1234567, "valid_mlm_per_character": 1.25},
        {"loss": "mlm=1,hidden=30", "parameters": 7, "valid_mlm_per_character": 0.5},
    ]
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, no_color=True, width=60)
    console.print(aligned(table(rows, ["loss"])))
    *_, one, two = said.getvalue().splitlines()
    assert one.split() == ["mlm=1", "1,234,567", "1.25"]
    assert two.split() == ["mlm=1,hidden=30", "7", "0.5"]
    ends = [[cell.end() for cell in re.finditer(r"\S+", line)] for line in (one, two)]
    assert ends[0][1:] == ends[1][1:] and ends[0][0] < ends[1][0]


def test_feature_store(store: Path, tmp_path: Path) -> None:
    printed = ok(feature_store, "info", store)
    fs = open_store(store)
    for word in ("bert", f"{fs.meta['tokens']:,}", "topk", "mean", "default"):
        assert word in printed
    described = json.loads(ok(feature_store, "info", store, "--json"))
    assert described["tokens"] == fs.meta["tokens"] and described["identity"] == fs.identity
    assert "sound" in ok(feature_store, "verify", store)
    shown = ok(feature_store, "show", store, "3")
    assert fs[3].text.split()[0] in shown and "sequence 3" in shown

    ok(feature_store, "convert", store, tmp_path / "copy.h5")
    ok(feature_store, "convert", tmp_path / "copy.h5", tmp_path / "small.zarr", "--codec", "small")
    assert "sound" in ok(feature_store, "verify", tmp_path / "small.zarr")
    copy = open_store(tmp_path / "copy.h5")
    assert list(copy.texts()) == list(fs.texts()) and copy.identity == fs.identity
    for name, states in fs[3].views[0].hidden.items():
        assert (copy[3].views[0].hidden[name] == states).all()
    words = ("--store", tmp_path / "small.zarr", "--vocab", "450", "--steps", "2", *STUDENT)
    ok(student_train, *words, "--out", tmp_path / "student")


PROGRAM = """
import importlib, json, sys
import click
for module, words in json.loads(sys.argv[1]):
    try: importlib.import_module(module).main(words, standalone_mode=False)
    except click.UsageError as error: print(" ".join(error.message.split()))
    except click.ClickException as error: print(error.message)
    else: print("not refused")
print({"torch", "transformers"} & set(sys.modules))
"""
DUMP = """
--model t5 --head causal | an encoder-decoder (t5) | choose an encoder
--model . | no config.json
--model nowhere/teacher/x | no such folder
--corpus nowhere.txt | no such file
--out blank.zarr | exists and is not
--out out.tar | out.tar | .zarr | .h5
--out nowhere/out.zarr | nowhere | does not exist
--logits none --hidden none --attention none | --logits, --hidden | all none | request one
--head none --hidden none --attention none | --head, --hidden | all none | request one
--logits best | expected topk
--logits topk:0 | (at least 1)
--logits topk:600 | topk:600 | vocabulary has 600 tokens | smaller K
--logits topk:² | topk:² | topk:K
--logits sample:0 | sample:DRAWS
--logits sample:70000 | --logits sample:70000 | at most 65535
--head mlm --logits none | --head mlm | --logits none
--hidden middle | unknown feature | middle | groups:N
--hidden layer:99 | --hidden layer:99: the teacher has layers 0 (embeddings) to 4
--hidden layer:² | layer:² | layer:I
--hidden groups:3 | groups:3 | divisor of 4
--hidden groups:0 | groups:0 | groups:N
--hidden groups:² | groups:² | groups:N
--hidden none,mean | none,mean | none cannot be combined with others
--hidden= | --hidden: is empty | give a value, or leave it out
--hidden mean:1 | unknown feature 'mean:1' | mean:0 | groups:N
--attention layer:99 | --attention layer:99: the teacher has layers 0 (embeddings) to 4
--attention groups:0 | unknown feature
--device toaster | --device toaster | expected auto, cpu
--device cpu: | --device cpu: | cuda:N
--device cuda:² | --device cuda:² | cuda:N
--views 0 | --views 0 | at least 1
--mask-prob 1.5 | --mask-prob 1.5
--mask-words rare | --mask-words rare | --views 2
--views 2 --mask-words odd | --mask-words | uniform | rare
--text-column nope | --text-column nope | corpus.txt | no columns | leave --text-column out
--max-length 9999 | --max-length 9999 | reads at most 128 tokens
--max-length 0 | --max-length 0 | at least 4
--stride 500 | less than --max-length 128
--stride -1 | --stride -1
--batch-tokens 0 | --batch-tokens
--limit 0 | --limit
--seed -1 | --seed -1
--codec best | --codec | exact
--precision fp8 | --precision | bf16
--head classification | no classification head (missing: it is a BertForMaskedLM)
--head tagging | downstream --task pos
--label-column label | labels are stored with the logits of a classification or tagging head
--text-column a,b | pairs of texts need a classification head, and the teacher's head is: mlm
--shard 2/2 | expected i/n
--shard 1 | expected i/n
--shard a/b | expected i/n
--shard -1/2 | expected i/n
--ray ray://host:1 | --ray ray://host:1: expected HOST:PORT
--ray host | --ray host: expected HOST:PORT
--ray --shard 0/2 | --shard 0/2 and --ray contradict each other
--ray-gpus 0.5 | --ray-gpus 0.5: applies to workers of Ray; add --ray
--ray local --ray-gpus 1.5 | expected a share of one GPU, or whole GPUs
--ray --ray-gpus -1 | --ray-gpus -1: expected 0 or more
"""
VECTORS = """
--logits topk:4 | --logits topk:4: --head embedding reads no LM head
--stride 3 | --stride 3: for an embedding head a document is one sequence
--views 2 | --views 2: the vector of a text is computed from the plain text | leave --views out
--label-column x | --label-column x: labels are stored with the logits of a classification
--text-column a,b | pairs of texts need a classification head
--head none --pooling max | --pooling max: applies to vectors of texts
--head none --prompt query | --prompt query: applies to vectors of texts
"""
PARALLEL = """
--student-column en | --student-column en: is also the teacher's column; name
--student-column sk | no column 'sk'; its columns are 'ru', 'en' | give one of them as --student-c
--student-column ru --hidden mean | store vectors only: --head embedding
--student-column ru --views 2 | the same words cannot be masked in both
--student-column ru --grow-from b.zarr | leave --grow-from out
--student-column ru --head none --hidden mean | add --head embedding
"""
TRAIN = """
--vocab many | --vocab many | 5k
--vocab nowhere | expected a size
--vocab 99999999999999999999 | expected a size
--vocab ./corpus.txt | is a file; expected a size
--student huge | --student huge | HxLxA
--student teacher:9 | --student teacher:9 | has 4 layers | teacher:4
--student scratch:64x2x2 | give 64x2x2
--lr 1e-3,1e-2 | to compare several: student-sweep --lr 1e-3 --lr 1e-2
--student lama | did you mean llama:SIZE? expected tiny
--student qwen3:256 | --student qwen3:256: expected HxLxA
--loss hiden=1 | did you mean hidden?
--loss wishful=1 | wishful | expected one of mlm, |  kl, |  ce,
--loss mlm=1,mlm=2 | --loss mlm=2 | mlm is given twice
--loss mlm=1 hidden=30 | unexpected word 'hidden=30' | (mlm=1,hidden=30)
--loss ce=1 | has no task head
--align spam | expected one of span
--init magic | --init magic | svd, svd:STORE, teacher
--init layer:1 | expected auto
--init layers:1,9 | layers:1,9 | 2 numbers | (one per student layer) from 1 to 4
--init layers:1,x | expected layer numbers
--init layers:one | layers:one | layers:1,3,5
--init layers:1,2@nowhere | nowhere: there is no such folder; check the path
--init svd:nowhere.zarr | --init svd:nowhere.zarr | no such file or folder
--word-vectors nowhere.txt | check the path
--view 9 | --view 9 | has views 0 to 0
--recipe nowhere | --recipe list
--held-out 0.99 | too few to hold out | 0.99
"""
DECODER = """
--loss mlm | --loss mlm | a decoder | next, next-inside
--loss kl=1,next=1 | --loss kl | a decoder | next, next-inside
--loss sentence=1,next=1 | --loss sentence | a decoder | hidden
--align kl-next=span | --align kl-next=span | white space | kl-next=bytes
--align reduce | --align reduce | white space | give bytes
--mask-prob 0.3 | --mask-prob 0.3 | a decoder | leave --mask-prob out
--mask-words rare | --mask-words rare | a decoder | leave --mask-words out
--view 1 | --view 1 | a decoder | leave --view out
--prune-to 300 | --prune-to 300 | a decoder | pruned:SIZE
--lora 4 | --lora 4 | --init is auto | --student DIR
--init folder:nowhere | --init folder:nowhere: nowhere: there is no such folder; check the path
--vocab teacher --loss next-inside | --loss next-inside: trains nothing | add next | --vocab 8k
--student ./nowhere | --student ./nowhere: no such folder | 128x2x2
--student teacher:x | --student teacher:x: expected teacher:L with a number
--student 32x2x4 --loss next | --loss next | not a decoder | mlm
--student 32x2x4 --loss mlm,kl | --loss kl | next-token logits of a causal | kl-next | mlm
--student 32x2x4 | 32x2x4: is not a decoder, but the teacher of | gpt2:256x4x | give --loss (mlm=1
"""
EXPORT = """
nowhere/a/b --to onnx | no such folder
blank.zarr --to onnx | no config.json
teacher --to onnx --check nowhere.txt | no such file
teacher --to gguf --out ready | does not export students other than decoders | onnx or openvino
decoder --to torchscript --out ready | does not export decoders; give --to onnx or gguf
teacher --to onnx --least 9 | a share above 0
teacher --to onnx --quantize int8 --out table.tsv | exists already
"""
PREDICT = """
nowhere/a/b text | no such folder
blank.zarr text | no config.json
decoder text | is a decoder
teacher --input nowhere.txt | check the path
teacher --input table.tsv --text-column x | no column
"""
SWEEP = """
--trials 3 | no setting varies
--lr 0.1 --lr -3 | --lr -3
--loss mlm=1 --loss ce=1 | has no task head
--trials 3 --loss mlm=1 --loss hiden=1 | did you mean hidden?
--grid nowhere.toml | cannot be read (No such file or directory); check the file
--downstream nowhere.toml | cannot be read (No such file or directory); check the file
--page nowhere | --page writes the page into the folder of its sweep, and reads no other option
--out corpus.txt | is a file
--out store.zarr | is the folder of a store
--prune median --lr 0.1 --lr 0.2 | --prune median | add --trials N
--ray-gpus 0.5 | --ray-gpus 0.5: applies only to students on Ray; add --ray
--ray local --jobs 2 | --jobs 2 and --ray contradict each other
--ray local --device cuda:1 | --device cuda:1: Ray assigns a GPU
"""
SCORE = """
--task classfy | expected one of
--task ner --model teacher --train table.tsv | needs --dev
--task classify --model nowhere/a/b --train table.tsv --dev table.tsv | no such folder
--task classify --model table.tsv --train table.tsv --dev table.tsv | is a file
--task classify --model teacher --train corpus.txt --dev table.tsv | ends in .jsonl
--task classify --model teacher --train table.tsv --dev nowhere.tsv | check the path
--task classify --model teacher --train table.tsv --dev table.tsv --text-column x | no column
--task classify --model teacher --train table.tsv --dev table.tsv --text-column txt | mean text?
--task pair --model teacher --train table.tsv --dev table.tsv | --text-a-column
--task qa --model teacher --train table.tsv --dev table.tsv | --question-column
--task classify --as-is --model teacher --test table.tsv | no classification head
--task ner --as-is --model teacher --test table.tsv | no tagging head
--task mlm --as-is --model decoder --test corpus.txt | is a GPT2LMHeadModel | with `--task lm`
--task mlm --as-is --model teacher --test blank.txt | blank.txt: has no text
--task mlm --model teacher --train corpus.txt --out store.zarr | choose another, or continue with
--task lm --model decoder --test blank.txt | blank.txt: has no text
--task retrieval --model teacher --test blank.zarr | queries.jsonl: cannot be read
--task speed --model nowhere/a/b | no such folder
--task table nowhere | no scores.json
"""


@pytest.mark.slow
def test_a_torchvision_for_another_torch_is_one_line(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    """transformers imports any installed torchvision."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    about = tmp_path / "torchvision-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\n")
    words = ["-m", "teachonce.student_predict", str(tiny_teacher("bert")), "A [MASK]."]
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *words], env=paths, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("Error: torchvision 0.1.0 does not fit torch ")
    assert "(operator nms does not exist)" in line and "pip uninstall torchvision" in line


def test_mistakes_are_reported_before_torch_is_loaded(
    tmp_path: Path, tiny_teacher: Teachers, embedder: Path, causal: Path
) -> None:
    (tmp_path / "teacher").symlink_to(tiny_teacher("bert"))
    (tmp_path / "decoder").symlink_to(tiny_teacher("gpt2"))
    corpus = write_corpus(tmp_path / "corpus.txt")
    store = dumped(tiny_teacher("bert"), corpus, tmp_path / "store.zarr", attention="none")
    (tmp_path / "t5").mkdir()
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5Model"]}
    (tmp_path / "t5" / "config.json").write_text(json.dumps(t5))
    (tmp_path / "t5" / "model.safetensors").touch()
    (tmp_path / "blank.zarr").mkdir()
    (tmp_path / "blank.txt").write_text(" \n\t\n")
    (tmp_path / "table.tsv").write_text("text\tlabel\nA good one.\tgood\nA bad one.\tbad\n")
    dump = ["--model", "teacher", "--corpus", "corpus.txt", "--out", "out.zarr"]
    train = ["--store", str(store), "--student", "32x2x2", "--out", "out"]
    (tmp_path / "embedder").symlink_to(embedder)
    (tmp_path / "pairs.tsv").write_text("ru\ten\nКамни.\tStones.\n", "utf-8")
    embedding = ["--model", "embedder", "--head", "embedding", "--out", "out.zarr", "--corpus"]
    vectors, parallel = [*embedding, "corpus.txt"], [*embedding, "pairs.tsv", "--text-column", "en"]
    decoder = ["--store", str(causal), "--student", "llama:32x2x4", "--out", "out"]
    typed, expected, before = [], [], tree(tmp_path)
    for module, base, lines in (
        ("teachonce.teacher_dump.cli", dump, DUMP),
        ("teachonce.teacher_dump.cli", vectors, VECTORS),
        ("teachonce.teacher_dump.cli", parallel, PARALLEL),
        ("teachonce.student_train.cli", train, TRAIN),
        ("teachonce.student_train.cli", decoder, DECODER),
        ("teachonce.student_train.sweep.cli", train, SWEEP),
        ("teachonce.student_export.cli", ["--out", "out"], EXPORT),
        ("teachonce.student_predict.cli", [], PREDICT),
        ("teachonce.downstream.cli", ["--out", "out"], SCORE),
    ):
        for line in lines.strip().splitlines():
            words, *printed = line.split(" | ")
            typed.append((module, [*base, *words.split()]))
            expected.append(printed)
    program = (sys.executable, "-c", PROGRAM, json.dumps(typed))
    *found, loaded = printed_by(*program, cwd=tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert len(found) == len(expected), found
    pairs = zip(expected, found, strict=True)
    assert [
        (printed, line) for printed, line in pairs if not all(word in line for word in printed)
    ] == []
    assert loaded == "set()" and tree(tmp_path) == before  # no output was created
