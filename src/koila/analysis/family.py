"""Families: joint graphs of one structure at any sizes, built from formulas instead of traced.

*Takes* two or more traces of programs that make the same calls at other sizes. *Gives* a `Family`, which builds the
joint graph of a new size: traces are aligned node by node, and every number that differs between them gets a formula of
the numbers that the record tells. What has no formula makes no family: such a program is traced at every size (Rule 3).

Sizes and strides of the values get formulas, too (`apply_symbolic_shapes`); where there is none, PyTorch is asked: the
operator is run on meta tensors. A graph whose results are not those that were recorded is thrown away.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_list

from koila._torch import FakeTensorMode, OpOverload, in_turn, without_modes
from koila._torch.graphs import add_node
from koila.analysis.marks import SlotArgument
from koila.analysis.outline import Outline, OutlineNode, Reference, takes_everything
from koila.analysis.trace import Joint, Traced, inputs_of
from koila.ir.formulas import SMALL, Formula, Formulas, NoFormula, agree
from koila.ir.graph import Graph
from koila.ir.job import Demand
from koila.ir.meta_kernels import known_result
from koila.ir.numbers import Number, num_input_numbers, numbers_of
from koila.ir.prepass import PrePass, with_bits
from koila.ir.tree import map_leaves

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Size:
    """Stands for a size of an earlier value: no formula says it, but whoever builds the graph has made the value."""

    index: int
    place: int
    dim: int


@dataclass(frozen=True, slots=True)
class _Template:
    """A node with formulas in the place of numbers."""

    node: OutlineNode
    args: Any
    kwargs: Any
    layout: Any
    """Its value: a `Layout`, a list of them, or what is no tensor; `_UNKNOWN` if PyTorch is to be asked."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor with formulas in the place of sizes and strides."""

    shape: list[Any]
    stride: list[Any]
    dtype: torch.dtype
    bits: tuple[bool, bool]


_UNKNOWN = object()


def apply_symbolic_shapes(values: Sequence[Any], number: Callable[[list[Any]], Any]) -> Any:
    """The layout of a value for any sizes, from what it is in some traces.

    Args:
        values: The value in each trace: a tensor, or a structure of tensors.
        number: Gives the formula of a number that is so much in the traces.

    Returns:
        A `Layout`, or a list of them; `_UNKNOWN` if a size follows from no formula.

    >>> found = Formulas([(8, 20), (8, 27)], 2)
    >>> sizes = lambda seen: seen[0] if seen[0] == seen[1] else found.formula(tuple(seen))
    >>> apply_symbolic_shapes([torch.empty(8, 19), torch.empty(8, 26)], sizes).shape
    [8, Formula(symbols=(0,), factor=1, summand=-1, power=1.0, divisor=1)]
    """
    first = values[0]
    if isinstance(first, (list, tuple)):
        if any(len(value) != len(first) for value in values):
            raise NoFormula("results differ in number")
        found = [apply_symbolic_shapes(each, number) for each in zip(*values, strict=True)]
        return _UNKNOWN if any(each is _UNKNOWN for each in found) else found
    if not isinstance(first, torch.Tensor):
        return first if all(value == first for value in values) else _UNKNOWN
    if any(value.dtype != first.dtype or value.ndim != first.ndim for value in values):
        raise NoFormula("values differ in dtype or rank")
    try:
        shape = [number(list(sizes)) for sizes in zip(*(tuple(value.shape) for value in values), strict=True)]
        stride = [number(list(steps)) for steps in zip(*(value.stride() for value in values), strict=True)]
    except NoFormula:
        return _UNKNOWN
    return Layout(shape, stride, first.dtype, (first.is_conj(), first.is_neg()))


_FILLED = (Reference, Formula, _Size, list, dict, slice)
"""What is not the same at all sizes, or may hold something that is not."""


class Sample:
    """One traced program: its numbers and the outline of its joint graph."""

    def __init__(self, graph: Graph, joint: Joint) -> None:
        self.numbers: tuple[Number, ...] = numbers_of(graph)
        self.num_inputs = num_input_numbers(graph)
        self.outline = Outline(joint)


