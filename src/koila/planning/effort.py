"""Effort: how much work a search may do.

*Takes* numbers of steps, from everything that builds, draws, orders or plays through a schedule. *Gives* an end to a
search that would take too long. Work is counted, not timed: the same input gives the same plan on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import TypeVar

R = TypeVar("R")


class Exhausted(Exception):
    """The work that was allowed is done."""


class _Meter(threading.local):
    left: float = inf
    """Steps that may still be done; a plan that nobody searches for is not limited."""


_meter = _Meter()


def spend(num_steps: float) -> None:
    """So many steps are about to be built or played through; building one takes about 60 µs.

    Raises:
        Exhausted: That is more than is left.
    """
    _meter.left -= num_steps
    if _meter.left < 0:
        raise Exhausted


def attempt(num_steps: float, make: Callable[[], R]) -> R | None:
    """What `make` gives, or None if it takes more than so many steps; what it takes is taken from what is left.

    >>> attempt(10, lambda: spend(5) or "done"), attempt(10, lambda: spend(15) or "done")
    ('done', None)
    """
    before, limit = _meter.left, min(_meter.left, num_steps)
    _meter.left = limit
    try:
        return make()
    except Exhausted:
        if limit == before:
            raise  # Nothing is left for anybody.
        return None
    finally:
        _meter.left = before if before == inf else before - min(limit - _meter.left, limit)
