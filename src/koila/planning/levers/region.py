"""Region splits: a part of a schedule runs in chunks along another axis than the batch.

*Takes* a schedule and the bytes it may use. *Gives* a schedule in which the steps around its largest value are one
step, a `SubPlan`: a plan of its own, cut by the same calculus along an axis of that value. The logits of a language
model, the hidden layer of an MLP, the scores of an attention never exist whole, without anybody naming them.

`koila.planning.levers.growth` proposes a region around the largest value at the peak; here it is proved, sized and put
in the place of its steps. Greedy, not optimal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import torch
from torch import fx

from koila import events
from koila.analysis.split import Facts, analyse
from koila.analysis.trace import Input, Joint, Traced
from koila.analysis.types import Sliced
from koila.planning.catalogue import is_sum
from koila.planning.cost import VIEW_SECONDS
from koila.planning.devices import current_rules
from koila.planning.effort import Exhausted, spend
from koila.planning.forms import forms_of
from koila.planning.levers.growth import CannotGrow, Drawing, Growth, hand_on, largest_bytes
from koila.planning.operation import Operation, OperatorWork, Ref, slice_whole
from koila.planning.peak import peak_of, project, totals
from koila.planning.phases import make_layout
from koila.planning.plan import Plan, make_plan
from koila.planning.rates import copy_seconds
from koila.planning.schedule import Schedule
from koila.planning.step import Kind, Step
from koila.planning.sub_plan import SubPlan


def _joint(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Joint:
    """The region as a program of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input{number}")
        copies[node].meta["val"] = node.meta["val"]
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda operand: copies[operand])
    graph.output(tuple(copies[node] for node in outputs))
    found = tuple(Input("leaf", number) for number in range(len(inputs)))
    return Joint(Traced(graph, {}), found, len(outputs), (), (), ())


def _absorb(nodes: dict[fx.Node, None]) -> None:
    """A sum that is only turned before it is handed on is turned in the region."""
    for node in list(nodes):
        users = [user for user in node.users if user not in nodes]
        while len(users) == 1 and getattr(users[0].target, "is_view", False):
            nodes[users[0]] = None
            users = list(users[0].users)


class _Making:
    """The schedule with a region in it, for any chunk size along the axis."""

    def __init__(self, growth: Growth) -> None:
        self.growth, self.drawing, self.schedule = growth, growth.drawing, growth.drawing.schedule
        found = {node: None for node in growth.calls if node in growth.types}
        for node in [n for n in found if isinstance(n.meta["val"], (tuple, list))]:
            found.update(dict.fromkeys(node.users))
        _absorb(found)
        self.nodes = [node for node in growth.calls if node in found]
        if any(node.target in (slice_whole, hand_on) for node in self.nodes):
            raise CannotGrow
        self.members = set(self.nodes)
        read = (operand for node in self.nodes for operand in node.all_input_nodes)
        self.inputs = list(dict.fromkeys(node for node in read if node not in self.members))
        self.outputs = [node for node in self.nodes if any(user not in self.members for user in node.users)]
        self.joint = _joint(self.nodes, self.inputs, self.outputs)
        cuts = {number: growth.entries[node] for number, node in enumerate(self.inputs) if node in growth.entries}
        self.facts: Facts = analyse(self.joint, cuts, growth.size)
        kept = make_layout(self.facts)
        self.layouts = [kept, make_layout(self.facts, lambda item: False, kept.catalogue)]

    def is_proved(self) -> bool:
        """Whether no large value is whole: neither gathered nor computed at once."""
        large = self.growth.large
        whole = [item for item in self.facts.items if not item.per_chunk and item.kind != "input"]
        fed = {id(node.meta["val"]) for node in self.inputs}
        results = [i for i in self.facts.results if i is not None]
        return self.facts.is_split and not any(
            largest_bytes(item.node) > large and id(item.node.meta["val"]) not in fed and item not in results
            for item in whole
        )

    def sub_plan(self, layout_number: int, chunk: int) -> SubPlan:
        """The region with chunks of that size."""
        spend(len(self.facts.items))
        plan, into = make_plan(self.layouts[layout_number], chunk), tuple(self._into())
        there = sum(map(largest_bytes, self.outputs))
        there += sum(
            self.schedule.sinks[index].state_bytes - largest_bytes(self.outputs[place]) for place, index in into
        )
        transient = max(0, project(plan).peak_bytes - there)
        return SubPlan(plan, into, transient, plan.seconds, _slots(plan))

    def _into(self) -> Iterator[tuple[int, int]]:
        """Results that are sums and that only the schedule's own sum reads."""
        for number, (node, item) in enumerate(zip(self.outputs, self.facts.results, strict=True)):
            users = [user for user in node.users if user not in self.members]
            if len(users) != 1 or users[0].target is not hand_on or self.schedule.chunk is None or item is None:
                continue
            (index,) = self.drawing.step[users[0]].sinks
            # The same value has the same merge inside and outside, in a wider type if it is of half precision.
            if item.kind == "finish" and is_sum(item.operands[0]) and self.schedule.sinks[index].is_sum:
                yield number, index

    def placed(self, sub_plan: SubPlan) -> tuple[Schedule, int]:
        """The schedule with the region as one step, as early as its inputs allow; and the position of that step."""
        return _Placing(self, sub_plan).run()


