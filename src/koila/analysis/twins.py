"""Twins: results of one call that are always equal.

*Takes* a traced graph. *Gives* it with one node for such results. oneDNN's recurrent layer returns the gradient of its
two biases, which is the same, twice. PyTorch's fake kernel returns one tensor for both, unless its cache has two: a
trace reads one of them or both by chance. Without this the traces of two sizes of a program would not be alike, and
nothing could be derived from them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

TWINS: dict[Any, dict[int, int]] = {torch.ops.aten.mkldnn_rnn_layer_backward.default: {4: 3}}
"""Operator → the place of a result → that of an earlier one that is equal to it."""


def join_twins(graph: fx.Graph) -> None:
    """Whoever reads one of several results that are equal reads the first; nobody reads the others."""
    first: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0].target in TWINS:
            source, place = node.args
            node.args = (source, TWINS[source.target].get(place, place))
            seen = first.setdefault(node.args, node)
            if seen is not node:
                node.replace_all_uses_with(seen)
