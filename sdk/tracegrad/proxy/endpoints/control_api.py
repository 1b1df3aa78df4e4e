"""`/api`: what the SDK and the trainer say to the proxy. OpenAPI at `/docs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

from fastapi import APIRouter, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tracegrad.events import (
    MAX_REWARD,
    Event,
    Json,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    new_id,
)
from tracegrad.key_derivation import CALLS, KeyScope
from tracegrad.protocol import ROLLOUT_ID_PATTERN
from tracegrad.proxy.auth.middleware import (
    Authenticator,
    Caller,
    caller_of,
    check_rollout,
    restrict_to_rollout,
)
from tracegrad.proxy.capture.call_index import CallIndex
from tracegrad.proxy.capture.recorder import Recorder
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate, canary_of
from tracegrad.proxy.http.errors import ApiError, BadRequest, Unavailable
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store.errors import EventRejected, StoreError
from tracegrad.store.read.call_counts import CallCount
from tracegrad.store.read.reward_arrival import RewardTarget
from tracegrad.urls import masked

# Events wait for a proxy that is away, and clocks differ. One that claims to be older than this
# has a clock that was never set, or a mistake.
MAX_EVENT_AGE_S = 86_400.0


def clamp_stated_time(stated: float | None, now: float) -> float:
    """`stated`, seconds since the epoch; `now` where that is to come, or more than a day ago."""
    return stated if stated is not None and now - MAX_EVENT_AGE_S <= stated <= now else now


RolloutId = Annotated[str, Field(pattern=ROLLOUT_ID_PATTERN)]

Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0)]
RewardValue = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]
RewardName = Annotated[str, Field(min_length=1)]
# Counted from 0, or from the end where negative.
TurnNumber = Annotated[int, Field(gt=-(2**31), lt=2**31)]
Comment = Annotated[str, Field(max_length=10_000)]


class _EventBody(BaseModel):
    """What a client may send of the event of the same name. `to_event(caller, now)` is the event:
    where it decides something, its source and its time are the proxy's to set."""

    model_config = ConfigDict(extra="forbid")
    rollout_id: RolloutId

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in self if name != "type"}


class RolloutStartedBody(_EventBody):
    # The second word: what SDKs before 0.1 left in their journals.
    type: Literal["rollout_started", "rollout_opened"]
    task_id: str | None = None
    agent: str | None = None
    tags: dict[str, str] = {}
    task: Any = None
    held_out: bool = False
    opened_at: Seconds | None = None

    def to_event(self, _: Caller, now: float) -> Event:
        return RolloutStarted(
            **{**self.fields(), "opened_at": clamp_stated_time(self.opened_at, now)}
        )


class RolloutFinishedBody(_EventBody):
    type: Literal["rollout_finished"]
    outcome: Outcome = Outcome.COMPLETED
    error: str | None = None
    finished_at: Seconds | None = None

    def to_event(self, _: Caller, now: float) -> Event:
        stated = now if self.finished_at is None else self.finished_at
        return RolloutFinished(**{**self.fields(), "finished_at": stated}, recorded_at=now)


class RewardBody(_EventBody):
    type: Literal["reward"]
    reward_id: str = Field(default_factory=new_id, min_length=1, max_length=128)
    value: RewardValue | None
    name: RewardName = "reward"
    turn: TurnNumber | None = None
    # Earlier versions of the SDK said `source` and `created_at`; files of theirs are sent yet.
    label: Annotated[str, Field(max_length=256)] | None = Field(
        None, validation_alias=AliasChoices("label", "source")
    )
    given_at: Seconds | None = Field(None, validation_alias=AliasChoices("given_at", "created_at"))
    comment: Comment | None = None

    def to_event(self, caller: Caller, now: float) -> Event:
        return Reward(**self.fields(), source=caller.source, created_at=now)


