"""R3 from the engine's answer to the training forward, all but vLLM's own part of it.

The engine is a mock one in vLLM's format, which tells the experts that a transformers forward
chose, of a model whose routers are not the trained one's: it goes through the real proxy into the
store, and what is trained took the engine's experts, where its own routers would take others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.engines.byte_tokenizer import save_byte_tokenizer
from support.engines.mock_engine import MODEL, Answer, MockEngine
from support.proxy.servers import serving
from support.trainer.step_samples import trainer_settings
from support.trainer.tiny_model import tiny_sizes
from tracegrad.events import Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.proxy import create_app
from tracegrad.store import GroupCommitWriter, StepHistory, Store
from tracegrad_trainer.batches import Row, pack
from tracegrad_trainer.batches.expert_routing import UNROUTED
from tracegrad_trainer.cli import dry_run
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.model import router_replay
from tracegrad_trainer.replay.replay import ReplayRequest, replay
from tracegrad_trainer.rl.coordinator import RolloutSupply
from tracegrad_trainer.rl.train_loop import TrainLoop

VOCABULARY = 264  # the mock engine's bytes, roles and end
LAYERS, DENSE = 3, 0


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def policy(tmp_path: Path) -> nn.Module:
    """A mixture whose first layer is a dense one; saved for the trainer too."""
    torch.manual_seed(0)
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
    sizes = tiny_sizes(VOCABULARY, head_dim=8, moe_intermediate_size=16, **experts)
    sizes |= {"num_hidden_layers": LAYERS, "mlp_only_layers": [DENSE]}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model")
    return model


@pytest.fixture
def engine(policy: nn.Module) -> MockEngine:
    """Tells its routers' choices of all layers, with zeros for the dense one, as vLLM does."""
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith("gate.weight"):
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
                weight += noise * weight.std()
    router_replay.install_replay(policy)

    def choices(ids: Sequence[int]) -> NDArray[Any]:
        with torch.no_grad(), router_replay.recording_routing(policy) as seen:
            policy(torch.tensor([ids]), use_cache=False)
        found = np.zeros((len(ids), LAYERS, 2), np.uint8)
        found[:, DENSE + 1 :] = seen[0]
        return found

    return MockEngine(routes=choices)


@pytest.fixture
def settings(tmp_path: Path, policy: nn.Module) -> TrainerSettings:
    return trainer_settings(
        tmp_path,
        batches={"groups": 1, "group_size": 2, "tokens_per_micro_batch": 1024},
        fsdp={"device": "cpu", "threads": 1, "routing": "r3"},
    )


def agent(url: str, rollout: str, *, stream: bool = False) -> None:
    """Two calls, the second of which goes on from the first."""
    talk = [{"role": "user", "content": f"I am {rollout}"}]
    with httpx.Client(base_url=f"{url}/rollouts/{rollout}/v1", timeout=20) as client:
        for more in ("And on?", ""):
            body = {"model": MODEL, "messages": talk, "temperature": 1.0, "stream": stream}
            answer = client.post("/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert b"routed_experts" not in answer.content.replace(b'"routed_experts":null', b"")
            talk += [{"role": "assistant", "content": SAID}, {"role": "user", "content": more}]


SAID = "ok"


@pytest.fixture
def captured(settings: TrainerSettings, engine: MockEngine, tmp_path: Path) -> Iterator[Store]:
    """Two rollouts of one task, the second of which streamed, so that it has no routes."""
    engine.replies.extend(Answer(SAID) for _ in range(4))
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(settings.proxy.store))
        writer = stack.enter_context(GroupCommitWriter(store))
        upstream = stack.enter_context(serving(engine.app(), lifespan="off"))
        proxy = settings.proxy.model_copy(
            update={"upstream": upstream, "tokenizer": tmp_path / "model"}
        )
        url = stack.enter_context(serving(create_app(proxy, store=store, writer=writer)))
        for number, name in enumerate(("whole", "streamed")):
            store.append([RolloutStarted(rollout_id=name, task_id="task")])
            agent(url, name, stream=name == "streamed")
            store.append(
                [
                    Reward(rollout_id=name, value=float(number)),
                    RolloutFinished(rollout_id=name, outcome=Outcome.COMPLETED),
                ]
            )
        yield store


def test_what_the_engine_chose_is_what_is_trained(
    settings: TrainerSettings, engine: MockEngine, captured: Store
) -> None:
    assert settings.proxy.routed_experts
    asked = [request.get("routed_experts_prompt_start", 0) for request in engine.requests[:2]]
    assert asked[0] == 0 < asked[1]

    out = StringIO()
    assert dry_run.show_dry_run(settings, Console(file=out, width=200), as_json=False) == 0
    rows, taken = trained(settings)
    [step] = StepHistory(captured).steps()
    share = step.metrics["expert_routing_known_share"]
    words = f"the serving engine recorded the experts of {share:.1%} of these tokens"
    assert words in out.getvalue()

    whole, streamed = sorted(rows, key=lambda row: row.rollout_id, reverse=True)
    assert streamed.expert_routing is None
    assert whole.expert_routing is not None
    assert engine.routes is not None
    chosen = engine.routes(whole.input_ids.tolist())[:, DENSE + 1 :]
    assert np.array_equal(whole.expert_routing[:-1], chosen[:-1])
    assert share == (len(whole) - 1) / (len(whole) + len(streamed))

    [batch] = pack(rows, ranks=1, budget=1024)[0]
    assert batch.expert_routing is not None
    known = batch.expert_routing != UNROUTED
    assert np.array_equal(taken[known], batch.expert_routing[known])

    # A replay has them from the store again; without them its own routers choose otherwise.
    done = replay(captured, settings.state_dir, ReplayRequest(overrides=["fsdp.routing=own"]))
    assert done.equal
    assert done.other is not None
    assert done.other.metrics["k3"] != done.replayed.metrics["k3"]
    assert "expert_routing_known_share" not in done.other.metrics


def trained(settings: TrainerSettings) -> tuple[list[Row], NDArray[np.int16]]:
    """One step: its rows, and the experts that its forward went to."""
    with ExitStack() as stack:
        training = TrainLoop(
            settings, stack, stopping=lambda: False, supply=RolloutSupply(is_open=False)
        )
        training.resume()
        assert training.next_action() == "train"
        assert training.batch is not None
        rows = training.batch.selection.rows
        with router_replay.recording_routing(training.learner.model) as seen:
            assert training.train_batch()
        training.commit_pending()
    [taken] = seen
    return rows, taken


def test_routes_of_another_model_are_one_error_and_nothing_is_trained(
    settings: TrainerSettings, captured: Store, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
    sizes = tiny_sizes(VOCABULARY, head_dim=8, moe_intermediate_size=16, **experts)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"another model's, of 3 layers.*this one has 2 and 2"):
        trained(settings)
    assert StepHistory(captured).steps() == []
    assert captured.turn_counts().pending == {"waiting": 4}
