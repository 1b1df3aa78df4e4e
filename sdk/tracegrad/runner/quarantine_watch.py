"""Which tasks a run leaves out, looked up again while it goes on: what breaks in its first epoch is
not run in all the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from tracegrad.context import proxy_url
from tracegrad.runner.attempt import Attempt
from tracegrad.runner.driver import RunObserver
from tracegrad.runner.quarantine import TaskRef, Verdict, check_tasks
from tracegrad.runner.scheduler import Ticket
from tracegrad.transport import ProxyRefused, ProxyUnreachable

LOOK_S = 30.0  # between two looks at tasks of which attempts have ended


class QuarantineWatch(RunObserver):
    """Of one run.

    Args:
        said: gets a line for each task or image that is left out, with its evidence.
        image_of: the image that a task runs in, by the task's id; None: in none.
    """

    def __init__(
        self,
        said: Callable[[str], object],
        image_of: Callable[[str], str | None] = lambda task_id: None,
    ) -> None:
        self._said, self._image_of = said, image_of
        self._tasks: dict[str, Verdict] = {}
        self._images: dict[str, Verdict] = {}
        self._ended: set[str] = set()  # tasks of which attempts have ended since the last look

    def why(self, task_id: str) -> Verdict | None:
        """That the task is left out; None: it is run."""
        image = self._image_of(task_id)
        return self._tasks.get(task_id) or (None if image is None else self._images.get(image))

    def left_out(self) -> dict[str, str]:
        """Why, by the ids of tasks."""
        return {task_id: str(verdict) for task_id, verdict in self._tasks.items()}

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self._ended.add(ticket.group.task_id)

    def look(self, task_ids: Iterable[str]) -> None:
        """Blocks for the proxy's answer. Without one, what was known before stands."""
        try:
            self._take(self._asked(task_ids))
        except (ProxyRefused, ProxyUnreachable) as error:
            self._said(f"no task is left out: {error}")

    async def watch(self) -> None:
        """Until the proxy refuses an answer; else without an end."""
        while True:
            await asyncio.sleep(LOOK_S)
            # What is left out may be tried again some time; else a state changes by new attempts.
            again = {one.task.task_id for one in [*self._tasks.values(), *self._images.values()]}
            asked = sorted(self._ended | again)
            self._ended.clear()
            if not asked:
                continue
            try:
                self._take(await asyncio.to_thread(self._asked, asked))
            except ProxyUnreachable:
                self._ended.update(asked)
            except ProxyRefused as error:
                self._said(f"no more tasks are left out: {error}")
                return

    def _asked(self, task_ids: Iterable[str]) -> Sequence[Verdict]:
        refs = [TaskRef(task_id, self._image_of(task_id)) for task_id in task_ids]
        return check_tasks(proxy_url(), refs, retry=True)

    def _take(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            task = verdict.task
            if verdict.run:
                self._tasks.pop(task.task_id, None)
                if task.image is not None:
                    self._images.pop(task.image, None)
            elif verdict.subject == "image" and task.image is not None:
                self._leave_out(self._images, task.image, verdict)
            else:
                self._leave_out(self._tasks, task.task_id, verdict)

    def _leave_out(self, known: dict[str, Verdict], name: str, verdict: Verdict) -> None:
        if name not in known:
            known[name] = verdict
            self._said(f"left out: {verdict}")
