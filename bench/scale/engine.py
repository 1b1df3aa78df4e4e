"""The mock engine of the day: replies of as many tokens as are asked for, at once. `python -m
bench.scale.engine BOARD --port N --tokenizer FOLDER`.

`bench.proxy.engine` with a model's tokenizer: prompts that come as messages are rendered and
tokenised, those that come as tokens are taken as they are. How long an engine would have taken is
the simulation's to say (`workload.EngineRates`).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from bench.proxy.answers import PromptIds
from bench.proxy.engine import Connection, Engine
from bench.scale.board import Board, Cell
from bench.scale.tokenizer import END, corpus
from tracegrad.chat.messages import render_options
from tracegrad.chat.model import ChatFormat, load_chat_format
from tracegrad.chat.renderer import Renderer

# Tokens of text that replies are pieces of, and where they begin in it: every so many.
_TOKENS, _EVERY = 100_000, 97


@dataclass(frozen=True, eq=False)
class SampledText:
    """`ids` of a text and of the token that ends it."""

    texts: list[str]
    ids: list[int]
    logprobs: list[float]

    @cached_property
    def text(self) -> str:
        return "".join(self.texts)


class Replies:
    """Pieces of one long text."""

    def __init__(self, chat: ChatFormat) -> None:
        self._ids = chat.tokenizer.encode(corpus(_TOKENS, "replies")).tolist()
        self._texts = [chat.tokenizer.decode([token]) for token in self._ids]
        [self._end] = chat.tokenizer.encode(END)
        chance = Random("log-probabilities")
        self._logprobs = [-(abs(chance.gauss(0, 1)) ** 3) / 4 - 1e-6 for _ in self._ids]

    def reply(self, number: int, tokens: int) -> SampledText:
        """`tokens`: with the one that ends it."""
        start = number * _EVERY % (len(self._ids) - tokens)
        piece = slice(start, start + tokens - 1)
        return SampledText(
            [*self._texts[piece], ""],
            [*self._ids[piece], self._end],
            self._logprobs[start : start + tokens],
        )


class DayEngine(Engine):
    def __init__(self, chat: ChatFormat) -> None:
        super().__init__()
        self._chat = chat
        self._sampled = Replies(chat)

    def _reply(self, body: Mapping[str, Any], number: int) -> SampledText:
        limit: int = body.get("max_completion_tokens") or body["max_tokens"]
        return self._sampled.reply(number, limit)

    def _prompt(self, body: Mapping[str, Any]) -> PromptIds:
        if exact := (body.get("kv_transfer_params") or {}).get("prompt_token_ids"):
            return PromptIds(exact)
        # Of no template that reads the date.
        renderer = Renderer(self._chat, render_options(dict(body)), datetime.now())  # noqa: DTZ005
        messages = [renderer.message(message) for message in body["messages"]]
        return PromptIds(self._chat.tokenizer.encode(renderer.render(messages)).tolist())


class CountedConnection(Connection):
    """Bytes of the bodies and heads go on the board."""

    def __init__(self, engine: Engine, board: Board) -> None:
        super().__init__(engine)
        self._board = board

    def data_received(self, data: bytes) -> None:
        self._board.add(Cell.ENGINE_BYTES_IN, len(data))
        super().data_received(data)

    def send(self, data: bytes) -> None:
        self._board.add(Cell.ENGINE_BYTES_OUT, len(data))
        super().send(data)


async def _main(board: Board, port: int, tokenizer: Path) -> None:
    engine = DayEngine(load_chat_format(tokenizer))
    server = await asyncio.get_running_loop().create_server(
        lambda: CountedConnection(engine, board), "127.0.0.1", port, backlog=2048
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("board", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    uvloop.run(_main(Board(options.board), options.port, options.tokenizer))
