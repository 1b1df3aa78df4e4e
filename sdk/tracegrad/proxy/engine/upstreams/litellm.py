"""Any provider's models, through the litellm package: text for a student to learn from.

It is imported only when such an upstream is opened. Its answers have no tokens, so their turns
are kept and never trained on as the policy's own.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import orjson

from tracegrad.chat.call import CHAT_PATH
from tracegrad.events import Json
from tracegrad.proxy.engine.upstreams import litellm_format as shapes
from tracegrad.proxy.engine.upstreams.base import (
    MODELS_PATH,
    TEXT_ONLY,
    Capabilities,
    IteratedBody,
    OnSent,
    UpstreamResponse,
    UpstreamTimeouts,
)
from tracegrad.proxy.http import sse
from tracegrad.proxy.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, BadRequest, UpstreamError

# 1.82.7 and 1.82.8 were somebody else's, made to steal keys.
OLDEST = (1, 83, 0)
FIX = "pip install 'tracegrad[litellm]'"

# Read at its import and later. No look-up of prices or of Anthropic's headers on the network, no
# .env file of whatever folder this runs in. Over aiohttp it neither hangs up on a provider when a
# stream is left, nor distinguishes a stream that broke off from one that ended; over httpx it
# does.
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",
    "DISABLE_AIOHTTP_TRANSPORT": "True",
}
_CALLBACKS = ("callbacks", "input_callback", "success_callback", "failure_callback")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class LiteLLMUpstream:
    """Models by litellm's names (`anthropic/claude-…`), for chat completions.

    Its failures come with the provider's status; nothing is tried again here.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        api_base: str | None = None,
        api_key: str | None = None,
        timeouts: UpstreamTimeouts | None = None,
    ) -> None:
        """`model` is named in the list of models, and serves calls that name none. `api_base`
        and `api_key`: without them litellm's own places, such as OPENAI_API_KEY."""
        self.capabilities: Capabilities = TEXT_ONLY
        self._model = model
        self._endpoint = {"api_base": api_base, "api_key": api_key}
        self._silence_s = (timeouts or UpstreamTimeouts()).read_s
        self._litellm: Any = None

    def open(self) -> None:
        """Raises ValueError that says what to install."""
        self._litellm = import_litellm()

    async def close(self) -> None:
        if self._litellm is None:
            return
        clients = importlib.import_module("litellm.llms.custom_httpx.async_client_cleanup")
        await clients.close_litellm_async_clients()
        # The next to be opened would take them for open ones.
        self._litellm.in_memory_llm_clients_cache.flush_cache()
        vars(self._litellm).pop("module_level_aclient", None)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None,
        headers: Mapping[str, str],
        sticky: str | None = None,
        on_sent: OnSent | None = None,
    ) -> AsyncIterator[UpstreamResponse]:
        """As `Upstream.request`. The client's own key goes nowhere: it is this proxy's.
        Raises BadRequest for what litellm cannot be asked, ApiError for the provider's refusal."""
        if (method, path) == ("GET", MODELS_PATH):
            yield _incoming(await self.models())
            return
        if path != CHAT_PATH:
            raise BadRequest(
                f"{path} is not served: litellm is asked for chat completions only", status=404
            )
        if on_sent is not None:
            on_sent(self._endpoint["api_base"] or "")
        said = await self._ask(orjson.loads(body or b"{}"))
        if not hasattr(said, "__aiter__"):
            yield _incoming(orjson.dumps(shapes.chat_completion(said.model_dump())))
            return
        events = self._events(said)
        try:
            yield UpstreamResponse(200, {"content-type": "text/event-stream"}, IteratedBody(events))
        finally:
            await events.aclose()
            await _hang_up(said)

    async def models(self) -> bytes:
        """The one that was named at the start, or none."""
        named = [self._model] if self._model else []
        data = [
            {"id": name, "object": "model", "created": int(time.time()), "owned_by": "litellm"}
            for name in named
        ]
        return orjson.dumps({"object": "list", "data": data})

    async def _ask(self, body: Json) -> Any:
        """A ModelResponse, or a CustomStreamWrapper where the body asks for a stream."""
        model = body.get("model") or self._model
        if not model:
            raise BadRequest(
                "model: name one as litellm does, with its provider: anthropic/claude-…",
                param="model",
            )
        keywords = shapes.completion_kwargs(body)
        with self._translated_errors():
            async with asyncio.timeout(self._silence_s):
                return await self._litellm.acompletion(
                    model=model,
                    **keywords,
                    **self._endpoint,
                    timeout=self._silence_s,
                    max_retries=0,
                    num_retries=0,
                )

    async def _events(self, stream: Any) -> AsyncGenerator[bytes, None]:
        parts = aiter(stream)
        while True:
            with self._translated_errors():
                async with asyncio.timeout(self._silence_s):
                    part = await anext(parts, None)
            if part is None:
                yield sse.DONE_EVENT
                return
            chunk = part.model_dump()
            # litellm ends every stream with "stop", also one that broke off.
            if shapes.finishes(chunk) and getattr(stream, "received_finish_reason", "?") is None:
                raise UpstreamError("the provider broke off its answer: it has no end")
            yield sse.encode_event(orjson.dumps(shapes.chat_completion_chunk(chunk)))

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """litellm's errors as ours."""
        try:
            yield
        except ApiError:
            raise
        except TimeoutError as error:
            raise _silent(self._silence_s) from error
        except Exception as error:
            raise _api_error(error, self._litellm, self._silence_s) from error


def import_litellm() -> Any:
    """The litellm package, kept silent. Raises ValueError that says what to install."""
    try:
        version = importlib.metadata.version("litellm")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"upstream_kind: litellm is not installed: {FIX}") from None
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(
            f"upstream_kind: litellm {version} is older than {oldest}, and two versions before"
            f" that steal keys: {FIX}"
        )
    os.environ.update(_ENVIRONMENT)
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    litellm.drop_params = False  # what a model cannot do is refused, not dropped
    for name in _CALLBACKS:
        setattr(litellm, name, [])
    return litellm


def _incoming(answer: bytes) -> UpstreamResponse:
    async def once() -> AsyncIterator[bytes]:
        yield answer

    return UpstreamResponse(200, {"content-type": "application/json"}, IteratedBody(once()))


async def _hang_up(stream: Any) -> None:
    parts = getattr(stream, "completion_stream", None)
    await stream.aclose()
    # Which does not reach the connection of every provider: Anthropic's lines are left open.
    aclose = getattr(getattr(parts, "streaming_response", None), "aclose", None)
    if aclose is not None:
        await aclose()


def _api_error(error: Exception, litellm: Any, silence_s: float) -> ApiError:
    message = str(getattr(error, "message", None) or error)
    if isinstance(error, litellm.ContextWindowExceededError):
        return BadRequest(message, param="messages", code=CONTEXT_LENGTH_EXCEEDED)
    if isinstance(error, litellm.Timeout):
        return _silent(silence_s)
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 400 <= status < 600:
        status = 502
    headers = getattr(error, "litellm_response_headers", None) or {}
    return ApiError(
        status,
        message,
        kind=_KINDS.get(status, "upstream_error"),
        retry_after=headers.get("retry-after"),
    )


def _silent(silence_s: float) -> ApiError:
    message = f"the provider sent nothing for {silence_s:g} s"
    return UpstreamError(message, status=504, code="upstream_timeout")
