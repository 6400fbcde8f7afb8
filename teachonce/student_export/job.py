"""Exports a student: writes, checks and measures each format, then writes the folder's metadata."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from teachonce.checkpoints.checkpoint_tokenizer import save_tokenizer
from teachonce.checkpoints.first_token import prepended_token
from teachonce.checkpoints.loading import input_limit, load_tokenizer
from teachonce.checkpoints.names import EXPORTED, resolve_model
from teachonce.checkpoints.sentence_folder import write_sentence_folder
from teachonce.student_export.cards import (
    STUDENT,
    Exported,
    export_card,
    write_card,
    write_programs,
)
from teachonce.student_export.checking import ExportCheck, export_check, random_texts
from teachonce.student_export.costs import Costs, costs_of, export_size
from teachonce.student_export.formats import ExportFormat
from teachonce.student_export.formats.registry import FORMATS
from teachonce.student_export.loaded_student import LoadedStudent, VectorNetwork, load_student
from teachonce.student_export.options import DECODER, ExportOptions, check_kind, check_new
from teachonce.student_export.run_code import LIBRARIES, check_answers
from teachonce.student_export.student_inputs import BATCH
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.redaction import without_credentials

CARD, CONFIG = "README.md", "config.json"
WORST = 3
"""The number of layers that a refusal names."""
SENTENCES = 20
"""Texts that are timed one by one."""
Say = Callable[[str], object]


def write_tokenizer(student: LoadedStudent, folder: Path) -> None:
    """Save the tokenizer with the student's truncation and padding in tokenizer.json.

    transformers does not save truncation and padding, but sets them for each call. Programs that
    run an export have only tokenizer.json. A decoder's tokenizer is saved unchanged, because a
    user's prompt must not be truncated.
    """
    if student.kind == DECODER:
        tokenizer = load_tokenizer(resolve_model(str(student.folder)))
        # transformers.js reads it, and would leave the token out; transformers does not save it.
        begins = prepended_token(tokenizer.backend_tokenizer) is not None
        save_tokenizer(tokenizer, folder, **({"add_bos_token": True} if begins else {}))
        return
    save_tokenizer(student.tokenizer, folder)
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text("utf-8"))
    # Programs add the post-processor's tokens, which a static student does not average.
    if not student.special:
        settings["post_processor"] = None
    settings["truncation"] = {
        "direction": student.tokenizer.truncation_side.capitalize(),
        "max_length": student.max_length,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": "BatchLongest",
        "direction": student.tokenizer.padding_side.capitalize(),
        "pad_to_multiple_of": None,
        "pad_id": student.tokenizer.pad_token_id,
        "pad_type_id": 0,
        "pad_token": student.tokenizer.pad_token,
    }
    files.write(path, (json.dumps(settings, ensure_ascii=False) + "\n").encode())


def write_metadata(student: LoadedStudent, exports: list[Exported], folder: Path) -> None:
    """Write config.json, and export.json with inputs, output, labels, prompts and costs."""
    if student.kind == DECODER:
        network: Any = student.network
        network.network.generation_config.save_pretrained(folder)
    if student.config is not None:
        student.config.save_pretrained(folder)
    else:
        config = {"model_type": "static", "hidden_size": student.network.embedding.embedding_dim}  # type: ignore[union-attr]
        files.write(folder / CONFIG, _json_bytes(config))
    about: dict[str, Any] = {
        "kind": student.kind,
        "inputs": list(student.inputs),
        "output": student.output,
        "max_length": _positions(student),
        "prompt": student.prompt,
        **({} if student.pairs is None else {"pairs": student.pairs}),
        **student.about,
        "files": [_about_file(exported) for exported in exports],
    }
    if student.task is not None:
        about["labels"] = list(student.task.labels)
        for name in ("problem_type", "later_label"):
            if value := getattr(student.task, name):
                about[name] = value
        if student.activation:
            about["activation"] = student.activation
    files.write(folder / EXPORTED, _json_bytes(about))


def _positions(student: LoadedStudent) -> int:
    """Return the largest number of tokens of a text for an exported student. A decoder is compared
    with the student on shorter texts."""
    if student.kind == DECODER:
        return input_limit(student.config, student.tokenizer)
    return student.max_length


def write_modules(student: LoadedStudent, folder: Path) -> None:
    """Write the modules after the encoder of a student of text vectors; do nothing for other
    students. SentenceTransformer(folder, backend="onnx") reads states from the graph, and pools
    them with these modules."""
    if isinstance(student.network, VectorNetwork):
        write_sentence_folder(
            folder,
            student.network.head,
            max_length=student.max_length,
            prompts=student.about.get("prompts"),
            default_prompt=student.about.get("default_prompt_name"),
            similarity=student.about.get("similarity_fn_name", "cosine"),
        )


def _about_file(exported: Exported) -> dict[str, Any]:
    facts = asdict(exported)
    return facts if exported.unit else {key: value for key, value in facts.items() if key != "unit"}


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def export(options: ExportOptions, say: Say = print) -> list[Exported]:
    """Export a student to every format of `options.to`, into a new folder; return its files.

    The model card of the new folder gets a table of its files; the files are also added to the
    table in the student's card.

    Raises UserError if the student or a library does not fit, or if an export's agreement is below
    `options.least`. No folder is made then.
    """
    say(f"{options.folder}: loads the student")
    student = load_student(options.folder)
    check_kind(options.to, student.kind)
    if LIBRARIES.keys() & options.to:
        check_answers(student)
    if all(FORMATS[name].layers_are_modules for name in options.to):
        # checked before the conversion, which takes minutes
        modules = student.network.named_modules()
        matrices = [name for name, module in modules if _has_matrix(module)]
        _check_layer_names(matrices, options.keep_float)
    check = export_check(student, options.check, options.columns)
    _student_card(options.folder)  # raises before the work; the card is read again after it
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # The lease protects the unfinished folder: `atomic_path` of another export to this path removes
    # it.
    with closing(Lease(options.out)), files.atomic_path(options.out) as folder:
        check_new(options.out)  # again: another export may have ended since
        folder.mkdir()
        exports = [_exported(student, check, name, options, folder, say) for name in options.to]
        say("the student is timed")
        costs = _costs(student, None, options.folder)
        student_row = Exported(
            STUDENT, check.measure, 1.0, check.student_score, costs, unit=check.unit
        )
        write_tokenizer(student, folder)
        write_metadata(student, exports, folder)
        write_modules(student, folder)
        write_programs(student, exports, folder)
        text = _student_card(options.folder)
        write_card(export_card(text, student, exports), student_row, exports, folder / CARD)
        files.apply_umask(folder)
    # Last, so that the student's card lists only published exports.
    write_card(text, student_row, exports, options.folder / CARD)
    say(f"export in {options.out}; its {CARD} shows how to run it")
    return exports


def _student_card(folder: Path) -> str:
    """Return the student's model card without credentials. Raises UserError if it is not UTF-8."""
    card = folder / CARD
    try:
        text = card.read_text("utf-8") if card.is_file() else f"# {folder.name}\n"
    except UnicodeDecodeError:
        raise UserError(f"{card}: is not UTF-8; convert it with iconv, or remove it") from None
    return without_credentials(text)


