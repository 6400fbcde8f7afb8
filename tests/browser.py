"""Open a page in a real browser and return its console messages, axe-core's findings and its
width."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDE, PHONE = (1280, 900), (375, 800)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@contextmanager
def opened(path: Path | str, size: tuple[int, int] = WIDE, dark: bool = False) -> Iterator[Any]:
    """Open a page from file://, without a network, or from a server on this machine. Requests go to
    that server alone, and the console must stay empty.

    Skips the test on a machine without Chromium or Playwright.
    """
    address = path if isinstance(path, str) else path.absolute().as_uri()
    server = address[: address.index("/", len("http://"))] if isinstance(path, str) else None
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            offline=server is None,
        )
        page = context.new_page()
        said = list[str]()
        page.on("console", lambda line: said.append(line.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.extend(_foreign(request.url, server)))
        page.goto(address)
        try:
            yield page
        finally:
            browser.close()
            assert said == [], said


def _foreign(url: str, server: str | None) -> list[str]:
    own = server is not None and url.startswith(f"{server}/")
    return [url] if url.startswith("http") and not own else []


def check_accessible(page: Any) -> None:
    """Check that axe-core finds no serious violation and that the page scrolls vertically only."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
    found = axe.Axe().run(page).response["violations"]
    serious = [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == [], serious
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
