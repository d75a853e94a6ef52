"""The split run: phases of chunks, merges between them.

*Takes* a `Plan` and the real inputs of a program. *Gives* the results of its joint graph: values, gradients and new
values of written leaves, nothing committed yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from koila import events
from koila.analysis.marks import Slot, slot_values
from koila.analysis.split import Facts, Item
from koila.analysis.types import Merged, Sliced, store_chunk
from koila.execution.arena_memory import ArenaMemory
from koila.execution.codegen import Loop, compile_schedule
from koila.execution.offload import Files, Pieces, empty_in_file
from koila.execution.pieces import Held
from koila.ir.ambient import without_autocast
from koila.ir.draws import Source
from koila.ir.graph import Graph
from koila.planning.forms import Form
from koila.planning.peak import Projection
from koila.planning.phases import is_joint, key_of
from koila.planning.placement import Arena, switch
from koila.planning.plan import Plan, stream_source
from koila.planning.schedule import Schedule
from koila.planning.step import Destination
from koila.planning.sub_plan import SubPlan

Floats = Callable[[Sequence[Slot]], list[float]]
"""The floats of this step."""


class CompiledPlan:
    """A plan with the code of its sections and loops, one per phase and chunk size; holds no tensors."""

    def __init__(self, plan: Plan, facts: Facts | None = None) -> None:
        self.plan = plan
        self.placeholders = [node for node in plan.facts.joint.module.graph.nodes if node.op == "placeholder"]
        self.batch_dims = (facts or plan.facts).batch_dims
        """By index of the joint graph's result, the dimension of those that plainly carry the batch: known from `facts`
        of the program when the plan does not cut it."""
        self.projected_bytes: int | None = None
        """What the run will allocate at its peak, where a byte budget asked for it."""
        self.projection: Projection | None = None
        self.files: Files | None = None
        """Where values wait that its runs offload, from its first run on."""
        self._loops: dict[tuple[Schedule, bool], Loop] = {}

    def code(self, schedule: Schedule, arena: Arena | None) -> Loop:
        """The function of a section or of a loop."""
        key = (schedule, arena is not None)
        found = self._loops.get(key)
        if found is None:
            offsets = {} if arena is None else arena.placements[schedule].offsets
            found = self._loops[key] = compile_schedule(schedule, SubPlanCode, offsets)
        return found


class _Run:
    """The state of one run."""

    def __init__(self, compiled: CompiledPlan, floats: Floats, inputs: Sequence[Any], inner: bool = False) -> None:
        self.compiled, self.plan, self.floats = compiled, compiled.plan, floats
        self.inner = inner
        """Whether it is a sub-plan of another run."""
        self.inputs = dict(zip(compiled.placeholders, inputs, strict=True))
        self.values: dict[Item, Any] = {}
        """Whole values, kept buffers, finished merges."""
        self.accumulators: dict[Item, Any] = {}
        self.unfinished: frozenset[Item] = frozenset()
        """Merges that somebody else finishes."""
        self.arena = self.plan.arena if switch() != "off" else None
        self.memory = None if self.arena is None else ArenaMemory(self.arena.num_bytes)
        self.phase_seconds: list[float] = []
        self.streamed: Item | None = None
        """The item whose chunks are handed out instead of stored."""

    def run(self) -> list[Any]:
        """Every result."""
        for number in range(len(self.plan.phases)):
            started = time.perf_counter()
            with self._range(number):
                for _ in self._phase(number):
                    pass
            self.phase_seconds.append(time.perf_counter() - started)
        self._section(self.plan.after, len(self.plan.phases))
        return [None if item is None else self._value(item) for item in self.plan.facts.results]

    def _range(self, number: int) -> AbstractContextManager[Any]:
        """A phase is a range in the traces of `torch.profiler`; a sub-plan is part of the phase around it."""
        if self.inner:
            return nullcontext()
        return torch.profiler.record_function(f"koila: phase {number + 1} of {len(self.plan.phases)}")

    def stream(self, item: Item) -> Iterator[torch.Tensor]:
        """The chunks of one Sliced item of the last phase, one after the other, never gathered."""
        for number in range(len(self.plan.phases) - 1):
            for _ in self._phase(number):
                pass
        self.streamed = item
        for _ in self._phase(len(self.plan.phases) - 1):
            yield self.values.pop(item)

    def _section(self, schedule: Schedule, number: int) -> None:
        """Run Whole items, before a phase or after the last one."""
        code = self.compiled.code(schedule, self.arena)
        wholes = [self._whole(item) for item in code.wholes]
        for item in self.plan.frees[2 * number]:
            self.values.pop(item, None)
        self._call(code, wholes, 0, 0)

    def _call(self, code: Loop, wholes: list[Any], start: int, stop: int) -> None:
        """Run a schedule; the list is its own, it lets go of each value after its last use."""
        placed = () if self.memory is None else self.memory.of(code)
        sink = _Sink(self, code, start, stop)
        code.function(wholes, start, stop, self.floats(code.slots), sink, code.numbers, placed)
        for name, times in code.executed.items():
            events.count(f"executed::{name}", times)
        events.count("nodes_executed", sum(code.executed.values()))

    def _value(self, item: Item) -> Any:
        """A whole value."""
        found = self._whole(item)
        return found.whole() if isinstance(found, Source) else found

    def _whole(self, item: Item) -> Any:
        """A whole value as schedules read it: random sources stay packed, they are opened chunk by chunk."""
        if item.kind == "input":
            return self.inputs[item.node]
        if item.node.op == "get_attr":
            return getattr(self.plan.facts.joint.module, str(item.node.target))
        found = self.values[key_of(item)]
        return found[item.operands[0].index] if item.operands and is_joint(item.operands[0]) else found

    def _phase(self, number: int) -> Iterator[None]:
        """Run a phase; stops after each chunk."""
        phase = self.plan.phases[number]
        if not self.inner:
            events.emit(events.PhaseStart(number, len(phase.chunks)))
        self._section(phase.before, number)
        ending = self.plan.frees[2 * number + 1]
        for index, (start, stop) in enumerate(phase.chunks):
            code = self.compiled.code(phase.loops[stop - start], self.arena)
            self._call(code, [self._whole(item) for item in code.wholes], start, stop)
            for found in (self.values.get(item) for item in ending):
                if isinstance(found, Held):
                    found.let_go(stop)
            if not self.inner:
                events.emit(events.ChunkEnd(number, index, stop - start))
            events.count("region_chunks" if self.inner else "chunks")
            yield
        for item in phase.targets:
            if item in self.accumulators:
                state = self.accumulators.pop(item)
                self.values[item] = state if item in self.unfinished else _monoid(item).finish(state)
        for item in ending:
            self.values.pop(item, None)


class _Sink:
    """Receives the values of a schedule that are merged, gathered, kept or stored."""

    def __init__(self, run: _Run, code: Loop, start: int, stop: int) -> None:
        self.run, self.code, self.start, self.stop = run, code, start, stop

    def __call__(self, index: int, value: Any) -> None:
        item = self.code.sinks[index]
        if self.code.destinations[index] is Destination.KEEP:
            self.run.values.setdefault(item, Held()).add(self.start, self.stop, value)
            return
        if not item.per_chunk or item is self.run.streamed:
            self.run.values[item] = value
            return
        if isinstance(item.type, Sliced):
            self._store(item, item.type, value)
            return
        monoid, count, accumulators = _monoid(item), self.stop - self.start, self.run.accumulators
        state = accumulators.pop(item, None)
        accumulators[item] = monoid.start(value, count) if state is None else monoid.add(state, value, count)

    def take(self, index: int) -> Any:
        """The sum so far, None before the first chunk; `give` brings it back."""
        return self.run.accumulators.pop(self.code.sinks[index], None)

    def give(self, index: int, total: Any) -> None:
        """The sum with this chunk's value."""
        self.run.accumulators[self.code.sinks[index]] = total

    def _store(self, item: Item, kind: Sliced, value: torch.Tensor) -> None:
        values, fake = self.run.values, item.node.meta["val"]
        is_offloaded = item in self.run.plan.offloaded
        if is_offloaded and value.device.type != "cpu":
            values.setdefault(item, Pieces()).store(self.start, self.stop, value)
            return
        if item not in values:
            shape, stride = fake.shape, Form.of(fake).gathered.stride
            if is_offloaded:
                values[item] = empty_in_file(shape, stride, fake.dtype)
            else:
                values[item] = torch.empty_strided(shape, stride, dtype=fake.dtype, device=value.device)
        store_chunk(values[item], value, kind, self.start, self.stop, self.run.plan.facts.num_samples)


