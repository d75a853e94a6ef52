"""Carrying over: a plan for a new size from those of other sizes of the same program.

*Takes* the search of a program, and the `Recipe` of its plans at other sizes. *Gives* a plan made in the same way, if
that fits, and the recipe for the sizes to come. A plan that is carried over is projected like any other: only looking
for it is saved.

Not optimal: a carried plan is taken if it fits, though a search at this size might find a faster one.
"""

from __future__ import annotations

from functools import cached_property
from math import inf

from koila import events
from koila.planning.peak import project
from koila.planning.recipes import Held, Made, Recipe, held_by, moves_of, with_moves
from koila.planning.search import Search
from koila.planning.sizing import Found, expected_seconds

_MOVES = 8
"""The moves of so many sizes are remembered, and what so many held between phases."""
_ROOM = 0.6
"""Plans like those of another size that use less of a budget were made for a much larger one: others are looked for.
One that left so much of the same budget unused at its own size did so because fewer bytes are faster."""
_SIZES = 3
"""So many chunk sizes are tried, from that of the last plan down."""
_ABOUT = 1.05
"""Moves that would use more of it are not tried, if bytes grow with those of the plan without them."""


def _is_likely(num_bytes: float, used_bytes: int, allowed: int) -> bool:
    """Whether a plan with this peak is a good one within a budget of which it used so much at another size."""
    return _ROOM * min(allowed, used_bytes) <= num_bytes <= _ABOUT * allowed


class Carrying:
    """What the plans of one program take over from those of other sizes.

    Args:
        search: The plans of the program at this size.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self._failed: dict[int, int] = {}
        """By chunk size, the peak of a plan in which the levers of another size could not make room."""

    def recipe(self, found: Found, before: Recipe | None = None) -> Recipe:
        """How a plan of this search was made, and others at other sizes before it."""
        plan, is_uncut = found[0], found[0].facts is not self.search.facts
        level = 0 if is_uncut else 1 if plan.layout is not self.search.layout else -1 if plan.offloaded else 0
        before = before or Recipe(level, plan.chunk_size)
        known = before.made
        moves, plain = moves_of(plan), None if is_uncut else self.search.plans.get((level, plan.chunk_size))
        if moves and plain is not None:
            others = [made for made in known if made.moves != moves]
            known = (Made(moves, plan.chunk_size, plain[1].peak_bytes, found[1].peak_bytes), *others[: _MOVES - 1])
        failed = tuple({**dict(before.failed), **self._failed}.items())
        return Recipe(level, plan.chunk_size, is_uncut, known, self._held_by(found, before), moves is None, failed)

    def _held_by(self, found: Found, before: Recipe) -> tuple[Held, ...]:
        """What a plan holds between phases, if it has a layout of its own, and what others held before it."""
        is_own = found[0].facts is self.search.facts and found[0].layout is not self.search.layout
        seconds = expected_seconds(found)
        latest = held_by(found[0], self._kept_bytes, found[1].peak_bytes, seconds) if is_own else None
        if latest is None:
            return before.held
        same = next((held for held in before.held if held.is_same(latest)), None)
        others = [held for held in before.held if held is not same]
        return (latest if same is None else latest.after(same), *others[: _MOVES - 1])

    def like(self, recipe: Recipe, allowed: int) -> Found | None:
        """The plan that a recipe from another size makes of this program, if it fits; chunks may be of another size."""
        search = self.search
        search.begin()
        if recipe.is_uncut:
            return search.shrunk(allowed)
        if recipe.level > 0:
            return self._held_again(recipe, allowed) or self._held_anew(allowed)
        if recipe.level not in search.levels:
            return None
        place = next((n for n, size in enumerate(search.sizes) if size <= recipe.chunk_size), len(search.sizes) - 1)
        found = search.plain(recipe.level, search.sizes[place])
        larger = search.guess(recipe.level, place, allowed)
        if search.sizes[larger] >= 2 * search.sizes[place]:
            other = search.plain(recipe.level, search.sizes[larger])
            found = other if other[1].peak_bytes <= allowed else found
        if found[1].peak_bytes <= allowed:
            return found
        following = (search.plain(recipe.level, size) for size in search.sizes[place : place + _SIZES])
        return next(filter(None, (self._carried(plain, recipe, allowed) for plain in following)), None)

    def _held_anew(self, allowed: int) -> Found | None:
        """The first plan found that keeps only some values between phases."""
        return next(self.search.held.within(allowed), None) if self.search.held else None

    def _carried(self, plain: Found, recipe: Recipe, allowed: int) -> Found | None:
        """The plan as it is, with the moves of another size, or with levers like those of the last size pulled."""
        if plain[1].peak_bytes <= allowed:
            return plain
        found, size = self._made_again(plain, recipe, allowed), plain[0].chunk_size
        if found is None and plain[1].peak_bytes < dict(recipe.failed).get(size, inf):
            levers = self.search.levers if recipe.has_regions else self.search.levers - {"region"}
            found = self.search.fit(plain[0], allowed, levers=levers)
            if found is None:
                self._failed[size] = plain[1].peak_bytes
        return found

    @cached_property
    def _kept_bytes(self) -> int:
        """The bytes of all that crosses phases."""
        return sum(map(self.search.layout.catalogue.state_bytes, self.search.layout.kept))

    def _held_again(self, recipe: Recipe, allowed: int) -> Found | None:
        """The plan that holds what another size held, if that may fit, and does."""
        search, num_bytes = self.search, self._kept_bytes
        alike = [held for held in recipe.held if held.signature == search.facts.signature]
        likely = [held for held in alike if _is_likely(held.expected_bytes(num_bytes), held.peak_bytes, allowed)]
        for held in sorted(likely, key=lambda held: held.expected_seconds(num_bytes)):
            layout = held.places.layout(search.facts, search.layout.catalogue)
            sizes = [next((size for size in search.nested if size <= each), search.nested[-1]) for each in held.sizes]
            plain, _ = search.made(layout, sizes, frozenset(search.facts.items[place] for place in held.filed))
            plan = with_moves(plain, held.moves)
            projection = None if plan is None else project(plan)
            if plan is not None and projection is not None and projection.peak_bytes <= allowed:
                events.count("plan::held again")
                return plan, projection
        return None

    def _made_again(self, plain: Found, recipe: Recipe, allowed: int) -> Found | None:
        """The plan with the moves of another size made in it: the fewest that may fit, if they do."""
        num_bytes = plain[1].peak_bytes
        alike = [made for made in recipe.made if made.chunk_size == plain[0].chunk_size]
        likely = [made for made in alike if made.expected_bytes(num_bytes) <= _ABOUT * allowed]
        for made in sorted(likely, key=lambda made: made.num_steps):
            changed = with_moves(plain[0], made.moves)
            projection = None if changed is None else project(changed)
            if changed is not None and projection is not None and projection.peak_bytes <= allowed:
                if not _is_likely(projection.peak_bytes, made.peak_bytes, allowed):
                    return None
                events.count("plan::moves made again")
                return changed, projection
        return None
