"""Agents as users write them, and a reward that a random model can already earn some of.

Four kinds, each with a client of `openai` in its own way: an async and a sync function under
`@trace`, and two that know nothing of the SDK: one names its rollout in the URL, one in the API
key, and both tell the proxy of rollouts and rewards over plain HTTP.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from tracegrad import Outcome, trace
from tracegrad.context import current

MAX_TOKENS = 24
SPLIT = {"split": "train"}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "finds", "parameters": {"type": "object"}},
}

Message = dict[str, Any]


@dataclass(frozen=True)
class CompleteAnswer:
    """An answer, complete."""

    completion_id: str
    text: str
    finish_reason: str


@dataclass(frozen=True)
class CompletedToyCall:
    """A call as its client saw it end."""

    kind: str
    rollout_id: str
    messages: list[Message]
    said: CompleteAnswer


@dataclass
class ToyAgents:
    """The agents of one proxy, and the calls that they saw completed."""

    url: str
    seen: list[CompletedToyCall] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # rollouts whose reward was accepted
    # What a rollout without the SDK is worth, by its id and its score.
    reward_of: Callable[[str, float], float] = field(default=lambda rollout_id, scored: scored)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def group(self, task: str, temperature: float = 1.0) -> None:
        """Four attempts at one task, one of each kind, at the same time."""
        attempts: list[Awaitable[object]] = [
            self.traced(task, temperature),
            asyncio.to_thread(self.streamed, task),
            self.by_path(task),
            self.by_key(task),
        ]
        await asyncio.gather(*attempts)

    async def traced(self, task: str, temperature: float = 1.0) -> float:
        """`@trace` around async code with a tool in between; the reward is what it returns."""

        @trace(task=lambda question: question, agent="traced", tags=SPLIT, reward=True)
        async def answer(question: str) -> float:
            @trace(name="look_up")
            async def look_up(text: str) -> str:
                return f"{len(text)} found"

            async def ask(messages: list[Message]) -> CompleteAnswer:
                return whole(
                    await client.chat.completions.create(
                        model="whatever",
                        messages=messages,  # type: ignore[arg-type]
                        tools=[TOOL],  # type: ignore[list-item]
                        temperature=temperature,
                        max_tokens=MAX_TOKENS,
                    )
                )

            async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="not-needed") as client:
                return await self._two_turns("traced", question, ask, look_up)

        return await answer(task)

    def streamed(self, task: str) -> float:
        """`@trace` around sync code that streams; one turn."""

        @trace(task=lambda question: question, agent="streamed", tags=SPLIT, reward=True)
        def answer(question: str) -> float:
            messages: list[Message] = [{"role": "user", "content": question}]
            with OpenAI(base_url=f"{self.url}/v1", api_key="not-needed") as client:
                stream = client.chat.completions.create(
                    model="whatever",
                    messages=messages,  # type: ignore[arg-type]
                    stream=True,
                    max_tokens=MAX_TOKENS,
                )
                said = together(list(stream))
            self._saw("streamed", _rollout_id(), messages, said)
            return score(said.text)

        return answer(task)

    async def by_path(self, task: str) -> None:
        """No SDK: the rollout is in the URL."""
        rollout_id = f"path-{uuid.uuid4().hex}"

        async def ask(messages: list[Message]) -> CompleteAnswer:
            return await plainly(client, messages)

        url = f"{self.url}/rollouts/{rollout_id}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            await self._told("by_path", rollout_id, task, ask)

    async def by_key(self, task: str) -> None:
        """No SDK: the rollout is in the key. Streams, and knows of no other address."""
        rollout_id = f"key-{uuid.uuid4().hex}"

        async def ask(messages: list[Message]) -> CompleteAnswer:
            return await streaming(client, messages)

        async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key=f"tg-{rollout_id}") as client:
            await self._told("by_key", rollout_id, task, ask)

    async def events(self, *events: Message) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.post(f"{self.url}/api/events", json={"events": list(events)})
        answer.raise_for_status()

    async def _told(
        self,
        kind: str,
        rollout_id: str,
        task: str,
        ask: Callable[[list[Message]], Awaitable[CompleteAnswer]],
    ) -> None:
        me = {"rollout_id": rollout_id}
        await self.events(
            {"type": "rollout_started", **me, "task_id": task, "agent": kind, "tags": SPLIT}
        )

        async def look_up(text: str) -> str:
            return f"{len(text)} found"

        scored = await self._two_turns(kind, task, ask, look_up, rollout_id)
        value = self.reward_of(rollout_id, scored)
        await self.events(
            {"type": "reward", **me, "value": value},
            {"type": "rollout_finished", **me, "outcome": Outcome.COMPLETED},
        )
        self.finished.append(rollout_id)

    async def _two_turns(
        self,
        kind: str,
        task: str,
        ask: Callable[[list[Message]], Awaitable[CompleteAnswer]],
        look_up: Callable[[str], Awaitable[str]],
        rollout_id: str | None = None,
    ) -> float:
        messages: list[Message] = [{"role": "user", "content": task}]
        total = ""
        for _ in range(2):
            said = await ask(messages)
            self._saw(kind, rollout_id or _rollout_id(), messages, said)
            total += said.text
            messages = [
                *messages,
                {"role": "assistant", "content": said.text},
                {"role": "tool", "tool_call_id": "none", "content": await look_up(said.text)},
            ]
        return score(total)

    def _saw(
        self, kind: str, rollout_id: str, messages: list[Message], said: CompleteAnswer
    ) -> None:
        with self._lock:
            self.seen.append(CompletedToyCall(kind, rollout_id, messages, said))


async def plainly(client: AsyncOpenAI, messages: list[Message]) -> CompleteAnswer:
    completion = await client.chat.completions.create(
        model="policy",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=MAX_TOKENS,
    )
    return whole(completion)


async def streaming(client: AsyncOpenAI, messages: list[Message]) -> CompleteAnswer:
    stream = await client.chat.completions.create(
        model="policy",
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        max_tokens=MAX_TOKENS,
    )
    return together([chunk async for chunk in stream])


def whole(completion: Any) -> CompleteAnswer:
    [choice] = completion.choices
    return CompleteAnswer(completion.id, choice.message.content or "", choice.finish_reason)


def together(chunks: Sequence[Any]) -> CompleteAnswer:
    """A stream's chunks as one answer."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    [reason] = [choice.finish_reason for choice in choices if choice.finish_reason]
    return CompleteAnswer(chunks[0].id, "".join(c.delta.content or "" for c in choices), reason)


def score(text: str) -> float:
    """The share of small letters: what the model is to learn."""
    return sum(map(str.islower, text)) / max(len(text), 1)


def _rollout_id() -> str:
    rollout = current()
    assert rollout is not None, "called inside @trace"
    return rollout.id
