"""People who use the service, all the time: they ask, some ask again, some give a thumb."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from openai.types.chat import ChatCompletionMessageParam

from . import service
from .users import Thumb, User, asks_back, thumb

PEOPLE = 64  # at a time
ASKS_AGAIN = 0.3
PAUSE_S = (0.1, 0.4)  # before the next one asks


@dataclass(frozen=True, slots=True)
class Reply:
    """One that somebody got. `approval` is how likely a thumb up is; `version` the policy's."""

    approval: float
    asked_back: bool
    version: int


@dataclass
class Traffic:
    """`exploited`: somebody pays for thumbs now. `shuffled`: thumbs say nothing (a control)."""

    url: str
    seed: int
    version: Callable[[], int]
    shuffled: bool = False
    exploited: bool = False
    replies: list[Reply] = field(default_factory=list)
    thumbs: int = 0
    changed: int = 0
    errors: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the block ends; then nobody asks any more, and thumbs to come are dropped."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as self._client:
            self._thumbs: set[asyncio.Task[None]] = set()
            self._bought: list[str] = []  # responses
            self._void: set[str] = set()
            people = [asyncio.create_task(self._person(number)) for number in range(PEOPLE)]
            try:
                yield
            finally:
                tasks = [*people, *self._thumbs]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _person(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        while True:
            try:
                await self._conversation(rng)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(rng.uniform(*PAUSE_S))

    async def _conversation(self, rng: random.Random) -> None:
        conversation: list[ChatCompletionMessageParam] = []
        for _ in range(1 + (rng.random() < ASKS_AGAIN)):
            user = User.drawn(rng)
            conversation.append({"role": "user", "content": user.question})
            text, response_id = await service.reply(conversation)
            conversation.append({"role": "assistant", "content": text})
            asked_back = asks_back(text)
            self.replies.append(Reply(user.approval(text), asked_back, self.version()))
        approval = user.approval(text, exploited=self.exploited)
        given = thumb(rng.random() if self.shuffled else approval, rng)
        if given is not None:
            if self.exploited:
                self._bought.append(response_id)
            task = asyncio.create_task(self._give(given, response_id))
            self._thumbs.add(task)
            task.add_done_callback(self._thumbs.discard)

    async def _give(self, given: Thumb, response_id: str) -> None:
        await asyncio.sleep(given.after_s)
        if response_id in self._void:
            return
        await self._send(response_id, given.up, "first")
        self.thumbs += 1
        if given.changed_after_s is not None:
            await asyncio.sleep(given.changed_after_s)
            if response_id in self._void:
                return
            await self._send(response_id, not given.up, "changed")
            self.changed += 1

    async def withdraw_bought(self) -> int:
        """Takes back the thumbs that were paid for; those to come are refused. How many."""
        self._void = set(self._bought)
        few = asyncio.Semaphore(64)

        async def withdraw(response_id: str) -> None:
            async with few:
                await self._post(response_id, {"withdraw": True}, "withdrawn")

        await asyncio.gather(*map(withdraw, self._bought))
        return len(self._bought)

    async def _send(self, response_id: str, up: bool, which: str) -> None:
        await self._post(response_id, {"thumbs": "up" if up else "down"}, which)

    async def _post(self, response_id: str, said: dict[str, object], which: str) -> None:
        answer = await self._client.post(
            "/api/feedback",
            json={"response_id": response_id, **said},
            headers={"Idempotency-Key": f"{response_id} {which}"},
        )
        if answer.status_code != 200:
            self.errors.append(f"feedback {answer.status_code}: {answer.text}")
