"""The catalogue of a program: what planning works out about its items, once for all its plans.

*Takes* the items and nodes of a program. *Gives* operations for whole values and for chunks, forms of whole values,
expected seconds, and sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from koila._torch import OpOverload, schema_of
from koila.analysis.monoids import HALVES, Sum
from koila.analysis.rules.reduce import chunk_moments
from koila.analysis.split import Facts, Item, arguments_by_name
from koila.analysis.types import Merged, Sliced
from koila.ir.tree import map_leaves
from koila.planning.cost import VIEW_SECONDS, large_bytes, node_seconds
from koila.planning.devices import current_rules
from koila.planning.forms import Drawn, Form, form_tree
from koila.planning.operation import Operation, Ref
from koila.planning.rates import FRESH
from koila.planning.step import Destination, Sink

aten = torch.ops.aten


class Catalogue:
    """What is known about the items of a program."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        placeholders = (node for node in facts.joint.module.graph.nodes if node.op == "placeholder")
        kinds = zip(placeholders, facts.joint.inputs, strict=True)
        self._draws = {node for node, found in kinds if found.kind == "draw"}
        self._arguments: dict[fx.Node, dict[str, Any]] = {}
        self._operations: dict[tuple[Item, int | None], Operation] = {}
        self._seconds: dict[fx.Node, float] = {}
        self._wholes: dict[Item, Any] = {}
        self._state_bytes: dict[Item, int] = {}

    def seconds(self, node: fx.Node) -> float:
        """The expected time of a node on the whole batch."""
        if node not in self._seconds:
            self._seconds[node] = node_seconds(node)
        return self._seconds[node]

    def seconds_in_place(self, node: fx.Node) -> float:
        """The same without new pages for large results: chunks may be so small that they need none."""
        return max(VIEW_SECONDS, self.seconds(node) - large_bytes(node.meta.get("val")) / FRESH)

    def whole_form(self, item: Item) -> Any:
        """The form of a whole value that schedules read."""
        if item not in self._wholes:
            self._wholes[item] = self._find_whole(item)
        return self._wholes[item]

    def _find_whole(self, item: Item) -> Any:
        if item.node.op == "get_attr":
            return form_tree(getattr(self.facts.joint.module, str(item.node.target)))
        found = form_tree(item.node.meta["val"])
        if item.per_chunk or item.kind == "gather":
            return map_leaves(found, lambda leaf: leaf.gathered if isinstance(leaf, Form) else leaf)
        return Drawn(found) if item.kind == "input" and item.node in self._draws else found

    def operation(self, item: Item, chunk: int | None) -> Operation:
        """What an item calls: on whole values, or on a chunk of so many samples."""
        ruling = self.facts.ruling_of(item)
        varies = ruling is not None and (bool(ruling.sizes) or ruling.rewrite is not None)
        key = (item, chunk if varies else None)
        if key not in self._operations:
            self._operations[key] = self._whole_call(item) if ruling is None else self._chunk_call(item, chunk)
        return self._operations[key]

    def _named(self, node: fx.Node) -> dict[str, Any]:
        """The arguments of a node by name, tensors numbered."""
        if node not in self._arguments:
            self._arguments[node] = _numbered(arguments_by_name(node))
        return dict(self._arguments[node])

    def _whole_call(self, item: Item) -> Operation:
        node = item.node
        if not isinstance(node.target, OpOverload):
            args, kwargs = _numbered((node.args, dict(node.kwargs)))
            return Operation(node.target, tuple(args), kwargs)
        arguments = self._named(node)
        if node.target is aten.var_mean.correction and _is_quick(node, arguments["correction"]):
            return Operation(chunk_moments, (), arguments)
        return _by_position(*as_reshape(node.target, arguments))

    def _chunk_call(self, item: Item, chunk: int | None) -> Operation:
        ruling = self.facts.ruling_of(item)
        assert ruling is not None and chunk is not None
        arguments = self._named(item.node)
        if ruling.sizes:
            shape = chunk_shape(item, chunk)
            arguments.update({name: list(shape) for name in ruling.sizes})
        if ruling.rewrite is not None:
            arguments = ruling.rewrite(arguments, chunk)
        return _by_position(*as_reshape(ruling.target or item.node.target, arguments))

    def sink(self, item: Item, streamed: Item | None = None) -> Sink:
        """Where an item's value is handed on to."""
        kind = first_type(item)
        if isinstance(kind, Merged):
            destination = Destination.MERGE
        elif not isinstance(kind, Sliced):
            destination = Destination.STORE
        else:
            destination = Destination.STREAM if item is streamed else Destination.GATHER
        return Sink(item, destination, value_bytes(item), self.state_bytes(item), is_plain_sum(item), is_sum(item))

    def piece_sink(self, item: Item) -> Sink:
        """The same for an item whose chunks are held as pieces."""
        return Sink(item, Destination.KEEP, value_bytes(item), self.state_bytes(item))

    def has_pieces(self, item: Item) -> bool:
        """Whether the chunks of an item can be held as they are: memory has the batch outermost, and no gaps."""
        kind, whole = item.type, self.whole_form(item)
        if not isinstance(kind, Sliced) or not isinstance(whole, Form) or kind.outer != 1 or whole.dtype.is_complex:
            return False
        if whole.stride[kind.dim] * whole.shape[kind.dim] * whole.dtype.itemsize != whole.num_bytes > 0:
            return False
        channels_last = len(whole.shape) == 4 and whole.make().is_contiguous(memory_format=torch.channels_last)
        return whole.is_contiguous or channels_last

    def state_bytes(self, item: Item) -> int:
        """The bytes of a merge that has begun; of a value that is not merged, its own."""
        if item not in self._state_bytes:
            self._state_bytes[item] = _state_bytes(item)
        return self._state_bytes[item]


