"""Writes tokenizers that transformers 4 and 5 load, explains why a folder's tokenizer cannot be
loaded, and recognises a tokenizer that was made for another language than the texts'."""

# Most servers of models still use transformers 4.

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from teachonce.support.errors import first_line

FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "vocab.model", "tokenizer.model",
    "spiece.model", "spm.model", "sentencepiece.bpe.model", "sentencepiece.model",
)  # fmt: skip
"""Files that may hold the vocabulary of a tokenizer."""
SETTINGS, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
IN_5, IN_4 = "TokenizersBackend", "PreTrainedTokenizerFast"  # one class in transformers 5 and 4
OF_LOADING = ("backend", "is_local", "local_files_only")  # 5 saves how the tokenizer was loaded
TEXTS, WORDS = 200, 5000  # sample: the first 25 words of 200 texts, spread over all texts
LEAST = 100  # a sample of fewer words shows nothing
FOREIGN = 2.5
"""Pieces per word from which a tokenizer counts as foreign. Measured on novels: a vocabulary of the
language has 1.1 (30,000 English pieces) to 2.1 (1,000 Russian pieces); the English one of MiniLM
has 2.2 on Slovak, 2.6 on German, 3.1 on Finnish and 5.2 on Russian text."""
UNKNOWN = 0.05
"""Share of words with an unknown piece, which a vocabulary of the language has under 1 %."""
# Numbers and marks are not words: tables and code would have many pieces with any vocabulary.
WORD = re.compile(r"[^\W\d_]+")
# Tibetan, Thai, Lao, Burmese, Khmer, kana and Han: no spaces divide their words.
UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)


def save_tokenizer(tokenizer: Any, folder: Path, **more: Any) -> None:
    """Save a fast tokenizer of transformers 5 so that transformers 4 and 5 load it, with `more`
    settings."""
    tokenizer.save_pretrained(folder)
    path = folder / SETTINGS
    settings = common_settings(json.loads(path.read_text("utf-8")))
    # Without this list, transformers 4 would add token_type_ids.
    settings["model_input_names"] = list(tokenizer.model_input_names)
    settings |= more
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")


def common_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert the settings of a tokenizer of transformers 5 so that transformers 4 reads them, too.

    In version 4 the class has another name. Special tokens without a role are a list, which version
    4 reads from `additional_special_tokens`; under the key of version 5 it expects a table.
    """
    common = {name: value for name, value in settings.items() if name not in OF_LOADING}
    if common.get("tokenizer_class") == IN_5:
        common["tokenizer_class"] = IN_4
    if isinstance(common.get("extra_special_tokens"), list):
        common["additional_special_tokens"] = common.pop("extra_special_tokens")
    return common


def save_from_hub(word: str) -> str:
    """Return how to save a tokenizer of the hub, for an error about a missing folder of this name;
    "" if the name cannot be a hub id."""
    # Hub ids without a hyphen and an owner, such as gpt2, are rarer than misspelt words.
    if not re.fullmatch(r"(?=.*[-/])\w[\w.-]*(/[\w.-]+)?", word):
        return ""
    return (
        "; for a model of the hub run in Python"
        f" transformers.AutoTokenizer.from_pretrained({word!r}).save_pretrained('FOLDER'), and give"
        " FOLDER"
    )


def why_unloadable(path: str, error: BaseException) -> str:
    """Return why a tokenizer cannot be loaded from a folder or hub id: no tokenizer file, or the
    first line of the error."""
    # For a missing file, transformers' error only lists the classes that it tried.
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in FILES):
        return f"it has no {FILES[0]}, nor another file of a tokenizer"
    return first_line(error)


def tokenizer_files(tokenizer: Any, max_length: int) -> dict[str, bytes]:
    """Return the files of a fast tokenizer as bytes by name: tokenizer.json, tokenizer_config.json
    and, if the tokenizer has one, the chat template for plain chats."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These are left by the tokenizer's last call, and are not part of it.
    backend["truncation"] = backend["padding"] = None
    names = [f"{role}_token" for role in ("cls", "sep", "mask", "pad", "unk", "bos", "eos")]
    settings = {n: getattr(tokenizer, n) for n in names if getattr(tokenizer, n, None)}
    if tokenizer.truncation_side != "right":
        settings["truncation_side"] = tokenizer.truncation_side
    settings["model_max_length"] = max_length
    settings["tokenizer_class"] = IN_4  # transformers 5 has this name as well
    files = {
        # Sorted, so that equal tokenizers have equal hashes.
        name: json.dumps(value, ensure_ascii=False, sort_keys=True).encode()
        for name, value in (("tokenizer.json", backend), (SETTINGS, settings))
    }
    with suppress(ValueError):  # several named templates, and none of them for plain chats
        if tokenizer.chat_template:
            files[CHAT_TEMPLATE] = str(tokenizer.get_chat_template()).encode()
    return files


def note_on_pieces(tokenizer: Any, texts: Sequence[str]) -> str:
    """Return a hint if a tokenizer splits the words of texts into many pieces, else "".

    No hint is given if more than a tenth of the words are in scripts without spaces.
    """
    sample = texts[:: max(1, len(texts) // TEXTS)]
    per_text = WORDS // max(1, len(sample))
    words = [word for text in sample for word in WORD.findall(text)[:per_text]]
    if len(words) < LEAST or sum(map(bool, map(UNSPACED.search, words))) > len(words) / 10:
        return ""
    # Joined by spaces: byte-level tokenizers have other pieces for a word without a space before.
    ids = tokenizer(" ".join(words), add_special_tokens=False, verbose=False)["input_ids"]
    mean, unknown = len(ids) / len(words), ids.count(tokenizer.unk_token_id) / len(words)
    if mean < FOREIGN and unknown < UNKNOWN:
        return ""
    problem = f"splits a word of the text into {mean:.1f} pieces, where 1 to 2 are usual"
    if unknown >= UNKNOWN:
        problem = f"has no pieces for {unknown:.0%} of the text's words"
    return (
        f"the tokenizer {problem}: it was probably made for another language, or its vocabulary is"
        " small; take a model of the text's language"
    )
