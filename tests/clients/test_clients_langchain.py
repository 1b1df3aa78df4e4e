"""LangChain's own standard tests of chat models, with OpenAI's and Anthropic's models at the proxy.

What the suite asks of a model the engine does; what it asks of a provider the proxy has to carry,
both ways. After each class everything that was sampled must be in the store.

Left out, in all three: PDFs, since vLLM has no such content part (refused by name, see the end),
and the suite's benchmark (`test_stream_time`), which replays recordings of the vendor's servers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import anthropic
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests, chat_models

from support.engines.mock_engine import MODEL
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, assert_all_recorded, proxy_with_engine
from support.proxy.servers import EngineServer

PNG = base64.b64decode("iVBORw0KGgo=")
# Where the suite's links to pictures point; the engine of these tests follows none.
PICTURES = "raw.githubusercontent.com"
LONG = "Remember all of this. " * 10

# LangChain's own: of OpenAI's `parsed`, and of schemas of pydantic 1.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Details = dict[Literal["invoke", "stream"], list[Any]]


@pytest.fixture(scope="class")
def proxied(
    engine_server: EngineServer,
    new_store: Callable[[], Path],
    request: pytest.FixtureRequest,
) -> Iterator[ProxyWithEngine]:
    """One proxy for a class of tests; what it recorded is checked in the end."""
    pictures = {"allowed_media_domains": [PICTURES]}
    with proxy_with_engine(engine_server, PromptDrivenEngine(), new_store(), **pictures) as rig:
        request.cls.rig = rig
        yield rig
        assert_all_recorded(rig.engine, rig.all_turns())
        assert any(turn.parent_id for turn in rig.all_turns()), "an agent's loop is one path"
        assert {turn.dialect for turn in rig.all_turns()} == {request.cls.dialect}


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite takes its pictures and its birdsong from the internet."""
    monkeypatch.setenv("LANGCHAIN_TESTS_USER_AGENT", "none")
    stand_in = SimpleNamespace(get=lambda url, **_: SimpleNamespace(content=PNG))
    monkeypatch.setattr(chat_models, "httpx", stand_in)


@pytest.mark.usefixtures("proxied")
class Suite(ChatModelIntegrationTests):
    """What the three have in common."""

    __test__ = False
    rig: ClassVar[ProxyWithEngine]
    dialect: ClassVar[str]
    _count: ClassVar[Iterator[int]] = count()

    @property
    def base_url(self) -> str:
        """Each model's is its own: LangChain keeps one HTTP client for each URL, and one that
        was used in another test's event loop is broken."""
        return f"{self.rig.url}/rollouts/lc-{next(self._count)}"

    @property
    def model_override_value(self) -> str:
        return "another-model"

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_image_urls(self) -> bool:
        return True

    @property
    def supports_image_tool_message(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    # No `supports_pdf_inputs`, no `supports_pdf_tool_message`: vLLM has no such part.
    # No `enable_vcr_tests`: there are no recordings to replay.

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self.asked_twice(LONG, stream=stream)

    def asked_twice(self, prompt: str, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke(prompt)
        return _said(model, prompt, stream=stream)


class OpenAISuite(Suite):
    __test__ = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": f"{self.base_url}/v1",
            "api_key": "any",
            "max_retries": 0,
            "timeout": 20,
            "stream_usage": True,  # left out by default for any server but OpenAI's
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {
            "invoke": ["reasoning_output", "cache_read_input"],
            "stream": ["reasoning_output", "cache_read_input"],
        }

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        message = _said(model, "Think, then answer.", stream=stream)
        assert message.usage_metadata["output_token_details"]["reasoning"] > 0
        return message


class TestChatOpenAI(OpenAISuite):
    __test__ = True
    dialect = "chat"

    @property
    def supports_audio_inputs(self) -> bool:
        return True

    def test_a_pdf_is_refused_by_name(self, model: BaseChatModel) -> None:
        with pytest.raises(openai.BadRequestError, match="Unknown part type: file"):
            model.invoke([_with_pdf()])

    def test_a_stream_without_usage_is_a_turn_as_any(self) -> None:
        params = {**self.chat_model_params}
        del params["stream_usage"]
        message = _said(ChatOpenAI(**params), "Count me.", stream=True)
        assert message.usage_metadata is None, "LangChain's default for such a server"
        [turn] = [turn for turn in self.rig.all_turns() if "Count me." in str(turn.request)]
        assert turn.untrainable is None
        assert len(turn.completion_token_ids) == len(turn.completion_logprobs) > 0


class TestChatOpenAIResponses(OpenAISuite):
    __test__ = True
    dialect = "responses"

    @property
    def supports_audio_inputs(self) -> bool:
        return True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}

    def test_a_pdf_is_refused_by_name(self, model: BaseChatModel) -> None:
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content\[1\]"):
            model.invoke([_with_pdf()])


class TestChatAnthropic(Suite):
    __test__ = True
    dialect = "messages"

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": self.base_url,
            "api_key": "any",
            "max_tokens": 4096,
            "max_retries": 0,
            "timeout": 20,
        }

    # No `supports_json_mode`, no `supports_audio_inputs`: Anthropic's API has neither.

    def test_a_pdf_is_refused_by_name(self, model: BaseChatModel) -> None:
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.1"):
            model.invoke([_with_pdf()])


def _said(model: BaseChatModel, prompt: str, *, stream: bool) -> AIMessage:
    if not stream:
        return model.invoke(prompt)
    first, *others = model.stream(prompt)
    return sum(others, first)


def _with_pdf() -> HumanMessage:
    pdf = {"type": "file", "base64": "JVBERg==", "mime_type": "application/pdf"}
    return HumanMessage([{"type": "text", "text": "Sum up"}, {**pdf, "filename": "a.pdf"}])
