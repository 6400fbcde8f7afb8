"""The job of a dump: its options, its identity when it is resumed, its progress.

- Options of a dump from Python are refused like on the command line, and have its defaults.
- A resumed dump compares the existing parts with the parts that it would write now.
- The progress messages of a dump.
"""

import dataclasses
import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, assert_type

import click
import h5py
import numpy as np
import pytest
import zarr
from safetensors.torch import load_file, save_file

from teachonce.store import StoreWriter, open_store
from teachonce.store.tools.verify import verify
from teachonce.support.errors import UserError
from teachonce.support.options import options_of
from teachonce.teacher_dump.cli import _report, main
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.dump import EARLY_ARGUMENTS, DumpSummary, dump
from teachonce.teacher_dump.job.option_values import ProcessShard, shard_of
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.progress import DumpProgress
from teachonce.teacher_dump.job.sharing import share
from teachonce.teacher_dump.job.versions import check_numbers
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions, StageOneDump
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.windows import sequences
from teachonce.teacher_dump.windows.cutting import iter_windows
from tests.end_to_end import dumping
from tests.end_to_end.support import ok, refused
from tests.making.dumps import dump_options, write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.stores import copied, features_of, make_store

OUT = Path("store.zarr")
HUGE = "9" * 5000  # int() raises ValueError for more than 4,300 digits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": "tiny"}, "--codec tiny: expected one of default, exact, small"),
        ({"mask_prob": 0.3}, "--mask-prob 0.3: no word is masked in view 0"),
        ({"plan": True, "shard": "0/2"}, "--plan and --shard: a plan covers a whole dump"),
        ({"plan": True, "ray": "local"}, "--plan and --ray: a plan covers a whole dump"),
        ({"head": "causal", "logits": "none"}, "--head causal and --logits none contradict"),
        ({"head": "none", "logits": "topk:8"}, "--head none and --logits topk:8 contradict"),
        ({"head": "causal", "views": 2}, "--views 2: a causal head reads no masked words"),
        ({"head": "classification", "stride": 3}, "--stride 3: for a classification head"),
        ({"head": "tagging", "logits": "head"}, "--logits head: applies to the logits of a"),
        ({"logits": f"topk:{HUGE}"}, "expected topk:K, sample:DRAWS"),
        ({"hidden": f"layer:{HUGE}"}, "unknown feature 'layer:9"),
        ({"shard": f"0/{HUGE}"}, "expected i/n"),
    ],
)
def test_python_refuses_what_the_command_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        DumpOptions("model", OUT, **changes)
    assert message in str(error.value)
    words = [word for name, value in changes.items() for word in _typed(name, value)]
    line = refused(main, "--model", "model", "--out", OUT, *words)
    if "codec" not in changes:  # click refuses a choice with its own message
        assert message in line


def test_parts_without_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="part_tokens 0: expected at least 1"):
        DumpOptions("model", OUT, part_tokens=0)


def test_python_takes_single_values_and_lists() -> None:
    url = Path("s3://bucket/a.zarr")
    for read in (lambda: DumpOptions("model", url), lambda: open_store(url)):
        with pytest.raises(UserError, match="^s3:/bucket/a.zarr: is a URL, .* as a string"):
            read()
    made = DumpOptions(Path("model"), "s.zarr", corpus="a.txt,b.txt", hidden=["mean", "layer:3"])
    same = DumpOptions("model", Path("s.zarr"), corpus=("a.txt", "b.txt"), hidden="mean,layer:3")
    assert made == same
    assert DumpOptions("model", OUT, corpus=Path("a.txt")).sources() == ("a.txt",)
    assert_type(made.corpus, tuple[str, ...])  # as mypy reads it, which checks this file
    assert_type(made.hidden, str)
    with pytest.raises(UserError, match="^--corpus: is empty"):  # not the default corpus
        DumpOptions("model", OUT, corpus="")
    with pytest.raises(UserError, match="^--corpus 3: expected a string$"):
        DumpOptions("model", OUT, corpus=["a.txt", 3])  # type: ignore[list-item]
    assert DumpOptions("model", "s3://a/b.zarr").out == "s3://a/b.zarr"
    with pytest.raises(TypeError, match=r"^dump: expected DumpOptions, got str; call dump\(DumpOp"):
        dump("model")  # type: ignore[arg-type]
    numbers: dict[str, Any] = {"limit": "50k", "views": "2", "mask_prob": "0.2"}
    made = DumpOptions("model", OUT, **numbers)
    assert (made.limit, made.mask_prob) == (50_000, 0.2)
    with pytest.raises(UserError, match="^--limit many: expected a whole number"):
        DumpOptions("model", OUT, **{**numbers, "limit": "many"})