def _costs(student: LoadedStudent, format_name: str | None, path: Path) -> Costs:
    texts = random_texts(student)
    singles = [student.encode([text]) for text in texts[:SENTENCES]]
    return costs_of(format_name, path, student.output, singles, student.encode(texts[:BATCH]))


def _exported(
    student: LoadedStudent,
    check: ExportCheck,
    name: str,
    options: ExportOptions,
    folder: Path,
    say: Say,
) -> Exported:
    format, kind = FORMATS[name], options.quantize or ""
    file = format.names[kind]
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    say(f"{file}: is being written")
    in_float: tuple[str, ...] = ()
    if kind:
        with tempfile.TemporaryDirectory(prefix="float-", dir=folder) as plain:
            source = Path(plain) / Path(format.names[""]).name
            format.write(student, source)
            # A wrong float32 export is not the quantisation's fault, and is refused as such.
            _check_float(_share(student, check, format, source), name, check, options.least)
            in_float, share = _quantise(student, check, format, source, path, options)
        if in_float:
            say(f"{file}: in float32: {', '.join(in_float)}")
    else:
        format.write(student, path)
        share = _share(student, check, format, path)
        _check_float(share, name, check, options.least)
    if share is None:
        module, package = format.runner
        say(
            f"{file}: written, but not compared with the student: {module} is missing;"
            f" `pip install {package}`, then export again to another --out"
        )
        return Exported(file, check.measure, None, None, Costs(export_size(path)), in_float)
    run = format.open_repeatable
    score = check.score(run(path, student.output, 1)) if check.score else None
    costs = _costs(student, name, path)
    exported = Exported(file, check.measure, share, score, costs, in_float, check.unit)
    scored = f", {exported.shown_score()}" if check.unit else ""
    say(f"{file}: {check.describe(share)}{scored}")
    return exported


