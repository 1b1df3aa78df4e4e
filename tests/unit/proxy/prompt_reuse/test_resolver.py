"""Which rollout a call belongs to, and which turn it continues."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from support.engines.mock_engine import MODEL, Answer, MockEngine, render
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from tracegrad.chat.call import Call
from tracegrad.events import Turn, logprob_array, token_id_array
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.engine.completion import tool_call_id
from tracegrad.proxy.prompt_reuse.resolver import PromptReuse, TreePosition
from tracegrad.proxy.prompt_reuse.tree_cache import cached_turn
from tracegrad.store import Store
from tracegrad.store.errors import StoreUnavailable
from tracegrad.turn_tree import extends

Json = dict[str, Any]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
CHAT = "/v1/chat/completions"


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def says(text: str) -> Json:
    return {"role": "assistant", "content": text}


def test_names_work_over_http(rig: ProxyWithEngine) -> None:
    body = {"messages": [user("hi")]}
    headers = {"authorization": "Bearer tg-by-key", "traceparent": PARENT}
    rig.http.post(f"/rollouts/by-path{CHAT}", json=body, headers=headers).raise_for_status()
    rig.http.post(CHAT, json=body, headers=headers).raise_for_status()
    rig.http.post(
        CHAT, json=body, headers={"baggage": "tracegrad.rollout=by-bag"}
    ).raise_for_status()
    assert rig.turns("by-path")[0].parent_span_id == SPAN
    assert rig.turns("by-key")[0].parent_span_id == SPAN
    assert rig.turns("by-bag")[0].parent_span_id is None


def test_only_a_clients_own_key_reaches_the_engine(rig: ProxyWithEngine) -> None:
    for key in ("tg-r1", "sk-own"):
        rig.http.post(
            CHAT, json={"messages": [user("hi")]}, headers={"authorization": f"Bearer {key}"}
        )
    assert [headers.get("authorization") for headers in rig.engine.headers] == [
        None,
        "Bearer sk-own",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_conversation_is_one_path(rig: ProxyWithEngine, stream: bool) -> None:
    """As an agent's loop does it: append the reply, append the tool's answer, call again."""
    rig.engine.replies += [
        Answer("", [("look", '{"q": 1}'), ("look", '{"q": 2}')]),
        Answer("Let me see. ", [("look", '{"q": 3}')]),
        Answer("It is 7."),
    ]
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    messages: list[Any] = [user("What is it?")]
    while True:
        if stream:
            with rig.client.chat.completions.stream(
                model=MODEL, messages=messages, tools=tools
            ) as events:
                reply = events.get_final_completion().choices[0].message
        else:
            answer = rig.client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
            reply = answer.choices[0].message
        messages.append(
            reply.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        )
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})

    first, second, third = rig.turns()
    assert (first.parent_id, second.parent_id) == (None, first.turn_id)
    assert third.parent_id == second.turn_id
    assert all(turn.fork_reason is None for turn in (first, second, third))
    assert extends(third.prompt_token_ids, second)
    assert third.prompt_token_ids.tolist() == render(messages[:-1], tools)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_get_ids_that_libraries_keep(rig: ProxyWithEngine, stream: bool) -> None:
    """agno rewrites those that begin otherwise. What the model says itself stays (Kimi)."""
    rig.engine.replies.append(Answer("", [("look", "{}"), ("look", "{}")]))
    body: Json = {"messages": [user("go")], "model": MODEL}
    if stream:
        with rig.client.chat.completions.stream(**body) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = rig.client.chat.completions.create(**body).choices[0].message
    ids = [call.id for call in message.tool_calls or []]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("call_[0-9a-f]{16}", id_) for id_ in ids)
    [turn] = rig.turns()
    recorded = (turn.response or {})["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in recorded] == ids
    assert tool_call_id("functions.look:0", "call_") == "functions.look:0"
    assert tool_call_id("chatcmpl-tool-ab", "toolu_") == "toolu_ab"


def test_ids_that_a_client_rewrote_still_continue(rig: ProxyWithEngine) -> None:
    """As agno does with those of stores of before, and of models that make their own: by a
    counter, in calls and results."""
    rig.engine.replies += [Answer("Let me see.", [("look", '{"q": 1}')]), Answer("It is 7.")]
    first = rig.client.chat.completions.create(model=MODEL, messages=[user("go")])
    [call] = first.choices[0].message.tool_calls or []
    reply: Any = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{**call.model_dump(), "id": "call_00000000"}],
    }
    result: Any = {"role": "tool", "tool_call_id": "call_00000000", "content": "42"}
    rig.client.chat.completions.create(model=MODEL, messages=[user("go"), reply, result])
    one, two = rig.turns()
    assert (two.parent_id, two.fork_reason) == (one.turn_id, None)
    # Without the text beside it, too.
    reply["content"] = None
    rig.client.chat.completions.create(model=MODEL, messages=[user("go"), reply, result])
    assert rig.turns()[2].fork_reason == "tokenizer"
    # Calls with other arguments are other calls.
    reply["tool_calls"][0]["function"]["arguments"] = '{"q": 2}'
    rig.client.chat.completions.create(model=MODEL, messages=[user("go"), reply, result])
    assert rig.turns()[3].fork_reason == "edited_calls"


def test_a_continued_choice_is_the_parent(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("left"), Answer("right"), Answer("done")]
    answer = rig.client.chat.completions.create(model=MODEL, messages=[user("go")], n=2)
    second = {"role": "assistant", "content": answer.choices[1].message.content}
    rig.client.chat.completions.create(model=MODEL, messages=[user("go"), second, user("on")])
    _, right, done = rig.turns()
    assert done.parent_id == right.turn_id


def test_forks_say_why(rig: ProxyWithEngine) -> None:
    def ask(*messages: Json) -> Any:
        answer = rig.client.chat.completions.create(model=MODEL, messages=list(messages))
        return answer.choices[0].message

    rig.engine.replies += [
        Answer("", [("look", '{"q": 1}')]),
        Answer("b"),
        Answer("c"),
        Answer("d"),
        Answer("e"),
    ]
    go = user("go")
    call = ask(go).tool_calls[0].model_dump()
    call["function"]["arguments"] = '{"q":1}'
    # The same call, its arguments written anew, without the space: other tokens.
    ask(go, {"role": "assistant", "tool_calls": [call]}, user("on"))
    ask(go)
    said = {"role": "assistant", "content": "b"}
    ask(user("go!"), said, user("on"), said, user("on"))
    ask(user("a sub-agent's own task"))
    assert [turn.parent_id for turn in rig.turns()] == [None] * 5
    assert [turn.fork_reason for turn in rig.turns()] == [
        None,
        "tokenizer",  # the mock engine has none that the proxy could read
        "new_conversation",
        "edited_history",
        "new_conversation",
    ]


TOO_LONG = {
    "message": "This model's maximum context length is 100 tokens.",
    "type": "BadRequestError",
    "code": 400,
}


@pytest.mark.parametrize("restarted", [False, True], ids=["in memory", "from the store"])
def test_what_is_shorter_than_a_refused_prompt_is_a_compaction_of_it(
    engine: MockEngine, serve_proxy: ServeProxy, store: Store, restarted: bool
) -> None:
    engine.replies += [Answer("b"), Answer("done"), Answer("other")]
    system, go, said = {"role": "system", "content": "Be brief."}, user("go"), says("b")
    summary, more = says("of before: b"), [user(f"result {number}") for number in range(4)]
    refusal = (400, {"error": TOO_LONG}, {})

    def ask(http: httpx.Client, *messages: Json, failure: Any = None) -> None:
        engine.failure = failure
        http.post(f"/rollouts/r1{CHAT}", json={"messages": messages})

    with ExitStack() as proxies:
        http = proxies.enter_context(serve_proxy())
        ask(http, system, go)
        ask(http, system, go, said, *more, failure=refusal)
        if restarted:
            http = proxies.enter_context(serve_proxy())
        # Longer than all that was answered, shorter than what was not; the third one fits.
        ask(http, system, summary, *more, failure=refusal)
        ask(http, system, summary, *more[1:], failure=refusal)
        # Sent again unchanged, and with more behind it: edited in neither.
        ask(http, system, summary, *more[1:], failure=refusal)
        ask(http, system, summary, *more[1:], user("more"), failure=refusal)
        ask(http, system, summary, *more[2:])
        ask(http, system, user("gone"), said, *more)
    assert [(turn.finish_reason, turn.fork_reason) for turn in store.rollout_turns("r1")] == [
        ("stop", None),
        ("refused", None),
        *[("refused", "compaction")] * 4,
        ("stop", "compaction"),
        ("stop", "edited_history"),
    ]


def test_reasoning_that_the_template_drops_forks(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("Yes.", reasoning="Is it? It is."), Answer("Sure.")]
    rig.client.chat.completions.create(model=MODEL, messages=[user("Is it?")])
    reply = {"role": "assistant", "content": "Yes."}
    rig.client.chat.completions.create(model=MODEL, messages=[user("Is it?"), reply, user("Sure?")])
    assert rig.turns()[1].fork_reason == "tokenizer"


def test_a_branch_off_an_earlier_turn_has_it_as_parent(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("a"), Answer("b"), Answer("b2")]
    start = [user("go"), {"role": "assistant", "content": "a"}]
    for messages in ([user("go")], [*start, user("this way")], [*start, user("that way")]):
        rig.client.chat.completions.create(model=MODEL, messages=messages)
    first, *branches = rig.turns()
    assert [turn.parent_id for turn in branches] == [first.turn_id] * 2


def test_rollouts_in_which_the_same_was_said_go_on_by_themselves(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("same"), Answer("same"), Answer("on")]
    start = [user("go"), says("same"), user("more")]
    for rollout_id, messages in (("r1", start[:1]), ("r2", start[:1]), ("r1", start)):
        asked = rig.http.post(f"/rollouts/{rollout_id}{CHAT}", json={"messages": messages})
        asked.raise_for_status()
    first, second = rig.turns("r1")
    assert second.parent_id == first.turn_id
    assert len(rig.turns("r2")) == 1


def test_untitled_calls_find_their_conversation(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [
        Answer("alpha"),
        Answer("beta"),
        Answer("more alpha"),
        Answer("more beta"),
    ]

    def ask(*messages: Json) -> None:
        rig.http.post(CHAT, json={"messages": messages}).raise_for_status()

    ask(user("go"))
    ask(user("go"))
    for word in ("alpha", "beta"):
        ask(user("go"), {"role": "assistant", "content": word}, user("on"))
    conversations = [rig.store.rollout_turns(row.rollout_id) for row in rig.store.rollouts()]
    assert sorted(len(turns) for turns in conversations) == [2, 2]
    for first, second in conversations:
        assert second.parent_id == first.turn_id


def test_an_untitled_call_joins_the_titled_rollout_that_it_continues(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("mine"))
    rig.http.post(f"/rollouts/r1{CHAT}", json={"messages": [user("go")]})
    messages = [user("go"), {"role": "assistant", "content": "mine"}, user("on")]
    rig.http.post(CHAT, json={"messages": messages})
    first, second = rig.turns()
    assert second.parent_id == first.turn_id


def test_a_conversation_goes_on_after_a_restart(
    engine: MockEngine, serve_proxy: ServeProxy, store: Store
) -> None:
    engine.replies += [Answer("before"), Answer("after")]
    for messages in (
        [user("go")],
        [user("go"), {"role": "assistant", "content": "before"}, user("on")],
    ):
        with serve_proxy() as http:
            http.post(f"/rollouts/r1{CHAT}", json={"messages": messages}).raise_for_status()
    first, second = store.rollout_turns("r1")
    assert second.parent_id == first.turn_id


def test_a_conversation_without_a_name_goes_on_after_a_restart(
    engine: MockEngine, serve_proxy: ServeProxy, store: Store
) -> None:
    engine.replies += [Answer("one"), Answer("other"), Answer("on one"), Answer("on other")]

    def ask(http: httpx.Client, *messages: Json) -> None:
        http.post(CHAT, json={"messages": messages}).raise_for_status()

    with serve_proxy() as http:
        ask(http, user("go"))
        ask(http, user("come"))
    with serve_proxy() as http:
        ask(http, user("go"), says("one"), user("and"))
        ask(http, user("come"), says("other"), user("and"))
    conversations = [store.rollout_turns(row.rollout_id) for row in store.rollouts()]
    assert sorted(len(turns) for turns in conversations) == [2, 2]
    for first, second in conversations:
        assert (second.parent_id, second.fork_reason) == (first.turn_id, None)


@pytest.mark.parametrize("edits", [False, True])
def test_a_rollout_whose_calls_come_to_two_proxies_is_one_path(
    engine: MockEngine, serve_proxy: ServeProxy, store: Store, edits: bool
) -> None:
    """What one proxy knows of a rollout is old when the other has answered since."""
    engine.replies += [Answer(f"reply {number}") for number in range(6)]
    messages = [user("go")]
    with serve_proxy() as first, serve_proxy() as second:
        for http in (first, second, second, first, second, first):
            asked = http.post(f"/rollouts/r1{CHAT}", json={"messages": messages})
            said = asked.json()["choices"][0]["message"]["content"]
            messages += [says(f"In short, {said}" if edits else said), user("on")]
    turns = store.rollout_turns("r1")
    assert len(turns) == 6
    if edits:
        assert {turn.fork_reason for turn in turns[1:]} == {"edited_content"}
    else:
        assert [turn.parent_id for turn in turns[1:]] == [turn.turn_id for turn in turns[:-1]]


async def test_what_is_not_the_last_reply_is_not_read_again_where_nobody_else_wrote() -> None:
    """As of an agent that puts words into the model's mouth."""
    store = CountingStore({})
    continuation = PromptReuse(store, limit_bytes=100_000)
    plan = await continuation.plan("r", a_call())
    response = {"choices": [{"message": {"role": "assistant", "content": "ok"}}]}
    turn = replace(a_turn("r", [1], [2]), response=response, finish_reason="stop")
    continuation.add(cached_turn(turn, plan.conversation))
    store.turns["r"] = [turn]
    for _ in range(3):
        plan = await continuation.plan(
            "r", a_call(user("go"), says("ok"), user("on"), says("made up"), user("on"))
        )
        assert plan.parent is not None
    assert store.reads == 0


