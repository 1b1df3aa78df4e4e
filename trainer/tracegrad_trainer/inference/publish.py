"""The trainer's weights into the served model, and the proof that they are served.

All ranks gather the weights and run the proof's forward; rank 0 alone talks to vLLM. The proof:
vLLM samples tokens under the new weights, and its log-probabilities of them must be the
trainer's own. That catches what no status code does: a layer that kept its old weights, a cache
that outlived them, a push that went to another model.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import Tensor

from tracegrad.events import Json, Turn, logprob_array, token_id_array
from tracegrad_trainer.batches import MicroBatch, Row, micro_batch, rows_of
from tracegrad_trainer.config.push_transport import Transport, choose_transport
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import Learner, as_hf_tensors, full_tensors
from tracegrad_trainer.engine.checkpoint.untrained_parts import (
    elements_beside,
    read_tensors,
    served_beside,
)
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.engine.model.memory import meta_model
from tracegrad_trainer.inference.canary_push import CanaryAdapter, CanaryEngine
from tracegrad_trainer.inference.control_routes import EngineLostError, PushError, ServedWeights
from tracegrad_trainer.inference.engine_sleep import SleepSettings
from tracegrad_trainer.inference.engine_watch import EngineWatch
from tracegrad_trainer.inference.live_weights import GatherOrder, LiveWeights
from tracegrad_trainer.inference.logprob_probe import (
    ProbeMismatchError,
    ProbeSample,
    compare_logprobs,
    sample_probes,
)
from tracegrad_trainer.inference.m2n_push import LiveShards, M2nOrder, M2nSender
from tracegrad_trainer.inference.transports import ControlOf, of_ranks, transport_of
from tracegrad_trainer.inference.weight_directory import choose_directory
from tracegrad_trainer.inference.weight_push import PushReport, SupersededError, WeightPusher
from tracegrad_trainer.inference.zero_adapter import zero_adapter
from tracegrad_trainer.losses.logprob_gap import LogprobGap, Precision
from tracegrad_trainer.utils.distributed import is_rank_zero, run_on_rank_zero

logger = logging.getLogger(__name__)

# With `push.probe_tokens` each: enough tokens for a 99 % quantile.
PROBE_PROMPTS = 8
MAX_PROMPT_TOKENS = 256
NOTHING_SERVED = -1  # the version before the first push


@dataclass(frozen=True, slots=True)
class PublishResult:
    """One attempt. Without `error`, `version` is what is served."""

    version: int
    report: PushReport | None
    gap: LogprobGap | None
    allowed: float | Precision  # what the gap was held against: as in `compare_logprobs`
    error: str | None = None
    lost: bool = False  # nothing is served any more
    superseded: bool = False  # by a rollback; nothing is wrong

    def detail(self) -> Json:
        return {
            "seconds": self.report.seconds if self.report else {},
            "paused_s": self.report.paused_s if self.report else None,
            "held_s": self.report.held_s if self.report else None,
            "bytes": self.report.bytes if self.report else None,
            "carried": self.report.carried if self.report else None,
            "gap": asdict(self.gap) | {"allowed": self.allowed} if self.gap else None,
            "error": self.error,
        }


class WeightPublisher:
    """On every rank; only rank 0 has a pusher."""

    def __init__(self, settings: TrainerSettings, learner: Learner, stack: ExitStack) -> None:
        self.settings = settings
        self.learner = learner
        self.allowed = settings.push.probe_tolerance or learner.precision
        self.pusher: WeightPusher | None = None
        # Until files of earlier pushes have given their room back; rank 0's.
        self.await_room: Callable[[], None] = lambda: None
        self._version_bytes = 0
        key = settings.proxy.control_key or settings.proxy.admin_key
        link = settings.vllm.adapter
        self._transport = _transport_name(settings, learner)
        self._sender = self._m2n_sender() if self._transport == "nccl_m2n" else None
        self._live: LiveWeights | LiveShards = (
            LiveWeights(_order, self._gathered, self._named)
            if self._sender is None
            else LiveShards(self._sender, _order)
        )
        if is_rank_zero():
            self._version_bytes = self._pushed_bytes()
            self.pusher = stack.enter_context(
                WeightPusher(
                    settings.engine_urls,
                    settings.push.proxies or settings.url,
                    proxy_key=key.get_secret_value() if key else None,
                    version=NOTHING_SERVED,
                    checkpoint=zero_adapter(link)
                    if (link := settings.vllm.adapter)
                    else settings.model,
                    directory=choose_directory(settings.push.folder, self._version_bytes),
                    drain_s=settings.push.drain_s,
                    timeout_s=settings.push.timeout_s,
                    sleep=SleepSettings(settings.gpus.planned_sleep_level, settings.state_dir)
                    if settings.gpus.share
                    else None,
                    adapter=lora.adapter_config(learner.model) if link else None,
                    transport=self._control_of(),
                    keep_cache=settings.push.kv_cache == "keep",
                    rolling=settings.push.rollout == "rolling",
                    canary=_canary(settings),
                    stages=settings.vllm.on_cpu,
                )
            )
            stack.enter_context(EngineWatch(self.pusher))

    def _control_of(self) -> ControlOf:
        name, device = self._transport, self.learner.device
        return transport_of(name, device, of_ranks(name, self.settings, device, self._live))

    def _m2n_sender(self) -> M2nSender:
        from tracegrad_trainer.inference.m2n_source import LearnerSource

        settings, learner = self.settings, self.learner
        source = LearnerSource(
            learner.model,
            getattr(torch, settings.vllm.weights_dtype),
            learner.device,
            lambda: read_tensors(settings.model, self._beside),
        )
        return M2nSender(source, learner.device, settings.push.timeout_s)

    @contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """Where ranks and vLLM share GPUs: vLLM sleeps while the body trains and publishes. Where
        nothing was published, it wakes with the weights that it had. A collective.

        A body that fails leaves it asleep, for the guard of its sleep, which wakes it when the
        ranks have ended: until then their memory is not free.
        """
        # All ranks wait for the sleep, which would find less memory free than before if they
        # allocated meanwhile; vLLM takes that for an error.
        if not self.settings.gpus.share:
            yield
            return
        free = _free_bytes(self.learner.device)
        run_on_rank_zero(lambda: self._rank_zeros.stop_engine())
        self._report_sleep(free)
        yield
        self.free_memory()
        run_on_rank_zero(lambda: self._rank_zeros.wake_engine())

    @property
    def _rank_zeros(self) -> WeightPusher:
        assert self.pusher is not None
        return self.pusher

    def free_memory(self) -> None:
        """Of a GPU that vLLM shares, all but weights, optimizer and what a probe needs; when this
        returns, every rank has. vLLM takes the memory back that they used for activations and
        gradients."""
        if not self.settings.gpus.share:
            return
        self.learner.engine.reshard()
        gc.collect()
        if self.learner.device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()

    def _report_sleep(self, free_before: int | None) -> None:
        free = _free_bytes(self.learner.device)
        if free is None or free_before is None:
            return
        said = f"vLLM sleeps: {free >> 20} MiB of the GPU are free, {free_before >> 20} before"
        logger.info(said)
        if free <= free_before:
            logger.warning(
                "vLLM's sleep has freed nothing of this rank's GPU: is it another one than vLLM's"
                " (gpus.share), or was vLLM started without --enable-sleep-mode?"
            )

    def publish(
        self, version: int, rows: Sequence[Row], *, as_candidate: bool = False
    ) -> PublishResult | None:
        """Pushes the learner's weights as `version`; on rank 0 what came of it, else None.
        `as_candidate`: to a share of traffic alone.

        `rows` (rank 0) are recent: their beginnings are the probes' prompts, which the engine
        may have cached, so that a cache kept over the push would show.
        """
        gathered = self._gathered()
        if self.pusher is None:
            deque(gathered, maxlen=0)
            self.free_memory()
            self._follow()
            return None
        if self.pusher.free_bytes() < self._version_bytes:
            self.await_room()
        new = self._written(version, gathered)
        self.free_memory()
        most = self.settings.vllm.max_model_len
        longest = None if most is None else most - self.settings.push.probe_tokens
        # As calls of that version: without one a cache that must not be there would show.
        salt = str(version) if self.settings.push.kv_cache == "keep" else None
        probing = _Probing(self, probe_prompts(rows, longest), salt)
        self._live.version = version
        try:
            if isinstance(new, PushError):
                raise new
            report = self.pusher.serve(new, verify=probing, as_candidate=as_candidate)
            return PublishResult(version, report, probing.gap, self.allowed)
        except PushError as error:
            return PublishResult(
                version,
                None,
                probing.gap,
                self.allowed,
                str(error),
                lost=isinstance(error, EngineLostError),
                superseded=isinstance(error, SupersededError),
            )
        finally:
            self._live.version = None
            _share(None)

    def _pushed_bytes(self) -> int:
        """Of one version's files, about."""
        dtype: torch.dtype = getattr(torch, self.settings.vllm.weights_dtype)
        only_adapter = self.settings.vllm.adapter is not None
        count = sum(
            parameter.numel()
            for name, parameter in self.learner.model.named_parameters()
            if lora.is_adapter_parameter(name) or not only_adapter
        )
        if not only_adapter:
            base = self.settings.model
            count += elements_beside(base, meta_model(base))
        return dtype.itemsize * count

    @cached_property
    def _beside(self) -> list[str]:
        """What vLLM serves of the model's folder and we do not train: an update is whole."""
        return served_beside(self.settings.model, meta_model(self.settings.model))

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the dtype that vLLM takes them in, one at a time; a collective to its
        end. Vectors (norms, biases) stay as they are: some are of float32 in vLLM too."""
        dtype = getattr(torch, self.settings.vllm.weights_dtype)
        if self.settings.vllm.adapter:
            yield from lora.adapter_tensors(self.learner.model, dtype)
            return
        for name, tensor in full_tensors(self.learner.model):
            matrix = tensor.ndim >= 2 and tensor.is_floating_point()
            yield name, tensor.to(dtype) if matrix else tensor

    def _written(
        self, version: int, gathered: Iterator[tuple[str, Tensor]]
    ) -> ServedWeights | PushError:
        """Rank 0: the files, or why there are none. No more than a bucket of them is in memory."""
        here = ((name, tensor.cpu()) for name, tensor in gathered)
        try:
            # An adapter has the names of the layers in memory, in vLLM and in peft.
            adapter = self.settings.vllm.adapter is not None
            named = here if adapter else self._named(here)
            return self._rank_zeros.write(version, named)
        except PushError as error:
            return error
        finally:
            deque(gathered, maxlen=0)  # a gather that rank 0 leaves half-way hangs the others

    def _named(self, gathered: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Under the names of folders, with what is not trained."""
        yield from as_hf_tensors(self.learner.model, gathered)
        yield from read_tensors(self.settings.model, self._beside)

    def _follow(self) -> None:
        """Not rank 0: does its part of the push, as ordered, and of each proof."""
        while (asked := _share(None)) is not None:
            if isinstance(asked, GatherOrder):
                deque(self._gathered(), maxlen=0)
            elif isinstance(asked, M2nOrder):
                assert self._sender is not None
                self._sender.take_part(asked)
            else:
                self.trained_logprobs(asked)

    def trained_logprobs(self, samples: Sequence[ProbeSample]) -> list[float]:
        """The trainer's own log-probabilities of the sampled tokens; a collective."""
        values = self.learner.logprobs([_as_micro_batch(samples)])[0]
        found: list[float] = values.tolist()
        return found


