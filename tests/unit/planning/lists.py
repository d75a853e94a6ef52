"""Schedules made by hand from sizes, and slow and simple answers to compare the planner's with.

*Takes* numbers. *Gives* `Draft`, which numbers the values, and `simulated_peak` and `best_order`, which try things out
instead of reasoning about them. No tensors, and nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from koila.planning.schedule import Schedule
from koila.planning.step import Destination, Kind, Place, Sink, Step


class Draft:
    """A schedule that is being written down."""

    def __init__(self, num_inputs: int = 0, sinks: Sequence[Sink] = (), chunk: int | None = 1) -> None:
        self.num_inputs, self.sinks, self.chunk = num_inputs, tuple(sinks), chunk
        self.steps: list[Step] = []

    def step(self, operands: Sequence[int], *places: Place, **fields: Any) -> int:
        """Add a step and give the number of its value."""
        value = self.num_inputs + len(self.steps)
        self.steps.append(Step(value, tuple(operands), tuple(places), **fields))
        return value

    def make(self, size: int, *operands: int, **fields: Any) -> int:
        """A value with bytes of its own."""
        return self.step(operands, size, seconds=1.0, **fields)

    def over(self, size: int, *operands: int, positions: tuple[int, ...] = (0,), **fields: Any) -> int:
        """A value that may be written over some of its operands."""
        return self.make(size, *operands, may_overwrite=positions, **fields)

    def view(self, operand: int, place: int = 0) -> int:
        """A view of a value."""
        return self.step([operand], (0, place), is_view=True)

    def hand_on(self, operand: int, sink: int = 0, **fields: Any) -> int:
        """Hand a value on."""
        return self.step([operand], kind=Kind.HAND_ON, sinks=(sink,), holds_operands=True, **fields)

    def add_product(self, size: int, *operands: int, sink: int = 0, **fields: Any) -> int:
        """Add a product to a sum."""
        return self.step(operands, size, kind=Kind.ADD_PRODUCT, sinks=(sink,), **fields)

    @property
    def schedule(self) -> Schedule:
        """What was written down."""
        return Schedule((1,) * self.num_inputs, tuple(self.steps), sinks=self.sinks, chunk=self.chunk)


def merge(num_bytes: int) -> Sink:
    """A sum of that many bytes."""
    return Sink("sum", Destination.MERGE, num_bytes, num_bytes, is_plain_sum=True)


def gather(num_bytes: int) -> Sink:
    """A whole value of that many bytes, to which chunks are copied."""
    return Sink("whole", Destination.GATHER, num_bytes, num_bytes)


STORE = Sink("stored", Destination.STORE)
STREAM = Sink("streamed", Destination.STREAM)


class _Memory:
    """Storages with the names that hold them, as Python holds tensors."""

    def __init__(self) -> None:
        self.size: dict[object, int] = {}
        self.holders: dict[object, set[object]] = {}

    def hold(self, storage: object, name: object, size: int = 0) -> None:
        if storage not in self.size:
            self.size[storage], self.holders[storage] = size, set()
        self.holders[storage].add(name)

    def drop(self, name: object) -> None:
        for storage in list(self.size):
            self.holders[storage].discard(name)
            if not self.holders[storage]:
                del self.size[storage], self.holders[storage]


def simulated_peak(schedule: Schedule, is_first: bool) -> int:
    """The peak of a run in which each value is let go after the last step that reads it."""
    memory, peak, begun = _Memory(), 0, set[int]()
    lies: dict[int, list[object]] = {v: [("input", v)] * places for v, places in enumerate(schedule.inputs)}
    for number, step in enumerate(schedule.steps):
        over = schedule.overwritten.get(step.value)
        made: list[object] = []
        for place, size in enumerate(step.places):
            if not isinstance(size, int):
                made.append(lies[step.operands[size[0]]][size[1]])
            elif over is not None:
                made.append(lies[over][0])
            else:
                made.append((step.value, place))
                own = 0 if step.kind is Kind.ADD_PRODUCT else size + (step.retained_bytes if place == 0 else 0)
                memory.hold(made[-1], step.value, own)
            if not _is_input(made[-1]):
                memory.hold(made[-1], step.value)
        lies[step.value] = made
        _hand_on(schedule, step, memory, lies, begun, is_first)
        peak = max(peak, sum(memory.size.values()) + step.inside_bytes)
        for value in (*step.operands, step.value):
            if not any(value in (*later.operands, later.value) for later in schedule.steps[number + 1 :]):
                memory.drop(value)
    return peak


def _is_input(storage: object) -> bool:
    return isinstance(storage, tuple) and storage[0] == "input"


def _hand_on(
    schedule: Schedule, step: Step, memory: _Memory, lies: dict[int, list[object]], begun: set[int], is_first: bool
) -> None:
    for index in step.sinks:
        sink = schedule.sinks[index]
        held = [storage for storage in lies[step.operands[0]] if not _is_input(storage)] if step.operands else []
        if sink.destination is Destination.GATHER:
            continue
        if sink.destination is Destination.STREAM or (sink.destination is Destination.STORE and is_first):
            for storage in held:
                memory.hold(storage, ("sink", index))
        elif sink.destination is Destination.MERGE and is_first and index not in begun:
            begun.add(index)
            if step.kind is Kind.HAND_ON and step.starts_merge:
                for storage in held:
                    memory.hold(storage, ("sink", index))
            else:
                memory.hold(("sum", index), ("sink", index), sink.state_bytes)


def orders(schedule: Schedule) -> Iterator[Schedule]:
    """The schedule in every order that respects its operands."""
    makers = {step.value for step in schedule.steps}
    pending: list[tuple[Step, ...]] = [()]
    while pending:
        done = pending.pop()
        if len(done) == len(schedule.steps):
            yield schedule.with_steps(done)
            continue
        known = {step.value for step in done}
        for step in schedule.steps:
            if step.value not in known and all(o in known for o in step.operands if o in makers):
                pending.append((*done, step))


def best_order(schedule: Schedule, is_first: bool = False) -> int:
    """The lowest peak of all orders."""
    return min(simulated_peak(each, is_first) for each in orders(schedule))
