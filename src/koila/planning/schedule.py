"""Schedules: straight-line programs with known sizes, the form in which every lever but the chunk size works.

*Takes* frozen steps. *Gives* a frozen `Schedule`, and what follows from it, each written once: the storages of its
values, the last use of each, and which results are written over an operand. The work of one phase on one chunk is a
schedule; a section of whole items is one, too. A lever takes a schedule and gives another one: recomputation repeats
steps, order moves them, a region becomes one step, an offloaded value a pair of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from koila.planning.aliasing import Overwrites, Storages
from koila.planning.step import Kind, Move, Sink, Step

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Schedule:
    """A straight-line program."""

    inputs: tuple[int, ...]
    """For each value that it reads from outside, how many tensors it is; the values have the numbers 0, 1, …"""
    steps: tuple[Step, ...]
    """What runs, in order."""
    wholes: tuple[Hashable, ...] = ()
    """What each input stands for; a kept item stands for its buffer."""
    sinks: tuple[Sink, ...] = ()
    """What each index of a sink is."""
    chunk: int | None = None
    """Samples per chunk; None for a section that runs once."""
    forms: tuple[Any, ...] = field(default=(), repr=False)
    """The layout of each input; only the lever that cuts regions looks at it."""
    moves: tuple[Move, ...] | None = field(default=(), repr=False)
    """What another order and recomputation have made of the schedule that was built: the same moves can be made at
    other sizes. Nothing: it is as it was built; None: other levers were pulled, too."""
    pattern: object = field(default=None, repr=False)
    """What it was filled from, if it was: schedules of one pattern and with the same moves differ in sizes only."""

    @cached_property
    def num_values(self) -> int:
        """All numbers of values are smaller."""
        return max((step.value for step in self.steps), default=len(self.inputs) - 1) + 1

    @cached_property
    def position(self) -> dict[int, int]:
        """By value, the position of the step that gives it."""
        return {step.value: position for position, step in enumerate(self.steps)}

    @cached_property
    def storages(self) -> Storages:
        """The memory that its values lie in."""
        return Storages(self.inputs, self.steps, self.num_values)

    @cached_property
    def last_use(self) -> list[int]:
        """By value, the position of the last step that reads it or gives it; -1 if there is none."""
        last = [-1] * self.num_values
        for position, step in enumerate(self.steps):
            last[step.value] = position
            for operand in step.operands:
                last[operand] = position
        return last

    @cached_property
    def last_use_of_storage(self) -> list[int]:
        """By storage, the last use of any value in it."""
        last = [-1] * len(self.storages.num_bytes)
        for value, storages in enumerate(self.storages.of):
            for storage in storages:
                last[storage] = max(last[storage], self.last_use[value])
        return last

    @cached_property
    def dying(self) -> list[list[int]]:
        """By position, the values whose last use it is."""
        found: list[list[int]] = [[] for _ in self.steps]
        for position, step in enumerate(self.steps):
            used = (*step.operands, step.value) if step.gives_value else step.operands
            found[position] = [value for value in used if self.last_use[value] == position]
        return found

    @cached_property
    def overwritten(self) -> dict[int, int]:
        """By value, the operand that the step writes it over: one that nobody reads afterwards."""
        overwrites, found = Overwrites(self.steps, self.storages), dict[int, int]()
        for position, step in enumerate(self.steps):
            if step.may_overwrite:
                operand = overwrites.choose(step, lambda operand, here=position: self._is_free(operand, here))  # type: ignore[misc]
                if operand is not None:
                    found[step.value] = operand
        return found

    def _is_free(self, operand: int, position: int) -> bool:
        return all(self.last_use_of_storage[storage] == position for storage in self.storages.of[operand])

    def with_steps(self, steps: tuple[Step, ...], moves: tuple[Move, ...] | None = None) -> Schedule:
        """The same program, scheduled otherwise; by these moves, if no other lever was pulled before."""
        return replace(self, steps=steps, moves=moves if self._is_an_order else None)

    @property
    def likeness(self) -> Hashable | None:
        """Equal for schedules that are known to differ in sizes only; None: nothing is known."""
        return None if self.pattern is None or self.moves is None else (self.pattern, self.moves)

    @property
    def _is_an_order(self) -> bool:
        """Whether it is the schedule that was built, in another order at the most: values have the same numbers."""
        moves = self.moves
        return moves is not None and len(set(moves)) == len(moves) and all(kind is Kind.RUN for kind, _ in moves)

    def decisions(self) -> list[str]:
        """What runs, in order, as text: equal for equal schedules."""
        return [self._describe(step) for step in self.steps]

    def _describe(self, step: Step) -> str:
        names = [self._name(operand) for operand in step.operands]
        if step.kind is Kind.HAND_ON:
            return f"{step.kind.value} {names[0]} to {step.sinks[0]}"
        label = step.work.label if step.work is not None else step.kind.value
        sums = "".join(f" into {sink}" for sink in step.sinks)
        written = self.overwritten.get(step.value)
        over = "" if written is None else f" over {self._name(written)}"
        return f"{self._name(step.value)} = {label}({', '.join(names)}){over}{sums}"

    def _name(self, value: int) -> str:
        return f"w{value}" if value < len(self.inputs) else f"v{value - len(self.inputs)}"


def once_per_schedule(function: Callable[[Schedule], R]) -> Callable[[Schedule], R]:
    """Remember what a function finds out about a schedule, as long as the schedule is there."""
    known: WeakKeyDictionary[Schedule, R] = WeakKeyDictionary()

    @wraps(function)
    def remembered(schedule: Schedule) -> R:
        found = known.get(schedule)
        if found is None:
            found = known[schedule] = function(schedule)
        return found

    return remembered
