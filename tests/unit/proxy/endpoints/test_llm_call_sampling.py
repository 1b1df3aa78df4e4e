"""Which sampling the engine is asked for, and what becomes of bent samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.chat.bent_sampling import BENT
from support.engines.mock_engine import MODEL, MockEngine
from support.proxy.proxy_with_engine import ServeProxy
from tracegrad.events import Turn

PATH = "/rollouts/r1/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **BENT}


@pytest.fixture
def sampling(serve_proxy: ServeProxy) -> Callable[[str], Any]:
    """Proxies that pass every field on: without that, beams and plug-ins of the engine's are
    refused."""
    return lambda kind: serve_proxy(sampling=kind, pass_unknown_fields=True)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_is_asked_for_free_samples(
    sampling: Callable[[str], Any],
    engine: MockEngine,
    turns: Callable[..., list[Turn]],
    stream: bool,
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
    sampling: Callable[[str], Any], engine: MockEngine, turns: Callable[..., list[Turn]]
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
    sampling: Callable[[str], Any], turns: Callable[..., list[Turn]], replaced: dict[str, Any]
) -> None:
    with sampling("as_asked") as http:
        body = {"model": MODEL, "messages": ASK["messages"], **replaced}
        assert http.post(PATH, json=body).status_code == 200
    assert turns("r1")[0].untrainable == "sampling_replaced"
