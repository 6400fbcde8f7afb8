"""BiLSTMs, and the vocabulary of words that a recurrent student may have.

- BiLSTMs: padding changes nothing, heads and losses equal hand computation, word vectors initialise
  the embeddings.
- A vocabulary of lower-cased words between spaces, for the RNN of Mukherjee & Awadallah 2019.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from transformers import AutoTokenizer

from teachonce.align import Vocabulary
from teachonce.checkpoints.bilstm import (
    BiLstmConfig,
    BiLstmForMaskedLM,
    BiLstmForSequenceClassification,
    BiLstmForTokenClassification,
    BiLstmModel,
    last_of,
    lstm_with_dropout,
)
from teachonce.store import FeatureStore, TaskSpec
from teachonce.student_train.cli import main
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.model.word_vectors import set_word_vectors
from teachonce.support.errors import UserError, out_of_memory
from teachonce.training.wordpiece import SPECIALS
from tests.end_to_end.support import ok
from tests.making.environment import printed_by
from tests.making.models import TOKENIZER_KINDS, Tokenizers

WITH_HEADS = (BiLstmForMaskedLM, BiLstmForSequenceClassification, BiLstmForTokenClassification)
LENGTHS = (7, 4, 1)


def model_of(own: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = BiLstmConfig(
        vocab_size=40, embedding_size=6, lstm_size=5, num_hidden_layers=2, num_labels=3, **settings
    )
    return own(config).eval()


def padded(side: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return three rows of ids, and the same rows as a batch with its mask. The padding has random
    ids."""
    draws = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 40, (length,), generator=draws) for length in LENGTHS]
    ids = torch.randint(1, 40, (len(rows), max(LENGTHS)), generator=draws)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place: Any = slice(0, len(row)) if side == "right" else slice(-len(row), None)
        if side == "between":
            place = torch.randperm(max(LENGTHS), generator=draws)[: len(row)].sort().values
        ids[number, place], mask[number, place] = row, 1
    return rows, ids, mask


