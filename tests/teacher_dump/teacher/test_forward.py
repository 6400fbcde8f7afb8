"""Too little memory, values out of range, and the precision that is chosen.

- Too little memory and values out of range: the reaction of a dump, and its messages.
- `--precision auto` is bf16 on a CPU that multiplies bfloat16, if the outputs agree.
"""

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.processes import finish, fork
from teachonce.store import open_store
from teachonce.store.write.writer import StoreWriter
from teachonce.support.errors import UserError
from teachonce.teacher_dump.job import part_writing
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.part_writing import dump_part
from teachonce.teacher_dump.job.parts import NumberedPart
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.teacher_dump.teacher.precision import TOLERANCE, deviations, load_fastest
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.training import device
from tests.making.dumps import dump_options, write_corpus
from tests.making.models import Teachers
from tests.making.stores import copied
from tests.making.texts import ENGLISH

FIRST = "bert.encoder.layer.0.intermediate.dense.weight"
HALF_MAX = float(torch.finfo(torch.half).max)
SHORTAGES = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    "numpy": MemoryError("Unable to allocate 2.00 GiB for an array"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", 40)


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, error: Exception, most: Callable[[], int]
) -> None:
    """Make the teacher's third layer fail for more than `most` tokens, padding included."""

    def load(*names: Any, **options: Any) -> Teacher:
        teacher = load_teacher(*names, **options)

        def fail(_layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].shape[0] * inputs[0].shape[1] > most():
                raise error

        teacher.base.encoder.layer[2].register_forward_pre_hook(fail)
        return teacher

    monkeypatch.setattr("teachonce.teacher_dump.teacher.loading.load_teacher", load)


@pytest.mark.parametrize("kind", SHORTAGES)
def test_batches_are_halved(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = tiny_teacher("bert")
    exact = {"codec": "exact", "views": 2, "weights": False}
    whole = dump(dump_options(model, corpus, tmp_path / "whole.h5", **exact))
    short_of_memory(monkeypatch, SHORTAGES[kind], lambda: 200)
    halved = dump(dump_options(model, corpus, tmp_path / "halved.h5", **exact))
    assert whole.halved == 0 < halved.halved
    assert halved.sequences == whole.sequences and halved.parts == whole.parts
    one, two = open_store(tmp_path / "whole.h5"), open_store(tmp_path / "halved.h5")
    for got, want in zip(two, one, strict=True):
        assert got.text == want.text and (got.token_ids == want.token_ids).all()
        for mine, theirs in zip(got.views, want.views, strict=True):
            close: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-5}  # rounding depends on the batch
            np.testing.assert_allclose(mine.hidden["mean"], theirs.hidden["mean"], **close)
            np.testing.assert_allclose(mine.attention["mean"], theirs.attention["mean"], **close)
            np.testing.assert_allclose(mine.logits.logprobs, theirs.logits.logprobs, atol=1e-4)


