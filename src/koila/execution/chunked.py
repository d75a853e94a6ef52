"""The split run: phases of chunks, merges between them.

*Takes* a `Plan` and the real inputs of a program. *Gives* the results of its joint graph: values, gradients and new
values of written leaves, nothing committed yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from koila import events
from koila.analysis.split import Item
from koila.analysis.trace import SlotArgument, slot_values
from koila.analysis.types import Merged, Sliced, store_chunk
from koila.execution.loops import VIEWS, Loop, compile_loop, needs_contiguous
from koila.ir.draws import Source
from koila.ir.graph import Graph
from koila.ir.tree import map_leaves
from koila.planning.plan import Plan


class CompiledPlan:
    """A plan with its loop bodies, one per phase and chunk size; holds no tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.placeholders = [node for node in plan.facts.joint.module.graph.nodes if node.op == "placeholder"]
        self.batch_dims = _batch_dims(plan)
        """By index of the joint graph's result, the dimension of those that plainly carry the batch."""
        self.frees = _frees(plan)
        self.chunks = plan.chunks
        """(first sample, sample after the last) of each chunk that a run goes through."""
        self.projected_bytes: int | None = None
        """What the run will allocate at its peak, where a byte budget asked for it."""
        self._loops: dict[tuple[int, int], Loop] = {}

    def sampled(self) -> CompiledPlan:
        """The same plan over the chunks that differ: the first two and the last."""
        found = CompiledPlan(self.plan)
        found._loops = self._loops
        found.chunks = tuple(dict.fromkeys((*self.chunks[:2], self.chunks[-1])))
        return found

    def loop(self, number: int, chunk: int) -> Loop:
        """The body of a phase for a chunk size."""
        found = self._loops.get((number, chunk))
        if found is None:
            kept = {item for phase in self.plan.phases[:number] for item in phase.kept}
            found = compile_loop(self.plan.phases[number], kept, self.plan.facts.num_samples, chunk)
            self._loops[number, chunk] = found
        return found

    def prepare(self) -> None:
        """Compile every body, so that an illegal one is found before anything runs."""
        for number in range(len(self.plan.phases)):
            for chunk in {stop - start for start, stop in self.chunks}:
                self.loop(number, chunk)


def _batch_dims(plan: Plan) -> dict[int, int]:
    output = next(node for node in plan.facts.joint.module.graph.nodes if node.op == "output")
    found = {}
    for index, node in enumerate(output.args[0]):
        kind = plan.facts.types[node.name] if isinstance(node, fx.Node) else None
        if isinstance(kind, Sliced) and kind == Sliced(kind.dim):
            found[index] = kind.dim
    return found


def _key(item: Item) -> Item:
    """Under which item a run holds a value: a finished or gathered one stands under what was merged."""
    if item.kind not in ("finish", "gather"):
        return item
    source = item.operands[0]
    return source.operands[0] if _is_joint(source) else source


def _is_joint(item: Item) -> bool:
    """A part of results that are merged as one."""
    return item.kind == "part" and not isinstance(item.operands[0].type, tuple)


def _frees(plan: Plan) -> list[list[Item]]:
    """For each phase, the values that nobody reads after it."""
    last: dict[Item, int] = {}
    for number, phase in enumerate(plan.phases):
        last.update(dict.fromkeys((*phase.before, *phase.kept, *phase.targets), number))
        for item in (*phase.before, *phase.body):
            last.update((_key(operand), number) for operand in item.operands)
            last[item] = number
    for item in (*plan.after, *(result for result in plan.facts.results if result is not None)):
        last.update((_key(read), len(plan.phases)) for read in (item, *item.operands))
    return [[item for item, phase in last.items() if phase == number] for number in range(len(plan.phases))]


