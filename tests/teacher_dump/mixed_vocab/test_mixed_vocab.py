"""Stage I of mixed-vocabulary training: words of two vocabularies, two softmaxes, a store."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from transformers import AutoModelForMaskedLM, AutoTokenizer

from align import Vocabulary, VocabularyMap
from store import open_store
from store.cli import main as feature_store
from store.errors import StoreError
from store.extras.mixed_vocab import GROUP, MixedVocab
from store.tools.verify import verify
from student_train.cli import main as student_train
from student_train.model.kinds import make_student
from student_train.model.start import initialise
from student_train.model.vocabulary import student_tokenizer
from support.errors import UserError
from support.signals import Stopped, stoppable
from teacher_dump.cli import main as teacher_dump
from teacher_dump.job.options import DumpOptions
from teacher_dump.mixed_vocab.embedding_training import BETAS, WEIGHT_DECAY, Course, train
from teacher_dump.mixed_vocab.mixed_teacher import MixedTeacher
from teacher_dump.mixed_vocab.segmentation import (
    MASKED,
    MASKED_BY_TEACHER,
    Batch,
    Mixer,
    Side,
    masked,
    mixed,
    shortened,
    word_numbers,
)
from teacher_dump.mixed_vocab.stage_one import MixedVocabOptions, mixed_vocab
from teacher_dump.teacher.teacher import load_teacher
from tests.end_to_end.support import dumped, ok, refused, write_corpus
from tests.texts import ENGLISH, SENTENCES
from tests.training.lamb import check_steps
from training.optimizer import optimizer_of
from training.wordpiece import train_wordpiece

WIDTH, PIECES, LONGEST = 16, 450, 64


@pytest.fixture(scope="module")
def small(make_tokenizer: Callable[[str], Any]) -> Any:
    """The student's tokenizer: fewer pieces of the same text."""
    from student_train.model.vocabulary import train_wordpiece as student_wordpiece

    return student_wordpiece(SENTENCES, PIECES, None)


def encoded(text: str, *tokenizers: Any) -> list[Any]:
    return [tokenizer.backend_tokenizer.encode(text) for tokenizer in tokenizers]


@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-lower", "bpe", "unigram"])
def test_each_word_is_segmented_by_exactly_one_vocabulary(
    kind: str, make_tokenizer: Callable[[str], Any], small: Any
) -> None:
    own = by_student = 0
    for seed, text in enumerate(SENTENCES * 5):
        encodings = encoded(text, make_tokenizer(kind), small)
        pieces = mixed(text, *encodings, 0.5, np.random.default_rng(seed))
        words = word_numbers(text, *(np.array(e.offsets) for e in encodings))
        covered = np.zeros((2, len(text)), bool)
        for begin, end in pieces.offsets[~pieces.special]:
            assert len(set(words[begin:end])) <= 1
        for place in np.flatnonzero(~pieces.special):
            begin, end = pieces.offsets[place]
            covered[int(pieces.own[place]), begin:end] = True
        for word in np.unique(words):
            sides = {bool(o) for o in pieces.own[(pieces.word == word) & ~pieces.special]}
            assert len(sides) <= 1
            have = [word in words[[b for b, e in en.offsets if e > b]] for en in encodings]
            own, by_student = own + all(have), by_student + (all(have) and sides == {True})
        # A vocabulary that drops a character (a blank, a control character) leaves it uncovered.
        for side, encoding in enumerate(encodings):
            expected = np.zeros(len(text), bool)
            for (begin, end), special in zip(
                encoding.offsets, encoding.special_tokens_mask, strict=True
            ):
                expected[begin:end] |= not special
            chosen = np.isin(words, pieces.word[pieces.own == bool(side)])
            assert (covered[side] == (expected & chosen)).all()
        visible = np.array([not c.isspace() and c.isprintable() for c in text])
        assert kind != "wordpiece" or covered.any(0)[visible].all()
    assert abs(by_student / own - 0.5) < 0.03


def test_pieces_are_those_of_their_tokenizers_in_order(
    make_tokenizer: Callable[[str], Any], small: Any
) -> None:
    text = ENGLISH[0]
    big = make_tokenizer("wordpiece")
    for share, tokenizer in ((0.0, big), (1.0, small)):
        pieces = mixed(text, *encoded(text, big, small), share, np.random.default_rng(0))
        assert pieces.ids.tolist() == tokenizer(text)["input_ids"]
        assert (pieces.own == bool(share)).all()
    both = mixed(text, *encoded(text, big, small), 0.5, np.random.default_rng(0))
    text_only = both.offsets[~both.special]
    assert (np.diff(text_only[:, 0]) > 0).all() and 0 < both.own.mean() < 1
    firsts = [mixed(text, *encoded(text, big, small), 0.5, np.random.default_rng(s)).own[0]
              for s in range(20)]  # fmt: skip
    assert len(set(firsts)) == 2  # the student's [CLS] is learnt, too


