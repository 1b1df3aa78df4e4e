"""Checks of a model before anything starts; each error is one line.

`check_supported` is about the model's kind, `check_fits_memory` about its size. Both run before
weights are trained, the second before they are read.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM

from tracegrad.host_memory import free_host_memory
from tracegrad_trainer.engine.attention import dispatch
from tracegrad_trainer.engine.attention.blocked import working_bytes
from tracegrad_trainer.engine.attention.masked import (
    Attended,
    Keys,
    Queries,
    ScoreTransform,
    Values,
)
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.config import FsdpSettings
from tracegrad_trainer.engine.distributed import compute_dtype, frozen_dtype, pick_device
from tracegrad_trainer.engine.model import recurrent_layers, router_replay
from tracegrad_trainer.engine.model.chunked_logprobs import MAX_LOGIT_ELEMENTS
from tracegrad_trainer.engine.model.forward import run_inside_forward
from tracegrad_trainer.engine.model.hf_config import (
    MASKED_LAYERS,
    POINTWISE_LAYERS,
    experts_per_token,
    layer_configs,
    query_heads,
    score_transforms,
    transformer_blocks,
)
from tracegrad_trainer.engine.model.hf_weights import HfWeights, loaded_whole, readable_by_parts

_GIB = 1024**3
_ASK = """
import torch
print(min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())))
"""
_OURS_PREFIX = "tracegrad_"
_OTHER_ATTENTION = (
    "{} takes no attention but transformers' own: set fsdp.attention = 'sdpa' or 'eager'"
)
_COARSE = 0.03  # of hidden states in bfloat16, as a share of the largest


def check_supported(model: nn.Module) -> None:
    """By the config. Raises ValueError: rows packed for this model would see each other, or would
    see wrongly."""
    config: Any = model.config
    name: str = config._attn_implementation
    kinds = _layer_kinds(config) - MASKED_LAYERS - POINTWISE_LAYERS
    recurrent = bool(kinds) or getattr(model, "_is_stateful", False)
    if recurrent and not recurrent_layers.recurrent_layers(model):
        what = ", ".join(sorted(kinds)) or "recurrent layers"
        raise ValueError(
            f"{type(model).__name__} has {what}, which carry a state from one row of a pack to the"
            " next, in a way not known here: such models cannot be trained"
        )
    if name.startswith(_OURS_PREFIX):
        # Models with recurrent layers do not say that they have a backend; they are tried.
        backend = recurrent or getattr(model, "_supports_attention_backend", False)
        if "chunked_attention" in _layer_kinds(config) or not backend:
            raise ValueError(_OTHER_ATTENTION.format(type(model).__name__))
    if name == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{type(model).__name__} caps attention scores, which 'sdpa' leaves out:"
            " set fsdp.attention = 'packed' or 'eager'"
        )


def check_rows_apart(model: nn.Module, device: torch.device) -> None:
    """By trial, on all ranks at once. Raises ValueError: rows of a pack see each other."""
    config: Any = model.config
    name: str = config._attn_implementation
    if name.startswith("flash"):
        return
    trial = run_inside_forward(model, lambda whole: _try_rows(whole, device))
    # Blocks too, which stay whole behind a forward without `fsdp.reshard`: whoever asks for the
    # model's parameters next must get the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    ours = name.startswith(_OURS_PREFIX)
    if trial.apart and ours and _layer_kinds(config) & MASKED_LAYERS and not trial.attended:
        raise ValueError(_OTHER_ATTENTION.format(type(model).__name__))
    if not trial.apart:
        other = "'eager'" if ours else "'packed'"
        raise ValueError(
            f"{type(model).__name__} lets the rows of a pack see each other with this attention:"
            f" set fsdp.attention = {other}"
        )


def _layer_kinds(config: Any) -> set[str]:
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


class _CountedAttention(PackedRowAttention):
    """Of a trial: knows whether a model came to it."""

    calls = 0

    def attend(self, query: Queries, key: Keys, value: Values, scores: ScoreTransform) -> Attended:
        self.calls += 1
        return super().attend(query, key, value, scores)


@dataclass(frozen=True, slots=True)
class _Trial:
    apart: bool
    attended: bool  # by our attention


@torch.no_grad()
def _try_rows(model: nn.Module, device: torch.device) -> _Trial:
    """A row of three tokens behind another, and alone.

    transformers finds rows by their position ids, but not every model hands those to its masks.
    """
    backbone: Any = model.base_model
    config: Any = model.config
    name = config._attn_implementation
    if name == dispatch.VARLEN:  # of its kernel nothing is asked here, and it may have no device
        config._attn_implementation = dispatch.PACKED
    calls = 0

    def hidden(ids: list[int], lengths: list[int]) -> torch.Tensor:
        nonlocal calls
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
        rows = _CountedAttention(lengths, device)
        given: dict[str, Any] = {}
        if config._attn_implementation == dispatch.PACKED:
            given["packed_rows"] = rows
        if recurrent_layers.is_installed(model):
            given["token_paths"] = rows.paths
        tokens = torch.tensor([ids], device=device)
        out = backbone(input_ids=tokens, position_ids=positions, use_cache=False, **given)
        calls += rows.calls
        last: torch.Tensor = out.last_hidden_state[0, -3:]
        return last

    try:
        alone = hidden([3, 4, 5], [3])
        behind = hidden([0, 1, 2, 3, 4, 5], [3, 3])
    finally:
        config._attn_implementation = name
    tolerance = 1e-3 if alone.dtype == torch.float32 else _COARSE
    apart = (alone - behind).abs().max() <= tolerance * alone.abs().max()
    return _Trial(bool(apart), calls > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank. `state`: weights (a reference's too), gradients and optimizer; in the
    host's memory if they are offloaded. Activations are an estimate, good to a factor of two.

    Of the host's memory besides: `loading`, beyond its shards, while the model is loaded, and
    `copied`, what of the state a checkpoint copies before it is written."""

    parameters: int  # of the whole model, not bytes
    state: int
    gradients: int  # of the state, and gone between steps
    whole: int  # parameters that are gathered while they are computed with
    activations: int
    backward: int  # logits, and gradients of whole parameters, while there are activations
    scores: int  # of attention, where they are written out; of ours a few blocks at a time
    loading: int
    copied: int
    offloaded: bool
    waiting: int = 0  # activations that wait in the host's memory

    @property
    def on_device(self) -> int:
        computed = self.whole + self.activations + self.backward + self.scores
        return computed + (0 if self.offloaded else self.state)

    @property
    def on_host(self) -> int:
        """Beside a GPU; without one all of `on_device` is there too."""
        state = self.state if self.offloaded else 0
        return max(self.loading, self.copied) + state + self.waiting

    def __str__(self) -> str:
        return (
            f"weights, gradients and optimizer {_gib(self.state)}, gathered parameters"
            f" {_gib(self.whole)}, activations {_gib(self.activations)}, logits and whole gradients"
            f" {_gib(self.backward)}, attention scores {_gib(self.scores)}, a checkpoint's copy"
            f" {_gib(self.copied)}"
        )

    @property
    def of_host(self) -> str:
        state = f"offloaded weights, gradients and optimizer {_gib(self.state)}, "
        return (
            f"a rank: {state if self.offloaded else ''}a checkpoint's copy {_gib(self.copied)},"
            f" loading {_gib(self.loading)}"
            + (f", offloaded activations {_gib(self.waiting)}" if self.waiting else "")
        )


