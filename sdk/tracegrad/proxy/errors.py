"""Errors that reach a client, in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from starlette.responses import Response

# Seconds. OpenAI's clients retry a 503 after this long.
RETRY_AFTER = "1"


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`, as bytes of JSON."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(
    status: int,
    message: str,
    *,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = error_body(message, kind=kind, param=param, code=code)
    return Response(body, status, headers, media_type="application/json")


class ApiError(Exception):
    """Something to tell the client; `status` is the HTTP status of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    def response(self) -> Response:
        headers = {"retry-after": RETRY_AFTER} if self.status == 503 else None
        return error_response(
            self.status,
            self.message,
            kind=self.kind,
            param=self.param,
            code=self.code,
            headers=headers,
        )

    def body(self) -> bytes:
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code)


class BadRequest(ApiError):
    """The request is wrong; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(status, message, kind="invalid_request_error", param=param)


class Unavailable(ApiError):
    """Nothing wrong with the request: it may be sent again a moment later."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(503, message, kind="service_unavailable", code=code)
