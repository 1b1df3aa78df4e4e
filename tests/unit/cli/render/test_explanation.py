"""`tracegrad rollouts explain ID`."""

from __future__ import annotations

from typing import Any

import pytest

from support.cli.run_rollouts import in_order, printed, printed_json, run
from support.cli.sample_rollouts import (
    SYSTEM,
    TOOLS,
    Talk,
    assistant,
    call,
    coding_agent,
    result,
    samples_of_one_prompt,
    user,
)
from support.store.events import make_turn, rollout_events
from tracegrad.events import Reward
from tracegrad.store import Ledger, Scoring, StepRecord, Store


def test_a_fork_is_shown_with_its_evidence(store: Store, url: str) -> None:
    store.append(coding_agent())
    text = printed(url, "explain", "0193c0de0001")
    in_order(text, [
        "turn 4 edited_history " + "─" * 57,
        "why An earlier message was changed, dropped or inserted: no recorded",
        "fix Let the agent only append to its messages: no clock, reminder or",
        "instead of continuing turn 3",
        "message number 1 is the first that differs:",
        "- turn 3 user: …day. Find out why and mend it.",
        "+ turn 4 user: …day. Find out why and mend it. <reminder>You have 30 minutes",
        "tokens 187 tokens shared with turn 3; they part in its prompt:",
        "- turn 3 … 44737 22277 45620 32578 [16714] 25204 17158 16714 38865 17158",
        "+ turn 4 … 44737 22277 45620 32578 [2723] 16714 16592 17158 14790 22277",
        "cost 336 of its 523 prompt tokens are new; stored a second time: 187",
    ])  # fmt: skip
    [edited, sub_agent, compacted, refused] = printed_json(url, "explain", "0193c0de0001")["forks"]
    assert (edited["turn"], edited["instead_of"], edited["parent"]) == (4, 3, None)
    assert (edited["prompt"], edited["shared"], edited["again"]) == (523, 187, 187)
    assert edited["tokens"]["before"][4] == 16714
    assert edited["tokens"]["now"][4] == 2723
    assert edited["message"]["position"] == 1
    assert edited["meaning"].startswith("An earlier message was changed")
    assert sub_agent["instead_of"] is None
    assert compacted["instead_of"] == 12
    assert refused["tokens"] is None


def test_every_turn_that_is_not_trained_has_its_reason_and_a_fix(store: Store, url: str) -> None:
    store.append(coding_agent())
    turns = store.rollout_turns("0193c0de0001" + "0" * 20)
    skipped = {turn.turn_id: turn.untrainable for turn in turns if turn.untrainable}
    skipped[turns[3].turn_id] = skipped[turns[5].turn_id] = "over_long"
    Ledger(store).commit_step(
        StepRecord(step=12, version=6),
        trained=[turn.turn_id for turn in turns if turn.turn_id not in skipped],
        skipped=skipped,
        rollouts=[turns[0].rollout_id],
    )
    text = printed(url, "explain", "0193c0de0001")
    in_order(text, [
        "14 of 20 turns trained in step 12",
        "over_long 2 turns: 3, 5",
        "It, its path or its preference pair is longer than a batch has room for.",
        "→ Raise batches.max_row_tokens (and tokens_per_micro_batch), or shorten the",
        "greedy 1 turn: 7",
        "media 1 turn: 16",
        "aborted 1 turn: 17",
        "over_length 1 turn: 18",
        "8,836 sent as prompts of 20 turns",
        "457 sampled",
        "350 of them a second time, because of forks",
    ])  # fmt: skip
    explained = printed_json(url, "explain", "0193c0de0001")
    missing = {turn for each in explained["not_trained"] for turn in each["turns"]}
    assert missing == {3, 5, 7, 16, 17, 18}
    assert all(each["meaning"] and each["final"] for each in explained["not_trained"])
    tokens = explained["tokens"]
    assert (tokens["turns"], tokens["roots"], tokens["paths"]) == (20, 5, 6)
    # Every token once, but for those that a fork brought in a second time.
    deltas = {turn.turn_id: turn for turn in turns}
    stored = sum(
        len(turn.prompt_token_ids) + len(turn.completion_token_ids)
        - (len(deltas[turn.parent_id].prompt_token_ids)
           + len(deltas[turn.parent_id].completion_token_ids) if turn.parent_id else 0)
        for turn in turns
    )  # fmt: skip
    assert tokens["stored"] == stored
    assert tokens["again"] == sum(fork["again"] for fork in explained["forks"])


