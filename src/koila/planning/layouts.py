"""Layouts at other sizes: which phase computes which items does not depend on sizes.

*Takes* `Facts`. *Gives* their `Layout`: the one of `koila.planning.phases.make_layout`, found once for all sizes of a
program whose facts are alike (`Facts.signature`), by the places of its items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from koila.analysis.split import Facts, Item
from koila.ir.cache import Cache, HashedOnce
from koila.planning.catalogue import Catalogue
from koila.planning.devices import current_rules
from koila.planning.phases import Layout, Stage, make_layout

MAX_ITEMS = 12_000
"""Layouts are kept as long as they have fewer items in all."""
ALWAYS = 4
"""So many are kept in any case."""


class Places:
    """A layout without its program."""

    def __init__(self, layout: Layout) -> None:
        places = layout.facts.places
        self.num_items = layout.num_items

        def found(items: Iterable[Item]) -> tuple[int, ...]:
            return tuple([places[item] for item in items])

        self._stages = [
            tuple(map(found, (stage.before, stage.items, stage.targets, stage.kept, _in_order(stage.held, places))))
            for stage in layout.stages
        ]
        self._after = found(layout.after)

    def is_same(self, other: Places) -> bool:
        """Whether it is the same layout."""
        return self._stages == other._stages and self._after == other._after

    def layout(self, facts: Facts, catalogue: Catalogue | None = None) -> Layout:
        """The layout of facts that are alike; all layouts of a program share what is known about its items."""
        items = facts.items

        def found(places: Sequence[int]) -> tuple[Item, ...]:
            return tuple([items[place] for place in places])

        stages = []
        for *parts, held in self._stages:
            before, computed, targets, kept = map(found, parts)
            stages.append(Stage(before, computed, targets, kept, frozenset(found(held))))
        return Layout(facts, tuple(stages), found(self._after), catalogue or Catalogue(facts))


def _in_order(items: Iterable[Item], places: Mapping[Item, int]) -> list[Item]:
    return sorted(items, key=places.__getitem__)


_known: Cache[Places] = Cache("layout_cache", MAX_ITEMS, lambda places: places.num_items, ALWAYS)


def layout_of(facts: Facts) -> Layout:
    """The layout of a program that keeps whatever would be computed again at length."""
    if facts.origin is None:
        return make_layout(facts)
    key = HashedOnce((facts.origin.structure, facts.signature, current_rules()))
    known = _known.get(key)
    if known is not None:
        return known.layout(facts)
    layout = make_layout(facts)
    _known.add(key, Places(layout))
    return layout
