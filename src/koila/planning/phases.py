"""Phases: which values each loop over the chunks computes, and what it keeps for later loops.

*Takes* `Facts`. *Gives* a `Layout`, in items: the same for every chunk size.

A phase is one loop over the chunks. A value that must be whole before others can go on (a barrier) is computed in the
earliest phase that can; a result that nobody waits for is computed where most of what it needs is computed anyway, so
that the numerator of a mean does not cost a second forward pass. A Sliced value that two phases need is recomputed,
unless it is what a barrier reads: that one is kept, and a network of BatchNorm layers costs linear time. Within a byte
budget `koila.planning.keeping` chooses what is kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from koila._torch import OpOverload
from koila.analysis.monoids import FirstExtreme, Moments
from koila.analysis.split import Facts, Item
from koila.analysis.types import OPAQUE, Merged, Sliced
from koila.planning.catalogue import Catalogue

JOINT = (Moments, FirstExtreme)
"""Monoids whose pieces are all results of an operator together."""


@dataclass(frozen=True)
class Stage:
    """One loop over the chunks, as items."""

    before: tuple[Item, ...]
    """Whole items to run before the loop, in order."""
    items: tuple[Item, ...]
    """Items to run for each chunk, in order."""
    targets: tuple[Item, ...]
    """Those of the items whose chunks are merged or gathered."""
    kept: tuple[Item, ...]
    """Those of the items whose chunks are kept from this phase on."""
    held: frozenset[Item] = frozenset()
    """Those of the items that it finds kept by earlier phases, and whatever else stays kept through it."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which items each phase computes; the same for every chunk size."""

    facts: Facts
    stages: tuple[Stage, ...]
    after: tuple[Item, ...]
    """Whole items to run after the last loop, in order."""
    catalogue: Catalogue
    """What is known about the items; shared by all layouts of a program."""

    @cached_property
    def sections(self) -> list[tuple[Item, ...]]:
        """What runs one after the other: the Whole items before each loop, its items, …, the Whole items at the end."""
        return [*(part for stage in self.stages for part in (stage.before, stage.items)), self.after]

    @cached_property
    def kept(self) -> frozenset[Item]:
        """What is kept between phases."""
        return frozenset(item for stage in self.stages for item in stage.kept)

    @property
    def num_items(self) -> int:
        """How many items run, in all sections together."""
        return sum(map(len, self.sections))

    @cached_property
    def _last(self) -> dict[Item, int]:
        """The last section in which each value is read; results are never let go."""
        last: dict[Item, int] = {}
        for number, stage in enumerate(self.stages):
            last.update(dict.fromkeys(stage.targets, 2 * number + 1))
        for number, items in enumerate(self.sections):
            kept = self.kept_before(number)
            for item in items:
                reads = (item,) if item in kept else item.operands
                last.update((key_of(read), number) for read in reads)
        for item in self.kept.difference(*(stage.targets for stage in self.stages)):
            last.pop(item, None)
        last.update((key_of(result), len(self.sections)) for result in self.facts.results if result is not None)
        return last

    @cached_property
    def frees(self) -> list[list[Item]]:
        """For each section, the values that nobody reads after it."""
        found: list[list[Item]] = [[] for _ in range(len(self.sections) + 1)]
        for item, number in self._last.items():
            found[number].append(item)
        for number, stage in enumerate(self.stages):
            following = self.kept_before(2 * number + 2)
            ending = (item for item in (*stage.held, *stage.kept) if item not in following and item not in self._last)
            found[2 * number + 1] += sorted(ending, key=self.facts.places.__getitem__)
        return found

    def stored(self, number: int) -> tuple[Item, ...]:
        """Items of a Whole section that are read after it."""
        return tuple(item for item in self.sections[number] if self._last.get(item, -1) > number)

    def kept_before(self, number: int) -> frozenset[Item]:
        """Items that a section finds kept."""
        return self.stages[number // 2].held if number // 2 < len(self.stages) else frozenset()


def key_of(item: Item) -> Item:
    """Under which item a run holds a value: a finished or gathered one stands under what was merged."""
    if item.kind not in ("finish", "gather"):
        return item
    source = item.operands[0]
    return source.operands[0] if is_joint(source) else source


def is_joint(item: Item) -> bool:
    """A part of results that are merged as one."""
    return item.kind == "part" and not isinstance(item.operands[0].type, tuple)


def _cone(targets: Iterable[Item], stop: Callable[[Item], bool]) -> dict[Item, None]:
    """Per-chunk items that the targets need, operands before users; items at which to stop are not opened."""
    done: dict[Item, None] = {}
    pending = [(item, False) for item in reversed(list(targets))]
    while pending:
        item, opened = pending.pop()
        if item in done:
            continue
        if opened or stop(item):
            done[item] = None
            continue
        pending.append((item, True))
        operands = (operand for operand in reversed(item.operands) if operand.per_chunk and operand not in done)
        pending += [(operand, False) for operand in operands]
    return done


def _work(item: Item) -> int:
    """A rough cost: operators that compute something count, views do not."""
    if item.kind != "chunk":
        return 0
    return 0 if getattr(item.node.target, "is_view", False) else 1


_FEW = 8
"""So many pointwise calls are done again rather than their result kept: longer chains would cost quadratic time."""


class _Planner:
    def __init__(self, catalogue: Catalogue, keeps: Callable[[Item], bool]) -> None:
        self.catalogue, self.facts, self.keeps = catalogue, catalogue.facts, keeps
        self.targets: list[dict[Item, None]] = [{} for _ in range(self.facts.num_phases)]
        self.kept: dict[Item, int] = {}
        self.order = {node: index for index, node in enumerate(self.facts.joint.module.graph.nodes)}
        self._moved: set[Item] = set()
        self._ends: dict[Item, int] = {}

    def run(self) -> Layout:
        self._place_targets()
        cones = self._place_kept()
        last = {item: number for number, items in enumerate(cones) for item in items}
        return self.arrange(
            [
                {item: None for item, first in self.kept.items() if first <= number < last[item]}
                for number in range(len(cones))
            ]
        )

    def arrange(self, held: Sequence[Iterable[Item]]) -> Layout:
        """The layout that holds these items after each phase."""
        stages, done, before = [], set[Item](), frozenset[Item]()
        for targets, after in zip(self.targets, held, strict=True):
            kept = tuple(item for item in after if item not in before)
            cone = _cone((*targets, *kept), lambda item, known=before: item.kind == "slice" or item in known)  # type: ignore[misc]
            items = self._in_program_order(cone)
            needed = [operand for item in items for operand in item.operands if not operand.per_chunk]
            stages.append(Stage(self._whole_order(needed, done), tuple(items), tuple(targets), kept, before))
            before = frozenset(after)
        last = self._whole_order([item for item in self.facts.results if item is not None], done)
        return Layout(self.facts, tuple(stages), last, self.catalogue)

    def _place_targets(self) -> None:
        barriers = [item for item in self.facts.items if item.kind in ("finish", "gather")]
        awaited = self._awaited()
        final: list[Item] = []
        for barrier in sorted(barriers, key=lambda item: -item.operands[0].phase):
            source = _merged_item(barrier.operands[0])
            if barrier in awaited:
                self.targets[source.phase].setdefault(source)
            else:
                final.append(source)
        cones = [_cone(targets, lambda item: False) for targets in self.targets]
        for source in final:
            if any(source in targets for targets in self.targets):
                continue
            best, fresh = _cheapest(source, cones)
            self.targets[best].setdefault(source)
            cones[best].update(fresh)

    def _awaited(self) -> set[Item]:
        """Barriers that per-chunk items wait for."""
        chunked = (item for item in self.facts.items if item.per_chunk)
        pending = [operand for item in chunked for operand in item.operands if not operand.per_chunk]
        found: set[Item] = set()
        while pending:
            item = pending.pop()
            if item not in found:
                found.add(item)
                pending += [operand for operand in item.operands if not operand.per_chunk]
        return found

    def _place_kept(self) -> list[list[Item]]:
        """The items of each phase, with what barriers read kept for later phases instead of recomputed."""
        found: list[list[Item]] = []
        users = self._users()
        ends = {target: number for number, targets in enumerate(self.targets) for target in targets}
        for number, targets in enumerate(self.targets):
            cone = _cone(targets, self._is_kept_before(number))
            for item in self._barrier_inputs(targets, cone):
                if item in self.kept or item.type == OPAQUE or not self.keeps(item) or self._is_cheap(item):
                    continue
                if self._is_needed_after(item, number, users, ends):
                    self.kept[item] = number
            found.append(self._in_program_order(cone))
        return found

    def _users(self) -> dict[Item, list[Item]]:
        found: dict[Item, list[Item]] = {}
        for item in self.facts.items:
            if item.per_chunk:
                for operand in item.operands:
                    found.setdefault(operand, []).append(item)
        return found

    def _is_needed_after(self, item: Item, number: int, users: dict[Item, list[Item]], ends: dict[Item, int]) -> bool:
        """Whether a later phase would compute an item again: a way leads to a target, past nothing that is kept."""
        if self._latest(users, ends)[item] <= number:
            return False
        is_kept = self._is_kept_before(number)
        pending, seen = [item], {item}
        while pending:
            each = pending.pop()
            if ends.get(each, -1) > number:
                return True
            fresh = [user for user in users.get(each, ()) if user not in seen and not is_kept(user)]
            seen.update(fresh)
            pending += fresh
        return False

    def _latest(self, users: dict[Item, list[Item]], ends: dict[Item, int]) -> dict[Item, int]:
        """The last phase whose targets an item leads to, found once."""
        if not self._ends:
            for item in sorted(self.facts.items, key=lambda item: -self.order[item.node]):
                following = (self._ends.get(user, -1) for user in users.get(item, ()))
                self._ends[item] = max(ends.get(item, -1), *following, -1)
        return self._ends

    def _in_program_order(self, cone: Iterable[Item]) -> list[Item]:
        """As the program computes them, forward before backward; slices right before their first use."""
        items = list(cone)
        place = {item: float(self.order[item.node]) for item in items}
        for item in items:
            for operand in item.operands:
                if operand.kind == "slice" and operand in place:
                    first = place[item] - 0.5
                    place[operand] = min(first, place[operand]) if operand in self._moved else first
                    self._moved.add(operand)
        self._moved.clear()
        return sorted(items, key=place.__getitem__)

    def _is_kept_before(self, number: int) -> Callable[[Item], bool]:
        return lambda item: item.kind == "slice" or self.kept.get(item, number) < number

    def _barrier_inputs(self, targets: Iterable[Item], cone: dict[Item, None]) -> list[Item]:
        """Sliced values that the merges of a phase read, through pointwise operators and views, outermost first."""
        found: list[Item] = []
        seen: set[Item] = set()
        pending = list(targets)
        while pending:
            item = pending.pop()
            for operand in item.operands:
                if operand in cone and operand not in seen and operand.kind != "slice":
                    seen.add(operand)
                    if isinstance(operand.type, Sliced):
                        found.append(operand)
                    if _is_pointwise(operand) or operand.kind == "part" or not isinstance(operand.type, Sliced):
                        pending.append(operand)
        return sorted(found, key=_is_pointwise)

    def _is_cheap(self, item: Item) -> bool:
        """A few pointwise calls away from what is there anyway: recomputing it costs less than keeping it."""
        pending, seen, calls = [item], {item}, 0
        while pending:
            each = pending.pop()
            if each.kind == "slice" or each in self.kept:
                continue
            if not _is_pointwise(each):
                return False
            calls += _work(each)
            if calls > _FEW:
                return False
            fresh = [operand for operand in each.operands if operand.per_chunk and operand not in seen]
            seen.update(fresh)
            pending += fresh
        return True

    def _whole_order(self, wanted: Iterable[Item], done: set[Item]) -> tuple[Item, ...]:
        """Whole items that are wanted and not done yet, in the order of the program."""
        order: list[Item] = []
        pending = [(item, False) for item in wanted]
        while pending:
            item, opened = pending.pop()
            if item in done or item.kind in ("input", "finish", "gather") or item.node.op == "get_attr":
                continue
            if opened:
                done.add(item)
                order.append(item)
            else:
                pending.append((item, True))
                pending += [(operand, False) for operand in item.operands]
        return tuple(sorted(order, key=lambda item: self.order[item.node]))


def _cheapest(source: Item, cones: list[dict[Item, None]]) -> tuple[int, dict[Item, None]]:
    """The earliest phase that computes most of what a result needs anyway, and what it would compute beside that."""
    best, least, fresh = source.phase, None, dict[Item, None]()
    for phase in range(source.phase, len(cones)):
        cone = cones[phase]
        found = _cone([source], cone.__contains__)
        cost = sum(_work(item) for item in found if item not in cone)
        if least is None or cost < least:
            best, least, fresh = phase, cost, found
        if cost == 0:
            break
    return best, fresh


def _merged_item(item: Item) -> Item:
    """What is merged: results that only make sense together are merged as one."""
    joint = isinstance(item.type, Merged) and isinstance(item.type.monoid, JOINT)
    return item.operands[0] if item.kind == "part" and joint else item


def _is_pointwise(item: Item) -> bool:
    target = item.node.target
    if not isinstance(target, OpOverload) or item.kind != "chunk":
        return False
    return torch.Tag.pointwise in target.tags or target.is_view


def make_layout(
    facts: Facts, keeps: Callable[[Item], bool] = lambda item: True, catalogue: Catalogue | None = None
) -> Layout:
    """Place every item of a program; what `keeps` denies does not live from one phase to the next."""
    return _Planner(catalogue or Catalogue(facts), keeps).run()


def hold_layout(layout: Layout, held: Sequence[Iterable[Item]]) -> Layout:
    """The same phases with the same targets, which hold these items after each of them."""
    planner = _Planner(layout.catalogue, lambda item: True)
    planner.targets = [dict.fromkeys(stage.targets) for stage in layout.stages]
    return planner.arrange(held)
