"""The web page in real headless Chromium: accessible, usable by keys, and deaf to what agents
wrote. Screenshots are left in .cache/screenshots, to be looked at."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette

from support.cli.sample_rollouts import (
    a_failure,
    coding_agent,
    four_alike,
    samples_of_one_prompt,
    spans_alone,
)
from support.compare.wheels import wheel_source
from support.proxy.servers import serving
from support.store.events import make_turn, rollout_events
from support.store.training_steps import trained_step, write_steps
from support.ui.chromium import Tab, chromium
from support.ui.policy_versions import add_versions
from support.ui.untrusted_texts import HOSTILE_ROLLOUT, PAYLOADS, hostile_rollout, payload_pieces
from tracegrad.events import Event, Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import GroupCommitWriter, Store
from tracegrad.store.ledger.quarantine import decide
from tracegrad.store.read.task_health import TaskDecision
from tracegrad.ui.app import make_ui, ui_routes
from tracegrad.ui.pages.tasks import path_of
from tracegrad.ui.pages.tokens import ReadTokens
from tracegrad.ui.security import Sessions
from tracegrad.ui.single_file import rollout_html

pytestmark = pytest.mark.timeout(1800)  # the first run installs Chromium

KEY = "the-admin-key-of-this-test-0123456789"
ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / ".cache" / "screenshots"
CODING = "0193c0de0001" + "0" * 20
AXE = ("axe-playwright-python", "0.1.8", "axe_playwright_python/axe.min.js")  # axe-core 4
PAGES = {
    "list": "/ui/rollouts",
    "filtered": "/ui/rollouts?task=sort-a-list&tag=split%3Dtrain",
    "rollout": f"/ui/rollouts/{CODING}",
    "tokens": f"/ui/rollouts/{CODING}/turns/1/tokens",
    "tasks": "/ui/tasks",
    "task": "/ui/tasks/sum",
    "compared": "/ui/tasks/sum?compare=sum-0&compare=sum-1&compare=sum-2",
    "training": "/ui/training",
    "step": "/ui/training/steps/121",
    "not-found": "/ui/rollouts/nobody",
    "versions": "/ui/versions?version=3",
    "health": "/ui/health",
}
CHARTS_DRAWN = "document.querySelector('[data-drawn]') !== null"
LOOKS = {"wide-light": (1400, 900, False), "phone-dark": (390, 844, True)}


def set_some_tasks_aside(store: Store) -> None:
    """Attempts at one task, of which some succeed; a task and an image that do not work."""
    for number in range(24):
        store.append(sum_attempt(number))
    for number in range(9):
        name, at = f"broken-{number}", 1_780_000_000.0 + number
        failed = rollout_events(
            name, task="build/the image", at=at, outcome=Outcome.ENV_ERROR, tags={"image": "img:3"}
        )
        store.append(failed)
    for kind, name in (("task", "build/the image"), ("image", "img:3")):
        decision = TaskDecision(
            subject="image" if kind == "image" else "task",
            subject_id=name,
            kind="quarantine",
            by="me@here",
            reason="its base image is gone from the registry, so that every attempt fails",
            created_at=time.time(),
        )
        decide(store, decision)


def sum_attempt(number: int) -> list[Event]:
    name, at = f"sum-{number}", 1_790_000_000.0 + 60 * number
    question = {"role": "user", "content": "What is the sum of the primes below 20?"}
    first = {"role": "assistant", "content": "2 + 3 + 5 + 7 + 11 + 13 + 17 + 19"}
    more = {"role": "user", "content": "And as one number?"}
    last = {
        "role": "assistant",
        "content": "It is 77." if number % 3 else "It is 75: I add them up.",
    }
    turns = [[question], [question, first, more]]
    events: list[Event] = [
        RolloutStarted(
            rollout_id=name, task_id="sum", task={"question": question["content"]}, opened_at=at
        )
    ]
    behind = None
    for place, (messages, reply) in enumerate(zip(turns, (first, last), strict=True)):
        behind = make_turn(
            f"{name}.{place}",
            name,
            parent=behind,
            version=number // 8,
            created_at=at + place,
            request={"model": "m", "messages": messages},
            response={"choices": [{"index": 0, "message": reply}]},
        )
        events.append(behind)
    return [
        *events,
        Reward(rollout_id=name, value=float(number % 3 > 0), created_at=at + 2),
        RolloutFinished(rollout_id=name, finished_at=at + 3),
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('ui')}/store.db") as opened:
        makers = (coding_agent, samples_of_one_prompt, spans_alone, four_alike, a_failure)
        for make in makers:
            opened.append(make())
        opened.append(hostile_rollout())
        set_some_tasks_aside(opened)
        add_versions(opened)
        write_steps(opened, range(4, 121))
        trained_step(opened, 121, advantages={"t0.0.0": -0.75, "t0.1.0": 0.5})
        yield opened


@pytest.fixture(scope="module")
def url(store: Store) -> Iterator[str]:
    """Of an open proxy's page; its tokens are read as texts that would run."""

    async def find_tokens() -> ReadTokens:
        return lambda ids: payload_pieces(list(ids))

    page = make_ui(store, sessions=Sessions(None), find_tokens=find_tokens)
    with serving(Starlette(routes=ui_routes(page))) as address:
        yield address


