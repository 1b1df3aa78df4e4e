"""Replayed routes: the recorded choice, the present gates, and a gradient for the router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.integrations import moe

from support.trainer.forward_checks import agree, gradients
from support.trainer.routing_samples import drawn, told
from support.trainer.row_samples import rows, turn
from support.trainer.tiny_models import MIXTURES, logprobs, make, plain
from tracegrad_trainer.batches import ExpertRouting, MicroBatch, RoutingLayout, micro_batch, pack
from tracegrad_trainer.batches.expert_routing import UNROUTED, routing_of_path
from tracegrad_trainer.engine import (
    Learner,
    OptimSettings,
    destroy_process_group,
    init_process_group,
    shard,
)
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.model.forward import TargetContext
from tracegrad_trainer.engine.model.parallelize import prepare_model
from tracegrad_trainer.engine.model.router_replay import (
    check_replay,
    recording_routing,
    routing_layout_of,
    with_routing,
)
from tracegrad_trainer.losses import preset

ROWS = rows(4)
EXPERTS = 6


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def batch(routes: ExpertRouting | None = None) -> MicroBatch:
    return replace(micro_batch(ROWS, range(len(ROWS))), expert_routing=routes)


def recorded(model: nn.Module) -> tuple[Tensor, ExpertRouting]:
    with torch.no_grad(), recording_routing(model) as seen:
        logp = logprobs(model, batch())
    (routes,) = seen
    return logp, routes


def shifted(routes: ExpertRouting) -> ExpertRouting:
    """Other experts, each token's still distinct."""
    return ((routes + 1) % EXPERTS).astype(np.int16)


def routers(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if type(m).__name__.endswith("Router"))


@pytest.mark.parametrize("name", MIXTURES)
def test_the_recorded_choice_gives_the_recorded_numbers(name: str) -> None:
    model = make(name, routing="r2")
    logp, routes = recorded(model)
    assert routes.shape == (batch().tokens, 2, 2)
    assert torch.equal(logp, logprobs(make(name), batch()))
    assert torch.equal(logp, logprobs(model, batch(routes)))
    assert not torch.allclose(logp, logprobs(model, batch(shifted(routes))), atol=1e-3)
    # Of a forward without routes nothing is left.
    assert torch.equal(logp, logprobs(model, batch()))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_changed_policy_keeps_the_choice_and_its_own_gates(name: str) -> None:
    """What r2 is for: after an update the router would choose others."""
    model = make(name, routing="r2")
    _, routes = recorded(model)
    with torch.no_grad():
        for router in routers(model):
            weight: Tensor = router.weight  # type: ignore[assignment]
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    _, free = recorded(model)
    assert (free != routes).any()
    with recording_routing(model) as seen:
        logprobs(model, batch(routes)).sum().backward()
    assert np.array_equal(seen[0], routes)
    for router in routers(model):
        grad = router.weight.grad  # type: ignore[union-attr]
        assert isinstance(grad, Tensor)
        assert grad.abs().max() > 0


def test_gates_are_softmax_over_the_given_experts() -> None:
    """gate_i = I exp(s_i) / sum I exp(s), and its gradient."""
    model = make("mixtral", routing="r3")
    router = next(iter(routers(model)))
    given = torch.tensor([[0, 1], [5, 2], [3, 4], [1, 0], [2, 3]])
    hidden: list[Tensor] = []
    output: list[tuple[Tensor, Tensor, Tensor]] = []
    router.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    router.register_forward_hook(lambda _, args, made: output.append(made))
    model.base_model(  # type: ignore[operator]
        torch.arange(5)[None],
        use_cache=False,
        routes=torch.stack([given, given], 1),
        packed_rows=PackedRowAttention([5]),
    )
    _, scores, chosen = output[0]
    assert torch.equal(chosen, given)
    weight: Tensor = router.weight  # type: ignore[assignment]
    s = hidden[0].reshape(5, -1) @ weight.T
    inside = torch.zeros(5, EXPERTS).scatter(1, given, 1.0)
    expected = (inside * s.exp() / (inside * s.exp()).sum(1, keepdim=True)).gather(1, given)
    torch.testing.assert_close(scores, expected)
    (found,) = torch.autograd.grad(scores[:, 0].sum(), weight, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected[:, 0].sum(), weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_tokens_without_a_record_are_routed_by_the_router() -> None:
    model = make("qwen3_moe", routing="r3")
    _, routes = recorded(model)
    partly = shifted(routes)
    partly[::2] = UNROUTED
    with recording_routing(model) as seen:
        logprobs(model, batch(partly))
    first_layer = seen[0][:, 0]
    assert np.array_equal(first_layer[1::2], partly[1::2, 0])
    assert np.array_equal(first_layer[::2], routes[::2, 0])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_checkpointed_block_replays_the_same_routes_in_backward(name: str) -> None:
    seen = []
    for checkpointing in (False, True):
        model = make(name, routing="r3", gradient_checkpointing=checkpointing)
        logprobs(model, batch(shifted(recorded(model)[1]))).sum().backward()
        seen.append(gradients(model))
    agree(seen[1], seen[0], tolerance=1e-6)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_at_once_or_one_by_one_with_replayed_routes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    grouped = moe._grouped_mm

    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(how)
        found: Tensor = grouped(*given, **named)
        return found

    monkeypatch.setattr(moe, "_grouped_mm", counted)
    numbers, seen = [], []
    for how in ("auto", "grouped_mm", "eager"):
        model = make(name, routing="r3", experts=how)
        found = logprobs(model, batch(shifted(recorded(model)[1])))
        found.sum().backward()
        numbers.append(found.detach())
        seen.append(gradients(model))
    assert set(calls) == {"auto", "grouped_mm"}
    assert torch.equal(numbers[0], numbers[1])
    torch.testing.assert_close(numbers[2], numbers[0], rtol=1e-5, atol=1e-5)
    agree(seen[2], seen[0])


def test_experts_that_are_not_there_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match=r"fsdp.experts = 'eager': .*Qwen3ForCausalLM.* 'auto'"):
        make("qwen3", experts="eager")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield init_process_group(FsdpSettings(device="cpu", threads=1))
    destroy_process_group()


