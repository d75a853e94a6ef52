"""Recipes: how a plan was made at one size of a program, so that the same is done at another one.

*Takes* a `Plan`. *Gives* what levers have done to its schedules, as lists of moves that hold at any size: a plan of
another size with the same moves in its schedules is simulated as any other, and taken if it fits. Regions that were
cut out are not among them: they are looked for again. What a plan holds between phases is remembered by the places of
the items, which are the same for all sizes at which the facts are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from koila.planning.layouts import Places
from koila.planning.levers.recompute import made_again
from koila.planning.plan import Phase, Plan
from koila.planning.schedule import Schedule
from koila.planning.step import Move

Moves = tuple[tuple[tuple[int, int | None], tuple[Move, ...]], ...]
"""By section and chunk size of a plan, the moves in its schedule."""


@dataclass(frozen=True, slots=True)
class Made:
    """What levers have done at one size."""

    moves: Moves
    chunk_size: int
    plain_bytes: int
    """The peak of the plan without them."""
    peak_bytes: int

    @property
    def num_steps(self) -> int:
        """How many steps run, those that are repeated included."""
        return sum(len(moves) for _, moves in self.moves)

    def expected_bytes(self, plain_bytes: int) -> float:
        """The peak at a size at which the plan without them has this one."""
        return self.peak_bytes * plain_bytes / self.plain_bytes


@dataclass(frozen=True, slots=True)
class Held:
    """What a plan with a layout of its own holds between phases, and the chunk sizes of its phases."""

    signature: Hashable
    """Equal for facts with the same items."""
    places: Places
    sizes: tuple[int, ...]
    filed: tuple[int, ...]
    """The places of the items that lie in files."""
    moves: Moves
    """What levers have done to its schedules."""
    kept_bytes: int
    """All that crosses phases at this size."""
    peak_bytes: int
    seconds: float
    """How long it was expected to take."""
    before: tuple[int, int] | None = None
    """What crosses phases, and the peak, at another size at which the same was held."""

    @property
    def num_steps(self) -> int:
        """How much memory it takes, in moves."""
        return self.places.num_items // 8 + sum(len(moves) for _, moves in self.moves)

    def expected_bytes(self, kept_bytes: int) -> float:
        """The peak at a size at which so much crosses phases: on a line through two sizes, if two are known."""
        if self.before is None:
            return self.peak_bytes * kept_bytes / max(1, self.kept_bytes)
        slope = (self.peak_bytes - self.before[1]) / (self.kept_bytes - self.before[0])
        return self.peak_bytes + slope * (kept_bytes - self.kept_bytes)

    def expected_seconds(self, kept_bytes: int) -> float:
        """How long it may take there, if all of it takes longer the more there is."""
        return self.seconds * kept_bytes / max(1, self.kept_bytes)

    def is_same(self, other: Held) -> bool:
        """Whether it makes the same plan."""
        mine, theirs = ((each.signature, each.sizes, each.filed, each.moves) for each in (self, other))
        return mine == theirs and self.places.is_same(other.places)

    def after(self, other: Held) -> Held:
        """The same with what is known from another size at which the same was held."""
        is_new = other.kept_bytes != self.kept_bytes
        return replace(self, before=(other.kept_bytes, other.peak_bytes) if is_new else other.before)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a plan was made, in terms that hold at other sizes."""

    level: int
    """How much is kept between phases: 0 all of it, -1 all of it, in a file, otherwise what the budget allows."""
    chunk_size: int
    is_uncut: bool = False
    """Whether nothing is cut along the batch."""
    made: tuple[Made, ...] = ()
    """What levers have done to the schedules of such plans, the latest first."""
    held: tuple[Held, ...] = ()
    """What such plans hold where not all is kept between phases, the latest first."""
    has_regions: bool = False
    """Whether regions were cut out of its schedules."""
    failed: tuple[tuple[int, int], ...] = ()
    """By chunk size, the peak without levers of the smallest plan in which levers could not make room."""

    @property
    def num_moves(self) -> int:
        """How many moves it remembers; each takes about 100 bytes."""
        return sum(made.num_steps for made in self.made) + sum(held.num_steps for held in self.held)


def moves_of(plan: Plan) -> Moves | None:
    """What levers have done to the schedules of a plan; None if it cannot be done again at other sizes."""
    found: dict[tuple[int, int | None], tuple[Move, ...]] = {}
    for section, schedule in plan.by_section:
        if schedule.moves is None:
            return None
        if schedule.moves:
            found[section, schedule.chunk] = schedule.moves
    return tuple(found.items())


def held_by(plan: Plan, kept_bytes: int, peak_bytes: int, seconds: float) -> Held | None:
    """What a plan holds at a size at which so much crosses phases; None if it cannot be held again at other sizes."""
    facts, moves = plan.facts, moves_of(plan)
    if moves is None or facts.origin is None:
        return None
    sizes = tuple(max(stop - start for start, stop in phase.chunks) for phase in plan.phases)
    filed = tuple(sorted(facts.places[item] for item in plan.offloaded))
    return Held(facts.signature, Places(plan.layout), sizes, filed, moves, kept_bytes, peak_bytes, seconds)


def with_moves(plan: Plan, moves: Moves) -> Plan | None:
    """The plan with the same moves made in its schedules; None if they were made in others."""
    given = dict(moves)

    def change(schedule: Schedule, section: int) -> Schedule | None:
        made = given.get((section, schedule.chunk))
        return schedule if made is None else made_again(schedule, made)

    return map_schedules(plan, change)


def map_schedules(plan: Plan, change: Callable[[Schedule, int], Schedule | None]) -> Plan | None:
    """The plan with every schedule changed, given its section; None if one cannot be."""
    phases: list[Phase] = []
    for number, phase in enumerate(plan.phases):
        before = change(phase.before, 2 * number)
        loops = {size: change(loop, 2 * number + 1) for size, loop in phase.loops.items()}
        if before is None or any(loop is None for loop in loops.values()):
            return None
        phases.append(replace(phase, before=before, loops=loops))  # type: ignore[arg-type]
    after = change(plan.after, 2 * len(plan.phases))
    return None if after is None else replace(plan, phases=tuple(phases), after=after)
