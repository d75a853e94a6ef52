"""Trials: what fits is tried in steps of the user's own loop, and the plan that was measured to be the fastest stays.

*Takes* how long the steps by a plan took. *Gives* what is to be tried next: the plan of another budget that fits this
one, too, and was the fastest there; one of half the bytes, as long as that is faster, then one of three quarters, as
long as that is, then one with chunks twice as large, as long as that is, then one that cuts nothing. A step is the same
work whatever plan it runs by, and its numbers are equal up to the order of summation, so a trial loses at most what a
slower plan takes longer in a few steps. Looking for plans takes a bounded share of the loop's time.

Not optimal: the plans that are tried are those that a search finds for these questions, each by its own expected
time. Nothing is tried twice, and what is found holds for one program at one size.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Way = Literal["known", "half", "three quarters", "larger chunks", "uncut"]
SHARES: dict[Way, float] = {"half": 0.5, "three quarters": 0.75}
"""The bytes that another plan may have, as a share of those of the best one so far."""

SHARE = 0.1
"""The share of the time of a loop's steps that may be spent on looking for other plans; 0: none is tried."""
NUM_STEPS = 3
"""So many steps of each plan are compared, by the fastest of them; the step before them makes code and pages."""
FASTER = 0.97
"""A plan stays if its steps take no more than this share of the time of the best one so far."""


class Trial(Generic[T]):
    """The plans of one program that were tried, and how long the steps of the running one take.

    A trial does not hold the running plan: it is looked up by that plan, and goes with it.

    >>> trial = Trial(planning_seconds=0.0)
    >>> plans = [("first", 2.0), ("other", 2.1), ("half", 1.5), ("quarter", 1.6), ("less", 1.55),
    ...          ("large", 1.6), ("whole", 1.4)]
    >>> for plan, seconds in plans:
    ...     for _ in range(1 + NUM_STEPS):
    ...         trial.note(seconds)
    ...     print(plan, trial.next_way(plan), trial.best)
    first known first
    other half first
    half half half
    quarter three quarters half
    less larger chunks half
    large uncut half
    whole None whole
    """

    def __init__(self, planning_seconds: float) -> None:
        self.best: T | None = None
        """The best plan so far, while another one is running."""
        self.best_seconds = float("inf")
        """What a step by the best plan took."""
        self._planning_seconds = planning_seconds
        """About how long it takes to find another plan."""
        self._seconds: list[float] = []
        self._way: Way | None = None
        """How the running plan was found; None for the first one."""
        self._ways: list[Way] = ["known", *SHARES, "larger chunks", "uncut"]
        """What is left to try."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try, and the best plan is running."""
        return not self._ways and not self._seconds

    def note(self, seconds: float) -> None:
        """A step of the running plan took so long."""
        if not self.is_over:
            self._seconds.append(seconds)

    @property
    def is_due(self) -> bool:
        """Whether enough is known about the running plan, and enough time has passed to look for another one."""
        return len(self._seconds) > NUM_STEPS and SHARE * sum(self._seconds) > self._planning_seconds

    def next_way(self, running: T) -> Way | None:
        """How the next plan to try is found, once the running one has been judged; None: the best one stays."""
        taken, self._seconds = min(self._seconds[1:]), []
        is_faster = taken < FASTER * self.best_seconds
        if is_faster:
            self.best, self.best_seconds = running, taken
        if self._way == "uncut" or not is_faster:
            self.give_up()
        return self._take()

    def give_up(self) -> Way | None:
        """There is no such plan, or it is no faster: the way to try after this one."""
        self._ways.pop(0)
        return self._take()

    def _take(self) -> Way | None:
        self._way = self._ways[0] if self._ways else None
        return self._way
