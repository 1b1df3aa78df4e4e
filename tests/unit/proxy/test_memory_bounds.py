"""All that is kept of calls and rollouts is bounded by what the cache may take, and by default as
much as ever is kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.proxy.servers import HeldWriter
from tracegrad.proxy import app, create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import Store


@pytest.mark.parametrize(
    ("cache_mib", "kept"),
    [
        (1, {"turns": 200, "traces": 200, "called": 200, "begun": 200, "answers": 300_000}),
        (16, {"turns": 3200, "traces": 3200, "called": 3200, "begun": 3200, "answers": 4_800_000}),
        (
            256,
            {"turns": 8192, "traces": 10_000, "called": 50_000, "begun": 16_384, "answers": 2**24},
        ),
    ],
)
def test_a_small_cache_keeps_less_of_everything(
    cache_mib: int,
    kept: dict[str, int],
    store: Store,
    writer: HeldWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, int] = {}

    def noting(name: str, what: str, place: int | str) -> None:
        def make(made: Any, *args: Any, **named: Any) -> Any:
            found[name] = args[place] if isinstance(place, int) else named[place]
            return made(*args, **named)

        monkeypatch.setattr(app, what, partial(make, getattr(app, what)))

    noting("traces", "TraceIndex", 0)
    noting("called", "Recorder", "rollouts")
    noting("begun", "IntakeGate", "remembered")
    noting("answers", "RetryCache", "most_bytes")
    monkeypatch.setattr(store, "remember_turns", partial(found.__setitem__, "turns"))
    settings = ProxySettings(upstream="http://127.0.0.1:1", cache_mib=cache_mib, pace_calls=True)
    create_app(settings, store=store, writer=writer)
    assert found == kept
