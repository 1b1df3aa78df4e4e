"""A device's peak by its data sheet (dense bfloat16, without sparsity), and what share of it a step
reached."""

from __future__ import annotations

import torch

# Operations a second, of data sheets; the first name that is part of the device's own counts.
_BFLOAT16: dict[str, float | None] = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090 ": None,  # the slower D and Laptop
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second; None where it is not known (CPUs, float32, other devices)."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _BFLOAT16.items() if known in name), None)


def throughput_metrics(
    tokens: float, seconds: float, *, flops: float | None = None, peak: float | None = None
) -> dict[str, float]:
    """Tokens a second of training, and the share of the hardware's peak that this was.

    `flops` are those of the step on all ranks together, `peak` (a second) of all of them; without
    both there is no `mfu`.
    """
    if seconds <= 0:
        return {}
    found = {"tokens_per_second": tokens / seconds}
    if flops is not None and peak:
        found["mfu"] = flops / seconds / peak
    return found
