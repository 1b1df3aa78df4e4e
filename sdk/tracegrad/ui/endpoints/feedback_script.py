"""`feedback.js`: the two buttons that an application embeds in a page of its own, which is of
another site. It holds nothing of anybody's, so that it is given to all."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from tracegrad.ui.environment import STATIC_FOLDER

_FILE = STATIC_FOLDER / "feedback.js"
_HEADERS = {
    "access-control-allow-origin": "*",  # modules are fetched as scripts of one's own are not
    "cross-origin-resource-policy": "cross-origin",
    "cache-control": "public, max-age=3600",  # its address has no digest
}


def feedback_script_route() -> Route:
    async def script(_: Request) -> Response:
        return FileResponse(_FILE, media_type="text/javascript", headers=_HEADERS)

    return Route("/feedback.js", script, methods=["GET"])
