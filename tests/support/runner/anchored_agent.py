"""An agent that runs its model's tool calls as commands in a sandbox, and goes on from anchors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from support.engines.mock_engine import Answer
from tracegrad.runner.anchored_sandboxes import AnchoredAttempt
from tracegrad.runner.sandbox import Sandbox, SandboxUnavailable

Json = dict[str, Any]


def call(command: str) -> Answer:
    """Of a model that wants the command run."""
    return Answer("", tool_calls=[("sh", json.dumps({"command": command}))])


class AnchoredAgent:
    """`ran`: commands, in their order."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def act(self, sandbox: Sandbox, reply: Json) -> Sequence[Json]:
        return [await self._run(sandbox, each) for each in reply.get("tool_calls") or ()]

    async def solve(self, one: AnchoredAttempt, question: str) -> str:
        """Until the model calls no tool; what it says then."""
        messages: list[Json] = [{"role": "user", "content": question}]
        if one.request is not None:
            messages = one.request["messages"]
        async with openai.AsyncOpenAI(
            base_url=one.rollout.base_url, api_key=one.rollout.api_key
        ) as client:
            while True:
                given: Any = messages
                answer = await client.chat.completions.create(model="policy", messages=given)
                reply = answer.choices[0].message.model_dump(exclude_none=True)
                added = await self.act(one.sandbox, reply)
                messages = [*messages, reply, *added]
                if not added:
                    return str(reply.get("content"))

    async def _run(self, sandbox: Sandbox, wanted: Json) -> Json:
        command = json.loads(wanted["function"]["arguments"])["command"]
        self.ran.append(command)
        with tempfile.TemporaryDirectory() as folder:
            output, own = Path(folder) / "output", f"ACT={folder}"
            environ = {"ACT": folder}
            end = await sandbox.run(
                command, environ=environ, timeout_s=60, output=output, marker=own
            )
            said = f"{end.exit_code} {output.read_text()}"
        if end.exit_code is None:
            raise SandboxUnavailable(said)
        return {"role": "tool", "tool_call_id": wanted["id"], "content": said}
