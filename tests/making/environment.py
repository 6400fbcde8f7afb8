"""The environment of the tests, and of the processes that run their checks at any length."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


def set_environment() -> None:
    """Keep this process and its children off the network and out of the user's caches.

    Call it before the imports: libraries read these variables when they are imported.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TEACHONCE_CACHE"] = tempfile.mkdtemp(prefix="teachonce-cache-")
    os.environ["HF_DATASETS_CACHE"] = os.environ["TEACHONCE_CACHE"] + "/datasets"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the commands set it
    # No bfloat16 with `--precision auto`: expected numbers must not depend on the machine.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
    # one process for each core: more threads would only wait
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def printed_by(
    *words: object, cwd: Path | None = None, given: str | None = None, **environment: str
) -> str:
    """Run a command, which must succeed, with `given` on stdin, and return its stdout."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, input=given, env={**os.environ, **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def borrowing_python(root: Path, *packages: str) -> Path:
    """Install packages into a new environment that shares all other packages, such as torch, with
    this one. Return its Python."""
    subprocess.run([sys.executable, "-m", "venv", root], check=True)
    python = root / "bin" / "python"
    site_packages = next(root.glob("lib/python*/site-packages"))
    (site_packages / "zz_borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = ("-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)
    subprocess.run([python, *install], check=True)
    return python