@pytest.mark.parametrize("side", ["right", "left", "between"])
@pytest.mark.parametrize("own", WITH_HEADS)
def test_padding_changes_nothing(own: Any, side: str) -> None:
    model = model_of(own)
    rows, ids, mask = padded(side)
    batch = model(ids, attention_mask=mask, output_hidden_states=True)
    for number, row in enumerate(rows):
        alone, present = model(row[None], output_hidden_states=True), mask[number].bool()
        for together, apart in zip(batch.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(together[number][present], apart[0])
        found = batch.logits[number]
        torch.testing.assert_close(found if found.dim() == 1 else found[present], alone.logits[0])


def test_dropped_channels_of_a_state_are_dropped_at_every_token() -> None:
    """The states equal torch's cells with one mask for the whole row."""
    lstm = torch.nn.LSTM(3, 64, batch_first=True)
    inputs = torch.randn(2, 6, 3)
    torch.manual_seed(3)
    found = lstm_with_dropout(lstm, inputs, 0.25)
    torch.manual_seed(3)
    mask = functional.dropout(torch.ones(2, 64), 0.25)
    assert 0.1 < (mask == 0).float().mean() < 0.4
    cell = torch.nn.LSTMCell(3, 64)
    cell.load_state_dict({name.removesuffix("_l0"): w for name, w in lstm.state_dict().items()})
    state = memory = torch.zeros(2, 64)
    for place in range(6):
        state, memory = cell(inputs[:, place], (state * mask, memory))
        torch.testing.assert_close(found[:, place], state)
    torch.testing.assert_close(lstm_with_dropout(lstm, inputs, 0.0), lstm(inputs)[0])


def test_states_are_dropped_in_training_alone() -> None:
    plain, dropping = model_of(BiLstmModel), model_of(BiLstmModel, recurrent_dropout=0.5)
    assert "recurrent_dropout" not in plain.config.to_dict()
    assert dropping.config.to_dict()["recurrent_dropout"] == 0.5
    _, ids, mask = padded("between")
    judged = dropping(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(judged, plain(ids, attention_mask=mask).last_hidden_state)
    dropping.train()
    torch.manual_seed(1)
    first = dropping(ids, attention_mask=mask).last_hidden_state
    torch.manual_seed(1)
    assert torch.equal(first, dropping(ids, attention_mask=mask).last_hidden_state)
    assert not torch.equal(first, judged) and (first[~mask.bool()] == 0).all()
    first.square().sum().backward()
    assert all(weight.grad is not None for weight in dropping.layers.parameters())


def test_states_are_embeddings_and_layers() -> None:
    model = model_of(BiLstmModel)
    _, ids, mask = padded("right")
    found = model(ids, attention_mask=mask, output_hidden_states=True)
    assert [state.shape[-1] for state in found.hidden_states] == [6, 10, 10]
    torch.testing.assert_close(found.hidden_states[0], model.embeddings.weight[ids])
    assert torch.equal(found.last_hidden_state, found.hidden_states[-1])
    assert not found.last_hidden_state[~mask.bool()].any()
    assert model(ids).hidden_states is None
    first, *_ = model(ids, attention_mask=mask, return_dict=False)
    assert torch.equal(first, found.last_hidden_state)


def test_a_layer_is_a_bidirectional_lstm_over_packed_rows() -> None:
    model = model_of(BiLstmModel)
    rows, ids, mask = padded("left")
    found = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1]
    layer, plain = model.layers[0], torch.nn.LSTM(6, 5, bidirectional=True)
    plain.load_state_dict(
        dict(layer.left_to_right.state_dict())
        | {f"{name}_reverse": each for name, each in layer.right_to_left.state_dict().items()}
    )
    packed, _ = plain(pack_sequence([model.embeddings(row) for row in rows]))
    for number, row in enumerate(unpack_sequence(packed)):
        torch.testing.assert_close(found[number][mask[number].bool()], row)


def test_a_text_is_the_largest_value_of_each_channel() -> None:
    model = model_of(BiLstmForSequenceClassification)
    _, ids, mask = padded("right")
    states = model.bilstm(ids, attention_mask=mask).last_hidden_state
    for number, length in enumerate(LENGTHS):
        largest = states[number, :length].max(dim=0).values
        found = model(ids, attention_mask=mask).logits[number]
        torch.testing.assert_close(found, model.classifier(largest))


def test_the_last_state_is_of_the_last_token_forwards_and_of_the_first_backwards() -> None:
    states = torch.arange(24.0).reshape(2, 3, 4)  # rows, tokens, channels: two of each direction
    present = torch.tensor([[True, True, False], [False, True, True]])
    assert last_of(states, present).tolist() == [[4, 5, 2, 3], [20, 21, 18, 19]]
    model = model_of(BiLstmForSequenceClassification, classifier_pooling="last")
    ids, mask = torch.tensor([[3, 4, 5, 0]]), torch.tensor([[1, 1, 1, 0]])
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask).logits
        states = model.bilstm(ids[:, :3], output_hidden_states=True).hidden_states[1]
        layer = model.bilstm.layers[1]
        ends = [layer.left_to_right(states)[1][0][0], layer.right_to_left(states.flip(1))[1][0][0]]
        torch.testing.assert_close(found, model.classifier(torch.cat(ends, dim=1)))


@pytest.mark.parametrize("own", WITH_HEADS)
def test_losses_are_cross_entropies(own: Any) -> None:
    model = model_of(own)
    _, ids, mask = padded("right")
    labels = torch.tensor([0, 2, 1])
    if own is not BiLstmForSequenceClassification:
        labels = torch.where(mask.bool(), ids % 3, -100)
    found = model(ids, attention_mask=mask, labels=labels)
    wanted = functional.cross_entropy(found.logits.flatten(0, -2), labels.flatten())
    torch.testing.assert_close(found.loss, wanted)
    found.loss.backward()
    assert all(each.grad is not None for each in model.parameters())


BF16: Any = torch.ops.mkldnn


