"""A push into experts that vLLM makes wider than they are loaded: into its own layer, by its own
loader and blockwise fp8, as far as these go without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from tracegrad_trainer.inference import vllm_weight_transfer
from tracegrad_trainer.inference.vllm_weight_transfer import (
    SafetensorsUpdateInfo,
    SafetensorsWeightTransferEngine,
)

pytestmark = pytest.mark.vllm
EXPERTS, HIDDEN, INNER, RANKS = 3, 200, 180, 2
LAYERS = ("first", "second")
SHARDS = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}


class WholeNumbers(Fp8PerBlockOnlineMoEMethod):
    """It rounds nothing, for which it would need a GPU."""

    def __init__(self) -> None:
        self.moe = SimpleNamespace(w13_num_shards=2, has_bias=False)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._zero_padding(layer)


class Experts(RoutedExperts):
    """Rank 1 of two."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.moe_config = SimpleNamespace(
            is_act_and_mul=True,
            hidden_dim=256,
            hidden_dim_unpadded=HIDDEN,
            intermediate_size_per_partition=128,
            intermediate_size_per_partition_unpadded=INNER // RANKS,
            moe_parallel_config=SimpleNamespace(tp_size=RANKS),
            tp_shard_with_padding=False,
            tp_rank=1,
        )
        self.quant_config: Any = SimpleNamespace(
            online_quantization_config=None, get_name=lambda: "fp8_per_block"
        )
        self._expert_map = self._fused_shared_expert_quantizer = None
        self.quant_method = WholeNumbers()
        self.quant_method.create_weights(
            self, EXPERTS, 256, 128, torch.bfloat16, weight_loader=self.weight_loader
        )

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return expert_id


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS:
            self.add_module(name, Experts())
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            layer, expert, shard = name.split(".")
            owner = self.get_submodule(layer)
            parameter = owner.w2_weight if shard == "w2" else owner.w13_weight
            parameter.weight_loader(parameter, tensor, f"{shard}_weight", shard, int(expert))


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        f"{layer}.{expert}.{shard}": torch.randn(shape).bfloat16()
        for layer in LAYERS
        for expert in range(EXPERTS)
        for shard, shape in SHARDS.items()
    }


def check(model: Mixture, wanted: dict[str, Tensor]) -> None:
    """This rank's half of each expert, and zeros around it."""
    inner = INNER // RANKS
    for name, tensor in wanted.items():
        layer, expert, shard = name.split(".")
        owner = model.get_submodule(layer)
        if shard == "w2":
            found, part = owner.w2_weight[int(expert)], tensor[:, inner:]
        else:
            at = 128 * (shard == "w3")
            found, part = owner.w13_weight[int(expert), at : at + 128], tensor[inner:]
        assert torch.equal(found[: part.shape[0], : part.shape[1]], part)
        assert found.count_nonzero() == part.count_nonzero()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Mixture:
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(vllm_weight_transfer, "current_platform", platform)
    model = Mixture()
    model.load_weights(weights(0).items())
    finalize_layerwise_reload(model, None)
    check(model, weights(0))
    return model


def engine_of(model: Mixture) -> SafetensorsWeightTransferEngine:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    return SafetensorsWeightTransferEngine(None, config, torch.device("cpu"), model)


def test_padded_experts_are_whole_with_what_is_loaded_layer_by_layer(
    model: Mixture, tmp_path: Path
) -> None:
    """No layer waits for the end, in full beside those that are served."""
    engine = engine_of(model)
    for seed in (1, 2):
        save_file(weights(seed), tmp_path / "model.safetensors")
        engine.start_weight_update()
        engine.receive_weights(SafetensorsUpdateInfo(paths=[str(tmp_path / "model.safetensors")]))
        assert not any(get_layerwise_info(layer).can_load() for layer in model.children())
        engine.finish_weight_update()
        check(model, weights(seed))


def test_an_expert_that_is_missing_is_missed_all_the_same(model: Mixture, tmp_path: Path) -> None:
    some = weights(1)
    del some["second.1.w2"]
    save_file(some, tmp_path / "model.safetensors")
    engine = engine_of(model)
    engine.start_weight_update()
    with pytest.raises(ValueError, match=r"the update lacks weights of second$"):
        engine.receive_weights(SafetensorsUpdateInfo(paths=[str(tmp_path / "model.safetensors")]))