async def recorded(continuation: PromptReuse, rollout: str, reply: Json, *before: Json) -> Turn:
    """A turn that is placed by its name, as a proxy keeps it."""
    call = a_call(*before)
    plan = await continuation.plan(rollout, call)
    parent = plan.parent.turn.turn_id if plan.parent is not None else None
    prompt, completion = [ord(char) for char in json.dumps(before)], [1]
    turn = replace(
        a_turn(rollout, prompt, completion),
        parent_id=parent,
        request=call.request,
        response={"choices": [{"message": reply}]},
        finish_reason="stop",
    )
    continuation.add(cached_turn(turn, plan.conversation))
    return turn


def calls(command: str, said: str | None = None) -> Json:
    """As Kimi's model writes them: its ids count the calls of a conversation."""
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": "functions.bash:0", "type": "function", "function": function}
    return {"role": "assistant", "content": said, "tool_calls": [call]}


RESULT: Json = {"role": "tool", "tool_call_id": "functions.bash:0", "content": "a.txt"}


async def test_calls_whose_ids_are_counted_are_known_by_what_they_say() -> None:
    continuation = PromptReuse(CountingStore({}), limit_bytes=100_000)
    mine = await recorded(continuation, "a", calls("ls"), user("go"))
    await recorded(continuation, "b", calls("find ."), user("go"))
    plan = await continuation.plan(None, a_call(user("go"), calls("ls"), RESULT))
    assert (plan.rollout_id, plan.parent and plan.parent.turn.turn_id) == ("a", mine.turn_id)
    # Later too, where the last replies are equal.
    for rollout, command in (("a", "ls"), ("b", "find .")):
        await recorded(continuation, rollout, says("done"), user("go"), calls(command), RESULT)
    plan = await continuation.plan(
        None, a_call(user("go"), calls("ls"), RESULT, says("done"), user("on"))
    )
    assert plan.rollout_id == "a"
    # What nobody said continues nothing.
    plan = await continuation.plan(None, a_call(user("go"), calls("pwd"), RESULT))
    assert (plan.rollout_id, plan.parent) == (None, None)


