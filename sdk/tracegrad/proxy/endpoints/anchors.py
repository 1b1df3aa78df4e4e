"""`/api/anchors`: the next rollout of a task from behind an expert's turns."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from tracegrad.events import RolloutStarted
from tracegrad.protocol import ANCHORS_PATH
from tracegrad.proxy.capture.redaction import Redactor
from tracegrad.proxy.http.errors import ApiError, Unavailable
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store.anchors.anchor_store import AnchorStore
from tracegrad.store.errors import StoreCorrupt, StoreUnavailable


class NextRolloutRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    task_id: Annotated[str, Field(min_length=1)]
    agent: str | None = None
    tags: dict[str, str] = {}
    task: Any = None
    counts: bool = True


class AnchoredRollout(BaseModel):
    """`request` is the expert's at the anchor: what was said before it. `responses` are the
    expert's before it, in order; null where texts were dropped."""

    rollout_id: str
    task_id: str
    anchor: int
    demonstration: str | None
    demonstration_turns: int
    request: dict[str, Any] | None
    responses: list[dict[str, Any] | None]


def make_anchors_router(anchors: AnchorStore | None, redactor: Redactor) -> APIRouter:
    router = APIRouter()

    @router.post(ANCHORS_PATH, status_code=201, summary="Open a task's next rollout at its anchor")
    async def next_rollout(body: NextRolloutRequest) -> AnchoredRollout:
        """The rollout is open, and has the expert's turns before the anchor. Bring a fresh
        environment behind the same calls; if it answers otherwise than it did the expert, finish
        the rollout as env_error. Then go on under `/rollouts/<rollout_id>/v1`."""
        if anchors is None:
            raise ApiError(
                409,
                "this proxy has no anchors: give it a table [proxy.anchors]",
                kind="invalid_request_error",
                code="no_anchors",
            )
        said = RolloutStarted(rollout_id="", agent=body.agent, tags=body.tags, task=body.task)
        [opened] = await redactor.redact([said])
        assert isinstance(opened, RolloutStarted), "it stays what it was"
        try:
            [found] = await run_in_thread(
                anchors.next,
                body.task_id,
                counts=body.counts,
                agent=opened.agent,
                tags=opened.tags,
                task=opened.task,
            )
        except StoreUnavailable as error:
            message = f"the store cannot be written: {error}"
            raise Unavailable(message, code="store_unavailable") from error
        except StoreCorrupt as error:
            raise ApiError(500, str(error), kind="store_error") from error
        return AnchoredRollout.model_validate(found, from_attributes=True)

    return router
