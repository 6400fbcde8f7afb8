"""Stage I as a command, the embeddings that it stores, and students that start from them.

- Stage I as a command: the store that it writes, how it resumes, and its refusals.
- Embeddings in a store: merged, missing, and verified against their tokenizer.
- Stage II: a student starts from the stored embeddings and trains from the store alone.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from transformers import AutoModelForMaskedLM, AutoTokenizer

from teachonce.align import Vocabulary, VocabularyMap
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.errors import StoreError
from teachonce.store.extras.mixed_vocab import GROUP, MixedVocab
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.start import initialise
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.dump import EARLY_ARGUMENTS
from teachonce.teacher_dump.mixed_vocab import stage_one
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions, StageOneDump
from teachonce.teacher_dump.mixed_vocab.segmentation import MASKED, MASKED_BY_TEACHER
from teachonce.training.wordpiece import train_wordpiece
from tests.end_to_end.support import ok, refused
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers, Tokenizers
from tests.making.stores import features_of, make_store
from tests.making.texts import ENGLISH
from tests.teacher_dump.mixed_vocab.support import LONGEST, PIECES, WIDTH


def test_the_store_is_ordinary_and_sound_in_both_formats(trained: Any, tmp_path: Path) -> None:
    path, corpus, words = trained
    h5 = tmp_path / "store.h5"
    ok(teacher_dump, *words, "--out", h5)
    ok(feature_store, "convert", path, tmp_path / "copy.h5")
    stores = [open_store(p) for p in (path, h5, tmp_path / "copy.h5")]
    assert len({store.manifest.content() for store in stores}) == 1
    for store in stores:
        assert verify(store.path).problems == []
        assert store.features.logits is None and store.features.hidden == ()
        assert "".join(store.texts()).strip()[:40] == corpus.read_text()[:40]
        assert store[0].token_ids.tolist() == store.tokenizer().encode(store[0].text).ids
    found = [MixedVocab.of(store) for store in stores]
    for one in found:
        assert one.embeddings.dtype == np.float32 and one.embeddings.shape == (PIECES, WIDTH)
        assert np.array_equal(one.embeddings, found[0].embeddings)
        assert one.tokenizer == found[0].tokenizer
    plain = zarr.open_array(path / GROUP / "embeddings", mode="r")[:]
    with h5py.File(h5, "r") as file:
        assert np.array_equal(plain, file[f"{GROUP}/embeddings"][:])
    assert np.array_equal(plain, found[0].embeddings)
    assert "mixed vocab" in ok(feature_store, "info", h5)


def test_other_options_other_embeddings(trained: Any, tmp_path: Path) -> None:
    path, _, words = trained
    out = tmp_path / "other.zarr"
    ok(teacher_dump, *words, "--seed", 3, "--hidden", "mean", "--logits", "topk:4", "--out", out)
    one, other = (MixedVocab.of(open_store(p)).embeddings for p in (path, out))
    assert one.shape == other.shape and not np.array_equal(one, other)
    record = open_store(out)[0]
    assert set(record.views[0].hidden) == {"mean"} and record.views[0].logits.ids.shape[1] == 4
    line = refused(feature_store, "merge", path, out, tmp_path / "all.zarr")
    assert "mixed_vocab" in line


def test_a_kill_while_the_text_is_written_trains_nothing_again(
    trained: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path, _, words = trained
    out = tmp_path / "store.zarr"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("teachonce.teacher_dump.job.part_writing.dump_part", killed)
        result = CliRunner().invoke(teacher_dump, [str(w) for w in (*words, "--out", out)])
        assert result.exit_code == 130
    with pytest.raises(StoreError, match="not finished"):
        open_store(out)
    line = refused(teacher_dump, *words, "--steps", 7, "--out", out)
    assert "steps is 6 in the store and 7 now" in line
    assert "step 6/6" not in ok(teacher_dump, *words, "--out", out)
    one, other = (open_store(p).manifest.content() for p in (path, out))
    assert one == other


@pytest.mark.parametrize("embeddings", [{}, {"mixed_vocab": [1]}])
def test_a_finished_store_of_another_training_is_refused(
    embeddings: dict[str, Any], trained: Any, tmp_path: Path
) -> None:
    words, out = trained[2], tmp_path / "store.zarr"
    options = StageOneDump(model="any", out=out, batch_tokens=512, seed=2)
    arguments = {name: getattr(options, name) for name in EARLY_ARGUMENTS}
    make_store(out, features_of(), identity={"arguments": arguments} | embeddings)
    line = refused(teacher_dump, *words, "--out", out)
    assert "exists already and was finished with other arguments" in line
    assert "lr is not given in the store and 0.0001 now" in line


def test_a_tokenizer_folder_is_taken_as_it_is(
    trained: Any, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    make_tokenizer("bpe").save_pretrained(tmp_path / "bpe")
    words = (*trained[2], "--vocab", tmp_path / "bpe", "--out", tmp_path / "store.zarr")
    ok(teacher_dump, *words)
    tokenizer = student_tokenizer("mixed-vocab", open_store(tmp_path / "store.zarr"))
    expected = AutoTokenizer.from_pretrained(tmp_path / "bpe")
    assert tokenizer(ENGLISH[0])["input_ids"] == expected(ENGLISH[0])["input_ids"]
    assert tokenizer.mask_token == "<mask>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--width", 33), "which is 32 in .*; choose 1 to 32"),
        (("--width", 0), "--width 0: expected at least 1"),
        (("--vocab", "nowhere"), "expected a size .* or a folder"),
        (("--vocab", "own/bert-tiny"), r"from_pretrained\('own/bert-tiny'\).save_pretrained\("),
        (("--student-share", 1), "--student-share 1: expected a share between"),
        (("--mask-prob", 0), "--mask-prob 0: expected a share"),
        (("--lr", 0), "--lr 0: expected a rate"),
        (("--precision", "fp16"), "--precision fp16: gradients underflow"),
        (("--max-length", 4000), "the teacher reads at most 128 tokens"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    changes: tuple[Any, ...], message: str, trained: Any, tmp_path: Path
) -> None:
    line = refused(teacher_dump, *trained[2], *changes, "--out", tmp_path / "store.zarr")
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


def test_a_finished_store_is_left_alone(trained: Any) -> None:
    store, _, words = trained
    line = refused(teacher_dump, *words, "--seed", 9, "--out", store)
    assert "was finished with other arguments" in line
    assert "seed is 2 in the store and 9 now" in line
    before = store.stat().st_mtime_ns
    assert "was finished before" in ok(teacher_dump, *words, "--out", store)
    assert store.stat().st_mtime_ns == before


def test_what_cannot_train_is_refused_before_anything_is_written(
    trained: Any, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*trained[2], "--out", tmp_path / "store.zarr")
    for teacher in (tiny_teacher("gpt2"), tiny_teacher("bert", "classification", ("a", "b"))):
        assert "no masked-LM head" in refused(teacher_dump, *words, "--model", teacher)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    line = refused(teacher_dump, *words, "--optimizer", "lamb")
    assert "--optimizer lamb" in line and "`pip install 'teachonce[lamb]'`" in line
    assert list(tmp_path.iterdir()) == []


def test_recipes_of_stage_one_are_the_published_settings(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MixedVocabOptions] = []

    def keep(options: MixedVocabOptions, say: Any) -> None:
        asked.append(options)
        raise UserError("seen")

    monkeypatch.setattr(stage_one, "mixed_vocab", keep)
    words = ("mixed-vocab", "--model", "m", "--corpus", trained[1], "--width", 256)
    for name, given in (("zhao-mixed", ()), ("zhao-tied", ("--steps", 9, "--batch-tokens", 512))):
        refused(teacher_dump, *words, "--out", tmp_path / "a.zarr", "--recipe", name, *given)
    mixed, tied = asked
    # Zhao et al. 2021, section 4: 500K steps, LAMB, 10 % of 1.25e-3, 2,048 x 128, p_SV 0.5
    assert (mixed.steps, mixed.optimizer, mixed.lr, mixed.warmup) == (500_000, "lamb", 1.25e-3, 0.1)
    assert mixed.dump.tokens_per_batch * mixed.accumulate == 2048 * 128
    assert (mixed.dump.max_length, mixed.student_share, mixed.vocab) == (128, 0.5, "5k")
    assert not mixed.tie and tied.tie  # section 6
    assert (MASKED, MASKED_BY_TEACHER) == (20, 10)  # up to 20 masks, up to 10 the teacher's
    assert (tied.steps, tied.dump.batch_tokens, tied.lr) == (9, 512, 1.25e-3)


def test_tied_pieces_train_and_are_reported(trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "tied.zarr"
    words = (*trained[2], "--tie", "--accumulate", 2, "--warmup", 0.1, "--steps", 2)
    said = ok(teacher_dump, *words, "--out", out)
    assert "tied      " in said and "2 steps of 1024 tokens" in said and "warm-up 10%" in said
    printed = open_store(out).identity["mixed_vocab"]
    assert (printed["tie"], printed["accumulate"], printed["warmup"]) == (True, 2, 0.1)
    plain = open_store(trained[0]).identity["mixed_vocab"]  # as before these options existed
    assert not {"tie", "accumulate", "warmup"} & plain.keys()


def test_a_cpu_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage I runs in float32 on every CPU: bfloat16 is not compared for a masked LM."""
    monkeypatch.setattr("teachonce.training.device._multiplies_bf16", lambda device: True)
    dump = StageOneDump("m", Path("s.zarr"), device="cpu").resolved()
    assert MixedVocabOptions(dump, "5k", 16).arguments()["precision"] == "fp32"