def _share(
    student: LoadedStudent, check: ExportCheck, format: ExportFormat, path: Path
) -> float | None:
    """Return the agreement of an exported file with the student, 1 if it is full; None if no
    installed package can run it.

    Raises UserError if the format's own tokenizer gives other tokens.
    """
    if not format.runs():
        return None
    if format.tokens is not None:
        expected = student.tokenizer(list(check.texts))["input_ids"]
        export_ids = format.tokens(path, check.texts)
        wrong = [n for n, ids in enumerate(expected) if list(ids) != list(export_ids[n])]
        if wrong:
            raise UserError(
                f"{path.name}: tokenizes {len(wrong)} of {len(expected)} texts differently from the"
                f" student's tokenizer, the first is {check.texts[wrong[0]][:40]!r}; train a"
                " student with --vocab 8k, or export to another format"
            )
    return check.share(format.open_repeatable(path, student.output, 1))


def _check_float(share: float | None, name: str, check: ExportCheck, least: float) -> None:
    """Raise UserError if the agreement of a float32 file is below `least`."""
    if share is not None and share < least:
        raise _too_low(f"--to {name}", share, check, least, "export another format")


def _quantise(
    student: LoadedStudent,
    check: ExportCheck,
    format: ExportFormat,
    source: Path,
    path: Path,
    options: ExportOptions,
) -> tuple[tuple[str, ...], float | None]:
    """Quantise all layers except `options.keep_float`; return the names of the layers that stay in
    float32, and the agreement of the file (see `_share`).

    Raises UserError if the agreement is below `options.least`, and names the layers that lose most.
    """
    kind = options.quantize
    assert kind and format.layers and format.quantise  # true of each format with `--quantize`
    layers = format.layers(source)
    _check_layer_names(layers, options.keep_float)
    quantised = {n: parts for n, parts in layers.items() if not _is_within(n, options.keep_float)}
    every = [part for parts in quantised.values() for part in parts]
    remaining = set(format.quantise(source, path, kind, every) if every else ())
    quantised = {name: parts for name, parts in quantised.items() if remaining.isdisjoint(parts)}
    if not quantised:
        raise UserError(
            f"--quantize {kind}: no layer is left to quantise; leave a --keep-float out, or give"
            " another --quantize"
        )
    in_float = tuple(name for name in layers if name not in quantised)
    share = _share(student, check, format, path)
    if share is None or share >= options.least:
        return in_float, share
    # One layer may cause the loss: in int8, a layer of `modernbert:tiny` loses 3.65 %, the next
    # worst 0.12 % (benchmarks/RESULTS.md).
    losses = _layer_losses(student, format, source, quantised, kind)
    worst = sorted(losses, key=lambda name: -losses[name])[:WORST]
    listed = ", ".join(f"{name} {100 * losses[name]:.2f} %" for name in worst)
    flags = " ".join(f"--keep-float {name}" for name in worst)
    raise _too_low(
        f"--quantize {kind}",
        share,
        check,
        options.least,
        f"quantised alone, these layers change the outputs most: {listed}; leave them in float32"
        f" ({flags})",
    )


def _layer_losses(
    student: LoadedStudent,
    format: ExportFormat,
    source: Path,
    layers: dict[str, list[str]],
    kind: str,
) -> dict[str, float]:
    """Return, for each layer, how much agreement is lost if only this layer is quantised."""
    assert format.quantise
    # on texts of random pieces: scoring a task's file may take minutes for each layer
    outputs = export_check(student, None)
    losses = {}
    for name, parts in layers.items():
        path = source.with_name(Path(format.names[kind]).name)
        format.quantise(source, path, kind, parts)
        losses[name] = 1 - outputs.share(format.open_repeatable(path, student.output, 1))
    return losses


def _is_within(layer: str, names: Sequence[str]) -> bool:
    """Return whether a layer is one of `names`, or a submodule of one of them."""
    return any(layer == name or layer.startswith(f"{name}.") for name in names)


def _has_matrix(module: nn.Module) -> bool:
    return any(weight.dim() > 1 for weight in module.parameters(recurse=False))


def _check_layer_names(layers: Collection[str], names: Sequence[str]) -> None:
    for name in names:
        if not any(_is_within(layer, [name]) for layer in layers):
            raise UserError(
                f"--keep-float {name}: the student has no such layer that could be quantised; it"
                f" has {', '.join(layers)[:400]}"
            )


def _too_low(flag: str, share: float, check: ExportCheck, least: float, remedy: str) -> UserError:
    return UserError(
        f"{flag}: {check.describe(share)}, less than --least {least:g}; {remedy}, or lower --least"
    )
