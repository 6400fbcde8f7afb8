"""Where a student starts: from the teacher's embeddings and layers, as the store keeps them, or at
random."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from align import Vocabulary, VocabularyMap
from store import FeatureStore, open_store
from store.errors import StoreError, UserError
from store.mixed_vocab import MixedVocab
from store.positions import first_position

ANOTHER = "svd:"  # and the path of a store
WORDS = tuple(
    f"{name}.weight" for name in ("word_embeddings", "tok_embeddings", "wte", "embed_tokens")
)
# Names of other families' parameters as BERT has them; RoBERTa, XLM-R and ELECTRA have BERT's own.
DISTILBERT = {
    "transformer.layer.": "encoder.layer.",
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}
BERT = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


def initialise(
    student: PreTrainedModel, how: str, store: FeatureStore, vocabulary: VocabularyMap
) -> list[str]:
    """Set the student's weights as `--init` asks and say, in a line each, what was taken from
    where.

    `svd`: word embeddings averaged over teacher pieces, then projected on their main directions to
    the student's width (Mukherjee & Awadallah 2020). `svd:STORE`: the same from the teacher of
    another store with the same vocabulary, such as the one that was fine-tuned into this.
    `teacher`: the same averages cut to the width, and layers averaged in consecutive groups and
    cut. `layers:1,3,5`: the same, each student layer from one teacher layer. `mixed-vocab`: word
    embeddings as a mixed-vocabulary training left them in the store (Zhao et al. 2021), the rest at
    random. `random`: nothing. `auto`: teacher where its layers can be cut for the student, else
    svd, else random. (Kolesnikova et al. 2022, section 3; the choice of layers as in DistilBERT,
    Sanh et al. 2019, section 3.)

    Raises UserError if the store keeps no weights or embeddings, or those asked for do not exist or
    do not fit.
    """
    if how == "mixed-vocab":
        return [_take_stored(student, MixedVocab.of(store), store, vocabulary)]
    if (other := other_teacher(how, store)) is not None:
        with closing(other):
            (said,) = initialise(student, "svd", other, vocabulary)
            return [f"{said}, those of {other.path}, content {other.manifest.content()[:12]}"]
    weights = store.teacher_weights()
    if how == "auto":
        how = _best_start(student, weights)
    if how == "random":
        return ["random weights"]
    kind, colon, chosen = how.partition(":")
    if kind not in ("svd", "teacher", "layers") or bool(colon) != (kind == "layers"):
        raise UserError(
            f"--init {how}: expected auto, svd, svd:STORE, teacher, layers:I,J,..., mixed-vocab, or"
            " random"
        )
    if kind != "svd" and student.config.model_type != "bert":
        raise UserError(
            f"--init {how}: a {student.config.model_type} cannot be cut out of BERT's layers; use"
            " --init svd"
        )
    name = _word_embeddings(weights)
    if name is None:
        raise UserError(
            f"--init {how}: {store.path} keeps no word embeddings of the teacher (dumped with"
            " --no-weights?); dump with --weights, or use --init random"
        )
    rows, known = embedding_means(
        np.asarray(weights[name], np.float32), vocabulary, student.config.vocab_size
    )
    words: torch.Tensor = student.get_input_embeddings().weight  # type: ignore[assignment]
    width = words.shape[1]
    with torch.no_grad():
        narrow = torch.from_numpy(_to_width(rows, known, width, kind == "svd")[known])
        if kind == "svd":  # the rest is random: known and unknown pieces must enter it alike
            narrow *= words.std() / narrow.std()
        words[torch.from_numpy(known)] = narrow
        said = (
            f"word embeddings from {int(known.sum())} of {len(known)} pieces"
            f" ({'SVD' if kind == 'svd' else 'cut'} to {width})"
        )
        return [said] if kind == "svd" else [said, _cut_layers(student, how, chosen, store)]


def _take_stored(
    student: PreTrainedModel, stored: MixedVocab, store: FeatureStore, vocabulary: VocabularyMap
) -> str:
    """Set the word embeddings to the stored ones, row by row; says so."""
    words: torch.Tensor = student.get_input_embeddings().weight  # type: ignore[assignment]
    pieces, width = stored.embeddings.shape
    if words.shape[1] != width:
        raise UserError(
            f"--init mixed-vocab: the stored embeddings are {width} wide and the student's"
            f" {words.shape[1]}; choose --student {width}xLxA"
        )
    theirs = VocabularyMap.between(
        Vocabulary.from_tokenizer_json(store.teacher_file("tokenizer.json").decode()),
        Vocabulary.from_tokenizer_json(stored.tokenizer.decode()),
    )
    same = np.array_equal(theirs.split_ids, vocabulary.split_ids)
    same = same and np.array_equal(theirs.split_start, vocabulary.split_start)
    if len(words) != pieces or not same:
        raise UserError(
            "--init mixed-vocab: the stored embeddings are of the vocabulary stored beside them,"
            " and the student has another; use --vocab mixed-vocab"
        )
    with torch.no_grad():
        words.copy_(torch.from_numpy(stored.embeddings))
    return f"word embeddings of all {pieces} pieces from mixed-vocabulary training"


def other_teacher(how: str, store: FeatureStore) -> FeatureStore | None:
    """The store of another teacher with the pieces of this one, where `--init` names one.

    Raises UserError where there is no store, or its teacher has other pieces.
    """
    if not how.startswith(ANOTHER) or how == ANOTHER:
        return None
    try:
        other = open_store(how.removeprefix(ANOTHER))
    except StoreError as error:
        raise UserError(f"--init {how}: {error}") from error
    ours, theirs = (
        Vocabulary.from_tokenizer_json(each.teacher_file("tokenizer.json").decode()).tokens
        for each in (store, other)
    )
    if theirs != ours:
        raise UserError(
            f"--init {how}: its teacher has {len(theirs)} pieces, other ones than the"
            f" {len(ours)} of {store.path}; give a store of a teacher with the same vocabulary"
        )
    return other


def _word_embeddings(weights: Mapping[str, np.ndarray]) -> str | None:
    return next((name for name in weights if name.endswith(WORDS)), None)


def _layer_count(weights: Mapping[str, np.ndarray]) -> int:
    """The teacher's layers, if they are such as BERT's; else 0."""
    plain = {_bert_name(name) for name in weights}
    needed = (f"encoder.layer.0.{name}.{kind}" for name in BERT for kind in ("weight", "bias"))
    if not plain.issuperset(needed):
        return 0
    return 1 + max(int(n.split(".")[2]) for n in plain if n.startswith("encoder.layer."))


def _best_start(student: PreTrainedModel, weights: Mapping[str, np.ndarray]) -> str:
    if _word_embeddings(weights) is None:
        return "random"
    enough = student.config.num_hidden_layers <= _layer_count(weights)
    return "teacher" if student.config.model_type == "bert" and enough else "svd"


def _cut_layers(student: PreTrainedModel, how: str, chosen: str, store: FeatureStore) -> str:
    """Everything but the words; says what was taken."""
    weights, body = store.teacher_weights(), cast(Any, student.base_model)
    plain = {_bert_name(name): name for name in weights}
    first = first_position(json.loads(store.teacher_file("config.json")))
    _copy_around_words(body.embeddings, weights, plain, first)
    count, width = _layer_count(weights), student.config.hidden_size
    if not count:
        other = "the teacher's layers are not BERT's, so a student's cannot be cut out of them"
        if chosen:
            raise UserError(f"--init {how}: {other}; use --init teacher or svd")
        return f"layers at random: {other}"
    groups = layer_groups(chosen, count, student.config.num_hidden_layers)
    for layer, group in zip(body.encoder.layer, groups, strict=True):
        _copy_layer(layer, group, weights, plain)
    told = ", ".join("+".join(map(str, group)) for group in groups)
    return f"layers {told} of {count}, cut to {width}"


def layer_groups(chosen: str, teacher_layers: int, student_layers: int) -> list[list[int]]:
    """Teacher layers (from 1) for every student layer: those chosen, or all of them in consecutive
    groups."""
    if not chosen:
        if student_layers > teacher_layers:
            raise UserError(
                f"--init teacher: {student_layers} student layers from {teacher_layers} of the"
                " teacher; use --init svd"
            )
        bounds = np.linspace(0, teacher_layers, student_layers + 1).round().astype(int)
        return [list(range(a + 1, b + 1)) for a, b in zip(bounds, bounds[1:], strict=False)]
    try:
        numbers = [int(word) for word in chosen.split(",")]
    except ValueError:
        raise UserError(f"--init layers:{chosen}: expected numbers such as layers:1,3,5") from None
    if len(numbers) != student_layers or not all(1 <= n <= teacher_layers for n in numbers):
        raise UserError(
            f"--init layers:{chosen}: expected {student_layers} numbers (one a student layer) from"
            f" 1 to {teacher_layers}"
        )
    return [[n] for n in numbers]


def embedding_means(
    teacher: np.ndarray, vocabulary: VocabularyMap, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean [Vs,D] of the teacher rows whose greedy split contains the student piece, and which
    pieces have one [Vs]."""
    pieces = np.asarray(vocabulary.split_ids, np.int64)
    owner = np.repeat(np.arange(len(vocabulary.split_start) - 1), np.diff(vocabulary.split_start))
    usable = (owner < len(teacher)) & ~vocabulary.unknown[owner]
    pieces, owner = pieces[usable], owner[usable]
    sums = torch.zeros(size, teacher.shape[1])
    sums.index_add_(0, torch.from_numpy(pieces), torch.from_numpy(teacher[owner]))
    counts = np.bincount(pieces, minlength=size)
    return sums.numpy() / np.maximum(counts, 1)[:, None].astype(np.float32), counts > 0


