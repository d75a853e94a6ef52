"""Holding: which values live from one loop over the chunks to the next, and which are computed again.

*Takes* values with their operands, seconds and bytes, loops with their targets, and a byte limit; no tensors. *Gives* a
`Holding`: for each border between two loops, the values that are held across it.

All that later loops need is held at first. While a loop does not fit, a value is let go from one use to the next: the
one whose recomputation costs least for the bytes that it frees, priced by what is held at the moment. It may be held
again afterwards, from the loop on that computes it again. Then whatever fits is taken back, dearest first, and a few
other choices are tried at random, from a fixed seed.

What is held is cut into pieces: a loop frees each piece of what it reads for the last time while it makes the pieces of
what it hands on. So a loop needs what it finds held or what it leaves, whichever is more, and not both.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from copy import copy
from dataclasses import dataclass
from math import inf
from random import Random

from koila.planning.effort import attempt, spend

QUICK, THOROUGH = 0.5, 4.0
"""How long to look for something faster than the first choice."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a chunk, for the whole batch."""

    operands: tuple[int, ...] = ()
    """The values of the same chunk that it is made from; all have smaller numbers."""
    seconds: float = 0.0
    """What it takes to compute it once."""
    num_bytes: int = 0
    """Bytes that it is made of; 0 for a view."""
    can_be_held: bool = True
    file_seconds: float | None = None
    """What it takes to write it to a file and read it again; None: it cannot be."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop over the chunks."""

    targets: tuple[int, ...]
    """The values that it must compute."""
    fixed_bytes: int = 0
    """Bytes that are there while it runs, whatever is held: sums, gradients, gathered values."""


@dataclass(frozen=True)
class Problem:
    """What can be held, and how much of it."""

    values: tuple[Value, ...]
    loops: tuple[Loop, ...]
    allowed_bytes: int
    smallest_share: float = 0.0
    """The share of the batch that the smallest chunk is."""
    share: float = 0.1
    """The share of the allowed bytes that the values of one chunk may take, where they need not take more."""


@dataclass(frozen=True)
class Holding:
    """What is held, and what follows from it."""

    held: tuple[frozenset[int], ...]
    """For each loop, the values that are held after it."""
    filed: frozenset[int]
    """Those of them that wait in files; they take no bytes."""
    computed: tuple[frozenset[int], ...]
    """For each loop, the values that it computes."""
    seconds: float
    """What all loops take, if all of the batch were one chunk."""
    loads: tuple[int, ...]
    """For each loop, the bytes that are there while it runs, whatever the size of its chunks."""
    transients: tuple[int, ...]
    """For each loop, the bytes of its values, if all of the batch were one chunk."""

    def held_before(self, loop: int) -> frozenset[int]:
        """The values that a loop finds held."""
        return self.held[loop - 1] if loop else frozenset()


@dataclass(frozen=True, slots=True)
class _Stay:
    """A value that is held from one use to the next: after the loops `first` to `last`, used by `last + 1`."""

    value: int
    first: int
    last: int


