"""The environment of the tests, and of processes that run their checks at any length."""

from __future__ import annotations

import os
import tempfile


def set_environment() -> None:
    """Keep this process and its children off the network and out of the user's caches.

    Libraries read these variables where they are imported: call it before.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TEACHONCE_CACHE"] = tempfile.mkdtemp(prefix="teachonce-cache-")
    os.environ["HF_DATASETS_CACHE"] = os.environ["TEACHONCE_CACHE"] + "/datasets"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the commands have it
    # No bfloat16 by `--precision auto`: expected numbers must not depend on the machine.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
    if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: more threads would only wait
        os.environ["OMP_NUM_THREADS"] = "1"
