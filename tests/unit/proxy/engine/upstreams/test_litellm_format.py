"""Calls that are refused before litellm or the teacher's provider gets to see them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json

import pytest

from support.proxy.litellm_provider import USER, Provider, Teacher, call, whole
from tracegrad.proxy.engine.upstreams.litellm_format import completion_kwargs
from tracegrad.proxy.http.errors import ApiError, BadRequest

# Without importing it: that is the adapter's, which sees to it that it keeps to itself.
if importlib.util.find_spec("litellm") is None:
    pytest.skip("litellm is not installed", allow_module_level=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_base", "http://127.0.0.1:1"),
        ("base_url", "http://127.0.0.1:1"),
        ("api_key", "mine"),
        ("mock_response", "boo"),
        ("extra_headers", {"a": "b"}),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_fields_that_are_litellms_own_or_vllms_are_refused(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        completion_kwargs({"messages": [USER], field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert completion_kwargs({"messages": [USER], field: None}) == {"messages": [USER]}


async def test_what_a_model_cannot_do_is_refused_not_dropped(
    provider: Provider, teacher: Teacher
) -> None:
    if provider.name == "anthropic":
        with pytest.raises(ApiError, match="seed") as caught:
            await whole(teacher(), call(provider, seed=3))
        assert caught.value.status == 400
        assert provider.engine.asked == []
    else:
        await whole(teacher(), call(provider, seed=3))
        assert provider.asked["seed"] == 3


async def test_other_routes_and_calls_without_a_model_are_refused(
    provider: Provider, teacher: Teacher
) -> None:
    upstream = teacher()
    with pytest.raises(BadRequest, match="chat completions only") as caught:
        async with upstream.request("POST", "/v1/embeddings", body=b"{}", headers={}):
            pass
    assert caught.value.status == 404
    with pytest.raises(BadRequest, match="anthropic/claude") as caught:
        await whole(upstream, json.dumps({"messages": [USER]}).encode())
    assert caught.value.param == "model"
    with pytest.raises(ApiError, match="provider"):
        await whole(upstream, json.dumps({"model": "nonsense", "messages": [USER]}).encode())
