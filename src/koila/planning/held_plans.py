"""Held plans: plans that keep between phases what is worth its bytes, each value from one use to the next.

*Takes* the layout of a program and a byte limit. *Gives* plans that fit, fastest choices first. What to hold is decided
on expected bytes (`koila.planning.keeping`); the plan that is made of it tells what its phases really need, and the
choice is made anew with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

from koila.analysis.split import Item
from koila.planning.devices import current_rules
from koila.planning.effort import attempt
from koila.planning.holding import THOROUGH, Holding
from koila.planning.keeping import Keeping
from koila.planning.peak import Projection
from koila.planning.phases import Layout
from koila.planning.plan import Plan
from koila.planning.sizing import Found, Need, all_alike, expected_seconds, largest_fitting

CHUNK_SHARES = (0.02, 0.05, 0.12, 0.3)
"""The shares of a budget that the values of one chunk may take, beside what is kept between phases."""
_TRIED = 2
"""Plans are made for so many of them."""
_CORRECTED = 4
"""So many times what is kept is chosen anew because a plan needs more than was expected."""
_FURTHER = 2
"""So many times, once a plan whose phases all have the same chunk size was found."""
_AGAIN = 6
"""How many times the items of a program a plan may compute: more takes as many times as long to plan."""
_EXACT = 0.02
"""How close to each other a limit that can be met and one that cannot are, in the end."""


class HeldPlans:
    """The plans of one program that keep some values between phases, some of the time.

    Args:
        layout: The phases.
        sizes: The chunk sizes to choose from, largest first, each a part of the one before.
        num_nodes: How large the program is; so much work is done.
        with_files: Whether values may wait in files.
        make: Makes the plan of a layout, by the chunk sizes of its phases and the items that wait in files.
        fit: Makes a plan smaller by what can be done inside its schedules.
    """

    def __init__(
        self, layout: Layout, sizes: Sequence[int], num_nodes: int, with_files: bool,
        make: Callable[[Layout, Sequence[int], frozenset[Item]], Found], fit: Callable[[Plan, int], Found | None],
    ) -> None:  # fmt: skip
        self.layout, self.sizes, self.num_nodes = layout, sizes, num_nodes
        self.make, self.fit = make, fit
        self.keeping = Keeping(layout, sizes[-1], with_files)

    def within(self, allowed: int) -> Iterator[Found]:
        """Plans that fit, with the most promising shares for a chunk; the last one took a longer search."""
        beside = [0] * len(self.layout.stages)
        first = {share: attempt(self.num_nodes, partial(self.keeping.hold, allowed, share)) for share in CHUNK_SHARES}
        seconds = {share: self._expected(holding, allowed) for share, holding in first.items() if holding is not None}
        found: dict[float, float] = {}
        for share in sorted(seconds, key=seconds.__getitem__)[:_TRIED]:
            for plan in self._with_share(allowed, share, beside):
                yield plan
                found[share] = min(expected_seconds(plan), found.get(share, inf))
        if found:
            hold = partial(self.keeping.hold, allowed, min(found, key=found.__getitem__), beside, effort=THOROUGH)
            holding = attempt(4 * self.num_nodes, hold)
            better = None if holding is None else self._sized(holding, allowed)[0]
            yield from [] if better is None else [better]

    def least(self, low: int, high: int) -> Found | None:
        """The plan that keeps as little as this search can, in the smallest chunks; it needs more than `low` bytes."""
        least: Holding | None = None
        while high - low > max(1, _EXACT * high):
            allowed = (low + high) // 2
            holding = attempt(self.num_nodes, partial(self.keeping.hold, allowed, 0.0, effort=0.0))
            if holding is None or self._is_long(holding):
                low = allowed
            else:
                high, least = allowed, holding
        return None if least is None else self._made(least, [self.sizes[-1]] * len(self.layout.stages))

    def _expected(self, holding: Holding, allowed: int) -> float:
        """About how long a plan that holds this takes, the calls of all its chunks included."""
        calls = 0.0
        for computed, load, transient in zip(holding.computed, holding.loads, holding.transients, strict=True):
            share = min(1.0, max(self.sizes[-1] / self.sizes[0], (allowed - load) / max(1, transient)))
            calls += len(computed) / share
        return holding.seconds + calls * current_rules().call_seconds

    def _with_share(self, allowed: int, share: float, beside: list[int]) -> Iterator[Found]:
        """Plans with so much for the values of a chunk; what phases need `beside` what was expected is learned."""
        before, left = None, _CORRECTED
        while left:
            left -= 1
            holding = self.keeping.hold(allowed, share, beside)
            if holding is None or self._is_long(holding) or (before is not None and holding.held == before.held):
                return
            found, closest = self._sized(holding, allowed)
            found = found or self.fit(closest[0], allowed)
            if found is not None:
                yield found
                return
            alike = all_alike(self._needs(holding), allowed, self.sizes, partial(self._made, holding))
            if alike is not None:
                yield alike
                left = min(left, _FURTHER)
            before = holding
            for number, more in enumerate(_unexpected(holding, *closest, allowed)):
                beside[number] += more

    def _sized(self, holding: Holding, allowed: int) -> tuple[Found | None, Found]:
        """The plan that holds this with the largest chunks that fit, if there is one; and the last one tried."""
        tried: list[Found] = []

        def make(sizes: Sequence[int]) -> Found:
            tried.append(self._made(holding, sizes))
            return tried[-1]

        return largest_fitting(self._needs(holding), allowed, self.sizes, make), tried[-1]

    def _needs(self, holding: Holding) -> list[Need]:
        return [Need(*pair) for pair in zip(holding.loads, holding.transients, strict=True)]

    def _made(self, holding: Holding, sizes: Sequence[int]) -> Found:
        return self.make(self.keeping.layout_of(holding), sizes, self.keeping.filed(holding))

    def _is_long(self, holding: Holding) -> bool:
        """Whether a plan that holds this would compute the program many times over."""
        return sum(map(len, holding.computed)) > _AGAIN * self.num_nodes


def _unexpected(holding: Holding, plan: Plan, projection: Projection, allowed: int) -> list[int]:
    """By phase that does not fit, by how many bytes it exceeds what was expected of it, or what is allowed."""
    found = []
    peaks = zip(projection.peaks[::2], projection.peaks[1::2], strict=False)
    rows = zip(plan.phases, peaks, holding.loads, holding.transients, strict=True)
    for phase, (before, within), load, transient in rows:
        expected = load + transient * phase.chunks[0][1] // plan.facts.num_samples
        most = max(before, within)
        excess = most - allowed
        found.append(max(most - expected, excess + excess // 2) if excess > 0 else 0)
    return found
