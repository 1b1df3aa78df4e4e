"""`/api/intake`: drivers ask how many rollouts they may open, and hold places for them.

Back-pressure for who asks, and for nobody else: rollouts and calls that come without a place are
taken as ever.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from tracegrad.events import Json
from tracegrad.protocol import INTAKE_PATH
from tracegrad.proxy.http.errors import BadRequest, Unavailable
from tracegrad.proxy.metrics.counters import ProxyMetrics
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store.errors import StoreError
from tracegrad.store.ledger.intake import MOST_ROLLOUTS, Intake, IntakeState, Places


class PlacesRequest(BaseModel):
    """`rollouts` that are opened together; none: the attempts of one group, as many as the trainer
    says. `waited_s`: how long they have been waited for, by the asker's clock."""

    model_config = ConfigDict(extra="forbid")
    rollouts: Annotated[int, Field(ge=1, le=MOST_ROLLOUTS)] | None = None
    waited_s: Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)] = 0.0


class IntakeAnswer(BaseModel):
    """`rollouts` may be opened now; null: any number. `paced`: a trainer that lives bounds them.
    `attempts` make one group. `reason`: why there is no room for what was asked; `retry_after_s`:
    when there is likely to be. `rollout_ids` are the places: open rollouts of these ids.
    `silent_for_s`: since the last sign of a trainer. `limits` and `counts`: what it goes by."""

    paced: bool
    rollouts: int | None
    reason: str = ""
    retry_after_s: float = 0.0
    version: int | None = None
    attempts: int | None = None
    rollout_ids: list[str] = []
    silent_for_s: float | None = None
    limits: Json | None = None
    counts: Json | None = None


def make_intake_router(intake: Intake, metrics: ProxyMetrics) -> APIRouter:
    router = APIRouter()

    @router.get(INTAKE_PATH, summary="How many rollouts may be opened now")
    async def read(rollouts: Annotated[int | None, Field(ge=1)] = None) -> IntakeAnswer:
        """Holds no place: to look at."""
        try:
            state = await run_in_thread(intake.state, wanted=rollouts)
        except StoreError as error:
            raise _unavailable(error) from error
        return _answer(state)

    @router.post(
        INTAKE_PATH,
        status_code=201,
        summary="Places for rollouts that are about to be opened",
        responses={202: {"model": IntakeAnswer, "description": "No room now; see Retry-After"}},
    )
    async def ask(response: Response, wanted: PlacesRequest | None = None) -> IntakeAnswer:
        """All of them or none. A place is a rollout's id, and is kept for a minute: what is opened
        under it (`/rollouts/<id>/v1`, or an event) takes it. 202: nothing is held; ask again after
        Retry-After seconds."""
        asked = wanted or PlacesRequest()
        try:
            places = await run_in_thread(intake.ask, asked.rollouts, waited_s=asked.waited_s)
        except ValueError as error:
            raise BadRequest(str(error), status=422, param="rollouts") from None
        except StoreError as error:
            raise _unavailable(error) from error
        _count(metrics, places, asked.waited_s)
        if not places.rollout_ids:
            response.status_code = 202
            response.headers["Retry-After"] = str(math.ceil(places.state.retry_after_s))
        return _answer(places.state, places.rollout_ids)

    return router


def _count(metrics: ProxyMetrics, places: Places, waited_s: float) -> None:
    if not places.rollout_ids:
        metrics.add("intake_asks_total", "wait")
        return
    metrics.add("intake_asks_total", "granted")
    metrics.add("intake_places_total", number=len(places.rollout_ids))
    metrics.add("intake_waited_seconds_total", number=waited_s)


def _answer(state: IntakeState, rollout_ids: list[str] | None = None) -> IntakeAnswer:
    return IntakeAnswer(
        paced=state.paced,
        rollouts=state.capacity.rollouts,
        reason=state.reason,
        retry_after_s=round(state.retry_after_s, 3),
        version=state.version,
        attempts=state.attempts,
        rollout_ids=rollout_ids or [],
        silent_for_s=state.silent_for_s,
        limits=None if state.limits is None else asdict(state.limits),
        counts=None if state.counts is None else asdict(state.counts),
    )


def _unavailable(error: StoreError) -> Unavailable:
    return Unavailable(f"the store: {error}", code="store_unavailable")