def test_words_are_joined_where_a_token_covers_several() -> None:
    text = "a cat don't, 猫犬"
    assert word_numbers(text).tolist() == [0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7, 8]
    joined = word_numbers(text, np.array([[0, 5], [13, 15], [7, 7]]))
    assert joined.tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 5]


def test_too_long_sequences_lose_whole_words_at_their_end(
    make_tokenizer: Callable[[str], Any], small: Any
) -> None:
    text = SENTENCES[3]
    whole = mixed(
        text, *encoded(text, make_tokenizer("wordpiece"), small), 0.5, np.random.default_rng(1)
    )
    for longest in range(4, len(whole.ids) + 2):
        short = shortened(whole, longest)
        assert len(short.ids) <= longest and short.special.sum() == whole.special.sum()
        kept = set(short.word[~short.special])
        if len(kept) > 1:
            expected = [i for i, w in zip(whole.ids, whole.word, strict=True)
                        if w in kept or w in (whole.word[0], whole.word[-1])]  # fmt: skip
            assert short.ids.tolist() == expected


def test_masks_are_whole_pieces_and_bounded(
    make_tokenizer: Callable[[str], Any], small: Any
) -> None:
    big = make_tokenizer("wordpiece")
    sides = Side.of(big), Side.of(small)
    text = " ".join(ENGLISH)
    seen = np.zeros(3)
    for seed in range(60):
        chance = np.random.default_rng(seed)
        pieces = mixed(text, *encoded(text, big, small), 0.3, chance)
        found = masked(pieces, sides, 0.15, chance)
        own = pieces.own[found.places]
        assert len(found.places) == MASKED and (~own).sum() <= MASKED_BY_TEACHER
        assert not pieces.special[found.places].any()
        assert (found.labels == pieces.ids[found.places]).all()
        elsewhere = np.setdiff1d(np.arange(len(pieces.ids)), found.places)
        assert (found.ids[elsewhere] == pieces.ids[elsewhere]).all()
        masks = np.where(own, small.mask_token_id, big.mask_token_id)
        read = found.ids[found.places]
        kinds = (read == masks, (read != masks) & (read != found.labels), read == found.labels)
        seen += [kind.sum() for kind in kinds]
    assert np.allclose(seen / seen.sum(), (0.8, 0.1, 0.1), atol=0.04)
    short = mixed("no", *encoded("no", big, small), 0.5, chance)
    assert len(masked(short, sides, 0.01, chance).places) == 1


def mixer_of(teacher: Any, small: Any, **changes: Any) -> Mixer:
    settings: dict[str, Any] = {
        "texts": lambda: SENTENCES,
        "sides": (Side.of(teacher.tokenizer), Side.of(small)),
        "share": 0.5,
        "probability": 0.15,
        "longest": LONGEST,
        "batch_tokens": 1024,
        "seed": 3,
    }
    return Mixer(**(settings | changes))


def some(mixer: Mixer, count: int, first: int = 0) -> list[Batch]:
    batches = mixer.batches(first)
    return [next(batches) for _ in range(count)]


def same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def test_batches_are_a_function_of_seed_and_number(
    tiny_teacher: Callable[..., Path], small: Any
) -> None:
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    mixer = mixer_of(teacher, small)
    batches = some(mixer, 8)
    assert all(batch.ids.numel() <= 1024 for batch in batches)
    assert all(map(same, batches[5:], some(mixer, 3, first=5)))
    assert not same(batches[0], some(mixer_of(teacher, small, seed=4), 1)[0])
    sequences = np.cumsum([len(batch.ids) for batch in some(mixer, 40)]).tolist()
    epochs = [len(SENTENCES) * times for times in range(1, 1 + sequences[-1] // len(SENTENCES))]
    assert epochs and set(epochs) <= set(sequences)  # every text comes once in an epoch
    assert not any(map(same, batches[:2], batches[2:4]))


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "deberta", "electra", "xlmr", "distilbert", "modernbert"]
)
def test_gradients_reach_both_vocabularies_the_map_and_the_teacher(
    kind: str, tiny_teacher: Callable[..., Path], small: Any
) -> None:
    teacher = load_teacher(str(tiny_teacher(kind)), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0)
    (batch,) = some(mixer_of(teacher, small), 1)
    sum(model(batch)).backward()
    words = model.network.get_input_embeddings().weight
    for parameter in (model.student.weight, model.up.weight, model.up.bias, model.student_bias):
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0
    assert words.grad is not None and words.grad.abs().sum() > 0
    without = [p for p in model.network.parameters() if p.grad is None]
    assert all(p.shape == model.bias.shape for p in without)  # its place is with the decoder
    assert model.bias.grad is not None and len(without) < 2
    model.zero_grad()
    read = torch.unique(batch.ids[batch.own])
    words = model.student(read)  # the map alone, without the softmax
    model.up(words).sum().backward()
    assert (model.student.weight.grad.abs().sum(1) > 0).nonzero().flatten().equal(read)


