"""Typing the joint graph: which values are cut, how, and what each operator needs of its operands.

*Takes* a `Joint` and the batch. *Gives* `Facts`: a graph of `Item`s in which every conversion is explicit. Whole items
run once; chunk items run once per chunk; `finish` and `gather` turn a chunk's value into a whole one and are the
only places where all chunks must be done first: the borders of phases.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import lcm
from typing import Any

import torch
from torch import fx

from koila import events
from koila._torch import OpOverload, schema_of
from koila.analysis.chunk_rule import Call, ChunkRule, Operand
from koila.analysis.rules import rule_for
from koila.analysis.trace import Input, Joint
from koila.analysis.types import OPAQUE, WHOLE, Merged, Sliced, SplitType, Whole
from koila.analysis.uniform import operand_types
from koila.errors import AnalysisError
from koila.ir.cache import HashedOnce
from koila.ir.numbers import Number
from koila.ir.tree import leaves


@dataclass(eq=False, slots=True)
class Item:
    """One value of the split program."""

    kind: str
    """`input` and `whole` run once; `slice`, `chunk` and `part` run per chunk; `finish` and `gather` end a phase."""
    node: fx.Node
    """The node of the joint graph whose value (or part of it) this is."""
    type: SplitType | tuple[SplitType, ...]
    operands: tuple[Item, ...] = ()
    """What it is made from, in the order of the tensors among the node's arguments."""
    ruling: ChunkRule | None = None
    """For a chunk: how the operator's arguments change; see `Facts.ruling_of`."""
    index: int | None = None
    """For `part` and the like: which result of an operator with several."""
    phase: int = 0
    """For chunk items: the earliest phase that can compute it; for whole ones: the first phase that can use it."""
    is_remade: bool = False
    """For a chunk: whether it is a Whole value that is made again, chunk by chunk, from chunks of its operands."""

    @property
    def per_chunk(self) -> bool:
        return self.kind in ("slice", "chunk", "part")

    def __repr__(self) -> str:
        return f"{self.kind} {self.node.name} {self.type}"


@dataclass(frozen=True)
class Origin:
    """Which program some facts are about, and at which sizes."""

    structure: Hashable
    """Equal for programs that differ in sizes and numbers only, and of which the same results are wanted."""
    numbers: tuple[Number, ...]
    """Its sizes and numbers; see `koila.ir.numbers`."""
    num_inputs: int
    """So many of them are those of inputs."""


@dataclass(frozen=True)
class Facts:
    """What the analysis knows about a program and a batch."""

    joint: Joint
    num_samples: int
    """The batch size B."""
    results: tuple[Item | None, ...]
    """The whole items of the joint graph's results, in order; None where there is no gradient."""
    types: dict[str, SplitType | tuple[SplitType, ...]]
    """The type of each node of the joint graph, by name."""
    gathers: tuple[tuple[str, str], ...]
    """(value, operator that asked) for each Sliced value that had to be gathered."""
    granule: int
    """Chunk sizes are multiples of this."""
    num_phases: int
    items: tuple[Item, ...] = field(repr=False, default=())
    """Every item that a result needs."""
    origin: Origin | None = field(repr=False, default=None)
    """None: a part of a program, which has no other sizes."""

    @cached_property
    def places(self) -> dict[Item, int]:
        """By item, its place among all of them: the same at other sizes."""
        return {item: place for place, item in enumerate(self.items)}

    @cached_property
    def signature(self) -> Hashable:
        """Equal for facts of other sizes whose items can stand for each other, one by one."""
        nodes = {node: place for place, node in enumerate(self.joint.module.graph.nodes)}
        places = self.places
        return HashedOnce(tuple(
            (item.kind, nodes[item.node], tuple([places[operand] for operand in item.operands]), item.index, item.phase,
             _without_sizes(item.type))
            for item in self.items
        ))  # fmt: skip

    def ruling_of(self, item: Item) -> ChunkRule | None:
        """How the arguments of an item's operator change for a chunk; None if it is no chunk.

        Facts that come from other sizes have not asked the rules yet.

        Raises:
            AnalysisError: The rule gives another type than at those sizes.
        """
        if item.kind == "chunk" and item.ruling is None:
            item.ruling = _ruling_again(item, self)
        return item.ruling

    def forget(self) -> None:
        """Let go of what only planning asks for, often: a program that is planned takes less memory."""
        for name in ("places", "signature"):
            self.__dict__.pop(name, None)

    @property
    def batch_dims(self) -> dict[int, int]:
        """By index of the joint graph's result, the dimension of those that plainly carry the batch."""
        output = next(node for node in self.joint.module.graph.nodes if node.op == "output")
        found: dict[int, int] = {}
        for index, node in enumerate(output.args[0]):
            kind = self.types[node.name] if isinstance(node, fx.Node) else None
            if isinstance(kind, Sliced) and kind == Sliced(kind.dim):
                found[index] = kind.dim
        return found

    @property
    def is_split(self) -> bool:
        """Whether anything runs per chunk."""
        return any(item.kind == "chunk" for item in self.items)


