"""`koila.plan`: the decision about a program, as a person reads it.

*Takes* a `Decision`. *Gives* a `PlannedRun`: frozen, comparable, printable, ready for JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from koila._bytes import format_bytes
from koila.ir.job import Job
from koila.planning.decide import Decision
from koila.planning.plan import Plan
from koila.planning.whole_peak import whole_peak
from koila.reporting.picture import notebook


@dataclass(frozen=True)
class PlannedRun:
    """How a program would run inside a budget."""

    how: str
    """`whole`: by eager's own kernels, or `split`: by a plan."""
    plan: Plan | None
    """The plan of a split run."""
    num_samples: int
    """The batch size."""
    chunk_size: int
    """Samples per chunk; the whole batch for a run that is not cut."""
    allowed_bytes: int | None
    """The budget; None if there is none."""
    projected_bytes: int
    """What the run will allocate at its peak."""
    kinds: tuple[tuple[str, int], ...]
    """What stands at the peak: (kind, bytes)."""
    largest: str
    """The largest value at the peak."""
    largest_site: str
    """The line of the user's program that it comes from."""
    device: str = "cpu"
    reasons: tuple[str, ...] = ()
    """Why the plan is what it is."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "how": self.how,
            "device": self.device,
            "num_samples": self.num_samples,
            "chunk_size": self.chunk_size,
            "allowed_bytes": self.allowed_bytes,
            "projected_bytes": self.projected_bytes,
            "kinds": dict(self.kinds),
            "largest": self.largest,
            "largest_site": self.largest_site,
            "reasons": list(self.reasons),
            "plan": None if self.plan is None else self.plan.to_dict(),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def _repr_html_(self) -> str:
        """What a notebook shows: the text as it stands."""
        return notebook(str(self))

    def __str__(self) -> str:
        allowed = "" if self.allowed_bytes is None else f" of {format_bytes(self.allowed_bytes)}"
        lines = [f"projected {format_bytes(self.projected_bytes)}{allowed} on {self.device}"]
        lines += [f"  {reason}" for reason in self.reasons]
        whole = f"all {self.num_samples} samples at once, by eager's own kernels" if self.num_samples else "as it is"
        lines.append(whole if self.plan is None else str(self.plan))
        lines.append("  at the peak: " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.kinds))
        lines.append(f"  at the peak: {self.largest}, {self.largest_site}")
        return "\n".join(lines)


def planned_run(job: Job, decision: Decision) -> PlannedRun:
    """A decision as a person reads it."""
    projection = decision.projection or whole_peak(job)
    graph = job.whole_graph if decision.plan is None else job.graph
    site = "in backward" if projection.recorded is None else f"at {graph.nodes[projection.recorded].site}"
    return PlannedRun(
        decision.how, decision.plan, decision.num_samples, decision.chunk_size, decision.budget.allowed_bytes,
        projection.peak_bytes, projection.kinds, projection.largest, site, str(job.device), decision.reasons,
    )  # fmt: skip
