"""The page of versions: how each stands, and forms that decide as the command line does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from support.ui.policy_versions import add_versions, serve
from tracegrad.events import Json
from tracegrad.store import Decision, PolicyVersion, Store
from tracegrad.ui.pages.versions import MOST_DECISIONS, MOST_REASON
from tracegrad.ui.paging import PAGE

from .conftest import token_in
from .test_rollout import text_of
from .test_untrusted import Elements

Browse = Callable[..., TestClient]


def row_of(page: str, name: str) -> str:
    """The text of a table's row."""
    found = re.search(rf'<tr id="{name}">.*?</tr>', page, re.DOTALL)
    assert found is not None, f"no row {name}"
    return text_of(found[0])


def offered_for(client: TestClient, version: int) -> list[str]:
    """What the form of a version offers."""
    page = client.get(f"/ui/versions?version={version}").text
    [form] = re.findall(r'<section class="card standing" id="decide".*?</section>', page, re.DOTALL)
    return re.findall(r'name="kind" value="(\w+)"', form)


def test_nothing_was_pushed_yet(browse: Browse) -> None:
    said = text_of(browse().get("/ui/versions").text)
    assert "No version yet: nothing was pushed." in said
    assert "Nobody decided anything yet." in said
    assert "Pause training" in said
    assert "Resume training" not in said


def test_each_version_says_how_it_stands(store: Store, browse: Browse) -> None:
    add_versions(store)
    page = browse().get("/ui/versions").text
    assert page.index('id="version-3"') < page.index('id="version-0"'), "the newest first"
    served, back, good, model = (row_of(page, f"version-{n}") for n in (3, 2, 1, 0))
    assert served.startswith("3 served now")
    assert "reject: 0.75 of 16 against 0.50 of 12" in served
    assert "step 3 4 MB" in served
    assert back.startswith("2 rolled back")
    assert good.startswith("1 promoted pinned")
    assert "rollback by guard:questions" in good
    assert "model folder no: beyond_keep" in model
    head = text_of(page)
    assert "Served version 3" in head
    assert "Promoted version 1" in head
    assert "paused by ann@host: <b>looking</b>".replace("<", "&lt;").replace(">", "&gt;") in head
    assert "25.0% of what an alarm needs, at the last step" in head


def test_only_what_is_possible_is_offered(store: Store, browse: Browse) -> None:
    add_versions(store)
    client = browse()
    page = client.get("/ui/versions").text
    assert 'id="decide"' not in page
    assert 'href="/ui/versions?version=1#decide"' in page
    offered = [offered_for(client, version) for version in range(4)]
    every = ["promote", "pin", "rollback"]
    assert offered == [[], ["unpin", "rollback"], every, every[:2]]
    none = text_of(client.get("/ui/versions?version=0").text)
    assert "Nothing can be decided about it: its weights are not on disk (beyond_keep)" in none
    assert 'id="decide"' not in client.get("/ui/versions?version=77").text
    said = text_of(page)
    assert "Resume training" in said
    assert "Pause training" not in said


def test_decisions_say_what_came_of_them(store: Store, browse: Browse) -> None:
    add_versions(store)
    page = browse().get("/ui/versions").text
    refused = row_of(page, "decision-4")
    assert "4 promote 2 refused ann@host tested refused: version 2 was rolled back" in refused
    assert "3 rollback 1 done guard:questions" in row_of(page, "decision-3")
    found = Elements()
    found.feed(page)
    assert found.foreign == []
    assert "&lt;script&gt;alert(1)" in page


def test_a_form_decides_and_the_decision_is_open_until_the_trainer_acts(
    store: Store, browse: Browse
) -> None:
    add_versions(store)
    client = browse()
    fields = {"csrf": token_in(client.get("/ui/versions").text), "reason": " replies are empty "}
    fields |= {"kind": "rollback", "version": "1", "training": "pause"}
    answer = client.post("/ui/versions", data=fields, follow_redirects=False)
    [decision] = store.open_decisions()
    assert answer.status_code == 303
    assert answer.headers["location"] == f"/ui/versions#decision-{decision.seq}"
    assert (decision.kind, decision.version, decision.training) == ("rollback", 1, "pause")
    assert decision.reason == "replies are empty"
    assert decision.by == "ui"
    shown = row_of(client.get("/ui/versions").text, f"decision-{decision.seq}")
    assert "rollback 1 open ui " in shown
    assert "no trainer has acted on it yet" in shown


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "promote", "version": "1", "reason": "  "}, "reason: say why"),
        ({"kind": "promote", "version": "0", "reason": "x"}, "version: 0 is not kept on disk"),
        ({"kind": "promote", "version": "77", "reason": "x"}, "version: there is no version 77"),
        ({"kind": "promote", "version": "-1", "reason": "x"}, "version: '-1' is no version"),
        ({"kind": "promote", "version": "²", "reason": "x"}, "version: '²' is no version"),
        ({"kind": "promote", "reason": "x"}, "version: promote needs one"),
        ({"kind": "delete", "version": "1", "reason": "x"}, "kind: 'delete' is none of promote"),
        ({"kind": "rollback", "version": "1", "training": "go", "reason": "x"}, "training: 'go'"),
        ({"kind": "unpin", "version": "3", "reason": "x"}, "version: 3 is not pinned"),
        ({"kind": "pause", "reason": "x"}, "training is paused already, by ann@host"),
        ({"kind": "unpin", "version": "1", "reason": "x" * (MOST_REASON + 1)}, "2,001 characters"),
    ],
)
def test_what_cannot_be_is_one_line(
    store: Store, browse: Browse, fields: dict[str, str], said: str
) -> None:
    add_versions(store)
    client = browse()
    fields = fields | {"csrf": token_in(client.get("/ui/versions").text)}
    answer = client.post("/ui/versions", data=fields)
    assert answer.status_code == 400
    assert said in text_of(answer.text)
    assert store.open_decisions() == []