class _Typing:
    """One pass over the joint graph."""

    def __init__(
        self, joint: Joint, batches: Mapping[int, int | Sliced], num_samples: int, wanted: set[int] | None
    ) -> None:
        self.joint, self.num_samples, self.wanted = joint, num_samples, wanted
        self.batches = batches
        self.items: dict[fx.Node, Item] = {}
        self.operands: dict[fx.Node, Operand] = {}
        self.converted: dict[Any, Item] = {}
        self.gathers: list[tuple[str, str]] = []
        self.to_reslice: dict[Item, set[int]] = {}
        """Operators with several results whose results are cut again, with the dimensions to try."""

    def run(self) -> Facts:
        placeholders = iter(self.joint.inputs)
        results: tuple[Item | None, ...] = ()
        for node in self.joint.module.graph.nodes:
            if node.op == "placeholder":
                self.items[node] = self._placeholder(node, next(placeholders))
            elif node.op == "output":
                results = tuple(self._result(number, value) for number, value in enumerate(node.args[0]))
            else:
                self.items[node] = self._call(node)
        items = tuple(_reachable([item for item in results if item is not None]))
        granules = [kind.granule for item in items for kind in _sliced_types(item)]
        types = {node.name: item.type for node, item in self.items.items()}
        phases = max((item.phase + 1 for item in items if item.per_chunk), default=0)
        gathers = tuple(dict.fromkeys(self.gathers))
        return Facts(self.joint, self.num_samples, results, types, gathers, lcm(1, *granules), phases, items)

    def _placeholder(self, node: fx.Node, found: Input) -> Item:
        item, shape = Item("input", node, WHOLE), tuple(node.meta["val"].shape)
        # Random numbers carry no mark of the batch: a first dimension of its size is likely to be it; any cut is exact.
        dim = self.batches.get(found.index) if found.kind == "leaf" else 0 if found.kind == "draw" and shape else None
        if isinstance(dim, Sliced):
            return self._slice(item, dim)
        if dim is not None and shape[dim] == self.num_samples:
            return self._slice(item, Sliced(dim))
        return item

    def _result(self, number: int, node: Any) -> Item | None:
        if not isinstance(node, fx.Node) or (self.wanted is not None and number not in self.wanted):
            return None
        return self._whole(self.items[node], "result")

    def _call(self, node: fx.Node) -> Item:
        named = arguments_by_name(node) if isinstance(node.target, OpOverload) else None
        given = (node.args, node.kwargs) if named is None else named.values()
        operands = [self.items[leaf] for leaf in _nodes_in(given)]
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            return self._part(node, operands[0], int(node.args[1]))  # type: ignore[arg-type]
        if all(isinstance(item.type, Whole) or item.kind in ("input", "whole") for item in operands):
            return self._whole_call(node, [self._whole(item, node.name) for item in operands])
        ruling = None if named is None else self._ruling(node, named)
        if named is None or ruling is None:
            whole = self._whole_call(node, [self._whole(item, node.name) for item in operands])
            return self._resliced(whole, {item.type.dim for item in operands if isinstance(item.type, Sliced)})
        return self._chunk_call(node, named, ruling)

    def _resliced(self, whole: Item, dims: set[int]) -> Item:
        """What an operator made of gathered values is cut again, so that what follows runs in chunks.

        Any cut is exact; a dimension in which an operand had the batch is likely to be the batch still.
        """
        value = whole.node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self.to_reslice[whole] = dims
            return whole
        shape = tuple(value.shape)
        dim = next((dim for dim in sorted(dims) if dim < len(shape) and shape[dim] == self.num_samples), None)
        return whole if dim is None else self._slice(whole, Sliced(dim))

    def _whole_call(self, node: fx.Node, operands: list[Item]) -> Item:
        phase = max((item.phase for item in operands), default=0)
        return Item("whole", node, WHOLE, tuple(operands), phase=phase)

    def _part(self, node: fx.Node, source: Item, index: int) -> Item:
        if not source.per_chunk:
            whole = self._whole_call(node, [source])
            return self._resliced(whole, self.to_reslice.get(source, set()))
        return Item("part", node, part_type(source.type, index), (source,), index=index, phase=source.phase)

    def _ruling(self, node: fx.Node, named: dict[str, Any]) -> ChunkRule | None:
        rule = rule_for(node.target)
        call = None if rule is None else describe_call(node, named, self._operand, self.num_samples)
        if call is None or rule is None:
            return None
        try:
            return rule(call)
        except Exception as error:  # A faulty rule costs memory, never correctness (Rule 3).
            events.count(f"rule_error::{node.target}: {type(error).__name__}: {error}")
            return None

    def _operand(self, node: fx.Node) -> Operand:
        """A value as rules see it."""
        if node not in self.operands:
            self.operands[node] = operand_as(node, self.items[node].type)
        return self.operands[node]

    def _chunk_call(self, node: fx.Node, named: dict[str, Any], ruling: ChunkRule) -> Item:
        operands = []
        for name, value in named.items():
            if isinstance(value, fx.Node):
                kind: Any = ruling.operands.get(name, WHOLE)
                operands.append(self._convert(self.items[value], kind or WHOLE, node.name))
                continue
            if not isinstance(value, (list, tuple)):
                continue
            required = ruling.operands.get(name, WHOLE)
            found = list(leaves(value))
            kinds = required if isinstance(required, tuple) else (required,) * len(found)
            pairs = ((leaf, kind) for leaf, kind in zip(found, kinds, strict=True) if isinstance(leaf, fx.Node))
            operands += [self._convert(self.items[leaf], kind or WHOLE, node.name) for leaf, kind in pairs]
        if not any(item.per_chunk for item in operands):
            return self._whole_call(node, operands)
        return Item("chunk", node, ruling.result, tuple(operands), ruling, phase=max(item.phase for item in operands))

    # Conversions.

    def _convert(self, item: Item, required: SplitType, user: str) -> Item:
        if item.per_chunk and (item.type is required or item.type == required):
            return item
        whole = self._whole(item, user)
        if isinstance(required, Whole):
            return whole
        assert isinstance(required, Sliced), f"{user} asks for {required} of a {item.type}"
        return self._slice(whole, required)

    def _whole(self, item: Item, user: str) -> Item:
        if not item.per_chunk:
            return item
        if item.kind == "slice":
            return item.operands[0]
        key = (item, "whole")
        if key not in self.converted and (isinstance(item.type, Whole) or item.type == OPAQUE):
            self.converted[key] = self._computed_whole(item, user)
        if key not in self.converted:
            kind = "finish" if isinstance(item.type, Merged) else "gather"
            if kind == "gather":
                self.gathers.append((item.node.name, user))
            self.converted[key] = Item(kind, item.node, WHOLE, (item,), phase=item.phase + 1)
        return self.converted[key]

    def _computed_whole(self, part: Item, user: str) -> Item:
        """A result that every chunk of an operator has alike or for itself, for who needs it outside of the chunks."""
        operator = part.operands[0]
        operands = [self._whole(operand, user) for operand in operator.operands]
        return self._whole_call(part.node, [self._whole_call(operator.node, operands)])

    def _slice(self, whole: Item, kind: Sliced) -> Item:
        """A chunk of a whole value: remade from chunks of its operands where that is exact, else cut out."""
        key = (whole, kind)
        if key not in self.converted:
            cut = Item("slice", whole.node, kind, (whole,), phase=whole.phase)
            self.converted[key] = self._remake(whole, kind) or cut
        return self.converted[key]

    def _remake(self, whole: Item, kind: Sliced) -> Item | None:
        if whole.kind != "whole":
            return None
        plan = operand_types(whole.node, kind, self.num_samples)
        if plan is None:
            return None
        ruling, kinds = plan
        operands = tuple(
            item if needed is None else self._slice(item, needed)
            for item, needed in zip(whole.operands, kinds, strict=True)
        )
        phase = max((item.phase for item in operands), default=0)
        return Item("chunk", whole.node, kind, operands, ruling, phase=phase, is_remade=True)


