"""`tracegrad rollouts explain`: the reasons of a whole store, counted by its database."""

from __future__ import annotations

from support.cli.run_rollouts import in_order, printed, printed_json
from support.cli.sample_rollouts import coding_agent, samples_of_one_prompt
from support.store.events import make_turn, rollout_events
from tracegrad.events import Outcome
from tracegrad.store import Ledger, StepRecord, Store


def test_all_reasons_of_a_store_are_counted_the_most_frequent_first(store: Store, url: str) -> None:
    store.append(
        [
            *rollout_events("a", task="x", turns=3),
            *rollout_events("b", task="x", turns=2),
            *rollout_events("c", task="y", turns=4, outcome=None),
            *rollout_events("d", task="y", turns=1, outcome=Outcome.ENV_ERROR),
            make_turn("g0", "b", untrainable="greedy"),
            make_turn("f0", "c", fork_reason="compaction"),
            make_turn("f1", "c", fork_reason="media", untrainable="media"),
            make_turn("f2", "d", fork_reason="media", untrainable="media"),
        ]
    )
    Ledger(store).commit_step(
        StepRecord(step=1, version=1),
        trained=["a.0", "a.1"],
        skipped={"a.2": "stale"},
        rollouts=["a"],
    )
    store.append([make_turn("too-late", "a")])
    counts = printed_json(url, "explain")
    assert (counts["rollouts"], counts["turns"], counts["trained"]) == (4, 15, 2)
    found = [(each["reason"], each["turns"], each["rollouts"], each["final"], each["example"])
             for each in counts["not_trained"]]  # fmt: skip
    assert found == [
        ("open", 5, 1, False, "c"),
        ("media", 2, 2, True, "d"),
        ("waiting", 2, 1, False, "b"),
        ("env_error", 1, 1, True, "d"),
        ("greedy", 1, 1, True, "b"),
        ("late", 1, 1, True, "a"),
        ("stale", 1, 1, True, "a"),
    ]
    assert sum(each["turns"] for each in counts["not_trained"]) + counts["trained"] == 15
    assert [(each["reason"], each["turns"]) for each in counts["forks"]] == [
        ("media", 2), ("compaction", 1)]  # fmt: skip
    in_order(printed(url, "explain"), [
        "15 turns in 4 rollouts: 2 trained, 6 not, 7 wait",
        "2 media in 2 rollouts, newest d",
        "Its messages hold images, audio or video, whose tokens are not recorded.",
        "5 open in 1 rollout, newest c",
        "2 media in 2 rollouts, newest d",
        "1 compaction in 1 rollout, newest c",
    ])  # fmt: skip
    # As the trainer's status has it.
    status = store.turn_counts()
    assert counts["trained"] == status.trained
    assert counts["turns"] == status.captured


def test_the_counts_agree_with_the_reasons_of_each_rollout(store: Store, url: str) -> None:
    store.append([*coding_agent(), *samples_of_one_prompt(), *rollout_events("0")])
    ids = ["0193c0de0001", "0193c0de0002", "0"]
    by_rollout: dict[tuple[str, bool], int] = {}
    for rollout in ids[:2]:
        for each in printed_json(url, "explain", rollout)["not_trained"]:
            key = (each["reason"], each["final"])
            by_rollout[key] = by_rollout.get(key, 0) + len(each["turns"])
    counted = printed_json(url, "explain", "--since", "1763640000", "--until", "1763640150")
    assert {
        (each["reason"], each["final"]): each["turns"] for each in counted["not_trained"]
    } == by_rollout


def test_counts_are_filtered(store: Store, url: str) -> None:
    store.append([*rollout_events("a", task="x"), *rollout_events("b", task="y", turns=3)])
    store.append([make_turn("f", "b", fork_reason="media")])
    assert printed_json(url, "explain", "--task", "x")["turns"] == 2
    assert printed_json(url, "explain", "--task", "x")["forks"] == []
    assert [each["turns"] for each in printed_json(url, "explain", "--task", "y")["forks"]] == [1]
    assert "no rollouts match" in printed(url, "explain", "--task", "z")


def test_an_empty_store_says_so(store: Store, url: str) -> None:
    assert printed(url, "explain") == "no rollouts yet\n"
    assert printed_json(url, "explain")["not_trained"] == []


def test_a_rollout_without_turns_says_why_in_json_too(store: Store, url: str) -> None:
    store.append(
        [*rollout_events("empty", turns=0), *rollout_events("open", turns=0, outcome=None)]
    )
    [why] = printed_json(url, "explain", "empty")["not_trained"]
    assert (why["reason"], why["final"], why["turns"]) == ("no_turns", False, [])
    text = " ".join(printed(url, "explain", "empty").split())
    assert why["meaning"] in text
    assert why["fix"] in text
    assert printed_json(url, "explain", "open")["not_trained"] == []
