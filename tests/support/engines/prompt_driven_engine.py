"""An engine that does what its prompt says, as far as a client library's tests can tell.

It answers as the mock engine does, from what arrives and from nothing else: a tool is called
only if the request offers it and asks for it, with arguments that fit its schema and are found
in the prompt; a stop string or a limit cuts the answer; a schema for the answer is kept to. What
vLLM would refuse it refuses too. So a field that gets lost on the way shows in what is answered.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from support.engines import mock_engine
from support.engines.json_schema_values import Words, filled
from support.engines.mock_engine import Answer, Json, MockEngine

# vLLM's kinds of content parts, as far as they are used here; a PDF is none.
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url")
_CACHE_BLOCK = 16  # prompt tokens


@dataclass
class StoppedText(Answer):
    """Text that a stop string ended; vLLM leaves the string out."""

    stop: str = ""


@dataclass
class PromptDrivenEngine(MockEngine):
    """`replies` that are queued take precedence. `said` is what was sampled, in order.
    `refusals` are for the next calls, one each, as (status, body, headers)."""

    refusals: deque[tuple[int, Json, dict[str, str]]] = field(default_factory=deque)
    said: list[Answer] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        refused = self.refusals.popleft() if self.refusals else refusal(body)
        if refused is not None:
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            status, answer, headers = refused
            return JSONResponse(answer, status, headers)
        if self.failure is None:
            if not self.replies:
                self.replies.extend([answer_for(body)] * (body.get("n") or 1))
            self.said.extend(list(self.replies)[: body.get("n") or 1])
        return await super()._chat(request)

    def _answer(self, body: Json, says: Sequence[Answer]) -> Json:
        answer = super()._answer(as_text(body), says)
        answer["usage"] |= self._details(body, says)
        return answer

    async def _chunks(self, body: Json, says: Sequence[Answer], head: Json) -> AsyncIterator[Json]:
        details = self._details(body, says)
        async for chunk in super()._chunks(as_text(body), says, head):
            if chunk.get("usage"):
                chunk["usage"] |= details
            yield chunk

    def _choice(self, body: Json, index: int, say: Answer) -> Json:
        return super()._choice(body, index, say) | _stop_reason(say)

    def _plan(self, body: Json, index: int, say: Answer) -> list[Json | None]:
        plan = super()._plan(body, index, say)
        assert plan[-1] is not None, "the last chunk has the finish reason"
        plan[-1] |= _stop_reason(say)
        return plan

    def _details(self, body: Json, says: Sequence[Answer]) -> Json:
        """As of an engine with a prefix cache and a reasoning parser."""
        prompt = mock_engine.render(as_text(body)["messages"], body.get("tools"))
        cached = max((_common(prompt, earlier) for earlier in self.prompts), default=0)
        self.prompts.append(prompt)
        return {
            "prompt_tokens_details": {"cached_tokens": cached // _CACHE_BLOCK * _CACHE_BLOCK},
            "completion_tokens_details": {
                "reasoning_tokens": sum(len(say.reasoning.encode()) for say in says)
            },
        }


def refusal(body: Json) -> tuple[int, Json, dict[str, str]] | None:
    """What vLLM would answer to a request that it does not take."""
    problem = _problem(body)
    if problem is None:
        return None
    return 400, mock_engine.error(problem, 400, "BadRequestError"), {}


def _problem(body: Json) -> str | None:
    called: set[str] = set()
    for message in body["messages"]:
        role = message["role"]
        if role not in mock_engine.ROLES:
            return f"Unexpected message role: {role}"
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type")
            if kind != "text" and (kind not in _MEDIA or not isinstance(part.get(kind), dict)):
                return f"Unknown part type: {kind}"
        called |= {call["id"] for call in message.get("tool_calls") or ()}
        if role == "tool" and message.get("tool_call_id") not in called:
            return f"No tool call has the id {message.get('tool_call_id')!r}"
    named = body.get("tool_choice")
    if named not in (None, "none", "auto") and not _offered(body):
        return "tool_choice is set, but no tool of that name is given"
    return None


def answer_for(body: Json) -> Answer:
    """The answer that the request asks for."""
    prompt = last_text(body["messages"])
    words = Words(prompt)
    # A model that thinks, unless it is told not to.
    thinks = "think" in prompt.lower() and body.get("reasoning_effort") != "none"
    reasoning = "Let me see." if thinks else ""
    tools = [] if body["messages"][-1]["role"] == "tool" else _wanted(body, prompt)
    if tools:
        calls = [(tool["name"], _arguments(tool, words)) for tool in tools]
        return Answer("", calls, reasoning)
    return _cut(_text(body, prompt, words), reasoning, body)


def last_text(messages: Sequence[Json]) -> str:
    """What was said last, by whoever."""
    return _flat(messages[-1].get("content"))


def as_text(body: Json) -> Json:
    """The request as a template would put it: of parts their text, and a mark for the rest;
    arguments spelled in one way, which is also that of the replies."""
    messages = []
    for message in body["messages"]:
        put = {**message, "content": _flat(message.get("content"))}
        if calls := message.get("tool_calls"):
            put["tool_calls"] = [_spelled(call) for call in calls]
        messages.append(put)
    return {**body, "messages": messages}


def _spelled(call: Json) -> Json:
    function = call["function"]
    arguments = json.dumps(json.loads(function["arguments"] or "{}"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _flat(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part.get("text", f"<{part['type']}>") for part in content)


def _offered(body: Json) -> list[Json]:
    """The functions that may be called."""
    functions = [tool["function"] for tool in body.get("tools") or ()]
    choice = body.get("tool_choice")
    if choice == "none":
        return []
    if isinstance(choice, dict):
        return [each for each in functions if each["name"] == choice["function"]["name"]]
    return functions


def _wanted(body: Json, prompt: str) -> list[Json]:
    """The functions to call now: those that must be, or that the prompt speaks of."""
    offered = _offered(body)
    if isinstance(choice := body.get("tool_choice"), dict) or choice == "required":
        wanted = [each for each in offered if each["name"] in prompt] or offered[:1]
    else:
        wanted = [each for each in offered if _is_meant(each["name"], prompt)]
    return wanted[:1] if body.get("parallel_tool_calls") is False else wanted


def _is_meant(name: str, prompt: str) -> bool:
    """ "get_weather" in "What is the weather in Ghent?"."""
    return name in prompt or any(
        len(word) > 4 and word in prompt.lower() for word in name.lower().split("_")
    )


def _arguments(function: Json, words: Words) -> str:
    return json.dumps(filled(function.get("parameters") or {}, words), ensure_ascii=False)


def _text(body: Json, prompt: str, words: Words) -> str:
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        return json.dumps(filled(form["json_schema"]["schema"], words), ensure_ascii=False)
    if form.get("type") == "json_object":
        return json.dumps({name: f"a {name}" for name in words.quoted})
    return f"Hello to you, who said: {prompt}"


def _cut(text: str, reasoning: str, body: Json) -> Answer:
    """The text up to a stop string or the limit of tokens, which are bytes here."""
    stops = body.get("stop") or ()
    hits = [(text.find(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops)]
    found = [hit for hit in hits if hit[0] >= 0]
    if found:
        at, stop = min(found)
        return StoppedText(text[:at], reasoning=reasoning, stop=stop)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and len(Answer(text, reasoning=reasoning).token_ids) > limit:
        kept = text.encode()[:limit].decode(errors="ignore")
        return Answer(kept, reasoning=reasoning, cut=True)
    return Answer(text, reasoning=reasoning)


def _stop_reason(say: Answer) -> Json:
    return {"stop_reason": say.stop} if isinstance(say, StoppedText) else {}


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
