"""Code for schedules: each becomes one flat Python function.

*Takes* a `Schedule`. *Gives* a function in which every value is freed or written over after its last use, and every
merged, kept or stored value is handed on as soon as it exists. When a value is used for the last time and what is
written over what, the schedule says: the code cannot do anything else than what was planned.

Sizes are arguments of the function, not part of its text, so that schedules of all sizes of a program share their code.
Of schedules that were filled from one pattern (`Schedule.likeness`) only the first is written: for the others, the
numbers are read off the steps that have some.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, TracebackType
from typing import Any

import torch

from koila._torch import OpOverload
from koila.analysis.marks import Slot, SlotArgument
from koila.analysis.split import Item
from koila.analysis.types import Sliced
from koila.execution.kernels import add_product, kernel_of
from koila.execution.offload import fetch, offload
from koila.ir.cache import Cache
from koila.planning.forms import Form
from koila.planning.given_memory import filler_of
from koila.planning.in_place import variant_of
from koila.planning.operation import Bound, Ref
from koila.planning.schedule import Schedule
from koila.planning.step import Destination, Kind, Step
from koila.planning.sub_plan import SubPlan


@dataclass(frozen=True, eq=False)
class Loop:
    """A compiled schedule."""

    function: Callable[..., None]
    """(whole values, first sample, sample after the last, slots, sink, numbers, memory in the arena) → nothing; the
    sink gets (index, value)."""
    numbers: tuple[Any, ...]
    """The numbers that stand in the calls, and the split types, which have sizes in them."""
    placed: tuple[tuple[int, Form], ...]
    """The results that it writes into an arena: the offset and the layout of each."""
    wholes: tuple[Item, ...]
    """Whole items that the schedule reads; kept items stand for their buffers."""
    sinks: tuple[Item, ...]
    """What each index of the sink is."""
    destinations: tuple[Destination, ...]
    """What becomes of its values."""
    slots: tuple[Slot, ...]
    """The floats that it reads, which vary from step to step of a training loop."""
    executed: Counter[str]
    """How often each operator runs per call."""
    numbered: tuple[int, ...] = ()
    """The positions of the steps with numbers among their arguments."""
    in_text: tuple[int, ...] = ()
    """The numbers that stand in the text."""
    is_for_all_sizes: bool = False
    """Whether nothing else about it may depend on sizes."""


_SMALL = 4
"""Whole numbers up to this stand in the text: they are dimensions and flags, mostly."""
_SIZED = (int, float, Sliced)
"""What is handed to the function: it differs from size to size."""
_SIZELESS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What is the same at all sizes, of what arguments are besides."""
_FILENAME = "<koila schedule>"
_RECORDED = "recorded"
"""The global in which a function has, for each line of its text, the number of the recorded call."""
_codes: Cache[CodeType] = Cache("code_cache", 2**18, lambda code: len(code.co_code))
"""By text, what Python made of it; weighed by its bytes."""


def _code(text: str) -> CodeType:
    """The code of the one function in a text."""
    return next(each for each in compile(text, _FILENAME, "exec").co_consts if isinstance(each, CodeType))


