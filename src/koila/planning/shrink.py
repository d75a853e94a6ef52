"""Shrinking a body: the levers that work inside a chunk, tried by what stands at the peak.

*Takes* a body and the bytes it may use. *Gives* the fastest body that fits of those tried, or None: another order
(which costs nothing), values computed again or offloaded, regions cut along another axis, and both together.
"""

from __future__ import annotations

from collections.abc import Iterator

from koila.planning.body import Body
from koila.planning.cost import body_seconds
from koila.planning.memory import peak_of
from koila.planning.order import reorder
from koila.planning.recompute import recompute
from koila.planning.region import split_regions

LEVERS = frozenset({"order", "recompute", "region"})
"""The levers inside a body."""


def shrink(body: Body, limit: int, levers: frozenset[str] = LEVERS) -> Body | None:
    """The fastest body within `limit` bytes of those tried; None if none is."""
    best: Body | None = None
    for candidate in _candidates(body, limit, levers):
        if best is not None and body_seconds(candidate) >= body_seconds(best):
            break  # The following ones have more regions.
        if peak_of(candidate, candidate.chunk is None).num_bytes <= limit:
            best = candidate
            if body_seconds(best) <= body_seconds(body):
                break
    return best


def _candidates(body: Body, limit: int, levers: frozenset[str]) -> Iterator[Body]:
    """Bodies to try, those that cost nothing first."""
    again = _let_go(body, limit, levers)
    if "order" in levers:
        ordered = reorder(body)
        if peak_of(ordered).num_bytes < peak_of(body).num_bytes:
            yield ordered
            if again is None:
                body, again = ordered, _let_go(ordered, limit, levers)
    if again is not None:
        yield again
    if "region" not in levers:
        return
    found = 0
    for cut in split_regions(body, limit):
        yield cut
        again = _let_go(cut, limit, levers)
        if again is not None:
            yield again
            found += 1
        if found == 2:
            return


_LESS = (1.0, 0.95)
"""Shares of the limit to aim at: letting values go is greedy, and aiming lower sometimes succeeds where it failed."""


def _let_go(body: Body, limit: int, levers: frozenset[str]) -> Body | None:
    if not levers & {"recompute", "offload"}:
        return None
    tries = (recompute(body, int(share * limit), "offload" in levers, "recompute" in levers) for share in _LESS)
    return next((found for found in tries if found is not None), None)
