"""The engine's models as each vendor's client reads them."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from google import genai

from support.engines.mock_engine import MODEL
from support.proxy.proxy_with_engine import ProxyWithEngine


@pytest.fixture
def anthropic_client(proxy: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{proxy}/rollouts/r1", api_key="any") as client:
        yield client


def test_openais_client(rig: ProxyWithEngine) -> None:
    assert [model.id for model in rig.client.models.list()] == [MODEL]


def test_anthropics_client(anthropic_client: anthropic.Anthropic) -> None:
    [model] = anthropic_client.models.list()
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert model.created_at.year >= 1970


def test_geminis_client(rig: ProxyWithEngine) -> None:
    options = {"base_url": f"{rig.url}/rollouts/r1"}
    client = genai.Client(api_key="any", http_options=options)
    assert [model.name for model in client.models.list()] == [f"models/{MODEL}"]


def test_one_model_by_its_name(rig: ProxyWithEngine, anthropic_client: anthropic.Anthropic) -> None:
    assert rig.client.models.retrieve(MODEL).id == MODEL
    assert anthropic_client.models.retrieve(MODEL).id == MODEL
    google = genai.Client(api_key="any", http_options={"base_url": rig.url})
    assert google.models.get(model=MODEL).name == f"models/{MODEL}"


def test_a_model_that_is_not_there(
    rig: ProxyWithEngine, anthropic_client: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        rig.client.models.retrieve("another")
    assert caught.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.models.retrieve("another")


def test_a_list_that_is_none_is_a_502(rig: ProxyWithEngine) -> None:
    rig.engine.models = {"object": "list"}
    answer = rig.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 502
