"""Calls that wait inside a real vLLM: the time is its queue's, not the prefill's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.engines.vllm_server import tiny_settings
from support.proxy.proxy_with_engine import served_proxy
from tracegrad.events import Turn
from tracegrad.inspect.rollout_time import time_of
from tracegrad.store import GroupCommitWriter, Store
from tracegrad.store.read.rollout_moments import load_moments
from tracegrad_trainer.inference.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CALLS = 4
TOKENS = 400


@pytest.fixture(scope="module")
def one_at_a_time(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    settings = tiny_settings(tiny_model_dir, tmp_path_factory.mktemp("one") / "vllm.log")
    with VllmProcess(settings.model_copy(update={"max_num_seqs": 1})) as process:
        process.wait_healthy(timeout=600)
        yield process


@pytest.mark.parametrize("stream", [True, False])
def test_three_of_four_calls_wait_for_those_before_them(
    one_at_a_time: VllmProcess, tmp_path: Path, stream: bool
) -> None:
    with (
        Store.open(f"sqlite:///{tmp_path}/store.db") as store,
        GroupCommitWriter(store) as writer,
        served_proxy(store, writer, upstream=one_at_a_time.url, model="policy") as client,
    ):

        def call(number: int, count: int = TOKENS) -> None:
            body = {
                "messages": [{"role": "user", "content": f"How many lamps are in {number}?"}],
                "max_tokens": count,
                "ignore_eos": True,
                "stream": stream,
            }
            url = f"/rollouts/r{number}/v1/chat/completions"
            client.post(url, json=body, timeout=httpx.Timeout(600)).raise_for_status()

        call(CALLS, 2)  # what the first call of all costs is nobody's queue
        with ThreadPoolExecutor(CALLS) as pool:
            list(pool.map(call, range(CALLS)))
        turns = [store.rollout_turns(f"r{number}")[0] for number in range(CALLS)]
        with store.reading() as connection:
            [moments] = load_moments(connection, ["r0"])
        shown = time_of(moments).stages
    by_wait = sorted(turns, key=lambda turn: seconds(turn, "engine_queue"))
    waits = [seconds(turn, "engine_queue") for turn in by_wait]
    stages = ("prefill", "decode") if stream else ("inference",)
    work = [sum(seconds(turn, stage) for stage in stages) for turn in by_wait]
    assert waits[0] < work[0] / 4, "nobody was before it"
    for before in range(1, CALLS):
        # Of which it saw all, but what its predecessors had done before it came.
        assert sum(work[:before]) / 2 < waits[before] < sum(work[:before]) * 2
    if stream:
        # Each prefill would be longer than its own wait if it held the wait too. Their sums are
        # compared: where two cores are busy, one first token may be seen late.
        prefills = [seconds(turn, "prefill") for turn in by_wait[1:]]
        assert sum(prefills) < sum(waits) / 2
    assert "engine_queue" in shown


def seconds(turn: Turn, stage: str) -> float:
    assert turn.timing is not None
    return float(turn.timing[stage])
