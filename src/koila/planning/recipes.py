"""Recipes: how a plan was made at one size of a program, so that the same is done at another one.

*Takes* a `Plan`. *Gives* what levers have done to its schedules, as lists of moves that hold at any size: a plan of
another size with the same moves in its schedules is simulated as any other, and taken if it fits. Regions that were
cut out are not among them: they are looked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
class Recipe:
    """How a plan was made, in terms that hold at other sizes."""

    level: int
    """How much is kept between phases: 0 all of it, -1 all of it, in a file, otherwise what the budget allows."""
    chunk_size: int
    is_uncut: bool = False
    """Whether nothing is cut along the batch."""
    made: tuple[Made, ...] = ()
    """What levers have done to the schedules of such plans, the latest first."""

    @property
    def num_moves(self) -> int:
        """How many moves it remembers; each takes about 100 bytes."""
        return sum(made.num_steps for made in self.made)


def moves_of(plan: Plan) -> Moves | None:
    """What levers have done to the schedules of a plan; None if it cannot be done again at other sizes."""
    found: dict[tuple[int, int | None], tuple[Move, ...]] = {}
    for section, schedule in plan.by_section:
        if schedule.moves is None:
            return None
        if schedule.moves:
            found[section, schedule.chunk] = schedule.moves
    return tuple(found.items())


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