def _to_width(rows: np.ndarray, known: np.ndarray, width: int, svd: bool) -> np.ndarray:
    if width > rows.shape[1]:
        rows = np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
    if not svd:
        return rows[:, :width]
    # Of the Gram matrix: D directions, however few pieces are known.
    _, directions = np.linalg.eigh(rows[known].T @ rows[known])
    return rows @ directions[:, ::-1][:, :width]


def _bert_name(name: str) -> str:
    for other, own in DISTILBERT.items():
        if (
            name.startswith(("transformer.layer.", "encoder.layer."))
            and ".attention.self." not in name
        ):
            name = name.replace(other, own)
    return name


def _copy_around_words(
    embeddings: nn.Module, weights: Mapping[str, np.ndarray], plain: Mapping[str, str], first: int
) -> None:
    """Positions, types and the norm of the embeddings, where the teacher has them."""
    for name, parameter in embeddings.named_parameters():
        found = plain.get(f"embeddings.{name}")
        if found and not name.startswith("word_embeddings"):
            values = np.asarray(weights[found], np.float32)
            begin = first if name.startswith("position_embeddings") else 0
            _copy_block(parameter, values[begin:])


def _copy_layer(
    layer: nn.Module,
    group: Sequence[int],
    weights: Mapping[str, np.ndarray],
    plain: Mapping[str, str],
) -> None:
    """Every parameter: the mean over the group of the teacher's."""
    for name, parameter in layer.named_parameters():
        found = [plain[f"encoder.layer.{n - 1}.{name}"] for n in group]
        _copy_block(parameter, np.mean([np.asarray(weights[f], np.float32) for f in found], axis=0))


def _copy_block(parameter: nn.Parameter, values: np.ndarray) -> None:
    """The leading block that both shapes have."""
    block = tuple(slice(0, min(a, b)) for a, b in zip(parameter.shape, values.shape, strict=True))
    parameter[block] = torch.from_numpy(values[block]).to(parameter.dtype)
