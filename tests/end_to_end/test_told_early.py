"""Mistakes in the words of a command are told, in a line each, before torch and transformers are
loaded: that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.support import ROOT, dumped, write_corpus

PROGRAM = """
import importlib, json, sys
import click
for module, words in json.loads(sys.argv[1]):
    try: importlib.import_module(module).main(words, standalone_mode=False)
    except click.ClickException as error: print(" ".join(error.message.split()))
    else: print("not refused")
print({"torch", "transformers"} & set(sys.modules))
"""
DUMP = """
--model . | no config.json
--model nowhere/teacher/x | no such folder
--corpus nowhere.txt | no such file
--out blank.zarr | exists and is not
--logits best | expected topk
--logits topk:0 | (at least 1)
--logits topk:99999 | vocabulary has
--hidden middle | unknown feature
--hidden layer:99 | --hidden layer:99: the teacher has layers 0
--attention layer:99 | --attention layer:99: the teacher has layers 0
--attention groups:0 | unknown feature
--device toaster | expected auto
--views 0 | at least 1
--text-column nope | --text-column
--mask-words rare | --views
--max-length 9999 | reads at most 128 tokens
--stride 500 | less than --max-length 128
--head classification | no classification head (missing: it is a BertForMaskedLM)
--head tagging | downstream --task pos
--label-column label | labels are stored with the logits of a classification or tagging head
--text-column a,b | pairs of texts need a classification head, and the teacher's head is: mlm
"""
TRAIN = """
--student 64x2 | expected tiny
--loss hiden=1 | did you mean hidden?
--student lama | did you mean llama:SIZE? expected tiny
--student qwen3:256 | --student qwen3:256: expected HxLxA
--align spam | expected one of span
--vocab nowhere | expected a size
--vocab ./corpus.txt | is a file; expected a size
--init layer:1 | expected auto
--init layers:1,99 | (one per student layer) from 1 to 4
--init layers:1,x | expected numbers
--init layers:1,2@nowhere | no config.json in nowhere
--init svd:nowhere.zarr | no such file
--word-vectors nowhere.txt | check the path
--loss ce=1 | has no task head
--view 9 | has views 0 to
--recipe nowhere | --recipe list
"""
EXPORT = """
nowhere/a/b --to onnx | no such folder
blank.zarr --to onnx | no config.json
teacher --to onnx --check nowhere.txt | no such file
teacher --to onnx --least 9 | a share above 0
teacher --to onnx --quantize int8 --out table.tsv | exists already
"""
PREDICT = """
nowhere/a/b text | no such folder
blank.zarr text | no config.json
teacher --input nowhere.txt | check the path
teacher --input table.tsv --text-column x | no column
"""
SWEEP = """
--trials 3 | nothing varies
--trials 3 --loss mlm=1 --loss hiden=1 | did you mean hidden?
--grid nowhere.toml | check --grid
--downstream nowhere.toml | check --downstream
--page nowhere | no runs.json
"""
SCORE = """
--task classfy | expected one of
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
--task speed --model nowhere/a/b | no such folder
--task table nowhere | no scores.json
"""


def cases(lines: str) -> list[tuple[list[str], str]]:
    """Read the words of each line, and what the refusal tells."""
    split = (line.rpartition(" | ") for line in lines.strip().splitlines())
    return [(words.split(), told) for words, _, told in split]


def test_a_torchvision_for_another_torch_is_one_line(
    tmp_path: Path, tiny_teacher: Callable[[str], Path]
) -> None:
    """transformers imports torchvision wherever it is installed, in each of the commands."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    about = tmp_path / "torchvision-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1.0\n")
    words = ["-m", "teachonce.student_predict.cli", str(tiny_teacher("bert")), "A [MASK]."]
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *words], env=paths, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("Error: torchvision 0.1.0 does not fit torch ")
    assert "(operator nms does not exist)" in line and "pip uninstall torchvision" in line


def test_mistakes_are_told_before_torch_is_loaded(
    tmp_path: Path, tiny_teacher: Callable[[str], Path]
) -> None:
    (tmp_path / "teacher").symlink_to(tiny_teacher("bert"))
    corpus = write_corpus(tmp_path / "corpus.txt")
    store = dumped(tiny_teacher("bert"), corpus, tmp_path / "store.zarr", attention="none")
    (tmp_path / "blank.zarr").mkdir()
    (tmp_path / "table.tsv").write_text("text\tlabel\nA good one.\tgood\nA bad one.\tbad\n")
    dump = ["--model", "teacher", "--corpus", "corpus.txt", "--out", "out.zarr"]
    train = ["--store", str(store), "--student", "32x2x2", "--out", "out"]
    typed, expected = [], []
    for module, before, lines in (
        ("teachonce.teacher_dump.cli", dump, DUMP),
        ("teachonce.student_train.cli", train, TRAIN),
        ("teachonce.student_train.sweep.cli", train, SWEEP),
        ("teachonce.student_export.cli", ["--out", "out"], EXPORT),
        ("teachonce.student_predict.cli", [], PREDICT),
        ("teachonce.downstream.cli", ["--out", "out"], SCORE),
    ):
        for words, told in cases(lines):
            typed.append((module, [*before, *words]))
            expected.append(told)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(typed)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    *found, loaded = done.stdout.splitlines()
    assert len(found) == len(expected), done.stdout
    assert [(a, b) for a, b in zip(expected, found, strict=True) if a not in b] == []
    assert loaded == "set()"