def test_updates_of_one_batch_keep_the_choice_of_before_it(mesh: DeviceMesh) -> None:
    """R2 by the training engine: recorded with the old log-probabilities, held while the policy
    moves away from them."""
    settings = FsdpSettings(device="cpu", routing="r2")
    model = shard(make("mixtral", routing="r2"), mesh, settings)
    learner = Learner(model, mesh, preset("grpo"), OptimSettings(lr=0.05))
    (batches,) = pack(ROWS, ranks=1, budget=60)
    assert len(batches) > 1
    with recording_routing(model) as before:
        old = [TargetContext(old_logprobs=logp) for logp in learner.logprobs(batches)]
    given = with_routing(batches, before)
    assert learner.train(given, version=3, before=old).metrics["policy_k3"] == 0
    with recording_routing(model) as free:
        learner.logprobs(batches)
    assert any((a != b).any() for a, b in zip(free, before, strict=True))
    with recording_routing(model) as during:
        moved = learner.train(given, version=3, before=old)
    assert moved.metrics["policy_k3"] > 0
    assert all(np.array_equal(a, b) for a, b in zip(during, before, strict=True))


def test_routes_travel_with_their_rows() -> None:
    model = make("mixtral", routing="r3")
    _, routes = recorded(model)
    ends = np.cumsum([len(row) for row in ROWS])
    first = replace(ROWS[0], expert_routing=routes[: ends[0]])
    third = replace(ROWS[2], expert_routing=routes[ends[1] : ends[2]])
    made = micro_batch([third, ROWS[1], first], [2, 1, 0])
    assert made.expert_routing is not None
    assert np.array_equal(made.expert_routing[: len(third)], routes[ends[1] : ends[2]])
    assert (made.expert_routing[len(third) : len(third) + len(ROWS[1])] == UNROUTED).all()
    left, _ = made.without_rows([2])
    assert left.expert_routing is not None
    assert np.array_equal(left.expert_routing[len(ROWS[1]) :], routes[: ends[0]])


@pytest.mark.parametrize("name", MIXTURES)
def test_routes_of_the_serving_engine_are_replayed(name: str) -> None:
    """R3, with routes recorded from a transformers forward and told in vLLM's format."""
    engine = make(name, routing="r2")
    logp, routes = recorded(engine)
    layout, ends = routing_layout_of(engine), np.cumsum([len(row) for row in ROWS])
    rows_told = []
    for row, end in zip(ROWS, ends, strict=True):
        asked = turn("t", row.input_ids[:5].tolist(), row.input_ids[5:].tolist())
        path = [told(asked, routes[end - len(row) : end])]
        rows_told.append(replace(row, expert_routing=routing_of_path(path, len(row), layout)))
    model = make(name, routing="r3")
    made = micro_batch(rows_told, range(len(rows_told)))
    assert made.expert_routing is not None
    assert np.array_equal(
        np.delete(made.expert_routing, ends - 1, 0), np.delete(routes, ends - 1, 0)
    )
    now = logprobs(model, made)
    assert torch.equal(now, logp)
    now.sum().backward()
    assert all(r.weight.grad.abs().max() > 0 for r in routers(model))  # type: ignore[union-attr,operator]


def test_an_engine_counts_layers_without_a_router_too() -> None:
    config = plain("qwen3_moe", "tracegrad_packed").config
    config.mlp_only_layers = [0]
    with torch.device("meta"):
        dense = type(plain("qwen3_moe", "tracegrad_packed"))(config)
    assert routing_layout_of(dense) == RoutingLayout(layers=2, routed=(1,), experts=EXPERTS, k=2)
    model = prepare_model(type(dense)(config), FsdpSettings(device="cpu", routing="r3"))
    (row,) = ROWS[:1]
    asked = turn("t", row.input_ids[:5].tolist(), row.input_ids[5:].tolist())
    layers = drawn(len(row), layout=routing_layout_of(model))
    routes = routing_of_path([told(asked, layers)], len(row), routing_layout_of(model))
    assert routes is not None
    with torch.no_grad(), recording_routing(model) as seen:
        logprobs(model, micro_batch([replace(row, expert_routing=routes)], [0]))
    assert np.array_equal(seen[0][:-1], layers[:-1, 1:])


@pytest.mark.parametrize("setting", ["r2", "r3"])
def test_before_anything_starts_a_model_is_asked_whether_it_has_routes(setting: str) -> None:
    check_replay(plain("mixtral", "sdpa"), setting)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no routers.*set fsdp.routing"):
        check_replay(plain("qwen3", "sdpa"), setting)


def test_two_routers_in_a_layer_are_not_taken_for_one() -> None:
    model: Any = plain("mixtral", "sdpa")
    model.model.layers[0].second = type(model.model.layers[0].mlp.gate)(model.config)
    with pytest.raises(ValueError, match=r"MixtralForCausalLM are not one in a layer.*'r2'"):
        routing_layout_of(model)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no routers.*set fsdp.routing = 'own'"):
        make("qwen3", routing="r2")
