"""How the engine's model writes its prompts, found out when it is first needed."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from tracegrad.chat.messages import RenderOptions, render_options
from tracegrad.chat.model import ChatFormat, NotReproducible, load_chat_format
from tracegrad.chat.model_folder import ModelNotFound, find_model_folder
from tracegrad.events import Json
from tracegrad.proxy.http.errors import ApiError
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork

log = logging.getLogger("tracegrad.proxy")

# So many of the engine's prompts are tokenised here too before the tokenizer is believed.
CHECKED = 16

# The engine's answer to GET /v1/models.
ListsModels = Callable[[], Awaitable[bytes]]


class EngineRenderer:
    """`folder`: of tokenizer and chat template; without one, what the engine calls its root.
    `chat_template`: the file that the engine was given in place of the model's; `kwargs`: the
    template arguments that it takes where a request has none."""

    def __init__(
        self,
        folder: Path | None,
        models: ListsModels,
        *,
        chat_template: Path | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._models = models
        self._chat_template = chat_template
        self._kwargs = dict(kwargs or {})
        self._found: ChatFormat | PromptFork | None = None
        self._lock = asyncio.Lock()
        self._checked = 0
        self._said = False

    async def get(self) -> ChatFormat | PromptFork:
        """The fork that every continuation meets where prompts cannot be reproduced exactly."""
        if self._found is None:
            async with self._lock:
                if self._found is None:
                    return await self._find()
        return self._found

    def frame(self, body: Json) -> RenderOptions:
        """What the engine renders a request from besides its messages."""
        return render_options(body, self._kwargs)

    def reproduces(self, text: ChatFormat, prompt_ids: array[int]) -> bool:
        """Whether the tokens that the engine made of a prompt are those that are made of it here.

        What is new in a prompt is tokenised here, and the engine takes whatever it is given: a
        folder that is not quite the engine's would go unnoticed. Slow for long prompts, so only
        the first ones are looked at; not to be called on the event loop.
        """
        if self._checked >= CHECKED:
            return True
        if text.tokenizer.encode(text.tokenizer.decode(prompt_ids)) == prompt_ids:
            self._checked += 1
            return True
        if not self._said:
            self._said = True
            log.error("the engine's tokens of a prompt are not those of the tokenizer found here")
        return False

    async def _find(self) -> ChatFormat | PromptFork:
        try:
            folder = self._folder or await self._root()
            self._found = await asyncio.to_thread(self._load, folder)
        except NotReproducible as error:
            log.warning("prompts are not continued token for token: %s", error)
            self._found = PromptFork(ForkReason.TOKENIZER, str(error))
        except ApiError as error:
            # The engine is away: it may be asked again with the next call.
            return PromptFork(ForkReason.TOKENIZER, error.message)
        return self._found

    def _load(self, folder: Path) -> ChatFormat:
        own = self._chat_template
        try:
            template = own.read_text(encoding="utf-8") if own is not None else None
        except (OSError, UnicodeDecodeError) as error:
            raise NotReproducible(f"chat_template {own}: {error}") from error
        return load_chat_format(folder, chat_template=template)

    async def _root(self) -> Path:
        try:
            root = orjson.loads(await self._models())["data"][0].get("root")
        except (ValueError, KeyError, TypeError, LookupError, AttributeError) as error:
            raise NotReproducible("the engine does not say where its model is") from error
        if not isinstance(root, str):
            raise NotReproducible("the engine does not say where its model is")
        try:
            # Of a model of the Hub an engine on this machine has filled the cache.
            return await asyncio.to_thread(find_model_folder, root, weights=False, fetch=False)
        except ModelNotFound as error:
            raise NotReproducible(
                f"the engine's model is {root!r}, no folder here and not in the Hub's cache: give "
                "its tokenizer's folder, or the model's name on the Hub, with --tokenizer"
            ) from error
