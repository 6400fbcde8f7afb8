"""Words of two vocabularies, the teacher that has both, and the training of its embeddings.

- Words of two vocabularies: segmented, masked and packed into batches.
- The teacher with two vocabularies: its two softmaxes and their gradients.
- Training of the embeddings: the loss falls, and a stopped training continues.
"""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from teachonce.support.errors import UserError
from teachonce.support.signals import Stopped, stoppable
from teachonce.teacher_dump.mixed_vocab.embedding_training import MixedTeacher, train_embeddings
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions, StageOneDump
from teachonce.teacher_dump.mixed_vocab.segmentation import (
    MASKED,
    MASKED_BY_TEACHER,
    MixedBatch,
    Side,
    masked,
    mixed,
    shortened,
    word_numbers,
)
from teachonce.teacher_dump.mixed_vocab.stage_one import student_ids
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.training.loop import Training
from tests.making.models import Teachers, Tokenizers
from tests.making.texts import ENGLISH, SENTENCES
from tests.teacher_dump.mixed_vocab.support import WIDTH, mixer_of, some


def encoded(text: str, teacher: Any, student: Any) -> tuple[Any, Any]:
    return teacher.backend_tokenizer.encode(text), student.backend_tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-lower", "bpe", "unigram"])
def test_each_word_is_segmented_by_exactly_one_vocabulary(
    kind: str, make_tokenizer: Tokenizers, small: Any
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
        # If a vocabulary drops a character (a blank, a control character), no piece covers it.
        for side, encoding in enumerate(encodings):
            expected = np.zeros(len(text), bool)
            for (begin, end), special in zip(
                encoding.offsets, encoding.special_tokens_mask, strict=True
            ):
                expected[begin:end] |= not special
            chosen = np.isin(words, pieces.word[pieces.own == bool(side)])
            assert (covered[side] == (expected & chosen)).all()
        visible = np.array([not c.isspace() and c.isprintable() for c in text])
        assert kind != "wordpiece" or covered[:, visible].any(0).all()
    assert abs(by_student / own - 0.5) < 0.03


def test_pieces_match_their_tokenizers_in_order(make_tokenizer: Tokenizers, small: Any) -> None:
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
    assert len(set(firsts)) == 2  # the student's [CLS] is trained, too


def test_words_are_joined_where_a_token_covers_several() -> None:
    text = "a cat don't, 猫犬"
    assert word_numbers(text).tolist() == [0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7, 8]
    joined = word_numbers(text, np.array([[0, 5], [13, 15], [7, 7]]))
    assert joined.tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 5]


