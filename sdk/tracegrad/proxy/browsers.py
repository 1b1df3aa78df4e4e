"""Keeps the pages that a browser on this machine shows away from a proxy that asks for no key.

Such a page may send requests to loopback addresses (they carry its Origin), or under a name of its
own that its DNS suddenly resolves to 127.0.0.1 (then Host is that name). Agents do neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from tracegrad.proxy.errors import ApiError

# Nobody can register a name in these: they mean this machine or its network (RFC 6761, RFC 6762,
# RFC 8375, ICANN's "internal").
_PRIVATE = ("localhost", "internal", "local", "home.arpa", "test")
_MEND = "set TRACEGRAD_API_KEY to serve it to those who have the key"


def check_local(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises ApiError (403) for a request that a page from elsewhere may have sent."""
    for name, value in headers:
        if name == b"host" and not _is_local(value.decode("latin-1")):
            raise _refused(f"Host: {_short(value)} is not a name of this machine's")
        if name == b"origin" and not _is_ours(value.decode("latin-1")):
            raise _refused(f"Origin: {_short(value)} is a page from elsewhere")


@lru_cache(256)
def _is_local(host: str) -> bool:
    """An address, a name without a dot, or one that only this machine's network can give."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    name = name.rstrip(".")
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name.endswith(tuple(f".{private}" for private in _PRIVATE))
    return True


@lru_cache(256)
def _is_ours(origin: str) -> bool:
    """Applications have schemes of their own (vscode-file://, tauri://); pages have http."""
    scheme, found, host = origin.partition("://")
    return bool(found) and (scheme not in ("http", "https") or _is_local(host))


def _short(value: bytes) -> str:
    return value[:100].decode("latin-1")


def _refused(what: str) -> ApiError:
    return ApiError(
        403,
        f"{what}, and this proxy asks nobody for a key: {_MEND}",
        kind="permission_error",
        code="not_from_here",
    )
