"""Servers that others started: what names them, what is refused, and what ranks need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.trainer.step_samples import trainer_settings
from tracegrad_trainer.rl.own_launcher import START_AGAIN, exit_code, is_own_launcher

URLS = ["http://10.0.0.1:8000/v1", "http://10.0.0.1:8001"]
PROXIES = ["http://10.0.0.2:4141", "http://10.0.0.3:4141"]


def test_a_push_and_calls_go_to_the_servers_that_are_named(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path, vllm={"urls": URLS})
    expected = ("http://10.0.0.1:8000", "http://10.0.0.1:8001")
    assert settings.engine_urls == settings.proxy.upstreams == expected
    assert settings.vllm.url == expected[0]


def test_agents_call_one_address_and_a_push_goes_to_each_proxy_behind_it(tmp_path: Path) -> None:
    push = {"proxies": [f"{url}/" for url in PROXIES]}
    settings = trainer_settings(tmp_path, proxy_url="http://10.0.0.1:4141", push=push)
    assert settings.url == "http://10.0.0.1:4141"
    assert settings.push.proxies == tuple(PROXIES)


def test_a_push_goes_through_the_gate_of_the_proxy_that_is_named(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path, proxy_url="http://10.0.0.1:4141/v1/")
    assert settings.url == "http://10.0.0.1:4141"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm": {"urls": ["10.0.0.1:8000"]}}, "is no base URL: write it as http://HOST:PORT"),
        ({"vllm": {"urls": [URLS[1], URLS[1]]}}, "vllm.urls: names an engine twice"),
        ({"vllm": {"urls": URLS, "port": 8000}}, "vllm.port is of a vLLM that is started here"),
        ({"vllm": {"urls": URLS}, "push": {"engines": ["http://a:1"]}}, "name all of them in vllm"),
        ({"vllm": {"urls": URLS}, "gpus": {"share": True}}, "gpus.share: vllm.urls names servers"),
        ({"vllm": {"urls": URLS}, "gpus": {"vllm": "0"}}, "gpus.vllm: vllm.urls names servers"),
        ({"proxy_url": "10.0.0.1:4141"}, "is no base URL: write it as http://HOST:PORT"),
        ({"push": {"proxies": ["a:4141"]}}, "is no base URL: write it as http://HOST:PORT"),
        ({"push": {"proxies": PROXIES}}, "push.proxies: names proxies .* set proxy_url"),
        (
            {"push": {"proxies": [*PROXIES, f"{PROXIES[0]}/v1"]}, "proxy_url": "http://a:4141"},
            "push.proxies: names a proxy twice",
        ),
    ],
)
def test_what_contradicts_it_is_refused_by_name(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_settings(tmp_path, **changes)


def test_ranks_need_no_admin_key_for_a_proxy_on_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
    settings = trainer_settings(tmp_path, proxy={"host": "10.0.0.1"})
    assert settings.url.startswith("http://10.0.0.1:")
    with pytest.raises(ValueError, match="not an IP address"):
        trainer_settings(tmp_path, proxy={"host": "nowhere"})


def test_a_launcher_of_ones_own_starts_ranks_again_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = trainer_settings(tmp_path)
    assert is_own_launcher(settings, tmp_path / "tracegrad.toml")
    assert not is_own_launcher(settings, settings.state_dir / "run" / "settings.json")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert exit_code(starts_again=True) == 0
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert exit_code(starts_again=True) == START_AGAIN == os.EX_TEMPFAIL
    assert exit_code(starts_again=False) == 0
