"""Makes a student at its start: vocabulary, initial weights, collator."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from teachonce.checkpoints.sentence_settings import declared_activation
from teachonce.store import FeatureStore
from teachonce.student_train.data.blocks import output_kind_of
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.spelled_text import check_spelling
from teachonce.student_train.model.any_student import has_attention
from teachonce.student_train.model.chats import set_up_chat
from teachonce.student_train.model.decoder_sizes import copied_settings, is_tied
from teachonce.student_train.model.freezing import add_low_rank
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.start import RANDOM, initialise
from teachonce.student_train.model.start_checks import (
    check_start_source,
    copies_layers,
    resolved_start,
    start_config,
)
from teachonce.student_train.model.student_tokenizer import (
    check_pair_form,
    default_max_length,
    student_tokenizer,
)
from teachonce.student_train.model.word_vectors import set_word_vectors
from teachonce.student_train.plan.train_plan import (
    TrainPlan,
    check_arguments,
    plan_of,
    terms_of,
)
from teachonce.student_train.settings.option_fields import BILSTM, NETWORK
from teachonce.student_train.settings.option_values import FOLDER
from teachonce.student_train.settings.options import BatchPlan, TrainOptions
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.options import scoped
from teachonce.training.wordpiece import fewer_pieces

Prepared = tuple[PreTrainedModel, Collator, list[str]]
"""A student with initial weights, its collator, and lines that describe the weights; see
`prepare`."""


def prepare(options: TrainOptions, store: FeatureStore, *others: FeatureStore) -> Prepared:
    """Make a student with initial weights and its collator, and describe how the weights were
    initialised.

    Vocabulary and initial weights are from the first store; the max length depends on all stores.
    Options are used as they are: `run` and `StudentBatches` set the defaults that depend on stores,
    such as the learning rate of a decoder that is cut out of its teacher. Pass the `options` of
    StudentBatches.
    Raises UserError if the store lacks what the vocabulary or the weights need, or if temporary
    files cannot be written.
    """
    check_arguments("prepare", options, store, *others)
    plan = plan_of(options.resolved(), store, *others)
    check_start_source(plan.options, store)
    return prepare_plan(plan)


def prepare_plan(plan: TrainPlan) -> Prepared:
    """Prepare the student of a plan; see `prepare`."""
    try:
        return _prepared(plan)
    except OSError as error:
        raise UserError(
            f"{plan.options.out_folder()}: the student cannot be prepared: {files.reason(error)}"
            f" (temporary files are in {tempfile.gettempdir()})"
        ) from error


def _prepared(plan: TrainPlan) -> Prepared:
    options, store = plan.options, plan.store
    family, others = options.shape.family, plan.stores[1:]
    tokenizer = student_tokenizer(options.vocab, store, others=others, family=family)
    template = prepare_tokenizer(tokenizer, plan)
    how = resolved_start(options.init, options.shape, store)
    # So that each process of a training draws the same initial weights.
    torch.manual_seed(options.seed)
    student = make_student(
        options.student,
        tokenizer,
        _positions(plan) or tokenizer.model_max_length,
        task=store.task,
        **_network(plan),
        **_copied_settings(how, plan),
    )
    if store.features.task and "config.json" in store.teacher_files():
        _take_activation(student, store)
    compares_maps = any(term.loss.student == "maps" for term in plan.terms)
    # Fused kernels do not return attention maps, and their backward pass is slow on a CPU.
    if has_attention(student) and (compares_maps or options.device == "cpu"):
        student.set_attn_implementation("eager")
    collator = make_collator(plan, store, tokenizer)
    fewer = fewer_pieces(options.vocab, len(tokenizer))
    changed = check_spelling(collator, store, options.vocab) if options.shape.causal else ""
    start = initialise(student, how, store, collator.vocabulary)
    # After the start, which finds weights by name: peft renames the weights of linear layers.
    if options.lora:
        add_low_rank(student, options.lora)
        start.append(f"low-rank changes of rank {options.lora} of the linear layers are trained")
    if options.word_vectors:
        at_random = start == [RANDOM]
        path = Path(options.word_vectors)
        start.append(set_word_vectors(student, tokenizer, path, others=at_random))
    return student, collator, [line for line in (fewer, changed, template, *start) if line]


def _take_activation(student: PreTrainedModel, store: FeatureStore) -> None:
    """Copy the teacher's activation for CrossEncoder to the student's config.

    Raises UserError unless it is a class of torch.nn: CrossEncoder imports and calls any name.
    """
    config = store.teacher_settings("config.json")
    for name in ("sentence_transformers", "sbert_ce_default_activation_function"):
        if name in config:
            setattr(student.config, name, config[name])
    declared_activation(str(store.path), student.config)


def prepare_tokenizer(tokenizer: Any, plan: TrainPlan) -> str:
    """Set the max length of a student's tokenizer, the outputs that it needs for text pairs, and a
    decoder's chat template, also in the saved files.

    Returns a line if the tokenizer had a chat template of its own, or lacks the token that ends a
    message, else "". Raises UserError for a tokenizer without a token between two texts, and for
    one that truncates the start of a text if an alignment truncates the end.
    """
    if plan.store.features.separator is not None:
        check_pair_form(tokenizer, plan.options.vocab, plan.store)
        types = ["token_type_ids"] if plan.options.shape.token_types else []
        names = ["input_ids", *types, "attention_mask"]
        # `save_pretrained` writes only the attributes that are named in `init_kwargs`.
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    longest = max(store.features.max_length for store in plan.stores)
    length, most = plan.options.max_length or default_max_length(longest), _positions(plan)
    if most is not None and plan.options.max_length and length > most:
        raise UserError(
            f"--max-length {length}: the student has {most} positions; give --max-length {most}"
        )
    tokenizer.model_max_length = length if most is None else min(length, most)
    name = "tokenizer_config.json"
    settings = plan.store.teacher_settings(name) if name in plan.store.teacher_files() else {}
    # The teacher has read the end of a long text, so the student must read the same end.
    if settings.get("truncation_side") == "left":
        tokenizer.truncation_side = tokenizer.init_kwargs["truncation_side"] = "left"
    _check_truncation(tokenizer, plan)
    return set_up_chat(tokenizer, plan.stores) if plan.options.shape.causal else ""


def _check_truncation(tokenizer: Any, plan: TrainPlan) -> None:
    used = {term.alignment for term in plan.terms if term.alignment}
    # `align_reduce` retains the teacher's first tokens.
    second = sorted(name for name in used if ALIGNMENTS[name].second_input)
    if second and tokenizer.truncation_side == "left":
        raise UserError(
            f"--align {second[0]}: truncates the end of a long text, but the student's tokenizer"
            " truncates the start: tokenizer_config.json, of the teacher or of --vocab"
            f' {plan.options.vocab}, has "truncation_side": "left"; use --align span or match'
        )


def _positions(plan: TrainPlan) -> int | None:
    """Return the maximal number of positions of the model that `--init folder:DIR` continues; None
    for other values of `--init`. Raises UserError if its config.json has no valid number."""
    if not plan.options.init.startswith(FOLDER):
        return None
    config, folder = start_config(plan.options.init, plan.store)
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int) or positions < 1:
        raise UserError(
            f"{folder}: max_position_embeddings or n_positions of its config.json is"
            f" {positions!r:.40}, expected a number of at least 1; save the model there again"
        )
    return positions


def _network(plan: TrainPlan) -> dict[str, Any]:
    """Return the options that become settings of the student's config."""
    names = scoped(TrainOptions, NETWORK)
    if plan.options.shape.kind != "bilstm":
        names -= scoped(TrainOptions, BILSTM)
    settings = {name: getattr(plan.options, name) for name in names}
    if plan.options.projection == "student":
        settings["projection_size"] = plan.store.features.width
    return {name: value for name, value in settings.items() if value is not None}


def _copied_settings(how: str, plan: TrainPlan) -> dict[str, Any]:
    """Return the settings of a teacher's config on which a decoder's copied layers depend, and
    whether its output embeddings are its word embeddings.

    how: the resolved `--init`.
    """
    if not plan.options.shape.causal or not copies_layers(how):
        return {}
    config, _ = start_config(how, plan.store)
    # Layers are copied with word embeddings alone, a whole folder with its output embeddings.
    tied = is_tied(config) or not how.startswith(FOLDER)
    return {**copied_settings(config), "tie_word_embeddings": tied}


def make_collator(plan: TrainPlan, store: FeatureStore, tokenizer: Any) -> Collator:
    """Make the collator of `store`, one of the plan's stores, for a student with `tokenizer`."""
    spec = store.features.logits
    return Collator(
        tokenizer,
        store.teacher_file("tokenizer.json").decode(),
        BatchPlan(plan.options, terms_of(plan.options, output_kind_of(store))),
        max_length=tokenizer.model_max_length,
        head=store.head() if spec and spec.tier == "head" else None,
        exact=plan.options.combine != "outputs",  # means of teachers are over their best pieces
        store=store,
    )
