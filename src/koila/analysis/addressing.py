"""Operators that count from the beginning of a storage: `as_strided` and its like.

*Takes* a traced graph. *Gives* the same graph, in which they start from the value that the storage was made for.

In eager a view lies in the memory of what it is a view of. A run in chunks may gather the view alone, without the gaps
that the rest of that memory leaves between its elements: whoever counts through them would find other elements.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from koila._torch import OpOverload
from koila.errors import AnalysisError
from koila.ir.layout import dense_strides

aten = torch.ops.aten

_READS = {aten.as_strided.default, aten.as_strided_copy.default}
_OTHERS = {aten.as_strided_scatter.default}


def address_from_bases(graph: fx.Graph) -> None:
    """Let each `as_strided` read the value that its storage was made for.

    Raises:
        AnalysisError: That value would not lie in memory as it does in eager.
    """
    for node in graph.nodes:
        if node.target not in _READS and node.target not in _OTHERS:
            continue
        source = node.args[0]
        base = _base(source)
        if base is source and (base.op == "placeholder" or _fills_storage(base)):
            continue
        offset = int(source.meta["val"].storage_offset())
        size, stride, *start = node.args[1:]
        is_relative = not start or start[0] is None
        if node.target in _OTHERS or not _is_known(base, offset if is_relative else None):
            raise AnalysisError(f"{node.target} counts from the beginning of a storage that a run in chunks has not")
        # An input may lie anywhere in its own storage: from where it begins, and from nowhere else.
        where = None if base.op == "placeholder" else offset if is_relative else start[0]
        node.args, node.kwargs = (base, size, stride, where), {}


def _base(node: fx.Node) -> fx.Node:
    """What a view is a view of, down to the value whose memory it is."""
    while True:
        is_part = node.target is operator.getitem
        call = node.args[0] if is_part else node
        if not isinstance(call, fx.Node) or not isinstance(call.target, OpOverload) or not call.target.is_view:
            return node
        source = call.args[0]
        assert isinstance(source, fx.Node)
        node = source


def _is_known(base: fx.Node, offset: int | None) -> bool:
    """Whether a place is known, in the memory of a value: from its beginning if it is an input."""
    return offset == 0 if base.op == "placeholder" else _fills_storage(base)


def _fills_storage(node: fx.Node) -> bool:
    """Whether a value lies in memory of its own, without gaps: so it does in a run in chunks."""
    value = node.meta["val"]
    dense = dense_strides(value.shape, value.stride())
    steps = zip(value.stride(), dense, value.shape, strict=True)
    return all(mine == theirs for mine, theirs, size in steps if size > 1)
