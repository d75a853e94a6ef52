"""Peephole: a few calls in a row that have a cheaper form with the same numbers.

*Takes* a traced graph. *Gives* the same graph with the gradient of a cross-entropy rewritten.

The gradient that arrives at a log-softmax from a loss over classes is zero but for one class in each row. Eager fills a
tensor of zeros with it and reads that twice; here the probabilities are scaled, and the one class is added. It rounds
as well as eager's kernel, but not alike: where a program computes its loss in less precision than the rest, that
rounding is the largest error of all, and eager's kernel stays. In half precision, it rounds once where this would
thrice, and stays, too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

aten = torch.ops.aten


def simplify_losses(graph: fx.Graph) -> None:
    """Rewrite gradients of cross-entropies."""
    for node in list(graph.nodes):
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        gradient, output, dim, dtype = node.args
        precise = node.meta["val"].dtype is dtype in (torch.float32, torch.float64) and not _is_narrowed(output)
        if precise and _is_one_class(gradient, dim):
            with graph.inserting_before(node):
                _, _, place, values = gradient.args
                shares = _call(graph, node, aten.exp.default, output)
                scaled = _call(graph, node, aten.mul.Tensor, shares, _call(graph, node, aten.neg.default, values))
                found = _call(graph, node, aten.scatter_add.default, scaled, dim, place, values)
            node.replace_all_uses_with(found)
    graph.eliminate_dead_code()


def _is_narrowed(value: Any) -> bool:
    """Whether a log-softmax is of a value that was cast to fewer bits."""
    through = (aten._log_softmax.default, aten._to_copy.default)
    while value.op == "call_function" and (value.target in through or getattr(value.target, "is_view", False)):
        before = value.args[0]
        if before.meta["val"].element_size() > value.meta["val"].element_size():
            return True
        value = before
    return False


def _is_one_class(gradient: Any, dim: Any) -> bool:
    """Whether a value is zero but for one element along a dimension."""
    if not isinstance(gradient, fx.Node) or gradient.target is not aten.scatter.src:
        return False
    base, along, place, values = cast(tuple[Any, ...], gradient.args)
    zeros = isinstance(base, fx.Node) and base.target is aten.full.default and base.args[1] == 0
    rank = gradient.meta["val"].ndim
    shapes = [tuple(each.meta["val"].shape) for each in (place, values)]
    wanted = list(gradient.meta["val"].shape)
    if not zeros or not wanted or dim % rank != along % rank:
        return False
    wanted[dim] = 1
    return shapes == [tuple(wanted)] * 2


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    found = graph.call_function(target, args)
    values = [argument.meta["val"] if isinstance(argument, fx.Node) else argument for argument in args]
    found.meta["val"] = target(*values)
    if "recorded" in like.meta:
        found.meta["recorded"] = like.meta["recorded"]
    return found
