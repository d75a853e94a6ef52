"""Bodies: straight-line programs with known sizes, the form in which every lever but the chunk size works.

*Takes* items of a plan and, for a loop, a chunk size. *Gives* a `Body`: an FX graph whose nodes run in order, each with
the meta tensor that it gives. A loop's body is the work of one phase on one chunk; a section of Whole items is a body
too. Recomputation copies nodes, order moves them, a region becomes one node, an offloaded value a pair of nodes: a
body stays a body.

Building one is the check that every chunk has the shape its type predicts (Rule 3): each call runs on meta tensors,
which is several times faster than on fake ones, and on fake ones where an operator has no kernel for meta tensors.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from koila.analysis.monoids import Sum
from koila.analysis.split import Facts, Item, arguments_by_name
from koila.analysis.trace import SlotArgument
from koila.analysis.types import Merged, Sliced, chunk_of
from koila.errors import AnalysisError
from koila.ir.cache import Cache
from koila.ir.draws import Source
from koila.ir.tree import leaves, map_leaves

aten = torch.ops.aten


def slice_whole(value: Any, kind: Sliced, start: int, stop: int, num_samples: int) -> torch.Tensor:
    """A chunk of a whole value or of a random source."""
    if not isinstance(value, Source):
        return chunk_of(value, kind, start, stop, num_samples)
    if kind.dim == 0 and kind.outer == 1:
        return value.rows(start // kind.granule * kind.inner, stop // kind.granule * kind.inner)
    return chunk_of(value.whole(), kind, start, stop, num_samples)


def open_source(value: Any) -> torch.Tensor:
    """All of a random source."""
    return value.whole() if isinstance(value, Source) else value


def sink_value(sink: Any, index: int, value: Any) -> None:
    """Hand a value on: to be merged, gathered, kept or stored."""
    sink(index, value)


def sink_product(sink: Any, index: int, first: torch.Tensor, second: torch.Tensor, turned: bool) -> None:
    """Add a matrix product to a sum without a temporary: the gradient of a weight."""
    total = sink.take(index)
    if total is None:
        product = torch.mm(second.t(), first.t()) if turned else torch.mm(first, second)
        sink(index, product)
    elif turned:
        sink.give(index, total.addmm_(second.t(), first.t()))
    else:
        sink.give(index, total.addmm_(first, second))


class FakeSource(Source):
    """A random source whose numbers are fake."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.whole().new_empty((stop - start, *self.shape[1:]))


