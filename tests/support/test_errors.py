"""The report of another library's error is a whole sentence."""

from __future__ import annotations

from teachonce.support.errors import first_line, library_error_line

TRANSFORMERS = """Couldn't instantiate the backend tokenizer from one of:
(1) a `tokenizers` library serialization file,
(2) a slow tokenizer instance to convert or
(3) an equivalent slow tokenizer class to instantiate and convert.
You need to have sentencepiece or tiktoken installed to convert a slow tokenizer to a fast one."""


def test_the_first_line_is_reported() -> None:
    assert first_line(ValueError("\nno such key\n\nTraceback of another process")) == "no such key"
    assert first_line(KeyError()) == "KeyError"


def test_a_line_that_ends_in_a_colon_is_reported_with_what_it_announces() -> None:
    printed = first_line(ValueError(TRANSFORMERS))
    assert printed.startswith(
        "Couldn't instantiate the backend tokenizer from one of: (1) a `token"
    )
    assert printed.endswith(" ...") and "\n" not in printed and len(printed) < 200
    assert first_line(ValueError("sizes differ:\n 3 and 4 ")) == "sizes differ: 3 and 4"
    assert first_line(ValueError("the file:")) == "the file"


def test_files_that_a_library_could_not_write() -> None:
    full = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert "No space left on device, while a file was" in str(library_error_line(Exception(full)))
    for words in ("PytorchStreamWriter failed writing file", "inline_container.cc:747] . open"):
        assert "a file could not be written" in str(library_error_line(RuntimeError(words)))
    assert (
        library_error_line(RuntimeError("shapes differ"))
        is library_error_line(ValueError("no"))
        is None
    )
