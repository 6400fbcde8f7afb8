"""An export finds lines in a browser: transformers.js in a headless Chromium, from local files."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.browser import opened
from tests.student_export.test_export import EXAMPLE, TEXTS, Teacher, by_example, embedder, run

TRANSFORMERS_JS = "@huggingface/transformers@4.3.1"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.apart
def test_it_finds_lines_in_a_browser(tiny_teacher: Teacher, tmp_path: Path) -> None:
    """A search in a browser finds lines. `apart`, as it fetches transformers.js from npm."""
    npm = shutil.which("npm") or pytest.skip("needs npm")
    site, modules = tmp_path / "site", tmp_path / "node_modules"
    site.mkdir()
    words = ("install", "--ignore-scripts", "--no-audit", "--no-fund", TRANSFORMERS_JS)
    subprocess.run([npm, *words], cwd=tmp_path, check=True, capture_output=True)
    (site / "transformers").symlink_to(modules / "@huggingface/transformers/dist")
    (site / "onnxruntime").symlink_to(modules / "onnxruntime-web/dist")
    shutil.copy(EXAMPLE.with_suffix(".html"), site / "index.html")
    student = embedder(tiny_teacher("bert"), tmp_path / "student")
    for dtype, more in (("fp32", ()), ("q8", ("--quantize", "int8", "--least", "0.5"))):
        shutil.rmtree(site / "model", ignore_errors=True)
        assert run(student, "--to", "onnx", *more, "--out", site / "model").exit_code == 0
        wanted = by_example(site / "model", *TEXTS)
        with served(site) as address, opened(f"{address}?dtype={dtype}") as page:
            page.wait_for_selector("#go:enabled")
            found = np.array(page.evaluate("texts => embed(texts)", TEXTS))
            assert np.abs(found - wanted).max() < 1e-3
            page.fill("#question", TEXTS[0])
            page.fill("#lines", "\n".join(TEXTS))
            page.click("#go")
            assert page.wait_for_selector("#found li").inner_text() == f"1.000 {TEXTS[0]}"
            assert page.locator("#found li").count() == len(TEXTS)
