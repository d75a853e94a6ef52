"""A guard for code that may hang, in time of the processor: neighbours do not count.

*Takes* seconds, so many that nothing that works comes near them. *Gives* a scope that `TooSlow` ends; it is no
`Exception`, so that nothing in between swallows it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooSlow(BaseException):
    """The time is over."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the body after that many seconds, and again each second after that."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 0.1), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
