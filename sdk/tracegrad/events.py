"""The events of the project as typed records. Floor zero: standard library only.

Everything that is captured is an event (`Event`): immutable, made once, with an id its maker
chose, so that sending it twice changes nothing. Events travel from an agent's process to the
proxy, and from the proxy into the store.

Token arrays are `array.array`: `'i'` (int32) for ids and `'f'` (float32) for log-probabilities.
They compare and slice in C, need no NumPy in an agent's process, and NumPy or torch view them
without a copy (`np.frombuffer`).
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, TypeGuard

Json = dict[str, Any]

# At temperature 0 vLLM takes the likeliest token; what lies between it raises to this one, so that
# the distribution is not the one that was asked for (`_MAX_TEMP` of its sampling_params.py).
GREEDY_BELOW = 0.01

# An id's end, drawn once by each process: asking the system for randomness every time costs a
# busy process the interpreter's lock.
_maker = ""
_made = count()


def _draw_maker() -> None:
    global _maker
    _maker = os.urandom(5).hex()


_draw_maker()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_draw_maker)


def new_id() -> str:
    """32 hex characters whose order is the order of creation.

    Milliseconds (12), nanoseconds within (5), a count (5), the process (10). Nobody else makes
    the same one, but it is no secret: who knows one may guess the next.
    """
    ms, ns = divmod(time.time_ns(), 1_000_000)
    return f"{ms:012x}{ns:05x}{next(_made) & 0xFFFFF:05x}{_maker}"


def token_id_array(ids: Iterable[int] = ()) -> array[int]:
    return array("i", ids)


def logprob_array(values: Iterable[float] = ()) -> array[float]:
    return array("f", values)


class Outcome(StrEnum):
    """How a rollout ended. The first three are the policy's own doing and are scored."""

    COMPLETED = "completed"
    AGENT_ERROR = "agent_error"
    BUDGET = "budget"
    ENV_ERROR = "env_error"
    INFRA_ERROR = "infra_error"
    ABORTED = "aborted"

    @property
    def scored(self) -> bool:
        """False: the failure is not the policy's; it never enters a baseline."""
        return self in (Outcome.COMPLETED, Outcome.AGENT_ERROR, Outcome.BUDGET)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStarted:
    """One attempt at one task begins. `task_id` is the group that it is compared within.
    `held_out`: it is for evaluation, and never trained."""

    rollout_id: str
    task_id: str | None = None
    agent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    task: Any = None  # what was asked, JSON-able, for people to read
    held_out: bool = False
    opened_at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFinished:
    """`finished_at` is the client's time. `recorded_at` is the proxy's, by its own clock: the
    rollout is ordered and leased by it; None: by `finished_at`."""

    rollout_id: str
    outcome: Outcome = Outcome.COMPLETED
    error: str | None = None
    finished_at: float = field(default_factory=time.time)
    recorded_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInferred:
    """Nobody named the rollout of the turns beside it: the proxy found it by what their prompts
    continue, or made it. `continues`: the rollout that its conversation goes on from, where
    training had taken that one already."""

    rollout_id: str
    continues: str | None = None


# Rewards lie between -MAX_REWARD and MAX_REWARD: sums of them and of their squares stay finite.
MAX_REWARD = 1e6
REWARD_RANGE = "a finite number from -1,000,000 to 1,000,000"


