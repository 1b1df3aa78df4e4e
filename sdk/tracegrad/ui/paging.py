"""Pages by key: a link names the row that a page begins behind, so that page a thousand costs what
the first one does, and new rows move nothing."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlencode

from tracegrad.store.read.rollout_pages import RolloutKey

PAGE = 50  # rows


class WrongLink(ValueError):
    """What a link asks for cannot be read. Names the parameter."""


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
