"""Batch positions: `x[arange(B), y]` takes one entry of each sample, so it is a gather within samples.

*Takes* a traced graph and the inputs that are known to count the batch. *Gives* the same graph with such an indexing
(and its gradient, an `index_put`) rewritten as `gather` and `scatter` along the second dimension, which can be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def pick_by_position(graph: fx.Graph, counting: Sequence[fx.Node]) -> None:
    """Rewrite every indexing by (positions, one index per sample)."""
    if not counting:
        return
    ways = {aten.index.Tensor: _picked, aten.index_put.default: _put}
    for node in list(graph.nodes):
        if node.target in ways and _is_pick(node.args[1], counting, node.args[0]):
            before = node.prev
            with graph.inserting_before(node):
                made = ways[node.target](graph, node)
            while before.next is not node:
                before = before.next
                before.meta.update({name: value for name, value in node.meta.items() if name != "val"})
            node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _is_pick(indices: Any, counting: Sequence[fx.Node], source: Any) -> bool:
    if len(indices) != 2 or indices[0] not in counting or not isinstance(indices[1], fx.Node):
        return False
    first, second, value = indices[0].meta["val"], indices[1].meta["val"], source.meta["val"]
    return bool(value.shape[0] == first.shape[0] and second.shape == first.shape and second.dtype == torch.int64)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call with the value that it would have."""
    node = graph.call_function(target, args)
    fakes = fx.node.map_arg(args, lambda argument: argument.meta["val"])
    mode = next(a.meta["val"].fake_mode for a in node.all_input_nodes)
    with mode:
        node.meta["val"] = target(*fakes)
    return node


def _columns(graph: fx.Graph, index: fx.Node, source: fx.Node) -> fx.Node:
    """The index of each sample, not negative, in the shape that gather wants: [B, 1, rest]."""
    shape = tuple(source.meta["val"].shape)
    negative = _call(graph, aten.lt.Scalar, index, 0)
    wrapped = _call(graph, aten.where.self, negative, _call(graph, aten.add.Tensor, index, shape[1]), index)
    for dim in range(1, len(shape)):
        wrapped = _call(graph, aten.unsqueeze.default, wrapped, dim)
    return _call(graph, aten.expand.default, wrapped, [shape[0], 1, *shape[2:]])


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args)


def _picked(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source, indices = _arguments(node)[:2]
    taken = _call(graph, aten.gather.default, source, 1, _columns(graph, indices[1], source))
    return _call(graph, aten.squeeze.dim, taken, 1)


def _put(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source, indices, values, *accumulate = _arguments(node)
    shape = tuple(source.meta["val"].shape)
    full = _call(graph, aten.expand.default, values, [shape[0], *shape[2:]])
    columns = _columns(graph, indices[1], source)
    target = aten.scatter_add.default if any(accumulate) else aten.scatter.src
    return _call(graph, target, source, 1, columns, _call(graph, aten.unsqueeze.default, full, 1))
