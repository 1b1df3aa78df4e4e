"""`tracegrad rollouts show`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.cli.run_rollouts import in_order, printed, printed_json, run
from support.cli.sample_rollouts import (
    Talk,
    assistant,
    call,
    coding_agent,
    result,
    spans_alone,
    user,
)
from support.store.events import make_turn, rollout_events
from tracegrad.events import (
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    Turn,
)
from tracegrad.store import Ledger, StepRecord, Store, lease_by_rollout

SYSTEM = {"role": "system", "content": "Answer with a number."}
USER = {"role": "user", "content": "How many red mugs? [bold]"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"item": "mug"}'},
}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "stock: 4\x1b[2J"}


@pytest.fixture
def story(store: Store) -> Store:
    """A rollout with a tool call, a fork, spans, rewards; trained but for its fork."""
    ask: dict[str, Any] = {"messages": [SYSTEM, USER]}
    called = {
        "choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}]
    }
    t0 = make_turn("t0", "abcdef123456", request=ask, response=called, finish_reason="tool_calls",
                   parent_span_id="a" * 16, version=3)  # fmt: skip
    echo = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    again = {"messages": [SYSTEM, USER, echo, TOOL]}
    answer = {"choices": [{"message": {"content": "There are 4.", "reasoning": "4 in stock"}}]}
    t1 = make_turn("t1", "abcdef123456", parent=t0, request=again, response=answer, version=4)
    edited = {"messages": [SYSTEM, {"role": "user", "content": "Shorter!"}]}
    t2 = make_turn("t2", "abcdef123456", request=edited, fork_reason="edited_history")
    rollout = "abcdef123456"
    trace = "0" * 32
    store.append(
        [
            RolloutStarted(rollout_id=rollout, task_id="mugs", agent="shop", opened_at=10.0,
                          tags={"split": "train"}, task={"question": "red mugs"}),
            t0, t1, t2,
            Reward(rollout_id=rollout, value=0.0, created_at=11.0),
            Reward(
                rollout_id=rollout,
                value=1.0,
                created_at=2.0,
                source="admin_key",
                label="a person",
            ),
            Reward(rollout_id=rollout, value=0.5, name="format", turn=-1),
            Span(trace_id=trace, span_id="b" * 16, rollout_id=rollout, name="solve",
                      start_ns=10**9, end_ns=5 * 10**9),
            Span(trace_id=trace, span_id="a" * 16, parent_span_id="b" * 16, name="look up",
                      rollout_id=rollout, start_ns=2 * 10**9, end_ns=3 * 10**9, status="error"),
            RolloutFinished(rollout_id=rollout, finished_at=13.0),
        ]
    )  # fmt: skip
    Ledger(store).commit_step(
        StepRecord(step=5, version=6),
        trained=["t0", "t1"],
        skipped={"t2": "stale"},
        rollouts=[rollout],
    )
    return store


def turn_of(text: str, index: int) -> str:
    """What `show` says of one turn."""
    return re.split(r"\n\n(?=turn \d|spans )", text)[index + 1]


def test_it_tells_the_whole_story(story: Store, url: str) -> None:
    text = printed(url, "show", "abc")
    in_order(
        text,
        [
            "rollout abcdef123456",
            "task mugs",
            'asked {"question":"red mugs"}',
            "agent shop",
            "tags split=train",
            "reward 0 from direct revised",
            "reward 1 from admin_key (a person)",
            "1 reward for turns, with them below",
            "turns 3 on 2 paths, 14 prompt + 6 tokens sampled, 1 fork",
            "training 2 of 3 turns trained in step 5, 1 not: 1 stale",
            "system Answer with a number.",
            "user How many red mugs? [bold]",
            'reply → lookup({"item": "mug"})',
            "… 3 messages as in turn 0",
            "tool ← lookup stock: 4\ufffd[2J",
            "reply 4 in stock",
            "There are 4.",
            "reward 0.5 format from direct",
            "… 1 message as in turn 1",
            "user Shorter!",
            "solve 4.0 s at +0 ms",
            "└─ look up 1.0 s at +1.0 s error turn 0",
        ],
    )
    text = " ".join(text.split())
    assert "outcome completed in 3.0 s" in text
    assert "turn 0 trained in step 5" in text
    assert "3 prompt + 2 tokens · version 3 · logprob -0.500 · tool_calls" in text
    assert "turn 2 starts afresh not trained: stale" in text
    assert "fork edited_history: An earlier message was changed" in text
    assert "untrained stale: Its policy version lagged too far behind" in text


def test_a_coding_agents_rollout_reads_well(store: Store, url: str) -> None:
    store.append(coding_agent())
    text = printed(url, "show", "0193c0de0001")
    assert [len(turn_of(text, index)) > 0 for index in range(20)] == [True] * 20
    first, read = turn_of(text, 0), turn_of(text, 2)
    in_order(first, ["tools bash, read_file, edit_file", "Answer in one sentence.",
                     "reply I look at the tests first.",
                     '→ bash({"command": "pytest -x -q"})'])  # fmt: skip
    assert "more characters)" in first
    in_order(read, ["… 5 messages as in turn 1", "tool ← read_file", "def total(cart):"])
    assert "tools" not in read, "they are the same as before"
    assert "reward     0.25  from admin_key" in turn_of(text, 3)
    # Of a fork only what changed is shown again.
    forked = turn_of(text, 4)
    in_order(forked, ["fork edited_history, instead of continuing turn 3: An earlier message",
                      "… 1 message as in turn 3",
                      "<reminder>You have 30 minutes left.</reminder>",
                      "… 7 messages as in turn 3", "tool ← bash 9 passed in 0.31s"])  # fmt: skip
    assert "[image: image/png, 12.0 kB]" in turn_of(text, 16)
    assert turn_of(text, 17).startswith("turn 17  not trainable: aborted ─")
    assert "+56.8 s · no tokens · refused" in turn_of(text, 18)
    assert "reward     -0.5 format  from admin_key" in turn_of(text, 19)
    assert turn_of(text, 19).startswith("turn 19  continues turn 16")
    in_order(text, ["├─ main loop 50.0 s at +500 ms turns 0-3, 5-12",
                    '│ → {"command":"pytest -x -q"}', "│ ← F......",
                    "└─ research 6.0 s at +44.0 s turns 13-14",
                    "└─ web search 2.0 s at +45.0 s error: no route to host"])  # fmt: skip


def test_one_turn_whole(store: Store, url: str) -> None:
    store.append(coding_agent())
    text = printed(url, "show", "0193c0de0001", "--turn", "2")
    in_order(text, [
        "id 0193c0de000100000000000000000000.2",
        "model qwen3-4b",
        "sampling temperature=1.0 top_p=1.0 top_k=0 max_tokens=2048",
        "versions 50 tokens by 3",
        "span aaaaaaaaaaaaaaaa main loop",
        "tools bash, read_file, edit_file",
        "system You are a coding agent in a repository.",
        "user The test suite fails since yesterday. Find out why and mend it.",
        "assistant I look at the tests first.",
        "tool ← bash",
        "reply The first item is left out.",
    ])  # fmt: skip
    assert text.count("Never touch files outside it.") == 9
    assert "more characters" not in text
    assert "sampled" not in text
    assert "sampled    " in printed(url, "show", "0193c0de0001", "--turn", "2", "--tokens")
    last = printed(url, "show", "0193c0de0001", "--turn", "-1")
    assert "Sum up in a sentence." in last
    assert "turn 19 " in last


@pytest.mark.parametrize("turn", ["20", "-21"])
def test_a_turn_that_is_not_there(store: Store, url: str, turn: str) -> None:
    store.append(coding_agent())
    done = run(url, "show", "0193c0de0001", "--turn", turn)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"tracegrad: no turn {turn}: rollout 0193c0de0001")
    assert done.stderr.endswith("has 20 turns, 0 to 19\n")


def test_tokens_when_asked(story: Store, url: str) -> None:
    text = printed(url, "show", "abc", "--tokens")
    assert "sampled" in text.partition("turn 0")[2]
    assert "4:-0.50 5:-0.50" in text
    assert "4:-0.50" not in printed(url, "show", "abc")


def test_long_messages_are_shortened_unless_full(store: Store, url: str) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 2000 + "END"}]}
    store.append([make_turn("t", "r", request=long)])
    assert "more characters)" in printed(url, "show", "r")
    assert "END" not in printed(url, "show", "r")
    assert "END" in printed(url, "show", "r", "--full")


def test_a_pipe_gets_every_line_whole(store: Store, url: str) -> None:
    long = {"messages": [user("needle " + "hay " * 60 + "end\n\tindented " + "x" * 300)]}
    store.append([make_turn("t", "r", request=long)])
    lines = printed(url, "show", "r", columns=None).splitlines()
    assert any(line.endswith("needle " + "hay " * 60 + "end") for line in lines)
    assert any(line.endswith("    indented " + "x" * 300) for line in lines)


def test_objects_for_scripts(story: Store, url: str) -> None:
    shown = printed_json(url, "show", "abc", "--tokens")
    turn = shown["turns"][1]
    assert (turn["turn"], turn["parent_turn_id"]) == (1, "t0")
    assert turn["prompt_token_ids"] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert turn["completion_logprobs"] == [-0.5, -0.5]
    assert turn["policy_versions"] == [[4, 2]]
    assert (turn["trained_step"], turn["skip_reason"]) == (5, None)
    assert [reward["value"] for reward in shown["rewards"]] == [0.0, 1.0, 0.5]
    assert [reward["value"] for reward in shown["turns"][2]["rewards"]] == [0.5]
    assert shown["outcome"] == "completed"
    assert len(shown["spans"]) == 2
    assert "prompt_token_ids" not in printed_json(url, "show", "abc")["turns"][0]
    one = printed_json(url, "show", "abc", "--turn", "1", "--tokens")
    assert one == turn


def test_spans_of_an_agent_that_never_used_the_proxy(store: Store, url: str) -> None:
    store.append(spans_alone())
    text = printed(url, "show", "0193c0de0003")
    in_order(text, ["task untitled", "turns 1, without tokens", "user Book a table for two.",
                    "reply Which evening?", "look up tables 10 ms at +0 ms TOOL",
                    '→ {"people":2}', "← table 4, table 9"])  # fmt: skip
    assert "chat  1.0 s at +0 ms  turn 0  chat · gpt-5-mini" in text
    store.append(
        [
            Span(trace_id="3" * 32, span_id="1" * 16, rollout_id="no-turns", name="chat",
                      start_ns=0, end_ns=1, attributes={"llm.token_count.prompt": 14,
                                                        "llm.token_count.completion": 1}),
        ]
    )  # fmt: skip
    text = printed(url, "show", "no-turns")
    assert "none, 1 span" in text
    assert "chat  0 ms at +0 ms  14 prompt + 1 token" in text


def test_spans_that_are_each_others_parents_are_shown_all_the_same(store: Store, url: str) -> None:
    def span(own: str, parent: str) -> Span:
        return Span(trace_id="1" * 32, span_id=own * 16, parent_span_id=parent * 16,
                         rollout_id="r", name=f"span {own}", start_ns=1, end_ns=2)  # fmt: skip

    store.append([span("a", "b"), span("b", "a"), span("c", "c")])
    text = printed(url, "show", "r")
    assert [text.count(f"span {own}") for own in "abc"] == [1, 1, 1]


def test_an_open_rollout_without_texts(store: Store, url: str) -> None:
    store.append([make_turn("t", "r", request=None, response=None)])
    text = printed(url, "show", "r")
    assert "open since" in text
    assert "untitled" in text
    assert "training open: Its rollout has not ended." in " ".join(text.split())
    assert "not trained" not in text, "once is enough"
    assert "not trained yet: open" in printed(url, "show", "r", "--turn", "0")
    assert "the request was not kept" in printed(url, "show", "r", "--turn", "0")


def test_a_reward_that_came_after_training_says_so(store: Store, url: str) -> None:
    store.append(rollout_events("r", reward=0.25))
    ledger = Ledger(store)
    groups = ledger.lease(groups=1, group_size=1, owner="o", ttl_s=600)
    turns = [turn.turn_id for turn in groups[0].rollouts[0].turns]
    store.append([Reward(rollout_id="r", value=0.5), Reward(rollout_id="r", value=1.0, turn=0)])
    in_order(printed(url, "show", "r"), [
        "reward 0.25 from direct training took this one",
        "reward 0.5 from direct came while it was being trained: not used",
    ])  # fmt: skip
    step = StepRecord(step=3, version=3, checkpoint="c")
    leases = lease_by_rollout(groups)
    ledger.commit_step(step, trained=turns, skipped={}, rollouts=["r"], leases=leases)
    in_order(printed(url, "show", "r"), [
        "reward 0.25 from direct training took this one",
        "reward 0.5 from direct came after step 3: not used",
        "reward 1 from direct came after step 3: not used",
    ])  # fmt: skip
    in_order(printed(url, "explain", "r"), [
        "2 of 2 turns trained in step 3",
        "2 rewards came when training had taken the others: not used",
    ])  # fmt: skip
    found = printed_json(url, "show", "r")
    assert [each["after_training"] for each in found["rewards"]] == [False, True, True]


def test_a_reward_is_revised_by_another_name_of_its_turn(store: Store, url: str) -> None:
    store.append(
        [
            make_turn("t0", "r"),
            make_turn("t1", "r"),
            Reward(rollout_id="r", value=0.125, turn=-1, created_at=1.0),
            Reward(rollout_id="r", value=0.25, turn=1, created_at=0.0),
            Reward(rollout_id="r", value=0.5, turn=7, created_at=3.0),
            RolloutFinished(rollout_id="r", outcome=Outcome.AGENT_ERROR, error="no\x1b[1mgood"),
        ]
    )
    in_order(
        printed(url, "show", "r"),
        [
            "error no\ufffd[1mgood",
            "reward 0.5 from direct for turn 7, which is not there",
            "2 rewards for turns, with them below",
            "reward 0.125 from direct revised",
            "reward 0.25 from direct",
        ],
    )


def test_a_conversation_that_the_client_only_named(store: Store, url: str) -> None:
    """Responses with previous_response_id: the request holds what is new and nothing else."""

    def turn(turn_id: str, text: str, **more: Any) -> Turn:
        reply = {"choices": [{"message": assistant(f"re: {text}")}]}
        return make_turn(turn_id, "r", dialect="responses", response=reply, **more)

    first = turn("a" * 32, "one", request={"model": "m", "input": "one"})
    named = {"model": "m", "input": "two", "previous_response_id": "resp_" + "a" * 32}
    second = turn("b" * 32, "two", parent=first, request=named)
    store.append([first, second])
    text = printed(url, "show", "r")
    in_order(turn_of(text, 1), ["… 2 messages as in turn 0", "user two", "reply re: two"])
    in_order(printed(url, "show", "r", "--turn", "1"),
             ["user one", "assistant re: one", "user two", "reply re: two"])  # fmt: skip


def test_a_reply_that_came_back_in_another_spelling_is_not_shown_again(
    store: Store, url: str
) -> None:
    talk = Talk("r")
    first = talk.turn([user("go")], assistant("Well.", call(1, "bash", cmd="ls")))
    spelled = assistant("Well. ", {**call(1, "bash"), "function": {"name": "bash", "arguments":
                                                                    '{ "cmd":"ls" }'}})  # fmt: skip
    talk._messages[first.turn_id] = [user("go"), spelled]
    talk.turn([user("go"), spelled, result(1, "a b c")], assistant("Three."), parent=first)
    store.append(talk.turns)
    second = turn_of(printed(url, "show", "r"), 1)
    in_order(second, ["… 2 messages as in turn 0", "tool ← bash a b c", "reply Three."])
    assert "Well." not in second


def test_postgresql_shows_the_same(url: str, postgres_url: str) -> None:
    rollout = "0193c0de0001"
    shown = []
    for each in (url, postgres_url):
        with Store.open(each) as store:
            store.append(coding_agent())
        shown.append([printed(each, command, rollout) for command in ("show", "tree", "explain")])
    assert shown[0] == shown[1]


def test_what_a_reason_means_is_said_once(store: Store, url: str) -> None:
    store.append([RolloutStarted(rollout_id="r", task_id="t")])
    for n in range(4):
        store.append(
            [make_turn(f"t{n}", fork_reason="edited_history" if n else None, untrainable="greedy")]
        )
    text = printed(url, "show", "r", columns=160)
    assert len(re.findall("untrained +greedy: ", text)) == 1
    assert text.count("not trainable: greedy") == 4, "each turn's title names it"
    assert text.count("fork       edited_history") == 3
    assert len(re.findall("An earlier message was changed", text)) == 1
    alone = printed(url, "show", "r", "--turn", "3", columns=160)
    assert re.search("untrained +greedy: ", alone)
    assert "An earlier message was changed" in alone


def heads(text: str) -> list[str]:
    return [line.rstrip(" ─") for line in text.splitlines() if line.startswith("turn ")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "training waiting: It is ready, and waits until"),
        ({"task": None}, "training no_task: It is ready, but its rollout has no task"),
        (
            {"reward": None},
            "training no_reward: Its rollout ended and has no reward, or it was taken back.",
        ),
        ({"outcome": Outcome.ENV_ERROR}, "training env_error: The environment failed"),
        ({"turns": 0}, "training no_turns: Its rollout ended without any recorded call"),
    ],
)
def test_a_reason_of_the_whole_rollout_is_said_once(
    store: Store, url: str, changes: dict[str, Any], said: str
) -> None:
    facts = {"task": "t", "turns": 3} | changes
    store.append(rollout_events("r", **facts))
    for columns in (80, 120):
        text = printed(url, "show", "r", columns=columns)
        assert said in " ".join(text.split())
        assert heads(text) == [f"turn {n}" for n in range(facts["turns"])]


def test_beside_the_reason_of_the_rollout_a_turn_has_its_own(store: Store, url: str) -> None:
    store.append(rollout_events("r", turns=3))
    first, *others = [turn.turn_id for turn in store.rollout_turns("r")]
    skipped = {first: "greedy", **dict.fromkeys(others, "equal_reward")}
    Ledger(store).commit_skipped(skipped, ["r"])
    text = printed(url, "show", "r")
    in_order(text, [
        "training skipped: 2 equal_reward, 1 greedy",
        "equal_reward: All rollouts of its group had the same reward: nothing",
    ])  # fmt: skip
    assert heads(text) == ["turn 0  not trained: greedy", "turn 1", "turn 2"]
    assert text.count("equal_reward") == 2
