"""Recomputation and offload inside a schedule: values are let go, and had again where they are needed next.

*Takes* a schedule and the bytes it may use. *Gives* a schedule with the same results in which some steps stand twice,
or some values are offloaded and fetched, or None if that does not suffice. The new schedule is made offline, by playing
the given one through: when a step does not fit, the value that is cheapest to have again, per byte and per step until
its next use, is let go. Greedy, not optimal; deterministic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from math import inf

from koila.planning.aliasing import Overwrites
from koila.planning.effort import spend
from koila.planning.levers.offload import can_offload, fetch_step, offload_step
from koila.planning.rates import offload_seconds
from koila.planning.schedule import Schedule, once_per_schedule
from koila.planning.step import Kind, Move, Step

_PATIENCE = 6
"""Give up when a schedule has grown this many times."""
_FAR = 64
"""So many steps are done again for one value at most."""


class _Play:
    """The state of a schedule that is played through. Values keep the numbers that they have in it."""

    def __init__(self, schedule: Schedule, limit: int, offload: bool, again: bool) -> None:
        self.schedule, self.limit, self.offload, self.again = schedule, limit, offload, again
        self.steps = {step.value: step for step in schedule.steps}
        self.storages = schedule.storages
        self.overwrites = Overwrites(schedule.steps, schedule.storages)
        self.offloaded: set[int] = set()
        self.uses: dict[int, list[int]] = {value: [] for value in self.steps}
        """By value, the positions of the steps that will need it, in order."""
        self.reads: dict[int, tuple[int, ...]] = {}
        """By value, the values of other steps that its step reads."""
        for position, step in enumerate(schedule.steps):
            self.reads[step.value] = tuple(operand for operand in step.operands if operand in self.uses)
            for operand in self.reads[step.value]:
                self.uses[operand].append(position)
        self.moves: list[Move] = []
        """What is done, in order; a step may stand in it several times."""
        self.alive: set[int] = set()
        self.holders: dict[int, set[int]] = {}
        """By storage that is alive, the values in it that are."""
        self.prices: dict[int, float] = {}
        """By storage, what it costs to compute it again, where that is known."""
        self.watched: dict[int, set[int]] = {}
        """By value, the storages whose price depends on whether it is alive."""
        self.now = 0
        """Bytes alive."""
        self.position = 0
        self.stored: set[int] = set()
        """Values that a section stores: they cannot be let go."""

    def run(self) -> list[Move] | None:
        for position, step in enumerate(self.schedule.steps):
            self.position = position
            needed = self._missing(step.value)
            for number, value in enumerate(needed):
                if not self._execute(value, needed[number:]):
                    return None
            if len(self.moves) > _PATIENCE * len(self.schedule.steps):
                return None
            for value in (*needed, *self._inputs(needed)):
                if value in self.alive and self._next_use(value, position) is None and value not in self.stored:
                    self._drop(value)
        return self.moves

    def _inputs(self, values: Iterable[int]) -> list[int]:
        return [operand for value in values for operand in self.reads[value]]

    def _missing(self, value: int) -> list[int]:
        """What must be had for a step, and the step's own value: its operands that are not there, theirs first."""
        found: dict[int, None] = {}
        pending = [(value, False)]
        while pending:
            each, opened = pending.pop()
            if each in found or (each in self.alive and each != value):
                continue
            if opened or each in self.offloaded:
                found[each] = None
            else:
                pending.append((each, True))
                pending += [(operand, False) for operand in self.reads[each]]
        return list(found)

    def _execute(self, value: int, rest: list[int]) -> bool:
        """Run a step, or fetch its value, with `rest` (the value first) still to be had for the present position."""
        step, fetched = self.steps[value], value in self.offloaded
        over = None if fetched else self._written_over(step, rest[1:])
        storages = self.storages.of[value] if fetched else () if over is not None else self.storages.made_by[value]
        need = sum(self.storages.num_bytes[each] for each in storages) + (0 if fetched else step.inside_bytes)
        if self.now + need > self.limit:
            if not self._make_room(need, rest):
                return False
            # What was let go may need the operand when it is computed again.
            over = None if fetched else self._written_over(step, rest[1:])
        self.moves.append((Kind.FETCH if fetched else Kind.RUN, value))
        if step.kind is Kind.HAND_ON:
            if self.schedule.sinks[step.sinks[0]].destination.stays:
                self.stored.add(step.operands[0])
            return True
        if over is not None:
            self._drop(over)
        self._hold(value)
        if not fetched:
            self._drop_what_only_repeats_needed(step, rest[1:])
        return True

    def _make_room(self, need: int, rest: list[int]) -> bool:
        pinned = set(self._inputs(each for each in rest if each not in self.offloaded))
        while self.now + need > self.limit:
            victim = self._victim(pinned)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _hold(self, value: int) -> None:
        self.alive.add(value)
        self._forget_prices(value)
        for storage in self.storages.of[value]:
            if storage >= self.storages.num_outside:
                holders = self.holders.setdefault(storage, set())
                if not holders:
                    self.now += self.storages.num_bytes[storage]
                holders.add(value)

    def _drop_what_only_repeats_needed(self, step: Step, rest: list[int]) -> None:
        for operand in self.reads[step.value]:
            awaited = operand in self.stored or self._next_use(operand, self.position - 1) is not None
            if operand in self.alive and not awaited and operand not in self._inputs(rest):
                self._drop(operand)

    def _written_over(self, step: Step, rest: list[int]) -> int | None:
        """The operand whose place the result takes."""
        if not step.may_overwrite:
            return None
        return self.overwrites.choose(step, lambda operand: self._is_free(operand, rest))

    def _is_free(self, operand: int, rest: list[int]) -> bool:
        """Whether nobody needs the storage of an operand after the step that runs."""
        (storage,) = self.storages.of[operand]
        if self.holders.get(storage) != {operand} or operand in self.offloaded or operand in self.stored:
            return False
        after = self.position - 1 if rest else self.position
        needed = any(operand in self.steps[each].operands for each in rest)
        return not needed and self._next_use(operand, after) is None

    def _next_use(self, value: int, after: int) -> int | None:
        uses = self.uses[value]
        place = bisect_right(uses, after)
        return uses[place] if place < len(uses) else None

    def _drop(self, value: int) -> None:
        self.alive.discard(value)
        self._forget_prices(value)
        for storage in self.storages.of[value]:
            holders = self.holders.get(storage)
            if holders is not None and value in holders:
                holders.discard(value)
                if not holders:
                    del self.holders[storage]
                    self.now -= self.storages.num_bytes[storage]

    # Letting go.

    def _victim(self, pinned: set[int]) -> int | None:
        """The storage to let go of: the cheapest to have again per byte and step, the earliest of equals."""
        spend((10 + len(self.holders)) / 64)
        best, least = -1, inf
        sizes = self.storages.num_bytes
        for storage, holders in self.holders.items():
            size = sizes[storage]
            if size == 0 or not holders.isdisjoint(pinned) or not holders.isdisjoint(self.stored):
                continue
            nexts = [use for holder in holders if (use := self._next_use(holder, self.position - 1)) is not None]
            price = self._cheapest(storage) / (size * (min(nexts, default=len(self.steps)) - self.position + 1))
            if price < least or (price == least < inf and storage < best):
                best, least = storage, price
        return None if best < 0 else best

    def _price(self, storage: int) -> float:
        """What it costs to compute a storage again; remembered until something that it depends on comes or goes."""
        found = self.prices.get(storage)
        if found is None:
            found = self.prices[storage] = self._find_price(storage)
        return found

    def _find_price(self, storage: int) -> float:
        """The seconds of its own step and of those of operands that are gone, too.

        Infinite if it cannot be had again, because a step on the way adds to a sum, or if that is a long way back: one
        value of a backward pass would bring a forward pass with it.
        """
        price, seen = 0.0, set[int]()
        pending = [self.storages.owners[storage][0], *sorted(self.holders[storage])]
        while pending:
            value = pending.pop()
            if value not in seen:
                seen.add(value)
                step = self.steps[value]
                price += step.seconds
                if len(seen) > _FAR or step.sinks:
                    return inf
                for operand in self.reads[value]:
                    self.watched.setdefault(operand, set()).add(storage)
                    if operand not in self.alive:
                        pending.append(operand)
        return price

    def _forget_prices(self, value: int) -> None:
        """A value has come or gone: who would need it has another price."""
        for storage in (*self.watched.pop(value, ()), *self.storages.of[value]):
            self.prices.pop(storage, None)

    def _file_value(self, storage: int) -> int | None:
        """The value that could be offloaded for a storage."""
        if not self.offload:
            return None
        return min((value for value in self.holders[storage] if can_offload(self.steps[value])), default=None)

    def _cheapest(self, storage: int) -> float:
        """What it costs to let go of a storage and have it again; infinite if it cannot be."""
        again = self._price(storage) if self.again else inf
        filed = inf if self._file_value(storage) is None else offload_seconds(self.storages.num_bytes[storage])
        return min(again, filed)

    def _evict(self, storage: int) -> None:
        held = self._file_value(storage)
        is_filed = held is not None and self._cheapest(storage) == offload_seconds(self.storages.num_bytes[storage])
        if held is not None and is_filed and held not in self.offloaded:
            self.moves.append((Kind.OFFLOAD, held))
            self.offloaded.add(held)
        for value in sorted(self.holders[storage]):
            following = self._next_use(value, self.position - 1)
            self._drop(value)
            if following is not None and value not in self.offloaded:
                self._need_operands(value, following)

    def _need_operands(self, value: int, position: int) -> None:
        """The operands of what was let go are needed when it is computed again."""
        pending = [value]
        while pending:
            for operand in self.reads[pending.pop()]:
                if position not in self.uses[operand]:
                    insort(self.uses[operand], position)
                    if operand not in self.alive and operand not in self.offloaded:
                        pending.append(operand)


