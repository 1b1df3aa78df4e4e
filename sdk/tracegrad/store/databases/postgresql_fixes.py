"""What to do about a PostgreSQL server that does not let us in, by its message."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from sqlalchemy import URL

# Servers that speak another language than English are quoted without a fix.
_FIXES: tuple[tuple[str, Callable[[re.Match[str], URL], str]], ...] = (
    (
        r'database "(.+?)" does not exist',
        lambda found, url: f"make it: {_command('createdb', url)} {shlex.quote(found[1])}",
    ),
    (
        r'role "(.+?)" does not exist',
        lambda found, _: (
            f"make it (createuser {shlex.quote(found[1])}), or name another in the URL"
        ),
    ),
    (
        r"password authentication failed|no password supplied",
        lambda *_: "put the password into the URL, PGPASSWORD or ~/.pgpass",
    ),
    (
        r"could not translate host name|Name or service not known|failed to resolve host",
        lambda *_: "look at the host in the URL",
    ),
    (
        r"permission denied for schema|no schema has been selected",
        lambda _, url: (
            "make the role the database's owner: ALTER DATABASE "
            f"{_quoted(url.database)} OWNER TO {_quoted(url.username)}"
        ),
    ),
    (
        r"read-only transaction",
        lambda *_: "connect to the primary server",
    ),
    (
        r"too many (clients|connections)|remaining connection slots",
        lambda *_: "raise max_connections: every process of ours may hold 16",
    ),
)


def fix_for(message: str, url: URL) -> str:
    """To be put after the server's message; empty where nothing is known."""
    for pattern, advice in _FIXES:
        if found := re.search(pattern, message):
            return f"; {advice(found, url)}"
    return ""


def _command(program: str, url: URL) -> str:
    words = [program]
    for flag, value in (("-h", url.host or url.query.get("host")), ("-p", url.port)):
        if isinstance(value, str | int):
            words += [flag, str(value)]
    return shlex.join(words)


def _quoted(name: str | None) -> str:
    return f'"{name}"' if name else "NAME"
