"""Weights pushed into a real vLLM: what is served is what transformers computes, token by token.

On a CPU in fp32 the two agree to about 1e-6 nats, so a stale layer, head or cache cannot hide.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from support.engines.vllm_server import VllmServer, tiny_settings
from support.trainer.ipc_engine import HostGpus
from support.trainer.tiny_model import (
    load_model,
    perturb,
    reference_logprobs,
    save_tiny_model,
    tiny_sizes,
    tiny_tokenizer,
)
from tracegrad_trainer.engine import as_hf_tensors
from tracegrad_trainer.engine.config import LoraSettings
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.inference import weight_buckets
from tracegrad_trainer.inference.control_routes import PushError, ServedWeights
from tracegrad_trainer.inference.engine_config import check_engines
from tracegrad_trainer.inference.live_weights import LiveWeights
from tracegrad_trainer.inference.logprob_probe import (
    ProbeMismatchError,
    compare_logprobs,
    sample_probe,
)
from tracegrad_trainer.inference.transports import transport_of
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_broadcast import BroadcastControl
from tracegrad_trainer.inference.weight_ipc import IpcControl
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.inference.zero_adapter import zero_adapter
from tracegrad_trainer.utils.network import http_client

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-4  # nats, the largest difference over all tokens
SHORT = [5, 6, 7, 8]
LONG = [5 + (7 * i) % 400 for i in range(600)]  # several whole blocks of the prefix cache


@pytest.fixture
def model(tiny_model_dir: Path) -> PreTrainedModel:
    return load_model(tiny_model_dir)


@pytest.fixture(params=["files", "gloo"])
def pusher(
    vllm_server: VllmServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightPusher]:
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 100_000)  # several
    transport = transport_of(request.param, torch.device("cpu"))
    with WeightPusher(
        vllm_server.url, checkpoint=vllm_server.model_dir, transport=transport
    ) as pusher:
        yield pusher
        original = load_model(vllm_server.model_dir)
        pusher.push(-1, original.named_parameters())


def agrees(
    url: str,
    model: PreTrainedModel,
    *prompts: list[int],
    tokens: int = 48,
    cache_salt: str | None = None,
) -> None:
    for prompt in prompts:
        sample = sample_probe(url, prompt, tokens=tokens, cache_salt=cache_salt)
        compare_logprobs(
            sample.logprobs, reference_logprobs(model, prompt, sample.token_ids), TOLERANCE
        )


def served_version(url: str) -> str:
    with http_client(url, timeout_s=60) as client:
        version: str = client.get("/weight_info").json()["weight_version"]
    return version


def test_served_equals_trained_before_and_after_each_push(
    vllm_server: VllmServer, model: PreTrainedModel, pusher: WeightPusher
) -> None:
    agrees(vllm_server.url, model, SHORT)
    for version in (1, 2):
        perturb(model, seed=version)
        pusher.push(version, model.named_parameters())
        agrees(vllm_server.url, model, SHORT)
        assert served_version(vllm_server.url) == str(version)


def test_an_engine_without_a_gpu_gets_files_in_place_of_shared_memory(
    vllm_server: VllmServer,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM's own words say why, before anything is paused; the push is served all the same."""
    gpus, host = HostGpus(monkeypatch, 1).devices, torch.device("cpu")
    live = LiveWeights(lambda _: None, lambda: iter(()), lambda gathered: gathered)
    transport = partial(IpcControl, device=host, engine_devices=gpus, live=live)
    original = load_model(vllm_server.model_dir)
    with (
        WeightPusher(
            vllm_server.url, checkpoint=vllm_server.model_dir, transport=transport
        ) as pusher,
        caplog.at_level(logging.WARNING),
    ):
        pusher.push(1, perturb(model, seed=1).named_parameters())
        agrees(vllm_server.url, model, SHORT)
        pusher.push(-1, original.named_parameters())
    assert "opens no memory of rank 0's" in caplog.text
    assert "pushes go by files" in caplog.text


def test_without_the_push_the_two_differ(vllm_server: VllmServer, model: PreTrainedModel) -> None:
    with pytest.raises(ProbeMismatchError):
        agrees(vllm_server.url, perturb(model, seed=1), SHORT)


def test_a_prompt_cached_before_the_push_is_not_stale_after(
    vllm_server: VllmServer, model: PreTrainedModel, pusher: WeightPusher
) -> None:
    agrees(vllm_server.url, model, LONG, LONG)  # the second one reads the cache
    pusher.push(1, perturb(model, seed=3).named_parameters())
    agrees(vllm_server.url, model, LONG, LONG)


