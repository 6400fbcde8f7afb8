"""Initial weights of a student: from the teacher's embeddings and layers in the store, or
random."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from teachonce.align import VocabularyMap
from teachonce.store import FeatureStore
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.student_train.data.vocabularies import vocabulary_map
from teachonce.student_train.model.any_student import head_of, kind_of
from teachonce.student_train.model.decoder_cut import PARTS, cut_decoder
from teachonce.student_train.model.model_folder import OUTPUT, ModelFolder, WeightSource
from teachonce.student_train.model.start_checks import check_same_pieces, other_teacher
from teachonce.student_train.model.teacher_layers import (
    assigned_layers,
    cut_layers,
    layer_count,
    take_transform,
)
from teachonce.student_train.settings.option_values import FOLDER
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

# The output bias of a masked-LM head: stores and `ModelFolder` give it this name in all families.
BIAS = "decoder.bias"
RANDOM = "random weights"
# The names of BERT and its relatives, ModernBERT, GPT-2, Llama and Qwen, GPT-NeoX, Mamba and RWKV,
# and GPT.
WORDS = frozenset({
    "word_embeddings", "tok_embeddings", "wte", "embed_tokens", "embed_in", "embeddings",
    "tokens_embed",
})  # fmt: skip


@torch.no_grad()
def initialise(
    student: PreTrainedModel, how: str, store: FeatureStore, vocabulary: VocabularyMap
) -> list[str]:
    """Set the student's weights by `--init`. Return lines that describe what was copied.

    - `vocab`: the embedding of each piece is the mean of the teacher's rows of its split into the
      teacher's pieces, centred and projected on the principal directions.
    - `svd`: word embeddings, averaged over teacher pieces and projected on their principal
      directions to the student's hidden size (Mukherjee & Awadallah 2020, section 4.1). Then they
      are scaled to the standard deviation of the random start (our choice).
    - `svd:STORE`: as `svd`, from the teacher of another store with the same vocabulary, such as the
      pre-trained model of a fine-tuned teacher.
    - `teacher`: the averages of `svd`, cut to the hidden size instead, and layers, averaged in
      consecutive groups and cut. If the hidden sizes are equal, the masked-LM head is copied as
      well. A BERT takes BERT-like teachers, a ModernBERT takes ModernBERTs with the same head size.
      Every layer of a ModernBERT student has global attention and one rotary base, whatever the
      teacher's have.
    - `layers:1,3,5`: as `teacher`, but with one teacher layer for each student layer.
    - `layers:1,3,5@DIR`: as `layers`, from the model in a folder. It must have the student's hidden
      size and the pieces of the store's teacher.
    - `folder:DIR`: all weights of the decoder in DIR, which has the student's shape and vocabulary.
      Only this student may have output embeddings of its own.
    - `teacher` and `layers` of a decoder: single layers, evenly spaced for `teacher`, with the
      channels, heads and feed-forward units of the largest activations (`decoder_cut.py`), and the
      rows of `vocab` in these channels. The teacher is of the student's kind. Its word embeddings
      become the student's output embeddings, too, even if the teacher has other ones.
    - `mixed-vocab`: the word embeddings of a mixed-vocabulary training in the store (Zhao et al.
      2021); other weights are random.
    - `random`: random weights.
    - `auto`: `vocab` for a decoder (`resolved_start` has chosen `teacher` where it fits); else
      `layers` with the first layer of each group, or `teacher` for a task or text vectors; `svd` if
      layers cannot be copied, and `random` if the store has no embeddings.

    Kolesnikova et al. 2022, section 3; layers chosen as in DistilBERT, Sanh et al. 2019, section 3.

    Raises UserError if the store has no weights or embeddings, or the layers do not exist or do not
    fit.
    """
    if how == "mixed-vocab":
        return [_take_stored(student, MixedVocab.of(store), store, vocabulary)]
    if (other := other_teacher(how, store)) is not None:
        with closing(other):
            # `vocabulary`, of this store's teacher, fits the other: `other_teacher` has compared
            # their pieces.
            (copied,) = initialise(student, "svd", other, vocabulary)
            return [f"{copied}, from {other.path}, content {other.manifest.content()[:12]}"]
    if how == "auto":
        how = _best_start(student, store)
    if how == "random":
        return [RANDOM]
    if how.startswith(FOLDER):
        return [_take_all(student, ModelFolder(how.removeprefix(FOLDER), f"--init {how}", True))]
    if how == "vocab":
        return [_take_split(student, _teacher_rows(how, store), vocabulary)]
    if how == "svd":
        return [_take_words(student, how, store, vocabulary)]
    decoder = PARTS.get(student.config.model_type)
    if kind_of(student).parts is None and decoder is None:
        raise UserError(
            f"--init {how}: a {student.config.model_type} student cannot copy a teacher's layers;"
            " use --init svd"
        )
    folder = other_model(how, store, head_of(student) == "causal")
    source: WeightSource = folder or store
    layer_list = how.partition(":")[2].partition("@")[0]  # of layers:1,3@DIR
    if decoder is not None:
        rows = _teacher_rows(how, source)
        layers, channels = cut_decoder(student, decoder, layer_list, source, store)
        lines = [_take_split(student, rows, vocabulary, channels), layers]
    else:
        lines = [_take_words(student, how, source, vocabulary)]
        lines += [cut_layers(student, how, layer_list, source)]
        lines += _take_head(student, source, vocabulary)
    if folder:
        lines += [f"all of {Path(folder.path).name}, weights {folder.content()[:12]}"]
    return lines


def _take_all(student: PreTrainedModel, folder: ModelFolder) -> str:
    """Copy all weights of a decoder of the same sizes. Return a line for the model card.

    Raises UserError for weights of another shape, such as fewer rows than the student has pieces,
    and for output embeddings that contradict `tie_word_embeddings`.
    """
    weights, embeddings = folder.teacher_weights(), student.get_input_embeddings().weight
    if (tied := student.config.tie_word_embeddings) == (OUTPUT in weights):
        raise UserError(
            f"{folder.path}: tie_word_embeddings in its config.json is {str(tied).lower()}, but its"
            f" weights have {('an' if tied else 'no')} {OUTPUT} of their own; correct it to"
            f" {str(not tied).lower()}"
        )
    for name, parameter in student.named_parameters():
        name = name.removeprefix(f"{student.base_model_prefix}.")
        values = weights[name]  # the loader has refused a folder without it
        if parameter is embeddings or name == OUTPUT:
            values = values[: len(parameter)]  # rows behind the vocabulary are padding
        if values.shape != parameter.shape:
            raise UserError(
                f"{folder.path}: {name} has shape {list(values.shape)}, expected"
                f" {list(parameter.shape)}; save the model there again, with its tokenizer"
            )
        parameter.copy_(torch.from_numpy(values))
    return f"all weights of {Path(folder.path).name}, {folder.content()[:12]}"


def _take_words(
    student: PreTrainedModel, how: str, store: WeightSource, vocabulary: VocabularyMap
) -> str:
    """Set the word embeddings to averages of the teacher's (`embedding_means`), reduced to the
    student's hidden size.

    Returns a line for the model card. Raises UserError if the store has no word embeddings.
    """
    rows, valid = embedding_means(_teacher_rows(how, store), vocabulary, student.config.vocab_size)
    embeddings: torch.Tensor = student.get_input_embeddings().weight  # type: ignore[assignment]
    width, svd = embeddings.shape[1], how == "svd"
    narrow = torch.from_numpy(_to_width(rows, valid, width, svd)[valid])
    if svd:
        # The layers are random, so valid rows get the scale of the random ones.
        narrow *= embeddings.std() / narrow.std()
    embeddings[torch.from_numpy(valid)] = narrow
    way = "SVD" if svd else "cut"
    return f"word embeddings from {int(valid.sum()):,} of {len(valid):,} pieces ({way} to {width})"


def _teacher_rows(how: str, store: WeightSource) -> Array:
    """Read the teacher's word embeddings, float32 [V,D]. Raises UserError if the store has none."""
    weights = store.teacher_weights()
    name = _word_embeddings(weights)
    if name is None:
        raise UserError(
            f"--init {how}: {store.path} has no word embeddings of the teacher (dumped with"
            " --no-weights?); dump with --weights, or use --init random"
        )
    return np.asarray(weights[name], np.float32)


