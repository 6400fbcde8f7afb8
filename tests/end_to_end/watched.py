"""`student-train` that keeps the gradient of its first step in GRADIENTS.RANK, and whose process
number STOPPED gets a signal in its third."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from student_train.cli import main

RANK = os.environ.get("RANK", "0")


class Watch:
    steps = 0

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if self.steps == 1 and "GRADIENTS" in os.environ:
            torch.save([weight.grad for weight in weights], f"{os.environ['GRADIENTS']}.{RANK}")
        if self.steps == 3 and os.environ.get("STOPPED") == RANK:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    register_optimizer_step_pre_hook(Watch())
    main()
