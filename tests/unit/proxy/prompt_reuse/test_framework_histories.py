"""Histories as agent frameworks really send them back: what continues, and what forks for which
reason. The messages are those of smolagents 1.26, agno 3.1, llama-index-core 0.14 and aider 0.86.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.chat.real_templates import FAMILIES, NOW, fresh_ids, model
from tracegrad.chat.call import Call
from tracegrad.chat.messages import RenderOptions, content_text, render_options
from tracegrad.chat.model import ChatFormat
from tracegrad.events import Turn, logprob_array
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason
from tracegrad.proxy.prompt_reuse.renderer_loader import EngineRenderer
from tracegrad.proxy.prompt_reuse.resolver import PromptReuse
from tracegrad.proxy.prompt_reuse.tree_cache import cached_turn

Json = dict[str, Any]
SYSTEM = {"role": "system", "content": "You are an expert assistant."}


class NothingStored:
    def rollout_turns(self, rollout_id: str, **_: bool) -> list[Turn]:
        return []

    def count_turns(self, rollout_id: str) -> int:
        return 0

    def recent_inferred(self, most: int) -> list[str]:
        return []

    def find_turn(self, turn_id: str, **_: bool) -> Turn | None:
        return None


class KnownRenderer(EngineRenderer):
    def __init__(self, text: ChatFormat, kwargs: Json | None = None) -> None:
        super().__init__(None, _no_models, kwargs=kwargs)
        self._found = text


async def _no_models() -> bytes:
    return b"{}"


@dataclass
class Agent:
    """A rollout of calls; what each came to is in `forks` and `parents`.

    `as_rendered`: the model writes its replies as the template does, but for white space.
    """

    family: str
    as_rendered: bool = True
    forks: list[str | None] = field(default_factory=list)
    parents: list[str | None] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = model(self.family)
        self.reuse = PromptReuse(NothingStored(), limit_bytes=10**7, text=KnownRenderer(self.text))

    def call(self, messages: list[Json]) -> Call:
        body = {"messages": messages, "chat_template_kwargs": FAMILIES[self.family].kwargs}
        return OpenAIChatDialect().parse(json.dumps(body).encode(), {}, {})

    async def ask(self, messages: list[Json], reply: Json, sampled: str, **ended: Any) -> None:
        call = self.call(messages)
        plan = await self.reuse.plan("r", call)
        fresh = fresh_ids(self.text, call.messages, render_options(call.body), NOW)
        prompt = plan.prompt_ids or fresh
        position = await self.reuse.position(plan, prompt)
        ids = self.text.tokenizer.encode(sampled)
        turn = Turn(
            rollout_id="r",
            parent_id=position.parent_id,
            dialect="chat",
            model="m",
            prompt_token_ids=prompt,
            completion_token_ids=ids,
            completion_logprobs=logprob_array([-1.0] * len(ids)),
            policy_versions=((0, len(ids)),),
            finish_reason=ended.get("finish_reason", "stop"),
            request=call.request,
            response={"choices": [{"message": reply, "stop_reason": ended.get("stop_reason")}]},
            created_at=NOW.timestamp(),
        )
        self.reuse.add(cached_turn(turn, plan.conversation))
        self.forks.append(position.fork_reason)
        self.parents.append(position.parent_id)
        self.turns.append(turn)
        mine, theirs = (self.text.tokenizer.decode(ids) for ids in (prompt, fresh))
        if self.as_rendered:
            assert "".join(mine.split()) == "".join(theirs.split())

    @property
    def is_one_path(self) -> bool:
        return self.parents == [None, *(turn.turn_id for turn in self.turns[:-1])]


def text_parts(role: str, text: str) -> Json:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: Json) -> Json:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


CONTINUED = ["Qwen2.5", "Qwen3", "Qwen3-Coder", "Llama-3.1", "Gemma 3", "Phi-4-mini", "SmolLM3"]


@pytest.mark.parametrize("family", CONTINUED)
async def test_smolagents_code_agent_is_one_path(family: str) -> None:
    """It asks for the stop string "</code>", puts that back, and "Calling tools:" behind it."""
    agent = Agent(family)
    history = [SYSTEM, text_parts("user", "New task:\nwhat is 1+2")]
    for number in range(4):
        said = f"Thought: step {number}.\n<code>\nx = add({number}, 2)\nprint(x)\n"
        reply = assistant(said)
        await agent.ask(history, reply, f"{said}</code>", stop_reason="</code>")
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "python_interpreter", "arguments": f"x = add({number}, 2)"},
        }
        history = [
            *history,
            text_parts("assistant", f"{said}</code>\nCalling tools:\n{[call]}"),
            text_parts("user", f"Observation:\nExecution logs:\n{number + 2}\n"),
        ]
    assert agent.forks == [None] * 4
    assert agent.is_one_path
    # No end token stands where the model wrote none: what is added is not sampled.
    last = agent.turns[-1]
    parent = agent.turns[-2]
    context = parent.prompt_token_ids + parent.completion_token_ids
    added = agent.text.tokenizer.decode(last.prompt_token_ids[len(context) :])
    assert added.startswith("\nCalling tools:\n[{'id': 'call_2'")


async def test_smolagents_addition_behind_an_end_token_forks_and_says_so() -> None:
    agent = Agent("Qwen2.5")
    history = [SYSTEM, text_parts("user", "New task:\nwhat is 1+2")]
    await agent.ask(history, assistant("I know it."), "I know it.<|im_end|>")
    history += [text_parts("assistant", "I know it.</code>"), text_parts("user", "Error:\nno code")]
    await agent.ask(history, assistant("So what?"), "So what?<|im_end|>")
    assert agent.forks == [None, ForkReason.EXTENDED_REPLY]


async def test_smolagents_tool_calling_agent_sends_calls_as_text() -> None:
    agent = Agent("Qwen2.5")
    history = [SYSTEM, text_parts("user", "New task:\nwhat is 1+2")]
    function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    call = {"id": "call_1", "type": "function", "function": function}
    sampled = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    await agent.ask(history, assistant(None, call), sampled, finish_reason="tool_calls")
    history += [
        text_parts("assistant", f"Calling tools:\n{[call]}"),
        text_parts("user", "Observation:\n3"),
    ]
    await agent.ask(history, assistant("3"), "3<|im_end|>")
    assert agent.forks == [None, ForkReason.CALLS_AS_TEXT]


@pytest.mark.parametrize("family", ["Qwen2.5", "Kimi-K2", "GLM-4.6"])
async def test_agno_rewrites_ids_and_is_one_path(family: str) -> None:
    """By a counter over all calls of a conversation. Kimi's template shows ids: those that the
    model knows."""
    agent = Agent(family, as_rendered=False)
    stop = FAMILIES[family].stop[True]
    history: list[Json] = [SYSTEM, user("How many?")]
    for number in range(3):
        function = {"name": "stock", "arguments": f'{{"item": "lamp {number}"}}'}
        call = {"id": f"functions.stock:{number}", "type": "function", "function": function}
        await agent.ask(history, assistant("I look.", call), f"I look. (call){stop}")
        rewritten = f"call_{number:035x}"
        history = [
            *history,
            assistant("I look.", {**call, "id": rewritten}),
            {"role": "tool", "tool_call_id": rewritten, "content": f"{number} pieces"},
        ]
    assert agent.forks == [None] * 3
    assert agent.is_one_path
    shown = agent.text.tokenizer.decode(agent.turns[-1].prompt_token_ids)
    assert "call_0" not in shown
    assert ("functions.stock:1" in shown) == (family == "Kimi-K2")


async def test_llama_index_react_writes_arguments_anew() -> None:
    """`ActionReasoningStep.get_content`: the arguments as Python prints a dict."""
    agent = Agent("Qwen2.5")
    history: list[Json] = [SYSTEM, user("How many lamps?")]
    said = 'Thought: I need a tool.\nAction: stock\nAction Input: {"item": "lamp", "red": true}'
    await agent.ask(history, assistant(said), f"{said}<|im_end|>")
    echoed = "Thought: I need a tool.\nAction: stock\nAction Input: {'item': 'lamp', 'red': True}"
    history += [assistant(echoed), user("Observation: 17")]
    await agent.ask(history, assistant("Answer: 17"), "Answer: 17<|im_end|>")
    other = [*history[:2], assistant(echoed.replace("lamp", "chair")), history[3]]
    await agent.ask(other, assistant("Answer: 18"), "Answer: 18<|im_end|>")
    assert agent.forks == [None, ForkReason.RESPELLED_ARGUMENTS, ForkReason.EDITED_CONTENT]


async def test_aider_moves_the_files_along() -> None:
    """They stand behind the history that is done, and before the message of now, which alone has
    the reminder."""
    agent = Agent("Qwen2.5")
    files = [
        user(
            "I have *added these files to the chat* so you can go ahead and edit them.\na.py\nx=1"
        ),
        assistant("Ok, any changes I propose will be to those files."),
    ]
    reminder = "\n\n# Rules:\nanswer with diffs"
    await agent.ask(
        [SYSTEM, *files, user(f"Set x to 2.{reminder}")], assistant("Done."), "Done.<|im_end|>"
    )
    edited = [{**files[0], "content": files[0]["content"].replace("x=1", "x=2")}, files[1]]
    done = [user("Set x to 2."), assistant("Done.")]
    await agent.ask(
        [SYSTEM, *done, *edited, user(f"Now to 3.{reminder}")], assistant("So."), "So.<|im_end|>"
    )
    assert agent.forks == [None, ForkReason.MOVED_MESSAGE]
    assert array("i", agent.turns[1].prompt_token_ids) != agent.turns[0].prompt_token_ids


@pytest.mark.parametrize("family", CONTINUED)
async def test_replies_of_any_text_that_are_cut_short_are_one_path(family: str) -> None:
    """White space at either end, which templates trim, and half a character."""
    agent = Agent(family)
    history: list[Json] = [SYSTEM, user("Go on.")]
    for said in ("one ", "\n\ntwo\n", "three \t", "", "four\ufffd", "five"):
        await agent.ask(history, assistant(said), said or " ", finish_reason="length")
        history = [*history, assistant(said), user("And?")]
    assert content_text(history[2]["content"]) == "one "
    assert agent.forks == [None] * 6
    assert agent.is_one_path


@pytest.mark.parametrize("configured", [True, False])
async def test_an_engine_with_template_arguments_of_its_own_is_continued_with_these(
    configured: bool,
) -> None:
    engines = {"enable_thinking": False}
    agent = Agent("Qwen3.5", as_rendered=False)
    agent.reuse = PromptReuse(
        NothingStored(),
        limit_bytes=10**7,
        text=KnownRenderer(agent.text, engines if configured else None),
    )
    function = {"name": "look", "arguments": "{}"}
    reply = assistant(None, {"id": "call_a1b2c3", "type": "function", "function": function})
    first = agent.call([user("go")])
    plan = await agent.reuse.plan("r", first)
    sampled = agent.text.tokenizer.encode("(a call)<|im_end|>")
    turn = Turn(
        rollout_id="r",
        dialect="chat",
        model="m",
        prompt_token_ids=fresh_ids(agent.text, first.messages, RenderOptions(None, engines), NOW),
        completion_token_ids=sampled,
        completion_logprobs=logprob_array([-1.0] * len(sampled)),
        policy_versions=((0, len(sampled)),),
        finish_reason="tool_calls",
        request=first.request,
        response={"choices": [{"message": reply}]},
        created_at=NOW.timestamp(),
    )
    agent.reuse.add(cached_turn(turn, plan.conversation))
    result = {"role": "tool", "tool_call_id": "call_a1b2c3", "content": "7"}
    plan = await agent.reuse.plan("r", agent.call([user("go"), reply, result]))
    if configured:
        assert plan.prompt_ids is not None
        prompt = agent.text.tokenizer.decode(plan.prompt_ids)
        assert prompt.endswith("<think>\n\n</think>\n\n")
    else:
        assert plan.fork is not None
        assert plan.fork.reason == ForkReason.NOT_AS_SENT