class _Probing:
    """Rank 0's side of the proof; called by the pusher between the push and its end."""

    def __init__(
        self, publisher: WeightPublisher, prompts: list[list[int]], cache_salt: str | None = None
    ) -> None:
        self.publisher = publisher
        self.cache_salt = cache_salt
        self.prompts = prompts
        self.gap: LogprobGap | None = None
        self._gaps: list[float] = []

    def __call__(self, *places: str) -> None:
        """Of these engines, or of all; or of the candidate, by its name."""
        settings = self.publisher.settings
        engine_key = settings.vllm.api_key
        by_engine = {
            place: sample_probes(
                place if place in settings.engine_urls else settings.engine_urls[0],
                self.prompts,
                tokens=settings.push.probe_tokens,
                model=settings.vllm.served_model_name if place in settings.engine_urls else place,
                key=engine_key.get_secret_value() if engine_key else None,
                timeout=settings.push.timeout_s,
                cache_salt=self.cache_salt,
            )
            for place in places or settings.engine_urls
        }
        samples = [sample for some in by_engine.values() for sample in some]
        _share(samples)
        trained = iter(self.publisher.trained_logprobs(samples))
        for place, some in by_engine.items():
            served = [value for sample in some for value in sample.logprobs]
            expected = list(islice(trained, len(served)))
            self._gaps += [abs(a - b) for a, b in zip(served, expected, strict=True)]
            self._compare(place, served, expected)
        self.gap = LogprobGap.of(self._gaps)

    def _compare(self, place: str, served: list[float], trained: list[float]) -> None:
        """Of one engine: among the right ones' log-probabilities a wrong one's would not show."""
        try:
            compare_logprobs(served, trained, self.publisher.allowed)
        except ProbeMismatchError as error:
            self.gap = error.gap
            if len(self.publisher.settings.engine_urls) == 1:
                raise
            raise ProbeMismatchError(f"engine {place}: {error}", error.gap) from error


