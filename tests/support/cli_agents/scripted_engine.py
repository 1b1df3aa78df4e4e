"""The mock engine, playing a model that knows what to do: its replies follow a script.

An agent also calls for titles, summaries and the like, in between or at the same time. So a
reply depends on nothing but the request: its tools tell the main thread, its messages how far.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from support.engines.mock_engine import Answer, Json, MockEngine


@dataclass(frozen=True, slots=True)
class Script:
    """What is said to requests that offer `tool`: `steps` one by one, and the last one for good."""

    tool: str
    steps: Sequence[Answer]
    aside: Answer = field(default_factory=lambda: Answer("A greeting in a file"))  # to all others

    def is_main(self, body: Json) -> bool:
        return self.tool in {tool["function"]["name"] for tool in body.get("tools") or ()}

    def reply(self, body: Json) -> Answer:
        if not self.is_main(body):
            return self.aside
        acted = sum(bool(message.get("tool_calls")) for message in body["messages"])
        return self.steps[min(acted, len(self.steps) - 1)]


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer of the engine, as it must be in the store."""

    completion_id: str
    request: Json
    prompt_ids: list[int]
    said: Answer


@dataclass(kw_only=True)
class ScriptedEngine(MockEngine):
    script: Script
    answered: list[Answered] = field(default_factory=list)

    async def _chat(self, request: Request) -> Response:
        # No await from here to where MockEngine takes it: the body is there already.
        self.replies.append(self.script.reply(await request.json()))
        return await super()._chat(request)

    def _answer(self, body: Json, says: Sequence[Answer]) -> Json:
        answer = super()._answer(_flat(body), says)
        self._note(answer["id"], body, answer, says)
        return answer

    async def _chunks(self, body: Json, says: Sequence[Answer], head: Json) -> AsyncIterator[Json]:
        async for number, chunk in _numbered(super()._chunks(_flat(body), says, head)):
            if number == 0:
                self._note(head["id"], body, chunk, says)
            yield chunk

    def _note(self, completion_id: str, body: Json, told: Json, says: Sequence[Answer]) -> None:
        [say] = says
        self.answered.append(Answered(completion_id, body, told["prompt_token_ids"], say))


def _flat(body: Json) -> Json:
    """Contents in parts as the one string that vLLM makes of them for most templates."""
    messages = [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in body["messages"]
    ]
    return {**body, "messages": messages}


async def _numbered(chunks: AsyncIterator[Json]) -> AsyncIterator[tuple[int, Json]]:
    number = 0
    async for chunk in chunks:
        yield number, chunk
        number += 1
