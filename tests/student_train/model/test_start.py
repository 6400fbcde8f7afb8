"""The initial weights of a student."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, ByT5Tokenizer

from teachonce.align import VocabularyMap
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data import vocabularies
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.model_folder import ModelFolder
from teachonce.student_train.model.start import embedding_means, initialise, split_means
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.model.teacher_layers import assigned_layers, cut_layers, layer_count
from teachonce.student_train.plan.checks import checked_plan
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Stores, Teachers
from tests.making.sentence_folders import changed


def vocabulary_map(store: FeatureStore, tokenizer: Any) -> VocabularyMap:
    theirs = store.teacher_file("tokenizer.json").decode()
    return vocabularies.vocabulary_map(theirs, tokenizer.backend_tokenizer.to_str())


Start = Callable[..., tuple[Any, list[str], VocabularyMap]]


@pytest.fixture(scope="module")
def started(store: FeatureStore) -> Start:
    tokenizer = student_tokenizer("400", store)
    found = vocabulary_map(store, tokenizer)

    def start(how: str, size: str = "bert:16x2x2") -> tuple[Any, list[str], VocabularyMap]:
        torch.manual_seed(0)
        student: Any = make_student(size, tokenizer, 64)
        return student, initialise(student, how, store, found), found

    return start


def start_of(
    store: FeatureStore, how: str, size: str, vocab: str = "teacher"
) -> tuple[Any, list[str]]:
    tokenizer = student_tokenizer(vocab, store)
    student: Any = make_student(size, tokenizer, 64)
    return student, initialise(student, how, store, vocabulary_map(store, tokenizer))


def test_a_piece_is_the_mean_of_the_teacher_rows_whose_split_holds_it(
    started: Start, store: FeatureStore
) -> None:
    _, _, found = started("random")
    teacher = np.asarray(store.teacher_weights()["embeddings.word_embeddings.weight"], np.float32)
    rows, known = embedding_means(teacher, found, 400)
    assert known.mean() > 0.5
    for piece in np.flatnonzero(known)[::37]:
        known_rows = [t for t in range(len(teacher)) if not found.unknown[t]]
        owners = [t for t in known_rows if piece in found.split(t)]
        times = [(found.split(t) == piece).sum() for t in owners]
        mean = np.average(teacher[owners], axis=0, weights=times)
        np.testing.assert_allclose(rows[piece], mean, atol=1e-5)


def test_a_decoder_starts_from_the_centred_means_of_the_pieces_that_spell_its_own(
    tiny_store: Stores,
) -> None:
    store = open_store(tiny_store("gpt2", 20, attention="none"))
    tokenizer = student_tokenizer("400", store, family="gpt-2")
    found = vocabulary_map(store, tokenizer)
    (name,) = (name for name in store.teacher_weights() if name.endswith("wte.weight"))
    teacher = np.asarray(store.teacher_weights()[name], np.float32)
    rows, valid = split_means(teacher, found, len(tokenizer))
    pieces = [each.decode("latin-1") for each in found.teacher_bytes.written()]
    longest_first = sorted(range(len(pieces)), key=lambda i: -len(pieces[i]))

    def spelled(text: str) -> list[int]:
        first = next((i for i in longest_first if pieces[i] and text.startswith(pieces[i])), None)
        return [] if first is None else [first, *spelled(text[len(pieces[first]) :])]

    own = [each.decode("latin-1") for each in found.student_bytes.written()]
    assert [bool(text) for text in own] == valid.tolist() and valid.sum() > 390
    for number in np.flatnonzero(valid):
        np.testing.assert_allclose(rows[number], teacher[spelled(own[number])].mean(0), atol=1e-6)
    torch.manual_seed(0)
    # As wide as the teacher: the projection on all principal directions keeps the angles.
    student: Any = make_student(f"llama:{teacher.shape[1]}x1x2", tokenizer, 64)
    deviation = float(student.get_input_embeddings().weight.detach().std())
    (line,) = initialise(student, "vocab", store, found)
    assert line == f"word embeddings of {valid.sum()} of 400 pieces from their splits"
    started = student.get_input_embeddings().weight.detach().numpy()[valid]
    centred = rows[valid] - rows[valid].mean(0)
    scale = deviation / started.std()
    assert scale == pytest.approx(1, rel=0.01) and np.abs(started.mean(0)).max() < 1e-6
    products = centred @ centred.T * float(started.var() / centred.var())
    np.testing.assert_allclose(started @ started.T, products, atol=1e-3 * products.max())


def test_cut_start_takes_leading_blocks_of_averaged_layers(
    started: Start, store: FeatureStore
) -> None:
    student, said, found = started("teacher")
    weights = store.teacher_weights()
    name = "attention.self.query.weight"
    mean = np.mean(
        [np.asarray(weights[f"encoder.layer.{i}.{name}"], np.float32) for i in (0, 1)], axis=0
    )
    own = student.bert.encoder.layer[0].get_parameter(name).detach().numpy()
    np.testing.assert_allclose(own, mean[:16, :16], atol=1e-6)
    positions = np.asarray(weights["embeddings.position_embeddings.weight"], np.float32)
    own = student.bert.embeddings.position_embeddings.weight.detach()
    np.testing.assert_allclose(own, positions[:64, :16], atol=1e-6)
    assert "1+2, 3+4 of 4" in said[-1]


def test_chosen_layers(started: Start, store: FeatureStore) -> None:
    student, _, _ = started("layers:2,4")
    name = "attention.output.dense.weight"
    whole = np.asarray(store.teacher_weights()[f"encoder.layer.3.{name}"], np.float32)
    wanted = whole[:16, :16]
    own = student.bert.encoder.layer[1].get_parameter(name).detach().numpy()
    np.testing.assert_allclose(own, wanted, atol=1e-6)


@pytest.fixture(scope="module")
def other_model(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with the store's tokenizer, the shape of its teacher, and other weights."""
    folder = tmp_path_factory.mktemp("models") / "grown"
    shutil.copytree(tiny_teacher("bert"), folder)
    model: Any = AutoModelForMaskedLM.from_pretrained(folder)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def test_layers_embeddings_and_head_of_another_model(
    started: Start, store: FeatureStore, other_model: Path
) -> None:
    student, said, found = started(f"layers:2,4@{other_model}", "bert:32x2x4")
    theirs: Any = AutoModelForMaskedLM.from_pretrained(other_model)
    for own, number in ((0, 1), (1, 3)):
        layer = dict(theirs.bert.encoder.layer[number].named_parameters())
        for name, value in student.bert.encoder.layer[own].named_parameters():
            block = tuple(map(slice, layer[name].shape))  # the student's feed-forward is wider
            assert torch.equal(value[block], layer[name]), name
    positions = theirs.bert.embeddings.position_embeddings.weight[:64]
    assert torch.equal(student.bert.embeddings.position_embeddings.weight, positions)
    rows, known = embedding_means(
        theirs.bert.embeddings.word_embeddings.weight.detach().numpy(), found, 400
    )
    words = student.bert.embeddings.word_embeddings.weight.detach().numpy()
    np.testing.assert_allclose(words[known], rows[known], atol=1e-6)
    dense = theirs.cls.predictions.transform.dense.weight
    assert torch.equal(student.cls.predictions.transform.dense.weight, dense)
    assert "2, 4 of 4" in said[1] and said[2] == "masked-LM head"
    assert said[3].startswith("all of grown, weights ") and str(other_model.parent) not in said[3]


