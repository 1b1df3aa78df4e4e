"""Run by verifiers' Python: a taskset of its v1, whose tasks fail each in a way of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import verifiers.v1 as vf


class AddTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.id == "broken":
            raise ValueError("no scores today")
        if self.data.id == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return float("3" in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 5)


class Adding(vf.Taskset[AddTask]):
    def load(self) -> Iterator[AddTask]:
        print("loading", flush=True)  # what it prints is no answer
        for name in ("right", "long", "broken", "killed"):
            yield AddTask(vf.TaskData(prompt=f"1 + 2? ({name})", id=name), self.config.task)


__all__ = ["Adding"]
