"""A push while the real proxy streams from the real vLLM: the recorded versions are exact."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.engines.vllm_server import VllmServer
from support.proxy.servers import CONTROL_KEY
from support.trainer.tiny_model import load_model, perturb, reference_logprobs
from tracegrad.store import Store
from tracegrad_trainer.inference.control_routes import EngineLostError, PushError, ServedWeights
from tracegrad_trainer.inference.engine_sleep import SleepSettings
from tracegrad_trainer.inference.logprob_probe import compare_logprobs
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.utils.network import find_free_port, http_client
from tracegrad_trainer.utils.subprocesses import ChildProcess

pytestmark = pytest.mark.vllm


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def proxy_url(vllm_server: VllmServer, store_url: str, tmp_path: Path) -> Iterator[str]:
    port = find_free_port()
    command = [str(Path(sys.executable).with_name("tracegrad")), "proxy", "--port", str(port)]
    command += ["--upstream", vllm_server.url, "--store", store_url]
    env = {"TRACEGRAD_PROXY_CONTROL_KEY": CONTROL_KEY}
    proxy = ChildProcess("proxy", command, log=tmp_path / "proxy.log", env=env)
    url = f"http://127.0.0.1:{port}"
    proxy.start()
    try:
        proxy.wait_until_ready(lambda: _is_up(url), timeout_s=60)
        yield url
    finally:
        proxy.stop()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_streamed_turn_records_which_weights_sampled_each_token(
    vllm_server: VllmServer, proxy_url: str, store_url: str, sleeps: bool, tmp_path: Path
) -> None:
    """Also one that was frozen while vLLM slept. (Its CPU build gives no memory up.)"""
    lines: list[str] = []

    def stream() -> None:
        request = {
            "model": vllm_server.model,
            "messages": [{"role": "user", "content": "How many lamps are in Oslo?"}],
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{proxy_url}/rollouts/r1/v1/chat/completions"
        with httpx.stream("POST", url, json=request, timeout=60) as response:
            lines.extend(line for line in response.iter_lines() if line)

    old, new = load_model(vllm_server.model_dir), load_model(vllm_server.model_dir)
    perturb(new, seed=11)
    reader = threading.Thread(target=stream)
    with WeightPusher(
        vllm_server.url,
        proxy_url,
        proxy_key=CONTROL_KEY,
        checkpoint=vllm_server.model_dir,
        sleep=SleepSettings(2, tmp_path) if sleeps else None,
    ) as pusher:
        try:
            pusher.stop_engine()
            pusher.wake_engine()  # as after a step that was skipped; a guard has started by now
            reader.start()
            deadline = time.monotonic() + 30
            while len(lines) < 20 and time.monotonic() < deadline:
                time.sleep(0.005)
            pusher.stop_engine()  # before files are written, which may take longer than the stream
            with http_client(vllm_server.url, timeout_s=60) as client:
                assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            pusher.push(1, new.named_parameters())
            reader.join(60)
        finally:
            pusher.push(2, old.named_parameters())

    assert lines[-1] == "data: [DONE]"
    with Store.open(store_url) as store:
        [turn] = store.rollout_turns("r1")
    [(before, switch), (after, rest)] = turn.policy_versions
    assert (before, after) == (0, 1)
    assert switch > 0
    assert rest > 0
    assert turn.untrainable is None
    answered = json.loads(lines[0].removeprefix("data: "))["id"]
    assert answered == f"chatcmpl-{turn.turn_id}", "by which feedback finds the turn"
    ids = turn.prompt_token_ids, turn.completion_token_ids
    served = list(turn.completion_logprobs)
    compare_logprobs(served[:switch], reference_logprobs(old, *ids)[:switch], 1e-4)
    compare_logprobs(served[switch:], reference_logprobs(new, *ids)[switch:], 1e-4)


@pytest.mark.parametrize(
    ("left", "back"),
    [(True, "version 4 is back"), (False, r"version 0 \(the model's folder\) is back")],
)
def test_a_first_push_that_is_wrong_leaves_an_endpoint_with_weights_that_are_right(
    vllm_server: VllmServer, proxy_url: str, store_url: str, left: bool, back: str
) -> None:
    """It may be one that people use: its calls go on, with what an earlier run served if that was
    kept (`left`), and with the model's own weights if not."""
    with http_client(proxy_url, timeout_s=60, key=CONTROL_KEY) as client:
        client.post("/api/push/version", json={"version": 4}).raise_for_status()
    before, new = load_model(vllm_server.model_dir), load_model(vllm_server.model_dir)
    perturb(new, seed=11)
    if left:
        perturb(before, seed=4)

    def fetch(folder: Path) -> ServedWeights | None:
        if not left:
            return None
        before.save_pretrained(folder)
        return ServedWeights(4, tuple(map(str, folder.glob("*.safetensors"))))

    def fails() -> None:
        raise ArithmeticError("off by 3 nats")

    with WeightPusher(
        vllm_server.url,
        proxy_url,
        proxy_key=CONTROL_KEY,
        version=-1,
        checkpoint=vllm_server.model_dir,
    ) as pusher:
        pusher.return_to_earlier_run(fetch)
        with pytest.raises(PushError, match=f"wrongly, {back}") as caught:
            pusher.push(7, new.named_parameters(), fails)
        assert not isinstance(caught.value, EngineLostError)
    request = {
        "model": vllm_server.model,
        "messages": [{"role": "user", "content": "How many lamps are in Oslo?"}],
        "max_tokens": 20,
    }
    url = f"{proxy_url}/rollouts/r1/v1/chat/completions"
    assert httpx.post(url, json=request, timeout=60).status_code == 200
    with Store.open(store_url) as store:
        [turn] = store.rollout_turns("r1")
    assert [version for version, _ in turn.policy_versions] == [4 if left else 0]
    wanted = reference_logprobs(before, turn.prompt_token_ids, turn.completion_token_ids)
    compare_logprobs(list(turn.completion_logprobs), wanted, 1e-4)
