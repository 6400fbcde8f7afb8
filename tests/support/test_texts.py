"""What is printed or parsed: errors, differences, tables, numbers, and nothing private.

- The report of another library's error is a whole sentence.
- Differences between settings are shown by the values that differ.
- Tables for notebooks: escaped and short.
- Whole numbers in untrusted text, and the parts that they name.
- Printed or published text contains no password, no signature and no path.
"""

import pickle
from typing import Any

import pytest

from teachonce.store import StoreError
from teachonce.store.format.layout import part_number
from teachonce.support.differences import describe_differences, differences
from teachonce.support.errors import UserError, first_line, library_error_line
from teachonce.support.html import MOST, html_table
from teachonce.support.parsing import whole_number
from teachonce.support.redaction import publishable, redacted, without_credentials

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


def test_lists_of_files_are_shown_by_their_names() -> None:
    one = {
        "sources": [{"name": "a.txt", "sha256": "0" * 64}, {"name": "b.txt", "sha256": "1" * 64}]
    }
    other = {"sources": [{"name": "a.txt", "sha256": "0" * 64}]}
    assert [*differences(one, other)] == [("sources", "a.txt, b.txt", "a.txt")]
    assert [*differences({"loss": [1, 2]}, {"loss": [1]})] == [("loss", "'[1, 2]'", "'[1]'")]


def test_keys_are_described_as_options_or_in_words() -> None:
    for then, now, group, expected in (
        ({"width": 48}, {"width": 64}, "", "--width is 48 in the store and 64 now"),
        ({"width": 48}, {"width": 64}, "features", "the model's hidden size is 48 in"),
        ({"sources": {"a": 1}}, {"sources": {"a": 2}}, "identity.corpus", "sources, a) is 1 in"),
        ({"seed": None}, {"seed": 3}, "", "--seed is not given in the store and 3 now"),
        ({"bos": "</s>"}, {"bos": "auto"}, "", "--bos is '</s>' in the store and 'auto' now"),
        ({"bos": "a\nb"}, {"bos": ""}, "", "--bos is 'a\\nb' in the store and '' now"),
        ({"sources": [{"n": 1}]}, {"sources": [{"n": 2}]}, "identity.corpus", "(source 1, n) is"),
        ({"encodings": {"a": 1}}, {"encodings": {"a": 2}}, "features", "the codec (a) is 1 in"),
        ({"codec": "default", "encodings": {"a": 1}}, {"codec": "small", "encodings": {"a": 2}},
         "features", "--codec is default in the store and small now"),
    ):  # fmt: skip
        (line,) = describe_differences(differences(then, now, group))
        assert expected in line


def test_every_text_is_escaped_and_cut() -> None:
    found = html_table("<a>", [("<b>", "x" * 1000)], ("<c>", '"&'))
    assert "<caption>&lt;a&gt;</caption>" in found
    assert "<tr><th>&lt;c&gt;</th><th>&quot;&amp;</th></tr>" in found
    assert f"<tr><td>&lt;b&gt;</td><td>{'x' * MOST}…</td></tr>" in found


def test_without_headings_the_first_cell_is_one() -> None:
    assert html_table("a", [("b", 3)]) == (
        "<table>\n<caption>a</caption>\n<tr><th>b</th><td>3</td></tr>\n</table>"
    )


@pytest.mark.parametrize(
    "word", ["", "-1", "+5", "1_000", "1.5", " 1", "²", "٣", 19 * "9", 5000 * "9"]
)
def test_other_words_are_no_number(word: str) -> None:
    assert whole_number(word) is None and part_number(word) is None


def test_numbers() -> None:
    assert whole_number("007") == 7 and part_number("007") is None and part_number("7") == 7
    assert whole_number(18 * "9") == 10**18 - 1 and whole_number("100", 2) is None


CLEAN = "https://host:8/a.zarr"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:CANARY@host:8/a.zarr",
        "https://CANARY@host:8/a.zarr",
        "https://me:CAN/ARY?x#y@host:8/a.zarr",
        "https://host:8/a.zarr?X-Amz-Signature=CANARY&X-Amz-Date=1",
        "https://me:CANARY@host:8/a.zarr?sig=CANARY",
    ],
)
def test_urls(url: str) -> None:
    for around in ("{}", "cannot open {} then", "({})", '"{}"', "<{}>", "[here]({})"):
        assert redacted(around.format(url)) == around.format(CLEAN)
    nested: dict[str, Any] = {"a": [{"b": (url, 3, None)}], url: True}
    assert redacted(nested) == {"a": [{"b": [CLEAN, 3, None]}], CLEAN: True}


def test_what_is_no_secret() -> None:
    for text in (
        "https://films.org/@user/x", "https://host:8080/a@b", "s3://bucket/a.zarr", "me@host: 3",
        "https://docs.org/page#part", "is it? yes", "a/b and c", "1/2", "hf_hub", "",
    ):  # fmt: skip
        assert redacted(text) == publishable(text) == text
    link = "[a film](https://films.org/watch?v=7) by https://me:CANARY@host/a"
    assert without_credentials(link) == "[a film](https://films.org/watch?v=7) by https://host/a"


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "CANARYCANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "short")
    text = "sent CANARYCANARY and hf_abcdefghijklmnopqrstuvwx, short"
    assert redacted(text) == without_credentials(text) == "sent *** and hf_***, short"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("svd:/home/ann/môj projekt/a.zarr", "svd:a.zarr"),
        ("svd:~/my project/a.zarr", "svd:a.zarr"),
        ("layers:1,2@/home/ann/my project/a b", "layers:1,2@a b"),
        ("folder:../my project/model", "folder:model"),
        ("folder:my project/model", "folder:my project/model"),
        ("/home/me/a store.zarr", "a store.zarr"),
        ("~/a.zarr", "a.zarr"),
        ("../me/a.zarr", "a.zarr"),
        ("cut out of /home/me/teacher, then trained", "cut out of teacher, then trained"),
        ("file:///home/me/a.zarr", "a.zarr"),
        ("svd:/home/me/a.zarr", "svd:a.zarr"),
        ("https://host:8080/a/b", "https://host:8080/a/b"),
        ("a|/home/me/a.zarr|b", "a|a.zarr|b"),
        ("(~me/b/a.zarr): no", "(a.zarr): no"),
        ("`/srv/x/y`", "`y`"),
    ],
)
def test_paths(text: str, clean: str) -> None:
    assert publishable(text) == clean and redacted(text) == text


def test_errors_have_no_password() -> None:
    error = StoreError("https://me:CANARY@host:8/a.zarr: is not there")
    assert str(error) == f"{CLEAN}: is not there"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(UserError()) == ""
