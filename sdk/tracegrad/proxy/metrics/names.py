"""Every metric of `GET /metrics`: its name, its kind, what it counts, and all its labels' values.

The values are known at the start, so that there are as many series as there will ever be: no
rollout, no model and no key has one of its own. `docs/metrics.md` has the same table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tracegrad.proxy.dialects.registry import DIALECTS, OtelDialect
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason

PREFIX = "tracegrad_proxy_"
OTHER = "other"  # a word that is none of a label's

# How workers' values become the proxy's. Of what every worker has for itself all of the same (a
# gate, a version) the largest; `known` is the smallest of those that are not 0.
Combine = Literal["sum", "max", "known"]

# Seconds, upper bounds: from the proxy's own work to rollouts of minutes.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
           30.0, 60.0, 120.0, 300.0, 600.0)  # fmt: skip

CALL_STAGES = ("proxy", "gate", "queue", "engine_queue", "prefill", "decode", "inference", "commit")
STATUSES = ("2xx", "4xx", "5xx", "broken", "aborted")
# `Turn.untrainable` as the proxy gives it.
UNTRAINABLE = ("greedy", "sampling_truncated", "sampling_penalised", "sampling_replaced",
               "constrained", "media", "echo", "aborted", "no_tokens", "no_logprobs",
               "version_unknown", "over_length", OTHER)  # fmt: skip
LOST = ("store_unavailable", "refused")
# In a worker's cell of `upstream_up`, where 0 is a worker that has not looked yet.
DOWN, UP = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels`: each with all its values. `combine`: how workers' values become one."""

    kind: Literal["counter", "gauge", "histogram"]
    what: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    combine: Combine = "sum"


def metrics_of(upstreams: Sequence[str] = ()) -> dict[str, Metric]:
    """By name without `PREFIX`. `upstreams`: the names of the servers behind the proxy."""
    dialects = [name for name in DIALECTS if name != OtelDialect.name]
    return {
        "calls_total": Metric(
            "counter",
            "LLM calls that ended, by their status; `broken`: a stream that ended in an error,"
            " `aborted`: the client left",
            {"dialect": dialects, "status": STATUSES},
        ),
        "calls_in_flight": Metric("gauge", "LLM calls that were received and have not ended"),
        "calls_waiting": Metric(
            "gauge",
            "of them, those that wait at the closed gate, for an engine that is down, or for a"
            " place of their rollout (`pace_calls`)",
            {"at": ("gate", "engine", "intake")},
        ),
        "intake_asks_total": Metric(
            "counter",
            "asks of drivers for places: `granted`, or told to `wait`",
            {"answer": ("granted", "wait")},
        ),
        "intake_places_total": Metric("counter", "rollouts that drivers were told to open"),
        "intake_waited_seconds_total": Metric(
            "counter", "seconds that drivers, and paced rollouts, waited for their places"
        ),
        "paced_rollouts_total": Metric(
            "counter",
            "rollouts whose first call was paced: they got a place (`placed`), or were `let_in`"
            " without one after max_wait_s",
            {"how": ("placed", "let_in")},
        ),
        "call_seconds": Metric(
            "histogram", "seconds of a call that became a turn, from its arrival to its commit"
        ),
        "time_to_first_token_seconds": Metric(
            "histogram", "seconds from a call's arrival to the first bytes of a streamed answer"
        ),
        "stage_seconds": Metric(
            "histogram",
            "seconds of a call that became a turn, by stage (`tracegrad rollouts time`)",
            {"stage": CALL_STAGES},
        ),
        "answered_retries_total": Metric(
            "counter", "calls that a client sent again and got the recorded answer of"
        ),
        "prompt_tokens_total": Metric(
            "counter",
            "tokens of prompts: `reused` as they were recorded, or `tokenized` anew",
            {"source": ("reused", "tokenized")},
        ),
        "sampled_tokens_total": Metric("counter", "tokens that the engine sampled for turns"),
        "forks_total": Metric(
            "counter",
            "turns that do not continue the turn they follow, by reason",
            {"reason": [reason.value for reason in ForkReason]},
        ),
        "turns_committed_total": Metric("counter", "turns of calls that are in the store"),
        "turns_untrainable_total": Metric(
            "counter",
            "of them, those that will not be trained, by reason",
            {"reason": UNTRAINABLE},
        ),
        "turns_lost_total": Metric(
            "counter",
            "turns that are not in the store: it could not be written, or refused them",
            {"reason": LOST},
        ),
        "gate_held": Metric("gauge", "1 while calls wait for a push of weights", combine="max"),
        "gate_held_seconds_total": Metric(
            "counter", "seconds in which calls were held, counted as each hold ends", combine="max"
        ),
        "policy_version": Metric("gauge", "the policy version that is served", combine="max"),
        "upstream_up": Metric(
            "gauge",
            "1: the server gets calls, 0: it is down, as any worker sees it",
            {"upstream": list(upstreams)},
            combine="known",
        ),
        "body_bytes": Metric("gauge", "memory that request bodies in flight take, bytes"),
        "body_limit_bytes": Metric("gauge", "memory that they may take, bytes (max_bodies_mib)"),
    }