def check_fits_memory(
    folder: Path | str,
    settings: FsdpSettings,
    *,
    ranks: int,
    local_ranks: int,
    tokens: int,
    vocabulary: int | None = None,
    free: int | None = None,
    free_host: int | None = None,
    reference: bool = False,
    moment_bytes: int = 8,
) -> MemoryEstimate:
    """Whether a model can be trained here; reads its config, and the headers of its files.

    Args:
        ranks: of all machines; `local_ranks` of this one.
        tokens: of one micro-batch.
        vocabulary: how many tokens the tokenizer has.
        free: bytes that a rank may have on its device; default: what is free there now.
        free_host: bytes that this machine has beside its GPUs; default: what is free now.
        reference: a frozen model of the same shape is held beside it.

    Raises:
        ValueError: there is no such model, its files are another's, its vocabulary is too small,
            it does not fit, or it has no routes that could be replayed.
    """
    model = meta_model(folder)
    embedded: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if vocabulary is not None and vocabulary > embedded:
        raise ValueError(
            f"model = {str(folder)!r}: its tokenizer has {vocabulary} tokens, the model embeds"
            f" {embedded}: they do not belong together"
        )
    if readable_by_parts(Path(folder), model.config):
        HfWeights(Path(folder), model)
    if settings.routing != "own":
        router_replay.check_replay(model, settings.routing)
    found = estimate_memory(
        model,
        settings,
        ranks=ranks,
        tokens=tokens,
        reference=reference,
        moment_bytes=moment_bytes,
    )
    device = "cpu" if settings.device == "cpu" or not torch.cuda.is_available() else "cuda"
    if free is None:
        free = free_gpu_memory() if device == "cuda" else free_host_memory() // local_ranks
    wanted = found.on_device
    if device == "cpu":  # its memory is the host's
        wanted += found.on_host
    elif free_host is None:
        free_host = free_host_memory()
    if device == "cuda" and free_host is not None and local_ranks * found.on_host > free_host:
        raise ValueError(
            f"model = {str(folder)!r} ({found.parameters / 1e9:.2f}e9 parameters) does not fit: its"
            f" {local_ranks} ranks on this machine need about"
            f" {_gib(local_ranks * found.on_host)} of the host's memory ({found.of_host}), and"
            f" {_gib(free_host)} are free: try {_host_advice(settings)}"
        )
    if wanted > free:
        raise ValueError(
            f"model = {str(folder)!r} ({found.parameters / 1e9:.2f}e9 parameters) does not fit: a"
            f" rank of {ranks} needs about {_gib(wanted)} ({found}) and has {_gib(free)}"
            f" {'of GPU memory' if device == 'cuda' else 'of memory'}: {_advice(settings, device)}"
        )
    return found