def test_a_kept_cache_is_of_no_use_to_calls_of_the_new_version(
    vllm_server: VllmServer, model: PreTrainedModel, pusher: WeightPusher
) -> None:
    pusher._swap.halt.keep_cache = True
    for _ in range(2):
        agrees(vllm_server.url, model, LONG, cache_salt="0")
    pusher.push(1, perturb(model, seed=6).named_parameters())
    agrees(vllm_server.url, model, LONG, cache_salt="1")
    with pytest.raises(ProbeMismatchError):  # it was kept: it is stale
        agrees(vllm_server.url, model, LONG, cache_salt="0")


def test_a_stream_goes_on_with_what_it_had_computed(
    vllm_server: VllmServer,
    model: PreTrainedModel,
    pusher: WeightPusher,
) -> None:
    stream, reader = stopped_half_way(vllm_server, pusher, keep_cache=True)
    begun = len(stream.tokens)
    pusher.push(1, perturb(model, seed=7).named_parameters())
    reader.join(60)
    assert len(stream.tokens) == 500
    new = reference_logprobs(model, stream.prompt, stream.tokens)
    with pytest.raises(ProbeMismatchError):  # the weights are new, what was computed is not
        compare_logprobs(stream.logprobs[begun:], new[begun:], TOLERANCE)
    agrees(vllm_server.url, model, LONG, cache_salt="unknown before")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """httpx ends a line at U+2028, too, which may be in the text."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


@dataclass
class Stream:
    """A streaming chat completion read in a thread; its tokens as they arrive."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def read(self, server: VllmServer, max_tokens: int) -> None:
        request = {
            "model": server.model,
            "messages": [{"role": "user", "content": "How many lamps are in Oslo?"}],
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "logprobs": True,
            "return_token_ids": True,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            http_client(server.url, timeout_s=60) as client,
            client.stream("POST", "/v1/chat/completions", json=request) as response,
        ):
            for line in _lines(response.iter_bytes()):
                if line.startswith(b"data: {"):
                    self._take(json.loads(line.removeprefix(b"data: ")))

    def _take(self, chunk: dict[str, Any]) -> None:
        self.prompt = self.prompt or chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            ids = choice.get("token_ids") or []
            self.logprobs += [e["logprob"] for e in (choice["logprobs"] or {}).get("content", [])]
            self.tokens += ids
            self.finish_reason = choice["finish_reason"] or self.finish_reason


def stopped_half_way(
    server: VllmServer, pusher: WeightPusher, tokens: int = 500, *, keep_cache: bool = False
) -> tuple[Stream, threading.Thread]:
    """A stream that the engine was stopped in the middle of. On a loaded machine the engine may be
    done with it before we have read that it began: then another one."""
    pusher._swap.halt.keep_cache = keep_cache
    for _ in range(20):
        stream = Stream()
        reader = threading.Thread(target=stream.read, args=(server, tokens))
        reader.start()
        deadline = time.monotonic() + 30
        while len(stream.tokens) < 20 and time.monotonic() < deadline:
            time.sleep(0.001)
        pusher.stop_engine()
        read = -1
        while read < len(stream.tokens):  # what was sampled before the stop is on its way
            read = len(stream.tokens)
            time.sleep(0.3)
        if 20 <= read < tokens:
            return stream, reader
        reader.join(60)
        pusher.wake_engine()
    raise AssertionError("no stream was met half-way")


