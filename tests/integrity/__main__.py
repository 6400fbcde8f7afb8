"""The checks at any length, for `benchmarks.integrity`: rows and findings as a line of JSON.

python -m tests.integrity NAME '{"seed": 0, ...}', NAME of RUNS
"""

from __future__ import annotations

import json
import sys

from tests.integrity import (
    capture_trials,
    dead_ends,
    forgery,
    hard_places,
    hostile_hubs,
    plain_tokenizers,
    shared_kills,
    trials,
)
from tests.making.environment import set_environment

RUNS = {
    "checks": (trials.HEAD, trials.checked),
    "forged": (forgery.HEAD, forgery.trial),
    "captures": (capture_trials.HEAD, capture_trials.trial),
    "dead-ends": (dead_ends.HEAD, dead_ends.trial),
    "hard-places": (hard_places.HEAD, hard_places.trial),
    "hubs": (hostile_hubs.HEAD, hostile_hubs.trial),
    "kills": (shared_kills.HEAD, shared_kills.trial),
    "tokenizers": (plain_tokenizers.HEAD, plain_tokenizers.trial),
}

if __name__ == "__main__":
    set_environment()
    head, run = RUNS[sys.argv[1]]
    rows, wrong = run(**json.loads(sys.argv[2]))  # type: ignore[operator]
    print(json.dumps([head, rows, wrong]))
