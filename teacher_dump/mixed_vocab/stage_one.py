"""Mixed-vocabulary training (Zhao et al. 2021, stage I).

A teacher is trained further with the student's vocabulary in addition to its own. The student's
embeddings are written to a store, from which stage II trains the student without the teacher.
Modules that load torch and transformers are imported inside functions, after the checks that do not
need them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import string
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from teachonce.checkpoints.declared import config_of
from teachonce.checkpoints.names import ResolvedModel, resolve_model
from teachonce.store import StoreWriter, open_store
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.store.format.identity import object_in
from teachonce.support.arrays import Array
from teachonce.support.differences import check_same, differences
from teachonce.support.errors import UserError
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.dump import (
    DumpSummary,
    check_existing,
    check_same_dump,
    dump,
    written_line,
)
from teachonce.teacher_dump.job.features import window_length
from teachonce.teacher_dump.job.parts import gathered
from teachonce.teacher_dump.job.plan import StageOne
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions, check_width
from teachonce.teacher_dump.windows.cutting import iter_windows
from teachonce.training.wordpiece import (
    SPECIALS,
    check_masking_tokenizer,
    fewer_pieces,
    train_wordpiece,
    vocabulary_size,
)

if TYPE_CHECKING:
    from teachonce.teacher_dump.mixed_vocab.embedding_training import MixedTeacher
    from teachonce.teacher_dump.teacher.teacher import Teacher
    from teachonce.training.ranks import Ranks

# In this order: ELECTRA has both of the first two, and its embeddings may be narrower.
EMBEDDING_SIZES = ("embedding_size", "hidden_size", "dim")  # in ELECTRA, BERT, DistilBERT
ASCII = string.ascii_letters + string.digits + string.punctuation
"""Characters that each student's vocabulary has, so that no English word is unknown (Zhao et al.
2021, section 3)."""


def mixed_vocab(
    options: MixedVocabOptions, say: Callable[[str], object] = lambda line: None
) -> DumpSummary | None:
    """Train the teacher on both vocabularies, then write the store.

    The store holds the corpus in the teacher's tokens, the student's tokenizer and embeddings, and
    the features that `options.dump` requests, of the teacher before this training. A run that was
    stopped or killed continues from the last checkpoint, or from the parts that the dump wrote.
    Under torchrun each process trains on its share of a step's batches; rank 0 dumps, and the
    others return None. Raises UserError for bad input before anything is written.
    """
    from teachonce.training.ranks import join_ranks

    with stoppable(lambda: _saved_line(options)) as stop:
        check_existing(options.dump)
        model = replace(resolve_model(options.dump.model), trusted=options.dump.trust_remote_code)
        config = config_of(model)
        size = next(
            (config[name] for name in EMBEDDING_SIZES if isinstance(config.get(name), int)), None
        )
        if size is not None:
            check_width(options.width, size, model.name)
        corpus = Corpus.open(options.dump.sources(), options.dump.text_column)
        options = replace(options, dump=options.dump.resolved())
        with join_ranks(options.dump.device) as ranks:
            say = say if ranks.is_main else lambda line: None
            ranks.check(options.accumulate)
            # Rank 0 looks for all: ranks that decide differently would wait for each other.
            stage_one = _from_store(options) if ranks.is_main else None
            if not ranks.broadcast(stage_one is not None):
                stage_one = _trained(options, model, corpus, stop, say, ranks)
            if not ranks.is_main:
                return None
    # After the group of ranks is closed, as the others have nothing to do in a dump.
    summary = dump(options.dump, say, stage_one)
    # Only now: until the dump has created the store, a stopped run continues from the checkpoint.
    options.checkpoint().unlink(missing_ok=True)
    return summary


def _saved_line(options: MixedVocabOptions) -> str:
    path = options.checkpoint()
    if path.exists():
        return f"{path}: the training is saved there; run the same command to continue"
    return written_line(options.dump.out)


def _from_store(options: MixedVocabOptions) -> StageOne | None:
    """Read the result of stage I from the store at --out, finished or not; None if there is no
    store. Raises UserError if the store's arguments differ."""
    out = options.dump.out
    attributes = StoreWriter.peek(out, None)
    if attributes is None:
        return None
    then, now = object_in(attributes["identity"], "mixed_vocab"), options.arguments()
    check = check_same_dump if attributes["state"] == "sealed" else check_same
    check(out, differences({key: then.get(key) for key in now}, now))
    with closing(open_store(out, allow_partial=True)) as store:
        return StageOne(MixedVocab.of(store), now)