def play_back(schedule: Schedule, moves: Sequence[Move]) -> Schedule:
    """The schedule of some moves; a step that stands in it again gives a value of another number."""
    given = {step.value: step for step in schedule.steps}
    numbers: dict[int, int] = {}
    """By value of the old schedule, the number that it has now."""
    handles: dict[int, int] = {}
    fresh, steps = count(schedule.num_values), list[Step]()
    for kind, value in moves:
        step = given[value]
        if kind is Kind.RUN:
            number = next(fresh) if value in numbers else value
            steps.append(_moved(step, number, numbers))
            numbers[value] = number
            continue
        num_bytes = schedule.storages.value_bytes[schedule.storages.of[value][0]]
        if kind is Kind.OFFLOAD:
            handles[value] = next(fresh)
            steps.append(offload_step(handles[value], step, numbers[value], num_bytes))
        else:
            numbers[value] = next(fresh)
            steps.append(fetch_step(numbers[value], step, handles[value], num_bytes))
    return schedule.with_steps(tuple(steps), tuple(moves))


def made_again(schedule: Schedule, moves: Sequence[Move]) -> Schedule | None:
    """The schedule of moves that were made at other sizes; None if they are not for this one.

    Whatever they were made for: a schedule has the same results if every step is run after its operands, and those that
    add to a sum or hand a value on once.
    """
    given = {step.value: step for step in schedule.steps}
    done, there, filed = Counter[int](), set[int](), set[int]()
    for kind, value in moves:
        step = given.get(value)
        if step is None or (kind is Kind.OFFLOAD and value not in there) or (kind is Kind.FETCH and value not in filed):
            return None
        if kind is Kind.RUN:
            if any(operand in given and operand not in there for operand in step.operands):
                return None
            done[value] += 1
        there.add(value)
        filed |= {value} if kind is Kind.OFFLOAD else set()
    if len(done) < len(given) or any(number > 1 and given[value].has_effects for value, number in done.items()):
        return None
    return play_back(schedule, moves)


