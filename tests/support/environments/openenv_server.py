"""Run by OpenEnv's Python: two of its environments, at their own ports.

openenv_server.py GUESSING_PORT TOOLS_PORT
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class Guessing(Environment[Guess, Hint, State]):
    """A number from 0 to 9, the seed's last digit; half a point for each of two questions."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self._number, self._steps = (seed or 0) % 10, 0
        return Hint(text=more.get("greeting", "guess"))

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        if action.number == 13:
            raise RuntimeError("the board fell off the table")
        self._steps += 1
        right = action.number == self._number
        said = "right" if right else "higher" if action.number < self._number else "lower"
        return Hint(text=said, reward=0.5 * right, done=self._steps == 2)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


class Adding(MCPEnvironment):
    """One tool, and a point for its use."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("adding")

        @tools.tool()
        def add(a: int, b: int) -> int:
            """The sum."""
            return a + b

        super().__init__(tools)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> Observation:
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return self._scored(super().step(action, timeout_s=timeout_s, **more))

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **more: Any
    ) -> Observation:
        return self._scored(await super().step_async(action, timeout_s=timeout_s, **more))

    def _scored(self, found: Observation) -> Observation:
        if isinstance(found, CallToolObservation):
            found.reward, found.done = float(found.error is None), True
        return found

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Any:
        raise ValueError(f"no {type(action).__name__} here")

    @property
    def state(self) -> State:
        return State()


def serve(app: Any, port: int) -> None:
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    guessing, adding = map(int, sys.argv[1:])
    app = create_fastapi_app(Adding, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    threading.Thread(target=serve, args=[app, adding], daemon=True).start()
    serve(create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4), guessing)
