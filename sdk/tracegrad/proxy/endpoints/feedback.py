"""`POST /api/feedback`: what somebody thinks of an answer, as a reward.

An application knows the id of the response that it showed, and often no rollout. So a response's
id finds its turn; feedback may come days later, be revised, and be taken back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Literal, Protocol, Self

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tracegrad.events import Reward, new_id
from tracegrad.protocol import FEEDBACK_PATH
from tracegrad.proxy.auth.middleware import caller_of, restrict_to_rollout
from tracegrad.proxy.capture.call_index import turn_id_in_response
from tracegrad.proxy.capture.recorder import Recorder
from tracegrad.proxy.endpoints.control_api import (
    Comment,
    EventReader,
    LateReward,
    RewardName,
    RewardValue,
    RolloutId,
    TurnNumber,
    accepted,
)
from tracegrad.proxy.http.errors import ApiError, BadRequest, Unavailable
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store.errors import EventRejected, StoreError

THUMBS = {"up": 1.0, "down": 0.0}


class FeedbackRequest(BaseModel):
    """Of a rollout, one of its turns (`turn` counts from 0, or from the end where negative), or of
    the response with this id. One of `value`, `thumbs` (up is 1, down is 0) and `withdraw`, which
    takes back what was given before: it is unknown again. `scope` of a response's feedback: its
    rollout's reward, which training compares rollouts by, or its turn's."""

    model_config = ConfigDict(extra="forbid")
    rollout_id: RolloutId | None = None
    response_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    turn: TurnNumber | None = None
    scope: Literal["rollout", "turn"] = "rollout"
    value: RewardValue | None = None
    thumbs: Literal["up", "down"] | None = None
    withdraw: bool = False
    name: RewardName = "reward"
    label: Annotated[str, Field(max_length=256)] | None = None
    comment: Comment | None = None

    @model_validator(mode="after")
    def _says_one_thing_of_one_thing(self) -> Self:
        if (self.rollout_id is None) == (self.response_id is None):
            raise ValueError("give one of rollout_id and response_id")
        if [self.value is not None, self.thumbs is not None, self.withdraw].count(True) != 1:
            raise ValueError("give one of value, thumbs and withdraw")
        if self.turn is not None and self.rollout_id is None:
            raise ValueError('turn goes with rollout_id; of a response, say "scope": "turn"')
        if self.scope == "turn" and self.response_id is None:
            raise ValueError("scope goes with response_id; of a rollout, give turn")
        return self

    @property
    def given(self) -> float | None:
        return THUMBS[self.thumbs] if self.thumbs is not None else self.value


class FeedbackAccepted(BaseModel):
    """It is stored. `unknown_rollout`: nobody opened it and no call belongs to it so far: look at
    the id. `after_training`: training had taken the rollout's rewards: this one is kept, and
    changes no step."""

    reward_id: str
    rollout_id: str
    turn: int | None = None
    unknown_rollout: bool = False
    after_training: LateReward | None = None


class FeedbackStore(EventReader, Protocol):
    """What `tracegrad.store.Store` does of it."""

    def rollout_of_turn(self, turn_id: str) -> str | None: ...

    def turn_order(self, rollout_id: str) -> Sequence[str]: ...

    def rewards(self, rollout_id: str) -> Sequence[Reward]: ...


IdempotencyKey = Annotated[str | None, Header(max_length=255)]


def make_feedback_router(recorder: Recorder, store: FeedbackStore) -> APIRouter:
    router = APIRouter()

    @router.post(
        FEEDBACK_PATH,
        summary="Thumbs or a number for a response, a turn or a rollout",
        response_model_exclude_defaults=True,
    )
    async def feedback(
        body: FeedbackRequest, request: Request, idempotency_key: IdempotencyKey = None
    ) -> FeedbackAccepted:
        """Of several of one name for the same rollout or turn the last one counts. The same
        `Idempotency-Key` again changes nothing; with another body it is refused."""
        caller = caller_of(request.scope)
        try:
            rollout_id, turn = await _place(body, recorder, store)
            reward = Reward(
                reward_id=_reward_id(idempotency_key),
                rollout_id=rollout_id,
                value=body.given,
                name=body.name,
                turn=turn,
                label=body.label,
                comment=body.comment,
                source=caller.source,
                created_at=time.time(),
            )
            [reward] = restrict_to_rollout([reward], caller)
            if idempotency_key is not None:
                await _check_repeated(reward, store)
            await recorder.commit([reward])
        except EventRejected as error:
            raise BadRequest(str(error), status=422) from None
        except StoreError as error:
            raise Unavailable(f"the store: {error}", code="store_unavailable") from error
        answer = await accepted([reward], store)
        return FeedbackAccepted(
            reward_id=reward.reward_id,
            rollout_id=rollout_id,
            turn=turn,
            unknown_rollout=bool(answer.unknown_rollouts),
            after_training=next(iter(answer.after_training), None),
        )

    return router


async def _place(
    body: FeedbackRequest, recorder: Recorder, store: FeedbackStore
) -> tuple[str, int | None]:
    """The rollout, and the turn or None. Raises ApiError (404), StoreError."""
    if body.rollout_id is not None:
        return body.rollout_id, body.turn
    turn_id = turn_id_in_response(body.response_id)
    rollout_id = await run_in_thread(store.rollout_of_turn, turn_id) if turn_id else None
    if rollout_id is not None and body.scope == "rollout":
        return rollout_id, None
    if rollout_id is not None and turn_id in (
        order := await run_in_thread(store.turn_order, rollout_id)
    ):
        return rollout_id, order.index(turn_id)
    # An answer of an engine that makes ids of its own, which are not stored.
    recent = recorder.call_index.rollout_of_response(body.response_id)
    if recent is not None and body.scope == "rollout":
        return recent, None
    raise ApiError(
        404,
        f"response_id: no recorded answer has the id {body.response_id!r}; give its rollout_id"
        " and turn",
        kind="not_found_error",
        code="unknown_response",
    )


def _reward_id(idempotency_key: str | None) -> str:
    if idempotency_key is None:
        return new_id()
    return blake2b(f"feedback {idempotency_key}".encode(), digest_size=16).hexdigest()


async def _check_repeated(reward: Reward, store: FeedbackStore) -> None:
    """Raises ApiError (422): the key came before, with another body."""
    for before in await run_in_thread(store.rewards, reward.rollout_id):
        if before.reward_id != reward.reward_id:
            continue
        if replace(before, created_at=reward.created_at, source=reward.source) != reward:
            raise BadRequest(
                "Idempotency-Key: it came before, with other feedback; give each its own",
                status=422,
                code="idempotency_key_reused",
            )