def _slots(plan: Plan) -> tuple[Any, ...]:
    works = (step.work for schedule in plan.schedules for step in schedule.steps if step.work is not None)
    return tuple(dict.fromkeys(argument.slot for work in works for argument in work.operation.slots))


class _Placing:
    """Puts a sub-plan in the place of its steps."""

    def __init__(self, making: _Making, sub_plan: SubPlan) -> None:
        self.making, self.sub_plan, self.schedule = making, sub_plan, making.schedule
        self.given = {number for number, _ in sub_plan.into}
        """Results that go into sums at once."""
        self.fresh = count(self.schedule.num_values)
        self.numbers: dict[int, int] = {}
        """By value of the old schedule that the region gives, its number in the new one."""
        self.steps: list[Step] = []

    def run(self) -> tuple[Schedule, int]:
        drawing, members, first = self.making.drawing, self.making.members, self.making.nodes[0]
        place = None
        for node in _sorted(drawing.calls, members, first):
            step = drawing.step[node]
            if node is first:
                place = len(self.steps)
                self._add_region()
            elif step.kind is not Kind.ADD_PRODUCT or node in drawing.value:  # Once for all nodes of a product.
                self._add(step)
        if place is None:
            raise CannotGrow  # Something outside lies between its calls.
        return self.schedule.with_steps(tuple(self.steps)), place

    def _add(self, step: Step) -> None:
        if step.kind is Kind.HAND_ON and self._is_given(step):
            return
        operands = tuple(self.numbers.get(operand, operand) for operand in step.operands)
        self.steps.append(step if operands == step.operands else replace(step, operands=operands))

    def _is_given(self, step: Step) -> bool:
        node = self.making.drawing.node[step.operands[0]]
        return any(node is self.making.outputs[number] for number in self.given)

    def _add_region(self) -> None:
        drawing, outputs = self.making.drawing, self.making.outputs
        made = next(self.fresh)
        forms = [None if number in self.given else self._form(node) for number, node in enumerate(outputs)]
        self.steps.append(self._region_step(made, forms))
        for number, node in enumerate(outputs):
            if number not in self.given:
                part = self._part(made, number, node, forms[number])
                self.steps.append(part)
                if node in drawing.value:
                    self.numbers[drawing.value[node]] = part.value
                if drawing.step[node].kind is Kind.ADD_PRODUCT:
                    self._hand_on(part, drawing.step[node])

    def _form(self, node: fx.Node) -> Any:
        step = self.making.drawing.step[node]
        if node in self.making.drawing.value or not isinstance(node.meta["val"], torch.Tensor):
            return step.work.form
        form = step.work.form  # A product that is turned before it is added to a sum.
        return replace(form, shape=form.shape[::-1], stride=form.stride[::-1])

    def _region_step(self, number: int, forms: list[Any]) -> Step:
        making, sub_plan = self.making, self.sub_plan
        operands = tuple(making.drawing.value[node] for node in making.inputs)
        operation = Operation(sub_plan, tuple(Ref(position) for position in range(len(operands))), {})
        pairs = zip(making.outputs, forms, strict=True)
        sizes = tuple(0 if form is None else self._bytes(node) for node, form in pairs)
        slack = tuple(map(current_rules().slack_bytes, sizes))
        return Step(
            number, operands, sizes, slack_bytes=slack, inside_bytes=sub_plan.transient_bytes, seconds=sub_plan.seconds,
            makes_memory=False, holds_operands=True, fills_storage=False, kind=Kind.SUB_PLAN,
            sinks=tuple(index for _, index in sub_plan.into), work=OperatorWork(operation, tuple(forms)),
        )  # fmt: skip

    def _bytes(self, node: fx.Node) -> int:
        """The bytes of the storage that a value lies in."""
        drawing, storages = self.making.drawing, self.schedule.storages
        value = drawing.value.get(node, drawing.step[node].value)
        storage = storages.of[value][0]
        is_outside = storage < storages.num_outside
        return largest_bytes(node) if is_outside else storages.value_bytes[storage]

    def _part(self, made: int, number: int, node: fx.Node, form: Any) -> Step:
        step = self.making.drawing.step[node]
        work = OperatorWork(Operation(operator.getitem, (Ref(0), number), {}), form)
        return Step(
            next(self.fresh), (made,), ((0, number),), seconds=VIEW_SECONDS, is_view=step.is_view,
            fills_storage=step.fills_storage, work=work,
        )  # fmt: skip

    def _hand_on(self, part: Step, product: Step) -> None:
        """A product of the region that is no sum there is handed on as it is."""
        num_bytes = sum(form.num_bytes for form in forms_of(part.work.form) if form is not None)
        step = Step(
            next(self.fresh), (part.value,), seconds=copy_seconds(num_bytes), holds_operands=True, kind=Kind.HAND_ON,
            sinks=product.sinks, starts_merge=not product.work.is_transposed,
        )  # fmt: skip
        self.steps.append(step)


