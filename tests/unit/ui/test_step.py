"""A step: its numbers, its batch, its neighbours, and the commands that make it again."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from html import unescape

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from support.store.ledger_fixtures import commit
from support.store.training_steps import (
    serve,
    trained_step,
    write_steps,
)
from support.ui.untrusted_texts import PAYLOADS
from tracegrad.events import Json, RolloutStarted
from tracegrad.store import Ledger, PolicyVersion, Store
from tracegrad.store.models import TurnLedger
from tracegrad.ui.pages import step_batch

Browse = Callable[..., TestClient]


def text(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def commands(page: str) -> list[str]:
    return [unescape(one) for one in re.findall(r'<code class="command"[^>]*>(.*?)</code>', page)]


def test_a_step_that_is_not_there(browse: Browse) -> None:
    client = browse()
    missing = client.get("/ui/training/steps/7")
    assert missing.status_code == 404
    assert "there is no step 7" in missing.text
    for wrong in ("x", "-1", "1234567890"):
        assert client.get(f"/ui/training/steps/{wrong}").status_code == 400


def test_its_batch_says_what_became_of_each_turn(store: Store, browse: Browse) -> None:
    groups = trained_step(store)
    page = browse().get("/ui/training/steps/1").text
    assert "2 groups, 4 rollouts" in text(page)
    for group in groups:
        for one in group.rollouts:
            assert f'href="/ui/rollouts/{one.rollout_id}"' in page
            assert f'href="/ui/rollouts/{one.rollout_id}?turn=1#turn-1"' in page
    said = text(page)
    assert said.count("turn 0 2 trained") == 4
    assert said.count("turn 1 2 stale") == 4
    assert said.count("reward 1") == 4
    assert "Advantage" not in said, "the store has none"


def test_turns_have_the_advantage_that_they_were_trained_with(store: Store, browse: Browse) -> None:
    trained_step(store, advantages={"t0.0.0": -0.75, "t0.1.0": 0.5})
    said = text(browse().get("/ui/training/steps/1").text)
    assert "Advantage" in said
    assert said.count("turn 0 2 trained -0.750") == 1
    assert said.count("turn 0 2 trained +0.500") == 1
    assert said.count("turn 0 2 trained –") == 2, "not known"
    assert said.count("turn 1 2 stale –") == 4


def test_rewards_of_turns_are_those_that_training_used(store: Store, browse: Browse) -> None:
    batch = [
        {"group_id": "g", "rollouts": [
            {"rollout_id": "t0.0", "reward": 0.75, "turn_rewards": {"1": -0.5}, "turns": 2}
        ]}
    ]  # fmt: skip
    trained_step(store, batch={"groups": batch})
    said = text(browse().get("/ui/training/steps/1").text)
    assert "reward 0.75 group g · 2 turns" in said
    assert "turn 0 2 trained –" in said
    assert "turn 1 2 stale -0.5" in said


def test_a_removed_rollout_is_named_without_a_link(store: Store, browse: Browse) -> None:
    batch = [{"group_id": "g", "rollouts": [
        {"rollout_id": "gone", "reward": 1.0, "turn_rewards": {}, "turns": 1}
    ]}]  # fmt: skip
    write_steps(store, range(1, 2), batch={"groups": batch})
    page = browse().get("/ui/training/steps/1").text
    assert "removed from the store" in page
    assert "/ui/rollouts/gone" not in page


def test_long_batches_and_long_rollouts_are_paged_by_key(
    store: Store, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_batch, "ROLLOUTS", 3)
    monkeypatch.setattr(step_batch, "TURNS", 1)
    monkeypatch.setattr(step_batch, "TURNS_ALONE", 1)
    trained_step(store)
    client = browse()
    page = client.get("/ui/training/steps/1").text
    later = re.search(r'href="([^"]*from=3)#batch" rel="next"', page)
    assert later is not None
    assert "from 4 to 4" in text(client.get(later[1]).text)
    alone = re.search(r'href="([^"]*rollout=[^"]*)">more turns', page)
    assert alone is not None
    rest = client.get(unescape(alone[1])).text
    assert "turn 1 2 stale" in text(rest)
    assert "turn 0" not in text(rest)
    assert "more turns" not in rest
    for query in ("from=99", "from=x", "rollout=other", "rollout=t0.0&after=1"):
        assert client.get(f"/ui/training/steps/1?{query}").status_code == 400, query


def test_numbers_stand_in_the_sections_of_the_docs(store: Store, browse: Browse) -> None:
    more = {"own_metric": 2.5, "loss": -0.125, "ess": 0.5, "entropy": None, "k1": math.nan}
    trained_step(store, metrics=more | {"seconds": {"wait": 1.5}, "k3_lag_2": 0.25})
    serve(store, 1, seconds={"write": 2.0}, paused_s=0.5)
    said = text(browse().get("/ui/training/steps/1").text)
    for shown in (
        "The step Value loss all terms, over the objective's denominator -0.125 loss",
        "ess effective sample size of the weights old/mu 50.0%",
        "k3_lag_2 k3 of those, mean 0.25 nats",
        "seconds/wait by stage: start, wait, train, checkpoint, … 1.5 s",
        "push/paused_s of it, that the engine made no token; not where it slept 500 ms",
        "Others Value own_metric 2.5",
    ):
        assert shown in said, shown
    assert "entropy" not in said
    assert "k1 k1" not in said, "the store has no NaN"
    assert said.index("The step Value") < said.index("Staleness Value") < said.index("Others Value")


def test_neighbours_are_the_steps_that_are_there(store: Store, browse: Browse) -> None:
    for number in (1, 4, 9):
        write_steps(store, range(number, number + 1))
    client = browse()
    page = client.get("/ui/training/steps/4").text
    assert 'href="/ui/training/steps/1" data-key="p"' in page
    assert 'href="/ui/training/steps/9" data-key="n"' in page
    assert 'href="/ui/training" data-key="u"' in page
    assert 'data-key="p"' not in client.get("/ui/training/steps/1").text
    assert 'data-key="n"' not in client.get("/ui/training/steps/9").text


def test_the_commands_make_the_step_again(store: Store, browse: Browse) -> None:
    ledger = Ledger(store)
    folder = "/data/it's here/.tracegrad"
    commit(ledger, step=1, checkpoint=f"{folder}/checkpoints/step-00000001")
    commit(ledger, step=2, batch={"groups": []})
    settings = {"objective": {"preset": "gspo"}}
    commit(ledger, step=3, batch={"groups": []}, settings=settings)
    page = browse().get("/ui/training/steps/3").text
    made = [shlex.split(one) for one in commands(page)]
    assert made[0] == ["trainer", "replay", "3", "--state-dir", folder, "--turns"]
    assert made[1][-2:] == ["--preset", "dapo"], "it was trained with gspo"
    assert made[2][-2:] == ["--set", "batches.max_staleness=0"]
    assert "the checkpoint of step 1" in text(page)
    assert "the steps since, to step 2, are trained again first" in text(page)
    first = browse().get("/ui/training/steps/2").text
    assert shlex.split(commands(first)[1])[-1] == "gspo"
    assert "trained again first" not in text(first)


def test_its_push_is_the_one_that_brought_its_weights(store: Store, browse: Browse) -> None:
    """A rollback serves a version again, within no time."""
    commit(Ledger(store), step=1)
    first = {"bytes": 4_000_000, "seconds": {"write": 90.0, "load": 10}, "paused_s": 0.25}
    for at, detail in ((1e9, first), (2e9, {"seconds": {"load": 0.5}})):
        store.record_version(PolicyVersion(1, 1, "serving", created_at=at, detail=detail))
    page = browse().get("/ui/training/steps/1")
    assert page.status_code == 200
    assert "that a push took 100.0 s" in text(page.text)
    assert "brought to the engine 4,000,000 bytes" in text(page.text)
    assert "served from 2001-" in text(page.text)


def test_a_push_that_failed_says_so(store: Store, browse: Browse) -> None:
    commit(Ledger(store), step=1)
    store.record_version(PolicyVersion(1, 1, "failed", detail={"seconds": {"write": 2.0}}))
    said = text(browse().get("/ui/training/steps/1").text)
    assert "its push failed" in said
    assert "the version before is served 1 0 or 1" in said


@pytest.mark.parametrize(
    "detail",
    [{"seconds": None}, {"seconds": "long"}, {"gap": [1]}, {"paused_s": "short", "bytes": "many"},
     {"seconds": {"write": 10**400}}],
)  # fmt: skip
def test_what_a_push_wrote_oddly_costs_no_page(store: Store, browse: Browse, detail: Json) -> None:
    commit(Ledger(store), step=1, metrics={"loss": 10**400, "reward_mean": 10**400})
    store.record_version(PolicyVersion(1, 1, "serving", detail=detail))
    for path in ("/ui/training/steps/1", "/ui/training", "/ui/training/series"):
        assert browse().get(path).status_code == 200, path


def test_turns_behind_one_are_of_a_rollout(store: Store, browse: Browse) -> None:
    trained_step(store)
    answer = browse().get("/ui/training/steps/1?after=1~0")
    assert answer.status_code == 400
    assert "after: it is of one rollout; name that too" in text(answer.text)


def test_a_step_that_cannot_be_replayed_says_why(store: Store, browse: Browse) -> None:
    write_steps(store, range(1, 2))
    client = browse()
    page = client.get("/ui/training/steps/1").text
    assert "This step cannot be replayed: it was recorded without its batch" in text(page)
    assert not commands(page)


def test_a_step_whose_turns_were_removed_cannot_be_replayed(store: Store, browse: Browse) -> None:
    trained_step(store)
    client = browse()
    assert commands(client.get("/ui/training/steps/1").text)
    with store.exclusive() as connection:
        gone = update(TurnLedger).where(TurnLedger.turn_id == "t0.0.0")
        connection.execute(gone.values(step=None, skip_reason="x"))
    page = client.get("/ui/training/steps/1").text
    assert "of the turns that it trained 1 are gone" in text(page)


def test_a_damaged_batch_is_said(store: Store, browse: Browse) -> None:
    write_steps(store, range(1, 2), batch={"groups": [{"rollouts": 3}]})
    answer = browse().get("/ui/training/steps/1")
    assert answer.status_code == 500
    assert "step 1: its batch cannot be read" in unescape(answer.text)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_others_wrote_is_text(store: Store, browse: Browse, payload: str) -> None:
    sendable = payload.encode("utf-8", "replace").decode().replace("\0", "")
    store.append([RolloutStarted(rollout_id=sendable, task_id=sendable, opened_at=1.0)])
    batch = [{"group_id": sendable, "rollouts": [
        {"rollout_id": sendable, "reward": 1.0, "turn_rewards": {}, "turns": 1}
    ]}]  # fmt: skip
    more = {"batch": {"groups": batch}, "checkpoint": f"/{sendable}/checkpoints/1"}
    write_steps(store, range(1, 2), metrics={sendable: 1.0}, run_id=sendable, **more)
    page = browse().get("/ui/training/steps/1")
    assert page.status_code == 200
    assert page.text.count("<script") == 1
    assert not re.search(r"<(img|svg|iframe|math|base|video|style|template|x)\b", page.text)
