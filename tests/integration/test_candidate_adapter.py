"""A candidate as a second LoRA adapter of one real vLLM, behind the real proxy: calls of both sides
are computed in the same batches, while the candidate is promoted and while it is taken back."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from support.engines.vllm_server import tiny_settings
from support.proxy.proxy_with_engine import served_proxy
from support.proxy.servers import CONTROL_KEY, eventually
from support.trainer.tiny_model import load_model, reference_logprobs
from tracegrad.proxy.engine.weight_gate import Canary
from tracegrad.store import GroupCommitWriter, Store
from tracegrad_trainer.engine.config import LoraSettings
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.inference.canary_push import CanaryAdapter
from tracegrad_trainer.inference.control_routes import ServedWeights
from tracegrad_trainer.inference.logprob_probe import compare_logprobs, sample_probe
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_push import WeightPusher
from tracegrad_trainer.inference.zero_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, zero_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GAP = 1e-4  # nats
SHARE, TOKENS, EACH = 0.5, 500, 3
Spans = dict[bool, set[tuple[int, ...]]]


class Streams:
    """Calls of rollouts on both sides, that go on for long."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        named = [f"{name}-{n}" for n in range(100)]
        sides = [[r for r in named if is_candidates(r) == side][:EACH] for side in (True, False)]
        self.rollouts = [rollout for side in sides for rollout in side]
        self._lines: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(len(self.rollouts))
        self._ends = [self._pool.submit(self._stream, rollout) for rollout in self.rollouts]

    def _stream(self, rollout: str) -> None:
        request = {
            "model": "any",
            "messages": [{"role": "user", "content": f"How many lamps are in Oslo, {rollout}?"}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self._url}/rollouts/{rollout}/v1/chat/completions"
        with httpx.stream("POST", url, json=request, timeout=300) as response:
            assert response.status_code == 200
            for _ in response.iter_lines():
                self._lines[rollout] += 1

    def await_lines(self, count: int) -> None:
        """Until each is on its way."""
        eventually(lambda: all(self._lines[rollout] > count for rollout in self.rollouts), 120)

    def await_ends(self) -> None:
        for end in self._ends:
            end.result(300)
        self._pool.shutdown()


def is_candidates(rollout: str) -> bool:
    return Canary(None, SHARE, "").has(rollout)


def moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Another adapter over the same weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in other.named_parameters():
        if lora.is_adapter_parameter(name):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return other


def versions_by_side(
    store: Store, rollouts: Sequence[str], models: dict[int, PreTrainedModel]
) -> Spans:
    """Each token is held against the adapter of its version."""
    found: Spans = {True: set(), False: set()}
    for rollout in rollouts:
        [turn] = store.rollout_turns(rollout)
        assert turn.untrainable is None
        found[is_candidates(rollout)].add(tuple(version for version, _ in turn.policy_versions))
        begin = 0
        for version, count in turn.policy_versions:
            end = begin + count
            ids = turn.prompt_token_ids, turn.completion_token_ids
            expected = reference_logprobs(models[version], *ids)
            compare_logprobs(list(turn.completion_logprobs)[begin:end], expected[begin:end], GAP)
            begin = end
    return found


def test_a_candidate_by_name_is_tried_promoted_and_taken_back(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    first = lora.attach_adapters(load_model(tiny_model_dir), LoraSettings(rank=4, alpha=8))
    assert isinstance(first, PreTrainedModel)
    models = {version: moved(first, seed=version) for version in (1, 2, 3)}
    config = lora.adapter_config(first)
    adapter = tmp_path / "run" / "adapter"
    settings = tiny_settings(tiny_model_dir, tmp_path / "vllm.log").model_copy(
        update={"adapter": adapter, "adapter_rank": 4, "candidates": True}
    )
    checked: list[tuple[str, ...]] = []
    with (
        VllmProcess(settings) as process,
        Store.open(f"sqlite:///{tmp_path}/store.db") as store,
        GroupCommitWriter(store) as writer,
        served_proxy(
            store, writer, upstream=process.url, model="policy", control_key=CONTROL_KEY
        ) as http,
        WeightPusher(
            process.url,
            str(http.base_url).rstrip("/"),
            proxy_key=CONTROL_KEY,
            checkpoint=zero_adapter(adapter),
            adapter=config,
            canary=CanaryAdapter(settings.candidate_name, SHARE),
        ) as pusher,
    ):
        process.wait_healthy(timeout=240)

        def verify(*places: str) -> None:
            """As the trainer does, of what was just given."""
            checked.append(places)
            model = places[0] if places else "policy"
            sample = sample_probe(process.url, [5, 7, 9, 11], model=model)
            expected = reference_logprobs(
                models[len(checked)], sample.prompt_token_ids, sample.token_ids
            )
            compare_logprobs(sample.logprobs, expected, GAP)

        def fetch(folder: Path) -> ServedWeights:
            assert folder.name == "1", "what is promoted is at hand"
            folder.mkdir()
            save_file(dict(lora.adapter_tensors(models[1])), folder / ADAPTER_WEIGHTS)
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
            return ServedWeights(1, (str(folder / ADAPTER_WEIGHTS),))

        def push(version: int, *, as_candidate: bool) -> None:
            written = pusher.write(version, lora.adapter_tensors(models[version]))
            pusher.serve(written, verify, as_candidate=as_candidate)

        url = str(http.base_url).rstrip("/")
        push(1, as_candidate=False)
        push(2, as_candidate=True)
        assert not pusher.restore(), "engine and proxy say that they have both"
        streams = Streams(url, "promoted")
        streams.await_lines(20)
        pusher.promote_candidate(2)
        streams.await_ends()
        found = versions_by_side(store, streams.rollouts, models)
        assert found == {True: {(2,)}, False: {(1, 2)}}

        push(3, as_candidate=True)
        streams = Streams(url, "taken-back")
        streams.await_lines(20)
        pusher.roll_back(2, fetch)
        streams.await_lines(100)
        pusher.roll_back(1, fetch)
        streams.await_ends()
        found = versions_by_side(store, streams.rollouts, models)
        assert found == {True: {(3, 2, 1)}, False: {(2, 1)}}
    assert checked == [(), (settings.candidate_name,), (settings.candidate_name,)]