def _sorted(calls: list[fx.Node], members: set[fx.Node], first: fx.Node) -> Iterator[fx.Node]:
    """The calls in program order, with the region at `first` standing for all its members."""
    place = {node: number for number, node in enumerate(calls)}
    unit = lambda node: first if node in members else node  # noqa: E731
    waiting: dict[fx.Node, set[fx.Node]] = {}
    for node in calls:
        operands = {unit(o) for o in node.all_input_nodes if o in place} - {unit(node)}
        waiting.setdefault(unit(node), set()).update(operands)
    users: dict[fx.Node, list[fx.Node]] = {}
    for node, operands in waiting.items():
        for operand in operands:
            users.setdefault(operand, []).append(node)
    ready = [(place[node], node) for node, operands in waiting.items() if not operands]
    heapify(ready)
    while ready:
        _, node = heappop(ready)
        yield node
        for user in users.get(node, ()):
            waiting[user].discard(node)
            if not waiting[user]:
                heappush(ready, (place[user], user))


def _give_far_readers_their_own(growth: Growth) -> Schedule:
    """Compute large values again right before readers that are far away."""
    drawing, schedule, place = growth.drawing, growth.drawing.schedule, growth.place
    makers: dict[int, list[tuple[fx.Node, fx.Node]]] = {}
    for value, readers in growth.far.items():
        first = drawing.step[min(readers, key=place.__getitem__)].value
        makers.setdefault(first, []).extend((value, reader) for reader in readers)
    fresh, steps = count(schedule.num_values), list[Step]()
    own: dict[tuple[int, int], int] = {}
    """By (value, reader), the number of the value that was computed for that reader."""
    for step in schedule.steps:
        again: dict[int, int] = {}
        for value, reader in makers.get(step.value, ()):
            for maker in _chain(value, growth):
                if maker.value not in again:
                    again[maker.value] = next(fresh)
                    operands = tuple(again.get(operand, operand) for operand in maker.operands)
                    steps.append(replace(maker, value=again[maker.value], operands=operands))
            number = drawing.value[value]
            own[number, drawing.step[reader].value] = again[number]
        operands = tuple(own.get((operand, step.value), operand) for operand in step.operands)
        steps.append(step if operands == step.operands else replace(step, operands=operands))
    return schedule.with_steps(tuple(steps))


