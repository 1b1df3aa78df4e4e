"""Sandboxes in the state behind the first turns of a task's demonstration: IPA's anchors.

The proxy opens a rollout at its anchor (`/api/anchors/next`) with the conversation that leads
there. Here its sandbox is brought there, too: the demonstration's replies are carried out again,
and what comes of them must be what the demonstration was shown. Where sandboxes have snapshots this
is done once for each anchor, and all others that are rolled from it start from what it made.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tracegrad import context
from tracegrad.context import Rollout, proxy_url
from tracegrad.decorators import rollout
from tracegrad.events import Json, Outcome
from tracegrad.intake_client import use_place
from tracegrad.protocol import ANCHORS_PATH
from tracegrad.runner.sandbox import (
    BrokenEnvironment,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    Snapshot,
    SnapshotSandbox,
)
from tracegrad.serializer import error_line
from tracegrad.transport import post_json

# Carries out one reply of the model in the sandbox (a message as the agent has it in its
# conversation), and gives the messages that the agent adds behind it.
Act = Callable[[Sandbox, Json], Awaitable[Sequence[Json]]]

log = logging.getLogger("tracegrad.runner")

MOST_SNAPSHOTS = 64
_SHOWN = 500  # characters of what differs


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredAttempt:
    """
    Attributes:
        rollout: open under the id that its turns up to the anchor are stored with.
        sandbox: in the state behind them.
        request: the demonstration's at the anchor, with all messages before it: what the agent goes
            on with. None: the task has no demonstration, and is begun as ever.
        anchor: how many turns were made before it.
    """

    rollout: Rollout
    sandbox: Sandbox
    request: Json | None
    anchor: int


class PrefixTurn(NamedTuple):
    """A reply, and the messages that stood behind it."""

    reply: Json
    behind: Sequence[Json]


class AnchoredSandboxes:
    """All on one event loop; `backend` is closed by whoever made it.

    Args:
        act: must do the same whenever it is called with the same state and reply.
        most_snapshots: that are kept, those that were used last.
    """

    def __init__(
        self, backend: SandboxBackend, act: Act, *, most_snapshots: int = MOST_SNAPSHOTS
    ) -> None:
        self._backend, self._act, self._most = backend, act, most_snapshots
        self._prefixes: OrderedDict[_PrefixKey, _Prefix] = OrderedDict()

    @asynccontextmanager
    async def rollout(
        self,
        task_id: str,
        spec: SandboxSpec,
        *,
        agent: str | None = None,
        tags: Mapping[str, str] | None = None,
        task: Any = None,
        counts: bool = True,
    ) -> AsyncIterator[AnchoredAttempt]:
        """The task's next one. Leaving it ends it as `tracegrad.rollout` does, and closes the
        sandbox. `counts` False: its success says nothing of the policy.

        Raises:
            BrokenEnvironment: the sandbox cannot be had, or comes to another state than the
                demonstration's; the rollout has ended as `env_error`.
            SandboxUnavailable: the same by the machine's doing; `infra_error`.
            ProxyUnreachable, ProxyRefused: of the proxy; it has no [proxy.anchors].
            ValueError: another rollout is open here, or TRACEGRAD_HELD_OUT is set.
        """
        if context.current() is not None or context.environment_held_out():
            raise ValueError("a rollout from an anchor is trained, and stands in no other one")
        asked = {"task_id": task_id, "agent": agent, "tags": {**(tags or {})}, "task": task}
        body = json.dumps({**asked, "counts": counts}).encode()
        answer = await asyncio.to_thread(post_json, proxy_url(), ANCHORS_PATH, body, {})
        found: Json = json.loads(answer)
        use_place(found["rollout_id"])
        with rollout(found["task_id"], agent=agent, tags=tags, input=task) as opened:
            assert opened.id == found["rollout_id"], "nobody else took the place"
            with _outcome_of_sandboxes(opened):
                sandbox = await self._at_anchor(spec, found)
                try:
                    yield AnchoredAttempt(
                        rollout=opened,
                        sandbox=sandbox,
                        request=found["request"],
                        anchor=found["anchor"],
                    )
                finally:
                    await sandbox.close()

    async def _at_anchor(self, spec: SandboxSpec, found: Json) -> Sandbox:
        """Raises SandboxError."""
        if found["anchor"] == 0:
            return await self._backend.start(spec)
        turns = prefix_turns(found["request"], found["anchor"])
        key = _PrefixKey(spec, found["demonstration"], found["anchor"])
        prefix = self._prefixes.setdefault(key, _Prefix())
        self._prefixes.move_to_end(key)
        with prefix.used():
            await self._drop_oldest()
            if not prefix.replays:
                async with prefix.making:  # once: the others of the group wait for it
                    if prefix.snapshot is None and not prefix.replays:
                        return await self._first(key, prefix, turns)
            if prefix.snapshot is not None:
                return await self._backend.start(prefix.snapshot.spec)
            return await self._replayed(key, turns)

    async def _first(
        self, key: _PrefixKey, prefix: _Prefix, turns: Sequence[PrefixTurn]
    ) -> Sandbox:
        sandbox = await self._replayed(key, turns)
        try:
            if isinstance(sandbox, SnapshotSandbox):
                prefix.snapshot = await sandbox.snapshot()
        except BrokenEnvironment as error:
            log.info(
                "anchor %d of %s is replayed each time: %s", key.anchor, key.demonstration, error
            )
        except BaseException:
            await sandbox.close()
            raise
        prefix.replays = prefix.snapshot is None
        return sandbox

    async def _replayed(self, key: _PrefixKey, turns: Sequence[PrefixTurn]) -> Sandbox:
        """From the latest state before it that there is."""
        made = 0
        for other, prefix in self._prefixes.items():
            same = (other.spec, other.demonstration) == (key.spec, key.demonstration)
            if same and prefix.snapshot is not None and made < other.anchor < key.anchor:
                made = other.anchor
        nearest = self._prefixes.get(key._replace(anchor=made)) or _Prefix()
        with nearest.used():
            start = key.spec if nearest.snapshot is None else nearest.snapshot.spec
            sandbox = await self._backend.start(start)
        try:
            for turn in turns[made:]:
                _check(await self._acted(sandbox, turn.reply), turn)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _acted(self, sandbox: Sandbox, reply: Json) -> Sequence[Json]:
        """Raises SandboxError: whatever fails here is no doing of the policy."""
        try:
            return await self._act(sandbox, reply)
        except SandboxError:
            raise
        except Exception as error:
            raise BrokenEnvironment(f"the replay failed: {error_line(error, _SHOWN)}") from error

    async def _drop_oldest(self) -> None:
        idle = [key for key, prefix in self._prefixes.items() if prefix.users == 0]
        too_many = max(0, len(self._prefixes) - self._most)
        for prefix in [self._prefixes.pop(key) for key in idle[:too_many]]:
            if prefix.snapshot is not None:
                await prefix.snapshot.remove()


class _PrefixKey(NamedTuple):
    spec: SandboxSpec
    demonstration: str
    anchor: int


@dataclass(slots=True)
class _Prefix:
    """`replays`: its sandboxes have no snapshots. `users`: that start from it at the moment."""

    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    snapshot: Snapshot | None = None
    replays: bool = False
    users: int = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1


def prefix_turns(request: Json | None, turns: int) -> list[PrefixTurn]:
    """The last so many replies in a request's conversation, in order, each with what stands behind
    it. Raises BrokenEnvironment: it has fewer, or no conversation."""
    messages = (request or {}).get("messages")
    if not isinstance(messages, list):
        raise BrokenEnvironment("the demonstration's request has no messages to be replayed")
    replies = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(replies) < turns:
        raise BrokenEnvironment(
            f"the demonstration's conversation has {len(replies)} replies before turn {turns}: it"
            " is not the one conversation that could be replayed"
        )
    begins = replies[-turns:]
    ends = [*begins[1:], len(messages)]
    return [
        PrefixTurn(messages[begin], messages[begin + 1 : end])
        for begin, end in zip(begins, ends, strict=True)
    ]


def _check(seen: Sequence[Json], turn: PrefixTurn) -> None:
    """Raises BrokenEnvironment."""
    now, then = (json.dumps([*each], sort_keys=True) for each in (seen, turn.behind))
    if now != then:
        raise BrokenEnvironment(
            "the replay differs from the demonstration: it shows"
            f" {now[:_SHOWN]} for {then[:_SHOWN]}"
        )


@contextmanager
def _outcome_of_sandboxes(opened: Rollout) -> Iterator[None]:
    try:
        yield
    except BrokenEnvironment as error:
        opened.finish(Outcome.ENV_ERROR, f"sandbox: {error}")
        raise
    except SandboxUnavailable as error:
        opened.finish(Outcome.INFRA_ERROR, f"sandbox: {error}")
        raise
