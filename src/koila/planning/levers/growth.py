"""Growing a region: which steps around a large value could run in chunks along an axis of that value.

*Takes* a schedule, drawn as an FX graph for the rules of the analysis, a value in it and an axis. *Gives* the nodes of
the region with their split types, or `CannotGrow`. A region grows backwards to values that are small, by asking the
rules which cut of which operand gives the wanted cut of the result; forwards through every call that reads a large
value, to results that are small. A reader that is far away (a backward pass) is noted: it gets the value computed again
for itself. What has grown is only a proposal: the analysis types the region anew and proves it, or it is not used
(Rule 3).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from koila._torch import OpOverload
from koila._torch.graphs import add_node
from koila.analysis.chunk_rule import Call, ChunkRule
from koila.analysis.rules import rule_for
from koila.analysis.rules.reduce import chunk_moments
from koila.analysis.split import arguments_by_name, describe_call, operand_as
from koila.analysis.types import WHOLE, Merged, Sliced, SplitType
from koila.analysis.uniform import operand_types
from koila.ir.tree import leaves
from koila.planning.effort import spend
from koila.planning.forms import meta_tree
from koila.planning.operation import Bound
from koila.planning.schedule import Schedule
from koila.planning.step import Kind, Step

aten = torch.ops.aten
_NEAR = 40
"""How many calls between two calls of a region may be drawn into it."""


class CannotGrow(Exception):
    """The value cannot be cut this way."""


def hand_on(*_: Any) -> None:
    """Stands in a drawing for handing a value on, or for adding it to a sum."""


def closed(*_: Any) -> None:
    """Stands in a drawing for what no region can hold: another region, or a value that is offloaded."""


_CLOSED = (Kind.SUB_PLAN, Kind.OFFLOAD, Kind.FETCH)


class Drawing:
    """A schedule as an FX graph: the form in which the rules of the analysis can be asked about it."""

    def __init__(self, schedule: Schedule, made: dict[Any, Any] | None = None) -> None:
        spend(len(schedule.steps))
        self.schedule, self.graph = schedule, fx.Graph()
        self.made: dict[Any, Any] = {} if made is None else made
        """By work of a step, its value; drawings of like schedules share them."""
        self.node: dict[int, fx.Node] = {}
        """By value, the node that gives it."""
        self.value: dict[fx.Node, int] = {}
        """By node, the value that it gives."""
        self.step: dict[fx.Node, Step] = {}
        """By node, the step that it was drawn for; a product that is added to a sum has several nodes."""
        for number, form in enumerate(schedule.forms):
            node = add_node(self.graph, "placeholder", f"w{number}", (), {}, f"w{number}")
            self._name(node, number, meta_tree(form))
        for step in schedule.steps:
            self._draw(step)
        self.calls = list(self.step)
        """The nodes that run, in order."""

    def _name(self, node: fx.Node, value: int, meta: Any) -> None:
        node.meta["val"] = meta
        self.node[value], self.value[node] = node, value

    def _add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return add_node(self.graph, "call_function", target, args, kwargs or {}, f"v{len(self.step)}")

    def _draw(self, step: Step) -> None:
        operands = [self.node[operand] for operand in step.operands]
        if step.kind is Kind.HAND_ON:
            self.step[self._add(hand_on, (operands[0],))] = step
            return
        work = step.work
        bounds = {bound.value: 0 for bound in Bound}
        if step.kind in _CLOSED:
            node = self._add(closed, tuple(operands))
        else:
            args, kwargs = work.operation.applied(operands, **bounds)
            # Rules are those of operators; a region finds its moments in its own way.
            target = aten.var_mean.correction if work.operation.target is chunk_moments else work.operation.target
            node = self._add(target, args, kwargs)
        if work not in self.made:  # Steps that repeat a call have the same value.
            self.made[work] = meta_tree(work.form)
        self._name(node, step.value, self.made[work])
        node.meta["recorded"] = work.recorded
        self.step[node] = step
        if step.kind is Kind.ADD_PRODUCT:
            self._draw_sum(step, node)

    def _draw_sum(self, step: Step, node: fx.Node) -> None:
        if step.work.is_transposed:
            turned = self._add(aten.t.default, (node,))
            turned.meta["val"] = node.meta["val"].t()
            self.step[turned] = step
            node = turned
        self.step[self._add(hand_on, (node,))] = step


def largest_bytes(node: fx.Node) -> int:
    """The bytes of the largest tensor that a node gives."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return max((t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor)), default=0)


