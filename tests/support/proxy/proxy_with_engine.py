"""The proxy behind its own server, with a store of its own, before an engine of the test's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import httpx
import openai

from support.engines.mock_engine import Answer, MockEngine, logprobs_of
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.raw_http import bounded
from support.proxy.servers import CONTROL_KEY, EngineServer, HeldWriter, serving
from tracegrad.events import Turn
from tracegrad.proxy import create_app
from tracegrad.proxy.capture.recorder import EventWriter
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.limits import ConnectionLimits
from tracegrad.store import GroupCommitWriter, Store


class ServeProxy(Protocol):
    """Serves another proxy before the same engine and store, with these settings. `as_admin`: its
    client has the admin key."""

    def __call__(
        self, *, as_admin: bool = False, **settings: Any
    ) -> AbstractContextManager[httpx.Client]: ...


@contextmanager
def served_proxy(
    store: Store,
    writer: EventWriter,
    *,
    patience_s: float | None = None,
    as_admin: bool = False,
    **settings: Any,
) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {settings['admin_key']}"} if as_admin else {}
    app = create_app(ProxySettings(**settings), store=store, writer=writer, patience_s=patience_s)
    with serving(app) as url, httpx.Client(base_url=url, timeout=30, headers=headers) as client:
        yield client


@dataclass(frozen=True)
class ProxyWithEngine:
    """`url` is the proxy's, `engine_url` that of the engine behind it; a test that shares them
    with others has a rollout of its own."""

    url: str
    engine_url: str
    engine: MockEngine
    store: Store
    writer: HeldWriter
    rollout_id: str = "r1"

    @property
    def base(self) -> str:
        """Where a client of the rollout sends its calls, without /v1."""
        return f"{self.url}/rollouts/{self.rollout_id}"

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)

    @cached_property
    def client(self) -> openai.OpenAI:
        """As the rollout's agent has it: the key names the rollout."""
        key = f"tg-{self.rollout_id}"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def close_clients(self) -> None:
        for name in ("http", "client"):
            if name in vars(self):
                getattr(self, name).close()

    def turns(self, rollout_id: str | None = None) -> list[Turn]:
        """Of a rollout; of its own, where none is named."""
        return self.turns_of(rollout_id or self.rollout_id)

    def turns_of(self, rollout_id: str) -> list[Turn]:
        return self.store.rollout_turns(rollout_id)

    def all_turns(self) -> list[Turn]:
        rows = self.store.rollouts(limit=None)
        return [turn for row in rows for turn in self.turns_of(row.rollout_id)]


@contextmanager
def proxy_with_engine(
    engines: EngineServer,
    engine: MockEngine,
    store_path: Path,
    **settings: Any,
) -> Iterator[ProxyWithEngine]:
    """`store_path` is that of a migrated SQLite store; `settings` are the proxy's."""
    engines.engine = engine
    settings = {"control_key": CONTROL_KEY, **settings}
    configured = ProxySettings(upstream=engines.url, **settings)
    with Store.open(f"sqlite:///{store_path}") as store, GroupCommitWriter(store) as writer:
        held = HeldWriter(writer)
        app = create_app(configured, store=store, writer=held)
        with bounded(app, ConnectionLimits.of(configured)) as url:
            try:
                yield ProxyWithEngine(url, engines.url, engine, store, held)
            finally:
                held.release()


def assert_sampled(turn: Turn, say: Answer) -> None:
    """The turn has the tokens of the reply, each with its log-probability and its version."""
    assert turn.completion_token_ids.tolist() == say.token_ids
    assert turn.completion_logprobs.tolist() == logprobs_of(say.token_ids)
    assert turn.policy_versions == ((0, len(say.token_ids)),)
    assert turn.finish_reason == say.finish_reason


def assert_all_recorded(engine: MockEngine, turns: Sequence[Turn]) -> None:
    """Every reply of an obedient engine is one turn, with its own tokens; there are no others.
    A turn is under one whose tokens its prompt extends, if there is such a one."""
    assert isinstance(engine, PromptDrivenEngine)
    said = Counter(tuple(say.token_ids) for say in engine.said)
    assert Counter(tuple(turn.completion_token_ids) for turn in turns) == said
    for turn in turns:
        ids = turn.completion_token_ids.tolist()
        assert turn.completion_logprobs.tolist() == logprobs_of(ids)
        assert len(turn.prompt_token_ids) > 0
        assert turn.policy_versions == ((0, len(ids)),)
        extended = [each for each in turns if _extends(turn, each)]
        assert turn.parent_id in ([each.turn_id for each in extended] or [None])


def _extends(turn: Turn, earlier: Turn) -> bool:
    """Whether the turn goes on where the earlier one of its rollout ended."""
    if turn.rollout_id != earlier.rollout_id:
        return False
    tokens = [*earlier.prompt_token_ids, *earlier.completion_token_ids]
    return turn.prompt_token_ids.tolist()[: len(tokens)] == tokens