class _Writer:
    """Writes the function's text; objects that have no literal become its globals."""

    def __init__(
        self, schedule: Schedule, sub_plan_code: Callable[[SubPlan], Callable[..., Any]], offsets: Mapping[int, int]
    ) -> None:
        self.schedule, self.sub_plan_code, self.offsets = schedule, sub_plan_code, offsets
        self.placed: list[tuple[int, Form]] = []
        self.globals: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.slots: dict[Slot, int] = {}
        self.numbers: list[Any] = []
        self.in_text: list[int] = []
        self.is_for_all_sizes = True
        self.names = {value: f"w[{value}]" for value in range(len(schedule.inputs))}
        self.counts: Counter[OpOverload] = Counter()

    def write(self) -> Loop:
        schedule, lines, recorded = self.schedule, list[str](), list[int | None]()
        numbered: list[int] = []
        for number, (step, dying) in enumerate(zip(schedule.steps, schedule.dying, strict=True)):
            self.names[step.value] = f"v{number}"
            before = len(self.numbers) + len(self.in_text)
            lines.append(self._statement(step))
            numbered += [number] if len(self.numbers) + len(self.in_text) > before else []
            lines += [f"{self.names[value]} = None" for value in dying]
            recorded += [None if step.work is None else step.work.recorded] * (1 + len(dying))
        text = "def run(w, start, stop, slots, sink, n, a):\n    " + "\n    ".join(lines or ["pass"]) + "\n"
        self.globals[_RECORDED] = recorded
        function = FunctionType(_codes.get_or_add(text, lambda: _code(text)), self.globals)
        wholes: Any = schedule.wholes
        sinks: Any = tuple(sink.key for sink in schedule.sinks)
        destinations = tuple(sink.destination for sink in schedule.sinks)
        executed = Counter({str(target): number for target, number in self.counts.items()})
        numbers, placed = tuple(self.numbers), tuple(self.placed)
        return Loop(
            function, numbers, placed, wholes, sinks, destinations, tuple(self.slots), executed, tuple(numbered),
            tuple(self.in_text), self.is_for_all_sizes,
        )  # fmt: skip

    def _statement(self, step: Step) -> str:
        operands = [self.names[operand] for operand in step.operands]
        if step.kind is Kind.HAND_ON:
            return f"sink({step.sinks[0]}, {operands[0]})"
        if step.kind is Kind.ADD_PRODUCT:
            self._count(step.work.target)
            first, second = (operands[argument.position] for argument in step.work.operation.args)
            arguments = f"sink, {step.sinks[0]}, {first}, {second}, {step.work.is_transposed}"
            return f"{self._constant(add_product)}({arguments})"
        return f"{self.names[step.value]} = {self._call(step, operands)}"

    def _call(self, step: Step, operands: list[str]) -> str:
        if step.kind in (Kind.OFFLOAD, Kind.FETCH):
            return f"{self._constant(offload if step.kind is Kind.OFFLOAD else fetch)}({operands[0]})"
        operation = step.work.operation
        arguments = [self._literal(value, operands) for value in operation.args]
        if operation.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if step.kind is Kind.SUB_PLAN:
            slots = [f"slots[{self._slot(slot)}]" for slot in operation.target.slots]
            sink = "sink" if step.sinks else "None"
            code = self._constant(self.sub_plan_code(operation.target))
            return f"{code}([{', '.join(slots)}], {', '.join([sink, *arguments])})"
        self._count(operation.target)
        target = kernel_of(step.work)
        over, offset = self.schedule.overwritten.get(step.value), self.offsets.get(step.value)
        if over is not None:
            variant = variant_of(target)
            assert variant is not None
            target = variant.target
            arguments += [] if variant.out is None else [f"{variant.out}={self.names[over]}"]
        elif offset is not None:
            filler = filler_of(operation.target)
            assert filler is not None
            target = filler.target
            arguments.append(f"{filler.out}=a[{len(self.placed)}]")
            self.placed.append((offset, step.work.form))
        arguments += [f"{name}={self._literal(value, operands)}" for name, value in operation.kwargs.items()]
        return f"{self._constant(target)}({', '.join(arguments)})"

    def _count(self, target: Any) -> None:
        if isinstance(target, OpOverload):
            self.counts[target] += 1

    def _slot(self, slot: Slot) -> int:
        return self.slots.setdefault(slot, len(self.slots))

    def _literal(self, value: Any, operands: list[str]) -> str:
        kind = type(value)
        if kind is Ref:
            return operands[value.position]
        if value is None or kind is bool or kind is str:
            return repr(value)
        if kind is int and abs(value) <= _SMALL:
            self.in_text.append(value)
            return repr(value)
        if kind in _SIZED:
            self.numbers.append(value)
            return f"n[{len(self.numbers) - 1}]"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join([self._literal(item, operands) for item in value]) + "]"
        if isinstance(value, SlotArgument):
            return f"slots[{self._slot(value.slot)}]"
        self.is_for_all_sizes = self.is_for_all_sizes and (kind is Bound or kind in _SIZELESS)
        return str(value.value) if kind is Bound else self._constant(value)

    def _constant(self, value: Any) -> str:
        if id(value) not in self.known:
            self.known[id(value)] = name = f"k{len(self.globals)}"
            self.globals[name] = value
        return self.known[id(value)]


def recorded_call(traceback: TracebackType) -> int | None:
    """The number of the recorded call that the line of a frame belongs to, if it is a schedule's code."""
    frame = traceback.tb_frame
    if frame.f_code.co_filename != _FILENAME:
        return None
    found: int | None = frame.f_globals[_RECORDED][traceback.tb_lineno - 2]
    return found


_NOWHERE: Mapping[int, int] = {}
_likes: Cache[Loop] = Cache("loop_cache", 16_384, lambda loop: sum(loop.executed.values()), 16)
"""By likeness of schedules and what they write over what, the function of the first; weighed by its calls."""


def _numbers(tree: Any, outside: list[Any], in_text: list[int]) -> None:
    """The numbers among arguments, in the order in which they are written."""
    for value in tree:
        kind = type(value)
        if kind is int and abs(value) <= _SMALL:
            in_text.append(value)
        elif kind in _SIZED:
            outside.append(value)
        elif isinstance(value, (list, tuple)):
            _numbers(value, outside, in_text)


def _like(loop: Loop, schedule: Schedule) -> Loop | None:
    """The function of a schedule from that of another one that differs in sizes; None if a size stands in the text."""
    outside: list[Any] = []
    in_text: list[int] = []
    for position in loop.numbered:
        operation = schedule.steps[position].work.operation
        _numbers(operation.args, outside, in_text)
        _numbers(operation.kwargs.values(), outside, in_text)
    if tuple(in_text) != loop.in_text or len(outside) != len(loop.numbers):
        return None
    wholes: Any = schedule.wholes
    sinks: Any = tuple([sink.key for sink in schedule.sinks])
    return replace(loop, numbers=tuple(outside), wholes=wholes, sinks=sinks)


def compile_schedule(
    schedule: Schedule, sub_plan_code: Callable[[SubPlan], Callable[..., Any]], offsets: Mapping[int, int] = _NOWHERE
) -> Loop:
    """The function of a schedule; `sub_plan_code` makes those of its sub-plans, `offsets` are those in an arena."""
    likeness = None if offsets else schedule.likeness
    if likeness is None:
        return _Writer(schedule, sub_plan_code, offsets).write()
    key = (likeness, tuple(schedule.overwritten.items()), tuple([sink.destination for sink in schedule.sinks]))
    known = _likes.get(key)
    found = None if known is None else _like(known, schedule)
    if found is None:
        found = _Writer(schedule, sub_plan_code, offsets).write()
        if found.is_for_all_sizes:
            _likes.add(key, replace(found, wholes=(), sinks=()))
    return found
