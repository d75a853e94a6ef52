"""Calibration: what measuring has taught about programs, the only thing besides its job that a decision depends on.

*Takes* peaks that were above their projection. *Gives* the bytes by which the next projections of a program are higher.
"""

from __future__ import annotations

from collections.abc import Hashable

from koila.ir.cache import Cache

_corrections: Cache[int] = Cache("corrections", 1024)
"""By program, the bytes by which a measured peak was above the projection."""


def correction_bytes(program: Hashable) -> int:
    """How much more than projected a program has used."""
    return _corrections.get(program) or 0


def correct(program: Hashable, num_bytes: int) -> None:
    """The next plans of a program count on that many more bytes."""
    _corrections.add(program, correction_bytes(program) + num_bytes)


def forget_corrections() -> None:
    """Trust every projection again."""
    _corrections.clear()
