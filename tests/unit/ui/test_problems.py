"""What goes wrong with a page is a page that says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from support.cli.sample_rollouts import coding_agent
from tracegrad.events import RolloutStarted, Turn, logprob_array, token_id_array
from tracegrad.store import Store, StoreCorrupt
from tracegrad.ui.pages import rollouts

Browse = Callable[..., TestClient]
CODING = "0193c0de0001" + "0" * 20
PATH = f"/ui/rollouts/{CODING}"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/ui/rollouts?min_version=" + "9" * 30, "min_version: &#39;" + "9" * 30),
        ("/ui/rollouts?max_reward=nan", "max_reward: &#39;nan&#39; is no number"),
        ("/ui/rollouts?task=a%00b", "&#39;task&#39;: a NUL character; leave it out"),
        ("/ui/rollouts?q=a%00b", "&#39;q&#39;: a NUL character; leave it out"),
        ("/ui/rollouts/a%00b", "&#39;rollout&#39;: a NUL character; leave it out"),
        ("/ui/rollouts?before=x", "begin with the newest"),
        ("/ui/rollouts?before=x~y", "begin with the newest"),
        (f"{PATH}?turn=-1", "turn: &#39;-1&#39; is no whole number"),
        (f"{PATH}/turns/{'9' * 5000}/tokens", "is no whole number of at most 9 digits"),
        (f"{PATH}/turns/0/tokens?by=luck", "by: &#39;luck&#39;"),
    ],
)
def test_a_link_that_cannot_be_read_is_named(
    store: Store, browse: Browse, path: str, said: str
) -> None:
    store.append(coding_agent())
    answer = browse().get(path)
    assert answer.status_code == 400
    assert said in answer.text


@pytest.mark.parametrize("more", ["", "/turns/0/tokens"])
def test_ids_that_begin_alike_are_listed(store: Store, browse: Browse, more: str) -> None:
    store.append([RolloutStarted(rollout_id=each, opened_at=5.0) for each in ("0a", "0b", "1")])
    answer = browse().get(f"/ui/rollouts/0{more}")
    assert answer.status_code == 200
    assert "2 rollouts whose id begins with <code>0</code>" in answer.text
    assert 'href="/ui/rollouts/0a"' in answer.text


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 5000, "9" * 5000])
def test_arguments_that_are_no_json_are_shown_as_they_are(
    store: Store, browse: Browse, arguments: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    turn = Turn(
        turn_id="t",
        rollout_id="r",
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array([1]),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        request={"model": "m", "messages": [{"role": "user", "content": "go"}]},
        response={"choices": [{"index": 0, "message": reply}]},
    )
    store.append([turn])
    answer = browse().get("/ui/rollouts/r")
    assert answer.status_code == 200
    assert arguments.replace('"', "&#34;") in answer.text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreCorrupt("a stored text has the unknown tag 9"), "has the unknown tag 9"),
        (ValueError("of ours"), "an error of tracegrad"),
        (RuntimeError("of ours"), "an error of tracegrad"),
    ],
)
def test_an_error_of_our_own_is_a_page_with_all_headers_and_is_logged(
    browse: Browse,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    said: str,
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(rollouts, "list_values", fails)
    with caplog.at_level(logging.ERROR, "tracegrad.proxy"):
        answer = browse().get("/ui/rollouts")
    assert answer.status_code == 500
    assert said in answer.text
    assert "of ours" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert str(error) in caplog.text
