"""The search for a plan that fits a byte budget: all levers, the peak constrained at every step.

*Takes* facts and a byte budget. *Gives* the fastest plan that fits of those tried, or a `BudgetError` with the smallest
budget that this search can meet. Same input, same plan.

What competes, by its expected seconds: the batch uncut and shrunk by recomputation; all that crosses phases kept, in
the largest chunks that fit, with the levers inside a schedule beyond that; and only what is worth its bytes kept, from
one use to the next, with a chunk size for each phase. Not optimal: chunk sizes are powers of two and even parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf

from koila import events
from koila._bytes import format_bytes
from koila.analysis.split import Facts, Item
from koila.errors import BudgetError
from koila.planning.effort import attempt, spend
from koila.planning.held_plans import HeldPlans
from koila.planning.layouts import layout_of
from koila.planning.levers.shrink import LEVERS, shrink
from koila.planning.peak import peak_alone, project
from koila.planning.phases import Layout
from koila.planning.plan import Known, Plan, make_plan, stream_source
from koila.planning.rates import LARGE
from koila.planning.recipes import map_schedules
from koila.planning.schedule import Schedule
from koila.planning.sizing import Found, expected_seconds, nested_sizes, paging_seconds


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


def layout_seconds(layout: Layout) -> float:
    """The expected time of a layout if all of the batch were one chunk, in memory that is there."""
    found = 0.0
    for number, items in enumerate(layout.sections):
        kept = layout.kept_before(number)
        computed = (item for item in items if item.kind in ("chunk", "whole") and item not in kept)
        found += sum(layout.catalogue.seconds_in_place(item.node) for item in computed)
    return found


def _largest_result(schedule: Schedule) -> int:
    """The bytes of the largest storage that a schedule asks the system for."""
    storages, written = schedule.storages, schedule.overwritten
    pairs = zip(storages.owners, storages.num_bytes, strict=True)
    return max((size for (value, _), size in pairs if value not in written), default=0)


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
RECOMPUTING = frozenset({"order", "recompute"})
"""The levers of a search that does not cut."""


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


_FEW = 600
"""Programs of few nodes may take a little longer for each of them."""
_FIND, _FIT, _SMALLEST = 20, 6, 12
"""Steps for each node of a program that a search, one plan in it, and the search for the smallest plan may do."""
_PAGING = 0.05
"""Where the pages of the heap take more than this share of a plan's time, one of half the size may be faster."""
_ALIKE = 1.03
"""Plans whose expected seconds differ less may take the same time."""