def _typed(name: str, value: Any) -> tuple[str, ...]:
    return (_flag(name),) if value is True else (_flag(name), str(value))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_python_has_the_defaults_of_the_command_mixed_vocab() -> None:
    command = main.commands["mixed-vocab"]
    made: dict[str, Any] = {
        **vars(StageOneDump("m", OUT)),
        **vars(MixedVocabOptions(StageOneDump("m", OUT), width=8)),
    }
    message = {
        str(option.name): option for option in command.params if isinstance(option, click.Option)
    }
    seen = [
        name for name in message if not message[name].required and message[name].default is not None
    ]
    assert len(seen) > 12
    for name in seen:
        default = message[name].default
        if isinstance(default, (str, int, float)) or default is None:
            assert made[name] == default, name
    assert (made["logits"], made["hidden"], made["max_length"]) == ("none", "none", 128)
    assert made["weights"] is False and made["text_only"] is True


def test_mixed_vocab_takes_no_option_of_a_dump_alone() -> None:
    offered = {name for option in main.commands["mixed-vocab"].params for name in option.opts}
    alone: dict[str, Any] = {"views": 2, "stride": 4, "head": "mlm", "label_column": "x"}
    for name, value in alone.items():
        assert _flag(name) not in offered and name in options_of(StageOneDump)
        with pytest.raises(UserError, match=f"{_flag(name)} "):
            StageOneDump("m", OUT, **{name: value})
    with pytest.raises(UserError, match="expected the options of a StageOneDump"):
        MixedVocabOptions(DumpOptions("m", OUT), width=8)


def test_options_before_the_word_mixed_vocab_are_refused() -> None:
    line = refused(main, "--model", "m", "--out", OUT, "mixed-vocab", "--width", "8")
    assert "give the options after the subcommand mixed-vocab" in line
    assert "--width" in ok(main, "mixed-vocab", "--help")


