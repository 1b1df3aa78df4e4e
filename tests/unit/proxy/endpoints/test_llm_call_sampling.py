"""Which sampling the engine is asked for, and what becomes of bent samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import httpx
import pytest

from support.chat.bent_sampling import BENT
from support.engines.mock_engine import MODEL, MockEngine
from support.proxy.servers import HeldWriter, serving
from tracegrad.events import Turn
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import Store

PATH = "/rollouts/r1/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **BENT}


Serve = Callable[[Literal["free", "as_asked"]], AbstractContextManager[httpx.Client]]


@pytest.fixture
def sampling(engine_url: str, store: Store, writer: HeldWriter) -> Serve:
    """Proxies that pass every field on: without that, beams and plug-ins of the engine's are
    refused."""

    @contextmanager
    def serve(sampling: Literal["free", "as_asked"]) -> Iterator[httpx.Client]:
        settings = ProxySettings(upstream=engine_url, sampling=sampling, pass_unknown_fields=True)
        with (
            serving(create_app(settings, store=store, writer=writer)) as url,
            httpx.Client(base_url=url, timeout=20) as client,
        ):
            yield client

    return serve


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_is_asked_for_free_samples(
    sampling: Serve, engine: MockEngine, turns: Callable[..., list[Turn]], stream: bool
) -> None:
    with sampling("free") as http:
        assert http.post(PATH, json={**ASK, "stream": stream}).status_code == 200
    asked = engine.requests[-1]
    assert asked["temperature"] == 1.0
    assert not {"top_p", "top_k", "min_p", "logit_bias"} & set(asked)
    [turn] = turns("r1")
    assert turn.untrainable is None
    assert turn.sampling["temperature"] == 1.0
    assert turn.request is not None
    assert turn.request["top_p"] == 0.9


def test_by_default_the_proxy_samples_as_asked(
    sampling: Serve, engine: MockEngine, turns: Callable[..., list[Turn]]
) -> None:
    with sampling("as_asked") as http:
        assert http.post(PATH, json=ASK).status_code == 200
    assert engine.requests[-1]["top_k"] == 40
    [turn] = turns("r1")
    assert turn.untrainable == "greedy"


@pytest.mark.parametrize(
    "replaced",
    [
        {"vllm_xargs": {"watermark": 3}},
        {"logits_processors": ["ban:5"]},
        {"custom_logit_processor": "ban"},
        {"use_beam_search": True},
    ],
)
def test_samples_of_plug_ins_and_beams_are_not_the_policys(
    sampling: Serve, turns: Callable[..., list[Turn]], replaced: dict[str, Any]
) -> None:
    with sampling("as_asked") as http:
        body = {"model": MODEL, "messages": ASK["messages"], **replaced}
        assert http.post(PATH, json=body).status_code == 200
    assert turns("r1")[0].untrainable == "sampling_replaced"