def test_the_teachers_softmax_is_its_own_head(
    tiny_teacher: Callable[..., Path], small: Any
) -> None:
    """With no word of the student's, the loss is that of transformers' own masked LM."""
    folder = tiny_teacher("bert")
    teacher = load_teacher(str(folder), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0).eval()
    (batch,) = some(mixer_of(teacher, small, share=0.0), 1)
    whole = AutoModelForMaskedLM.from_pretrained(folder).eval()
    labels = torch.full(batch.ids.shape, -100)
    labels.view(-1)[batch.rows] = batch.labels
    with torch.no_grad():
        of_teacher, of_student = model(batch)
        expected = whole(
            input_ids=batch.ids, attention_mask=batch.present.long(), labels=labels
        ).loss
    assert of_student == 0
    torch.testing.assert_close(of_teacher / len(batch.labels), expected)


def test_the_students_softmax_is_over_the_projected_embeddings(
    tiny_teacher: Callable[..., Path], small: Any
) -> None:
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0).eval()
    (batch,) = some(mixer_of(teacher, small, share=1.0), 1)
    with torch.no_grad():
        embeddings = model.up(model.student.weight)
        states = model.network(
            inputs_embeds=embeddings[batch.ids], attention_mask=batch.present.long()
        ).logits.flatten(0, 1)[batch.rows]
        logits = states @ embeddings.T + model.student_bias
        expected = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
        of_teacher, of_student = model(batch)
    assert of_teacher == 0
    torch.testing.assert_close(of_student, expected)


def course(steps: int, **changes: Any) -> Course:
    settings: dict[str, Any] = {
        "steps": steps,
        "lr": 3e-3,
        "optimizer": "adamw",
        "seed": 1,
        "precision": "fp32",
        "checkpoint_every": 1000,
        "begun": {"steps": steps},
    }
    return Course(**(settings | changes))


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 3e-3), ("lamb", 3e-2)])
def test_the_loss_falls_and_a_stopped_training_goes_on_along_the_same_curve(
    tiny_teacher: Callable[..., Path], small: Any, tmp_path: Path, optimizer: str, rate: float
) -> None:
    def once(name: str, until: int = 0, **changes: Any) -> tuple[Any, list[str]]:
        teacher = load_teacher(
            str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none"
        )
        model, said = MixedTeacher(teacher, len(small), WIDTH, seed=1), list[str]()
        mixer = mixer_of(teacher, small, batch_tokens=512)

        def say(line: str) -> None:
            said.append(line)
            if line.startswith(f"step {until}/"):
                os.kill(os.getpid(), signal.SIGINT)

        with stoppable() as stop:
            path = tmp_path / name
            asked = course(30, optimizer=optimizer, lr=rate, **changes)
            return train(model, mixer, asked, path, "cpu", stop, say), said

    whole, said = once("whole")
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (said[0], said[-1]))
    assert last < first - 0.5 and said[-1].startswith("step 30/30")
    with pytest.raises(Stopped):
        once("cut", until=11, checkpoint_every=4)
    again, said = once("cut")
    assert said[0] == "resume    after step 11 of 30"
    assert np.array_equal(whole, again) and whole.dtype == np.float32
    unchanged, said = once("cut")  # killed as the store was to be written: nothing is trained
    assert said == ["resume    after step 30 of 30"] and np.array_equal(whole, unchanged)
    with pytest.raises(UserError, match="with other arguments: steps was '30' and is '31'"):
        once("cut", begun={"steps": 31})
    (tmp_path / "torn").write_bytes(b"PK")
    with pytest.raises(UserError, match="cannot be read.*remove it to begin anew"):
        once("torn")