def _moved(step: Step, number: int, numbers: dict[int, int]) -> Step:
    """The step with the numbers that its value and its operands have now."""
    operands = tuple(numbers.get(operand, operand) for operand in step.operands)
    if number == step.value and operands == step.operands:
        return step
    return replace(step, value=number, operands=operands, is_repeat=step.is_repeat or number != step.value)


def recompute(schedule: Schedule, limit: int, offload: bool = False, again: bool = True) -> Schedule | None:
    """The schedule within `limit` bytes, with values computed again or offloaded; None if that does not suffice."""
    if least_bytes(schedule) > limit:
        return None
    spend(len(schedule.steps))
    moves = _Play(schedule, limit, offload, again).run()
    if moves is None:
        return None
    effects = {step.value for step in schedule.steps if step.has_effects}
    runs = Counter(value for kind, value in moves if kind is Kind.RUN and value in effects)
    assert all(count == 1 for count in runs.values()), "a sum would be added to twice"
    return play_back(schedule, moves)


@once_per_schedule
def least_bytes(schedule: Schedule) -> int:
    """What the most demanding step needs by itself: operands, results, workspace, and what is stored by then."""
    storages, found, stored = schedule.storages, 0, set[int]()
    for step in schedule.steps:
        needed = {storage for value in (step.value, *step.operands) for storage in storages.of[value]} | stored
        if step.may_overwrite:
            needed -= set(storages.made_by[step.value])
        found = max(found, step.inside_bytes + sum(storages.num_bytes[storage] for storage in needed))
        if step.kind is Kind.HAND_ON and schedule.sinks[step.sinks[0]].destination.stays:
            stored.update(storages.of[step.operands[0]])
    return found