@pytest.fixture(scope="module")
def axe() -> str:
    name, version, script = AXE
    return (wheel_source(name, version) / script).read_text(encoding="utf-8")


async def violations(tab: Tab, axe: str) -> list[str]:
    """What axe-core says is wrong with the page: WCAG 2.2, level A and AA."""
    await tab.run(axe + "\n;0")
    found = await tab.run(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa',"
        " 'best-practice']}).then(r => JSON.stringify(r.violations.map(v =>"
        " v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html.slice(0, 120)).join(' | '))))"
    )
    told: list[str] = json.loads(found)
    return told


async def test_pages_are_accessible_in_every_look(url: str, axe: str) -> None:
    found: dict[str, list[str]] = {}
    async with chromium() as tab:
        for look, (width, height, dark) in LOOKS.items():
            await tab.look_like(width=width, height=height, dark=dark)
            for name, path in PAGES.items():
                await tab.open(url + path)
                if name == "training":
                    await tab.until(CHARTS_DRAWN)
                await tab.screenshot(SCREENSHOTS / f"{name}-{look}.png")
                if wrong := await violations(tab, axe):
                    found[f"{name} {look}"] = wrong
                overflow = "document.documentElement.scrollWidth - innerWidth"
                assert await tab.run(overflow) <= 0, f"{name} {look} is wider than the screen"
        # The 404 is what the last page is.
        complaints = [said for said in tab.said if "404" not in said]
    assert not found, json.dumps(found, indent=1)
    assert not complaints


async def test_nothing_that_an_agent_wrote_runs(store: Store, url: str, tmp_path: Path) -> None:
    one_file = tmp_path / "one.html"
    one_file.write_text(
        rollout_html(store, HOSTILE_ROLLOUT, read=lambda ids: payload_pieces(list(ids)))
    )
    places = [
        f"{url}/ui/rollouts",
        f"{url}/ui/rollouts/{HOSTILE_ROLLOUT}",
        f"{url}/ui/rollouts/{HOSTILE_ROLLOUT}/turns/0/tokens",
        f"{url}/ui/tasks",
        f"{url}{path_of(PAYLOADS[8])}?compare={HOSTILE_ROLLOUT}",
        one_file.as_uri(),
    ]
    async with chromium() as tab:
        for place in places:
            await tab.open(place)
            # Everything that could be opened, pointed at or focused is.
            await tab.run(
                "document.querySelectorAll('details').forEach(d => d.open = true);"
                "document.querySelectorAll('main *').forEach(e => {"
                " for (const type of ['mouseover', 'focus', 'pointerover'])"
                "  e.dispatchEvent(new Event(type, {bubbles: true})); }); 0"
            )
            if place.endswith(f"/ui/rollouts/{HOSTILE_ROLLOUT}"):
                await tab.run("document.querySelector('a.tokens-link').click()")
                await tab.until("document.querySelector('[data-tokens]')")
            assert await tab.run("typeof window.owned") == "undefined", place
            assert await tab.run("location.href") == place
            # No policy stopped a script of theirs either: none was there to be stopped.
            assert not [said for said in tab.said if "Content Security Policy" in said]
        assert not tab.dialogs


async def test_rollouts_are_read_by_keys_and_new_ones_are_announced(store: Store, url: str) -> None:
    async with chromium() as tab:
        await tab.look_like(width=1200, height=800, dark=False)
        await tab.open(f"{url}/ui/rollouts?agent=codex")
        first = await tab.run("document.querySelector('tbody tr a').href")
        await tab.press("j")
        assert await tab.run("document.activeElement.href") == first
        before = await tab.run("document.querySelector('tbody').textContent")
        now = time.time()
        store.append(
            [RolloutStarted(rollout_id=f"n{n}", agent="codex", opened_at=now) for n in range(3)]
        )
        await tab.until("document.getElementById('news').textContent === '3 new'")
        assert await tab.run("document.querySelector('tbody').textContent") == before
        await tab.run("document.getElementById('news').click()")
        await tab.loaded()
        assert await tab.run("document.querySelectorAll('tbody tr').length") > 3
        await tab.open(f"{url}/ui/rollouts/{CODING}?agent=codex")
        await tab.press("j")
        await tab.press("j")
        assert await tab.run("document.querySelector('.turn.current').id") == "turn-1"
        await tab.press("t")
        await tab.until("document.querySelector('#turn-1 [data-tokens]')")
        await tab.press("ArrowRight")
        said = await tab.run("document.querySelector('[data-value]').textContent")
        assert "log-probability" in said
        # Read aloud as it changes.
        assert await tab.run("document.querySelector('[data-value]').ariaLive") == "polite"
        await tab.screenshot(SCREENSHOTS / "turn-tokens-wide-light.png")
        await tab.press("p")
        await asyncio.wait_for(tab.loaded(), 60)
        assert await tab.run("location.pathname") != f"/ui/rollouts/{CODING}"
        await tab.press("?")
        assert await tab.run("document.getElementById('help').open") is True