def _take_split(
    student: PreTrainedModel,
    teacher: Array,
    vocabulary: VocabularyMap,
    channels: Array | None = None,
) -> str:
    """Set the embedding of each student piece from the teacher's rows [Vt,D] of the pieces that it
    splits into.

    channels: the channels that copied layers read; without them the rows are centred, projected on
        their principal directions and scaled to random ones.

    Returns a line for the model card.
    """
    rows, valid = split_means(teacher, vocabulary, student.config.vocab_size)
    embeddings: torch.Tensor = student.get_input_embeddings().weight  # type: ignore[assignment]
    if channels is None:
        rows[valid] -= rows[valid].mean(axis=0)
        narrow = torch.from_numpy(_to_width(rows, valid, embeddings.shape[1], svd=True)[valid])
        narrow *= embeddings.std() / narrow.std()
    else:
        # The copied layers read exactly these channels, so rows are taken as they are.
        teacher_ids = np.flatnonzero(vocabulary.match[: len(teacher)] >= 0)
        student_ids = vocabulary.match[teacher_ids]  # with special tokens, which have no bytes
        rows[student_ids], valid[student_ids] = teacher[teacher_ids], True
        narrow = torch.from_numpy(rows[np.ix_(valid, channels)])
    embeddings[torch.from_numpy(valid)] = narrow
    return f"word embeddings of {int(valid.sum()):,} of {len(valid):,} pieces from their splits"


