"""vLLM's weight-transfer engine `tracegrad_shm`: weights arrive as safetensors files, by broadcast,
or in memory that rank 0 shares with this worker's GPU.

Runs inside a vLLM worker (vLLM 0.32). Files are mapped, not copied; vLLM's layerwise reload
puts each tensor where the kernels want it. Two kinds of layers are packed for CPU kernels only at
the first load and would silently keep (part of) the old weights; they are packed again here:
output heads whose weight is tied to the embedding, and mixture-of-experts blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from tracegrad_trainer.inference.transfer_group import (
    GroupAddress,
    TransferBackend,
    TransferError,
    TransferGroup,
    join_group,
)
from tracegrad_trainer.inference.vllm_own_transfers import (
    IpcReceiver,
    IpcTrialInfo,
    M2nReceiver,
    M2NWeightTransferInitInfo,
)
from tracegrad_trainer.inference.vllm_staged_weights import StagedWeights, can_stage
from tracegrad_trainer.inference.weight_buckets import TensorSpec, receive


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Of a group for broadcasts, as `GroupAddress`. Updates that name their files need none."""

    host: str
    port: int
    size: int
    backend: TransferBackend
    timeout_s: float


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Every weight, under checkpoint names: in the safetensors files `paths`, or in `buckets` that
    rank 0 broadcasts in the `group` of this name, one after the other, once all workers have
    announced `step`; or those of `m2n`, from the ranks' shards. Or a part of them: `packed`, in
    memory of GPUs, whole with the `last`. With `parts` updates come one after the other while the
    engine runs, each of some `names` in the files, and what they hold is served from the end of the
    update on."""

    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    part: int = 0  # from 1 on
    parts: int = 0
    group: str = ""
    step: str = ""
    buckets: list[list[list[Any]]] = field(default_factory=list)
    packed: dict[str, Any] | None = None
    m2n: dict[str, Any] | None = None
    last: bool = False


class SafetensorsWeightTransferEngine(
    WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]  # type: ignore[misc]
):
    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo
    supports_draft_weight_update = False

    _group: TransferGroup | None = None
    _ipc: IpcReceiver | None = None
    _m2n: M2nReceiver | None = None
    _staged: StagedWeights | None = None
    _later: Sequence[str] = ()  # files of an update whose weights are not staged
    _is_loading = False  # the model's layers stand by for weights

    def parse_init_info(self, init_dict: dict[str, Any]) -> WeightTransferInitInfo:
        if "ipc_handles" in init_dict:
            return IpcTrialInfo(**init_dict)
        if "src_mesh_dims" in init_dict:
            return M2NWeightTransferInitInfo(**init_dict)
        return super().parse_init_info(init_dict)

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Raises TransferError: the group does not come together; ValueError, RuntimeError: memory
        is not opened."""
        if isinstance(init_info, IpcTrialInfo):
            self._receiver().try_out(init_info)
            return
        if isinstance(init_info, M2NWeightTransferInitInfo):
            if self._m2n is not None:
                self._m2n.close()
            self._m2n = M2nReceiver(self, init_info)
            return
        self.shutdown()
        address = GroupAddress(**asdict(init_info))
        device = self.device if address.backend == "nccl" else torch.device("cpu")
        self._group = join_group(address, self._rank, device)

    def _receiver(self) -> IpcReceiver:
        if self._ipc is None:
            self._ipc = IpcReceiver(self)
        return self._ipc

    @property
    def _rank(self) -> int:
        """Behind the trainer's, which is 0; across data parallelism, as vLLM's nccl counts."""
        parallel = self.parallel_config
        before: int = parallel.data_parallel_index * parallel.world_size
        return 1 + before + int(parallel.rank)

    def start_weight_update(self) -> None:
        if self._ipc is not None:
            self._ipc.release()
        # The engine may run: nothing is touched before there are weights.
        self._drop_staged()
        self._later = []
        self._is_loading = False

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        """Loads them. Raises before the model is touched if a file cannot be read or nothing is
        named, and ValueError naming the layers if they do not hold the whole model."""
        try:
            if update_info.parts:
                self._stage(update_info)
            elif update_info.m2n is not None:
                self._receive_shards(update_info.m2n)
            elif update_info.packed is not None:
                self._receive_packed(update_info.packed, last=update_info.last)
            elif update_info.buckets:
                self._load(self._received(update_info))
            elif update_info.paths:
                with _opened(update_info.paths) as files:
                    self._load(_read(files))
            else:
                # All may have come before; it must fail all the same: a pusher ends an update so.
                raise ValueError("paths: the update names no files")
        except BaseException:
            self._drop_staged()
            raise

    def _stage(self, update: SafetensorsUpdateInfo) -> None:
        """Beside the weights that are served; where that cannot be, they are loaded at the end."""
        parallel = self.parallel_config
        workers = parallel.world_size * parallel.data_parallel_size
        if update.part == 1 and can_stage(self.model, workers=workers):
            self._staged = StagedWeights(self.model)
        if self._staged is None:
            self._later = update.paths
            return
        with _opened(update.paths) as files:
            weights = _Weights(_read(files, frozenset(update.names)))
            try:
                self._staged.load(weights)
            except Exception as error:
                raise ValueError(f"{weights.current} does not fit: {error!r}") from error
        if update.part == update.parts:
            self._staged.complete()

    def _receive_shards(self, update: dict[str, Any]) -> None:
        if self._m2n is None:
            raise TransferError("this worker has no plan of shards; it was started again")
        # What goes into the model's own memory is not missed in layers that are loaded.
        self._begin()
        self._m2n.receive(update)

    def _receive_packed(self, update: dict[str, Any], *, last: bool) -> None:
        if not self._is_loading:
            self._begin()
        self._receiver().receive(update)
        if last:
            self._receiver().release()
            self._check_complete()

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
        self._staged = None

    def _begin(self) -> None:
        # What a failed update had buffered must not be mixed into this one.
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        if current_platform.is_cpu():
            _unpad_for_cpu(self.model)
        initialize_layerwise_reload(self.model)
        _declare_padding(self.model)
        self._is_loading = True

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if not self._is_loading:
            self._begin()
        weights = _Weights(tensors)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(weights)
        except TransferError:
            raise
        except Exception as error:
            # Rank 0 and the other workers broadcast to the end: this one must, too.
            deque(tensors, maxlen=0)
            raise ValueError(f"{weights.current} does not fit: {error!r}") from error
        self._check_complete()

    def _check_complete(self) -> None:
        if missing := _missing_layers(self.model):
            raise ValueError(f"the update lacks weights of {', '.join(missing[:5])}")

    def _received(self, update: SafetensorsUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise TransferError("this worker is in no group; it was started again, perhaps")
        buckets = [[TensorSpec(*spec) for spec in bucket] for bucket in update.buckets]
        for spec in chain(*buckets):
            _ = spec.torch_dtype  # raises before rank 0 is told that this worker takes part
        self._group.announce(update.step, self._rank, update.group)
        yield from receive(self._group, buckets)

    def finish_weight_update(self) -> None:
        if self._staged is not None:
            self._staged.commit()
            self._drop_staged()
            return
        if self._later:
            with _opened(self._later) as files:
                self._load(_read(files))
        if not self._is_loading:
            raise ValueError("the update has brought no weights")
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _repack_for_cpu(self.model)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
        if self._ipc is not None:
            self._ipc.release()
        if self._m2n is not None:
            self._m2n.close()
            self._m2n = None


class _Weights:
    """Iterates over (name, tensor); remembers where it is, for error messages."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.current = "the first weight"

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            self.current = f"{name} {tuple(tensor.shape)}"
            yield name, tensor


@contextmanager
def _opened(paths: Sequence[str]) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        yield [stack.enter_context(safe_open(path, framework="pt")) for path in paths]


def _read(
    files: list[Any], names: frozenset[str] = frozenset()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of these names, or all."""
    for file in files:
        for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            if not names or name in names:
                yield name, file.get_tensor(name)


def _missing_layers(model: torch.nn.Module) -> list[str]:
    """Names of layers whose parameters did not all arrive."""
    tied = _tied_heads(model)
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = info.restore_metadata[0]
        # A layer that is complete was processed already and takes no more.
        if not info.can_load() or not parameters or layer in tied:
            continue
        # The vocabulary is padded to a multiple of 64, so an embedding never fills up.
        padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
        if not padded:
            missing.append(name)
    return missing


def _declare_padding(model: torch.nn.Module) -> None:
    """vLLM's blockwise fp8 makes experts wider than they are loaded, and does not say so as its
    other methods do: a layer would never fill up, and all experts wait in full for the end."""
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            for name, parameter in layer.named_parameters(recurse=False):
                loaded, made = _expert_sizes(layer.moe_config, name)
                if parameter[0].numel() == made and not hasattr(parameter, "weight_loader_numel"):
                    parameter.weight_loader_numel = len(parameter) * loaded


def _expert_sizes(config: Any, name: str) -> tuple[int, int]:
    """Elements of one expert in a parameter: that are loaded, and with its padding."""
    shards = 1 + config.is_act_and_mul
    loaded, made = (
        {
            "w13_weight": shards * inner * hidden,
            "w13_bias": shards * inner,
            "w2_weight": hidden * inner,
            "w2_bias": hidden,
        }.get(name, 0)
        for hidden, inner in (
            (config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded),
            (config.hidden_dim, config.intermediate_size_per_partition),
        )
    )
    return loaded, made


def _tied_heads(model: torch.nn.Module) -> set[torch.nn.Module]:
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return set()
    return {layer for layer in model.modules() if isinstance(layer, ParallelLMHead)}


def _unpad_for_cpu(model: torch.nn.Module) -> None:
    """Experts that were made wider for the kernel, again as wide as they are loaded: the reload
    copies into them. `_repack_for_cpu` makes them wider again."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not isinstance(layer, RoutedExperts) or info.can_load():
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            loaded = info.restore_metadata[0].get(name)
            if loaded is not None and parameter.shape != loaded.shape:
                parameter.data = parameter.new_empty(loaded.shape)


def _repack_for_cpu(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
        elif isinstance(layer, RoutedExperts):
            kernel = layer.quant_method.moe_kernel
            assert kernel is not None, "a served expert block has its kernel"
            kernel.fused_experts.process_weights_after_loading(layer)
