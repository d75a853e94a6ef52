"""Region splits: a part of a body runs in chunks along another axis than the batch.

*Takes* a body and the bytes it may use. *Gives* a body in which the calls around its largest value are one call, a
`Region`: a plan of its own, cut by the same calculus along an axis of that value. The logits of a language model,
the hidden layer of an MLP, the scores of an attention never exist whole, without anybody naming them.

A region grows from the largest value at the peak: backwards to values that are small, by asking the rules which cut of
which operand gives the wanted cut of the result; forwards through every call that reads a large value, to results
that are small. A reader that is far away (a backward pass) gets the value computed again for itself. What has grown
is only a proposal: the analysis types the region anew and proves it, or it is not used (Rule 3).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import fx

from koila import events
from koila.analysis.chunk_rule import Call, ChunkRule
from koila.analysis.rules import rule_for
from koila.analysis.split import Facts, analyse, arguments_by_name, describe_call
from koila.analysis.trace import Input, Joint, Slot
from koila.analysis.types import WHOLE, Merged, Sliced, SplitType
from koila.analysis.uniform import operand_types
from koila.ir.tree import leaves
from koila.planning.body import SINKS, Body, is_plain_sum, sink_value, slots_in
from koila.planning.cost import body_seconds
from koila.planning.memory import peak_of, project, totals
from koila.planning.plan import Plan, make_layout, make_plan
from koila.planning.storages import num_bytes, tensors_of

_NEAR = 40
"""How many calls between two calls of a region may be drawn into it."""


@dataclass(eq=False)
class Region:
    """A part of a body that runs in chunks; the target of one call. Its results are a tuple."""

    plan: Plan
    into: tuple[tuple[int, int], ...]
    """(result, index of the sink) of sums that are added to the body's own sums."""
    transient_bytes: int
    """What it allocates at its peak beside its results."""
    sum_bytes: int
    """Bytes of the sums in `into`."""
    seconds: float
    """The expected time of a call."""
    slots: tuple[Slot, ...] = field(default=())
    __name__ = "region"

    @property
    def axis(self) -> str:
        """What it is cut along."""
        return f"{len(self.plan.chunks)} chunks of {self.plan.chunk_size} of {self.plan.facts.num_samples}"

    def __str__(self) -> str:
        return f"region of {len(self.plan.facts.joint.module.graph.nodes)} calls in {self.axis}"

    def __call__(self, *inputs: Any, **_: Any) -> Any:
        raise AssertionError("a region is compiled before it runs")


class _Fails(Exception):
    """The value cannot be cut this way."""


def _largest(node: fx.Node) -> int:
    found = [t.numel() * t.element_size() for t in tensors_of(node.meta.get("val")) if t is not None]
    return max(found, default=0)


