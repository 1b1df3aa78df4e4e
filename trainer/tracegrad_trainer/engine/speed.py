"""How fast a step was."""

from __future__ import annotations


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
