"""A rollout with forks as one tree row against a row for each of its paths."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._inductor.kernel.flex.flex_attention import _sanitize_kernel_options_for_triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from support.trainer.batch_samples import Rollout, source_of
from support.trainer.forward_checks import agree, gradients
from support.trainer.row_samples import rows, turn
from support.trainer.tiny_models import VOCABULARY, logprobs, make
from tracegrad_trainer.batches import MicroBatch, Row, micro_batch
from tracegrad_trainer.batches.rows import path_rows
from tracegrad_trainer.batches.tree_rows import tree_rows
from tracegrad_trainer.engine.attention import flex
from tracegrad_trainer.engine.attention.flex import FlexRowAttention
from tracegrad_trainer.engine.attention.masked import ScoreTransform
from tracegrad_trainer.engine.attention.tree import TreeRowAttention
from tracegrad_trainer.engine.model.forward import to_inputs

CPU = torch.device("cpu")
# (parent node, tokens): a fork within the second node's branch, and one at the root.
NODES = [(-1, 9), (0, 6), (1, 5), (1, 7), (0, 4), (4, 8)]
MODELS = [
    *("qwen3", "llama", "mistral", "gemma2", "gemma3", "gpt2", "mixtral", "gpt_oss"),
    *("qwen3_5", "lfm2", "falcon_h1"),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tree(seed: int = 0) -> tuple[Row, list[Row]]:
    """The tree as one row; and its paths as rows, each token a target of the first with it."""
    rng = np.random.default_rng(seed)
    sizes = [size for _, size in NODES]
    starts = np.cumsum([0, *sizes])
    ids = rng.integers(0, VOCABULARY, starts[-1]).astype(np.int32)
    children = {n: [i for i, (p, _) in enumerate(NODES) if p == n] for n in range(len(NODES))}

    def tokens_of(node: int) -> list[int]:
        return list(range(starts[node], starts[node + 1]))

    def end(node: int) -> int:
        return max([int(starts[node + 1]), *(end(child) for child in children[node])])

    position, previous, ends = (np.zeros(starts[-1], np.int32) for _ in range(3))
    for node, (parent, _) in enumerate(NODES):
        last = starts[parent + 1] - 1 if parent >= 0 else -1
        for i, token in enumerate(tokens_of(node)):
            previous[token] = token - 1 if i else last
            position[token] = position[previous[token]] + 1 if previous[token] >= 0 else 0
            ends[token] = end(node)
    whole = row(ids, position=position, previous=previous, subtree_end=ends)

    paths, owned = [], set()
    for leaf in (n for n in range(len(NODES)) if not children[n]):
        nodes = [leaf]
        while NODES[nodes[0]][0] >= 0:
            nodes.insert(0, NODES[nodes[0]][0])
        keep = [t not in owned for node in nodes for t in tokens_of(node)]
        owned |= {t for node in nodes for t in tokens_of(node)}
        paths.append(row(ids[[t for n in nodes for t in tokens_of(n)]], keep=keep))
    return whole, paths


def row(ids: Any, keep: Sequence[bool] | None = None, **changes: Any) -> Row:
    count = len(ids)
    mask = np.array(keep if keep is not None else [True] * count)
    mask[0] = False
    zeros = np.zeros(count, np.float32)
    return Row(
        input_ids=ids,
        loss_mask=mask,
        keep=mask.copy(),
        rollout_logprobs=zeros,
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        temperature=zeros + 1,
        advantage=zeros,
        reward=zeros,
        demonstration=np.zeros(count, np.bool_),
        rollout_id="r",
        group_id="g",
        turn_ids=("t",),
        **changes,
    )


def batches() -> tuple[MicroBatch, MicroBatch]:
    """Trees between plain rows, and the same with a row for each path."""
    (first, first_paths), (second, second_paths) = tree(0), tree(1)
    plain = rows(2)
    mixed = [plain[0], first, second, plain[1]]
    separate = [plain[0], *first_paths, *second_paths, plain[1]]
    return micro_batch(mixed, range(4)), micro_batch(separate, range(len(separate)))


def loss_and_gradients(model: nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Every token weighted by its id and log-probability, so that none stands for another."""
    logp = logprobs(model, batch)
    labels = torch.from_numpy(batch.input_ids[0, batch.target])
    model.zero_grad()
    (logp * (1 + labels / VOCABULARY)).sum().backward()
    order = torch.argsort(labels * 1000.0 + logp.detach())
    return logp.detach()[order], gradients(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_tree_has_the_loss_and_gradients_of_its_paths(name: str) -> None:
    whole, separate = batches()
    assert whole.tokens < separate.tokens
    assert len(whole.target) == len(separate.target)
    model = make(name)
    logp, grads = loss_and_gradients(model, whole)
    expected_logp, expected_grads = loss_and_gradients(model, separate)
    torch.testing.assert_close(logp, expected_logp, rtol=1e-5, atol=1e-5)
    agree(grads, expected_grads)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_turns_that_fork_train_alike_as_trees_and_as_paths(name: str) -> None:
    """From the turns on: the batches' own rows."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    first = turn("a", ids(9), ids(5))
    turns = [
        first,
        turn("b", ids(3), ids(6), parent=first),
        again := turn("c", ids(4), ids(5), parent=first),
        turn("d", ids(2), ids(3), parent=again),
        turn("e", ids(2), ids(8), parent=again),
    ]
    source = source_of(Rollout("r", 1.0, turns))
    ((whole,), _), separate = tree_rows(source, limit=10**6), path_rows(source)
    assert len(separate) == 3
    assert len(whole) < sum(len(path) for path in separate)
    model = make(name)
    logp, grads = loss_and_gradients(model, micro_batch([whole], [0]))
    expected_logp, expected_grads = loss_and_gradients(model, micro_batch(separate, range(3)))
    torch.testing.assert_close(logp, expected_logp, rtol=1e-5, atol=1e-5)
    agree(grads, expected_grads)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attentions_of_transformers_take_trees_too(attention: str) -> None:
    whole, separate = batches()
    model = make("qwen3", attention)
    logp, grads = loss_and_gradients(model, whole)
    expected_logp, expected_grads = loss_and_gradients(model, separate)
    torch.testing.assert_close(logp, expected_logp, rtol=1e-5, atol=1e-5)
    agree(grads, expected_grads)


def test_trees_within_a_window_are_refused_where_there_is_one_mask_for_all() -> None:
    model = make("mistral", "sdpa")
    with pytest.raises(ValueError, match=r"rows are trees.*set fsdp.attention to 'auto'"):
        to_inputs(batches()[0], model, CPU)


@contextmanager
def compiled_by(backend: Any) -> Iterator[None]:
    """Compiled as far as the graph: on a CPU the rest is not all there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex.torch, "compile", functools.partial(torch.compile, backend=backend))
        flex._compiled.cache_clear()
        torch._dynamo.reset()
        counters.clear()
        yield
    flex._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def _traced() -> Iterator[None]:
    with compiled_by("eager"):
        yield