def _chain(value: fx.Node, growth: Growth) -> list[Step]:
    """The steps that make a value out of small ones."""
    found: set[fx.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            source_is_tuple = node.target is operator.getitem
            pending += [
                o for o in node.all_input_nodes if o in growth.types and (source_is_tuple or growth.is_large(o))
            ]
    return [growth.drawing.step[node] for node in sorted(found, key=growth.place.__getitem__)]


def _grown(drawing: Drawing, value: fx.Node) -> Iterator[Growth]:
    tensor = value.meta["val"]
    if isinstance(tensor, (tuple, list)):
        tensor = next(each for each in tensor if each is not None)
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            try:
                yield Growth(drawing, value, Sliced(dim), size)
            except CannotGrow:
                continue


def _split_around(drawing: Drawing, value: int, limit: int) -> Schedule | None:
    """The schedule with a region around a value, its chunks as large as the limit allows."""
    for growth in _grown(drawing, drawing.node[value]):
        if growth.far:
            kind = growth.types[drawing.node[value]]
            again = Drawing(_give_far_readers_their_own(growth), drawing.made)
            twin = again.node[value]
            following = next((g for g in _grown(again, twin) if not g.far and g.types[twin] == kind), None)
            if following is None:
                continue
            growth = following
        try:
            making = _Making(growth)
            if making.is_proved():
                return _sized(making, limit)
        except CannotGrow:
            continue
        except Exhausted:
            raise
        except Exception as error:  # What cannot be analysed stays as it is (Rule 3).
            events.count(f"region_error::{type(error).__name__}: {error}")
    return None


_ALIKE = 1.25
"""Where the region's moment fits with no chunks at all, those that need less than this many times the least are alike:
very small ones only make more calls."""


def _sized(making: _Making, limit: int) -> Schedule:
    """The fastest chunks with which the region's own moment fits, or is a small part of it; else the fastest of those
    that need hardly more than the smallest.

    From the largest on: smaller ones are tried as long as they are faster.
    """
    sizes, step = [], making.facts.granule
    while step < making.growth.size:
        sizes.append(step)
        step *= 2
    tried: list[tuple[SubPlan, Schedule]] = []
    best: tuple[float, Schedule] | None = None
    for chunk in reversed(sizes):
        for number in range(len(making.layouts) if making.facts.num_phases > 1 else 1):
            sub_plan = making.sub_plan(number, chunk)
            if best is not None and sub_plan.seconds >= best[0]:
                return best[1]
            found, place = making.placed(sub_plan)
            tried.append((sub_plan, found))
            if totals(found)[place] <= limit or sub_plan.transient_bytes <= limit // 4:
                best = sub_plan.seconds, found
                break
    if best is not None:
        return best[1]
    most = _ALIKE * min(sub_plan.transient_bytes for sub_plan, _ in tried)
    alike = [each for each in tried if each[0].transient_bytes <= most]
    return min(alike, key=lambda each: each[0].seconds)[1]


def split_regions(schedule: Schedule, limit: int, most: int = 64) -> Iterator[Schedule]:
    """Schedules with one region after the other cut out, until one fits or nothing large can be cut."""
    threshold, made = max(limit // 32, 1 << 12), dict[Any, Any]()
    for _ in range(most):
        peak, sizes = peak_of(schedule), schedule.storages.value_bytes
        if peak.num_bytes <= limit:
            return
        largest = sorted(peak.alive, key=lambda storage: -sizes[storage])[:4]
        values = [_value_of(schedule, storage) for storage in largest if sizes[storage] > threshold]
        drawing = Drawing(schedule, made) if values else None
        tries = (_split_around(drawing, value, limit) for value in values if drawing is not None)
        found = next((each for each in tries if each is not None), None)
        if found is None:
            return
        schedule = found
        yield schedule


def _value_of(schedule: Schedule, storage: int) -> int:
    """The value that names a storage: of an operator with several results, the part."""
    value, place = schedule.storages.owners[storage]
    if isinstance(schedule.steps[schedule.position[value]].work.form, (tuple, list)):
        for step in schedule.steps:
            if step.operands == (value,) and step.places == ((0, place),) and step.work.target is operator.getitem:
                return step.value
    return value
