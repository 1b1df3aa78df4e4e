"""OpenEnv's environments with Gymnasium's methods: a session of an environment server, over its
WebSocket (`pip install "tracegrad[openenv]"`).

    agent = episode_agent(lambda task: OpenEnvSession("http://127.0.0.1:8000"), policy)

Actions and observations are objects of JSON. Tools of an MCP environment are steps, too: `info`
has them as chat completions take them, `tool_action` makes a step of a model's tool call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad_integrations.environments.episode import InvalidAction, Step

try:
    from openenv.core.generic_client import GenericEnvClient
    from websockets.exceptions import ConnectionClosed
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("openenv", "websockets"):
        raise
    raise ModuleNotFoundError(
        "openenv is not installed: pip install 'tracegrad[openenv]'", name="openenv"
    ) from None

Json = dict[str, Any]
# How its client spells what the server answered: `Server error: … (code: …)`.
_CODE = re.compile(r"\(code: (?:WSErrorCode\.)?(\w+)\)\s*$")


class OpenEnvSession:
    """One session of the server's: an environment of its own, until `close`."""

    def __init__(
        self,
        url: str,
        *,
        tools: bool = False,
        reset: Mapping[str, Any] | None = None,
        connect_s: float = 10.0,
        message_s: float = 60.0,
    ) -> None:
        """
        Args:
            url: the server's, http:// or ws://.
            tools: it is an MCP environment: `info["tools"]` has its tools, as they are at `reset`.
            reset: what its `reset` gets besides the seed.
            message_s: the longest that it may take for an answer.
        """
        client = GenericEnvClient(
            base_url=url,
            connect_timeout_s=connect_s,
            message_timeout_s=message_s,
            mode="simulation",
        )
        self._client = client.sync()
        self._tools, self._reset = tools, dict(reset or {})
        self._info: Json = {}

    def reset(self, *, seed: int | None = None) -> tuple[Json, Json]:
        """Raises BrokenEnvironment, SandboxUnavailable."""
        given = {**self._reset, **({} if seed is None else {"seed": seed})}
        found = self._asked("reset", **given)
        if self._tools:
            listed = self._asked("step", {"type": "list_tools"}).observation
            self._info = {"tools": [_chat_tool(each) for each in listed.get("tools", [])]}
        return found.observation, dict(self._info)

    def step(self, action: Mapping[str, Any]) -> Step:
        """Raises InvalidAction: the server takes no such action; and as `reset`. A tool that fails
        is an observation with an `error`."""
        if not isinstance(action, Mapping):
            raise InvalidAction(f"action {action!r:.60} is no object with fields")
        found = self._asked("step", dict(action))
        return found.observation, found.reward, bool(found.done), False, dict(self._info)

    def state(self) -> Json:
        """What the server says of the session: `episode_id`, `step_count` and its own."""
        found: Json = self._asked("state")
        return found

    def close(self) -> None:
        self._client.close()

    def _asked(self, what: str, *given: Any, **named: Any) -> Any:
        try:
            return getattr(self._client, what)(*given, **named)
        except ConnectionError as error:
            raise SandboxUnavailable(f"openenv: {error}") from error
        except ConnectionClosed as error:
            raise SandboxUnavailable(f"openenv: the server hung up: {error}") from error
        except TimeoutError as error:
            raise BrokenEnvironment(f"openenv: {what}: no answer in time") from error
        except RuntimeError as error:
            raise _of_server(what, error) from error


def tool_action(call: Any) -> Json:
    """The step that a tool call of chat completions is: an object of a client's, or its JSON.

    Raises InvalidAction: its arguments are no JSON object.
    """
    function = call["function"] if isinstance(call, Mapping) else call.function
    name, text = (
        (function["name"], function["arguments"])
        if isinstance(function, Mapping)
        else (function.name, function.arguments)
    )
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidAction(f"tool call {name}: arguments {text!r:.60} are no JSON object")
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def _chat_tool(tool: Mapping[str, Any]) -> Json:
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"}
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _of_server(what: str, error: RuntimeError) -> Exception:
    """What its error is: the code is the last thing that it says."""
    said = f"openenv: {what}: {error}"
    code = found[1] if (found := _CODE.search(str(error))) else ""
    if code == "VALIDATION_ERROR" and what == "step":
        return InvalidAction(said)
    if code == "CAPACITY_REACHED":
        return SandboxUnavailable(said)
    return BrokenEnvironment(said)
