"""Compares the files of a checkpoint with the list of fields: raises for refused fields, and
reports fields that are not listed."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from teachonce.checkpoints.declared import config_of
from teachonce.checkpoints.fields import (
    ADAPTER,
    CONFIG,
    FIELDS,
    LENGTHS,
    MODULES,
    OLD_LENGTHS,
    SETTINGS,
    TOKENIZER_SETTINGS,
    Fields,
)
from teachonce.checkpoints.names import ResolvedModel, adapter_error, finder
from teachonce.support.errors import UserError


def check_fields(
    model: str, file: str, given: Mapping[str, Any], known: Collection[str] = (), kind: str = ""
) -> None:
    """Raise UserError for a refused field of a file.

    given: the content of the file. kind: the key in FIELDS, if it is not the file's name. known:
    fields that the family's own class reads.
    """
    for fields in FIELDS[kind or file]:
        if fields.treatment == "refused":
            check_field(model, file, given, fields, known)


def check_field(
    model: str, file: str, given: Mapping[str, Any], fields: Fields, known: Collection[str] = ()
) -> None:
    """Raise UserError if a refused field has a value that is not accepted."""
    for name in fields.names:
        if name not in given or given[name] in fields.accepted:
            continue
        if not (fields.of_class and name in known):
            raise UserError(
                f"{model}: {name} is {given[name]!r:.60} in {file}: {fields.note}; {fields.remedy}"
            )


def unlisted(kind: str, given: Mapping[str, Any], known: Collection[str] = ()) -> list[str]:
    """Return the fields that are neither in the list nor in `known`, in their order."""
    listed = {name for fields in FIELDS[kind] for name in fields.names}
    return [name for name in given if name not in listed and name not in known]


def dotted_fields(given: Mapping[str, Any], tables: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field. The fields in nested `tables` have dotted names, such as
    `model_args.dtype`."""
    for name, value in given.items():
        if name not in tables or not isinstance(value, Mapping):
            yield name, value
            continue
        for key, inner in value.items():
            # One level more, for processing_kwargs.text.max_length.
            if isinstance(inner, Mapping):
                yield from ((f"{name}.{key}.{subkey}", leaf) for subkey, leaf in inner.items())
            else:
                yield f"{name}.{key}", inner


def class_fields(config: Any) -> set[str]:
    """Return the names of the fields that the class of a config reads."""
    kind = type(config)
    names = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    # `attribute_map` has the common names of fields that a family spells otherwise, as GPT-2 does
    # with n_layer.
    names |= set(inspect.signature(kind).parameters) | set(getattr(kind, "attribute_map", ()))
    with suppress(Exception):  # classes of other packages may raise anything
        names |= set(kind().to_dict())  # fields that it computes and saves
    return names


def check_checkpoint(model: ResolvedModel, config: Any) -> None:
    """Raise UserError for an adapter, for a refused field of config.json, and for a class of the
    checkpoint's own code that transformers would silently replace.

    `config` is the config as transformers loaded it.
    """
    if adapter := finder(replace(model, root=None))(ADAPTER):
        raise adapter_error(model.name, adapter)
    # From the file: a config that transformers loaded also has the defaults of missing fields.
    given = config_of(model)
    check_fields(model.name, CONFIG, given, class_fields(config))
    code = given.get("auto_map")
    mapped = dict(code) if isinstance(code, Mapping) and not model.trusted else {}
    for name in (str(path).rpartition(".")[2] for path in mapped.values() if isinstance(path, str)):
        # If transformers has a class of this name, too, the checkpoint is not refused: `unread`
        # reports that the two classes may compute different numbers.
        if not of_transformers(name):
            raise UserError(
                f"{model.name}: its class {name} is Python code of its own (auto_map of"
                f" {CONFIG}), and transformers would read it as {type(config).__name__} instead;"
                " read the code, then give --trust-remote-code to teacher-dump or feature-store"
                " verify"
            )


def of_transformers(name: str) -> bool:
    """Return whether transformers has a class with this name."""
    import transformers

    return hasattr(transformers, name)


def unread(model: ResolvedModel, config: Any) -> list[str]:
    """Return a line for each JSON file of a checkpoint that has fields which nothing reads."""
    given, lines = config_of(model), []
    classes = given.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        if not (model.trusted or of_transformers(str(name))):
            lines.append(
                f"{CONFIG}: its class {str(name):.60} is not in transformers, which loads it as"
                f" {type(config).__name__}"
            )
    if given.get("auto_map") and not model.trusted:
        lines.append(
            f"{CONFIG}: auto_map, its own Python code, which may compute other numbers than the"
            f" class of transformers ({type(config).__name__}) that reads it; read the code, and"
            " give --trust-remote-code to run it"
        )
    fields = unlisted(CONFIG, given, class_fields(config))
    return [*lines, *_unlisted_line(CONFIG, fields), *unread_settings(model)]


def unread_settings(model: ResolvedModel) -> list[str]:
    """Return a line for each settings file next to config.json that has fields which nothing
    reads."""
    root, lines = replace(model, path_or_id=model.root or model.path_or_id), list[str]()
    for file, folders in (
        (TOKENIZER_SETTINGS, (model,)),
        (SETTINGS, (root,)),
        # These files may be in the root or next to the transformer.
        *((file, (root, model)) for file in (LENGTHS, *OLD_LENGTHS)),
    ):
        given = {name: value for m in folders for name, value in config_of(m, file).items()}
        kind = LENGTHS if file in OLD_LENGTHS else file
        lines += _unlisted_line(file, unlisted(kind, given))
    with suppress(OSError, ValueError, TypeError, RecursionError):  # loading reports these
        if listed := finder(root)(MODULES):
            given = {name: m for m in json.loads(listed.read_text("utf-8")) for name in m}
            lines += _unlisted_line(MODULES, unlisted(MODULES, given))
    return lines


def _unlisted_line(file: str, names: list[str]) -> list[str]:
    if not names:
        return []
    # Names come from an untrusted file: a few of them, shortened, keep the report one line.
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    listed = ", ".join(f"{name:.40}" for name in names[:8])
    return [f"{file}: {listed}{rest}: not in the list of fields, so nothing reads it"]
