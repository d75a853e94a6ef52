"""The plan: which values each phase computes, what it keeps for later phases, and how large the chunks are.

*Takes* `Facts` and a chunk size. *Gives* a frozen `Plan`.

A phase is one loop over the chunks. A value that must be whole before others can go on (a barrier) is computed in the
earliest phase that can; a result that nobody waits for is computed where most of what it needs is computed anyway, so
that the numerator of a mean does not cost a second forward pass. A Sliced value that two phases need is recomputed,
unless it is what a barrier reads: that one is kept, and a network of BatchNorm layers costs linear time. This
choice is greedy, not optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from koila.analysis.monoids import FirstExtreme, Moments
from koila.analysis.split import Facts, Item
from koila.analysis.types import Merged, Sliced

JOINT = (Moments, FirstExtreme)
"""Monoids whose pieces are all results of an operator together."""


@dataclass(frozen=True)
class Phase:
    """One loop over the chunks."""

    before: tuple[Item, ...]
    """Whole items to run before the loop, in order."""
    body: tuple[Item, ...]
    """Items to run for each chunk, in order."""
    targets: tuple[Item, ...]
    """Items of the body whose chunks are merged or gathered."""
    kept: tuple[Item, ...]
    """Items of the body whose chunks are kept whole for later phases."""


@dataclass(frozen=True)
class Plan:
    """How a program runs in chunks."""

    facts: Facts
    chunk_size: int
    """Samples per chunk; the last chunk may have fewer."""
    phases: tuple[Phase, ...]
    after: tuple[Item, ...]
    """Whole items to run after the last loop, in order."""

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(first sample, sample after the last) of each chunk."""
        total = self.facts.num_samples
        return tuple((start, min(start + self.chunk_size, total)) for start in range(0, total, self.chunk_size))

    def __str__(self) -> str:
        lines = [f"{len(self.chunks)} chunks of {self.chunk_size} of {self.facts.num_samples} samples"]
        for number, phase in enumerate(self.phases):
            kept = ", ".join(item.node.name for item in phase.kept) or "nothing"
            body, merged = len(phase.body), len(phase.targets)
            lines.append(f"  phase {number}: {body} values per chunk, {merged} merged or gathered, keeps {kept}")
        gathered = ", ".join(f"{name} (for {user})" for name, user in self.facts.gathers)
        lines.append(f"  gathered: {gathered or 'nothing'}")
        return "\n".join(lines)


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


class _Planner:
    def __init__(self, facts: Facts, keep: bool) -> None:
        self.facts, self.keep = facts, keep
        self.targets: list[dict[Item, None]] = [{} for _ in range(facts.num_phases)]
        self.kept: dict[Item, int] = {}
        self.order = {node: index for index, node in enumerate(facts.joint.module.graph.nodes)}
        self._moved: set[Item] = set()

    def run(self, chunk_size: int) -> Plan:
        self._place_targets()
        bodies = self._place_kept()
        phases, done = [], set[Item]()
        for number, body in enumerate(bodies):
            needed = [operand for item in body for operand in item.operands if not operand.per_chunk]
            before = self._whole_order(needed, done)
            kept = tuple(item for item, phase in self.kept.items() if phase == number)
            phases.append(Phase(before, tuple(body), tuple(self.targets[number]), kept))
        after = self._whole_order([item for item in self.facts.results if item is not None], done)
        return Plan(self.facts, chunk_size, tuple(phases), after)

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
            cone = _cone([source], lambda item: False)
            best = _cheapest(cone, cones, source.phase)
            self.targets[best].setdefault(source)
            cones[best].update(cone)

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
        """Bodies of the phases, with what barriers read kept for later phases instead of recomputed."""
        bodies: list[list[Item]] = []
        for number, targets in enumerate(self.targets):
            body = _cone(targets, self._is_kept_before(number))
            following = [target for targets in self.targets[number + 1 :] for target in targets]
            later = _cone(following, self._is_kept_before(number))
            for item in self._barrier_inputs(targets, body):
                if self.keep and item in later and item not in self.kept and not self._is_cheap(item):
                    self.kept[item] = number
            bodies.append(self._in_program_order(body))
        return bodies

    def _in_program_order(self, body: Iterable[Item]) -> list[Item]:
        """As the program computes them, forward before backward; slices right before their first use."""
        items = list(body)
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

    def _barrier_inputs(self, targets: Iterable[Item], body: dict[Item, None]) -> list[Item]:
        """Sliced values that the merges of a phase read, through pointwise operators and views, outermost first."""
        found: list[Item] = []
        seen: set[Item] = set()
        pending = list(targets)
        while pending:
            item = pending.pop()
            for operand in item.operands:
                if operand in body and operand not in seen and operand.kind != "slice":
                    seen.add(operand)
                    if isinstance(operand.type, Sliced):
                        found.append(operand)
                    if _is_pointwise(operand) or operand.kind == "part" or not isinstance(operand.type, Sliced):
                        pending.append(operand)
        return sorted(found, key=_is_pointwise)

    def _is_cheap(self, item: Item) -> bool:
        """Pointwise in what is there anyway: recomputing it costs less than keeping it."""
        if item.kind == "slice" or item in self.kept:
            return True
        return _is_pointwise(item) and all(self._is_cheap(operand) for operand in item.operands if operand.per_chunk)

    def _whole_order(self, wanted: Iterable[Item], done: set[Item]) -> tuple[Item, ...]:
        """Whole items that are wanted and not done yet, operands first."""
        order: list[Item] = []
        pending = [(item, False) for item in wanted]
        while pending:
            item, opened = pending.pop()
            if item in done or item.kind in ("input", "finish", "gather"):
                continue
            if opened:
                done.add(item)
                order.append(item)
            else:
                pending.append((item, True))
                pending += [(operand, False) for operand in item.operands]
        return tuple(order)


def _cheapest(cone: Iterable[Item], cones: list[dict[Item, None]], first: int) -> int:
    """The earliest phase from `first` on that computes most of a cone anyway."""
    best, least = first, None
    for phase in range(first, len(cones)):
        cost = sum(_work(item) for item in cone if item not in cones[phase])
        if least is None or cost < least:
            best, least = phase, cost
        if cost == 0:
            break
    return best


def _merged_item(item: Item) -> Item:
    """What is merged: results that only make sense together are merged as one."""
    joint = isinstance(item.type, Merged) and isinstance(item.type.monoid, JOINT)
    return item.operands[0] if item.kind == "part" and joint else item


def _is_pointwise(item: Item) -> bool:
    target = item.node.target
    if not isinstance(target, torch._ops.OpOverload) or item.kind != "chunk":
        return False
    return torch.Tag.pointwise in target.tags or target.is_view


def make_plan(facts: Facts, chunk_size: int, keep: bool = True) -> Plan:
    """Plan a program for a chunk size, rounded up to what its granule allows.

    Without `keep` nothing Sliced lives from one phase to the next: less memory, more time.
    """
    granule = facts.granule
    return _Planner(facts, keep).run(-(-chunk_size // granule) * granule)
