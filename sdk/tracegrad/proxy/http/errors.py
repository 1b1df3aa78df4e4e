"""The error that a client gets when a call fails; each dialect has a shape of its own for it."""

from __future__ import annotations

from starlette.responses import Response

from tracegrad.jsonutil import dump_json

# Seconds. Some clients give up at once on a 429 or 503 that does not say when to come back.
RETRY_AFTER = "1"
# What vLLM says when its engine process has died under the server, which then shuts down.
ENGINE_DIED = b"EngineCore encountered an issue"
# OpenAI's code for a prompt that is too long; agents that can shorten theirs look for it.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class ApiError(Exception):
    """Something to tell the client.

    `status` is the HTTP status; `kind` an error type and `code` an error code as OpenAI names
    them; `param` the field that is wrong. `raw` is the engine's own error body, for clients
    that speak its dialect.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: str | None = None,
        raw: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.raw = raw

    def headers(self) -> dict[str, str]:
        if self.retry_after is not None:
            return {"retry-after": self.retry_after}
        return {"retry-after": RETRY_AFTER} if self.status in (429, 503, 529) else {}

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`: OpenAI's shape, and ours."""
        if self.raw is not None:
            return self.raw
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return dump_json({"error": error}).encode()

    def response(self, body: bytes | None = None) -> Response:
        """`body`: the same in another dialect's shape."""
        return Response(
            self.body() if body is None else body,
            self.status,
            self.headers(),
            media_type="application/json",
        )


class BadRequest(ApiError):
    """The request is wrong; `param` names the field."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(status, message, kind="invalid_request_error", param=param, code=code)


class UpstreamError(ApiError):
    """The engine's fault, or a provider's."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        code: str | None = None,
        retry_after: str | None = None,
    ) -> None:
        kind = "upstream_error"
        super().__init__(status, message, kind=kind, code=code, retry_after=retry_after)


class EngineDied(UpstreamError):
    """The engine, or the connection to it, ended in the middle of an answer. `raw`: its last words,
    where it had some."""

    def __init__(self, message: str, *, raw: bytes | None = None) -> None:
        super().__init__(message, code="engine_died")
        self.raw = raw


class Unavailable(ApiError):
    """Nothing wrong with the request: it may be sent again a moment later."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(503, message, kind="service_unavailable", code=code)