def test_a_model_whose_layers_do_not_fit_is_refused_in_a_line(
    started: Start, store: FeatureStore, other_model: Path, tiny_teacher: Teachers
) -> None:
    for size, chosen, line in (
        ("bert:16x2x2", "1,2", "size of .*grown is 32, but the student's is 16, .* --student"),
        ("bert:32x2x2", "1,2", "the number of heads of .*grown is 4, but the student's is 2"),
        ("bert:32x2x4", "1", "expected 2 numbers"),
        ("modernbert:32x2x4", "1,2", "layers cannot be copied: the teacher's layers"),
    ):
        with pytest.raises(UserError, match=line):
            started(f"layers:{chosen}@{other_model}", size)
    init = f"layers:1,2@{tiny_teacher('roberta')}"
    options = TrainOptions(store=store.path, student="bert:32x2x4", init=init)
    with pytest.raises(UserError, match="the .* pieces of its model differ .* the same vocabulary"):
        checked_plan(options.resolved(), store)
    with pytest.raises(UserError, match="teacher:1@x: expected auto"):
        TrainOptions(store=store.path, init="teacher:1@x")


def test_what_layers_alone_do_not_carry_is_said(
    started: Start, other_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(other_model, tmp_path / "m"))
    changed(folder, "config.json", hidden_act="relu", is_decoder=True)
    _, said, _ = started(f"layers:2,4@{folder}", "bert:32x2x4")
    assert said[1].endswith(
        "cut to 32 (activation gelu, and the teacher's is 'relu'; bidirectional, and the teacher"
        " reads from left to right)"
    )
    changed(folder, "config.json", position_embedding_type="relative_key")
    with pytest.raises(UserError, match="position_embedding_type is 'relative_key'"):
        started(f"layers:2,4@{folder}", "bert:32x2x4")