async def test_a_text_beside_counted_calls_may_be_dropped_where_one_reply_alone_is_meant() -> None:
    continuation = PromptReuse(CountingStore({}), limit_bytes=100_000)
    await recorded(continuation, "a", calls("ls", "I look."), user("go"))
    echoed = a_call(user("go"), calls("ls"), RESULT)
    plan = await continuation.plan(None, echoed)
    assert plan.rollout_id == "a"
    await recorded(continuation, "b", calls("ls", "Let me see."), user("go"))
    plan = await continuation.plan(None, echoed)
    assert (plan.rollout_id, plan.parent) == (None, None)


async def test_equal_replies_are_distinguished_by_reasoning_that_came_back() -> None:
    continuation = PromptReuse(CountingStore({}), limit_bytes=100_000)
    for rollout in ("a", "b"):
        reply = {**says("Yes."), "reasoning": f"thought of {rollout}"}
        await recorded(continuation, rollout, reply, user("Is it?"))
    for rollout in ("b", "a"):
        reply = {**says("Yes."), "reasoning": f"thought of {rollout}"}
        plan = await continuation.plan(None, a_call(user("Is it?"), reply, user("Sure?")))
        assert plan.rollout_id == rollout
    # Reasoning of neither: there is no telling whose it is.
    reply = {**says("Yes."), "reasoning": "another"}
    plan = await continuation.plan(None, a_call(user("Is it?"), reply, user("Sure?")))
    assert (plan.rollout_id, plan.parent) == (None, None)


