"""An upstream as the endpoints use it: its answers, its capabilities and its limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

MODELS_PATH = "/v1/models"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What may be asked of an upstream beyond OpenAI's own API; other servers refuse the fields.

    `tokens`: it reports token ids (`return_token_ids`); without them a turn cannot be trained.
    `exact_prompts`: it takes the prompt's tokens (`kv_transfer_params`) in place of messages.
    """

    tokens: bool
    exact_prompts: bool


VLLM = Capabilities(tokens=True, exact_prompts=True)
TEXT_ONLY = Capabilities(tokens=False, exact_prompts=False)


@dataclass(frozen=True, slots=True)
class UpstreamTimeouts:
    """Seconds. `read_s` is the longest silence, before an answer and inside one: an answer that
    does not stream is silent until it is complete."""

    connect_s: float = 10.0
    read_s: float = 600.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many calls wait at most while no server is there, and for how many seconds each."""

    max_waiting: int = 4096
    max_wait_s: float = 300.0


Consume = Callable[[bytes], bool]
# For bytes as they came from the wire, in HTTP's chunked encoding: as Consume, or None where they
# are to be decoded first.
ConsumeFrames = Callable[[bytes], bool | None]
Drained = Callable[[], Awaitable[None]]
OnSent = Callable[[str], None]  # hears the server's URL, again where that one did not answer


class Body(Protocol):
    """The bytes of an answer as they arrive, never empty."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def deliver(
        self, consume: Consume, drained: Drained, frames: ConsumeFrames | None = None
    ) -> None: ...


class IteratedBody:
    """A body of an iterator's pieces."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def deliver(
        self, consume: Consume, drained: Drained, frames: ConsumeFrames | None = None
    ) -> None:
        """As `UpstreamResponse.deliver`."""
        async for piece in self._pieces:
            if consume(piece):
                await drained()


class UpstreamResponse:
    """An answer that is coming in, its first bytes here already; to be read once, one way or
    another.

    Reading raises ApiError: 502 when the answer breaks off, 504 when it stops coming.
    """

    __slots__ = ("_body", "headers", "status")

    def __init__(self, status: int, headers: Mapping[str, str], body: Body) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    @property
    def content(self) -> UpstreamResponse:
        """Where aiohttp's responses have their `iter_any`."""
        return self

    def iter_any(self) -> AsyncIterator[bytes]:
        """The bytes as they arrive, never empty."""
        return aiter(self._body)

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self._body])

    async def deliver(
        self, consume: Consume, drained: Drained, frames: ConsumeFrames | None = None
    ) -> None:
        """Call `consume` with the bytes as they arrive, to the end, without waking this task for
        each piece. Where it returns True it gets nothing more before `drained()` has returned.
        What `consume` raises ends it and is raised here. It may run outside of this task.

        `frames` is offered bytes of the wire first, where there are such: it takes none but whole
        pieces of the chunked encoding, which it knows by what is in them."""
        await self._body.deliver(consume, drained, frames)


class Upstream(Protocol):
    """Lives on one event loop, between `open` and `close`."""

    @property
    def capabilities(self) -> Capabilities: ...

    def open(self) -> None: ...

    async def close(self) -> None: ...

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None,
        headers: Mapping[str, str],
        sticky: str | None = None,
        on_sent: OnSent | None = None,
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """The answer, whatever its status. Leaving early hangs up, which ends the work up there.

        `sticky`: the rollout, or None for a call without a name. `on_sent` is called as a server
        is asked, once for each that is. Raises ApiError.
        """
        ...

    async def models(self) -> bytes:
        """The list of models, as JSON. Raises ApiError; at once, where nobody is there to ask."""
        ...