def test_too_long_sequences_lose_whole_words_at_their_end(
    make_tokenizer: Tokenizers, small: Any
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


def test_masks_are_whole_pieces_and_bounded(make_tokenizer: Tokenizers, small: Any) -> None:
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


def same(one: MixedBatch, other: MixedBatch) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def test_batches_are_a_function_of_seed_and_number(tiny_teacher: Teachers, small: Any) -> None:
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    mixer = mixer_of(teacher, small)
    batches = some(mixer, 8)
    assert all(batch.ids.numel() <= 1024 for batch in batches)
    assert all(map(same, batches[5:], some(mixer, 3, first=5)))
    assert not same(batches[0], some(mixer_of(teacher, small, seed=4), 1)[0])
    sequences = np.cumsum([len(batch.ids) for batch in some(mixer, 40)]).tolist()
    epochs = [len(SENTENCES) * times for times in range(1, 1 + sequences[-1] // len(SENTENCES))]
    assert epochs and set(epochs) <= set(sequences)  # every text occurs once in an epoch
    assert not any(map(same, batches[:2], batches[2:4]))


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "deberta", "electra", "xlmr", "distilbert", "modernbert"]
)
def test_gradients_reach_both_vocabularies_the_map_and_the_teacher(
    kind: str, tiny_teacher: Teachers, small: Any
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
    assert all(p.shape == model.bias.shape for p in without)  # the decoder contains it
    assert model.bias.grad is not None and len(without) < 2
    model.zero_grad()
    read = torch.unique(batch.ids[batch.own])
    words = model.student(read)  # the map alone, without the softmax
    model.up(words).sum().backward()
    assert model.student.weight.grad is not None
    assert (model.student.weight.grad.abs().sum(1) > 0).nonzero().flatten().equal(read)


def test_the_teachers_softmax_is_its_own_head(tiny_teacher: Teachers, small: Any) -> None:
    """Without words in the student's vocabulary, the loss equals transformers' masked LM loss."""
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


def test_tied_pieces_have_one_embedding(tiny_teacher: Teachers, small: Any) -> None:
    """A piece of both vocabularies has one embedding, the student's, for input and for output."""
    folder = tiny_teacher("bert")
    teacher = load_teacher(str(folder), head="mlm", hidden="none", attention="none")
    same = student_ids(teacher.tokenizer, small)
    names, own = teacher.tokenizer.get_vocab(), small.get_vocab()
    assert {same[names[piece]] == own[piece] for piece in names.keys() & own.keys()} == {True}
    assert 100 < (same >= 0).sum() == len(names.keys() & own.keys()) < len(names)
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0, same=same).eval()
    whole: Any = AutoModelForMaskedLM.from_pretrained(folder).eval()
    rows, ids = (torch.from_numpy(each) for each in ((same >= 0).nonzero()[0], same[same >= 0]))
    words = whole.get_input_embeddings().weight
    with torch.no_grad():
        tied = model.up(model.student(ids))
        # the best initial value at that rank, also used by the head
        kept = (words[rows] - words[rows].mean(0)).norm() ** 2 - (tied - words[rows]).norm() ** 2
        spread = torch.linalg.svdvals(words[rows] - words[rows].mean(0)) ** 2
        torch.testing.assert_close(kept, spread[:WIDTH].sum(), rtol=1e-3, atol=1e-4)
        words[rows] = tied
        whole.cls.predictions.decoder.weight[rows] = tied
    (batch,) = some(mixer_of(teacher, small, share=0.0), 1)
    labels = torch.full(batch.ids.shape, -100)
    labels.view(-1)[batch.rows] = batch.labels
    with torch.no_grad():
        expected = whole(
            input_ids=batch.ids, attention_mask=batch.present.long(), labels=labels
        ).loss
    of_teacher, _ = model(batch)
    torch.testing.assert_close(of_teacher.detach() / len(batch.labels), expected)
    of_teacher.backward()  # so the teacher's words alone train the student's embeddings
    assert model.student.weight.grad is not None
    moved = model.student.weight.grad.abs().sum(1) > 0
    assert moved[ids].all() and not moved[sorted(set(range(len(small))) - set(ids.tolist()))].any()
    own_words = model.network.get_input_embeddings().weight.grad
    assert own_words is not None and not own_words[rows].any()


def test_pieces_of_another_kind_are_not_tied(tiny_teacher: Teachers, small: Any) -> None:
    teacher = load_teacher(str(tiny_teacher("roberta")), hidden="none", attention="none")
    with pytest.raises(UserError, match="--tie: .* is a BPE and the student's a WordPiece"):
        student_ids(teacher.tokenizer, small)


def test_the_students_softmax_is_over_the_projected_embeddings(
    tiny_teacher: Teachers, small: Any
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


def test_the_loss_of_stage_one_is_equation_1(tiny_teacher: Teachers, small: Any) -> None:
    """The loss is eq. 1 of Zhao et al. 2021, in NumPy: the sum of minus the log-probability of each
    masked piece, under the softmax of the vocabulary of its word."""
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0).eval()
    (batch,) = some(mixer_of(teacher, small), 1)
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    words = model.network.get_input_embeddings().weight.detach().double().numpy()
    own = weights["student.weight"] @ weights["up.weight"].T + weights["up.bias"]
    ids, of_student = batch.ids.numpy(), batch.own.numpy()
    read = np.where(of_student[..., None], own[ids % len(own)], words[ids % len(words)])
    with torch.no_grad():
        states = model.network(
            inputs_embeds=torch.from_numpy(read).float(), attention_mask=batch.present.long()
        ).logits.flatten(0, 1)[batch.rows]
        found = model(batch)
    wanted = np.zeros(2)
    for state, piece, side in zip(
        states.double().numpy(), batch.labels.numpy(), batch.labels_own.numpy(), strict=True
    ):
        table, bias = (own, "student_bias") if side else (weights["weight"], "bias")
        scores = table @ state + weights[bias]
        wanted[int(side)] -= (
            scores[piece] - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        )
    assert wanted.all() and [float(each) for each in found] == pytest.approx(wanted, rel=1e-4)


def options(out: Path, steps: int, **changes: Any) -> MixedVocabOptions:
    dump = StageOneDump("teacher", out, seed=1, device="cpu", precision="fp32")
    settings: dict[str, Any] = {"width": WIDTH, "steps": steps, "lr": 3e-3}
    return MixedVocabOptions(dump, **(settings | {"checkpoint_every": 1000} | changes))


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("adamw", 3e-3), pytest.param("lamb", 3e-2, marks=pytest.mark.apart)]
)
def test_the_loss_falls_and_a_stopped_training_goes_on_along_the_same_curve(
    tiny_teacher: Teachers, small: Any, tmp_path: Path, optimizer: str, rate: float
) -> None:
    def once(name: str, until: int = 0, started: int = 30, **changes: Any) -> tuple[Any, list[str]]:
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
            asked = options(tmp_path / name, 30, optimizer=optimizer, lr=rate, **changes)
            return train_embeddings(model, mixer, asked, {"steps": started}, stop, say), said

    whole, said = once("whole")
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (said[0], said[-1]))
    assert last < first - 0.5 and said[-1].startswith("step 30/30")
    with pytest.raises(Stopped):
        once("cut", until=11, checkpoint_every=4)
    again, said = once("cut")
    assert said[0] == "resume    after step 11 of 30"
    assert np.array_equal(whole, again) and whole.dtype == np.float32
    unchanged, said = once("cut")  # killed just before the store is written: no training is left
    assert said == ["resume    after step 30 of 30"] and np.array_equal(whole, unchanged)
    with pytest.raises(UserError, match="with other arguments: steps was 30 and is 31"):
        once("cut", started=31)
    options(tmp_path / "torn", 30).checkpoint().write_bytes(b"PK")
    with pytest.raises(UserError, match="cannot be read.*remove it to start from the beginning"):
        once("torn")


