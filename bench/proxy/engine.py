"""The mock engine: a vLLM that knows all answers already. `python -m bench.proxy.engine --port N`.

It must be much faster than what stands before it, so its answers are bytes made beforehand and
its HTTP is a bare protocol. How long it takes to think is told to it at `POST /bench/pace`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import httptools
import orjson
import uvloop

from bench.proxy import answers
from bench.proxy.answers import PromptIds, Sampled, Told
from bench.proxy.calls import MODEL, PROMPTS, REPLIES, Prompt, Reply
from bench.proxy.text import render

PROMPT_TOKENS = (200, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Pace:
    """`answer_s`: until a whole answer; `step_s`: between two chunks of a stream, and 0 sends
    each as soon as the other streams have had theirs; `chunk_tokens`: tokens a chunk."""

    answer_s: float = 0.0
    step_s: float = 0.0
    chunk_tokens: int = 1


class Engine:
    def __init__(self) -> None:
        self.pace = Pace()
        self._calls = 0
        self._replies = [Reply(number) for number in range(REPLIES)]
        self._prompts: dict[str, tuple[int, PromptIds]] = {}
        self._streams: list[_Sending] = []
        self._timer: asyncio.Handle | None = None
        self._due = 0.0

    def prepare(self) -> None:
        """Make what the benchmark will ask for."""
        for tokens in PROMPT_TOKENS:
            for number in range(PROMPTS):
                prompt = Prompt(tokens, number)
                user = prompt.messages[1]["content"]
                self._prompts[prompt.name] = (len(user), PromptIds(render(prompt.messages)))
        for told in (Told(), Told(ids=True, logprobs=True)):
            for reply in self._replies:
                answers.whole(PromptIds([]), reply, told, 0)
                answers.stream(PromptIds([]), reply, told, self.pace.chunk_tokens, 0)

    def chat(self, raw: bytes, connection: Connection) -> None:
        try:
            body = orjson.loads(raw)
            prompt = self._prompt(body)
        except (ValueError, KeyError, TypeError) as error:
            connection.send(_error(f"the body is no chat completion: {error!r}"))
            return
        number = self._calls = self._calls + 1
        reply = self._reply(body, number)
        told = Told(
            ids=bool(body.get("return_token_ids")),
            logprobs=bool(body.get("logprobs")),
            usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )
        if body.get("stream"):
            chunks = answers.stream(prompt, reply, told, self.pace.chunk_tokens, number)
            self._begin(_Sending(connection, chunks))
            return
        data = answers.whole(prompt, reply, told, number)
        if self.pace.answer_s:
            asyncio.get_running_loop().call_later(self.pace.answer_s, connection.send, data)
        else:
            connection.send(data)

    def _reply(self, body: Mapping[str, Any], number: int) -> Sampled:
        return self._replies[number % REPLIES]

    def _prompt(self, body: Mapping[str, Any]) -> PromptIds:
        """The prompt's ids: those that were sent, or what the messages render to."""
        if exact := (body.get("kv_transfer_params") or {}).get("prompt_token_ids"):
            return PromptIds(exact)
        messages: Sequence[Mapping[str, Any]] = body["messages"]
        if len(messages) == 2:
            name = messages[0]["content"].partition("]")[0] + "]"
            known = self._prompts.get(name)
            if known is not None and known[0] == len(messages[1]["content"]):
                return known[1]
        return PromptIds(render(messages))

    def _begin(self, sending: _Sending) -> None:
        sending.step()
        self._streams.append(sending)
        if self._timer is None:
            self._due = asyncio.get_running_loop().time()
            self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        # By the clock: the time that a step itself takes does not add up.
        self._due = max(self._due + self.pace.step_s, loop.time())
        if self.pace.step_s:
            self._timer = loop.call_at(self._due, self._step)
        else:
            self._timer = loop.call_soon(self._step)

    def _step(self) -> None:
        """One chunk for every stream, as engines that batch do it."""
        self._streams = [sending for sending in self._streams if sending.step()]
        if self._streams:
            self._schedule()
        else:
            self._timer = None


class _Sending:
    """A stream on its way."""

    __slots__ = ("_at", "_chunks", "_connection")

    def __init__(self, connection: Connection, chunks: answers.Stream) -> None:
        self._connection = connection
        self._chunks = chunks
        self._at = 0

    def step(self) -> bool:
        """Send the next piece; False when there is none left, or nobody to send it to."""
        if self._connection.gone or self._at == self._chunks.pieces:
            return False
        self._connection.send(self._chunks.piece(self._at))
        self._at += 1
        return self._at < self._chunks.pieces


class Connection(asyncio.Protocol):
    """HTTP/1.1 for one client that sends its next request after the last answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            assert self._transport is not None
            self._transport.close()

    def send(self, data: bytes) -> None:
        if not self.gone and self._transport is not None:
            self._transport.write(data)

    # What httptools calls.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url, body = self._url, b"".join(self._body)
        self._url, self._body = b"", []
        if url == b"/v1/chat/completions":
            self._engine.chat(body, self)
        elif url == b"/bench/pace":
            self._engine.pace = Pace(**orjson.loads(body))
            self.send(answers.json_response(orjson.dumps(asdict(self._engine.pace))))
        elif url == b"/health":
            self.send(answers.json_response(b""))
        elif url == b"/v1/models":
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm"}
            self.send(answers.json_response(orjson.dumps({"object": "list", "data": [card]})))
        else:
            self.send(_error("there is no such route", b"404 Not Found", 404))


def _error(message: str, status: bytes = b"400 Bad Request", code: int = 400) -> bytes:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": code}
    return answers.json_response(orjson.dumps({"error": error}), status)


async def serve(engine: Engine, port: int) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=2048)


async def _main(port: int) -> None:
    engine = Engine()
    engine.prepare()
    gc.freeze()
    server = await serve(engine, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--port", type=int, required=True)
    uvloop.run(_main(arguments.parse_args().port))
