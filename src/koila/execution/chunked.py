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
from koila.execution.loops import Loop, compile_loop, executed_names
from koila.ir.draws import Source
from koila.ir.graph import Graph
from koila.ir.tree import map_leaves
from koila.planning.plan import Phase, Plan


class CompiledPlan:
    """A plan with its loop bodies, one per phase and chunk size; holds no tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._loops: dict[tuple[int, int], Loop] = {}
        self.last_use = _last_phase(plan)

    def loop(self, number: int, chunk: int) -> Loop:
        """The body of a phase for a chunk size."""
        found = self._loops.get((number, chunk))
        if found is None:
            kept = {item for phase in self.plan.phases[:number] for item in phase.kept}
            phase = self.plan.phases[number]
            found = compile_loop(phase, kept, self.plan.facts.num_samples, chunk)
            self._loops[number, chunk] = found
        return found

    def prepare(self) -> None:
        """Compile every body, so that an illegal one is found before anything runs."""
        for number in range(len(self.plan.phases)):
            for chunk in {stop - start for start, stop in self.plan.chunks}:
                self.loop(number, chunk)


def _last_phase(plan: Plan) -> dict[Item, int]:
    """The last phase in which a whole item (or a kept buffer) is read; results live to the end."""
    last: dict[Item, int] = {}
    for number, phase in enumerate(plan.phases):
        for item in (*phase.before, *phase.body):
            last.update(dict.fromkeys((item, *item.operands), number))
    end = len(plan.phases)
    for item in plan.after:
        last.update(dict.fromkeys((item, *item.operands), end))
    last.update(dict.fromkeys((item for item in plan.facts.results if item is not None), end))
    return last


class _Run:
    """The state of one run."""

    def __init__(self, compiled: CompiledPlan, graph: Graph, inputs: Sequence[Any]) -> None:
        self.compiled, self.plan, self.graph = compiled, compiled.plan, graph
        nodes = [n for n in self.plan.facts.joint.module.graph.nodes if n.op == "placeholder"]
        self.inputs = dict(zip(nodes, inputs, strict=True))
        self.values: dict[Item, Any] = {}
        self.accumulators: dict[Item, Any] = {}

    def run(self) -> list[Any]:
        for number, phase in enumerate(self.plan.phases):
            events.emit(events.PhaseStart(number, len(self.plan.chunks)))
            self._run_whole(phase.before)
            self._run_phase(number, phase)
            self._free(number)
        self._run_whole(self.plan.after)
        return [None if item is None else self._take(item) for item in self.plan.facts.results]

    def _run_whole(self, items: Sequence[Item]) -> None:
        for item in items:
            operands = iter([self._value(operand) for operand in item.operands])
            swap = lambda leaf: next(operands) if isinstance(leaf, fx.Node) else self._static(leaf)  # noqa: B023, E731
            if item.node.op == "get_attr":
                self.values[item] = getattr(self.plan.facts.joint.module, str(item.node.target))
                continue
            args, kwargs = map_leaves(item.node.args, swap), map_leaves(item.node.kwargs, swap)
            self.values[item] = item.node.target(*args, **kwargs)  # type: ignore[operator]
        for name in executed_names(items):
            events.count(f"executed::{name}")
        events.count("nodes_executed", len(items))

    def _static(self, leaf: Any) -> Any:
        return slot_values(self.graph, iter([leaf.slot]))[0] if isinstance(leaf, SlotArgument) else leaf

    def _value(self, item: Item, opened: bool = True) -> Any:
        if item.kind == "input":
            value = self.inputs[item.node]
            return value.whole() if opened and isinstance(value, Source) else value
        if item.kind in ("finish", "gather"):
            return self._finished(item)
        return self.values[item]

    def _finished(self, barrier: Item) -> Any:
        source = barrier.operands[0]
        if source in self.values:
            return self.values[source]
        joint = self.values[source.operands[0]]
        return joint[source.index]

    def _run_phase(self, number: int, phase: Phase) -> None:
        buffers: dict[Item, torch.Tensor] = {}
        for index, (start, stop) in enumerate(self.plan.chunks):
            loop = self.compiled.loop(number, stop - start)
            wholes = [self.values[item] if item.per_chunk else self._value(item, opened=False) for item in loop.wholes]
            slots = slot_values(self.graph, iter(loop.slots))
            sink = _Sink(self, loop, buffers, start, stop)
            loop.function(wholes, start, stop, slots, sink)
            events.emit(events.ChunkEnd(number, index, stop - start))
            events.count("chunks")
            for name, times in loop.executed.items():
                events.count(f"executed::{name}", times)
            events.count("nodes_executed", sum(loop.executed.values()))
        self.values.update(buffers)
        for item in phase.targets:
            if item in self.accumulators:
                self.values[item] = _monoid(item).finish(self.accumulators.pop(item))

    def _free(self, number: int) -> None:
        """Drop whole values and buffers that no later phase reads."""
        alive = self.compiled.last_use
        for item in [item for item in self.values if alive.get(item, -1) <= number and not self._is_awaited(item, number)]:
            del self.values[item]

    def _is_awaited(self, item: Item, number: int) -> bool:
        """Whether a finished or gathered form of it is read later."""
        return any(last > number for last in self._barrier_uses().get(item, ()))

    def _barrier_uses(self) -> dict[Item, list[int]]:
        found: dict[Item, list[int]] = {}
        for item, last in self.compiled.last_use.items():
            if item.kind in ("finish", "gather"):
                source = item.operands[0]
                found.setdefault(source, []).append(last)
                if source.kind == "part":
                    found.setdefault(source.operands[0], []).append(last)
        return found

    def _take(self, item: Item) -> Any:
        return self._value(item)


class _Sink:
    """Receives the values of one chunk that are merged, gathered or kept."""

    def __init__(self, run: _Run, loop: Loop, buffers: dict[Item, torch.Tensor], start: int, stop: int) -> None:
        self.run, self.loop, self.buffers, self.start, self.stop = run, loop, buffers, start, stop

    def __call__(self, index: int, value: Any) -> None:
        item = self.loop.sinks[index]
        if isinstance(item.type, Sliced):
            self._store(item, item.type, value)
            return
        monoid, count = _monoid(item), self.stop - self.start
        accumulators = self.run.accumulators
        if item in accumulators:
            accumulators[item] = monoid.add(accumulators[item], value, count)
        else:
            accumulators[item] = monoid.start(value, count)

    def _store(self, item: Item, kind: Sliced, value: torch.Tensor) -> None:
        total = self.run.plan.facts.num_samples
        if item not in self.buffers:
            fake = item.node.meta["val"]
            self.buffers[item] = torch.empty_strided(fake.shape, _dense_stride(fake), dtype=fake.dtype, device=value.device)
        store_chunk(self.buffers[item], value, kind, self.start, self.stop, total)


def _dense_stride(fake: torch.Tensor) -> tuple[int, ...]:
    """The layout that eager's value has, unless it overlaps itself or leaves gaps."""
    order = sorted(range(fake.ndim), key=lambda dim: (-fake.stride(dim), -fake.shape[dim]))
    stride, step = [0] * fake.ndim, 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(fake.shape[dim], 1)
    return tuple(stride)


def _monoid(item: Item) -> Any:
    kind = item.type[0] if isinstance(item.type, tuple) else item.type
    assert isinstance(kind, Merged)
    return kind.monoid


def run_chunked(compiled: CompiledPlan, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    """Run a plan; results in the order of the joint graph."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _Run(compiled, graph, inputs).run()


def iterate_leaves(results: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Tensors among results."""
    return (result for result in results if isinstance(result, torch.Tensor))