def test_what_was_written_stays_in_the_form(store: Store, browse: Browse) -> None:
    add_versions(store)
    client = browse()
    fields = {"csrf": token_in(client.get("/ui/versions").text), "form": "r-version"}
    fields |= {"version": "2", "kind": "unpin", "reason": 'a "quoted" <reason>'}
    answer = client.post("/ui/versions?version=2", data=fields | {"training": "pause"})
    assert answer.status_code == 400
    [field] = re.findall(r'<input id="r-version"[^>]*>', answer.text)
    assert 'value="a &#34;quoted&#34; &lt;reason&gt;"' in field
    [other] = re.findall(r'<input id="r-training"[^>]*>', answer.text)
    assert 'value=""' in other
    assert '<option value="pause" selected>' in answer.text


def test_a_second_press_is_no_second_decision(store: Store, browse: Browse) -> None:
    add_versions(store)
    client = browse()
    fields = {"csrf": token_in(client.get("/ui/versions").text), "reason": "bad replies"}
    fields |= {"kind": "rollback", "version": "1"}
    assert client.post("/ui/versions", data=fields, follow_redirects=False).status_code == 303
    again = client.post("/ui/versions", data=fields)
    assert again.status_code == 400
    assert "rollback is asked for already, by ui: decision 6 is open until a" in text_of(again.text)
    assert len(store.open_decisions()) == 1
    # Another version is another decision.
    answer = client.post("/ui/versions", data=fields | {"version": "2"}, follow_redirects=False)
    assert answer.status_code == 303


def test_enter_decides_nothing(store: Store, browse: Browse) -> None:
    """A browser presses a form's first button."""
    add_versions(store)
    page = browse().get("/ui/versions?version=2").text
    forms = re.findall(r'<form class="decide".*?</form>', page, re.DOTALL)
    assert len(forms) == 2
    for form in forms:
        [first, *_] = re.findall(r"<button[^>]*>", form)
        assert first == '<button type="submit" disabled hidden>'


@pytest.mark.parametrize(
    "evaluation",
    [{}, {"verdict": "promote"}, {"mean_candidate": "high", "mean_baseline": [1]},
     {"mean_candidate": 10**400, "n_candidate": None}],
)  # fmt: skip
def test_what_the_gate_wrote_oddly_costs_no_page(
    store: Store, browse: Browse, evaluation: Json
) -> None:
    serve(store, 0, bytes="many")
    serve(store, 1)
    store.note_version(PolicyVersion(1, 1, "evaluated", detail=evaluation))
    page = browse().get("/ui/versions")
    assert page.status_code == 200
    assert "– of" in row_of(page.text, "version-1")


def test_nobody_decides_without_the_token_or_the_key(store: Store, browse: Browse) -> None:
    add_versions(store)
    fields = {"kind": "unpin", "version": "1", "reason": "x"}
    assert browse().post("/ui/versions", data=fields).status_code == 403
    other = token_in(browse().get("/ui/versions").text)
    assert browse().post("/ui/versions", data=fields | {"csrf": other}).status_code == 403
    assert store.open_decisions() == []


def test_pages_by_version(store: Store, browse: Browse) -> None:
    for version in range(PAGE + 5):
        serve(store, version, kept=version in (2, PAGE))
    client = browse()
    first = client.get("/ui/versions").text
    assert first.count('<tr id="version-') == PAGE
    assert "Also on disk: 2 ." in text_of(first)
    [older] = re.findall(r'href="(/ui/versions\?before=\d+)" rel="next"', first)
    last = client.get(older).text
    assert re.findall(r'<tr id="version-(\d+)"', last) == ["4", "3", "2", "1", "0"]
    assert 'rel="next"' not in last
    assert client.get("/ui/versions?before=x").status_code == 400
    assert "No version before this one." in text_of(client.get("/ui/versions?before=0").text)


def test_of_many_decisions_the_newest_are_shown(store: Store, browse: Browse) -> None:
    add_versions(store)
    client = browse()
    for _ in range(MOST_DECISIONS):
        store.decide(Decision(kind="unpin", version=1, by="ann@host", reason="again"))
    page = client.get("/ui/versions").text
    assert page.count('<tr id="decision-') == MOST_DECISIONS
    assert "5 earlier ones not shown" in text_of(page)
