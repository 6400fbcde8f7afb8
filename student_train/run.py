"""One student from start to finish: options in, a transformers folder out."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from store import FeatureStore, disk, open_store
from store.content import check_tokens
from store.errors import UserError
from store.lease import Lease
from student_train import losses
from student_train.architecture import make_student, parse_student
from student_train.batches import Collator
from student_train.card import environment, hub_id, model_card
from student_train.checkpoint import remove_checkpoints
from student_train.data import split_blocks, view_of
from student_train.initialise import initialise
from student_train.options import TrainOptions
from student_train.report import SETTINGS, check_out, go_on, tokenizer_hash
from student_train.trainer import Trained, train
from student_train.vocabulary import student_tokenizer


def run(
    options: TrainOptions, *, resume: bool = False, say: Any = lambda line: None
) -> dict[str, Any]:
    """Train the student that `options`, which are resolved, ask for and write it to its folder;
    returns what training.json says.

    `say` is told, in a line each, what a user should know. Raises UserError for bad input, before
    anything is written.
    """
    store = open_store(options.store, allow_partial=options.allow_partial)
    check(options, store)
    check_tokens(store)
    out = options.out_folder()
    origin = {
        "identity": store.identity,
        "features": store.features.to_json(),
        "content": store.manifest.content(),
        "state": store.meta["state"],
        "software": store.meta["software"],
    }
    begun: dict[str, Any] = {
        "settings": options.describing(),
        "store": origin,
        "environments": [environment(options.device)],
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with closing(Lease(out)):  # two trainings would mix their checkpoints
            before = check_out(out, begun, resume)
            student, collator, begun["start"] = _prepared(options, store)
            begun["tokenizer"] = tokenizer_hash(collator.student_tokenizer)
            if before is not None:
                go_on(out, before, begun, say)
            for line in begun["start"]:
                say(f"start     {line}")
            out.mkdir(exist_ok=True)
            disk.write(out / SETTINGS, json.dumps(begun, indent=1).encode())
            trained = train(store, student, collator, options, out, resume=resume, say=say)
            return _finish(out, begun, trained, collator, hub_id(store))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{out}: cannot be written: {disk.reason(error)} and go on with --resume, or give"
            " another --out"
        ) from error


def _prepared(
    options: TrainOptions, store: FeatureStore
) -> tuple[PreTrainedModel, Collator, list[str]]:
    try:
        return prepare(options, store)
    except OSError as error:
        raise UserError(
            f"{options.out_folder()}: the student cannot be prepared: {disk.reason(error)}"
            f" (temporary files are in {tempfile.gettempdir()})"
        ) from error


def prepare(
    options: TrainOptions, store: FeatureStore
) -> tuple[PreTrainedModel, Collator, list[str]]:
    """The student at its start, the collator that feeds it, and in a few lines where it starts
    from."""
    tokenizer = student_tokenizer(options.vocab, store)
    tokenizer.model_max_length = options.max_length or min(512, 2 * store.features.max_length)
    torch.manual_seed(options.seed)
    student = make_student(options.student, tokenizer, tokenizer.model_max_length)
    # The fused kernels never hold the probabilities, and their backward pass is slow on a CPU.
    if "attention" in options.loss or options.device == "cpu":
        student.set_attn_implementation("eager")
    collator = make_collator(options, store, tokenizer)
    return student, collator, initialise(student, options.init, store, collator.vocabulary)


def make_collator(options: TrainOptions, store: FeatureStore, tokenizer: Any) -> Collator:
    """What turns batches of `store` into batches for a student with `tokenizer` and its losses."""
    spec = store.features.logits
    return Collator(
        tokenizer,
        store.teacher_file("tokenizer.json").decode(),
        align=options.align,
        loss_names=options.loss,
        masked_only=options.targets == "masked",
        mask_probability=options.mask_prob,
        max_length=tokenizer.model_max_length,
        head=store.head() if spec and spec.tier == "head" else None,
        store=store,
    )


def check(options: TrainOptions, store: FeatureStore) -> None:
    """Refuse, in one line, all that can be seen to be wrong before any work is done."""
    options.check()
    _, (_, student_layers, _) = parse_student(options.student)
    _check_features(options, store)
    _check_groups(options, store, student_layers)
    split_blocks(store, options.held_out)


def _check_features(options: TrainOptions, store: FeatureStore) -> None:
    has = {
        "logits": (bool(store.features.logits), losses.OF_LOGITS),
        "hidden states": (bool(store.features.hidden), losses.OF_HIDDEN),
        "attention maps": (bool(store.features.attention), ("attention",)),
    }
    for feature, (there, names) in has.items():
        for name in set(names) & set(options.loss):
            if not there:
                task = store.features.task if feature == "logits" else None
                held = f" over a vocabulary (its teacher does {task.kind})" if task else ""
                raise UserError(
                    f"--loss {name}: {options.store} holds no {feature}{held}; dump them, or choose"
                    " another loss"
                )
    spec = store.features.logits
    for name in set(losses.OF_LOGITS) & set(options.loss):
        if spec and spec.next_token:
            raise UserError(
                f"--loss {name}: the logits of {options.store} are of the token after each, as a"
                " causal teacher gives them, and students are masked LMs; use mlm and hidden"
            )
    if spec and spec.tier == "sample" and "logit" in options.loss:
        raise UserError("--loss logit: the store keeps random draws, which have no logits; use kl")
    plain = view_of(0, store.features.views, options.view) == 0
    if options.targets == "masked" and options.align == "reduce" and plain:
        raise UserError(
            "--targets masked: under --align reduce the student reads view 0 unmasked; use a store"
            " with masked views (teacher-dump --views 2), or --targets all"
        )
    if options.view is not None and not 0 <= options.view < store.features.views:
        raise UserError(
            f"--view {options.view}: {options.store} has views 0 to {store.features.views - 1}"
        )


def _check_groups(options: TrainOptions, store: FeatureStore, layers: int) -> None:
    compared = [*(store.features.hidden if set(losses.OF_HIDDEN) & set(options.loss) else ())]
    compared += store.features.attention if "attention" in options.loss else ()
    for name in compared:
        if name.startswith("groups") and layers % int(name[6:].split(".")[0]):
            raise UserError(
                f"{name}: {layers} student layers do not fall into as many groups; choose --student"
                " accordingly"
            )


def _finish(
    out: Path,
    begun: dict[str, Any],
    trained: Trained,
    collator: Collator,
    base_model: str | None,
) -> dict[str, Any]:
    student = trained.student.eval()
    student.cpu()
    transformers_logging.disable_progress_bar()
    student.save_pretrained(out)
    collator.student_tokenizer.save_pretrained(out)
    result = {
        **trained.validation,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": round(trained.seconds, 1),
        "parameters": student.num_parameters(),
    }
    report = {**begun, "result": result}
    (out / "README.md").write_text(model_card(report, base_model))
    disk.sync_tree(out)
    disk.write(out / SETTINGS, json.dumps(report, indent=1).encode())
    remove_checkpoints(out / "checkpoints")
    return report
