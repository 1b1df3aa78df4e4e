"""A user's function in child processes that can be killed: a crash there is a failed attempt."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from contextlib import suppress

from tracegrad.events import Json
from tracegrad_trainer.rewards.attempt import AttemptFailed
from tracegrad_trainer.rewards.child_process import (
    LOG,
    describe_end,
    kill,
    prepare,
    scorer_environment,
)
from tracegrad_trainer.rewards.function_child import HEAD
from tracegrad_trainer.rewards.result import NoScore, Score
from tracegrad_trainer.rewards.rollout import ScoredRollout

_CHILD = "tracegrad_trainer.rewards.function_child"
# To import what the function needs, which may be much.
START_TIMEOUT_S = 300.0
_LONGEST_REPLY = 1 << 20


class FunctionUnusable(ValueError):
    """It cannot be imported; in one line."""


class FunctionScorer:
    """`described`: an import path, or a built-in term as `function_child` reads it. `secret`: a
    variable of the environment that its processes do not get."""

    def __init__(
        self, name: str, described: str, *, timeout_s: float, secret: str | None = None
    ) -> None:
        self.name = name
        self.label = f"function {described}" if not described.startswith("{") else f"term {name}"
        self.described = described
        self.timeout_s = timeout_s
        self.secret = secret
        self.digest = ""
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()

    async def start(self) -> None:
        """Learns the digest of its source. Raises FunctionUnusable."""
        child = await self._new_child()
        self.digest = child.digest
        self._idle.append(child)

    async def score(self, rollout: ScoredRollout, _number: int) -> Score:
        """Raises AttemptFailed."""
        try:
            child = self._idle.pop() if self._idle else await self._new_child()
        except FunctionUnusable as error:
            raise AttemptFailed(str(error)) from None
        try:
            async with asyncio.timeout(self.timeout_s):
                said = await child.ask(rollout)
        except TimeoutError:
            await self._end(child)
            raise AttemptFailed(f"{self.name} timed out after {self.timeout_s:g} s") from None
        except _ChildEnded as error:
            await self._end(child)
            raise AttemptFailed(f"the process of {self.name} {error}") from None
        except BaseException:
            await self._end(child)
            raise
        self._idle.append(child)
        return _score(said)

    async def close(self) -> None:
        for child in [*self._all]:
            await self._end(child)
        self._idle.clear()

    async def _new_child(self) -> _Child:
        child = await _Child.started(self.described, self.name, self.secret)
        self._all.add(child)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                said = await child.reply()
        except TimeoutError:
            await self._end(child)
            raise FunctionUnusable(
                f"{self.described} is not imported after {START_TIMEOUT_S:.0f} s"
            ) from None
        except _ChildEnded as error:
            await self._end(child)
            raise FunctionUnusable(f"the process that imports {self.described} {error}") from None
        except BaseException:
            await self._end(child)
            raise
        if "error" in said:
            await self._end(child)
            raise FunctionUnusable(str(said["error"]))
        child.digest = str(said["digest"])
        return child

    async def _end(self, child: _Child) -> None:
        self._all.discard(child)
        await child.end()


def _score(said: Json) -> Score:
    if "error" in said:
        raise AttemptFailed(str(said["error"]), final=bool(said.get("final")))
    try:
        return Score.from_json(said)
    except (NoScore, KeyError, TypeError, AttributeError) as error:
        raise AttemptFailed(str(error), final=True) from None


class _ChildEnded(Exception):
    """How."""


class _Child:
    """One process, which scores one rollout at a time."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        replies: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
    ) -> None:
        self.digest = ""
        self._process = process
        self._replies = replies
        self._transport = transport

    @classmethod
    async def started(cls, described: str, name: str, secret: str | None) -> _Child:
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _CHILD, described, name, str(write)),
                stdin=asyncio.subprocess.PIPE,
                stdout=LOG,
                env=scorer_environment(secret),
                start_new_session=True,
                pass_fds=[write],
                preexec_fn=prepare,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        replies = asyncio.StreamReader(limit=_LONGEST_REPLY)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(replies), os.fdopen(read, "rb")
        )
        return cls(process, replies, transport)

    async def ask(self, rollout: ScoredRollout) -> Json:
        """Raises _ChildEnded."""
        asked = pickle.dumps(rollout)
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended, as its reply will say
            self._process.stdin.write(HEAD.pack(len(asked)) + asked)
            await self._process.stdin.drain()
        return await self.reply()

    async def reply(self) -> Json:
        """Raises _ChildEnded."""
        try:
            line = await self._replies.readline()
            said: Json | None = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:  # the user's code wrote there too
            raise _ChildEnded("wrote something that is no reply") from None
        if said is None:
            raise _ChildEnded(describe_end(await self._process.wait()))
        return said

    async def end(self) -> None:
        await kill(self._process)
        self._transport.close()
