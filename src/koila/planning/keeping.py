"""Keeping: which items live from one phase to the next within a byte budget.

*Takes* the `Layout` of a program and a byte limit. *Gives* layouts that keep what is worth its bytes, phase by phase
(`koila.planning.holding` decides), and the items among it that wait in files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from koila.analysis.split import Item
from koila.analysis.types import OPAQUE, Sliced
from koila.planning.catalogue import lies_in_operand, value_bytes
from koila.planning.devices import current_rules
from koila.planning.effort import spend
from koila.planning.holding import QUICK, Holding, Loop, Problem, Value, hold
from koila.planning.phases import Layout, hold_layout
from koila.planning.rates import offload_seconds


class Keeping:
    """What can be kept between the phases of a program."""

    def __init__(self, layout: Layout, smallest_chunk: int, with_files: bool) -> None:
        self.layout, self.facts, self.smallest_chunk = layout, layout.facts, smallest_chunk
        self.with_files = with_files and current_rules().type == "cpu"
        order = {node: place for place, node in enumerate(self.facts.joint.module.graph.nodes)}
        chunked = [item for item in self.facts.items if item.per_chunk]
        self.items = sorted(chunked, key=lambda item: order[item.node])
        self.numbers = {item: number for number, item in enumerate(self.items)}

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """Every item of a chunk."""
        return tuple(map(self._value, self.items))

    def _value(self, item: Item) -> Value:
        operands = tuple(self.numbers[operand] for operand in item.operands if operand.per_chunk)
        if item.kind == "slice":
            return Value(can_be_held=False)
        num_bytes = value_bytes(item) if isinstance(item.type, Sliced) and not _is_view(item) else 0
        seconds = self.layout.catalogue.seconds(item.node) if item.kind == "chunk" else 0.0
        can_be_held = num_bytes > 0 and item.type != OPAQUE
        in_file = offload_seconds(num_bytes) if self.with_files and can_be_held else None
        return Value(operands, seconds, num_bytes, can_be_held, in_file)

    @cached_property
    def fixed_bytes(self) -> list[int]:
        """By phase, the bytes of sums and gathered values that are there while it runs."""
        layout, state_bytes = self.layout, self.layout.catalogue.state_bytes
        targets = {item for stage in layout.stages for item in stage.targets}
        found, now = list[int](), 0
        for number, stage in enumerate(layout.stages):
            now += sum(map(state_bytes, stage.targets))
            found.append(now)
            now -= sum(state_bytes(item) for item in layout.frees[2 * number + 1] if item in targets)
        return found

    def hold(self, allowed: int, share: float, beside: Sequence[int] = (), effort: float = QUICK) -> Holding | None:
        """What to hold within so many bytes; `beside` are those that each phase needs more than is known here."""
        spend(len(self.items) / 4)
        more = beside or [0] * len(self.fixed_bytes)
        rows = zip(self.layout.stages, self.fixed_bytes, more, strict=True)
        loops = tuple(
            Loop(tuple(self.numbers[item] for item in stage.targets), fixed + further) for stage, fixed, further in rows
        )
        smallest = self.smallest_chunk / max(1, self.facts.num_samples)
        return hold(Problem(self.values, loops, allowed, smallest, share), effort)

    def layout_of(self, holding: Holding) -> Layout:
        """The layout that holds this."""
        return hold_layout(self.layout, [[self.items[number] for number in sorted(held)] for held in holding.held])

    def filed(self, holding: Holding) -> frozenset[Item]:
        """The items that wait in files."""
        return frozenset(self.items[number] for number in holding.filed)


def _is_view(item: Item) -> bool:
    """Whether an item lies in the memory of another one, or may."""
    maker = item.operands[0].node if item.kind == "part" else item.node
    return lies_in_operand(maker.target)
