"""Tree rows: tokens that branches of a rollout begin with alike are computed once.

The turns' tokens are put into a prefix tree. A prompt goes along tokens that are there already,
whoever they belong to: the same sampled tokens before it, the same tool result that two replies
answer, the same system prompt of a rewritten history. A completion is always a branch of its
own, so that every sampled token is one target, also where two samples begin alike.

Laid out depth first, a token's descendants are the ones behind it up to its `subtree_end`, and
they alone attend to it: each target sees exactly its turn's recorded prompt and completion, at
the positions that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tracegrad.events import Turn
from tracegrad.turn_tree import TurnTree, common_prefix
from tracegrad_trainer.batches.expert_routing import (
    ExpertRouting,
    RoutingLayout,
    routing_of_turn,
)
from tracegrad_trainer.batches.rows import Row, RowDraft, RowSource, path_rows
from tracegrad_trainer.batches.turn_access import Ints, as_int_array, length_of


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens without a fork in between, all context or all sampled by one turn."""

    ids: Ints
    depth: int  # of the first token
    parent: _Node | None
    turn: Turn | None = None  # whose completion these tokens are of
    at: int = 0  # the first token's place in that completion
    children: list[_Node] = field(default_factory=list)
    start: int = 0  # in the row
    stop: int = 0  # behind the last descendant

    @property
    def depth_end(self) -> int:
        return self.depth + len(self.ids)

    def add(self, ids: Ints, turn: Turn | None = None) -> _Node:
        child = _Node(ids, self.depth_end, self, turn)
        self.children.append(child)
        return child

    def split(self, tokens: int) -> _Node:
        """Puts a node of the first `tokens` above this one, which keeps the rest."""
        assert 0 < tokens < len(self.ids)
        assert self.parent is not None
        above = _Node(self.ids[:tokens], self.depth, self.parent, self.turn, self.at, [self])
        siblings = self.parent.children
        siblings[siblings.index(self)] = above
        self.parent = above
        self.ids = self.ids[tokens:]
        self.depth += tokens
        self.at += tokens
        return above


def tree_rows(source: RowSource, *, limit: int) -> tuple[list[Row], int]:
    """Rows of a rollout: one for each of its trees, and how many trees were too long for that.

    Turns without a common beginning are trees of their own. One that never forks is a plain
    row; one of more than `limit` tokens becomes a row for each of its paths.
    """
    tree = source.trained
    if len(tree.leaves) <= 1:
        return path_rows(source), 0
    leaves = frozenset(tree.leaves)
    rows: list[Row] = []
    too_long = 0
    for top, ends in _prefix_trees(tree):
        own = [place for place in ends if place in leaves]
        if len(own) == 1:
            rows += path_rows(source, map(tree.path, own))
        elif (nodes := _laid_out(top))[0].stop > limit:
            rows += path_rows(source, map(tree.path, own))
            too_long += 1
        else:
            rows.append(_row(nodes, ends, source))
    return rows, too_long


_Ends = dict[int, _Node]  # turns (places, in order of capture), and the nodes that they end with


def _prefix_trees(tree: TurnTree[Turn]) -> list[tuple[_Node, _Ends]]:
    """The first nodes of the trees of tokens, each with its turns."""
    root = _Node(np.zeros(0, np.int32), 0, None)
    ends = [root] * len(tree.turns)
    # A turn is longer than what it continues, unless neither adds a token: then either may come
    # first.
    for place in sorted(range(len(ends)), key=lambda place: length_of(tree.turns[place])):
        parent = tree.parents[place]
        ends[place] = _insert(tree.turns[place], ends[parent] if parent >= 0 else root)
    found: dict[int, tuple[_Node, _Ends]] = {}
    for place, end in enumerate(ends):
        top = end
        while top.parent is not None and top.parent is not root:
            top = top.parent
        if top is not root:  # where a turn without any token ends
            found.setdefault(id(top), (top, {}))[1][place] = end
    return list(found.values())


def _insert(turn: Turn, start: _Node) -> _Node:
    """Adds what of the turn is not there yet, below `start`; -> the node that it ends with."""
    prompt, completion = (
        as_int_array(turn.prompt_token_ids),
        as_int_array(turn.completion_token_ids),
    )
    node, used = _longest_match(start, prompt)
    if used < len(node.ids):
        node = node.split(used)
    if node.depth_end < len(prompt):
        node = node.add(prompt[node.depth_end :])
    return node.add(completion, turn) if len(completion) else node


def _longest_match(start: _Node, ids: Ints) -> tuple[_Node, int]:
    """The node at or below `start` up to which `ids` run alike the longest, and how many of its
    tokens they share. Samples that begin alike are branches side by side: all are looked at."""
    best, most, used = start, start.depth_end, len(start.ids)
    waiting = [start]
    while waiting:
        for child in waiting.pop().children:
            same = common_prefix(child.ids, ids[child.depth :])
            if child.depth + same > most:
                best, most, used = child, child.depth + same, same
            if same == len(child.ids):
                waiting.append(child)
    return best, used


def _laid_out(top: _Node) -> list[_Node]:
    """The nodes depth first, each with its place."""
    nodes: list[_Node] = []
    waiting, tokens = [top], 0
    while waiting:
        node = waiting.pop()
        node.start = tokens
        tokens += len(node.ids)
        nodes.append(node)
        waiting += reversed(node.children)
    for node in reversed(nodes):
        node.stop = node.children[-1].stop if node.children else node.start + len(node.ids)
    return nodes


def _row(nodes: Sequence[_Node], ends: _Ends, source: RowSource) -> Row:
    draft = RowDraft(np.concatenate([node.ids for node in nodes]), source)
    tokens = len(draft.input_ids)
    if source.layout is not None:
        draft.expert_routing = _routing_of_tree(ends, tokens, source.trained.turns, source.layout)
    position = np.arange(tokens, dtype=np.int32)
    previous = np.arange(-1, tokens - 1, dtype=np.int32)
    subtree_end = np.empty(tokens, np.int32)
    for node in nodes:
        length = len(node.ids)
        span = slice(node.start, node.start + length)
        position[span] += node.depth - node.start
        subtree_end[span] = node.stop
        if node is not nodes[0]:
            assert node.parent is not None
            previous[node.start] = node.parent.start + len(node.parent.ids) - 1
        if node.turn is None:
            continue
        draft.write(node.turn, node.start, slice(node.at, node.at + length))
        if node.at + length == len(node.turn.completion_token_ids):
            draft.give(node.turn, node.start + length - 1)
    return draft.row(position=position, previous=previous, subtree_end=subtree_end)


def _routing_of_tree(
    ends: _Ends, tokens: int, turns: Sequence[Turn], layout: RoutingLayout
) -> ExpertRouting | None:
    """As `expert_routing.routing_of_path`, over all of a tree's branches: turns are written over
    each other, each behind all that continue it, and of equal ones the first captured last."""
    routing: ExpertRouting | None = None
    for place in sorted(ends, key=lambda place: length_of(turns[place]))[::-1]:
        if (known := routing_of_turn(turns[place], layout)) is None:
            continue
        routing = layout.unknown(tokens) if routing is None else routing
        node: _Node | None = ends[place]
        while node is not None and node.depth_end > known.start:
            first, last = max(node.depth, known.start), min(node.depth_end, known.stop)
            if first < last:
                at = slice(node.start + first - node.depth, node.start + last - node.depth)
                routing[at] = known.experts[first - known.start : last - known.start]
            node = node.parent
    return routing
