"""Weights that a vLLM worker makes ready beside those that it serves: layers of its kind, without
an engine. What a whole model serves then is `test_weight_push.py`'s."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tracegrad_trainer.inference import vllm_staged_weights
from tracegrad_trainer.inference.vllm_staged_weights import StagedWeights, can_stage

pytestmark = pytest.mark.vllm


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        for parameter in (self.weight, self.bias):
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: Tensor, loaded: Tensor) -> None:
        default_weight_loader(param, loaded)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ScaleNorm(), ScaleNorm()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            parameter.weight_loader(parameter, tensor)  # type: ignore[attr-defined]

    def values(self) -> set[float]:
        return {value for tensor in self.parameters() for value in tensor.tolist()}


@pytest.fixture
def model() -> Model:
    model = Model()
    record_metadata_for_reloading(model)
    return model


def weights(model: Model, value: float) -> list[tuple[str, Tensor]]:
    return [(name, torch.full((4,), value)) for name, _ in model.named_parameters()]


def test_the_old_ones_serve_until_the_new_ones_are_put_in_place(model: Model) -> None:
    parameters = list(model.parameters())
    for value in (1.0, 2.0):
        before = model.values()
        staged = StagedWeights(model)
        for some in weights(model, value):  # one at a time
            staged.load([some])
        staged.complete()
        assert model.values() == before
        staged.commit()
        staged.close()
        assert model.values() == {value}
    # What refers to a parameter, as a tied head does, has the new weights too.
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["second.weight", "first.bias"])
def test_what_is_missing_is_named_and_nothing_has_changed(model: Model, name: str) -> None:
    staged = StagedWeights(model)
    staged.load([(other, tensor) for other, tensor in weights(model, 1.0) if other != name])
    with pytest.raises(ValueError, match=f"lacks weights of {name.partition('.')[0]}$"):
        staged.complete()
    staged.close()
    assert model.values() == {0.0}


@pytest.mark.parametrize("whole", [True, False])
def test_shadows_are_gone_when_it_is_over(model: Model, whole: bool) -> None:
    """An engine takes thousands of pushes: what stayed of each would be a copy of the model."""
    gc.collect()
    known = len(LAYERWISE_INFO)
    staged = StagedWeights(model)
    shadows = [weakref.ref(shadow) for _, shadow in staged._shadows]
    staged.load(weights(model, 1.0) if whole else weights(model, 1.0)[:1])
    if whole:
        staged.complete()
        staged.commit()
    staged.close()
    gc.collect()
    assert [shadow() for shadow in shadows] == [None] * 3
    assert len(LAYERWISE_INFO) == known


def test_what_does_not_fit_beside_all_workers_is_loaded_in_the_pause(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make their shards ready at the same moment, of the same memory."""
    size = sum(tensor.nbytes for tensor in model.parameters())
    least = 2 * 2 * size + vllm_staged_weights._SPARE_BYTES
    monkeypatch.setattr(vllm_staged_weights, "free_host_memory", lambda: least)
    assert can_stage(model)
    assert not can_stage(model, workers=2)


def test_layers_that_are_not_known_to_be_plain_are_loaded_in_the_pause(model: Model) -> None:
    assert can_stage(model)
    model.third = nn.Linear(2, 2)  # none of vLLM's
    record_metadata_for_reloading(model)
    assert not can_stage(model)
