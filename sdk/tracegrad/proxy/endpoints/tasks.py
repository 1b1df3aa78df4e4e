"""`/api/tasks/check`: whoever runs tasks asks which of them are worth it."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from tracegrad.protocol import TASKS_PATH
from tracegrad.proxy.http.errors import Unavailable
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store import Store
from tracegrad.store.errors import StoreError
from tracegrad.store.ledger.quarantine import apply_rule
from tracegrad.store.read.task_health import (
    DEFAULT_RULE,
    QuarantineRule,
    Subject,
    SubjectHealth,
)

Name = Annotated[str, Field(min_length=1, max_length=2048)]


class TaskBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    task_id: Name
    image: Name | None = None


class RuleBody(BaseModel):
    """As `store.read.task_health.QuarantineRule`."""

    model_config = ConfigDict(extra="forbid")
    failures: Annotated[int, Field(ge=1, le=10_000)] = DEFAULT_RULE.failures
    equal_rewards: Annotated[int, Field(ge=2, le=10_000)] = DEFAULT_RULE.equal_rewards
    versions: Annotated[int, Field(ge=1, le=10_000)] = DEFAULT_RULE.versions
    retry_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = DEFAULT_RULE.retry_after_s


class TasksRequest(BaseModel):
    """`retry`: those that were set aside `rule.retry_after_s` ago may run, too."""

    model_config = ConfigDict(extra="forbid")
    tasks: Annotated[list[TaskBody], Field(max_length=1000)]
    retry: bool = False
    rule: RuleBody = RuleBody()


class TaskAnswer(BaseModel):
    """`run`: it may be run. `why` and `by` whom it, or its image (`subject`), is quarantined; also
    of one that may run because it is tried again."""

    task_id: str
    image: str | None = None
    run: bool
    state: Literal["ok", "quarantined"]
    subject: Literal["task", "image"] = "task"
    by: str = ""
    why: str = ""


class TasksAnswer(BaseModel):
    """In the order of the request."""

    tasks: list[TaskAnswer]


def make_tasks_router(store: Store) -> APIRouter:
    router = APIRouter()

    @router.post(
        TASKS_PATH, summary="Which tasks are worth running", response_model_exclude_none=True
    )
    async def check(body: TasksRequest) -> TasksAnswer:
        """What the rule finds is decided, and recorded with its evidence (`tracegrad tasks ls`):
        tasks and images whose attempts all fail, or whose reward never varies, are set aside."""
        rule = QuarantineRule(**body.rule.model_dump())
        asked = [_subjects(task) for task in body.tasks]
        subjects = list(dict.fromkeys(subject for some in asked for subject in some))
        try:
            found = await run_in_thread(apply_rule, store, subjects, rule)
        except StoreError as error:
            raise Unavailable(f"the store: {error}", code="store_unavailable") from error
        by_subject = {health.subject: health for health in found}
        now = time.time()
        answers = []
        for task, some in zip(body.tasks, asked, strict=True):
            health = [by_subject[subject] for subject in some]
            run = all(each.may_run(retry=body.retry, rule=rule, now=now) for each in health)
            answers.append(_answer(task, health, run=run))
        return TasksAnswer(tasks=answers)

    return router


def _subjects(task: TaskBody) -> list[Subject]:
    image = [] if task.image is None else [Subject("image", task.image)]
    return [*image, Subject("task", task.task_id)]


def _answer(task: TaskBody, health: list[SubjectHealth], *, run: bool) -> TaskAnswer:
    aside = next((each for each in health if each.state == "quarantined"), None)
    answer = TaskAnswer(
        task_id=task.task_id,
        image=task.image,
        run=run,
        state="ok" if aside is None else "quarantined",
    )
    if aside is not None:
        answer.subject, answer.by, answer.why = aside.subject.kind, aside.by, aside.why
    return answer
