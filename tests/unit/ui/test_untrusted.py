"""Without a browser: nothing of what an agent wrote becomes an element or an attribute."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from starlette.testclient import TestClient

from support.ui.untrusted_texts import HOSTILE_ROLLOUT, PAYLOADS, hostile_rollout, payload_pieces
from tracegrad.store import Store
from tracegrad.ui.pages.tasks import path_of
from tracegrad.ui.single_file import rollout_html

Browse = Callable[..., TestClient]
_OWN = {"base", "iframe", "math", "video", "source", "x", "scr", "img", "textarea", "template"}


class Elements(HTMLParser):
    """What of a page is an element or an attribute that no page of ours has."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _OWN:
            self.foreign.append(tag)
        for name, value in attrs:
            link = (value or "").strip().lower()
            if name.startswith("on") or name == "style":
                self.foreign.append(f"{tag} {name}")
            if name in ("href", "src", "action") and not _leads_to_us(link):
                self.foreign.append(f"{tag} {name}={value}")
        if tag == "script" and dict(attrs).get("type") != "module":
            self.foreign.append("script")


def _leads_to_us(link: str) -> bool:
    # Browsers read a backslash as a slash, and two of them as the beginning of a host.
    return link.startswith(("/", "#", "?")) and not link.replace("\\", "/").startswith("//")


@pytest.mark.parametrize("link", ["//evil.example", "/\\evil.example", "https://evil.example", "x"])
def test_a_link_to_elsewhere_is_seen(link: str) -> None:
    found = Elements()
    found.feed(f'<a href="{link}">x</a><a href="/ui/rollouts">y</a><a href="?by=x">z</a>')
    assert found.foreign == [f"a href={link}"]


@pytest.mark.parametrize(
    "path",
    [
        "/ui/rollouts",
        f"/ui/rollouts/{HOSTILE_ROLLOUT}",
        f"/ui/rollouts/{HOSTILE_ROLLOUT}/turns/0/tokens",
        "/ui/tasks",
        f"{path_of(PAYLOADS[8])}?compare={HOSTILE_ROLLOUT}",
        "one file",
    ],
)
def test_what_agents_wrote_is_text(store: Store, browse: Browse, path: str) -> None:
    store.append(hostile_rollout())
    if path == "one file":
        page = rollout_html(store, HOSTILE_ROLLOUT, read=lambda ids: payload_pieces(list(ids)))
    else:
        page = browse().get(path).text
    found = Elements()
    found.feed(page)
    assert not found.foreign
    assert page.count("</html>") == 1


@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_is_asked_for_in_a_link_is_text(browse: Browse, payload: str) -> None:
    client = browse()
    sendable = payload.encode("utf-8", "replace").decode()
    for query in ({"task": sendable}, {"q": sendable}, {"since": sendable}, {"before": sendable}):
        found = Elements()
        found.feed(client.get("/ui/rollouts", params=query).text)
        assert not found.foreign, query
