"""Keeps the pages that a browser on this machine shows away from a proxy that asks for no key.

Such a page may send requests to loopback addresses (they carry its Origin, or say in
Sec-Fetch-Site that another site made them), or under a name of its own that its DNS suddenly
resolves to 127.0.0.1 (then Host is that name). Agents do neither. Where keys are asked for none
of this applies: a browser adds no key of ours to a request by itself, as it would a cookie.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from tracegrad.proxy.http.errors import ApiError

Headers = Iterable[tuple[bytes, bytes]]

# Applications have schemes of their own (vscode-file://, tauri://); these are a page's.
_WEB = ("http", "https", "ws", "wss", "ftp")
_origin = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)", re.IGNORECASE)
_KEY = "set TRACEGRAD_API_KEY to serve it to those who have the key"


class OriginCheck:
    """Raises ApiError (403) for requests that a page from elsewhere may have sent.

    `allowed_hosts`: names and addresses that this machine has beside loopback addresses and
    `localhost`, in lower case, without a port.
    """

    def __init__(self, allowed_hosts: Iterable[str] = ()) -> None:
        self._allowed = frozenset(allowed_hosts)
        self._served: set[str] = set()  # Host values that passed: nearly always one

    def check(self, method: str, headers: Headers) -> None:
        sent: dict[bytes, str] = {}
        for name, value in headers:
            if name == b"host":
                self._check_host(value.decode("latin-1"))
            elif name == b"origin":
                self._check_origin(value.decode("latin-1"))
                sent[name] = ""
            elif name.startswith(b"sec-fetch-"):
                sent[name] = value.decode("latin-1").lower()
        if b"sec-fetch-site" in sent:
            _check_site(method, sent)

    def _check_host(self, host: str) -> None:
        if host in self._served:
            return
        name = _hostname(host)
        if name is None or (name and not self._is_ours(name)):
            fix = f"name it in allowed_hosts of [proxy] if it is this machine's, or {_KEY}"
            raise _refused(f"Host: {host[:100]} is not a name of this machine's", fix)
        if len(self._served) < 100:
            self._served.add(host)

    def _check_origin(self, origin: str) -> None:
        found = _origin.fullmatch(origin)
        if found is not None:
            if found[1].lower() not in _WEB:
                return
            name = _hostname(found[2])
            if name and self._is_ours(name):
                return
        raise _refused(f"Origin: {origin[:100]} is a page from elsewhere", _KEY)

    def _is_ours(self, name: str) -> bool:
        if name == "localhost" or name.endswith(".localhost") or name in self._allowed:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def _hostname(host: str) -> str | None:
    """Of a Host header's value; empty where it says nothing, None where it cannot be read."""
    if not host:
        return ""
    try:
        parts = urlsplit(f"//{host}")
    except ValueError:
        return None
    if parts.netloc != host or "@" in host or not parts.hostname:
        return None
    return parts.hostname.rstrip(".")


def _check_site(method: str, sent: dict[bytes, str]) -> None:
    """A request without Origin that another site made: an image, a script, a form's GET.

    A link that somebody follows is let through: it reads, and nobody but its reader sees what.
    """
    if sent[b"sec-fetch-site"] in ("none", "same-origin") or b"origin" in sent:
        return
    is_link = sent.get(b"sec-fetch-mode") == "navigate" and sent.get(b"sec-fetch-dest") in (
        "document",
        None,
    )
    if method not in ("GET", "HEAD") or not is_link:
        site = sent[b"sec-fetch-site"][:40]
        raise _refused(f"Sec-Fetch-Site: {site}: a page from elsewhere sends this", _KEY)


def _refused(what: str, fix: str) -> ApiError:
    return ApiError(
        403,
        f"{what}, and this proxy asks nobody for a key: {fix}",
        kind="permission_error",
        code="not_from_here",
    )
