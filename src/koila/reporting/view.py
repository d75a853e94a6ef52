"""What a picture of a run shows, as plain data.

*Takes* a decision, or a job that was not run. *Gives* a frozen `View`: the memory step by step, the program with its
types, and other plans along the curve of time and memory. It holds texts and numbers only, so it can be saved, drawn
and sent; what stands in it comes from the user's program and must be escaped by whoever writes HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from koila._bytes import format_bytes
from koila._torch import OpOverload
from koila.analysis.split import Facts, Item
from koila.analysis.types import Merged, Sliced, SplitType
from koila.ir.source import Site
from koila.planning.decide import Decision
from koila.planning.plan import Plan
from koila.planning.timeline import Moment, Stretch, Tensor, plan_timeline, story_timeline

MAX_POINTS = 4000
"""Points of a timeline; of longer ones each point is the worst of its neighbours."""
BESIDE = "objects and drawn numbers"
BACKWARD = "in backward"


@dataclass(frozen=True)
class Part:
    """A part of the timeline: a section, or a chunk that stands for all that look alike."""

    title: str
    times: int
    """How often it runs."""


@dataclass(frozen=True)
class Point:
    """The memory at one moment."""

    part: int
    """The number of the part that it belongs to."""
    operator: str
    """What runs."""
    site: str
    """The user's line that it comes from."""
    kinds: dict[str, int]
    """What is alive: kind → bytes."""
    largest: str
    """The largest value that is alive, with its shape."""
    largest_site: str
    """The user's line that it comes from."""

    @property
    def num_bytes(self) -> int:
        """All that is alive."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Row:
    """One value of the program."""

    name: str
    operator: str
    shape: str
    num_bytes: int
    """Bytes of the value for the whole batch."""
    type: str
    """Sliced, Merged, Whole or Uniform: what it is, seen from a chunk."""
    phases: str
    """The phases that compute it, counted from one; empty for what runs once."""
    site: str
    """The user's line that it comes from."""


@dataclass(frozen=True)
class Alternative:
    """One plan on the curve of time and memory."""

    allowed_bytes: int | None
    """The budget it was made for; None: without one."""
    projected_bytes: int | None
    """The bytes at its peak; None: no plan was found."""
    relative_time: float | None
    """The expected time over that of the program as it is; an estimate."""
    text: str
    """How it runs."""
    is_chosen: bool = False
    """Whether it is what a run does."""


@dataclass(frozen=True)
class View:
    """What a page or a picture shows of a run."""

    parts: tuple[Part, ...] = ()
    points: tuple[Point, ...] = ()
    rows: tuple[Row, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def peak(self) -> Point | None:
        """The moment with the most bytes; the first of equals."""
        return max(self.points, key=lambda point: point.num_bytes, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> View:
        """The view that `to_dict` gave."""
        return View(
            tuple(Part(**each) for each in data["parts"]),
            tuple(Point(**each) for each in data["points"]),
            tuple(Row(**each) for each in data["rows"]),
            tuple(Alternative(**each) for each in data["alternatives"]),
        )


def decision_view(decision: Decision) -> View:
    """What is known of a run after it: its plan, or what was projected of a run that was not cut."""
    projection, plan = decision.projection, decision.plan
    if projection is None:
        return View()
    if plan is not None:
        parts, points = timeline(plan_timeline(plan), projection.peak_bytes, decision.sites)
        return View(parts, points, rows(plan, decision.sites))
    story = projection.story()
    stretches = () if story is None else story_timeline(story)
    return View(*timeline(stretches, projection.peak_bytes, decision.sites))


# The timeline.


def timeline(
    stretches: Sequence[Stretch], peak_bytes: int, sites: Sequence[Site]
) -> tuple[tuple[Part, ...], tuple[Point, ...]]:
    """Parts and points; what the plan does not see is the same all the time, so that the peak is the projected one."""
    moments = [(number, moment) for number, stretch in enumerate(stretches) for moment in stretch.moments]
    seen = max((moment.num_bytes for _, moment in moments), default=0)
    beside = max(0, peak_bytes - seen)
    points = tuple(_point(number, moment, beside, sites) for number, moment in _thinned(moments))
    return tuple(Part(stretch.title, stretch.times) for stretch in stretches), points


def _thinned(moments: list[tuple[int, Moment]]) -> list[tuple[int, Moment]]:
    size = -(-len(moments) // MAX_POINTS)
    if size <= 1:
        return moments
    groups = (moments[start : start + size] for start in range(0, len(moments), size))
    return [max(group, key=lambda each: each[1].num_bytes) for group in groups]


def _point(part: int, moment: Moment, beside: int, sites: Sequence[Site]) -> Point:
    kinds = dict(moment.kinds)
    if beside:
        kinds[BESIDE] = beside
    largest, recorded = _tensor_text(moment.largest)
    return Point(part, moment.operator, _site(moment.recorded, sites), kinds, largest, _site(recorded, sites))


def _tensor_text(tensor: Tensor | None) -> tuple[str, int | None]:
    if tensor is None:
        return "nothing of its own", None
    return f"{tensor.operator} {list(tensor.shape)}, {format_bytes(tensor.num_bytes)}", tensor.recorded


def _site(recorded: int | None, sites: Sequence[Site]) -> str:
    return BACKWARD if recorded is None or recorded >= len(sites) else str(sites[recorded])


# The program.


def rows(plan: Plan, sites: Sequence[Site]) -> tuple[Row, ...]:
    """Each value of the joint graph, in its order, with its type and the phases that compute it."""
    phases: dict[fx.Node, list[int]] = {}
    for number, phase in enumerate(plan.phases):
        kept = plan.layout.kept_before(2 * number)
        for item in phase.stage.items:
            if item.kind == "chunk" and item not in kept:
                phases.setdefault(item.node, []).append(number + 1)
    items = {item.node: item for item in plan.facts.items if item.kind not in ("finish", "gather", "slice")}
    nodes = plan.facts.joint.module.graph.nodes
    found = (_row(node, items[node], plan.facts, phases.get(node, ()), sites) for node in nodes if node in items)
    return tuple(found)


def _row(node: fx.Node, item: Item, facts: Facts, phases: Sequence[int], sites: Sequence[Site]) -> Row:
    value = node.meta.get("val")
    shape, num_bytes = "", 0
    if isinstance(value, torch.Tensor):
        shape = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        num_bytes = value.numel() * value.element_size()
    site = "" if node.op == "placeholder" else _site(node.meta.get("recorded"), sites)
    kind = facts.types.get(node.name, item.type) if node.op == "placeholder" else item.type
    name = type_name(item, kind)
    return Row(node.name, operator_name(node), shape, num_bytes, name, ", ".join(map(str, sorted(set(phases)))), site)


def operator_name(node: fx.Node) -> str:
    """What a node of the joint graph calls, as people know it."""
    if node.op == "placeholder":
        return "input"
    return str(node.target) if isinstance(node.target, (str, OpOverload)) else node.target.__name__


def type_name(item: Item, kind: SplitType | tuple[SplitType, ...] | None = None) -> str:
    """The name of an item's type."""
    kind = item.type if kind is None else kind
    first: SplitType = kind[0] if isinstance(kind, tuple) else kind
    if isinstance(first, Sliced):
        uniform = item.kind == "chunk" and not any(operand.per_chunk for operand in item.operands)
        return "Uniform" if uniform else "Sliced"
    return "Merged" if isinstance(first, Merged) else "Whole"