async def test_earlier_conversations_are_read_once_and_again_after_a_failure() -> None:
    store = CountingStore({})
    asked: list[int] = []

    def recent(most: int) -> list[str]:
        asked.append(most)
        if len(asked) == 1:
            raise StoreUnavailable("it is started")
        return []

    store.recent_inferred = recent  # type: ignore[method-assign]
    continuation = PromptReuse(store, limit_bytes=10_000)
    for _ in range(3):
        plan = await continuation.plan(None, a_call(user("go"), says("x"), user("on")))
        assert plan.parent is None
    assert len(asked) == 2


async def test_no_more_of_earlier_conversations_is_read_than_fits_in_half_of_the_memory() -> None:
    turns = {f"r{n}": [a_turn(f"r{n}", [n] * 1000, [5])] for n in range(20)}
    store = CountingStore(turns)
    continuation = PromptReuse(store, limit_bytes=60_000)
    await continuation.plan(None, a_call(user("go"), says("x"), user("on")))
    assert 0 < store.reads < 8
    assert [turn.rollout_id for turn in continuation._trees.recent(2)] == ["r19", "r18"]


class CountingStore:
    """Reads from a dictionary, and counts how often."""

    def __init__(self, turns: dict[str, list[Turn]]) -> None:
        self.turns = turns
        self.reads = 0

    def rollout_turns(
        self, rollout_id: str, *, raw: bool = True, expert_routing: bool = True
    ) -> list[Turn]:
        self.reads += 1
        return list(self.turns.get(rollout_id, ()))

    def count_turns(self, rollout_id: str) -> int:
        return len(self.turns.get(rollout_id, ()))

    def recent_inferred(self, most: int) -> list[str]:
        return [*self.turns][::-1][:most]

    def find_turn(self, turn_id: str, *, expert_routing: bool = True) -> Turn | None:
        every = [turn for turns in self.turns.values() for turn in turns]
        return next((turn for turn in every if turn.turn_id == turn_id), None)


