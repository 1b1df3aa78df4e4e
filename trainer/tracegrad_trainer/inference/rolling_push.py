"""New weights into several engines, one after the other: the others take the calls meanwhile.

While a push goes round, two versions are served, and the proxy has one of each engine. If one
engine fails, those before it go back, and those after it were never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tracegrad_trainer.inference.control_routes import EngineLostError, PushError, ServedWeights
from tracegrad_trainer.inference.weight_swap import Verify, WeightSwap


def roll(
    swap: WeightSwap,
    urls: Sequence[str],
    new: ServedWeights,
    had: ServedWeights,
    verify: Verify | None = None,
) -> dict[str, float]:
    """From `had` to `new`, each held against `verify` before the next one stands still. All engines
    serve `new` then, those too that are not in `urls`. Seconds by stage, of all.

    Raises PushError (all of them serve `had`), EngineLostError.
    """
    seconds: dict[str, float] = {}
    changed: list[str] = []
    try:
        for url in urls:
            check = partial(verify, url) if verify else None
            with swap.only(url):
                found = swap.change(new, had, check)
            changed.append(url)
            for stage, value in found.items():
                seconds[stage] = seconds.get(stage, 0.0) + value
        swap.proxy.set_version(new.version)
    except BaseException as error:
        _take_back(swap, changed, new, had, error)
        raise
    return seconds


def _take_back(
    swap: WeightSwap,
    urls: Sequence[str],
    new: ServedWeights,
    had: ServedWeights,
    cause: BaseException,
) -> None:
    """Raises EngineLostError: one of them does not take it; the others have."""
    lost: EngineLostError | None = None
    for url in reversed(urls):
        try:
            with swap.only(url):
                swap.change(had, new)
        except PushError as error:
            lost = EngineLostError(
                f"engine {url} does not go back to version {had.version} from {new.version},"
                f" restart it: {error} (after: {cause})"
            )
    if lost is not None:
        raise lost from cause