# Which charts have a pixel of this colour.
_HAVE_COLOUR = """[...document.querySelectorAll('figure:not([hidden]) canvas')].map(canvas => {
  const wanted = [RGB];
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let found = false;
  for (let at = 0; at < pixels.length && !found; at += 4)
    found = pixels[at + 3] === 255 && wanted.every((c, n) => Math.abs(c - pixels[at + n]) < 9);
  return [canvas.closest('figure').dataset.chart, found];
})"""


async def test_charts_are_drawn_and_go_on_with_new_steps(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        write_steps(store, range(1, 61))
        page = make_ui(store, sessions=Sessions(None))
        with serving(Starlette(routes=ui_routes(page))) as url:
            await _look_at_charts(store, url)


async def _look_at_charts(store: Store, url: str) -> None:
    async with chromium() as tab:
        for dark, first in ((False, "67,56,202"), (True, "143,138,255")):
            await tab.look_like(width=1200, height=900, dark=dark)
            await tab.open(f"{url}/ui/training")
            await tab.until(CHARTS_DRAWN)
            found = dict(await tab.run(_HAVE_COLOUR.replace("RGB", first)))
            drawn = ("reward", "kl", "entropy", "gradient", "staleness", "lags", "ess", "clip")
            # The first colour is the first series' own, in light and in dark.
            assert found == dict.fromkeys((*drawn, "gap", "seconds", "push"), True)
        # The values at the pointer's step stand beside the names.
        over = "document.querySelector('[data-chart=reward] .u-over')"
        await tab.run(
            f"(o => o.dispatchEvent(new MouseEvent('mousemove', {{bubbles: true, clientX:"
            f" o.getBoundingClientRect().left + 2, clientY: o.getBoundingClientRect().top + 9}})))"
            f"({over})"
        )
        await tab.until(
            "document.querySelector('[data-chart=kl] [data-at]').textContent[0] === 's'"
        )
        assert await tab.run("document.querySelector('[data-at]').textContent") == "step 1"
        write_steps(store, range(61, 64))
        await tab.until("document.getElementById('news').textContent === '3 new'")
        await tab.until("document.querySelector('[data-range]').textContent.endsWith('to 63')")
        assert await tab.run("document.querySelector('tbody tr a')?.textContent") != "63"
        assert not tab.said


async def test_keys_are_turned_off_and_stay_off(url: str) -> None:
    current = "document.querySelectorAll('tr.current').length"
    switch = "document.querySelector('[data-keys-switch]').click()"
    async with chromium() as tab:
        await tab.open(f"{url}/ui/rollouts")
        await tab.press("?")
        await tab.run(f"{switch}; document.getElementById('help').close()")
        await tab.open(f"{url}/ui/rollouts")
        for key in ("j", "?", "n", "/"):
            await tab.press(key)
        assert await tab.run(current) == 0
        assert await tab.run("document.getElementById('help').open") is False
        assert await tab.run("document.activeElement === document.body")
        # The button opens the switch without a key.
        await tab.run(f"document.querySelector('[data-help]').click(); {switch}")
        await tab.run("document.getElementById('help').close()")
        await tab.until("document.activeElement === document.body")
        await tab.press("j")
        assert await tab.run(current) == 1


async def test_a_person_logs_in_with_the_key_and_out(store: Store, axe: str) -> None:
    """Through the whole proxy, as `tracegrad proxy` serves it."""
    settings = ProxySettings(admin_key=KEY)  # type: ignore[arg-type]
    app = create_app(settings, store=store, writer=GroupCommitWriter(store))
    with serving(app) as url:
        async with chromium() as tab:
            await tab.look_like(width=1200, height=800, dark=False)
            await tab.open(f"{url}/ui/rollouts?agent=codex")
            await tab.arrive_at("/ui/login")
            assert not await violations(tab, axe)
            await tab.screenshot(SCREENSHOTS / "login-wide-light.png")
            await tab.run(f"document.getElementById('key').value = '{KEY}'")
            await tab.run("document.querySelector('form[data-onward] button').click()")
            await tab.arrive_at("/ui/rollouts")
            assert await tab.run("location.search") == "?agent=codex"
            assert await tab.run("document.querySelectorAll('tbody tr').length") > 1
            assert "session" not in await tab.run("document.cookie")
            # A link from elsewhere lands on the form although there is a session: login.js goes on.
            await tab.open(f"{url}/ui/login?next=%2Fui%2Frollouts%3Fsince%3Dsoon")
            await tab.arrive_at("/ui/rollouts")
            assert "since" in await tab.run("document.querySelector('[role=alert]').textContent")
            assert not await violations(tab, axe)
            await tab.run("document.querySelector('form.logout button').click()")
            await tab.arrive_at("/ui/login")
            await tab.open(f"{url}/ui/rollouts")
            await tab.arrive_at("/ui/login")