def a_turn(rollout_id: str, prompt: list[int], completion: list[int]) -> Turn:
    return Turn(
        rollout_id=rollout_id,
        dialect="chat",
        model=MODEL,
        prompt_token_ids=token_id_array(prompt),
        completion_token_ids=token_id_array(completion),
        completion_logprobs=logprob_array([-1.0] * len(completion)),
        policy_versions=((0, len(completion)),),
    )


def a_call(*messages: Json) -> Call:
    return OpenAIChatDialect().parse(
        json.dumps({"messages": messages or [user("go")]}).encode(), {}, {}
    )


async def placed(continuation: PromptReuse, rollout_id: str, prompt: list[int]) -> TreePosition:
    said = {"role": "assistant", "content": "something"}
    plan = await continuation.plan(rollout_id, a_call(user("go"), said, user("on")))
    return await continuation.position(plan, token_id_array(prompt))


async def test_the_cache_is_bounded_and_falls_back_to_the_store() -> None:
    old = a_turn("old", [1] * 1000, [2])
    store = CountingStore({"old": [old]})
    continuation = PromptReuse(store, limit_bytes=30_000)
    for _ in range(2):
        assert (await placed(continuation, "old", [1] * 1000 + [2, 3])).parent_id == old.turn_id
    assert store.reads == 2, "another proxy may have written what is missing"
    for number in range(10):
        rollout = f"new{number}"
        plan = await continuation.plan(rollout, a_call())
        await continuation.position(plan, token_id_array([number]))
        continuation.add(cached_turn(a_turn(rollout, [number] * 1000, [5]), plan.conversation))
    assert continuation._trees.size <= 30_000
    assert (await placed(continuation, "old", [1] * 1000 + [2, 3])).parent_id == old.turn_id
    assert store.reads == 3, "rollouts that begin are not looked for in the store"


