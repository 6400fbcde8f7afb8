"""Finds, checks and loads what a dump reads: the teacher and the corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.checkpoints.declared import (
    DECLARED,
    RERANKER,
    check_declared,
    config_of,
    declared_kind,
    layers_of,
    longest_input,
)
from teachonce.checkpoints.labels import PAIRS
from teachonce.checkpoints.names import (
    ResolvedModel,
    corpus_of,
    is_sentence_folder,
    resolve_teacher,
)
from teachonce.checkpoints.sentence_settings import EMBEDDER, library_class
from teachonce.store.format.features import SEVERAL_LABELS, TASKS
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.corpus.labelled_text import pair_of
from teachonce.teacher_dump.job.contradictions import check_head
from teachonce.teacher_dump.job.features import check_gold, check_length, logits_of
from teachonce.teacher_dump.job.option_values import DEFAULT_MAX_LENGTH
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher.layer_groups import layer_groups
from teachonce.teacher_dump.windows.chats import ChatRenderer
from teachonce.teacher_dump.windows.label_numbers import Labels

if TYPE_CHECKING:
    from teachonce.teacher_dump.teacher.teacher import Teacher


def check_inputs(options: DumpOptions) -> tuple[DumpOptions, ResolvedModel, Corpus]:
    """Find teacher and corpus, and compare the options with the teacher's config.json. Return the
    options without `auto` for --hidden and --attention, the teacher and the corpus.

    Raises UserError if the config.json lacks a requested layer or head, or has a smaller vocabulary
    or shorter inputs; CorpusError like `Corpus.open`. Loads neither torch nor the weights.
    """
    resolved = resolve_teacher(options.model, options.gguf)
    model = replace(resolved, trusted=options.trust_remote_code)
    config = config_of(model)
    kind, problem = declared_kind(config), config.get("problem_type")
    options, layers = options.for_head(kind), layers_of(config)
    if layers is not None:
        layer_groups(options.hidden, layers, "--hidden ")
        layer_groups(options.attention, layers, "--attention ")
    pieces = config.get("vocab_size")
    if options.logits and isinstance(pieces, int):
        # Only for its error. Any width serves: the real one is known once the teacher is loaded.
        logits_of(options.logits, 1, pieces)
    # The config.json of a reranker declares a classifier.
    head = {"score": "classification"}.get(options.head, options.head)
    if head in DECLARED:
        check_declared(model, config, head, RERANKER if options.head == "score" else "")
    if options.head == "auto" and kind is not None:
        # `--logits none` leaves out a head over the vocabulary.
        tokens_alone = options.logits == "none" and kind not in TASKS
        check_head(options, "none" if tokens_alone else kind)
    if kind == "classification" and head in ("auto", kind) and options.logits != "none":
        _check_pairs(options, config)
        if problem == SEVERAL_LABELS:
            check_gold(options, "several labels")
    tokens = config_of(model, "tokenizer_config.json").get("model_max_length")
    longest = longest_input(tokens, config.get("max_position_embeddings"), config)
    check_length(options.max_length, longest)
    window = options.max_length or min(longest or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if options.stride >= window:
        raise UserError(f"--stride {options.stride}: expected less than --max-length {window}")
    return options, model, open_corpus(options)


def _check_pairs(options: DumpOptions, config: Mapping[str, Any]) -> None:
    """Raise UserError for single texts if the teacher was trained on pairs of texts, and for pairs
    if it was trained on single texts."""
    given = pair_of(options.text_column) is not None
    if config.get(PAIRS) == (not given):
        remedy = "give one column" if given else "give the columns of both texts as A,B"
        raise UserError(
            f"--text-column {options.text_column or 'is missing'}: the teacher {options.model} was"
            f" trained on {'single texts' if given else 'pairs of texts'}; {remedy}"
        )


def check_labels(options: DumpOptions, model: ResolvedModel, corpus: Corpus) -> None:
    """Raise UserError for a label that the teacher lacks, before its weights are loaded."""
    from teachonce.checkpoints.loading import FACTORIES, declared_task  # loads torch

    kind = declared_kind(config_of(model))
    stored = kind in TASKS and options.head in ("auto", kind) and options.logits != "none"
    if stored and (task := declared_task(model, FACTORIES[str(kind)])):
        Labels.of_corpus(task, model.name, corpus)


def open_corpus(options: DumpOptions) -> Corpus:
    """Find the sources of the corpus. Raises CorpusError like `Corpus.open`."""
    columns = options.text_column, options.label_column, options.student_column
    return Corpus.open(options.sources(), *columns, options.messages)


def load_for_dump(
    options: DumpOptions, model: ResolvedModel, corpus: Corpus, say: Callable[[str], object]
) -> tuple[Teacher, DumpOptions]:
    """Load the teacher in the precision of the options. Return the teacher and the options, with a
    precision that is chosen here for `auto`.

    Raises UserError for chats that the teacher's template cannot write, judged by the first chat,
    before the weights are loaded.
    """
    from teachonce.teacher_dump.teacher.loading import load_teacher
    from teachonce.teacher_dump.teacher.precision import TEXTS, load_fastest  # loads torch
    from teachonce.teacher_dump.teacher.teacher import VectorOptions

    def check_template(tokenizer: Any) -> None:
        if options.messages is not None:
            renderer = ChatRenderer(tokenizer, model.name, options.learn or "assistant")
            for _ in renderer.rendered(islice(corpus, 1)):
                pass

    def load(precision: str) -> Teacher:
        teacher = load_teacher(
            model,
            head="none" if options.logits == "none" and options.head == "auto" else options.head,
            hidden=options.hidden,
            attention=options.attention,
            device=options.device,
            precision=precision,
            vectors=VectorOptions(options.pooling, options.prompt),
            check_tokenizer=check_template,
        )
        # Before any text is tokenized, because it changes the template of the tokenizer.
        teacher.start_with(options.bos)
        return teacher

    if options.precision != "auto":
        return load(options.precision), options
    teacher, precision = load_fastest(load, (doc.text for doc in islice(corpus, TEXTS)), say)
    return teacher, replace(options, precision=precision)


def notes_on_teacher(teacher: Teacher) -> Iterator[str]:
    """Yield a line for each peculiarity of a loaded teacher: fields that nothing reads, prompts
    that are not used, a first token that is added, batches of one length."""
    for line in teacher.notes:
        yield f"{'unread':9} {line}"
    if (vectors := teacher.text_vectors) and vectors.unused_prompts:
        yield (
            f"{'prompt':9} none, but the model has {', '.join(vectors.unused_prompts)}; give"
            " --prompt NAME, or --prompt '' if its texts need none"
        )
    if teacher.first_token is not None:
        piece = teacher.tokenizer.convert_ids_to_tokens(teacher.first_token)
        yield f"{'bos':9} {piece} ({teacher.first_token}) in front of each window (--bos)"
    if teacher.one_length:
        yield (
            f"{'batches':9} hold texts of the same length only: padding would change the output of"
            f" {type(teacher.base).__name__}"
        )


def notes_on_vectors(options: DumpOptions, model: ResolvedModel) -> list[str]:
    """Return a line if the folder of the teacher is a sentence embedder whose vectors are not
    requested: a student of the store would be a masked LM."""
    folder = Path(model.root or model.path_or_id)
    if options.head != "auto" or options.text_only or not is_sentence_folder(folder):
        return []
    with suppress(UserError):  # an unreadable file, which this dump does not need
        if library_class(model) == EMBEDDER:  # --head embedding refuses others
            return [
                f"{'note':9} {options.model} is a sentence embedding model, and its vectors are not"
                " stored; --head embedding stores them"
            ]
    return []


def settings_lines(options: DumpOptions, corpus_was_given: bool) -> str:
    """Describe the settings that do not depend on the teacher, one line each."""
    source = "" if corpus_was_given else " (no --corpus given: the default)"
    if not corpus_was_given and options.limit is None and corpus_of(options.model):
        source = (
            " (no --corpus given: the alias's whole corpus; --limit 2m takes 2 million teacher"
            " tokens)"
        )
    # `load_fastest` prints a line on the precision that it chooses.
    precision = "" if options.precision == "auto" else f"{options.precision}, "
    rows = {
        "teacher": options.model,
        "corpus": ", ".join(options.sources()) + source,
        "codec": options.codec,
        "device": (
            f"{options.device}, {precision}{options.batch_tokens} teacher tokens per batch,"
            f" seed {options.seed}"
        ),
        "out": str(options.out),
    }
    if options.trust_remote_code:
        rows["warning"] = f"the Python code that comes with {options.model} runs on this machine"
    return "\n".join(f"{name:9} {value}" for name, value in rows.items())
