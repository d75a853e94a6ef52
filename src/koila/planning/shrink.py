"""Shrinking a body: the levers that work inside a chunk, tried by what stands at the peak.

*Takes* a body and the bytes it may use. *Gives* the fastest body that fits of those tried, or None: another order
(which costs nothing), values computed again, regions cut along another axis, and regions with values computed again.
"""

from __future__ import annotations

from collections.abc import Iterator

from koila.planning.body import Body
from koila.planning.cost import total_seconds
from koila.planning.memory import peak_of
from koila.planning.order import reorder
from koila.planning.recompute import recompute
from koila.planning.region import split_regions

LEVERS = frozenset({"order", "recompute", "region"})
"""The levers inside a body."""


def shrink(body: Body, limit: int, levers: frozenset[str] = LEVERS) -> Body | None:
    """The fastest body within `limit` bytes of those tried; None if none is."""
    fitting: list[Body] = []
    for candidate in _candidates(body, limit, levers):
        if peak_of(candidate, candidate.chunk is None).num_bytes <= limit:
            fitting.append(candidate)
            if len(fitting) == 1 and total_seconds(candidate.calls) <= total_seconds(body.calls):
                break
    return min(fitting, key=lambda each: total_seconds(each.calls), default=None)


def _candidates(body: Body, limit: int, levers: frozenset[str]) -> Iterator[Body]:
    """Bodies to try, those that cost nothing first."""
    if "order" in levers:
        ordered = reorder(body)
        if peak_of(ordered).num_bytes < peak_of(body).num_bytes:
            yield ordered
            body = ordered
    again = recompute(body, limit) if "recompute" in levers else None
    if again is not None:
        yield again
    if "region" not in levers:
        return
    found = 0
    for cut in split_regions(body, limit):
        yield cut
        again = recompute(cut, limit) if "recompute" in levers else None
        if again is not None:
            yield again
            found += 1
        if found == 2:
            return