def _trained(
    options: MixedVocabOptions,
    model: ResolvedModel,
    corpus: Corpus,
    stop: Stop,
    say: Callable[[str], object],
    ranks: Ranks,
) -> StageOne:
    from teachonce.checkpoints.checkpoint_tokenizer import tokenizer_files
    from teachonce.teacher_dump.mixed_vocab.embedding_training import train_embeddings
    from teachonce.teacher_dump.mixed_vocab.segmentation import Mixer, Side

    settings = options.dump
    corpus.check()
    teacher = _masked_teacher(model)
    longest = window_length(settings.max_length, teacher)

    def texts() -> Iterator[str]:
        windows = iter_windows(corpus, teacher.tokenizer, longest, settings.stride)
        # Gathered as for a dump, so that --limit ends both at the same text.
        parts = gathered(windows, settings.part_tokens, settings.limit)
        return (window.text for window in itertools.chain.from_iterable(parts))

    tokenizer = mixed_vocab_tokenizer(options.vocab, texts(), teacher)
    if line := fewer_pieces(options.vocab, len(tokenizer)):
        say(f"text      {line}")
    network = _network(options, teacher, tokenizer, say)
    files = tokenizer_files(tokenizer, longest)
    mixer = Mixer(
        texts,
        (Side.of(teacher.tokenizer), Side.of(tokenizer)),
        options.student_share,
        options.mask_prob,
        longest,
        settings.tokens_per_batch,
        settings.seed,
    )
    started = {
        **options.arguments(),
        "teacher": teacher.weights_hash(),
        "tokenizer": hashlib.sha256(files["tokenizer.json"]).hexdigest(),
        "corpus": corpus.identity(),
        "max_length": longest,
        "limit": settings.limit,
    }
    embeddings = train_embeddings(network, mixer, options, started, stop, say, ranks)
    vocab = MixedVocab(embeddings, files["tokenizer.json"], files["tokenizer_config.json"])
    corpus.check_unchanged()
    return StageOne(vocab, options.arguments(), started["corpus"])


def _masked_teacher(model: ResolvedModel) -> Teacher:
    from teachonce.teacher_dump.teacher.loading import load_teacher

    teacher = load_teacher(model, head="mlm", hidden="none", attention="none")
    if teacher.tokenizer.mask_token_id is None:
        raise UserError(f"{teacher.name}: its tokenizer has no mask token; choose a masked LM")
    return teacher


def _network(
    options: MixedVocabOptions, teacher: Teacher, tokenizer: Any, say: Callable[[str], object]
) -> MixedTeacher:
    """Create the network with both vocabularies, and print how it is trained."""
    from teachonce.teacher_dump.mixed_vocab.embedding_training import MixedTeacher

    settings = options.dump
    same = student_ids(teacher.tokenizer, tokenizer) if options.tie else None
    network = MixedTeacher(teacher, len(tokenizer), options.width, settings.seed, same)
    say(
        f"student   {len(tokenizer):,} pieces of hidden size {options.width}; the teacher has"
        f" {len(teacher.tokenizer):,} of size {network.weight.shape[1]}"
    )
    tokens = settings.tokens_per_batch * options.accumulate
    say(
        f"training  {options.steps} steps of {tokens} tokens,"
        f" {options.optimizer}, lr {options.lr:g}, warm-up {options.warmup:.0%}, seed"
        f" {settings.seed}, {settings.device}, {settings.precision}"
    )
    if same is not None:
        tied = len(np.unique(same[same >= 0]))
        say(f"tied      {tied:,} of the student's pieces, which are in both vocabularies")
    return network


def student_ids(teacher: Any, student: Any) -> Array:
    """Find the student's id of each piece of the teacher: int64 [V], -1 if the student lacks it.

    Raises UserError if equal pieces of the two vocabularies do not mean equal text.
    """
    models = [json.loads(t.backend_tokenizer.to_str())["model"] for t in (teacher, student)]
    here, there = (
        (model["type"], model.get("continuing_subword_prefix") or "") for model in models
    )
    if here != there:
        raise UserError(
            f"--tie: the teacher's vocabulary is a {here[0]} and the student's a {there[0]}, which"
            " mark pieces differently; leave --tie out, or give a --vocab folder of the teacher's"
            " kind"
        )
    student_vocab = student.get_vocab()
    # By the largest id: the ids of a vocabulary may have gaps.
    same = np.full(1 + max(teacher.get_vocab().values()), -1)
    for piece, number in teacher.get_vocab().items():
        same[number] = student_vocab.get(piece, -1)
    return same


def mixed_vocab_tokenizer(word: str, texts: Iterator[str], teacher: Teacher) -> Any:
    """Train a fast tokenizer if `word`, the value of `--vocab`, is a size; load it if `word` is a
    folder.

    Raises UserError if the size is too small for the characters of the texts, or if the folder has
    no tokenizer with a mask token and a padding token.
    """
    from transformers import PreTrainedTokenizerFast

    from teachonce.checkpoints.loading import load_tokenizer

    size = vocabulary_size(word)
    if size is not None:
        backend = train_wordpiece(
            texts, size, teacher.tokenizer.backend_tokenizer.normalizer, ASCII
        )
        return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **SPECIALS)
    tokenizer = load_tokenizer(ResolvedModel(word, f"--vocab {word}"))
    check_masking_tokenizer(tokenizer, word)
    return tokenizer