class SpanBody(BaseModel):
    """A span that could not leave by OTLP, which is the ordinary way (`/v1/traces`)."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["span", "span_ended"]
    rollout_id: RolloutId | None = None
    trace_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    span_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    parent_span_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    name: str
    kind: str = "internal"
    start_ns: Annotated[int, Field(ge=0, lt=2**63)]
    end_ns: Annotated[int, Field(ge=0, lt=2**63)]
    status: Literal["unset", "ok", "error"] = "unset"
    attributes: dict[str, Any] = {}

    def to_event(self, _: Caller, __: float) -> Event:
        return Span(**{name: value for name, value in self if name != "type"})


EventBody = Annotated[
    RolloutStartedBody | RolloutFinishedBody | RewardBody | SpanBody,
    Field(discriminator="type"),
]


class EventsRequest(BaseModel):
    """`calls_of`: rollouts whose calls the answer counts, beside those that the events end."""

    events: list[EventBody]
    calls_of: Annotated[list[RolloutId], Field(max_length=1000)] = []


class LateReward(BaseModel):
    """`state` of the rollout: `trained` (by `step`), `skipped`, or `leased` (is being trained)."""

    rollout_id: str
    state: Literal["leased", "trained", "skipped"]
    step: int | None = None


class RolloutCalls(BaseModel):
    """`calls` of a rollout: the recorded turns; at least 1 where a call came, of which nothing is
    recorded yet. Without any, and asked for: `unnamed_calls` that came while it was open.
    `last_failed`: the last one did, by the engine or the proxy."""

    rollout_id: str
    calls: int
    unnamed_calls: int = 0
    last_failed: bool = False


class EventsAccepted(BaseModel):
    """All were stored. `unknown_rollouts` were given rewards, and nobody opened them and no call
    belongs to them so far: look at the id, unless its events are still on their way.
    `after_training` were given rewards when training had taken those it had: these are kept, and
    change no step. `calls`: of each rollout that was ended or asked for."""

    accepted: int
    unknown_rollouts: list[str] = []
    after_training: list[LateReward] = []
    calls: list[RolloutCalls] = []


class HoldRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ttl_s: Annotated[float, Field(gt=0, le=3600)] = 120
    drain_s: Annotated[float, Field(ge=0, le=600)] = 2
    upstream: str | None = None  # one server; left out: all


class SetVersionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=0, lt=2**31)]
    upstream: str | None = None
    model: str | None = None  # the canary's


class ReleaseRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    upstream: str | None = None


class CanaryRequest(BaseModel):
    """`upstream`: the candidate's server; or `model`: its name on every server. Without either
    there is no canary any more."""

    model_config = ConfigDict(extra="forbid")
    upstream: str | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    share: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _is_in_one_place(self) -> Self:
        if self.upstream is not None and self.model is not None:
            raise ValueError("upstream, model: a candidate is on one server, or has a name on all")
        return self


class InFlight(BaseModel):
    in_flight: int


class UpstreamState(BaseModel):
    """Of a server that has a version of its own, or is given no calls for now."""

    version: int
    held: bool


class CanaryState(BaseModel):
    upstream: str | None = None
    model: str | None = None
    share: float
    version: int | None = None  # of the model


class GateState(BaseModel):
    version: int
    held: bool
    in_flight: int
    waiting: int


class UpstreamsState(GateState):
    upstreams: dict[str, UpstreamState] = {}
    canary: CanaryState | None = None


class WeightPushes(Protocol):
    """The gate, of this process alone or of all workers of the proxy."""

    async def hold(self, *, ttl_s: float, drain_s: float, upstream: str | None) -> int: ...

    async def set_version(
        self, version: int, upstream: str | None, model: str | None = None
    ) -> None: ...

    async def set_canary(
        self, upstream: str | None, share: float, model: str | None = None
    ) -> None: ...

    async def release(self, upstream: str | None) -> None: ...

    async def state(self) -> Json: ...


class OwnGate:
    """That of a proxy of one process."""

    def __init__(self, gate: WeightUpdateGate) -> None:
        self._gate = gate
        self.hold, self.set_version = gate.hold, gate.set_version

    async def release(self, upstream: str | None) -> None:
        self._gate.release(upstream)

    async def set_canary(
        self, upstream: str | None, share: float, model: str | None = None
    ) -> None:
        self._gate.set_canary(canary_of(upstream, share, model))

    async def state(self) -> Json:
        return self._gate.state()


class EventReader(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def reward_targets(self, rollout_ids: Collection[str]) -> list[RewardTarget]: ...

    def late_reward_ids(self, reward_ids: Collection[str]) -> Collection[str]: ...

    def count_calls(self, rollout_ids: Collection[str]) -> list[CallCount]: ...


async def accepted(events: Sequence[Event], store: EventReader) -> EventsAccepted:
    """The answer to events that were committed, but for `calls`."""
    rewards = {e.reward_id: e.rollout_id for e in events if isinstance(e, Reward)}
    rewarded = list(dict.fromkeys(rewards.values()))
    answer = EventsAccepted(accepted=len(events))
    if not rewarded:
        return answer
    try:
        targets = await run_in_thread(store.reward_targets, rewarded)
        late_ids = await run_in_thread(store.late_reward_ids, list(rewards))
    except StoreError:  # they are stored: that much is known
        return answer
    late_for = {rewards[reward_id] for reward_id in late_ids}
    by_id = {target.rollout_id: target for target in targets}
    for target in (by_id[name] for name in rewarded if name in by_id):
        if not target.is_known:
            answer.unknown_rollouts.append(target.rollout_id)
        # A lease may have ended between both questions.
        if target.rollout_id in late_for and target.state != "open":
            late = LateReward(rollout_id=target.rollout_id, state=target.state, step=target.step)
            answer.after_training.append(late)
    return answer


async def count_calls(
    wanted: Collection[str], store: EventReader, index: CallIndex
) -> list[RolloutCalls]:
    """One for each. Raises StoreError."""
    counts = await run_in_thread(store.count_calls, wanted) if wanted else []
    by_id = {count.rollout_id: count for count in counts}
    found = []
    for rollout_id in wanted:
        count = by_id.get(rollout_id) or CallCount(rollout_id=rollout_id, turns=0)
        calls = count.turns or int(index.was_called(rollout_id))
        unnamed = 0 if calls else count.unnamed_calls
        found.append(
            RolloutCalls(
                rollout_id=rollout_id,
                calls=calls,
                unnamed_calls=unnamed,
                last_failed=index.last_failed(rollout_id),
            )
        )
    return found


def make_control_router(
    recorder: Recorder, gate: WeightPushes, store: EventReader, upstreams: Sequence[str]
) -> APIRouter:
    """`upstreams`: the servers' base URLs."""
    router = APIRouter(prefix="/api")

    @router.post(
        "/events",
        summary="Rollouts started and finished, rewards, spans",
        response_model_exclude_defaults=True,
    )
    async def events(body: EventsRequest, request: Request) -> EventsAccepted:
        """Stored all together or not at all; the answer comes after the commit. Of several rewards
        of one name and turn the one that arrives last counts, whatever `given_at` says."""
        caller, now = caller_of(request.scope), time.time()
        if caller.bound:
            for rollout_id in body.calls_of:
                check_rollout(caller, rollout_id)
        received = [event.to_event(caller, now) for event in body.events]
        try:
            if received or not body.calls_of:  # a question alone writes nothing
                await recorder.commit(restrict_to_rollout(received, caller))
        except EventRejected as error:
            raise BadRequest(str(error), status=422) from None
        answer = await accepted(received, store)
        ended = [event.rollout_id for event in received if isinstance(event, RolloutFinished)]
        wanted = dict.fromkeys([*ended, *body.calls_of])
        try:
            answer.calls = await count_calls(wanted, store, recorder.call_index)
        except StoreError as error:
            if not received:  # else they are stored: that much is known
                why = f"the store cannot be read: {error}"
                raise Unavailable(why, code="store_unavailable") from error
        return answer

    @router.get("/push", summary="Policy version and gate")
    async def push() -> GateState:
        return GateState.model_validate(await gate.state())

    @router.get(
        "/push/upstreams",
        summary="The same, with what single servers have",
        response_model_exclude_defaults=True,
    )
    async def upstreams_state() -> UpstreamsState:
        """Under the key of pushes: where the servers are is nobody else's business."""
        return UpstreamsState.model_validate(await gate.state())

    @router.post("/push/hold", summary="Before a weight push: new calls wait")
    async def hold(body: HoldRequest) -> InFlight:
        """Answers when calls that come in one piece have finished, or after `drain_s`."""
        known(body.upstream)
        held = await gate.hold(ttl_s=body.ttl_s, drain_s=body.drain_s, upstream=body.upstream)
        return InFlight(in_flight=held)

    @router.post(
        "/push/version",
        summary="Tokens from now on are of this policy version",
    )
    async def set_version(body: SetVersionRequest) -> GateState:
        """To be sent while the engine is paused."""
        known(body.upstream)
        await gate.set_version(body.version, body.upstream, body.model)
        return GateState.model_validate(await gate.state())

    @router.post(
        "/push/release",
        summary="Waiting calls go on, in order",
        response_model_exclude_defaults=True,
    )
    async def release(body: ReleaseRequest | None = None) -> GateState:
        upstream = None if body is None else body.upstream
        known(upstream)
        await gate.release(upstream)
        return GateState.model_validate(await gate.state())

    @router.post(
        "/push/canary",
        summary="A share of rollouts gets a candidate, and no others do",
        response_model_exclude_defaults=True,
    )
    async def canary(body: CanaryRequest) -> GateState:
        """Each rollout by its name, for as long as its server takes calls."""
        known(body.upstream)
        await gate.set_canary(body.upstream, body.share, body.model)
        return GateState.model_validate(await gate.state())

    def known(upstream: str | None) -> None:
        if upstream is not None and upstream not in upstreams:
            raise BadRequest(
                f"upstream: {masked(upstream)} is none of this proxy's servers; name one as"
                f" `--upstream` does: {', '.join(map(masked, upstreams))}"
            )

    return router


