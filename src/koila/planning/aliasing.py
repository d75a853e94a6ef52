"""Aliasing: which storage each value lies in, and which results are written over an operand.

*Takes* steps. *Gives* `Storages`, and `Overwrites`, the only place that decides whether a result takes the memory of an
operand: the schedule, the lever that lets values go and the generated code all ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from koila.planning.step import Step


class Storages:
    """The memory that the values of a schedule lie in; views share it."""

    def __init__(self, inputs: Sequence[int], steps: Iterable[Step], num_values: int) -> None:
        self.of: list[tuple[int, ...]] = [()] * num_values
        """By value, the number of the storage of each of its places."""
        self.num_bytes: list[int] = []
        """By storage, its bytes; 0 for what the schedule only reads: that is somebody else's."""
        self.value_bytes: list[int] = []
        """By storage, the bytes of the value that it was made for, also of one that is added to a sum at once."""
        self.owners: list[tuple[int, int]] = []
        """By storage, the value that made it, and the place of that value."""
        self.made_by: list[tuple[int, ...]] = [()] * num_values
        """By value, the storages that its step makes."""
        for value, num_places in enumerate(inputs):
            self.of[value] = tuple(self._new(value, place, 0) for place in range(num_places))
        self.num_outside = len(self.num_bytes)
        """Storages with smaller numbers belong to inputs."""
        for step in steps:
            self._add(step)

    def _new(self, value: int, place: int, num_bytes: int, value_bytes: int = 0) -> int:
        self.num_bytes.append(num_bytes)
        self.value_bytes.append(value_bytes)
        self.owners.append((value, place))
        return len(self.num_bytes) - 1

    def _add(self, step: Step) -> None:
        first, found = len(self.num_bytes), []
        for number, place in enumerate(step.places):
            if isinstance(place, int):
                found.append(self._new(step.value, number, step.owned_bytes(number), place))
            else:
                found.append(self.of[step.operands[place[0]]][place[1]])
        self.of[step.value] = tuple(found)
        self.made_by[step.value] = tuple(range(first, len(self.num_bytes)))


class Overwrites:
    """Decides which results are written over an operand; asked for each step, in the order in which they run."""

    def __init__(self, steps: Sequence[Step], storages: Storages) -> None:
        self.storages = storages
        self._makers = {step.value: step for step in steps}
        self._held = {
            storage
            for step in steps
            if step.holds_operands
            for operand in step.operands
            for storage in storages.of[operand]
        }
        """Storages that somebody outside may hold."""
        self._views = {step.value for step in steps if step.is_view}

    def choose(self, step: Step, is_free: Callable[[int], bool]) -> int | None:
        """The operand that the result is written over; `is_free` says whether nobody needs an operand any more."""
        for position in step.may_overwrite:
            operand = step.operands[position]
            if self._allows(step, operand) and is_free(operand):
                if operand in self._views:
                    self._views.add(step.value)
                return operand
        return None

    def _allows(self, step: Step, operand: int) -> bool:
        """Whether nothing but a later reader could stand in the way."""
        (storage,) = self.storages.of[operand]
        maker = self._makers.get(self.storages.owners[storage][0])
        # A storage that keeps a workspace alive is more than its value.
        if maker is None or storage in self._held or not maker.makes_memory or maker.retained_bytes:
            return False
        # What is handed on must not be a view: a sum would start with a copy of it.
        if operand in self._views and self.storages.of[step.value][0] in self._held:
            return False
        return not any(storage in self.storages.of[other] for other in step.operands if other != operand)
