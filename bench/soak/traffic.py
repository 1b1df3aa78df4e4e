"""Background traffic: conversations that nobody trains on, in every dialect, at a steady rate.

`python -m bench.soak.traffic URL FILE --rate 1` until SIGTERM; then calls under way may end. A
process of its own: a client that shares its event loop with others measures them too. Conversations
arrive in an open loop (a Poisson process that waits for nobody), and a call's latency counts from
when it was meant to start. FILE gets a line of JSON a call (`Call`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

import aiohttp

from bench.soak.dialects import DIALECTS, Conversation, Dialect, Reply, WrongAnswer

Kind = Literal["whole", "stream", "hang_up", "malformed"]

TURNS = 3  # of a conversation, at most
# Of so many conversations one hangs up and one is malformed; no multiple of how many dialects there
# are, so that each has its turn.
ODD = 11
THINK_S = 1.0  # mean time between an answer and the next call of its conversation
CALL_LIMIT_S = 120.0
STOP_S = 150.0
# Servers close idle connections after five seconds, and one that closes as a call is sent is an
# error of nobody.
_IDLE_S = 2.0
_SHOP = import_module("examples.shop.tasks")
_QUESTIONS: list[str] = [task.question for task in _SHOP.exam("validation", 90)]


@dataclass(frozen=True, slots=True)
class Call:
    """`at`: when it was meant to start, seconds since the epoch; times are from there. `error`:
    what went wrong, by kind; a client that hangs up and a 4xx for a malformed request are right."""

    at: float
    dialect: str
    kind: Kind
    tools: bool
    turn: int  # of its conversation, from 1
    seconds: float
    first_s: float | None = None  # to the first words of a stream
    answer_id: str | None = None  # of an answer that came whole
    tokens: int = 0
    error: str | None = None


def calls_in(path: Path) -> list[Call]:
    with path.open() as file:
        return [Call(**json.loads(line)) for line in file]


class Traffic:
    def __init__(self, url: str, file: IO[str], rate: float, seed: int) -> None:
        """`rate`: conversations a second."""
        self._url, self._file, self._rate = url, file, rate
        self._random = random.Random(seed)
        self._over = asyncio.Event()
        # Both clocks, so that a call's times are of one that never jumps.
        self._epoch = time.time() - time.monotonic()

    def stop(self) -> None:
        """No more calls begin."""
        self._over.set()

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
        limit = aiohttp.ClientTimeout(total=CALL_LIMIT_S)
        async with (
            aiohttp.ClientSession(self._url, connector=connector, timeout=limit) as self._http,
            asyncio.TaskGroup() as group,
        ):
            number, due = 0, time.monotonic()
            while not await self._reached(due):
                group.create_task(self._conversation(number, due))
                number, due = number + 1, due + self._random.expovariate(self._rate)

    async def _reached(self, due: float) -> bool:
        """Waits until `due`, or until it is over: True."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), max(0.0, due - time.monotonic()))
        return self._over.is_set()

    async def _conversation(self, number: int, due: float) -> None:
        dialect = DIALECTS[number % len(DIALECTS)]
        talk = Conversation(
            tools=dialect.name != "completions" and self._random.random() < 0.5,
            by_reference=self._random.random() < 0.5,
        )
        talk.messages.append(f"{self._random.choice(_QUESTIONS)} ({number})")
        prefix, headers = self._named(number)
        if number % ODD == ODD // 2:
            await self._malformed(dialect, prefix, headers, due)
            return
        hang_up = number % ODD == ODD - 1
        for turn in range(1, self._random.randint(1, TURNS) + 1):
            kind: Kind = "stream" if self._random.random() < 0.5 else "whole"
            kind = "hang_up" if hang_up else kind
            reply = await self._call(dialect, talk, turn, kind, prefix, headers, due)
            due = time.monotonic() + self._random.expovariate(1 / THINK_S)
            if reply is None or await self._reached(due):
                return
            self._go_on(talk, reply)

    def _named(self, number: int) -> tuple[str, dict[str, str]]:
        """How a call says of which rollout it is: by its path, a header, or not at all."""
        how = self._random.randrange(4)
        if how < 2:
            return f"/rollouts/soak-{number}", {}
        return "", {"x-tracegrad-rollout": f"soak-{number}"} if how == 2 else {}

    def _go_on(self, talk: Conversation, reply: Reply) -> None:
        talk.messages.append(reply)
        if reply.calls:
            talk.messages.append([str(self._random.randrange(11, 100)) for _ in reply.calls])
        else:
            talk.messages.append(f" And the {self._random.choice(_SHOP.ITEMS)}s?")

    async def _call(
        self,
        dialect: Dialect,
        talk: Conversation,
        turn: int,
        kind: Kind,
        prefix: str,
        headers: dict[str, str],
        due: float,
    ) -> Reply | None:
        stream = kind != "whole"
        path = prefix + dialect.path(stream=stream)
        body = dialect.body(talk, stream=stream)
        first: float | None = None
        reply: Reply | None = None
        error: str | None = None
        try:
            async with self._http.post(path, json=body, headers=headers) as answer:
                if answer.status != 200:
                    text = await answer.text()
                    error = f"status {answer.status}: {text[:200]}"
                elif not stream:
                    reply = dialect.whole(await answer.json())
                else:
                    reader, done = dialect.stream(), False
                    async for event in _events(answer):
                        if event is None:
                            done = True
                        elif reader.feed(event) and first is None:
                            first = time.monotonic() - due
                            if kind == "hang_up":
                                answer.close()
                                break
                    if kind != "hang_up":
                        reply = reader.reply(done=done)
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:200]
        except (WrongAnswer, KeyError, TypeError, ValueError) as failure:
            error = f"wrong answer: {failure!r}"[:200]
        self._write(
            Call(
                at=self._epoch + due,
                dialect=dialect.name,
                kind=kind,
                tools=talk.tools,
                turn=turn,
                seconds=time.monotonic() - due,
                first_s=first,
                answer_id=reply.answer_id if reply else None,
                tokens=reply.tokens if reply else 0,
                error=error,
            )
        )
        return reply

    async def _malformed(
        self, dialect: Dialect, prefix: str, headers: dict[str, str], due: float
    ) -> None:
        bodies = [*map(json.dumps, dialect.malformed()), '{"model": "policy", "input"']
        body = self._random.choice(bodies)
        error: str | None = None
        try:
            path = prefix + dialect.path(stream=False)
            async with self._http.post(
                path, data=body, headers=headers | {"content-type": "application/json"}
            ) as answer:
                said = await answer.json()
                if not (400 <= answer.status < 500 and "error" in said):
                    error = f"status {answer.status} for {body[:60]}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:200]
        seconds = time.monotonic() - due
        at = self._epoch + due
        self._write(Call(at, dialect.name, "malformed", False, 1, seconds, error=error))

    def _write(self, call: Call) -> None:
        self._file.write(json.dumps(asdict(call)) + "\n")
        self._file.flush()


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """Of a stream; None is `[DONE]`."""
    async for line in answer.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            yield None if data == b"[DONE]" else json.loads(data)


async def _main(options: argparse.Namespace) -> None:
    with options.file.open("a") as file:
        traffic = Traffic(options.url, file, options.rate, options.seed)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, traffic.stop)
        await traffic.run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak.traffic", description=__doc__)
    parser.add_argument("url", help="of the proxy")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rate", type=float, default=1.0, help="conversations a second")
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(_main(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