def split_means(teacher: Array, vocabulary: VocabularyMap, size: int) -> tuple[Array, Array]:
    """Split each student piece into teacher pieces, the longest first from the left, and average
    their rows of `teacher` [Vt,D]. Return means [Vs,D], and bool [Vs]: which student pieces can be
    split."""
    student_bytes, teacher_bytes = vocabulary.student_bytes, vocabulary.teacher_bytes
    table = {raw: i for i, raw in enumerate(teacher_bytes.written()) if i < len(teacher)}
    longest = max(map(len, table), default=0)
    means = np.zeros((size, teacher.shape[1]), np.float32)
    valid = np.zeros(size, bool)
    for number, raw in enumerate(student_bytes.written()[:size]):
        rows, begin = list[int](), 0
        while begin < len(raw):
            ends = range(min(len(raw), begin + longest), begin, -1)
            end = next((end for end in ends if raw[begin:end] in table), 0)
            if not end:
                break
            rows.append(table[raw[begin:end]])
            begin = end
        if raw and begin == len(raw):
            means[number], valid[number] = teacher[rows].mean(axis=0), True
    return means, valid


def _take_head(
    student: PreTrainedModel, store: WeightSource, vocabulary: VocabularyMap
) -> list[str]:
    """Copy the teacher's masked-LM head if it has the same size as the student's. Return its line
    for the model card, or []."""
    weights, parts = store.teacher_weights(), kind_of(student).parts
    assert parts is not None  # `initialise` has refused
    if BIAS not in weights or not take_transform(student, weights):
        return []
    bias = np.asarray(weights[BIAS], np.float32)[:, None]
    means, valid = embedding_means(bias, vocabulary, student.config.vocab_size)
    student_bias = student.get_parameter(parts.bias)
    student_bias[torch.from_numpy(valid)] = torch.from_numpy(means[valid, 0])
    return ["masked-LM head"]


