"""`tracegrad rollouts tree`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.style import Style

from support.cli.run_rollouts import in_order, printed, printed_json, run
from support.cli.sample_rollouts import coding_agent, samples_of_one_prompt, spans_alone
from support.store.events import make_turn
from tracegrad.cli.render.explanation import explanation_json, render_explanation
from tracegrad.cli.render.rollout import render_rollout
from tracegrad.cli.render.tree import render_tree, tree_json
from tracegrad.events import Reward, RolloutStarted, Turn
from tracegrad.inspect.tree_layout import group_samples, place_turns, turn_chains
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason
from tracegrad.store import RolloutDetail, RolloutSummary, Store, TurnDisposition


def turns_in(node: Any) -> Iterator[int]:
    """The indices of all turns in the objects of `tree --json`."""
    for root in node["roots"] if "roots" in node else node["branches"]:
        yield from (turn["turn"] for turn in root["turns"])
        yield from turns_in(root)


def test_a_coding_agents_tree(store: Store, url: str) -> None:
    store.append(coding_agent())
    text = printed(url, "tree", "0193c0de0001")
    in_order(text, [
        "in span main loop",
        "0 190 36 tool_calls 3 waiting I look at t…",
        "3 7 21 tool_calls 0.25 4 waiting → bash({\"co…",
        "fork: edited_history, instead of continuing turn 3",
        "7 18 25 tool_calls 4 greedy → bash({\"co…",
        "fork: new_conversation, in span research",
        "14 15 10 stop 4 waiting Still nothi…",
        "fork: compaction, instead of continuing turn 12",
        "├─ 17 10 15 abort 4 aborted The test su…",
        "└─ 19 16 20 stop -0.5 format 5 waiting total() lef…",
        "fork: template, instead of continuing turn 16",
        "18 0 0 refused over_length",
        "20 turns · 5 roots · 6 paths",
    ])  # fmt: skip
    wide = printed(url, "tree", "0193c0de0001", columns=140)
    assert '→ edit_file({"path": "shop/cart.py", "old": "cart.items[1:]"' in wide
    narrow = printed(url, "tree", "0193c0de0001", columns=60)
    assert "said" not in narrow
    assert len(narrow.splitlines()) == len(text.splitlines())


def test_samples_of_one_prompt_stand_side_by_side(store: Store, url: str) -> None:
    store.append(samples_of_one_prompt())
    text = printed(url, "tree", "0193c0de0002")
    in_order(text, [
        "turn new sampled ended version training said",
        "4 samples of one prompt",
        "├─ 0 175 7 stop 3 waiting 391",
        "├─ 1 same 32 stop 3 waiting Let me see: 17 times 20 is 34…",
        "│ │ 2 samples of one prompt",
        "│ ├─ 4 12 11 stop 3 waiting Yes, 391.",
        "│ └─ 5 same 8 stop 3 waiting Quite.",
        "├─ 2 same 7 stop 3 waiting 401",
        "└─ 3 same 7 stop 3 waiting 39",
        "6 turns · 4 roots · 5 paths",
    ])  # fmt: skip


def test_objects_for_scripts_are_nested_at_forks(store: Store, url: str) -> None:
    store.append(coding_agent())
    tree = printed_json(url, "tree", "0193c0de0001")
    chains = [[turn["turn"] for turn in root["turns"]] for root in tree["roots"]]
    assert chains == [[0, 1, 2, 3], list(range(4, 13)), [13, 14], [15, 16], [18]]
    assert [root["instead_of"] for root in tree["roots"]] == [None, 3, None, 12, 16]
    assert tree["roots"][1]["fork_reason"] == "edited_history"
    ends = [branch["turns"][0] for branch in tree["roots"][3]["branches"]]
    assert [end["turn"] for end in ends] == [17, 19]
    assert ends[1]["rewards"] == {"format": -0.5}
    assert ends[0]["not_trained"] == "aborted"
    assert sorted(turns_in(tree)) == list(range(20))


def test_rollouts_without_turns_or_tokens(store: Store, url: str) -> None:
    store.append([*spans_alone(), RolloutStarted(rollout_id="bare")])
    in_order(printed(url, "tree", "0193c0de0003"), ["0 0 0 stop no_tokens Which evening?"])
    assert "no turns" in printed(url, "tree", "bare")
    assert printed_json(url, "tree", "bare")["roots"] == []


def test_a_long_chain_is_no_deep_nest(store: Store, url: str) -> None:
    turn, turns = None, []
    for index in range(600):
        turn = make_turn(f"t{index}", "r", parent=turn, new=[1], sampled=[2])
        turns.append(turn)
    store.append(turns)
    assert len(printed(url, "tree", "r").splitlines()) == 600 + 5
    [root] = printed_json(url, "tree", "r")["roots"]
    assert len(root["turns"]) == 600


def test_forks_in_forks_in_forks(sqlite_url: str) -> None:
    """As a search makes them: every turn is tried twice, and one of the two goes on."""
    parent, turns = None, []
    for index in range(1000):
        leaf = make_turn(f"leaf{index}", "r", parent=parent, new=[1], sampled=[1])
        parent = make_turn(f"t{index}", "r", parent=parent, new=[2], sampled=[2])
        turns += [leaf, parent]
    with Store.open(sqlite_url) as store:
        store.append(turns)
    text = printed(sqlite_url, "tree", "r")
    assert "…  │" in text or "…     " in text, "only the nearest forks lead to a deep turn"
    assert len(text.splitlines()) == 2000 + 5
    done = run(sqlite_url, "tree", "r", "--json")
    assert done.exit_code == 3
    assert done.stderr.startswith("tracegrad: the tree forks too deep for JSON; `show --json`")


ODD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
ONE = st.fixed_dictionaries({
    "parent": st.integers(-3, 30),
    "new": st.lists(st.integers(1, 2), max_size=3),
    "sampled": st.lists(st.integers(1, 2), max_size=3),
    "reason": st.one_of(st.none(), st.sampled_from([*ForkReason, "of tomorrow"]), ODD),
    "untrainable": st.sampled_from([None, "greedy", "odd"]),
    "fate": st.sampled_from([None, TurnDisposition(3, None), TurnDisposition(None, "stale")]),
    "prompt": st.one_of(st.none(), ODD),
    "answered": st.one_of(st.none(), ODD),
    "reward": st.one_of(st.none(), st.floats(-1, 1)),
})  # fmt: skip


def detail_of(drawn: list[dict[str, Any]]) -> RolloutDetail:
    turns: list[Turn] = []
    for index, one in enumerate(drawn):
        parent = turns[one["parent"]] if 0 <= one["parent"] < index else None
        messages = [{"role": "user", "content": one["prompt"]}]
        if parent is not None and parent.request is not None:
            reply = {"role": "assistant", "content": one["answered"]}
            messages = [*parent.request["messages"], reply, *messages]
        reply = {"role": "assistant", "content": one["answered"]}
        turns.append(
            make_turn(
                f"t{index}",
                parent=parent,
                new=one["new"],
                sampled=one["sampled"],
                fork_reason=one["reason"],
                untrainable=one["untrainable"],
                request=None if one["prompt"] is None else {"model": "m", "messages": messages},
                response=None if one["answered"] is None else {"choices": [{"message": reply}]},
            )
        )
    row = RolloutSummary(
        rollout_id="r", task_id=None, agent=None, tags={}, outcome=None, error=None, opened_at=0.0,
        finished_at=None, reward=None, turns=len(turns), completion_tokens=0, trained_turns=0,
        state="open", consumed_step=None,
    )  # fmt: skip
    return RolloutDetail(
        summary=row,
        task=None,
        turns=turns,
        rewards=[
            Reward(rollout_id="r", value=one["reward"], turn=index - len(turns) * (index % 2))
            for index, one in enumerate(drawn)
            if one["reward"] is not None
        ],
        spans=[],
        dispositions={
            f"t{i}": one["fate"] for i, one in enumerate(drawn) if one["fate"] is not None
        },
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ONE, max_size=25), st.one_of(st.none(), st.integers(40, 160)))
def test_any_tree_is_drawn_with_every_turn_once(
    drawn: list[dict[str, Any]], width: int | None
) -> None:
    detail = detail_of(drawn)
    every = list(range(len(drawn)))
    shown = place_turns(group_samples(turn_chains(detail.turns), detail.turns))
    assert sorted(place.turn for place in shown) == every
    tree, story, why = (
        list(render_tree(detail, width)),
        list(render_rollout(detail, width, tokens=True, full=False)),
        list(render_explanation(detail, width)),
    )
    lines = [line.plain for line in tree]
    if every:
        table = lines[3:-2]
        numbers = [re.match(r"[│├└─… ]*(\d+)(?: |$)", line) for line in table]
        drawn_turns = [int(n[1]) for n, line in zip(numbers, table, strict=True)
                       if n and "samples of one prompt" not in line]  # fmt: skip
        assert sorted(drawn_turns) == every
    assert sorted(turns_in(tree_json(detail))) == every
    titles = [re.match(r"turn (\d+)(?:  | ─|$)", line.plain) for line in story]
    assert [int(title[1]) for title in titles if title] == every
    assert explanation_json(detail)["tokens"]["turns"] == len(every)
    for line in (*tree, *story, *why):
        assert all(sign.isprintable() for sign in line.plain)
        for style in (line.style, *(span.style for span in line.spans)):
            Style.parse(str(style))


@settings(deadline=None)
@given(st.lists(ONE, max_size=25), st.integers(40, 160))
def test_no_line_is_wider_than_the_terminal(drawn: list[dict[str, Any]], width: int) -> None:
    detail = detail_of(drawn)
    for lines in (render_tree(detail, width), render_rollout(detail, width, tokens=True, full=True),
                  render_explanation(detail, width)):  # fmt: skip
        assert max((line.cell_len for line in lines), default=0) <= width