@pytest.mark.skipif(BF16._is_mkldnn_bf16_supported(), reason="this processor can")
def test_bfloat16_without_instructions_for_it_is_one_line() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError) as caught:
        model_of(BiLstmModel)(ids)
    assert str(caught.value).endswith(
        "no instructions for an LSTM in bfloat16 (AVX-512 or AMX); give --precision fp32"
    )


@pytest.mark.parametrize(
    ("words", "autocast", "weights", "refused"),
    [
        ("primitive descriptor for an LSTM", torch.bfloat16, torch.float32, True),
        ("primitive descriptor for an LSTM", None, torch.bfloat16, True),
        ("primitive descriptor for an LSTM", None, torch.float32, False),
        ("primitive", torch.bfloat16, torch.float32, False),
    ],
)
def test_words_of_onednn_and_the_precision_decide_what_it_lacks(
    words: str,
    autocast: torch.dtype | None,
    weights: torch.dtype,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In any other case the error is unchanged, and means a lack of memory."""

    def fails(*_: Any) -> Any:
        raise RuntimeError(f"could not create a {words}")

    model = model_of(BiLstmModel).to(weights)
    monkeypatch.setattr(torch.nn.LSTM, "forward", fails)
    with (
        torch.autocast("cpu", autocast, enabled=autocast is not None),
        pytest.raises(UserError if refused else RuntimeError) as caught,
    ):
        model(torch.ones(2, 3, dtype=torch.int64))
    assert out_of_memory(caught.value) != refused
    assert ("give --precision fp32" in str(caught.value)) == refused


def test_what_a_bilstm_cannot_give_is_refused() -> None:
    model = model_of(BiLstmForMaskedLM)
    with pytest.raises(UserError, match="a BiLSTM has no attention maps; leave --loss attention"):
        model(torch.ones(1, 3, dtype=torch.long), output_attentions=True)
    mask = torch.tensor([[1, 1], [0, 0]])
    with pytest.raises(ValueError, match="row 1 of the batch has no token"):
        model(torch.ones(2, 2, dtype=torch.long), attention_mask=mask)


LOAD = """
import sys
import teachonce.checkpoints.bilstm
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline
model = AutoModelForTokenClassification.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print([word["entity"] for word in pipeline("token-classification", sys.argv[1])("The old lamp.")])
print([model.config.id2label[n] for n in model(**tokenizer("The old lamp.", return_tensors="pt"))
       .logits[0, 1:-1].argmax(-1).tolist()])
"""


@pytest.mark.slow
def test_the_auto_classes_load_it_in_a_new_process(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer("wordpiece")
    task = TaskSpec("tagging", ("NOUN", "VERB", "X"))
    made: Any = make_student("bilstm:8,8", tokenizer, 64, task=task)
    torch.nn.init.normal_(made.classifier.weight)
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    piped, own = printed_by(sys.executable, "-c", LOAD, tmp_path).splitlines()
    assert piped == own and set(eval(own)) <= set(task.labels) and len(eval(own)) > 2


def vectors(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_word_vectors_go_to_whole_words(
    kind: str, header: bool, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(kind)
    student: Any = make_student("bilstm:3,4", tokenizer, 64)
    before = student.get_input_embeddings().weight.detach().clone()
    lines = ["the 1 2 3", "ing 4 5 6", ". . . 7 8 9", "[UNK] 1 1 1 ", "the 0 0 0", "a -2e0 0 .5"]
    path = vectors(tmp_path / "words.vec", [f"{len(lines)} 3", *lines] if header else lines)
    said = set_word_vectors(student, tokenizer, path)
    after = student.get_input_embeddings().weight.detach()
    changed = (after != before).any(dim=1).nonzero().flatten().tolist()
    encoded = tokenizer(" the a", add_special_tokens=False)["input_ids"]
    assert sorted(changed) == sorted(encoded)
    assert said == f"word embeddings of 2 of {len(before):,} pieces from words.vec"
    the, a = after[encoded]
    assert the.tolist() == [1.0, 2.0, 3.0] and a.tolist() == [-2.0, 0.0, 0.5]  # unchanged
    set_word_vectors(student, tokenizer, path, others=True)
    after = student.get_input_embeddings().weight.detach()
    assert torch.equal(after[encoded], torch.stack([the, a]))
    padding = tokenizer.pad_token_id
    others = torch.tensor([n for n in range(len(after)) if n not in (*encoded, padding)])
    assert not after[padding].any() and (after[others] != before[others]).any(dim=1).all()
    assert 0.09 < after[others].max() <= 0.1 and -0.1 <= after[others].min() < -0.09
    assert after[others].std().item() == pytest.approx(0.2 / 12**0.5, rel=0.15)  # uniform


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["2 50", "the 1 2 3"], "line 1: expected a word and 3 numbers.*got 50"),
        (["of 1 2 3", "the 1 2"], "line 2: expected a word and 3 numbers.*got 2"),
        (["of 1 2 3", "the 1 2 3 4"], "line 2: expected a word and 3 numbers.*got 4"),
        (["the"], "line 1: expected a word and 3 numbers.*got 0"),
        (["", "the 1 x 3"], "line 2: expected finite numbers after the word, got 'x'"),
        (["the 1 nan 3"], "line 1: expected finite numbers after the word, got 'nan'"),
        (["xyzzy 1 2 3"], "none of the student's [0-9]+ pieces is a word of the file"),
        ([""], "none of the student's"),
        (b"3 3\nthe \x00\x01\xff\x80\n", "line 2: expected a word and 3 numbers"),
        (None, "cannot be read"),
    ],
)
def test_wrong_word_vectors_are_refused(
    lines: list[str] | bytes | None, message: str, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    tokenizer, path = make_tokenizer("wordpiece-lower"), tmp_path / "a.txt"
    student: Any = make_student("bilstm:3,4", tokenizer, 64)
    before = student.get_input_embeddings().weight.detach().clone()
    if lines is not None:
        path.write_bytes(lines) if isinstance(lines, bytes) else vectors(path, lines)
    with pytest.raises(UserError, match=message) as caught:
        set_word_vectors(student, tokenizer, path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert torch.equal(student.get_input_embeddings().weight, before)


def test_it_has_every_word_the_most_frequent_first(store: FeatureStore, tmp_path: Path) -> None:
    counts = Counter(word for text in store.texts() for word in text.lower().split())
    tokenizer: Any = student_tokenizer("words", store)
    assert len(tokenizer) == len(SPECIALS) + len(counts)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert names[5:] == sorted(counts, key=lambda word: (-counts[word], word))
    few: Any = student_tokenizer("words:25", store)
    assert few.convert_ids_to_tokens(list(range(25))) == names[:25] and len(few) == 25
    text = f"{names[5].upper()} {names[6]}\tNeverSeen {names[30]}"
    few.save_pretrained(tmp_path)
    for each in (few, AutoTokenizer.from_pretrained(tmp_path)):
        read = each(text)["input_ids"]
        printed = ["[CLS]", names[5], names[6], "[UNK]", "[UNK]", "[SEP]"]
        assert each.convert_ids_to_tokens(read) == printed
    whole = Vocabulary.from_tokenizer_json(tokenizer.backend_tokenizer.to_str())
    assert whole.pieces[5].text == names[5].encode()


def test_a_size_without_a_place_for_a_word_is_refused(store: FeatureStore) -> None:
    with pytest.raises(UserError, match="words:5: leaves no room .* give 6 or more.*words$"):
        student_tokenizer("words:5", store)


def test_a_student_of_words_starts_with_their_vectors(store: FeatureStore, tmp_path: Path) -> None:
    tokenizer: Any = student_tokenizer("words", store)
    known = tokenizer.convert_ids_to_tokens([5, 9])
    vectors = tmp_path / "v.txt"
    vectors.write_text("".join(f"{word} 1 2 3\n" for word in known), "utf-8")
    words = ("--store", store.path, "--vocab", "words", "--student", "bilstm:3,4", "--steps", 1,
             "--device", "cpu", "--init", "random", "--word-vectors", vectors)  # fmt: skip
    said = ok(main, *words, "--out", tmp_path / "a")
    assert f"word embeddings of 2 of {len(tokenizer):,} pieces from v.txt" in said
