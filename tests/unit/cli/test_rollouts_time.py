"""`tracegrad rollouts time`, of one rollout and of many."""

from __future__ import annotations

import pytest

from support.cli.run_rollouts import in_order, printed, printed_json, run
from support.cli.timed_rollouts import OLD, TRAINED, WAITS, timed_samples
from tracegrad.store import Store


@pytest.fixture
def timed(url: str) -> str:
    with Store.open(url) as store:
        timed_samples(store)
    return url


def test_one_rollout_by_turn_and_by_stage(timed: str) -> None:
    text = printed(timed, "time", TRAINED[:13])
    in_order(
        text,
        [
            "turn at gate queue engine queue prefill decode held whole",
            "0 +1.6 s 0 0 0 400 ms 2.0 s 0 2.4 s",
            "2 +4.5 s 1.2 s 0 200 ms 100 ms 3.0 s 0 4.5 s",
            "3 +13.0 s 0 0 0 500 ms 2.5 s 300 ms 3.0 s",
            "41.0 s in all",
        ],
    )
    wide = printed(timed, "time", TRAINED, columns=100)
    in_order(
        wide,
        [
            "turn at proxy gate queue engine queue prefill decode commit held whole",
            "3 +13.0 s 4 ms 0 0 0 500 ms 2.5 s ? 300 ms 3.0 s",
        ],
    )
    found = printed_json(timed, "time", TRAINED)
    assert found["rollout_id"] == TRAINED
    assert found["whole_s"] == pytest.approx(41.0)
    assert sum(found["stages"].values()) == pytest.approx(41.0)
    assert found["stages"]["training"] == pytest.approx(11.0)
    assert found["stages"]["waiting"] == pytest.approx(8.0)
    assert found["stages"]["reward"] == pytest.approx(5.5)
    assert found["turns"][2]["seconds"]["gate"] == pytest.approx(1.2)
    assert found["turns"][2]["seconds"]["engine_queue"] == pytest.approx(0.2)
    assert found["turns"][3]["held_s"] == pytest.approx(0.3)
    assert found["overlap_s"] == pytest.approx(1.309)
    assert "commit" not in found["turns"][3]["seconds"], "its next turn would say it"


def test_an_engine_that_says_nothing_of_its_queue_is_said(timed: str) -> None:
    said = "the engine did not say how long 1 turn waited in its queue"
    text = printed(timed, "time", WAITS, columns=None)
    assert said in text
    assert "engine queue" not in text
    assert said not in printed(timed, "time", TRAINED, columns=None)


def test_a_rollout_of_before_is_unknown_and_not_zero(timed: str) -> None:
    text = printed(timed, "time", OLD)
    in_order(text, ["0 +6.0 s ?"])
    assert "1 turn without timing" in text
    found = printed_json(timed, "time", OLD)
    assert found["turns"][0]["seconds"] is None
    assert found["stages"].keys() == {"unknown", "reward", "between"}


def test_all_rollouts_or_some(timed: str) -> None:
    found = printed_json(timed, "time")
    assert found["rollouts"] == 3
    assert found["stages"]["queue"]["p95_s"] == pytest.approx(9.0)
    assert found["stages"]["queue"]["rollouts"] == 2, "the old one says nothing of it"
    assert sum(row["share"] for row in found["stages"].values()) == pytest.approx(1.0)
    some = printed_json(timed, "time", "--task", "mend-the-cart")
    assert some["rollouts"] == 2
    assert "unknown" not in some["stages"]
    assert printed(timed, "time", "--limit", "1").startswith("the newest 1 rollout, ")
    assert printed(timed, "time", "--task", "none") == "no rollouts match\n"
    assert printed_json(timed, "time", "--task", "none")["rollouts"] == 0
    in_order(
        printed(timed, "time", columns=None), [f"{TRAINED} 41.0 s: training 11.0 s, waiting 8.0 s"]
    )


def test_wrong_use_is_one_line(timed: str) -> None:
    assert run(timed, "time", "nothing").exit_code == 1
    both = run(timed, "time", WAITS, "--task", "x")
    assert both.exit_code == 2
    assert "name a rollout or filter them, not both" in both.output
