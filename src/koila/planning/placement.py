"""Placement: which results of a plan lie in one planned buffer, the arena, and where.

*Takes* the schedules of a plan. *Gives* a `Placement` for each, and the `Arena`: the bytes of the buffer that all of
them share, one after the other. A result lies there if its operator can write it into given memory
(`koila.planning.given_memory`) and if nobody outside the schedule ever holds it: what is handed on, merged or kept has
memory of its own. What is written over such a result lies there, too, in the same place.

The buffer is there for the whole run, beside the most that the rest needs: a plan with an arena needs more than the
same plan without it, unless both pools are largest at the same step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from koila._scopes import Scopes
from koila.planning.arena import Block, arrange
from koila.planning.devices import current_rules
from koila.planning.given_memory import can_fill, needs_own_operands
from koila.planning.schedule import Schedule, once_per_schedule

VARIABLE = "KOILA_ARENA"
"""`on`: wherever it fits, for results of any size; `off`: never; else where a limit of the process binds and it is
worthwhile. Without a limit the heap is warm and serves as well, and an arena is made of new pages in every run."""
SMALL_BYTES = 4096
"""Smaller results stay outside: the C library has a place for them at once."""
WORTHWHILE = 0.5
"""The share of the bytes of results that must lie in an arena, so that it is used: convolutions and normalisations have
no `out` form, and two pools of memory are larger than one."""
LARGE_BYTES = 1 << 20
"""A smaller arena is not worth its preparation: the heap serves as well."""
VIEW_BYTES = 1024
"""What a tensor in the arena takes itself: objects of Python and of PyTorch."""
switched = Scopes[str]("arena")
"""What holds instead of the variable, inside a block: for tests and measurements."""


def switch() -> str:
    """Whether arenas are used: `on`, `off`, or `auto`."""
    return switched.innermost or os.environ.get(VARIABLE, "auto")


@dataclass(frozen=True, slots=True)
class Placement:
    """The results of one schedule that lie in the arena."""

    offsets: dict[int, int]
    """By value, where its bytes start; those that are written over another one are not among them."""
    num_bytes: int
    """Up to where the arena is used."""
    storages: frozenset[int]
    """The storages of the schedule that lie there."""
    placed_bytes: int
    """The bytes of all of these results, however short they live."""


@dataclass(frozen=True, eq=False)
class Arena:
    """One buffer for the results of all schedules of a plan."""

    placements: dict[Schedule, Placement]

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of the buffer."""
        return max((each.num_bytes for each in self.placements.values()), default=0)

    @property
    def num_values(self) -> int:
        """How many results lie in it, in all schedules."""
        return sum(len(each.offsets) for each in self.placements.values())

    @property
    def held_bytes(self) -> int:
        """The bytes of the buffer, and of the tensors that stand for places in it while a run goes on."""
        return self.num_bytes + VIEW_BYTES * self.num_values

    def to_dict(self) -> dict[str, Any]:
        """Its bytes, and the offsets by schedule, in the order in which they run."""
        return {"bytes": self.num_bytes, "offsets": [list(each.offsets.values()) for each in self.placements.values()]}


def arena_for(schedules: Iterable[Schedule], is_limited: bool) -> Arena | None:
    """The arena of a plan; None where it would bring nothing, or the device does not run the kernels of the CPU.

    Args:
        schedules: Those of the plan.
        is_limited: Whether the budget is one of the whole process, or what a limit of the process leaves.
    """
    if switch() == "off" or current_rules().type != "cpu" or not (is_limited or switch() == "on"):
        return None
    if switch() == "on":
        found = Arena({schedule: _all_placed(schedule) for schedule in schedules})
        return found if found.num_bytes else None
    found = Arena({schedule: _large_placed(schedule) for schedule in schedules})
    made = sum(map(_made_bytes, found.placements))
    placed = sum(each.placed_bytes for each in found.placements.values())
    return found if found.num_bytes >= LARGE_BYTES and placed >= WORTHWHILE * made else None


def _made_bytes(schedule: Schedule) -> int:
    """The bytes of all results that are not written over another one."""
    storages, overwritten = schedule.storages, schedule.overwritten
    inside = range(storages.num_outside, len(storages.num_bytes))
    return sum(storages.num_bytes[each] for each in inside if storages.owners[each][0] not in overwritten)


@once_per_schedule
def _all_placed(schedule: Schedule) -> Placement:
    return placement_of(schedule, 1)


@once_per_schedule
def _large_placed(schedule: Schedule) -> Placement:
    return placement_of(schedule, SMALL_BYTES)


def placement_of(schedule: Schedule, least_bytes: int) -> Placement:
    """Where those results of a schedule lie that have so many bytes or more."""
    chains, storages = _chains(schedule), schedule.storages
    held = _held(schedule)
    found: dict[int, Block] = {}
    placed: set[int] = set()
    for root, chain in chains.items():
        value, _ = storages.owners[root]
        position = schedule.position[value]
        size = storages.num_bytes[root]
        if size < least_bytes or not held.isdisjoint(chain) or not can_fill(schedule.steps[position]):
            continue
        found[value] = Block(size, position, max(schedule.last_use_of_storage[each] for each in chain))
        placed.update(chain)
    offsets, num_bytes = arrange(list(found.values()))
    total = sum(block.num_bytes for block in found.values())
    return Placement(dict(zip(found, offsets, strict=True)), num_bytes, frozenset(placed), total)


def _chains(schedule: Schedule) -> dict[int, list[int]]:
    """By storage that a step has made, itself and those of the results that were written over it, one by one."""
    storages, first = schedule.storages, dict[int, int]()
    found: dict[int, list[int]] = {}
    for storage in range(storages.num_outside, len(storages.num_bytes)):
        over = schedule.overwritten.get(storages.owners[storage][0])
        root = storage if over is None else first[storages.of[over][0]]
        first[storage] = root
        found.setdefault(root, []).append(storage)
    return found


def _held(schedule: Schedule) -> set[int]:
    """Storages that must be memory of their own: somebody may hold them longer than is known, or see all of them."""
    readers = (step for step in schedule.steps if needs_own_operands(step))
    return {storage for step in readers for operand in step.operands for storage in schedule.storages.of[operand]}
