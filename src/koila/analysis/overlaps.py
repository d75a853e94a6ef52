"""Operators that write to memory which another operand of theirs lies in.

*Takes* a traced graph that still writes in place. *Gives* an error if the result depends on the order in which a kernel
goes through the memory: in `x -= x[..., :1]` eager reads elements that it has overwritten already, or refuses to. A
functional graph, which has no memory, cannot do the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from koila._torch import OpOverload, schema_of, storage_key
from koila.errors import AnalysisError
from koila.ir.tree import leaves

aten = torch.ops.aten

_SPLITS = frozenset({
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.unbind.int,
})  # fmt: skip
"""Operators whose results are parts of one tensor that have nothing in common, whatever its size."""


def check_overlaps(graph: fx.Graph) -> bool:
    """Whether there is an operator that reads beside what it writes to: at other sizes it may read the same elements.

    The gates of a recurrent cell are written beside each other: they are parts of one value at every size.

    Raises:
        AnalysisError: One reads the elements that it writes to.
    """
    shared = False
    for node in graph.nodes:
        for first, second in _sharing(node):
            if _are_parts(first, second):
                continue
            written, read = first.meta["val"], second.meta["val"]
            is_same = _layout(written) == _layout(read)
            if is_same and (torch.Tag.pointwise in node.target.tags or node.target is torch.ops.aten.copy_.default):
                continue  # Each element is read before it is written.
            if is_same or may_overlap(written, read):
                raise AnalysisError(f"{node.target} reads the memory that it writes to")
            shared = True
    return shared


def _are_parts(first: fx.Node, second: fx.Node) -> bool:
    """Whether two values are different parts of one that has memory of its own, without an element twice."""
    parts = [_made(node) for node in (first, second)]
    if any(part.target is not operator.getitem for part in parts):
        return False
    (whole, one), (same, other) = ((part.args[0], part.args[1]) for part in parts)
    if whole is not same or one == other or not isinstance(whole, fx.Node) or whole.target not in _SPLITS:
        return False
    source = whole.args[0]
    return isinstance(source, fx.Node) and _is_fresh(_made(source))


def _made(node: fx.Node) -> fx.Node:
    """The node that made a value, before others wrote to it in place and passed it on."""
    while isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _is_in_place(node.target):
            break
        node = source
    return node


def _is_in_place(target: OpOverload[Any, Any]) -> bool:
    """Whether the one result of an operator is its first operand."""
    schema = schema_of(target)
    given, returned = schema.arguments[0].alias_info, [each.alias_info for each in schema.returns]
    if given is None or len(returned) != 1 or returned[0] is None:
        return False
    return bool(given.is_write and given.before_set == returned[0].before_set)


def _is_fresh(node: fx.Node) -> bool:
    """Whether a value has memory that its operator has allocated, and fills it."""
    made = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(made, torch.Tensor) or not made.is_contiguous():
        return False
    given = (each.meta.get("val") for each in node.all_input_nodes)
    return all(_storage(made) != _storage(each) for each in given if isinstance(each, torch.Tensor))


def _sharing(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What an operator writes to, with each other operand in the same memory."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return
    arguments = schema_of(node.target).arguments
    given = [*node.args, *(node.kwargs.get(argument.name) for argument in arguments[len(node.args) :])]
    tensors = [
        (leaf, argument.alias_info is not None and argument.alias_info.is_write, (position, place))
        for position, (argument, value) in enumerate(zip(arguments, given, strict=True))
        for place, leaf in enumerate(leaves(value))
        if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor)
    ]
    for written, is_written, here in tensors:
        for read, _, there in tensors if is_written else ():
            if here != there and _storage(written.meta["val"]) == _storage(read.meta["val"]):
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
