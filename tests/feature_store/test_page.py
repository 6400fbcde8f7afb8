"""The page of a store's sequences shows the store's values; it is opened in a real browser."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from teachonce.feature_store.arguments import MOST
from teachonce.feature_store.cli import main
from teachonce.store import FeatureStore, open_store
from tests.browser import PHONE, WIDE, check_accessible, opened
from tests.end_to_end.support import refused as refused_by
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


def lit(page: Any, side: str) -> list[str]:
    return list(page.locator(f".lattice:visible .{side} .token.lit").all_inner_texts())


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
        assert lit(first, "student") == [
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


def test_a_page_is_made_anew(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    for number in (0, -1):
        assert run(store, f"--sequence={number}", "--out", out).exit_code == 0
    assert "sequence 23 of 24" in out.read_text()