def meta_model(folder: Path | str, attention: str | None = None) -> nn.Module:
    """The model in float32 without storage, with an attention of transformers' by name.

    Raises:
        ValueError: there is no such model.
    """
    given = {} if attention is None else {"attn_implementation": attention}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.name_or_path = str(folder)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, **given
            )
        # What a model draws by `torch.normal` (DiffLlama's lambdas) is on the host in spite of it,
        # and would be left as it was drawn, on each rank otherwise.
        model.to("meta")
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"model = {str(folder)!r} cannot be loaded: {error}") from error
    return model


def estimate_memory(
    model: nn.Module,
    settings: FsdpSettings,
    *,
    ranks: int,
    tokens: int,
    reference: bool = False,
    moment_bytes: int = 8,
) -> MemoryEstimate:
    """What one rank will hold, from the shapes alone; `model` may be on the meta device.
    `moment_bytes`: of both moments of a parameter."""
    ranks = max(1, ranks // settings.replicas)  # that share one copy
    blocks = transformer_blocks(model)
    count = sum(p.numel() for p in model.parameters())
    trained = count
    if settings.lora is not None:
        trained = _adapter_parameters(model, settings.lora.rank)
    computed = compute_dtype(settings).itemsize
    kept = frozen_dtype(settings).itemsize
    pinned = settings.cpu_offload and pick_device(settings).type == "cuda"
    weights = gradients = 4 * trained // ranks
    if settings.lora is None:
        weights = gradients = _shards(model, 4, ranks, pinned=pinned)
    else:
        weights += _shards(model, kept, ranks, pinned=pinned)
    if reference:
        weights += _shards(model, kept, ranks, pinned=pinned)
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    root = count - sum(p.numel() for block in blocks for p in block.parameters())
    # The next block is gathered early. One rank copies its shards too, whatever their type.
    whole = computed * (root + 2 * largest if settings.reshard else count)
    if not settings.reshard:
        whole += 4 * trained
    stays, at_work, waiting = _activations(model, settings, tokens)
    freed = computed * largest if settings.reshard else 0  # one of both blocks, by then
    # At the end, when all that is gone, what is in no block is summed over ranks like a block.
    end = (computed + 4) * root + 4 * largest - whole - stays - at_work
    return MemoryEstimate(
        parameters=count,
        state=weights + gradients + moment_bytes * trained // ranks,
        gradients=gradients,
        whole=whole,
        activations=stays + at_work,
        backward=max(
            0,
            _head(model, settings, tokens) - at_work - freed,
            _reduced(model, settings, largest) - freed,
            0 if settings.lora else end,
        ),
        scores=_attention_scores(model.config, settings, tokens),
        loading=loading_bytes(model, ranks),
        copied=(4 + moment_bytes) * trained // ranks,
        offloaded=settings.cpu_offload,
        waiting=waiting,
    )


def loading_bytes(model: nn.Module, ranks: int) -> int:
    """Of the host's memory, beyond its shards, that a rank needs at most while a model is loaded.

    One tensor's part, twice in float32: as it is read and as it is kept, or what a mixture's
    experts are stacked of and what they are stacked into. Quantized models, and those without
    safetensors, are loaded whole.
    """
    config: Any = model.config
    if loaded_whole(Path(config.name_or_path), config):
        return 4 * sum(p.numel() for p in model.parameters())
    return 2 * 4 * max(p.numel() for p in model.parameters()) // ranks


def _shards(model: nn.Module, itemsize: int, ranks: int, *, pinned: bool) -> int:
    """Bytes of a rank's shards of all parameters."""
    if not pinned:
        return itemsize * sum(p.numel() for p in model.parameters()) // ranks
    rows = ((len(p), p.numel()) for p in model.parameters())
    return sum(_pinned(itemsize * -(-n // ranks) * (count // n)) for n, count in rows)


def _pinned(size: int) -> int:
    """What torch takes of the host's memory for it: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _head(model: Any, settings: FsdpSettings, tokens: int) -> int:
    """Bytes at the start of backward: a chunk of logits with their exponentials, and the gradient
    of the head, which is summed in float32 from chunk to chunk."""
    most = MAX_LOGIT_ELEMENTS[pick_device(settings).type]
    head: nn.Parameter = model.get_output_embeddings().weight
    logits = 2 * 4 * min(most, tokens * len(head))
    if settings.lora is not None:
        return logits
    # Of half precision the sum, and what is added to it.
    return logits + (4 if compute_dtype(settings).itemsize == 4 else 8) * head.numel()


def _reduced(model: Any, settings: FsdpSettings, block: int) -> int:
    """Bytes behind a block's backward: its gradients, what of them is summed over ranks in float32
    and that of the block before, while the head's gradient waits for the end."""
    if settings.lora is not None:  # of adapters alone
        return 0
    itemsize = compute_dtype(settings).itemsize
    head: int = model.get_output_embeddings().weight.numel()
    return itemsize * head + (itemsize + 2 * 4) * block


def _activations(model: nn.Module, settings: FsdpSettings, tokens: int) -> tuple[int, int, int]:
    """Bytes that the blocks keep for backward: on the device until then, there while a block is
    computed, and in the host's memory."""
    layers = layer_configs(model.config)
    itemsize = compute_dtype(settings).itemsize
    kept = [_kept(layer) for layer in layers]
    for i, more in _recurrent(model, layers[0].hidden_size):
        kept[i].append(int(more / itemsize))
    largest = max(map(sum, kept))
    stays = at_work = waiting = 0
    if settings.gradient_checkpointing == "selective":
        stays = sum(map(sum, kept)) // 3  # torch holds it where no hook offloads it
    if settings.gradient_checkpointing:
        at_work = largest
        kept = [[layer.hidden_size] for layer in layers]
    token = tokens * itemsize
    if settings.activation_offloading:
        at_work = 2 * largest  # and of the block that is on its way
        on_host = _pinned if pick_device(settings).type == "cuda" else int
        waiting = sum(on_host(token * value) for block in kept for value in block)
    else:
        stays += sum(map(sum, kept))
    return token * stays, token * at_work, waiting


def _recurrent(model: nn.Module, hidden_size: int) -> Iterator[tuple[int, float]]:
    """Number of a layer that carries a state, and the bytes a token that it keeps for that."""
    known: dict[type, float] = {}
    layers = recurrent_layers.recurrent_layers(model)
    for i, block in enumerate(transformer_blocks(model)):
        inside = [layer for layer in layers if any(layer is one for one in block.modules())]
        for layer in inside:
            if type(layer) not in known:
                known[type(layer)] = recurrent_layers.kept_bytes(layer, hidden_size)
            yield i, known[type(layer)]


def _attention_scores(config: Any, settings: FsdpSettings, tokens: int) -> int:
    """Bytes for what is as large as the square of a pack, in transformers' own attentions, or of
    what ours holds of it at a time. `tokens`: of a pack; a row may be as long."""
    layers = layer_configs(config)
    itemsize = compute_dtype(settings).itemsize
    mask = tokens**2 * (1 + itemsize)  # as it is made, and as it is added to the scores
    if settings.attention == "sdpa":
        return mask
    if settings.attention == "eager":
        # A layer keeps its weights, and the softmax in float32 that they are cast from.
        each = [query_heads(layer)[0] * tokens**2 * (4 + itemsize) for layer in layers]
        return mask + (max(each) if settings.gradient_checkpointing else sum(each))
    if settings.attention.startswith("flash"):
        return 0
    return max(
        working_bytes(tokens, query_heads(layer)[0], scores)
        for layer in layers
        for scores in score_transforms(layer)
    )


def _kept(layer: Any) -> list[int]:
    """Values a token of each tensor that a block of today's kind keeps for backward.

    Inputs, norms and their factors, rotated queries and keys, the attention's output; gate, up
    and their products in the MLP. The factor for copies in fp32 is from measurement.
    """
    heads, width = query_heads(layer)
    attended = width * (heads + 2 * (getattr(layer, "num_key_value_heads", None) or heads))
    hidden: int = layer.hidden_size
    inner = getattr(layer, "moe_intermediate_size", None) or getattr(
        layer, "intermediate_size", None
    )
    inner = inner or 4 * hidden
    return 8 * [hidden] + 4 * [attended] + 4 * [inner * (experts_per_token(layer) or 1)]


def _adapter_parameters(model: nn.Module, rank: int) -> int:
    """Of all linear layers but the head: what `targets` may leave out is not counted out."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = (m for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    return sum(rank * (m.in_features + m.out_features) for m in linear)


def free_gpu_memory() -> int:
    """Bytes that each GPU has left: ours, or where none is yet, the fullest that can be seen.

    Where this process does not use it, another one asks: a context would hold hundreds of MB of
    it for as long as its process lives, and `trainer serve` lives as long as the run.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.mem_get_info()[0]
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise ValueError(f"fsdp.device: the GPU does not say what memory it has: {lines[-1]}")
    return int(asked.stdout)


def _advice(settings: FsdpSettings, device: str) -> str:
    ways = ["more ranks on more devices"]
    if settings.gradient_checkpointing is not True:
        ways.append("fsdp.gradient_checkpointing = true")
    if device == "cuda" and compute_dtype(settings) == torch.float32:
        ways.append("fsdp.compute_dtype = 'bfloat16'")
    if device == "cuda" and not settings.cpu_offload:
        ways.append("fsdp.cpu_offload = true")
    if not settings.reshard:
        ways.append("fsdp.reshard = true")
    if settings.attention in ("sdpa", "eager"):
        ways.append("fsdp.attention = 'auto', which writes out no scores")
    if settings.lora is None:
        ways.append("[fsdp.lora]")
    ways.append("a smaller batches.tokens_per_micro_batch")
    return "try " + ", ".join(ways)


def _host_advice(settings: FsdpSettings) -> str:
    ways = ["ranks on more machines"]
    if settings.cpu_offload:
        ways.append("fsdp.cpu_offload = false")
    if settings.lora is None:
        ways.append("[fsdp.lora]")
    return ", ".join(ways)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