def is_reward(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) <= MAX_REWARD  # not a number is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A number from a source, for a rollout or (`turn`) for one of its turns.

    `turn` counts the rollout's turns from 0; negative counts from the end, as in a list.
    Rewards are events: of the same `name` and `turn` the one that arrives last counts, whatever
    times are stated; a `value` of None takes back what was given: the reward is unknown again.
    `source` and `created_at` are set by whoever writes them down (the proxy: by the key that was
    used, and by its own clock); `label`, `given_at` and `comment` are what the giver says of
    itself, of the time and of the reason, and nobody relies on them.
    """

    reward_id: str = field(default_factory=new_id)
    rollout_id: str
    value: float | None
    name: str = "reward"
    turn: int | None = None
    source: str = "direct"
    label: str | None = None
    given_at: float | None = None
    comment: str | None = None
    created_at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An OpenTelemetry span that belongs to a rollout."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_span_id: str | None = None
    rollout_id: str | None = None
    name: str
    kind: str = "internal"
    start_ns: int
    end_ns: int
    status: str = "unset"  # unset | ok | error
    attributes: Json = field(default_factory=dict)


# `Turn.untrainable` of a call without tokens: the engine refused its prompt as over its context.
OVER_LENGTH = "over_length"
# `Turn.finish_reason` of a call that the engine would not answer.
REFUSED = "refused"
# ... of a call whose client got the error that it could not be stored, and then it was.
UNACKNOWLEDGED = "unacknowledged"

# The stages of a call, in their order. The proxy's own work: `prepare` (the request is received,
# read and attributed), `encode` (the engine's request is written), `finish` (the turn is placed).
# `gate`: weights were pushed. `queue`: no engine took it. `engine_queue`: one did, and let it wait
# for others; part of the next stage where the engine does not tell it. `prefill` ends with the
# first token, and `decode` with the last; `inference` is both, of an answer that came in one piece.
CALL_STAGES = ("prepare", "gate", "encode", "queue", "engine_queue", "prefill", "decode",
               "inference", "finish")  # fmt: skip

# [(version, count), ...] over the completion's tokens, in order.
VersionSpans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One LLM call: prompt tokens in, sampled tokens out.

    `prompt_token_ids` is the whole prompt; the store keeps only what the parent lacks.

    `routed_experts` is a `.npy` file, [n, layers, k] of uint8, uint16 or int32: which experts the
    engine's routers chose for the *last n* tokens of prompt + completion but the very last one,
    which was never forwarded. The first token that it speaks of is
    `len(prompt) + len(completion) - 1 - n`. A turn that continues another may lack what its
    parent has. None where the engine did not tell.

    `state_key` names the environment's state that the call was made in, as the agent or the
    environment gave it; `observation` is a digest of what was observed last (module
    `proxy.observation`). Equal ones are equal states. None: nobody said, or it is not known.

    `agent_name`: of several agents in a rollout the one that made the call, as the call said. None:
    it did not; spans may (`turn_scopes`).

    `model` is the name that the answer has. `asked_model`: the one that the client asked for, where
    it is another: the proxy and the engine may have names of their own for what they serve. None:
    the same, or not known.

    `timing`: seconds of the call by stage (`CALL_STAGES`), by a monotonic clock. A call of the
    proxy ends at `created_at`, one that a span reported begins there. What else it may hold:
    `held`, the seconds of the engine's time in which weights were pushed, and `commits`, how long
    earlier turns of the rollout took from their ends to their commits, by their ids. None: not
    known.
    """

    turn_id: str = field(default_factory=new_id)
    rollout_id: str
    parent_id: str | None = None
    fork_reason: str | None = None  # why it does not continue an earlier turn, if one was there
    dialect: str
    model: str
    prompt_token_ids: array[int]
    completion_token_ids: array[int]
    completion_logprobs: array[float]
    policy_versions: VersionSpans
    sampling: Json = field(default_factory=dict)  # temperature, top_p, ... as the engine used them
    finish_reason: str | None = None
    untrainable: str | None = None  # a reason, when its tokens must not be trained
    parent_span_id: str | None = None
    request: Json | None = None  # as the client sent it
    response: Json | None = None  # as the client received it (a stream: put together)
    state_key: str | None = None
    observation: str | None = None  # 32 hex digits
    agent_name: str | None = None
    asked_model: str | None = None
    timing: Json | None = None
    routed_experts: bytes | None = None
    created_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        tokens = len(self.completion_token_ids)
        assert len(self.completion_logprobs) == tokens, "one log-probability a sampled token"
        assert sum(count for _, count in self.policy_versions) == tokens, "spans cover all tokens"


Event = RolloutStarted | RolloutInferred | RolloutFinished | Reward | Span | Turn