def test_a_student_with_the_teachers_hidden_size_has_its_head(
    started: Start, store: FeatureStore, tiny_teacher: Teachers
) -> None:
    student, said, found = started("layers:2,4", "bert:32x2x4")
    teacher = AutoModelForMaskedLM.from_pretrained(tiny_teacher("bert"))
    theirs = dict(teacher.cls.predictions.transform.named_parameters())
    for name, own in student.cls.predictions.transform.named_parameters():
        np.testing.assert_allclose(own.detach(), theirs[name].detach(), atol=1e-3)
    bias = teacher.cls.predictions.bias.detach().numpy()
    means, known = embedding_means(bias[:, None], found, 400)
    own = student.cls.predictions.bias.detach()
    np.testing.assert_allclose(own[known], means[known, 0], atol=1e-3)
    assert said[-1] == "masked-LM head"
    narrow, said, _ = started("layers:2,4")
    assert not narrow.cls.predictions.bias.any() and "head" not in said[-1]


@pytest.mark.parametrize(
    ("kind", "dense"), [("distilbert", "vocab_transform"), ("roberta", "lm_head.dense")]
)
def test_heads_of_other_families(
    kind: str, dense: str, tiny_teacher: Teachers, tiny_store: Stores
) -> None:
    student, said = start_of(open_store(tiny_store(kind)), "teacher", "bert:32x2x4", "400")
    theirs = AutoModelForMaskedLM.from_pretrained(tiny_teacher(kind)).get_submodule(dense).weight
    own = student.cls.predictions.transform.dense.weight
    np.testing.assert_allclose(own.detach(), theirs.detach(), atol=1e-3)
    assert said[-1] == "masked-LM head"


def test_a_bert_of_all_layers_of_a_distilbert_reads_as_it_does(
    store: FeatureStore, tiny_teacher: Teachers
) -> None:
    """DistilBERT has no token types: a random row of them would be added to every token."""
    teacher, tokenizer = tiny_teacher("distilbert"), student_tokenizer("teacher", store)
    student, _ = start_of(store, f"layers:1,2,3,4@{teacher}", "bert:32x4x4")
    assert not student.bert.embeddings.token_type_embeddings.weight.any()
    batch = tokenizer(list(store.texts())[:4], padding=True, return_tensors="pt", max_length=64,
                      truncation=True)  # fmt: skip
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    models = student.bert, AutoModelForMaskedLM.from_pretrained(teacher).distilbert
    with torch.no_grad():
        own, theirs = (model(**given).last_hidden_state for model in models)
    cosines = torch.nn.functional.cosine_similarity(own, theirs, dim=-1)
    assert cosines[given["attention_mask"].bool()].min() > 0.999


