"""The checks at any length, for `benchmarks.integrity`: print rows and findings as a line of JSON.

python -m tests.integrity NAME '{"seed": 0, ...}', where NAME is a key of RUNS
"""

import json
import sys
from importlib import import_module

from tests.making.environment import set_environment

RUNS = {  # module and function: only one of them is imported, because some import torch
    "checks": ("trials", "checked"),
    "forged": ("forgery", "trial"),
    "captures": ("capture_trials", "trial"),
    "dead-ends": ("dead_ends", "trial"),
    "hard-places": ("hard_places", "trial"),
    "hubs": ("hostile_hubs", "trial"),
    "kills": ("shared_kills", "trial"),
    "tokenizers": ("plain_tokenizers", "trial"),
}

if __name__ == "__main__":
    set_environment()
    module, function = RUNS[sys.argv[1]]
    checks = import_module(f"tests.integrity.{module}")
    rows, wrong = getattr(checks, function)(**json.loads(sys.argv[2]))
    print(json.dumps([checks.HEAD, rows, wrong]))
