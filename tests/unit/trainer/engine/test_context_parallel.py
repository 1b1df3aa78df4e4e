"""Four ranks that share a micro-batch compute what one does; `test_layout_invariance` has whole
steps of every objective."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from support.trainer import context_ranks
from support.trainer.context_ranks import VARIANTS
from support.trainer.ranks import run_on_ranks
from support.trainer.tiny_models import make
from tracegrad_trainer.engine import FsdpSettings
from tracegrad_trainer.engine.context_parallel import ContextParallel, repeats_of
from tracegrad_trainer.engine.model.context_trial import _divides, sharing_group

ODD = ["trees", "one token a rank", "no targets", "compiled", "compiled, filled up"]
EXACT = 2e-5  # of float32 sums in another order, through two layers


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("context")
    run_on_ranks(context_ranks.main, 4, folder)
    found: dict[str, Any] = json.loads((folder / "context.json").read_text())
    return found


@pytest.mark.parametrize("name", [*VARIANTS, *ODD])
def test_a_model_gives_the_same_numbers_and_gradients(seen: dict[str, Any], name: str) -> None:
    """Windows, caps, sinks, branches, fewer heads of keys than ranks, recomputed blocks."""
    numbers, gradients = seen[name]
    assert numbers < EXACT
    assert gradients < EXACT


def test_without_the_exchange_it_would_not(seen: dict[str, Any]) -> None:
    numbers, gradients = seen["not exchanged"]
    assert numbers > 100 * EXACT
    assert gradients > 100 * EXACT


def test_what_cannot_be_shared_is_refused_by_name(seen: dict[str, Any]) -> None:
    assert seen["said"]["fits"] == ""
    assert seen["said"]["heads"] == (
        "fsdp.context_parallel = 4: each rank takes some of the 6 heads of the model's attention"
        " (3 of keys and values): set it to one of [1, 2, 3, 6]"
    )
    assert "Qwen3_5ForCausalLM has layers that carry a state along" in seen["said"]["state"]
    assert "LlamaForCausalLM looks at a row's other tokens by more than" in seen["said"]["mixes"]
    assert "fsdp.context_parallel = 3: 4 ranks cannot be divided by it" in seen["said"]["ranks"]


def test_by_default_ranks_share_rows_where_the_model_allows_it(seen: dict[str, Any]) -> None:
    found = seen["chosen"]
    assert (found["CPU"], found["fits"], found["mixes"]) == (1, 2, 1)
    assert found["machines"] == 2, "every rank has the same"
    assert found["recorded"] == 4, "as the step was taken"
    assert "LlamaForCausalLM looks at a row's other" in found["no more"]


@pytest.mark.parametrize(
    ("kind", "settings", "local", "expected"),
    [
        ("qwen3", {}, 4, 4),  # 4 heads
        ("qwen3", {}, 8, 4),
        ("qwen3", {}, 2, 2),
        ("qwen3", {}, 3, 1),
        ("qwen3", {}, 6, 2),
        ("qwen3", {"routing": "r3"}, 4, 1),
        ("qwen3", {"attention": "sdpa"}, 4, 1),
        ("qwen3_5", {}, 4, 1),  # a state along a row
    ],
)
def test_the_most_of_a_machine_that_the_heads_allow_share_rows(
    kind: str, settings: dict[str, Any], local: int, expected: int
) -> None:
    made, fsdp = [make(kind)], FsdpSettings(**settings)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert sharing_group(made, fsdp, gpu, local) == expected
    assert sharing_group(made, fsdp, cpu, local) == 1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"routing": "r2"}, "set fsdp.routing = 'own'"),
        ({"attention": "sdpa"}, "set fsdp.attention"),
    ],
)
def test_settings_that_cannot_go_with_it_are_refused(
    settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        FsdpSettings.model_validate({"context_parallel": 2, **settings})


class _Place(ContextParallel):
    """Without ranks."""

    size, rank = 0, 0  # type: ignore[assignment]

    def __init__(self, size: int, rank: int) -> None:
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "rank", rank)


@given(st.integers(1, 50), st.integers(2, 9))
def test_slices_are_alike_and_hold_every_token_once(tokens: int, ranks: int) -> None:
    values = np.arange(1, tokens + 1)
    places = [_Place(ranks, rank) for rank in range(ranks)]
    parts = [place.shard(values) for place in places]
    assert len({len(part) for part in parts}) == 1
    assert np.concatenate(parts)[:tokens].tolist() == values.tolist()
    assert not np.concatenate(parts)[tokens:].any()
    owned = np.concatenate([place.own_targets(values - 1, tokens) for place in places])
    assert owned.tolist() == list(range(tokens))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_each_query_head_finds_its_keys_on_its_rank(
    kv_heads: int, queries_each: int, ranks: int
) -> None:
    heads = kv_heads * queries_each
    if not _divides(heads, kv_heads, ranks):
        return
    keys = np.repeat(np.arange(kv_heads), repeats_of(kv_heads, ranks)).reshape(ranks, -1)
    queries = np.arange(heads).reshape(ranks, -1)
    for own_keys, own_queries in zip(keys, queries, strict=True):
        used = own_keys[np.arange(len(own_queries)) // (len(own_queries) // len(own_keys))]
        assert (used == own_queries // queries_each).all()