def test_steps_of_lamb_are_those_of_the_paper(
    tiny_teacher: Callable[..., Path], small: Any
) -> None:
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=1)
    made = optimizer_of(model, "lamb", lr=course(3).lr, weight_decay=WEIGHT_DECAY, betas=BETAS)
    check_steps(made, model, BETAS, WEIGHT_DECAY)


def test_without_lambs_package_nothing_is_begun(
    tiny_teacher: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 10)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    line = refused(
        *(teacher_dump, "mixed-vocab", "--model", tiny_teacher("bert"), "--corpus", corpus),
        *("--width", WIDTH, "--optimizer", "lamb", "--out", tmp_path / "store.zarr"),
    )
    assert "--optimizer lamb" in line and "`pip install pytorch-optimizer`" in line
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[..., Path]
) -> tuple[Path, Path, tuple[Any, ...]]:
    """A store made by the command, in Zarr; the corpus, and the words it was made by."""
    folder = tmp_path_factory.mktemp("mixed")
    corpus = write_corpus(folder / "corpus.txt", 60)
    words = (
        *("mixed-vocab", "--model", tiny_teacher("bert"), "--corpus", corpus, "--vocab", PIECES),
        *("--width", WIDTH, "--steps", 6, "--batch-tokens", 512, "--max-length", LONGEST),
        *("--device", "cpu", "--seed", 2),
    )
    said = ok(teacher_dump, *words, "--out", folder / "store.zarr")
    assert "step 6/6" in said and f"--student {WIDTH}xLxA --loss mlm=1" in said
    assert not (folder / "store.zarr.mixed-vocab").exists()
    return folder / "store.zarr", corpus, words


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
    plain = zarr.open_group(path, mode="r")[f"{GROUP}/embeddings"][:]
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
    assert "mixed_vocab" in line or "features" in line


def test_stage_two_starts_from_exactly_these_rows(trained: Any, tmp_path: Path) -> None:
    store = open_store(trained[0])
    stored = MixedVocab.of(store).embeddings
    tokenizer = student_tokenizer("mixed-vocab", store)
    assert len(tokenizer) == PIECES and tokenizer.mask_token == "[MASK]"
    found = vocabulary_map(store, tokenizer)
    for kind in ("", "modernbert:"):
        student = make_student(f"{kind}{WIDTH}x2x2", tokenizer, LONGEST)
        said = initialise(student, "mixed-vocab", store, found)
        words = student.get_input_embeddings().weight
        assert torch.equal(words, torch.from_numpy(stored)) and f"all {PIECES} pieces" in said[0]
        assert student.get_output_embeddings().weight is words
    with pytest.raises(
        UserError, match=f"{WIDTH} wide and the student's 32; choose --student 16xLxA"
    ):
        initialise(make_student("32x2x2", tokenizer, LONGEST), "mixed-vocab", store, found)
    other = student_tokenizer("400", store)
    with pytest.raises(UserError, match="use --vocab mixed-vocab"):
        student = make_student(f"{WIDTH}x2x2", other, LONGEST)
        initialise(student, "mixed-vocab", store, vocabulary_map(store, other))


def test_stage_two_trains_from_the_store_alone(trained: Any, tmp_path: Path) -> None:
    words = ("--store", trained[0], "--vocab", "mixed-vocab", "--init", "mixed-vocab")
    size = ("--student", f"{WIDTH}x2x2", "--batch-tokens", "256", "--device", "cpu")
    said = ok(student_train, *words, *size, "--steps", "2", "--out", tmp_path / "student")
    assert f"word embeddings of all {PIECES} pieces" in said
    assert len(AutoTokenizer.from_pretrained(tmp_path / "student")) == PIECES
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "student").config.vocab_size == PIECES


def vocabulary_map(store: Any, tokenizer: Any) -> VocabularyMap:
    return VocabularyMap.between(
        Vocabulary.from_tokenizer_json(store.teacher_file("tokenizer.json").decode()),
        Vocabulary.from_tokenizer_json(tokenizer.backend_tokenizer.to_str()),
    )