@pytest.mark.usefixtures("_traced")
def test_every_form_of_scores_is_compiled_and_packs_of_any_size_share_it() -> None:
    """Beyond dynamo's own limit of eight graphs attention would write out all scores."""
    forms = [ScoreTransform(window=w, softcap=c, scale=s) for w, c, s in product(*_FORMS)]
    graphs = []
    for tokens in (100, 300, 90, 470):  # of one block, of several
        ends, depth = np.full(tokens, tokens), np.arange(tokens)
        tree = TreeRowAttention(ends, depth, [tokens])
        q, k, v = torch.randn(3, 1, 2, tokens, 16, generator=torch.Generator().manual_seed(0))
        for scores in forms:
            found = tree.flex.attend(q, k, v, scores)
            torch.testing.assert_close(found, tree.exact(q, k, v, scores), rtol=1e-4, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [8, 16, 16, 16]


# Windows, caps, scales.
_FORMS = ((None, 4), (None, 2.0), (None, 0.5))


def attend_with_gradients(attend: Any, scores: ScoreTransform) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 120, 16) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    out = attend(*given, scores)
    return out.detach(), *torch.autograd.grad(out.square().sum(), given)


@pytest.mark.parametrize("scores", [ScoreTransform(softcap=2.0, window=4), ScoreTransform()])
def test_backward_is_compiled_too(scores: ScoreTransform, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a graph that torch cannot compile writes out all scores, and says nothing."""
    # On a CPU only the kernel of the backward is missing.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    tree = TreeRowAttention(np.full(120, 120), np.arange(120), [120])
    expected = attend_with_gradients(tree.exact, scores)
    with compiled_by("aot_eager"):
        found = attend_with_gradients(tree.flex.attend, scores)
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_short_packs_do_not_go_to_the_kernel_for_decoding() -> None:
    """Of 120 tokens, by two heads of a group, it has none: a query's block would be 256."""
    chosen = []

    def look(graph: torch.fx.GraphModule, _: object) -> Any:
        (node,) = [n for n in graph.graph.nodes if n.target is flex_attention_op]
        options: Any = node.args[6]
        chosen.append(_sanitize_kernel_options_for_triton(options)[1])
        return graph.forward

    tree = TreeRowAttention(np.full(120, 120), np.arange(120), [120])
    q, k = torch.randn(1, 4, 120, 16), torch.randn(1, 2, 120, 16)
    with compiled_by(look), torch.no_grad():
        tree.flex.attend(q, k, k, ScoreTransform())
    assert chosen == ["TRITON"]  # AUTO may choose, by `_use_flex_decoding`


@pytest.mark.parametrize(("width", "kernel"), [(16, "flex"), (8, "exact")])
def test_a_gpu_takes_flex_attention_where_heads_are_wide_enough(
    width: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel wants 16 numbers a head."""
    called = []
    for kind, name, said in (
        (FlexRowAttention, "attend", "flex"),
        (TreeRowAttention, "exact", "exact"),
    ):
        monkeypatch.setattr(kind, name, lambda *_, _said=said, **__: called.append(_said))
    tree = TreeRowAttention(np.full(4, 4), np.arange(4), [4])
    with FakeTensorMode():
        q = torch.empty(1, 2, 4, width, device="cuda")
        tree.attend(q, q, q, ScoreTransform())
        tree.attend(q, q, q, ScoreTransform(sinks=q))
    assert called == [kernel, kernel]