def test_layers_of_an_electra_read_more_than_its_embeddings(
    started: Start, tiny_teacher: Teachers
) -> None:
    """A small ELECTRA projects its embeddings to the hidden size, unlike any BERT."""
    student, _, _ = started("random")
    before = [weight.clone() for weight in student.bert.encoder.parameters()]
    electra = ModelFolder(str(tiny_teacher("electra")), "--init teacher")
    why = "the teacher's embeddings are narrower than its layers"
    with torch.no_grad():
        assert cut_layers(student, "teacher", "", electra) == f"random layers: {why}"
        with pytest.raises(UserError, match=f"layers:1,3: layers cannot be copied: {why}"):
            cut_layers(student, "layers:1,3", "1,3", electra)
    assert all(map(torch.equal, before, student.bert.encoder.parameters()))


def test_weights_without_a_number_are_in_no_layer(started: Start, store: FeatureStore) -> None:
    weights = dict(store.teacher_weights().items())
    odd = ("encoder.layer.0", "encoder.layer.x.attention.self.query.weight")
    given: Any = SimpleNamespace(
        teacher_settings=store.teacher_settings,
        teacher_weights=lambda: weights | dict.fromkeys(odd, np.zeros(1, np.float16)),
    )
    student, _, _ = started("random")
    assert layer_count(student, store) == (4, "")
    count, why = layer_count(student, given)
    assert count == 0 and "other parameters than a bert's" in why


@pytest.mark.parametrize("missing", ["encoder.layer.2.", "encoder.layer.2.output.dense.weight"])
def test_a_teacher_with_a_missing_layer_is_not_copied(
    missing: str, started: Start, store: FeatureStore
) -> None:
    """The student's layer would be random."""
    weights = {n: v for n, v in store.teacher_weights().items() if not n.startswith(missing)}
    given: Any = SimpleNamespace(
        teacher_settings=store.teacher_settings, teacher_weights=lambda: weights
    )
    student, _, _ = started("random")
    why = "the teacher's weights lack encoder.layer.2."
    with torch.no_grad():
        assert cut_layers(student, "teacher", "", given).startswith(f"random layers: {why}")
        with pytest.raises(UserError, match=f"layers:1,3: layers cannot be copied: {why}"):
            cut_layers(student, "layers:1,3", "1,3", given)


