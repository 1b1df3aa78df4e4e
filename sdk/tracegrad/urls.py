"""URLs as settings have them: those of Unix sockets, and what may be shown of one with a password.

An engine on a Unix socket is `unix:///absolute/path` (as Docker writes it).
"""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

STORE_VARIABLE = "TRACEGRAD_STORE"
# What a socket's address has room for, in bytes (sun_path, less its end).
LONGEST_SOCKET_PATH = 107

_MASK = "***"
# To the last "@": whatever a password holds, none of it is left over.
_password = re.compile(r"(?<=:)(//?[^:/?@]*):.*@", re.DOTALL)
_in_query = re.compile(r"(?<=[?&])(password|sslpassword)=[^&]*", re.IGNORECASE)


def masked(url: str) -> str:
    """The URL with `***` for each password in it."""
    return _in_query.sub(rf"\1={_MASK}", _password.sub(rf"\1:{_MASK}@", url))


def is_masked(url: str) -> bool:
    return _MASK in url and masked(url) == url


def unmasked(url: str) -> str:
    """`url`; where it is a masked one, the whole one that TRACEGRAD_STORE holds.

    Raises:
        ValueError: it is masked, and the variable has another URL or none.
    """
    if not is_masked(url):
        return url
    whole = os.environ.get(STORE_VARIABLE, "")
    if masked(whole) != url or is_masked(whole):
        raise ValueError(
            f"the password of {url} is kept in no file: give the whole URL in {STORE_VARIABLE}"
        )
    return whole


def unix_socket(url: str) -> str | None:
    """The path of `unix:///path`; None: it is no such URL."""
    return urlsplit(url).path if url.startswith("unix:") else None


def is_on_this_machine(url: str) -> bool:
    """Whether its host is one of the loopback's, which no proxy of HTTP_PROXY's can reach."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def http_base(url: str) -> str:
    """What requests to an engine are addressed to, by whatever way they get there."""
    return "http://localhost" if unix_socket(url) is not None else url