def _is_quick(node: fx.Node, correction: Any) -> bool:
    """Whether the moments of a whole value, which normalisation asks for, are found as those of a chunk are."""
    value = arguments_by_name(node)["self"].meta["val"]
    return correction == 0 and value.is_floating_point() and value.dtype not in HALVES and value.numel() > 0


def _numbered(tree: Any) -> Any:
    count = iter(range(1 << 30))
    return map_leaves(tree, lambda leaf: Ref(next(count)) if isinstance(leaf, fx.Node) else leaf)


def _by_position(target: Any, arguments: dict[str, Any]) -> Operation:
    """Positional arguments as the schema has them; one that a rewrite left out makes the following ones keywords."""
    if not isinstance(target, OpOverload):
        return Operation(target, (), arguments)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, argument in enumerate(schema_of(target).arguments):
        if argument.name in arguments:
            if argument.kwarg_only or len(args) < place:
                kwargs[argument.name] = arguments[argument.name]
            else:
                args.append(arguments[argument.name])
    return Operation(target, tuple(args), kwargs)


VIEWS = {aten.view.default, aten._unsafe_view.default}


def as_reshape(target: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A chunk may lie in memory otherwise than the whole value: a view becomes a reshape."""
    if target not in VIEWS:
        return target, arguments
    return aten.reshape.default, {"self": arguments["self"], "shape": arguments["size"]}


def needs_contiguous(operand: Item, target: Any) -> bool:
    """Whether an operator is a kernel that was traced with this operand contiguous."""
    if not isinstance(target, OpOverload) or target.is_view or torch.Tag.pointwise in target.tags:
        return False
    value = operand.node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or target is aten.reshape.default:
        return False
    return value.is_contiguous()


def chunk_shape(item: Item, chunk: int) -> tuple[int, ...]:
    """The shape that an item's type predicts for a chunk (of its first result)."""
    value, kind = item.node.meta["val"], item.type
    if isinstance(kind, tuple):
        value, kind = value[0], kind[0]
    shape = tuple(value.shape)
    return kind.shape(shape, chunk) if isinstance(kind, Sliced) else shape


def result_shapes(item: Item, chunk: int | None) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of an item's results as its types have them: those of slices, and of merged values as they are.

    None if one of them has another type, or is no tensor.
    """
    value = item.node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    kinds = item.type if isinstance(item.type, tuple) else (item.type,) * len(values)
    if len(kinds) != len(values) or not all(isinstance(each, torch.Tensor) for each in values):
        return None
    if item.kind != "chunk" or chunk is None:
        return tuple(tuple(each.shape) for each in values)
    found = [
        kind.shape(tuple(each.shape), chunk) if isinstance(kind, Sliced) else tuple(each.shape)
        for each, kind in zip(values, kinds, strict=True)
        if isinstance(kind, (Sliced, Merged))
    ]
    return tuple(found) if len(found) == len(values) else None


def first_type(item: Item) -> Any:
    """The split type of an item's first result."""
    return item.type[0] if isinstance(item.type, tuple) else item.type


def is_sum(item: Item) -> bool:
    """A merge by addition, in the value's own dtype or in a wider one."""
    return isinstance(item.type, Merged) and isinstance(item.type.monoid, Sum)


def is_plain_sum(item: Item) -> bool:
    """A merge by addition in the value's own dtype."""
    return isinstance(item.type, Merged) and isinstance(item.type.monoid, Sum) and item.type.monoid.dtype is None


def _tensors(item: Item) -> list[torch.Tensor]:
    value = item.node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor) and each.layout == torch.strided]


def lies_in_operand(target: Any) -> bool:
    """Whether the result of a call lies in the memory of an operand, or may."""
    return not isinstance(target, OpOverload) or target.is_view or target is torch.ops.aten.reshape.default


def value_bytes(item: Item) -> int:
    """The bytes of a whole value."""
    return sum(_block_bytes(tensor.numel() * tensor.element_size()) for tensor in _tensors(item))


def _block_bytes(num_bytes: int) -> int:
    return num_bytes + current_rules().slack_bytes(num_bytes)


def _state_bytes(item: Item) -> int:
    kind = first_type(item)
    if not isinstance(kind, Merged):
        return value_bytes(item)
    sizes = (t.numel() * (4 if t.dtype in HALVES else t.element_size()) for t in _tensors(item))
    wide = sum(map(_block_bytes, sizes))
    return wide if isinstance(kind.monoid, Sum) else 2 * wide