class Family:
    """The joint graphs of one structure.

    Raises:
        NoFormula: The traces are not alike, or a number follows from nothing that is recorded.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._first = samples[0].outline.joint
        self._formulas = Formulas([sample.numbers for sample in samples], samples[0].num_inputs)
        _check_alike([sample.outline for sample in samples])
        rows = list(zip(*(sample.outline.nodes for sample in samples), strict=True))
        self._sizes: dict[tuple[Any, ...], _Size] = {}
        self._rivals: set[tuple[Formula, ...]] = set()
        """Formulas of one number that nobody recorded."""
        self._layouts: dict[Any, Layout] = {}
        self._templates: list[_Template] = []
        for index, row in enumerate(rows):
            self._templates.append(self._template(row))
            if self._templates[-1].layout is _UNKNOWN:
                self._note_sizes(index, [node.value for node in row])

    # Alignment.

    def _template(self, row: tuple[OutlineNode, ...]) -> _Template:
        node = row[0]
        if node.target in _BY_SIZE:
            raise NoFormula(f"{node.target} is chosen by size")
        if any(str(other.target) != str(node.target) or other.op != node.op for other in row):
            raise NoFormula(f"{' and '.join(str(other.target) for other in row)} stand in one place")
        args = self._align([other.args for other in row])
        kwargs = self._align([dict(other.kwargs) for other in row])
        if node.op in ("placeholder", "output", "get_attr"):
            return _Template(node, args, kwargs, None)
        if any(other.value is None for other in row):
            raise NoFormula(f"nothing is known about the value of {node.target}")
        layout = apply_symbolic_shapes([other.value for other in row], self._number)
        return _Template(node, args, kwargs, self._known_layout(layout))

    def _known_layout(self, layout: Any) -> Any:
        """The layout, the same object for equal ones: layers of a network give values that are alike."""
        if isinstance(layout, list):
            return list(map(self._known_layout, layout))
        if not isinstance(layout, Layout):
            return layout
        return self._layouts.setdefault((*layout.shape, None, *layout.stride, layout.dtype, layout.bits), layout)

    def _align(self, trees: list[Any]) -> Any:
        first = trees[0]
        if isinstance(first, Reference):
            if any(tree != first for tree in trees):
                raise NoFormula("operands differ")
            return first
        if any(type(tree) is not type(first) for tree in trees):
            raise NoFormula("arguments differ in type")
        if isinstance(first, (list, tuple)):
            if any(len(tree) != len(first) for tree in trees):
                raise NoFormula("arguments differ in length")
            found = [self._align(list(items)) for items in zip(*trees, strict=True)]
            return found if any(type(item) in _FILLED for item in found) else immutable_list(found)
        if isinstance(first, dict):
            if any(tree.keys() != first.keys() for tree in trees):
                raise NoFormula("arguments differ in name")
            return {name: self._align([tree[name] for tree in trees]) for name in first}
        if isinstance(first, slice):
            return slice(*(self._align([getattr(t, part) for t in trees]) for part in ("start", "stop", "step")))
        return self._number(trees)

    def _number(self, values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, SlotArgument):
            if any(value.slot != first.slot for value in values):
                raise NoFormula("slots differ")
            return first
        if all(value == first for value in values):
            return first
        if type(first) not in (int, float):
            raise NoFormula(f"{first} and {values[1]} stand in one place")
        self._rivals.add(self._formulas.rivals(tuple(values)))
        found = self._formulas.formula(tuple(values)) or self._sizes.get((type(first), *values))
        if found is None:
            raise NoFormula(f"{', '.join(map(str, values))} follow from nothing that is recorded")
        return found

    def _note_sizes(self, index: int, values: list[Any]) -> None:
        """Sizes of values that no formula says, for arguments that come later."""
        places = [value if isinstance(value, (tuple, list)) else (value,) for value in values]
        for place, tensors in enumerate(zip(*places, strict=False)):
            if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                for dim, sizes in enumerate(zip(*(tensor.shape for tensor in tensors), strict=False)):
                    if any(size != sizes[0] for size in sizes):
                        self._sizes.setdefault((int, *sizes), _Size(index, place, dim))

    # Building.

    def build(self, graph: Graph, demand: Demand) -> Joint:
        """The joint graph of a program of this structure.

        Raises:
            NoFormula: Its numbers are not as the formulas say.
        """
        symbols = self._formulas.values_for(numbers_of(graph))
        if any(not agree(rivals, symbols) for rivals in self._rivals):
            raise NoFormula("a number that nobody recorded may follow from several formulas, which differ")
        if not self._first.holds_for(graph):
            raise NoFormula("a number is another one that is pinned")
        inputs = [prepass for _, prepass in inputs_of(graph, demand)]
        try:
            with without_modes(), torch.no_grad():
                return _Builder(self._templates, symbols, inputs).joint(self._first, graph)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            raise NoFormula(f"PyTorch refuses the graph: {type(error).__name__}") from error


def _check_alike(outlines: Sequence[Outline]) -> None:
    """Raise unless the traces have the same inputs, results, constants and pinned numbers."""
    first = outlines[0].joint
    for outline in outlines[1:]:
        other = outline.joint
        if len(outline.nodes) != len(outlines[0].nodes):
            raise NoFormula("the traces differ in length")
        same = (
            first.inputs == other.inputs and first.num_outputs == other.num_outputs and first.wrt == other.wrt
            and first.written == other.written and first.completed == other.completed
            and first.module.constants.keys() == other.module.constants.keys()
        )  # fmt: skip
        if not same or first.pinned != other.pinned:
            raise NoFormula("the traces differ in what they take or give")
        for name, value in first.module.constants.items():
            if not torch.equal(value, other.module.constants[name]):
                raise NoFormula("the traces hold other constants")


class _Builder:
    """One graph on its way."""

    def __init__(self, templates: Sequence[_Template], symbols: Sequence[Number], inputs: Sequence[PrePass]) -> None:
        self.templates, self.symbols = templates, symbols
        self.inputs = iter(inputs)
        self.nodes: list[fx.Node] = []
        self.numbers: dict[int, Number] = {}
        """By identity of a formula; the templates hold it."""
        self.tensors: dict[int, torch.Tensor] = {}
        """By identity of a layout. Nobody asks which values of a joint graph share their memory."""

    def joint(self, like: Joint, graph: Graph) -> Joint:
        made = fx.Graph()
        for template in self.templates:
            args = self._filled(template.args)
            kwargs = self._filled(template.kwargs) if template.kwargs else {}
            like_it = template.node
            node = add_node(made, like_it.op, like_it.target, tuple(args), kwargs, like_it.name)
            if node.op != "output":
                node.meta["val"] = self._value(node, template)
                if takes_everything(node) and not like_it.takes_everything:
                    raise NoFormula("a slice takes everything")  # It would not stand in a trace.
            if like_it.recorded is not None:
                node.meta["recorded"] = like_it.recorded
            self.nodes.append(node)
        _check_results(self.nodes[-1], like, graph)
        return replace(like, module=Traced(made, like.module.constants), is_built=True)

    def _filled(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is Reference:
            return self.nodes[tree.index]
        if kind is Formula:
            found = self.numbers.get(id(tree))
            if found is None:
                found = self.numbers[id(tree)] = tree(self.symbols)
            return found
        if kind is _Size:
            value = self.nodes[tree.index].meta["val"]
            return (value if isinstance(value, torch.Tensor) else value[tree.place]).shape[tree.dim]
        if kind is list:
            return [self._filled(item) for item in tree]
        if kind is dict:
            return {name: self._filled(item) for name, item in tree.items()}
        if kind is slice:
            return slice(*(self._filled(part) for part in (tree.start, tree.stop, tree.step)))
        return tree

    def _value(self, node: fx.Node, template: _Template) -> Any:
        like = template.node.value
        if node.op == "placeholder":
            prepass = next(self.inputs)
            made = torch.empty_strided(prepass.shape, prepass.stride, dtype=prepass.dtype, device="meta")
            return _checked(with_bits(made, prepass.bits), like)
        if node.op == "get_attr":
            return like
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return source.meta["val"][node.args[1]]
        if template.layout is not _UNKNOWN:
            return self._made(template.layout, like)
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), _meta_of)
        return _checked(_run(node.target, args, kwargs), like)

    def _made(self, layout: Any, like: Any) -> Any:
        if type(layout) is not Layout:
            return tuple(map(self._made, layout, like)) if isinstance(layout, list) else layout
        found = self.tensors.get(id(layout))
        if found is None:
            shape, stride = self._filled(layout.shape), self._filled(layout.stride)
            made = torch.empty_strided(shape, stride, dtype=layout.dtype, device="meta")
            made = made if layout.bits == (False, False) else with_bits(made, layout.bits)
            found = self.tensors[id(layout)] = _checked(made, like)
        return found


def _meta_of(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


_BY_SIZE = {aten._cdist_forward.default, aten._euclidean_dist.default}
"""Operators that PyTorch takes for some sizes only."""
_BY_DEVICE = {aten.convolution.default, aten.convolution_backward.default}
"""Operators whose results lie in memory as the device has it."""


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    """The layout of an operator's results, as meta tensors."""
    if not isinstance(target, OpOverload):
        raise NoFormula(f"{target} is no operator of PyTorch")
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta")}
    if target not in _BY_DEVICE:
        known = known_result(target, args, kwargs)
        if known is not None:
            return known
        try:
            return target(*args, **kwargs)
        except NotImplementedError:
            pass
    return _run_on_cpu(target, args, kwargs)


