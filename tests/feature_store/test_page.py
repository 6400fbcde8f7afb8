"""The page of a store's sequences, and what is on it: rows of tokens, pieces, the nearest.

- The page of a store's sequences shows the store's values; it is opened in a real browser.
- Tokens in the rows of a text: each token and each character has exactly one place, in order.
- The nearest sequences of a store: by stored vectors, else by the means of hidden states.
- Pieces as people read them.
"""

import json
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from teachonce.align import Tokens
from teachonce.feature_store.arguments import MOST
from teachonce.feature_store.cli import main
from teachonce.feature_store.page import lattice
from teachonce.feature_store.page import nearest as module
from teachonce.feature_store.page.lattice import Cluster, clusters
from teachonce.feature_store.page.nearest import COUNT, nearest_sequences
from teachonce.feature_store.piece_names import PieceNames, direction
from teachonce.store import FeatureStore, open_store
from tests.browser import PHONE, WIDE, check_accessible, opened
from tests.end_to_end.support import refused as refused_by
from tests.making.models import Tokenizers
from tests.making.stores import PIECES, TOKENIZER, features_of, make_store

pytest.importorskip("jinja2")
EVIL = "</script><img src=x onerror=alert(1)>"
NUMBERS = (17, 5)
OTHERS = ("sample", "head", "classification", "tagging", "pairs", "embedding")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["page", *map(str, arguments)])


refused = partial(refused_by, main, "page")


def data_of(page: Path) -> Any:
    """Return the data that the script of a page reads."""
    found = re.search(r"^const page = (.*);$", page.read_text(), re.MULTILINE)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="session")
def written(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of two sequences, with a student's tokens."""
    out = tmp_path_factory.mktemp("pages") / "new/page.html"
    done = run(store, "--vocab", "5k", "--sequence", "17,5", "--out", out)
    assert done.exit_code == 0 and done.output == f"page in {out}\n"
    return out


def test_it_shows_what_the_store_has(store: Path, written: Path) -> None:
    fs, printed = open_store(store), data_of(written)
    for number, shown in zip(NUMBERS, printed["sequences"], strict=True):
        record = fs[number]
        for token, (piece, begin, end, special, _, text) in enumerate(shown["teacher"]):
            assert PIECES[piece] == record.token_ids[token] and special == record.special[token]
            assert special or (text == record.text[begin:end] and text)
        for view, best in zip(record.views, shown["best"], strict=True):
            assert shown["masks"][view.number] == view.spans.tolist()
            for token, pairs in enumerate(best):
                logits = view.logits
                order = np.argsort(-logits.logprobs[token])
                assert [identity for identity, _ in pairs] == logits.ids[token][order].tolist()
                chances = np.exp(logits.logprobs[token][order])
                assert [chance for _, chance in pairs] == pytest.approx(chances, rel=1e-3)
        for name, runs in shown["runs"].items():
            student = shown["students"].get(name, shown["students"]["own"])
            for t_begin, t_end, s_begin, s_end in runs:
                texts = [row[5] for row in shown["teacher"][t_begin:t_end]]
                own = [row[5] for row in student[s_begin:s_end]]
                assert "".join(texts) == ("".join(own) if name != "reduce" else own[0])


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (PHONE, True)])
def test_a_page_in_a_browser(store: Path, written: Path, size: tuple[int, int], dark: bool) -> None:
    shown, record = data_of(written)["sequences"][0], open_store(store)[NUMBERS[0]]
    with opened(written, size, dark) as page:
        page.wait_for_selector("body[data-shown='span 0']")
        check_accessible(page)
        first = page.locator("section.sequence").first
        token = first.locator(".lattice:visible [data-side=teacher]")
        assert token.all_inner_texts() == [row[0] for row in shown["teacher"]]
        run = next(each for each in shown["runs"]["span"] if each[3] - each[2] > 1)
        token.nth(run[0]).hover()
        assert first.locator(".lattice:visible .student .token.lit").all_inner_texts() == [
            row[0] for row in shown["students"]["own"][run[2] : run[3]]
        ]
        token.nth(run[0]).click()
        assert token.nth(run[0]).get_attribute("aria-pressed") == "true"
        panel = first.locator(".panel")
        assert (
            f"{run[1] - run[0]} : {run[3] - run[2]}" in panel.locator(".description").inner_text()
        )
        best = round(100 * float(np.exp(record.views[0].logits.logprobs[run[0]].max())))
        assert f"{best} %" in panel.inner_text()
        page.keyboard.press("ArrowDown")
        here = page.evaluate(
            "[document.activeElement.dataset.side, +document.activeElement.dataset.token]"
        )
        assert here == ["student", run[2]]
        page.keyboard.press("End")
        page.keyboard.press("Enter")
        assert re.search(r"\[SEP\]\W+has no text", panel.locator(".description").inner_text())
        for name in ("match", "reduce"):
            page.get_by_label(name, exact=True).check()
            page.wait_for_selector(f"body[data-shown='{name} 0']")
            taught = sum(each[1] - each[0] for each in shown["runs"][name])
            assert first.locator(".lattice:visible .teacher .token.in").count() == taught
        assert first.locator(".lattice:visible").get_attribute("data-tokens") == "reduce"
        page.get_by_label("What the teacher read").select_option("1")
        page.wait_for_selector("body[data-shown='reduce 1']")
        words = [record.text[begin:end] for begin, end, _ in record.views[1].spans]
        atoms = first.locator(".lattice:visible .atom.masked").all_inner_texts()
        assert "".join(atoms) == "".join(words)
        first.locator(".shares summary").click()
        rows = first.locator(".shares tbody tr")
        assert rows.count() == len(record.token_ids)
        most = shown["teacher"][int(record.views[1].attention["mean"][0].argmax())][0]
        assert rows.first.locator("td").nth(2).inner_text().startswith(most)
        check_accessible(page)