def add_error_handlers(app: FastAPI, shape: Callable[[str, ApiError], bytes]) -> None:
    """`shape` gives an error's body in the words that are spoken at a path."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            reason, at = first["ctx"]["error"], first["loc"][-1]
            refused = BadRequest(f"the body is no JSON: {reason} at character {at}", status=422)
            return refused.response()
        where = _where(first["loc"])
        reason = str(first["msg"]).removeprefix("Value error, ")
        message = f"{where}: {reason}" if where else reason
        return BadRequest(message, param=where or None, status=422).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        # What FastAPI makes of an error that came up while it read the body.
        if isinstance(error.__cause__, ApiError):
            return error.__cause__.response()
        path = request.url.path
        refused = BadRequest(f"{request.method} {path}: {error.detail}", status=error.status_code)
        response = refused.response(shape(path, refused))
        response.headers.update(error.headers or {})
        return response


def _where(loc: Sequence[str | int]) -> str:
    """("body", "events", 3, "reward", "value") -> "events[3].value"."""
    path = ""
    for index, part in enumerate(loc[1:], start=1):
        if isinstance(part, int):
            path += f"[{part}]"
        # After an index pydantic names the kind of event it tried; nobody sent that.
        elif not isinstance(loc[index - 1], int):
            path += f".{part}" if path else part
        elif index == len(loc) - 1:
            path += f".{part}"
    return path


RolloutIdInPath = Annotated[str, Path(pattern=ROLLOUT_ID_PATTERN)]


class KeyRequest(BaseModel):
    """`calls`: for the agent, to call models. `events`: for who scores it, to post rewards and its
    end."""

    model_config = ConfigDict(extra="forbid")
    scopes: Annotated[list[KeyScope], Field(min_length=1)] = [CALLS]


class MintedKey(BaseModel):
    """None: the proxy asks for no key."""

    key: str | None


def make_keys_router(access: Authenticator) -> APIRouter:
    """For whoever has the admin key: the guard keeps everybody else from these routes."""
    router = APIRouter(prefix="/api/rollouts/{rollout_id}/keys")

    @router.post("", status_code=201, summary="A key for one rollout")
    async def mint(rollout_id: RolloutIdInPath, wanted: KeyRequest | None = None) -> MintedKey:
        """It may do for its rollout what it is minted for, and send spans, and nothing else. Give
        the agent one for calls. Only its hash is kept: this answer alone shows it.
        In an open proxy there is none for events: they are posted without one."""
        scopes = (wanted or KeyRequest()).scopes
        return MintedKey(key=await access.mint(rollout_id, scopes))

    @router.delete("", status_code=204, summary="The rollout's keys open nothing any more")
    async def revoke(rollout_id: RolloutIdInPath) -> None:
        await access.revoke(rollout_id)

    return router
