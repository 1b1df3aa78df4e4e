"""A rollout as one HTML file: the page with its styles and scripts in it, which opens offline."""

from __future__ import annotations

import base64
import hashlib
import time
from typing import Any

from markupsafe import Markup

from tracegrad.store import Store
from tracegrad.store.read.rollout_outline import rollout_outline, turn_tokens
from tracegrad.text_format import format_count
from tracegrad.ui.environment import STATIC_FOLDER, make_environment, render
from tracegrad.ui.pages.rollout import RolloutView, rollout_values, rollout_view
from tracegrad.ui.pages.rollouts import read_query
from tracegrad.ui.pages.tokens import ReadTokens, TokensView, tokens_values, view_of

MOST_TURNS = 500
MOST_TOKENS = 100_000  # sampled ones that are shown one by one
MOST_CHARACTERS = 40_000_000  # of texts
_SCRIPTS = ("keys.js", "tokens.js")


def rollout_html(store: Store, rollout_id: str, *, read: ReadTokens | None = None) -> str:
    """By id or a prefix of it; its first MOST_TURNS turns. Raises `UnknownRollout` or
    `AmbiguousRollout`. The file's policy allows its own styles and scripts, by their digests, and
    nothing else."""
    view = rollout_view(store, rollout_id, 0, MOST_TURNS, characters=MOST_CHARACTERS, single=True)
    css = (STATIC_FOLDER / "ui.css").read_text(encoding="utf-8")
    # Blocks: each file keeps its names to itself.
    sources = [(STATIC_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    script = "\n".join(f"{{\n{source}}}" for source in sources)
    tokens = _tokens(store, view, read)
    values = rollout_values(view, read_query([])) | {"earlier": None, "later": None}
    return render(
        make_environment(),
        "single.html",
        **values,
        **_token_words(),
        single_file=True,
        policy=_policy(css, script),
        css=Markup(css),
        script=Markup(script),
        tokens=tokens,
        made_at=time.time(),
        left_out=_left_out(view, tokens),
        navigation=(),
        here="",
        csrf="",
        logged_in=False,
    )


def _tokens(store: Store, view: RolloutView, read: ReadTokens | None) -> dict[int, TokensView]:
    """By turn: whole turns, the small ones first, and of the one that comes next what there is room
    for. So a large turn takes the room of no small one."""
    found: dict[int, TokensView] = {}
    room = MOST_TOKENS
    with store.reading() as connection:
        outline = rollout_outline(connection, view.detail.summary.rollout_id)
        for each in sorted(view.turns, key=lambda turn: turn.size.sampled):
            tokens = turn_tokens(connection, each.turn.turn_id) if room else None
            if tokens is not None and each.number < len(outline.sizes):
                found[each.number] = view_of(
                    outline, each.number, tokens.sampled, tokens.logprobs, 0, read, room
                )
                room -= len(found[each.number].tokens)
    return found


def _token_words() -> dict[str, Any]:
    """What the part of the page with tokens needs beside them."""
    empty: Any = None
    values = tokens_values(empty, "probability")
    del values["view"]
    return values


def _left_out(view: RolloutView, tokens: dict[int, TokensView]) -> str:
    """What the file does not have of the rollout, in words."""
    missing = []
    if view.total > len(view.turns):
        missing.append(f"without its last {format_count(view.total - len(view.turns), 'turn')}")
    silent = sum(each.size.sampled > 0 and each.number not in tokens for each in view.turns)
    if silent:
        missing.append(f"without the tokens of {format_count(silent, 'turn')}")
    partial = sum(bool(each.part) for each in tokens.values())
    if partial:
        missing.append(f"with a part of the tokens of {format_count(partial, 'turn')}")
    return ", ".join(missing)


def _policy(css: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(css)}'; script-src '{_digest(script)}';"
        " img-src data:; form-action 'none'; base-uri 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
