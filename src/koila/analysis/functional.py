"""Writes in place become values, in the graph itself: autograd adds gradients up in place, and some kernels do so, too.

*Takes* a traced graph over fake tensors. *Gives* the same graph without writes, or says that it cannot: then the graph
is traced again under PyTorch's functionalisation, which takes as long as the first trace.

The fake tensors of a trace share their storages as the real ones will. A write may become a value if nobody reads the
memory that it changes through another view afterwards; whoever reads the tensor itself reads the new value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from koila._torch import FakeTensorMode, OpOverload, has_kernel, overload_name, schema_of, storage_key
from koila.ir.tree import map_leaves

aten = torch.ops.aten
_BY_STORAGE = {aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default}
"""Operators that look at memory beside their operand's."""
_SAME = {aten.detach.default, aten.alias.default}
"""Operators whose result is their operand under another name."""


class _Cannot(Exception):
    """A write that this file does not understand."""


def is_mutable(node: fx.Node) -> bool:
    """Whether a node writes to an operand."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def without_writes(module: fx.GraphModule, mode: FakeTensorMode, table: dict[Any, Any]) -> bool:
    """Turn writes into values; False, and the graph is as it was, if one of them cannot be.

    Args:
        module: The graph; it is changed.
        mode: The mode of its fake tensors.
        table: Decompositions: an operator that has one is left to a new trace.
    """
    try:
        targets = {node: _functional(node, table) for node in module.graph.nodes if is_mutable(node)}
        names = _Names(module.graph)
        changes = [(node, target, names.before(node)) for node, target in targets.items()]
    except _Cannot:
        return False
    before = fx.Graph()
    before.output(before.graph_copy(module.graph, {}))
    try:
        with torch.no_grad(), mode:
            values: dict[fx.Node, fx.Node] = {}
            again = {name for _, _, earlier in changes for name in earlier}
            dirty = set[fx.Node]()
            for write, target, earlier in changes:
                # A tensor that is written again has the value of the write before as a name.
                known = [values.get(name, name) for name in earlier]
                dirty |= set(_replace(module.graph, names.place, write, target, known, values, write not in again))
            _update_layouts(module.graph, dirty)
    except Exception:  # What is illegal in the new layout is left to a new trace.
        module.graph = before
        return False
    return True


def _functional(node: fx.Node, table: dict[Any, Any]) -> Any:
    """The operator that gives the value which a node writes to its first operand."""
    target: Any = node.target
    schema = schema_of(target)
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    packet = getattr(aten, target.overloadpacket.__name__.removesuffix("_"), None)
    found = getattr(packet, overload_name(target), None)
    if found is None or found is target or written != [schema.arguments[0].name] or len(schema.returns) != 1:
        raise _Cannot
    if found in table or has_kernel(found.name(), "CompositeImplicitAutograd"):
        raise _Cannot
    return found


class _Names:
    """Which nodes are names for the same memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: number for number, node in enumerate(graph.nodes)}
        self._tensor: dict[fx.Node, fx.Node] = {}
        """By node, the first name of the very same tensor."""
        self._in: dict[int, list[tuple[fx.Node, torch.Tensor]]] = {}
        """By storage, the nodes that lie in it."""
        for node in self.place:
            if node.target in _BY_STORAGE:
                raise _Cannot
            same = node.target in _SAME or is_mutable(node)
            self._tensor[node] = self._tensor[node.args[0]] if same else node
            for tensor in _tensors(node):
                self._in.setdefault(storage_key(tensor.untyped_storage()), []).append((node, tensor))

    def before(self, write: fx.Node) -> list[fx.Node]:
        """The names that the tensor which a node writes to has before; no other view of it may be read afterwards."""
        here, found = self.place[write], list[fx.Node]()
        written = next(_tensors(write), None)
        if written is None:
            raise _Cannot
        for node, tensor in self._in[storage_key(written.untyped_storage())]:
            if self.place[node] >= here:
                break
            if self._tensor[node] is self._tensor[write]:
                found.append(node)
            elif any(self.place[user] > here for user in node.users) and not _are_apart(tensor, written):
                raise _Cannot
        return found


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, torch.Tensor) and each.layout == torch.strided:
            yield each


def _are_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views of a storage are boxes in the same grid that have no element in common."""
    if one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    strides: Any = one.stride()
    dims = sorted(range(one.ndim), key=lambda dim: -strides[dim])
    dims = [dim for dim in dims if one.shape[dim] != 1 or other.shape[dim] != 1]
    strides = [strides[dim] for dim in dims]
    if not dims or strides[-1] != 1:
        return False
    apart, starts = False, [one.storage_offset(), other.storage_offset()]
    for dim, stride, above in zip(dims, strides, [0, *strides], strict=False):
        places = [start // stride for start in starts]
        starts = [start % stride for start in starts]
        ends = [place + tensor.shape[dim] for place, tensor in zip(places, (one, other), strict=True)]
        if above and (above % stride or max(ends) * stride > above):
            return False  # Not a box.
        apart = apart or places[0] >= ends[1] or places[1] >= ends[0]
    return apart


def _replace(
    graph: fx.Graph, place: dict[fx.Node, int], write: fx.Node, target: Any, names: list[fx.Node],
    values: dict[fx.Node, fx.Node], is_last: bool,
) -> Iterator[fx.Node]:  # fmt: skip
    """Put a value in the place of a write, for whoever reads the tensor afterwards; give it if it lies otherwise."""
    old, here = write.meta["val"], place[write]
    operand, source = write.args[0], write.args[1] if len(write.args) > 1 else None
    if is_last and target is aten.copy.default and operand.op == "placeholder" and _is_like(source, old):  # type: ignore[union-attr]
        made: Any = source  # The run returns the new value and commits it later (Rule 4).
    else:
        with graph.inserting_before(write):
            made = graph.call_function(target, write.args, dict(write.kwargs))
        made.meta.update(write.meta)
        made.meta["val"] = _evaluated(made)
        place[made] = here
        if (made.meta["val"].shape, made.meta["val"].dtype) != (old.shape, old.dtype):
            raise _Cannot
        if made.meta["val"].stride() != old.stride():
            yield made
    for name in names:
        name.replace_all_uses_with(made, lambda user: place[user] > here)
    write.replace_all_uses_with(made)
    values[write] = made
    graph.erase_node(write)


def _is_like(source: Any, old: torch.Tensor) -> bool:
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (old.shape, old.dtype)


def _evaluated(node: fx.Node) -> Any:
    swap = lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf  # noqa: E731
    target: Any = node.target
    return target(*map_leaves(node.args, swap), **map_leaves(dict(node.kwargs), swap))


def _update_layouts(graph: fx.Graph, dirty: set[fx.Node]) -> None:
    """Find the layout of what is made of values that lie otherwise than they did."""
    for node in graph.nodes if dirty else ():
        if node in dirty or node.op != "call_function" or dirty.isdisjoint(node.all_input_nodes):
            continue
        before, node.meta["val"] = list(_tensors(node)), _evaluated(node)
        after = list(_tensors(node))
        if [(each.shape, each.dtype) for each in before] != [(each.shape, each.dtype) for each in after]:
            raise _Cannot
        if [each.stride() for each in before] != [each.stride() for each in after]:
            dirty.add(node)
