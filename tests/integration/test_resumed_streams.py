"""A real vLLM, killed while it streams and started again: clients get the rest, by tokens."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from support.chat.chat_templates import chat_template
from support.proxy.proxy_with_engine import served_proxy
from support.proxy.servers import eventually
from support.trainer.tiny_model import tiny_model, tiny_tokenizer
from tracegrad.events import Json
from tracegrad.store import GroupCommitWriter, Store
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SLOW_S = 600.0  # for what takes seconds on an idle machine
TOKENS = 1500  # more than are sampled before the kill
CALLS: dict[str, Json] = {
    "completions": {"prompt": "How many lamps are in Oslo?"},
    # The parser takes all for a thought that is not told to be ended.
    "chat/completions": {"messages": [{"role": "user", "content": "How many lamps?"}]},
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = tiny_tokenizer()
    found.chat_template = chat_template("Qwen-Qwen3-0.6B")
    return found


@pytest.fixture(scope="module")
def engine(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    folder = tmp_path_factory.mktemp("engine")
    model = tiny_model(len(tokenizer))
    model.config.max_position_embeddings = 4096
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "run").mkdir(mode=0o700)
    settings = VllmSettings(
        model=str(folder / "model"),
        socket=folder / "run" / "vllm.sock",
        max_model_len=4096,
        kv_cache_memory_bytes=128 << 20,
        reasoning_parser="qwen3",
        log=folder / "vllm.log",
    )
    with VllmProcess(settings) as process:
        process.wait_healthy(timeout=SLOW_S)
        yield process


def test_a_text_and_a_thought_go_on_behind_a_killed_engine(
    engine: VllmProcess,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "tracegrad.proxy")
    lines: dict[str, list[str]] = {path: [] for path in CALLS}
    with (
        Store.open(f"sqlite:///{tmp_path}/store.db") as store,
        GroupCommitWriter(store) as writer,
        served_proxy(store, writer, upstream=engine.url, model="policy", max_wait_s=SLOW_S) as http,
    ):

        def stream(path: str) -> None:
            asks = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
            url = f"/rollouts/{path.partition('/')[0]}/v1/{path}"
            timeout = httpx.Timeout(SLOW_S)
            with http.stream("POST", url, json={**asks, **CALLS[path]}, timeout=timeout) as answer:
                lines[path] += (line for line in answer.iter_lines() if line)

        with ThreadPoolExecutor() as pool:
            running = [pool.submit(stream, path) for path in CALLS]
            eventually(lambda: all(len(each) > 20 for each in lines.values()), SLOW_S)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            engine.stop()
            engine.start()
            engine.wait_healthy(timeout=SLOW_S)
            for each in running:
                each.result()
        turns = {path: store.rollout_turns(path.partition("/")[0])[0] for path in CALLS}
    went_on = [record for record in caplog.records if "goes on behind" in record.getMessage()]
    assert len(went_on) == len(CALLS)
    for path, turn in turns.items():
        assert lines[path][-1] == "data: [DONE]"
        assert (turn.untrainable, turn.finish_reason) == ("greedy", "length")
        assert len(turn.completion_token_ids) == TOKENS
        is_thought = path.startswith("chat")
        ids = turn.completion_token_ids.tolist()
        sampled = tokenizer.decode(ids, skip_special_tokens=not is_thought)
        # A random model's bytes are not all letters, and may end in half of one.
        words = ascii_of(said(lines[path], is_thought))
        assert ascii_of(sampled).startswith(words)
        assert 2 * len(words) > len(ascii_of(sampled)) > 0


def ascii_of(text: str) -> str:
    return "".join(letter for letter in text if letter.isascii())


def said(lines: list[str], is_thought: bool) -> str:
    """All words of a stream, which are those of a thought, or of a text."""
    data = [line for line in lines[:-1] if not line.startswith(":")]  # the proxy waited
    chunks = [json.loads(line.removeprefix("data: ")) for line in data]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if not is_thought:
        return "".join(choice["text"] for choice in choices)
    assert not any(choice["delta"].get("content") for choice in choices)
    return "".join(choice["delta"].get("reasoning") or "" for choice in choices)