class _Run:
    """The state of one run."""

    def __init__(self, compiled: CompiledPlan, graph: Graph, inputs: Sequence[Any]) -> None:
        self.compiled, self.plan, self.graph = compiled, compiled.plan, graph
        self.inputs = dict(zip(compiled.placeholders, inputs, strict=True))
        self.values: dict[Item, Any] = {}
        """Whole values, kept buffers, finished merges."""
        self.accumulators: dict[Item, Any] = {}
        self.streamed: Item | None = None
        """The item whose chunks are handed out instead of stored."""

    def run(self) -> list[Any]:
        """Every result."""
        for number in range(len(self.plan.phases)):
            for _ in self._phase(number):
                pass
        self._run_whole(self.plan.after)
        return [None if item is None else self._value(item) for item in self.plan.facts.results]

    def stream(self, item: Item) -> Iterator[torch.Tensor]:
        """The chunks of one Sliced item of the last phase, one after the other, never gathered."""
        for number in range(len(self.plan.phases) - 1):
            for _ in self._phase(number):
                pass
        self.streamed = item
        for _ in self._phase(len(self.plan.phases) - 1):
            yield self.values.pop(item)

    def _run_whole(self, items: Sequence[Item]) -> None:
        for item in items:
            self.values[item] = self._whole_call(item)
            events.count(f"executed::{item.node.target}")
        events.count("nodes_executed", len(items))

    def _whole_call(self, item: Item) -> Any:
        node = item.node
        if node.op == "get_attr":
            return getattr(self.plan.facts.joint.module, str(node.target))
        operands = iter([self._operand(operand, node.target) for operand in item.operands])

        def swap(leaf: Any) -> Any:
            if isinstance(leaf, SlotArgument):
                return slot_values(self.graph, (leaf.slot,))[0]
            return next(operands) if isinstance(leaf, fx.Node) else leaf

        target: Any = torch.ops.aten.reshape.default if node.target in VIEWS else node.target
        return target(*map_leaves(node.args, swap), **map_leaves(node.kwargs, swap))

    def _operand(self, item: Item, target: Any) -> Any:
        value = self._value(item)
        return value.contiguous() if isinstance(value, torch.Tensor) and needs_contiguous(item, target) else value

    def _value(self, item: Item) -> Any:
        """A whole value."""
        if item.kind == "input":
            value = self.inputs[item.node]
            return value.whole() if isinstance(value, Source) else value
        found = self.values[_key(item)]
        return found[item.operands[0].index] if item.operands and _is_joint(item.operands[0]) else found

    def _read_by_loop(self, item: Item) -> Any:
        """A whole value for a loop: random sources stay packed, they are opened chunk by chunk."""
        return self.inputs[item.node] if item.kind == "input" else self._value(item)

    def _phase(self, number: int) -> Iterator[None]:
        """Run a phase; stops after each chunk."""
        phase = self.plan.phases[number]
        events.emit(events.PhaseStart(number, len(self.compiled.chunks)))
        self._run_whole(phase.before)
        for index, (start, stop) in enumerate(self.compiled.chunks):
            loop = self.compiled.loop(number, stop - start)
            wholes = [self._read_by_loop(item) for item in loop.wholes]
            slots = slot_values(self.graph, loop.slots)
            loop.function(wholes, start, stop, slots, _Sink(self, loop, start, stop))
            del wholes
            events.emit(events.ChunkEnd(number, index, stop - start))
            _count(loop)
            yield
        for item in phase.targets:
            if item in self.accumulators:
                self.values[item] = _monoid(item).finish(self.accumulators.pop(item))
        for item in self.compiled.frees[number]:
            self.values.pop(item, None)


def _count(loop: Loop) -> None:
    events.count("chunks")
    for name, times in loop.executed.items():
        events.count(f"executed::{name}", times)
    events.count("nodes_executed", sum(loop.executed.values()))


class _Sink:
    """Receives the values of one chunk that are merged, gathered or kept."""

    def __init__(self, run: _Run, loop: Loop, start: int, stop: int) -> None:
        self.run, self.loop, self.start, self.stop = run, loop, start, stop

    def __call__(self, index: int, value: Any) -> None:
        item = self.loop.sinks[index]
        if item is self.run.streamed:
            self.run.values[item] = value
            return
        if isinstance(item.type, Sliced):
            self._store(item, item.type, value)
            return
        monoid, count, accumulators = _monoid(item), self.stop - self.start, self.run.accumulators
        state = accumulators.pop(item, None)
        accumulators[item] = monoid.start(value, count) if state is None else monoid.add(state, value, count)

    def _store(self, item: Item, kind: Sliced, value: torch.Tensor) -> None:
        values, fake = self.run.values, item.node.meta["val"]
        if item not in values:
            values[item] = torch.empty_strided(fake.shape, _dense(fake), dtype=fake.dtype, device=value.device)
        store_chunk(values[item], value, kind, self.start, self.stop, self.run.plan.facts.num_samples)


def _dense(fake: torch.Tensor) -> tuple[int, ...]:
    """Strides in the order that eager's value has, without overlaps or gaps."""
    strides, shape = fake.stride(), tuple(fake.shape)
    order = sorted(range(fake.ndim), key=lambda dim: (strides[dim], shape[dim]))
    found, step = [0] * fake.ndim, 1
    for dim in order:
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def _monoid(item: Item) -> Any:
    kind = item.type[0] if isinstance(item.type, tuple) else item.type
    assert isinstance(kind, Merged)
    return kind.monoid


def run_chunked(compiled: CompiledPlan, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    """Run a plan; results in the order of the joint graph."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _Run(compiled, graph, inputs).run()


def stream_chunked(compiled: CompiledPlan, graph: Graph, inputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Run a plan for one result and hand out its chunks; a result that is not Sliced comes in one piece."""
    result = next(item for item in compiled.plan.facts.results if item is not None)
    run = _Run(compiled, graph, inputs)
    source = result.operands[0] if result.kind == "gather" else None
    if source is None or source not in compiled.plan.phases[-1].targets:
        yield next(value for value in run_chunked(compiled, graph, inputs) if value is not None)
        return
    chunks = run.stream(source)
    while True:
        # Between chunks the caller's code runs: its grad mode must be its own.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            piece = next(chunks, None)
        if piece is None:
            return
        yield piece
