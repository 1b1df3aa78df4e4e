"""Low-rank adapters by peft: only they are trained, the model's own weights stay as they were.

The adapters are put into the model itself, so that it stays the transformers model that
everything else knows. They go in before sharding, and a block's adapters are sharded with it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from tracegrad_trainer.engine.config import LoraSettings
from tracegrad_trainer.engine.model import value_head
from tracegrad_trainer.utils.scratch_folder import replacing_folder

_ADAPTER = "default"
_BASE = "base_layer."
_SEED = 0


def attach_adapters(model: nn.Module, settings: LoraSettings) -> nn.Module:
    """Put an adapter beside each targeted layer, and freeze all else. In place.

    As they start, adapters change nothing. They are the same on every rank. On a model without
    storage they have none: `fresh_adapters` is what they would hold.

    Raises:
        ValueError: no layer has such a name, or one that has it cannot have an adapter.
    """
    targets = settings.targets
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_all_linear(model) if targets == "all-linear" else _names(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=getattr(model, "name_or_path", None),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        try:
            inject_adapter_in_model(config, model, _ADAPTER)
        except ValueError as error:
            raise ValueError(f"fsdp.lora.targets = {targets!r}: {error}") from error
    for _, layer in _layers(model):
        if unfit := _unfit(model, layer):
            raise ValueError(
                f"fsdp.lora.targets = {targets!r}: {unfit}: name layers of the attention, as q_proj"
            )
    return model


def fresh_adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(parameter's name, whole tensor) of adapters as `attach_adapters` leaves them, bit for bit;
    one at a time, for a model that was sharded before it had storage."""
    generator = torch.Generator().manual_seed(_SEED)
    for name, layer in _layers(model):
        pairs: Any = (layer.lora_A, layer.lora_B)
        a, b = (torch.empty(pair[_ADAPTER].weight.shape) for pair in pairs)
        # peft makes two nn.Linear, which draw their weights, and then draws the first once more.
        for drawn in (a, b, a):
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        yield f"{name}.lora_A.{_ADAPTER}.weight", a
        yield f"{name}.lora_B.{_ADAPTER}.weight", b.zero_()


def is_adapter_parameter(parameter: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".lora_" in parameter


def base_name(parameter: str) -> str:
    """The name of a parameter in the model without adapters."""
    return parameter.replace(_BASE, "")


def _unfit(model: Any, layer: Any) -> str | None:
    """Why an adapter of this layer would be lost on the way to who serves or merges it."""
    if isinstance(layer, ParamWrapper):
        return "experts of a mixture cannot have adapters here"
    if isinstance(layer.get_base_layer(), nn.Embedding):
        return "the embedding cannot have adapters here"
    if layer.get_base_layer().weight is model.get_input_embeddings().weight:
        return "the head shares its weights with the embedding and cannot have adapters"
    return None


def _all_linear(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]
    convolved = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d)}
    if any(p.ndim == 3 and id(p) not in convolved for p in model.parameters()):
        # Beside stacked experts peft takes the names of a dense layer for theirs.
        names = [name for name in names if "attn" in name or "attention" in name]
    return names


def _names(targets: str | tuple[str, ...]) -> str | list[str]:
    """A string is peft's regular expression over whole names."""
    return targets if isinstance(targets, str) else list(targets)


def has_adapters(model: nn.Module) -> bool:
    return any(True for _ in _layers(model))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before `attach`: the reference policy. For forwards without gradient."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        # Not enable_adapters(): it also changes requires_grad, of whichever parameters, whole or
        # sharded, FSDP has in place at the moment.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name as in peft's files, whole tensor); every rank must run through all of them.

    Of the language model in a model that sees, the names are those of the whole: vLLM passes over
    adapters for layers that it does not find, and says nothing.
    """
    for name, parameter in model.named_parameters():
        if f".{_ADAPTER}." in name and is_adapter_parameter(name):
            layer, _, part = name.partition(".lora_")
            part = part.replace(f".{_ADAPTER}.", ".")
            layer = _name_in_folder(model, layer)
            yield f"base_model.model.{layer}.lora_{part}", _whole(parameter, dtype)


def _name_in_folder(model: nn.Module, layer: str) -> str:
    """A linear layer's, where all that its folder has otherwise is what its name begins with."""
    weight = f"{layer}.weight"
    with torch.device("meta"):
        [(name, _), *more] = revert_weight_conversion(model, {weight: torch.empty(1, 1)}).items()
    alike = not more and name.rpartition(".")[0].endswith(layer.partition(".")[2])
    return name.removesuffix(".weight") if alike else layer


def merged_tensors(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name in the model without adapters, whole tensor with its adapter added).

    Every rank must run through all of them; a value head does not come. In float32 if no `dtype`
    is given, also where frozen weights are kept in bfloat16.
    """
    layers = dict(_layers(model))
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name) or value_head.is_value_parameter(name):
            continue
        tensor = _whole(parameter)
        if tensor.is_floating_point():
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        owner, _, leaf = name.rpartition("." + _BASE)
        if leaf == "weight" and owner in layers:
            tensor = tensor + _delta(layers[owner])
        yield base_name(name), tensor if dtype is None else tensor.to(dtype)


def save_adapter(model: nn.Module, folder: Path | str, dtype: torch.dtype | None = None) -> None:
    """Write a folder that peft and vLLM load; every rank calls, rank 0 writes.

    It appears whole or not at all, and replaces one that was there.

    Raises:
        OSError: it could not be written (on rank 0; the other ranks return).
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in adapter_tensors(model, dtype):
        if first:
            tensors[name] = tensor.cpu().contiguous()
    if first:
        with replacing_folder(Path(folder)) as partial:
            save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            _config(model).save_pretrained(str(partial))


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """What `save_adapter` writes beside the tensors, as JSON."""
    config: dict[str, Any] = _config(model).to_dict()  # type: ignore[no-untyped-call]
    # As peft's own `save_pretrained`: neither enums nor sets are JSON.
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in config.items()
    }


def _config(model: nn.Module) -> LoraConfig:
    configs: Any = model.peft_config
    config: LoraConfig = copy.copy(configs[_ADAPTER])
    config.inference_mode = True
    targets: Any = config.target_modules
    if isinstance(targets, set):  # what peft makes of a list
        layers = {name for name, _ in _layers(model)}
        config.target_modules = {  # type: ignore[assignment]
            _name_in_folder(model, one) if one in layers else one for one in targets
        }
    return config


def _layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _delta(layer: Any) -> Tensor:
    a = _whole(layer.lora_A[_ADAPTER].weight)
    b = _whole(layer.lora_B[_ADAPTER].weight)
    delta: Tensor = (b @ a) * layer.scaling[_ADAPTER]
    return delta.T if layer.fan_in_fan_out else delta


def _whole(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor if dtype is None else tensor.to(dtype)