def _forms(shape: tuple[int, ...], size: int) -> Iterator[Sliced]:
    """The ways in which an axis of that size can lie in a shape."""
    for dim, extent in enumerate(shape):
        if extent == size:
            yield Sliced(dim)
        elif size > 1 and extent and extent % size == 0:
            yield Sliced(dim, inner=extent // size)
            yield Sliced(dim, outer=extent // size)


class _Growth:
    """A region that grows around one value."""

    def __init__(self, body: Body, value: fx.Node, kind: Sliced, size: int) -> None:
        self.body, self.size = body, size
        self.calls = body.calls
        self.place = {node: number for number, node in enumerate(self.calls)}
        self.large = _largest(value) // 2
        self.types: dict[fx.Node, SplitType | tuple[SplitType, ...]] = {}
        self.entries: dict[fx.Node, Sliced] = {}
        """Values from outside that are cut, and how."""
        self.far: dict[fx.Node, set[fx.Node]] = {}
        """By large value, its readers that are too far away."""
        self._add_maker(value, kind)
        self._forwards()

    def _is_large(self, node: fx.Node) -> bool:
        return node in self.place and node.target not in SINKS and _largest(node) > self.large

    # Backwards.

    def _add_maker(self, value: fx.Node, kind: Sliced) -> None:
        """Put the calls into the region that make a value in chunks out of small values."""
        pending = [(value, kind)]
        while pending:
            node, wanted = pending.pop()
            if node in self.types:
                if self.types[node] != wanted:
                    raise _Fails
                continue
            self.types[node] = wanted
            if node.target is operator.getitem:
                source: Any = node.args[0]
                ruling = self._cut_that_gives(source, wanted, node.args[1])  # type: ignore[arg-type]
                if ruling is None:
                    raise _Fails
                self.types[source] = ruling.result
                node = source
            else:
                ruling = self._cut_that_gives(node, wanted, None)
            pending += self._remade(node, wanted) if ruling is None else self._operands(node, ruling)

    def _remade(self, node: fx.Node, wanted: Sliced) -> list[tuple[fx.Node, Sliced]]:
        """Operands of a value that any chunk can be made of: zeros, expanded scalars."""
        found = operand_types(node, wanted, self.size)
        if found is None:
            raise _Fails
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
                if self.types[member] != kind and self._is_large(member):
                    raise _Fails
            elif isinstance(kind, Sliced):
                if self._is_large(member):
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
        rule = rule_for(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
        if rule is None:
            return None
        call: Call | None = describe_call(node, lambda operand: given.get(operand, WHOLE), self.size)
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
                node for node, kind in self.types.items() if isinstance(kind, Sliced) and self._is_large(node)
            ]:
                for user in sorted(value.users, key=self.place.__getitem__):
                    if user not in self.types and (value, user) not in seen:
                        seen.add((value, user))
                        self._add_reader(value, user)
                        growing = True

    def _add_reader(self, value: fx.Node, user: fx.Node) -> None:
        if user.target is sink_value:
            return  # It is handed on: a result of the region.
        between = self._between(user)
        if between is None:
            self.far.setdefault(value, set()).add(user)
            return
        for node in (*between, user):
            if node not in self.types:
                self._add_typed(node)

    def _add_typed(self, node: fx.Node) -> None:
        if isinstance(node.target, Region):
            raise _Fails  # It adds to the sums of this body.
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
            if any(self._is_large(operand) and operand in self.types for operand in node.all_input_nodes):
                raise _Fails
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


# Making the region.


def _joint(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Joint:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input{number}")
        copies[node].meta["val"] = node.meta["val"]
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda operand: copies[operand])
        copies[node].meta = {key: value for key, value in node.meta.items() if key in ("val", "recorded")}
    graph.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(torch.nn.Module(), graph)
    found = tuple(Input("leaf", number) for number in range(len(inputs)))
    return Joint(module, found, len(outputs), (), (), ())


def _absorb(nodes: dict[fx.Node, None]) -> None:
    """A sum that is only turned before it is handed on is turned in the region."""
    for node in list(nodes):
        users = [user for user in node.users if user not in nodes]
        while len(users) == 1 and users[0].op == "call_function" and getattr(users[0].target, "is_view", False):
            nodes[users[0]] = None
            users = list(users[0].users)


class _Making:
    """The body with a region in it, for any chunk size along the axis."""

    def __init__(self, growth: _Growth) -> None:
        self.body, self.growth = growth.body, growth
        found = {node: None for node in growth.calls if node in growth.types}
        for node in [n for n in found if isinstance(n.meta["val"], (tuple, list))]:
            found.update(dict.fromkeys(node.users))
        _absorb(found)
        self.nodes = [node for node in growth.calls if node in found]
        members = set(self.nodes)
        self.inputs = list(dict.fromkeys(o for node in self.nodes for o in node.all_input_nodes if o not in members))
        self.outputs = [node for node in self.nodes if any(user not in members for user in node.users)]
        self.joint = _joint(self.nodes, self.inputs, self.outputs)
        cuts = {number: growth.entries[node] for number, node in enumerate(self.inputs) if node in growth.entries}
        self.facts: Facts = analyse(self.joint, cuts, growth.size)
        self.layouts = [make_layout(self.facts), make_layout(self.facts, lambda item: False)]

    def is_proved(self) -> bool:
        """Whether no large value is whole: neither gathered nor computed at once."""
        large = self.growth.large
        whole = [item for item in self.facts.items if not item.per_chunk and item.kind != "input"]
        fed = {id(node.meta["val"]) for node in self.inputs}
        results = [i for i in self.facts.results if i is not None]
        return self.facts.is_split and not any(
            _largest(item.node) > large and id(item.node.meta["val"]) not in fed and item not in results
            for item in whole
        )

    def region(self, layout_number: int, chunk: int) -> Region:
        layout = self.layouts[layout_number]
        plan = make_plan(layout, chunk)
        into = tuple(self._into())
        sums = sum(_largest(self.outputs[number]) for number, _ in into)
        results = sum(_largest(node) for node in self.outputs)
        bodies = [body for phase in plan.phases for body in (phase.before, *phase.loops.values())]
        slots = tuple(dict.fromkeys(slot.slot for body in (*bodies, plan.after) for slot in slots_in(body.graph)))
        once = sum(map(body_seconds, [*(phase.before for phase in plan.phases), plan.after]))
        sizes = [stop - start for start, stop in plan.chunks]
        loops = sum(body_seconds(phase.loops[size]) for phase in plan.phases for size in sizes)
        peak = project(plan).peak_bytes
        return Region(plan, into, max(0, peak - results), sums, once + loops, slots)

    def _into(self) -> Iterator[tuple[int, int]]:
        """Results that are sums and that only the body's own sum reads."""
        for number, (node, item) in enumerate(zip(self.outputs, self.facts.results, strict=True)):
            users = [user for user in node.users if user not in set(self.nodes)]
            if len(users) != 1 or users[0].target is not sink_value or self.body.chunk is None or item is None:
                continue
            index: Any = users[0].args[1]
            if item.kind == "finish" and is_plain_sum(item.operands[0]) and is_plain_sum(self.body.sinks[index]):
                yield number, index

    def placed(self, region: Region) -> tuple[Body, fx.Node]:
        """The body with the region as one call, as early as its inputs allow."""
        members, graph = set(self.nodes), fx.Graph()
        given = {number for number, _ in region.into}
        gone = {user for number in given for user in self.outputs[number].users if user.target is sink_value}
        first = self.nodes[0]
        copies: dict[fx.Node, fx.Node] = {}
        made: fx.Node | None = None
        for node in self.body.graph.nodes:
            if node.op == "placeholder":
                copies[node] = graph.node_copy(node)
        for node in _sorted(self.growth.calls, members, first, self.inputs):
            if node in gone:
                continue
            if node is not first:
                copies[node] = graph.node_copy(node, lambda operand: copies[operand])
                continue
            sink = next(n for n in self.body.graph.nodes if n.name == "sink")
            arguments = [copies[sink] if region.into else None, *(copies[each] for each in self.inputs)]
            made = graph.call_function(region, tuple(arguments))
            values = [None if n in given else each.meta["val"] for n, each in enumerate(self.outputs)]
            made.meta.update(val=tuple(values), alias=(None,) * len(values))
            for number, each in enumerate(self.outputs):
                if number not in given:
                    copies[each] = graph.call_function(operator.getitem, (made, number))
                    copies[each].meta.update(val=each.meta["val"], alias=((0, number),))
        if made is None:
            raise _Fails  # Something outside lies between its calls.
        return self.body.with_graph(graph), made


def _sorted(calls: list[fx.Node], members: set[fx.Node], first: fx.Node, inputs: list[fx.Node]) -> Iterator[fx.Node]:
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


def _give_far_readers_their_own(growth: _Growth) -> Body | None:
    """Compute large values again right before readers that are far away."""
    place, graph = growth.place, fx.Graph()
    makers: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    for value, readers in growth.far.items():
        makers.setdefault(min(readers, key=place.__getitem__), []).extend((value, reader) for reader in readers)
    copies: dict[fx.Node, fx.Node] = {}
    own: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for node in growth.body.graph.nodes:
        if node in makers:
            again: dict[fx.Node, fx.Node] = {}
            for value, reader in makers[node]:
                for maker in _chain(value, growth):
                    if maker not in again:
                        again[maker] = graph.node_copy(maker, lambda o, again=again: again.get(o, copies.get(o)))  # type: ignore[misc]
                own[value, reader] = again[value]
        swap = lambda operand, node=node: own.get((operand, node), copies.get(operand))  # noqa: E731
        copies[node] = graph.node_copy(node, swap)
    return growth.body.with_graph(graph)


def _chain(value: fx.Node, growth: _Growth) -> list[fx.Node]:
    """The calls that make a value out of small ones."""
    found: set[fx.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            source_is_tuple = node.target is operator.getitem
            pending += [
                o for o in node.all_input_nodes if o in growth.types and (source_is_tuple or growth._is_large(o))
            ]
    return sorted(found, key=growth.place.__getitem__)


def _grown(body: Body, value: fx.Node) -> Iterator[_Growth]:
    tensor = tensors_of(value.meta["val"])[0]
    assert tensor is not None
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            try:
                yield _Growth(body, value, Sliced(dim), size)
            except _Fails:
                continue


def _split_around(body: Body, value: fx.Node, limit: int) -> Body | None:
    """The body with a region around a value, its chunks as large as the limit allows."""
    for growth in _grown(body, value):
        if growth.far:
            again = _give_far_readers_their_own(growth)
            if again is None:
                continue
            twin = next(n for n in again.calls if n.target is value.target and n.meta["val"] is value.meta["val"])
            kind = growth.types[value]
            following = next((g for g in _grown(again, twin) if not g.far and g.types[twin] == kind), None)
            if following is None:
                continue
            growth = following
        try:
            making = _Making(growth)
            if making.is_proved():
                return _sized(making, limit)
        except _Fails:
            continue
        except Exception as error:  # What cannot be analysed stays as it is (Rule 3).
            events.count(f"region_error::{type(error).__name__}: {error}")
    return None


def _sized(making: _Making, limit: int) -> Body:
    """The fastest chunks with which the region's own moment fits, or is a small part of it; else the smallest.

    From the largest on: smaller ones are tried as long as they are faster.
    """
    sizes, step = [], making.facts.granule
    while step < making.growth.size:
        sizes.append(step)
        step *= 2
    found: Body | None = None
    best: tuple[float, Body] | None = None
    for chunk in reversed(sizes):
        for number in range(len(making.layouts) if making.facts.num_phases > 1 else 1):
            region = making.region(number, chunk)
            if best is not None and region.seconds >= best[0]:
                return best[1]
            found, node = making.placed(region)
            if totals(found)[found.calls.index(node)] <= limit or region.transient_bytes <= limit // 4:
                best = region.seconds, found
                break
    assert found is not None
    return found if best is None else best[1]


def split_regions(body: Body, limit: int, most: int = 64) -> Iterator[Body]:
    """Bodies with one region after the other cut out, until one fits or nothing large can be cut."""
    for _ in range(most):
        peak = peak_of(body)
        if peak.num_bytes <= limit:
            return
        largest = sorted(peak.alive, key=lambda ref: -num_bytes(*ref))[:4]
        threshold = max(limit // 32, 1 << 12)
        tries = (_split_around(body, _value_of(body, ref), limit) for ref in largest if num_bytes(*ref) > threshold)
        found = next((body for body in tries if body is not None), None)
        if found is None:
            return
        body = found
        yield body


def _value_of(body: Body, ref: tuple[fx.Node, int]) -> fx.Node:
    """The node that names a storage: of an operator with several results, the part."""
    node, place = ref
    if isinstance(node.meta["val"], (tuple, list)):
        parts = (user for user in node.users if user.target is operator.getitem and user.args[1] == place)
        return next(parts, node)
    return node