def rule_again(node: fx.Node, types: Mapping[str, Any], num_samples: int) -> ChunkRule | None:
    """What the rule of a node's operator says, given the types of all nodes by name."""
    rule, operand_of = rule_for(node.target), lambda value: operand_as(value, types[value.name])
    call = describe_call(node, arguments_by_name(node), operand_of, num_samples)
    return None if rule is None or call is None else rule(call)


def part_type(kind: SplitType | tuple[SplitType, ...], index: int) -> SplitType:
    """The type of one result of an operator with several."""
    return kind[index] if isinstance(kind, tuple) else kind


def _ruling_again(item: Item, facts: Facts) -> ChunkRule:
    node = item.node
    if item.is_remade:
        assert isinstance(item.type, Sliced)
        plan = operand_types(node, item.type, facts.num_samples)
        ruling = None if plan is None else plan[0]
    else:
        ruling = rule_again(node, facts.types, facts.num_samples)
    if ruling is None or ruling.result != item.type:
        raise AnalysisError(f"{node.target} is cut otherwise than at other sizes")
    return ruling


def operand_as(node: fx.Node, kind: Any) -> Operand:
    """A value as rules see it, with its type."""
    fake = node.meta["val"]
    return Operand(tuple(fake.shape), fake.dtype, kind)


