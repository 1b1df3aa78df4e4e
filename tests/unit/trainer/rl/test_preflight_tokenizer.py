"""The engine must read text as the model that is trained does: asked before anything is pushed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.trainer.prepared_run import save_smallest_model, settings_of
from support.trainer.tiny_model import tiny_tokenizer
from tracegrad_trainer.config.trainer import PushSettings, TrainerSettings
from tracegrad_trainer.rl.preflight import check_served_tokenizer

Answer = Callable[[str, dict[str, Any]], dict[str, Any] | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest_model(tmp_path_factory.mktemp("smallest") / "model")


class Engine(ThreadingHTTPServer):
    """Answers as `answer` says; None: it does not know the route."""

    answer: Answer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Engine)
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        found = self.server.answer(self.path, request)
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def settings(model: Path, engine: Engine) -> TrainerSettings:
    return settings_of(model, model.parent / "state", vllm__port=engine.server_address[1])


def like(tokenizer: Any) -> Answer:
    def answer(path: str, request: dict[str, Any]) -> dict[str, Any] | None:
        assert request["model"] == "policy"
        if path == "/tokenize":
            special = request["add_special_tokens"]
            return {"tokens": tokenizer.encode(request["prompt"], add_special_tokens=special)}
        assert path == "/detokenize"
        return {"prompt": tokenizer.decode(request["tokens"])}

    return answer


def test_the_same_tokenizer_is_let_through(model: Path, engine: Engine) -> None:
    engine.answer = like(tiny_tokenizer())
    check_served_tokenizer(settings(model, engine))


def test_other_ids_for_a_text_are_refused(model: Path, engine: Engine) -> None:
    other = tiny_tokenizer()

    def reversed_ids(path: str, request: dict[str, Any]) -> dict[str, Any] | None:
        return {"tokens": other.encode(request["prompt"])[::-1]}

    engine.answer = reversed_ids
    with pytest.raises(ValueError, match="its tokenizer is not the engine's: token 0 of a text"):
        check_served_tokenizer(settings(model, engine))


def test_a_vocabulary_that_goes_on_otherwise_is_refused(model: Path, engine: Engine) -> None:
    """Tokens that were added to one of the two do not show in a text."""
    same = like(tiny_tokenizer())

    def shorter(path: str, request: dict[str, Any]) -> dict[str, Any] | None:
        return same(path, request) if path == "/tokenize" else {"prompt": ""}

    engine.answer = shorter
    with pytest.raises(ValueError, match="its last one, differs"):
        check_served_tokenizer(settings(model, engine))


def test_an_engine_that_cannot_be_asked_is_taken_at_its_word(model: Path, engine: Engine) -> None:
    engine.answer = lambda path, request: None
    check_served_tokenizer(settings(model, engine))


def test_each_of_several_engines_is_asked(model: Path, engine: Engine) -> None:
    engine.answer = like(tiny_tokenizer())
    with Engine(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        both = settings(model, engine).with_changes(push=PushSettings(engines=(url,)))
        other.answer = like(tiny_tokenizer())
        check_served_tokenizer(both)
        other.answer = lambda path, request: {"tokens": [1], "prompt": "x"}
        with pytest.raises(ValueError, match=f"vLLM at {url} must serve the tokenizer"):
            check_served_tokenizer(both)
        other.shutdown()