class SubPlanCode:
    """A sub-plan of a schedule, ready to run."""

    def __init__(self, sub_plan: SubPlan) -> None:
        self.sub_plan, self.compiled = sub_plan, CompiledPlan(sub_plan.plan)
        results = sub_plan.plan.facts.results
        self.sums = [(number, index, key_of(results[number])) for number, index in sub_plan.into]  # type: ignore[arg-type]

    def __call__(self, floats: list[float], sink: Any, *inputs: Any) -> list[Any]:
        """The results; sums that the schedule adds up itself are added to its own."""
        known = dict(zip(self.sub_plan.slots, floats, strict=True))
        run = _Run(self.compiled, lambda slots: [known[slot] for slot in slots], inputs, inner=True)
        run.unfinished = frozenset(item for _, _, item in self.sums)
        for _, index, item in self.sums:
            total = sink.take(index)
            if total is not None:
                run.accumulators[item] = total
        del inputs
        results = run.run()
        for number, index, _ in self.sums:
            sink.give(index, results[number])
            results[number] = None
        return results


def _monoid(item: Item) -> Any:
    kind = item.type[0] if isinstance(item.type, tuple) else item.type
    assert isinstance(kind, Merged)
    return kind.monoid


@contextmanager
def _recorded_state(graph: Graph) -> Iterator[None]:
    """What kernels read while they run, as it was when the program was recorded; what is traced has its own casts."""
    context = graph.nodes[0].context
    with context.enter_stream(), context.enter_dtype(), torch.no_grad(), without_autocast():
        yield


def run_chunked(
    compiled: CompiledPlan, graph: Graph, inputs: Sequence[Any], phase_seconds: list[float] | None = None
) -> list[Any]:
    """Run a plan; results in the order of the joint graph."""
    with _recorded_state(graph):
        run = _Run(compiled, lambda slots: slot_values(graph, slots), inputs)
        results = run.run()
    if phase_seconds is not None:
        phase_seconds += run.phase_seconds
    return results


def stream_chunked(compiled: CompiledPlan, graph: Graph, inputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Run a plan for one result and hand out its chunks; a result that is not Sliced comes in one piece."""
    run = _Run(compiled, lambda slots: slot_values(graph, slots), inputs)
    source = stream_source(compiled.plan.layout)
    if source is None:
        yield next(value for value in run_chunked(compiled, graph, inputs) if value is not None)
        return
    chunks = run.stream(source)
    while True:
        # Between chunks the caller's code runs: its grad mode must be its own.
        with _recorded_state(graph):
            piece = next(chunks, None)
        if piece is None:
            return
        yield piece
