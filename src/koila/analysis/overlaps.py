"""Operators that write to memory which another operand of theirs lies in.

*Takes* a traced graph that still writes in place. *Gives* an error if the result depends on the order in which a kernel
goes through the memory: in `x -= x[..., :1]` eager reads elements that it has overwritten already, or refuses to. A
functional graph, which has no memory, cannot do the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from koila._torch import OpOverload, schema_of, storage_key
from koila.errors import AnalysisError
from koila.ir.tree import leaves


def check_overlaps(graph: fx.Graph) -> bool:
    """Whether there is an operator that reads beside what it writes to: at other sizes it may read the same elements.

    Raises:
        AnalysisError: One reads the elements that it writes to.
    """
    shared = False
    for node in graph.nodes:
        for written, read in _sharing(node):
            is_same = _layout(written) == _layout(read)
            if is_same and (torch.Tag.pointwise in node.target.tags or node.target is torch.ops.aten.copy_.default):
                continue  # Each element is read before it is written.
            if is_same or may_overlap(written, read):
                raise AnalysisError(f"{node.target} reads the memory that it writes to")
            shared = True
    return shared


def _sharing(node: fx.Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What an operator writes to, with each other operand in the same memory."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return
    arguments = schema_of(node.target).arguments
    given = [*node.args, *(node.kwargs.get(argument.name) for argument in arguments[len(node.args) :])]
    tensors = [
        (leaf.meta["val"], argument.alias_info is not None and argument.alias_info.is_write, (position, place))
        for position, (argument, value) in enumerate(zip(arguments, given, strict=True))
        for place, leaf in enumerate(leaves(value))
        if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor)
    ]
    for written, is_written, here in tensors:
        for read, _, there in tensors if is_written else ():
            if here != there and _storage(written) == _storage(read):
                yield written, read


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _layout(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def may_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors in the same memory may have an element in common; no only if that is certain.

    >>> x = torch.ones(4, 6)
    >>> may_overlap(x[:, 0], x[:, 1]), may_overlap(x[:, ::2], x[:, 1::2]), may_overlap(x[:, :4], x[:, 3:])
    (False, False, True)
    """
    if not first.numel() or not second.numel():
        return False
    steps = {step for each in (first, second) for step, size in _dims(each)} | {1}
    boxes = [_box(each, sorted(steps, reverse=True)) for each in (first, second)]
    if boxes[0] is None or boxes[1] is None:
        return True
    return all(a < d and c < b for (a, b), (c, d) in zip(*boxes, strict=True))


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return [(step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _box(tensor: torch.Tensor, steps: list[int]) -> list[tuple[int, int]] | None:
    """A tensor as a box: for each step through the memory, from where to where; None if it is none."""
    sizes = dict(_dims(tensor))
    if len(sizes) < len(_dims(tensor)) or 0 in steps:
        return None
    found, rest, room = list[tuple[int, int]](), int(tensor.storage_offset()), None
    for step in steps:
        start, rest = divmod(rest, step)
        stop = start + sizes.get(step, 1)
        if room is not None and (room % step or stop > room // step):
            return None  # It goes on in the next row.
        found.append((start, stop))
        room = step
    return found
