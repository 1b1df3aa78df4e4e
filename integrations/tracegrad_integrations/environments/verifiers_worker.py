"""Run by the Python that has verifiers, as a program: its environments' episodes, on demand.

Imports nothing of tracegrad, which is not installed there. Lines of JSON on stdin and stdout; the
first one in is the environment's settings and `limit`, the first one out its tasks. Ends when
stdin does, so that it never outlives who started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from typing import Any

Json = dict[str, Any]


class Worker:
    def __init__(self, environment: Any, tasks: list[Any], out: Any) -> None:
        self._environment, self._tasks, self._out = environment, tasks, out
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, lines: asyncio.StreamReader) -> None:
        async with self._environment.serving():
            self.say({"tasks": [_told(task) for task in self._tasks]})
            while line := await lines.readline():
                asked = json.loads(line)
                number = asked["number"]
                if "task" in asked:
                    running = asyncio.create_task(self._episode(asked))
                    self._running[number] = running
                    running.add_done_callback(partial(self._ended, number))
                elif number in self._running:
                    self._running[number].cancel()
            for each in [*self._running.values()]:
                each.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        self._running.pop(number, None)

    def say(self, what: Json) -> None:
        self._out.write(json.dumps(what) + "\n")
        self._out.flush()

    async def _episode(self, asked: Json) -> None:
        import verifiers.v1 as vf

        # Read when the episode's client is made, and by nobody else's.
        variable = f"TRACEGRAD_KEY_{asked['number']}"
        os.environ[variable] = asked["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
            context = vf.ModelContext(model=asked["model"], client=client)
            episode = await self._environment.run_episode(self._tasks[asked["task"]], context)
            self.say({"number": asked["number"], **_ended(episode)})
        except Exception as error:
            self.say({"number": asked["number"], **_failed(type(error).__name__, str(error))})
        finally:
            os.environ.pop(variable, None)


def _told(task: Any) -> Json:
    return {"id": str(task.data.id or task.key), "prompt": task.data.prompt_text}


def _ended(episode: Any) -> Json:
    """Of an episode of one agent."""
    if episode.errors:
        return _failed(episode.errors[-1].type, episode.errors[-1].message)
    if len(episode.traces) != 1:
        return _failed("TaskError", f"{len(episode.traces)} agents played; one can be trained")
    [trace] = episode.traces
    if trace.errors and not trace.is_timeout:
        return _failed(trace.errors[-1].type, trace.errors[-1].message)
    return {
        "stop": trace.stop_condition,
        "rewards": {
            name: None if one is None else {"value": one.value, "score": one.score}
            for name, one in trace.rewards.items()
        },
    }


def _failed(kind: str, message: str) -> Json:
    return {"error": {"type": kind, "message": message[:2_000]}}


async def _main(out: Any) -> None:
    lines = asyncio.StreamReader(limit=64 << 20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    given = json.loads(await lines.readline())
    import verifiers.v1 as vf

    environment: Any = vf.load_environment(vf.resolve_env_config(given["environment"]))
    tasks = list(environment.taskset.take(given["limit"]))
    await Worker(environment, tasks, out).serve(lines)


if __name__ == "__main__":
    # What the environment prints goes with the errors, and its agents find what is installed here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    sys.path.insert(0, os.getcwd())
    asyncio.run(_main(answers))