def test_one_sequence_alone_is_too_large(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dump_options(tiny_teacher("bert"), corpus, tmp_path / "a.zarr", part_tokens=400)
    memory = 10_000
    short_of_memory(monkeypatch, SHORTAGES["cpu"], lambda: memory)
    written: list[int] = []

    def write(plan: Any, writer: StoreWriter, part: NumberedPart, *rest: Any) -> None:
        nonlocal memory
        memory = 100 if part.number == 2 else memory
        dump_part(plan, writer, part, *rest)
        written.append(part.number)

    monkeypatch.setattr(part_writing, "dump_part", write)
    line = r"sequence \d+ \(document \d+, '.{40}…'\): its 1\d\d tokens alone do not fit .*--device"
    with pytest.raises(UserError, match=line):
        dump(options)
    assert written == [0, 1]
    monkeypatch.setattr(part_writing, "dump_part", dump_part)
    memory = 10_000
    assert dump(options).resumed_parts == 2


def with_little_memory(model: Path, corpus: Path, out: Path) -> None:
    """Run a dump of one part and one batch with growing address space until it fits.

    The memory used apart from the batch varies: libraries that are loaded late, threads and heaps
    each take up to 128 MiB of addresses. Hence one thread and one heap.
    """
    m_arena_max = -8  # from malloc.h
    ctypes.CDLL(None).mallopt(m_arena_max, 1)
    torch.set_num_threads(1)
    spare = 64 << 20
    # loads the late libraries, without limit
    dump(dump_options(model, corpus, out.with_name("warm.h5")))

    def write(*arguments: Any) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + spare, -1))
        try:
            dump_part(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

    setattr(part_writing, "dump_part", write)  # noqa: B010  in a process of its own
    # Without states there is no calibration, which would run the teacher before `dump_part`.
    asked: dict[str, Any] = {"part_tokens": 10**6, "batch_tokens": 10**6, "hidden": "none"}
    while True:
        try:
            done = dump(dump_options(model, corpus, out, **asked))
        except UserError as error:
            assert "do not fit into memory" in str(error), error
            spare += spare // 16
            print(f"refused with {spare >> 20} MiB")
        else:
            print(f"halved {done.halved} of {done.tokens} with {spare >> 20} MiB")
            break


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.apart
def test_real_shortage(tmp_path: Path, tiny_teacher: Teachers) -> None:
    corpus, out, log = (
        write_corpus(tmp_path / "corpus.txt", 400),
        tmp_path / "a.h5",
        tmp_path / "log",
    )
    code = finish(fork(with_little_memory, tiny_teacher("bert"), corpus, out, log=log))
    assert code == 0, log.read_text()
    assert "halved " in log.read_text() and "halved 0 " not in log.read_text()
    assert len(open_store(out)) > 400


def overflowing(model: Path, folder: Path, most: float, corpus: Path) -> Path:
    """Scale the teacher's first feed-forward layer, so that its largest value over the corpus is
    `most` for the sequence in the middle of the order. All weights fit into float16."""
    teacher = load_teacher(str(model), attention="none")
    largest: list[float] = []
    layer = teacher.base.encoder.layer[0].intermediate.dense
    layer.register_forward_hook(lambda _l, _i, output: largest.append(float(output.abs().max())))
    for text in corpus.read_text(encoding="utf-8").splitlines():
        ids = np.array([teacher.tokenizer(text, truncation=True)["input_ids"]])
        teacher.run(ids, np.ones_like(ids, bool))
    weights = load_file(copied(model, folder) / "model.safetensors")
    scale = most / float(np.median(largest))
    weights = {name: value.half().float() for name, value in weights.items()}
    for name in (FIRST, FIRST.replace("weight", "bias")):
        weights[name] = (weights[name] * scale).half().float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_overflow_is_run_again_in_float32(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = overflowing(tiny_teacher("bert"), tmp_path / "model", HALF_MAX, corpus)

    def options(name: str, precision: str) -> Any:
        exact = {"codec": "exact", "precision": precision, "part_tokens": 800}
        return dump_options(model, corpus, tmp_path / name, **exact)

    wide = dump(options("wide.h5", "fp32"))
    half = dump(options("half.h5", "fp16"))
    assert wide.widened == 0 < half.widened < half.sequences == wide.sequences
    want, got = open_store(tmp_path / "wide.h5"), open_store(tmp_path / "half.h5")
    differ = [
        np.abs(a.views[0].hidden["mean"] - b.views[0].hidden["mean"]).max()
        for a, b in zip(want, got, strict=True)
    ]
    assert sum(value < 1e-4 for value in differ) == half.widened
    assert max(differ) < 0.5  # the cost of float16 for the others

    seal = StoreWriter.seal
    monkeypatch.setattr(StoreWriter, "seal", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dump(options("again.h5", "fp16"))
    (tmp_path / "again.h5.parts" / "1.h5").unlink()
    monkeypatch.setattr(StoreWriter, "seal", seal)
    dump(options("again.h5", "fp16"))
    assert open_store(tmp_path / "again.h5").manifest.parts == got.manifest.parts


def test_overflow_in_float32_is_named(tmp_path: Path, tiny_teacher: Teachers, corpus: Path) -> None:
    model = copied(tiny_teacher("bert"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights[FIRST] *= 1e38
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError) as refused:
        dump(dump_options(model, corpus, tmp_path / "a.zarr"))
    line = str(refused.value)
    assert "sequence " in line and "(document " in line and "\n" not in line
    assert (
        "NaN or infinity (hidden mean, attention mean, logits), in float32, too; leave the" in line
    )
    assert not (tmp_path / "a.zarr").exists()


def test_a_weight_that_is_nan_is_named(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path
) -> None:
    """A NaN in the embedding of one piece is named; texts without the piece are not affected."""
    model = copied(tiny_teacher("bert"), tmp_path / "model")
    text = corpus.read_text(encoding="utf-8").splitlines()
    teacher = load_teacher(str(model), attention="none")
    used = [set(teacher.tokenizer(line)["input_ids"]) for line in text]
    piece = min(used[-1] - set().union(*used[:5]))
    name = "bert.embeddings.word_embeddings.weight"
    weights = load_file(model / "model.safetensors")
    weights[name][piece, 3] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    bad = next(i for i, pieces in enumerate(used) if piece in pieces)
    line = (
        rf"sequence \d+ \(document \d+, .*\): the teacher .* gives NaN or infinity \(.*hidden"
        rf".*its {name.removeprefix('bert.')} holds NaN or infinity in torch.float32;"
        " the checkpoint is damaged"
    )
    for weights_kept in (True, False):
        # Logits cover all pieces: with a tied embedding they would be NaN in every text.
        asked: dict[str, Any] = {"weights": weights_kept, "logits": "none"}
        with pytest.raises(UserError, match=line) as refused:
            dump(dump_options(model, corpus, tmp_path / "a.h5", **asked))
        document = int(str(refused.value).split("(document ")[1].split(",")[0])
        assert document >= bad and piece in used[document]
        assert repr(text[document][:40])[1:-1] in str(refused.value)


def test_the_calibration_of_a_small_first_part_costs_no_pass(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher's output for the calibration is reused for the first part; a part that is
    computed again by a resumed dump has the same bytes."""
    model, sequences = tiny_teacher("bert"), [0]
    whole, run = part_writing.measured_calibration, Teacher.run

    def counted(self: Teacher, ids: Any, *more: Any) -> Any:
        sequences[-1] += len(ids)
        return run(self, ids, *more)

    def apart(plan: Any, windows: Any, say: Any, first_pass: Any) -> Any:
        return whole(plan, windows, say)

    monkeypatch.setattr(Teacher, "run", counted)
    once, twice = (
        dump_options(model, corpus, tmp_path / name, part_tokens=400, logits="topk:4", views=2)
        for name in ("once.zarr", "twice.zarr")
    )
    dump(once)
    sequences.append(0)
    monkeypatch.setattr(part_writing, "measured_calibration", apart)
    dump(twice)
    with open_store(once.out) as one, open_store(twice.out) as other:
        assert one.manifest.content() == other.manifest.content()
        assert len(one.manifest.parts) > 1
        # Loading a teacher runs some sequences, too.
        first = one.manifest.parts[0].counts.sequences
        assert first and sequences[1] - sequences[0] == first


def test_deviations_by_hand() -> None:
    """An error of 1 in a channel of deviation 2 counts as 0.5; constant channels do not count."""
    values = torch.tensor([[1.0, 7.0, 0.0], [5.0, 7.0, 2.0]])
    found = deviations({"a": values}, {"a": values + torch.tensor([1.0, 9.0, 0.0])})
    assert found["a"] == pytest.approx((0.25 / 2) ** 0.5)
    assert deviations({"a": values[:, 1:2]}, {"a": values[:, :1]}) == {"a": 0.0}


@pytest.mark.parametrize("kind", ("bert", "gpt2"))
def test_a_decoder_that_agrees(kind: str, tiny_teacher: Teachers) -> None:
    said: list[str] = []

    def load(precision: str) -> Teacher:
        return load_teacher(str(tiny_teacher(kind)), precision=precision)

    teacher, precision = load_fastest(load, ENGLISH, said.append)
    if kind == "bert":  # without a decoder
        assert precision == "fp32" and not teacher.narrow
        assert said == ["precision fp32, chosen by auto: on a CPU, only decoders run in bf16"]
        return
    assert precision == "bf16" and teacher.narrow
    assert len(said) == 1 and said[0].startswith("precision bf16: in bf16 ")


def test_a_teacher_that_does_not_agree(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """A teacher with a large common offset in its embeddings does not agree in bfloat16."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    folder = tiny_teacher("gpt2")
    model = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.wte.weight += 300
    model.save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "large")
    said: list[str] = []

    def load(precision: str) -> Teacher:
        return load_teacher(str(tmp_path / "large"), precision=precision)

    teacher, precision = load_fastest(load, ENGLISH, said.append)
    assert precision == "fp32" and not teacher.narrow
    assert said[0].startswith("precision fp32: in bf16 ") and f"(at most {TOLERANCE})" in said[0]


@pytest.fixture
def small_corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "c.txt", 12)


def precision_of(path: Path) -> Any:
    return open_store(path).identity["arguments"]["precision"]


def test_a_store_keeps_the_precision_that_it_was_started_with(
    tiny_teacher: Teachers, small_corpus: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def options(name: str, **changes: Any) -> Any:
        words = {"codec": "exact", "hidden": "mean", **changes}
        return dump_options(tiny_teacher("gpt2"), small_corpus, tmp_path / name, **words)

    dump(options("fp32.zarr", precision="auto"))
    monkeypatch.setattr(device, "_multiplies_bf16", lambda device: True)
    first: list[str] = []
    dump(options("bf16.zarr", precision="auto"), first.append)
    assert not any("auto" in line for line in first)
    assert sum(line.startswith("precision bf16: in bf16 ") for line in first) == 1
    assert precision_of(tmp_path / "fp32.zarr") == "fp32"
    assert precision_of(tmp_path / "bf16.zarr") == "bf16"
    said: list[str] = []
    assert dump(options("fp32.zarr", precision="auto"), said.append).finished_before
    assert not any(line.startswith("precision") for line in said)
    one, two = (open_store(tmp_path / f"{name}.zarr")[0] for name in ("fp32", "bf16"))
    difference = np.abs(one.views[0].hidden["mean"] - two.views[0].hidden["mean"]).max()
    assert 0 < difference < 0.1


def test_a_limit_on_the_instructions_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    able = {"amx_bf16": True, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
    assert device.resolved_precision("auto", "cpu") == "fp32"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert device.resolved_precision("auto", "cpu") == "bf16"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert device.resolved_precision("auto", "cpu") == "bf16"
    assert device.resolved_precision("fp32", "cpu") == "fp32"
