"""Pages by key: a link names the row that a page begins behind, so that page a thousand costs what
the first one does, and new rows move nothing."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlencode

from starlette.requests import Request

from tracegrad.store.read.rollout_pages import RolloutKey

PAGE = 50  # rows


class WrongLink(ValueError):
    """What a link asks for cannot be read. Names the parameter."""


class NotThere(LookupError):
    """What a link asks for is not there. Says so."""


Query = list[tuple[str, str]]


def write_key(key: RolloutKey) -> str:
    return f"{key.opened_at!r}~{key.rollout_id}"


def read_key(text: str) -> RolloutKey:
    """WrongLink: it is none of `write_key`'s."""
    moment, tilde, rollout_id = text.partition("~")
    try:
        if tilde:
            return RolloutKey(float(moment), rollout_id)
    except ValueError:
        pass
    raise WrongLink("a page's link is incomplete: begin with the newest")


def link(path: str, query: Iterable[tuple[str, str]], **more: str | None) -> str:
    """The path with these parameters, those of `more` in place of such as have their names."""
    pairs = [(name, value) for name, value in query if name not in more]
    pairs += [(name, value) for name, value in more.items() if value is not None]
    return f"{path}?{urlencode(pairs)}" if pairs else path


def whole_number(request: Request, name: str) -> int:
    """A parameter of the link; 0 where it has none. Raises WrongLink."""
    return read_number(name, request.query_params.get(name, "0"))


def read_number(name: str, text: str) -> int:
    """Raises WrongLink."""
    if not (text.isdecimal() and text.isascii() and len(text) <= 9):
        raise WrongLink(f"{name}: {text[:40]!r} is no whole number of at most 9 digits")
    return int(text)
