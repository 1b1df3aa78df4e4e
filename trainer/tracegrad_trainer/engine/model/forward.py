"""One forward over a packed micro-batch: log-probabilities, entropy and values of its targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.attention import dispatch
from tracegrad_trainer.engine.attention.dispatch import RowAttention
from tracegrad_trainer.engine.context_parallel import ContextParallel, ContextParallelAttention
from tracegrad_trainer.engine.model import recurrent_layers, router_replay
from tracegrad_trainer.engine.model import value_head as value
from tracegrad_trainer.engine.model.chunked_logprobs import LogitTransform, chunked_logprobs
from tracegrad_trainer.losses.tokens import PerToken, Scalar, TokenMask, Tokens

T = TypeVar("T")
# Log-probabilities, entropy and values of targets.
_Outputs = tuple[PerToken, PerToken, PerToken | None]

# What of a micro-batch an objective sees as it is.
_TO_TOKENS = (
    *("rollout_logprobs", "advantage", "score", "version", "demonstration", "turn", "row"),
    *("rollout", "group", "turn_tokens", "rollout_tokens", "rollout_sampled", "group_tokens"),
    *("group_sampled", "pair", "label"),
)


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """A micro-batch as tensors on the rank's device."""

    batch: MicroBatch
    model: dict[str, Any]  # keyword arguments of the model's forward
    labels: Int64[Tensor, " n"]
    temperature: PerToken
    has_temperature: bool  # some temperature is not 1
    tensors: dict[str, Tensor]  # fields of `Tokens`, [n] or [rows]
    context: ContextParallel | None = None  # what follows, labels and temperature are its slice's
    own: Int64[Tensor, " own"] | None = None  # numbers of the targets that this rank predicts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TargetContext:
    """What is known of a micro-batch's targets before its forward with gradient."""

    # None: the current ones, which they are at a batch's first step
    old_logprobs: PerToken | None = None
    current_logprobs: PerToken | None = None  # the policy's now; None: not computed yet
    reference_logprobs: PerToken | None = None
    old_value: PerToken | None = None
    returns: PerToken | None = None
    # Where it depends on values: instead of the batch's own.
    advantage: PerToken | None = None
    kto_z: Scalar | None = None
    # None: they are whole here.
    rollout_sums: tuple[Float64[Tensor, " rollouts"], ...] | None = None
    complete: bool = False  # nothing that the objective needs is missing

    def select(self, stay: TokenMask) -> TargetContext:
        """What is known of the targets that stay."""
        known = {name: getattr(self, name) for name in TARGET_FIELDS}
        return replace(self, **{k: v[stay.to(v.device)] for k, v in known.items() if v is not None})