def test_a_plain_store_has_none_and_merges_behind_one_that_has(
    trained: Any, tiny_teacher: Callable[..., Path], tmp_path: Path
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


def test_a_kill_while_the_text_is_written_trains_nothing_anew(
    trained: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path, _, words = trained
    out = tmp_path / "store.zarr"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("teacher_dump.job.part_writing.write_part", killed)
        result = CliRunner().invoke(teacher_dump, [str(w) for w in (*words, "--out", out)])
        assert result.exit_code == 130
    with pytest.raises(StoreError, match="not finished"):
        open_store(out)
    line = refused(teacher_dump, *words, "--steps", 7, "--out", out)
    assert "steps is '6' in the store and '7' now" in line
    assert "step 6/6" not in ok(teacher_dump, *words, "--out", out)
    one, other = (open_store(p).manifest.content() for p in (path, out))
    assert one == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--width", 33), "words of .* are 32 wide; choose 1 to 32"),
        (("--width", 0), "--width 0: expected at least 1"),
        (("--vocab", 20), "--vocab 20: the text has .* ask for more"),
        (("--vocab", "nowhere"), "expected a size .* or a folder"),
        (("--student-share", 1), "--student-share 1: expected a share between"),
        (("--mask-prob", 0), "--mask-prob 0: expected a share"),
        (("--lr", 0), "--lr 0: expected a rate"),
        (("--precision", "fp16"), "--precision fp16: gradients vanish"),
        (("--max-length", 4000), "the teacher reads at most 128 tokens"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    changes: tuple[Any, ...], message: str, trained: Any, tmp_path: Path
) -> None:
    line = refused(teacher_dump, *trained[2], *changes, "--out", tmp_path / "store.zarr")
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


def test_teachers_without_a_masked_lm_head_are_refused(
    trained: Any, tiny_teacher: Callable[..., Path], tmp_path: Path
) -> None:
    words = trained[2]
    for teacher, message in (
        (tiny_teacher("gpt2"), "no masked-LM head"),
        (tiny_teacher("bert", "classification", ("a", "b")), "no masked-LM head"),
    ):
        line = refused(teacher_dump, *words, "--model", teacher, "--out", tmp_path / "store.zarr")
        assert message in line
    line = refused(teacher_dump, *words, "--out", trained[0])
    assert "is finished" in line


def test_a_tokenizer_folder_is_taken_as_it_is(
    trained: Any, make_tokenizer: Callable[[str], Any], tmp_path: Path
) -> None:
    make_tokenizer("bpe").save_pretrained(tmp_path / "bpe")
    words = (*trained[2], "--vocab", tmp_path / "bpe", "--out", tmp_path / "store.zarr")
    ok(teacher_dump, *words)
    tokenizer = student_tokenizer("mixed-vocab", open_store(tmp_path / "store.zarr"))
    expected = AutoTokenizer.from_pretrained(tmp_path / "bpe")
    assert tokenizer(ENGLISH[0])["input_ids"] == expected(ENGLISH[0])["input_ids"]
    assert tokenizer.mask_token == "<mask>"


def test_verify_tells_embeddings_that_are_not_those_of_the_tokenizer(
    trained: Any, tmp_path: Path
) -> None:
    store = open_store(trained[0])
    good = MixedVocab.of(store)
    backend = train_wordpiece(ENGLISH, 180, None)
    settings = json.dumps(json.loads(good.settings)).encode()
    wrong = dataclasses.replace(good, tokenizer=backend.to_str().encode(), settings=settings)
    from store.tools.copy import copy_part
    from store.write.writer import StoreWriter

    writer = StoreWriter.create_or_resume(
        tmp_path / "wrong.zarr", store.identity, store.features, store.calibration,
        files=dict(store.teacher_files()), software=store.meta["software"], more=[wrong],
    )  # fmt: skip
    copy_part(writer, 0, store, 0, store, 0)
    writer.seal()
    (line,) = verify(tmp_path / "wrong.zarr").problems
    assert "is not a finite float32 [180, d]" in line
    with pytest.raises(StoreError, match="a row for each piece"):
        MixedVocab.of(open_store(tmp_path / "wrong.zarr"))


def test_help_shows_the_subcommand() -> None:
    assert "mixed-vocab" in ok(teacher_dump, "--help").partition("Commands:")[2]
    short, long = (ok(teacher_dump, "mixed-vocab", option) for option in ("-h", "--help"))
    assert short == long and "Usage: main mixed-vocab" in short and "--student-share" in short
    assert "--width" in refused(teacher_dump, "mixed-vocab", "--model", "x", "--out", "y.zarr")
    assert MixedVocabOptions(DumpOptions("m", Path("s.h5")), "5k", 16).checkpoint() == Path(
        "s.h5.mixed-vocab"
    )
    assert callable(mixed_vocab)