@pytest.mark.parametrize("finished_before", [False, True])
def test_the_next_command_can_be_typed(
    finished_before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DumpOptions("model", Path("it's a/store.zarr"))
    done = DumpSummary(1, 1, 9, 1, "--vocab 5k", "", finished_before=finished_before)
    _report(options, done)
    words = shlex.split(capsys.readouterr().out.partition("next: ")[2])
    assert words == ["student-train", "--store", str(options.out), "--vocab", "5k"]


def test_which_of_several_processes_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard comes from `--shard`, or else from the variables of torchrun."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert shard_of(None) is None and shard_of("2/4") == ProcessShard(2, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert shard_of(None) is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert shard_of(None) == ProcessShard(3, 8) and shard_of("0/1") == ProcessShard(0, 1)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Any:
    """Return the options of a dump in its own folder that was killed just before it sealed."""
    root = tmp_path_factory.mktemp("killed")
    corpus = write_corpus(root / "c.txt", 60)

    def seal(writer: StoreWriter) -> None:
        raise Killed

    @cache
    def made(ext: str) -> Any:
        options = dumping.options(tiny_teacher("bert"), corpus, root / ext / f"s.{ext}")
        (root / ext).mkdir()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(StoreWriter, "seal", seal)
            dump(options)
        return options

    return made


@pytest.fixture
def stopped(tmp_path: Path, killed: Any) -> Any:
    """Return the options of a copy of such a dump, which the test may change."""

    def make(ext: str) -> Any:
        options = killed(ext)
        folder = shutil.copytree(options.out.parent, tmp_path / "copy")
        return dataclasses.replace(options, out=folder / options.out.name)

    return make


def lose(out: Path, part: int) -> None:
    if out.is_dir():
        shutil.rmtree(out / f"parts/{part}")
    else:
        Path(f"{out}.parts/{part}.h5").unlink()


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_parts_of_other_sequences_are_refused(
    stopped: Any, monkeypatch: pytest.MonkeyPatch, ext: str
) -> None:
    """Parts of other sequences are refused: other tokenizers could store a sequence twice."""
    options = stopped(ext)
    lose(options.out, 2)

    def others(*words: Any, **named: Any) -> Iterator[Any]:
        return (w for n, w in enumerate(iter_windows(*words, **named)) if not 2 <= n <= 5)

    with monkeypatch.context() as patch:
        patch.setattr(sequences, "iter_windows", others)
        with pytest.raises(UserError, match=r"part 0, published before, has other sequences"):
            dump(options)
    assert StoreWriter.peek(options.out) is not None
    done = dump(options)
    assert done.resumed_parts == done.parts - 1 and verify(options.out).problems == []
    documents = [record.document for record in open_store(options.out)]
    assert documents == sorted(documents)


def test_another_cut_of_the_same_tokens_is_refused(
    stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = stopped("zarr")

    def moved(*words: Any, **named: Any) -> Iterator[Any]:
        for window in iter_windows(*words, **named):
            yield dataclasses.replace(window, offsets=np.where(window.offsets > 0, 1, 0))

    monkeypatch.setattr(sequences, "iter_windows", moved)
    monkeypatch.setattr("teachonce.teacher_dump.job.parts.version", lambda name: "9.9")
    with pytest.raises(UserError, match=r"token/begin differs; teachonce was .* and is 9\.9"):
        dump(options)


@pytest.mark.parametrize("ext", ["zarr", "h5"])
def test_a_calibration_that_was_altered_is_refused(stopped: Any, ext: str) -> None:
    """A changed calibration is refused, since new parts would be encoded with another mean."""
    options = stopped(ext)
    lose(options.out, 1)
    name = "calibration/hidden/mean/mean"
    if ext == "zarr":
        array = zarr.open_array(options.out / name)
        array[3] = np.asarray(array[3]) + 1
    else:
        with h5py.File(options.out, "r+") as file:
            file[name][3] += 1
    with pytest.raises(UserError, match=f"{name} does not match its checksum"):
        dump(options)


def test_other_arguments_are_refused_before_the_calibration(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store without states has no calibration, so that a dump with states would measure one."""
    corpus = write_corpus(tmp_path / "c.txt", 20)
    options = dumping.options(tiny_teacher("bert"), corpus, tmp_path / "s.zarr")

    def seal(writer: StoreWriter) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(StoreWriter, "seal", seal)
        dump(replace(options, hidden="none"))
    lines: list[str] = []
    with pytest.raises(UserError, match="--hidden is none in the store and mean now"):
        dump(options, lines.append)
    assert not any(line.startswith("calibrate") for line in lines)


def started_by(out: Path, changed: Callable[[dict[str, Any]], object]) -> None:
    """Change the root attributes of an unfinished store to what another release would write."""
    path = out / "zarr.json"
    node = json.loads(path.read_text())
    changed(node["attributes"])
    path.write_text(json.dumps(node))


def test_another_release_of_transformers_goes_on(stopped: Any) -> None:
    """A dump continues after an update of transformers, also from an old release whose
    `config_hash` covers all of config.json and the version."""
    options, said = stopped("zarr"), list[str]()
    lose(options.out, 2)
    with closing(open_store(options.out, allow_partial=True)) as store:
        config = store.teacher_settings("config.json")
    others = config | {"transformers_version": "5.0.0", "a_field_of_then": True}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()

    def older(attributes: dict[str, Any]) -> None:
        attributes["identity"]["teacher"]["config_hash"] = digest
        attributes["software"]["transformers"] = "5.0.0"

    started_by(options.out, older)
    done = dump(options, said.append)
    assert done.resumed_parts == done.parts - 1 and verify(options.out).problems == []
    (line,) = (line for line in said if line.startswith("versions  "))
    assert f"transformers was 5.0.0 and is {version('transformers')}; 16 sequences of" in line
    assert open_store(options.out).identity["teacher"]["config_hash"] == digest
    assert dump(options).finished_before


def test_other_forms_of_the_hashes_go_on(stopped: Any) -> None:
    """A dump continues if `config_hash` covers all of config.json, or if tokenizer.json has another
    form but gives equal tokens."""
    options = stopped("zarr")
    with closing(open_store(options.out, allow_partial=True)) as store:
        digest = hashlib.sha256(store.teacher_file("config.json")).hexdigest()

    def older(attributes: dict[str, Any]) -> None:
        attributes["identity"]["teacher"]["config_hash"] = digest
        attributes["identity"]["tokenizer_hash"] = "12" * 32

    started_by(options.out, older)
    with pytest.raises(UserError, match="the model's tokenizer is '121212"):
        dump(options)
    started_by(options.out, lambda found: found["software"].update(tokenizers="0.20.0"))
    assert dump(options).resumed_parts


def test_other_numbers_of_another_release_are_refused(stopped: Any, tiny_teacher: Teachers) -> None:
    options = stopped("zarr")
    started_by(options.out, lambda found: found["software"].update(torch="2.0.0"))
    model = copied(tiny_teacher("bert"), options.out.parent / "other")
    weights = load_file(model / "model.safetensors")
    weights["bert.encoder.layer.3.output.LayerNorm.bias"] += 0.1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    other = load_teacher(str(model))
    with pytest.raises(UserError) as error:
        check_numbers(options.out, None, other, print)
    line = str(error.value)
    assert "output differs with other versions of the libraries (torch was 2.0.0 and is" in line
    assert "view0/hidden/mean: " in line and "(pip install torch==2.0.0)" in line


def test_another_config_is_reported_by_its_fields(stopped: Any, tmp_path: Path) -> None:
    options = stopped("zarr")
    model = copied(Path(options.model), tmp_path / "model")
    changed(model, "config.json", layer_norm_eps=0.5)
    moved = {"id": model.name}
    started_by(options.out, lambda found: found["identity"]["teacher"].update(moved))
    with pytest.raises(UserError, match="layer_norm_eps is 1e-12 in the store and 0.5 now"):
        dump(dataclasses.replace(options, model=str(model)))


def test_fields_that_change_no_number_go_on(stopped: Any, tmp_path: Path) -> None:
    options = stopped("zarr")
    model = copied(Path(options.model), tmp_path / "model")
    changed(model, "config.json", hidden_dropout_prob=0.3, use_cache=False, initializer_range=0.5)
    moved = {"id": str(model)}
    started_by(options.out, lambda found: found["identity"]["teacher"].update(moved))
    lose(options.out, 2)
    done = dump(dataclasses.replace(options, model=str(model)))
    assert done.resumed_parts == done.parts - 1 and verify(options.out).problems == []


def test_batches_keep_the_size_that_a_store_was_started_with(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    """The default depends on the device, and earlier versions had another one."""
    corpus, first = write_corpus(tmp_path / "c.txt", 12), tmp_path / "a.zarr"
    options = dump_options(tiny_teacher("bert"), corpus, first, batch_tokens=8192)
    dump(options)
    default = dataclasses.replace(options, batch_tokens=None)
    assert dump(default).finished_before
    with pytest.raises(UserError, match="--batch-tokens is 8192 in the store and 64 now"):
        dump(dataclasses.replace(options, batch_tokens=64))
    dump(dataclasses.replace(default, out=tmp_path / "b.zarr"))
    assert open_store(tmp_path / "b.zarr").identity["arguments"]["batch_tokens"] == 2048


@pytest.mark.parametrize(
    "identity",
    [{"arguments": [1]}, {"corpus": 3}, {"corpus": {"sources": 3}}, {"corpus": {"sources": [3]}}],
    ids=str,
)
def test_an_identity_of_any_form_is_compared(
    identity: dict[str, Any], tmp_path: Path, tiny_teacher: Teachers
) -> None:
    corpus, out = write_corpus(tmp_path / "c.txt", 12), tmp_path / "s.zarr"
    options = dump_options(tiny_teacher("bert"), corpus, out)
    arguments = {name: getattr(options, name) for name in EARLY_ARGUMENTS}
    make_store(out, features_of(), identity={"arguments": arguments} | identity)
    with pytest.raises(UserError, match="was finished with other arguments"):
        share(options, ProcessShard(0, 1))


LEAN = {"logits": "none", "attention": "none", "weights": False}  # the messages are the same
LINE = re.compile(r"part (\d+) .* tokens so far, about (\d+)% of all, [\d:]+ left")


@pytest.mark.parametrize("changes", [{}, {"stride": 8, "max_length": 24}, {"limit": 3000}])
def test_every_part_shows_its_share_and_the_time_left(
    tmp_path: Path, tiny_teacher: Teachers, changes: dict[str, int]
) -> None:
    corpus, said = write_corpus(tmp_path / "corpus.txt", 200), list[str]()
    options = dump_options(tiny_teacher("bert"), corpus, tmp_path / "a.zarr", **LEAN, **changes)
    dump(options, said.append)
    check_shares(said)


def check_shares(said: list[str]) -> None:
    found = [LINE.fullmatch(line) for line in said if line.startswith("part ")]
    shares = [int(match[2]) for match in found if match]
    assert len(shares) == len(found) >= 2 and shares == sorted(shares)
    assert shares[-1] >= 97 and abs(shares[0] - 100 / len(shares)) < 25


def test_what_is_new_of_a_grown_corpus_is_the_whole(tmp_path: Path, tiny_teacher: Teachers) -> None:
    """When a corpus has grown, progress is relative to the new documents, not to the old store."""
    teacher, said = tiny_teacher("bert"), list[str]()
    changes = LEAN | {"stride": 8, "max_length": 24}
    before, grown = write_corpus(tmp_path / "before.txt", 150), tmp_path / "grown.txt"
    grown.write_text(before.read_text() + write_corpus(tmp_path / "more.txt", 350).read_text())
    dump(dump_options(teacher, before, tmp_path / "a.zarr", **changes))
    options = dump_options(teacher, grown, tmp_path / "b.zarr", **changes)
    dump(replace(options, grow_from=tmp_path / "a.zarr"), said.append)
    check_shares(said)


def test_a_long_part_prints_its_progress(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachonce.teacher_dump.job.progress.EVERY", 0.0)
    corpus, said = write_corpus(tmp_path / "corpus.txt", 60), list[str]()
    options = dump_options(tiny_teacher("bert"), corpus, tmp_path / "a.zarr", batch_tokens=500)
    dump(options, said.append)
    lines = [line for line in said if line.startswith(("dump ", "part "))]
    found = [re.search(r"([\d,]+) (?:teacher )?tokens so far", line) for line in lines]
    tokens = [int(match[1].replace(",", "")) for match in found if match]
    assert len(tokens) == len(lines) >= 4 and tokens == sorted(tokens)
    assert re.fullmatch(
        r"dump      [\d,]+ teacher tokens so far, [\d,]+ tokens/s, about \d+% of all, [\d:]+ left",
        lines[0],
    )


def test_nobody_knows_the_end_of_what_was_not_read(tmp_path: Path) -> None:
    corpus = Corpus.open([str(write_corpus(tmp_path / "corpus.txt", 7))])
    for limit in (None, 50):
        with DumpProgress(corpus, limit, False, lambda line: None) as progress:
            assert progress.total() == limit
    corpus.check()
    assert corpus.size(True) == 7
    texts = [document.text for document in corpus]
    assert corpus.size(False) == sum(map(len, texts))
