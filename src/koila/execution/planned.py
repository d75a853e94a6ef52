"""`koila.plan`: the plan of a program, made and not run.

*Takes* pending values and a budget. *Gives* a `PlannedRun`: frozen, comparable, printable, ready for JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from koila._budget import current_budget, default_bytes
from koila._bytes import format_bytes
from koila.analysis.trace import Demand
from koila.execution.programs import Program, Selection
from koila.ir.graph import Graph, collect
from koila.ir.node import Value
from koila.planning.plan import Plan


@dataclass(frozen=True)
class PlannedRun:
    """How a program would run inside a budget."""

    plan: Plan
    allowed_bytes: int
    projected_bytes: int
    """What the run will allocate at its peak."""
    kinds: tuple[tuple[str, int], ...]
    """What stands at the peak: (kind, bytes)."""
    largest: str
    """The largest value at the peak."""
    largest_site: str
    """The line of the user's program that it comes from."""
    device: str = "cpu"
    reasons: tuple[str, ...] = field(default=())
    """Why the plan is what it is."""

    @property
    def chunk_size(self) -> int:
        """Samples per chunk."""
        return self.plan.chunk_size

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "device": self.device,
            "allowed_bytes": self.allowed_bytes,
            "projected_bytes": self.projected_bytes,
            "kinds": dict(self.kinds),
            "largest": self.largest,
            "largest_site": self.largest_site,
            "plan": self.plan.to_dict(),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        share = f"projected {format_bytes(self.projected_bytes)} of {format_bytes(self.allowed_bytes)}"
        lines = [f"{share} on {self.device}", *(f"  {reason}" for reason in self.reasons), str(self.plan)]
        lines.append("  at the peak: " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.kinds))
        lines.append(f"  at the peak: {self.largest}, {self.largest_site}")
        return "\n".join(lines)


def plan_values(values: Sequence[Value], backward: bool, limit: int | None, device: torch.device) -> PlannedRun:
    """Trace, analyse and plan the program behind values."""
    graph = collect([value for value in values if value.real is None], [])
    wrt = tuple(number for number, leaf in enumerate(graph.leaves) if leaf.requires_grad)
    demand = Demand((0,), (False,), wrt) if backward and wrt else Demand()
    program = Program(graph, demand)
    selection = Selection(tuple(range(len(graph.outputs))), gradients=bool(demand.roots))
    budget = current_budget(graph.budgets)
    allowed = limit if limit is not None else budget.limit() or default_bytes(budget.reserved_bytes)
    compiled = program.fitting(selection, allowed, budget.offload is not None)
    assert compiled.projected_bytes is not None and compiled.projection is not None
    projection, outside = compiled.projection, program.outside_bytes(selection)
    kinds = (*projection.kinds, *((("objects and drawn numbers", outside),) if outside else ()))
    site = "in backward" if projection.recorded is None else f"at {graph.nodes[projection.recorded].site}"
    return PlannedRun(
        compiled.plan, allowed, compiled.projected_bytes, kinds, projection.largest, site, str(device),
        _reasons(compiled.plan, graph),
    )  # fmt: skip


def _reasons(plan: Plan, graph: Graph) -> tuple[str, ...]:
    found = []
    if plan.chunk_size < plan.facts.num_samples:
        found.append(f"chunks of {plan.chunk_size}: the largest with which the fastest plan found fits")
    again = plan.recomputed
    if again:
        count = sum(again.values())
        found.append(f"{count} calls computed again per chunk: cheaper than the bytes of their values")
    if plan.offloaded:
        found.append("values between phases wait in a file: they do not fit beside the rest")
    return tuple(found)