@in_turn
def _run_on_cpu(target: Any, args: Any, kwargs: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        cpu = lambda leaf: _moved(leaf, "cpu") if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        named = {name: value for name, value in kwargs.items() if name != "device"}
        result = target(*map_leaves(args, cpu), **map_leaves(named, cpu))
    return map_leaves(result, lambda leaf: _moved(leaf, "meta") if isinstance(leaf, torch.Tensor) else leaf)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)


def _checked(value: Any, like: Any) -> Any:
    """The value. A dimension of one or no element has ways of its own: it must be one in the traces, too."""
    if isinstance(value, (tuple, list)):
        for each, other in zip(value, like, strict=True):
            _checked(each, other)
    elif isinstance(value, torch.Tensor):
        pairs = zip(value.shape, like.shape, strict=True)
        if any(size != other and min(size, other) < SMALL for size, other in pairs):
            raise NoFormula("a size is smaller than two")
    return value


def _check_results(output: fx.Node, like: Joint, graph: Graph) -> None:
    """Outputs have the shapes that were recorded, gradients those of their leaves."""
    expected = [(value.prepass.shape, value.prepass.dtype) for value in graph.outputs]
    expected += [(tuple(graph.leaves[leaf].shape), graph.leaves[leaf].dtype) for leaf in (*like.wrt, *like.written)]
    for node, layout in zip(output.args[0], expected, strict=True):  # type: ignore[arg-type]
        if isinstance(node, fx.Node) and (tuple(node.meta["val"].shape), node.meta["val"].dtype) != layout:
            raise NoFormula("the graph gives another shape than was recorded")