def test_a_stream_in_flight_goes_on_with_the_new_weights(
    vllm_server: VllmServer,
    model: PreTrainedModel,
    pusher: WeightPusher,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_mark: list[int] = []
    # Before files are written, which may take longer than the stream.
    stream, reader = stopped_half_way(vllm_server, pusher)
    monkeypatch.setattr(
        pusher._swap.proxy, "set_version", lambda version: at_mark.append(len(stream.tokens))
    )
    pusher.push(1, perturb(model, seed=4).named_parameters())
    reader.join(60)

    [mark] = at_mark
    assert 20 <= mark < 500, "the push met the stream half-way"
    assert len(stream.tokens) == len(stream.logprobs) == 500
    assert stream.finish_reason == "length"
    old = reference_logprobs(load_model(tiny_model_dir), stream.prompt, stream.tokens)
    new = reference_logprobs(model, stream.prompt, stream.tokens)
    compare_logprobs(stream.logprobs[:mark], old[:mark], TOLERANCE)
    compare_logprobs(stream.logprobs[mark:], new[mark:], TOLERANCE)


def test_a_call_that_arrives_during_the_push_waits_and_gets_the_new_weights(
    vllm_server: VllmServer, model: PreTrainedModel, pusher: WeightPusher
) -> None:
    perturb(model, seed=5)
    caller = threading.Thread(target=lambda: None)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            agrees(vllm_server.url, model, SHORT)
        except BaseException as error:
            failed.append(error)

    def call_half_way() -> Iterator[tuple[str, Any]]:
        yield from model.named_parameters()

    with pytest.MonkeyPatch.context() as patch:
        name = "load_staged" if pusher._swap.stages else "load"
        load = getattr(pusher._swap.engines, name)

        def call_then_load(served: ServedWeights) -> None:
            nonlocal caller
            caller = threading.Thread(target=call)
            caller.start()
            time.sleep(0.1)
            load(served)

        patch.setattr(pusher._swap.engines, name, call_then_load)
        pusher.push(1, call_half_way())
    caller.join(60)
    assert not failed


@pytest.mark.parametrize("broken", ["half of the model", "a wrong shape", "a truncated file"])
def test_a_failed_push_leaves_the_old_version_serving_and_says_so(
    vllm_server: VllmServer,
    model: PreTrainedModel,
    pusher: WeightPusher,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pusher.push(1, perturb(model, seed=6).named_parameters())
    weights = [(name, p.detach().clone() * 2) for name, p in model.named_parameters()]
    if broken == "half of the model":
        # q without k: the two are one layer of vLLM's, and half of it is worse than none.
        weights = [(name, tensor) for name, tensor in weights if "k_proj" not in name]
        reason = r"lacks weights of model\.layers\.0\.self_attn\.qkv_proj"
    elif broken == "a wrong shape":
        weights = [(n, t[:8] if n.endswith("1.mlp.up_proj.weight") else t) for n, t in weights]
        reason = r"model\.layers\.1\.mlp\.up_proj\.weight \(8, 128\) does not fit"
    else:
        write = pusher._files.write

        def write_half(version: int, tensors: Any) -> list[Path]:
            paths = write(version, tensors)
            paths[0].write_bytes(paths[0].read_bytes()[:100_000])
            return paths

        monkeypatch.setattr(pusher._files, "write", write_half)
        reason = "file not fully covered"
    with pytest.raises(
        PushError, match=f"version 2 is not (served, version 1 still is|pushed).*{reason}"
    ):
        pusher.push(2, weights)
    monkeypatch.undo()
    agrees(vllm_server.url, model, SHORT, LONG)
    assert served_version(vllm_server.url) == "1"

    pusher.push(3, perturb(model, seed=7).named_parameters())
    agrees(vllm_server.url, model, SHORT, LONG)


@pytest.mark.parametrize("pusher", ["gloo"], indirect=True)
def test_what_a_worker_cannot_receive_it_says_before_the_broadcast(
    vllm_server: VllmServer,
    model: PreTrainedModel,
    pusher: WeightPusher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else rank 0 would wait for it, and the engine stand still, for as long as a request may."""
    first = iter(["float99"])
    send = BroadcastControl._update

    def send_misnamed(self: BroadcastControl, info: dict[str, Any]) -> None:
        buckets = [[list(spec) for spec in bucket] for bucket in info.get("buckets", [])]
        if buckets and (dtype := next(first, None)):
            buckets[0][0][1] = dtype
        send(self, info | {"buckets": buckets})

    monkeypatch.setattr(BroadcastControl, "_update", send_misnamed)
    with pytest.raises(PushError, match="'float99' is no dtype of torch"):
        pusher.push(1, perturb(model, seed=12).named_parameters())
    agrees(vllm_server.url, load_model(vllm_server.model_dir), SHORT)


def test_weights_that_fail_verification_are_taken_back(
    vllm_server: VllmServer, model: PreTrainedModel, pusher: WeightPusher, tiny_model_dir: Path
) -> None:
    perturb(model, seed=8)
    wrong = [(n, p.detach() * (1.5 if "down" in n else 1)) for n, p in model.named_parameters()]
    with pytest.raises(PushError, match=r"served wrongly, version 0 is back: .* nats"):
        pusher.push(1, wrong, verify=lambda: agrees(vllm_server.url, model, SHORT))
    agrees(vllm_server.url, load_model(tiny_model_dir), SHORT, LONG)
    assert served_version(vllm_server.url) == "0"


def save_mixtral(folder: Path) -> Path:
    """Its folder names a block's experts otherwise than transformers and vLLM do in memory, and
    vLLM's kernel on a CPU wants them wider than they are (48)."""
    tokenizer = tiny_tokenizer()
    sizes = tiny_sizes(len(tokenizer), hidden_size=128, max_position_embeddings=1024)
    torch.manual_seed(0)
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes, **experts, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    MixtralForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_qwen2(folder: Path) -> Path:
    """With biases, which vLLM loads otherwise than matrices, and a head of its own."""
    tokenizer = tiny_tokenizer()
    sizes = tiny_sizes(len(tokenizer), hidden_size=128, max_position_embeddings=1024)
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0
    )
    perturb(Qwen2ForCausalLM(config).float(), seed=9).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


MODELS = {
    "mixtral": save_mixtral,
    "biases": save_qwen2,
    "untied": lambda folder: save_tiny_model(folder, tied=False),
}


@pytest.mark.parametrize(
    "kind", ["mixtral", "biases", pytest.param("untied", marks=pytest.mark.slow)]
)
def test_other_shapes_of_model_take_new_weights(kind: str, tmp_path: Path) -> None:
    folder = MODELS[kind](tmp_path / "model")
    model = load_model(folder)
    with VllmProcess(tiny_settings(folder, tmp_path / "vllm.log")) as process:
        process.wait_healthy(timeout=240)
        agrees(process.url, model, SHORT)
        with WeightPusher(process.url, checkpoint=folder) as pusher:
            for version in (1, 2):
                perturb(model, seed=version)
                pusher.push(version, as_hf_tensors(model, model.named_parameters()))
                agrees(process.url, model, SHORT, LONG)


def moved(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Another adapter; the weights beneath stay."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if lora.is_adapter_parameter(name):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def test_adapters_are_served_beside_their_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = lora.attach_adapters(load_model(tiny_model_dir), LoraSettings(rank=4, alpha=8))
    assert isinstance(model, PreTrainedModel)
    config = lora.adapter_config(model)
    adapter = tmp_path / "run" / "adapter"
    settings = tiny_settings(tiny_model_dir, tmp_path / "vllm.log").model_copy(
        update={"adapter": adapter, "adapter_rank": 4}
    )
    with VllmProcess(settings) as process:
        process.wait_healthy(timeout=240)
        server = VllmServer(process.url, tiny_model_dir, "policy", process, tmp_path)
        agrees(process.url, load_model(tiny_model_dir), SHORT, LONG)  # nothing is pushed yet
        check_engines((process.url,), settings)
        with pytest.raises(ValueError, match=r'"tracegrad_shm"}\', --served-model-name policy$'):
            check_engines((process.url,), settings.model_copy(update={"adapter": None}))
        with WeightPusher(process.url, checkpoint=zero_adapter(adapter), adapter=config) as pusher:
            report = pusher.push(1, lora.adapter_tensors(moved(model, seed=1)))
            assert report.carried == "adapter"
            assert report.bytes < sum(p.nbytes for p in model.parameters()) / 4
            agrees(process.url, model, SHORT, LONG, LONG)  # no cache of the model alone
            assert served_version(process.url) == "1"

            wrong = [(n.replace("o_proj", "p"), t) for n, t in lora.adapter_tensors(model)]
            with pytest.raises(PushError, match="version 2 is not served, version 1 still is"):
                pusher.push(2, wrong)
            agrees(process.url, model, SHORT, LONG)

            before = copy.deepcopy(model)
            stream, reader = stopped_half_way(server, pusher)
            mark = len(stream.tokens)
            pusher.push(3, lora.adapter_tensors(moved(model, seed=2)))
            reader.join(60)
            assert stream.finish_reason == "length"
            old = reference_logprobs(before, stream.prompt, stream.tokens)
            new = reference_logprobs(model, stream.prompt, stream.tokens)
            compare_logprobs(stream.logprobs[:mark], old[:mark], TOLERANCE)
            compare_logprobs(stream.logprobs[mark:], new[mark:], TOLERANCE)
            agrees(process.url, model, SHORT, LONG)