class _State:
    """What is held while the search goes on."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.values, self.loops = problem, problem.values, problem.loops
        count = len(problem.loops)
        self.held: list[set[int]] = [set() for _ in range(count)]
        self.filed: set[int] = set()
        self.computed: list[set[int]] = [set() for _ in range(count)]
        self.read: list[set[int]] = [set() for _ in range(count)]
        self.seconds = [0.0] * count
        self.version = [0] * count
        """By loop, changes with what it computes."""
        self._transients = [0] * count
        self._weights = [0] * count
        """For each loop, the bytes of what is held after it."""
        self._prices: dict[tuple[_Stay, int], float] = {}
        self._hold_all()

    def _hold_all(self) -> None:
        """Everything that a later loop reads is held from the loop on that computes it."""
        made: dict[int, int] = {}
        for number, loop in enumerate(self.loops):
            cone, read = self._cone(loop.targets, made)
            for value in read:
                for border in range(made[value], number):
                    self.held[border].add(value)
            for value in cone:
                if self.values[value].can_be_held:
                    made.setdefault(value, number)
        for number in range(len(self.loops)):
            self.close(number)

    def _cone(self, targets: Iterable[int], stop: Container[int]) -> tuple[set[int], set[int]]:
        """What must be computed for some values, and what of `stop` is read for it."""
        computed, read, pending = set[int](), set[int](), list(targets)
        while pending:
            value = pending.pop()
            if value in stop:
                read.add(value)
            elif value not in computed:
                computed.add(value)
                pending += self.values[value].operands
        return computed, read

    # One loop.

    def before(self, loop: int) -> set[int]:
        """What a loop finds held."""
        return self.held[loop - 1] if loop else set()

    def close(self, loop: int) -> None:
        """Find out again what a loop computes and reads."""
        before = self.before(loop)
        wanted = (*self.loops[loop].targets, *(self.held[loop] - before))
        self.computed[loop], self.read[loop] = self._cone(wanted, before)
        self.seconds[loop] = sum([self.values[value].seconds for value in self.computed[loop]])
        self._transients[loop] = self._transient(loop)
        self.version[loop] += 1
        spend(_LOOK * len(self.computed[loop]))

    def _transient(self, loop: int) -> int:
        """The most bytes alive of what a loop computes, for all of the batch at once."""
        values, last = self.values, dict[int, int]()
        order = sorted(self.computed[loop])
        for value in order:
            last[value] = value
            for operand in values[value].operands:
                last[operand] = value
        ending: dict[int, int] = {}
        for value in order:
            ending[last[value]] = ending.get(last[value], 0) + values[value].num_bytes
        now = most = 0
        for value in order:
            now += values[value].num_bytes
            most = max(most, now)
            now -= ending.get(value, 0)
        return most

    def _reserved(self, loop: int) -> int:
        """The bytes that the values of one chunk may take."""
        problem, transient = self.problem, self._transients[loop]
        return int(max(transient * problem.smallest_share, min(transient, problem.share * problem.allowed_bytes)))

    def _num_bytes(self, value: int) -> int:
        return 0 if value in self.filed else self.values[value].num_bytes

    def load(self, loop: int) -> int:
        """The bytes that are there while a loop runs, beside the values of a chunk."""
        found = self._weights[loop - 1] if loop else 0
        return self.loops[loop].fixed_bytes + max(found, self._weights[loop])

    def fits(self, loop: int) -> bool:
        """Whether a loop needs no more than is allowed."""
        return self.load(loop) + self._reserved(loop) <= self.problem.allowed_bytes

    def excess(self) -> dict[int, int]:
        """By the loops after which too much is held, by how many bytes: for themselves, or for those that follow."""
        fixed = [loop.fixed_bytes + self._reserved(number) for number, loop in enumerate(self.loops)]
        following = [*fixed[1:], 0]
        needed = map(sum, zip(self._weights, map(max, fixed, following), strict=True))
        allowed = self.problem.allowed_bytes
        return {loop: there - allowed for loop, there in enumerate(needed) if there > allowed}

    # Stays.

    def stay(self, value: int, border: int) -> _Stay:
        """The stay of a value that is held after loop `border`."""
        first = last = border
        while first and value in self.held[first - 1] and value not in self.read[first]:
            first -= 1
        while value in self.held[last + 1] and value not in self.read[last + 1]:
            last += 1
        return _Stay(value, first, last)

    def price(self, stay: _Stay) -> float:
        """The seconds that it costs to compute a value again at the end of its stay."""
        loop = stay.last + 1
        if stay.value in self.held[stay.last] and stay.value not in self.read[loop]:
            return 0.0  # Nobody reads it any more.
        key = stay, self.version[loop]
        if key not in self._prices:
            computed, stop = self.computed[loop], self.held[stay.last] - {stay.value}
            cone, _ = self._cone([stay.value], stop)
            fresh = cone if stay.value in computed else cone - computed
            self._prices[key] = sum([self.values[value].seconds for value in fresh])
        return self._prices[key]

    def end(self, stay: _Stay) -> None:
        """Let a value go for the time of a stay."""
        self._change(stay, set.discard)

    def take_back(self, stay: _Stay) -> None:
        """Hold a value for the time of a stay."""
        self._change(stay, set.add)

    def _change(self, stay: _Stay, change: Callable[[set[int], int], None]) -> None:
        size = self._num_bytes(stay.value)
        for border in range(stay.first, stay.last + 1):
            before = len(self.held[border])
            change(self.held[border], stay.value)
            self._weights[border] += (len(self.held[border]) - before) * size
        self.close(stay.first)
        self.close(stay.last + 1)

    def improves(self, stay: _Stay) -> bool:
        """Hold a value for the time of a stay if that fits and saves time; whether it does."""
        if not self._has_room(stay):
            return False
        before = self.total_seconds
        self.take_back(stay)
        is_faster = self.total_seconds < before * (1 - _NOTHING)
        if is_faster and all(map(self.fits, range(stay.first, stay.last + 2))):
            return True
        self.end(stay)
        return False

    def _has_room(self, stay: _Stay) -> bool:
        """Whether a value fits for the time of a stay, as far as the loop goes by that will read it."""
        size, allowed = self._num_bytes(stay.value), self.problem.allowed_bytes
        fixed = [self.loops[loop].fixed_bytes + self._reserved(loop) for loop in range(stay.first, stay.last + 1)]
        weights = self._weights[stay.first : stay.last + 1]
        following = [*fixed[1:], self.loops[stay.last + 1].fixed_bytes]
        return all(held + max(pair) + size <= allowed for held, *pair in zip(weights, fixed, following, strict=True))

    def repeats(self) -> list[_Stay]:
        """The stays that would save computing a value again: from its last use to the loop that computes it anew."""
        found, last = list[_Stay](), dict[int, int]()
        for loop, computed in enumerate(self.computed):
            for value in computed:
                if value in last and self.values[value].can_be_held:
                    found.append(_Stay(value, last[value], loop - 1))
            last.update(dict.fromkeys(computed, loop))
            last.update(dict.fromkeys(self.read[loop], loop))
        return sorted(found, key=lambda stay: (stay.value, stay.first))

    def copy(self) -> _State:
        """The same state, to be changed."""
        other = copy(self)
        other.held, other.filed = [set(held) for held in self.held], set(self.filed)
        for name in ("computed", "read", "seconds", "version", "_transients", "_weights"):
            setattr(other, name, list(getattr(self, name)))
        other._prices = {}
        return other

    def put_in_file(self, value: int) -> None:
        """Hold a value in a file, whenever it is held."""
        size = self._num_bytes(value)
        for border, held in enumerate(self.held):
            self._weights[border] -= size if value in held else 0
        self.filed.add(value)

    def weigh(self) -> None:
        """Add up again what is held after each loop."""
        self._weights = [sum([self._num_bytes(value) for value in held]) for held in self.held]

    def prune(self) -> None:
        """Let go of what nobody reads any more."""
        for border in reversed(range(len(self.loops) - 1)):
            unread = self.held[border] - self.held[border + 1] - self.read[border + 1]
            if unread:
                self.held[border] -= unread
                self.close(border)
        for loop in range(len(self.loops)):
            self.close(loop)
        self.weigh()

    @property
    def total_seconds(self) -> float:
        """What all loops take, and the files."""
        return sum(self.seconds) + sum(self.values[value].file_seconds or 0.0 for value in self.filed)

    def answer(self) -> Holding:
        """What is held now."""
        held, computed = tuple(map(frozenset, self.held)), tuple(map(frozenset, self.computed))
        loads = tuple(map(self.load, range(len(self.loops))))
        return Holding(held, frozenset(self.filed), computed, self.total_seconds, loads, tuple(self._transients))


def _let_go(state: _State) -> bool:
    """End stays until every loop fits; whether that was possible."""
    state.weigh()
    while excess := state.excess():
        best = _cheapest(state, excess)
        if best is None:
            return False
        in_file = state.values[best.value].file_seconds
        if in_file is not None and in_file < state.price(best):
            state.put_in_file(best.value)
        else:
            state.end(best)
    return True


def _cheapest(state: _State, excess: dict[int, int]) -> _Stay | None:
    """The stay whose end costs least for the bytes by which all borders come closer to what is allowed."""
    worst = max(excess, key=excess.__getitem__)
    best, least = None, inf
    for value in sorted(state.held[worst] - state.filed):
        stay, size = state.stay(value, worst), state.values[value].num_bytes
        freed = sum([min(over, size) for border, over in excess.items() if stay.first <= border <= stay.last])
        spend(_LOOK)
        price, in_file = state.price(stay), state.values[value].file_seconds
        score = (price if in_file is None else min(price, in_file)) / freed
        if score < least:
            best, least = stay, score
    return best


def _take_back(state: _State, rng: Random | None = None) -> None:
    """Hold what fits of all that is computed again, dearest first, or in an order that chance has a part in."""
    changed = True
    while changed:
        changed = False
        stays = state.repeats()
        luck = [rng.uniform(0.2, 1.0) if rng else 1.0 for _ in stays]
        sizes = [max(1, state.values[stay.value].num_bytes) for stay in stays]
        rows = zip(stays, sizes, luck, strict=True)
        prices = {stay: share * state.price(stay) / size for stay, size, share in rows}
        for stay in sorted(stays, key=prices.__getitem__, reverse=True):
            spend(_LOOK)
            changed = state.improves(stay) or changed
        state.prune()
        changed = changed and rng is None


def _exchange(state: _State, effort: float) -> _State:
    """Hold, instead of others, the values that take the most seconds to compute again; what is faster stays.

    Each is held from the first to the last loop that computes it. Letting go one by one does not find this: while a
    large value is held, what is made of it is cheap, and while that is not held, the large value is read often.
    """
    best = state

    def look() -> None:
        nonlocal best
        for value in _dearest(state):
            other = best.copy()
            for stay in other.repeats():
                if stay.value == value:
                    other.take_back(stay)
            other.prune()
            if _let_go(other) and other.total_seconds < best.total_seconds * (1 - _NOTHING):
                best = other

    attempt(effort * len(state.values), look)
    if best is not state:
        best.prune()
        _take_back(best)
    return best


def _dearest(state: _State) -> list[int]:
    """The values that are computed again, those first that cost most time."""
    lost: dict[int, float] = {}
    for stay in state.repeats():
        lost[stay.value] = lost.get(stay.value, 0.0) + state.price(stay)
    return sorted(lost, key=lost.__getitem__, reverse=True)


def _improve(state: _State) -> _State:
    """Let some values go and fill the room anew, again and again; what is faster stays."""
    rng = Random(len(state.values))
    for _ in range(min(_MOST_TRIES, _TRIES // len(state.values) + 1)):
        other = state.copy()
        border = rng.randrange(max(1, len(state.loops) - 1))
        held = sorted(other.held[border] - other.filed)
        for value in rng.sample(held, min(len(held), rng.randint(1, 4))):
            other.end(other.stay(value, border))
        if other.excess():
            continue  # What is computed instead does not fit.
        _take_back(other, rng)
        if other.total_seconds < state.total_seconds * (1 - _NOTHING):
            state = other
    return state


_TRIES, _MOST_TRIES = 3_000, 80
"""How often that is tried, for each value of a program, and at the most."""
_NOTHING = 1e-9
"""A difference of seconds that comes from rounding."""
_LOOK = 0.05
"""What it takes to look at a value, measured by what it takes to build a step of a schedule."""


def hold(problem: Problem, effort: float = THOROUGH) -> Holding | None:
    """What to hold within the allowed bytes, as fast as this search finds it; None if even nothing is too much.

    Args:
        problem: What can be held.
        effort: How long to look for something faster, measured by the number of values; `QUICK`, `THOROUGH`, or 0.

    >>> heavy, light = Value(seconds=1.0, num_bytes=100), Value((0,), seconds=0.1, num_bytes=100)
    >>> loops = Loop((1,)), Loop((2,)), Loop((3,))
    >>> values = heavy, light, Value((1,), num_bytes=1), Value((0, 1), num_bytes=1)
    >>> found = hold(Problem(values, loops, allowed_bytes=150, share=0.0))
    >>> found is not None and [sorted(held) for held in found.held], found is not None and round(found.seconds, 6)
    ([[0], [0], []], 1.3)
    """
    state = _State(problem)
    if not _let_go(state):
        return None
    state.prune()
    _take_back(state)
    if effort:
        state = _exchange(state, effort)
    return (_improve(state) if effort >= THOROUGH else state).answer()