# Fields of `TargetContext` that have one number a target.
TARGET_FIELDS = (
    *("old_logprobs", "current_logprobs", "reference_logprobs"),
    *("old_value", "returns", "advantage"),
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardOutput:
    policy_logprobs: PerToken  # with gradient
    entropy: PerToken  # with gradient where asked for
    value: PerToken | None = None  # with gradient


def to_inputs(
    batch: MicroBatch,
    model: nn.Module,
    device: torch.device,
    context: ContextParallel | None = None,
) -> ModelInputs:
    """With a `context` this rank's slice of it."""

    def move(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    arguments: dict[str, Any] = {
        "input_ids": move(batch.input_ids),
        "position_ids": move(batch.position_ids),
        "use_cache": False,
        # Logits only where a target is predicted from.
        "logits_to_keep": move(batch.source),
    }
    arguments |= model_arguments(model, batch, device)
    every = ModelInputs(
        batch=batch,
        model=arguments,
        labels=move(batch.input_ids[0, batch.target]),
        temperature=move(batch.temperature),
        has_temperature=bool((batch.temperature != 1).any()),
        tensors={name: move(getattr(batch, name)) for name in _TO_TOKENS},
    )
    return every if context is None else _sliced(every, context, device)


def _sliced(inputs: ModelInputs, context: ContextParallel, device: torch.device) -> ModelInputs:
    batch = inputs.batch
    here = context.slice_of(batch.tokens)
    own = torch.from_numpy(context.own_targets(batch.source, batch.tokens)).to(device)
    rows: RowAttention = inputs.model["packed_rows"]
    arguments = inputs.model | {
        "input_ids": torch.from_numpy(context.shard(batch.input_ids[0])[None]).to(device),
        "position_ids": torch.from_numpy(context.shard(batch.position_ids[0])[None]).to(device),
        "logits_to_keep": inputs.model["logits_to_keep"][own] - here.start,
        "packed_rows": ContextParallelAttention(rows, batch.tokens, context),
    }
    return replace(
        inputs,
        model=arguments,
        labels=inputs.labels[own],
        temperature=inputs.temperature[own],
        context=context,
        own=own,
    )


def model_arguments(model: nn.Module, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model's forward: what keeps a micro-batch's rows apart, in attention
    and in recurrent layers, and the experts that its tokens go to."""
    given: dict[str, Any] = {}
    if router_replay.is_installed(model) and batch.expert_routing is not None:
        # As narrow as they came: a step's micro-batches are on the device all at once.
        given["routes"] = torch.from_numpy(batch.expert_routing).to(device)
    if recurrent_layers.is_installed(model):
        given["token_paths"] = recurrent_layers.paths_of(batch, device)
    return given | dispatch.row_arguments(model, batch, device)


def loss_tokens_of(inputs: ModelInputs, now: ForwardOutput, before: TargetContext) -> Tokens:
    given = inputs.tensors
    if before.advantage is not None:
        given = given | {"advantage": before.advantage}
    old = now.policy_logprobs.detach() if before.old_logprobs is None else before.old_logprobs
    batch = inputs.batch
    return Tokens(
        policy_logprobs=now.policy_logprobs,
        old_logprobs=old,
        turns=batch.turns,
        rows=len(batch.row_lengths),
        rollouts=batch.rollouts,
        groups=batch.groups,
        reference_logprobs=before.reference_logprobs,
        value=now.value,
        old_value=before.old_value,
        returns=before.returns,
        kto_z=before.kto_z,
        rollout_sums=before.rollout_sums,
        entropy=now.entropy,
        asked=None,
        **given,
    )


@dataclass(frozen=True, slots=True)
class LmHead:
    """How log-probabilities are made of hidden states; see `lm_head.choose_lm_head`.

    Without a `shape` the model makes full logits itself: `reason` says why.
    """

    shape: LogitTransform | None
    reason: str = ""
    elements: int | None = None  # most logits held at a time; None: by the device
    dtype: torch.dtype = torch.float32  # of its matrix products


def forward(
    model: nn.Module,
    inputs: ModelInputs,
    head: LmHead,
    *,
    values: bool = False,
    entropy_gradient: bool = False,
) -> ForwardOutput:
    """The targets' log-probabilities at their temperatures, and with `values` their values. The
    entropy, at the same temperatures, has a gradient only where one is asked for.

    Raises:
        ValueError: the model ignores `logits_to_keep`.
    """
    make = _by_model if head.shape is None else _by_body
    # What passes through FSDP must be plain tensors: it hangs its backward on them.
    logp, entropy, found = run_inside_forward(
        model, lambda whole: make(whole, inputs, head, values, entropy_gradient)
    )
    return ForwardOutput(
        policy_logprobs=_every_target(inputs, logp),
        entropy=_every_target(inputs, entropy),
        value=None if found is None else _every_target(inputs, found),
    )


def _every_target(inputs: ModelInputs, own: PerToken) -> PerToken:
    """Of the micro-batch; all of them are this rank's without a `context`."""
    if inputs.context is None:
        return own
    assert inputs.own is not None
    return inputs.context.gather_targets(own, inputs.own, len(inputs.batch.target))


def values_of(model: nn.Module, inputs: ModelInputs) -> PerToken:
    """Values of the targets alone; no logits are made."""
    own = run_inside_forward(
        model, lambda whole: value.predict_values(whole, _hidden(whole, inputs))
    )
    return _every_target(inputs, own)


def run_inside_forward(model: nn.Module, work: Callable[[nn.Module], T]) -> T:
    """`work(model)` as if it were the model's forward: under FSDP the root's parameters are
    whole meanwhile, and their gradients are reduced as ever."""
    if not isinstance(model, FSDPModule):
        return work(model)
    if not hasattr(model, _WORK):
        # Arguments would be rounded to the compute type on the way in; a function is not.
        setattr(model, _WORK, lambda given: given(model))
        register_fsdp_forward_method(model, _WORK)
    done: T = getattr(model, _WORK)(work)
    return done


_WORK = "tracegrad_work"


def _hidden(model: Any, inputs: ModelInputs) -> Float[Tensor, "n hidden"]:
    arguments = {name: given for name, given in inputs.model.items() if name != "logits_to_keep"}
    hidden: Tensor = model.base_model(**arguments).last_hidden_state[0]
    return hidden.index_select(0, inputs.model["logits_to_keep"])


def _by_body(
    model: Any, inputs: ModelInputs, head: LmHead, values: bool, entropy_gradient: bool
) -> _Outputs:
    assert head.shape is not None
    hidden = _hidden(model, inputs)
    last: nn.Linear = model.get_output_embeddings()
    logp, entropy = chunked_logprobs(
        hidden,
        last.weight,
        last.bias,
        inputs.labels,
        inputs.temperature if inputs.has_temperature else None,
        shape=head.shape,
        elements=head.elements,
        entropy_gradient=entropy_gradient,
    )
    return logp, entropy, value.predict_values(model, hidden) if values else None


def _by_model(
    model: Any, inputs: ModelInputs, head: LmHead, values: bool, entropy_gradient: bool
) -> _Outputs:
    """By full logits, as the model makes them."""
    seen: list[Tensor] = []
    last: nn.Module = model.get_output_embeddings()
    hook = last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        logits: Tensor = model.forward(**inputs.model).logits[0]
    finally:
        hook.remove()
    if logits.shape[0] != len(inputs.labels):
        raise ValueError(f"{type(model).__name__} does not support logits_to_keep")
    logits = logits.float()
    if inputs.has_temperature:
        logits = logits / inputs.temperature[:, None]
    log_z = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, inputs.labels[:, None])[:, 0] - log_z
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        log_share = logits - log_z[:, None]
        entropy = -torch.linalg.vecdot(log_share.exp(), log_share)
    return chosen, entropy, value.predict_values(model, seen[0][0]) if values else None
