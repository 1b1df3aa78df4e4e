"""What one call adds to the counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracegrad.events import Turn
from tracegrad.proxy.metrics.counters import ProxyMetrics

# The proxy's own work is one stage of three.
_STAGE_NAMES = {"prepare": "proxy", "encode": "proxy", "finish": "proxy"}


def count_call(
    metrics: ProxyMetrics,
    dialect: str,
    status: str,
    stages: Mapping[str, float] | None,
    first_token_s: float | None,
) -> None:
    """As a call ends. `stages`: its seconds, with its commit; None: it became no turn.
    `first_token_s`: from its arrival, where that is known."""
    metrics.add("calls_total", dialect, status)
    if first_token_s is not None:
        metrics.observe("time_to_first_token_seconds", seconds=first_token_s)
    if stages is None:
        return
    seconds: dict[str, float] = {}
    for stage, took in stages.items():
        name = _STAGE_NAMES.get(stage, stage)
        seconds[name] = seconds.get(name, 0.0) + took
    for stage, took in seconds.items():
        metrics.observe("stage_seconds", stage, seconds=took)
    metrics.observe("call_seconds", seconds=sum(seconds.values()))


def count_turns(metrics: ProxyMetrics, turns: Sequence[Turn], reused_tokens: int) -> None:
    """As they are committed. `reused_tokens`: so many of each prompt the engine was given as they
    were recorded."""
    metrics.add("turns_committed_total", number=len(turns))
    for turn in turns:
        prompt = len(turn.prompt_token_ids)
        reused = min(reused_tokens, prompt) if turn.parent_id is not None else 0
        metrics.add("prompt_tokens_total", "reused", number=reused)
        metrics.add("prompt_tokens_total", "tokenized", number=prompt - reused)
        metrics.add("sampled_tokens_total", number=len(turn.completion_token_ids))
        if turn.fork_reason is not None:
            metrics.add("forks_total", turn.fork_reason)
        if turn.untrainable is not None:
            metrics.add("turns_untrainable_total", turn.untrainable)