def _forms(shape: tuple[int, ...], size: int) -> Iterator[Sliced]:
    """The ways in which an axis of that size can lie in a shape."""
    for dim, extent in enumerate(shape):
        if extent == size:
            yield Sliced(dim)
        elif size > 1 and extent and extent % size == 0:
            yield Sliced(dim, inner=extent // size)
            yield Sliced(dim, outer=extent // size)


class Growth:
    """A region that grows around one value."""

    def __init__(self, drawing: Drawing, value: fx.Node, kind: Sliced, size: int) -> None:
        self.drawing, self.size = drawing, size
        self.calls = drawing.calls
        self.place = {node: number for number, node in enumerate(self.calls)}
        self.large = largest_bytes(value) // 2
        self.types: dict[fx.Node, SplitType | tuple[SplitType, ...]] = {}
        self.entries: dict[fx.Node, Sliced] = {}
        """Values from outside that are cut, and how."""
        self.far: dict[fx.Node, set[fx.Node]] = {}
        """By large value, its readers that are too far away."""
        self._add_maker(value, kind)
        self._forwards()

    def is_large(self, node: fx.Node) -> bool:
        return node in self.place and node.target is not hand_on and largest_bytes(node) > self.large

    # Backwards.

    def _add_maker(self, value: fx.Node, kind: Sliced) -> None:
        """Put the calls into the region that make a value in chunks out of small values."""
        pending = [(value, kind)]
        while pending:
            node, wanted = pending.pop()
            if node in self.types:
                if self.types[node] != wanted:
                    raise CannotGrow
                continue
            self.types[node] = wanted
            if node.target is operator.getitem:
                source: Any = node.args[0]
                ruling = self._cut_that_gives(source, wanted, node.args[1])  # type: ignore[arg-type]
                if ruling is None:
                    raise CannotGrow
                self.types[source] = ruling.result
                node = source
            else:
                ruling = self._cut_that_gives(node, wanted, None)
            pending += self._remade(node, wanted) if ruling is None else self._operands(node, ruling)

    def _remade(self, node: fx.Node, wanted: Sliced) -> list[tuple[fx.Node, Sliced]]:
        """Operands of a value that any chunk can be made of: zeros, expanded scalars."""
        found = operand_types(node, wanted, self.size)
        if found is None:
            raise CannotGrow
        return self._enter(zip(node.all_input_nodes, found[1], strict=True))

    def _operands(self, node: fx.Node, ruling: ChunkRule) -> list[tuple[fx.Node, Sliced]]:
        """Large operands that must be made in chunks, too; small ones are cut where they enter."""
        pairs: list[tuple[Any, Any]] = []
        for name, value in arguments_by_name(node).items():
            required = ruling.operands.get(name, WHOLE)
            members = list(leaves(value))
            pairs += zip(members, required if isinstance(required, tuple) else (required,) * len(members), strict=True)
        return self._enter(pairs)

    def _enter(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[fx.Node, Sliced]]:
        found: list[tuple[fx.Node, Sliced]] = []
        for member, kind in pairs:
            if not isinstance(member, fx.Node):
                continue
            if member in self.types:
                if self.types[member] != kind and self.is_large(member):
                    raise CannotGrow
            elif isinstance(kind, Sliced):
                if self.is_large(member):
                    found.append((member, kind))
                else:
                    self.entries.setdefault(member, kind)
        return found

    def _cut_that_gives(self, node: fx.Node, wanted: Sliced, index: int | None) -> ChunkRule | None:
        """The cut of operands whose result is cut as wanted: the rules, asked backwards."""
        given = {o: t for o in node.all_input_nodes if isinstance(t := self.types.get(o), (Sliced, Merged))}
        if given:
            ruling = self._ruling(node, given)
            if ruling is not None and _result(ruling, index) == wanted:
                return ruling
        for operand in node.all_input_nodes:
            value = operand.meta.get("val")
            if isinstance(value, torch.Tensor) and operand not in given:
                for kind in _forms(tuple(value.shape), self.size):
                    ruling = self._ruling(node, {**given, operand: kind})
                    if ruling is not None and _result(ruling, index) == wanted:
                        return ruling
        return None

    def _ruling(self, node: fx.Node, given: dict[fx.Node, Any]) -> ChunkRule | None:
        rule = rule_for(node.target) if isinstance(node.target, OpOverload) else None
        if rule is None:
            return None
        described = lambda operand: operand_as(operand, given.get(operand, WHOLE))  # noqa: E731
        call: Call | None = describe_call(node, arguments_by_name(node), described, self.size)
        try:
            return None if call is None else rule(call)
        except Exception:
            return None

    # Forwards.

    def _forwards(self) -> None:
        seen: set[tuple[fx.Node, fx.Node]] = set()
        growing = True
        while growing:
            growing = False
            for value in [
                node for node, kind in self.types.items() if isinstance(kind, Sliced) and self.is_large(node)
            ]:
                for user in sorted(value.users, key=self.place.__getitem__):
                    if user not in self.types and (value, user) not in seen:
                        seen.add((value, user))
                        self._add_reader(value, user)
                        growing = True

    def _add_reader(self, value: fx.Node, user: fx.Node) -> None:
        if user.target is hand_on:
            return  # It is handed on: a result of the region.
        between = self._between(user)
        if between is None:
            self.far.setdefault(value, set()).add(user)
            return
        for node in (*between, user):
            if node not in self.types:
                self._add_typed(node)

    def _add_typed(self, node: fx.Node) -> None:
        if node.target is closed:
            raise CannotGrow  # A sub-plan adds to the sums of this schedule.
        if node.target is operator.getitem:
            kinds = self.types[node.args[0]]  # type: ignore[index]
            self.types[node] = kinds[node.args[1]] if isinstance(kinds, tuple) else kinds  # type: ignore[index]
            return
        given = {o: self.types[o] for o in node.all_input_nodes if o in self.types}
        if all(kind == WHOLE for kind in given.values()):
            self.types[node] = WHOLE
            return
        given.update({o: kind for o, kind in self.entries.items() if o in node.all_input_nodes and o not in given})
        ruling = self._ruling(node, {o: k for o, k in given.items() if not isinstance(k, tuple)})
        if ruling is None:
            if any(self.is_large(operand) and operand in self.types for operand in node.all_input_nodes):
                raise CannotGrow
            self.types[node] = WHOLE
            return
        self.types[node] = ruling.result
        for operand, kind in self._operands(node, ruling):
            self._add_maker(operand, kind)

    def _between(self, user: fx.Node) -> list[fx.Node] | None:
        """Calls on a way from the region to a reader; None if there are too many: the reader is far."""
        first = min(self.place[node] for node in self.types)
        before: set[fx.Node] = set()
        pending = [user]
        while pending:
            for operand in pending.pop().all_input_nodes:
                if operand in self.place and self.place[operand] > first and operand not in before:
                    before.add(operand)
                    pending.append(operand)
        after: set[fx.Node] = set()
        found: list[fx.Node] = []
        for node in self.calls[first : self.place[user]]:
            if node in self.types or any(o in after for o in node.all_input_nodes):
                after.add(node)
                if node in before and node not in self.types:
                    found.append(node)
        return found if len(found) <= _NEAR else None


def _result(ruling: ChunkRule, index: int | None) -> Any:
    if index is None:
        return ruling.result
    return ruling.result[index] if isinstance(ruling.result, tuple) else ruling.result