@dataclass(eq=False)
class Body:
    """A straight-line program."""

    graph: fx.Graph
    """Placeholders `w0`, `w1`, … for the whole values that it reads, then `start`, `stop`, `sink`; then calls."""
    wholes: tuple[Item, ...]
    """What the placeholders stand for; a kept item stands for its buffer."""
    sinks: tuple[Item, ...]
    """What each index of the sink is."""
    chunk: int | None
    """Samples per chunk; None for a section that runs once."""
    notes: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What was found out about it."""

    def decisions(self) -> list[str]:
        """What runs, in order, as text: equal for equal schedules."""
        return [
            f"{node.name} = {node.target}({', '.join(o.name for o in node.all_input_nodes)})" for node in self.calls
        ]

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The nodes that run, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def with_graph(self, graph: fx.Graph) -> Body:
        """The same program, scheduled otherwise."""
        return Body(graph, self.wholes, self.sinks, self.chunk)


SINKS: tuple[Callable[..., None], ...] = (sink_value,)
"""Calls that hand a value on; they give nothing."""


def has_effects(node: fx.Node) -> bool:
    """Whether a call adds to a sum or hands a value on: it stands in a body once, whoever needs its value again."""
    return node.target in SINKS or "fused" in node.meta or bool(getattr(node.target, "into", ()))


class _Builder:
    def __init__(self, facts: Facts, kept_before: set[Item], chunk: int | None) -> None:
        self.facts, self.kept_before, self.chunk = facts, kept_before, chunk
        self.graph = fx.Graph()
        self.wholes: dict[Item, fx.Node] = {}
        self.nodes: dict[Item, fx.Node] = {}
        self.contiguous: dict[fx.Node, fx.Node] = {}
        placeholders = (n for n in facts.joint.module.graph.nodes if n.op == "placeholder")
        kinds = zip(placeholders, facts.joint.inputs, strict=True)
        self.draws = {node for node, found in kinds if found.kind == "draw"}
        self.opened: dict[Item, fx.Node] = {}
        # Placeholders for wholes are added in front of these.
        self.start = self._placeholder("start", 0)
        self.stop = self._placeholder("stop", chunk or 0)
        self.sink = self._placeholder("sink", None)

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def build(self, items: Sequence[Item], sinks: Sequence[Item]) -> Body:
        wanted: dict[Item, list[int]] = {}
        sums = set[Item]()
        readers = Counter(operand for item in items for operand in item.operands)
        readers.update(sinks)
        for index, item in enumerate(sinks):
            parts = [item] if self.chunk is None else summands(item, readers, sums)
            for part in parts:
                wanted.setdefault(part, []).append(index)
        with _disable_current_modes(), torch.no_grad():
            for item in (each for each in items if each not in sums):
                self.nodes[item] = node = self._item(item)
                self._check(item, node.meta["val"])
                for index in wanted.get(item, ()):
                    self._call(sink_value, (self.sink, index, node))
        if self.chunk is not None:
            _fuse_products(self.graph, sinks)
        return Body(self.graph, tuple(self.wholes), tuple(sinks), self.chunk)

    def _call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, like: Any = None
    ) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        if target not in SINKS:
            plain = None if like is None else _pointwise(node, like)
            node.meta["val"] = run_node(node) if plain is None else plain
        return node

    def _item(self, item: Item) -> fx.Node:
        if item in self.kept_before:
            return self._slice(item, item)
        if item.kind == "slice":
            return self._slice(item, item.operands[0])
        if item.kind == "part":
            return self._call(operator.getitem, (self.nodes[item.operands[0]], item.index))
        target, args, kwargs = chunk_call(item, self.chunk) if item.kind == "chunk" else _whole_call(item)
        operands = [self._operand(operand, target) for operand in item.operands]
        swap = lambda leaf: operands[leaf.index] if isinstance(leaf, _Operand) else leaf  # noqa: E731
        node = self._call(target, map_leaves(args, swap), map_leaves(kwargs, swap), item.node.meta.get("val"))
        node.meta["recorded"] = item.node.meta.get("recorded")
        return node

    def _slice(self, item: Item, whole: Item) -> fx.Node:
        source = self._whole(whole)
        return self._call(slice_whole, (source, item.type, self.start, self.stop, self.facts.num_samples))

    def _whole(self, item: Item) -> fx.Node:
        if item not in self.wholes:
            with self.graph.inserting_before(self.start):
                node = self.graph.placeholder(f"w{len(self.wholes)}")
            value = _meta_whole(self.facts, item)
            node.meta["val"] = FakeSource(value) if item.kind == "input" and item.node in self.draws else value
            self.wholes[item] = node
        return self.wholes[item]

    def _operand(self, item: Item, target: Any) -> fx.Node:
        """A kernel that was traced with contiguous memory may rely on it; a chunk of it need not be contiguous."""
        node = self.nodes.get(item) or self._opened(item)
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.is_contiguous() or not needs_contiguous(item, target):
            return node
        if node not in self.contiguous:
            self.contiguous[node] = self._call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        return self.contiguous[node]

    def _opened(self, item: Item) -> fx.Node:
        whole = self._whole(item)
        if not isinstance(whole.meta["val"], Source):
            return whole
        if item not in self.opened:
            self.opened[item] = self._call(open_source, (whole,))
        return self.opened[item]

    def _check(self, item: Item, value: Any) -> None:
        if self.chunk is None or not isinstance(value, torch.Tensor) or not isinstance(item.type, Sliced):
            return
        expected = chunk_shape(item, self.chunk)
        if tuple(value.shape) != expected:
            found = f"{item.node.target} gives {list(value.shape)} for a chunk of {self.chunk} samples"
            raise AnalysisError(f"{found}, {item.type} predicts {list(expected)}")


def run_node(node: fx.Node) -> Any:
    """The meta value of a call, from those of its operands."""
    swap = lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf  # noqa: E731
    args, kwargs = map_leaves(node.args, swap), map_leaves(dict(node.kwargs), swap)
    if kwargs.get("device") is not None:
        kwargs["device"] = "meta"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload) and not target.is_view and target is not aten.reshape.default:
        return _remembered(target, args, kwargs)
    return _run(target, args, kwargs)


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    try:
        return target(*args, **kwargs)
    except NotImplementedError:
        return _run_on_fakes(target, args, kwargs)


_results: Cache[Any] = Cache("meta_cache", 16384)


def _remembered(target: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that makes new storages: layers of one shape ask once."""
    key = call_key(target, args, kwargs)
    known = _results.get(key)
    if known is not None:
        return map_leaves(known, lambda leaf: leaf.make() if isinstance(leaf, _Form) else leaf)
    result = _run(target, args, kwargs)
    if any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in leaves(result)):
        return result
    given = {leaf.untyped_storage()._cdata for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    if not any(leaf.untyped_storage()._cdata in given or leaf._is_view() for leaf in made):
        form = lambda leaf: _Form.of(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        _results.add(key, map_leaves(result, form))
    return result


@dataclass(frozen=True, slots=True)
class _Form:
    """The layout of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def call_key(target: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Equal for calls of an operator whose arguments have the same layouts and the same values."""
    found: list[Any] = [target]
    for leaf in leaves((args, kwargs)):
        tensor = isinstance(leaf, torch.Tensor)
        found.append((tuple(leaf.shape), leaf.stride(), leaf.dtype) if tensor else (type(leaf), leaf))
    return (*found, len(args), tuple(kwargs))


def _pointwise(node: fx.Node, whole: Any) -> torch.Tensor | None:
    """The value of a pointwise call on contiguous operands, without asking PyTorch: most calls are of this kind."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    if not isinstance(whole, torch.Tensor) or target._schema.is_mutable:
        return None
    operands = [operand.meta["val"] for operand in node.all_input_nodes]
    if any(operand.layout != torch.strided for operand in operands):
        return None
    shapes = {tuple(operand.shape) for operand in operands}
    shape = max(shapes, key=len, default=())
    if any(size != 1 and size != shape[place] for other in shapes for place, size in enumerate(other, -len(other))):
        return None
    if not all(operand.is_contiguous() for operand in operands):
        return None
    return torch.empty(shape, dtype=whole.dtype, device="meta")


def _run_on_fakes(target: Any, args: Any, kwargs: Any) -> Any:
    with FakeTensorMode():
        fake = lambda leaf: like(leaf, "cpu") if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        result = target(*map_leaves(args, fake), **map_leaves(kwargs, fake))
    return map_leaves(result, lambda leaf: like(leaf, "meta") if isinstance(leaf, torch.Tensor) else leaf)


def like(value: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the same layout on another device."""
    if value.layout != torch.strided:
        return value if value.device.type == device else value.to(device)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _meta_whole(facts: Facts, item: Item) -> Any:
    if item.node.op == "get_attr":
        return like(getattr(facts.joint.module, str(item.node.target)), "meta")
    return map_leaves(
        item.node.meta["val"], lambda leaf: like(leaf, "meta") if isinstance(leaf, torch.Tensor) else leaf
    )


@dataclass(frozen=True, slots=True)
class _Operand:
    """Stands for the operand of that index among an item's arguments."""

    index: int


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator and its arguments, tensors as `_Operand`s."""


def _numbered(tree: Any) -> Any:
    count = iter(range(1 << 30))
    return map_leaves(tree, lambda leaf: _Operand(next(count)) if isinstance(leaf, fx.Node) else leaf)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, numbered; found once."""
    if "arguments" not in node.meta:
        node.meta["arguments"] = _numbered(arguments_by_name(node))
    return dict(node.meta["arguments"])


def _whole_call(item: Item) -> Call:
    node = item.node
    if not isinstance(node.target, torch._ops.OpOverload):
        args, kwargs = _numbered((node.args, dict(node.kwargs)))
        return node.target, tuple(args), kwargs
    return _by_position(*as_reshape(node.target, _arguments(node)))


def chunk_call(item: Item, chunk: int | None) -> Call:
    """The operator and its arguments for a chunk of that many samples."""
    assert chunk is not None and item.ruling is not None
    arguments, ruling = _arguments(item.node), item.ruling
    if ruling.sizes:
        shape = chunk_shape(item, chunk)
        arguments.update({name: list(shape) for name in ruling.sizes})
    if ruling.rewrite is not None:
        arguments = ruling.rewrite(arguments, chunk)
    return _by_position(*as_reshape(ruling.target or item.node.target, arguments))


def _by_position(target: Any, arguments: dict[str, Any]) -> Call:
    """Positional arguments as the schema has them; one that a rewrite left out makes the following ones keywords."""
    if not isinstance(target, torch._ops.OpOverload):
        return target, (), arguments
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, argument in enumerate(target._schema.arguments):
        if argument.name in arguments:
            if argument.kwarg_only or len(args) < place:
                kwargs[argument.name] = arguments[argument.name]
            else:
                args.append(arguments[argument.name])
    return target, tuple(args), kwargs


VIEWS = {aten.view.default, aten._unsafe_view.default}


def as_reshape(target: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A chunk may lie in memory otherwise than the whole value: a view becomes a reshape."""
    if target not in VIEWS:
        return target, arguments
    return aten.reshape.default, {"self": arguments["self"], "shape": arguments["size"]}


def needs_contiguous(operand: Item, target: Any) -> bool:
    """Whether an operator is a kernel that was traced with this operand contiguous."""
    if not isinstance(target, torch._ops.OpOverload) or target.is_view or torch.Tag.pointwise in target.tags:
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


_ACCUMULATED = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Fused:
    """A matrix product that is added to a sum in place of being handed on."""

    index: int
    """The index of the sink."""
    turned: bool
    """Whether the sum is of the transposed product."""


def _fuse_products(graph: fx.Graph, sinks: Sequence[Item]) -> None:
    """Note on matrix products that only a sum reads that they are added up in place; what stands between is skipped."""
    for node in [n for n in graph.nodes if n.target is sink_value]:
        _, index, value = node.args
        turned = value.target is aten.t.default or (value.target is aten.permute.default and value.args[1] == [1, 0])
        product = value.args[0] if turned else value
        alone = len(value.users) == 1 and len(product.users) == 1
        if not (alone and product.target is aten.mm.default and is_plain_sum(sinks[index])):
            continue
        if product.meta["val"].dtype in _ACCUMULATED:
            product.meta["fused"] = Fused(index, turned)
            node.meta["skipped"] = True
            if turned:
                value.meta["skipped"] = True


def summands(item: Item, readers: Counter[Item], sums: set[Item]) -> list[Item]:
    """Values that can be added to a sum one by one, instead of their sum: two gradients of one weight.

    Nobody else may read them: the first of them becomes the sum. What is added up elsewhere is put into `sums`.
    """
    if not (item.kind == "chunk" and item.node.target is aten.add.Tensor and is_plain_sum(item)) or readers[item] > 1:
        return [item]
    value, alike = item.node.meta["val"], item.operands
    fits = len(set(alike)) == 2 and len(item.node.args) == 2 and not item.node.kwargs
    for operand in alike:
        other = operand.node.meta["val"] if operand.kind == "chunk" else None
        fits = fits and isinstance(other, torch.Tensor) and (other.shape, other.dtype) == (value.shape, value.dtype)
        fits = fits and readers[operand] == 1 and is_plain_sum(operand)
    if not fits:
        return [item]
    sums.add(item)
    return [part for operand in alike for part in summands(operand, readers, sums)]


def is_plain_sum(item: Item) -> bool:
    """A merge by addition in the value's own dtype."""
    return isinstance(item.type, Merged) and isinstance(item.type.monoid, Sum) and item.type.monoid.dtype is None


def build_body(
    facts: Facts, items: Sequence[Item], sinks: Sequence[Item], kept_before: Iterable[Item] = (),
    chunk: int | None = None,
) -> Body:  # fmt: skip
    """The straight-line program of some items; `sinks` are handed on."""
    return _Builder(facts, set(kept_before), chunk).build(items, sinks)


def slots_in(graph: fx.Graph) -> list[SlotArgument]:
    """The floats among the arguments that vary from step to step."""
    found: list[SlotArgument] = []
    look = lambda leaf: found.append(leaf) if isinstance(leaf, SlotArgument) else None  # noqa: E731
    for node in graph.nodes:
        map_leaves((node.args, dict(node.kwargs)), look)
    return found
