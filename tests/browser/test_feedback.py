"""The two buttons in a page of another origin, in Chromium: what is pressed is a reward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from support.proxy.servers import serving
from support.ui.chromium import Tab, chromium
from tracegrad.events import RolloutStarted
from tracegrad.key_derivation import EVENTS, derive_key
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import GroupCommitWriter, Store

pytestmark = pytest.mark.timeout(1800)  # the first run installs Chromium

KEY = "the-admin-key-of-this-test-0123456789"
SCREENSHOTS = Path(__file__).resolve().parents[2] / ".cache" / "screenshots"
INSIDE = "document.querySelector('tracegrad-feedback').shadowRoot"
BUTTON = f"{INSIDE}.querySelectorAll('button')"
SAID = "window.said?.at(-1)"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('feedback')}/store.db") as opened:
        opened.append([RolloutStarted(rollout_id="mine")])
        yield opened


def application(proxy: list[str]) -> Starlette:
    """An app's own page, strict as such pages are: no inline style, scripts of the proxy alone."""

    async def page(request: Request) -> Response:
        attributes = {"rollout-id": "mine", **request.query_params}
        written = " ".join(f'{name}="{value}"' for name, value in attributes.items())
        policy = (
            f"default-src 'none'; script-src {proxy[0]} 'unsafe-inline'; connect-src {proxy[0]}"
        )
        return HTMLResponse(
            f"<!doctype html><title>app</title><p>42.</p><tracegrad-feedback {written}>"
            "</tracegrad-feedback><script>window.said = [];"
            " addEventListener('tracegrad-feedback', (e) => said.push(e.detail))</script>"
            f'<script type="module" src="{proxy[0]}/ui/feedback.js"></script>',
            headers={"content-security-policy": policy},
        )

    return Starlette(routes=[Route("/", page)])


@pytest.fixture(scope="module")
def app_url(store: Store) -> Iterator[str]:
    proxy: list[str] = []
    with serving(application(proxy)) as url:
        settings = ProxySettings(admin_key=KEY, feedback_origins=[url])  # type: ignore[arg-type]
        writer = GroupCommitWriter(store)
        with serving(create_app(settings, store=store, writer=writer)) as proxy_url:
            proxy.append(proxy_url)
            yield url


async def press(tab: Tab, number: int) -> object:
    """What the page was told after the button was pressed."""
    before = await tab.run("said.length")
    await tab.run(f"{BUTTON}[{number}].click()")
    await tab.until(f"said.length > {before}")
    return json.loads(await tab.run(f"JSON.stringify({SAID})"))


async def pressed(tab: Tab) -> list[str]:
    states = f"JSON.stringify([...{BUTTON}].map(b => b.getAttribute('aria-pressed')))"
    return list(json.loads(await tab.run(states)))


async def test_what_is_pressed_is_a_reward_and_is_taken_back(store: Store, app_url: str) -> None:
    key = derive_key(KEY, "mine", EVENTS)
    async with chromium() as tab:
        await tab.open(f"{app_url}/?key={key}")
        await tab.until(f"{BUTTON}.length === 2")
        labels = f"JSON.stringify([...{BUTTON}].map(b => b.ariaLabel))"
        assert json.loads(await tab.run(labels)) == ["Good answer", "Bad answer"]
        assert await press(tab, 0) == {"thumbs": "up"}
        assert await pressed(tab) == ["true", "false"]
        await tab.screenshot(SCREENSHOTS / "feedback.png")
        assert await press(tab, 1) == {"thumbs": "down"}
        assert await pressed(tab) == ["false", "true"]
        assert await press(tab, 1) == {"thumbs": None}
        assert await pressed(tab) == ["false", "false"]
        assert not [said for said in tab.said if "Content Security Policy" in said]
    assert [reward.value for reward in store.rewards("mine")] == [1.0, 0.0, None]


async def test_a_refusal_is_said_and_nothing_is_marked(store: Store, app_url: str) -> None:
    before = len(store.rewards("mine"))
    key = derive_key(KEY, "other", EVENTS)
    async with chromium() as tab:
        await tab.open(f"{app_url}/?key={key}&label-failed=Nicht+gesendet")
        await tab.until(f"{BUTTON}.length === 2")
        told = await press(tab, 0)
        assert isinstance(told, dict)
        assert told["thumbs"] == "up"
        assert "mine" in told["error"]
        assert await pressed(tab) == ["false", "false"]
        status = (
            "document.querySelector('tracegrad-feedback').shadowRoot.querySelector('[role=status]')"
        )
        assert await tab.run(f"{status}.textContent") == "Nicht gesendet"
    assert len(store.rewards("mine")) == before