@pytest.mark.parametrize("tier", OTHERS)
def test_pages_of_other_stores(tmp_path: Path, tier: str) -> None:
    tokenizer = json.loads(TOKENIZER)
    tokenizer["model"]["vocab"] = {
        EVIL if piece == "stor" else piece: number for piece, number in PIECES.items()
    }
    files = {"tokenizer.json": json.dumps(tokenizer).encode(), "config.json": b"{}"}
    make_store(tmp_path / "a.zarr", features_of(tier=tier), parts=1, files=files)
    numbers = ",".join(map(str, range(12)))
    assert run(tmp_path / "a.zarr", "--sequence", numbers).exit_code == 0
    page = tmp_path / "a-page.html"
    text, printed, fs = page.read_text(), data_of(page), open_store(tmp_path / "a.zarr")
    assert EVIL not in text and "Give --vocab to see" in text and "alignment" not in printed["maps"]
    pieces = {row[0] for each in printed["sequences"] for row in each["teacher"]}
    assert EVIL in pieces
    check_tier(fs, text, printed, tier)


def check_tier(fs: FeatureStore, text: str, printed: Any, tier: str) -> None:
    """Check that the page shows the features that are specific to the store's tier."""
    record, best = fs[4], printed["sequences"][4]["best"][1]
    if tier == "sample":
        logits = record.views[1].logits
        begin, end = logits.start[2:4]
        assert best[2][0][1] == pytest.approx(logits.counts[begin:end].max() / 12, rel=1e-3)
        assert printed["draws"] == 12
    elif tier == "head":
        weight, bias = fs.head()
        raw = record.views[1].logits.values @ weight.T + bias
        assert [pairs[0][0] for pairs in best] == raw.argmax(axis=1).tolist()
    elif tier == "embedding":
        assert "embedding of length 1.000" in text and "vectors of whole texts" in text
    elif tier == "tagging":
        assert not printed["hasLogits"] and '<th scope="col">tag</th>' in text
    else:
        assert fs.features.task and not printed["hasLogits"]
        label = "none" if record.label is None else fs.features.task.labels[record.label]
        assert f"; label {label}, " in text


