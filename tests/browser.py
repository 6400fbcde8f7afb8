"""A page in a real browser: what its console says, what axe-core finds, how wide it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDE, PHONE = (1280, 900), (375, 800)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@contextmanager
def opened(path: Path, size: tuple[int, int] = WIDE, dark: bool = False) -> Iterator[Any]:
    """A page from file://, without a network; at its end nothing may stand on the console.

    Skips the test on a machine without Chromium or Playwright.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            offline=True,
        )
        page = context.new_page()
        said = list[str]()
        page.on("console", lambda line: said.append(line.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda r: said.append(r.url) if r.url.startswith("http") else None)
        page.goto(path.absolute().as_uri())
        try:
            yield page
        finally:
            browser.close()
            assert said == [], said


def check_accessible(page: Any) -> None:
    """axe-core finds nothing serious, and the page scrolls down only."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
    found = axe.Axe().run(page).response["violations"]
    serious = [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == [], serious
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
