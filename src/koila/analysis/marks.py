"""Marks: numbers of a recorded program that vary from step to step, found again in its joint graph.

*Takes* a recorded program, and the graph that was traced with marks, numbers that occur nowhere else, in the places of
its own. *Gives* the graph with slots in the places of marks, and which numbers had to be pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from koila.ir.graph import Graph
from koila.ir.node import Node
from koila.ir.slots import is_slot, slotted_by


@dataclass(frozen=True, slots=True)
class Slot:
    """A Python float of the recorded program that stands in the joint graph."""

    node: int
    """The recorded node."""
    position: int
    """Which of its floats."""
    form: str
    """How it occurs: one of `SLOT_FORMS`."""


SLOT_FORMS: dict[str, Callable[[Any], Any]] = {
    "v": lambda v: v,
    "-v": lambda v: -v,
    "1-v": lambda v: 1.0 - v,
    "v-1": lambda v: v - 1.0,
    "v/2": lambda v: 0.5 * v,
    "1/v": lambda v: 1.0 / v,
    "1/(1-v)": lambda v: 1.0 / (1.0 - v),
}
"""How a number of the recorded program may occur in the joint graph."""


Place = tuple[int, int]
"""(recorded node, which of its slots)."""


class Marks:
    """One number that occurs nowhere else for each number of the program that may vary."""

    def __init__(self, graph: Graph, plain: frozenset[Place]) -> None:
        self.of: dict[Place, float] = {}
        self.plain = plain
        """Numbers that stand for themselves."""
        for number, node in enumerate(graph.nodes):
            for position, value in enumerate(node.slots):
                count = len(self.of) + 1
                mark = 0.4142135623 + 1e-7 * count if type(value) is float else 7_368_787 + count
                self.of[number, position] = value if (number, position) in plain else mark
        self.forms: dict[Any, Slot] = {}
        for place, mark in self.of.items():
            if place in plain:
                continue
            for name, form in SLOT_FORMS.items():
                if type(mark) is float or name in ("v", "-v"):
                    self.forms[form(mark)] = Slot(*place, name)

    def lookup(self, number: int, node: Node, lookup: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What stands for the arguments of recorded call `number`: marks for its numbers, else what `lookup` says."""
        if not node.slots:
            return lookup
        marks = iter([self.of[number, position] for position in range(len(node.slots))])
        slotted = slotted_by(node.func)
        return lambda leaf: next(marks) if is_slot(leaf, slotted) else lookup(leaf)


def place_slots(
    graph: fx.Graph, marks: Marks, recorded: Graph
) -> tuple[tuple[tuple[int, int, float], ...], frozenset[Place]]:
    """Turn marks in arguments into slots.

    Returns:
        The numbers that occur nowhere, which are pinned to their values, and those from which other numbers were
        computed: the trace is of no use.
    """
    found: set[tuple[int, int]] = set()
    others: set[float] = set()

    def swap(argument: Any) -> Any:
        slot = marks.forms.get(argument) if type(argument) in (float, int) else None
        if slot is None:
            others.update([argument] if type(argument) is float else [])
            return argument
        found.add((slot.node, slot.position))
        return FloatSlot(slot) if type(argument) is float else IntSlot(slot)

    if marks.of:
        for node in graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), swap)
    spoiled = frozenset(p for p, mark in marks.of.items() if p not in marks.plain and _stands_in(mark, others))
    missing = [place for place in marks.of if place not in found]
    return tuple((n, position, recorded.nodes[n].slots[position]) for n, position in missing), spoiled


def _stands_in(mark: float, numbers: set[float]) -> bool:
    """Whether one of some numbers is a multiple or a part of a mark: then it was computed from it in another way."""
    pairs = ((form, number) for number in numbers if number for form in (mark, 1.0 - mark))
    ratios = (ratio for form, number in pairs for ratio in (form / number, number / form))
    return any(1 <= abs(ratio) < 1e6 and abs(ratio - round(ratio)) < 1e-9 for ratio in ratios)


class SlotArgument:
    """A slot among the arguments of a node: a number for everything that only looks."""

    slot: Slot


class FloatSlot(SlotArgument, float):
    """A slot for a float."""

    def __new__(cls, slot: Slot) -> FloatSlot:
        made = super().__new__(cls, 0.375)
        made.slot = slot
        return made


class IntSlot(SlotArgument, int):
    """A slot for a whole number."""

    def __new__(cls, slot: Slot) -> IntSlot:
        made = super().__new__(cls, 7)
        made.slot = slot
        return made


def slot_values(graph: Graph, slots: Sequence[Slot]) -> list[float]:
    """The numbers of this step."""
    return [SLOT_FORMS[slot.form](graph.nodes[slot.node].slots[slot.position]) for slot in slots]
