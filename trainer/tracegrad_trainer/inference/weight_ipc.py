"""A push to an engine on this machine, from GPU to GPU: workers open memory that rank 0 has filled.

`push.transport = "ipc"`. A worker of vLLM's `ipc` finds a handle by the UUID of its own GPU, so
rank 0 has a buffer of one bucket on each GPU that the engine serves on. All ranks gather the
weights once more, as they were written to files; rank 0 packs them on its own GPU, copies each
bucket to the engine's, and asks for an update; a worker copies what it takes before it answers.
What a push goes back to are the files (`weight_files`), and the engine takes them as well: the
ranks have other weights by then, and the guard of a sleeping engine has no GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tracegrad_trainer.config.push_transport import BUCKET_BYTES
from tracegrad_trainer.inference.control_routes import (
    EngineLostError,
    PushError,
    ServedWeights,
    VllmControl,
)
from tracegrad_trainer.inference.ipc_handles import encode_handle
from tracegrad_trainer.inference.live_weights import LiveWeights, Named
from tracegrad_trainer.inference.transfer_group import on_device
from tracegrad_trainer.inference.weight_buckets import (
    ALIGNMENT,
    Bucket,
    BucketReader,
    TensorSpec,
    bucket_bytes,
)

logger = logging.getLogger(__name__)

TRIAL = bytes(range(64))


class IpcControl(VllmControl):
    """As `VllmControl`, but an update names memory of GPUs in place of files."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        *,
        device: torch.device,
        engine_devices: Sequence[torch.device],
        live: LiveWeights,
    ) -> None:
        """`device`: this process's GPU; `engine_devices`: the engine's, as it numbers them."""
        super().__init__(url, timeout_s)
        self._url = url
        self._device = device
        self._devices = list(engine_devices)
        self._live = live
        self.by_files = False  # a worker could not open memory of ours
        self._tried: str | None = None  # the engine's word for its weights, as we left it

    def connect(self) -> None:
        """Has every worker open a few bytes of its GPU, once, and again where the engine was
        started anew: before calls wait. Where one cannot, pushes go by files, and a warning says
        so."""
        if self.by_files or (self._tried is not None and self.weight_version() == self._tried):
            return
        try:
            with _Buffers(self._devices, len(TRIAL)) as buffers:
                buffers.fill(torch.frombuffer(bytearray(TRIAL), dtype=torch.uint8))
                self.join_group({"ipc_handles": buffers.handles, "content": list(TRIAL)})
        except EngineLostError:
            raise
        except (RuntimeError, PushError) as error:  # RuntimeError: CUDA's
            logger.warning(
                "push.transport = 'ipc': vLLM at %s opens no memory of rank 0's: %s; pushes go by"
                " files",
                self._url,
                error,
            )
            self.by_files = True
            return
        self._tried = self.weight_version()

    def load(self, served: ServedWeights) -> None:
        super().load(served)
        self._tried = str(served.version)

    def _send(self, served: ServedWeights) -> None:
        if self.by_files or self._live.version != served.version:
            super()._send(served)
            return
        try:
            largest = _largest(served.paths)
            # Gathering is the ranks' own, and each thread has a GPU of its own.
            with on_device(self._device), self._live.tensors() as tensors:
                self._send_tensors(tensors, max(BUCKET_BYTES, largest))
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, PushError):
                raise
            raise PushError(f"weights for vLLM at {self._url} are not sent: {error}") from error

    def _send_tensors(self, tensors: Named, size: int) -> None:
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        with _Buffers(self._devices, size) as buffers:
            ready: Bucket = []
            for bucket in packed(tensors, flat):
                if ready:  # the one before is in the engine's buffers: it was not the last
                    self._update(update_info(ready, buffers.handles, last=False))
                ready = bucket
                buffers.fill(flat[: bucket_bytes(bucket)])
            self._update(update_info(ready, buffers.handles, last=True))


def packed(tensors: Named, flat: Tensor) -> Iterator[Bucket]:
    """Fills `flat` with one bucket after the other; the next one takes its place."""
    bucket: Bucket = []
    begins = 0
    for name, tensor in tensors:
        spec = TensorSpec.of(name, tensor)
        if bucket and (begins % ALIGNMENT or begins + spec.nbytes > flat.numel()):
            yield bucket
            bucket, begins = [], 0
        ends = begins + spec.nbytes
        flat[begins:ends].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        bucket.append(spec)
        begins = ends
    if bucket:
        yield bucket


def _largest(paths: Sequence[str]) -> int:
    with BucketReader(paths) as files:
        return max(spec.nbytes for bucket in files.buckets for spec in bucket)


def update_info(bucket: Bucket, handles: dict[str, Any], *, last: bool) -> dict[str, Any]:
    """One bucket in the fields of vLLM's `IPCWeightTransferUpdateInfo`, packed, but for the form of
    its handles. `last`: the update is whole with it."""
    packed = {
        "names": [spec.name for spec in bucket],
        "dtype_names": [spec.dtype for spec in bucket],
        "shapes": [spec.shape for spec in bucket],
        "tensor_sizes": [spec.nbytes for spec in bucket],
        "ipc_handles": handles,
    }
    return {"packed": packed, "last": last}


class _Buffers:
    """One on each GPU, of `size` bytes, open to other processes until the context ends. `handles`:
    by the GPUs' UUIDs."""

    def __init__(self, devices: Sequence[torch.device], size: int) -> None:
        """Raises RuntimeError: a GPU has no room, or none of its memory can be shared."""
        # A GPU's memory is vLLM's but for what the placement leaves to this.
        made = {device: torch.empty(size, dtype=torch.uint8, device=device) for device in devices}
        self._buffers = list(made.values())
        self.handles = {uuid_of(at): encode_handle(exported(one)) for at, one in made.items()}

    def fill(self, flat: Tensor) -> None:
        """With these bytes; they are there when it returns."""
        first, *others = (buffer[: flat.numel()] for buffer in self._buffers)
        first.copy_(flat, non_blocking=True)
        wait_for(first.device)
        for other in others:
            other.copy_(first, non_blocking=True)
        for other in others:
            wait_for(other.device)

    def __enter__(self) -> _Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what workers have let go of meanwhile
            torch.cuda.empty_cache()


def exported(buffer: Tensor) -> tuple[Any, ...]:
    """What another process opens it with."""
    arguments: tuple[Any, ...] = reduce_tensor(buffer)[1]  # type: ignore[no-untyped-call]
    return arguments


def uuid_of(device: torch.device) -> str:
    """As vLLM's workers know their own GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