def _transport_name(settings: TrainerSettings, learner: Learner) -> Transport:
    """Where nobody has planned, as for ranks of several machines, it may be open until here."""
    name = choose_transport(
        settings,
        engine_on_gpu=not settings.vllm.on_cpu,
        train_on_gpu=learner.device.type == "cuda",
    )
    if name == "ipc" and settings.push.transport == "auto":  # `trainer serve` would have planned it
        name = "files"
    return name


def _canary(settings: TrainerSettings) -> CanaryEngine | CanaryAdapter | None:
    if settings.promotion.gate != "canary":
        return None
    share = settings.promotion.canary_share
    if settings.vllm.candidates:
        return CanaryAdapter(settings.vllm.candidate_name, share)
    return CanaryEngine(settings.engine_urls[-1], share)


def _free_bytes(device: torch.device) -> int | None:
    """Of the GPU, whoever uses the rest; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


Asked = M2nOrder | GatherOrder | list[ProbeSample] | None


def _share(asked: Asked) -> Asked:
    """Rank 0's order on every rank, or its samples, with which a push ends; None: there was no
    proof to take part in."""
    message = [asked]
    dist.broadcast_object_list(message, src=0)
    return message[0]


def _order(order: M2nOrder | GatherOrder) -> None:
    _share(order)


def probe_prompts(rows: Sequence[Row], longest: int | None) -> list[list[int]]:
    """The beginnings of the longest rows, over again where these are few; any ids will do where
    there are none yet. `longest`: tokens that the engine takes beside those that it samples."""
    tokens = max(1, min(MAX_PROMPT_TOKENS, longest or MAX_PROMPT_TOKENS))
    first = sorted(rows, key=len, reverse=True)[:PROBE_PROMPTS]
    # Not fewer ids: vLLM 0.32 on a CPU was seen to die of four in bfloat16.
    begun = [row.input_ids[:tokens].tolist() for row in first] or [list(range(1, 25))[:tokens]]
    return list(islice(cycle(begun), PROBE_PROMPTS))


@dataclass(frozen=True, slots=True)
class _ProbeRollout:
    rollout_id: str
    turns: Sequence[Turn]
    reward: float = 0.0


def _as_micro_batch(samples: Sequence[ProbeSample]) -> MicroBatch:
    rows = []
    for i, sample in enumerate(samples):
        turn = Turn(
            rollout_id=f"probe-{i}",
            dialect="probe",
            model="",
            prompt_token_ids=token_id_array(sample.prompt_token_ids),
            completion_token_ids=token_id_array(sample.token_ids),
            completion_logprobs=logprob_array(sample.logprobs),
            policy_versions=((0, len(sample.token_ids)),),
        )
        rollout = _ProbeRollout(turn.rollout_id, [turn])
        rows += rows_of(rollout, group_id=turn.rollout_id, advantages=[0.0])
    return micro_batch(rows, range(len(rows)))
