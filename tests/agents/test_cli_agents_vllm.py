"""The same agents before a real vLLM, whose model plays their scripts in real tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from support.cli_agents.acting_model import MAX_LENGTH, save_acting_model
from support.cli_agents.recipes import AGENTS, TASK
from support.cli_agents.scene import ROLLOUT, play
from support.trainer.tiny_model import load_model
from tracegrad.events import Turn
from tracegrad.turn_tree import extends, paths
from tracegrad_trainer.config.vllm import VllmSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.utils.network import find_free_port

pytestmark = [
    pytest.mark.agents,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first run installs them
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {name: agent.script for name, agent in AGENTS.items()}
    return save_acting_model(tmp_path_factory.mktemp("acting") / "model", parts)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PreTrainedModel:
    return load_model(model_dir)


@pytest.fixture(scope="module")
def vllm(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = VllmSettings(
        model=str(model_dir),
        port=find_free_port(),
        max_model_len=MAX_LENGTH,
        kv_cache_memory_bytes=512 << 20,
        log=tmp_path_factory.mktemp("vllm") / "vllm.log",
    )
    with VllmProcess(settings) as process:
        process.wait_healthy(timeout=240)
        yield process.url


@pytest.mark.parametrize("name", AGENTS)
def test_its_turns_are_one_path_with_the_tokens_of_the_engine(
    name: str, vllm: str, model_dir: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    agent = AGENTS[name]
    run = play(agent, vllm, tmp_path, timeout_s=150)

    assert run.exit_code == 0, run.output + run.proxy_log
    assert (run.work / "hello.txt").read_text() == "hi"
    assert "Traceback" not in run.proxy_log
    assert run.rollouts == [ROLLOUT]
    [path] = [path for path in paths(run.turns) if len(path) > 1]
    assert len(path) == len(agent.script.steps)
    assert TASK in AutoTokenizer.from_pretrained(model_dir).decode(path[0].prompt_token_ids)
    for turn, earlier in zip(path[1:], path, strict=False):
        assert extends(turn.prompt_token_ids, earlier)
    for turn in run.turns:
        assert len(turn.completion_token_ids) > 1
        assert turn.untrainable is None
    # The strongest proof that these ids are what the engine read and wrote.
    sampled = [logprob for turn in path for logprob in turn.completion_logprobs]
    assert sampled == pytest.approx(reference_logprobs(model, path), abs=5e-5)
    assert min(sampled) < -0.01  # some token was not certain, but hung on the whole prompt


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, path: Sequence[Turn]) -> list[float]:
    """log p (nats) of all that was sampled on `path`, by transformers, in one forward."""
    last = path[-1]
    ids = torch.tensor([*last.prompt_token_ids, *last.completion_token_ids])
    first = len(path[0].prompt_token_ids)
    logits = model(ids[None], logits_to_keep=len(ids) - first + 1).logits[0, :-1].float()
    known = logits.log_softmax(-1).gather(1, ids[first:, None]).squeeze(1)
    return [
        value
        for turn in path
        for value in known[len(turn.prompt_token_ids) - first :][: len(turn.completion_token_ids)]
        .double()
        .tolist()
    ]
