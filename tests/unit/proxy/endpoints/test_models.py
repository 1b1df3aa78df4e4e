"""The engine's models as each vendor's client reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anthropic
import httpx
import openai
import pytest
from google import genai

from support.engines.mock_engine import MODEL, MockEngine
from tracegrad.events import Turn

Turns = Callable[..., list[Turn]]


@pytest.fixture
def anthropic_client(proxy: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{proxy}/rollouts/r1", api_key="any") as client:
        yield client


def test_openais_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_anthropics_client(anthropic_client: anthropic.Anthropic) -> None:
    [model] = anthropic_client.models.list()
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert model.created_at.year >= 1970


def test_geminis_client(proxy: str) -> None:
    options = {"base_url": f"{proxy}/rollouts/r1"}
    client = genai.Client(api_key="any", http_options=options)
    assert [model.name for model in client.models.list()] == [f"models/{MODEL}"]


def test_one_model_by_its_name(
    client: openai.OpenAI, anthropic_client: anthropic.Anthropic, proxy: str
) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    assert anthropic_client.models.retrieve(MODEL).id == MODEL
    google = genai.Client(api_key="any", http_options={"base_url": proxy})
    assert google.models.get(model=MODEL).name == f"models/{MODEL}"


def test_a_model_that_is_not_there(
    client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.models.retrieve("another")


def test_a_list_that_is_none_is_a_502(engine: MockEngine, http: httpx.Client) -> None:
    engine.models = {"object": "list"}
    answer = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 502
