"""The server that an agent's machine talks to: LLM calls, spans, rewards.

`create_app` is loaded on first use, so that the command line can name the proxy's command
without importing a web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracegrad.proxy.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from tracegrad.proxy.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
