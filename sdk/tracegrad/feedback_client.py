"""Feedback on what an agent did, from whoever saw it: `POST /api/feedback` of the proxy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from tracegrad.context import proxy_url
from tracegrad.protocol import FEEDBACK_PATH
from tracegrad.transport import REQUEST_TIMEOUT_S, post_json

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the proxy stored.

    Attributes:
        rollout_id, turn: what it is of; `turn` None: the whole rollout.
        unknown_rollout: nobody opened it and no call belongs to it so far: look at the id.
        after_training: "trained", "skipped" or "leased" where it came after training had taken
            the rollout's rewards: it is kept, and changes no step.
    """

    reward_id: str
    rollout_id: str
    turn: int | None
    unknown_rollout: bool
    after_training: str | None


def feedback(
    value: float | Literal["up", "down"] | None,
    *,
    rollout_id: str | None = None,
    response_id: str | None = None,
    turn: int | None = None,
    scope: Literal["rollout", "turn"] = "rollout",
    name: str = "reward",
    comment: str | None = None,
    idempotency_key: str | None = None,
    url: str | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> Feedback:
    """Tell the proxy what an answer was worth; any time after it, from any process.

        feedback("up", response_id=completion.id)

    Waits for the proxy's answer, unlike `reward()`: call it from the code of an application, in a
    thread where that must not wait.

    Args:
        value: a number, "up" (1) or "down" (0); None takes back what was given before.
        rollout_id, response_id: one of them; a response's id is the one that the client got.
        turn: of a rollout, counted from 0, or from the end if negative; None: the rollout.
        scope: of a response's feedback: its rollout's reward, or its turn's.
        name: which reward; training uses the one named "reward".
        comment: why, for people to read.
        idempotency_key: the same one again changes nothing.
        url: the proxy; default TRACEGRAD_URL.
        timeout_s: how long to wait for each part of the answer, in seconds.

    Raises:
        ProxyRefused: it is wrong; the message names the field.
        ProxyUnreachable: the proxy does not answer in time, or cannot store it now. It may store
            what it was sent all the same: try again with the same `idempotency_key`.
        ValueError: `timeout_s` is no time, or TRACEGRAD_URL or TRACEGRAD_API_KEY cannot be used.
    """
    if not 0 < timeout_s <= _DAY_S:
        raise ValueError(f"timeout_s: {timeout_s} is not above 0 and a day ({_DAY_S:,} s) at most")
    body: dict[str, Any] = {"name": name, "scope": scope}
    if value is None:
        body["withdraw"] = True
    else:
        body["thumbs" if isinstance(value, str) else "value"] = value
    given = {"rollout_id": rollout_id, "response_id": response_id, "turn": turn}
    body |= {key: one for key, one in (given | {"comment": comment}).items() if one is not None}
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    sent = json.dumps(body).encode()
    answer = json.loads(post_json(proxy_url(url), FEEDBACK_PATH, sent, headers, timeout_s))
    late = answer.get("after_training")
    return Feedback(
        reward_id=answer["reward_id"],
        rollout_id=answer["rollout_id"],
        turn=answer.get("turn"),
        unknown_rollout=answer.get("unknown_rollout", False),
        after_training=late["state"] if late else None,
    )
