"""An engine that answers chat completions in vLLM 0.32's shapes, without a model.

Its tokens are bytes, plus one for each role and one that ends a message, so a test can work out
every id that a call must have had, and a continued conversation really is a continued prompt.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]

END = 256
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
MODEL = "mock"


@dataclass
class Answer:
    """What the engine is to sample next: text, or tool calls as (name, JSON of arguments)."""

    content: str = "ok"
    tool_calls: Sequence[tuple[str, str]] = ()
    reasoning: str = ""
    cut: bool = False  # by max_tokens: no end token, finish_reason "length"

    @property
    def raw(self) -> str:
        thought = f"<think>{self.reasoning}</think>" if self.reasoning else ""
        return thought + self.content + "".join(map(tool_text, self.tool_calls))

    @property
    def token_ids(self) -> list[int]:
        return list(self.raw.encode()) + ([] if self.cut else [END])

    @property
    def finish_reason(self) -> str:
        if self.cut:
            return "length"
        return "tool_calls" if self.tool_calls else "stop"


def tool_text(call: tuple[str, str]) -> str:
    return f'<tool_call>{{"name": "{call[0]}", "arguments": {call[1]}}}</tool_call>'


def message_text(message: Json) -> str:
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return (message.get("content") or "") + "".join(map(tool_text, calls))


def render(messages: Sequence[Json], tools: Sequence[Json] | None = None) -> list[int]:
    """The chat template: tools, messages, and the role that is to speak."""
    ids = list(json.dumps(tools).encode()) if tools else []
    for message in messages:
        ids += [ROLES[message["role"]], *message_text(message).encode(), END]
    return [*ids, ROLES["assistant"]]


def logprobs_of(ids: Sequence[int]) -> list[float]:
    return [-(1 + position % 7) / 8 for position in range(len(ids))]


@dataclass
class MockEngine:
    replies: deque[Answer] = field(default_factory=deque)
    requests: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: int = 0
    failure: tuple[int, Json, dict[str, str]] | None = None
    chunk_tokens: int = 4
    break_at: int | None = None  # drop the connection in place of this chunk
    error_at: int | None = None  # report an error in place of this chunk
    error_words: str = "EngineCore died"
    faults_left: int = 1_000  # so many answers have one of these
    models: Json = field(
        default_factory=lambda: {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL}],
        }
    )
    tell_ids: bool = True  # False: an engine that knows nothing of token ids
    takes_ids: bool = False  # reads prompts that are given as tokens, in place of their messages
    queue_ms: float | None = None  # of each request, in its own queue; None: it does not say
    routes: Callable[[Sequence[int]], NDArray[Any]] | None = None  # [n, layers, k] of tokens read
    _gates: dict[int, threading.Event] = field(default_factory=dict)

    def wait_before(self, chunk: int) -> threading.Event:
        """Chunk `chunk` (of each choice; a whole answer is chunk 0) waits until it is set."""
        return self._gates.setdefault(chunk, threading.Event())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/models", self._models),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse(self.models)

    async def _embeddings(self, request: Request) -> Response:
        self.requests.append(await request.json())
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}]
        return JSONResponse({"object": "list", "model": MODEL, "data": data, "usage": {}})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        ids = render(body["messages"], body.get("tools"))
        return JSONResponse({"count": len(ids), "max_model_len": 100_000, "tokens": ids})

    async def _completions(self, request: Request) -> Response:
        """Text completions: a list of prompts has its choices one after another."""
        body = await request.json()
        self.requests.append(body)
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        if isinstance(prompts[0], int):
            prompts = [prompts]
        choices = [
            self._text_choice(body, prompt, number * (body.get("n") or 1) + nth)
            for number, prompt in enumerate(prompts)
            for nth in range(body.get("n") or 1)
        ]
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
        spent = usage(1, sum(len(choice["token_ids"] or ()) for choice in choices))
        if not body.get("stream"):
            return JSONResponse({**head, "choices": choices, "usage": spent})
        return StreamingResponse(
            self._text_stream(body, head, choices, spent), media_type="text/event-stream"
        )

    async def _text_stream(
        self, body: Json, head: Json, choices: Sequence[Json], spent: Json
    ) -> AsyncIterator[str]:
        for choice in choices:
            first = {**choice, "text": "", "logprobs": None, "token_ids": None}
            first |= {"finish_reason": None, "stop_reason": None}
            yield f"data: {json.dumps({**head, 'choices': [first]})}\n\n"
            rest = {**choice, "prompt_token_ids": None}
            yield f"data: {json.dumps({**head, 'choices': [rest]})}\n\n"
        if (body.get("stream_options") or {}).get("include_usage"):
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': spent})}\n\n"
        yield "data: [DONE]\n\n"

    def _text_choice(self, body: Json, prompt: str | list[int], index: int) -> Json:
        say = self.replies.popleft() if self.replies else Answer()
        ids = say.token_ids
        told = {
            "text_offset": [0] * len(ids),
            "token_logprobs": logprobs_of(ids),
            "tokens": [chr(token) for token in ids],
            "top_logprobs": [None] * len(ids),
        }
        tells = self._tells_ids(body)
        prompt_ids = prompt if isinstance(prompt, list) else list(prompt.encode())
        return {
            "index": index,
            "text": say.content,
            "logprobs": told if body.get("logprobs") is not None else None,
            "finish_reason": say.finish_reason,
            "stop_reason": None,
            "token_ids": ids if tells else None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt_ids if tells else None,
            "routed_experts": self._routed(body, prompt_ids, ids),
        }

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.failure is not None:
            status, answer, headers = self.failure
            return JSONResponse(answer, status, headers)
        says = [
            self.replies.popleft() if self.replies else Answer() for _ in range(body.get("n") or 1)
        ]
        body = {**body, "request_id": request.headers.get("x-request-id")}
        if body.get("stream"):
            return StreamingResponse(self._stream(body, says), media_type="text/event-stream")
        return await self._whole(request, body, says)

    async def _pass(self, chunk: int) -> None:
        gate = self._gates.get(chunk)
        while gate is not None and not gate.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # the test sets it from another thread

    async def _whole(self, request: Request, body: Json, says: Sequence[Answer]) -> Response:
        waiting = asyncio.create_task(self._pass(0))
        while not waiting.done():
            if await request.is_disconnected():
                self.aborted += 1
                waiting.cancel()
                return Response(status_code=499)
            await asyncio.sleep(0.002)
        return JSONResponse(self._answer(body, says))

    def _prompt(self, body: Json) -> list[int]:
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if self.takes_ids and given is not None:
            return list(given)
        return render(body["messages"], body.get("tools"))

    def _answer(self, body: Json, says: Sequence[Answer]) -> Json:
        prompt = self._prompt(body)
        return {
            "id": _answer_id(body),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
            "choices": [self._choice(body, index, say) for index, say in enumerate(says)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {
                **usage(len(prompt), sum(len(say.token_ids) for say in says)),
                "completion_tokens_details": None,
            },
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if self._tells_ids(body) else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": self._metrics(body),
        }

    def _choice(self, body: Json, index: int, say: Answer) -> Json:
        message: Json = {
            "role": "assistant",
            "content": say.content or None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": say.reasoning or None,
        }
        if say.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in say.tool_calls
            ]
        ids = say.token_ids
        return {
            "index": index,
            "message": message,
            "logprobs": entries(ids, logprobs_of(ids)) if body.get("logprobs") else None,
            "finish_reason": say.finish_reason,
            "stop_reason": None,
            "token_ids": ids if self._tells_ids(body) else None,
            "routed_experts": self._routed(body, self._prompt(body), ids),
        }

    async def _stream(self, body: Json, says: Sequence[Answer]) -> AsyncIterator[str]:
        head = {
            "id": _answer_id(body),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
        }
        try:
            async for event in self._chunks(body, says, head):
                yield f"data: {json.dumps(event)}\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        yield "data: [DONE]\n\n"

    async def _chunks(self, body: Json, says: Sequence[Answer], head: Json) -> AsyncIterator[Json]:
        prompt = self._prompt(body)
        for index in range(len(says)):
            opening = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": opening, "logprobs": None, "finish_reason": None}
            first = {**head, "choices": [choice]}
            yield {**first, "prompt_token_ids": prompt if self._tells_ids(body) else None}
        plans = [self._plan(body, index, say) for index, say in enumerate(says)]
        for number in range(max(map(len, plans))):
            await self._pass(number)
            if number in (self.break_at, self.error_at):
                self.faults_left -= 1
            if number == self.break_at and self.faults_left >= 0:
                raise ConnectionError("the engine dies here, as the test wants it")
            if number == self.error_at and self.faults_left >= 0:
                yield error(self.error_words, 500)
                return
            for plan in plans:
                if number < len(plan) and plan[number] is not None:
                    yield {**head, "choices": [plan[number]]}
        if (body.get("stream_options") or {}).get("include_usage"):
            total = sum(len(say.token_ids) for say in says)
            told = {"metrics": metrics} if (metrics := self._metrics(body)) else {}
            yield {**head, "choices": [], "usage": usage(len(prompt), total), **told}

    def _plan(self, body: Json, index: int, say: Answer) -> list[Json | None]:
        """The choice's chunks; None where vLLM would send nothing."""
        ids, lps = say.token_ids, logprobs_of(say.token_ids)
        size = self.chunk_tokens
        starts = range(0, len(ids), size)
        deltas = self._deltas(say, len(starts))
        plan: list[Json | None] = []
        for start, delta in zip(starts, deltas, strict=True):
            last = start + size >= len(ids)
            piece = slice(start, start + size)
            if not delta and not last and not body.get("logprobs") and not self._tells_ids(body):
                plan.append(None)
                continue
            choice: Json = {
                "index": index,
                "delta": delta,
                "logprobs": entries(ids[piece], lps[piece]) if body.get("logprobs") else None,
                "finish_reason": say.finish_reason if last else None,
                "token_ids": ids[piece] if self._tells_ids(body) else None,
            }
            if last:
                choice["stop_reason"] = None
            plan.append(choice)
        return plan

    def _deltas(self, say: Answer, count: int) -> list[Json]:
        """What each of `count` chunks says; a tool call is told at the end, in pieces."""
        pieces: list[Json] = []
        if say.reasoning:
            pieces.append({"reasoning": say.reasoning})
        pieces += [{"content": part} for part in parts(say.content, 4)]
        for number, (name, arguments) in enumerate(say.tool_calls):
            start = {
                "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
                "type": "function",
                "index": number,
            }
            pieces.append({"tool_calls": [{**start, "function": {"name": name}}]})
            pieces += [
                {"tool_calls": [{"index": number, "function": {"arguments": part}}]}
                for part in parts(arguments, 12)
            ]
        pieces = pieces[: count - 1] + _merged(pieces[count - 1 :])
        return [{}] * (count - len(pieces)) + pieces

    def _routed(self, body: Json, prompt: Sequence[int], ids: Sequence[int]) -> str | None:
        if self.routes is None:
            return None
        start = body.get("routed_experts_prompt_start", 0)
        assert 0 <= start <= len(prompt), "vLLM refuses a start outside of the prompt"
        # The last token was sampled, and never read.
        np.save(file := io.BytesIO(), self.routes([*prompt, *ids][:-1])[start:])
        return base64.b64encode(file.getvalue()).decode()

    def _metrics(self, body: Json) -> Json | None:
        """As vLLM tells them of calls with one choice."""
        if self.queue_ms is None or (body.get("n") or 1) > 1:
            return None
        return {"queue_time_ms": self.queue_ms, "generation_time_ms": 1.0, "mean_itl_ms": None}

    def _tells_ids(self, body: Json) -> bool:
        return self.tell_ids and bool(body.get("return_token_ids"))


def _merged(pieces: list[Json]) -> list[Json]:
    """Pieces that must share the last chunk."""
    if len(pieces) < 2:
        return pieces
    merged: Json = {}
    for piece in pieces:
        for key, value in piece.items():
            merged[key] = merged[key] + value if key in merged else value
    return [merged]


def parts(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def entries(ids: Sequence[int], lps: Sequence[float]) -> Json:
    return {
        "content": [
            {
                "token": chr(token),
                "logprob": lp,
                "bytes": list(chr(token).encode()),
                "top_logprobs": [],
            }
            for token, lp in zip(ids, lps, strict=True)
        ]
    }


def usage(prompt: int, completion: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
    }


def error(message: str, code: int, kind: str = "InternalServerError") -> Json:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _answer_id(body: Json) -> str:
    return f"chatcmpl-{body.get('request_id') or uuid.uuid4().hex}"