def test_a_model_without_a_fast_tokenizer_is_refused(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    shutil.copytree(tiny_teacher("bert"), tmp_path / "slow")
    for file in (tmp_path / "slow").glob("*token*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    with pytest.raises(UserError, match="slow: ByT5Tokenizer is not a fast tokenizer, .* give a"):
        ModelFolder(str(tmp_path / "slow"), "--init layers:1@slow")


def test_svd_of_another_teacher_with_the_same_pieces(
    started: Start, store: FeatureStore, tiny_store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the teacher before its fine-tuning."""
    other, foreign = (tiny_store(kind) for kind in ("distilbert", "xlmr"))
    student, (said,), found = started(f"svd:{other}")
    assert open_store(other).manifest.content()[:12] in said and str(other) in said
    expected, own = started("random")[0], started("svd")[0]
    initialise(expected, "svd", open_store(other), found)
    words, same, others = (each.get_input_embeddings().weight for each in (student, expected, own))
    assert torch.equal(words, same) and not torch.equal(words, others)
    closed = list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "close", lambda store: closed.append(store.path))
        with pytest.raises(UserError, match=r"svd:.*differ from the .* the same vocabulary"):
            started(f"svd:{foreign}")
    assert [*map(str, closed)] == [str(foreign)]
    with pytest.raises(UserError, match="same vocabulary"):
        checked_plan(TrainOptions(store=store.path, init=f"svd:{foreign}").resolved(), store)
    with pytest.raises(UserError, match="svd:: expected auto"):
        TrainOptions(store=store.path, init="svd:")


def test_svd_keeps_the_angles_between_pieces(started: Start, store: FeatureStore) -> None:
    student, _, found = started("svd", "bert:32x1x2")  # the teacher's hidden size: nothing is lost
    teacher = np.asarray(store.teacher_weights()["embeddings.word_embeddings.weight"], np.float32)
    rows, known = embedding_means(teacher, found, 400)
    known &= np.linalg.norm(rows, axis=1) > 0  # the row of the padding is zero
    own = student.bert.embeddings.word_embeddings.weight.detach().numpy()[known]
    cosines = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (rows[known], own)]
    np.testing.assert_allclose(cosines[0] @ cosines[0].T, cosines[1] @ cosines[1].T, atol=1e-4)


def test_svd_of_a_bilstm_reaches_the_width_of_its_embeddings(started: Start) -> None:
    before = started("random", "bilstm:12,20")[0].get_input_embeddings().weight
    for how in ("auto", "svd"):
        student, (said,), _ = started(how, "bilstm:12,20")
        changed = (student.get_input_embeddings().weight != before).any(dim=1)
        known = changed.sum() + 1  # the padding's is zero before and after
        assert known > 200
        assert said == f"word embeddings from {known} of 400 pieces (SVD to 12)"


def test_random_changes_nothing(started: Start) -> None:
    torch.manual_seed(0)
    student, said, _ = started("random")
    assert said == ["random weights"]
    words = student.bert.embeddings.word_embeddings.weight
    assert words.std().item() == pytest.approx(0.02, rel=0.1)


def test_layer_groups() -> None:
    assert assigned_layers("", 6, 3) == [[1, 2], [3, 4], [5, 6]]
    assert assigned_layers("", 4, 3) == [[1], [2, 3], [4]]
    assert assigned_layers("1,5,12", 12, 3) == [[1], [5], [12]]
    for chosen, teacher, student in [("1,2", 4, 3), ("1,9", 4, 2), ("a,b", 4, 2), ("", 2, 3)]:
        with pytest.raises(UserError, match="--init"):
            assigned_layers(chosen, teacher, student)


def test_a_modernbert_starts_from_embeddings_alone_of_a_bert(
    started: Start, store: FeatureStore
) -> None:
    student, said, found = started("svd", "modernbert:16x2x2")
    other, _, _ = started("svd", "bert:16x2x2")
    teacher = np.asarray(store.teacher_weights()["embeddings.word_embeddings.weight"], np.float32)
    known = torch.from_numpy(embedding_means(teacher, found, 400)[1])
    known[0] = False  # the padding's is zero
    own, of_bert = (s.get_input_embeddings().weight.detach()[known] for s in (student, other))
    assert len(said) == 1 and "SVD to 16" in said[0]
    assert torch.nn.functional.cosine_similarity(own, of_bert).min() > 0.999
    advice = "choose a --student of this model's kind and head size, such as bert:HxLxA"
    with pytest.raises(UserError, match=f"layers:1,2: layers cannot be copied: the .*; {advice}"):
        started("layers:1,2", "modernbert:16x2x2")
    with pytest.raises(UserError, match="--init teacher: a bilstm student cannot copy a teacher's"):
        started("teacher", "bilstm:16,8")
    _, said, _ = started("teacher", "modernbert:16x2x2")
    why = "the teacher's layers have other parameters than a modernbert's"
    assert said[1] == f"random layers: {why}"


@pytest.fixture(scope="module")
def trained(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a ModernBERT whose norms and biases differ from a new model's."""
    folder = shutil.copytree(tiny_teacher("modernbert"), tmp_path_factory.mktemp("m") / "teacher")
    teacher = AutoModelForMaskedLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in teacher.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    teacher.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def modern(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("modern")
    return open_store(dumped(trained, write_corpus(folder / "a.txt"), folder / "a.zarr"))


def test_a_modernbert_is_cut_out_of_a_modernbert(modern: FeatureStore) -> None:
    student, said = start_of(modern, "teacher", "modernbert:16x2x2")
    assert "1+2, 3+4 of 4, cut to 16" in said[-1]
    weights = modern.teacher_weights()

    def mean(name: str) -> Array:
        both = [np.asarray(weights[f"layers.{n}.{name}"], np.float32) for n in (0, 1)]
        return np.asarray(np.mean(both, 0))

    layer = student.model.layers[0]
    for own, theirs in (  # 48 rows of 96, of queries, keys and values; 64 of 128, of two halves
        (layer.attn.Wqkv.weight, mean("attn.Wqkv.weight").reshape(3, 32, 32)[:, :16, :16]),
        (layer.mlp.Wi.weight, mean("mlp.Wi.weight").reshape(2, 64, 32)[:, :32, :16]),
        (layer.mlp.Wo.weight, mean("mlp.Wo.weight")[:16, :32]),
    ):
        np.testing.assert_allclose(own.detach(), theirs.reshape(own.shape), atol=1e-6)


def test_a_modernbert_of_all_layers_says_what_its_teacher_says_with_full_attention(
    modern: FeatureStore, trained: Path
) -> None:
    student, said = start_of(modern, "layers:1,2,3,4", "modernbert:32x4x4")
    teacher = AutoModelForMaskedLM.from_pretrained(trained)
    teacher.config.layer_types[:] = student.config.layer_types
    for own, layer in zip(student.model.layers, teacher.model.layers, strict=True):
        layer.attention_type, layer.attn.sliding_window = own.attention_type, None
    ids = torch.tensor([[1, 17, 30, 44, 9, 2]])
    with torch.no_grad():
        np.testing.assert_allclose(student(ids).logits, teacher(ids).logits, atol=2e-2)
    assert said[-1] == "masked-LM head"


@pytest.mark.parametrize("size", ["modernbert:16x2x2", "modernbert:32x2x4"])
def test_a_student_starts_from_the_first_layer_of_each_group(
    modern: FeatureStore, size: str
) -> None:
    student, said = start_of(modern, "auto", size)
    expected, _ = start_of(modern, "layers:1,3", size)
    assert "layers 1, 3 of 4" in said[1]
    for own, theirs in zip(student.model.layers, expected.model.layers, strict=True):
        assert all(map(torch.equal, own.parameters(), theirs.parameters()))


def test_a_bert_takes_the_words_alone_of_a_modernbert(modern: FeatureStore) -> None:
    _, said = start_of(modern, "auto", "bert:16x2x2")
    assert len(said) == 1 and "SVD to 16" in said[0]
    _, said = start_of(modern, "teacher", "bert:16x2x2")
    assert said[1] == "random layers: the teacher's layers have other parameters than a bert's"


def test_rotary_heads_of_another_width_are_not_cut(modern: FeatureStore) -> None:
    _, said = start_of(modern, "auto", "modernbert:16x2x4")
    assert len(said) == 1 and "SVD to 16" in said[0]
    with pytest.raises(UserError, match="teacher's heads have size 8, the student's 4"):
        start_of(modern, "layers:1,2", "modernbert:16x2x4")


def test_what_a_layer_has_beyond_the_teachers_is_silent(store: FeatureStore) -> None:
    """The student has other proportions, as published ModernBERTs do."""
    student, _ = start_of(store, "teacher", "bert:32x4x4")
    theirs = store.teacher_weights()["encoder.layer.0.output.dense.weight"].shape[1]
    own = student.bert.encoder.layer[0].output.dense.weight
    assert own.shape[1] > theirs
    assert not own[:, theirs:].any() and own[:, :theirs].any()