def test_a_step_of_several_batches_and_its_warm_up(
    tiny_teacher: Teachers, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, several batches make one step, and the warm-up is a share of the steps."""
    taken: list[tuple[float, int, int]] = []
    update = Training.update

    def printed(self: Any, rate: float, batches: Any, losses: Any, count: int = 1) -> Any:
        found = update(self, rate, batches, losses, count)
        taken.append((rate, count, self.step))
        return found

    monkeypatch.setattr(Training, "update", printed)

    def trained(name: str, until: int = 0) -> Any:
        taken.clear()
        teacher = load_teacher(
            str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none"
        )
        mixer = mixer_of(teacher, small, batch_tokens=512)
        model = MixedTeacher(teacher, len(small), WIDTH, seed=1)

        def say(line: str) -> None:
            if line.startswith(f"step {until}/"):
                os.kill(os.getpid(), signal.SIGINT)

        with stoppable() as stop:
            asked = options(tmp_path / name, 4, accumulate=3, warmup=0.5)
            return train_embeddings(model, mixer, asked, {}, stop, say)

    whole = trained("whole")
    assert [rate for rate, _, _ in taken] == pytest.approx([1.5e-3, 3e-3, 3e-3, 1.5e-3])
    assert {count for _, count, _ in taken} == {3}
    with pytest.raises(Stopped):
        trained("cut", until=2)
    assert np.array_equal(trained("cut"), whole)  # continues with batch 6, not with batch 2
    assert [step for *_, step in taken] == [3, 4]