class Search:
    """The plans of one program, made when they are needed; all of it is forgotten once a decision is made.

    A search may do so much work for each node of the program, and no more: what it found by then is its answer. How
    much it does for one question does not depend on the questions before.
    """

    def __init__(
        self, facts: Facts, levers: frozenset[str] = ALL, uncut_facts: Callable[[], Facts | None] = lambda: None,
        whole_facts: Callable[[], Facts | None] = lambda: None, streamed: bool = False, smallest_chunk: int = 1,
    ) -> None:  # fmt: skip
        self.facts, self.levers, self.streamed = facts, levers, streamed
        self.uncut_facts, self.whole_facts = uncut_facts, whole_facts
        sizes, nested = (make(facts.num_samples, facts.granule) for make in (chunk_sizes, nested_sizes))
        self.sizes = [size for size in sizes if size >= smallest_chunk] or sizes[:1]
        self.nested = [size for size in nested if size >= smallest_chunk] or nested[:1]
        """The sizes of which each is a part of the one before."""
        self.num_nodes = len(facts.joint.module.graph.nodes) + _FEW
        self.plans: dict[tuple[int, int], Found] = {}
        self._schedules: Known = {}
        self._charged: set[Schedule] = set()
        """What the present question has paid for."""
        self._smallest: Found | None = None

    @cached_property
    def layout(self) -> Layout:
        """The layout that keeps whatever would be computed again at length."""
        return layout_of(self.facts)

    def begin(self) -> None:
        """A new question: what others have paid for is paid for again."""
        self._charged.clear()

    def plain(self, level: int, size: int) -> Found:
        """The plan for a chunk size, without levers inside its schedules."""
        if (level, size) not in self.plans:
            filed = self.layout.kept if level < 0 else frozenset()
            self.plans[level, size] = self.made(self.layout, size, filed)
        self._charge(self.plans[level, size][0])
        return self.plans[level, size]

    def made(self, layout: Layout, sizes: int | Sequence[int], filed: frozenset[Item]) -> Found:
        """The plan of a layout."""
        plan = make_plan(layout, sizes, self.streamed, self._schedules, filed)
        self._charge(plan)
        return plan, project(plan)

    def _charge(self, plan: Plan) -> None:
        fresh = [schedule for schedule in plan.schedules if schedule not in self._charged]
        self._charged.update(fresh)
        spend(sum(len(schedule.steps) for schedule in fresh))

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
        best: list[Found] = []

        def is_better_within(limit: int) -> bool:
            before = best[:]
            for found in self._fitting(limit):
                if not best or expected_seconds(found) < expected_seconds(best[0]):
                    best[:] = [found]
            return best != before

        def look() -> bool:
            limit = allowed
            while is_better_within(limit) and paging_seconds(best[0]) > _PAGING * expected_seconds(best[0]):
                limit //= 2
            return True

        self.begin()
        if not attempt(_FIND * self.num_nodes, look):
            events.count("plan::search cut short")
        if not best and thorough and self.smallest()[1].peak_bytes <= allowed:
            best = [self.smallest()]
        return self._preferred(best[0], allowed) if best else None

    def _preferred(self, found: Found, allowed: int) -> Found:
        """A plan that leaves the program uncut keeps eager's kernels, if that fits and takes no longer to speak of."""
        same = self._by_eager_kernels(allowed) if found[0].facts is not self.facts else None
        return found if same is None or expected_seconds(same) > _ALIKE * expected_seconds(found) else same

    @cached_property
    def _uncut(self) -> Plan | None:
        """The program with nothing cut along the batch."""
        return _as_it_is(self.uncut_facts())

    @cached_property
    def _whole(self) -> Plan | None:
        """The same with eager's own kernels."""
        return _as_it_is(self.whole_facts())

    @cached_property
    def _price(self) -> tuple[bool, int]:
        """What cutting costs: whether many values are computed again, and the bytes of those that are kept."""
        layout = self.layout
        calls = (node for node in self.facts.joint.module.graph.nodes if node.op == "call_function")
        once = sum(map(layout.catalogue.seconds_in_place, calls))
        return layout_seconds(layout) > 1.05 * once, sum(map(layout.catalogue.state_bytes, layout.kept))

    @cached_property
    def _result_bytes(self) -> int:
        """What every plan holds in the end."""
        return sum(self.layout.catalogue.state_bytes(item) for item in self.facts.results if item is not None)

    def _may_stay_uncut(self, allowed: int) -> bool:
        """Whether cutting costs something, so that the uncut program may be the faster one within so many bytes."""
        repeats, kept = self._price
        return "recompute" in self.levers and self._result_bytes <= allowed and (repeats or kept > allowed / 16)

    def shrunk(self, allowed: int, effort: float = _FIT) -> Found | None:
        """The uncut program within so many bytes."""
        return self._fit_uncut(self._uncut, allowed, effort) if self._may_stay_uncut(allowed) else None

    def _by_eager_kernels(self, allowed: int) -> Found | None:
        """The uncut program within so many bytes, by eager's own kernels."""
        return self._fit_uncut(self._whole, allowed, _FIT) if self._may_stay_uncut(allowed) else None

    def _fit_uncut(self, plan: Plan | None, allowed: int, effort: float) -> Found | None:
        if plan is None:
            return None
        self._charge(plan)
        # Regions are for what stands in a chunk; here, they would take most of the time and seldom help.
        return self.fit(plan, allowed, effort, self.levers - {"region"})

    def fit(self, plan: Plan, allowed: int, effort: float = _FIT, levers: frozenset[str] | None = None) -> Found | None:
        """The plan with levers pulled, if that does not take too long."""
        return attempt(effort * self.num_nodes, lambda: fit(plan, allowed, levers or self.levers))

    def _fitting(self, allowed: int) -> Iterator[Found]:
        """Plans that fit: the batch as it is, shrunk; then cut, with all that crosses phases kept, or part of it."""
        best, uncut = inf, self.shrunk(allowed)
        # Eager's kernels need a trace of their own: only where the uncut program fits without them, too.
        for each in (uncut, uncut and self._by_eager_kernels(allowed)):
            if each is not None:
                best = min(best, expected_seconds(each))
                yield each
        for held in self.held.within(allowed) if self.held else ():
            best = min(best, expected_seconds(held))
            yield held
        for level in self.levels:
            if level >= 0 and kept_bytes(self.layout, self.streamed) > allowed:
                continue  # No chunk size makes room for what this level keeps.
            if layout_seconds(self.layout) >= best:
                return
            found = False
            for plan in self._with_all_kept(level, allowed):
                found = True
                yield plan
            if found:
                return

    def _with_all_kept(self, level: int, allowed: int) -> Iterator[Found]:
        """Plans that keep all that crosses phases: in the largest chunks that fit, and in larger ones with levers."""
        largest, best = self._largest_that_fits(level, allowed), inf
        if largest is not None:
            for plain in (self.plain(level, self.sizes[largest]), *self._with_small_results(level, largest)):
                best = min(best, expected_seconds(plain))
                yield plain
        last = len(self.sizes) if largest is None else largest
        first = last - (1 if self._is_mostly_kept(level, allowed) else 2)
        for place in range(max(0, first), last) if "chunk" in self.levers else (0,):
            plan = self.plain(level, self.sizes[place])[0]
            fitted = self.fit(plan, allowed) if plan.seconds < best else None
            if fitted is not None:
                best = min(best, expected_seconds(fitted))
                yield fitted

    @cached_property
    def held(self) -> HeldPlans | None:
        """The plans that keep some values between phases; None if there is nothing to keep."""
        if "keep" not in self.levers or len(self.layout.stages) < 2:
            return None
        sizes = self.nested if "chunk" in self.levers else self.sizes[:1]
        fit = lambda plan, allowed: self.fit(plan, allowed, _FIT / 6)  # noqa: E731
        return HeldPlans(self.layout, sizes, self.num_nodes, "offload" in self.levers, self.made, fit)

    def _with_small_results(self, level: int, place: int) -> Iterator[Found]:
        """The plan with chunks so small that no result is made of new pages every time, if that is another one."""
        plan = self.plain(level, self.sizes[place])[0]
        made = (num_bytes for phase in plan.phases for num_bytes in map(_largest_result, phase.loops.values()))
        share = (LARGE - 1) / max(LARGE - 1, *made, 0)
        following = next((size for size in self.sizes if size <= share * self.sizes[place]), None)
        if share < 1 and following is not None and "chunk" in self.levers:
            yield self.plain(level, following)

    @cached_property
    def levels(self) -> list[int]:
        """How all that crosses phases is kept: in memory, or in files (-1)."""
        return [0, -1] if self.layout.kept and "offload" in self.levers else [0]

    def _largest_that_fits(self, level: int, allowed: int) -> int | None:
        """The place of the largest chunk size that fits as it is."""
        sizes = self.sizes if "chunk" in self.levers else self.sizes[:1]
        if self._is_mostly_kept(level, allowed) and self.plain(level, sizes[-1])[1].peak_bytes > allowed:
            return None
        if self.plain(level, sizes[0])[1].peak_bytes <= allowed:
            return 0
        # With several chunks, projected bytes fall with their size; what scales tells where to look.
        low, high, found = 1, len(sizes) - 1, None
        guess = self.guess(level, 0, allowed)
        while low <= high:
            place = min(max(guess, low), high)
            if self.plain(level, sizes[place])[1].peak_bytes <= allowed:
                found, high, guess = place, place - 1, place - 1
            else:
                low, guess = place + 1, self.guess(level, place, allowed)
        return found

    def _is_mostly_kept(self, level: int, num_bytes: int) -> bool:
        """Whether what crosses phases is most of so many bytes: then chunk sizes change little."""
        return level >= 0 and 2 * kept_bytes(self.layout, self.streamed) > num_bytes and self.held is not None

    def guess(self, level: int, place: int, allowed: int) -> int:
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
        """The smallest plan without levers, and what levers make of it: bisected down to what is there anyway."""
        level = self.levels[-1]
        size = self.sizes[-1] if "chunk" in self.levers else self.sizes[0]
        best = [self.plain(level, size)]
        lower = lambda found: best.insert(0, found) if found[1].peak_bytes < best[0][1].peak_bytes else None  # noqa: E731

        def look() -> bool:
            if not self._is_mostly_kept(level, best[0][1].peak_bytes):
                lower(self.plain(level, self.sizes[0]))  # A single chunk needs no sums beside its values.
            least = self.held.least(self._result_bytes, best[0][1].peak_bytes) if self.held else None
            if least is not None:
                lower(least)
            self._bisect(best[0][0], lower)
            return True

        self.begin()
        if not attempt(_SMALLEST * self.num_nodes, look):
            events.count("plan::search cut short")
        return best[0]

    def _bisect(self, plan: Plan, lower: Callable[[Found], None]) -> None:
        """Pull levers on a plan, and on the uncut program, for less and less memory."""
        low, high = self._result_bytes, project(plan).peak_bytes
        while high - low > max(1, _EXACT * high):
            allowed = (low + high) // 2
            found = self.fit(plan, allowed, _FIT / 2) or self.shrunk(allowed, _FIT / 2)
            if found is None:
                low = allowed
            else:
                lower(found)
                high = found[1].peak_bytes


def _as_it_is(facts: Facts | None) -> Plan | None:
    """The plan that does all of it at once."""
    return None if facts is None else make_plan(layout_of(facts), facts.num_samples)


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
