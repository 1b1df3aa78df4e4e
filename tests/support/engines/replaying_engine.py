"""An engine that samples one and the same text, a token at a time, wherever its prompt is in it.

Thoughts and tool calls are between tokens of their own, as in most models, and are parsed as vLLM
parses them: a thought is open where the prompt's tokens say so, a tool call never is. What is told
of each token is its own: its words, once they are whole letters.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from support.engines.mock_engine import (
    END,
    MODEL,
    ROLES,
    Answer,
    Json,
    MockEngine,
    entries,
    logprobs_of,
    usage,
)

THINK, THOUGHT, CALL, CALLED = 300, 301, 302, 303
TAGS = {"<think>": THINK, "</think>": THOUGHT, "<tool_call>": CALL, "</tool_call>": CALLED}
_NAME = re.compile(r'"name": "([^"]+)"')
_ARGUMENTS = '"arguments": '


def tokens_of(answer: Answer) -> list[int]:
    """Bytes, tags and an end."""
    found: list[int] = []
    for part in re.split(f"({'|'.join(TAGS)})", answer.raw):
        found += [TAGS[part]] if part in TAGS else list(part.encode())
    return [*found, END]


@dataclass
class ReplayingEngine(MockEngine):
    """`dies_after`: so many tokens of its first answer; None: it lives."""

    script: Answer = field(default_factory=Answer)
    dies_after: int | None = None
    takes_ids: bool = True
    sees_open_thoughts: bool = True  # in the prompt; some of vLLM's parsers do not

    def _behind(self, prompt: Sequence[int], asked: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens of the script behind `prompt`, of which those that are not the client's
        (`asked`) are its own, and whether they begin in a thought."""
        said = list(prompt[len(asked) :])
        script = tokens_of(self.script)
        assert said == script[: len(said)], "what it is to go on with is not what it said"
        marks = [token for token in said if token in (THINK, THOUGHT)]
        return script[len(said) :], self.sees_open_thoughts and marks[-1:] == [THINK]

    def _dies_at(self, number: int) -> bool:
        if number != self.dies_after or len(self.requests) > 1:
            return False
        raise ConnectionError("the engine dies here, as the test wants it")

    async def _chunks(self, body: Json, says: Sequence[Answer], head: Json) -> AsyncIterator[Json]:
        prompt = self._prompt(body)
        asked = prompt[: len(prompt) - prompt[::-1].index(ROLES["assistant"])]
        tokens, thinks = self._behind(prompt, asked)
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        first = {**head, "choices": [{**opening, "finish_reason": None}]}
        yield {**first, "prompt_token_ids": prompt}
        parser = _Parser(thinks)
        left = tokens[: body.get("max_tokens", len(tokens))]
        for number, token in enumerate(left):
            self._dies_at(number)
            choice: Json = {
                "index": 0,
                "delta": parser.delta(token),
                "logprobs": entries([token], logprobs_of([token])),
                "finish_reason": None,
                "token_ids": [token],
            }
            if number + 1 == len(left):
                choice |= {"finish_reason": self._finish(token), "stop_reason": None}
            yield {**head, "choices": [choice]}
        self._dies_at(len(left))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": usage(len(prompt), len(left))}

    def _finish(self, last: int) -> str:
        return self.script.finish_reason if last == END else "length"

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        return StreamingResponse(self._text_chunks(body), media_type="text/event-stream")

    async def _text_chunks(self, body: Json) -> AsyncIterator[str]:
        first = self.requests[0]["prompt"]
        asked = list(first.encode()) if isinstance(first, str) else first
        prompt = asked if body["prompt"] == first else body["prompt"]
        tokens, _ = self._behind(prompt, asked)
        left = tokens[: body.get("max_tokens") or 16]
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
        decode = codecs.getincrementaldecoder("utf-8")().decode
        for number, token in enumerate(left):
            self._dies_at(number)
            ends = number + 1 == len(left)
            told: Json = {"tokens": ["x"], "token_logprobs": logprobs_of([token])}
            choice = {
                "index": 0,
                "text": decode(bytes([token])) if token < END else "",
                "logprobs": {**told, "text_offset": [number], "top_logprobs": [None]},
                "finish_reason": self._finish(token) if ends else None,
                "stop_reason": None,
                "token_ids": [token],
                "prompt_token_ids": None if number else prompt,
            }
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
        self._dies_at(len(left))
        spent = usage(len(prompt), len(left))
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': spent})}\n\n"
        yield "data: [DONE]\n\n"


class _Parser:
    """Of one stream: a thought, text, or the JSON of a tool call."""

    def __init__(self, thinks: bool) -> None:
        self._state = "reasoning" if thinks else "content"
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._json: str | None = None  # of the tool call that is open
        self._calls = 0
        self._told = 0  # of its arguments

    def delta(self, token: int) -> Json:
        if token == END:
            return {}
        if token in (THINK, THOUGHT):
            self._state = "reasoning" if token == THINK else "content"
            return {}
        if token == CALL:
            self._json, self._told = "", -1
            return {}
        if token == CALLED:
            return self._called()
        text = self._decode(bytes([token]))
        if self._json is None:
            return {self._state: text}
        self._json += text
        return self._of_the_call()

    def _of_the_call(self) -> Json:
        assert self._json is not None
        if self._told < 0:
            if (name := _NAME.search(self._json)) is None:
                return {}
            self._told = 0
            opened = {"id": f"chatcmpl-tool-{self._calls}", "type": "function"}
            function = {"name": name[1]}
            return {"tool_calls": [{**opened, "index": self._calls, "function": function}]}
        return self._arguments(self._json.partition(_ARGUMENTS)[2].rstrip("}"))

    def _arguments(self, text: str) -> Json:
        if not (new := text[self._told :]):
            return {}
        self._told = len(text)
        return {"tool_calls": [{"index": self._calls, "function": {"arguments": new}}]}

    def _called(self) -> Json:
        if self._json is None:
            return {"content": "</tool_call>"}
        found = self._arguments(self._json.partition(_ARGUMENTS)[2][:-1])
        self._json, self._calls = None, self._calls + 1
        return found