def test_help_shows_the_subcommand() -> None:
    assert "mixed-vocab" in ok(teacher_dump, "--help").partition("Commands:")[2]
    assert "--width" in refused(teacher_dump, "mixed-vocab", "--model", "x", "--out", "y.zarr")
    assert MixedVocabOptions(StageOneDump("m", Path("s.h5")), "5k", 16).checkpoint() == Path(
        "s.h5.mixed-vocab"
    )


def test_a_plain_store_has_none_and_merges_behind_one_that_has(
    trained: Any, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    path, corpus, _ = trained
    plain = dumped(
        tiny_teacher("bert"), write_corpus(tmp_path / "more.txt", 10), tmp_path / "plain.zarr",
        logits="none", hidden="none", attention="none", text_only=True, max_length=LONGEST,
        part_tokens=1 << 17, weights=False,
    )  # fmt: skip
    store = open_store(plain)
    assert MixedVocab.stored(store) is None
    for asked in (lambda: student_tokenizer("mixed-vocab", store), lambda: MixedVocab.of(store)):
        with pytest.raises(StoreError, match="make such a store with `teacher-dump mixed-vocab`"):
            asked()
    line = refused(feature_store, "merge", plain, path, tmp_path / "all.zarr")
    assert f"name {path} first" in line
    ok(feature_store, "merge", path, plain, tmp_path / "all.h5")
    both = open_store(tmp_path / "all.h5")
    assert len(both) == len(store) + len(open_store(path)) and not verify(both.path).problems
    assert np.array_equal(
        MixedVocab.of(both).embeddings, MixedVocab.of(open_store(path)).embeddings
    )


def test_verify_reports_embeddings_of_another_tokenizer(trained: Any, tmp_path: Path) -> None:
    store = open_store(trained[0])
    good = MixedVocab.of(store)
    backend = train_wordpiece(ENGLISH, 180, None)
    settings = json.dumps(json.loads(good.settings)).encode()
    wrong = dataclasses.replace(good, tokenizer=backend.to_str().encode(), settings=settings)
    from teachonce.store import StoreWriter
    from teachonce.store.tools.copy import copy_part

    writer = StoreWriter.create_or_resume(
        tmp_path / "wrong.zarr", store.identity, store.features,
        software=store.meta["software"], calibration=store.calibration,
        files=store.teacher_files(), extras=(wrong,),
    )  # fmt: skip
    copy_part(writer, 0, store, 0, store, 0)
    writer.seal()
    (line,) = verify(tmp_path / "wrong.zarr").problems
    assert "is not a float32 [180, d]" in line
    with pytest.raises(StoreError, match="a row for each piece"):
        MixedVocab.of(open_store(tmp_path / "wrong.zarr"))


def vocabulary_map(store: Any, tokenizer: Any) -> VocabularyMap:
    return VocabularyMap.between(
        Vocabulary.from_tokenizer_json(store.teacher_file("tokenizer.json").decode()),
        Vocabulary.from_tokenizer_json(tokenizer.backend_tokenizer.to_str()),
    )


def test_stage_two_starts_from_exactly_these_rows(trained: Any) -> None:
    store = open_store(trained[0])
    stored = MixedVocab.of(store).embeddings
    tokenizer = student_tokenizer("mixed-vocab", store)
    assert len(tokenizer) == PIECES and tokenizer.mask_token == "[MASK]"
    found = vocabulary_map(store, tokenizer)
    for kind in ("", "modernbert:"):
        student = make_student(f"{kind}{WIDTH}x2x2", tokenizer, LONGEST)
        said = initialise(student, "mixed-vocab", store, found)
        words = student.get_input_embeddings().weight
        assert isinstance(words, torch.Tensor)
        assert torch.equal(words, torch.from_numpy(stored)) and f"all {PIECES} pieces" in said[0]
        assert student.get_output_embeddings().weight is words
    with pytest.raises(
        UserError, match=f"hidden size {WIDTH} and the student's 32; choose --student 16xLxA"
    ):
        initialise(make_student("32x2x2", tokenizer, LONGEST), "mixed-vocab", store, found)
    other = student_tokenizer("400", store)
    student = make_student(f"{WIDTH}x2x2", other, LONGEST)
    with pytest.raises(UserError, match="use --vocab mixed-vocab"):
        initialise(student, "mixed-vocab", store, vocabulary_map(store, other))


def test_stage_two_trains_from_the_store_alone(trained: Any, tmp_path: Path) -> None:
    words = ("--store", trained[0], "--vocab", "mixed-vocab", "--init", "mixed-vocab")
    size = ("--student", f"{WIDTH}x2x2", "--batch-tokens", "256", "--device", "cpu")
    said = ok(student_train, *words, *size, "--steps", "2", "--out", tmp_path / "student")
    assert f"word embeddings of all {PIECES} pieces" in said
    assert len(AutoTokenizer.from_pretrained(tmp_path / "student")) == PIECES
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "student").config.vocab_size == PIECES