def test_a_turn_that_waits_names_what_it_waits_for(store: Store, url: str) -> None:
    store.append(rollout_events("r", reward=None))
    in_order(printed(url, "explain", "r"), [
        "no forks: every turn continues another, or samples the same prompt",
        "0 of 2 turns trained",
        "no_reward 2 turns: 0-1",
        "Its rollout ended and has no reward, or it was taken back.",
        "→ Give one: `reward(x)` in the agent, `tracegrad score`, or POST",
    ])  # fmt: skip


def test_a_reward_of_another_name_is_named_with_what_is_missing(store: Store, url: str) -> None:
    store.append(rollout_events("r", reward=None))
    store.append([
        Reward(rollout_id="r", value=0.25, name="score"),
        Reward(rollout_id="r", value=0.5, name="score"),
        Reward(rollout_id="r", value=1.0, turn=1),
    ])  # fmt: skip
    in_order(printed(url, "explain", "r"), [
        "0 of 2 turns trained",
        "named_reward 2 turns: 0-1",
        "Its rollout ended, and has only rewards of other names, or of turns:",
        "→ Give that one too: `reward(x)` without a name and a turn in the agent, or",
        "given so far: 'score' (0.5), 'reward' of turn 1 (1)",
    ])  # fmt: skip
    [found] = printed_json(url, "explain", "r")["not_trained"]
    assert (found["reason"], found["final"]) == ("named_reward", False)
    [counted] = printed_json(url, "explain")["not_trained"]
    assert (counted["reason"], counted["turns"]) == ("named_reward", 2)
    store.append([Reward(rollout_id="r", value=1.0)])
    assert printed_json(url, "explain", "r")["not_trained"][0]["reason"] == "waiting"


def failed_scoring(rollout_id: str, **more: Any) -> Scoring:
    given: dict[str, Any] = {"scorer": "resolved", "digest": "d", "turns": 2, "round": 0}
    error = "resolved timed out after 30 s"
    given |= {"state": "failed", "error": error, "attempts": 3}
    return Scoring(rollout_id=rollout_id, **{**given, **more})


def test_a_scoring_that_failed_says_why_until_it_is_made_up_for(store: Store, url: str) -> None:
    store.append(rollout_events("r", reward=1.0))
    assert store.record_scorings([failed_scoring("r")], [])
    in_order(printed(url, "explain", "r"), [
        "0 of 2 turns trained",
        "not scored: resolved timed out after 30 s (3 attempts)",
        "scoring_failed 2 turns: 0-1",
        "→ Look at the error; then `trainer score ID` tries again. A part that the",
        "given so far: 'reward' (1)",
    ])  # fmt: skip
    found = printed_json(url, "explain", "r")
    assert found["not_trained"][0]["reason"] == "scoring_failed"
    assert [each["scorer"] for each in found["failed_scorings"]] == ["resolved"]
    [row] = printed_json(url, "ls", "--state", "scoring_failed")
    assert (row["rollout_id"], row["state"]) == ("r", "scoring_failed")
    assert store.record_scorings([failed_scoring("r", round=1, state="scored", error=None)], [])
    assert "not scored" not in printed(url, "explain", "r")
    assert printed_json(url, "ls", "--state", "scoring_failed") == []


FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
# As the agents ask without being told otherwise: the dialect, the request, what is said of it.
BY_DEFAULT = {
    "openai-agents": ("responses", {"input": "hi", "tools": [
        {"type": "function", "strict": True, **FUNCTION}]}, "strict tools"),
    "CrewAI": ("chat", {"messages": [user("hi")], "tools": [STRICT]}, "strict tools"),
    "pydantic-ai": ("chat", {"messages": [user("hi")], "tools": [STRICT]}, "strict tools"),
    "aider": ("chat", {"messages": [user("hi")], "temperature": 0}, "temperature = 0"),
    "Gemini CLI": ("gemini", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "generationConfig": {"topP": 0.95, "topK": 64}}, "top_p = 0.95, top_k = 64"),
}  # fmt: skip
WHY = {"strict tools": "constrained", "temperature = 0": "greedy"}


