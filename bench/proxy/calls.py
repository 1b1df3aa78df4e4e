"""The calls of the benchmark: prompts and replies, each a little different from every other."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from bench.proxy.text import END, encode, passage, pieces, render

MODEL = "mock"
REPLY_TOKENS = 512
# So many different prompts of a length and replies take turns: more than any cache of a
# processor holds, and no two calls in a row are alike.
PROMPTS = 24
REPLIES = 61


@dataclass(frozen=True)
class Prompt:
    """A system message (a fifth) and a user message; `tokens` in all, template included."""

    tokens: int
    number: int

    @property
    def name(self) -> str:
        """What its text begins with: an engine may know the prompt by it."""
        return f"[{self.tokens}/{self.number}]"

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        frame = len(render([{"role": "system"}, {"role": "user"}]))
        # A few more, as pieces may merge where passages meet.
        text = self.name + "".join(passage(self.tokens + 256, f"prompt {self.name}"))
        parts = pieces(text)[: self.tokens - frame]
        cut = len(parts) // 5
        return [
            {"role": "system", "content": "".join(parts[:cut])},
            {"role": "user", "content": "".join(parts[cut:])},
        ]

    def request(self, *, stream: bool, tokens: bool = False) -> bytes:
        """The body of a call that asks for 512 tokens, sampled as training samples them.

        `tokens`: the client asks for what training needs, token ids and log-probabilities.
        """
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": REPLY_TOKENS,
            "temperature": 1.0,
            "stream": stream,
        }
        if tokens:
            body |= {"logprobs": True, "return_token_ids": True}
        return orjson.dumps(body)


@dataclass(frozen=True)
class Reply:
    """512 sampled tokens: 511 of text and one that ends the message."""

    number: int

    @cached_property
    def texts(self) -> list[str]:
        """What each token reads as; the last one as nothing."""
        # A few more, as pieces may merge where passages meet.
        text = "".join(passage(REPLY_TOKENS + 64, f"reply {self.number}"))
        return [*pieces(text)[: REPLY_TOKENS - 1], ""]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @cached_property
    def ids(self) -> list[int]:
        return [*encode(self.text), END]

    @cached_property
    def logprobs(self) -> list[float]:
        """Most tokens are nearly sure and some are not, as in samples at temperature 1."""
        chance = random.Random(f"logprobs {self.number}")
        return [_float32(-(abs(chance.gauss(0, 1)) ** 3) / 4 - 1e-6) for _ in self.ids]


def _float32(value: float) -> float:
    return array("f", [value])[0]
