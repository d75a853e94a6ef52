"""Order: the same steps, each as soon as it lets go of more than it makes.

*Takes* a schedule. *Gives* a schedule with the same steps in an order that respects their operands. Of the steps that
could run next the one that adds the fewest bytes runs, the earliest of equals. Greedy, not optimal: use it if its peak
is lower.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from koila.planning.effort import spend
from koila.planning.schedule import Schedule
from koila.planning.step import Kind, Step


class _Ordering:
    """The state of a schedule that is put into another order."""

    def __init__(self, schedule: Schedule) -> None:
        self.steps, self.storages = schedule.steps, schedule.storages
        position = schedule.position
        self.waiting = [{position[value] for value in step.operands if value in position} for step in self.steps]
        """By position, the steps that must run before."""
        self.users: list[list[int]] = [[] for _ in self.steps]
        for place, operands in enumerate(self.waiting):
            for operand in operands:
                self.users[operand].append(place)
        self.touched = [self._touched(step) for step in self.steps]
        """By position, the storages that a step makes or reads."""
        self.readers = [0] * len(self.storages.num_bytes)
        """By storage, how many steps that have not run touch it."""
        self.places = [0] * len(self.storages.num_bytes)
        """By storage, the sum of their positions: of one step, its position."""
        for place, storages in enumerate(self.touched):
            for storage in storages:
                self.readers[storage] += 1
                self.places[storage] += place

    def _touched(self, step: Step) -> set[int]:
        values = (step.value, *step.operands)
        outside = self.storages.num_outside
        return {storage for value in values for storage in self.storages.of[value] if storage >= outside}

    def _growth(self, place: int) -> int:
        sizes, readers = self.storages.num_bytes, self.readers
        made = sum(sizes[storage] for storage in self.storages.made_by[self.steps[place].value] if readers[storage] > 1)
        freed = sum(sizes[storage] for storage in self.touched[place] if readers[storage] == 1)
        return made - freed

    def _rank(self, place: int) -> tuple[bool, int, int]:
        return self.steps[place].kind is not Kind.HAND_ON, self._growth(place), place

    def run(self) -> list[int]:
        """Positions in their new order."""
        ready = [self._rank(place) for place, operands in enumerate(self.waiting) if not operands]
        heapify(ready)
        order: list[int] = []
        done = [False] * len(self.steps)
        while ready:
            _, _, place = heappop(ready)
            if done[place]:
                continue
            done[place] = True
            order.append(place)
            for again in (*self._relieved(place), *self._released(place)):
                heappush(ready, self._rank(again))
        return order

    def _released(self, place: int) -> Iterator[int]:
        """The steps that waited for this one alone."""
        for user in self.users[place]:
            self.waiting[user].discard(place)
            if not self.waiting[user]:
                yield user

    def _relieved(self, place: int) -> Iterator[int]:
        """The steps that could run and are now the last to touch a storage: they have a better rank than before."""
        for storage in self.touched[place]:
            self.readers[storage] -= 1
            self.places[storage] -= place
            last = self.places[storage]
            if self.readers[storage] == 1 and not self.waiting[last]:
                yield last


def reorder(schedule: Schedule) -> Schedule:
    """The schedule in the order that keeps the fewest bytes, step by step."""
    spend(len(schedule.steps) / 3)
    steps = tuple(schedule.steps[place] for place in _Ordering(schedule).run())
    return schedule.with_steps(steps, tuple((Kind.RUN, step.value) for step in steps))
