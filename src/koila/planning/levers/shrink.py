"""Shrinking a schedule: the levers that work inside a chunk, tried by what stands at the peak.

*Takes* a schedule and the bytes it may use. *Gives* the fastest schedule that fits of those tried, or None: another
order (which costs nothing), values computed again or offloaded, regions cut along another axis, and both together.
"""

from __future__ import annotations

from collections.abc import Iterator

from koila.planning.cost import schedule_seconds
from koila.planning.levers.order import reorder
from koila.planning.levers.recompute import recompute
from koila.planning.levers.region import split_regions
from koila.planning.peak import peak_alone, peak_of
from koila.planning.schedule import Schedule

LEVERS = frozenset({"order", "recompute", "region"})
"""The levers inside a schedule."""


def shrink(schedule: Schedule, limit: int, levers: frozenset[str] = LEVERS) -> Schedule | None:
    """The fastest schedule within `limit` bytes of those tried; None if none is."""
    best: Schedule | None = None
    for candidate in _candidates(schedule, limit, levers):
        if best is not None and schedule_seconds(candidate) >= schedule_seconds(best):
            break  # The following ones have more regions.
        if peak_alone(candidate).num_bytes <= limit:
            best = candidate
            if schedule_seconds(best) <= schedule_seconds(schedule):
                break
    return best


def _candidates(schedule: Schedule, limit: int, levers: frozenset[str]) -> Iterator[Schedule]:
    """Schedules to try, those that cost nothing first."""
    again = _let_go(schedule, limit, levers)
    if "order" in levers:
        ordered = reorder(schedule)
        if peak_of(ordered).num_bytes < peak_of(schedule).num_bytes:
            yield ordered
            if again is None:
                schedule, again = ordered, _let_go(ordered, limit, levers)
    if again is not None:
        yield again
    if "region" not in levers:
        return
    found = 0
    for cut in split_regions(schedule, limit):
        yield cut
        again = _let_go(cut, limit, levers)
        if again is not None:
            yield again
            found += 1
        if found == 2:
            return


_LESS = (1.0, 0.95)
"""Shares of the limit to aim at: letting values go is greedy, and aiming lower sometimes succeeds where it failed."""


def _let_go(schedule: Schedule, limit: int, levers: frozenset[str]) -> Schedule | None:
    if not levers & {"recompute", "offload"}:
        return None
    tries = (recompute(schedule, int(share * limit), "offload" in levers, "recompute" in levers) for share in _LESS)
    return next((found for found in tries if found is not None), None)