async def test_what_is_forgotten_leaves_nothing_behind() -> None:
    continuation = PromptReuse(CountingStore({}), limit_bytes=20_000)
    for number in range(50):
        plan = await continuation.plan(f"r{number}", a_call(user(f"task {number}")))
        await continuation.position(plan, token_id_array([number]))
        turn = a_turn(f"r{number}", [number] * 500, [5])
        response = {"choices": [{"message": {"role": "assistant", "content": "ok"}}]}
        turn = replace(turn, response=response, finish_reason="stop")
        continuation.add(cached_turn(turn, plan.conversation))
    trees = continuation._trees
    assert len(trees._trees) < 10
    kept = sum(len(tree.turns) for tree in trees._trees.values())
    assert {len(trees._by_id), len(trees._by_text), len(trees._by_prompt)} == {kept}
    assert 0 < trees.size <= 20_000


async def test_a_failed_reading_is_tried_again() -> None:
    store = CountingStore({})
    continuation = PromptReuse(store, limit_bytes=1000)
    broken, store.rollout_turns = store.rollout_turns, lambda *_, **__: 1 / 0  # type: ignore
    with pytest.raises(ZeroDivisionError):
        await placed(continuation, "r", [1])
    store.rollout_turns = broken  # type: ignore[method-assign]
    assert (await placed(continuation, "r", [1])).parent_id is None


async def test_a_turn_without_a_prompt_is_nobodys_parent() -> None:
    continuation = PromptReuse(CountingStore({"r": [a_turn("r", [], [])]}), limit_bytes=1000)
    plan = await continuation.plan("r", a_call())
    assert await continuation.position(plan, token_id_array([1, 2])) == ("r", None, None)
    continuation.add(cached_turn(a_turn("r", [], []), plan.conversation))
    assert (await placed(continuation, "r", [1, 2])).parent_id is None
