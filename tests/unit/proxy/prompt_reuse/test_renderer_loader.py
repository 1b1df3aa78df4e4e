"""How the proxy comes to know the engine's tokenizer and template, and when it trusts them."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import huggingface_hub.constants
import pytest

from support.chat.fake_hub import put_in_cache
from support.system.log_lines import our_lines
from support.trainer.char_model import char_tokenizer
from tracegrad.chat.model import ChatFormat
from tracegrad.chat.renderer import Renderer
from tracegrad.events import token_id_array
from tracegrad.proxy.http.errors import Unavailable
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason, PromptFork
from tracegrad.proxy.prompt_reuse.renderer_loader import CHECKED, EngineRenderer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    char_tokenizer().save_pretrained(path)
    return path


class Engine:
    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    async def models(self) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()


def root(path: object) -> object:
    return {"data": [{"id": "policy", "root": str(path)}]}


async def test_the_folder_is_the_one_that_the_engine_serves(folder: Path) -> None:
    engine = Engine(root(folder))
    text = EngineRenderer(None, engine.models)
    found = await text.get()
    assert isinstance(found, ChatFormat)
    assert found.tokenizer.decode(found.tokenizer.encode("hello")) == "hello"
    assert await text.get() is found
    assert engine.answers == [], "asked once"


async def test_a_model_of_the_hub_is_looked_for_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `vllm serve org/name` on this machine has put it; nothing is fetched for it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    missing = await EngineRenderer(None, Engine(root("org/name")).models).get()
    assert isinstance(missing, PromptFork)
    assert "not in the Hub's cache: give its tokenizer's folder" in missing.detail
    put_in_cache(tmp_path, "org/name", folder, "a" * 40)
    text = EngineRenderer(None, Engine(root("org/name")).models)
    assert isinstance(await text.get(), ChatFormat)


async def test_a_folder_that_is_given_needs_no_engine(folder: Path) -> None:
    assert isinstance(await EngineRenderer(folder, Engine().models).get(), ChatFormat)


@pytest.mark.parametrize("answer", [root("org/name"), {"data": []}, {"data": [{}]}, [], 3])
async def test_without_a_folder_nothing_is_continued(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    text = EngineRenderer(None, Engine(answer).models)
    found = await text.get()
    assert isinstance(found, PromptFork)
    assert found.reason is ForkReason.TOKENIZER
    assert await text.get() is found
    assert len(our_lines(caplog)) == 1, "said once"


async def test_an_engine_that_is_away_is_asked_again(folder: Path) -> None:
    away = Unavailable("nobody there", code="upstream_unreachable")
    text = EngineRenderer(None, Engine(away, root(folder)).models)
    assert isinstance(await text.get(), PromptFork)
    assert isinstance(await text.get(), ChatFormat)


async def test_other_tokens_than_the_engines_are_not_continued(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = EngineRenderer(folder, Engine().models)
    found = await text.get()
    assert isinstance(found, ChatFormat)
    right = found.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n")
    assert text.reproduces(found, right)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert not text.reproduces(found, token_id_array([*right, 100_000]))
    assert len(our_lines(caplog)) == 1, "said once"


async def test_a_tokenizer_that_was_right_often_is_believed(folder: Path) -> None:
    text = EngineRenderer(folder, Engine().models)
    found = await text.get()
    assert isinstance(found, ChatFormat)
    for _ in range(CHECKED):
        assert text.reproduces(found, found.tokenizer.encode("hello"))
    assert text.reproduces(found, token_id_array([100_000])), "not looked at any more"


async def test_an_engines_own_template_and_arguments_are_taken(
    folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ style }}: {{ messages[0].content }}")
    text = EngineRenderer(
        folder, Engine().models, chat_template=own, kwargs={"style": "brief", "other": 1}
    )
    found = await text.get()
    assert isinstance(found, ChatFormat)
    messages = [{"role": "user", "content": "hi"}]
    now = datetime(2026, 11, 20, tzinfo=UTC)
    asked = {"chat_template_kwargs": {"style": "long"}}
    assert Renderer(found, text.frame({}), now).render(messages) == "brief: hi"
    assert Renderer(found, text.frame(asked), now).render(messages) == "long: hi"
    own.unlink()
    gone = await EngineRenderer(folder, Engine().models, chat_template=own).get()
    assert isinstance(gone, PromptFork)
    assert str(own) in gone.detail
