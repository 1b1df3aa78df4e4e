"""The page of training: what holds it up, its charts' numbers, its steps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from support.store.training_steps import pause_training, serve, step_metrics, write_steps
from support.ui.untrusted_texts import PAYLOADS
from tracegrad.store import Decision, PolicyVersion, Store
from tracegrad.ui.pages.charts import CHARTS, MOST_POINTS, MOST_SERIES
from tracegrad.ui.paging import PAGE

Browse = Callable[..., TestClient]


def steps_in(page: str) -> list[int]:
    return [int(n) for n in re.findall(r'<a href="/ui/training/steps/\d+">(\d+)</a></th>', page)]


def series(client: TestClient, **query: int) -> dict[str, Any]:
    answer = client.get("/ui/training/series", params=query)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(answer.text, parse_constant=refuse)
    return found


def lines(found: dict[str, Any], chart: str) -> dict[str, list[float | None]]:
    return {one["label"]: one["values"] for one in found["charts"][chart]["series"]}


def text(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_an_empty_store_has_no_charts_and_says_what_makes_steps(browse: Browse) -> None:
    client = browse()
    page = client.get("/ui/training").text
    assert "No steps yet" in page
    assert page.count('<figure class="card chart"') == len(CHARTS)
    assert len(re.findall(r"<figure [^>]* hidden>", page)) == len(CHARTS)
    found = series(client)
    assert found["steps"] == []
    assert all(not chart["series"] for chart in found["charts"].values())
    assert '{"newest": 0, "new": 0}' in client.get("/ui/training/events?after=0").text


def test_pages_show_every_step_once_the_newest_first(store: Store, browse: Browse) -> None:
    write_steps(store, range(1, 2 * PAGE + 6))
    client = browse()
    page = client.get("/ui/training").text
    seen = steps_in(page)
    write_steps(store, range(900, 903))  # what comes meanwhile moves nothing
    while (older := re.search(r'href="([^"]*)" rel="next"', page)) is not None:
        page = client.get(older[1].replace("&amp;", "&")).text
        seen += steps_in(page)
    # The newest stands in the head too.
    assert [n for n in seen if n != seen[0]] == list(reversed(range(1, 2 * PAGE + 5)))
    assert "data-series" not in page, "charts stand above the newest steps alone"


def test_the_table_has_the_columns_of_trainer_status(store: Store, browse: Browse) -> None:
    write_steps(store, range(30, 31))
    page = text(browse().get("/ui/training").text)
    assert "Step reward spread turns loss grad ent. k3 ess clip lag gap tok/s Age" in page
    m = step_metrics(30)
    row = f"30 {m['reward_mean']:.3f} {m['group_spread']:.2f} 44 {m['loss']:+.3f}"
    assert f"{row} {m['grad_norm']:.2g} {m['entropy']:.2f}" in page
    assert "2e-06 12k" in page


def test_charts_have_the_numbers_of_the_steps(store: Store, browse: Browse) -> None:
    write_steps(store, range(1, 41))
    store.note_version(PolicyVersion(7, 7, "evaluated", detail={"mean_candidate": 0.625}))
    found = series(browse(), steps=30)
    assert (found["steps"], found["every"]) == (list(range(11, 41)), 1)
    expected = [step_metrics(step)["reward_mean"] for step in range(11, 41)]
    assert lines(found, "reward") == {"mean of the batch": expected}, "step 7 is not drawn"
    stages = lines(found, "seconds")
    assert [*stages] == ["checkpoint", "push", "start", "train", "wait"]
    assert [n for n, value in enumerate(stages["checkpoint"], 11) if value] == [20, 30, 40]
    assert stages["checkpoint"][0] is None
    assert {name: values[0] for name, values in lines(found, "push").items()} == {
        "push": 0.8,
        "no token": 0.25,
        "calls held": 0.125,
    }
    assert not found["charts"]["reference"]["series"], "nothing recorded it"
    whole = lines(series(browse()), "reward")
    assert whole["held-out, when evaluated"] == [None] * 6 + [0.625] + [None] * 33


def test_each_chart_says_its_last_least_and_greatest_value(store: Store, browse: Browse) -> None:
    write_steps(store, range(1, 4), metrics={})
    with store.exclusive() as connection:
        for step, reward in ((1, 0.5), (2, 0.25), (3, 0.375)):
            connection.exec_driver_sql(
                f"UPDATE steps SET metrics = '{{\"reward_mean\": {reward}}}' WHERE step = {step}"
            )
    page = text(browse().get("/ui/training").text)
    assert "mean of the batch 0.375 0.25 0.5" in page


def test_many_steps_are_thinned_and_the_last_one_stays(store: Store, browse: Browse) -> None:
    write_steps(store, range(1, 2 * MOST_POINTS + 3), metrics={"reward_mean": 1.0})
    client = browse()
    found = series(client, steps=5000)
    assert found["every"] == 3
    assert len(found["steps"]) == 2 * MOST_POINTS // 3 + 1
    assert found["steps"][:2] == [3, 6]
    assert found["steps"][-1] == 2 * MOST_POINTS + 2
    # One more step draws those again that were drawn.
    write_steps(store, range(2 * MOST_POINTS + 3, 2 * MOST_POINTS + 4))
    assert series(client, steps=5000)["steps"][:-1] == found["steps"]
    refused = client.get("/ui/training?steps=5001")
    assert refused.status_code == 400
    assert "at most 5,000" in refused.text
    assert client.get("/ui/training?steps=-1").status_code == 400


def test_what_is_no_finite_number_is_not_drawn(store: Store, browse: Browse) -> None:
    odd = {
        "reward_mean": math.nan,
        "grad_norm": math.inf,
        "entropy": None,
        "k1": "text",
        "k3": 0.5,
        "gap_max": 0.0,
        "gap_mean": 0.0,
        "gap_tokens": 0.0,
        "turns": math.nan,
        "turns_trained": 3.0,
        "seconds": {"wait": math.nan, "train": 2.0},
    }
    write_steps(store, range(1, 3), metrics=odd)
    client = browse()
    found = series(client)
    drawn = {name for name, chart in found["charts"].items() if chart["series"]}
    assert drawn == {"kl", "seconds", "push"}, "a gap of no tokens means nothing"
    assert lines(found, "kl") == {"k3": [0.5, 0.5]}
    page = client.get("/ui/training")
    assert page.status_code == 200
    assert "Step reward turns grad ent. k3 gap Age 2 – – – – 5e-01 –" in text(page.text)


def test_of_very_many_stages_the_smallest_are_one_series(store: Store, browse: Browse) -> None:
    seconds = {f"s{n:02}": float(n) for n in range(1, 13)}
    write_steps(store, range(1, 3), metrics={"seconds": seconds})
    found = lines(series(browse()), "seconds")
    assert len(found) == MOST_SERIES
    assert found["others"] == [15.0, 15.0]  # 1 + 2 + 3 + 4 + 5
    assert sum(values[0] or 0.0 for values in found.values()) == sum(seconds.values())


def test_what_holds_training_up_is_said(store: Store, browse: Browse) -> None:
    serve(store, 3, seconds={"write": 1.0})
    store.record_version(PolicyVersion(4, 4, "failed"))
    pause_training(store, "the grader is being replaced")
    refused = store.decide(Decision(kind="promote", by="bob@host", reason="good", version=9))
    store.close_decision(refused, {"refused": "there is no version 9"})
    page = text(browse().get("/ui/training").text)
    assert "Version served 3 pushes failed: 4" in page
    assert re.search(r"paused \d+ \w+ ago by ann@host: the grader is being replaced", page)
    assert re.search(r"refused \d+ \w+ ago: promote by bob@host: there is no version 9", page)


def test_new_steps_are_announced(store: Store, browse: Browse) -> None:
    write_steps(store, range(1, 6))
    client = browse()
    page = client.get("/ui/training").text
    live = re.search(r'data-live="([^"]*)"', page)
    assert live is not None
    assert live[1] == "/ui/training/events?after=5"
    assert '{"newest": 5, "new": 0}' in client.get(live[1]).text
    write_steps(store, range(6, 9))
    answer = client.get(live[1])
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert 'event: step\ndata: {"newest": 8, "new": 3}' in answer.text


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_of_stages_and_reasons_are_text(store: Store, browse: Browse, payload: str) -> None:
    sendable = payload.encode("utf-8", "replace").decode().replace("\0", "")
    metrics = {"reward_mean": 1.0, "seconds": {sendable: 1.0}, "lag_share_" + sendable: 0.5}
    write_steps(store, range(1, 3), metrics=metrics)
    pause_training(store, f"x {sendable}", by=f"x {sendable}")
    client = browse()
    page = client.get("/ui/training").text
    assert page.count("<script") == 2
    assert "owned=1>" not in page
    assert sendable in lines(series(client), "seconds")
