"""Rollouts as real agents leave them, for looking at what the commands show of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from tracegrad.events import (
    OVER_LENGTH,
    Event,
    Json,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Span,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store import Ledger, StepRecord, Store

BEGAN = 1_763_640_000.0
TESTS: dict[str, Any] = {"source": "admin_key", "label": "tests"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("bash", "read_file", "edit_file")
]
SYSTEM = {
    "role": "system",
    "content": "You are a coding agent in a repository.\nUse the tools. Run the tests before you "
    "say that you are done.\nAnswer in one sentence.\n" + "Never touch files outside it.\n" * 9,
}
SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 2048}


def encode(text: str) -> list[int]:
    """A token for each word and each sign."""
    return [crc32(word.encode()) % 50_000 for word in re.findall(r"\w+|\W", text)]


def call(number: int, tool: str, **arguments: Any) -> Json:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int, text: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


class Talk:
    """Makes the turns of one rollout: its messages are its tokens."""

    def __init__(self, rollout_id: str, *, model: str = "qwen3-4b") -> None:
        self.rollout_id = rollout_id
        self.model = model
        self.turns: list[Turn] = []
        self._messages: dict[str, list[Json]] = {}

    def turn(
        self,
        messages: Sequence[Json],
        reply: Json | None,
        *,
        parent: Turn | None = None,
        tools: Sequence[Json] | None = TOOLS,
        version: int = 3,
        finish: str | None = None,
        **more: Any,
    ) -> Turn:
        """`messages` are all of the conversation; a `parent` has the tokens of the first ones."""
        known = (
            parent.prompt_token_ids + parent.completion_token_ids if parent else token_id_array()
        )
        known_messages = self._messages[parent.turn_id] if parent else []
        assert list(messages[: len(known_messages)]) == known_messages or parent is None
        prompt = known + token_id_array(
            encode("".join(map(_rendered, messages[len(known_messages) :])))
        )
        if reply is None:  # refused: the engine returned nothing
            prompt = token_id_array()
        sampled = token_id_array(encode(_rendered(reply)) if reply is not None else [])
        index = len(self.turns)
        if finish is None and reply is not None:
            finish = "tool_calls" if reply.get("tool_calls") else "stop"
        request = {"model": self.model, "messages": list(messages)}
        turn = Turn(
            turn_id=f"{self.rollout_id}.{index}",
            rollout_id=self.rollout_id,
            parent_id=parent.turn_id if parent else None,
            dialect="chat",
            model=self.model,
            prompt_token_ids=prompt,
            completion_token_ids=sampled,
            completion_logprobs=logprob_array([-0.1 - (i % 7) / 5 for i in range(len(sampled))]),
            policy_versions=((version, len(sampled)),) if sampled else (),
            sampling=SETTINGS,
            finish_reason=finish,
            request=request | ({"tools": list(tools)} if tools else {}),
            response={"model": self.model, "choices": [{"index": 0, "message": reply}]}
            if reply is not None
            else None,
            created_at=BEGAN + 3.1 * index + 1,
            **more,
        )
        self.turns.append(turn)
        echo = [{k: v for k, v in reply.items() if k != "reasoning"}] if reply else []
        self._messages[turn.turn_id] = [*messages, *echo]
        return turn

    def then(self, turn: Turn, *more: Json) -> list[Json]:
        """The conversation of a turn, its reply as clients send it back, and what follows."""
        return [*self._messages[turn.turn_id], *more]


def _rendered(message: Json) -> str:
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = "".join(part.get("text", "<image>") for part in text)
    calls = [each["function"] for each in message.get("tool_calls") or []]
    parts = [text, *(f"{each['name']}{each['arguments']}" for each in calls)]
    return f"<{message['role']}>{' '.join(parts)}</>"


def assistant(text: str | None = None, *calls: Json, reasoning: str | None = None) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    return message | ({"reasoning": reasoning} if reasoning else {})


def coding_agent(rollout_id: str = "0193c0de0001" + "0" * 20) -> list[Event]:
    """Twenty turns: tools, a reminder that changed in an earlier message, a compaction, a
    sub-agent, a picture, a reply that was cut off, a prompt that was refused, rewards."""
    talk = Talk(rollout_id)
    ask = user("The test suite fails since yesterday. Find out why and mend it.")
    turn = talk.turn(
        [SYSTEM, ask],
        assistant("I look at the tests first.", call(0, "bash", command="pytest -x -q")),
        parent_span_id="a" * 16,
    )
    outputs = ["F......\nE   AssertionError: assert 3 == 4\n" + "tests/test_cart.py:41\n" * 12,
               "def total(cart):\n\treturn sum(i.price for i in cart.items[1:])\n",
               "ok", "9 passed in 0.31s"]  # fmt: skip
    wishes = [call(1, "read_file", path="shop/cart.py"),
              call(2, "edit_file", path="shop/cart.py", old="cart.items[1:]", new="cart.items"),
              call(3, "bash", command="pytest -q")]  # fmt: skip
    for number, (output, wish) in enumerate(zip(outputs, wishes, strict=False)):
        turn = talk.turn(
            talk.then(turn, result(number, output)),
            assistant(None, wish, reasoning="The first item is left out." if number == 1 else None),
            parent=turn,
            parent_span_id="a" * 16,
            version=3 if number < 2 else 4,
        )
    events: list[Event] = []
    # The client's reminder in the user's message changed: the tree forks.
    changed = [*talk.then(turn, result(3, outputs[3]))]
    changed[1] = user(ask["content"] + "\n<reminder>You have 30 minutes left.</reminder>")
    turn = talk.turn(
        changed,
        assistant(None, call(4, "bash", command="git diff --stat")),
        fork_reason="edited_history",
        version=4,
    )
    for number in range(4, 12):
        turn = talk.turn(
            talk.then(turn, result(number, f"step {number}\x1b[31m red\x1b[0m\n")),
            assistant(None, call(number + 1, "bash", command=f"ls -la src/part{number}")),
            parent=turn,
            version=4,
            parent_span_id="a" * 16,
            **({"untrainable": "greedy"} if number == 6 else {}),
        )
    # A sub-agent in a span of its own.
    sub = talk.turn(
        [user("Search the web for 'cart total off by one'.")],
        assistant("Nobody has written of it."),
        tools=None,
        fork_reason="new_conversation",
        parent_span_id="c" * 16,
        version=4,
    )
    talk.turn(
        talk.then(sub, user("Look again, in English.")),
        assistant("Still nothing."),
        parent=sub,
        tools=None,
        parent_span_id="c" * 16,
        version=4,
    )
    # The conversation was summed up.
    summary = user("So far: total() left out the first item; mended; nine tests pass.")
    turn = talk.turn(
        [SYSTEM, summary, *talk.then(turn)[-1:], result(12, "ok")],
        assistant("Is the picture of the cart right too?"),
        fork_reason="compaction",
        version=4,
    )
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 16_000}}
    seen = talk.turn(
        talk.then(turn, user([{"type": "text", "text": "See for yourself."}, picture])),
        assistant("It shows 4 items, as it should."),
        parent=turn,
        untrainable="media",
        version=4,
    )
    cut = assistant("The test suite fails bec")
    talk.turn(talk.then(seen, user("Sum up.")), cut, parent=seen, finish="abort",
              untrainable="aborted", version=4)  # fmt: skip
    refused = talk.then(seen, user("Sum up. " + "log line\n" * 400))
    talk.turn(refused, None, finish="refused", untrainable=OVER_LENGTH, fork_reason="template")
    talk.turn(talk.then(seen, user("Sum up in a sentence.")),
              assistant("total() left out the first item."), parent=seen, version=5)  # fmt: skip
    events += talk.turns
    return [
        RolloutStarted(rollout_id=rollout_id, task_id="mend-the-cart", agent="codex",
                      tags={"split": "train", "seed": "7"}, opened_at=BEGAN,
                      task={"repository": "shop", "issue": 41}),
        *events,
        Reward(rollout_id=rollout_id, value=0.0, **TESTS, created_at=BEGAN + 70),
        Reward(rollout_id=rollout_id, value=1.0, **TESTS, created_at=BEGAN + 71),
        Reward(rollout_id=rollout_id, value=0.25, turn=3, source="admin_key",
                    created_at=BEGAN + 20),
        Reward(rollout_id=rollout_id, value=-0.5, name="format", turn=-1,
                    source="admin_key", created_at=BEGAN + 72),
        *spans(rollout_id),
        RolloutFinished(rollout_id=rollout_id, finished_at=BEGAN + 75),
    ]  # fmt: skip


def spans(rollout_id: str) -> list[Event]:
    def span(letter: str, name: str, start: float, took: float, **more: Any) -> Span:
        return Span(
            trace_id="1" * 32,
            span_id=letter * 16,
            rollout_id=rollout_id,
            name=name,
            start_ns=int((BEGAN + start) * 1e9),
            end_ns=int((BEGAN + start + took) * 1e9),
            **more,
        )

    shell = {"gen_ai.operation.name": "execute_tool",
             "gen_ai.tool.call.arguments": '{"command":"pytest -x -q"}',
             "gen_ai.tool.call.result": "F......\nE   AssertionError"}  # fmt: skip
    failed = {"otel.status_description": "no route to host"}
    return [
        span("b", "solve", 0, 74),
        span("a", "main loop", 0.5, 50, parent_span_id="b" * 16),
        span("d", "bash", 2, 1.5, parent_span_id="a" * 16, attributes=shell),
        span("c", "research", 44, 6, parent_span_id="b" * 16),
        span("e", "web search", 45, 2, parent_span_id="c" * 16, status="error",
             attributes=failed),
    ]  # fmt: skip


def samples_of_one_prompt(rollout_id: str = "0193c0de0002" + "0" * 20) -> list[Event]:
    """A best-of-four agent: four samples, one of them goes on."""
    talk = Talk(rollout_id)
    ask = [SYSTEM, user("What is 17 times 23?")]
    replies = ["391", "Let me see: 17 times 20 is 340, and 51 makes 391.", "401", "39"]
    four = [talk.turn(ask, assistant(each)) for each in replies]
    again = talk.then(four[1], user("Are you sure?"))
    for each in ("Yes, 391.", "Quite."):
        talk.turn(again, assistant(each), parent=four[1])
    return [
        RolloutStarted(rollout_id=rollout_id, task_id="multiply", opened_at=BEGAN + 100),
        *talk.turns,
        Reward(rollout_id=rollout_id, value=1.0),
        RolloutFinished(rollout_id=rollout_id, outcome=Outcome.BUDGET, finished_at=BEGAN + 130),
    ]


def spans_alone(rollout_id: str = "0193c0de0003" + "0" * 20) -> list[Event]:
    """An agent that never went through the proxy: OpenTelemetry, texts, no tokens."""
    talk = Talk(rollout_id, model="gpt-5-mini")
    ask = [user("Book a table for two.")]
    reply = assistant("Which evening?")
    turn = Turn(
        turn_id=f"{rollout_id}.0", rollout_id=rollout_id, dialect="otel", model=talk.model,
        prompt_token_ids=token_id_array(), completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(), policy_versions=(), untrainable="no_tokens",
        finish_reason="stop", request={"messages": ask}, response={"choices": [{"message": reply}]},
        parent_span_id="f" * 16, created_at=BEGAN + 201,
    )  # fmt: skip
    chat = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-5-mini",
            "gen_ai.usage.input_tokens": 14, "gen_ai.usage.output_tokens": 3}  # fmt: skip
    start = int((BEGAN + 200) * 1e9)
    return [
        RolloutStarted(rollout_id=rollout_id, agent="concierge", opened_at=BEGAN + 200),
        turn,
        Span(trace_id="2" * 32, span_id="f" * 16, rollout_id=rollout_id, name="chat",
                  start_ns=start, end_ns=start + 10**9, attributes=chat),
        Span(trace_id="2" * 32, span_id="9" * 16, rollout_id=rollout_id, name="look up tables",
                  start_ns=start, end_ns=start + 10**7,
                  attributes={"openinference.span.kind": "TOOL", "input.value": '{"people":2}',
                              "output.value": "table 4, table 9"}),
    ]  # fmt: skip


def four_alike() -> list[Event]:
    """A group whose rollouts all succeeded: nothing to learn from."""
    events: list[Event] = []
    for n in range(4):
        talk = Talk(f"0193c0de001{n}" + "0" * 20)
        sort = call(1, "bash", command="sort")
        first = talk.turn([user("Sort [3, 1, 2].")], assistant(None, sort))
        talk.turn(talk.then(first, result(1, "1 2 3")), assistant("[1, 2, 3]"), parent=first)
        at = BEGAN + 300 + n
        events += [
            RolloutStarted(rollout_id=talk.rollout_id, task_id="sort-a-list", agent="codex",
                          tags={"split": "train"}, opened_at=at),
            *talk.turns,
            Reward(rollout_id=talk.rollout_id, value=1.0, created_at=at),
            RolloutFinished(rollout_id=talk.rollout_id, finished_at=at + 9),
        ]  # fmt: skip
    return events


def a_failure(rollout_id: str = "0193c0de0020" + "0" * 20) -> list[Event]:
    talk = Talk(rollout_id)
    talk.turn([user("Mend the cart.")], assistant(None, call(1, "bash", command="pytest")))
    return [
        RolloutStarted(rollout_id=rollout_id, task_id="mend-the-cart", agent="codex",
                      tags={"split": "train"}, opened_at=BEGAN + 400),
        *talk.turns,
        RolloutFinished(rollout_id=rollout_id, outcome=Outcome.ENV_ERROR,
                        error="the container did not start", finished_at=BEGAN + 401),
    ]  # fmt: skip


def every_sample() -> list[Event]:
    return [*coding_agent(), *samples_of_one_prompt(), *spans_alone()]


def trained_samples(store: Store) -> None:
    """A store after two batches: one was trained, the other had nothing to learn from."""
    store.append([*every_sample(), *four_alike(), *a_failure()])
    ledger = Ledger(store)
    turns = store.rollout_turns("0193c0de0001" + "0" * 20)
    skipped = {turn.turn_id: turn.untrainable for turn in turns if turn.untrainable is not None}
    skipped[turns[3].turn_id] = "over_long"
    ledger.commit_step(
        StepRecord(step=12, version=6),
        trained=[turn.turn_id for turn in turns if turn.turn_id not in skipped],
        skipped=skipped,
        rollouts=[turns[0].rollout_id],
        advantages={turns[0].turn_id: -1.25, turns[1].turn_id: 0.0},
    )
    alike = [f"0193c0de001{n}" + "0" * 20 for n in range(4)]
    equal = {turn.turn_id: "equal_reward" for each in alike for turn in store.rollout_turns(each)}
    ledger.commit_skipped(equal, alike)
