"""The search for a plan that fits a byte budget: all levers, the peak constrained at every step.

*Takes* facts and a byte budget. *Gives* the fastest plan that fits of those tried, or a `BudgetError` with the smallest
budget that this search can meet. Same input, same plan.

Larger chunks are tried first as they are, then chunks beyond that with the levers inside a schedule. Not optimal: chunk
sizes are powers of two and even parts, values between phases are given up by quarters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from koila._bytes import format_bytes
from koila.analysis.split import Facts
from koila.errors import BudgetError
from koila.planning.levers.offload import keep_in_files
from koila.planning.levers.shrink import LEVERS, shrink
from koila.planning.peak import Projection, peak_alone, project
from koila.planning.phases import Layout, keep_less, make_layout
from koila.planning.plan import Known, Phase, Plan, make_plan, stream_source
from koila.planning.rates import LARGE
from koila.planning.schedule import Schedule

Found = tuple[Plan, Projection]


def chunk_sizes(num_samples: int, granule: int) -> list[int]:
    """Candidates, largest first: powers of two times the granule, and the batch in two, four, eight, … even parts.

    >>> chunk_sizes(11, 1), chunk_sizes(48, 1)
    ([11, 8, 6, 4, 3, 2, 1], [48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1])
    """
    sizes, size = {max(num_samples, 1)}, 1
    while size * granule < num_samples:
        part = -(-num_samples // (2 * size))
        sizes |= {size * granule, -(-part // granule) * granule}
        size *= 2
    return sorted(sizes, reverse=True)


def plan_seconds(plan: Plan) -> float:
    """The expected time of a plan."""
    return plan.seconds


def layout_seconds(layout: Layout) -> float:
    """The expected time of a layout if all of the batch were one chunk."""
    found = 0.0
    for number, items in enumerate(layout.sections):
        kept = layout.kept_before(number)
        computed = (item for item in items if item.kind in ("chunk", "whole") and item not in kept)
        found += sum(layout.catalogue.seconds(item.node) for item in computed)
    return found


def _largest_result(schedule: Schedule) -> int:
    """The bytes of the largest storage that a schedule asks the system for."""
    storages, written = schedule.storages, schedule.overwritten
    pairs = zip(storages.owners, storages.num_bytes, strict=True)
    return max((size for (value, _), size in pairs if value not in written), default=0)


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


def fit(plan: Plan, allowed: int, levers: frozenset[str] = LEVERS) -> Found | None:
    """The plan with the levers inside its schedules pulled until it fits."""
    projection = project(plan)
    if projection.peak_bytes <= allowed:
        return plan, projection
    if min(allowed - there for there in projection.resident) <= 0:
        return None

    def change(schedule: Schedule, section: int) -> Schedule | None:
        limit = allowed - projection.resident[section]
        return schedule if peak_alone(schedule).num_bytes <= limit else shrink(schedule, limit, levers)

    changed = map_schedules(plan, change)
    after = None if changed is None else project(changed)
    return None if changed is None or after is None or after.peak_bytes > allowed else (changed, after)


ALL = LEVERS | {"chunk", "keep"}
"""The levers that need no file."""
KEEPING = (1.0, 0.75, 0.5, 0.25, 0.0)
"""How much of what crosses phases is kept, from all to nothing."""


def kept_bytes(layout: Layout, streamed: bool = False) -> int:
    """The most that is kept between phases at any time, with the gradients and results that are there by then."""
    most = now = 0
    state_bytes = layout.catalogue.state_bytes
    source = stream_source(layout) if streamed else None
    for number, stage in enumerate(layout.stages):
        now += sum(state_bytes(item) for item in (*stage.targets, *stage.kept) if item is not source)
        most = max(most, now)
        now -= sum(map(state_bytes, layout.frees[2 * number + 1]))
    return most


class Search:
    """All plans of one program, made when they are needed."""

    def __init__(
        self, facts: Facts, levers: frozenset[str] = ALL, whole_facts: Callable[[], Facts | None] = lambda: None,
        streamed: bool = False,
    ) -> None:  # fmt: skip
        self.facts, self.levers, self.whole_facts, self.streamed = facts, levers, whole_facts, streamed
        self.sizes = chunk_sizes(facts.num_samples, facts.granule)
        self._layouts: list[Layout] = []
        self._plans: dict[tuple[int, int], Found] = {}
        self._schedules: Known = {}
        self._smallest: Found | None = None

    def layout(self, level: int) -> Layout:
        """The layout that keeps less and less between phases."""
        while len(self._layouts) <= level:
            if not self._layouts:
                self._layouts.append(make_layout(self.facts))
            else:
                before, after = KEEPING[len(self._layouts) - 1], KEEPING[len(self._layouts)]
                self._layouts.append(keep_less(self._layouts[-1], 1 - after / before))
        return self._layouts[level]

    def plain(self, level: int, size: int) -> Found:
        """The plan for a chunk size, without levers inside its schedules."""
        if (level, size) not in self._plans:
            plan = make_plan(self.layout(max(0, level)), size, self.streamed, self._schedules)
            plan = keep_in_files(plan) if level < 0 else plan
            self._plans[level, size] = plan, project(plan)
        return self._plans[level, size]

    def run(self, allowed: int) -> Found:
        """The fastest plan that fits, as far as this search knows.

        Raises:
            BudgetError: None does.
        """
        found = self.find(allowed)
        if found is None:
            smallest = self.smallest()[1]
            raise refusal(smallest.peak_bytes, allowed, smallest.largest)
        return found

    def find(self, allowed: int, thorough: bool = True) -> Found | None:
        """The same, or None. A thorough search looks for the smallest plan before it gives up, which takes longer."""
        found = min(self._fitting(allowed), key=lambda pair: plan_seconds(pair[0]), default=None)
        if found is None and thorough and self.smallest()[1].peak_bytes <= allowed:
            return self.smallest()
        return found

    @cached_property
    def whole(self) -> Plan | None:
        """The program as it is, with eager's kernels."""
        facts = self.whole_facts()
        return None if facts is None else make_plan(make_layout(facts), facts.num_samples)

    def _costs(self, allowed: int) -> bool:
        """Whether cutting costs something: values that cross phases are computed again, or kept."""
        layout = self.layout(0)
        calls = (node for node in self.facts.joint.module.graph.nodes if node.op == "call_function")
        once = sum(map(layout.catalogue.seconds, calls))
        kept = sum(layout.catalogue.state_bytes(item) for stage in layout.stages for item in stage.kept)
        return layout_seconds(layout) > 1.05 * once or kept > allowed / 16

    def _fitting(self, allowed: int, smallest: bool = False) -> Iterator[Found]:
        """Plans that fit: the batch as it is, shrunk; then cut, with less and less that crosses phases."""
        best = float("inf")
        if "recompute" in self.levers and self._costs(allowed) and self.whole is not None:
            shrunk = fit(self.whole, allowed, self.levers)
            if shrunk is not None:
                best = plan_seconds(shrunk[0])
                yield shrunk
        for level in self._levels()[-1:] if smallest else self._levels():
            layout = self.layout(max(0, level))
            if level >= 0 and kept_bytes(layout, self.streamed) > allowed:
                continue  # No chunk size makes room for what this level keeps.
            if layout_seconds(layout) >= best:
                return  # The following ones are slower still.
            largest = self._largest_that_fits(level, allowed)
            if largest is not None:
                yield self.plain(level, self.sizes[largest])
                yield from self._with_small_results(level, largest)
            last = len(self.sizes) if largest is None else largest
            found = largest is not None
            for place in range(max(0, last - (1 if smallest else 2)), last) if "chunk" in self.levers else (0,):
                fitted = fit(self.plain(level, self.sizes[place])[0], allowed, self.levers)
                if fitted is not None:
                    yield fitted
                    found = True
                    break
            if found:
                return

    def _with_small_results(self, level: int, place: int) -> Iterator[Found]:
        """The plan with chunks so small that no result is made of new pages every time, if that is another one."""
        plan = self.plain(level, self.sizes[place])[0]
        made = (num_bytes for phase in plan.phases for num_bytes in map(_largest_result, phase.loops.values()))
        share = (LARGE - 1) / max(LARGE - 1, *made, 0)
        following = next((size for size in self.sizes if size <= share * self.sizes[place]), None)
        if share < 1 and following is not None and "chunk" in self.levers:
            yield self.plain(level, following)

    def _levels(self) -> list[int]:
        """How much crosses phases: all of it; all of it in a file (-1); less and less of it."""
        if not any(stage.kept for stage in self.layout(0).stages):
            return [0]
        in_file = [-1] if "offload" in self.levers else []
        return [0, *in_file, *(range(1, len(KEEPING)) if "keep" in self.levers else ())]

    def _largest_that_fits(self, level: int, allowed: int) -> int | None:
        """The place of the largest chunk size that fits as it is."""
        sizes = self.sizes if "chunk" in self.levers else self.sizes[:1]
        if self.plain(level, sizes[0])[1].peak_bytes <= allowed:
            return 0
        # With several chunks, projected bytes fall with their size; what scales tells where to look.
        low, high, found = 1, len(sizes) - 1, None
        guess = self._guess(level, 0, allowed)
        while low <= high:
            place = min(max(guess, low), high)
            if self.plain(level, sizes[place])[1].peak_bytes <= allowed:
                found, high, guess = place, place - 1, place - 1
            else:
                low, guess = place + 1, self._guess(level, place, allowed)
        return found

    def _guess(self, level: int, place: int, allowed: int) -> int:
        """The place of the largest chunk size that might fit, if activations are all that scales."""
        size, projection = self.sizes[place], self.plain(level, self.sizes[place])[1]
        scales = sum(num_bytes for kind, num_bytes in projection.kinds if kind in ("activations", "workspace"))
        most = size * (allowed - (projection.peak_bytes - scales)) / max(1, scales)
        return next((number for number, each in enumerate(self.sizes) if each <= most), len(self.sizes) - 1)

    def smallest(self) -> Found:
        """The plan with the fewest bytes that this search knows, whatever the budget."""
        if self._smallest is None:
            self._smallest = self._find_smallest()
        return self._smallest

    def _find_smallest(self) -> Found:
        """Bisect between what is there anyway and the smallest plan without levers; the plan that keeps nothing."""
        level = self._levels()[-1]
        size = self.sizes[-1] if "chunk" in self.levers else self.sizes[0]
        # A single chunk needs no sums beside its values.
        starts = [self.plain(level, each) for each in sorted({size, self.sizes[0]})]
        best = min(starts, key=lambda found: found[1].peak_bytes)
        low = kept_bytes(self.layout(max(0, level)), self.streamed)
        while best[1].peak_bytes - low > max(1, _EXACT * best[1].peak_bytes):
            allowed = (low + best[1].peak_bytes) // 2
            found = next(self._fitting(allowed, smallest=True), None)
            if found is None:
                low = allowed
            else:
                best = found
        return best


_EXACT = 0.02
"""How close to each other a budget that can be met and one that cannot are, in the end."""


def refusal(needed: int, allowed: int, operator: str) -> BudgetError:
    """The error for a budget that cannot be met; exactly `needed` would be accepted."""
    return BudgetError(
        f"needs {needed} bytes ({format_bytes(needed)}) at the smallest, allowed {allowed} ({format_bytes(allowed)})",
        where=operator if operator.startswith("at the peak") else f"at the peak: {operator}",
        hint=f"budget={needed}; koila.explain(value, backward=True) shows what cannot be cut",
        needed_bytes=needed,
        allowed_bytes=allowed,
    )