@pytest.mark.parametrize("agent", BY_DEFAULT)
def test_what_an_agent_asked_for_is_named_with_the_line_that_mends_it(
    store: Store, url: str, agent: str
) -> None:
    dialect, request, fields = BY_DEFAULT[agent]
    reason = WHY.get(fields, "sampling_truncated")
    store.append([make_turn("t", request=request, dialect=dialect, model="m", untrainable=reason)])
    in_order(printed(url, "explain", "r"), [
        f"{reason} 1 turn: 0",
        f"The agent asked for: {fields}",
        "→ Overrule it: start the proxy with TRACEGRAD_PROXY_SAMPLING=free.",
    ])  # fmt: skip
    [found] = printed_json(url, "explain", "r")["not_trained"]
    assert found["asked_for"] == fields.split(", ")
    assert "TRACEGRAD_PROXY_SAMPLING=free" in found["fix"]


def test_a_setting_that_the_proxy_does_not_overrule_must_be_left_out(
    store: Store, url: str
) -> None:
    look = {"type": "function", "function": {"name": "look"}}
    forced = {"messages": [user("hi")], "tools": [STRICT], "tool_choice": look}
    store.append([
        make_turn("forced", request=forced, dialect="chat", untrainable="constrained"),
        make_turn("cold", request={**forced, "temperature": 0}, dialect="chat",
                  untrainable="aborted"),
    ])  # fmt: skip
    constrained, aborted = printed_json(url, "explain", "r")["not_trained"]
    assert constrained["asked_for"] == ["tool_choice", "strict tools"]
    assert constrained["fix"] == (
        "Leave tool_choice out of the agent's requests:"
        " TRACEGRAD_PROXY_SAMPLING=free does not overrule that. Start the proxy with that setting"
        " against strict tools, or change it in the requests too."
    )
    assert aborted["asked_for"] == [], "no setting gave this reason"


def test_a_rollout_without_a_task_says_so(store: Store, url: str) -> None:
    store.append([*rollout_events("r", task=None), *rollout_events("other")])
    in_order(printed(url, "explain", "r"), [
        "no_task 2 turns: 0-1",
        "It is ready, but its rollout has no task: training that compares the",
        "→ Name one where a rollout begins: @trace(task=...), rollout(\"task\"), or",
        "`rollout_started` with `task_id` to POST /api/events. Or train without",
    ])  # fmt: skip
    assert [each["reason"] for each in printed_json(url, "explain", "other")["not_trained"]] == [
        "waiting"
    ]
    counts = printed_json(url, "explain")["not_trained"]
    assert [(each["reason"], each["turns"], each["final"]) for each in counts] == [
        ("no_task", 2, False),
        ("waiting", 2, False),
    ]


def test_samples_of_one_prompt_are_no_forks(store: Store, url: str) -> None:
    store.append(samples_of_one_prompt())
    assert printed_json(url, "explain", "0193c0de0002")["forks"] == []


def test_other_tools_are_named(store: Store, url: str) -> None:
    talk = Talk("r")
    first = talk.turn([SYSTEM, user("go")], assistant("done"))
    other = [TOOLS[0], {**TOOLS[1], "function": {"name": "read_file", "parameters": {}}},
             {"type": "function", "function": {"name": "search", "parameters": {}}}]  # fmt: skip
    talk.turn(talk.then(first, user("more")), assistant("ok"), tools=other,
              fork_reason="tools_changed")  # fmt: skip
    store.append(talk.turns)
    in_order(printed(url, "explain", "r"), [
        "instead of continuing turn 0",
        "messages all of turn 0's are there, with its reply",
        "tools gone: edit_file",
        "tools new: search",
        "tools changed: read_file",
    ])  # fmt: skip
    assert printed_json(url, "explain", "r")["forks"][0]["frame"] == {
        "gone": ["edit_file"], "new": ["search"], "changed": ["read_file"], "arguments": [],
    }  # fmt: skip


def test_a_reply_that_came_back_changed_is_held_against_what_was_recorded(
    store: Store, url: str
) -> None:
    talk = Talk("r")
    first = talk.turn([user("go")], assistant(None, call(1, "bash", command="ls")))
    second = talk.turn(talk.then(first, result(1, "a b")), assistant("Two."), parent=first)
    changed = talk.then(second, user("more"))
    changed[1] = assistant(None, call(1, "bash", command="ls -la"))
    talk.turn(changed, assistant("ok"), fork_reason="edited_calls")
    store.append(talk.turns)
    in_order(printed(url, "explain", "r"), [
        "instead of continuing turn 1",
        "message number 1 is the first that differs:",
        '- turn 1 assistant: → bash({"command": "ls"})',
        '+ turn 2 assistant: → bash({"command": "ls -la"})',
    ])  # fmt: skip


