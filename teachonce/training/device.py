"""Chooses device and precision if the options of a training are `auto`.

torch is imported inside the functions, because `--help` must not wait for it.
"""

from __future__ import annotations

import os
from typing import Any

from teachonce.support.console import check_device
from teachonce.support.environment import torchrun_number

# oneDNN's names of the instruction sets that cannot multiply bf16.
WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def resolved_device(device: str) -> str:
    """Return the device for a value of `--device`. `auto` is a GPU if there is one; of several
    processes of torchrun, each gets its own GPU.

    Raises UserError if the machine lacks the device, or if LOCAL_RANK is not a number.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and os.environ.get("LOCAL_RANK"):
        # torchrun starts one process for each GPU.
        device = f"cuda:{torchrun_number('LOCAL_RANK', 0)}"
    check_device(device, torch.cuda.device_count())
    return device


def resolved_precision(precision: str, device: str) -> str:
    """Return the precision for a value of `--precision` on a device. `auto` is bf16 if the hardware
    multiplies bf16 natively, else fp32."""
    if precision != "auto":
        return precision
    return "bf16" if _multiplies_bf16(device) else "fp32"


def _multiplies_bf16(device: str) -> bool:
    import torch

    if device.startswith("cuda"):
        # By default torch also counts GPUs before compute capability 8.0, which emulate bf16.
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # The user's limit on the instructions of oneDNN, which multiplies the matrices of torch.
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper() in WITHOUT_BF16:
        return False
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