def describe_call(
    node: fx.Node, named: dict[str, Any], operand_of: Callable[[fx.Node], Operand], num_samples: int
) -> Call | None:
    """A call as rules see it: the arguments of a node by name, in which operands stand for values."""
    results = node.meta.get("val")
    outputs = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    if any(isinstance(item, (tuple, list)) for item in outputs):
        return None

    def operand(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return operand_of(value)
        return tuple(map(operand, value)) if isinstance(value, (list, tuple)) else value

    return Call(
        node.target,  # type: ignore[arg-type]
        {name: operand(value) for name, value in named.items()},
        tuple(Operand(tuple(o.shape), o.dtype, WHOLE) if isinstance(o, torch.Tensor) else None for o in outputs),
        num_samples,
    )


def _nodes_in(values: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes among some arguments, in order."""
    for value in values:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from (leaf for leaf in leaves(value) if isinstance(leaf, fx.Node))


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operator's schema by name, defaults filled in."""
    assert isinstance(node.target, OpOverload)
    found = dict(_defaults(node.target))
    found.update(zip(found, node.args, strict=False))
    found.update(node.kwargs)
    return found


@cache
def _defaults(target: OpOverload) -> dict[str, Any]:
    """The arguments of an operator by name, with their default values."""
    schema = schema_of(target).arguments
    return {argument.name: argument.default_value if argument.has_default_value() else None for argument in schema}


def _sliced_types(item: Item) -> list[Sliced]:
    kinds = item.type if isinstance(item.type, tuple) else (item.type,)
    return [kind for kind in kinds if isinstance(kind, Sliced)]


def _without_sizes(kind: SplitType | tuple[SplitType, ...]) -> Hashable:
    if isinstance(kind, tuple):
        return tuple(map(_without_sizes, kind))
    if isinstance(kind, Merged):
        return str(type(kind.monoid))
    return (kind.dim, kind.granule, kind == OPAQUE) if isinstance(kind, Sliced) else Whole


def _reachable(results: list[Item]) -> Iterator[Item]:
    seen: set[Item] = set()
    pending = list(results)
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            pending += item.operands
            yield item


def analyse(
    joint: Joint, batches: Mapping[int, int | Sliced], num_samples: int, wanted: set[int] | None = None,
    origin: Origin | None = None,
) -> Facts:  # fmt: skip
    """Type a joint graph for a cut of the batch, by leaf the dimension or the type; `wanted` selects results."""
    return replace(_Typing(joint, batches, num_samples, wanted).run(), origin=origin)