def test_bad_input_is_reported_in_a_line(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    assert "no sequence 24; it has 0..23" in refused(store, "--sequence", "3,24", "--out", out)
    assert "such as 17,42, got 'two'" in refused(store, "--sequence", "1,two", "--out", out)
    many = ",".join(map(str, range(MOST + 1)))
    assert f"has {MOST} sequences at most" in refused(store, "--sequence", many, "--out", out)
    os.mkfifo(tmp_path / "pipe.html")
    for other in (tmp_path, tmp_path / "pipe.html"):
        assert f"{other}: is a folder, pipe or device" in refused(store, "--out", other)
    (tmp_path / "novel.txt").write_text("mine")
    line = refused(store, "--out", tmp_path / "novel.txt")
    assert "exists already" in line and (tmp_path / "novel.txt").read_text() == "mine"
    line = refused(store, "--out", tmp_path / "novel.txt/page.html")
    assert "novel.txt" in line and "check the name" in line
    assert "give --out as well" in refused("s3://bucket/a.zarr")
    assert not out.exists()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    line = refused(store, "--out", out)
    assert "feature-store page needs jinja2" in line and "teachonce[report]" in line


def test_a_page_is_made_again(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    for number in (0, -1):
        assert run(store, f"--sequence={number}", "--out", out).exit_code == 0
    assert "sequence 23 of 24" in out.read_text()


Side = list[tuple[int, int]]  # spans; an empty span is special


def tokens(spans: Side) -> Tokens:
    return Tokens.of([list(range(len(spans)))], [spans], [[int(b == e) for b, e in spans]])


def drawn(text: str, *sides: Side) -> list[Cluster]:
    return clusters(text, [tokens(side) for side in sides])


def printed(text: str, found: list[Cluster]) -> list[str]:
    """Format each cluster as its atoms, and each side's tokens by number under the columns."""
    return [
        "|".join(text[b:e] for b, e in c.atoms)
        + "".join(f" {[(x.column, x.width, x.tokens) for x in side]}" for side in c.sides)
        for c in found
    ]


def test_a_word_that_is_cut_in_other_places() -> None:
    teacher = [(0, 0), (0, 7), (7, 8), (0, 0)]
    student = [(0, 0), (0, 3), (3, 7), (7, 8), (0, 0)]
    assert printed("stories.", drawn("stories.", teacher, student)) == [
        " [(0, 1, (0,))] [(0, 1, (0,))]",
        "sto|ries [(0, 2, (1,))] [(0, 1, (1,)), (1, 1, (2,))]",
        ". [(0, 1, (2,))] [(0, 1, (3,))]",
        " [(0, 1, (3,))] [(0, 1, (4,))]",
    ]


def test_blanks_at_edges_and_characters_that_nothing_covers() -> None:
    found = drawn("a  bc\x00 d", [(0, 1), (1, 5), (6, 8)], [(0, 1)])
    assert printed("a  bc\x00 d", found) == [
        "a [(0, 1, (0,))] [(0, 1, (0,))]",
        "bc [(0, 1, (1,))] []",
        "\x00 [] []",
        "d [(0, 1, (2,))] []",
    ]
    assert [each.before for each in found] == ["", "  ", "", " "]


def test_tokens_of_one_character_share_a_cell() -> None:
    found = drawn("🙂x", [(0, 1), (0, 1), (0, 1), (1, 2)], [(0, 2)])
    assert printed("🙂x", found) == ["🙂|x [(0, 1, (0, 1, 2)), (1, 1, (3,))] [(0, 2, (0,))]"]


def test_the_work_grows_with_the_text() -> None:
    assert instructions(64) < 6 * instructions(16)


def instructions(words: int) -> int:
    """Count the instructions for the layout of `words` words, with a special token in each."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace if frame.f_code.co_filename == lattice.__file__ else None

    side = [(5 * n, 5 * n + size) for n in range(words) for size in (2, 0)]
    text, before = "word " * words, sys.gettrace()
    sys.settrace(trace)
    try:
        drawn(text, side, [(begin, begin + 4) for begin, _ in side[::2]])
    finally:
        sys.settrace(before)
    return count


@st.composite
def texts_with_sides(draw: st.DrawFn) -> tuple[str, list[Side]]:
    """Draw a text, and spans of tokens that may overlap, step back, be special or leave gaps."""
    text = draw(st.text("ab \n", max_size=12))
    place = st.integers(0, len(text))
    span = st.tuples(place, place).map(lambda pair: (min(pair), max(pair)))
    side = st.lists(span, max_size=8)
    return text, draw(st.lists(st.one_of(side, side.map(sorted)), min_size=1, max_size=2))


@given(texts_with_sides())
def test_everything_is_in_one_place(example: tuple[str, list[Side]]) -> None:
    text, sides = example
    found = drawn(text, *sides)
    assert "".join(c.before + "".join(text[b:e] for b, e in c.atoms) for c in found) == (
        text if found and text.strip() and not text[-1:].isspace() else text[: _end(found)]
    )
    for number, spans in enumerate(sides):
        placed = [t for c in found for cell in c.sides[number] for t in cell.tokens]
        assert sorted(placed) == list(range(len(spans)))
        for cluster in found:
            for cell in cluster.sides[number]:
                if cluster.atoms:
                    begin = cluster.atoms[cell.column][0]
                    end = cluster.atoms[cell.column + cell.width - 1][1]
                    for token in cell.tokens:
                        low, high = spans[token]
                        kept = text[low:high].strip() or low == high
                        assert not kept or low == high or begin <= high and low <= end


def _end(found: list[Cluster]) -> int:
    return max((e for c in found for _, e in c.atoms), default=0)


@pytest.mark.parametrize("kind", ("states", "embedding"))
def test_they_equal_the_nearest_of_all_pairs(tmp_path: Path, store: Path, kind: str) -> None:
    path = store
    if kind == "embedding":
        path = tmp_path / "a.zarr"
        make_store(path, features_of(tier="embedding"), parts=2)
    fs = open_store(path)
    mean, deviation = fs.calibration["mean"]
    vectors = np.stack(
        [
            record.embedding
            if kind == "embedding"
            else ((record.views[0].hidden["mean"] - mean) / deviation)[~record.special].mean(axis=0)
            for record in fs
        ]
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = nearest_sequences(fs, [17, 3])
    assert found.among is not None and found.among.whole and kind[:5] in found.about
    for number in (17, 3):
        cosines = vectors @ vectors[number]
        order = [each for each in np.argsort(-cosines) if each != number][:COUNT]
        assert [other for other, _ in found.neighbours[number]] == order
        assert [c for _, c in found.neighbours[number]] == pytest.approx(cosines[order], abs=1e-4)


def test_a_large_store_is_sampled(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATES", 1)
    found = nearest_sequences(open_store(store), [17])
    assert found.among is not None and found.among.summary == "12 of 24 sequences, spread evenly"
    assert {other for other, _ in found.neighbours[17]} <= set(range(12))


def test_a_store_may_have_no_vectors(tmp_path: Path) -> None:
    make_store(tmp_path / "a.zarr", replace(features_of(), hidden=(), attention=()), parts=1)
    found = nearest_sequences(open_store(tmp_path / "a.zarr"), [0])
    assert found.neighbours == {} and "neither vectors of texts nor hidden states" in found.about


def test_byte_level_pieces_are_written_in_letters(make_tokenizer: Tokenizers) -> None:
    backend = make_tokenizer("bpe").backend_tokenizer
    names = PieceNames(backend.to_str())
    text = "Нева 🙂 x\n東"
    readable = [
        names.readable(token) for token in backend.encode(text, add_special_tokens=False).tokens
    ]
    joined = "".join(readable)
    assert joined.startswith("<D0><9D>е")  # a letter in two pieces, and one in a piece
    codes = joined.replace("Ġ", " ").replace("Ċ", "\n")
    raw, place = b"", 0
    while place < len(codes):
        byte = codes[place : place + 4]
        is_byte = byte[:1] == "<" and byte[3:] == ">"
        raw += bytes.fromhex(byte[1:3]) if is_byte else codes[place].encode()
        place += 4 if is_byte else 1
    assert raw == text.encode()
    assert names.unknown is None


def test_other_pieces_stay_as_they_are(make_tokenizer: Tokenizers) -> None:
    for kind, unknown in (("wordpiece", "[UNK]"), ("unigram", "<unk>")):
        names = PieceNames(make_tokenizer(kind).backend_tokenizer.to_str())
        assert names.unknown == unknown and names.readable("##ä▁é") == "##ä▁é"
    assert PieceNames(None).readable("17") == "17"


def test_the_way_that_a_text_runs() -> None:
    assert [direction(text) for text in ("1. كانت", "a كانت", "שלום", "12", "")] == [
        *("rtl", "ltr", "rtl", "ltr", "ltr")
    ]