def test_messages_that_look_the_same_are_never_said_to_differ(store: Store, url: str) -> None:
    """A store of before: agno had rewritten ids, and nothing was found by its text."""
    talk = Talk("r")
    first = talk.turn([user("go")], assistant(None, call(1, "bash", command="ls")))
    sent = talk.then(first, result(1, "a b"))
    sent[1] = assistant(None, {**call(1, "bash", command="ls"), "id": "call_00000000"})
    sent[2] = {**result(1, "a b"), "tool_call_id": "call_00000000"}
    talk.turn(sent, assistant("ok"), fork_reason="edited_history")
    store.append(talk.turns)
    text = printed(url, "explain", "r")
    assert "the first that differs" not in text
    in_order(text, [
        "messages all of turn 0's are there, with its reply",
        "ids the client gave tool calls other ids; that alone is no reason",
    ])  # fmt: skip
    assert printed_json(url, "explain", "r")["forks"][0]["ids_changed"] is True


def test_a_difference_in_white_space_is_named(store: Store, url: str) -> None:
    talk = Talk("r")
    first = talk.turn([SYSTEM, user("list  them")], assistant("Done."))
    sent = talk.then(first, user("more"))
    sent[1] = user("list them")
    talk.turn(sent, assistant("ok"), fork_reason="edited_history")
    store.append(talk.turns)
    in_order(printed(url, "explain", "r"), [
        "message number 1 is the first that differs:",
        "- turn 0 user: list them",
        "+ turn 1 user: list them",
        "differ in white space alone",
    ])  # fmt: skip


def test_a_difference_in_the_reply_names_how_far_it_got(store: Store, url: str) -> None:
    first = make_turn("a", "r", new=[1, 2, 3], sampled=[4, 5, 6])
    later = make_turn("b", "r", new=[1, 2, 3, 4, 9, 9], fork_reason="tokens")
    ended = make_turn("c", "r", new=[1, 2, 3, 4, 5], fork_reason="tokens")
    store.append([first, later, ended])
    text = printed(url, "explain", "r")
    in_order(text, [
        "turn 1 tokens " + "─" * 65,
        "instead of continuing turn 0",
        "tokens 4 tokens shared with turn 0; they part in its reply, after 1 token:",
        "- turn 0 1 2 3 4 [5] 6",
        "+ turn 1 1 2 3 4 [9] 9",
        "cost 2 of its 6 prompt tokens are new; stored a second time: 4 (they are",
        "tokens 5 tokens shared with turn 0; they part in its reply, after 2",
        "- turn 0 … 2 3 4 5 [6]",
        "+ turn 2 … 2 3 4 5 (ends)",
    ])  # fmt: skip


def test_reasoning_that_a_template_drops_is_shown(store: Store, url: str) -> None:
    talk = Talk("r")
    first = talk.turn([user("go")], assistant("Done.", reasoning="I think and think."))
    talk.turn(talk.then(first, user("more")), assistant("ok"), fork_reason="reasoning_dropped")
    store.append(talk.turns)
    in_order(printed(url, "explain", "r"), [
        "why The template leaves out the reasoning of the reply.",
        "messages all of turn 0's are there, with its reply",
        "reply (I think and think.) Done.",
    ])  # fmt: skip


def test_a_rollout_without_turns_is_named(store: Store, url: str) -> None:
    store.append(rollout_events("r", turns=0, outcome=None))
    assert printed(url, "explain", "r").splitlines()[1:] == ["no turns"]


def test_one_rollout_and_filters_contradict_each_other(store: Store, url: str) -> None:
    done = run(url, "explain", "r", "--task", "x", columns=200)
    assert done.exit_code == 2
    assert "name a rollout or filter them, not both" in done.stderr


@pytest.mark.parametrize("reason", ["of tomorrow", "a\x1b[2Jb"])
def test_a_reason_of_another_version_is_shown_as_it_is(store: Store, url: str, reason: str) -> None:
    store.append([make_turn("a", "r"), make_turn("b", "r", fork_reason=reason)])
    shown = reason.replace("\x1b", "\ufffd")
    assert shown in printed(url, "explain", "r")
    assert "This version of tracegrad has no words for it." in printed(url, "explain")