def _take_stored(
    student: PreTrainedModel, stored: MixedVocab, store: FeatureStore, vocabulary: VocabularyMap
) -> str:
    """Copy the word embeddings of a mixed-vocabulary training from the store. Return their line for
    the model card.

    Raises UserError if hidden size or vocabulary differ.
    """
    embeddings: torch.Tensor = student.get_input_embeddings().weight  # type: ignore[assignment]
    pieces, width = stored.embeddings.shape
    if embeddings.shape[1] != width:
        raise UserError(
            f"--init mixed-vocab: the stored embeddings have hidden size {width} and the student's"
            f" {embeddings.shape[1]}; choose --student {width}xLxA"
        )
    teacher = store.teacher_file("tokenizer.json").decode()
    stored_map = vocabulary_map(teacher, stored.tokenizer.decode())
    same = np.array_equal(stored_map.split_ids, vocabulary.split_ids)
    same = same and np.array_equal(stored_map.split_start, vocabulary.split_start)
    if len(embeddings) != pieces or not same:
        raise UserError(
            "--init mixed-vocab: the student's vocabulary is not the one stored with the"
            " embeddings; use --vocab mixed-vocab"
        )
    embeddings.copy_(torch.from_numpy(stored.embeddings))
    return f"word embeddings of all {pieces} pieces from mixed-vocabulary training"


def other_model(how: str, store: FeatureStore, causal: bool) -> ModelFolder | None:
    """Open the folder of `--init layers:...@DIR`; return None for any other `--init`.

    causal: whether its model is a decoder. Raises UserError if there is no such model, or if it has
        other pieces than the store's teacher.
    """
    kind, _, rest = how.partition(":")
    _, at, path = rest.partition("@")
    if kind != "layers" or not at:
        return None
    model = ModelFolder(path, f"--init {how}", causal)
    check_same_pieces(how, store, model.tokenizer_json, "model", "a model")
    return model


def _word_embeddings(weights: Mapping[str, Array]) -> str | None:
    ends = ((name, name.removesuffix(".weight").rpartition(".")[2]) for name in weights)
    return next((name for name, end in ends if end in WORDS), None)


def _best_start(student: PreTrainedModel, store: FeatureStore) -> str:
    """Resolve `--init auto`."""
    # Measured (RESULTS, "Where a student starts"): single layers are a better start than averaged
    # ones for a masked LM, but not for text vectors. For tasks they were not compared.
    if _word_embeddings(store.teacher_weights()) is None:
        return "random"
    if head_of(student) == "causal":
        return "vocab"
    layers, _ = layer_count(student, store)
    count = student.config.num_hidden_layers
    if not 0 < count <= layers:
        return "svd"
    if store.features.embedding is not None or store.features.task is not None:
        # Vectors of texts: a held-out loss of 3.94 from means of layers, 4.17 from single layers.
        return "teacher"
    # Masked LM: 4.57 nats a token from the first layers, 5.07 from means (BERT 128x2x2).
    return f"layers:{','.join(str(group[0]) for group in assigned_layers('', layers, count))}"


def embedding_means(teacher: Array, vocabulary: VocabularyMap, size: int) -> tuple[Array, Array]:
    """Compute an embedding of each student piece: the mean of the rows of `teacher` [V,D] whose
    pieces contain it, when `vocabulary` splits them into student pieces.

    Returns means [Vs,D], and bool [Vs]: whether any teacher piece contains the student piece.
    size: Vs, the number of student pieces.
    """
    pieces = np.asarray(vocabulary.split_ids, np.int64)
    owner = np.repeat(np.arange(len(vocabulary.split_start) - 1), np.diff(vocabulary.split_start))
    usable = (owner < len(teacher)) & ~vocabulary.unknown[owner]
    pieces, owner = pieces[usable], owner[usable]
    sums = torch.zeros(size, teacher.shape[1])
    sums.index_add_(0, torch.from_numpy(pieces), torch.from_numpy(teacher[owner]))
    counts = np.bincount(pieces, minlength=size)
    return sums.numpy() / np.maximum(counts, 1)[:, None].astype(np.float32), counts > 0


def _to_width(rows: Array, valid: Array, width: int, svd: bool) -> Array:
    """Return rows [V,D] with `width` channels: with `svd`, projected on the principal directions of
    the `valid` rows; else the first channels. If D is smaller, zeros are appended first."""
    if width > rows.shape[1]:
        rows = np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
    if not svd:
        return rows[:, :width]
    # The Gram matrix has D eigenvectors, even if fewer rows are valid.
    _, directions = np.linalg.eigh(rows[valid].T @ rows[valid])
    narrowed: Array = rows @ directions[:, ::-1][:, :width]
    return narrowed
