"""Which tasks the runner leaves out: it asks the proxy, which decides from the store.

What became of attempts is in their rollouts; nothing else is reported. Rollouts of a task that runs
in an image carry its name as the tag `protocol.IMAGE_TAG`, by which a broken image is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tracegrad.protocol import TASKS_PATH
from tracegrad.transport import post_json

_AT_ONCE = 1000  # tasks in a request


@dataclass(frozen=True, slots=True)
class TaskRef:
    """A task, and the image that it runs in; None: in none."""

    task_id: str
    image: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`run`: it may be run. Of one that is quarantined, `subject` (it, or its image), by whom, and
    why; one that is tried again may run all the same."""

    task: TaskRef
    run: bool
    is_quarantined: bool
    subject: str
    by: str
    why: str

    def __str__(self) -> str:
        """`task fix-7 is quarantined (rule:fails): the last 8 attempts failed ...`"""
        name = self.task.image if self.subject == "image" else self.task.task_id
        return f"{self.subject} {name} is quarantined ({self.by}): {self.why}"


def check_tasks(
    url: str,
    tasks: Sequence[TaskRef],
    *,
    retry: bool = False,
    rule: Mapping[str, float] | None = None,
) -> list[Verdict]:
    """May these be run? In their order. Blocks for the proxy's answer.

    Args:
        url: the proxy.
        retry: those that were set aside long enough ago may run, too.
        rule: settings that differ from the defaults: failures, equal_rewards, versions,
            retry_after_s (`store.read.task_health.QuarantineRule`).

    Raises:
        ProxyUnreachable: nobody answers.
        ProxyRefused: a setting is wrong, the key is none, or the proxy is of before quarantine.
    """
    return [
        verdict
        for first in range(0, len(tasks), _AT_ONCE)
        for verdict in _check(url, tasks[first : first + _AT_ONCE], retry, rule or {})
    ]


def _check(
    url: str, tasks: Sequence[TaskRef], retry: bool, rule: Mapping[str, float]
) -> Iterator[Verdict]:
    asked = [
        {"task_id": task.task_id} | ({} if task.image is None else {"image": task.image})
        for task in tasks
    ]
    body = {"tasks": asked, "retry": retry, "rule": dict(rule)}
    answer = json.loads(post_json(url, TASKS_PATH, json.dumps(body).encode(), {}))
    for task, found in zip(tasks, answer["tasks"], strict=True):
        yield Verdict(
            task=task,
            run=found["run"],
            is_quarantined=found["state"] == "quarantined",
            subject=found["subject"],
            by=found["by"],
            why=found["why"],
        )
