"""A store whose tokens are what a chat template makes of its texts, for layouts to be held to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.trainer.char_model import char_tokenizer
from tracegrad.events import (
    Event,
    Json,
    Outcome,
    Reward,
    RolloutFinished,
    RolloutStarted,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store import Store

TOKENIZER = char_tokenizer()
NEWLINE = TOKENIZER.encode("\n")[0]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def answer(text: str) -> Json:
    return {"role": "assistant", "content": text}


def call(name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def prompt_of(messages: list[Json], tools: list[Json] | None = None) -> list[int]:
    rendered = TOKENIZER.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    return list(TOKENIZER.encode(rendered))


def sampled(reply: Json) -> list[int]:
    """What a model samples that says `reply`."""
    rendered = TOKENIZER.apply_chat_template([reply], tokenize=False)
    return list(TOKENIZER.encode(rendered.removeprefix("<|im_start|>assistant\n").rstrip("\n")))


def turn(
    turn_id: str,
    rollout_id: str,
    messages: list[Json],
    reply: Json,
    *,
    parent: Turn | None = None,
    tools: list[Json] | None = None,
    **more: Any,
) -> Turn:
    completion = sampled(reply)
    request: Json = {"model": "m", "messages": messages}
    if tools:
        request["tools"] = tools
    options: dict[str, Any] = {
        "finish_reason": "stop",
        "request": request,
        "response": {"choices": [{"index": 0, "message": reply}]},
        **more,
    }
    return Turn(
        turn_id=turn_id,
        rollout_id=rollout_id,
        parent_id=parent.turn_id if parent else None,
        dialect="chat",
        model="m",
        prompt_token_ids=token_id_array(prompt_of(messages, tools)),
        completion_token_ids=token_id_array(completion),
        completion_logprobs=logprob_array(-0.25 * (1 + i % 4) for i in range(len(completion))),
        policy_versions=((len(turn_id), len(completion)),),
        **options,
    )


def rollout(
    rollout_id: str,
    turns: list[Turn],
    *,
    task: str | None,
    reward: float | None,
    outcome: Outcome | None = Outcome.COMPLETED,
    about: Any = None,
) -> list[Event]:
    facts: list[Event] = [
        RolloutStarted(
            rollout_id=rollout_id, task_id=task, agent="shop", task=about, opened_at=1000.0
        ),
        *turns,
    ]
    if reward is not None:
        facts.append(Reward(rollout_id=rollout_id, value=reward, created_at=1001.0))
    if outcome is not None:
        facts.append(RolloutFinished(rollout_id=rollout_id, outcome=outcome, finished_at=1002.0))
    return facts


SUM = [{"role": "system", "content": "Short."}, user("2+2?")]
STOCK = [user("How many lamps?")]
CHAT = [user("Hello")]


def fill(store: Store) -> None:
    """Group "sum": four answers to one question, and rollouts that nobody learns from. Group
    "stock": a tool call. Group "chat": a conversation, and one that forks."""
    for name, text, reward in [("a1", "4", 1.0), ("a2", "5", 0.0), ("a3", "44", 0.5)]:
        one = turn(f"{name}.0", name, SUM, answer(text))
        store.append(
            rollout(name, [one], task="sum", reward=reward, about={"text": "2+2?", "answer": 4})
        )
    greedy = turn("a4.0", "a4", SUM, answer("9"), untrainable="greedy")
    store.append(rollout("a4", [greedy], task="sum", reward=0.5))
    broken = turn("b1.0", "b1", SUM, answer("1"))
    store.append(rollout("b1", [broken], task="sum", reward=None, outcome=Outcome.INFRA_ERROR))
    store.append(rollout("b2", [turn("b2.0", "b2", SUM, answer("2"))], task="sum", reward=None))
    store.append(
        rollout("b3", [turn("b3.0", "b3", SUM, answer("3"))], task="sum", reward=1.0, outcome=None)
    )

    first = turn("c1.0", "c1", STOCK, call("stock", '{"item": "lamp"}'), tools=TOOLS)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "17"}
    # The client spells the arguments anew; the engine was given the tokens that it had sampled.
    echo = call("stock", '{"item":"lamp"}')
    second = turn(
        "c1.01", "c1", [*STOCK, first.response["choices"][0]["message"], result],  # type: ignore[index]
        answer("17 lamps"), parent=first, tools=TOOLS, finish_reason="length",
    )  # fmt: skip
    request = {"model": "m", "messages": [*STOCK, echo, result], "tools": TOOLS}
    second = replace(second, request=request)
    store.append(rollout("c1", [first, second], task="stock", reward=1.0, about="count lamps"))

    hello = turn("d1.0", "d1", CHAT, answer("Hi! "))
    more = [*CHAT, answer("Hi! "), user("Bye")]
    bye = replace(
        turn("d1.01", "d1", more, answer("Bye!"), parent=hello),
        request={"model": "m", "messages": [*CHAT, answer("Hi!"), user("Bye")]},
    )
    other = turn("d1.002", "d1", [*more[:2], user("Why?")], answer("So."), parent=hello)
    store.append(rollout("d1", [hello, bye, other], task="chat", reward=0.25))
    brought = [user("1"), answer("one"), user("2")]
    store.append(rollout("d2", [turn("d2.0", "d2", brought, answer("two"))], task=None, reward=1.0))
